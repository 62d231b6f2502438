//! Row-wise ops: norms, element-wise functions, routing, gathers. An item is a block of rows, or, when there are few
//! rows, a block of columns of one row.

use super::Ctx;
use super::contract::{Needs, QuantizeTask, WorkerScratch};
use crate::batch::Input;
use crate::cpu::memory::{CpuWeights, Vector};
use crate::cpu::ops::{self, Mat, MatMut};
use crate::plan::{Activation, GluKind, Op, Plan, RouteSpec, ValueId, WeightId};
use hanzo_gguf::Format;
use std::ops::Range;

/// Elements of a block: worth a claim (about a microsecond of work), and what fits the first-level cache.
pub(super) const GRAIN: usize = 4096;
/// Blocks of an item at most: consecutive ones, which prefetchers follow.
const BLOCKS: usize = 8;
/// Items a thread where there are many blocks.
const ITEMS_A_THREAD: usize = 8;

/// Blocks of an item of `blocks` in all.
pub(super) fn blocks_an_item(blocks: usize, threads: usize) -> usize {
    (blocks / (threads * ITEMS_A_THREAD)).clamp(1, BLOCKS)
}

/// A row-wise op, bound to its weights.
pub(super) struct RowTask {
    kind: Kind,
    /// The value whose rows and columns are split.
    over: ValueId,
    /// Columns may be split too.
    columns: bool,
    /// Quantizes `over` on the way: its rows are in the worker's memory alone.
    quantize: Option<QuantizeTask>,
    threads: usize,
}

enum Kind {
    Embed { table: *const u8, format: Format, row_bytes: usize, scale: f32, out: ValueId },
    RmsNorm { x: ValueId, weight: Option<Vector>, eps: f32, group: usize, out: ValueId },
    LayerNorm { x: ValueId, weight: Vector, bias: Option<Vector>, eps: f32, out: ValueId },
    AddRmsNorm { a: ValueId, b: ValueId, weight: Option<Vector>, eps: f32, sum: ValueId, out: ValueId },
    Act { x: ValueId, kind: Activation, out: ValueId },
    Glu { gate: ValueId, up: ValueId, kind: GluKind, out: ValueId },
    Add { a: ValueId, b: ValueId, out: ValueId },
    Mul { a: ValueId, b: ValueId, out: ValueId },
    Scale { x: ValueId, s: f32, out: ValueId },
    Softcap { x: ValueId, cap: f32, out: ValueId },
    Columns { x: ValueId, first: usize, out: ValueId },
    Concat { a: ValueId, b: ValueId, out: ValueId },
    Copy { x: ValueId, out: ValueId },
    AllReduce { xs: Vec<ValueId>, out: ValueId },
    Gather { x: ValueId, out: ValueId },
    Scores { logits: ValueId, spec: RouteSpec, out: ValueId },
    TopK { scores: ValueId, spec: RouteSpec, bias: Option<Vector>, ids: ValueId, weights: ValueId },
    Normalise { weights: ValueId, spec: RouteSpec, out: ValueId },
    Route { logits: ValueId, spec: RouteSpec, bias: Option<Vector>, ids: ValueId, weights: ValueId },
    Combine { x: ValueId, weights: ValueId, out: ValueId },
}

impl RowTask {
    /// The task of a row-wise op; `None` if the op is not one. `vector` and `matrix` find bound weights.
    pub(super) fn new(
        plan: &Plan,
        op: &Op,
        weights: &CpuWeights,
        threads: usize,
        needs: &mut Needs,
    ) -> Option<RowTask> {
        let vector = |w: WeightId| weights.vector(w.0 as usize);
        let opt = |w: &Option<WeightId>| w.map(vector);
        let (kind, over, columns) = match op.clone() {
            Op::Embed { table, scale, out } => {
                let w = plan.wt(table);
                let table = weights.ptr(table.0 as usize);
                (Kind::Embed { table, format: w.format, row_bytes: w.row_bytes(), scale, out }, out, false)
            }
            Op::RmsNorm { x, weight, eps, group, out } => {
                (Kind::RmsNorm { x, weight: opt(&weight), eps, group, out }, out, false)
            }
            Op::LayerNorm { x, weight, bias, eps, out } => {
                (Kind::LayerNorm { x, weight: vector(weight), bias: opt(&bias), eps, out }, out, false)
            }
            Op::AddRmsNorm { a, b, weight, eps, sum, out } => {
                (Kind::AddRmsNorm { a, b, weight: opt(&weight), eps, sum, out }, out, false)
            }
            Op::Act { x, kind, out } => (Kind::Act { x, kind, out }, out, true),
            Op::Glu { gate, up, kind, out } => (Kind::Glu { gate, up, kind, out }, out, true),
            Op::Add { a, b, out } => (Kind::Add { a, b, out }, out, true),
            Op::Mul { a, b, out } => (Kind::Mul { a, b, out }, out, false),
            Op::Scale { x, s, out } => (Kind::Scale { x, s, out }, out, true),
            Op::Softcap { x, cap, out } => (Kind::Softcap { x, cap, out }, out, true),
            Op::Columns { x, first, out } => (Kind::Columns { x, first, out }, out, false),
            Op::Concat { a, b, out } => (Kind::Concat { a, b, out }, out, false),
            Op::Copy { x, out } => (Kind::Copy { x, out }, out, false),
            Op::AllReduce { xs, out } => (Kind::AllReduce { xs, out }, out, false),
            Op::GatherRows { x, out } => (Kind::Gather { x, out }, out, false),
            Op::RouteScores { logits, spec, out } => (Kind::Scores { logits, spec, out }, out, false),
            Op::RouteTopK { scores, spec, ids, weights: w } => {
                (Kind::TopK { scores, bias: opt(&spec.bias), spec, ids, weights: w }, scores, false)
            }
            Op::RouteNormalise { weights: w, spec, out } => (Kind::Normalise { weights: w, spec, out }, out, false),
            Op::MoeRoute { logits, spec, ids, weights: w } => {
                needs.floats = needs.floats.max(spec.n_expert);
                (Kind::Route { logits, bias: opt(&spec.bias), spec, ids, weights: w }, logits, false)
            }
            Op::MoeCombine { x, weights: w, out } => (Kind::Combine { x, weights: w, out }, out, false),
            _ => return None,
        };
        Some(RowTask { kind, over, columns, quantize: None, threads })
    }

    /// The same, with the quantization of what it makes.
    pub(super) fn quantizing(self, quantize: QuantizeTask, plan: &Plan, needs: &mut Needs) -> RowTask {
        let cols = plan.val(self.over).cols;
        needs.floats = needs.floats.max(GRAIN.max(cols));
        debug_assert!(quantize.input() == self.over && cols.is_multiple_of(32));
        RowTask { quantize: Some(quantize), ..self }
    }

    /// `(rows a block, columns a block)` for a value of `rows x cols`.
    fn split(&self, rows: usize, cols: usize) -> (usize, usize) {
        if self.columns && rows < 4 && cols >= GRAIN / 2 {
            return (1, GRAIN / 4);
        }
        ((GRAIN / cols.max(1)).max(1), cols.max(1))
    }

    /// Items for the step's sizes.
    pub(super) fn items(&self, plan: &Plan, ctx_rows: impl Fn(ValueId) -> usize) -> usize {
        let (rows, cols) = (ctx_rows(self.over), plan.val(self.over).cols);
        let blocks = self.blocks(rows, cols);
        blocks.div_ceil(blocks_an_item(blocks, self.threads))
    }

    fn blocks(&self, rows: usize, cols: usize) -> usize {
        let (r, c) = self.split(rows, cols);
        rows.div_ceil(r) * cols.div_ceil(c)
    }

    /// Runs item `item`.
    pub(super) fn run(&self, ctx: &Ctx<'_>, item: usize, scratch: &mut WorkerScratch) {
        let blocks = self.blocks(ctx.rows(self.over), ctx.cols(self.over));
        let each = blocks_an_item(blocks, self.threads);
        for block in item * each..((item + 1) * each).min(blocks) {
            self.run_block(ctx, block, scratch);
        }
    }

    fn run_block(&self, ctx: &Ctx<'_>, block: usize, scratch: &mut WorkerScratch) {
        let (rows, cols) = (ctx.rows(self.over), ctx.cols(self.over));
        let (r, c) = self.split(rows, cols);
        let across = cols.div_ceil(c);
        let rows = block / across * r..((block / across + 1) * r).min(rows);
        let cols = block % across * c..((block % across + 1) * c).min(cols);
        let isa = ctx.isa;
        let m = |v: ValueId| ctx.mat(v, rows.clone());
        let made = self.quantize.as_ref().map(|_| scratch.floats().as_mut_ptr());
        let own = |v: ValueId| made.filter(|_| v == self.over);
        // SAFETY: `quantizing` has asked for a block's floats, and only this block uses them.
        let mine = |p: *mut f32| unsafe { MatMut::from_raw(p, rows.len(), cols.len(), cols.len()) };
        let o = |v: ValueId| own(v).map_or_else(|| ctx.mat_mut(v, rows.clone()), mine);
        let part = |v: ValueId| ctx.part(v, rows.clone(), cols.clone());
        let part_mut = |v: ValueId| own(v).map_or_else(|| ctx.part_mut(v, rows.clone(), cols.clone()), mine);
        match &self.kind {
            Kind::Embed { table, format, row_bytes, scale, out } => {
                embed(ctx, *table, *format, *row_bytes, *scale, rows.clone(), o(*out));
            }
            Kind::RmsNorm { x, weight, eps, group, out } => {
                ops::norm::rms_norm(isa, m(*x), weight.as_ref().map(Vector::get), *eps, *group, o(*out));
            }
            Kind::LayerNorm { x, weight, bias, eps, out } => {
                let bias = bias.as_ref().map(Vector::get);
                ops::norm::layer_norm(isa, m(*x), Some(weight.get()), bias, *eps, o(*out));
            }
            Kind::AddRmsNorm { a, b, weight, eps, sum, out } => {
                ops::norm::add_rms_norm(isa, m(*a), m(*b), weight.as_ref().map(Vector::get), *eps, o(*sum), o(*out));
            }
            Kind::Act { x, kind, out } => ops::glu::activate(isa, *kind, part(*x), part_mut(*out)),
            Kind::Glu { gate, up, kind, out } => ops::glu::glu(isa, *kind, part(*gate), part(*up), part_mut(*out)),
            Kind::Add { a, b, out } => ops::elementwise::add(isa, part(*a), part(*b), part_mut(*out)),
            Kind::Mul { a, b, out } => match ctx.cols(*b) {
                1 if ctx.cols(*a) > 1 => ops::elementwise::mul_column(isa, m(*a), m(*b), o(*out)),
                _ => ops::elementwise::mul(isa, m(*a), m(*b), o(*out)),
            },
            Kind::Scale { x, s, out } => ops::elementwise::scale(isa, part(*x), *s, part_mut(*out)),
            Kind::Softcap { x, cap, out } => ops::elementwise::softcap(isa, part(*x), *cap, part_mut(*out)),
            Kind::Columns { x, first, out } => {
                copy(ctx.part(*x, rows.clone(), *first..first + cols.end), o(*out), 0);
            }
            Kind::Concat { a, b, out } => {
                let mut out = o(*out);
                copy(m(*a), out.reborrow(), 0);
                copy(m(*b), out, ctx.cols(*a));
            }
            Kind::Copy { x, out } => copy(m(*x), o(*out), 0),
            Kind::AllReduce { xs, out } => {
                copy(m(xs[0]), o(*out), 0);
                for x in &xs[1..] {
                    ops::elementwise::add(isa, m(*out), m(*x), o(*out));
                }
            }
            Kind::Gather { x, out } => {
                let mut out = o(*out);
                for (i, row) in rows.clone().enumerate() {
                    let src = ctx.out_rows[row] as usize;
                    out.row_mut(i).copy_from_slice(ctx.mat(*x, src..src + 1).row(0));
                }
            }
            Kind::Scores { logits, spec, out } => ops::moe::route_scores(isa, spec, m(*logits), o(*out)),
            Kind::TopK { scores, spec, bias, ids, weights } => {
                let bias = bias.as_ref().map(Vector::get);
                ops::moe::route_top_k(spec, bias, m(*scores), ctx.ids_mut(*ids, rows.clone()), o(*weights));
            }
            Kind::Normalise { weights, spec, out } => ops::moe::route_normalise(isa, spec, m(*weights), o(*out)),
            Kind::Route { logits, spec, bias, ids, weights } => {
                let bias = bias.as_ref().map(Vector::get);
                ops::moe::moe_route(
                    isa,
                    spec,
                    bias,
                    m(*logits),
                    ctx.ids_mut(*ids, rows.clone()),
                    o(*weights),
                    scratch.floats(),
                );
            }
            Kind::Combine { x, weights, out } => {
                let k = ctx.cols(*weights);
                let slots = ctx.mat(*x, rows.start * k..rows.end * k);
                ops::moe::moe_combine(isa, slots, m(*weights), o(*out));
            }
        }
        if let (Some(quantize), Some(x)) = (&self.quantize, made) {
            quantize.run_on(ctx, rows, cols, x);
        }
    }
}

/// Copies rows into columns `at..` of `out`.
fn copy(x: Mat<'_>, mut out: MatMut<'_>, at: usize) {
    for i in 0..x.rows() {
        out.row_mut(i)[at..at + x.cols()].copy_from_slice(x.row(i));
    }
}

/// Rows of the token table, or of the batch's embeddings, times a scale.
fn embed(
    ctx: &Ctx<'_>,
    table: *const u8,
    format: Format,
    row_bytes: usize,
    scale: f32,
    rows: Range<usize>,
    mut out: MatMut<'_>,
) {
    for (i, t) in rows.enumerate() {
        let out = out.row_mut(i);
        match ctx.batch.input {
            Input::Tokens(tokens) => {
                // SAFETY: `Batch::check` bounds token ids by the table's rows.
                let row = unsafe { std::slice::from_raw_parts(table.add(tokens[t] as usize * row_bytes), row_bytes) };
                hanzo_gguf::formats::to_float(format, row, out);
                if scale != 1.0 {
                    out.iter_mut().for_each(|x| *x *= scale);
                }
            }
            // Embedding rows come as the first layer wants them: unscaled.
            Input::Embeddings(e) => out.copy_from_slice(&e[t * out.len()..(t + 1) * out.len()]),
        }
    }
}

// SAFETY: raw pointers into weights that outlive the executable and are never written.
unsafe impl Send for RowTask {}
// SAFETY: as above.
unsafe impl Sync for RowTask {}
