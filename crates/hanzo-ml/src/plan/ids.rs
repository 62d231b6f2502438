//! The ids inside an op, to renumber: what a rewrite that moves ops between Plans needs, and nothing else.

use super::op::{CacheSlot, Op, StateId};
use super::value::{ValueId, WeightId};

/// One id of an op.
#[derive(Debug, PartialEq, Eq)]
pub enum IdMut<'a> {
    /// A value, read or written.
    Value(&'a mut ValueId),
    /// A weight, read or only named (a router's bias stands in all ops of its chain).
    Weight(&'a mut WeightId),
    /// A layer's cached rows.
    Cache(&'a mut CacheSlot),
    /// A layer's recurrent state.
    State(&'a mut StateId, &'a mut u32),
}

impl Op {
    /// Calls `f` with every id in the op.
    pub fn ids_mut(&mut self, f: &mut dyn FnMut(IdMut<'_>)) {
        use IdMut::*;
        fn values(vs: &mut [&mut ValueId], f: &mut dyn FnMut(IdMut<'_>)) {
            vs.iter_mut().for_each(|v| f(Value(v)));
        }
        fn weights<'a>(ws: impl IntoIterator<Item = &'a mut WeightId>, f: &mut dyn FnMut(IdMut<'_>)) {
            ws.into_iter().for_each(|w| f(Weight(w)));
        }
        fn member(m: &mut super::Member, f: &mut dyn FnMut(IdMut<'_>)) {
            f(Weight(&mut m.w));
            weights(&mut m.bias, f);
            f(Value(&mut m.out));
        }
        match self {
            Op::Embed { table, out, .. } => {
                f(Weight(table));
                f(Value(out));
            }
            Op::RmsNorm { x, weight, out, .. } => {
                values(&mut [x, out], f);
                weights(weight, f);
            }
            Op::LayerNorm { x, weight, bias, out, .. } => {
                values(&mut [x, out], f);
                f(Weight(weight));
                weights(bias, f);
            }
            Op::Linear { x, member: m } => {
                f(Value(x));
                member(m, f);
            }
            Op::LinearGroup { x, members } => {
                f(Value(x));
                members.iter_mut().for_each(|m| member(m, f));
            }
            Op::Rope { x, rope, out, .. } => {
                values(&mut [x, out], f);
                weights(&mut rope.factors, f);
            }
            Op::KvStore { k, store } => {
                f(Value(k));
                store.v.iter_mut().for_each(|v| f(Value(v)));
                f(Cache(&mut store.cache));
            }
            Op::QkNormRope { q, k, q_norm, k_norm, rope, q_out, k_out, store, .. } => {
                values(&mut [q, k, q_out], f);
                k_out.iter_mut().for_each(|v| f(Value(v)));
                weights(q_norm, f);
                weights(k_norm, f);
                weights(&mut rope.factors, f);
                if let Some(s) = store {
                    s.v.iter_mut().for_each(|v| f(Value(v)));
                    f(Cache(&mut s.cache));
                }
            }
            Op::Attention { q, spec, out } => {
                values(&mut [q, out], f);
                spec.gate.iter_mut().for_each(|v| f(Value(v)));
                weights(&mut spec.sinks, f);
                f(Cache(&mut spec.cache));
            }
            Op::Quantize { x, out }
            | Op::Act { x, out, .. }
            | Op::Scale { x, out, .. }
            | Op::Softcap { x, out, .. }
            | Op::GatherRows { x, out }
            | Op::Columns { x, out, .. }
            | Op::Copy { x, out } => values(&mut [x, out], f),
            Op::Glu { gate: a, up: b, out, .. }
            | Op::Add { a, b, out }
            | Op::Mul { a, b, out }
            | Op::Concat { a, b, out }
            | Op::MoeCombine { x: a, weights: b, out } => values(&mut [a, b, out], f),
            Op::AddRmsNorm { a, b, weight, sum, out, .. } => {
                values(&mut [a, b, sum, out], f);
                weights(weight, f);
            }
            Op::RouteScores { logits: x, spec, out } | Op::RouteNormalise { weights: x, spec, out } => {
                values(&mut [x, out], f);
                weights(&mut spec.bias, f);
            }
            Op::RouteTopK { scores: x, spec, ids, weights: w } | Op::MoeRoute { logits: x, spec, ids, weights: w } => {
                values(&mut [x, ids, w], f);
                weights(&mut spec.bias, f);
            }
            Op::MoeLinear { x, ids, member: m } => {
                values(&mut [x, ids], f);
                member(m, f);
            }
            Op::MoeLinearGroup { x, ids, members } => {
                values(&mut [x, ids], f);
                members.iter_mut().for_each(|m| member(m, f));
            }
            Op::ShortConv { x, weight, bias, state, layer, out, .. } => {
                values(&mut [x, out], f);
                f(Weight(weight));
                weights(bias, f);
                f(State(state, layer));
            }
            Op::GatedDelta { q, k, v, decay, beta, state, layer, out, .. } => {
                values(&mut [q, k, v, decay, beta, out], f);
                f(State(state, layer));
            }
            Op::AllReduce { xs, out } => {
                xs.iter_mut().for_each(|x| f(Value(x)));
                f(Value(out));
            }
        }
    }
}
