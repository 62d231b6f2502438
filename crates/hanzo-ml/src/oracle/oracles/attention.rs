//! Cases of attention and of what fills its cache.

use super::rope::{CONVENTIONS, plain};
use super::{Builder, Context, Sink};
use crate::cache::{CACHE_FORMATS, CacheGroup, PAGE};
use crate::oracle::case::{Case, Step, Tables};
use crate::oracle::random::Rng;
use crate::plan::{AttentionSpec, CacheGroupId, CacheSlot, Dim, Mask, Op, RopeConvention, RopeSpec, Store, ValueId};
use hanzo_gguf::Format;

/// Where pages lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Pages in random order, sequences interleaved.
    Scattered,
    /// The same, and pages wholly out of the window are dropped from the table.
    Freed(u32),
}

/// Sequences that grow step by step, and their block tables.
#[derive(Clone, Debug)]
pub struct Sequences {
    layout: Layout,
    free: Vec<u32>,
    pages: Vec<Vec<u32>>,
    first: Vec<u32>,
    next: Vec<u32>,
}

impl Sequences {
    /// `n` empty sequences over `pages` pages (page 0 is padding).
    pub fn new(n: usize, pages: usize, layout: Layout, rng: &mut Rng) -> Sequences {
        let free = rng.permutation(pages - 1).into_iter().map(|p| p + 1).collect();
        Sequences { layout, free, pages: vec![Vec::new(); n], first: vec![0; n], next: vec![0; n] }
    }

    /// A step in which sequence `i` grows by `grow[i]` tokens (sequences after the last are not part of it).
    pub fn step(&mut self, grow: &[usize]) -> Step {
        let mut step = Step { seq_offsets: vec![0], ..Step::default() };
        let mut table = Tables { offsets: vec![0], ..Tables::default() };
        for (seq, &n) in grow.iter().enumerate() {
            let start = self.next[seq];
            self.next[seq] += n as u32;
            if let Layout::Freed(window) = self.layout {
                // The oldest key that this step's first token still sees.
                let oldest = (start + 1).saturating_sub(window) / PAGE as u32;
                while self.first[seq] < oldest {
                    self.pages[seq].remove(0);
                    self.first[seq] += 1;
                }
            }
            while (self.first[seq] as usize + self.pages[seq].len()) * PAGE < self.next[seq] as usize {
                let page = self.free.pop().unwrap_or(0);
                self.pages[seq].push(page);
            }
            step.positions.extend(start..self.next[seq]);
            step.seq_offsets.push(step.positions.len() as u32);
            table.pages.extend(&self.pages[seq]);
            table.offsets.push(table.pages.len() as u32);
            table.first.push(self.first[seq]);
        }
        step.tokens = vec![0; step.positions.len()];
        step.tables = vec![table];
        step
    }
}

/// What an attention case is like.
#[derive(Clone, Debug)]
struct Shape {
    n_head: usize,
    n_kv: usize,
    d_k: usize,
    d_v: usize,
    format: (Format, Format),
    window: Option<u32>,
    softcap: Option<f32>,
    sinks: bool,
    gate: bool,
    mask: Mask,
    latent: bool,
    free_pages: bool,
    scale: f32,
    /// Tokens of each sequence, step by step.
    steps: Vec<Vec<usize>>,
}

impl Shape {
    fn usual() -> Shape {
        Shape {
            n_head: 4,
            n_kv: 2,
            d_k: 32,
            d_v: 32,
            format: (Format::F16, Format::F16),
            window: None,
            softcap: None,
            sinks: false,
            gate: false,
            mask: Mask::Causal,
            latent: false,
            free_pages: false,
            scale: 0.2,
            // A prompt in two chunks that cross a page, then single tokens across the next page's edge.
            steps: [vec![vec![20], vec![43]], vec![vec![1]; 3]].concat(),
        }
    }
}

const PAGES: usize = 12;

struct Parts {
    q: ValueId,
    k: ValueId,
    v: Option<ValueId>,
    gate: Option<ValueId>,
}

/// Inputs, group and spec of a shape.
fn parts(b: &mut Builder, s: &Shape, rng: &mut Rng) -> (Parts, AttentionSpec) {
    let cache = CacheSlot { group: CacheGroupId(0), layer: 1 };
    b.plan.groups.push(CacheGroup {
        name: "kv".into(),
        layers: 2,
        n_kv: s.n_kv,
        d_k: s.d_k,
        d_v: if s.latent { 0 } else { s.d_v },
        type_k: s.format.0,
        type_v: s.format.1,
        window: s.window,
    });
    let q = b.input("q", Dim::Tokens, s.n_head * s.d_k, Vec::new());
    let k = b.input("k", Dim::Tokens, s.n_kv * s.d_k, Vec::new());
    let v = (!s.latent).then(|| b.input("v", Dim::Tokens, s.n_kv * s.d_v, Vec::new()));
    let gate = s.gate.then(|| b.input("gate", Dim::Tokens, s.n_head * s.d_v, Vec::new()));
    let spec = AttentionSpec {
        n_head: s.n_head,
        n_kv: s.n_kv,
        d_k: s.d_k,
        d_v: s.d_v,
        scale: s.scale,
        window: s.window,
        softcap: s.softcap,
        sinks: s.sinks.then(|| b.vector("sinks", &rng.floats(s.n_head, 1.0))),
        gate,
        mask: s.mask,
        cache,
    };
    (Parts { q, k, v, gate }, spec)
}

/// Fills in the steps.
fn finish(b: Builder, s: &Shape, op: &'static str, about: &str, rng: &mut Rng) -> Case {
    let plan_inputs: Vec<(ValueId, usize)> = b.plan.inputs.iter().map(|v| (*v, b.plan.val(*v).cols)).collect();
    let mut b = b;
    b.inputs.clear();
    let format =
        if s.format.0 == s.format.1 { s.format.0.to_string() } else { format!("{}/{}", s.format.0, s.format.1) };
    let mut case = b.case(op, format, 0, about.to_string());
    let n_seqs = s.steps.iter().map(Vec::len).max().unwrap_or(1);
    let layout = if s.free_pages { Layout::Freed(s.window.unwrap_or(u32::MAX)) } else { Layout::Scattered };
    let mut sequences = Sequences::new(n_seqs, PAGES, layout, rng);
    case.steps = (s.steps.iter())
        .map(|grow| {
            let mut step = sequences.step(grow);
            let n = step.positions.len();
            step.inputs = plan_inputs.iter().map(|(v, cols)| (*v, rng.floats(n * cols, 1.0))).collect();
            step
        })
        .collect();
    case.pages = vec![PAGES];
    case
}

fn case(s: &Shape, about: &str, rng: &mut Rng) -> Case {
    let mut b = Builder::new(s.n_head * s.d_k);
    let (p, spec) = parts(&mut b, s, rng);
    b.plan.push(Op::KvStore { k: p.k, store: Store { v: p.v, cache: spec.cache } });
    let out = b.plan.value("out", Dim::Tokens, s.n_head * s.d_v);
    debug_assert_eq!(p.gate, spec.gate);
    b.plan.push(Op::Attention { q: p.q, spec, out });
    b.plan.outputs.push(out);
    finish(b, s, "attention", about, rng)
}

pub(super) fn attention(context: &Context<'_>, sink: Sink<'_>) {
    let rng = &mut context.rng("attention");
    let usual = Shape::usual;
    for format in CACHE_FORMATS {
        sink(case(&Shape { format: (format, format), ..usual() }, "cache format", rng));
    }
    sink(case(&Shape { format: (Format::F16, Format::Q8_0), ..usual() }, "mixed cache formats", rng));
    let long = vec![vec![70], vec![1], vec![30]];
    let shapes = [
        ("as many kv heads as heads", Shape { n_head: 3, n_kv: 3, ..usual() }),
        ("one kv head", Shape { n_head: 7, n_kv: 1, ..usual() }),
        ("wide heads", Shape { d_k: 128, d_v: 128, ..usual() }),
        ("odd heads", Shape { d_k: 20, d_v: 12, format: (Format::F32, Format::F16), ..usual() }),
        ("window", Shape { window: Some(17), ..usual() }),
        ("window of one", Shape { window: Some(1), ..usual() }),
        ("window of a page", Shape { window: Some(32), steps: long.clone(), ..usual() }),
        ("window, old pages freed", Shape { window: Some(20), free_pages: true, steps: long.clone(), ..usual() }),
        ("softcap", Shape { softcap: Some(2.0), scale: 1.0, ..usual() }),
        ("sinks", Shape { sinks: true, ..usual() }),
        ("gate", Shape { gate: true, ..usual() }),
        ("window, softcap, sinks and gate", {
            Shape { window: Some(40), softcap: Some(5.0), sinks: true, gate: true, steps: long, ..usual() }
        }),
        ("full mask", Shape { mask: Mask::Full, ..usual() }),
        ("latent", Shape { n_head: 4, n_kv: 1, d_k: 48, d_v: 32, latent: true, ..usual() }),
        ("sharp", Shape { scale: 4.0, ..usual() }),
        ("one token", Shape { steps: vec![vec![1]], ..usual() }),
        ("exactly a page, then one more", Shape { steps: vec![vec![32], vec![1], vec![31], vec![1]], ..usual() }),
        ("three sequences", {
            Shape { steps: vec![vec![33, 5, 64], vec![1, 1, 1], vec![1, 30, 1], vec![7]], ..usual() }
        }),
        ("many pages", Shape { steps: vec![vec![290], vec![1], vec![40], vec![1]], ..usual() }),
    ];
    for (about, shape) in shapes {
        sink(case(&shape, about, rng));
    }
    // An image of 9 tokens within a prompt of 40.
    let mut spans = case(&Shape { steps: vec![vec![40], vec![1]], ..usual() }, "non-causal span", rng);
    spans.steps[0].spans.push(11..20);
    sink(spans);
}

/// Norms (or none), rotation, store, attention.
fn rotated(s: &Shape, rope: &RopeSpec, norms: (bool, bool), factors: bool, about: &str, rng: &mut Rng) -> Case {
    let mut b = Builder::new(s.n_head * s.d_k);
    let (p, spec) = parts(&mut b, s, rng);
    let mut rope = rope.clone();
    if factors {
        let f: Vec<f32> = (0..rope.n_dims / 2).map(|i| 1.0 + i as f32 / 7.0).collect();
        rope.factors = Some(b.vector("rope_freqs", &f));
    }
    let mut turn = |b: &mut Builder, x: ValueId, norm: bool, name: &str| {
        let mut x = x;
        if norm {
            let weight = Some(b.vector(&format!("{name}_norm"), &rng.floats(s.d_k, 1.0)));
            let out = b.like(x, "normed");
            b.plan.push(Op::RmsNorm { x, weight, eps: 1e-6, group: s.d_k, out });
            x = out;
        }
        let out = b.like(x, name);
        b.plan.push(Op::Rope { x, head_dim: s.d_k, rope: rope.clone(), out });
        out
    };
    let q = turn(&mut b, p.q, norms.0, "q");
    let k = turn(&mut b, p.k, norms.1, "k");
    b.plan.push(Op::KvStore { k, store: Store { v: p.v, cache: spec.cache } });
    let out = b.plan.value("out", Dim::Tokens, s.n_head * s.d_v);
    b.plan.push(Op::Attention { q, spec, out });
    b.plan.outputs = vec![q, out];
    finish(b, s, "qk_norm_rope", about, rng)
}

pub(super) fn qk_norm_rope(context: &Context<'_>, sink: Sink<'_>) {
    let rng = &mut context.rng("qk norm rope");
    let usual = || Shape { steps: vec![vec![9, 33], vec![1, 1], vec![6]], ..Shape::usual() };
    for convention in CONVENTIONS {
        let rope = plain(convention, 32);
        for norms in [(true, true), (false, false), (true, false)] {
            sink(rotated(&usual(), &rope, norms, false, &format!("{convention:?}, norms {norms:?}"), rng));
        }
        sink(rotated(&usual(), &plain(convention, 12), (true, true), false, "partial", rng));
        sink(rotated(&usual(), &rope, (false, false), true, "factors", rng));
    }
    let rope = plain(RopeConvention::Neox, 64);
    let wide = Shape { d_k: 64, d_v: 64, n_head: 6, n_kv: 3, ..usual() };
    for format in CACHE_FORMATS {
        sink(rotated(&Shape { format: (format, format), ..wide.clone() }, &rope, (true, true), false, "formats", rng));
    }
}

/// As [`rotated`], one token a step, where only attention reads the queries.
pub(super) fn prologue(context: &Context<'_>, sink: Sink<'_>) {
    let rng = &mut context.rng("attention prologue");
    let mut sink = |s: &Shape, rope: &RopeSpec, norms: (bool, bool), about: &str| {
        let mut case = rotated(s, rope, norms, about == "factors", about, rng);
        case.op = "attention";
        case.plan.outputs.remove(0);
        sink(case);
    };
    let steps = |n: usize| vec![vec![1]; n];
    let usual = || Shape { steps: steps(3), ..Shape::usual() };
    let both = (true, true);
    for convention in CONVENTIONS {
        for norms in [both, (false, false), (false, true)] {
            sink(&usual(), &plain(convention, 32), norms, &format!("{convention:?}, norms {norms:?}"));
        }
        sink(&usual(), &plain(convention, 12), both, "partial");
    }
    let rope = &plain(RopeConvention::Neox, 32);
    sink(&usual(), rope, (false, false), "factors");
    sink(&Shape { steps: steps(68), ..usual() }, rope, both, "two splits");
    sink(&Shape { steps: steps(40), window: Some(17), free_pages: true, ..usual() }, rope, both, "window");
    sink(&Shape { n_head: 7, n_kv: 1, steps: steps(34), ..usual() }, rope, both, "two groups of threads a key head");
    let (softcap, scale) = (Some(2.0), 1.0);
    sink(&Shape { sinks: true, softcap, scale, ..usual() }, rope, both, "softcap and sinks");
    sink(&Shape { gate: true, mask: Mask::Full, ..usual() }, rope, both, "gate and full mask");
    sink(&Shape { steps: vec![vec![1, 1], vec![1, 1]], ..usual() }, rope, both, "two sequences");
    let wide = plain(RopeConvention::Neox, 128);
    let shape = |format| Shape { d_k: 128, d_v: 128, format: (format, format), steps: steps(34), ..usual() };
    for format in CACHE_FORMATS {
        sink(&shape(format), &wide, both, "formats");
    }
    sink(&Shape { d_k: 256, d_v: 256, n_kv: 1, ..usual() }, &wide, both, "wide heads");
    sink(
        &Shape { d_k: 96, d_v: 96, format: (Format::Q8_0, Format::Q4_0), ..usual() },
        rope,
        both,
        "scales side by side",
    );
}
