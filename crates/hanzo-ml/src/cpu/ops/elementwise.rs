//! Element-wise ops on rows of floats: sums, products, scaling, soft-caps, biases.
//!
//! Each is one pass: `out` may be an input's rows (see [`MatMut::from_raw`]). Bytes moved: 4 per element read
//! or written. Every result is one correctly rounded operation (soft-cap: see [`softcap`]), so the bound is
//! one unit in the last place. Activations live in `glu`.

use super::math::{self, Binary, Unary};
use super::simd::{Kernel, Simd};
use super::view::{Mat, MatMut};
use crate::cpu::isa::IsaLevel;

struct Map<'a, F>(F, Mat<'a>, MatMut<'a>);
impl<F: Unary> Kernel for Map<'_, F> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Map(f, x, out) = self;
        assert!(x.rows() == out.rows() && x.cols() == out.cols(), "shapes differ");
        for r in 0..x.rows() {
            // SAFETY: both rows have `cols` elements.
            unsafe { math::map_row(s, f, x.row_ptr(r), out.row_ptr(r), x.cols()) };
        }
    }
}

struct Zip<'a, F>(F, Mat<'a>, Mat<'a>, MatMut<'a>);
impl<F: Binary> Kernel for Zip<'_, F> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Zip(f, x, y, out) = self;
        assert!(x.rows() == out.rows() && x.cols() == out.cols() && y.cols() == x.cols(), "shapes differ");
        assert!(y.rows() == x.rows() || y.rows() == 1, "the second operand has as many rows, or one");
        for r in 0..x.rows() {
            let y = y.row_ptr(if y.rows() == 1 { 0 } else { r });
            // SAFETY: all three rows have `cols` elements.
            unsafe { math::zip_row(s, f, x.row_ptr(r), y, out.row_ptr(r), x.cols()) };
        }
    }
}

/// `out = f(x)`, for the modules that bring their own `f`.
pub(crate) fn map<F: Unary>(isa: IsaLevel, f: F, x: Mat<'_>, out: MatMut<'_>) {
    isa.run(Map(f, x, out))
}

/// `out = f(x, y)`; a one-row `y` is used for every row.
pub(crate) fn zip<F: Binary>(isa: IsaLevel, f: F, x: Mat<'_>, y: Mat<'_>, out: MatMut<'_>) {
    isa.run(Zip(f, x, y, out))
}

#[derive(Clone, Copy)]
struct Add;
impl Binary for Add {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F, y: S::F) -> S::F {
        s.add(x, y)
    }
}

#[derive(Clone, Copy)]
struct Mul;
impl Binary for Mul {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F, y: S::F) -> S::F {
        s.mul(x, y)
    }
}

#[derive(Clone, Copy)]
struct Scale(f32);
impl Unary for Scale {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F) -> S::F {
        s.mul(x, s.splat(self.0))
    }
}

#[derive(Clone, Copy)]
struct Softcap(f32);
impl Unary for Softcap {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F) -> S::F {
        s.mul(s.splat(self.0), math::tanh(s, s.div(x, s.splat(self.0))))
    }
}

/// `out = x + y` on `[rows, cols]`; a one-row `y` (a bias) is added to every row.
pub fn add(isa: IsaLevel, x: Mat<'_>, y: Mat<'_>, out: MatMut<'_>) {
    zip(isa, Add, x, y, out)
}

/// `out = x * y` on `[rows, cols]`; a one-row `y` multiplies every row.
pub fn mul(isa: IsaLevel, x: Mat<'_>, y: Mat<'_>, out: MatMut<'_>) {
    zip(isa, Mul, x, y, out)
}

/// `out[r] = x[r] * factor[r]` with a one-column `factor` `[rows, 1]`.
pub fn mul_column(isa: IsaLevel, x: Mat<'_>, factor: Mat<'_>, out: MatMut<'_>) {
    assert!(factor.rows() == x.rows() && factor.cols() == 1 && x.rows() == out.rows() && x.cols() == out.cols());
    isa.run(MulColumn(x, factor, out))
}

struct MulColumn<'a>(Mat<'a>, Mat<'a>, MatMut<'a>);
impl Kernel for MulColumn<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let MulColumn(x, factor, out) = self;
        for r in 0..x.rows() {
            // SAFETY: `mul_column` has checked the shapes.
            unsafe { math::map_row(s, Scale(*factor.row_ptr(r)), x.row_ptr(r), out.row_ptr(r), x.cols()) };
        }
    }
}

/// `out = x * factor`.
pub fn scale(isa: IsaLevel, x: Mat<'_>, factor: f32, out: MatMut<'_>) {
    map(isa, Scale(factor), x, out)
}

/// `out = cap * tanh(x / cap)`. Relative error at most 6e-7: tanh's 4e-7, the division (whose u reaches the
/// result at most once, tanh being flatter than linear) and the product.
pub fn softcap(isa: IsaLevel, x: Mat<'_>, cap: f32, out: MatMut<'_>) {
    map(isa, Softcap(cap), x, out)
}

#[cfg(test)]
mod tests {
    use super::super::math::tests::isas;
    use super::*;

    #[test]
    fn sums_products_and_biases_are_exact_roundings_at_odd_widths() {
        for isa in isas() {
            for cols in [1, 7, 8, 15, 16, 17, 33, 100] {
                let x: Vec<f32> = (0..3 * cols).map(|i| (i as f32 * 0.37).sin() * 9.0).collect();
                let y: Vec<f32> = (0..3 * cols).map(|i| (i as f32 * 1.7).cos() * 0.3).collect();
                let (a, b) = (Mat::new(&x, 3, cols), Mat::new(&y, 3, cols));
                let mut out = vec![f32::NAN; 3 * cols];
                add(isa, a, b, MatMut::new(&mut out, 3, cols));
                assert!(out.iter().zip(x.iter().zip(&y)).all(|(o, (x, y))| *o == x + y));
                mul(isa, a, b.range(1, 2), MatMut::new(&mut out, 3, cols));
                assert!((0..3 * cols).all(|i| out[i] == x[i] * y[cols + i % cols]));
                mul_column(isa, a, Mat::strided(&y, 3, 1, cols), MatMut::new(&mut out, 3, cols));
                assert!((0..3 * cols).all(|i| out[i] == x[i] * y[i / cols * cols]));
                scale(isa, a, 1.1, MatMut::new(&mut out, 3, cols));
                assert!(out.iter().zip(&x).all(|(o, x)| *o == x * 1.1));
            }
        }
    }

    #[test]
    fn softcap_is_within_its_bound() {
        let x: Vec<f32> = (-3000..3000).map(|i| i as f32 * 0.1).collect();
        for isa in isas() {
            let mut out = vec![0.0; x.len()];
            softcap(isa, Mat::new(&x, 1, x.len()), 30.0, MatMut::new(&mut out, 1, x.len()));
            for (x, o) in x.iter().zip(&out) {
                let want = 30.0 * (*x as f64 / 30.0).tanh();
                assert!((*o as f64 - want).abs() <= 6e-7 * want.abs());
            }
        }
    }
}
