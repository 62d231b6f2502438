//! Cases of linears, embeddings and the activation quantization.

use super::{Builder, Context, Sink, weight_formats};
use crate::backend::Precision;
use crate::oracle::case::Case;
use crate::oracle::random::{Draw, Rng, weights};
use crate::plan::{Activation, Dim, GluKind, Member, Op, RouteSpec, RouterScore};
use hanzo_gguf::Format;

/// A linear of random activations: `x [tokens, cols]`, `w [rows, cols]`.
pub fn linear_case(
    op: &'static str,
    format: Format,
    (rows, cols, tokens): (usize, usize, usize),
    bytes: Vec<u8>,
    (size, bias): (f64, bool),
    rng: &mut Rng,
) -> Case {
    let mut b = Builder::new(cols);
    let x = b.input("x", Dim::Tokens, cols, rng.floats(tokens * cols, size));
    let w = b.weight("w", format, (1, rows, cols), bytes);
    let bias = bias.then(|| b.vector("bias", &rng.floats(rows, 1.0)));
    let out = b.plan.value("out", Dim::Tokens, rows);
    b.plan.push(Op::Linear { x, member: Member { w, bias, out } });
    b.plan.outputs.push(out);
    b.case(op, format, tokens, format!("{rows} x {cols}, {tokens} tokens, activations x {size:e}"))
}

/// Both precisions of a case.
pub(super) fn both(case: Case, sink: Sink<'_>) {
    sink(Case { precision: Precision::Int8, ..case.clone() });
    sink(case);
}

/// Contraction lengths: one block, and several.
fn lengths(format: Format) -> Vec<usize> {
    match format.block_len() {
        1 => vec![1, 7, 64, 300],
        32 => vec![32, 96, 1280],
        n => vec![n, 3 * n],
    }
}

pub(super) fn matvec(context: &Context<'_>, sink: Sink<'_>) {
    for format in weight_formats() {
        let rng = &mut context.rng(&format!("matvec {format}"));
        for cols in lengths(format) {
            for rows in [1, 3, 33] {
                let w = weights(format, rows, cols, Draw::Usual, rng);
                both(linear_case("linear", format, (rows, cols, 1), w, (1.0, rows == 3), rng), sink);
            }
        }
        let cols = *lengths(format).last().unwrap_or(&256);
        let mut special = |draw: Draw, size: f64| {
            let w = weights(format, 5, cols, draw, rng);
            both(linear_case("linear", format, (5, cols, 1), w, (size, false), rng), sink);
        };
        special(Draw::Tiny, 1.0);
        special(Draw::Zero, 1.0);
        special(Draw::Usual, 1e6);
        special(Draw::Usual, 1e-12);
        special(Draw::Usual, 0.0);
        real(context, format, 1, rng, sink);
    }
}

pub(super) fn gemm(context: &Context<'_>, sink: Sink<'_>) {
    for format in weight_formats() {
        let rng = &mut context.rng(&format!("gemm {format}"));
        let cols = lengths(format)[1];
        for (rows, tokens) in [(1, 33), (3, 2), (5, 3), (33, 4), (40, 5), (17, 12), (33, 33)] {
            let w = weights(format, rows, cols, Draw::Usual, rng);
            both(linear_case("linear", format, (rows, cols, tokens), w, (1.0, rows == 5), rng), sink);
        }
        // More than one tile of tokens and of rows.
        let w = weights(format, 131, cols, Draw::Usual, rng);
        both(linear_case("linear", format, (131, cols, 140), w, (1.0, false), rng), sink);
        for draw in [Draw::Tiny, Draw::Zero] {
            let w = weights(format, 5, cols, draw, rng);
            both(linear_case("linear", format, (5, cols, 6), w, (1.0, false), rng), sink);
        }
        let w = weights(format, 5, cols, Draw::Usual, rng);
        both(linear_case("linear", format, (5, cols, 6), w, (1e6, false), rng), sink);
        both(head_case(format, (35, cols.next_multiple_of(32)), rng), sink);
        real(context, format, 7, rng, sink);
    }
}

/// The output head: some rows of x, in chunks; its activations are quantized in two terms.
pub fn head_case(format: Format, (rows, cols): (usize, usize), rng: &mut Rng) -> Case {
    let tokens = 9;
    let mut b = Builder::new(cols);
    let x = b.input("x", Dim::Tokens, cols, rng.floats(tokens * cols, 1.0));
    let bytes = weights(format, rows, cols, Draw::Usual, rng);
    let w = b.weight("w", format, (1, rows, cols), bytes);
    b.plan.head = Some(0);
    let last = b.plan.value("last", Dim::Out, cols);
    b.plan.push(Op::GatherRows { x, out: last });
    let out = b.plan.value("out", Dim::Out, rows);
    b.plan.push(Op::Linear { x: last, member: Member { w, bias: None, out } });
    b.plan.outputs.push(out);
    let mut case = b.case("linear", format, tokens, "output head, 5 rows in chunks of 3".into());
    case.steps[0].out_rows = vec![0, 2, 3, 7, 8];
    case.chunk = Some(3);
    case
}

pub(super) fn bf16_activations(context: &Context<'_>, sink: Sink<'_>) {
    let rng = &mut context.rng("bf16 activations");
    // Through an identity: ties both ways, signs, the ends of the range, subnormal floats, ordinary ones.
    const N: usize = 40;
    let mut x = rng.floats(N, 1.0);
    let half = 2f32.powi(-8);
    let special = [1.0 + half, 1.0 + 3.0 * half, -1.0 - half, 1.0 + half * 1.001, 1.0 - half / 2.0, 1.0 - half / 4.0];
    x[..6].copy_from_slice(&special);
    x[6..12].copy_from_slice(&[1e-39, -1e-40, f32::MIN_POSITIVE, -0.0, 1e6, -1e-30]);
    let one = |i: usize| if i / N == i % N { 0x3f80u16 } else { 0 };
    let identity: Vec<u8> = (0..N * N).flat_map(|i| one(i).to_le_bytes()).collect();
    for tokens in [1, 7] {
        let mut b = Builder::new(N);
        let rows = (0..tokens).flat_map(|t| x.iter().map(move |x| x * if t % 2 == 0 { 1.0 } else { -1.0 })).collect();
        let input = b.input("x", Dim::Tokens, N, rows);
        let w = b.weight("identity", Format::BF16, (1, N, N), identity.clone());
        let out = b.plan.value("out", Dim::Tokens, N);
        b.plan.push(Op::Linear { x: input, member: Member { w, bias: None, out } });
        b.plan.outputs.push(out);
        both(b.case("linear", Format::BF16, tokens, format!("{tokens} rows through an identity")), sink);
    }
    // Rows of one slice of k and of several, with and without a rest; several tiles and blocks of tokens and rows.
    for (rows, cols, tokens) in [(6, 1024, 1), (6, 2100, 1), (5, 1056, 3), (9, 2049, 8), (4, 3072, 13), (131, 1030, 27)]
    {
        for draw in [Draw::Usual, Draw::Tiny] {
            let w = weights(Format::BF16, rows, cols, draw, rng);
            both(linear_case("linear", Format::BF16, (rows, cols, tokens), w, (1.0, rows == 5), rng), sink);
        }
    }
    both(head_case(Format::BF16, (35, 1100), rng), sink);
}

/// The real matrices of a format.
fn real(context: &Context<'_>, format: Format, tokens: usize, rng: &mut Rng, sink: Sink<'_>) {
    for m in context.real.iter().filter(|m| m.format == format) {
        let shape = (m.rows, m.cols, tokens);
        let mut case = linear_case("linear", format, shape, m.bytes.clone(), (1.0, false), rng);
        case.about = format!("{}: {}", m.name, case.about);
        both(case, sink);
    }
}

/// Linears of several formats over one x: as q, k and v, or (`glu`) as gate and up.
pub fn group_case(formats: &[Format], (rows, cols, tokens): (usize, usize, usize), glu: bool, rng: &mut Rng) -> Case {
    let mut b = Builder::new(cols);
    let x = b.input("x", Dim::Tokens, cols, rng.floats(tokens * cols, 1.0));
    let mut outs = Vec::new();
    for (i, &format) in formats.iter().enumerate() {
        // q has more rows than k and v; gate and up are alike.
        let rows = if i == 0 && !glu { 2 * rows } else { rows };
        let bytes = weights(format, rows, cols, Draw::Usual, rng);
        let w = b.weight(&format!("w{i}"), format, (1, rows, cols), bytes);
        // Three of one format have none: they may share a launch.
        let biased = i == 1 && (glu || formats.iter().any(|f| *f != formats[0]));
        let bias = biased.then(|| b.vector("bias", &rng.floats(rows, 1.0)));
        let out = b.plan.value(format!("out{i}"), Dim::Tokens, rows);
        b.plan.push(Op::Linear { x, member: Member { w, bias, out } });
        outs.push(out);
    }
    if let (true, &[gate, up, ..]) = (glu, &outs[..]) {
        let out = b.like(gate, "glu");
        b.plan.push(Op::Glu { gate, up, kind: GluKind::Plain(Activation::Silu), out });
        outs.push(out);
    }
    b.plan.outputs = outs;
    let names: Vec<&str> = formats.iter().map(|f| f.name()).collect();
    b.case("linear_group", formats[0], tokens, format!("{}, {tokens} tokens", names.join("+")))
}

pub(super) fn group(context: &Context<'_>, sink: Sink<'_>) {
    let all: Vec<Format> = weight_formats().collect();
    for i in 0..all.len() {
        let rng = &mut context.rng(&format!("group {i}"));
        let pick = |n: usize| all[(i + n) % all.len()];
        let cols = if i % 3 == 0 { 768 } else { 256 };
        for tokens in [1, 5] {
            both(group_case(&[pick(0), pick(1), pick(7)], (9, cols, tokens), false, rng), sink);
            both(group_case(&[pick(0), pick(0)], (11, cols, tokens), true, rng), sink);
            both(group_case(&[pick(0), pick(0), pick(0)], (9, cols, tokens), false, rng), sink);
        }
    }
}

/// Gate and up of one format, their glu and perhaps a down projection, dense or by experts, who are given or `routed` from logits:
/// the last value is the only output.
fn feed_forward_case(
    format: Format,
    (tokens, experts, down): (usize, usize, bool),
    routed: Option<RouterScore>,
    rng: &mut Rng,
) -> Case {
    let (rows, cols, k) = (format.block_len().max(64), format.block_len().max(64), 2);
    let mut b = Builder::new(cols);
    let mut x = b.input("x", Dim::Tokens, cols, rng.floats(tokens * cols, 1.0));
    let routing = routed.map(|score| {
        let (normalise, scale) = (score != RouterScore::Sigmoid, if tokens == 1 { 1.0 } else { 2.5 });
        let spec = RouteSpec { n_expert: experts, top_k: k, score, bias: None, groups: None, normalise, scale };
        // As in a model: a norm, and the router behind it, here of nothing but its bias. Of four sizes only: ties, and none
        // that rounding would make.
        let h = b.like(x, "h");
        b.plan.push(Op::RmsNorm { x, weight: None, eps: 1e-6, group: cols, out: h });
        x = h;
        let bias: Vec<f32> = (0..experts).map(|_| rng.below(4) as f32 * 0.75 - 1.0).collect();
        let zeros = vec![0; 4 * experts * cols];
        let (w, bias) = (b.weight("router", Format::F32, (1, experts, cols), zeros), Some(b.vector("bias", &bias)));
        let logits = b.plan.value("logits", Dim::Tokens, experts);
        b.plan.push(Op::Linear { x, member: Member { w, bias, out: logits } });
        super::route::chosen(&mut b, logits, &spec)
    });
    let ids = routing.map(|r| r.0).or_else(|| {
        if experts == 1 {
            return None;
        }
        let data =
            (0..tokens).flat_map(|_| rng.permutation(experts)[..k].iter().map(|e| *e as f32).collect::<Vec<_>>());
        let data = data.collect();
        Some(b.ids("ids", k, data))
    });
    let dim = if ids.is_some() { Dim::Slots(k) } else { Dim::Tokens };
    let mut linear = |b: &mut Builder, x, name: &str, (rows, cols)| {
        let bytes = weights(format, experts * rows, cols, Draw::Usual, rng);
        let w = b.weight(name, format, (experts, rows, cols), bytes);
        let out = b.plan.value(format!("{name}.out"), dim, rows);
        let member = Member { w, bias: None, out };
        b.plan.push(ids.map_or(Op::Linear { x, member }, |ids| Op::MoeLinear { x, ids, member }));
        out
    };
    let gate = linear(&mut b, x, "gate", (rows, cols));
    let up = linear(&mut b, x, "up", (rows, cols));
    let clamped = GluKind::SwigluClamped { alpha: 1.702, limit: 7.0 };
    let kind = if tokens == 1 { GluKind::Plain(Activation::Silu) } else { clamped };
    let mut out = b.like(gate, "glu");
    b.plan.push(Op::Glu { gate, up, kind, out });
    if down {
        out = linear(&mut b, out, "down", (cols, rows));
    }
    if let (true, Some(_)) = (down, ids) {
        let weights = match routing {
            Some((_, weights)) => weights,
            None => b.input("weights", Dim::Tokens, k, rng.floats(tokens * k, 0.5)),
        };
        let sum = b.plan.value("sum", Dim::Tokens, cols);
        b.plan.push(Op::MoeCombine { x: out, weights, out: sum });
        out = sum;
    }
    b.plan.outputs = vec![out];
    let about = format!("{tokens} tokens, {experts} experts, {}", if down { "down" } else { "gate and up" });
    Case { precision: Precision::Int8, ..b.case("feed_forward", format, tokens, about) }
}

pub(super) fn feed_forward(context: &Context<'_>, sink: Sink<'_>) {
    for format in weight_formats().filter(|f| f.is_block()) {
        let rng = &mut context.rng(&format!("feed forward {format}"));
        for (tokens, experts) in [(1, 1), (3, 1), (9, 1), (1, 5), (3, 5)] {
            for down in [false, true] {
                sink(feed_forward_case(format, (tokens, experts, down), None, rng));
            }
        }
    }
}

/// A residual sum, its norm, and what reads that: three linears, or (`glu`) gate, up, their glu and a down projection.
fn normed_case(format: Format, (tokens, weighted): (usize, bool), glu: bool, rng: &mut Rng) -> Case {
    let (rows, cols) = (format.block_len().max(64), 3 * format.block_len().max(32));
    let mut b = Builder::new(cols);
    let x = b.input("x", Dim::Tokens, cols, rng.floats(tokens * cols, 1.0));
    let a = b.input("a", Dim::Tokens, cols, rng.floats(tokens * cols, 3.0));
    let weight = weighted.then(|| b.vector("norm", &rng.floats(cols, 1.0)));
    let (sum, h) = (b.like(x, "sum"), b.like(x, "h"));
    b.plan.push(Op::Add { a: x, b: a, out: sum });
    b.plan.push(Op::RmsNorm { x: sum, weight, eps: 1e-6, group: cols, out: h });
    let mut linear = |b: &mut Builder, x, name: &str, (rows, cols), bias: bool| {
        let bytes = weights(format, rows, cols, Draw::Usual, rng);
        let w = b.weight(name, format, (1, rows, cols), bytes);
        let bias = bias.then(|| b.vector(&format!("{name}.bias"), &rng.floats(rows, 1.0)));
        let out = b.plan.value(format!("{name}.out"), Dim::Tokens, rows);
        b.plan.push(Op::Linear { x, member: Member { w, bias, out } });
        out
    };
    if glu {
        let gate = linear(&mut b, h, "gate", (rows, cols), false);
        let up = linear(&mut b, h, "up", (rows, cols), false);
        let out = b.like(gate, "glu");
        b.plan.push(Op::Glu { gate, up, kind: GluKind::Plain(Activation::Silu), out });
        let down = linear(&mut b, out, "down", (33, rows), false);
        b.plan.outputs = vec![sum, down];
    } else {
        let each =
            [("q", 70), ("k", 33), ("v", 1)].map(|(name, rows)| linear(&mut b, h, name, (rows, cols), rows == 33));
        b.plan.outputs = [&[sum][..], &each].concat();
    }
    let about = format!("{tokens} tokens, {}", if glu { "gate, up and down" } else { "q, k and v" });
    Case { precision: Precision::Int8, ..b.case("normed_linear", format, tokens, about) }
}

pub(super) fn normed_linear(context: &Context<'_>, sink: Sink<'_>) {
    for format in weight_formats().filter(|f| f.is_block()) {
        let rng = &mut context.rng(&format!("normed linear {format}"));
        for (tokens, weighted, glu) in [(1, true, false), (1, false, true), (1, true, true), (3, true, true)] {
            sink(normed_case(format, (tokens, weighted), glu, rng));
        }
    }
}

pub(super) fn routed(context: &Context<'_>, sink: Sink<'_>) {
    let scores = [RouterScore::Softmax, RouterScore::Sigmoid, RouterScore::SoftmaxSelected];
    for (i, format) in weight_formats().filter(|f| f.is_block()).enumerate() {
        let rng = &mut context.rng(&format!("routed {format}"));
        for (tokens, experts) in [(1, 5), (1, 33), (3, 5)] {
            for down in [false, true] {
                let score = scores[(i + usize::from(down)) % scores.len()];
                sink(feed_forward_case(format, (tokens, experts, down), Some(score), rng));
            }
        }
    }
    // As many experts as a model has, of whom most are never asked.
    let rng = &mut context.rng("routed, many");
    for score in scores {
        sink(feed_forward_case(Format::Q4_0, (1, 300, true), Some(score), rng));
    }
}

pub(super) fn embed(context: &Context<'_>, sink: Sink<'_>) {
    const VOCABULARY: usize = 40;
    for format in weight_formats() {
        let rng = &mut context.rng(&format!("embed {format}"));
        let cols = lengths(format)[1];
        for (scale, tokens, draw) in [(1.0f32, 1, Draw::Usual), (11.3, 33, Draw::Usual), (1.0, 3, Draw::Tiny)] {
            let mut b = Builder::new(cols);
            let bytes = weights(format, VOCABULARY, cols, draw, rng);
            let table = b.weight("table", format, (1, VOCABULARY, cols), bytes);
            let out = b.plan.value("out", Dim::Tokens, cols);
            b.plan.push(Op::Embed { table, scale, out });
            b.plan.outputs.push(out);
            let mut case = b.case("embed", format, tokens, format!("{tokens} tokens, scale {scale}"));
            case.steps[0].tokens = (0..tokens).map(|_| rng.below(VOCABULARY) as u32).collect();
            sink(case.clone());
            if format == Format::Q4_0 {
                case.steps[0].embeddings = Some(rng.floats(tokens * cols, 1.0));
                case.about += ", embedding rows";
                case.exact = true;
                sink(case);
            }
        }
    }
}

pub(super) fn quantize(context: &Context<'_>, sink: Sink<'_>) {
    let rng = &mut context.rng("quantize");
    let mut rows: Vec<Vec<f32>> = vec![
        rng.floats(64, 1.0),
        vec![0.0; 64],
        // Every code, its neighbours' halves (ties go to even), and the ends.
        (0..64).map(|i| if i == 0 { 127.0 } else { i as f32 + 0.5 }).collect(),
        (0..64).map(|i| if i % 32 == 0 { -127.0 } else { -(i as f32) - 0.5 }).collect(),
        rng.floats(64, 1e30),
        rng.floats(64, 1e-30),
        // 1/d overflows: zeros. And just before it does.
        rng.floats(64, 1e-38),
        rng.floats(64, 1e-36),
        vec![f32::MIN_POSITIVE / 8.0; 64],
        vec![-3.25; 64],
    ];
    // One outlier among small numbers, and blocks of different sizes in one row.
    let mut outlier = rng.floats(64, 1e-3);
    outlier[17] = -40.0;
    rows.push(outlier);
    rows.extend((0..20).map(|i| rng.floats(64, f64::from(i) + 0.1)));
    for tokens in [1, rows.len()] {
        for chunk in rows.chunks(tokens) {
            let mut b = Builder::new(64);
            let x = b.input("x", Dim::Tokens, 64, chunk.concat());
            // Row r of the identity: one code of 1 under a scale of 1 (a half is 0x3c00).
            let identity = |r: usize, block: usize| {
                let mut bytes = vec![0x00, 0x3c];
                bytes.extend((0..32).map(|j| u8::from(block * 32 + j == r)));
                bytes
            };
            let bytes = (0..64).flat_map(|r| [identity(r, 0), identity(r, 1)].concat()).collect();
            let w = b.weight("identity", Format::Q8_0, (1, 64, 64), bytes);
            let out = b.plan.value("out", Dim::Tokens, 64);
            b.plan.push(Op::Linear { x, member: Member { w, bias: None, out } });
            b.plan.outputs.push(out);
            let case = b.case("quantize", "-", tokens, format!("{tokens} rows through an identity"));
            sink(Case { precision: Precision::Int8, exact: true, ..case });
        }
    }
}
