//! A number that knows how far off an f32 computation of it may be: running error analysis (Wilkinson 1963).
//!
//! [`Num`] holds a value in f64 and a bound `e` such that any f32 computation of the same formula, in any order of
//! summation, lies within `e` of it. Every operator states its own rounding once, so that the interpreter reads like
//! the maths and the bound of whatever it computes is derived on the way. No op and no format may enter here.
//!
//! With u = 2^-24, the unit roundoff of f32:
//!
//! | operation | bound of the result |
//! |---|---|
//! | `a + b` | `e_a + e_b + u |a + b|` |
//! | `a * b` | `|a| e_b + |b| e_a + e_a e_b + u |a b|` |
//! | `a / b` | `(e_a + |a / b| e_b) / (|b| - e_b) + u |a / b|` |
//! | `sqrt a` | `sqrt a - sqrt(a - e_a)` (or `sqrt e_a` near zero) `+ u sqrt a` |
//! | sum of n terms | `sum e + (n - 1) u sum |term|`: whatever the order, a term passes at most n - 1 additions |
//! | elementary functions | the argument's error through the function, plus [`FUNCTION`] u of the result |
//!
//! Results below [`TINY`], intermediate ones included, may be flushed to zero: their rounding is their whole size.

use std::ops::{Add, Div, Mul, Neg, Sub};

/// u: half the distance of 1 to the next f32.
pub const U: f64 = 1.0 / (1u64 << 24) as f64;

/// The smallest normal f32: what a flushed result may be off by.
pub const TINY: f64 = f32::MIN_POSITIVE as f64;

/// Units of u that exp, tanh, sigmoid and erf may be off by: four units in the last place, the usual promise of a
/// vector maths library.
pub const FUNCTION: f64 = 8.0;

/// What rounding a result to f32 may change it by.
fn rounding(v: f64) -> f64 {
    if v.abs() < TINY { v.abs() } else { U * v.abs() }
}

/// A value and the bound of an f32 computation of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Num {
    /// The value.
    pub v: f64,
    /// What an f32 computation may differ by.
    pub e: f64,
}

impl From<f32> for Num {
    /// A number that both sides know exactly.
    fn from(x: f32) -> Num {
        Num { v: f64::from(x), e: 0.0 }
    }
}

impl Num {
    /// Zero.
    pub const ZERO: Num = Num { v: 0.0, e: 0.0 };
    /// One.
    pub const ONE: Num = Num { v: 1.0, e: 0.0 };

    /// A number that both sides know exactly.
    pub fn exact(v: f64) -> Num {
        Num { v, e: 0.0 }
    }

    /// A constant that f32 code holds rounded.
    pub fn rounded(v: f64) -> Num {
        Num { v, e: U * v.abs() }
    }

    /// With a further error.
    #[must_use]
    pub fn widened(self, by: f64) -> Num {
        Num { v: self.v, e: self.e + by }
    }

    /// The largest magnitude an f32 computation may give.
    pub fn magnitude(self) -> f64 {
        self.v.abs() + self.e
    }

    /// A sum in any order.
    pub fn sum(terms: impl IntoIterator<Item = Num>) -> Num {
        let (mut n, mut sum, mut size, mut e) = (0u32, 0.0, 0.0, 0.0);
        for t in terms {
            n += 1;
            sum += t.v;
            size += t.magnitude();
            e += t.e;
        }
        Num { v: sum, e: e + f64::from(n.saturating_sub(1)) * U * size }
    }

    /// The square root.
    pub fn sqrt(self) -> Num {
        let root = self.v.max(0.0).sqrt();
        let e = if self.v > self.e { root - (self.v - self.e).sqrt() } else { (self.v.max(0.0) + self.e).sqrt() };
        Num { v: root, e: e + U * root }
    }

    /// `e^x`.
    pub fn exp(self) -> Num {
        let v = self.v.exp();
        Num { v, e: v * (self.e.exp_m1() + FUNCTION * U) + if v < TINY { v } else { 0.0 } }
    }

    /// `tanh x`; its slope is at most one.
    pub fn tanh(self) -> Num {
        let v = self.v.tanh();
        // Within half the argument's error of the largest slope nearby, which is at the end nearest zero.
        let near = (self.v.abs() - self.e).max(0.0);
        let slope = 1.0 - near.tanh().powi(2);
        Num { v, e: self.e * slope + FUNCTION * U * v.abs().max(U) }
    }

    /// `1 / (1 + e^-x)`.
    pub fn sigmoid(self) -> Num {
        Num::ONE / (Num::ONE + (-self).exp())
    }

    /// `ln(1 + e^x)`; its slope is at most one, and its value is positive, so that the sum of its two parts loses nothing.
    pub fn softplus(self) -> Num {
        let v = self.v.max(0.0) + (-self.v.abs()).exp().ln_1p();
        Num { v, e: self.e + 2.0 * FUNCTION * U * v + if v < TINY { v } else { 0.0 } }
    }

    /// The Gauss error function; its slope is at most 2 / sqrt(pi). The bound is absolute: implementations go through
    /// erfc, whose exponential moves with the rounding of x^2.
    pub fn erf(self) -> Num {
        let v = erf(self.v);
        let slope = 2.0 / std::f64::consts::PI.sqrt();
        Num { v, e: self.e * slope + FUNCTION * U }
    }

    /// The larger of two.
    pub fn max(self, o: Num) -> Num {
        Num { v: self.v.max(o.v), e: self.e.max(o.e) }
    }

    /// The smaller of two.
    pub fn min(self, o: Num) -> Num {
        -((-self).max(-o))
    }
}

impl Neg for Num {
    type Output = Num;
    fn neg(self) -> Num {
        Num { v: -self.v, e: self.e }
    }
}

impl Add for Num {
    type Output = Num;
    fn add(self, o: Num) -> Num {
        let v = self.v + o.v;
        Num { v, e: self.e + o.e + rounding(v) }
    }
}

impl Sub for Num {
    type Output = Num;
    fn sub(self, o: Num) -> Num {
        self + -o
    }
}

impl Mul for Num {
    type Output = Num;
    fn mul(self, o: Num) -> Num {
        let v = self.v * o.v;
        Num { v, e: self.v.abs() * o.e + o.v.abs() * self.e + self.e * o.e + rounding(v) }
    }
}

impl Div for Num {
    type Output = Num;
    fn div(self, o: Num) -> Num {
        let v = self.v / o.v;
        let room = o.v.abs() - o.e;
        let e = if room > 0.0 { (self.e + v.abs() * o.e) / room } else { f64::INFINITY };
        Num { v, e: e + rounding(v) }
    }
}

/// erf in f64: the Maclaurin series below 3, the continued fraction of erfc (Lentz form, evaluated backwards) above.
fn erf(x: f64) -> f64 {
    let a = x.abs();
    let v = if a < 3.0 {
        let (mut sum, mut term, mut k) = (a, a, 0.0);
        while term.abs() > 1e-18 * sum.abs() && k < 200.0 {
            k += 1.0;
            term *= -a * a / k;
            sum += term / (2.0 * k + 1.0);
        }
        2.0 / std::f64::consts::PI.sqrt() * sum
    } else {
        let f = (1..=60).rev().fold(0.0, |f, k| f64::from(k) / 2.0 / (a + f));
        1.0 - (-a * a).exp() / ((a + f) * std::f64::consts::PI.sqrt())
    };
    v.copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn erf_has_its_known_values() {
        for (x, want) in
            [(0.5, 0.520_499_877_813_046_5), (1.0, 0.842_700_792_949_714_9), (3.5, 0.999_999_256_901_627_7)]
        {
            assert!((erf(x) - want).abs() < 1e-13, "{x}: {}", erf(x));
            assert_eq!(erf(-x), -erf(x));
        }
    }

    #[test]
    fn an_f32_computation_stays_within_the_bound() {
        // Heron's formula on pseudo-random triangles: products, sums, a root and a division.
        let mut seed = 1u32;
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / (1 << 24) as f32 + 0.5
        };
        for _ in 0..10_000 {
            let (a, b, c) = (next(), next(), next());
            let half = (a + b + c) / 2.0;
            let got = ((half * (half - a)).abs() * (half - b).abs()).sqrt() / c;
            let [a, b, c] = [a, b, c].map(Num::from);
            let half = Num::sum([a, b, c]) / Num::exact(2.0);
            let abs = |n: Num| if n.v < 0.0 { -n } else { n };
            let want = (abs(half * (half - a)) * abs(half - b)).sqrt() / c;
            assert!((f64::from(got) - want.v).abs() <= want.e, "{got} {want:?}");
        }
    }

    #[test]
    fn a_sum_is_bounded_in_any_order() {
        let terms: Vec<f32> = (0..1000).map(|i| ((i * 7919) % 1000) as f32 / 37.0 - 13.0).collect();
        let want = Num::sum(terms.iter().map(|t| Num::from(*t)));
        let forward: f32 = terms.iter().sum();
        let backward: f32 = terms.iter().rev().sum();
        for got in [forward, backward] {
            assert!((f64::from(got) - want.v).abs() <= want.e);
        }
    }
}
