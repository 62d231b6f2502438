//! Whole-row ops: softmax, log-softmax, argmax, embedding rows, gathers and copies.
//!
//! Softmax bound, u = 2^-24, n columns, S = max - min of the row: a weight's exp is off by (S_i + 4) u with
//! S_i = max - x_i (the subtraction rounds S_i), their sum by (n / 8 + 6) u on top, the product by 2 u: relative error
//! at most (2 S_i + n / 8 + 16) u while the result is normal (S_i of the sum's terms are weighted by themselves, S e^-S
//! being below 1). FLOPs per element: about 15; bytes: 8.

use super::math::{self, Unary};
use super::simd::{Kernel, Simd};
use super::view::{Mat, MatMut};
use crate::cpu::isa::IsaLevel;
use hanzo_gguf::Format;

/// `e^(x - shift)`
#[derive(Clone, Copy)]
struct ExpShifted(f32);
impl Unary for ExpShifted {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F) -> S::F {
        math::exp(s, s.sub(x, s.splat(self.0)))
    }
}

/// Largest element; minus infinity for an empty row.
///
/// # Safety
/// `x` is readable for `n` floats.
#[inline(always)]
unsafe fn max_row<S: Simd>(s: S, x: *const f32, n: usize) -> f32 {
    let mut top = s.splat(f32::NEG_INFINITY);
    let whole = n - n % S::LANES;
    // SAFETY: indices stay below `n`.
    unsafe {
        for i in (0..whole).step_by(S::LANES) {
            top = s.max(s.load(x.add(i)), top);
        }
        (whole..n).fold(s.reduce_max(top), |m, i| m.max(*x.add(i)))
    }
}

/// Sum of a row.
///
/// # Safety
/// `x` is readable for `n` floats.
#[inline(always)]
unsafe fn sum_row<S: Simd>(s: S, x: *const f32, n: usize) -> f32 {
    let mut sum = s.splat(0.0);
    let whole = n - n % S::LANES;
    // SAFETY: indices stay below `n`.
    unsafe {
        for i in (0..whole).step_by(S::LANES) {
            sum = s.add(sum, s.load(x.add(i)));
        }
        if whole < n {
            sum = s.add(sum, s.load_part(x.add(whole), n - whole));
        }
    }
    s.reduce_add(sum)
}

/// Softmax of one row; `out` may be `x`.
///
/// # Safety
/// `x` is readable and `out` writable for `n` floats.
#[inline(always)]
pub(crate) unsafe fn softmax_row<S: Simd>(s: S, x: *const f32, out: *mut f32, n: usize) {
    // SAFETY: the caller's.
    unsafe {
        let top = max_row(s, x, n);
        math::map_row(s, ExpShifted(if top == f32::NEG_INFINITY { 0.0 } else { top }), x, out, n);
        let sum = sum_row(s, out, n);
        super::norm::scale_by(s, out, if sum == 0.0 { 0.0 } else { 1.0 / sum }, None, out, n);
    }
}

struct Softmax<'a>(Mat<'a>, MatMut<'a>);
impl Kernel for Softmax<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for r in 0..self.0.rows() {
            // SAFETY: `softmax` has checked the shapes.
            unsafe { softmax_row(s, self.0.row_ptr(r), self.1.row_ptr(r), self.0.cols()) };
        }
    }
}

/// `out = e^(x - max) / sum e^(x - max)` per row; zeros where every element is minus infinity. `out` may be the rows of
/// `x`. Bound: the module's.
pub fn softmax(isa: IsaLevel, x: Mat<'_>, out: MatMut<'_>) {
    assert!(x.rows() == out.rows() && x.cols() == out.cols(), "shapes differ");
    isa.run(Softmax(x, out))
}

struct LogSum<'a>(&'a [f32]);
impl Kernel for LogSum<'_> {
    type Out = f64;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f64 {
        // SAFETY: the slice's own length.
        let top = unsafe { max_row(s, self.0.as_ptr(), self.0.len()) };
        // Chunks that fit the stack; their sums are added in f64.
        let mut sum = 0.0f64;
        let mut e = [0.0f32; 256];
        for chunk in self.0.chunks(256) {
            // SAFETY: a chunk has at most 256 elements.
            unsafe {
                math::map_row(s, ExpShifted(top), chunk.as_ptr(), e.as_mut_ptr(), chunk.len());
                sum += sum_row(s, e.as_ptr(), chunk.len()) as f64;
            }
        }
        top as f64 + sum.ln()
    }
}

/// `ln sum e^x` of a row of logits, in f64: absolute error below 40 u (chunks of 256 terms in f32, then f64).
///
/// `x[i] - log_sum_exp(x)` is the log-probability of i.
pub fn log_sum_exp(isa: IsaLevel, x: &[f32]) -> f64 {
    isa.run(LogSum(x))
}

/// `out[i] = x[i] - ln sum e^x`.
pub fn log_softmax(isa: IsaLevel, x: &[f32], out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "shapes differ");
    let l = log_sum_exp(isa, x);
    out.iter_mut().zip(x).for_each(|(o, x)| *o = (*x as f64 - l) as f32);
}

/// The index of the largest element, the lowest among equals; NaN never wins. 0 for a row without a number.
pub fn argmax(x: &[f32]) -> usize {
    let mut best = (0, f32::NEG_INFINITY);
    for (i, v) in x.iter().enumerate() {
        if *v > best.1 {
            best = (i, *v);
        }
    }
    best.0
}

/// `out[t] = scale * table[ids[t]]`: rows of a `[n_rows, cols]` table of any format, decoded exactly.
///
/// Panics if an id is not a row of the table (the batch has been checked) or `out` is not `[ids, cols]`.
pub fn embed(isa: IsaLevel, format: Format, table: &[u8], ids: &[u32], scale: f32, mut out: MatMut<'_>) {
    let cols = out.cols();
    assert!(out.rows() == ids.len() && cols % format.block_len() == 0, "shapes differ");
    let row_bytes = cols / format.block_len() * format.block_bytes();
    for (t, &id) in ids.iter().enumerate() {
        let at = id as usize * row_bytes;
        hanzo_gguf::formats::to_float(format, &table[at..at + row_bytes], out.row_mut(t));
        if scale != 1.0 {
            isa.run(ScaleRow(out.row_mut(t), scale));
        }
    }
}

struct ScaleRow<'a>(&'a mut [f32], f32);
impl Kernel for ScaleRow<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let p = self.0.as_mut_ptr();
        // SAFETY: one slice, in place.
        unsafe { super::norm::scale_by(s, p, self.1, None, p, self.0.len()) };
    }
}

/// `out[i] = x[rows[i]]`. Panics if a row is not there.
pub fn gather_rows(x: Mat<'_>, rows: &[u32], mut out: MatMut<'_>) {
    assert!(out.rows() == rows.len() && out.cols() == x.cols(), "shapes differ");
    for (i, r) in rows.iter().enumerate() {
        out.row_mut(i).copy_from_slice(x.row(*r as usize));
    }
}

/// `out = x`: columns of a wider value, or one side of a concatenation, by the views' offsets and strides.
pub fn copy(x: Mat<'_>, mut out: MatMut<'_>) {
    assert!(x.rows() == out.rows() && x.cols() == out.cols(), "shapes differ");
    for r in 0..x.rows() {
        out.row_mut(r).copy_from_slice(x.row(r));
    }
}

#[cfg(test)]
mod tests {
    use super::super::math::tests::isas;
    use super::*;

    const U: f64 = 1.0 / 16_777_216.0;

    #[test]
    fn softmax_and_log_softmax_are_within_their_bounds() {
        for isa in isas() {
            for n in [1usize, 5, 16, 60, 128, 1000] {
                let x: Vec<f32> = (0..n).map(|i| (i as f32 * 1.3).sin() * 12.0).collect();
                let (mut p, mut lp) = (vec![0.0; n], vec![0.0; n]);
                softmax(isa, Mat::new(&x, 1, n), MatMut::new(&mut p, 1, n));
                log_softmax(isa, &x, &mut lp);
                let top = x.iter().copied().fold(f32::MIN, f32::max) as f64;
                let sum: f64 = x.iter().map(|v| (*v as f64 - top).exp()).sum();
                for i in 0..n {
                    let s = top - x[i] as f64;
                    let want = (-s).exp() / sum;
                    assert!((p[i] as f64 - want).abs() <= (2.0 * s + n as f64 / 8.0 + 16.0) * U * want);
                    let log = -s - sum.ln();
                    assert!((lp[i] as f64 - log).abs() <= (40.0 + log.abs()) * U);
                }
            }
        }
    }

    #[test]
    fn masked_rows_give_zeros_and_poison_shows() {
        for isa in isas() {
            let mut x = [f32::NEG_INFINITY; 20];
            let mut p = [1.0; 20];
            softmax(isa, Mat::new(&x, 1, 20), MatMut::new(&mut p, 1, 20));
            assert_eq!(p, [0.0; 20]);
            x[3] = f32::NAN;
            softmax(isa, Mat::new(&x, 1, 20), MatMut::new(&mut p, 1, 20));
            assert!(p[3].is_nan());
        }
    }

    #[test]
    fn argmax_takes_the_lowest_index_among_equals() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0, f32::NAN, 2.0]), 1);
        assert_eq!(argmax(&[f32::NAN, f32::NEG_INFINITY]), 0);
        assert_eq!(argmax(&[]), 0);
    }

    #[test]
    fn embedding_rows_are_decoded_scaled_and_gathered() {
        let table: Vec<u8> =
            (0..3 * 32u16).flat_map(|i| half::f16::from_f32(i as f32 * 0.5).to_bits().to_le_bytes()).collect();
        for isa in isas() {
            let mut out = vec![0.0; 2 * 32];
            embed(isa, Format::F16, &table, &[2, 0], 3.0, MatMut::new(&mut out, 2, 32));
            assert_eq!((out[0], out[31], out[32], out[33]), (96.0, 142.5, 0.0, 1.5));
            let mut one = vec![0.0; 32];
            gather_rows(Mat::new(&out, 2, 32), &[1], MatMut::new(&mut one, 1, 32));
            assert_eq!(one, out[32..]);
            let mut wide = vec![0.0; 2 * 40];
            copy(Mat::new(&out, 2, 32), MatMut::strided(&mut wide[8..], 2, 32, 40));
            assert_eq!((wide[7], wide[8], wide[48]), (0.0, 96.0, 0.0));
        }
    }
}
