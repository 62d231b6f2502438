//! Tiny models with random weights, written to memory.

use hanzo_gguf::{Format, Gguf, GgufWriter, Metadata};

pub const EMBD: usize = 64;
pub const HEADS: usize = 4;
pub const KV: usize = 2;
pub const D: usize = 32;
pub const FF: usize = 96;
pub const EXPERTS: usize = 6;
pub const EXPERT_FF: usize = 64;
/// Three special tokens and one a byte.
pub const VOCAB: usize = 259;
pub const EOS: u32 = 2;
/// Id of the token of byte 0.
pub const BYTES: u32 = 3;
pub const WINDOW: usize = 40;

/// xorshift64 (Marsaglia 2003).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Roughly normal, of mean 0 and variance 1.
    fn normal(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| (self.next() >> 40) as f32 / (1 << 24) as f32 - 0.5).sum();
        sum * 3f32.sqrt()
    }
}

fn tokenizer(m: &mut Metadata) {
    let bytes = (0..256).map(|b| format!("<0x{b:02X}>"));
    let tokens: Vec<String> = ["<unk>", "<s>", "</s>"].into_iter().map(String::from).chain(bytes).collect();
    m.set("tokenizer.ggml.model", "llama");
    m.set("tokenizer.ggml.tokens", tokens);
    m.set("tokenizer.ggml.scores", vec![0.0f32; VOCAB]);
    // Unknown 2, control 3, byte 6.
    m.set("tokenizer.ggml.token_type", [2, 3, 3].into_iter().chain([6; 256]).collect::<Vec<i32>>());
    m.set("tokenizer.ggml.bos_token_id", 1u32);
    m.set("tokenizer.ggml.eos_token_id", EOS);
    m.set("tokenizer.ggml.add_space_prefix", false);
}

/// Every tensor of an architecture: name and dimensions.
fn tensors(arch: &str, layers: usize, d: usize) -> Vec<(String, Vec<usize>)> {
    let mut t = vec![("token_embd.weight".to_string(), vec![EMBD, VOCAB]), ("output_norm.weight".into(), vec![EMBD])];
    if arch == "qwen2" {
        t.push(("output.weight".into(), vec![EMBD, VOCAB]));
    }
    if arch == "llama" {
        t.push(("rope_freqs.weight".into(), vec![d / 2]));
    }
    if arch == "phi3" {
        t.push(("rope_factors_long.weight".into(), vec![d / 4]));
        t.push(("rope_factors_short.weight".into(), vec![d / 4]));
    }
    for l in 0..layers {
        let mut add = |name: &str, dims: &[usize]| t.push((format!("blk.{l}.{name}"), dims.to_vec()));
        let (q, kv) = (HEADS * d, KV * d);
        add("attn_norm.weight", &[EMBD]);
        add("ffn_norm.weight", &[EMBD]);
        if arch == "phi3" {
            add("attn_qkv.weight", &[EMBD, q + 2 * kv]);
        } else {
            for (name, n) in [("attn_q", q), ("attn_k", kv), ("attn_v", kv)] {
                add(&format!("{name}.weight"), &[EMBD, n]);
                if arch == "qwen2" {
                    add(&format!("{name}.bias"), &[n]);
                }
            }
        }
        if ["qwen3", "qwen3moe", "gemma3"].contains(&arch) {
            add("attn_q_norm.weight", &[d]);
            add("attn_k_norm.weight", &[d]);
        }
        add("attn_output.weight", &[q, EMBD]);
        if arch == "gemma3" {
            add("post_attention_norm.weight", &[EMBD]);
            add("post_ffw_norm.weight", &[EMBD]);
        }
        match arch {
            "qwen3moe" => {
                add("ffn_gate_inp.weight", &[EMBD, EXPERTS]);
                add("ffn_gate_exps.weight", &[EMBD, EXPERT_FF, EXPERTS]);
                add("ffn_up_exps.weight", &[EMBD, EXPERT_FF, EXPERTS]);
                add("ffn_down_exps.weight", &[EXPERT_FF, EMBD, EXPERTS]);
            }
            "phi3" => {
                add("ffn_up.weight", &[EMBD, 2 * FF]);
                add("ffn_down.weight", &[FF, EMBD]);
            }
            _ => {
                add("ffn_gate.weight", &[EMBD, FF]);
                add("ffn_up.weight", &[EMBD, FF]);
                add("ffn_down.weight", &[FF, EMBD]);
            }
        }
    }
    t
}

/// A model file of `layers` layers. Windows are [`WINDOW`] tokens, every third layer of gemma3 is global and has linear
/// scaling, llama's rope is stretched by YaRN and per-pair factors, phi3 rotates half of a head by longrope factors.
pub fn model(arch: &str, layers: usize, seed: u64) -> Gguf {
    model_with_heads(arch, layers, seed, D)
}

/// As [`model`], with heads of `d` elements.
pub fn model_with_heads(arch: &str, layers: usize, seed: u64, d: usize) -> Gguf {
    let mut w = GgufWriter::new(Vec::new());
    let m = w.metadata_mut();
    m.set("general.architecture", arch);
    let mut set = |key: &str, v: usize| m.set(format!("{arch}.{key}"), v as u32);
    set("block_count", layers);
    set("embedding_length", EMBD);
    set("attention.head_count", HEADS);
    set("attention.head_count_kv", KV);
    set("attention.key_length", d);
    set("attention.value_length", d);
    set("feed_forward_length", FF);
    set("context_length", 1024);
    match arch {
        "gemma3" => {
            set("attention.sliding_window", WINDOW);
            set("attention.sliding_window_pattern", 3);
            m.set("gemma3.rope.freq_base", 1e6f32);
            m.set("gemma3.rope.scaling.factor", 8.0f32);
        }
        "phi3" => {
            set("attention.sliding_window", WINDOW);
            set("rope.dimension_count", d / 2);
            set("rope.scaling.original_context_length", 256);
        }
        "qwen3moe" => {
            set("expert_count", EXPERTS);
            set("expert_used_count", 2);
            set("expert_feed_forward_length", EXPERT_FF);
        }
        "llama" => {
            set("rope.scaling.original_context_length", 64);
            m.set("llama.rope.scaling.type", "yarn");
            m.set("llama.rope.scaling.factor", 4.0f32);
        }
        _ => {}
    }
    m.set(format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-6f32);
    tokenizer(m);

    let tensors = tensors(arch, layers, d);
    for (name, dims) in &tensors {
        let dims: Vec<u64> = dims.iter().map(|d| *d as u64).collect();
        w.declare(name, &dims, Format::F32).expect("a tensor");
    }
    let mut r = Random(seed | 1);
    let mut data = w.begin().expect("a header");
    for (name, dims) in &tensors {
        let n: usize = dims.iter().product();
        let scale = 1.0 / (dims[0] as f32).sqrt();
        let element = |r: &mut Random| match name {
            n if n.contains("norm") => 1.0 + 0.2 * r.normal(),
            n if n.starts_with("rope_") => 1.0 + r.below(8) as f32,
            n if n.starts_with("token_embd") => r.normal(),
            n if n.ends_with("bias") => 0.3 * r.normal(),
            _ => scale * r.normal(),
        };
        let bytes: Vec<u8> = (0..n).flat_map(|_| element(&mut r).to_le_bytes()).collect();
        data.tensor(name, &bytes).expect("tensor data");
    }
    Gguf::from_bytes(data.finish().expect("a file")).expect("a model")
}

/// `n` ids of bytes.
pub fn ids(n: usize, seed: u64) -> Vec<u32> {
    let mut r = Random(seed * 2 + 1);
    (0..n).map(|_| BYTES + r.below(256) as u32).collect()
}
