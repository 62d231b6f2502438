//! `qk_norm_rope` and `kv_store`: what happens to q, k and v between their projections and attention, as one op.

use super::replace;
use crate::plan::{Op, Plan, RopeSpec, ValueId, WeightId};

/// The rope (and the norm before it, if only the rope reads it) that makes value `v`.
struct Rotation {
    ops: Vec<usize>,
    x: ValueId,
    norm: Option<(WeightId, f32)>,
    head_dim: usize,
    rope: RopeSpec,
}

fn rotation(plan: &Plan, producers: &[Option<usize>], consumers: &[Vec<usize>], v: ValueId) -> Option<Rotation> {
    let i = producers[v.0 as usize]?;
    let Op::Rope { x, head_dim, rope, .. } = &plan.ops[i] else { return None };
    let mut r = Rotation { ops: vec![i], x: *x, norm: None, head_dim: *head_dim, rope: rope.clone() };
    if let Some(j) = producers[x.0 as usize]
        && let Op::RmsNorm { x: x0, weight: Some(w), eps, group, .. } = &plan.ops[j]
        && group == head_dim
        && consumers[x.0 as usize] == [i]
        && !plan.outputs.contains(x)
    {
        r.ops.push(j);
        r.x = *x0;
        r.norm = Some((*w, *eps));
    }
    Some(r)
}

/// For each attention: the norm and rope of its q, and of the k stored last before it, become `QkNormRope`.
pub(super) fn qk_norm_rope(plan: &mut Plan) {
    let mut i = 0;
    while i < plan.ops.len() {
        if let Some((remove, op)) = qk_at(plan, i) {
            // Before the store that reads the keys; everything it reads was made before its first op.
            let at = remove.iter().copied().max().unwrap_or(i);
            replace(plan, &remove, at, op);
        }
        i += 1;
    }
}

fn qk_at(plan: &Plan, i: usize) -> Option<(Vec<usize>, Op)> {
    let Op::Attention { q, spec, .. } = &plan.ops[i] else { return None };
    let k = plan.ops[..i].iter().rev().find_map(|op| match op {
        Op::KvStore { k, store } if store.cache == spec.cache => Some(*k),
        _ => None,
    })?;
    let (producers, consumers) = (plan.producers(), plan.consumers());
    let rq = rotation(plan, &producers, &consumers, *q)?;
    let rk = rotation(plan, &producers, &consumers, k)?;
    let eps = [&rq, &rk].iter().find_map(|r| r.norm.map(|n| n.1)).unwrap_or(0.0);
    let same_eps = [&rq, &rk].iter().all(|r| r.norm.is_none_or(|n| n.1 == eps));
    if rq.rope != rk.rope || rq.head_dim != rk.head_dim || !same_eps {
        return None;
    }
    let last = rq.ops.iter().chain(&rk.ops).copied().max()?;
    // Nothing may read the rotated q or k before the fused op's place.
    if consumers[q.0 as usize].iter().chain(&consumers[k.0 as usize]).any(|c| *c < last) {
        return None;
    }
    let op = Op::QkNormRope {
        q: rq.x,
        k: rk.x,
        q_norm: rq.norm.map(|n| n.0),
        k_norm: rk.norm.map(|n| n.0),
        eps,
        head_dim: rq.head_dim,
        rope: rq.rope,
        q_out: *q,
        k_out: Some(k),
        store: None,
    };
    Some(([rq.ops, rk.ops].concat(), op))
}

/// A store whose keys come from a `QkNormRope` that nothing else reads moves into it.
pub(super) fn kv_store(plan: &mut Plan) {
    let mut i = 0;
    while i < plan.ops.len() {
        if let Op::KvStore { k, store } = plan.ops[i]
            && plan.consumers()[k.0 as usize] == [i]
            && !plan.outputs.contains(&k)
            && let Some(j) = plan.producers()[k.0 as usize]
            && let Op::QkNormRope { store: None, .. } = &plan.ops[j]
        {
            let mut fused = plan.ops[j].clone();
            if let Op::QkNormRope { k_out, store: s, .. } = &mut fused {
                *k_out = None;
                *s = Some(store);
            }
            // The value rows must be there: the fused op takes the store's place.
            let q_read_between =
                plan.ops[j + 1..i].iter().any(|op| op.reads().iter().any(|v| plan.ops[j].writes().contains(v)));
            if !q_read_between {
                replace(plan, &[j, i], i, fused);
            }
        }
        i += 1;
    }
}
