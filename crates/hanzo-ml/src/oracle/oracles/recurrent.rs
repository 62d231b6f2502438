//! Cases of ops with a carried state: several sequences, steps of different lengths, slots out of order.

use super::{Builder, Context, Sink};
use crate::cache::StateSpec;
use crate::oracle::case::{Case, Step};
use crate::oracle::random::Rng;
use crate::plan::{Activation, Dim, Op, StateId, ValueId};

/// Steps of two sequences (the second joins later) in slots 3 and 1 of 4.
const STEPS: [&[usize]; 4] = [&[5], &[1], &[2, 6], &[1, 1]];

fn steps(inputs: &[(ValueId, usize, f64)], rng: &mut Rng) -> Vec<Step> {
    let mut next = [0u32; 2];
    let step = |lens: &&[usize]| {
        let mut step = Step { seq_offsets: vec![0], state_slots: [3, 1][..lens.len()].to_vec(), ..Step::default() };
        for (seq, &n) in lens.iter().enumerate() {
            step.positions.extend(next[seq]..next[seq] + n as u32);
            next[seq] += n as u32;
            step.seq_offsets.push(step.positions.len() as u32);
        }
        let n = step.positions.len();
        step.tokens = vec![0; n];
        step.inputs = inputs.iter().map(|(v, cols, size)| (*v, rng.floats(n * cols, *size))).collect();
        step
    };
    STEPS.iter().map(step).collect()
}

fn finish(mut b: Builder, op: &'static str, about: String, inputs: &[(ValueId, usize, f64)], rng: &mut Rng) -> Case {
    b.inputs.clear();
    let mut case = b.case(op, "-", 0, about);
    case.steps = steps(inputs, rng);
    case.slots = vec![4];
    case
}

pub(super) fn short_conv(context: &Context<'_>, sink: Sink<'_>) {
    let rng = &mut context.rng("short conv");
    for (cols, kernel, activation) in
        [(64, 4, Some(Activation::Silu)), (33, 3, None), (7, 1, None), (16, 2, Some(Activation::Sigmoid))]
    {
        let mut b = Builder::new(cols);
        b.plan.states.push(StateSpec { name: "conv".into(), layers: 2, elements: (kernel - 1) * cols });
        let x = b.input("x", Dim::Tokens, cols, Vec::new());
        let weight = b.matrix("w", cols, &rng.floats(cols * kernel, 0.7));
        let bias = (cols % 2 == 1).then(|| b.vector("bias", &rng.floats(cols, 1.0)));
        let out = b.like(x, "out");
        b.plan.push(Op::ShortConv { x, weight, bias, kernel, activation, state: StateId(0), layer: 1, out });
        b.plan.outputs.push(out);
        sink(finish(b, "short_conv", format!("{kernel} taps, {cols} columns"), &[(x, cols, 1.0)], rng));
    }
}

pub(super) fn gated_delta(context: &Context<'_>, sink: Sink<'_>) {
    let rng = &mut context.rng("gated delta");
    for (n_head, n_key_head, d_k, d_v) in [(2, 2, 16, 16), (4, 2, 32, 24), (3, 1, 8, 40)] {
        let mut b = Builder::new(n_head * d_v);
        let elements = n_head * d_k * d_v;
        b.plan.states.push(StateSpec { name: "delta".into(), layers: 1, elements });
        let shapes = [
            ("q", n_key_head * d_k, 1.0),
            ("k", n_key_head * d_k, 1.0),
            ("v", n_head * d_v, 1.0),
            ("decay", n_head, 0.5),
            ("beta", n_head, 0.4),
        ];
        let inputs = shapes.map(|(name, cols, size)| (b.input(name, Dim::Tokens, cols, Vec::new()), cols, size));
        let [q, k, v, decay, beta] = inputs.map(|i| i.0);
        let out = b.plan.value("out", Dim::Tokens, n_head * d_v);
        let (state, layer, eps) = (StateId(0), 0, 1e-6);
        b.plan.push(Op::GatedDelta { q, k, v, decay, beta, n_head, n_key_head, d_k, d_v, eps, state, layer, out });
        b.plan.outputs.push(out);
        let mut case = finish(b, "gated_delta", format!("{n_head} heads of {d_k} x {d_v}"), &inputs, rng);
        // Decays are logarithms: at most zero.
        for data in case.steps.iter_mut().flat_map(|s| &mut s.inputs).filter(|(v, _)| *v == decay) {
            data.1.iter_mut().for_each(|g| *g = -g.abs());
        }
        sink(case);
    }
}
