//! Lowering of a mixture of experts' routing: one kernel does all of it, or any one of its three steps.

use super::Lowering;
use super::rows::threads;
use crate::error::Result;
use crate::gpu::launch::Ptr;
use crate::plan::{Op, RouteSpec, RouterScore, ValueId};
use hanzo_kernels::args::MoeRoute;

const SCORES: u32 = 1;
const SELECTION: u32 = 2;
const WEIGHTS: u32 = 4;

/// Adds the op's launches; false if the op is not one of this file's.
pub(super) fn lower(cx: &mut Lowering<'_>, op: &Op) -> Result<bool> {
    match op {
        Op::RouteScores { logits, spec, out } => route(cx, SCORES, *logits, spec, None, *out)?,
        Op::RouteTopK { scores, spec, ids, weights } => route(cx, SELECTION, *scores, spec, Some(*ids), *weights)?,
        Op::RouteNormalise { weights, spec, out } => route(cx, WEIGHTS, *weights, spec, None, *out)?,
        Op::MoeRoute { logits, spec, ids, weights } => {
            route(cx, SCORES | SELECTION | WEIGHTS, *logits, spec, Some(*ids), *weights)?;
        }
        _ => return Ok(false),
    }
    Ok(true)
}

fn route(
    cx: &mut Lowering<'_>,
    stages: u32,
    x: ValueId,
    spec: &RouteSpec,
    ids: Option<ValueId>,
    y: ValueId,
) -> Result<()> {
    let biased = stages & SELECTION != 0 && spec.bias.is_some();
    let args = MoeRoute {
        x: cx.value(x),
        bias: if biased { cx.optional_vector(spec.bias) } else { Ptr::NONE },
        live: cx.live(x),
        ids: ids.map_or(Ptr::NONE, |ids| cx.value(ids)),
        y: cx.value(y),
        scale: spec.scale,
    };
    let score = match spec.score {
        RouterScore::Softmax => 0,
        RouterScore::Sigmoid => 1,
        RouterScore::SoftmaxSelected => 2,
    };
    let (groups, kept) = spec.groups.unwrap_or((1, 1));
    let set = [
        ("THREADS", threads(cx.features, spec.n_expert, 256)),
        ("STAGES", stages),
        ("SCORE", score),
        ("EXPERTS", spec.n_expert as u32),
        ("TOP", spec.top_k as u32),
        ("BIASED", biased.into()),
        ("GROUPS", groups as u32),
        ("KEPT", kept as u32),
        ("NORMALISE", spec.normalise.into()),
        ("MASK", cx.mask(x)),
    ];
    cx.launch(None, &args, &set, [cx.max_rows(x) as u32, 1, 1])
}
