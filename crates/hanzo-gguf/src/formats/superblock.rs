//! Superblocks: groups whose scales (and minima) are small integers times one half float.
//!
//! A group's best scale alone is not the answer, because what is stored is `d * integer`. The search goes to and fro: given `d`,
//! each group takes the integer, of the few near its own best scale, that leaves the least error *with the codes it leads to*;
//! given all integers and codes, `d` (and `dmin`) has a closed least-squares solution. Only improvements are kept, so
//! the rounds end; there are [`ROUNDS`] at most.

use super::fit::{Affine, Block, GroupSums, Levels, fit_affine, fit_scale, moments, scale_error};
use half::f16;

const ROUNDS: usize = 3;

/// A superblock's scales: group `g` has the scale `d * scales[g]`.
pub(super) struct Scales<const GROUPS: usize> {
    pub d: f16,
    pub scales: [i8; GROUPS],
}

/// Scales of a superblock of `GROUPS` groups of `N`, integers in `LOW..=HIGH`.
pub(super) fn fit_scales<L: Levels, const LEN: usize, const N: usize, const GROUPS: usize>(
    block: &Block<LEN>,
    low: i8,
    high: i8,
) -> Scales<GROUPS> {
    let x = block.x.as_chunks::<N>().0;
    let w = block.w.as_chunks::<N>().0;
    let mut wanted = [0f32; GROUPS];
    for g in 0..GROUPS {
        wanted[g] = fit_scale::<L, N>(&x[g], &w[g]);
    }
    let largest = wanted.iter().fold(0f32, |m, &v| if v.abs() > m.abs() { v } else { m });
    let mut best = Scales { d: f16::ZERO, scales: [0; GROUPS] };
    if largest == 0.0 {
        return best;
    }
    let mut best_error = f32::INFINITY;
    let mut next = largest / f32::from(low);
    for _ in 0..ROUNDS {
        let stored = block.half(next);
        let d = block.units(stored);
        let (mut error, mut qq, mut xq) = (0f32, 0f32, 0f32);
        let mut scales = [0i8; GROUPS];
        for g in 0..GROUPS {
            let (group_error, scale) = best_scale::<L, N>(&x[g], &w[g], d, wanted[g], low, high);
            let sums = moments::<L, N>(&x[g], &w[g], d * f32::from(scale));
            scales[g] = scale;
            error += group_error;
            qq += f32::from(scale) * f32::from(scale) * sums.0;
            xq += f32::from(scale) * sums.1;
        }
        if error >= best_error {
            break;
        }
        best_error = error;
        best = Scales { d: stored, scales };
        if qq <= 0.0 {
            break;
        }
        next = xq / qq;
    }
    best
}

/// The least error of a group over the integers next to `wanted / d`, and the integer.
#[inline(always)]
fn best_scale<L: Levels, const N: usize>(
    x: &[f32; N],
    w: &[f32; N],
    d: f32,
    wanted: f32,
    low: i8,
    high: i8,
) -> (f32, i8) {
    let middle = if d == 0.0 { 0.0 } else { (wanted / d).round_ties_even() };
    let mut best = (f32::INFINITY, 0);
    for candidate in [middle, middle - 1.0, middle + 1.0] {
        let scale = candidate.clamp(f32::from(low), f32::from(high));
        let error = scale_error::<L, N>(x, w, d * scale);
        if error < best.0 {
            best = (error, scale as i8);
        }
    }
    best
}

/// A superblock's scales and minima: group `g` has the values `d * scales[g] * code - dmin * mins[g]`.
pub(super) struct ScalesMins<const GROUPS: usize> {
    pub d: f16,
    pub dmin: f16,
    pub scales: [u8; GROUPS],
    pub mins: [u8; GROUPS],
}

impl<const GROUPS: usize> ScalesMins<GROUPS> {
    /// Group `g`'s scale and minimum, in the block's units.
    pub fn group<const LEN: usize>(&self, block: &Block<LEN>, g: usize) -> Affine {
        Affine {
            scale: block.units(self.d) * f32::from(self.scales[g]),
            min: block.units(self.dmin) * f32::from(self.mins[g]),
        }
    }
}

/// Scales and minima of a superblock of `GROUPS` groups of `N` with codes `0..=MAX`, integers in `0..=STEPS`.
pub(super) fn fit_scales_mins<const MAX: u8, const STEPS: u8, const LEN: usize, const N: usize, const GROUPS: usize>(
    block: &Block<LEN>,
) -> ScalesMins<GROUPS> {
    let x = block.x.as_chunks::<N>().0;
    let w = block.w.as_chunks::<N>().0;
    let sums: [GroupSums; GROUPS] = std::array::from_fn(|g| GroupSums::new(&x[g], &w[g]));
    let mut wanted: [Affine; GROUPS] = std::array::from_fn(|g| fit_affine::<MAX, N, true>(&x[g], &w[g], &sums[g]));
    let steps = f32::from(STEPS);
    let largest = wanted.iter().fold((0f32, 0f32), |m, a| (m.0.max(a.scale), m.1.max(a.min)));
    let mut next = (largest.0 / steps, largest.1 / steps);
    let mut best = ScalesMins { d: f16::ZERO, dmin: f16::ZERO, scales: [0; GROUPS], mins: [0; GROUPS] };
    let mut best_error = f32::INFINITY;
    for _ in 0..ROUNDS {
        let stored = (block.half(next.0), block.half(next.1));
        let (d, dmin) = (block.units(stored.0), block.units(stored.1));
        let mut trial = ScalesMins { d: stored.0, dmin: stored.1, scales: [0; GROUPS], mins: [0; GROUPS] };
        let mut error = 0f32;
        let mut normal = Normal::default();
        for g in 0..GROUPS {
            let (group_error, scale, min) = best_scale_min::<MAX, STEPS, N>(&x[g], &w[g], &sums[g], d, dmin, wanted[g]);
            trial.scales[g] = scale;
            trial.mins[g] = min;
            error += group_error;
            let chosen = Affine { scale: d * f32::from(scale), min: dmin * f32::from(min) };
            normal.add(&sums[g], &chosen.sums::<MAX, N>(&x[g], &w[g]), scale, min);
            wanted[g] = chosen;
        }
        if error >= best_error {
            break;
        }
        best_error = error;
        best = trial;
        let Some(solved) = normal.solve() else { break };
        next = solved;
    }
    best
}

/// The least error of a group over a few integer scales and minima next to the wanted ones, and the two integers.
#[inline(always)]
fn best_scale_min<const MAX: u8, const STEPS: u8, const N: usize>(
    x: &[f32; N],
    w: &[f32; N],
    sums: &GroupSums,
    d: f32,
    dmin: f32,
    wanted: Affine,
) -> (f32, u8, u8) {
    let steps = f32::from(STEPS);
    let nearest = |value: f32, unit: f32| {
        if unit == 0.0 { 0.0 } else { (value / unit).round_ties_even().clamp(0.0, steps) }
    };
    let middle = nearest(wanted.scale, d);
    let mut best = (f32::INFINITY, 0, 0);
    for candidate in [middle, middle - 1.0, middle + 1.0] {
        let step = candidate.clamp(0.0, steps);
        let scale = d * step;
        // With the scale fixed, the best minimum of the codes is the mean of what they leave.
        let min = nearest(wanted.min, dmin);
        let codes = Affine { scale, min: dmin * min }.sums::<MAX, N>(x, w);
        let refit = nearest((scale * codes.q - sums.x) / sums.one, dmin);
        for min in [min, refit] {
            let error = Affine { scale, min: dmin * min }.error::<MAX, N>(x, w);
            if error < best.0 {
                best = (error, step as u8, min as u8);
            }
        }
    }
    best
}

/// Normal equations of `x = d * (scale * q) - dmin * min` over all groups.
#[derive(Default)]
struct Normal {
    aa: f64,
    ab: f64,
    bb: f64,
    xa: f64,
    xb: f64,
}

impl Normal {
    fn add(&mut self, group: &GroupSums, codes: &super::fit::AffineSums, scale: u8, min: u8) {
        let (a, b) = (f64::from(scale), f64::from(min));
        self.aa += a * a * f64::from(codes.qq);
        self.ab += a * b * f64::from(codes.q);
        self.bb += b * b * f64::from(group.one);
        self.xa += a * f64::from(codes.xq);
        self.xb += b * f64::from(group.x);
    }

    /// `d` and `dmin`, or `None` where the equations do not fix both to a positive value.
    fn solve(&self) -> Option<(f32, f32)> {
        let determinant = self.aa * self.bb - self.ab * self.ab;
        if self.bb == 0.0 && self.aa > 0.0 {
            return Some(((self.xa / self.aa) as f32, 0.0));
        }
        if determinant <= 1e-9 * self.aa * self.bb {
            return None;
        }
        let d = (self.bb * self.xa - self.ab * self.xb) / determinant;
        let dmin = (self.ab * self.xa - self.aa * self.xb) / determinant;
        (d > 0.0 && dmin >= 0.0).then_some((d as f32, dmin as f32))
    }
}
