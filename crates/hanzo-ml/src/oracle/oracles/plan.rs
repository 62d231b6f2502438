//! Cases of whole small transformers, dense and with experts, and the bit-equality of every chunking of a prompt.

use super::attention::{Layout, Sequences};
use super::rope::plain;
use super::{Builder, Context, Sink};
use crate::backend::{Backend, Precision};
use crate::cache::{CacheGroup, PAGE};
use crate::error::Result;
use crate::levers::LeverSet;
use crate::oracle::case::{Bound, Case, Measured, RunOptions, run_backend};
use crate::oracle::random::{Draw, Rng, weights};
use crate::plan::{
    Activation, AttentionSpec, CacheGroupId, CacheSlot, DType, Dim, GluKind, Mask, Member, Op, RopeConvention,
    RouteSpec, RouterScore, Store, ValueId, WeightId,
};
use hanzo_gguf::Format;

const EMBD: usize = 256;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 32;
const FF: usize = 256;
const EXPERTS: usize = 8;
const TOP_K: usize = 2;
const VOCABULARY: usize = 64;
const LAYERS: u32 = 2;

/// Tokens of the prompt: it crosses a page.
const PROMPT: usize = 40;

/// Prompts are cut into chunks of these sizes.
const CHUNKS: [usize; 3] = [PROMPT, 7, 1];

struct Model<'r> {
    b: Builder,
    rng: &'r mut Rng,
    layer: u32,
    /// Of tensor names: `blk.N.`, or nothing outside the layers.
    prefix: String,
}

impl Model<'_> {
    fn matrix(&mut self, name: &str, format: Format, experts: usize, rows: usize, cols: usize) -> WeightId {
        let bytes = weights(format, experts * rows, cols, Draw::Usual, self.rng);
        self.b.weight(&format!("{}{name}.weight", self.prefix), format, (experts, rows, cols), bytes)
    }

    fn norm(&mut self, x: ValueId, name: &str, group: usize) -> ValueId {
        let w: Vec<f32> = (0..group).map(|_| 1.0 + 0.2 * self.rng.gauss() as f32).collect();
        let weight = Some(self.b.vector(&format!("{}{name}.weight", self.prefix), &w));
        let out = self.b.like(x, name);
        self.b.plan.push(Op::RmsNorm { x, weight, eps: 1e-6, group, out });
        out
    }

    fn linear(&mut self, x: ValueId, name: &str, rows: usize, format: Format) -> ValueId {
        let w = self.matrix(name, format, 1, rows, self.b.plan.val(x).cols);
        let out = self.b.plan.value(name, self.b.plan.val(x).rows, rows);
        self.b.plan.push(Op::Linear { x, member: Member { w, bias: None, out } });
        out
    }

    fn add(&mut self, a: ValueId, b: ValueId) -> ValueId {
        let out = self.b.like(a, "residual");
        self.b.plan.push(Op::Add { a, b, out });
        out
    }

    fn glu(&mut self, gate: ValueId, up: ValueId) -> ValueId {
        let out = self.b.like(gate, "glu");
        self.b.plan.push(Op::Glu { gate, up, kind: GluKind::Plain(Activation::Silu), out });
        out
    }

    fn attention(&mut self, h: ValueId) -> ValueId {
        let cache = CacheSlot { group: CacheGroupId(0), layer: self.layer };
        let q = self.linear(h, "attn_q", HEADS * HEAD_DIM, Format::Q4_K);
        let k = self.linear(h, "attn_k", KV_HEADS * HEAD_DIM, Format::Q4_K);
        let v = self.linear(h, "attn_v", KV_HEADS * HEAD_DIM, Format::Q6_K);
        let turn = |m: &mut Self, x: ValueId, name: &str| {
            let x = m.norm(x, name, HEAD_DIM);
            let out = m.b.like(x, name);
            let rope = plain(RopeConvention::Neox, HEAD_DIM);
            m.b.plan.push(Op::Rope { x, head_dim: HEAD_DIM, rope, out });
            out
        };
        let (q, k) = (turn(self, q, "attn_q_norm"), turn(self, k, "attn_k_norm"));
        self.b.plan.push(Op::KvStore { k, store: Store { v: Some(v), cache } });
        let out = self.b.plan.value("attn", Dim::Tokens, HEADS * HEAD_DIM);
        let spec = AttentionSpec {
            n_head: HEADS,
            n_kv: KV_HEADS,
            d_k: HEAD_DIM,
            d_v: HEAD_DIM,
            scale: (HEAD_DIM as f32).sqrt().recip(),
            window: (self.layer == 1).then_some(24),
            softcap: None,
            sinks: None,
            gate: None,
            mask: Mask::Causal,
            cache,
        };
        self.b.plan.push(Op::Attention { q, spec, out });
        // The output projection reads whole superblocks or blocks of 32.
        self.linear(out, "attn_output", EMBD, Format::Q5_0)
    }

    fn dense(&mut self, h: ValueId) -> ValueId {
        let gate = self.linear(h, "ffn_gate", FF, Format::IQ4_XS);
        let up = self.linear(h, "ffn_up", FF, Format::Q5_K);
        let g = self.glu(gate, up);
        self.linear(g, "ffn_down", EMBD, Format::Q3_K)
    }

    fn experts(&mut self, h: ValueId) -> ValueId {
        let spec = RouteSpec {
            n_expert: EXPERTS,
            top_k: TOP_K,
            score: RouterScore::Softmax,
            bias: None,
            groups: None,
            normalise: true,
            scale: 1.0,
        };
        let logits = self.linear(h, "ffn_gate_inp", EXPERTS, Format::F32);
        let scores = self.b.like(logits, "scores");
        let ids = self.b.plan.typed_value("ids", Dim::Tokens, TOP_K, DType::I32);
        let raw = self.b.plan.value("raw", Dim::Tokens, TOP_K);
        let weights = self.b.plan.value("weights", Dim::Tokens, TOP_K);
        self.b.plan.push(Op::RouteScores { logits, spec: spec.clone(), out: scores });
        self.b.plan.push(Op::RouteTopK { scores, spec: spec.clone(), ids, weights: raw });
        self.b.plan.push(Op::RouteNormalise { weights: raw, spec, out: weights });
        let expert = |m: &mut Self, x: ValueId, name: &str, rows: usize, format: Format| {
            let w = m.matrix(name, format, EXPERTS, rows, m.b.plan.val(x).cols);
            let out = m.b.plan.value(name, Dim::Slots(TOP_K), rows);
            m.b.plan.push(Op::MoeLinear { x, ids, member: Member { w, bias: None, out } });
            out
        };
        let gate = expert(self, h, "ffn_gate_exps", FF, Format::Q4_0);
        let up = expert(self, h, "ffn_up_exps", FF, Format::MXFP4);
        let g = self.glu(gate, up);
        let x = expert(self, g, "ffn_down_exps", EMBD, Format::Q4_1);
        let out = self.b.plan.value("moe", Dim::Tokens, EMBD);
        self.b.plan.push(Op::MoeCombine { x, weights, out });
        out
    }
}

/// A transformer of two layers, the second with a window, and its prompt in chunks.
fn model(moe: bool, chunk: usize, cache: Format, rng: &mut Rng) -> Case {
    let chunks: Vec<usize> = (0..PROMPT).step_by(chunk).map(|at| chunk.min(PROMPT - at)).collect();
    let mut case = transformer(moe, &chunks, cache, rng);
    case.about = format!("{PROMPT} tokens, {chunk} a step");
    case.chunk = Some(16);
    case
}

/// The same over steps of these sizes, every row's logits wanted.
pub fn transformer(moe: bool, chunks: &[usize], cache: Format, rng: &mut Rng) -> Case {
    let mut m = Model { b: Builder::new(EMBD), rng, layer: 0, prefix: String::new() };
    m.b.plan.groups.push(CacheGroup {
        name: "all".into(),
        layers: LAYERS as usize,
        n_kv: KV_HEADS,
        d_k: HEAD_DIM,
        d_v: HEAD_DIM,
        type_k: cache,
        type_v: cache,
        window: None,
    });
    let table = m.matrix("token_embd", Format::Q8_0, 1, VOCABULARY, EMBD);
    let mut x = m.b.plan.value("embedding", Dim::Tokens, EMBD);
    m.b.plan.push(Op::Embed { table, scale: 1.0, out: x });
    for layer in 0..LAYERS {
        (m.layer, m.prefix) = (layer, format!("blk.{layer}."));
        let h = m.norm(x, "attn_norm", EMBD);
        let a = m.attention(h);
        x = m.add(x, a);
        let h = m.norm(x, "ffn_norm", EMBD);
        let f = if moe { m.experts(h) } else { m.dense(h) };
        x = m.add(x, f);
    }
    m.prefix.clear();
    m.b.plan.head = Some(m.b.plan.ops.len());
    let last = m.b.plan.value("last", Dim::Out, EMBD);
    m.b.plan.push(Op::GatherRows { x, out: last });
    let h = m.norm(last, "output_norm", EMBD);
    let logits = m.b.plan.value("logits", Dim::Out, VOCABULARY);
    m.b.plan.push(Op::Linear { x: h, member: Member { w: table, bias: None, out: logits } });
    m.b.plan.outputs.push(logits);

    let n: usize = chunks.iter().sum();
    let tokens: Vec<u32> = (0..n).map(|_| m.rng.below(VOCABULARY) as u32).collect();
    let format = if moe { "experts" } else { "dense" };
    // One page more than is needed, besides that of padding.
    let pages = n.div_ceil(PAGE) + 2;
    let mut sequences = Sequences::new(1, pages, Layout::Scattered, m.rng);
    let mut case = m.b.case("plan", format, 0, format!("{n} tokens"));
    let mut tokens = tokens.into_iter();
    case.steps = (chunks.iter())
        .map(|n| {
            let mut step = sequences.step(&[*n]);
            step.tokens = tokens.by_ref().take(*n).collect();
            step.out_rows = (0..*n as u32).collect();
            step
        })
        .collect();
    case.pages = vec![pages];
    case
}

pub(super) fn plan(context: &Context<'_>, sink: Sink<'_>) {
    for moe in [false, true] {
        for chunk in CHUNKS {
            // The same draw for every chunking: the same model and prompt.
            let rng = &mut context.rng(&format!("plan {moe}"));
            let case = model(moe, chunk, Format::F32, rng);
            sink(Case { bound: Bound::Noise { draws: 4 }, ..case });
        }
    }
}

/// For each model and precision, one prompt in chunks of all, 7 and 1 tokens.
pub fn chunkings(context: &Context<'_>) -> Vec<Vec<Case>> {
    let mut all = Vec::new();
    for moe in [false, true] {
        let case = |chunk: usize| model(moe, chunk, Format::F16, &mut context.rng(&format!("chunks {moe}")));
        let cases = CHUNKS.map(case);
        for precision in [Precision::Int8, Precision::Exact] {
            all.push(cases.iter().map(|c| Case { precision, ..c.clone() }).collect());
        }
    }
    all
}

/// Logits of the same prompt in several chunkings under `deterministic`: elements whose bits differ from the first's.
pub fn chunking_differences(cases: &[Case], backend: &dyn Backend, levers: LeverSet) -> Measured {
    let mut found = Measured::default();
    let mut first: Option<Vec<f32>> = None;
    for case in cases {
        let got = match logits(case, backend, levers) {
            Ok(got) => got,
            Err(e) => return Measured { failure: Some(e.to_string()), ..found },
        };
        let want = first.get_or_insert_with(|| got.clone());
        for (w, g) in want.iter().zip(&got) {
            // Zeros may differ in sign.
            let same = w.to_bits() == g.to_bits() || *w == 0.0 && *g == 0.0;
            let error = f64::from((w - g).abs()).max(f64::from(f32::MIN_POSITIVE));
            found.add(if same { 0.0 } else { error }, 0.0);
        }
    }
    found
}

fn logits(case: &Case, backend: &dyn Backend, levers: LeverSet) -> Result<Vec<f32>> {
    let mut all = Vec::new();
    run_backend(case, backend, RunOptions { levers, deterministic: true }, &mut |_, outputs, _| {
        all.extend(outputs.iter().flatten().copied());
        Ok(())
    })?;
    Ok(all)
}
