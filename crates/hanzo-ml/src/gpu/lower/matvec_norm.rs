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

/// The most waves of one launch. A workgroup leaves late here, behind a fence and a count, and holds more registers than a mat-vec
/// alone: a second round of workgroups would wait for that too (H200: two waves a row of 4096 cost 5% of a step).
const RESIDENT: u32 = 4096;

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
    let wave = cx.features.wave;
    let places = (units * slots.max(1)) as usize;
    let usual = (1, variants::units_in_flight(places, wave));
    let shape = match slots {
        _ if !cx.options.levers.on("matvec_split") => None,
        0 => variants::waves_of_long_rows(format, (w.rows, units as usize), true, threads, wave),
        _ => (places >= 2 * wave as usize && threads / wave > 1)
            .then(|| (2, variants::units_in_flight(places, 2 * wave))),
    };
    let there = |s: &(u32, u32)| rows * s.0 <= RESIDENT;
    let (split, in_flight) = shape.filter(there).unwrap_or(usual);
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
        ("SPLIT", split),
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
    cx.launch(Some(format), &args, &set, [rows.div_ceil(threads / wave / split), 1, 1])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Precision;
    use crate::gpu::{MatrixUnits, Program};
    use crate::levers::{LeverSet, find};
    use hanzo_gguf::Format;

    const COLS: usize = 64;

    /// Two layers of a matrix, the residual sum and its norm. `apart`: the first residual is made beside the matrix, not before it.
    fn program(tokens: usize, apart: bool, levers: LeverSet) -> Program {
        let mut p = Plan::new(COLS);
        let x = p.input("x", Dim::Tokens, COLS, DType::F32);
        let mut residual = p.input("residual", Dim::Tokens, COLS, DType::F32);
        if apart {
            let twice = p.value("twice", Dim::Tokens, COLS);
            p.push(Op::Scale { x: residual, s: 2.0, out: twice });
            residual = twice;
        }
        let mut h = x;
        for i in 0..2 {
            let w = p.weight(&format!("w{i}"), Format::Q4_0, 1, COLS, COLS);
            let weight = Some(p.weight(&format!("norm{i}"), Format::F32, 1, 1, COLS));
            let [made, sum, out] = ["made", "sum", "out"].map(|n| p.value(format!("{n}{i}"), Dim::Tokens, COLS));
            p.push(Op::Linear { x: h, member: Member { w, bias: None, out: made } });
            p.push(Op::Add { a: residual, b: made, out: sum });
            p.push(Op::RmsNorm { x: sum, weight, eps: 1e-6, group: COLS, out });
            (h, residual) = (out, sum);
        }
        p.outputs = vec![h, residual];
        let options = CompileOptions {
            levers,
            bucket: Sizes { n_tokens: tokens, n_seqs: 1, n_out: 1 },
            precision: Precision::Int8,
            deterministic: false,
            n_ctx: 64,
            eager: None,
        };
        let features = Features {
            wave: 32,
            half_hw: true,
            int_dot: true,
            matrix: MatrixUnits::NONE,
            shared_bytes: 32768,
            max_threads: 1024,
            prefetch_bytes: 0,
        };
        crate::gpu::lower::program(&p, &options, &features, &|_| None).expect("it lowers")
    }

    fn count(p: &Program, op: &str) -> usize {
        p.launches.iter().filter(|l| l.kernel.op == op).count()
    }

    #[test]
    fn in_a_step_of_one_token_norms_take_no_launch_and_no_barrier() {
        let on = LeverSet::default().set(find("norm_in_matvec").expect("a lever"), false);
        let off = on.set(find("matvec_norm").expect("a lever"), false);
        let [with, without] = [on, off].map(|levers| program(1, false, levers));
        assert_eq!((count(&with, "matvec_norm"), count(&with, "rms_norm")), (2, 0));
        assert_eq!((count(&without, "matvec_norm"), count(&without, "rms_norm")), (0, 2));
        let barriers = |p: &Program| p.barriers.iter().filter(|b| **b).count();
        assert_eq!(barriers(&without) - barriers(&with), 2);
    }

    #[test]
    fn a_step_begins_by_zeroing_the_counter() {
        let p = program(1, false, LeverSet::all());
        let fill = &p.launches[0];
        assert_eq!(fill.kernel.op, "fill");
        let counter = &fill.touches[0];
        for norm in p.launches.iter().filter(|l| l.kernel.op == "matvec_norm") {
            assert!(norm.touches.iter().any(|t| (t.write, &t.range) == (true, &counter.range)));
        }
    }

    #[test]
    fn several_tokens_and_residuals_that_may_not_be_there_stay_apart() {
        assert_eq!(count(&program(2, false, LeverSet::all()), "matvec_norm"), 0);
        // The first norm's residual is made in the same level as its matrix' result; the second's comes before it.
        let p = program(1, true, LeverSet::all());
        assert_eq!((count(&p, "matvec_norm"), count(&p, "rms_norm")), (1, 1));
    }
}
