//! Lowering of a mixture of experts' routing: one kernel does all of it, or any one of its three steps; in a step of one token the
//! last workgroup of the router's own mat-vec does all of it (lever `router_select`, see [`super::fuse`]).

use super::Lowering;
use super::linear::Routing;
use super::matvec_norm::one_token;
use super::rows::threads;
use super::variants;
use crate::backend::CompileOptions;
use crate::error::{Error, Result};
use crate::gpu::launch::Ptr;
use crate::plan::{DType, Dim, Member, Op, Plan, RouteSpec, RouterScore, ValueId};
use hanzo_kernels::args::{MoeRoute, RouterSelect};

const SCORES: u32 = 1;
const SELECTION: u32 = 2;
const WEIGHTS: u32 = 4;
/// The whole of it.
pub(super) const ALL: u32 = SCORES | SELECTION | WEIGHTS;

/// Adds the op's launches; false if the op is not one of this file's.
pub(super) fn lower(cx: &mut Lowering<'_>, op: &Op) -> Result<bool> {
    match op {
        Op::RouteScores { logits, spec, out } => route(cx, SCORES, *logits, spec, None, *out)?,
        Op::RouteTopK { scores, spec, ids, weights } => route(cx, SELECTION, *scores, spec, Some(*ids), *weights)?,
        Op::RouteNormalise { weights, spec, out } => route(cx, WEIGHTS, *weights, spec, None, *out)?,
        Op::MoeRoute { logits, spec, ids, weights } => {
            let group = cx.followers().find(|op| matches!(op, Op::MoeLinearGroup { .. })).cloned();
            if let Some(Op::MoeLinearGroup { x, ids, members }) = group {
                let routing = Routing { logits: *logits, spec, weights: *weights };
                super::moe_linear::routed(cx, x, ids, &members, routing)?;
                return Ok(true);
            }
            route(cx, ALL, *logits, spec, Some(*ids), *weights)?;
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
    let mut set = constants(spec, stages, biased).to_vec();
    set.extend([("THREADS", threads(cx.features, spec.n_expert, 256)), ("MASK", cx.mask(x))]);
    cx.launch(None, &args, &set, [cx.max_rows(x) as u32, 1, 1])
}

/// Can the experts' gate and up do what `op`, a routing, does?
pub(super) fn routed_fits(plan: &Plan, options: &CompileOptions, op: &Op) -> bool {
    let Op::MoeRoute { logits, spec, .. } = op else { return false };
    one_token(options) && plan.val(*logits).rows == Dim::Tokens && spec.bias.is_none() && spec.groups.is_none()
}

/// What the kernels are told of a router.
pub(super) fn constants(spec: &RouteSpec, stages: u32, biased: bool) -> [(&'static str, u32); 8] {
    let score = match spec.score {
        RouterScore::Softmax => 0,
        RouterScore::Sigmoid => 1,
        RouterScore::SoftmaxSelected => 2,
    };
    let (groups, kept) = spec.groups.unwrap_or((1, 1));
    [
        ("STAGES", stages),
        ("SCORE", score),
        ("EXPERTS", spec.n_expert as u32),
        ("TOP", spec.top_k as u32),
        ("BIASED", biased.into()),
        ("GROUPS", groups as u32),
        ("KEPT", kept as u32),
        ("NORMALISE", spec.normalise.into()),
    ]
}

/// Can selection run inside `op`, which makes `logits`?
pub(super) fn select_fits(plan: &Plan, options: &CompileOptions, op: &Op, logits: ValueId) -> bool {
    let Op::Linear { x, member } = op else { return false };
    let (floats, x) = (!plan.wt(member.w).format.is_block(), plan.val(*x));
    floats && x.dtype == DType::F32 && plan.val(logits).rows == Dim::Tokens && one_token(options)
}

/// The launch of a router's matrix `m` and of the selection that follows.
pub(super) fn select(cx: &mut Lowering<'_>, x: ValueId, m: &Member) -> Result<()> {
    let Some(Op::MoeRoute { spec, ids, weights, .. }) = cx.followers().next().cloned() else {
        return Err(Error::Unsupported { backend: "gpu", what: "a fused router without a selection".into() });
    };
    let w = cx.plan.wt(m.w);
    let (format, rows, cols) = (w.format, w.rows, cx.cols(x));
    let (units, wave) = (cols.div_ceil(32), cx.features.wave);
    // Selection wants a thread an expert; rows are shared by as many waves as in a mat-vec alone.
    let threads = threads(cx.features, spec.n_expert, 256);
    let split = variants::waves_of_few_rows(rows, units, cx.features).unwrap_or(1).min(threads / wave);
    let count = cx.scratch("router_select count", 4).part(0, 4);
    cx.zeroed(count);
    let biased = spec.bias.is_some();
    let args = RouterSelect {
        w: cx.weight(m.w)?,
        x: cx.value(x),
        added: cx.optional_vector(m.bias),
        logits: cx.value(m.out),
        count,
        bias: cx.optional_vector(spec.bias),
        ids: cx.value(ids),
        y: cx.value(weights),
        units: units as u32,
        cols: cols as u32,
        scale: spec.scale,
    };
    let mut set = constants(&spec, ALL, biased).to_vec();
    set.extend([
        ("THREADS", threads),
        ("SPLIT", split),
        ("UNITS", variants::units_in_flight(units, wave * split)),
        ("WHOLE", cols.is_multiple_of(32).into()),
        ("ADDED", m.bias.is_some().into()),
    ]);
    cx.launch(Some(format), &args, &set, [(rows as u32).div_ceil(threads / wave / split), 1, 1])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Program;
    use crate::gpu::lower::fixtures::{options, scalar, with};
    use crate::levers::LeverSet;
    use crate::plan::{Activation, DType, GluKind};
    use hanzo_gguf::Format;

    /// Routing of logits and the experts' gate, up and glu, whose inputs are there before the logits unless `late`.
    fn program(tokens: usize, biased: bool, late: bool, on: bool) -> Program {
        let (cols, n_expert, top_k) = (64, 8, 2);
        let mut p = Plan::new(cols);
        let input = p.input("x", Dim::Tokens, cols, DType::F32);
        let (mut x, logits) = (p.value("h", Dim::Tokens, cols), p.value("logits", Dim::Tokens, n_expert));
        p.push(Op::RmsNorm { x: input, weight: None, eps: 1e-6, group: cols, out: x });
        let w = p.weight("router", Format::F32, 1, n_expert, cols);
        p.push(Op::Linear { x, member: Member { w, bias: None, out: logits } });
        if late {
            let doubled = p.value("doubled", Dim::Tokens, cols);
            p.push(Op::Scale { x, s: 2.0, out: doubled });
            x = doubled;
        }
        let bias = biased.then(|| p.weight("bias", Format::F32, 1, 1, n_expert));
        let score = RouterScore::Softmax;
        let spec = RouteSpec { n_expert, top_k, score, bias, groups: None, normalise: true, scale: 1.0 };
        let ids = p.typed_value("ids", Dim::Tokens, top_k, DType::I32);
        let weights = p.value("weights", Dim::Tokens, top_k);
        p.push(Op::MoeRoute { logits, spec, ids, weights });
        let members = ["gate", "up"].map(|name| {
            let w = p.weight(name, Format::Q4_0, n_expert, cols, cols);
            Member { w, bias: None, out: p.value(format!("{name}.out"), Dim::Slots(top_k), cols) }
        });
        let (gate, up) = (members[0].out, members[1].out);
        p.push(Op::MoeLinearGroup { x, ids, members: members.to_vec() });
        let out = p.value("out", Dim::Slots(top_k), cols);
        p.push(Op::Glu { gate, up, kind: GluKind::Plain(Activation::Silu), out });
        p.outputs = vec![ids, weights, out];
        let options = options(with(LeverSet::default(), "glu_routed", on), tokens);
        crate::gpu::lower::program(&p, &options, &scalar(), &|_| None).expect("it lowers")
    }

    #[test]
    fn in_a_step_of_one_token_experts_route_themselves() {
        let kernels = |p: &Program| p.launches.iter().map(|l| l.kernel.op).collect::<Vec<_>>();
        assert_eq!(kernels(&program(1, false, false, true)), ["rms_norm", "matvec_f32", "glu_routed"]);
        let apart = ["rms_norm", "matvec_f32", "moe_route", "glu_matvec"];
        assert_eq!(kernels(&program(1, false, false, false)), apart);
        assert_eq!(kernels(&program(1, true, false, true)), apart);
        assert_eq!(kernels(&program(3, false, false, true)), apart);
        assert!(!kernels(&program(1, false, true, true)).contains(&"glu_routed"));
    }
}
