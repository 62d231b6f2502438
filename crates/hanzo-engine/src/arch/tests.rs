//! Every architecture builds a Plan that checks and schedules under every set of levers, and bad files are refused with
//! errors that name what is wrong. Numbers are checked against references where a backend runs the Plans.

use super::*;
use hanzo_gguf::Format;
use hanzo_ml::backend::CompileOptions;
use hanzo_ml::gpu::{self, Features, MatrixUnit, MatrixUnits};
use hanzo_ml::levers::{self, LeverSet};
use hanzo_ml::plan::schedule::Schedule;
use hanzo_ml::plan::{Op, RopeConvention, RopeSpec, Sizes};
use std::collections::BTreeMap;

/// A tensor directory without data.
#[derive(Clone, Default)]
struct Table(BTreeMap<String, TensorShape>);

impl Tensors for Table {
    fn find(&self, name: &str) -> Option<TensorShape> {
        self.0.get(name).cloned()
    }
    fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }
}

impl Table {
    fn add(&mut self, name: &str, dims: &[u64]) {
        let format = if dims.len() == 1 { Format::F32 } else { Format::Q8_0 };
        self.0.insert(name.to_string(), TensorShape { format, dims: dims.to_vec() });
    }
    fn remove(&mut self, name: &str) {
        assert!(self.0.remove(name).is_some(), "{name}");
    }
}

const OPTIONS: PlanOptions = PlanOptions { n_ctx: 4096, type_k: Format::F16, type_v: Format::F16 };
const LAYERS: u64 = 12;

/// A small model of 12 layers: 64 columns, 4 query and 2 key heads of 32, feed-forward 96, 128 tokens, 8 experts of 64.
fn model(arch: &str) -> (Metadata, Table) {
    let mut m = Metadata::new();
    m.set("general.architecture", arch);
    let mut set = |key: &str, v: u32| m.set(format!("{arch}.{key}"), v);
    set("block_count", LAYERS as u32);
    set("embedding_length", 64);
    set("attention.head_count", 4);
    set("attention.head_count_kv", 2);
    set("attention.key_length", 32);
    set("attention.value_length", 32);
    set("feed_forward_length", 96);
    set("context_length", 8192);
    set("attention.sliding_window", 64);
    if arch == "qwen3moe" {
        set("expert_count", 8);
        set("expert_used_count", 2);
        set("expert_feed_forward_length", 64);
    }
    m.set(format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-6f32);

    let mut t = Table::default();
    t.add("token_embd.weight", &[64, 128]);
    t.add("output_norm.weight", &[64]);
    for l in 0..LAYERS {
        let mut add = |name: &str, dims: &[u64]| t.add(&format!("blk.{l}.{name}"), dims);
        add("attn_norm.weight", &[64]);
        add("ffn_norm.weight", &[64]);
        add("attn_output.weight", &[128, 64]);
        if arch == "phi3" {
            add("attn_qkv.weight", &[64, 256]);
            add("ffn_up.weight", &[64, 192]);
        } else {
            add("attn_q.weight", &[64, 128]);
            add("attn_k.weight", &[64, 64]);
            add("attn_v.weight", &[64, 64]);
        }
        if arch == "qwen2" {
            add("attn_q.bias", &[128]);
            add("attn_k.bias", &[64]);
            add("attn_v.bias", &[64]);
        }
        if arch.starts_with("qwen3") || arch == "gemma3" {
            add("attn_q_norm.weight", &[32]);
            add("attn_k_norm.weight", &[32]);
        }
        if arch == "gemma3" {
            add("post_attention_norm.weight", &[64]);
            add("post_ffw_norm.weight", &[64]);
        }
        if arch == "qwen3moe" {
            add("ffn_gate_inp.weight", &[64, 8]);
            add("ffn_gate_exps.weight", &[64, 64, 8]);
            add("ffn_up_exps.weight", &[64, 64, 8]);
            add("ffn_down_exps.weight", &[64, 64, 8]);
        } else {
            add("ffn_down.weight", &[96, 64]);
            if arch != "phi3" {
                add("ffn_gate.weight", &[64, 96]);
                add("ffn_up.weight", &[64, 96]);
            }
        }
    }
    (m, t)
}

fn built(arch: &str) -> Built {
    let (m, t) = model(arch);
    build(&m, &t, &OPTIONS).unwrap_or_else(|e| panic!("{arch}: {e}"))
}

fn ropes(b: &Built) -> Vec<RopeSpec> {
    let rope = |op: &Op| match op {
        Op::Rope { rope, .. } => Some(rope.clone()),
        _ => None,
    };
    b.plan.ops.iter().filter_map(rope).collect()
}

#[test]
fn every_architecture_checks_and_schedules_under_every_lever_set() {
    for arch in ARCHITECTURES {
        let b = built(arch.name);
        assert!(b.unused.is_empty(), "{}: {:?}", arch.name, b.unused);
        assert_eq!(b.hyper.n_vocab, 128);
        let logits = b.plan.val(*b.plan.outputs.last().expect("an output"));
        assert_eq!(logits.cols, 128);
        for (name, set) in LeverSet::gate_sets(4) {
            let p = levers::rewrite(&b.plan, set);
            p.check().unwrap_or_else(|e| panic!("{} {name}: {e}\n{p}", arch.name));
            let s = Schedule::new(&p, &Sizes { n_tokens: 7, n_seqs: 2, n_out: 3 });
            s.verify(&p).unwrap_or_else(|e| panic!("{} {name}: {e}", arch.name));
        }
    }
}

/// Devices that lowering tells apart: one with matrix units and one without, in waves of different sizes.
fn devices() -> [Features; 2] {
    let gpu = Features {
        wave: 32,
        half_hw: true,
        int_dot: true,
        matrix: MatrixUnits::NONE.with(MatrixUnit::Coop),
        shared_bytes: 49152,
        max_threads: 1024,
        prefetch_bytes: 32 << 20,
    };
    [Features { wave: 8, matrix: MatrixUnits::NONE, shared_bytes: 32768, prefetch_bytes: 0, ..gpu.clone() }, gpu]
}

#[test]
fn deleting_any_one_barrier_of_a_models_gpu_program_fails_the_checker() {
    for arch in ARCHITECTURES {
        let plan = built(arch.name).plan;
        let sets = [LeverSet::NONE, LeverSet::default()];
        for (levers, features) in sets.into_iter().flat_map(|s| devices().map(|f| (s, f))) {
            // A step of decode, one of a few sequences, and one of prefill.
            for (n_tokens, n_seqs) in [(1, 1), (4, 4), (128, 1)] {
                let options = CompileOptions {
                    levers,
                    bucket: Sizes { n_tokens, n_seqs, n_out: n_seqs },
                    n_ctx: OPTIONS.n_ctx,
                    ..CompileOptions::default()
                };
                let p = gpu::lower::program(&plan, &options, &features, &|_| None)
                    .unwrap_or_else(|e| panic!("{}: {e}", arch.name));
                assert_eq!(gpu::verify(&p.launches, &p.barriers, p.head), Ok(()), "{}", arch.name);
                let standing: Vec<usize> = (0..p.barriers.len()).filter(|i| p.barriers[*i]).collect();
                assert!(standing.len() >= 4 * LAYERS as usize, "{} has {} barriers", arch.name, standing.len());
                for i in standing {
                    let mut fewer = p.barriers.clone();
                    fewer[i] = false;
                    let kernel = p.launches[i].kernel;
                    let found = gpu::verify(&p.launches, &fewer, p.head);
                    assert!(
                        found.is_err(),
                        "{}, {n_tokens} tokens: barrier {i}, of {kernel}, is not missed",
                        arch.name
                    );
                }
            }
        }
    }
}

#[test]
fn all_levers_leave_no_unfused_norm_rope_store_or_pair() {
    for arch in ARCHITECTURES {
        let p = levers::rewrite(&built(arch.name).plan, LeverSet::all());
        let count = |kind: &str| p.ops.iter().filter(|o| o.kind() == kind).count();
        assert_eq!(count("rope") + count("kv_store"), 0, "{}\n{p}", arch.name);
        assert_eq!(count("qk_norm_rope"), LAYERS as usize, "{}", arch.name);
        let moe = arch.name == "qwen3moe";
        assert_eq!(count("linear_group"), LAYERS as usize * if moe { 1 } else { 2 }, "{}", arch.name);
        assert_eq!(count("moe_linear_group"), if moe { LAYERS as usize } else { 0 });
    }
}

#[test]
fn an_unknown_architecture_lists_the_supported_ones() {
    let (mut m, t) = model("llama");
    m.set("general.architecture", "mamba2");
    let e = build(&m, &t, &OPTIONS).unwrap_err().to_string();
    for a in ARCHITECTURES {
        assert!(e.contains(a.name) && e.contains("mamba2"), "{e}");
    }
}

#[test]
fn one_error_lists_every_missing_and_every_misshapen_tensor() {
    let (m, mut t) = model("qwen2");
    t.remove("blk.3.attn_q.bias");
    t.remove("blk.11.ffn_down.weight");
    t.remove("output_norm.weight");
    t.add("blk.5.attn_k.weight", &[64, 65]);
    let e = build(&m, &t, &OPTIONS).unwrap_err();
    let Error::Tensors { missing, wrong, .. } = &e else { panic!("{e}") };
    assert_eq!(missing[..], ["blk.3.attn_q.bias", "blk.11.ffn_down.weight", "output_norm.weight"]);
    assert!(wrong.len() == 1 && wrong[0].contains("blk.5.attn_k.weight is [64, 65], expected [64, 64"), "{wrong:?}");
}

#[test]
fn expert_tensors_must_have_the_expert_dimension() {
    let (m, mut t) = model("qwen3moe");
    // As many elements, another meaning.
    t.add("blk.0.ffn_up_exps.weight", &[64, 8, 64]);
    let e = build(&m, &t, &OPTIONS).unwrap_err().to_string();
    assert!(e.contains("blk.0.ffn_up_exps.weight"), "{e}");
}

#[test]
fn a_bad_key_is_named_with_what_it_should_be() {
    for (key, v) in [("attention.head_count", 0), ("block_count", 5000), ("attention.head_count_kv", 3)] {
        let (mut m, t) = model("llama");
        m.set(format!("llama.{key}"), v);
        let e = build(&m, &t, &OPTIONS).unwrap_err().to_string();
        assert!(e.contains(&format!("llama.{key}")), "{e}");
    }
    let (mut m, t) = model("llama");
    m.remove("llama.embedding_length");
    assert!(build(&m, &t, &OPTIONS).unwrap_err().to_string().contains("llama.embedding_length"));
}

#[test]
fn unread_tensors_are_reported() {
    let (m, mut t) = model("llama");
    t.add("blk.0.attn_q.lora_a", &[64, 8]);
    assert_eq!(build(&m, &t, &OPTIONS).expect("builds").unused, ["blk.0.attn_q.lora_a"]);
}

#[test]
fn a_separate_output_matrix_is_used_and_a_missing_one_means_tied_embeddings() {
    let head = |b: &Built| match b.plan.ops.last() {
        Some(Op::Linear { member, .. }) => b.plan.wt(member.w).tensor.clone(),
        op => panic!("{op:?}"),
    };
    assert_eq!(head(&built("llama")), "token_embd.weight");
    let (m, mut t) = model("llama");
    t.add("output.weight", &[64, 128]);
    assert_eq!(head(&build(&m, &t, &OPTIONS).expect("builds")), "output.weight");
}

#[test]
fn llama_pairs_are_interleaved_and_the_others_are_halves() {
    for arch in ARCHITECTURES {
        let want = if arch.name == "llama" { RopeConvention::Interleaved } else { RopeConvention::Neox };
        assert!(ropes(&built(arch.name)).iter().all(|r| r.convention == want), "{}", arch.name);
    }
}

#[test]
fn linear_and_yarn_scaling_divide_positions_and_llama3_factors_come_from_their_tensor() {
    let (mut m, mut t) = model("llama");
    m.set("llama.rope.scaling.factor", 4.0f32);
    t.add("rope_freqs.weight", &[16]);
    let b = build(&m, &t, &OPTIONS).expect("linear");
    let r = &ropes(&b)[0];
    assert_eq!((r.scale, r.yarn), (0.25, None));
    assert_eq!(r.factors.map(|w| b.plan.wt(w).tensor.as_str()), Some("rope_freqs.weight"));

    m.set("llama.rope.scaling.type", "yarn");
    m.set("llama.rope.scaling.original_context_length", 2048);
    let y = ropes(&build(&m, &t, &OPTIONS).expect("yarn"))[0].yarn.expect("yarn");
    assert_eq!((y.original_context, y.ext_factor, y.beta_fast, y.beta_slow), (2048, 1.0, 32.0, 1.0));

    m.set("llama.rope.scaling.type", "dynamic");
    let e = build(&m, &t, &OPTIONS).unwrap_err().to_string();
    assert!(e.contains("llama.rope.scaling.type") && e.contains("dynamic"), "{e}");
}

#[test]
fn longrope_picks_its_factors_by_the_context_and_grows_the_magnitude() {
    let (mut m, mut t) = model("phi3");
    t.add("rope_factors_long.weight", &[16]);
    t.add("rope_factors_short.weight", &[16]);
    m.set("phi3.rope.scaling.original_context_length", 4096);
    for (n_ctx, want) in [(4096, "rope_factors_short.weight"), (4097, "rope_factors_long.weight")] {
        let b = build(&m, &t, &PlanOptions { n_ctx, ..OPTIONS }).expect("builds");
        let r = &ropes(&b)[0];
        assert_eq!(r.factors.map(|w| b.plan.wt(w).tensor.as_str()), Some(want));
        assert!((r.magnitude - (1.0f32 + 2f32.ln() / 4096f32.ln()).sqrt()).abs() < 1e-6);
        assert!(b.unused.is_empty());
    }
}

#[test]
fn gemma3_alternates_five_windowed_layers_with_a_global_one() {
    let b = built("gemma3");
    let specs: Vec<_> = b
        .plan
        .ops
        .iter()
        .filter_map(|op| if let Op::Attention { spec, .. } = op { Some(spec) } else { None })
        .collect();
    let rope = ropes(&b);
    for (l, spec) in specs.iter().enumerate() {
        let global = (l + 1) % 6 == 0;
        assert_eq!(spec.window, (!global).then_some(64));
        assert_eq!(spec.cache.layer as usize, if global { l / 6 } else { l - l / 6 });
        assert_eq!(rope[2 * l].base, 10_000.0);
        assert_eq!(spec.scale, 1.0 / 32f32.sqrt());
    }
    assert_eq!(b.plan.groups.iter().map(|g| (g.layers, g.window)).collect::<Vec<_>>(), [(10, Some(64)), (2, None)]);

    let (mut m, t) = model("gemma3");
    m.set("gemma3.rope.freq_base", 1e6f32);
    m.set("gemma3.rope.scaling.factor", 8.0f32);
    let r = ropes(&build(&m, &t, &OPTIONS).expect("builds"));
    assert_eq!((r[0].base, r[0].scale), (1e4, 1.0));
    assert_eq!((r[10].base, r[10].scale), (1e6, 0.125));
}

#[test]
fn phi3_reads_its_fused_tensors_as_row_ranges() {
    let b = built("phi3");
    let ranges = |t: &str| {
        let w = b.plan.weights.iter().filter(|w| w.tensor == t);
        w.map(|w| (w.first_row, w.rows, w.tensor_rows)).collect::<Vec<_>>()
    };
    assert_eq!(ranges("blk.0.attn_qkv.weight"), [(0, 128, 256), (128, 64, 256), (192, 64, 256)]);
    assert_eq!(ranges("blk.0.ffn_up.weight"), [(0, 96, 192), (96, 96, 192)]);
}
