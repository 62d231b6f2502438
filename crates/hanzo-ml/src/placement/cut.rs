//! Parts a placed Plan: for each device what it must load and allocate, and the segments, runs of consecutive ops of one
//! device, in the order in which they run. How they run is not decided here.

use crate::error::Result;
use crate::plan::{Access, CacheSlot, DeviceId, Dim, IdMut, Op, Plan, StateId, ValueId, WeightId};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// What one device has of a Plan.
#[derive(Clone, Debug)]
pub struct Part {
    /// The device.
    pub device: DeviceId,
    /// Its ops, weights, page groups and states, as a Plan of its own. Value ids are those of the placed Plan; everything
    /// else is numbered from 0.
    pub plan: Plan,
    /// Weights of the placed Plan, by the part's ids.
    pub weights: Vec<WeightId>,
    /// Page groups of the whole Plan, by the part's ids, and the layers of each that are here.
    pub groups: Vec<(u16, Vec<u32>)>,
    /// The same for states.
    pub states: Vec<(u16, Vec<u32>)>,
}

/// Where a segment gets an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// From the caller: an input of the whole Plan.
    Host,
    /// From an earlier segment.
    Segment(usize),
}

/// One input of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feed {
    /// Where it comes from.
    pub from: Source,
    /// Its name there.
    pub x: ValueId,
    /// Its name here: another one if it crosses between devices.
    pub out: ValueId,
}

/// Consecutive ops of one device.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Index of the part it belongs to.
    pub part: usize,
    /// Its ops, over the part's weights and memory.
    pub plan: Plan,
    /// What it must be given before it runs.
    pub feeds: Vec<Feed>,
}

/// A placed Plan in parts.
#[derive(Clone, Debug)]
pub struct Cut {
    /// The placed Plan.
    pub plan: Plan,
    /// One a device that has ops, by device.
    pub parts: Vec<Part>,
    /// In the order in which they run.
    pub segments: Vec<Segment>,
    /// The first segment of the output head, which runs once a chunk with all that follow; `segments.len()` if there is
    /// none, or if the last segment has the whole head and runs its chunks itself.
    pub head: usize,
}

/// Does this op move a value between devices?
fn crosses(plan: &Plan, op: &Op) -> Option<(ValueId, ValueId)> {
    match op {
        Op::Copy { x, out } if plan.val(*x).device != plan.val(*out).device => Some((*x, *out)),
        _ => None,
    }
}

/// The device of an op; those that touch no value at all are the host's.
fn device(plan: &Plan, op: &Op) -> DeviceId {
    let mut found = DeviceId::default();
    op.accesses(&mut |a| {
        if let Access::Read(v) | Access::Write(v) = a {
            found = plan.val(v).device;
        }
    });
    found
}

/// Parts a placed Plan ([`super::place::place`]).
pub fn cut(plan: Plan) -> Result<Cut> {
    // Op indices of each segment, and whether it is all head.
    let mut runs: Vec<(DeviceId, Vec<usize>, bool)> = Vec::new();
    let together = head_stays(&plan);
    for (i, op) in plan.ops.iter().enumerate() {
        if crosses(&plan, op).is_some() {
            continue;
        }
        let in_head = plan.head.is_some_and(|h| i >= h) && !together;
        let d = device(&plan, op);
        match runs.last_mut() {
            Some((last, ops, head)) if *last == d && *head == in_head => ops.push(i),
            _ => runs.push((d, vec![i], in_head)),
        }
    }
    let devices: BTreeSet<DeviceId> = runs.iter().map(|r| r.0).collect();
    let parts: Vec<Part> = devices.iter().map(|d| part(&plan, *d)).collect();
    let head = runs.iter().position(|r| r.2).unwrap_or(runs.len());
    let mut segments = Vec::new();
    let made = made_by(&plan, &runs);
    for (d, ops, _) in &runs {
        let at = parts.iter().position(|p| p.device == *d).unwrap_or(0);
        segments.push(Segment {
            part: at,
            plan: segment_plan(&plan, &parts[at], ops),
            feeds: feeds(&plan, ops, &made),
        });
    }
    deliver(&plan, &mut segments, &made);
    let mut cut = Cut { plan, parts, segments, head };
    cut.finish()?;
    Ok(cut)
}

/// True if the whole head runs where the body ends, so that the two need no boundary.
fn head_stays(plan: &Plan) -> bool {
    let Some(head) = plan.head else { return true };
    let own = |i: &usize| crosses(plan, &plan.ops[*i]).is_none();
    let last = (0..head).rev().find(own).map(|i| device(plan, &plan.ops[i]));
    let here = (head..plan.ops.len()).all(|i| own(&i) && last == Some(device(plan, &plan.ops[i])));
    // What a step delivers must be the head's, or the caller would get it once a chunk.
    here && plan.outputs.last().is_none_or(|v| plan.val(*v).rows == Dim::Out)
}

/// The segment that makes each value.
fn made_by(plan: &Plan, runs: &[(DeviceId, Vec<usize>, bool)]) -> HashMap<ValueId, usize> {
    let of = |(s, run): (usize, &(DeviceId, Vec<usize>, bool))| -> Vec<(ValueId, usize)> {
        run.1.iter().flat_map(|i| plan.ops[*i].writes()).map(|v| (v, s)).collect()
    };
    runs.iter().enumerate().flat_map(of).collect()
}

/// What a device has, without inputs and outputs.
fn part(plan: &Plan, device: DeviceId) -> Part {
    let mut weights = Vec::new();
    let mut groups: BTreeMap<u16, BTreeSet<u32>> = BTreeMap::new();
    let mut states: BTreeMap<u16, BTreeSet<u32>> = BTreeMap::new();
    let mut ops = Vec::new();
    let mut head = None;
    for (i, op) in plan.ops.iter().enumerate() {
        if crosses(plan, op).is_some() || self::device(plan, op) != device {
            continue;
        }
        if head.is_none() && plan.head.is_some_and(|h| i >= h) {
            head = Some(ops.len());
        }
        let mut op = op.clone();
        op.ids_mut(&mut |id| match id {
            IdMut::Weight(w) if !weights.contains(w) => weights.push(*w),
            IdMut::Cache(c) => _ = groups.entry(c.group.0).or_default().insert(c.layer),
            IdMut::State(s, layer) => _ = states.entry(s.0).or_default().insert(*layer),
            _ => {}
        });
        ops.push(op);
    }
    let list = |m: BTreeMap<u16, BTreeSet<u32>>| -> Vec<(u16, Vec<u32>)> {
        m.into_iter().map(|(k, layers)| (k, layers.into_iter().collect())).collect()
    };
    let (groups, states) = (list(groups), list(states));
    let mut own = Plan { ops, head, inputs: Vec::new(), outputs: Vec::new(), ..plan.clone() };
    own.values.iter_mut().for_each(|v| v.device = DeviceId::default());
    let weight = |w: &WeightId| crate::plan::Weight { device: DeviceId::default(), ..plan.wt(*w).clone() };
    own.weights = weights.iter().map(weight).collect();
    own.groups = (groups.iter())
        .map(|(g, layers)| crate::cache::CacheGroup { layers: layers.len(), ..plan.groups[*g as usize].clone() })
        .collect();
    own.states = (states.iter())
        .map(|(s, layers)| crate::cache::StateSpec { layers: layers.len(), ..plan.states[*s as usize].clone() })
        .collect();
    let mut part = Part { device, plan: own, weights, groups, states };
    let mut ops = std::mem::take(&mut part.plan.ops);
    ops.iter_mut().for_each(|op| part.to_own(op));
    part.plan.ops = ops;
    part
}

fn find(list: &[(u16, Vec<u32>)], id: u16, layer: u32) -> (u16, u32) {
    // ok: the lists were made from the very ops that are renumbered.
    let i = list.iter().position(|(g, _)| *g == id).unwrap_or(0);
    (i as u16, list.get(i).and_then(|(_, l)| l.iter().position(|x| *x == layer)).unwrap_or(0) as u32)
}

impl Part {
    /// Renumbers an op of the placed Plan.
    fn to_own(&self, op: &mut Op) {
        op.ids_mut(&mut |id| match id {
            IdMut::Value(_) => {}
            IdMut::Weight(w) => *w = WeightId(self.weights.iter().position(|x| x == w).unwrap_or(0) as u32),
            IdMut::Cache(c) => {
                let (group, layer) = find(&self.groups, c.group.0, c.layer);
                *c = CacheSlot { group: crate::plan::CacheGroupId(group), layer };
            }
            IdMut::State(s, layer) => {
                let (state, l) = find(&self.states, s.0, *layer);
                (*s, *layer) = (StateId(state), l);
            }
        });
    }

    /// The other way round; `value` says what becomes of values.
    pub fn to_whole(&self, op: &mut Op, value: &mut dyn FnMut(&mut ValueId)) {
        op.ids_mut(&mut |id| match id {
            IdMut::Value(v) => value(v),
            IdMut::Weight(w) => *w = self.weights[w.0 as usize],
            IdMut::Cache(c) => {
                let (group, layers) = &self.groups[c.group.0 as usize];
                *c = CacheSlot { group: crate::plan::CacheGroupId(*group), layer: layers[c.layer as usize] };
            }
            IdMut::State(s, layer) => {
                let (state, layers) = &self.states[s.0 as usize];
                (*layer, *s) = (layers[*layer as usize], StateId(*state));
            }
        });
    }
}

fn segment_plan(plan: &Plan, part: &Part, ops: &[usize]) -> Plan {
    let head = plan.head.and_then(|h| ops.iter().position(|i| *i >= h));
    let own = |i: &usize| {
        let mut op = plan.ops[*i].clone();
        part.to_own(&mut op);
        op
    };
    let whole = &part.plan;
    Plan {
        ops: ops.iter().map(own).collect(),
        values: whole.values.clone(),
        weights: whole.weights.clone(),
        groups: whole.groups.clone(),
        states: whole.states.clone(),
        inputs: Vec::new(),
        outputs: Vec::new(),
        head,
        n_embd: plan.n_embd,
        n_pos_axes: plan.n_pos_axes,
    }
}

/// What a segment reads and does not make.
fn feeds(plan: &Plan, ops: &[usize], made: &HashMap<ValueId, usize>) -> Vec<Feed> {
    let copied: HashMap<ValueId, ValueId> =
        plan.ops.iter().filter_map(|op| crosses(plan, op)).map(|(x, out)| (out, x)).collect();
    let own: BTreeSet<ValueId> = ops.iter().flat_map(|i| plan.ops[*i].writes()).collect();
    let mut feeds: Vec<Feed> = Vec::new();
    for v in ops.iter().flat_map(|i| plan.ops[*i].reads()) {
        if own.contains(&v) || feeds.iter().any(|f| f.out == v) {
            continue;
        }
        let x = copied.get(&v).copied().unwrap_or(v);
        let from = made.get(&x).map_or(Source::Host, |s| Source::Segment(*s));
        feeds.push(Feed { from, x, out: v });
    }
    feeds
}

/// Inputs and outputs of the segments: what crosses first, then what the whole Plan delivers, in its order.
fn deliver(plan: &Plan, segments: &mut [Segment], made: &HashMap<ValueId, usize>) {
    let feeds: Vec<Feed> = segments.iter().flat_map(|s| s.feeds.clone()).collect();
    for f in feeds {
        if let Source::Segment(s) = f.from
            && !plan.outputs.contains(&f.x)
            && !segments[s].plan.outputs.contains(&f.x)
        {
            segments[s].plan.outputs.push(f.x);
        }
    }
    for v in &plan.outputs {
        if let Some(s) = made.get(v) {
            segments[*s].plan.outputs.push(*v);
        }
    }
    for s in segments {
        s.plan.inputs = s.feeds.iter().map(|f| f.out).collect();
    }
}

impl Cut {
    /// Gives the parts their inputs and outputs, and checks everything.
    fn finish(&mut self) -> Result<()> {
        for (i, part) in self.parts.iter_mut().enumerate() {
            let made: BTreeSet<ValueId> = part.plan.ops.iter().flat_map(Op::writes).collect();
            for s in self.segments.iter().filter(|s| s.part == i) {
                for v in s.plan.inputs.iter().filter(|v| !made.contains(v)) {
                    if !part.plan.inputs.contains(v) {
                        part.plan.inputs.push(*v);
                    }
                }
                for v in &s.plan.outputs {
                    if !part.plan.outputs.contains(v) {
                        part.plan.outputs.push(*v);
                    }
                }
            }
        }
        self.plan.check()?;
        self.parts.iter().try_for_each(|p| p.plan.check())?;
        self.segments.iter().try_for_each(|s| s.plan.check())
    }
}
