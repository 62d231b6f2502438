//! A tiny model in a folder of its own, and the binary run there.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use hanzo_gguf::{Format, GgufWriter, formats};
use serde_json::Value;

const N_EMBD: u64 = 64;
const N_FF: u64 = 96;
const N_LAYER: u32 = 2;
/// Bytes, then the two markers of ChatML.
pub const N_VOCAB: u64 = 258;
/// `<|im_end|>`, which ends a reply.
pub const END: u32 = 257;

/// What kind of model.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Random weights.
    Random,
    /// All logits are equal: every token has probability 1 / n_vocab.
    Uniform,
    /// Random weights, and a template that opens `<think>`.
    Thinking,
    /// Every logit is NaN.
    Broken,
}

/// A folder with `model.gguf` in it, removed at the end.
pub struct Tiny(pub PathBuf);

impl Tiny {
    pub fn new(name: &str, kind: Kind) -> Tiny {
        let folder = std::env::temp_dir().join(format!("hanzo-running-test-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        write_model(&folder.join("model.gguf"), kind);
        Tiny(folder)
    }

    /// `hanzo COMMAND -m model.gguf -t 1 ARGS`, with nothing on stdin and nothing from the caller's environment.
    pub fn hanzo(&self, command: &str, args: &[&str]) -> Command {
        self.bare(&[&[command, "-m", "model.gguf", "-t", "1"], args].concat())
    }

    /// `hanzo ARGS`, as [`Tiny::hanzo`] but without a model.
    pub fn bare(&self, args: &[&str]) -> Command {
        let mut hanzo = Command::new(env!("CARGO_BIN_EXE_hanzo"));
        hanzo.args(args).current_dir(&self.0);
        for (name, _) in std::env::vars_os().filter(|(n, _)| n.to_string_lossy().starts_with("HANZO_")) {
            hanzo.env_remove(name);
        }
        hanzo.env("HANZO_CACHE", self.0.join("cache")).stdin(Stdio::null());
        hanzo
    }

    pub fn run(&self, command: &str, args: &[&str]) -> Output {
        self.hanzo(command, args).output().unwrap()
    }

    /// Stdout of a run that must succeed.
    pub fn ok(&self, command: &str, args: &[&str]) -> String {
        ended(0, self.run(command, args)).0
    }

    /// The JSON of a run that must succeed.
    pub fn json(&self, command: &str, args: &[&str]) -> Value {
        serde_json::from_str(&self.ok(command, &[args, &["--json"]].concat())).unwrap()
    }

    /// Stderr of a run that must end with this exit code.
    pub fn fails(&self, code: i32, command: &str, args: &[&str]) -> String {
        let out = self.run(command, args);
        let said = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(code), "{args:?}: {said}");
        said
    }

    /// Stdout and stderr of a run that must succeed, with `input` on stdin.
    pub fn piped(&self, command: &str, args: &[&str], input: &str) -> (String, String) {
        self.piped_to(0, command, args, input)
    }

    /// Stdout and stderr of a run that must end with this exit code, with `input` on stdin.
    pub fn piped_to(&self, code: i32, command: &str, args: &[&str], input: &str) -> (String, String) {
        let mut child = self.hanzo(command, args);
        let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        ended(code, child.wait_with_output().unwrap())
    }

    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.0.join(name), text).unwrap();
    }
}

fn ended(code: i32, out: Output) -> (String, String) {
    let (stdout, stderr) = (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap());
    assert_eq!(out.status.code(), Some(code), "{stderr}");
    (stdout, stderr)
}

impl Drop for Tiny {
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

fn write_model(path: &Path, kind: Kind) {
    let mut writer = GgufWriter::create(path).unwrap();
    let metadata = writer.metadata_mut();
    metadata.set("general.architecture", "llama");
    metadata.set("llama.block_count", N_LAYER);
    metadata.set("llama.context_length", 1_u32 << 20);
    metadata.set("llama.embedding_length", N_EMBD);
    metadata.set("llama.feed_forward_length", N_FF);
    metadata.set("llama.attention.head_count", 2_u32);
    metadata.set("llama.attention.head_count_kv", 1_u32);
    metadata.set("llama.attention.layer_norm_rms_epsilon", 1e-5_f32);
    let mut tokens: Vec<String> = (0..=255).map(|b| byte_char(b).to_string()).collect();
    tokens.extend(["<|im_start|>".into(), "<|im_end|>".into()]);
    let mut kinds = vec![1_i32; 256];
    kinds.extend([3, 3]);
    metadata.set("tokenizer.ggml.model", "gpt2");
    metadata.set("tokenizer.ggml.pre", "gpt-2");
    metadata.set("tokenizer.ggml.tokens", tokens);
    metadata.set("tokenizer.ggml.token_type", kinds);
    metadata.set("tokenizer.ggml.merges", Vec::<String>::new());
    metadata.set("tokenizer.ggml.eos_token_id", END);
    if kind == Kind::Thinking {
        let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: <think>\n";
        metadata.set("tokenizer.chat_template", template);
    }
    let mut tensors = vec![("token_embd.weight".to_string(), vec![N_EMBD, N_VOCAB])];
    for layer in 0..N_LAYER {
        let shapes: [(&str, &[u64]); 9] = [
            ("attn_norm", &[N_EMBD]),
            ("attn_q", &[N_EMBD, 64]),
            ("attn_k", &[N_EMBD, 32]),
            ("attn_v", &[N_EMBD, 32]),
            ("attn_output", &[64, N_EMBD]),
            ("ffn_norm", &[N_EMBD]),
            ("ffn_gate", &[N_EMBD, N_FF]),
            ("ffn_up", &[N_EMBD, N_FF]),
            ("ffn_down", &[N_FF, N_EMBD]),
        ];
        tensors.extend(shapes.map(|(name, dims)| (format!("blk.{layer}.{name}.weight"), dims.to_vec())));
    }
    tensors.push(("output_norm.weight".to_string(), vec![N_EMBD]));
    let format = |dims: &[u64]| if dims.len() == 1 { Format::F32 } else { Format::Q8_0 };
    for (name, dims) in &tensors {
        writer.declare(name, dims, format(dims)).unwrap();
    }
    let mut data = writer.begin().unwrap();
    let mut state = 0x9e37_79b9_u32;
    for (name, dims) in &tensors {
        let mut next = || {
            // xorshift32 (Marsaglia 2003)
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state as f32 / u32::MAX as f32 - 0.5
        };
        let n = dims.iter().product::<u64>() as usize;
        // Wide enough that logits differ: the model has opinions.
        let values: Vec<f32> = match dims.len() {
            1 if kind == Kind::Broken && name == "output_norm.weight" => vec![f32::NAN; n],
            1 if kind == Kind::Uniform && name == "output_norm.weight" => vec![0.0; n],
            1 => vec![1.0; n],
            _ => (0..n).map(|_| 1.2 * next()).collect(),
        };
        let mut bytes = vec![0; format(dims).row_bytes(n).unwrap()];
        match format(dims) {
            Format::F32 => bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            f => formats::from_float(f, &values, None, &mut bytes).unwrap(),
        }
        data.tensor(name, &bytes).unwrap();
    }
    data.land().unwrap();
}
