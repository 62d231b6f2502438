//! Attention with f64 arithmetic inside: what `Precision::Exact` runs, so that a comparison with an f64 reference
//! measures the model and not the softmax of a long context.
//!
//! The same formula and visibility as [`super::attention`], one page at a time for a block of rows, with f64 scores,
//! maxima, weights and sums; only the stored rows and the result are f32. Each (token, head) row goes through its pages in
//! order whatever shares its block, so any chunking gives the same bits. Bound: u = 2^-24 of the result for its rounding;
//! the f64 part is below (d_k + 2 n) 2^-52 sum_j w_j |v_j|. FLOPs and bytes: as `attention`.

use super::attention::{AttentionHeads, AttentionInput, attention_scratch};
use super::attention_tile::{load_keys, load_values, padded};
use super::simd::{Kernel, Simd};
use super::view::MatMut;
use crate::cache::PAGE;
use crate::cpu::isa::IsaLevel;

/// Query rows that share a page.
const BLOCK_ROWS: usize = 48;

struct Exact<'a> {
    heads: &'a AttentionHeads,
    input: &'a AttentionInput<'a>,
    sinks: Option<&'a [f32]>,
    out: MatMut<'a>,
    scratch: &'a mut [f32],
}

/// A row's running maximum, sum and visible keys.
#[derive(Clone, Copy)]
struct Row {
    m: f64,
    l: f64,
    lo: usize,
    hi: usize,
}

impl Kernel for Exact<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Exact { heads, input, sinks, mut out, scratch } = self;
        let (g, d_k, d_v) = (heads.group, input.k.dim(), input.v.dim());
        let stride = padded(d_v);
        let (page, rest) = scratch.split_at_mut(PAGE * d_k.max(stride));
        // SAFETY: every bit pattern is an f64; the middle part is aligned.
        let (_, sums, _) = unsafe { rest.align_to_mut::<f64>() };
        let sums = &mut sums[..BLOCK_ROWS * d_v];
        let mut scores = [[0f64; PAGE]; BLOCK_ROWS];
        let total = input.positions.len() * g;
        for first in (0..total).step_by(BLOCK_ROWS) {
            let n = BLOCK_ROWS.min(total - first);
            let mut rows = [Row { m: f64::NEG_INFINITY, l: 0.0, lo: 0, hi: 0 }; BLOCK_ROWS];
            let rows = &mut rows[..n];
            for (r, row) in rows.iter_mut().enumerate() {
                (row.lo, row.hi) = input.visible(heads, (first + r) / g);
            }
            sums[..n * d_v].fill(0.0);
            let lo = rows.iter().map(|r| r.lo).min().unwrap_or(0);
            let hi = rows.iter().map(|r| r.hi).max().unwrap_or(0);
            for number in lo / PAGE..hi.div_ceil(PAGE) {
                let base = number * PAGE;
                let id = input.pages[number - input.first_page as usize];
                let (kp, vp) = (input.k.page_ptr(id, input.head), input.v.page_ptr(id, input.head));
                // SAFETY: the page exists (`page_ptr` checks), the scratch holds it widened.
                unsafe { load_keys(s, &input.k, kp, kp, page.as_mut_ptr()) };
                for (r, row) in rows.iter_mut().enumerate() {
                    let (from, to) = (row.lo.saturating_sub(base), row.hi.saturating_sub(base).min(PAGE));
                    let w = &mut scores[r];
                    *w = [0.0; PAGE];
                    if from >= to {
                        continue;
                    }
                    let at = first + r;
                    let q = &input.q.row(at / g)[at % g * d_k..][..d_k];
                    for (q, k) in q.iter().zip(page.chunks_exact(PAGE)) {
                        for (w, k) in w.iter_mut().zip(k) {
                            *w += f64::from(*q) * f64::from(*k);
                        }
                    }
                    let mut top = row.m;
                    for w in &mut w[from..to] {
                        *w *= f64::from(heads.scale);
                        if let Some(cap) = heads.softcap.map(f64::from) {
                            *w = cap * (*w / cap).tanh();
                        }
                        top = top.max(*w);
                    }
                    for (j, w) in w.iter_mut().enumerate() {
                        *w = if (from..to).contains(&j) { (*w - top).exp() } else { 0.0 };
                    }
                    let fade = (row.m - top).exp();
                    row.l = row.l * fade + w.iter().sum::<f64>();
                    row.m = top;
                    sums[r * d_v..][..d_v].iter_mut().for_each(|o| *o *= fade);
                }
                let used = (hi - base).min(PAGE);
                // SAFETY: as above.
                unsafe { load_values(s, &input.v, vp, vp, used, page.as_mut_ptr(), stride) };
                for (w, o) in scores[..n].iter().zip(sums.chunks_exact_mut(d_v)) {
                    for (w, v) in w.iter().zip(page.chunks_exact(stride)).take(used).filter(|(w, _)| **w > 0.0) {
                        for (o, v) in o.iter_mut().zip(v) {
                            *o += w * f64::from(*v);
                        }
                    }
                }
            }
            for (r, (row, o)) in rows.iter().zip(sums.chunks_exact(d_v)).enumerate() {
                let at = first + r;
                let (mut l, mut f) = (row.l, 1.0);
                if let Some(sink) = sinks.map(|x| f64::from(x[at % g])) {
                    let top = row.m.max(sink);
                    f = (row.m - top).exp();
                    l = l * f + (sink - top).exp();
                }
                let by = if l == 0.0 { 0.0 } else { f / l };
                let dst = &mut out.row_mut(at / g)[at % g * d_v..][..d_v];
                dst.iter_mut().zip(o).for_each(|(d, o)| *d = (o * by) as f32);
            }
        }
    }
}

/// [`super::attention::attention`] with f64 inside; arguments, scratch and panics are the same, splits do not apply.
pub fn attention_exact(
    isa: IsaLevel,
    heads: &AttentionHeads,
    input: &AttentionInput<'_>,
    sinks: Option<&[f32]>,
    out: MatMut<'_>,
    scratch: &mut [f32],
) {
    input.check(heads, &out, scratch);
    assert!(sinks.is_none_or(|x| x.len() == heads.group), "one sink a head");
    isa.run(Exact { heads, input, sinks, out, scratch })
}

// The widened page, then BLOCK_ROWS sums in f64 and room to align them.
const _: () = {
    let mut d = 1;
    while d <= 640 {
        assert!(attention_scratch(d, d) > PAGE * padded(d) + 2 * BLOCK_ROWS * d + 2);
        d += 1;
    }
};
