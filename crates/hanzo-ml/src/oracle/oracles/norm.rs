//! Cases of norms.

use super::{Builder, Context, Sink};
use crate::oracle::random::Rng;
use crate::plan::{Dim, Op};

/// Rows of the kinds that norms get wrong: usual, large, tiny, zero, one outlier, far from zero mean.
fn rows(cols: usize, tokens: usize, rng: &mut Rng) -> Vec<f32> {
    let row = |i: usize, rng: &mut Rng| {
        let mut row = rng.floats(cols, [1.0, 1e4, 1e-15, 0.0, 0.05, 1.0][i % 6]);
        match i % 6 {
            4 => row[cols / 2] = 300.0,
            5 => row.iter_mut().for_each(|x| *x += 100.0),
            _ => {}
        }
        row
    };
    (0..tokens).flat_map(|i| row(i, rng)).collect()
}

const SHAPES: [(usize, usize); 7] = [(1, 1), (3, 2), (32, 6), (100, 12), (576, 5), (1537, 6), (4096, 1)];

pub(super) fn rms(context: &Context<'_>, sink: Sink<'_>) {
    let rng = &mut context.rng("rms");
    let heads = [(128, 32, 6), (192, 64, 5), (96, 3, 2)];
    for (cols, group, tokens) in SHAPES.iter().map(|(c, t)| (*c, *c, *t)).chain(heads) {
        for weighted in [true, false] {
            let mut b = Builder::new(cols);
            let x = b.input("x", Dim::Tokens, cols, rows(cols, tokens, rng));
            let weight = weighted.then(|| b.vector("w", &rng.floats(group, 1.0)));
            let out = b.like(x, "out");
            b.plan.push(Op::RmsNorm { x, weight, eps: 1e-6, group, out });
            b.plan.outputs.push(out);
            sink(b.case("rms_norm", "-", tokens, format!("{tokens} rows of {cols} in groups of {group}")));
        }
    }
}

pub(super) fn add_rms(context: &Context<'_>, sink: Sink<'_>) {
    let rng = &mut context.rng("add rms");
    for (cols, tokens) in SHAPES {
        for weighted in [true, false] {
            let mut b = Builder::new(cols);
            let a = b.input("a", Dim::Tokens, cols, rows(cols, tokens, rng));
            let other = rows(cols, tokens, rng);
            let c = b.input("b", Dim::Tokens, cols, other);
            let weight = weighted.then(|| b.vector("w", &rng.floats(cols, 1.0)));
            let (sum, out) = (b.like(a, "sum"), b.like(a, "out"));
            b.plan.push(Op::Add { a, b: c, out: sum });
            b.plan.push(Op::RmsNorm { x: sum, weight, eps: 1e-5, group: cols, out });
            b.plan.outputs = vec![sum, out];
            sink(b.case("add_rms_norm", "-", tokens, format!("{tokens} rows of {cols}")));
        }
    }
}

pub(super) fn layer(context: &Context<'_>, sink: Sink<'_>) {
    let rng = &mut context.rng("layer norm");
    for (cols, tokens) in SHAPES {
        let mut b = Builder::new(cols);
        let x = b.input("x", Dim::Tokens, cols, rows(cols, tokens, rng));
        let weight = b.vector("w", &rng.floats(cols, 1.0));
        let bias = (tokens % 2 == 0).then(|| b.vector("bias", &rng.floats(cols, 1.0)));
        let out = b.like(x, "out");
        b.plan.push(Op::LayerNorm { x, weight, bias, eps: 1e-5, out });
        b.plan.outputs.push(out);
        sink(b.case("layer_norm", "-", tokens, format!("{tokens} rows of {cols}")));
    }
}
