//! Lowering: a Plan to a [`Program`] of kernel launches.
//!
//! Levers rewrite the Plan; contractions over block formats get their activations quantized by an op of its own; ops that
//! one kernel runs together are fused (`fuse`); then each op's file turns it into launches. The order is the schedule's:
//! level by level, so that launches that need no barrier between them stand together.

mod attention;
#[cfg(test)]
mod fixtures;
mod fold;
mod fuse;
pub mod levered;
mod linear;
mod matvec_group;
mod matvec_norm;
mod moe_linear;
mod one_row;
mod prefetch;
mod recurrent;
mod rope;
mod route;
mod rows;
mod tiles;
#[cfg(test)]
mod tiles_tests;
pub mod variants;

use super::barriers::{barriers, verify};
use super::launch::{Buffer, Features, Launch, Program, Ptr};
use super::step::StepLayout;
use crate::backend::{CompileOptions, Precision};
use crate::error::{Error, Result};
use crate::levers;
use crate::plan::schedule::Schedule;
use crate::plan::{Access, CacheSlot, DType, Dim, Member, Op, Plan, StateId, ValueId, WeightId};
use hanzo_gguf::Format;
use hanzo_kernels::args::{Args, Field, Fill, Weight};
use std::collections::HashMap;

/// Lowers a checked Plan. `vector` gives the elements of an f32 weight on the host.
pub fn program(
    plan: &Plan,
    options: &CompileOptions,
    features: &Features,
    vector: &dyn Fn(WeightId) -> Option<Vec<f32>>,
) -> Result<Program> {
    let one = one_row::without_gather(plan, options);
    let plan = quantized(&levers::rewrite(one.as_ref().unwrap_or(plan), options.levers), options);
    let features = &features.within(options.levers);
    let leader = fuse::leaders(&plan, options, features);
    let schedule = Schedule::fused(&plan, &options.bucket, &leader);
    let step = StepLayout::new(&plan, options.bucket, options.n_ctx, vector)?;
    let mut cx = Lowering {
        plan: &plan,
        options,
        features,
        schedule: &schedule,
        step: &step,
        leader: &leader,
        launches: Vec::new(),
        op: 0,
        arena_bytes: schedule.arena_bytes as u64,
        scratch: HashMap::new(),
        zeroed: Vec::new(),
    };
    let mut head = None;
    for (level, ops) in schedule.levels.iter().enumerate() {
        if level >= schedule.head && head.is_none() {
            head = Some(cx.launches.len());
        }
        for &op in ops.iter().filter(|op| leader[**op] == **op) {
            cx.op = op;
            cx.lower(&plan.ops[op])?;
        }
    }
    let head = head.map_or(cx.launches.len() + cx.zeroed.len(), |h| h + cx.zeroed.len());
    cx.zero()?;
    let (launches, arena_bytes) = (cx.launches, cx.arena_bytes);
    let fault = |what| Error::Unsupported { backend: "gpu", what };
    let (launches, head) = prefetch::add(&plan, options, features, launches, head).map_err(fault)?;
    let barriers = barriers(&launches, head);
    debug_assert_eq!(verify(&launches, &barriers, head), Ok(()));
    Ok(Program { schedule, arena_bytes, launches, barriers, head, step, plan })
}

/// Is the weight a matrix in device layout (of a contraction or an embedding)? Any other is uploaded as plain f32.
pub fn is_matrix(plan: &Plan, w: WeightId) -> bool {
    plan.ops.iter().any(|op| match op {
        Op::Embed { table, .. } => *table == w,
        op => op.members().iter().any(|m| m.w == w),
    })
}

/// Gives every contraction of a block format its quantized input, unless the precision is exact.
fn quantized(plan: &Plan, options: &CompileOptions) -> Plan {
    let mut p = plan.clone();
    if options.precision == Precision::Exact {
        return p;
    }
    let (old_head, mut head) = (p.head, None);
    let mut made: HashMap<ValueId, ValueId> = HashMap::new();
    for (i, op) in std::mem::take(&mut p.ops).into_iter().enumerate() {
        if old_head == Some(i) {
            head = Some(p.ops.len());
        }
        let (x, ids) = match &op {
            Op::Linear { x, .. } | Op::LinearGroup { x, .. } => (*x, None),
            Op::MoeLinear { x, ids, .. } | Op::MoeLinearGroup { x, ids, .. } => (*x, Some(*ids)),
            _ => {
                p.ops.push(op);
                continue;
            }
        };
        let (int8, float): (Vec<Member>, Vec<Member>) = op.members().iter().partition(|m| p.wt(m.w).format.is_block());
        p.contraction(x, ids, float);
        if int8.is_empty() {
            continue;
        }
        // The head's rows are quantized in two terms, which its own lowering does in scratch.
        if p.val(x).rows == Dim::Out {
            p.contraction(x, ids, int8);
            continue;
        }
        let q = match made.get(&x) {
            Some(q) => *q,
            None => {
                let (name, rows, cols) = (format!("{}.q8", p.val(x).name), p.val(x).rows, p.val(x).cols);
                let q = p.typed_value(name, rows, cols, DType::Q8);
                p.push(Op::Quantize { x, out: q });
                made.insert(x, q);
                q
            }
        };
        p.contraction(q, ids, int8);
    }
    p.head = head;
    p
}

/// The pointers of quantized activations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Q8 {
    /// Codes, `cols` bytes a row.
    pub q: Ptr,
    /// f32 per 32.
    pub d: Ptr,
    /// Two i16 sums per 32.
    pub s: Ptr,
}

/// A Plan being lowered. Op files add launches through it.
pub(crate) struct Lowering<'a> {
    pub plan: &'a Plan,
    pub options: &'a CompileOptions,
    pub features: &'a Features,
    pub step: &'a StepLayout,
    schedule: &'a Schedule,
    leader: &'a [usize],
    launches: Vec<Launch>,
    /// The op being lowered.
    pub op: usize,
    arena_bytes: u64,
    scratch: HashMap<&'static str, Ptr>,
    /// Scratch that is zero when a step begins.
    zeroed: Vec<Ptr>,
}

impl Lowering<'_> {
    fn lower(&mut self, op: &Op) -> Result<()> {
        if fold::lower(self, op)? {
            return Ok(());
        }
        let done = match op {
            Op::Linear { .. } | Op::LinearGroup { .. } | Op::Quantize { .. } => linear::lower(self, op)?,
            Op::MoeLinear { .. } | Op::MoeLinearGroup { .. } | Op::MoeCombine { .. } => moe_linear::lower(self, op)?,
            Op::Rope { .. } | Op::KvStore { .. } | Op::QkNormRope { .. } => rope::lower(self, op)?,
            Op::Attention { .. } => attention::lower(self, op)?,
            Op::RouteScores { .. } | Op::RouteTopK { .. } | Op::RouteNormalise { .. } | Op::MoeRoute { .. } => {
                route::lower(self, op)?
            }
            Op::ShortConv { .. } | Op::GatedDelta { .. } => recurrent::lower(self, op)?,
            _ => rows::lower(self, op)?,
        };
        if done {
            return Ok(());
        }
        let what = format!("no kernel for {} yet; run it on the CPU (-ot or -ngl)", op.kind());
        Err(Error::Unsupported { backend: "gpu", what })
    }

    /// The ops that run inside the one being lowered, in the Plan's order (see [`fuse`]).
    pub fn followers(&self) -> impl Iterator<Item = &Op> + '_ {
        let parts = self.leader.iter().enumerate().filter(|(i, l)| **l == self.op && *i != self.op);
        parts.map(|(i, _)| &self.plan.ops[i])
    }

    /// The most rows of a value in this bucket.
    pub fn max_rows(&self, v: ValueId) -> usize {
        self.plan.val(v).rows.eval(&self.options.bucket)
    }

    /// Columns of a value.
    pub fn cols(&self, v: ValueId) -> usize {
        self.plan.val(v).cols
    }

    /// The word that holds the number of rows in use of a value: kernels mask rows at and beyond it.
    pub fn live(&self, v: ValueId) -> Ptr {
        self.step.live(self.plan.val(v).rows)
    }

    /// All bytes of a value for the bucket, row-major. For f32 and i32 values.
    pub fn value(&self, v: ValueId) -> Ptr {
        let range = &self.schedule.ranges[v.0 as usize];
        let x = self.plan.val(v);
        let len = x.rows.eval(&self.options.bucket) * x.dtype.row_bytes(x.cols);
        Ptr { buffer: Buffer::Arena, offset: range.start as u64, len: len as u64 }
    }

    /// The planes of a Q8 value.
    pub fn q8(&self, v: ValueId) -> Q8 {
        let range = &self.schedule.ranges[v.0 as usize];
        let all = Ptr { buffer: Buffer::Arena, offset: range.start as u64, len: (range.end - range.start) as u64 };
        Lowering::planes(all, self.max_rows(v), self.cols(v))
    }

    /// Planes of `rows` rows of `cols` quantized activations laid out in a run of bytes.
    pub fn planes(all: Ptr, rows: usize, cols: usize) -> Q8 {
        let (codes, groups) = ((rows * cols) as u64, (rows * cols / 32) as u64);
        let d = codes.next_multiple_of(64);
        let s = d + (4 * groups).next_multiple_of(64);
        Q8 { q: all.part(0, codes), d: all.part(d, 4 * groups), s: all.part(s, 4 * groups) }
    }

    /// Bytes that [`Lowering::planes`] needs.
    pub fn planes_bytes(rows: usize, cols: usize) -> u64 {
        let (codes, groups) = ((rows * cols) as u64, (rows * cols / 32) as u64);
        codes.next_multiple_of(64) + 2 * (4 * groups).next_multiple_of(64)
    }

    /// A matrix in device layout.
    pub fn weight(&self, w: WeightId) -> Result<Weight<Ptr>> {
        let x = self.plan.wt(w);
        let layout = hanzo_kernels::layout(x.format, x.experts * x.rows, x.cols).ok_or_else(|| {
            let what = format!("no {} kernels for rows of {} columns", x.format, x.cols);
            Error::Weight { name: x.tensor.clone(), what }
        })?;
        let base = Ptr { buffer: Buffer::Weight(w), offset: 0, len: layout.bytes };
        Ok(Weight { base, planes: layout.planes(), table: tables(x.format) })
    }

    /// One power of two a row of a matrix (op `row_scale`), on devices with matrix units.
    pub fn row_scales(&self, w: WeightId) -> Result<Ptr> {
        let x = self.plan.wt(w);
        let base = self.weight(w)?.base;
        Ok(Ptr { offset: base.len, len: 4 * (x.experts * x.rows) as u64, ..base })
    }

    /// A vector (or any weight that is no matrix): plain f32, `[experts, rows, cols]`.
    pub fn vector(&self, w: WeightId) -> Ptr {
        let x = self.plan.wt(w);
        Ptr { buffer: Buffer::Weight(w), offset: 0, len: 4 * (x.experts * x.rows * x.cols) as u64 }
    }

    /// As [`Lowering::vector`], or no pointer.
    pub fn optional_vector(&self, w: Option<WeightId>) -> Ptr {
        w.map_or(Ptr::NONE, |w| self.vector(w))
    }

    /// A layer's keys and values, `[page][n_kv][PAGE][d]` each; no values where they are part of the keys (MLA).
    pub fn cache(&self, slot: CacheSlot) -> (Ptr, Ptr) {
        let g = slot.group.0;
        let whole = |buffer| Ptr { buffer, offset: 0, len: Ptr::WHOLE };
        let none = self.plan.groups[g as usize].d_v == 0;
        let v = if none { Ptr::NONE } else { whole(Buffer::Values(g, slot.layer)) };
        (whole(Buffer::Keys(g, slot.layer)), v)
    }

    /// A layer's states, `[slots][elements]` f32.
    pub fn state(&self, state: StateId, layer: u32) -> Ptr {
        Ptr { buffer: Buffer::State(state.0, layer), offset: 0, len: Ptr::WHOLE }
    }

    /// Scratch of at least `bytes` bytes. The same label gives the same bytes to every op: barriers keep uses apart.
    pub fn scratch(&mut self, label: &'static str, bytes: u64) -> Ptr {
        let bytes = bytes.next_multiple_of(256);
        if let Some(p) = self.scratch.get(label)
            && p.len >= bytes
        {
            return p.part(0, bytes);
        }
        let offset = self.arena_bytes.next_multiple_of(256);
        let p = Ptr { buffer: Buffer::Arena, offset, len: bytes };
        self.arena_bytes = offset + bytes;
        self.scratch.insert(label, p);
        p
    }

    /// Has a run of scratch zero when a step begins. Kernels leave it zero for those that follow.
    pub fn zeroed(&mut self, p: Ptr) {
        if !self.zeroed.contains(&p) {
            self.zeroed.push(p);
        }
    }

    /// Puts the launches in front that zero such runs. They wait for nothing, and the step's first barrier is theirs too.
    fn zero(&mut self) -> Result<()> {
        let runs = std::mem::take(&mut self.zeroed);
        let behind = std::mem::take(&mut self.launches);
        self.op = 0;
        for y in runs {
            let count = (y.len / 4) as u32;
            self.launch(None, &Fill { y, value: 0, count }, &[], [count.div_ceil(256), 1, 1])?;
        }
        self.launches.extend(behind);
        Ok(())
    }

    /// Adds a launch of the kernel of `A`.
    pub fn launch<A: Args<Ptr>>(
        &mut self,
        format: Option<Format>,
        args: &A,
        set: &[(&str, u32)],
        groups: [u32; 3],
    ) -> Result<()> {
        // A step of one token has no rows to mask, and a word less to wait for. (Not in `matvec`: measured slower there.)
        let mut set = set.to_vec();
        let mut known = None;
        args.fields(&mut |_, field| {
            if let Field::Read(p) = field {
                known = known.or(self.step.known_rows(p));
            }
        });
        if let Some(rows) = known {
            for (name, _) in hanzo_kernels::constants(A::OP) {
                let value = match name.as_str() {
                    "LIVE" if A::OP != "matvec" => rows as u32,
                    "MASK" => 0,
                    _ => continue,
                };
                set.retain(|s| s.0 != name);
                set.push(if name == "LIVE" { ("LIVE", value) } else { ("MASK", value) });
            }
        }
        let launch = Launch::new(self.op, format, self.features, args, &set, groups).map_err(|what| Error::Plan {
            index: self.op,
            op: self.plan.ops[self.op].kind(),
            what,
        })?;
        self.launches.push(launch);
        Ok(())
    }
}

/// Where the codebook of a format lies among all of them.
fn tables(format: Format) -> Ptr {
    let mut offset = 0;
    for (name, words) in codebooks() {
        let len = 4 * words.len() as u64;
        if hanzo_kernels::format_file(format).and_then(|f| f.table.as_deref()) == Some(name) {
            return Ptr { buffer: Buffer::Tables, offset, len };
        }
        offset += len.next_multiple_of(16);
    }
    Ptr { buffer: Buffer::Tables, offset: 0, len: 0 }
}

/// Where the codebook of a format begins in [`Buffer::Tables`]; 0 for a format without one.
pub fn table_offset(format: Format) -> u64 {
    tables(format).offset
}

/// Every codebook that a format uses, by name, in the order of [`Buffer::Tables`]: each begins at a multiple of 16 bytes.
pub fn codebooks() -> Vec<(&'static str, Vec<u32>)> {
    let mut all: Vec<(&'static str, Vec<u32>)> = Vec::new();
    for (_, file) in hanzo_kernels::formats() {
        if let Some(name) = file.table.as_deref()
            && all.iter().all(|t| t.0 != name)
        {
            all.push((name, hanzo_kernels::tables::codebook(name)));
        }
    }
    all
}

/// What an op touches in values, for [`fuse`].
fn values(op: &Op, write: bool) -> Vec<ValueId> {
    let mut v = Vec::new();
    op.accesses(&mut |a| match a {
        Access::Read(x) if !write => v.push(x),
        Access::Write(x) if write => v.push(x),
        _ => {}
    });
    v
}
