//! `hanzo run`.

use std::io::Read;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::tiny::{Kind, Tiny};

/// No reply ends by itself.
const ENDLESS: &str = "--logit-bias=257=-inf";

#[test]
fn the_answer_is_all_that_stdout_gets_and_json_says_the_same() {
    let tiny = Tiny::new("answer", Kind::Random);
    let args = ["hello", "-n", "24", "--seed", "7", "--temp", "1.5", ENDLESS];
    let json = tiny.json("run", &args);
    let text = json["text"].as_str().unwrap();
    let out = tiny.run("run", &[&args[..], &["-v"]].concat());
    let streamed = String::from_utf8(out.stdout).unwrap();
    assert_eq!(streamed.strip_suffix('\n').unwrap_or(&streamed), text.strip_suffix('\n').unwrap_or(text));
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(said.contains("t/s") && said.contains("24 tokens"), "{said}");
    assert_eq!((&json["stop"], &json["seed"], &json["reasoning"]), (&"length".into(), &7.into(), &"".into()));
    assert_eq!(json["tokens"]["generated"], 24);
    // <|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n, one token a byte
    assert_eq!(json["tokens"]["prompt"], 1 + 5 + 5 + 1 + 1 + 1 + 10);
    assert!(json["timings"]["generated_per_s"].as_f64().unwrap() > 0.0);
    assert!(tiny.run("run", &[&args[..], &["-q"]].concat()).stderr.is_empty());
}

#[test]
fn a_seed_repeats_a_text_and_another_one_does_not() {
    let tiny = Tiny::new("seed", Kind::Random);
    let run = |seed: &str| tiny.ok("run", &["hello", "-n", "24", "--temp", "2", "--seed", seed, ENDLESS]);
    assert_eq!(run("1"), run("1"));
    assert_ne!(run("1"), run("2"));
}

#[test]
fn the_prompt_may_come_through_a_pipe() {
    let tiny = Tiny::new("stdin", Kind::Random);
    let flags = ["--greedy", "-n", "16"];
    let from_words = tiny.ok("run", &[&["tell me", "more"], &flags[..]].concat());
    assert_eq!(tiny.piped("run", &flags, "tell me more\n").0, from_words);
    assert_eq!(tiny.piped("run", &[&["-"], &flags[..]].concat(), "tell me more").0, from_words);
    assert_eq!(tiny.piped("run", &[&["tell", "-"], &flags[..]].concat(), "me more\n").0, from_words);
    assert_ne!(tiny.ok("run", &[&["tell me more", "--raw"], &flags[..]].concat()), from_words);
    assert_ne!(tiny.ok("run", &[&["tell me more", "--system", "Be kind."], &flags[..]].concat()), from_words);
}

#[test]
fn a_deterministic_reply_does_not_depend_on_the_batch() {
    let tiny = Tiny::new("ubatch", Kind::Random);
    let run = |ubatch: &str| {
        let prompt = "a prompt of several dozen tokens, so that it takes more than one batch";
        tiny.ok("run", &[prompt, "--greedy", "--deterministic", "-n", "20", "-ub", ubatch])
    };
    assert_eq!(run("512"), run("7"));
}

#[test]
fn a_stop_string_ends_the_reply_and_is_not_shown() {
    let tiny = Tiny::new("stop", Kind::Random);
    let args = ["hello", "--greedy", "-n", "32", ENDLESS];
    let whole = tiny.json("run", &args)["text"].as_str().unwrap().to_string();
    let chars: Vec<char> = whole.chars().collect();
    let stop: String = chars[chars.len() / 2..chars.len() / 2 + 2].iter().collect();
    let json = tiny.json("run", &[&args[..], &["--stop", "never ever", "--stop", &stop]].concat());
    assert_eq!(json["text"].as_str().unwrap(), whole.split(&stop).next().unwrap());
    assert_eq!((&json["stop"], &json["stop_string"]), (&"stop_string".into(), &stop.as_str().into()));
}

#[test]
fn a_forced_end_gives_an_empty_answer_and_a_full_context_says_so() {
    let tiny = Tiny::new("ends", Kind::Random);
    let json = tiny.json("run", &["hello", "--logit-bias", "257=inf"]);
    assert_eq!((&json["text"], &json["stop"], &json["tokens"]["generated"]), (&"".into(), &"end".into(), &1.into()));
    let (out, said) = tiny.piped("run", &["hello", "-c", "64", ENDLESS], "");
    assert!(!out.is_empty() && said.contains("context of 64 tokens is full"), "{said}");
}

#[test]
fn reasoning_stays_off_stdout() {
    let tiny = Tiny::new("think", Kind::Thinking);
    let args = ["hello", "-n", "16", "--greedy", ENDLESS];
    let json = tiny.json("run", &args);
    assert!(json["text"] == "" && !json["reasoning"].as_str().unwrap().is_empty(), "{json}");
    let out = tiny.run("run", &[&args[..], &["-v"]].concat());
    assert!(out.stdout.is_empty());
    assert!(String::from_utf8_lossy(&out.stderr).contains(json["reasoning"].as_str().unwrap()));
}

#[test]
fn bad_usage_ends_with_2_and_failure_with_1() {
    let tiny = Tiny::new("codes", Kind::Random);
    let bad: [&[&str]; 10] = [
        &[],
        &[""],
        &["x", "--raw", "--system", "y"],
        &["x", "--top-p", "3"],
        &["x", "--greedy", "--temp", "1"],
        &["x", "--logit-bias", "1"],
        &["x", "--logit-bias", "258=1"],
        &["x", "-ctk", "q4_k"],
        &["x", "-c", "0"],
        &["x", "--isa", "sse9"],
    ];
    for args in bad {
        tiny.fails(2, "run", args);
    }
    for (command, prompt) in [("run", &["x"][..]), ("chat", &[])] {
        let said = tiny.fails(2, command, &[prompt, &["--logit-bias", "5=1", "--logit-bias", "300=-inf"]].concat());
        assert!(said.contains("token 300") && said.contains("258 tokens") && said.contains("hanzo tokenize"), "{said}");
    }
    let long = "x".repeat(100);
    let said = tiny.fails(1, "run", &[&long, "-c", "64"]);
    assert!(said.contains("context is full") && said.contains("--ctx-size"), "{said}");
    tiny.write("model.gguf", "no model");
    let said = tiny.fails(1, "run", &["x"]);
    assert!(said.starts_with("error: ") && said.contains("model.gguf"), "{said}");
    let mut wrong = tiny.hanzo("run", &["x"]);
    let out = wrong.env("HANZO_PLAN", "fast").output().unwrap();
    assert_eq!(out.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&out.stderr).contains("HANZO_PLAN"));
}

#[test]
fn a_reader_that_leaves_ends_the_reply_quietly() {
    let tiny = Tiny::new("closed", Kind::Random);
    let mut command = tiny.hanzo("run", &["hello", "-c", "100000", ENDLESS]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut some = [0; 8];
    child.stdout.take().unwrap().read_exact(&mut some).unwrap();
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success() && out.stderr.is_empty(), "{}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn ctrl_c_ends_the_reply_with_130() {
    let tiny = Tiny::new("ctrl-c", Kind::Random);
    let mut command = tiny.hanzo("run", &["hello", "-c", "200000", ENDLESS]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    let mut first = [0; 1];
    out.read_exact(&mut first).unwrap();
    let reader = std::thread::spawn(move || {
        let mut rest = Vec::new();
        out.read_to_end(&mut rest).map(|_| rest)
    });
    // SAFETY: sends a signal to a child that has not been waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
    let started = Instant::now();
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(130));
    assert!(started.elapsed() < Duration::from_secs(10));
    assert!(reader.join().unwrap().unwrap().ends_with(b"\n"));
}
