//! Causal depthwise convolution with carried state (LFM2, and the input of gated delta layers).
//!
//! `out[t, c] = act(bias[c] + sum_j w[c, j] x[t - kernel + 1 + j, c])`; rows before the step come from the state, which
//! then keeps the last `kernel - 1` rows. FLOPs: `2 kernel` per element; bytes: 8, the taps and the state. A result is
//! one chain of `kernel` products in tap order whatever the chunking, so any chunking gives the same bits. Bound:
//! `(kernel + 1) u sum|w x|`, then the activation's.

use super::simd::{Kernel, Simd};
use super::view::{Mat, MatMut};
use crate::cpu::isa::IsaLevel;
use crate::plan::Activation;

/// Taps at most.
pub const MAX_TAPS: usize = 16;

struct Conv<'a> {
    x: Mat<'a>,
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    kernel: usize,
    state: MatMut<'a>,
    out: MatMut<'a>,
}

impl Kernel for Conv<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Conv { x, weight, bias, kernel, state, out } = self;
        let (cols, past) = (x.cols(), kernel - 1);
        // Row `i` of the state followed by the step's rows.
        let row = |i: usize| if i < past { state.row_ptr(i).cast_const() } else { x.row_ptr(i - past) };
        let mut c = 0;
        while c < cols {
            let n = (cols - c).min(S::LANES);
            // The taps of these channels, one channel a lane.
            let mut taps = [[0.0f32; 16]; MAX_TAPS];
            for (j, tap) in taps.iter_mut().enumerate().take(kernel) {
                for (i, w) in tap.iter_mut().enumerate().take(n) {
                    *w = weight[(c + i) * kernel + j];
                }
            }
            // SAFETY: `n` columns remain from `c` in every row and in the bias; a tap row holds 16 floats.
            unsafe {
                let load = |p: *const f32| if n == S::LANES { s.load(p) } else { s.load_part(p, n) };
                let bias = bias.map_or(s.splat(0.0), |b| load(b.as_ptr().add(c)));
                for t in 0..x.rows() {
                    let mut sum = bias;
                    for (j, tap) in taps.iter().enumerate().take(kernel) {
                        sum = s.fma(s.load(tap.as_ptr()), load(row(t + j).add(c)), sum);
                    }
                    let dst = out.row_ptr(t).add(c);
                    if n == S::LANES { s.store(dst, sum) } else { s.store_part(dst, n, sum) }
                }
            }
            c += n;
        }
    }
}

/// Convolves the tokens of one sequence: `x` and `out` `[n_tokens, cols]` (not the same rows), `weight` `[cols, kernel]`
/// as files have it, `bias` `[cols]`, `state` `[kernel - 1, cols]` oldest first, updated.
///
/// Threads may split columns: give each its columns of every argument. Panics if shapes disagree or `kernel` exceeds
/// [`MAX_TAPS`].
#[allow(clippy::too_many_arguments)]
pub fn short_conv(
    isa: IsaLevel,
    x: Mat<'_>,
    weight: &[f32],
    bias: Option<&[f32]>,
    kernel: usize,
    activation: Option<Activation>,
    mut state: MatMut<'_>,
    mut out: MatMut<'_>,
) {
    let (n, cols) = (x.rows(), x.cols());
    assert!((1..=MAX_TAPS).contains(&kernel), "1 to {MAX_TAPS} taps");
    assert!(weight.len() == cols * kernel && bias.is_none_or(|b| b.len() == cols), "taps or bias");
    assert!(state.rows() == kernel - 1 && (kernel == 1 || state.cols() == cols), "state");
    assert!(out.rows() == n && out.cols() == cols, "shapes differ");
    isa.run(Conv { x, weight, bias, kernel, state: state.reborrow(), out: out.reborrow() });
    // The last kernel - 1 rows of state and step; ascending order reads a row before it is overwritten.
    for i in 0..kernel - 1 {
        let from = i + n;
        if from < kernel - 1 {
            let src = state.row_ptr(from);
            // SAFETY: two different rows of the state.
            unsafe { core::ptr::copy_nonoverlapping(src, state.row_ptr(i), cols) };
        } else {
            state.row_mut(i).copy_from_slice(x.row(from - (kernel - 1)));
        }
    }
    if let Some(act) = activation {
        // SAFETY: the same rows in and out, which `activate` allows.
        let rows = unsafe { Mat::from_raw(out.first_ptr(), n, cols, out.stride()) };
        super::glu::activate(isa, act, rows, out);
    }
}

#[cfg(test)]
mod tests {
    use super::super::math::tests::isas;
    use super::*;

    #[test]
    fn convolution_is_within_its_bound_and_bit_equal_in_any_chunking() {
        let u = 2f64.powi(-24);
        for (n, cols, kernel) in [(9, 37, 4), (5, 16, 3), (3, 8, 1), (2, 5, 6)] {
            let x: Vec<f32> = (0..n * cols).map(|i| (i as f32 * 0.37).sin() * 2.0).collect();
            let w: Vec<f32> = (0..cols * kernel).map(|i| (i as f32 * 1.1).cos()).collect();
            let b: Vec<f32> = (0..cols).map(|i| i as f32 * 0.01).collect();
            let past: Vec<f32> = (0..(kernel - 1) * cols).map(|i| (i as f32 * 0.9).sin()).collect();
            for isa in isas() {
                let mut whole = vec![0.0; n * cols];
                let mut state = past.clone();
                let run = |from: usize, to: usize, act, state: &mut [f32], out: &mut [f32]| {
                    let x = Mat::new(&x[from * cols..], to - from, cols);
                    let state = MatMut::new(state, kernel - 1, cols);
                    short_conv(isa, x, &w, Some(&b), kernel, act, state, MatMut::new(out, to - from, cols));
                };
                run(0, n, None, &mut state, &mut whole);
                let rows: Vec<f32> = past.iter().chain(&x).copied().collect();
                assert_eq!(state, rows[n * cols..]);
                for t in 0..n {
                    for c in 0..cols {
                        let terms = (0..kernel).map(|j| w[c * kernel + j] as f64 * rows[(t + j) * cols + c] as f64);
                        let (sum, size) = terms.fold((b[c] as f64, b[c] as f64), |(s, a), v| (s + v, a + v.abs()));
                        assert!((whole[t * cols + c] as f64 - sum).abs() <= (kernel + 1) as f64 * u * size);
                    }
                }
                let (mut parts, mut carried) = (vec![0.0; n * cols], past.clone());
                for t in 0..n {
                    run(t, t + 1, None, &mut carried, &mut parts[t * cols..(t + 1) * cols]);
                }
                assert!(parts == whole && carried == state, "{isa:?}");
                let (mut silu, mut again) = (vec![0.0; n * cols], past.clone());
                run(0, n, Some(Activation::Silu), &mut again, &mut silu);
                for (y, z) in whole.iter().zip(&silu) {
                    let want = *y as f64 / (1.0 + (-*y as f64).exp());
                    assert!((*z as f64 - want).abs() <= 5e-7 * want.abs());
                }
            }
        }
    }
}
