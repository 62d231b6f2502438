//! Order, barriers and memory of a Plan: one pure function of what its ops read and write.
//!
//! Ops are put into levels: an op's level is one more than the highest level it depends on, through values, caches or
//! states. Ops of a level run together; one barrier separates neighbouring levels, so barriers per step equal the Plan's
//! dependency depth. Values get arena ranges such that two values share bytes only if their lifetimes, in levels, are
//! disjoint. [`Schedule::verify`] replays the levels against the byte ranges and finds any race or stale read: deleting
//! any one barrier makes it fail.

use super::{Access, Op, Plan, Sizes, ValueId};
use std::collections::HashMap;
use std::ops::Range;

/// Alignment of every value in the arena, bytes.
pub const ALIGN: usize = 64;

/// A Plan's execution order and memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Op indices, level by level. Ops of a level are independent.
    pub levels: Vec<Vec<usize>>,
    /// First level of the output head (`levels.len()` if there is none).
    pub head: usize,
    /// Byte range of each value in the arena, for the sizes the schedule was made for.
    pub ranges: Vec<Range<usize>>,
    /// Bytes of the arena.
    pub arena_bytes: usize,
}

/// What makes two ops depend on each other besides values.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Memory {
    Cache(u16, u32),
    State(u16, u32),
}

/// `(memory, writes)` of an access that is not to a value.
fn memory(a: Access) -> Option<(Memory, bool)> {
    match a {
        Access::CacheRead(c) => Some((Memory::Cache(c.group.0, c.layer), false)),
        Access::CacheWrite(c) => Some((Memory::Cache(c.group.0, c.layer), true)),
        Access::State(s, l) => Some((Memory::State(s.0, l), true)),
        _ => None,
    }
}

fn visit(op: &Op, mut f: impl FnMut(Access)) {
    op.accesses(&mut f);
}

/// The level of each op. An op whose `leader` is another one runs as part of it.
fn levels(plan: &Plan, leader: &[usize]) -> Vec<usize> {
    let mut value_level = vec![0usize; plan.values.len()];
    let mut last_write: HashMap<Memory, usize> = HashMap::new();
    let mut last_read: HashMap<Memory, usize> = HashMap::new();
    let mut out = Vec::with_capacity(plan.ops.len());
    let mut body_depth = 0;
    for (i, op) in plan.ops.iter().enumerate() {
        let mut level = if plan.head.is_some_and(|h| i >= h) { body_depth } else { 0 };
        let part = leader[i] != i;
        visit(op, |a| match a {
            Access::Read(_) if part => {}
            Access::Read(v) => level = level.max(value_level[v.0 as usize]),
            _ => {
                if let Some((m, writes)) = memory(a) {
                    level = level.max(last_write.get(&m).copied().unwrap_or(0));
                    if writes {
                        level = level.max(last_read.get(&m).copied().unwrap_or(0));
                    }
                }
            }
        });
        if part {
            level = out[leader[i]];
        }
        // `*_level` maps hold the first level at which a dependent may run.
        visit(op, |a| match a {
            Access::Write(v) => value_level[v.0 as usize] = level + 1,
            _ => {
                if let Some((m, writes)) = memory(a) {
                    let map = if writes { &mut last_write } else { &mut last_read };
                    let e = map.entry(m).or_insert(0);
                    *e = (*e).max(level + 1);
                }
            }
        });
        if plan.head.is_none_or(|h| i < h) {
            body_depth = body_depth.max(level + 1);
        }
        out.push(level);
    }
    out
}

impl Schedule {
    /// Schedules a checked Plan, with memory for at most `max` tokens, sequences and output rows at a time.
    pub fn new(plan: &Plan, max: &Sizes) -> Schedule {
        Schedule::fused(plan, max, &(0..plan.ops.len()).collect::<Vec<_>>())
    }

    /// As [`Schedule::new`], where op `i` runs inside op `leader[i] <= i` (`i` itself for most): a backend's fused kernels.
    /// An op that is part of another may read only what its leader's group writes, and what is there when the leader runs.
    pub fn fused(plan: &Plan, max: &Sizes, leader: &[usize]) -> Schedule {
        let level = levels(plan, leader);
        let depth = level.iter().map(|l| l + 1).max().unwrap_or(0);
        let mut order = vec![Vec::new(); depth];
        for (i, l) in level.iter().enumerate() {
            order[*l].push(i);
        }
        let head = plan.head.and_then(|h| level.get(h).copied()).unwrap_or(depth);

        // Lifetimes in levels, both ends included.
        let mut life: Vec<Option<(usize, usize)>> = vec![None; plan.values.len()];
        for v in &plan.inputs {
            life[v.0 as usize] = Some((0, 0));
        }
        for (i, op) in plan.ops.iter().enumerate() {
            visit(op, |a| match a {
                Access::Write(v) => life[v.0 as usize] = Some((level[i], level[i])),
                Access::Read(v) => {
                    if let Some(l) = &mut life[v.0 as usize] {
                        // A head runs several times over the same body: what it reads from the body lives to the end.
                        let from_body = level[i] >= head && l.0 < head;
                        l.1 = l.1.max(if from_body { depth } else { level[i] });
                    }
                }
                _ => {}
            });
        }
        for v in plan.outputs.iter().chain(&plan.inputs) {
            if let Some(l) = &mut life[v.0 as usize] {
                l.1 = depth;
            }
        }
        // Largest first, each at the lowest offset free over its lifetime.
        let bytes = |v: usize| {
            let x = &plan.values[v];
            x.dtype.bytes(x.rows.eval(max), x.cols).next_multiple_of(ALIGN)
        };
        let mut ids: Vec<usize> = (0..plan.values.len()).filter(|v| life[*v].is_some()).collect();
        ids.sort_by_key(|v| (std::cmp::Reverse(bytes(*v)), *v));
        let mut ranges = vec![0..0; plan.values.len()];
        let mut placed: Vec<usize> = Vec::new();
        let mut arena_bytes = 0;
        for v in ids {
            let Some((a, b)) = life[v] else { continue };
            let mut busy: Vec<Range<usize>> = placed
                .iter()
                .filter(|p| life[**p].is_some_and(|(c, d)| c <= b && a <= d))
                .map(|p| ranges[*p].clone())
                .collect();
            busy.sort_by_key(|r| r.start);
            let mut at = 0;
            for r in busy {
                if r.start >= at + bytes(v) {
                    break;
                }
                at = at.max(r.end);
            }
            ranges[v] = at..at + bytes(v);
            arena_bytes = arena_bytes.max(at + bytes(v));
            placed.push(v);
        }
        Schedule { levels: order, head, ranges, arena_bytes }
    }

    /// Barriers in one step: one between neighbouring levels.
    pub fn barriers(&self) -> usize {
        self.levels.len().saturating_sub(1)
    }

    /// The schedule with the barrier after level `i` deleted: a planted fault for the checker's own test.
    pub fn without_barrier(&self, i: usize) -> Schedule {
        let mut s = self.clone();
        let next = s.levels.remove(i + 1);
        s.levels[i].extend(next);
        s
    }

    /// The schedule with value `v` moved onto the bytes of `onto`: a planted aliasing fault.
    pub fn with_alias(&self, v: ValueId, onto: ValueId) -> Schedule {
        let mut s = self.clone();
        s.ranges[v.0 as usize] = s.ranges[onto.0 as usize].clone();
        s
    }

    /// Replays the levels: every read must find the bytes its value's writer left, in an earlier level, with no other
    /// access of the same level touching them; caches and states must be touched in the Plan's order.
    pub fn verify(&self, plan: &Plan) -> std::result::Result<(), String> {
        self.verify_fused(plan, &(0..plan.ops.len()).collect::<Vec<_>>())
    }

    /// As [`Schedule::verify`] for a schedule of [`Schedule::fused`], whose backend sees to the order of what an op makes for
    /// those that run inside it.
    pub fn verify_fused(&self, plan: &Plan, leader: &[usize]) -> std::result::Result<(), String> {
        let mut writer = vec![None; plan.values.len()];
        for (i, op) in plan.ops.iter().enumerate() {
            op.writes().iter().for_each(|v| writer[v.0 as usize] = Some(i));
        }
        // Does op `i` get `v` from the op that it runs inside?
        let inside = |i: usize, v: ValueId| {
            writer[v.0 as usize].is_some_and(|w| leader[i] != i && leader[w] == leader[i] && w < i)
        };
        let overlap = |a: &Range<usize>, b: &Range<usize>| a.start < b.end && b.start < a.end;
        let mut want: HashMap<(usize, Memory), usize> = HashMap::new();
        let mut count: HashMap<Memory, usize> = HashMap::new();
        for (i, op) in plan.ops.iter().enumerate() {
            visit(op, |a| {
                if let Some((m, writes)) = memory(a) {
                    let n = count.entry(m).or_insert(0);
                    want.insert((i, m), *n);
                    *n += writes as usize;
                }
            });
        }
        let mut live: Vec<ValueId> = plan.inputs.clone();
        let mut done: HashMap<Memory, usize> = HashMap::new();
        for (l, ops) in self.levels.iter().enumerate() {
            let mut touched: Vec<(usize, bool, Range<usize>, ValueId)> = Vec::new();
            let mut memories: Vec<(usize, Memory, bool)> = Vec::new();
            let mut fault = None;
            for &i in ops {
                visit(&plan.ops[i], |a| match a {
                    Access::Read(v) => {
                        if !live.contains(&v) && !inside(i, v) {
                            fault.get_or_insert(format!(
                                "level {l}: op {i} reads {} before it is there",
                                plan.val(v).name
                            ));
                        }
                        touched.push((i, false, self.ranges[v.0 as usize].clone(), v));
                    }
                    Access::Write(v) => touched.push((i, true, self.ranges[v.0 as usize].clone(), v)),
                    _ => {
                        if let Some((m, writes)) = memory(a) {
                            if done.get(&m).copied().unwrap_or(0) != want[&(i, m)] {
                                fault.get_or_insert(format!("level {l}: op {i} touches a cache out of order"));
                            }
                            memories.push((i, m, writes));
                        }
                    }
                });
            }
            for (n, x) in touched.iter().enumerate() {
                for y in &touched[n + 1..] {
                    let handed =
                        |a: usize, b: usize| x.3 == y.3 && (inside(a, x.3) && writer[x.3.0 as usize] == Some(b));
                    let own = x.0 == y.0 && x.1 == y.1 && x.3 == y.3 || handed(x.0, y.0) || handed(y.0, x.0);
                    if (x.1 || y.1) && !own && overlap(&x.2, &y.2) {
                        fault.get_or_insert(format!(
                            "level {l}: op {} and op {} race on {} and {}",
                            x.0,
                            y.0,
                            plan.val(x.3).name,
                            plan.val(y.3).name
                        ));
                    }
                }
            }
            for (n, x) in memories.iter().enumerate() {
                if memories[n + 1..].iter().any(|y| x.0 != y.0 && x.1 == y.1 && (x.2 || y.2)) {
                    fault.get_or_insert(format!("level {l}: two ops race on a cache"));
                }
            }
            if let Some(f) = fault {
                return Err(f);
            }
            for (_, writes, range, v) in &touched {
                if *writes {
                    live.retain(|o| !overlap(&self.ranges[o.0 as usize], range));
                    live.push(*v);
                }
            }
            for (_, m, writes) in &memories {
                *done.entry(*m).or_insert(0) += *writes as usize;
            }
        }
        match plan.outputs.iter().find(|v| !live.contains(v)) {
            Some(v) => Err(format!("output {} is overwritten", plan.val(*v).name)),
            None => Ok(()),
        }
    }
}
