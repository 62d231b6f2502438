//! Cases of functions of single elements, and of moves.

use super::{Builder, Context, Sink};
use crate::oracle::random::Rng;
use crate::plan::{Activation, Dim, GluKind, Op, ValueId};

const ACTIVATIONS: [Activation; 6] = [
    Activation::Silu,
    Activation::GeluTanh,
    Activation::GeluErf,
    Activation::Relu2,
    Activation::Sigmoid,
    Activation::Softplus,
];

/// Usual numbers, then the far ends, zeros and small ones.
fn values(n: usize, rng: &mut Rng) -> Vec<f32> {
    const SPECIAL: [f32; 12] = [0.0, -0.0, 1e-8, -1e-8, 20.0, -20.0, 90.0, -90.0, 1e4, -1e4, 0.5, -1e-30];
    let mut x = rng.floats(n, 3.0);
    for (to, s) in x.iter_mut().skip(3).step_by(3).zip(SPECIAL) {
        *to = s;
    }
    x
}

const SHAPES: [(usize, usize); 4] = [(1, 1), (1, 37), (5, 64), (33, 100)];

fn one(
    op: &'static str,
    about: String,
    (tokens, cols): (usize, usize),
    rng: &mut Rng,
    sink: Sink<'_>,
    make: impl FnOnce(&mut Builder, ValueId, ValueId, &mut Rng) -> Op,
) {
    let mut b = Builder::new(cols);
    let x = b.input("x", Dim::Tokens, cols, values(tokens * cols, rng));
    let out = b.like(x, "out");
    let op_made = make(&mut b, x, out, rng);
    b.plan.push(op_made);
    b.plan.outputs.push(out);
    sink(b.case(op, "-", tokens, format!("{about}, {tokens} x {cols}")));
}

pub(super) fn glu(context: &Context<'_>, sink: Sink<'_>) {
    let rng = &mut context.rng("glu");
    let clamped = GluKind::SwigluClamped { alpha: 1.702, limit: 7.0 };
    for kind in ACTIVATIONS.map(GluKind::Plain).into_iter().chain([clamped]) {
        for (tokens, cols) in SHAPES {
            one("glu", format!("{kind:?}"), (tokens, cols), rng, sink, |b, gate, out, rng| {
                let up = b.input("up", Dim::Tokens, cols, rng.floats(tokens * cols, 4.0));
                Op::Glu { gate, up, kind, out }
            });
        }
    }
}

pub(super) fn elementwise(context: &Context<'_>, sink: Sink<'_>) {
    let rng = &mut context.rng("elementwise");
    for (tokens, cols) in SHAPES {
        let shape = (tokens, cols);
        for kind in ACTIVATIONS {
            one("act", format!("{kind:?}"), shape, rng, sink, |_, x, out, _| Op::Act { x, kind, out });
        }
        one("add", "add".into(), shape, rng, sink, |b, x, out, rng| {
            let y = b.input("y", Dim::Tokens, cols, rng.floats(tokens * cols, 100.0));
            Op::Add { a: x, b: y, out }
        });
        one("mul", "mul".into(), shape, rng, sink, |b, x, out, rng| {
            let y = b.input("y", Dim::Tokens, cols, rng.floats(tokens * cols, 1.0));
            Op::Mul { a: x, b: y, out }
        });
        one("mul", "mul by one column".into(), shape, rng, sink, |b, x, out, rng| {
            let y = b.input("y", Dim::Tokens, 1, rng.floats(tokens, 1.0));
            Op::Mul { a: x, b: y, out }
        });
        one("scale", "scale".into(), shape, rng, sink, |_, x, out, _| Op::Scale { x, s: 0.3, out });
        one("softcap", "softcap".into(), shape, rng, sink, |_, x, out, _| Op::Softcap { x, cap: 30.0, out });
    }
}

pub(super) fn moves(context: &Context<'_>, sink: Sink<'_>) {
    let rng = &mut context.rng("moves");
    for (tokens, cols) in SHAPES {
        let x = values(tokens * cols, rng);
        for first in [0, cols / 3, cols - 1] {
            let mut b = Builder::new(cols);
            let x = b.input("x", Dim::Tokens, cols, x.clone());
            let out = b.plan.value("out", Dim::Tokens, (cols - first).div_ceil(2));
            b.plan.push(Op::Columns { x, first, out });
            b.plan.outputs.push(out);
            let mut case = b.case("columns", "-", tokens, format!("from column {first} of {cols}"));
            case.exact = true;
            sink(case);
        }
        let mut b = Builder::new(cols);
        let a = b.input("a", Dim::Tokens, cols, x.clone());
        let c = b.input("b", Dim::Tokens, 5, rng.floats(tokens * 5, 1.0));
        let out = b.plan.value("out", Dim::Tokens, cols + 5);
        b.plan.push(Op::Concat { a, b: c, out });
        let copied = b.plan.value("copied", Dim::Tokens, cols);
        b.plan.push(Op::Copy { x: a, out: copied });
        b.plan.outputs = vec![out, copied];
        let mut case = b.case("concat", "-", tokens, format!("{cols} and 5 columns, and a copy"));
        case.exact = true;
        sink(case);
    }
}

pub(super) fn gather(context: &Context<'_>, sink: Sink<'_>) {
    let rng = &mut context.rng("gather");
    for (tokens, out_rows, chunk) in
        [(1, vec![0], 1), (5, vec![4], 1), (33, vec![0, 7, 31, 32], 4), (33, (0..33).collect(), 8)]
    {
        let mut b = Builder::new(24);
        let x = b.input("x", Dim::Tokens, 24, rng.floats(tokens * 24, 1.0));
        b.plan.head = Some(0);
        let rows = b.plan.value("rows", Dim::Out, 24);
        b.plan.push(Op::GatherRows { x, out: rows });
        // A head of two ops, so that chunks pass through more than one.
        let out = b.plan.value("out", Dim::Out, 24);
        b.plan.push(Op::Scale { x: rows, s: 0.5, out });
        b.plan.outputs.push(out);
        let mut case =
            b.case("gather_rows", "-", tokens, format!("{} of {tokens} rows, {chunk} a chunk", out_rows.len()));
        case.steps[0].out_rows = out_rows;
        case.chunk = Some(chunk);
        case.exact = true;
        sink(case);
    }
}
