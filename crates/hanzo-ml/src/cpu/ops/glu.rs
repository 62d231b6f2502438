//! Activations and gated linear units.
//!
//! Formulas: silu x sigmoid(x); gelu-tanh x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)) (identical to the tanh form,
//! as (1 + tanh z) / 2 = sigmoid(2 z)); gelu-erf x erfc(-x / sqrt 2) / 2; relu^2 max(x, 0)^2;
//! softplus max(x, 0) + log1p(e^-|x|), with log1p(y) = 2 atanh(z), z = y / (2 + y) <= 1/3, by its series.
//! A GLU is `out = act(gate) * up`. FLOPs per element: about 25; bytes: 12 (8 for an activation).
//!
//! Relative bounds, in u = 2^-24: silu 8 (5e-7); sigmoid 7 (4e-7); gelu-tanh 6 |z| + 8, z being the argument of the
//! sigmoid (its three roundings become relative errors of the result); gelu-erf 3 x^2 + 12 (see
//! `math::erfc_positive`); relu^2 1; softplus 14. A GLU adds one.

use super::elementwise::{map, zip};
use super::math::{self, Binary, Unary};
use super::simd::Simd;
use super::view::{Mat, MatMut};
use crate::cpu::isa::IsaLevel;
use crate::plan::{Activation, GluKind};

macro_rules! activation {
    ($name:ident, |$s:ident, $x:ident| $body:expr) => {
        #[derive(Clone, Copy)]
        struct $name;
        impl Unary for $name {
            #[inline(always)]
            fn apply<S: Simd>(self, $s: S, $x: S::F) -> S::F {
                $body
            }
        }
    };
}

activation!(Silu, |s, x| s.mul(x, math::sigmoid(s, x)));
activation!(GeluTanh, |s, x| {
    // 2 sqrt(2/pi), and that times 0.044715.
    let z = s.fma(s.mul(x, x), s.splat(0.071_354_814), s.splat(1.595_769));
    s.mul(x, math::sigmoid(s, s.mul(z, x)))
});
activation!(GeluErf, |s, x| {
    let z = s.mul(s.abs(x), s.splat(core::f32::consts::FRAC_1_SQRT_2));
    let tail = s.mul(s.splat(0.5), math::erfc_positive(s, z));
    s.mul(x, s.select_lt(x, s.splat(0.0), tail, s.sub(s.splat(1.0), tail)))
});
activation!(Relu2, |s, x| {
    let r = s.max(s.splat(0.0), x);
    s.mul(r, r)
});
activation!(Sigmoid, |s, x| math::sigmoid(s, x));
activation!(Softplus, |s, x| {
    let y = math::exp(s, s.sub(s.splat(0.0), s.abs(x)));
    let z = s.div(y, s.add(s.splat(2.0), y));
    let z2 = s.mul(z, z);
    // 2 (z + z^3 / 3 + ...): the first term left out is below 2e-9 of the first.
    let mut sum = s.splat(2.0 / 15.0);
    for k in [13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0f32] {
        sum = s.fma(sum, z2, s.splat(2.0 / k));
    }
    // The bound first, the value second: a NaN stays one.
    s.fma(sum, z, s.max(s.splat(0.0), x))
});

#[derive(Clone, Copy)]
struct Gated<A>(A);
impl<A: Unary> Binary for Gated<A> {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, gate: S::F, up: S::F) -> S::F {
        s.mul(self.0.apply(s, gate), up)
    }
}

#[derive(Clone, Copy)]
struct SwigluClamped {
    alpha: f32,
    limit: f32,
}
impl Binary for SwigluClamped {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, gate: S::F, up: S::F) -> S::F {
        let limit = s.splat(self.limit);
        let g = s.min(limit, gate);
        let v = s.min(limit, s.max(s.splat(-self.limit), up));
        let swish = s.mul(g, math::sigmoid(s, s.mul(g, s.splat(self.alpha))));
        s.mul(s.add(v, s.splat(1.0)), swish)
    }
}

/// `out = act(x)` on `[rows, cols]`; `out` may be the rows of `x`.
pub fn activate(isa: IsaLevel, act: Activation, x: Mat<'_>, out: MatMut<'_>) {
    match act {
        Activation::Silu => map(isa, Silu, x, out),
        Activation::GeluTanh => map(isa, GeluTanh, x, out),
        Activation::GeluErf => map(isa, GeluErf, x, out),
        Activation::Relu2 => map(isa, Relu2, x, out),
        Activation::Sigmoid => map(isa, Sigmoid, x, out),
        Activation::Softplus => map(isa, Softplus, x, out),
    }
}

/// `out = glu(gate, up)` on `[rows, cols]`; `out` may be the rows of either. The error is the activation's, plus
/// one rounding. A fused `[rows, 2 cols]` gate-up output is two views of it with a stride of `2 cols`.
pub fn glu(isa: IsaLevel, kind: GluKind, gate: Mat<'_>, up: Mat<'_>, out: MatMut<'_>) {
    match kind {
        GluKind::Plain(Activation::Silu) => zip(isa, Gated(Silu), gate, up, out),
        GluKind::Plain(Activation::GeluTanh) => zip(isa, Gated(GeluTanh), gate, up, out),
        GluKind::Plain(Activation::GeluErf) => zip(isa, Gated(GeluErf), gate, up, out),
        GluKind::Plain(Activation::Relu2) => zip(isa, Gated(Relu2), gate, up, out),
        GluKind::Plain(Activation::Sigmoid) => zip(isa, Gated(Sigmoid), gate, up, out),
        GluKind::Plain(Activation::Softplus) => zip(isa, Gated(Softplus), gate, up, out),
        GluKind::SwigluClamped { alpha, limit } => zip(isa, SwigluClamped { alpha, limit }, gate, up, out),
    }
}

#[cfg(test)]
mod tests {
    use super::super::math::tests::{erfc64, floats, isas};
    use super::*;

    const U: f64 = 1.0 / 16_777_216.0;

    fn reference(act: Activation, x: f64) -> (f64, f64) {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        match act {
            Activation::Silu => (x * sigmoid(x), 5e-7),
            Activation::GeluTanh => {
                let z = 2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
                (x * sigmoid(z), (6.0 * z.abs() + 8.0) * U)
            }
            Activation::GeluErf => (0.5 * x * erfc64(-x * 0.5f64.sqrt()), (3.0 * x * x + 12.0) * U),
            Activation::Relu2 => (x.max(0.0).powi(2), U),
            Activation::Sigmoid => (sigmoid(x), 4e-7),
            Activation::Softplus => (x.max(0.0) + (-x.abs()).exp().ln_1p(), 14.0 * U),
        }
    }

    const ACTS: [Activation; 6] = [
        Activation::Silu,
        Activation::GeluTanh,
        Activation::GeluErf,
        Activation::Relu2,
        Activation::Sigmoid,
        Activation::Softplus,
    ];

    #[test]
    fn every_activation_is_within_its_stated_bound_over_all_exponents() {
        let xs = floats(60.0);
        for isa in isas() {
            for act in ACTS {
                let mut out = vec![0.0; xs.len()];
                activate(isa, act, Mat::new(&xs, 1, xs.len()), MatMut::new(&mut out, 1, xs.len()));
                for (&x, &got) in xs.iter().zip(&out) {
                    let (want, rel) = reference(act, x as f64);
                    // Where a factor is subnormal its relative error is not bounded: half a step times |x|, twice.
                    let bound = rel * want.abs() + 1.5e-45 * (1.0 + x.abs() as f64);
                    // A reduced sigmoid below the normal range may also flush through 1 / infinity.
                    let flush = if want.abs() < 1.2e-36 { 1.2e-36 } else { 0.0 };
                    let bad = (got as f64 - want).abs();
                    assert!(bad <= bound + flush, "{isa:?} {act:?}({x}) = {got}, want {want}, off {bad:e} > {bound:e}");
                }
            }
        }
    }

    #[test]
    fn glu_is_the_activation_times_up_and_works_in_place_on_a_fused_buffer() {
        let (rows, cols) = (3, 37);
        let fused: Vec<f32> = (0..rows * 2 * cols).map(|i| (i as f32 * 0.71).sin() * 4.0).collect();
        for isa in isas() {
            for act in ACTS {
                let mut buf = fused.clone();
                let p = buf.as_mut_ptr();
                // SAFETY: `gate` and `out` are the same rows, `up` the other half of the buffer.
                let (gate, up, out) = unsafe {
                    (
                        Mat::from_raw(p, rows, cols, 2 * cols),
                        Mat::from_raw(p.add(cols), rows, cols, 2 * cols),
                        MatMut::from_raw(p, rows, cols, 2 * cols),
                    )
                };
                glu(isa, GluKind::Plain(act), gate, up, out);
                for r in 0..rows {
                    for c in 0..cols {
                        let (g, u) = (fused[r * 2 * cols + c] as f64, fused[r * 2 * cols + cols + c] as f64);
                        let (want, rel) = reference(act, g);
                        let got = buf[r * 2 * cols + c] as f64;
                        assert!((got - want * u).abs() <= (rel + U) * (want * u).abs() + 1e-44);
                    }
                }
            }
        }
    }

    #[test]
    fn gpt_oss_swiglu_clamps_both_inputs() {
        let gate = [10.0f32, -20.0, 1.0, 7.0, 0.5];
        let up = [1.0f32, 9.0, -9.0, 0.25, -1.0];
        for isa in isas() {
            let mut out = [0.0; 5];
            glu(
                isa,
                GluKind::SwigluClamped { alpha: 1.702, limit: 7.0 },
                Mat::new(&gate, 1, 5),
                Mat::new(&up, 1, 5),
                MatMut::new(&mut out, 1, 5),
            );
            for i in 0..5 {
                let g = (gate[i] as f64).min(7.0);
                let v = (up[i] as f64).clamp(-7.0, 7.0);
                let z = 1.702f32 as f64 * g;
                let want = (v + 1.0) * g / (1.0 + (-z).exp());
                assert!((out[i] as f64 - want).abs() <= (8.0 + 2.0 * z.abs()) * U * want.abs(), "{} {want}", out[i]);
            }
        }
    }
}
