//! `moe_route`: a router's scores, selection and normalisation become one op.

use super::replace;
use crate::plan::{Op, Plan};

/// `RouteScores`, `RouteTopK` and `RouteNormalise` in a chain that nothing else reads become `MoeRoute`.
pub(super) fn moe_route(plan: &mut Plan) {
    let mut i = 0;
    while i < plan.ops.len() {
        if let Some((remove, op)) = route_at(plan, i) {
            // The last one's place: readers of the ids come after the weights were normalised or must wait for it.
            let at = remove[1];
            replace(plan, &remove, at, op);
        }
        i += 1;
    }
}

fn route_at(plan: &Plan, i: usize) -> Option<(Vec<usize>, Op)> {
    let Op::RouteScores { logits, spec, out: scores } = &plan.ops[i] else { return None };
    let consumers = plan.consumers();
    let [j] = consumers[scores.0 as usize][..] else { return None };
    let Op::RouteTopK { ids, weights: raw, .. } = &plan.ops[j] else { return None };
    let [k] = consumers[raw.0 as usize][..] else { return None };
    let Op::RouteNormalise { out, .. } = &plan.ops[k] else { return None };
    if plan.outputs.contains(scores) || plan.outputs.contains(raw) {
        return None;
    }
    // The fused op sits at the selection's place, so nothing before the normalisation may read its output: true by order.
    Some((vec![i, j, k], Op::MoeRoute { logits: *logits, spec: spec.clone(), ids: *ids, weights: *out }))
}
