//! The op set is wide enough: Plans of models that hanzo does not run yet are built with the ordinary builder, and every
//! set of levers turns them into Plans that check and schedule. A new architecture starts as a file here: a table of
//! its tensors, and a function that reads like the maths.

mod deepseek2;
mod gemma3_images;
mod gpt_oss;
mod qwen35;

use hanzo_engine::arch::{Builder, Built, PlanOptions, TensorShape, Tensors};
use hanzo_gguf::{Format, Metadata};
use hanzo_ml::levers::{self, LeverSet};
use hanzo_ml::plan::schedule::Schedule;
use hanzo_ml::plan::{Op, Plan, Sizes, ValueId};

/// A tensor directory without data: name, format, dimensions.
struct Table(Vec<(String, Format, Vec<u64>)>);

impl Table {
    fn new() -> Table {
        Table(Vec::new())
    }

    /// A float vector or a Q8_0 matrix.
    fn add(&mut self, name: impl Into<String>, dims: &[usize]) {
        self.add_as(name, if dims.len() == 1 { Format::F32 } else { Format::Q8_0 }, dims);
    }

    fn add_as(&mut self, name: impl Into<String>, format: Format, dims: &[usize]) {
        self.0.push((name.into(), format, dims.iter().map(|d| *d as u64).collect()));
    }
}

impl Tensors for Table {
    fn find(&self, name: &str) -> Option<TensorShape> {
        let (_, format, dims) = self.0.iter().find(|t| t.0 == name)?;
        Some(TensorShape { format: *format, dims: dims.clone() })
    }
    fn names(&self) -> Vec<String> {
        self.0.iter().map(|t| t.0.clone()).collect()
    }
}

const OPTIONS: PlanOptions = PlanOptions { n_ctx: 8192, type_k: Format::F16, type_v: Format::F16 };

/// Metadata with these whole numbers under `arch.`, and the keys that every architecture has.
fn metadata(arch: &str, sizes: &[(&str, usize)]) -> Metadata {
    let mut m = Metadata::new();
    m.set("general.architecture", arch);
    for (key, v) in sizes {
        m.set(format!("{arch}.{key}"), *v as u32);
    }
    m.set(format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-6f32);
    m
}

/// The Plan checks and schedules, plain and under every set of levers; no tensor of the table is left over.
fn gate(built: &Built) {
    assert!(built.unused.is_empty(), "{:?}", built.unused);
    for (name, set) in LeverSet::gate_sets(8) {
        let p = levers::rewrite(&built.plan, set);
        p.check().unwrap_or_else(|e| panic!("{} {name}: {e}\n{p}", built.arch));
        for sizes in [(1, 1, 1), (7, 2, 3)] {
            let sizes = Sizes { n_tokens: sizes.0, n_seqs: sizes.1, n_out: sizes.2 };
            Schedule::new(&p, &sizes).verify(&p).unwrap_or_else(|e| panic!("{} {name}: {e}\n{p}", built.arch));
        }
    }
}

fn count(plan: &Plan, kind: &str) -> usize {
    plan.ops.iter().filter(|op| op.kind() == kind).count()
}

/// `a` and `b` side by side.
fn concat(b: &mut Builder<'_>, left: ValueId, right: ValueId) -> ValueId {
    let cols = b.cols(left) + b.cols(right);
    let out = b.like(left, "concat", cols);
    b.plan().push(Op::Concat { a: left, b: right, out });
    out
}

/// All of `parts` side by side, in a balanced tree: each element moves log2(n) times.
fn concat_all(b: &mut Builder<'_>, parts: &[ValueId]) -> ValueId {
    match parts {
        [one] => *one,
        _ => {
            let (left, right) = parts.split_at(parts.len() / 2);
            let (left, right) = (concat_all(b, left), concat_all(b, right));
            concat(b, left, right)
        }
    }
}

/// Columns `first..first + cols` of `x`.
fn columns(b: &mut Builder<'_>, x: ValueId, name: &str, first: usize, cols: usize) -> ValueId {
    let out = b.like(x, name, cols);
    b.plan().push(Op::Columns { x, first, out });
    out
}
