//! Recurrent ops: an item is one sequence's columns (short convolution) or heads (gated delta rule).

use super::Ctx;
use super::contract::{Needs, WorkerScratch};
use crate::backend::CompileOptions;
use crate::cpu::memory::{CpuWeights, Vector};
use crate::cpu::ops::gated_delta::{self, CHUNK, DeltaHeads, DeltaInput};
use crate::cpu::ops::{MatMut, short_conv};
use crate::plan::{Activation, Op, Plan, Sizes, StateId, ValueId};
use std::ops::Range;

/// Columns of a short convolution's item.
const COLUMNS: usize = 512;

/// `ShortConv` or `GatedDelta`, bound.
pub(super) struct StateTask {
    kind: Kind,
    state: StateId,
    layer: usize,
    /// Items a sequence.
    parts: usize,
}

enum Kind {
    Conv {
        x: ValueId,
        weight: Vector,
        bias: Option<Vector>,
        kernel: usize,
        activation: Option<Activation>,
        out: ValueId,
    },
    Delta {
        q: ValueId,
        k: ValueId,
        v: ValueId,
        decay: ValueId,
        beta: ValueId,
        heads: DeltaHeads,
        steps: bool,
        out: ValueId,
    },
}

impl StateTask {
    pub(super) fn new(
        plan: &Plan,
        op: &Op,
        weights: &CpuWeights,
        options: &CompileOptions,
        needs: &mut Needs,
    ) -> Option<StateTask> {
        let vector = |w: crate::plan::WeightId| weights.vector(w.0 as usize);
        match op {
            Op::ShortConv { x, weight, bias, kernel, activation, state, layer, out } => {
                let kind = Kind::Conv {
                    x: *x,
                    weight: vector(*weight),
                    bias: bias.map(vector),
                    kernel: *kernel,
                    activation: *activation,
                    out: *out,
                };
                let parts = plan.val(*x).cols.div_ceil(COLUMNS);
                Some(StateTask { kind, state: *state, layer: *layer as usize, parts })
            }
            Op::GatedDelta { q, k, v, decay, beta, n_head, n_key_head, d_k, d_v, eps, state, layer, out } => {
                needs.floats = needs.floats.max(gated_delta::gated_delta_scratch(*d_k, *d_v));
                let heads = DeltaHeads { n_head: *n_head, n_key_head: *n_key_head, d_k: *d_k, d_v: *d_v, eps: *eps };
                let kind = Kind::Delta {
                    q: *q,
                    k: *k,
                    v: *v,
                    decay: *decay,
                    beta: *beta,
                    heads,
                    steps: options.deterministic,
                    out: *out,
                };
                Some(StateTask { kind, state: *state, layer: *layer as usize, parts: *n_head })
            }
            _ => None,
        }
    }

    pub(super) fn items(&self, sizes: &Sizes) -> usize {
        sizes.n_seqs * self.parts
    }

    pub(super) fn run(&self, ctx: &Ctx<'_>, item: usize, scratch: &mut WorkerScratch) {
        let (seq, part) = (item / self.parts, item % self.parts);
        let tokens = ctx.batch.seq_offsets[seq] as usize..ctx.batch.seq_offsets[seq + 1] as usize;
        if tokens.is_empty() {
            return;
        }
        let slot = ctx.batch.state_slots[self.state.0 as usize * ctx.sizes.n_seqs + seq] as usize;
        let state = ctx.cache.states[self.state.0 as usize].ptr(slot, self.layer);
        match &self.kind {
            Kind::Conv { x, weight, bias, kernel, activation, out } => {
                let all = ctx.cols(*x);
                let cols = part * COLUMNS..((part + 1) * COLUMNS).min(all);
                // SAFETY: the state is `[kernel - 1, all]`; items own different columns of it.
                let state = unsafe { MatMut::from_raw(state.add(cols.start), kernel - 1, cols.len(), all) };
                let weight = &weight.get()[cols.start * kernel..cols.end * kernel];
                let bias = bias.as_ref().map(|b| &b.get()[cols.clone()]);
                let x = ctx.part(*x, tokens.clone(), cols.clone());
                let out = ctx.part_mut(*out, tokens, cols);
                short_conv::short_conv(ctx.isa, x, weight, bias, *kernel, *activation, state, out);
            }
            Kind::Delta { q, k, v, decay, beta, heads, steps, out } => {
                let m = |v: &ValueId, rows: &Range<usize>| ctx.mat(*v, rows.clone());
                let input = DeltaInput {
                    q: m(q, &tokens),
                    k: m(k, &tokens),
                    v: m(v, &tokens),
                    decay: m(decay, &tokens),
                    beta: m(beta, &tokens),
                };
                let n = heads.d_k * heads.d_v;
                // SAFETY: the state is `[n_head, d_k, d_v]`; items own different heads.
                let state = unsafe { std::slice::from_raw_parts_mut(state.add(part * n), n) };
                let long = tokens.len() >= CHUNK && !steps;
                let out = ctx.part_mut(*out, tokens, part * heads.d_v..(part + 1) * heads.d_v);
                let one = part..part + 1;
                if long {
                    gated_delta::gated_delta_chunks(ctx.isa, heads, &input, one, state, out, scratch.floats());
                } else {
                    gated_delta::gated_delta_steps(ctx.isa, heads, &input, one, state, out, scratch.floats());
                }
            }
        }
    }
}
