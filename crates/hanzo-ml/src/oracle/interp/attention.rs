//! Attention over the paged cache.

use super::super::array::Array;
use super::super::num::{FUNCTION, Num, U};
use super::super::pages::{Memory, Part};
use super::{Interpreter, elementwise, slot};
use crate::batch::Batch;
use crate::cache::PAGE;
use crate::plan::{AttentionSpec, Mask};

impl Interpreter<'_> {
    /// `softmax(mask(softcap(scale q k^T))) v` for every token and head.
    pub(super) fn attention(&self, q: &Array, spec: &AttentionSpec, batch: &Batch<'_>, memory: &Memory) -> Array {
        let gate = spec.gate.map(|g| self.value(g));
        let sinks = self.opt_vector(spec.sinks);
        let mut out = Array::zeros(q.rows(), spec.n_head * spec.d_v);
        for seq in 0..batch.sizes().n_seqs {
            let tokens = batch.seq_offsets[seq] as usize..batch.seq_offsets[seq + 1] as usize;
            for t in tokens.clone() {
                let keys = visible(spec, batch, seq, t);
                for head in 0..spec.n_head {
                    let q = &q.row(t)[head * spec.d_k..(head + 1) * spec.d_k];
                    let kv_head = head / (spec.n_head / spec.n_kv);
                    let rows = read_rows(spec, batch, memory, seq, keys.clone(), kv_head);
                    let o = attend(q, &rows, spec, sinks.as_ref().map(|s| s[head]));
                    for (j, o) in o.into_iter().enumerate() {
                        let at = t * out.cols + head * spec.d_v + j;
                        out.data[at] = gate.map_or(o, |g| o * g.data[at].sigmoid());
                    }
                }
            }
        }
        out
    }
}

/// The positions whose keys token `t` of sequence `seq` sees: from `own - window + 1` to its own, or to the last member
/// of a non-causal span it belongs to (causal), or to the last position of the sequence in this step (full).
fn visible(spec: &AttentionSpec, batch: &Batch<'_>, seq: usize, t: usize) -> std::ops::RangeInclusive<u32> {
    let end_token = batch.seq_offsets[seq + 1];
    let own = batch.positions[t];
    let spans = batch.spans.iter().filter(|s| s.contains(&(t as u32)));
    let last_token = match spec.mask {
        Mask::Causal => spans.map(|s| s.end.min(end_token) - 1).fold(t as u32, u32::max),
        Mask::Full => end_token - 1,
    };
    let kept = batch.groups[spec.cache.group.0 as usize].first[seq] * PAGE as u32;
    let oldest = spec.window.map_or(0, |w| (own + 1).saturating_sub(w));
    oldest.max(kept)..=batch.positions[last_token as usize]
}

/// Keys and values at the given positions.
fn read_rows(
    spec: &AttentionSpec,
    batch: &Batch<'_>,
    memory: &Memory,
    seq: usize,
    positions: std::ops::RangeInclusive<u32>,
    kv_head: usize,
) -> Vec<(Vec<f64>, Vec<f64>)> {
    let group = spec.cache.group.0 as usize;
    let store = &memory.groups[group];
    let layer = spec.cache.layer as usize;
    let row = |p: u32| {
        let slot = slot(batch, group, seq, p);
        let k = store.read(layer, Part::Keys, kv_head, slot);
        // Latent attention: the values are the first part of the keys.
        let latent = store.group().d_v == 0;
        let v = if latent { k[..spec.d_v].to_vec() } else { store.read(layer, Part::Values, kv_head, slot) };
        (k, v)
    };
    positions.map(row).collect()
}

/// One query over its keys.
fn attend(q: &[Num], rows: &[(Vec<f64>, Vec<f64>)], spec: &AttentionSpec, sink: Option<Num>) -> Vec<Num> {
    let score = |k: &[f64]| {
        let dot = Num::sum(q.iter().zip(k).map(|(q, k)| *q * Num::exact(*k)));
        // The scale may also be multiplied into q first: one rounding a term.
        let s = (dot * Num::from(spec.scale))
            .widened(U * q.iter().zip(k).map(|(q, k)| (q.v * k).abs()).sum::<f64>() * f64::from(spec.scale.abs()));
        spec.softcap.map_or(s, |cap| elementwise::softcap(s, cap))
    };
    let scores: Vec<Num> = rows.iter().map(|(k, _)| score(k)).collect();
    let top = scores.iter().chain(&sink).fold(f64::NEG_INFINITY, |m, s| m.max(s.v));
    // Subtracting any reference point near the maximum cancels in the quotient; an online softmax multiplies by one
    // more exponential for every chunk of keys that raises the maximum: at most one a page.
    let rescales = (rows.len().div_ceil(PAGE) + 1) as f64;
    let weight = |s: &Num| {
        let w = (*s - Num::exact(top)).exp();
        w.widened(w.v * rescales * (FUNCTION + 2.0) * U)
    };
    let weights: Vec<Num> = scores.iter().map(weight).collect();
    let total = Num::sum(weights.iter().copied().chain(sink.iter().map(weight)));
    (0..spec.d_v)
        .map(|j| {
            let sum = Num::sum(weights.iter().zip(rows).map(|(w, (_, v))| *w * Num::exact(v[j])));
            if total.v == 0.0 { Num::ZERO } else { sum / total }
        })
        .collect()
}
