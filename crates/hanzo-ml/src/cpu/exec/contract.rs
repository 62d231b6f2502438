//! Contractions and the quantization of their inputs.
//!
//! An item is a range of output rows of one member, for all tokens; for experts, the same for one slot (few tokens) or
//! one expert (many, the expert with the most tokens first). Few tokens take the mat-vec kernel, many the GEMM.
//!
//! The output head reads its activations in two int8 terms, the second quantizing what the first left over: its error
//! goes straight into the logits, its rows are few, and both terms share one pass over the weights.

use super::Ctx;
use super::lower::is_int8;
use crate::backend::{CompileOptions, Precision};
use crate::cpu::contract::{self, ActBuf, ActKind, Acts, Contraction, Input, Job, Kernel, Scratch, Tokens, Weights};
use crate::cpu::isa::IsaLevel;
use crate::cpu::memory::{CpuWeights, Vector};
use crate::cpu::ops::moe;
use crate::error::{Error, Result};
use crate::plan::{DType, Dim, Member, Op, Plan, ValueId};
use hanzo_gguf::Format;
use std::ops::Range;

/// Tokens from which the GEMM is used: below, its packing costs more than the mat-vec's repeated unpacking.
const GEMM_TOKENS: usize = 5;
/// Items a thread (of each of many tokens' experts): enough to even out threads that lose time to others.
const ITEMS_A_THREAD: usize = 4;
/// The same for the GEMM, whose items last longer: what a thread does after all others have finished is at most an item.
const GEMM_ITEMS_A_THREAD: usize = 12;
/// The same for all slots of one member of a mixture: fewer, larger items, since each one's first rows come from memory unasked.
const SLOT_ITEMS_A_THREAD: usize = 8;
/// Output rows of an item in two terms, whose results are summed in the worker's memory.
const TWO_TERM_ROWS: usize = 1024;
/// Output rows of an item: not below what a claim is worth.
const ROW_UNIT: usize = 32;
/// The same for the GEMM: whole tiles, of any instruction set.
const TILE_UNIT: usize = 48;

/// The most memory that any task of an executable needs per worker.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Needs {
    /// Floats of attention and state ops.
    pub floats: usize,
    /// Floats of one head.
    pub head: usize,
    /// `(rows, columns)` bytes of privately quantized activations.
    fold_bytes: usize,
    kernel_bytes: usize,
    slots: usize,
    experts: usize,
}

/// A worker's own memory.
pub(super) struct WorkerScratch {
    floats: Vec<f32>,
    head: Vec<f32>,
    kernel: Scratch,
    /// Who left packed activations in `kernel` in this level.
    packed: Option<Packed>,
    acts: ActBuf,
    /// The value that `acts` holds in this level.
    folded: Option<ValueId>,
    /// The routing that `pairs` and `offsets` hold in this level, and whether x has one row a slot.
    sorted: Option<(ValueId, bool)>,
    order: Vec<u32>,
    offsets: Vec<u32>,
    pairs: Vec<(u32, u32)>,
    /// Experts by their number of slots, the most first.
    busiest: Vec<u32>,
}

/// Packed activations: of which task (its address), for which kernel, of which tokens (a row of x, an expert's, or all: 0).
#[derive(Clone, Copy)]
struct Packed {
    task: usize,
    kernel: Kernel,
    tokens: usize,
}

impl WorkerScratch {
    pub(super) fn new(n: &Needs) -> Result<WorkerScratch> {
        let mut kernel = Scratch::new();
        kernel.reserve(n.kernel_bytes);
        let mut acts = ActBuf::new();
        acts.planes(n.fold_bytes.div_ceil(32), 32);
        Ok(WorkerScratch {
            floats: vec![0.0; n.floats],
            head: vec![0.0; n.head],
            kernel,
            packed: None,
            acts,
            folded: None,
            sorted: None,
            order: vec![0; n.slots],
            offsets: vec![0; n.experts + 1],
            pairs: vec![(0, 0); n.slots],
            busiest: vec![0; n.experts],
        })
    }

    /// Forgets what belonged to the level before.
    pub(super) fn new_level(&mut self) {
        self.folded = None;
        self.sorted = None;
        self.packed = None;
    }

    /// Has `task` packed these tokens for this kernel? From now on it has.
    fn packed(&mut self, task: &ContractTask, kernel: Kernel, tokens: usize) -> bool {
        let task = std::ptr::from_ref(task).addr();
        let same = |p: Packed| p.task == task && p.tokens == tokens && std::ptr::fn_addr_eq(p.kernel, kernel);
        let before = self.packed.is_some_and(same);
        self.packed = Some(Packed { task, kernel, tokens });
        before
    }

    /// Scratch floats of attention and state ops.
    pub(super) fn floats(&mut self) -> &mut [f32] {
        &mut self.floats
    }

    /// Scratch for one head's row.
    pub(super) fn head_row(&mut self, n: usize) -> &mut [f32] {
        &mut self.head[..n]
    }
}

/// `Quantize`: an item is a block of rows, or a range of 32s of one row.
pub(super) struct QuantizeTask {
    x: ValueId,
    out: ValueId,
    cols: usize,
    quantize: contract::QuantizeRow,
}

impl QuantizeTask {
    pub(super) fn new(plan: &Plan, x: ValueId, out: ValueId, isa: IsaLevel) -> QuantizeTask {
        QuantizeTask { x, out, cols: plan.val(x).cols, quantize: contract::quantizer(isa) }
    }

    /// The value that is quantized.
    pub(super) fn input(&self) -> ValueId {
        self.x
    }

    /// Quantizes columns `cols` of rows `rows`, which lie in the worker's memory: row 0 at `x`, the next `cols.len()` further.
    pub(super) fn run_on(&self, ctx: &Ctx<'_>, rows: Range<usize>, cols: Range<usize>, x: *const f32) {
        let acts = Acts::at(ctx.ptr(self.out), ctx.rows(self.x), self.cols);
        let groups = cols.start / 32..cols.end / 32;
        for (i, row) in rows.enumerate() {
            // SAFETY: the caller has just made these rows; items write different groups of the planes.
            unsafe {
                let x = x.add(i * cols.len()).wrapping_sub(cols.start);
                (self.quantize)(&acts, row, groups.clone(), x);
            }
        }
    }

    fn block(&self) -> usize {
        (8192 / self.cols.max(1)).max(1)
    }

    pub(super) fn items(&self, rows: impl Fn(ValueId) -> usize) -> usize {
        rows(self.x).div_ceil(self.block())
    }

    pub(super) fn run(&self, ctx: &Ctx<'_>, item: usize) {
        let n = ctx.rows(self.x);
        let acts = Acts::at(ctx.ptr(self.out), n, self.cols);
        let rows = item * self.block()..((item + 1) * self.block()).min(n);
        let x = ctx.mat(self.x, rows.clone());
        for (i, row) in rows.enumerate() {
            // SAFETY: the row lies within both values; items write different rows.
            unsafe { (self.quantize)(&acts, row, 0..self.cols / 32, x.row(i).as_ptr()) };
        }
    }
}

/// One matrix of a contraction, bound.
struct BoundMember {
    data: *const u8,
    format: Format,
    row_bytes: usize,
    rows: usize,
    k: usize,
    expert_bytes: usize,
    bias: Option<Vector>,
    out: ValueId,
    matvec: Kernel,
    gemm: Kernel,
}

/// How the input reaches the kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    /// A quantized value.
    Q8,
    /// A float value that each worker quantizes for itself.
    Fold,
    /// As `Fold`, in two terms: row `2 r` of the planes is row `r` of x, row `2 r + 1` what is left of it.
    TwoTerm,
    /// A float value, read as it is.
    F32,
}

/// Experts of a mixture.
#[derive(Clone, Copy)]
struct Experts {
    ids: ValueId,
    /// Experts a token uses.
    k: usize,
    n: usize,
    /// x has one row a slot (else one a token).
    per_slot: bool,
}

/// `Linear`, `LinearGroup`, `MoeLinear` or `MoeLinearGroup`.
pub(super) struct ContractTask {
    x: ValueId,
    source: Source,
    experts: Option<Experts>,
    members: Vec<BoundMember>,
    threads: usize,
    deterministic: bool,
    quantize: contract::QuantizeRow,
}

// SAFETY: raw pointers into weights that outlive the executable and are never written.
unsafe impl Send for ContractTask {}
// SAFETY: as above.
unsafe impl Sync for ContractTask {}

impl ContractTask {
    pub(super) fn new(
        plan: &Plan,
        op: &Op,
        weights: &CpuWeights,
        options: &CompileOptions,
        isa: IsaLevel,
        threads: usize,
        needs: &mut Needs,
    ) -> Result<ContractTask> {
        let (x, ids) = match op {
            Op::Linear { x, .. } | Op::LinearGroup { x, .. } => (*x, None),
            Op::MoeLinear { x, ids, .. } | Op::MoeLinearGroup { x, ids, .. } => (*x, Some(*ids)),
            _ => return Err(Error::Unsupported { backend: "cpu", what: format!("{} is no contraction", op.kind()) }),
        };
        let value = plan.val(x);
        let max_rows = value.rows.eval(&options.bucket);
        let int8 = options.precision == Precision::Int8 && op.members().iter().all(|m| is_int8(plan, m));
        let source = match (value.dtype, int8) {
            (DType::Q8, _) => Source::Q8,
            (_, true) if value.rows == Dim::Out => Source::TwoTerm,
            (_, true) => Source::Fold,
            _ => Source::F32,
        };
        // The head's errors go straight into the logits: its activations stay f32.
        let rounds = options.precision == Precision::Int8
            && options.levers.on("bf16_activations")
            && contract::rounds_to_bf16(isa)
            && value.rows != Dim::Out;
        let terms = if source == Source::TwoTerm { 2 } else { 1 };
        if matches!(source, Source::Fold | Source::TwoTerm) {
            needs.fold_bytes = needs.fold_bytes.max(terms * max_rows * value.cols);
        }
        let experts = match (ids, op.members().first()) {
            (Some(ids), Some(m)) => {
                let k = plan.val(ids).cols;
                let n = plan.wt(m.w).experts;
                needs.slots = needs.slots.max(options.bucket.n_tokens * k);
                needs.experts = needs.experts.max(n);
                Some(Experts { ids, k, n, per_slot: value.rows == Dim::Slots(k) })
            }
            _ => None,
        };
        // Tokens of one kernel call at most: with experts, any may get every slot.
        let tokens = experts.map_or(terms * max_rows, |e| options.bucket.n_tokens * e.k);
        let mut members = Vec::with_capacity(op.members().len());
        for m in op.members() {
            members.push(bind(plan, m, weights, (source, rounds), isa, tokens, needs)?);
        }
        if source == Source::TwoTerm {
            let widest = members.iter().map(|m| m.rows).max().unwrap_or(0);
            needs.floats = needs.floats.max(tokens * widest.min(TWO_TERM_ROWS) + value.cols);
        }
        Ok(ContractTask {
            x,
            source,
            experts,
            members,
            threads,
            deterministic: options.deterministic,
            quantize: contract::quantizer(isa),
        })
    }

    /// Is this a step for the GEMM?
    fn many(&self, x_rows: usize) -> bool {
        let terms = if self.source == Source::TwoTerm { 2 } else { 1 };
        self.deterministic || terms * self.tokens(x_rows) >= GEMM_TOKENS
    }

    /// Tokens of the step.
    fn tokens(&self, x_rows: usize) -> usize {
        match self.experts {
            Some(e) if e.per_slot => x_rows / e.k,
            _ => x_rows,
        }
    }

    /// Output rows of an item. Each of the slots of a few tokens (else 0) has as many; few experts may get all of many.
    fn chunk(&self, m: &BoundMember, many: bool, slots: usize) -> usize {
        let unit = if many { TILE_UNIT } else { ROW_UNIT };
        let items = match (&self.experts, many) {
            (Some(_), false) => (self.threads * SLOT_ITEMS_A_THREAD).div_ceil(slots.max(1)),
            (None, true) => self.threads * GEMM_ITEMS_A_THREAD,
            _ => self.threads * ITEMS_A_THREAD,
        };
        let per = m.rows.div_ceil(items).next_multiple_of(unit);
        match self.source {
            Source::TwoTerm => per.min(TWO_TERM_ROWS),
            _ if self.threads == 1 => m.rows.max(1),
            _ => per,
        }
    }

    /// The slots of a step of few tokens with experts, else 0.
    fn slots(&self, x_rows: usize, many: bool) -> usize {
        self.experts.filter(|_| !many).map_or(0, |e| self.tokens(x_rows) * e.k)
    }

    fn chunks(&self, many: bool, slots: usize) -> usize {
        self.members.iter().map(|m| m.rows.div_ceil(self.chunk(m, many, slots))).sum()
    }

    pub(super) fn items(&self, rows: impl Fn(ValueId) -> usize) -> usize {
        let x_rows = rows(self.x);
        if x_rows == 0 {
            return 0;
        }
        let many = self.many(x_rows);
        let slots = self.slots(x_rows, many);
        let outer = match self.experts {
            None => 1,
            Some(e) if many => e.n,
            Some(_) => slots,
        };
        outer * self.chunks(many, slots)
    }

    pub(super) fn run(&self, ctx: &Ctx<'_>, item: usize, scratch: &mut WorkerScratch) {
        let x_rows = ctx.rows(self.x);
        let many = self.many(x_rows);
        let slots = self.slots(x_rows, many);
        let chunks = self.chunks(many, slots);
        let (outer, mut at) = (item / chunks, item % chunks);
        for m in &self.members {
            let chunk = self.chunk(m, many, slots);
            let n = m.rows.div_ceil(chunk);
            if at >= n {
                at -= n;
                continue;
            }
            let rows = at * chunk..((at + 1) * chunk).min(m.rows);
            match self.experts {
                None if self.source == Source::TwoTerm => self.two_term(ctx, m, rows, many, scratch),
                None => self.call(ctx, m, (0, 0), rows, Tokens::Dense { first: 0, count: x_rows }, many, scratch),
                Some(e) if many => {
                    self.sort(ctx, e, scratch);
                    let expert = scratch.busiest[outer] as usize;
                    let of = scratch.offsets[expert] as usize..scratch.offsets[expert + 1] as usize;
                    if of.is_empty() {
                        return;
                    }
                    let gemm = self.deterministic || of.len() >= GEMM_TOKENS;
                    let pairs = std::mem::take(&mut scratch.pairs);
                    self.call(ctx, m, (expert, expert), rows, Tokens::Pairs(&pairs[of]), gemm, scratch);
                    scratch.pairs = pairs;
                }
                Some(e) => {
                    let expert = ctx.ids(e.ids, 0..ctx.rows(e.ids))[outer] as usize;
                    let row = if e.per_slot { outer } else { outer / e.k };
                    let pair = [(row as u32, outer as u32)];
                    self.call(ctx, m, (expert, row), rows, Tokens::Pairs(&pair), false, scratch);
                }
            }
            return;
        }
    }

    /// Slots grouped by expert, in slot order within each: `(row of x, row of the output)`.
    fn sort(&self, ctx: &Ctx<'_>, e: Experts, scratch: &mut WorkerScratch) {
        if scratch.sorted == Some((e.ids, e.per_slot)) {
            return;
        }
        let ids = ctx.ids(e.ids, 0..ctx.rows(e.ids));
        moe::sort_by_expert(ids, &mut scratch.offsets[..e.n + 1], &mut scratch.order[..ids.len()]);
        for (pair, slot) in scratch.pairs.iter_mut().zip(&scratch.order[..ids.len()]) {
            *pair = (if e.per_slot { *slot } else { *slot / e.k as u32 }, *slot);
        }
        let WorkerScratch { busiest, offsets, .. } = scratch;
        let busiest = &mut busiest[..e.n];
        busiest.iter_mut().enumerate().for_each(|(i, expert)| *expert = i as u32);
        let slots = |expert: u32| offsets[expert as usize + 1] - offsets[expert as usize];
        busiest.sort_unstable_by_key(|expert| (std::cmp::Reverse(slots(*expert)), *expert));
        scratch.sorted = Some((e.ids, e.per_slot));
    }

    /// Output rows from activations in two terms: the kernel sees twice the tokens, and their results are summed.
    fn two_term(&self, ctx: &Ctx<'_>, m: &BoundMember, rows: Range<usize>, many: bool, scratch: &mut WorkerScratch) {
        let (tokens, cols, n) = (ctx.rows(self.x), ctx.cols(self.x), rows.len());
        let acts = scratch.acts.planes(2 * tokens, cols);
        if scratch.folded != Some(self.x) {
            let x = ctx.mat(self.x, 0..tokens);
            let rest = &mut scratch.floats[..cols];
            for row in 0..tokens {
                // SAFETY: the planes hold these rows and belong to this worker.
                unsafe {
                    (self.quantize)(&acts, 2 * row, 0..cols / 32, x.row(row).as_ptr());
                    for (i, (rest, x)) in rest.iter_mut().zip(x.row(row)).enumerate() {
                        let d = *acts.d.add(2 * row * (cols / 32) + i / 32);
                        *rest = x - d * f32::from(*acts.codes.add(2 * row * cols + i));
                    }
                    (self.quantize)(&acts, 2 * row + 1, 0..cols / 32, rest.as_ptr());
                }
            }
            scratch.folded = Some(self.x);
        }
        let kernel = if many { m.gemm } else { m.matvec };
        let packed = scratch.packed(self, kernel, 0);
        let sums = scratch.floats[..2 * tokens * n].as_mut_ptr();
        let mut job = Job {
            w: Weights { format: m.format, data: m.data, row_bytes: m.row_bytes, k: m.k },
            rows: rows.clone(),
            input: Input::Int8(acts),
            tokens: Tokens::Dense { first: 0, count: 2 * tokens },
            // Element `rows.start` of an output row is the first that is written.
            out: sums.wrapping_sub(rows.start),
            out_stride: n,
            bias: None,
            packed,
            scratch: &mut scratch.kernel,
        };
        // SAFETY: as in `call`; the sums are this worker's.
        unsafe { kernel(&mut job) }
        let mut out = ctx.part_mut(m.out, 0..tokens, rows.clone());
        for t in 0..tokens {
            let (a, b) = scratch.floats[2 * t * n..2 * (t + 1) * n].split_at(n);
            for (i, out) in out.row_mut(t).iter_mut().enumerate() {
                *out = a[i] + b[i] + m.bias.as_ref().map_or(0.0, |bias| bias.get()[rows.start + i]);
            }
        }
    }

    /// The quantized or float rows of x.
    fn input(&self, ctx: &Ctx<'_>, scratch: &mut WorkerScratch) -> Input {
        let (rows, cols) = (ctx.rows(self.x), ctx.cols(self.x));
        match self.source {
            Source::Q8 => Input::Int8(Acts::at(ctx.ptr(self.x), rows, cols)),
            Source::F32 => Input::F32 { data: ctx.ptr(self.x).cast_const().cast(), stride: cols },
            Source::Fold | Source::TwoTerm => {
                let acts = scratch.acts.planes(rows, cols);
                if scratch.folded != Some(self.x) {
                    let x = ctx.mat(self.x, 0..rows);
                    for row in 0..rows {
                        // SAFETY: the planes hold these rows and belong to this worker.
                        unsafe { (self.quantize)(&acts, row, 0..cols / 32, x.row(row).as_ptr()) };
                    }
                    scratch.folded = Some(self.x);
                }
                Input::Int8(acts)
            }
        }
    }

    /// Calls the kernel for tokens that have a number of their own among those of the task.
    #[allow(clippy::too_many_arguments)]
    fn call(
        &self,
        ctx: &Ctx<'_>,
        m: &BoundMember,
        (expert, number): (usize, usize),
        rows: Range<usize>,
        tokens: Tokens<'_>,
        gemm: bool,
        scratch: &mut WorkerScratch,
    ) {
        let input = self.input(ctx, scratch);
        let kernel = if gemm { m.gemm } else { m.matvec };
        let packed = scratch.packed(self, kernel, number);
        let mut job = Job {
            // SAFETY: the expert exists: ids come from a routing over `experts` of them.
            w: Weights {
                format: m.format,
                data: unsafe { m.data.add(expert * m.expert_bytes) },
                row_bytes: m.row_bytes,
                k: m.k,
            },
            rows,
            input,
            tokens,
            out: ctx.ptr(m.out).cast(),
            out_stride: m.rows,
            bias: m
                .bias
                .as_ref()
                .map(|b| b.ptr().wrapping_add(if self.experts.is_some() { expert * m.rows } else { 0 })),
            packed,
            scratch: &mut scratch.kernel,
        };
        // SAFETY: the kernel was looked up for this format, input and instruction set; weights, input and output are
        // valid for the job, and items write disjoint parts of the output.
        unsafe { kernel(&mut job) }
    }
}

fn bind(
    plan: &Plan,
    m: &Member,
    weights: &CpuWeights,
    (source, rounds): (Source, bool),
    isa: IsaLevel,
    tokens: usize,
    needs: &mut Needs,
) -> Result<BoundMember> {
    let w = plan.wt(m.w);
    let acts = match (source, w.format) {
        (Source::F32, Format::BF16) if rounds => ActKind::Bf16,
        (Source::F32, _) => ActKind::F32,
        _ => ActKind::Int8,
    };
    let kernel = |op: Contraction| {
        contract::kernel(op, w.format, acts, isa).ok_or_else(|| Error::Unsupported {
            backend: "cpu",
            what: format!("no {op:?} kernel for {} ({}) on {isa}", w.format, w.tensor),
        })
    };
    for op in [Contraction::MatVec, Contraction::Gemm] {
        needs.kernel_bytes = needs.kernel_bytes.max(contract::scratch_bytes(op, w.format, acts, isa, w.cols, tokens));
    }
    Ok(BoundMember {
        data: weights.ptr(m.w.0 as usize),
        format: w.format,
        row_bytes: w.row_bytes(),
        rows: w.rows,
        k: w.cols,
        expert_bytes: w.tensor_rows * w.row_bytes(),
        bias: m.bias.map(|b| weights.vector(b.0 as usize)),
        out: m.out,
        matvec: kernel(Contraction::MatVec)?,
        gemm: kernel(Contraction::Gemm)?,
    })
}
