//! Eight f32 side by side: the arithmetic in which the sums of a fit run.
//!
//! Every lane is an IEEE operation of its own, nothing is fused, and the order of a sum is fixed, so results do not depend on
//! the machine: the two implementations give the same bits. x86-64 uses SSE2, which it always has (compilers
//! unravel the equivalent loops into scalar code with branches, five times slower); elsewhere loops do.
//! Only what the fits need is here.

use std::ops::{Add, Mul, Sub};

pub(super) const LANES: usize = 8;

#[cfg(not(target_arch = "x86_64"))]
use portable as lanes;
#[cfg(target_arch = "x86_64")]
use sse2 as lanes;

pub(super) use lanes::Lanes;

impl Lanes {
    /// All numbers of a group, eight at a time (a group is a multiple of eight).
    #[inline(always)]
    pub fn of<const N: usize>(group: &[f32; N]) -> impl Iterator<Item = Lanes> {
        group.as_chunks::<LANES>().0.iter().map(|&lanes| Lanes::new(lanes))
    }

    /// The nearest integers, ties to even, for magnitudes below 2^22; larger numbers keep about their size.
    ///
    /// Adding and taking off 1.5 * 2^23 leaves no room for fractions.
    #[inline(always)]
    pub fn round(self) -> Lanes {
        let shift = Lanes::splat(12_582_912.0);
        self + shift - shift
    }

    /// The sum of all lanes, in a fixed order.
    #[inline(always)]
    pub fn sum(self) -> f32 {
        let [a, b, c, d, e, f, g, h] = self.get();
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }
}

#[cfg(target_arch = "x86_64")]
mod sse2 {
    use super::{Add, LANES, Mul, Sub};
    use std::arch::x86_64::{
        __m128, _mm_add_ps, _mm_and_ps, _mm_andnot_ps, _mm_cmpgt_ps, _mm_max_ps, _mm_min_ps, _mm_mul_ps, _mm_or_ps,
        _mm_set1_ps, _mm_sub_ps,
    };

    macro_rules! sse {
        ($( $name:ident = $intrinsic:ident; )*) => { $(
            #[inline(always)]
            fn $name(a: __m128, b: __m128) -> __m128 {
                // SAFETY: SSE2 is part of every x86-64 target, and the instruction touches registers only.
                unsafe { $intrinsic(a, b) }
            }
        )* };
    }

    sse! {
        add = _mm_add_ps;
        sub = _mm_sub_ps;
        mul = _mm_mul_ps;
        max = _mm_max_ps;
        min = _mm_min_ps;
        above = _mm_cmpgt_ps;
        and = _mm_and_ps;
        and_not = _mm_andnot_ps;
        or = _mm_or_ps;
    }

    #[inline(always)]
    fn four(v: f32) -> __m128 {
        // SAFETY: SSE2 is part of every x86-64 target.
        unsafe { _mm_set1_ps(v) }
    }

    /// Eight numbers.
    #[derive(Clone, Copy)]
    #[repr(C)]
    pub(in super::super) struct Lanes(__m128, __m128);

    impl Lanes {
        #[inline(always)]
        pub fn new(v: [f32; LANES]) -> Lanes {
            // SAFETY: both types are eight f32 without padding, in this order.
            unsafe { std::mem::transmute(v) }
        }

        #[inline(always)]
        pub fn splat(v: f32) -> Lanes {
            Lanes(four(v), four(v))
        }

        #[inline(always)]
        pub fn get(self) -> [f32; LANES] {
            // SAFETY: both types are eight f32 without padding, in this order.
            unsafe { std::mem::transmute(self) }
        }

        /// At least `low` and at most `high` (`low` for NaN).
        #[inline(always)]
        pub fn clamp(self, low: f32, high: f32) -> Lanes {
            let (low, high) = (four(low), four(high));
            Lanes(min(max(self.0, low), high), min(max(self.1, low), high))
        }

        /// `step` where a lane is above `threshold`, else 0.
        #[inline(always)]
        pub fn step_above(self, threshold: f32, step: f32) -> Lanes {
            let (threshold, step) = (four(threshold), four(step));
            Lanes(and(above(self.0, threshold), step), and(above(self.1, threshold), step))
        }

        #[inline(always)]
        pub fn abs(self) -> Lanes {
            let sign = four(-0.0);
            Lanes(and_not(sign, self.0), and_not(sign, self.1))
        }

        /// These numbers, none negative, with the signs of others.
        #[inline(always)]
        pub fn with_sign_of(self, other: Lanes) -> Lanes {
            let sign = four(-0.0);
            Lanes(or(self.0, and(sign, other.0)), or(self.1, and(sign, other.1)))
        }
    }

    impl Add for Lanes {
        type Output = Lanes;
        #[inline(always)]
        fn add(self, other: Lanes) -> Lanes {
            Lanes(add(self.0, other.0), add(self.1, other.1))
        }
    }

    impl Sub for Lanes {
        type Output = Lanes;
        #[inline(always)]
        fn sub(self, other: Lanes) -> Lanes {
            Lanes(sub(self.0, other.0), sub(self.1, other.1))
        }
    }

    impl Mul for Lanes {
        type Output = Lanes;
        #[inline(always)]
        fn mul(self, other: Lanes) -> Lanes {
            Lanes(mul(self.0, other.0), mul(self.1, other.1))
        }
    }
}

#[cfg(any(test, not(target_arch = "x86_64")))]
mod portable {
    use super::{Add, LANES, Mul, Sub};

    /// Eight numbers.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Lanes([f32; LANES]);

    impl Lanes {
        #[inline(always)]
        pub fn new(v: [f32; LANES]) -> Lanes {
            Lanes(v)
        }

        #[inline(always)]
        pub fn splat(v: f32) -> Lanes {
            Lanes([v; LANES])
        }

        #[inline(always)]
        pub fn get(self) -> [f32; LANES] {
            self.0
        }

        #[inline(always)]
        fn each(self, other: Lanes, op: impl Fn(f32, f32) -> f32) -> Lanes {
            Lanes(std::array::from_fn(|i| op(self.0[i], other.0[i])))
        }

        /// At least `low` and at most `high` (`low` for NaN).
        #[inline(always)]
        pub fn clamp(self, low: f32, high: f32) -> Lanes {
            Lanes(self.0.map(|v| v.max(low).min(high)))
        }

        /// `step` where a lane is above `threshold`, else 0.
        #[inline(always)]
        pub fn step_above(self, threshold: f32, step: f32) -> Lanes {
            Lanes(self.0.map(|v| if v > threshold { step } else { 0.0 }))
        }

        #[inline(always)]
        pub fn abs(self) -> Lanes {
            Lanes(self.0.map(f32::abs))
        }

        /// These numbers, none negative, with the signs of others.
        #[inline(always)]
        pub fn with_sign_of(self, other: Lanes) -> Lanes {
            self.each(other, f32::copysign)
        }
    }

    impl Add for Lanes {
        type Output = Lanes;
        #[inline(always)]
        fn add(self, other: Lanes) -> Lanes {
            self.each(other, |a, b| a + b)
        }
    }

    impl Sub for Lanes {
        type Output = Lanes;
        #[inline(always)]
        fn sub(self, other: Lanes) -> Lanes {
            self.each(other, |a, b| a - b)
        }
    }

    impl Mul for Lanes {
        type Output = Lanes;
        #[inline(always)]
        fn mul(self, other: Lanes) -> Lanes {
            self.each(other, |a, b| a * b)
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::{portable, sse2};

    const CASES: [[f32; 8]; 4] = [
        [0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 0.49999997],
        [1e-45, -1e-45, 1e38, -1e38, 3.4e38, 7.0, -8.0, 7.5],
        [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1.0, -1.0, 127.0, -127.4, 113.6],
        [0.1, 0.2, 0.3, 0.7, -0.7, 12.0, 1e-3, 1e3],
    ];

    #[test]
    fn both_implementations_give_the_same_bits() {
        for x in CASES {
            for y in CASES {
                let (s, t) = (sse2::Lanes::new(x), sse2::Lanes::new(y));
                let (p, q) = (portable::Lanes::new(x), portable::Lanes::new(y));
                let pairs = [
                    (sse2::Lanes::splat(y[0]).get(), portable::Lanes::splat(y[0]).get()),
                    ((s + t).get(), (p + q).get()),
                    ((s - t).get(), (p - q).get()),
                    ((s * t).get(), (p * q).get()),
                    (s.clamp(-8.0, 7.0).get(), p.clamp(-8.0, 7.0).get()),
                    (s.step_above(0.5, 3.0).get(), p.step_above(0.5, 3.0).get()),
                    (s.abs().get(), p.abs().get()),
                    (s.abs().with_sign_of(t).get(), p.abs().with_sign_of(q).get()),
                ];
                for (i, (sse, plain)) in pairs.into_iter().enumerate() {
                    for (a, b) in sse.into_iter().zip(plain) {
                        assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "operation {i}: {a} and {b}");
                    }
                }
            }
        }
    }
}
