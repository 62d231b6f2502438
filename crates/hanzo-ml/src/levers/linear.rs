//! `qkv`, `linear_pair`, `moe_linear_pair`: projections of one input become a group that quantizes it once.
//!
//! Members keep their own formats: in a Q4_K_M file the v projection is often Q6_K.

use super::replace;
use crate::plan::{Op, Plan, ValueId};

/// Does `v` reach a `Glu` as gate or up?
fn feeds_glu(plan: &Plan, v: ValueId) -> bool {
    plan.ops.iter().any(|op| matches!(op, Op::Glu { gate, up, .. } if *gate == v || *up == v))
}

/// Merges runs of linears over one x; `take` says which outputs belong to the lever.
fn group(plan: &mut Plan, take: impl Fn(&Plan, ValueId) -> bool) {
    let mut i = 0;
    while i < plan.ops.len() {
        if let Op::Linear { x, member } = &plan.ops[i]
            && take(plan, member.out)
        {
            let x = *x;
            let mut members = vec![*member];
            let mut remove = vec![i];
            for (j, op) in plan.ops.iter().enumerate().skip(i + 1) {
                if let Op::Linear { x: y, member } = op
                    && *y == x
                    && take(plan, member.out)
                {
                    members.push(*member);
                    remove.push(j);
                }
            }
            if members.len() > 1 {
                // The first one's place: x is there, and members read nothing else.
                replace(plan, &remove, i, Op::LinearGroup { x, members });
            }
        }
        i += 1;
    }
}

/// Linears over one x that do not feed a glu: q, k, v (and an attention gate).
pub(super) fn qkv(plan: &mut Plan) {
    group(plan, |p, v| !feeds_glu(p, v));
}

/// Linears over one x that feed a glu: gate and up.
pub(super) fn linear_pair(plan: &mut Plan) {
    group(plan, feeds_glu);
}

/// Expert linears over one x and one routing.
pub(super) fn moe_linear_pair(plan: &mut Plan) {
    let mut i = 0;
    while i < plan.ops.len() {
        if let Op::MoeLinear { x, ids, member } = plan.ops[i] {
            let mut members = vec![member];
            let mut remove = vec![i];
            for (j, op) in plan.ops.iter().enumerate().skip(i + 1) {
                if let Op::MoeLinear { x: y, ids: d, member } = op
                    && (*y, *d) == (x, ids)
                {
                    members.push(*member);
                    remove.push(j);
                }
            }
            if members.len() > 1 {
                replace(plan, &remove, i, Op::MoeLinearGroup { x, ids, members });
            }
        }
        i += 1;
    }
}
