//! A split Plan that runs: the segments in order, each on its backend, with the values that cross copied in between.

use super::cache::SplitCache;
use super::cut::{Cut, Feed, Part, Source};
use crate::backend::{Cache, Executable, OpTime, StepReport};
use crate::batch::{Batch, GroupTables};
use crate::error::{Error, Result};
use crate::plan::{Op, Plan, Sizes, ValueId};
use std::collections::HashMap;

/// The most page groups of one Plan.
const MAX_GROUPS: usize = 8;

/// A segment, compiled.
struct Running {
    executable: Box<dyn Executable>,
    part: usize,
    feeds: Vec<Feed>,
    /// Index of its first op in the joined Plan.
    first_op: usize,
}

/// The compiled segments.
pub(super) struct SplitExecutable {
    /// All of them joined, for people and profiles.
    plan: Plan,
    segments: Vec<Running>,
    /// The first segment of the head; see [`Cut::head`].
    head: usize,
    /// The last segment runs the chunks of the head itself.
    own_chunks: bool,
    /// What the caller sets.
    inputs: Vec<(ValueId, Vec<f32>)>,
    /// Where the outputs are.
    outputs: HashMap<ValueId, Source>,
    tables: Tables,
    bucket: Sizes,
}

/// Which of a step's block tables and state slots a part gets.
struct Tables {
    groups: Vec<Vec<u16>>,
    states: Vec<Vec<u16>>,
    /// State slots of the segment that runs.
    slots: Vec<u32>,
}

impl Tables {
    /// A part's own view of a step.
    fn with<T>(
        &mut self,
        part: usize,
        batch: &Batch<'_>,
        out_rows: &[u32],
        f: impl FnOnce(&Batch<'_>) -> Result<T>,
    ) -> Result<T> {
        let mut groups = [GroupTables::default(); MAX_GROUPS];
        for (to, g) in groups.iter_mut().zip(&self.groups[part]) {
            *to = *batch.groups.get(usize::from(*g)).ok_or_else(|| Error::Batch(format!("no block table {g}")))?;
        }
        let n_seqs = batch.seq_offsets.len().saturating_sub(1);
        self.slots.clear();
        for s in &self.states[part] {
            let at = usize::from(*s) * n_seqs;
            let slots = batch.state_slots.get(at..at + n_seqs);
            self.slots.extend_from_slice(slots.ok_or_else(|| Error::Batch(format!("no slots of state {s}")))?);
        }
        f(&Batch { groups: &groups[..self.groups[part].len()], state_slots: &self.slots, out_rows, ..*batch })
    }
}

impl SplitExecutable {
    /// Joins the compiled segments of a cut Plan.
    pub(super) fn new(cut: Cut, executables: Vec<Box<dyn Executable>>, bucket: Sizes) -> Result<SplitExecutable> {
        if cut.plan.groups.len() > MAX_GROUPS {
            let what = format!("{} page groups, at most {MAX_GROUPS} can be split", cut.plan.groups.len());
            return Err(Error::Unsupported { backend: "split", what });
        }
        let ids = |list: &[(u16, Vec<u32>)]| -> Vec<u16> { list.iter().map(|(id, _)| *id).collect() };
        let n_slots = cut.parts.iter().map(|p| p.states.len()).max().unwrap_or(0) * bucket.n_seqs;
        let tables = Tables {
            groups: cut.parts.iter().map(|p| ids(&p.groups)).collect(),
            states: cut.parts.iter().map(|p| ids(&p.states)).collect(),
            slots: Vec::with_capacity(n_slots),
        };
        let room = |v: &ValueId| {
            let x = cut.plan.val(*v);
            (*v, vec![0.0; x.dtype.row_bytes(x.cols) / 4 * x.rows.eval(&bucket)])
        };
        let mut outputs: HashMap<ValueId, Source> = cut.plan.inputs.iter().map(|v| (*v, Source::Host)).collect();
        for (i, s) in cut.segments.iter().enumerate() {
            outputs.extend(s.plan.outputs.iter().map(|v| (*v, Source::Segment(i))));
        }
        outputs.retain(|v, _| cut.plan.outputs.contains(v) || cut.plan.inputs.contains(v));
        let inputs = cut.plan.inputs.iter().map(room).collect();
        let mut segments: Vec<Running> = (cut.segments.into_iter().zip(executables))
            .map(|(s, executable)| Running { executable, part: s.part, feeds: s.feeds, first_op: 0 })
            .collect();
        let own_chunks = cut.plan.head.is_some() && cut.head == segments.len();
        let plan = join(cut.plan, &cut.parts, &mut segments, cut.head);
        Ok(SplitExecutable { plan, segments, head: cut.head, own_chunks, inputs, outputs, tables, bucket })
    }

    /// Gives segment `i` what it reads of others; of the head's values if `head`, of the body's if not.
    fn feed(&mut self, i: usize, head: bool, sizes: &Sizes) -> Result<()> {
        let (before, rest) = self.segments.split_at_mut(i);
        let Some(to) = rest.first_mut() else { return Ok(()) };
        let Running { executable, feeds, .. } = to;
        for f in feeds.iter() {
            let from = match f.from {
                Source::Host if !head => {
                    let x = self.plan.val(f.x);
                    let n = x.dtype.row_bytes(x.cols) / 4 * x.rows.eval(sizes);
                    let input = self.inputs.iter().find(|(v, _)| *v == f.x);
                    input.and_then(|(_, data)| data.get(..n)).unwrap_or(&[])
                }
                Source::Segment(s) if (s >= self.head) == head => before[s].executable.value(f.x)?,
                _ => continue,
            };
            let value = executable.value_mut(f.out)?;
            let Some(value) = value.get_mut(..from.len()) else {
                let what =
                    format!("{} elements of {} in a value of {}", from.len(), self.plan.val(f.x).name, value.len());
                return Err(Error::Batch(what));
            };
            value.copy_from_slice(from);
        }
        Ok(())
    }

    fn run_segment(
        &mut self,
        i: usize,
        batch: &Batch<'_>,
        out_rows: &[u32],
        cache: &mut SplitCache,
        sink: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        let s = &mut self.segments[i];
        let cache = cache.parts[s.part].as_mut();
        self.tables.with(s.part, batch, out_rows, |batch| s.executable.run(batch, cache, sink))
    }

    fn source(&self, v: ValueId) -> Result<Source> {
        self.outputs.get(&v).copied().ok_or_else(|| match self.plan.values.get(v.0 as usize) {
            Some(x) => Error::Batch(format!("{} is neither an input nor an output", x.name)),
            None => Error::Batch(format!("value {} does not exist", v.0)),
        })
    }
}

/// The segments' Plans as they run, one after another, with the copies between them.
fn join(placed: Plan, parts: &[Part], segments: &mut [Running], head: usize) -> Plan {
    let mut plan = Plan { ops: Vec::new(), head: None, ..placed };
    let known = plan.values.len();
    let copies = |plan: &mut Plan, s: &Running, body: bool| {
        for f in s.feeds.iter().filter(|f| f.x != f.out) {
            let of_body = !matches!(f.from, Source::Segment(s) if s >= head);
            let copy = Op::Copy { x: f.x, out: f.out };
            if of_body == body && !plan.ops.contains(&copy) {
                plan.push(copy);
            }
        }
    };
    for i in 0..segments.len() {
        if i == head {
            segments[i..].iter().for_each(|s| copies(&mut plan, s, true));
            plan.head = Some(plan.ops.len());
        }
        copies(&mut plan, &segments[i], i < head);
        let s = &mut segments[i];
        s.first_op = plan.ops.len();
        let part = &parts[s.part];
        let own = s.executable.plan();
        if let Some(h) = own.head {
            plan.head.get_or_insert(s.first_op + h);
        }
        // What lowering added.
        let mut new: HashMap<ValueId, ValueId> = HashMap::new();
        for op in &own.ops {
            let mut op = op.clone();
            part.to_whole(&mut op, &mut |v| {
                if v.0 as usize >= known {
                    let value = || crate::plan::Value { device: part.device, ..own.val(*v).clone() };
                    *v = *new.entry(*v).or_insert_with(|| {
                        plan.values.push(value());
                        ValueId(plan.values.len() as u32 - 1)
                    });
                }
            });
            plan.ops.push(op);
        }
    }
    plan
}

impl Executable for SplitExecutable {
    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn barriers(&self) -> usize {
        self.segments.iter().map(|s| s.executable.barriers()).sum()
    }

    fn arena_bytes(&self) -> usize {
        self.segments.iter().map(|s| s.executable.arena_bytes()).sum()
    }

    fn value_mut(&mut self, v: ValueId) -> Result<&mut [f32]> {
        match self.source(v)? {
            Source::Segment(s) => self.segments[s].executable.value_mut(v),
            Source::Host => {
                let input = self.inputs.iter_mut().find(|(i, _)| *i == v);
                Ok(input.map_or(&mut [], |(_, data)| data))
            }
        }
    }

    fn value(&self, v: ValueId) -> Result<&[f32]> {
        match self.source(v)? {
            Source::Segment(s) => self.segments[s].executable.value(v),
            Source::Host => Ok(self.inputs.iter().find(|(i, _)| *i == v).map_or(&[], |(_, data)| data)),
        }
    }

    fn run(&mut self, batch: &Batch<'_>, cache: &mut dyn Cache, sink: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
        let mut sizes = batch.sizes();
        if sizes.n_tokens > self.bucket.n_tokens || sizes.n_seqs > self.bucket.n_seqs {
            return Err(Error::Batch(format!("a step of {sizes:?} in an executable for {:?}", self.bucket)));
        }
        let Some(cache) = cache.as_any_mut().downcast_mut::<SplitCache>() else {
            return Err(Error::Unsupported { backend: "split", what: "this cache belongs to another backend".into() });
        };
        let last = self.segments.len().saturating_sub(1);
        for i in 0..self.head {
            self.feed(i, false, &sizes)?;
            if self.own_chunks && i == last {
                return self.run_segment(i, batch, batch.out_rows, cache, sink);
            }
            self.run_segment(i, batch, &[], cache, &mut |_, _| ())?;
        }
        let output = self.plan.outputs.last().copied();
        if self.plan.head.is_none() {
            return match output {
                Some(v) => self.value(v).map(|rows| sink(0, rows)),
                None => Ok(()),
            };
        }
        let mut first = 0;
        for out_rows in batch.out_rows.chunks(self.bucket.n_out.max(1)) {
            sizes.n_out = out_rows.len();
            for i in self.head..self.segments.len() {
                if first == 0 {
                    self.feed(i, false, &sizes)?;
                }
                self.feed(i, true, &sizes)?;
                self.run_segment(i, batch, out_rows, cache, &mut |_, _| ())?;
            }
            if let Some(v) = output {
                sink(first, self.value(v)?);
            }
            first += out_rows.len();
        }
        Ok(())
    }

    fn profile(&self) -> Vec<OpTime> {
        let of = |s: &Running| {
            let shift = |t: OpTime| OpTime { op: t.op + s.first_op, ..t };
            s.executable.profile().into_iter().map(shift).collect::<Vec<_>>()
        };
        self.segments.iter().flat_map(of).collect()
    }

    fn set_profile(&mut self, on: bool) {
        self.segments.iter_mut().for_each(|s| s.executable.set_profile(on));
    }

    fn report(&self) -> Option<StepReport> {
        let mut all: Option<StepReport> = None;
        for s in &self.segments {
            let Some(mut r) = s.executable.report() else { continue };
            let sum = all.get_or_insert_default();
            sum.dispatches += r.dispatches;
            sum.barriers += r.barriers;
            sum.submissions += r.submissions;
            sum.record += r.record;
            sum.submit += r.submit;
            sum.wait += r.wait;
            sum.gpu = r.gpu.map_or(sum.gpu, |s| Some(s + sum.gpu.unwrap_or(0.0)));
            r.kernels.iter_mut().for_each(|k| k.op += s.first_op);
            sum.kernels.append(&mut r.kernels);
        }
        all
    }

    fn set_poison(&mut self, on: bool) {
        self.segments.iter_mut().for_each(|s| s.executable.set_poison(on));
    }
}
