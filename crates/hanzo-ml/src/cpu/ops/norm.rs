//! RMS norm, fused residual add, layer norm.
//!
//! `rms_norm`: for each group of `group` columns, `out = x / sqrt(mean(x^2) + eps) * w`. A layer's norm has
//! `group = cols`; the per-head q and k norms have `group = head_dim` on a row of all heads.
//! FLOPs: 4 per element; bytes: 8 per element (12 with the residual, plus the weight once).
//!
//! Bound. The sum of squares runs in four vector accumulators of L lanes: each term passes at most
//! m = ceil(n / 4L) + 2 + log2 L additions and one squaring, so the sum of positive terms is off by at most
//! (m + 1) u relative. The mean, eps, square root and reciprocal add 4 u, the root halves what came before; then
//! the two products add 2 u: |error| <= ((m + 1) / 2 + 6) u |out|. With L = 8 (the smallest) and n = 4096,
//! m = 133: 73 u = 4.4e-6. `add_rms_norm` is the same function of the rounded sum, so the same bound holds
//! against its own stored sum.

use super::simd::{Kernel, Simd};
use super::view::{Mat, MatMut};
use crate::cpu::isa::IsaLevel;

/// `(m + 1) / 2 + 6` of the module's bound, in units of u, for a group of `n` columns.
pub fn rms_norm_bound(n: usize) -> f32 {
    ((n.div_ceil(32) + 6) as f32 * 0.5 + 6.0) * f32::EPSILON * 0.5
}

/// Sum of squares in four accumulators.
///
/// # Safety
/// `x` is readable for `n` floats.
#[inline(always)]
pub(crate) unsafe fn sum_squares<S: Simd>(s: S, x: *const f32, n: usize) -> f32 {
    let mut a = [s.splat(0.0); 4];
    let mut i = 0;
    while i + 4 * S::LANES <= n {
        for (k, a) in a.iter_mut().enumerate() {
            // SAFETY: i + 4 LANES <= n.
            let v = unsafe { s.load(x.add(i + k * S::LANES)) };
            *a = s.fma(v, v, *a);
        }
        i += 4 * S::LANES;
    }
    while i < n {
        let k = (n - i).min(S::LANES);
        // SAFETY: k elements remain.
        let v = unsafe { if k == S::LANES { s.load(x.add(i)) } else { s.load_part(x.add(i), k) } };
        a[0] = s.fma(v, v, a[0]);
        i += k;
    }
    s.reduce_add(s.add(s.add(a[0], a[1]), s.add(a[2], a[3])))
}

/// Sum in four accumulators of `x - shift`, or of its square.
///
/// # Safety
/// `x` is readable for `n` floats.
#[inline(always)]
unsafe fn sum_shifted<S: Simd>(s: S, x: *const f32, n: usize, shift: f32, square: bool) -> f32 {
    let mut a = [s.splat(0.0); 4];
    let shift = s.splat(shift);
    let (mut i, mut lane) = (0, 0);
    while i + S::LANES <= n {
        // SAFETY: i + LANES <= n.
        let v = s.sub(unsafe { s.load(x.add(i)) }, shift);
        a[lane & 3] = if square { s.fma(v, v, a[lane & 3]) } else { s.add(a[lane & 3], v) };
        i += S::LANES;
        lane += 1;
    }
    let mut sum = s.reduce_add(s.add(s.add(a[0], a[1]), s.add(a[2], a[3])));
    let shift = s.reduce_max(shift);
    while i < n {
        // SAFETY: i < n.
        let v = unsafe { *x.add(i) } - shift;
        sum += if square { v * v } else { v };
        i += 1;
    }
    sum
}

/// `out = x * factor * w` (w absent: ones); `out` may be `x`.
///
/// # Safety
/// `x` and `w` are readable and `out` writable for `n` floats.
#[inline(always)]
pub(crate) unsafe fn scale_by<S: Simd>(
    s: S,
    x: *const f32,
    factor: f32,
    w: Option<*const f32>,
    out: *mut f32,
    n: usize,
) {
    let f = s.splat(factor);
    let mut i = 0;
    while i < n {
        let k = (n - i).min(S::LANES);
        // SAFETY: k <= n - i elements are touched.
        unsafe {
            if k == S::LANES {
                let v = s.mul(s.load(x.add(i)), f);
                s.store(out.add(i), if let Some(w) = w { s.mul(v, s.load(w.add(i))) } else { v });
            } else {
                let v = s.mul(s.load_part(x.add(i), k), f);
                s.store_part(out.add(i), k, if let Some(w) = w { s.mul(v, s.load_part(w.add(i), k)) } else { v });
            }
        }
        i += k;
    }
}

/// One group: the factor `1 / sqrt(mean(x^2) + eps)`.
///
/// # Safety
/// `x` is readable for `n` floats.
#[inline(always)]
pub(crate) unsafe fn rms_factor<S: Simd>(s: S, x: *const f32, n: usize, eps: f32) -> f32 {
    // SAFETY: the caller's.
    1.0 / (unsafe { sum_squares(s, x, n) } / n as f32 + eps).sqrt()
}

struct RmsNorm<'a> {
    x: Mat<'a>,
    residual: Option<(Mat<'a>, MatMut<'a>)>,
    weight: Option<&'a [f32]>,
    eps: f32,
    group: usize,
    out: MatMut<'a>,
}

impl Kernel for RmsNorm<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let RmsNorm { x, residual, weight, eps, group, out } = self;
        let cols = x.cols();
        assert!(x.rows() == out.rows() && cols == out.cols(), "shapes differ");
        assert!(group > 0 && cols % group == 0, "{cols} columns in groups of {group}");
        assert!(weight.is_none_or(|w| w.len() == group), "the weight has one element a column of a group");
        let w = weight.map(<[f32]>::as_ptr);
        for r in 0..x.rows() {
            let mut src = x.row_ptr(r);
            if let Some((b, sum)) = &residual {
                let (b, sum) = (b.row_ptr(r), sum.row_ptr(r));
                // SAFETY: shapes are checked by `add_rms_norm`.
                unsafe { super::math::zip_row(s, AddOp, src, b, sum, cols) };
                src = sum;
            }
            let dst = out.row_ptr(r);
            for g in (0..cols).step_by(group) {
                // SAFETY: g + group <= cols; the weight has `group` elements.
                unsafe {
                    let f = rms_factor(s, src.add(g), group, eps);
                    scale_by(s, src.add(g), f, w, dst.add(g), group);
                }
            }
        }
    }
}

#[derive(Clone, Copy)]
struct AddOp;
impl super::math::Binary for AddOp {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F, y: S::F) -> S::F {
        s.add(x, y)
    }
}

/// RMS norm of every group of `group` columns of `x` `[rows, cols]`, times `weight` `[group]`.
///
/// `out` may be the rows of `x`. Panics if shapes disagree. Bound: the module's.
pub fn rms_norm(isa: IsaLevel, x: Mat<'_>, weight: Option<&[f32]>, eps: f32, group: usize, out: MatMut<'_>) {
    isa.run(RmsNorm { x, residual: None, weight, eps, group, out })
}

/// `sum = x + y`; `out = rms_norm(sum) * weight`, one group a row. `sum` may be the rows of `x` or of `y`.
///
/// What it saves over `add` then `rms_norm`: one read of the row. Bit-equal to the two.
pub fn add_rms_norm(
    isa: IsaLevel,
    x: Mat<'_>,
    y: Mat<'_>,
    weight: Option<&[f32]>,
    eps: f32,
    sum: MatMut<'_>,
    out: MatMut<'_>,
) {
    assert!(y.rows() == x.rows() && sum.rows() == x.rows() && y.cols() == x.cols() && sum.cols() == x.cols());
    isa.run(RmsNorm { x, residual: Some((y, sum)), weight, eps, group: x.cols(), out })
}

struct LayerNorm<'a> {
    x: Mat<'a>,
    weight: Option<&'a [f32]>,
    bias: Option<&'a [f32]>,
    eps: f32,
    out: MatMut<'a>,
}

impl Kernel for LayerNorm<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let LayerNorm { x, weight, bias, eps, out } = self;
        let n = x.cols();
        assert!(x.rows() == out.rows() && n == out.cols(), "shapes differ");
        assert!(weight.is_none_or(|w| w.len() == n) && bias.is_none_or(|b| b.len() == n), "one weight a column");
        for r in 0..x.rows() {
            let (src, dst) = (x.row_ptr(r), out.row_ptr(r));
            // SAFETY: both rows, the weight and the bias have `n` elements.
            unsafe {
                let mean = sum_shifted(s, src, n, 0.0, false) / n as f32;
                let var = sum_shifted(s, src, n, mean, true) / n as f32;
                let f = 1.0 / (var + eps).sqrt();
                super::math::map_row(s, ShiftScale(mean, f), src, dst, n);
                if let Some(w) = weight {
                    scale_by(s, dst, 1.0, Some(w.as_ptr()), dst, n);
                }
                if let Some(b) = bias {
                    super::math::zip_row(s, AddOp, dst, b.as_ptr(), dst, n);
                }
            }
        }
    }
}

#[derive(Clone, Copy)]
struct ShiftScale(f32, f32);
impl super::math::Unary for ShiftScale {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F) -> S::F {
        s.mul(s.sub(x, s.splat(self.0)), s.splat(self.1))
    }
}

/// `out = (x - mean) / sqrt(var + eps) * weight + bias` per row; two passes, so that the variance of a row with a
/// large mean keeps its digits. `out` may be the rows of `x`.
///
/// Bound. With n columns, m as in the module: the mean is off by (m + 1) u mean|x|, so each centred element by that
/// and one rounding; relative to the row's deviation d: |error| <= ((m + 4) u (1 + mean|x| / d) (1 + |z|) + 6 u) |w|
/// with z the normalised element.
pub fn layer_norm(isa: IsaLevel, x: Mat<'_>, weight: Option<&[f32]>, bias: Option<&[f32]>, eps: f32, out: MatMut<'_>) {
    isa.run(LayerNorm { x, weight, bias, eps, out })
}

#[cfg(test)]
mod tests {
    use super::super::math::tests::isas;
    use super::*;

    fn data(n: usize, seed: f32) -> Vec<f32> {
        (0..n).map(|i| ((i as f32 + seed) * 12.9898).sin() * 3.0 + 0.1).collect()
    }

    #[test]
    fn rms_norm_is_within_its_derived_bound_for_rows_and_heads() {
        for isa in isas() {
            for (rows, cols, group) in [(1, 1, 1), (2, 64, 64), (3, 576, 64), (2, 80, 80), (1, 4096, 4096), (2, 99, 33)]
            {
                let x = data(rows * cols, 0.5);
                let w = data(group, 7.0);
                let mut out = vec![0.0; rows * cols];
                rms_norm(isa, Mat::new(&x, rows, cols), Some(&w), 1e-6, group, MatMut::new(&mut out, rows, cols));
                for (xs, os) in x.chunks(group).zip(out.chunks(group)) {
                    let mean = xs.iter().map(|v| (*v as f64).powi(2)).sum::<f64>() / group as f64;
                    let f = 1.0 / (mean + 1e-6f32 as f64).sqrt();
                    for i in 0..group {
                        let want = xs[i] as f64 * f * w[i] as f64;
                        assert!((os[i] as f64 - want).abs() <= rms_norm_bound(group) as f64 * want.abs());
                    }
                }
            }
        }
    }

    #[test]
    fn add_rms_norm_is_bit_equal_to_add_then_rms_norm_and_may_write_the_sum_in_place() {
        for isa in isas() {
            let (rows, cols) = (3, 101);
            let (x, y, w) = (data(rows * cols, 1.0), data(rows * cols, 2.0), data(cols, 3.0));
            let (mut sum, mut want) = (vec![0.0; rows * cols], vec![0.0; rows * cols]);
            let view = |v: &[f32]| unsafe { Mat::from_raw(v.as_ptr(), rows, cols, cols) };
            super::super::elementwise::add(isa, view(&x), view(&y), MatMut::new(&mut sum, rows, cols));
            rms_norm(isa, view(&sum), Some(&w), 1e-5, cols, MatMut::new(&mut want, rows, cols));
            let (mut acc, mut out) = (x.clone(), vec![0.0; rows * cols]);
            let p = acc.as_mut_ptr();
            // SAFETY: input and sum are the same rows, which the op allows.
            let (a, s) = unsafe { (Mat::from_raw(p, rows, cols, cols), MatMut::from_raw(p, rows, cols, cols)) };
            add_rms_norm(isa, a, view(&y), Some(&w), 1e-5, s, MatMut::new(&mut out, rows, cols));
            assert_eq!((acc, out), (sum, want));
        }
    }

    #[test]
    fn layer_norm_is_within_its_derived_bound_with_a_large_mean() {
        let u = 2f64.powi(-24);
        for isa in isas() {
            for cols in [5usize, 64, 100, 768] {
                let x: Vec<f32> = data(cols, 0.0).iter().map(|v| v + 20.0).collect();
                let (w, b) = (data(cols, 4.0), data(cols, 5.0));
                let mut out = vec![0.0; cols];
                layer_norm(isa, Mat::new(&x, 1, cols), Some(&w), Some(&b), 1e-5, MatMut::new(&mut out, 1, cols));
                let n = cols as f64;
                let mean = x.iter().map(|v| *v as f64).sum::<f64>() / n;
                let var = x.iter().map(|v| (*v as f64 - mean).powi(2)).sum::<f64>() / n;
                let d = (var + 1e-5f32 as f64).sqrt();
                let m = cols.div_ceil(32) as f64 + 5.0;
                for i in 0..cols {
                    let z = (x[i] as f64 - mean) / d;
                    let want = z * w[i] as f64 + b[i] as f64;
                    let bound = ((m + 4.0) * u * (1.0 + mean / d) * (1.0 + z.abs()) + 6.0 * u) * w[i].abs() as f64
                        + u * want.abs();
                    assert!((out[i] as f64 - want).abs() <= bound, "{isa:?} {cols} {} {want}", out[i]);
                }
            }
        }
    }
}
