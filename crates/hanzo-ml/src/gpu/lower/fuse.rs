//! Which ops one kernel runs together: a producer and the ops that only it feeds.
//!
//! The Plan stays as it is: an op that runs inside another one names it as its leader, and the schedule gives both one
//! level. An op may follow a leader only if everything it reads is written by the leader's group.

use super::values;
use crate::backend::CompileOptions;
use crate::gpu::launch::Features;
use crate::plan::{Op, Plan};

/// The leader of every op: itself for most.
pub(super) fn leaders(plan: &Plan, options: &CompileOptions, _features: &Features) -> Vec<usize> {
    let mut leader: Vec<usize> = (0..plan.ops.len()).collect();
    let producers = plan.producers();
    let levers = options.levers;
    for (i, op) in plan.ops.iter().enumerate() {
        // A quantization runs inside the op that makes its input.
        let Op::Quantize { x, .. } = op else { continue };
        let Some(p) = producers[x.0 as usize] else { continue };
        let body_and_head = plan.head.is_some_and(|h| (p < h) != (i < h));
        let fused = match &plan.ops[p] {
            Op::RmsNorm { group, .. } => levers.on("norm_quantize") && *group == plan.val(*x).cols,
            Op::AddRmsNorm { out, .. } => levers.on("norm_quantize") && out == x,
            Op::Glu { .. } => levers.on("glu_quantize"),
            Op::Attention { .. } => levers.on("attention_quantize"),
            _ => false,
        };
        if fused && !body_and_head {
            leader[i] = leader[p];
        }
    }
    debug_assert!((0..leader.len()).all(|i| {
        let group: Vec<usize> = (0..i).filter(|j| leader[*j] == leader[i]).collect();
        let made = |v| group.iter().any(|j| values(&plan.ops[*j], true).contains(&v));
        leader[i] == i || values(&plan.ops[i], false).into_iter().all(made)
    }));
    leader
}
