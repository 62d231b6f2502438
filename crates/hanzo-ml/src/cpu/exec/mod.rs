//! The CPU executor: a compiled Plan walks its levels on a persistent thread pool.
//!
//! Each level's ops are cut into items (row ranges, heads, blocks of queries); workers claim items, each of its own part
//! first, and meet at a barrier. Nothing that changes per step is compiled in, and a step allocates nothing: buffers are sized for
//! the bucket at compile time.

mod attend;
mod claims;
mod contract;
mod lower;
mod rows;
mod state;
mod store;

use super::isa::IsaLevel;
use super::memory::{Buffer, CpuCache, CpuWeights};
use super::ops::{Mat, MatMut};
use super::pool::{Barrier, Pool};
use crate::backend::{Cache, CompileOptions, Executable, OpTime, Weights};
use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::plan::schedule::{ALIGN, Schedule};
use crate::plan::{DType, Op, Plan, Sizes, ValueId};
use attend::{AttendTask, Visible};
use claims::Claims;
use contract::{ContractTask, QuantizeTask, WorkerScratch};
use rows::RowTask;
use state::StateTask;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use store::{RopeTables, StoreTask};

/// What one op became.
enum Task {
    Rows(RowTask),
    Quantize(QuantizeTask),
    Contract(ContractTask),
    Store(StoreTask),
    Attend(AttendTask),
    State(StateTask),
}

/// A task with its place in the Plan and this step's number of items.
struct Slot {
    op: usize,
    task: Task,
    items: usize,
    /// Nanoseconds that workers spent in it, while profiling.
    busy: AtomicU64,
}

/// The tasks between two barriers.
struct Level {
    slots: Vec<Slot>,
    total: usize,
    /// Wall nanoseconds of the level, while profiling.
    wall: AtomicU64,
}

/// A worker's own memory; worker `w` alone touches entry `w`.
struct Workers(Vec<UnsafeCell<WorkerScratch>>);

// SAFETY: entry `w` is only touched by worker `w`, and runs of one executable do not overlap (`run` takes `&mut self`).
unsafe impl Sync for Workers {}

/// A Plan compiled for the CPU.
pub(super) struct CpuExecutable {
    plan: Plan,
    schedule: Schedule,
    levels: Vec<Level>,
    arena: Buffer,
    workers: Workers,
    claims: Claims,
    pool: Arc<Pool>,
    /// Keeps the memory alive that tasks point into.
    _weights: Arc<dyn Weights>,
    isa: IsaLevel,
    bucket: Sizes,
    ropes: RopeTables,
    visible: Visible,
    /// Physical row of each token, per page group.
    kv_slots: Vec<Vec<u32>>,
    profiling: bool,
    poison: bool,
    last: Sizes,
}

/// Everything an item may look at during a step.
struct Ctx<'a> {
    plan: &'a Plan,
    ranges: &'a [Range<usize>],
    arena: *mut u8,
    pub batch: &'a Batch<'a>,
    pub cache: &'a CpuCache,
    pub isa: IsaLevel,
    pub sizes: Sizes,
    /// Token rows of this chunk of the head.
    pub out_rows: &'a [u32],
    pub ropes: &'a RopeTables,
    pub visible: &'a Visible,
    pub kv_slots: &'a [Vec<u32>],
}

// SAFETY: the arena is shared between workers by the schedule: no two items of a level touch the same bytes unless both
// read them, and levels are separated by barriers (`Schedule::verify` is the proof).
unsafe impl Sync for Ctx<'_> {}

impl Ctx<'_> {
    /// The Plan as it runs.
    pub fn plan(&self) -> &Plan {
        self.plan
    }

    /// Rows of a value in this step.
    pub fn rows(&self, v: ValueId) -> usize {
        self.plan.val(v).rows.eval(&self.sizes)
    }

    /// Columns of a value.
    pub fn cols(&self, v: ValueId) -> usize {
        self.plan.val(v).cols
    }

    /// The value's first byte.
    pub fn ptr(&self, v: ValueId) -> *mut u8 {
        // SAFETY: the schedule's ranges lie within the arena.
        unsafe { self.arena.add(self.ranges[v.0 as usize].start) }
    }

    /// Rows of an f32 value, to read.
    pub fn mat(&self, v: ValueId, rows: Range<usize>) -> Mat<'_> {
        let cols = self.cols(v);
        self.part(v, rows, 0..cols)
    }

    /// Rows of an f32 value, to write.
    pub fn mat_mut(&self, v: ValueId, rows: Range<usize>) -> MatMut<'_> {
        let cols = self.cols(v);
        self.part_mut(v, rows, 0..cols)
    }

    /// Rows and columns of an f32 value, to read.
    pub fn part(&self, v: ValueId, rows: Range<usize>, cols: Range<usize>) -> Mat<'_> {
        debug_assert!(self.plan.val(v).dtype == DType::F32 && rows.end <= self.rows(v) && cols.end <= self.cols(v));
        let stride = self.cols(v);
        // SAFETY: within the value's range; the schedule keeps writers away.
        unsafe {
            let p = self.ptr(v).cast::<f32>().add(rows.start * stride + cols.start);
            Mat::from_raw(p, rows.len(), cols.len(), stride)
        }
    }

    /// Rows and columns of an f32 value, to write.
    pub fn part_mut(&self, v: ValueId, rows: Range<usize>, cols: Range<usize>) -> MatMut<'_> {
        debug_assert!(self.plan.val(v).dtype == DType::F32 && rows.end <= self.rows(v) && cols.end <= self.cols(v));
        let stride = self.cols(v);
        // SAFETY: within the value's range; items of one op write disjoint parts.
        unsafe {
            let p = self.ptr(v).cast::<f32>().add(rows.start * stride + cols.start);
            MatMut::from_raw(p, rows.len(), cols.len(), stride)
        }
    }

    /// Rows of an id value; ids are never negative.
    pub fn ids(&self, v: ValueId, rows: Range<usize>) -> &[u32] {
        debug_assert!(self.plan.val(v).dtype == DType::I32 && rows.end <= self.rows(v));
        let cols = self.cols(v);
        // SAFETY: as `part`.
        unsafe {
            let p = self.ptr(v).cast::<u32>().add(rows.start * cols);
            std::slice::from_raw_parts(p, rows.len() * cols)
        }
    }

    /// Rows of an id value, to write.
    #[allow(clippy::mut_from_ref)] // disjoint parts of the arena, as `part_mut`
    pub fn ids_mut(&self, v: ValueId, rows: Range<usize>) -> &mut [u32] {
        debug_assert!(self.plan.val(v).dtype == DType::I32 && rows.end <= self.rows(v));
        let cols = self.cols(v);
        // SAFETY: as `part_mut`.
        unsafe {
            let p = self.ptr(v).cast::<u32>().add(rows.start * cols);
            std::slice::from_raw_parts_mut(p, rows.len() * cols)
        }
    }
}

impl Task {
    fn items(&self, plan: &Plan, sizes: &Sizes, batch: &Batch<'_>) -> usize {
        let rows = |v: ValueId| plan.val(v).rows.eval(sizes);
        match self {
            Task::Rows(t) => t.items(plan, rows),
            Task::Quantize(t) => t.items(rows),
            Task::Contract(t) => t.items(rows),
            Task::Store(t) => t.items(sizes),
            Task::Attend(t) => t.items(batch),
            Task::State(t) => t.items(sizes),
        }
    }

    fn run(&self, ctx: &Ctx<'_>, item: usize, scratch: &mut WorkerScratch) {
        match self {
            Task::Rows(t) => t.run(ctx, item, scratch),
            Task::Quantize(t) => t.run(ctx, item),
            Task::Contract(t) => t.run(ctx, item, scratch),
            Task::Store(t) => t.run(ctx, item, scratch),
            Task::Attend(t) => t.run(ctx, item, scratch),
            Task::State(t) => t.run(ctx, item, scratch),
        }
    }
}

impl CpuExecutable {
    /// Compiles a Plan; see [`crate::backend::Backend::compile`].
    pub(super) fn new(
        plan: &Plan,
        options: &CompileOptions,
        weights: &Arc<dyn Weights>,
        pool: &Arc<Pool>,
        isa: IsaLevel,
    ) -> Result<CpuExecutable> {
        let unsupported = |what: String| Error::Unsupported { backend: "cpu", what };
        let Some(bound) = weights.as_any().downcast_ref::<CpuWeights>() else {
            return Err(unsupported("these weights were loaded by another backend".into()));
        };
        let plan = lower::lower(plan, options);
        plan.check()?;
        let leader = lower::leaders(&plan, options);
        let mut schedule = Schedule::fused(&plan, &options.bucket, &leader);
        debug_assert_eq!(schedule.verify_fused(&plan, &leader), Ok(()));
        // The quantization that runs inside an op.
        let mut inside: Vec<Option<QuantizeTask>> = plan.ops.iter().map(|_| None).collect();
        for (i, op) in plan.ops.iter().enumerate() {
            if let Op::Quantize { x, out } = op
                && leader[i] != i
            {
                inside[leader[i]] = Some(QuantizeTask::new(&plan, *x, *out, isa));
            }
        }
        if let Some(shift) = options.eager {
            let shift = shift as usize * ALIGN;
            schedule.ranges.iter_mut().for_each(|r| *r = r.start + shift..r.end + shift);
            schedule.arena_bytes += shift;
        }
        let ropes = RopeTables::new(&plan, bound, options.bucket.n_tokens);
        let mut needs = contract::Needs::default();
        let mut levels = Vec::with_capacity(schedule.levels.len());
        for ops in &schedule.levels {
            let mut slots = Vec::with_capacity(ops.len());
            for &i in ops.iter().filter(|i| leader[**i] == **i) {
                let op = &plan.ops[i];
                let quantize = inside[i].take();
                let no_kernel = || unsupported(format!("op {} has no CPU kernel", op.kind()));
                let task = match op {
                    Op::Quantize { x, out } => Task::Quantize(QuantizeTask::new(&plan, *x, *out, isa)),
                    Op::Linear { .. } | Op::LinearGroup { .. } | Op::MoeLinear { .. } | Op::MoeLinearGroup { .. } => {
                        Task::Contract(ContractTask::new(&plan, op, bound, options, isa, pool.threads(), &mut needs)?)
                    }
                    Op::KvStore { .. } | Op::Rope { .. } | Op::QkNormRope { .. } => {
                        let task = StoreTask::new(&plan, op, bound, &ropes, pool.threads(), &mut needs);
                        Task::Store(task.ok_or_else(no_kernel)?)
                    }
                    Op::Attention { q, spec, out } => {
                        let task =
                            AttendTask::new(*q, spec, *out, bound, options.precision, pool.threads(), &mut needs);
                        Task::Attend(match quantize {
                            Some(q) => task.quantizing(q, &mut needs),
                            None => task,
                        })
                    }
                    Op::ShortConv { .. } | Op::GatedDelta { .. } => {
                        Task::State(StateTask::new(&plan, op, bound, options, &mut needs).ok_or_else(no_kernel)?)
                    }
                    op => {
                        let task = RowTask::new(&plan, op, bound, pool.threads(), &mut needs).ok_or_else(no_kernel)?;
                        Task::Rows(match quantize {
                            Some(q) => task.quantizing(q, &plan, &mut needs),
                            None => task,
                        })
                    }
                };
                slots.push(Slot { op: i, task, items: 0, busy: AtomicU64::new(0) });
            }
            levels.push(Level { slots, total: 0, wall: AtomicU64::new(0) });
        }
        let workers = (0..pool.threads()).map(|_| Ok(UnsafeCell::new(WorkerScratch::new(&needs)?)));
        let workers = Workers(workers.collect::<Result<_>>()?);
        let kv_slots = plan.groups.iter().map(|_| vec![0; options.bucket.n_tokens]).collect();
        Ok(CpuExecutable {
            arena: Buffer::new(schedule.arena_bytes)?,
            plan,
            schedule,
            levels,
            workers,
            claims: Claims::new(pool.threads()),
            pool: Arc::clone(pool),
            _weights: Arc::clone(weights),
            isa,
            bucket: options.bucket,
            ropes,
            visible: Visible::new(options.bucket.n_tokens),
            kv_slots,
            profiling: false,
            poison: false,
            last: Sizes::default(),
        })
    }

    /// Counts the items of levels `range` for these sizes; none of them is claimed.
    fn prepare(&mut self, range: Range<usize>, sizes: &Sizes, batch: &Batch<'_>) {
        for level in &mut self.levels[range] {
            level.total = 0;
            for s in &mut level.slots {
                s.items = s.task.items(&self.plan, sizes, batch);
                level.total += s.items;
            }
        }
        self.claims.rewind();
    }

    /// Runs levels `range` on all workers.
    fn walk(&self, range: Range<usize>, ctx: &Ctx<'_>) {
        let levels = &self.levels[range];
        let profiling = self.profiling;
        self.pool.run(&|worker: usize, barrier: &Barrier| {
            // SAFETY: worker `worker`'s own entry; see `Workers`.
            let scratch = unsafe { &mut *self.workers.0[worker].get() };
            for (l, level) in levels.iter().enumerate() {
                let start = profiling.then(Instant::now);
                scratch.new_level();
                for mut item in self.claims.items(l, worker, level.total) {
                    for s in &level.slots {
                        if item < s.items {
                            let t = profiling.then(Instant::now);
                            s.task.run(ctx, item, scratch);
                            if let Some(t) = t {
                                s.busy.fetch_add(t.elapsed().as_nanos() as u64, Ordering::Relaxed);
                            }
                            break;
                        }
                        item -= s.items;
                    }
                }
                if l + 1 < levels.len() {
                    barrier.wait();
                }
                if worker == 0
                    && let Some(t) = start
                {
                    level.wall.fetch_add(t.elapsed().as_nanos() as u64, Ordering::Relaxed);
                }
            }
        });
    }

    /// Fills the arena with NaN, inputs aside.
    fn fill_with_nan(&mut self) {
        let mut keep: Vec<Range<usize>> =
            self.plan.inputs.iter().map(|v| self.schedule.ranges[v.0 as usize].clone()).collect();
        keep.sort_by_key(|r| r.start);
        let bytes = self.arena.bytes_mut();
        let mut at = 0;
        for r in keep {
            bytes[at..r.start].fill(0xff);
            at = r.end;
        }
        bytes[at..].fill(0xff);
    }

    fn known(&self, v: ValueId) -> Result<&crate::plan::Value> {
        match self.plan.values.get(v.0 as usize) {
            Some(x) if self.plan.inputs.contains(&v) || self.plan.outputs.contains(&v) => Ok(x),
            Some(x) => Err(Error::Batch(format!("{} is neither an input nor an output", x.name))),
            None => Err(Error::Batch(format!("value {} does not exist", v.0))),
        }
    }
}

impl Executable for CpuExecutable {
    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn barriers(&self) -> usize {
        // The last level ends at the pool's own barrier.
        self.levels.len()
    }

    fn arena_bytes(&self) -> usize {
        self.arena.len()
    }

    fn value_mut(&mut self, v: ValueId) -> Result<&mut [f32]> {
        let x = self.known(v)?;
        let n = x.rows.eval(&self.bucket) * x.dtype.row_bytes(x.cols) / 4;
        // SAFETY: the value's range of the arena; `self` is borrowed exclusively.
        Ok(unsafe {
            std::slice::from_raw_parts_mut(self.arena.ptr().add(self.schedule.ranges[v.0 as usize].start).cast(), n)
        })
    }

    fn value(&self, v: ValueId) -> Result<&[f32]> {
        let x = self.known(v)?;
        let n = x.rows.eval(&self.last) * x.dtype.row_bytes(x.cols) / 4;
        // SAFETY: the value's range of the arena; nothing runs while `self` is borrowed.
        Ok(unsafe {
            std::slice::from_raw_parts(self.arena.ptr().add(self.schedule.ranges[v.0 as usize].start).cast(), n)
        })
    }

    fn run(&mut self, batch: &Batch<'_>, cache: &mut dyn Cache, sink: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
        let mut sizes = batch.sizes();
        if sizes.n_tokens > self.bucket.n_tokens || sizes.n_seqs > self.bucket.n_seqs {
            return Err(Error::Batch(format!("a step of {sizes:?} in an executable for {:?}", self.bucket)));
        }
        let Some(cache) = cache.as_any_mut().downcast_mut::<CpuCache>() else {
            return Err(Error::Unsupported { backend: "cpu", what: "this cache belongs to another backend".into() });
        };
        if cfg!(debug_assertions) {
            batch.check(&self.plan, usize::MAX, cache.pages(), cache.slots())?;
        }
        if self.poison {
            self.fill_with_nan();
        }
        store::fill_slots(&mut self.kv_slots, batch);
        self.visible.fill(batch);
        self.ropes.fill(batch);
        if self.profiling {
            for l in &mut self.levels {
                *l.wall.get_mut() = 0;
                l.slots.iter_mut().for_each(|s| *s.busy.get_mut() = 0);
            }
        }
        let (depth, head) = (self.levels.len(), self.schedule.head);
        let chunk = self.bucket.n_out.max(1);
        let mut first = 0;
        loop {
            let out_rows = &batch.out_rows[first..(first + chunk).min(batch.out_rows.len())];
            sizes.n_out = out_rows.len();
            let from = if first == 0 { 0 } else { head };
            // A step without output rows ends where the head begins.
            let to = if self.plan.head.is_some() && out_rows.is_empty() { head } else { depth };
            self.prepare(from..to, &sizes, batch);
            let ctx = Ctx {
                plan: &self.plan,
                ranges: &self.schedule.ranges,
                arena: self.arena.ptr(),
                batch,
                cache,
                isa: self.isa,
                sizes,
                out_rows,
                ropes: &self.ropes,
                visible: &self.visible,
                kv_slots: &self.kv_slots,
            };
            self.walk(from..to, &ctx);
            self.last = sizes;
            if let Some(v) = self.plan.outputs.last()
                && (to == depth)
            {
                sink(first, self.value(*v)?);
            }
            first += out_rows.len();
            if first >= batch.out_rows.len() {
                return Ok(());
            }
        }
    }

    fn profile(&self) -> Vec<OpTime> {
        let mut out = Vec::new();
        for level in &self.levels {
            let busy: u64 = level.slots.iter().map(|s| s.busy.load(Ordering::Relaxed)).sum();
            let wall = level.wall.load(Ordering::Relaxed) as f64 * 1e-9;
            for s in &level.slots {
                // A level's wall time goes to its ops by the time workers spent in each.
                let share = if busy == 0 { 0.0 } else { s.busy.load(Ordering::Relaxed) as f64 / busy as f64 };
                let op = &self.plan.ops[s.op];
                let name = op.writes().first().map_or(String::new(), |v| self.plan.val(*v).name.clone());
                out.push(OpTime { op: s.op, name: format!("{} {name}", op.kind()), seconds: wall * share });
            }
        }
        out
    }

    fn set_profile(&mut self, on: bool) {
        self.profiling = on;
    }

    fn set_poison(&mut self, on: bool) {
        self.poison = on;
    }
}
