//! `inspect`, `tokenize`, `quantize` and `devices` as processes, on a model of a few kilobytes made here.
#![cfg(unix)]

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use hanzo_gguf::{Format, Gguf, GgufWriter};
use serde_json::Value;

/// A folder of its own with `model.gguf` in it, removed at the end.
struct Bench(PathBuf);

impl Bench {
    fn new(name: &str) -> Bench {
        let folder = std::env::temp_dir().join(format!("hanzo-model-test-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        write_model(&folder.join("model.gguf"));
        Bench(folder)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_string()
    }

    fn hanzo(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hanzo"));
        command.args(args).env("HANZO_CACHE", self.0.join("cache")).current_dir(&self.0);
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.hanzo(args).output().unwrap()
    }

    /// Stdout of a run that must succeed.
    fn ok(&self, args: &[&str]) -> String {
        let out = self.run(args);
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    }

    /// Stderr of a run that must end with this exit code.
    fn fails(&self, code: i32, args: &[&str]) -> String {
        let out = self.run(args);
        assert_eq!(out.status.code(), Some(code), "{args:?}");
        String::from_utf8(out.stderr).unwrap()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The character that stands for a byte in a byte-level vocabulary: itself if it prints, else one from 256 on.
fn byte_char(byte: u8) -> char {
    let prints = |b: u8| matches!(b, 33..=126 | 161..=172 | 174..=255);
    if prints(byte) {
        return char::from(byte);
    }
    let nth = (0..byte).filter(|b| !prints(*b)).count() as u32;
    char::from_u32(256 + nth).unwrap()
}

/// Every byte is a token (its value is its id), 256 is `he`, 257 the special `<end>`.
fn write_model(path: &Path) {
    let mut tokens: Vec<String> = (0..=255).map(|b| byte_char(b).to_string()).collect();
    tokens.extend(["he".into(), "<end>".into()]);
    let mut kinds = vec![1_i32; 257];
    kinds.push(3);
    let mut writer = GgufWriter::create(path).unwrap();
    let metadata = writer.metadata_mut();
    metadata.set("general.architecture", "llama");
    metadata.set("llama.block_count", 1_u32);
    metadata.set("tokenizer.ggml.model", "gpt2");
    metadata.set("tokenizer.ggml.pre", "gpt-2");
    metadata.set("tokenizer.ggml.tokens", tokens);
    metadata.set("tokenizer.ggml.token_type", kinds);
    metadata.set("tokenizer.ggml.merges", vec!["h e"]);
    metadata.set("tokenizer.ggml.eos_token_id", 257_u32);
    writer.declare("blk.0.attn_q.weight", &[256, 16], Format::F32).unwrap();
    writer.declare("output_norm.weight", &[256], Format::F32).unwrap();
    let mut data = writer.begin().unwrap();
    for n in [256 * 16, 256_u32] {
        let values = (0..n).flat_map(|i| ((i * 37 % 101) as f32 * 0.02 - 1.0).to_le_bytes());
        data.append(&values.collect::<Vec<u8>>()).unwrap();
    }
    data.land().unwrap();
}

#[test]
fn inspect_shows_metadata_and_tensors() {
    let bench = Bench::new("inspect");
    let text = bench.ok(&["inspect", "model.gguf"]);
    assert!(text.contains("\"llama\"") && text.contains("blk.0.attn_q.weight") && text.contains("string[258]"));
    let json: Value = serde_json::from_str(&bench.ok(&["inspect", "model.gguf", "--json", "--tensors"])).unwrap();
    assert_eq!(json["tensors"][0]["shape"], serde_json::json!([256, 16]));
    assert!(json.get("metadata").is_none());
    let missing = bench.fails(1, &["inspect", "missing.gguf"]);
    assert!(missing.starts_with("error: no such file: `missing.gguf`"), "{missing}");
    fs::write(bench.0.join("bad.gguf"), "GGUF").unwrap();
    assert!(bench.fails(1, &["inspect", "bad.gguf"]).contains("bad.gguf"));
    bench.fails(2, &["inspect", "model.gguf", "--metadata", "--tensors"]);
}

#[test]
fn inspect_ends_quietly_when_its_reader_leaves() {
    let bench = Bench::new("pipe");
    let mut command = bench.hanzo(&["inspect", "model.gguf", "--full"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = [0; 10];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success() && out.stderr.is_empty(), "{}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn tokenize_goes_both_ways_and_checks_references() {
    let bench = Bench::new("tokenize");
    let (m, model) = ("-m", "model.gguf");
    assert_eq!(bench.ok(&["tokenize", m, model, "--ids", "hey<end>"]), "[256, 121, 257]\n");
    assert_eq!(bench.ok(&["tokenize", m, model, "--ids", "--no-special", "<e"]), "[60, 101]\n");
    assert_eq!(bench.ok(&["tokenize", m, model, "--decode", "[256, 121]"]), "hey\n");
    let shown = bench.ok(&["tokenize", m, model, "hé"]);
    assert_eq!(shown, "     104  \"h\"\n     195  b\"\\xc3\"\n     169  b\"\\xa9\"\n");
    let mut command = bench.hanzo(&["tokenize", m, model, "--json"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"he\n").unwrap();
    let json: Value = serde_json::from_slice(&child.wait_with_output().unwrap().stdout).unwrap();
    assert_eq!(json, serde_json::json!({"text": "he\n", "ids": [256, 10], "pieces": ["he", "\n"]}));
    let reference = bench.path("reference.json");
    fs::write(&reference, r#"[{"text": "he", "ids": [256]}, {"text": "x", "ids": [120]}]"#).unwrap();
    assert_eq!(bench.ok(&["tokenize", m, model, "--check", &reference]), "2 of 2 exact\n");
    fs::write(&reference, r#"[{"text": "he", "ids": [256]}, {"text": "x", "ids": [121]}]"#).unwrap();
    let out = bench.run(&["tokenize", m, model, "--check", &reference]);
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8(out.stdout).unwrap().ends_with("1 of 2 exact\n"));
    bench.fails(2, &["tokenize", m, model, "--decode", "x"]);
    bench.fails(2, &["tokenize", m, model, "--decode", "258"]);
}

#[test]
fn quantize_lands_a_smaller_model_and_never_overwrites_unasked() {
    let bench = Bench::new("quantize");
    let out = bench.path("small.gguf");
    let report = bench.ok(&["quantize", "model.gguf", &out, "Q4_K_M", "--report"]);
    assert!(report.contains("Q4_K") && report.contains("relative"), "{report}");
    let copy = Gguf::open(&out).unwrap();
    let formats: Vec<Format> = copy.tensors().iter().map(|t| t.format).collect();
    assert_eq!(formats, [Format::Q4_K, Format::F32]);
    assert_eq!(bench.ok(&["tokenize", "-m", &out, "--ids", "he"]), "[256]\n");
    let refused = bench.fails(1, &["quantize", "model.gguf", &out, "Q8_0"]);
    assert!(refused.contains("exists already") && refused.contains("--force"), "{refused}");
    bench.ok(&["quantize", "model.gguf", &out, "Q8_0", "--force", "--tensor-type", "attn_q=Q5_1"]);
    assert_eq!(Gguf::open(&out).unwrap().tensors()[0].format, Format::Q5_1);
    let again = bench.fails(1, &["quantize", &out, &bench.path("again.gguf"), "Q4_0"]);
    assert!(again.contains("--allow-requantize"), "{again}");
    bench.fails(2, &["quantize", "model.gguf", &out, "Q9_9"]);
    bench.fails(2, &["quantize", "model.gguf", &out, "Q4_0", "--tensor-type", "(=Q4_0"]);
    let left: Vec<_> = fs::read_dir(&bench.0).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[test]
fn ctrl_c_ends_quantize_with_130_and_leaves_nothing_beside_the_model() {
    let bench = Bench::new("interrupted");
    // Much more than a moment's work.
    let (rows, row) = (4_000, vec![0x3e; 4096 * 4]);
    let mut writer = GgufWriter::create(bench.path("large.gguf")).unwrap();
    writer.metadata_mut().set("general.architecture", "test");
    writer.declare("blk.0.attn_q.weight", &[4096, rows], Format::F32).unwrap();
    let mut data = writer.begin().unwrap();
    (0..rows).for_each(|_| data.append(&row).unwrap());
    data.land().unwrap();
    let mut child = bench.hanzo(&["quantize", "large.gguf", "small.gguf", "Q4_K_M", "-t", "1"]);
    let mut child = child.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let left = || {
        let names = fs::read_dir(&bench.0).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        names.filter(|n| n.starts_with('.') || n == "small.gguf").collect::<Vec<_>>()
    };
    while left().is_empty() {
        assert_eq!(child.try_wait().unwrap(), None, "it has not begun to write");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    // SAFETY: sends a signal to a child that has not been waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(left(), Vec::<String>::new());
}

#[test]
fn devices_names_the_kernels_in_force() {
    let bench = Bench::new("devices");
    let json: Value = serde_json::from_str(&bench.ok(&["devices", "--json"])).unwrap();
    assert!(json["cpu"]["threads"].as_u64().unwrap() > 0);
    let portable = bench.hanzo(&["devices", "--json"]).env("HANZO_ISA", "portable").output().unwrap();
    let json: Value = serde_json::from_slice(&portable.stdout).unwrap();
    assert_eq!(json["cpu"]["kernels"], "portable");
}

#[test]
fn an_environment_that_is_wrong_is_bad_usage_in_every_command() {
    let bench = Bench::new("environment");
    for args in
        [&["devices"][..], &["levers"], &["gate"], &["inspect", "model.gguf"], &["bench", "--op", "copy"], &["run"]]
    {
        let wrong = bench.hanzo(args).env("HANZO_ISA", "mmx").output().unwrap();
        assert_eq!(wrong.status.code(), Some(2), "{args:?}");
        assert!(String::from_utf8(wrong.stderr).unwrap().contains("HANZO_ISA"), "{args:?}");
    }
}

#[test]
fn a_misspelt_variable_is_named_with_what_it_may_have_been_and_the_command_goes_on() {
    let bench = Bench::new("misspelt");
    let mut command = bench.hanzo(&["tokenize", "-m", "model.gguf", "--ids", "hey"]);
    let out = command.env("HANZO_NORM_QUANTISE", "off").output().unwrap();
    assert_eq!((out.status.code(), &out.stdout[..]), (Some(0), &b"[256, 121]\n"[..]));
    let said = String::from_utf8(out.stderr).unwrap();
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.starts_with("warning: HANZO_NORM_QUANTISE") && said.contains("HANZO_NORM_QUANTIZE"), "{said}");
}

#[test]
fn the_gate_refuses_no_threads_and_a_filter_that_nothing_has_before_any_device_is_opened() {
    let bench = Bench::new("gate");
    assert!(bench.fails(2, &["gate", "-t", "0"]).contains("1..=1024"));
    // The device is not looked for.
    let said = bench.fails(2, &["gate", "--filter", "zzzz", "--device", "tpu:0"]);
    assert!(said.contains("zzzz") && !said.contains("tpu"), "{said}");
}
