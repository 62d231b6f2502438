//! `add_rms_norm`: a residual add whose sum is normed next becomes one op.

use super::replace;
use crate::plan::{Op, Plan};

/// `s = a + b; h = rms_norm(s)` over whole rows becomes `AddRmsNorm`.
pub(super) fn add_rms_norm(plan: &mut Plan) {
    let mut i = 0;
    while i < plan.ops.len() {
        if let Op::Add { a, b, out: sum } = plan.ops[i] {
            let norm = plan.ops.iter().enumerate().skip(i + 1).find_map(|(j, op)| match op {
                Op::RmsNorm { x, weight, eps, group, out } if *x == sum && *group == plan.val(*x).cols => {
                    Some((j, *weight, *eps, *out))
                }
                _ => None,
            });
            if let Some((j, weight, eps, out)) = norm {
                replace(plan, &[i, j], i, Op::AddRmsNorm { a, b, weight, eps, sum, out });
            }
        }
        i += 1;
    }
}
