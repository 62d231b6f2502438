//! `hanzo pull` as a process: killed in the middle, run twice at once, its output piped into a reader that leaves.
#![cfg(unix)]

#[allow(dead_code)]
#[path = "../src/pull/test_server.rs"]
mod test_server;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

use test_server::{Fault, Server};

fn cache(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("hanzo-cli-test-{}-{name}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn hanzo(cache: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hanzo"));
    command.env("HANZO_CACHE", cache).env("NO_PROXY", "127.0.0.1");
    command
}

fn body(len: usize) -> Vec<u8> {
    let mut body: Vec<u8> = (0..len).map(|i| (i % 253) as u8).collect();
    body[..4].copy_from_slice(b"GGUF");
    body
}

fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    let entries: Vec<_> = fs::read_dir(folder).ok()?.flatten().map(|e| e.path()).collect();
    entries.iter().find_map(|p| if p.is_dir() { find(p, name) } else { p.ends_with(name).then(|| p.clone()) })
}

#[test]
fn a_killed_pull_blocks_nobody_and_is_continued() {
    let server = Server::start();
    let cache = cache("killed");
    server.put("/m.gguf", body(100_000), "\"e\"");
    server.fault(Fault::Slow(10_000, Duration::from_millis(100)));
    let url = format!("{}/m.gguf", server.base);
    let mut first = hanzo(&cache).args(["pull", &url]).stdout(Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    // Some of the bytes, not all of them.
    while find(&cache, "m.gguf.part").is_none_or(|p| fs::metadata(p).map_or(0, |m| m.len()) < 30_000) {
        assert!(Instant::now() < deadline, "the first pull never began");
        thread::sleep(Duration::from_millis(5));
    }
    // A second one waits for the first, and takes over when it dies.
    let second = hanzo(&cache).args(["pull", &url]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    thread::sleep(Duration::from_millis(100));
    first.kill().unwrap();
    first.wait().unwrap();
    let second = second.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(second.status.success() && said.contains("another hanzo is pulling"), "{said}");
    let path = String::from_utf8(second.stdout).unwrap();
    assert_eq!(fs::read(path.trim()).unwrap(), body(100_000));
    let seen = server.seen();
    assert_eq!(seen.len(), 2);
    let from = seen[1].header("range").unwrap().trim_start_matches("bytes=").trim_end_matches('-');
    assert!(from.parse::<usize>().unwrap() >= 30_000, "{from}");
    fs::remove_dir_all(cache).unwrap();
}

#[test]
fn failures_exit_with_1_and_bad_usage_with_2() {
    let cache = cache("codes");
    let run = |args: &[&str]| hanzo(&cache).args(args).output().unwrap();
    let unknown = run(&["pull", "nosuchmodel"]);
    assert_eq!(unknown.status.code(), Some(1));
    let said = String::from_utf8(unknown.stderr).unwrap();
    assert!(said.starts_with("error: unknown model `nosuchmodel`\n  remedy: "), "{said}");
    assert_eq!(run(&["pull", "--no-such-flag"]).status.code(), Some(2));
    assert_eq!(run(&[]).status.code(), Some(2));
    // Neither runs anything first.
    let large = run(&["bench", "--op", "gemm", "--shape", "64x64", "--tokens", "99999999"]);
    assert_eq!(large.status.code(), Some(2), "{}", String::from_utf8_lossy(&large.stderr));
    assert_eq!(run(&["gate", "--every-kernel", "--device", "cpu"]).status.code(), Some(2));
    assert_eq!(run(&["--version"]).status.code(), Some(0));
    fs::remove_dir_all(cache).unwrap();
}

#[test]
fn a_list_is_json_for_programs() {
    let cache = cache("list");
    let out = hanzo(&cache).args(["pull", "--list", "--json"]).output().unwrap();
    let list: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let smollm2 = list.as_array().unwrap().iter().find(|m| m["name"] == "smollm2").unwrap();
    assert_eq!(smollm2["cached"], false);
    assert_eq!(smollm2["bytes"], 98_362_432);
    fs::remove_dir_all(cache).unwrap();
}

#[test]
fn a_reader_that_leaves_ends_the_program_quietly() {
    let cache = cache("pipe");
    let mut child =
        hanzo(&cache).args(["completions", "bash"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success() && out.stderr.is_empty(), "{}", String::from_utf8_lossy(&out.stderr));
    fs::remove_dir_all(cache).unwrap();
}
