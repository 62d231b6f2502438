//! Cases of what the last workgroup of a mat-vec may do besides: the norm of a residual sum, and the selection of experts.

use super::{Builder, Context, Sink, weight_formats};
use crate::backend::Precision;
use crate::oracle::case::Case;
use crate::oracle::random::{Draw, Rng, weights};
use crate::plan::{Dim, Member, Op, RouteSpec, RouterScore, ValueId};
use hanzo_gguf::Format;

/// What is in front of a norm.
#[derive(Clone, Copy)]
struct Shape {
    rows: usize,
    tokens: usize,
    /// More than one: the last of experts' matrices, and what combines their outputs.
    experts: usize,
    /// A second matrix and norm behind, whose residual is the first's sum.
    chain: bool,
    /// The normed rows are an output too.
    seen: bool,
}

fn norm_case(format: Format, shape: Shape, rng: &mut Rng) -> Case {
    let Shape { rows, tokens, experts, chain, seen } = shape;
    let (k, cols) = (2, format.block_len().max(64));
    let mut b = Builder::new(cols);
    let dim = if experts > 1 { Dim::Slots(k) } else { Dim::Tokens };
    let x = b.input("x", dim, cols, rng.floats(tokens * cols * if experts > 1 { k } else { 1 }, 1.0));
    let residual = b.input("residual", Dim::Tokens, rows, rng.floats(tokens * rows, 1.0));
    let bytes = weights(format, experts * rows, cols, Draw::Usual, rng);
    let w = b.weight("w", format, (experts, rows, cols), bytes);
    let bias = (rows % 3 != 0).then(|| b.matrix("bias", experts, &rng.floats(experts * rows, 1.0)));
    let mut made = b.plan.value("made", dim, rows);
    let member = Member { w, bias, out: made };
    if experts > 1 {
        let pick = |rng: &mut Rng| rng.permutation(experts)[..k].iter().map(|e| *e as f32).collect::<Vec<_>>();
        let ids = (0..tokens).flat_map(|_| pick(rng)).collect();
        let ids = b.ids("ids", k, ids);
        b.plan.push(Op::MoeLinear { x, ids, member });
        let shares = b.input("shares", Dim::Tokens, k, rng.floats(tokens * k, 0.5));
        let combined = b.plan.value("combined", Dim::Tokens, rows);
        b.plan.push(Op::MoeCombine { x: made, weights: shares, out: combined });
        made = combined;
    } else {
        b.plan.push(Op::Linear { x, member });
    }
    // The residual stands on either side, and half of the norms have no weight.
    let norm = |b: &mut Builder, name: &str, (a, c): (ValueId, ValueId), gain: Option<Vec<f32>>| {
        let (sum, out) = (b.plan.value(format!("{name}.sum"), Dim::Tokens, rows), b.like(residual, name));
        let weight = gain.map(|g| b.vector(&format!("{name}.weight"), &g));
        b.plan.push(Op::Add { a, b: c, out: sum });
        b.plan.push(Op::RmsNorm { x: sum, weight, eps: 1e-6, group: rows, out });
        (sum, out)
    };
    let gain = seen.then(|| rng.floats(rows, 1.0));
    let (mut sum, mut out) = norm(&mut b, "first", (residual, made), gain);
    b.plan.outputs = if seen { vec![sum, out] } else { vec![sum] };
    if chain {
        let bytes = weights(format, rows, rows, Draw::Usual, rng);
        let w = b.weight("w2", format, (1, rows, rows), bytes);
        let made = b.plan.value("made2", Dim::Tokens, rows);
        b.plan.push(Op::Linear { x: out, member: Member { w, bias: None, out: made } });
        let gain = Some(rng.floats(rows, 1.0));
        (sum, out) = norm(&mut b, "second", (made, sum), gain);
        b.plan.outputs.push(sum);
    }
    if !b.plan.outputs.contains(&out) {
        b.plan.outputs.push(out);
    }
    let about = format!("{rows} rows, {tokens} tokens, {experts} experts, chain: {chain}, seen: {seen}");
    Case { precision: Precision::Int8, ..b.case("matvec_norm", format, tokens, about) }
}

pub(super) fn norm(context: &Context<'_>, sink: Sink<'_>) {
    for format in weight_formats().filter(|f| f.is_block()) {
        let rng = &mut context.rng(&format!("matvec norm {format}"));
        let rows = format.block_len().max(64);
        for experts in [1, 5] {
            for (tokens, seen) in [(1, true), (1, false), (3, true)] {
                sink(norm_case(format, Shape { rows, tokens, experts, chain: true, seen }, rng));
            }
            // Rows that are no groups of 32, and no groups of four.
            for rows in [36, 7] {
                sink(norm_case(format, Shape { rows, tokens: 1, experts, chain: false, seen: experts == 1 }, rng));
            }
        }
    }
    // More than each thread's first places, and more than a workgroup takes everywhere.
    let rng = &mut context.rng("matvec norm, long");
    for rows in [2080, 4128] {
        sink(norm_case(Format::Q4_0, Shape { rows, tokens: 1, experts: 1, chain: false, seen: true }, rng));
    }
}

/// Logits that come out exactly in any order of their sums, many of them equal: so ids follow from the Plan alone.
fn select_case(format: Format, (tokens, cols): (usize, usize), spec: &RouteSpec, biased: bool, rng: &mut Rng) -> Case {
    let n = spec.n_expert;
    let mut b = Builder::new(cols);
    let x = (0..tokens * cols).map(|_| (rng.below(3) as f32 - 1.0) * 0.5).collect();
    let x = b.input("x", Dim::Tokens, cols, x);
    let values: Vec<f32> = (0..n * cols).map(|_| (rng.below(5) as f32 - 2.0) * 0.25).collect();
    let bytes = match format {
        Format::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        // These few have no more bits than a BF16, nor than a half.
        Format::F16 => values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| v.to_bits().to_le_bytes()[2..].to_vec()).collect(),
    };
    let w = b.weight("w", format, (1, n, cols), bytes);
    let added = (n % 2 == 1).then(|| b.vector("added", &vec![0.5; n]));
    let logits = b.plan.value("logits", Dim::Tokens, n);
    b.plan.push(Op::Linear { x, member: Member { w, bias: added, out: logits } });
    let mut spec = spec.clone();
    spec.bias = biased.then(|| {
        let bias: Vec<f32> = (0..n).map(|_| rng.gauss() as f32 * 0.3).collect();
        b.vector("bias", &bias)
    });
    let (ids, shares) = super::route::chosen(&mut b, logits, &spec);
    b.plan.outputs = vec![ids, shares];
    let about = format!("{:?}, {n} experts, {cols} columns, {tokens} tokens, biased: {biased}", spec.score);
    b.case("router_select", format, tokens, about)
}

pub(super) fn select(context: &Context<'_>, sink: Sink<'_>) {
    let rng = &mut context.rng("router select");
    let base = RouteSpec {
        n_expert: 8,
        top_k: 2,
        score: RouterScore::Softmax,
        bias: None,
        groups: None,
        normalise: true,
        scale: 1.0,
    };
    for (i, score) in [RouterScore::Softmax, RouterScore::Sigmoid, RouterScore::SoftmaxSelected].into_iter().enumerate()
    {
        let spec = RouteSpec { score, ..base.clone() };
        let kinds = [
            (spec.clone(), false),
            (RouteSpec { top_k: 1, normalise: false, ..spec.clone() }, false),
            (RouteSpec { n_expert: 5, top_k: 5, scale: 2.5, ..spec.clone() }, false),
            (RouteSpec { n_expert: 128, top_k: 8, ..spec.clone() }, false),
            (RouteSpec { n_expert: 300, top_k: 6, ..spec.clone() }, false),
            (RouteSpec { n_expert: 33, top_k: 4, ..spec.clone() }, true),
            (RouteSpec { n_expert: 32, top_k: 6, groups: Some((4, 2)), scale: 2.5, ..spec }, true),
        ];
        for (k, (spec, biased)) in kinds.iter().enumerate() {
            let format = [Format::F32, Format::BF16, Format::F16][(i + k) % 3];
            for (tokens, cols) in [(1, 64), (1, 40), (1, 300), (3, 64)] {
                sink(select_case(format, (tokens, cols), spec, *biased, rng));
            }
        }
    }
}
