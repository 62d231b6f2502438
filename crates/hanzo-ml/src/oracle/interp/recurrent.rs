//! Ops that carry a state from step to step: the short convolution and the gated delta rule.

use super::super::array::Array;
use super::super::num::Num;
use super::super::pages::Memory;
use super::{Interpreter, elementwise};
use crate::batch::Batch;
use crate::plan::{Op, StateId};

impl Interpreter<'_> {
    /// A sequence's state of a layer.
    fn state<'m>(
        &self,
        memory: &'m mut Memory,
        id: StateId,
        layer: u32,
        batch: &Batch<'_>,
        seq: usize,
    ) -> &'m mut [Num] {
        let kind = id.0 as usize;
        let slot = batch.state_slots[kind * batch.sizes().n_seqs + seq] as usize;
        let n = self.plan.states[kind].elements;
        let at = (layer as usize * memory.slots[kind] + slot) * n;
        &mut memory.states[kind][at..at + n]
    }

    /// `out[t, c] = act(bias[c] + sum_j w[c, j] x[t - kernel + 1 + j, c])`, rows before the step from the state
    /// (oldest first), which then keeps the last `kernel - 1` rows.
    pub(super) fn short_conv(&mut self, op: &Op, batch: &Batch<'_>, memory: &mut Memory) {
        let Op::ShortConv { x, weight, bias, kernel, activation, state, layer, out } = op else { return };
        let x = self.value(*x).clone();
        let w = self.weights.get(*weight);
        let bias = self.opt_vector(*bias);
        let cols = x.cols;
        let mut y = Array::zeros(x.rows(), cols);
        for seq in 0..batch.sizes().n_seqs {
            let tokens = batch.seq_offsets[seq] as usize..batch.seq_offsets[seq + 1] as usize;
            let state = self.state(memory, *state, *layer, batch, seq);
            let mut rows = state.to_vec();
            rows.extend_from_slice(&x.data[tokens.start * cols..tokens.end * cols]);
            for (i, t) in tokens.enumerate() {
                for c in 0..cols {
                    let taps = (0..*kernel).map(|j| rows[(i + j) * cols + c] * Num::exact(w.row(0, c)[j]));
                    let sum = Num::sum(taps.chain(bias.as_ref().map(|b| b[c])));
                    y.data[t * cols + c] = activation.map_or(sum, |a| elementwise::activate(a, sum));
                }
            }
            let keep = rows.len() - state.len();
            state.copy_from_slice(&rows[keep..]);
        }
        self.set(*out, y);
    }

    /// Per head and token: `S = exp(g) S; S += k (beta (v - k^T S)); out = S^T q`, q and k L2-normalised.
    pub(super) fn gated_delta(&mut self, op: &Op, batch: &Batch<'_>, memory: &mut Memory) {
        let Op::GatedDelta { q, k, v, decay, beta, n_head, n_key_head, d_k, d_v, eps, state, layer, out } = op else {
            return;
        };
        let [q, k, v, decay, beta] = [q, k, v, decay, beta].map(|x| self.value(*x).clone());
        let mut y = Array::zeros(v.rows(), n_head * d_v);
        for seq in 0..batch.sizes().n_seqs {
            let state = self.state(memory, *state, *layer, batch, seq);
            for t in batch.seq_offsets[seq] as usize..batch.seq_offsets[seq + 1] as usize {
                for h in 0..*n_head {
                    let key_head = h / (n_head / n_key_head);
                    let head = |x: &Array| unit(&x.row(t)[key_head * d_k..(key_head + 1) * d_k], *eps);
                    let (q, k) = (head(&q), head(&k));
                    let v = &v.row(t)[h * d_v..(h + 1) * d_v];
                    let (keep, beta) = (decay.row(t)[h].exp(), beta.row(t)[h]);
                    let s = &mut state[h * d_k * d_v..(h + 1) * d_k * d_v];
                    s.iter_mut().for_each(|s| *s = *s * keep);
                    for j in 0..*d_v {
                        let seen = Num::sum((0..*d_k).map(|i| k[i] * s[i * d_v + j]));
                        let step = beta * (v[j] - seen);
                        for i in 0..*d_k {
                            s[i * d_v + j] = s[i * d_v + j] + k[i] * step;
                        }
                        y.data[t * y.cols + h * d_v + j] = Num::sum((0..*d_k).map(|i| s[i * d_v + j] * q[i]));
                    }
                }
            }
        }
        self.set(*out, y);
    }
}

/// `x / sqrt(sum x^2 + eps)`.
fn unit(x: &[Num], eps: f32) -> Vec<Num> {
    let scale = Num::ONE / (Num::sum(x.iter().map(|x| *x * *x)) + Num::from(eps)).sqrt();
    x.iter().map(|x| *x * scale).collect()
}
