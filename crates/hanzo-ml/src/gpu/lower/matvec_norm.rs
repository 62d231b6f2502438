//! Lowering of a mat-vec whose last workgroup norms the sum of its result and the residual (lever `matvec_norm`), in steps of
//! one token: attention's output projection, the feed-forward's last matrix, the experts' last matrix with what combines
//! their outputs. Which ops come together, says [`super::fuse`].

use super::linear::{Experts, Source};
use super::rows::norm_threads;
use super::variants;
use super::{Lowering, Q8};
use crate::backend::CompileOptions;
use crate::error::{Error, Result};
use crate::gpu::launch::{Features, Ptr};
use crate::plan::{DType, Dim, Member, Op, Plan, Sizes, ValueId};
use hanzo_kernels::args::MatvecNorm;

/// Is it a bucket of one token, in which no row has to be masked and counters need no index?
pub(super) fn one_token(options: &CompileOptions) -> bool {
    options.bucket == Sizes { n_tokens: 1, n_seqs: 1, n_out: 1 } && !options.deterministic
}

/// Can the norm of a sum with `made` run inside `op`, which makes it (or the experts' outputs that it combines)?
pub(super) fn fits(plan: &Plan, options: &CompileOptions, features: &Features, op: &Op, made: ValueId) -> bool {
    let (x, m) = match op {
        Op::Linear { x, member } | Op::MoeLinear { x, member, .. } => (*x, member),
        _ => return false,
    };
    let (w, one) = (plan.wt(m.w), plan.val(made).rows == Dim::Tokens && one_token(options));
    let whole = w.rows.is_multiple_of(4) && w.rows <= 16 * norm_threads(features, w.rows, 1) as usize;
    one && whole && w.format.is_block() && plan.val(x).dtype == DType::Q8
}

/// The launch of `m`, of what combines experts if there are any (their ids and weights), and of the norm that follows.
pub(super) fn lower(cx: &mut Lowering<'_>, x: ValueId, m: &Member, experts: Option<(Experts, ValueId)>) -> Result<()> {
    let fault = |what: &str| Error::Unsupported { backend: "gpu", what: what.into() };
    let norm = cx.followers().find_map(|op| match op {
        Op::AddRmsNorm { a, b, weight, eps, sum, out } => Some((*a, *b, *weight, *eps, *sum, *out)),
        _ => None,
    });
    let (Some((a, b, gain, eps, sum, out)), Source::Int8(planes)) = (norm, Source::of(cx, x)) else {
        return Err(fault("a fused norm that does not follow a mat-vec over quantized activations"));
    };
    // The mat-vec's own result is one of the two that are added up.
    let combined = cx.followers().find_map(|op| match op {
        Op::MoeCombine { out, .. } => Some(*out),
        _ => None,
    });
    let made = combined.unwrap_or(m.out);
    let residual = if a == made { b } else { a };
    let w = cx.plan.wt(m.w);
    let (format, rows, units) = (w.format, w.rows as u32, (w.cols / 32) as u32);
    let (slots, weights) = experts.map_or((0, Ptr::NONE), |(e, weights)| (e.k as u32, cx.value(weights)));
    // As the norm alone: the same sums.
    let threads = norm_threads(cx.features, w.rows, 1);
    let in_flight = variants::units_in_flight((units * slots.max(1)) as usize, cx.features.wave);
    let words = |q: &Q8, p: Ptr| ((p.offset - q.q.offset) / 4) as u32;
    let whole = |q: &Q8| Ptr { len: q.s.offset + q.s.len - q.q.offset, ..q.q };
    let to = cx.written(out);
    let (yq, yd, ys) = match to.planes {
        [q, d, s] if to.quant != 0 => {
            let q = Q8 { q, d, s };
            (whole(&q), words(&q, d), words(&q, s))
        }
        _ => (Ptr::NONE, 0, 0),
    };
    let count = cx.scratch("matvec_norm count", 4).part(0, 4);
    cx.zeroed(count);
    let args = MatvecNorm {
        w: cx.weight(m.w)?,
        x: whole(&planes),
        bias: cx.optional_vector(m.bias),
        ids: experts.map_or(Ptr::NONE, |(e, _)| cx.value(e.ids)),
        weights,
        a: cx.value(residual),
        gain: cx.optional_vector(gain),
        sum: cx.value(sum),
        // Nobody else reads what the mat-vec makes: its place passes the gain on.
        passed: cx.value(made),
        count,
        y: to.y,
        yq,
        rows,
        units,
    };
    let set = [
        ("THREADS", threads),
        ("UNITS", in_flight),
        ("SLOTS", slots),
        ("BIAS", m.bias.is_some().into()),
        ("WEIGHTED", gain.is_some().into()),
        ("QUANT", to.quant),
        ("XD", words(&planes, planes.d)),
        ("XS", words(&planes, planes.s)),
        ("YD", yd),
        ("YS", ys),
        ("INVERSE", (1.0 / rows as f32).to_bits()),
        ("EPS", eps.to_bits()),
    ];
    cx.launch(Some(format), &args, &set, [rows.div_ceil(threads / cx.features.wave), 1, 1])
}
