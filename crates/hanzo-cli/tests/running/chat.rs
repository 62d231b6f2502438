//! `hanzo chat`, through a pipe.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;

use serde_json::Value;

use crate::tiny::{Kind, Tiny};

const ENDLESS: &str = "--logit-bias=257=-inf";

#[test]
fn a_second_turn_evaluates_only_what_is_new() {
    let tiny = Tiny::new("turns", Kind::Random);
    let (out, said) = tiny.piped("chat", &["-n", "8", "--greedy", ENDLESS], "one\n/stats\ntwo\n/stats\n/exit\nnever\n");
    let stats: Vec<&str> = out.lines().filter(|l| l.starts_with("prompt ")).collect();
    assert_eq!(stats.len(), 2, "{out} {said}");
    assert!(!stats[0].contains("from the cache"), "{out}");
    let cached: usize = stats[1].split("(and ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    // The first prompt and what was said; a reply of broken characters is spelled differently when it comes back.
    let first: usize = stats[0].split(' ').nth(1).unwrap().parse().unwrap();
    assert!(cached >= first, "{out}");
    assert!(out.contains("4 messages") && !said.contains("never"));
}

#[test]
fn commands_act_and_mistakes_do_not_end_the_chat() {
    let tiny = Tiny::new("slash", Kind::Random);
    let input = "/system Be brief.\n/system\none\\\nmore\n/save talk.json\n/nosuch\n/load missing.json\n/clear\n/regen\n/help\n";
    let (out, said) = tiny.piped_to(1, "chat", &["-n", "4", "--greedy", ENDLESS], input);
    assert!(said.contains("1 of the lines could not be obeyed"), "{said}");
    assert!(out.starts_with("Be brief.\n") && out.contains("/regen"), "{out}");
    for part in ["no command /nosuch", "missing.json", "there is no answer yet", "the conversation is forgotten"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let saved: Value = serde_json::from_slice(&std::fs::read(tiny.0.join("talk.json")).unwrap()).unwrap();
    let messages = saved["messages"].as_array().unwrap();
    let roles: Vec<&str> = messages.iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant"]);
    assert_eq!(messages[1]["content"], "one\nmore");
    // A saved conversation goes on: the answer that is asked for again is to the same question.
    let (again, _) = tiny.piped("chat", &["-n", "4", "--greedy", ENDLESS, "--load", "talk.json"], "/regen\n/stats\n");
    assert!(again.contains("3 messages"), "{again}");
    assert!(tiny.fails(1, "chat", &["--load", "missing.json"]).contains("missing.json"));
}

#[test]
fn a_full_context_is_said_or_made_room_in() {
    let tiny = Tiny::new("full", Kind::Random);
    let input = format!("{}\n{}\n/stats\n", "a".repeat(30), "b".repeat(30));
    let flags = ["-n", "4", "--greedy", ENDLESS, "-c", "96"];
    // The chat goes on, and its exit code tells.
    let (out, said) = tiny.piped_to(1, "chat", &flags, &input);
    assert!(said.contains("1 of the lines could not be obeyed"), "{said}");
    assert!(said.contains("the context has 96") && said.contains("--on-full drop"), "{said}");
    assert!(out.contains("2 messages"), "{out}");
    let (out, said) = tiny.piped("chat", &[&flags[..], &["--on-full", "drop"]].concat(), &input);
    assert!(said.contains("oldest exchanges were forgotten") && out.contains("2 messages"), "{said} {out}");
    let (_, said) = tiny.piped("chat", &["--greedy", ENDLESS, "-c", "64"], "a\n");
    assert!(said.contains("cut off: the context of 64 tokens is full"), "{said}");
}

#[test]
fn thoughts_are_printed_only_if_asked_for() {
    let tiny = Tiny::new("thoughts", Kind::Thinking);
    let flags = ["-n", "8", "--greedy", ENDLESS];
    assert_eq!(tiny.piped("chat", &flags, "hello\n").0, "");
    assert_ne!(tiny.piped("chat", &[&flags[..], &["--show-thinking"]].concat(), "hello\n").0.trim(), "");
}

#[test]
fn ctrl_c_stops_the_reply_and_not_the_chat() {
    let tiny = Tiny::new("stopped", Kind::Random);
    let mut command = tiny.hanzo("chat", &["-c", "200000", ENDLESS]);
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let (mut input, mut out) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    input.write_all(b"hello\n").unwrap();
    out.read_exact(&mut [0; 1]).unwrap();
    let reader = std::thread::spawn(move || {
        let mut rest = Vec::new();
        out.read_to_end(&mut rest).map(|_| String::from_utf8_lossy(&rest).into_owned())
    });
    // SAFETY: sends a signal to a child that has not been waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
    let mut said = String::new();
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    errors.read_line(&mut said).unwrap();
    assert_eq!(said, "(stopped)\n");
    // It still listens.
    input.write_all(b"/stats\n").unwrap();
    drop(input);
    assert!(child.wait().unwrap().success());
    assert!(reader.join().unwrap().unwrap().contains("ended by cancelled"));
}
