//! Rotary position embeddings: angles once a step, rotation a layer.
//!
//! Pair i of a head turns by `p * f_i`. Per pair: f_i = base^(-2i / n_dims) / factor_i, then linear scaling and YaRN
//! (arXiv 2309.00071), both linear in the position, so that one f64 frequency per pair holds everything
//! ([`rope_frequencies`], at plan compilation). A step computes one table `[n_tokens, n_dims]`, cosines then sines,
//! shared by all layers of the same spec ([`rope_table`]): angles, cos and sin in f64, one rounding to f32. A layer
//! then rotates ([`rope`]): `(a, b) -> (a c - b s, a s + b c)`.
//!
//! Bound. cos and sin times magnitude: 1 u each (p f_i is off by 2^-53 p f_i in f64: below 2e-11 at p = 131072). A
//! rotation adds two roundings a term: |error| <= 3 u (|a| + |b|) magnitude. FLOPs: 3 per element; bytes: 8.

use super::kv::CacheRows;
use super::norm::{rms_factor, scale_by};
use super::simd::{Kernel, Simd};
use super::view::{Mat, MatMut};
use crate::cpu::isa::IsaLevel;
use crate::plan::{RopeConvention, RopeSpec};

/// Writes the angle per position of each pair, `[n_dims / 2]`, in radians.
///
/// `factors` are the per-pair divisors of `rope_freqs`. Panics if a length is not `n_dims / 2`.
pub fn rope_frequencies(spec: &RopeSpec, factors: Option<&[f32]>, out: &mut [f64]) {
    let half = spec.n_dims / 2;
    assert!(out.len() == half && factors.is_none_or(|f| f.len() == half), "one frequency a pair");
    let (n, base, scale) = (spec.n_dims as f64, spec.base as f64, spec.scale as f64);
    // YaRN: pairs below `low` keep their frequency, pairs above `high` are interpolated, a ramp lies between.
    let ramp = spec.yarn.filter(|y| y.ext_factor != 0.0).map(|y| {
        // The pair that makes `rotations` turns within the original context.
        let pair = |rotations: f32| {
            n * (y.original_context as f64 / (rotations as f64 * 2.0 * core::f64::consts::PI)).ln() / (2.0 * base.ln())
        };
        let low = pair(y.beta_fast).floor().max(0.0);
        let high = pair(y.beta_slow).ceil().min(n - 1.0);
        (y.ext_factor as f64, low, high)
    });
    for (i, out) in out.iter_mut().enumerate() {
        let f = base.powf(-2.0 * i as f64 / n) / factors.map_or(1.0, |f| f[i] as f64);
        let keep = ramp
            .map_or(0.0, |(ext, low, high)| ext * (1.0 - ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0)));
        *out = f * (scale * (1.0 - keep) + keep);
    }
}

/// What cosines and sines are multiplied by: the spec's magnitude, YaRN's attention factor, and YaRN's
/// `1 + 0.1 ln(1 / scale)` where it extrapolates.
pub fn rope_magnitude(spec: &RopeSpec) -> f64 {
    let yarn = spec.yarn.map_or(1.0, |y| {
        let growth = if y.ext_factor != 0.0 { 1.0 - 0.1 * (spec.scale as f64).ln() } else { 1.0 };
        y.attn_factor as f64 * growth
    });
    spec.magnitude as f64 * yarn
}

/// Fills `table` `[n_tokens, n_dims]`: row t holds `n_dims / 2` cosines, then as many sines, for positions
/// `[n_axes][n_tokens]` (`positions.len() / n_tokens` axes).
///
/// With `sections`, pair i follows axis a where `i mod sum(sections)` falls into section a; an axis that is not there
/// reads axis 0. Rows are independent: the executor may split them. Cost: one f64 sine and cosine a pair.
pub fn rope_table(
    positions: &[u32],
    n_tokens: usize,
    tokens: core::ops::Range<usize>,
    frequencies: &[f64],
    sections: Option<[u32; 4]>,
    magnitude: f64,
    mut table: MatMut<'_>,
) {
    let half = frequencies.len();
    assert!(table.cols() == 2 * half && table.rows() == tokens.len() && tokens.end <= n_tokens, "one row a token");
    let axes = positions.len().checked_div(n_tokens).unwrap_or(0);
    assert!(axes >= 1 || n_tokens == 0, "positions cover the tokens");
    for (row, t) in tokens.enumerate() {
        let (cos, sin) = table.row_mut(row).split_at_mut(half);
        for i in 0..half {
            let axis = sections.map_or(0, |s| axis_of(i, s));
            let p = positions[if axis < axes { axis } else { 0 } * n_tokens + t];
            let (sn, cs) = (p as f64 * frequencies[i]).sin_cos();
            cos[i] = (cs * magnitude) as f32;
            sin[i] = (sn * magnitude) as f32;
        }
    }
}

/// The position axis of pair `i`.
fn axis_of(i: usize, sections: [u32; 4]) -> usize {
    let total: u32 = sections.iter().sum();
    let mut at = if total == 0 { 0 } else { i as u32 % total };
    for (axis, len) in sections.into_iter().enumerate() {
        if at < len {
            return axis;
        }
        at -= len;
    }
    0
}

/// How the heads of a row rotate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeHeads {
    /// Which pairs.
    pub convention: RopeConvention,
    /// Columns of a head.
    pub head_dim: usize,
    /// Leading columns that rotate: even, at most `head_dim`.
    pub n_dims: usize,
}

/// The norm of a head before its rotation.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm<'a> {
    /// `[head_dim]`, or ones.
    pub weight: Option<&'a [f32]>,
    /// Added to the mean of squares.
    pub eps: f32,
}

/// Rotates one head; `out` may be `x`.
///
/// # Safety
/// `x` is readable and `out` writable for `head_dim` floats, `table` readable for `n_dims`.
#[inline(always)]
unsafe fn rotate<S: Simd>(s: S, h: RopeHeads, x: *const f32, table: *const f32, out: *mut f32) {
    let half = h.n_dims / 2;
    let mut i = 0;
    // SAFETY: every index is below `head_dim` (x, out) or `n_dims` (table).
    unsafe {
        while i + S::LANES <= half {
            let (c, n) = (s.load(table.add(i)), s.load(table.add(half + i)));
            match h.convention {
                RopeConvention::Neox => {
                    let (a, b) = (s.load(x.add(i)), s.load(x.add(half + i)));
                    s.store(out.add(i), s.sub(s.mul(a, c), s.mul(b, n)));
                    s.store(out.add(half + i), s.fma(a, n, s.mul(b, c)));
                }
                RopeConvention::Interleaved => {
                    let (v, w) = (s.load(x.add(2 * i)), s.load(x.add(2 * i + S::LANES)));
                    let (a, b) = s.deinterleave(v, w);
                    let (v, w) = s.interleave(s.sub(s.mul(a, c), s.mul(b, n)), s.fma(a, n, s.mul(b, c)));
                    s.store(out.add(2 * i), v);
                    s.store(out.add(2 * i + S::LANES), w);
                }
            }
            i += S::LANES;
        }
        while i < half {
            let (ia, ib) = match h.convention {
                RopeConvention::Neox => (i, half + i),
                RopeConvention::Interleaved => (2 * i, 2 * i + 1),
            };
            let (a, b, c, n) = (*x.add(ia), *x.add(ib), *table.add(i), *table.add(half + i));
            *out.add(ia) = a * c - b * n;
            *out.add(ib) = a * n + b * c;
            i += 1;
        }
        if !core::ptr::eq(x, out) {
            core::ptr::copy(x.add(h.n_dims), out.add(h.n_dims), h.head_dim - h.n_dims);
        }
    }
}

/// Norms (if asked) and rotates one head into `out`, which may be `x`.
///
/// # Safety
/// As [`rotate`]; the norm's weight has `head_dim` elements.
#[inline(always)]
unsafe fn norm_rotate<S: Simd>(
    s: S,
    h: RopeHeads,
    norm: Option<HeadNorm<'_>>,
    x: *const f32,
    table: *const f32,
    out: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        let Some(norm) = norm else { return rotate(s, h, x, table, out) };
        let f = rms_factor(s, x, h.head_dim, norm.eps);
        scale_by(s, x, f, norm.weight.map(<[f32]>::as_ptr), out, h.head_dim);
        rotate(s, h, out, table, out);
    }
}

fn check(h: RopeHeads, norm: Option<HeadNorm<'_>>, x: &Mat<'_>, table: &Mat<'_>) {
    assert!(h.head_dim > 0 && h.n_dims % 2 == 0 && h.n_dims <= h.head_dim, "an even number of leading dimensions");
    assert!(x.cols() % h.head_dim == 0 && table.rows() == x.rows() && table.cols() == h.n_dims, "shapes differ");
    assert!(norm.and_then(|n| n.weight).is_none_or(|w| w.len() == h.head_dim), "one weight a column of a head");
}

struct NormRope<'a>(RopeHeads, Option<HeadNorm<'a>>, Mat<'a>, Mat<'a>, MatMut<'a>);
impl Kernel for NormRope<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let NormRope(h, norm, x, table, out) = self;
        for t in 0..x.rows() {
            let (src, dst, angles) = (x.row_ptr(t), out.row_ptr(t), table.row_ptr(t));
            for c in (0..x.cols()).step_by(h.head_dim) {
                // SAFETY: `check` has seen the shapes; c + head_dim <= cols.
                unsafe { norm_rotate(s, h, norm, src.add(c), angles, dst.add(c)) };
            }
        }
    }
}

/// Rotates every head of `x` `[n_tokens, n_heads * head_dim]` by row t of `table` `[n_tokens, n_dims]`.
///
/// `out` may be the rows of `x`. Columns of a head beyond `n_dims` pass through.
pub fn rope(isa: IsaLevel, heads: RopeHeads, x: Mat<'_>, table: Mat<'_>, out: MatMut<'_>) {
    norm_rope(isa, heads, None, x, table, out)
}

/// [`super::norm::rms_norm`] of each head, then [`rope`], in one pass; bit-equal to the two.
pub fn norm_rope(
    isa: IsaLevel,
    heads: RopeHeads,
    norm: Option<HeadNorm<'_>>,
    x: Mat<'_>,
    table: Mat<'_>,
    out: MatMut<'_>,
) {
    check(heads, norm, &x, &table);
    assert!(x.rows() == out.rows() && x.cols() == out.cols(), "shapes differ");
    isa.run(NormRope(heads, norm, x, table, out))
}

struct NormRopeStore<'a> {
    heads: RopeHeads,
    norm: Option<HeadNorm<'a>>,
    x: Mat<'a>,
    table: Mat<'a>,
    cache: CacheRows,
    first_head: usize,
    slots: &'a [u32],
    scratch: &'a mut [f32],
}
impl Kernel for NormRopeStore<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let d = self.heads.head_dim;
        let row = self.scratch.as_mut_ptr();
        for (t, &slot) in self.slots.iter().enumerate() {
            let (src, angles) = (self.x.row_ptr(t), self.table.row_ptr(t));
            for i in 0..self.x.cols() / d {
                // SAFETY: `norm_rope_store` has checked shapes, slots and the scratch; the cache's rows are ours.
                unsafe {
                    norm_rotate(s, self.heads, self.norm, src.add(i * d), angles, row);
                    self.cache.store_row(s, slot, self.first_head + i, row);
                }
            }
        }
    }
}

/// [`norm_rope`] of keys `[n_tokens, heads * head_dim]`, written to the cache rows of `slots` (one a token) for heads
/// `first_head..`; bit-equal to [`norm_rope`] then [`super::kv::kv_store`]. `scratch` holds at least `head_dim` floats.
#[allow(clippy::too_many_arguments)]
pub fn norm_rope_store(
    isa: IsaLevel,
    heads: RopeHeads,
    norm: Option<HeadNorm<'_>>,
    x: Mat<'_>,
    table: Mat<'_>,
    cache: CacheRows,
    first_head: usize,
    slots: &[u32],
    scratch: &mut [f32],
) {
    check(heads, norm, &x, &table);
    assert!(scratch.len() >= heads.head_dim && cache.dim() == heads.head_dim, "one head's row");
    cache.check(slots, first_head, &x);
    isa.run(NormRopeStore { heads, norm, x, table, cache, first_head, slots, scratch })
}

#[cfg(test)]
mod tests {
    use super::super::kv::tests::Cache;
    use super::super::math::tests::isas;
    use super::super::{kv::kv_store, norm::rms_norm};
    use super::*;
    use crate::plan::Yarn;
    use hanzo_gguf::Format;

    fn spec(n_dims: usize) -> RopeSpec {
        RopeSpec {
            convention: RopeConvention::Neox,
            n_dims,
            base: 10000.0,
            scale: 1.0,
            yarn: None,
            factors: None,
            sections: None,
            magnitude: 1.0,
        }
    }

    fn table(spec: &RopeSpec, positions: &[u32], n: usize) -> Vec<f32> {
        let mut f = vec![0.0; spec.n_dims / 2];
        rope_frequencies(spec, None, &mut f);
        let mut t = vec![0.0; n * spec.n_dims];
        let out = MatMut::new(&mut t, n, spec.n_dims);
        rope_table(positions, n, 0..n, &f, spec.sections, rope_magnitude(spec), out);
        t
    }

    fn data(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 1.37).sin() * 2.0).collect()
    }

    #[test]
    fn both_conventions_partial_dims_and_far_positions_are_within_the_bound() {
        let u = 2f64.powi(-24);
        let positions = [0u32, 1, 17, 4096, 131_072];
        for isa in isas() {
            for convention in [RopeConvention::Neox, RopeConvention::Interleaved] {
                for (head_dim, n_dims) in [(64, 64), (128, 128), (80, 32), (96, 96), (6, 6), (20, 10)] {
                    let spec = RopeSpec { convention, ..spec(n_dims) };
                    let angles = table(&spec, &positions, 5);
                    let (rows, cols) = (5, 3 * head_dim);
                    let x = data(rows * cols);
                    let mut out = vec![0.0; rows * cols];
                    let heads = RopeHeads { convention, head_dim, n_dims };
                    let (m, t) = (Mat::new(&x, rows, cols), Mat::new(&angles, rows, n_dims));
                    rope(isa, heads, m, t, MatMut::new(&mut out, rows, cols));
                    for (r, p) in positions.iter().enumerate() {
                        for h in 0..3 {
                            let at = r * cols + h * head_dim;
                            for i in 0..n_dims / 2 {
                                let (ia, ib) = match convention {
                                    RopeConvention::Neox => (at + i, at + i + n_dims / 2),
                                    RopeConvention::Interleaved => (at + 2 * i, at + 2 * i + 1),
                                };
                                let w = *p as f64 * 10000f64.powf(-2.0 * i as f64 / n_dims as f64);
                                let (a, b) = (x[ia] as f64, x[ib] as f64);
                                let bound = 3.0 * u * (a.abs() + b.abs());
                                assert!((out[ia] as f64 - (a * w.cos() - b * w.sin())).abs() <= bound);
                                assert!((out[ib] as f64 - (a * w.sin() + b * w.cos())).abs() <= bound);
                            }
                            assert_eq!(out[at + n_dims..at + head_dim], x[at + n_dims..at + head_dim]);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn linear_scaling_and_frequency_factors_divide_the_angle() {
        let mut f = [0.0; 4];
        let spec = RopeSpec { scale: 0.125, base: 16.0, ..spec(8) };
        rope_frequencies(&spec, Some(&[1.0, 2.0, 4.0, 8.0]), &mut f);
        assert_eq!(f, [0.125, 0.03125, 0.0078125, 0.001953125]);
    }

    #[test]
    fn yarn_keeps_fast_pairs_interpolates_slow_ones_and_grows_the_magnitude() {
        let yarn = Yarn { original_context: 4096, ext_factor: 1.0, attn_factor: 1.0, beta_fast: 32.0, beta_slow: 1.0 };
        let spec = RopeSpec { scale: 0.25, yarn: Some(yarn), ..spec(128) };
        let mut f = [0.0; 64];
        rope_frequencies(&spec, None, &mut f);
        // Pairs 20.9 and 45.03 make 32 turns and 1 turn in 4,096 tokens: ramp from 20 to 46.
        for (i, f) in f.iter().enumerate() {
            let plain = 10000f64.powf(-(i as f64) / 64.0);
            let keep = 1.0 - ((i as f64 - 20.0) / 26.0).clamp(0.0, 1.0);
            assert!((f / (plain * (0.25 * (1.0 - keep) + keep)) - 1.0).abs() < 1e-12, "pair {i}");
        }
        assert!((rope_magnitude(&spec) - (1.0 + 0.1 * 4f64.ln())).abs() < 1e-12);
    }

    #[test]
    fn sections_take_each_pair_from_its_axis() {
        let spec = RopeSpec { sections: Some([2, 1, 1, 0]), ..spec(8) };
        // [axis][token]
        let t = table(&spec, &[5, 6, 50, 60, 500, 600], 2);
        for token in 0..2 {
            for (i, axis) in [0, 0, 1, 2].into_iter().enumerate() {
                let p = [[5.0, 6.0], [50.0, 60.0], [500.0, 600.0]][axis][token];
                let w: f64 = p * 10000f64.powf(-2.0 * i as f64 / 8.0);
                assert_eq!((t[token * 8 + i], t[token * 8 + 4 + i]), (w.cos() as f32, w.sin() as f32));
            }
        }
    }

    #[test]
    fn the_fused_norm_rope_store_is_bit_equal_to_its_three_steps() {
        let (rows, heads, d) = (5, 3, 80);
        let cols = heads * d;
        let (x, w) = (data(rows * cols), data(d));
        let spec = spec(32);
        let angles = table(&spec, &[3, 4, 5, 6, 7], rows);
        let h = RopeHeads { convention: RopeConvention::Neox, head_dim: d, n_dims: 32 };
        let norm = Some(HeadNorm { weight: Some(&w), eps: 1e-6 });
        let slots = [33, 34, 95, 64, 65];
        for isa in isas() {
            let mat = |v: &[f32]| unsafe { Mat::from_raw(v.as_ptr(), rows, cols, cols) };
            let t = Mat::new(&angles, rows, 32);
            let (mut steps, mut fused) = (x.clone(), vec![0.0; rows * cols]);
            let mut tmp = vec![0.0; rows * cols];
            rms_norm(isa, mat(&x), Some(&w), 1e-6, d, MatMut::new(&mut tmp, rows, cols));
            rope(isa, h, mat(&tmp), t, MatMut::new(&mut steps, rows, cols));
            norm_rope(isa, h, norm, mat(&x), t, MatMut::new(&mut fused, rows, cols));
            assert_eq!(steps, fused);
            let (mut a, mut b) = (Cache::new(Format::F16, 3, heads, d), Cache::new(Format::F16, 3, heads, d));
            kv_store(isa, a.rows(), 0, mat(&steps), &slots);
            norm_rope_store(isa, h, norm, mat(&x), t, b.rows(), 0, &slots, &mut vec![0.0; d]);
            assert_eq!(a.bytes, b.bytes);
        }
    }
}
