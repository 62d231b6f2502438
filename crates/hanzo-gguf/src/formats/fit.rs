//! The search for the scale (and minimum) of one group of weights: least squares over the codes.
//!
//! A group is a handful of weights that share a scale. For fixed codes `q` the best scale is a linear least-squares
//! problem with a closed solution; for a fixed scale the best code of a weight is the nearest one. What is left is a
//! search over scales: the error as a function of the scale has many shallow minima, so each fit starts from a fixed
//! ladder of scales, ranks them by the error *after* the closed solution, and alternates nearest codes and closed
//! solution from the best (Lloyd's iteration, S. P. Lloyd, "Least squares quantization in PCM", 1982).
//!
//! Everything is in units of the block (see [`Block`]), so neither huge nor tiny weights overflow. Sums run in eight fixed
//! lanes: results are the same on every machine. What a block stores besides its codes is decided in `superblock.rs`
//! and the formats; bit layouts do not enter here.

use super::lanes::{LANES, Lanes};
use half::f16;

/// A block's weights and their importance, scaled to a convenient range.
///
/// Weights are divided by `2^exponent` so that the largest magnitude is in `[1, 2)`; importance is divided by its
/// largest and kept above [`LEAST_IMPORTANCE`].
pub(super) struct Block<const LEN: usize> {
    /// Weights in units of `2^exponent`.
    pub x: [f32; LEN],
    /// Importance of each weight's squared error, in `(0, 1]`.
    pub w: [f32; LEN],
    exponent: i32,
}

/// An importance of zero would let a weight's code be anything; this small one keeps it near its value.
const LEAST_IMPORTANCE: f32 = 1e-4;

impl<const LEN: usize> Block<LEN> {
    #[inline(always)]
    pub fn new(x: &[f32; LEN], importance: Option<&[f32; LEN]>) -> Self {
        let largest = x.iter().fold(0f32, |m, v| m.max(v.abs()));
        // The exponent of an f64 is exact for subnormal f32 too.
        let exponent = if largest == 0.0 { 0 } else { (f64::from(largest).to_bits() >> 52) as i32 - 1023 };
        let factor = power_of_two(-exponent);
        let w = match importance {
            None => [1.0; LEN],
            Some(w) => {
                let most = w.iter().fold(0f32, |m, &v| m.max(v));
                w.map(|v| if most > 0.0 { (v / most).max(LEAST_IMPORTANCE) } else { 1.0 })
            }
        };
        Block { x: x.map(|v| (f64::from(v) * factor) as f32), w, exponent }
    }

    /// A scale in the block's units as the half float to store, clamped to the finite ones.
    pub fn half(&self, scale: f32) -> f16 {
        let largest = f64::from(f16::MAX.to_f32());
        f16::from_f32((f64::from(scale) * power_of_two(self.exponent)).clamp(-largest, largest) as f32)
    }

    /// A stored half float in the block's units (exact).
    pub fn units(&self, stored: f16) -> f32 {
        (stored.to_f64() * power_of_two(-self.exponent)) as f32
    }

    /// `2^e`, a scale itself, in the block's units.
    pub fn units_of_power(&self, e: i32) -> f32 {
        power_of_two(e - self.exponent) as f32
    }

    /// The exponent of the largest magnitude.
    pub fn exponent(&self) -> i32 {
        self.exponent
    }
}

fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}

/// `1 / v`, and 0 for 0 or what has no finite inverse.
#[inline]
fn inverse(v: f32) -> f32 {
    let r = 1.0 / v;
    if r.is_finite() { r } else { 0.0 }
}

/// The values that codes stand for, before the scale.
pub(super) trait Levels {
    /// Smallest value (negative).
    const LOW: f32;
    /// Largest value (positive).
    const HIGH: f32;
    /// Distance of the outer values: the measure of how far a scale is worth varying.
    const STEP: f32;

    /// The levels nearest to `v`.
    fn nearest(v: Lanes) -> Lanes;

    /// The code of a level.
    fn code(level: f32) -> u8;
}

/// All integers of `LOW..=HIGH`, coded from 0 up.
pub(super) struct Integers<const LOW: i32, const HIGH: i32>;

impl<const LOW: i32, const HIGH: i32> Levels for Integers<LOW, HIGH> {
    const LOW: f32 = LOW as f32;
    const HIGH: f32 = HIGH as f32;
    const STEP: f32 = 1.0;

    #[inline(always)]
    fn nearest(v: Lanes) -> Lanes {
        v.round().clamp(Self::LOW, Self::HIGH)
    }

    #[inline(always)]
    fn code(level: f32) -> u8 {
        (level - Self::LOW) as u8
    }
}

/// How many scales a fit tries in each orientation, and how far the outermost weight may lie outside the levels.
const LADDER: i32 = 17;
const REACH: f32 = 1.4;
/// Alternations of nearest codes and closed solution after the ladder.
const ALTERNATIONS: usize = 3;

/// `(sum w q^2, sum w x q)` for the nearest levels `q` of `x * inverse`.
#[inline(always)]
fn scale_sums<L: Levels, const N: usize>(x: &[f32; N], w: &[f32; N], inverse: f32) -> (f32, f32) {
    let (mut qq, mut xq) = (Lanes::splat(0.0), Lanes::splat(0.0));
    let inverse = Lanes::splat(inverse);
    for (x, w) in Lanes::of(x).zip(Lanes::of(w)) {
        let q = L::nearest(x * inverse);
        let wq = w * q;
        qq = qq + wq * q;
        xq = xq + wq * x;
    }
    (qq.sum(), xq.sum())
}

/// The weighted squared error of a group coded with a scale: `sum w (x - scale * q)^2`, `q` nearest.
#[inline(always)]
pub(super) fn scale_error<L: Levels, const N: usize>(x: &[f32; N], w: &[f32; N], scale: f32) -> f32 {
    let (scale, inverse) = (Lanes::splat(scale), Lanes::splat(inverse(scale)));
    let mut sum = Lanes::splat(0.0);
    for (x, w) in Lanes::of(x).zip(Lanes::of(w)) {
        let e = x - scale * L::nearest(x * inverse);
        sum = sum + w * e * e;
    }
    sum.sum()
}

/// `(sum w q^2, sum w x q)` of a group coded with `scale`: what a refit of a common factor adds up.
#[inline(always)]
pub(super) fn moments<L: Levels, const N: usize>(x: &[f32; N], w: &[f32; N], scale: f32) -> (f32, f32) {
    scale_sums::<L, N>(x, w, inverse(scale))
}

/// Codes of a group for a scale.
#[inline(always)]
pub(super) fn codes<L: Levels, const N: usize>(x: &[f32; N], scale: f32) -> [u8; N] {
    let inverse = Lanes::splat(inverse(scale));
    let mut codes = [0; N];
    for (codes, x) in codes.as_chunks_mut::<LANES>().0.iter_mut().zip(Lanes::of(x)) {
        *codes = L::nearest(x * inverse).get().map(L::code);
    }
    codes
}

/// The scale `s` (of either sign) that makes `sum w (x - s * level)^2` small, 0 for a group of zeros.
///
/// The ladder lets the largest weight fall on the lowest or the highest level, and up to [`REACH`] steps short of or
/// beyond it.
pub(super) fn fit_scale<L: Levels, const N: usize>(x: &[f32; N], w: &[f32; N]) -> f32 {
    let extreme = x.iter().fold(0f32, |m, &v| if v.abs() > m.abs() { v } else { m });
    if extreme == 0.0 {
        return 0.0;
    }
    // The error after the closed solution is `sum w x^2 - xq^2 / qq`.
    let gain = |(qq, xq): (f32, f32)| if qq > 0.0 { xq * xq / qq } else { 0.0 };
    let (mut best_gain, mut best) = (0f32, 0f32);
    for end in [L::LOW, L::HIGH] {
        for rung in 0..LADDER {
            let reach = REACH * (2.0 * rung as f32 / (LADDER - 1) as f32 - 1.0) * L::STEP;
            let inverse = inverse(extreme) * (end + reach * end.signum());
            let sums = scale_sums::<L, N>(x, w, inverse);
            if gain(sums) > best_gain {
                (best_gain, best) = (gain(sums), sums.1 / sums.0);
            }
        }
    }
    for _ in 0..ALTERNATIONS {
        let sums = scale_sums::<L, N>(x, w, inverse(best));
        if gain(sums) <= best_gain {
            break;
        }
        (best_gain, best) = (gain(sums), sums.1 / sums.0);
    }
    best
}

/// Sums over a group with codes `q` in `0..=MAX` for `value = s * q - m`.
#[derive(Clone, Copy)]
pub(super) struct AffineSums {
    /// sum w q
    pub q: f32,
    /// sum w q^2
    pub qq: f32,
    /// sum w x q
    pub xq: f32,
}

/// Sums over a group that do not depend on its codes.
#[derive(Clone, Copy)]
pub(super) struct GroupSums {
    /// sum w
    pub one: f32,
    /// sum w x
    pub x: f32,
    /// sum w x^2
    pub xx: f32,
}

impl GroupSums {
    #[inline(always)]
    pub fn new<const N: usize>(x: &[f32; N], w: &[f32; N]) -> Self {
        let mut sums = [Lanes::splat(0.0); 3];
        for (x, w) in Lanes::of(x).zip(Lanes::of(w)) {
            sums[0] = sums[0] + w;
            sums[1] = sums[1] + w * x;
            sums[2] = sums[2] + w * x * x;
        }
        GroupSums { one: sums[0].sum(), x: sums[1].sum(), xx: sums[2].sum() }
    }
}

/// A scale and a minimum: `value = scale * code - min`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Affine {
    pub scale: f32,
    pub min: f32,
}

impl Affine {
    #[inline(always)]
    pub fn sums<const MAX: u8, const N: usize>(self, x: &[f32; N], w: &[f32; N]) -> AffineSums {
        let inverse = inverse(self.scale);
        affine_sums::<MAX, N>(x, w, inverse, self.min * inverse)
    }

    /// The weighted squared error of a group coded with this scale and minimum, codes nearest.
    #[inline(always)]
    pub fn error<const MAX: u8, const N: usize>(self, x: &[f32; N], w: &[f32; N]) -> f32 {
        let (scale, min) = (Lanes::splat(self.scale), Lanes::splat(self.min));
        let mut sum = Lanes::splat(0.0);
        for (x, w) in Lanes::of(x).zip(Lanes::of(w)) {
            let e = x - (scale * self.levels::<MAX>(x) - min);
            sum = sum + w * e * e;
        }
        sum.sum()
    }

    #[inline(always)]
    fn levels<const MAX: u8>(self, x: Lanes) -> Lanes {
        let inverse = inverse(self.scale);
        affine_levels::<MAX>(x, inverse, self.min * inverse)
    }

    /// The codes of a group.
    #[inline(always)]
    pub fn codes<const MAX: u8, const N: usize>(self, x: &[f32; N]) -> [u8; N] {
        let mut codes = [0; N];
        for (codes, x) in codes.as_chunks_mut::<LANES>().0.iter_mut().zip(Lanes::of(x)) {
            *codes = self.levels::<MAX>(x).get().map(|q| q as u8);
        }
        codes
    }
}

#[inline(always)]
fn affine_levels<const MAX: u8>(x: Lanes, inverse: f32, offset: f32) -> Lanes {
    (x * Lanes::splat(inverse) + Lanes::splat(offset)).round().clamp(0.0, f32::from(MAX))
}

#[inline(always)]
fn affine_sums<const MAX: u8, const N: usize>(x: &[f32; N], w: &[f32; N], inverse: f32, offset: f32) -> AffineSums {
    let (mut sum_q, mut sum_qq, mut sum_xq) = (Lanes::splat(0.0), Lanes::splat(0.0), Lanes::splat(0.0));
    for (x, w) in Lanes::of(x).zip(Lanes::of(w)) {
        let q = affine_levels::<MAX>(x, inverse, offset);
        let wq = w * q;
        sum_q = sum_q + wq;
        sum_qq = sum_qq + wq * q;
        sum_xq = sum_xq + wq * x;
    }
    AffineSums { q: sum_q.sum(), qq: sum_qq.sum(), xq: sum_xq.sum() }
}

/// Where the smallest and the largest weight of a group may fall: how far beyond the first and the last code (negative:
/// short of it). Every pair of the first five is tried; the last three pairs let weights that already are multiples
/// of a scale, but do not use all codes, come back exactly.
const OVERHANGS: [(f32, f32); 28] = {
    const TRIED: [f32; 5] = [-0.4, 0.0, 0.3, 0.6, 0.9];
    let mut pairs = [(0.0, -1.0); 28];
    let mut i = 0;
    while i < 25 {
        pairs[i] = (TRIED[i / 5], TRIED[i % 5]);
        i += 1;
    }
    pairs[26] = (-1.0, 0.0);
    pairs[27] = (-1.0, -1.0);
    pairs
};

/// The scale (at least 0) and minimum that make `sum w (x - (s * q - m))^2` small over codes `0..=MAX`.
///
/// With `POSITIVE_MIN` the minimum is at least 0, as formats with unsigned minima need.
pub(super) fn fit_affine<const MAX: u8, const N: usize, const POSITIVE_MIN: bool>(
    x: &[f32; N],
    w: &[f32; N],
    group: &GroupSums,
) -> Affine {
    let (mut low, mut high) = x.iter().fold((f32::MAX, f32::MIN), |(l, h), &v| (l.min(v), h.max(v)));
    if POSITIVE_MIN {
        (low, high) = (low.min(0.0), high.max(0.0));
    }
    if high == low {
        return Affine { scale: 0.0, min: -low };
    }
    // A group that does not use all codes fits as well one code higher, with a larger minimum: the first one found stays.
    let margin = 1e-6 * group.xx;
    let (mut best_error, mut best) = (f32::INFINITY, Affine { scale: 0.0, min: 0.0 });
    for (below, above) in OVERHANGS {
        let inverse = (f32::from(MAX) + below + above) / (high - low);
        let sums = affine_sums::<MAX, N>(x, w, inverse, -low * inverse - below);
        let (error, fit) = solve::<POSITIVE_MIN>(group, &sums);
        if error < best_error - margin {
            (best_error, best) = (error, fit);
        }
    }
    for _ in 0..ALTERNATIONS {
        let (error, fit) = solve::<POSITIVE_MIN>(group, &best.sums::<MAX, N>(x, w));
        if error >= best_error {
            break;
        }
        (best_error, best) = (error, fit);
    }
    best
}

/// The least-squares scale and minimum for fixed codes, and the squared error they leave.
#[inline(always)]
fn solve<const POSITIVE_MIN: bool>(group: &GroupSums, codes: &AffineSums) -> (f32, Affine) {
    // Normal equations of x = s q - m, and the error as a quadratic form. f64: the error is a small difference.
    let (one, x, xx) = (f64::from(group.one), f64::from(group.x), f64::from(group.xx));
    let (q, qq, xq) = (f64::from(codes.q), f64::from(codes.qq), f64::from(codes.xq));
    let determinant = one * qq - q * q;
    let (mut s, mut m) = (0.0, -x / one);
    if determinant > 1e-9 * one * qq {
        s = (one * xq - q * x) / determinant;
        m = (q * xq - qq * x) / determinant;
    }
    if s < 0.0 {
        (s, m) = (0.0, -x / one);
    }
    if POSITIVE_MIN && m < 0.0 {
        m = 0.0;
        s = if qq > 0.0 { (xq / qq).max(0.0) } else { 0.0 };
    }
    let error = xx - 2.0 * s * xq + 2.0 * m * x + s * s * qq - 2.0 * s * m * q + m * m * one;
    (error as f32, Affine { scale: s as f32, min: m as f32 })
}
