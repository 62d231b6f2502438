//! Which ops one kernel runs together: a producer and the ops that only it feeds.
//!
//! The Plan stays as it is: an op that runs inside another one names it as its leader, and the schedule gives both one
//! level. An op may follow a leader only if everything it reads is written by the leader's group, or is there when the leader
//! runs: an input, or a value made before something that the leader reads.

use super::fold;
use super::rows::quantized_columns;
use super::values;
use crate::backend::CompileOptions;
use crate::gpu::launch::Features;
use crate::plan::{Op, Plan, ValueId};

/// Columns up to which a row is normed by those who read it rather than by who makes it, if both may: in one run on an H200 rows
/// of 1024 gained a tenth of a step, rows of 4096 lost a twentieth, 2048 and less than 1024 were not measured.
const NARROW: usize = 1024;

/// The leader of every op: itself for most.
pub(super) fn leaders(plan: &Plan, options: &CompileOptions, features: &Features) -> Vec<usize> {
    let mut leader: Vec<usize> = (0..plan.ops.len()).collect();
    let producers = plan.producers();
    let levers = options.levers;
    let consumers = plan.consumers();
    let norm = |x| levers.on("norm_quantize") && plan.val(x).cols <= quantized_columns(features);
    let one_side = |a: usize, b: usize| plan.head.is_none_or(|h| (a < h) == (b < h));
    // Do all readers of norm `i`, of a narrow row, norm it themselves? For them that is little work, and one stage less.
    let read_raw = |i: usize| {
        let Op::AddRmsNorm { out, .. } = &plan.ops[i] else { return false };
        let [q] = consumers[out.0 as usize][..] else { return false };
        let Op::Quantize { out: planes, .. } = &plan.ops[q] else { return false };
        let readers = &consumers[planes.0 as usize];
        let alone = !readers.is_empty() && !plan.outputs.contains(out) && one_side(i, q);
        // Not those that may norm what they make.
        let plain = |c: usize| match plan.ops[c].members() {
            [m] => !consumers[m.out.0 as usize].iter().any(|n| matches!(plan.ops[*n], Op::AddRmsNorm { .. })),
            _ => true,
        };
        let fits = |c: &usize| fold::fits(plan, options, features, &plan.ops[*c]) && one_side(q, *c) && plain(*c);
        levers.on("norm_in_matvec") && plan.val(*out).cols <= NARROW && alone && readers.iter().all(fits)
    };
    // Where norm `i` of the sum of `made` and a residual runs: inside the matrix that makes it.
    let host = |leader: &[usize], i: usize, made: ValueId, residual: ValueId| {
        let p = producers[made.0 as usize].filter(|_| levers.on("matvec_norm") && !read_raw(i))?;
        let (l, alone) = (leader[p], consumers[made.0 as usize] == [i] && !plan.outputs.contains(&made));
        let own = l == p || matches!(plan.ops[p], Op::MoeCombine { .. });
        let apart = made != residual && ready(plan, &producers, leader, l, residual);
        let runs = own && alone && one_side(l, i) && apart;
        (runs && super::matvec_norm::fits(plan, options, features, &plan.ops[l], made)).then_some(l)
    };
    // Will a norm run inside this matrix? Then it keeps its quantized input: `matvec_norm` goes before `norm_in_matvec` (after it
    // for narrow rows), and that before `quantize_in_matvec`.
    let hosts = |leader: &[usize], c: usize| {
        let [m] = plan.ops[c].members() else { return false };
        let [n] = consumers[m.out.0 as usize][..] else { return false };
        let Op::AddRmsNorm { a, b, .. } = &plan.ops[n] else { return false };
        host(leader, n, m.out, if *a == m.out { *b } else { *a }).is_some()
    };
    // The projections that op `i` runs inside, if it is a glu.
    let glu_inside = |leader: &[usize], i: usize, op: &Op| {
        let Op::Glu { gate, up, out, .. } = op else { return None };
        let p = pair(plan, &producers, *gate, *up)?;
        // Quantized on the way, the result exists as planes only.
        let planes = consumers[out.0 as usize].iter().any(|c| matches!(plan.ops[*c], Op::Quantize { .. }));
        let alone = consumers[out.0 as usize].len() == 1 && !plan.outputs.contains(out);
        let fits = levers.on("glu_matvec")
            && [gate, up].iter().all(|v| consumers[v.0 as usize] == [i] && !plan.outputs.contains(*v))
            && match leader[p] == p || matches!(plan.ops[leader[p]], Op::MoeRoute { .. }) {
                true => super::linear::glu_fits(plan, options, features, &plan.ops[p], *out),
                false => fold::glu_fits(plan, options, features, &plan.ops[p]),
            }
            && (alone || !planes || !levers.on("glu_quantize"));
        fits.then_some(p)
    };
    for (i, op) in plan.ops.iter().enumerate() {
        // Experts' gate and up, if a glu runs inside them, route their token themselves.
        if let Op::MoeLinearGroup { x, ids, .. } = op
            && levers.on("glu_routed")
            && let Some(p) = producers[ids.0 as usize]
            && leader[p] == p
            && super::route::routed_fits(plan, options, &plan.ops[p])
            && ready(plan, &producers, &leader, p, *x)
            && plan.ops.iter().enumerate().skip(i).any(|(g, glu)| glu_inside(&leader, g, glu) == Some(i))
        {
            leader[i] = p;
        }
        // A glu runs inside the projections that make its inputs.
        if let Some(p) = glu_inside(&leader, i, op) {
            leader[i] = leader[p];
        }
        // The sum over a token's slots runs inside the experts' linear that makes them.
        if let Op::MoeCombine { x, weights, out } = op
            && levers.on("moe_down")
            && let Some(p) = producers[x.0 as usize]
            && consumers[x.0 as usize] == [i]
            && !plan.outputs.contains(x)
            && ready(plan, &producers, &leader, p, *weights)
            && super::moe_linear::down_fits(plan, options, features, &plan.ops[p], *out)
        {
            leader[i] = p;
        }
        // What happens to q, k and v just before attention runs inside it.
        if let Op::Attention { q, spec, .. } = op
            && levers.on("attention_prologue")
            && let Some(p) = producers[q.0 as usize]
            && consumers[q.0 as usize] == [i]
            && !plan.outputs.contains(q)
            && spec.gate.is_none_or(|g| ready(plan, &producers, &leader, p, g))
            && super::attention::prologue_fits(plan, options, features, p, i)
        {
            leader[i] = p;
        }
        // A norm runs inside the matrix that makes one of the two things it adds up, a selection inside its router's.
        match op {
            Op::AddRmsNorm { a, b, .. } => {
                leader[i] = host(&leader, i, *b, *a).or_else(|| host(&leader, i, *a, *b)).unwrap_or(i);
            }
            Op::MoeRoute { logits, .. } if levers.on("router_select") => {
                let p = producers[logits.0 as usize];
                let fits = |p: &usize| super::route::select_fits(plan, options, &plan.ops[*p], *logits);
                leader[i] = p.filter(fits).unwrap_or(i);
            }
            _ => {}
        }
        // A quantization runs inside the op that makes its input.
        let Op::Quantize { x, out: q } = op else { continue };
        // Contractions that quantize their row themselves run inside the quantization, or inside the norm before it.
        let readers = &consumers[q.0 as usize];
        let raw =
            |c: &usize| fold::fits(plan, options, features, &plan.ops[*c]) && one_side(i, *c) && !hosts(&leader, *c);
        if !readers.is_empty() && readers.iter().all(raw) {
            let normed = producers[x.0 as usize].filter(|p| {
                let norm = match &plan.ops[*p] {
                    Op::RmsNorm { group, .. } => *group == plan.val(*x).cols,
                    Op::AddRmsNorm { out, .. } => out == x,
                    _ => false,
                };
                let alone = consumers[x.0 as usize] == [i] && !plan.outputs.contains(x);
                let narrow = plan.val(*x).cols <= NARROW || !levers.on("matvec_norm");
                norm && alone && leader[*p] == *p && levers.on("norm_in_matvec") && narrow && one_side(*p, i)
            });
            if normed.is_some() || levers.on("quantize_in_matvec") {
                let first = normed.unwrap_or(i);
                leader[i] = first;
                readers.iter().for_each(|c| leader[*c] = first);
                continue;
            }
        }
        let Some(p) = producers[x.0 as usize] else { continue };
        let fused = match &plan.ops[p] {
            Op::RmsNorm { group, .. } => norm(*x) && *group == plan.val(*x).cols,
            Op::AddRmsNorm { out, .. } => norm(*x) && out == x,
            Op::Glu { .. } => levers.on("glu_quantize"),
            Op::Attention { .. } => levers.on("attention_quantize"),
            _ => false,
        };
        if fused && one_side(p, i) {
            leader[i] = leader[p];
        }
    }
    debug_assert!((0..leader.len()).all(|i| {
        let group: Vec<usize> = (0..i).filter(|j| leader[*j] == leader[i]).collect();
        let made = |v| group.iter().any(|j| values(&plan.ops[*j], true).contains(&v));
        let there = |v| made(v) || ready(plan, &producers, &leader, leader[i], v);
        leader[i] == i || values(&plan.ops[i], false).into_iter().all(there)
    }));
    leader
}

/// The group of just these two projections, if there is one.
fn pair(plan: &Plan, producers: &[Option<usize>], gate: ValueId, up: ValueId) -> Option<usize> {
    let p = producers[gate.0 as usize]?;
    let group = matches!(plan.ops[p], Op::LinearGroup { .. } | Op::MoeLinearGroup { .. });
    (group && producers[up.0 as usize] == Some(p) && plan.ops[p].members().len() == 2).then_some(p)
}

/// Is `v` there whenever op `first` runs: made by a group that comes before it, through whatever else?
fn ready(plan: &Plan, producers: &[Option<usize>], leader: &[usize], first: usize, v: ValueId) -> bool {
    let Some(maker) = producers[v.0 as usize].map(|p| leader[p]) else { return true };
    // A group waits for what its first op reads. Its ops stand behind those it waits for.
    let (mut left, mut seen) = (vec![first], Vec::new());
    while let Some(op) = left.pop() {
        for read in plan.ops[op].reads() {
            match producers[read.0 as usize].map(|p| leader[p]) {
                Some(p) if p == maker => return true,
                Some(p) if p > maker && !seen.contains(&p) => {
                    seen.push(p);
                    left.push(p);
                }
                _ => {}
            }
        }
    }
    false
}
