//! Cases of expert linears and of combining their outputs.

use super::contraction::both;
use super::{Builder, Context, Sink, weight_formats};
use crate::oracle::case::Case;
use crate::oracle::random::{Draw, Rng, weights};
use crate::plan::{Activation, Dim, GluKind, Member, Op};
use hanzo_gguf::Format;

/// Which experts tokens go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// Distinct random experts a token.
    Random,
    /// Every token to the same experts, the last ones.
    Same,
    /// One expert gets no token at all (the first one).
    FirstEmpty,
}

const EXPERTS: usize = 6;
const TOP_K: usize = 2;

fn ids(routing: Routing, tokens: usize, rng: &mut Rng) -> Vec<f32> {
    let pick = |rng: &mut Rng| match routing {
        Routing::Same => (EXPERTS - TOP_K..EXPERTS).map(|e| e as f32).collect::<Vec<_>>(),
        Routing::Random => rng.permutation(EXPERTS)[..TOP_K].iter().map(|e| *e as f32).collect(),
        Routing::FirstEmpty => rng.permutation(EXPERTS - 1)[..TOP_K].iter().map(|e| *e as f32 + 1.0).collect(),
    };
    (0..tokens).flat_map(|_| pick(rng)).collect()
}

/// Expert linears over one x (one row a token, or one a slot with `per_slot`); two formats make a gate and an up.
pub fn moe_case(
    formats: &[Format],
    (rows, cols, tokens): (usize, usize, usize),
    routing: Routing,
    per_slot: bool,
    rng: &mut Rng,
) -> Case {
    let mut b = Builder::new(cols);
    let ids = {
        let data = ids(routing, tokens, rng);
        b.ids("ids", TOP_K, data)
    };
    let (dim, n) = if per_slot { (Dim::Slots(TOP_K), tokens * TOP_K) } else { (Dim::Tokens, tokens) };
    let x = b.input("x", dim, cols, rng.floats(n * cols, 1.0));
    let mut outs = Vec::new();
    for (i, &format) in formats.iter().enumerate() {
        let bytes = weights(format, EXPERTS * rows, cols, Draw::Usual, rng);
        let w = b.weight(&format!("w{i}"), format, (EXPERTS, rows, cols), bytes);
        let bias = (i == 0 && rows % 2 == 1).then(|| b.matrix("bias", EXPERTS, &rng.floats(EXPERTS * rows, 1.0)));
        let out = b.plan.value(format!("out{i}"), Dim::Slots(TOP_K), rows);
        b.plan.push(Op::MoeLinear { x, ids, member: Member { w, bias, out } });
        outs.push(out);
    }
    if let &[gate, up] = &outs[..] {
        let out = b.like(gate, "glu");
        b.plan.push(Op::Glu { gate, up, kind: GluKind::Plain(Activation::Silu), out });
        outs.push(out);
    }
    b.plan.outputs = outs;
    let op = if formats.len() > 1 { "moe_linear_group" } else { "moe_linear" };
    b.case(op, formats[0], tokens, format!("{rows} x {cols}, {tokens} tokens, {routing:?}, per slot: {per_slot}"))
}

fn cols(format: Format) -> usize {
    2 * format.block_len().max(32)
}

pub(super) fn matvec(context: &Context<'_>, sink: Sink<'_>) {
    for format in weight_formats() {
        let rng = &mut context.rng(&format!("moe matvec {format}"));
        for (rows, per_slot) in [(1, false), (3, true), (34, false)] {
            both(moe_case(&[format], (rows, cols(format), 1), Routing::Random, per_slot, rng), sink);
        }
    }
}

pub(super) fn gemm(context: &Context<'_>, sink: Sink<'_>) {
    for format in weight_formats() {
        let rng = &mut context.rng(&format!("moe gemm {format}"));
        for (rows, tokens, routing, per_slot) in [
            (3, 2, Routing::Random, false),
            (9, 5, Routing::FirstEmpty, true),
            (17, 12, Routing::Same, false),
            (10, 33, Routing::Random, true),
        ] {
            both(moe_case(&[format], (rows, cols(format), tokens), routing, per_slot, rng), sink);
        }
    }
}

pub(super) fn pair(context: &Context<'_>, sink: Sink<'_>) {
    let all: Vec<Format> = weight_formats().collect();
    for (i, &format) in all.iter().enumerate() {
        let rng = &mut context.rng(&format!("moe pair {format}"));
        for (other, tokens, routing) in
            [(format, 1, Routing::Random), (all[(i + 5) % all.len()], 7, Routing::FirstEmpty)]
        {
            both(moe_case(&[format, other], (9, 256, tokens), routing, false, rng), sink);
        }
    }
}

pub(super) fn combine(context: &Context<'_>, sink: Sink<'_>) {
    let rng = &mut context.rng("moe combine");
    for (tokens, k, cols) in [(1, 1, 7), (1, 8, 64), (5, 2, 33), (33, 4, 100)] {
        let mut b = Builder::new(cols);
        let x = b.input("x", Dim::Slots(k), cols, rng.floats(tokens * k * cols, 1.0));
        let weights = b.input("weights", Dim::Tokens, k, rng.floats(tokens * k, 0.5));
        let out = b.plan.value("out", Dim::Tokens, cols);
        b.plan.push(Op::MoeCombine { x, weights, out });
        b.plan.outputs.push(out);
        sink(b.case("moe_combine", "-", tokens, format!("{tokens} tokens of {k} experts, {cols} columns")));
    }
}
