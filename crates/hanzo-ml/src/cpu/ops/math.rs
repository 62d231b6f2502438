//! Elementary functions on vectors of floats: exp, sigmoid, tanh, erfc, and the walk over a row.
//!
//! NaN in gives NaN out everywhere, so that a poisoned arena shows. Bounds are relative to the exact value,
//! in units of u = 2^-24, and are tested over all exponents by the tests below.

use super::simd::Simd;

/// `log2(e)`.
const LOG2E: f32 = core::f32::consts::LOG2_E;
/// `ln 2` in two parts; the first has 10 trailing zero bits, so that `n * LN2_HI` is exact for |n| < 2^10.
const LN2_HI: f32 = 0.693_359_4;
const LN2_LO: f32 = -2.121_944_4e-4;

/// `e^x`, relative error at most 2e-7 where the result is normal, half a subnormal step where it is not.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2 (two-part ln 2), then 1 + r + r^2 q(r) with q of degree 4 fitted to
/// 3.1e-9 relative (weighted least squares iterated towards minimax), then an exact scaling by 2^n.
/// Error: reduction |r| u, polynomial 3.1e-9, three roundings near 1: under 3u = 1.8e-7.
/// Below -104 the result is 0, above 88.73 infinity.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    // Bound first operand, value second: `max` and `min` give the second one where it is NaN.
    let x = s.min(s.splat(89.0), s.max(s.splat(-104.5), x));
    let n = s.round(s.mul(x, s.splat(LOG2E)));
    let r = s.fma(n, s.splat(-LN2_HI), x);
    let r = s.fma(n, s.splat(-LN2_LO), r);
    let q = s.splat(0.001_381_453_8);
    let q = s.fma(q, r, s.splat(0.008_368_745));
    let q = s.fma(q, r, s.splat(0.041_668_39));
    let q = s.fma(q, r, s.splat(0.166_665_21));
    let q = s.fma(q, r, s.splat(0.499_999_94));
    let p = s.add(s.fma(s.mul(r, r), q, r), s.splat(1.0));
    s.scale_pow2(p, n)
}

/// `1 / (1 + e^-x)`, relative error at most 4e-7 where the result is normal.
///
/// e^-x carries 3u; adding 1 and dividing add 2u (and 1u of slack for the subnormal end).
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(s: S, x: S::F) -> S::F {
    let e = exp(s, s.sub(s.splat(0.0), x));
    s.div(s.splat(1.0), s.add(s.splat(1.0), e))
}

/// `tanh x`, relative error at most 4e-7.
///
/// |x| < 0.56: x + x^3 t(x^2), t of degree 4 fitted to 1.2e-9. Beyond: 1 - 2 / (e^2|x| + 1), where the
/// subtracted term is at most 0.49, so that its 5u weigh less than 1 + 2.5 u against a result of at least 0.5.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::F) -> S::F {
    let a = s.abs(x);
    let z = s.mul(x, x);
    let t = s.splat(-0.006_207_423_3);
    let t = s.fma(t, z, s.splat(0.021_027_213));
    let t = s.fma(t, z, s.splat(-0.053_842_276));
    let t = s.fma(t, z, s.splat(0.133_325));
    let t = s.fma(t, z, s.splat(-0.333_333_16));
    let small = s.fma(s.mul(z, x), t, x);
    let e = exp(s, s.add(a, a));
    let big = s.sub(s.splat(1.0), s.div(s.splat(2.0), s.add(e, s.splat(1.0))));
    let big = s.select_lt(x, s.splat(0.0), s.sub(s.splat(0.0), big), big);
    s.select_lt(a, s.splat(0.56), small, big)
}

/// `erfc z` for z >= 0, relative error at most (2 z^2 + 8) u while the result is normal.
///
/// e^(-z^2) t P(t) with t = 1 / (1 + z/2), P of degree 8 fitted to 4.5e-8 relative on [0, 14]. Rounding z^2
/// moves the exponential by z^2 u relative: the z^2 term of the bound.
#[inline(always)]
pub(crate) fn erfc_positive<S: Simd>(s: S, z: S::F) -> S::F {
    let t = s.div(s.splat(1.0), s.fma(z, s.splat(0.5), s.splat(1.0)));
    let p = s.splat(-0.059_386_484);
    let p = s.fma(p, t, s.splat(0.286_124_05));
    let p = s.fma(p, t, s.splat(-0.490_406_54));
    let p = s.fma(p, t, s.splat(0.281_733_45));
    let p = s.fma(p, t, s.splat(-0.029_148_636));
    let p = s.fma(p, t, s.splat(0.203_752_56));
    let p = s.fma(p, t, s.splat(0.242_835_1));
    let p = s.fma(p, t, s.splat(0.282_412_17));
    let p = s.fma(p, t, s.splat(0.282_084_35));
    let e = exp(s, s.sub(s.splat(0.0), s.mul(z, z)));
    s.mul(s.mul(e, t), p)
}

/// A function of one element. `apply` must be `#[inline(always)]`.
pub(crate) trait Unary: Copy {
    fn apply<S: Simd>(self, s: S, x: S::F) -> S::F;
}

/// A function of two elements. `apply` must be `#[inline(always)]`.
pub(crate) trait Binary: Copy {
    fn apply<S: Simd>(self, s: S, x: S::F, y: S::F) -> S::F;
}

/// `out[i] = f(x[i])`; `out` may be `x`.
///
/// # Safety
/// `x` is readable and `out` writable for `n` floats.
#[inline(always)]
pub(crate) unsafe fn map_row<S: Simd, F: Unary>(s: S, f: F, x: *const f32, out: *mut f32, n: usize) {
    let whole = n - n % S::LANES;
    let mut i = 0;
    while i < whole {
        // SAFETY: i + LANES <= n.
        unsafe { s.store(out.add(i), f.apply(s, s.load(x.add(i)))) };
        i += S::LANES;
    }
    if i < n {
        // SAFETY: exactly the n - i remaining elements are touched.
        unsafe { s.store_part(out.add(i), n - i, f.apply(s, s.load_part(x.add(i), n - i))) };
    }
}

/// `out[i] = f(x[i], y[i])`; `out` may be `x` or `y`.
///
/// # Safety
/// `x` and `y` are readable and `out` writable for `n` floats.
#[inline(always)]
pub(crate) unsafe fn zip_row<S: Simd, F: Binary>(s: S, f: F, x: *const f32, y: *const f32, out: *mut f32, n: usize) {
    let whole = n - n % S::LANES;
    let mut i = 0;
    while i < whole {
        // SAFETY: i + LANES <= n.
        unsafe { s.store(out.add(i), f.apply(s, s.load(x.add(i)), s.load(y.add(i)))) };
        i += S::LANES;
    }
    if i < n {
        let k = n - i;
        // SAFETY: exactly the n - i remaining elements are touched.
        unsafe { s.store_part(out.add(i), k, f.apply(s, s.load_part(x.add(i), k), s.load_part(y.add(i), k))) };
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::simd::Kernel;
    use super::*;
    use crate::cpu::isa::IsaLevel;

    /// f64 erfc by series (small z) or continued fraction (large z), for the references of this crate's tests.
    pub(crate) fn erfc64(z: f64) -> f64 {
        if z < 0.0 {
            return 2.0 - erfc64(-z);
        }
        if z < 2.5 {
            let (mut sum, mut term) = (z, z);
            for k in 1..200 {
                term *= -z * z / k as f64;
                sum += term / (2 * k + 1) as f64;
            }
            return 1.0 - sum * 2.0 / std::f64::consts::PI.sqrt();
        }
        let mut f = 0.0;
        for k in (1..200).rev() {
            f = k as f64 / 2.0 / (z + f);
        }
        (-z * z).exp() / (z + f) / std::f64::consts::PI.sqrt()
    }

    struct Map<'a, F>(F, &'a [f32], &'a mut [f32]);
    impl<F: Unary> Kernel for Map<'_, F> {
        type Out = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            assert_eq!(self.1.len(), self.2.len());
            // SAFETY: both slices have the same length.
            unsafe { map_row(s, self.0, self.1.as_ptr(), self.2.as_mut_ptr(), self.1.len()) }
        }
    }

    pub(crate) fn isas() -> impl Iterator<Item = IsaLevel> {
        IsaLevel::available()
    }

    /// Every exponent and both signs, 2,000 mantissas each, within |x| <= max.
    pub(crate) fn floats(max: f32) -> Vec<f32> {
        let mut v = vec![0.0, -0.0];
        for e in 0..255u32 {
            for m in 0..2000u32 {
                let x = f32::from_bits(e << 23 | m.wrapping_mul(4194).wrapping_add(e * 7) & 0x7f_ffff);
                if x <= max {
                    v.extend([x, -x]);
                }
            }
        }
        v
    }

    /// Largest relative error over `xs`, with the absolute error of half a subnormal step allowed for.
    fn worst<F: Unary>(f: F, xs: &[f32], want: fn(f64) -> f64, allowed: impl Fn(f64) -> f64) {
        for isa in isas() {
            let mut out = vec![0.0; xs.len()];
            isa.run(Map(f, xs, &mut out));
            for (&x, &got) in xs.iter().zip(&out) {
                let w = want(x as f64);
                if w > f32::MAX as f64 {
                    assert!(got > 3.4e38, "{isa:?} f({x}) = {got}, want {w}");
                    continue;
                }
                let bound = allowed(x as f64) * w.abs() + 1.5e-45;
                assert!((got as f64 - w).abs() <= bound, "{isa:?} f({x}) = {got}, want {w}, bound {bound:e}");
            }
        }
    }

    macro_rules! unary {
        ($name:ident, $f:path) => {
            #[derive(Clone, Copy)]
            struct $name;
            impl Unary for $name {
                #[inline(always)]
                fn apply<S: Simd>(self, s: S, x: S::F) -> S::F {
                    $f(s, x)
                }
            }
        };
    }
    unary!(Exp, exp);
    unary!(Sigmoid, sigmoid);
    unary!(Tanh, tanh);
    unary!(Erfc, erfc_positive);

    #[test]
    fn exp_is_within_2e7_relative_over_its_whole_range() {
        worst(Exp, &floats(200.0), f64::exp, |_| 2e-7)
    }

    #[test]
    fn sigmoid_is_within_4e7_relative() {
        worst(Sigmoid, &floats(88.0), |x| 1.0 / (1.0 + (-x).exp()), |_| 4e-7)
    }

    #[test]
    fn tanh_is_within_4e7_relative() {
        worst(Tanh, &floats(1e30), f64::tanh, |_| 4e-7)
    }

    #[test]
    fn erfc_is_within_its_stated_bound() {
        let u = 2f64.powi(-24);
        let xs: Vec<f32> = floats(9.0).into_iter().filter(|x| *x >= 0.0).collect();
        worst(Erfc, &xs, erfc64, |z| (2.0 * z * z + 8.0) * u);
    }

    #[test]
    fn infinities_saturate_and_nan_stays_nan() {
        let xs = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN];
        for isa in isas() {
            let mut e = [1.0f32; 3];
            isa.run(Map(Exp, &xs, &mut e));
            assert!(e[0] == 0.0 && e[1] == f32::INFINITY && e[2].is_nan(), "{isa:?} {e:?}");
            isa.run(Map(Sigmoid, &xs, &mut e));
            assert!(e[0] == 0.0 && e[1] == 1.0 && e[2].is_nan(), "{isa:?} {e:?}");
            isa.run(Map(Tanh, &xs, &mut e));
            assert!(e[0] == -1.0 && e[1] == 1.0 && e[2].is_nan(), "{isa:?} {e:?}");
        }
    }
}
