//! Advanced SIMD with FEAT_DotProd and FEAT_I8MM: as `neon`, but GEMM tiles by `smmla`.
//!
//! `smmla` multiplies 2 rows of eight codes with 2 tokens' eight: 32 products, twice those of `sdot`. The tile stays 8 rows
//! by 4 tokens: a step of eight codes takes 4 registers of weights and 2 of activations, 8 integer and 8 float accumulators
//! beside them: 22 of 32. A group of 32 is 32 `smmla`, 8 zips that put each token's rows side by side, 8 conversions, 8
//! multiplies and 8 multiply-adds: 64 vector instructions where `neon` has 88, so 1.4 times its rate if both have the
//! same throughput, as on Neoverse V1 and N2. Loads are 6 in 8 `smmla`.
//!
//! Mat-vec keeps `sdot`: two rows by two tokens would be 4 `smmla`, 8 zips and a scale put together from four places instead
//! of 8 `sdot` and 8 multiply-adds, and would add in another order than one token alone does, which must not be.

use std::arch::aarch64::*;

use super::arm::{self, neon_methods};
use super::{Isa, Quantized};

/// Advanced SIMD, FEAT_DotProd, FEAT_I8MM.
#[derive(Clone, Copy)]
pub(crate) struct I8mm;

impl Isa for I8mm {
    neon_methods!();

    /// For an even token its and the next one's products with rows 0 to 4, for that with rows 4 to 8: `[token][row]` of
    /// two by two in each register. [`Isa::wi_rows`] makes them rows.
    type WI = [int32x4_t; 2];

    const NR: usize = 8;
    const MR: usize = 4;
    const FT: usize = 2;
    const STEP: usize = 8;

    #[inline(always)]
    unsafe fn wi_steps<const M: usize>(
        mut sums: [[int32x4_t; 2]; M],
        w: *const i8,
        a: *const i8,
    ) -> [[int32x4_t; 2]; M] {
        unsafe {
            let w = [vld1q_s8(w), vld1q_s8(w.add(16)), vld1q_s8(w.add(32)), vld1q_s8(w.add(48))];
            for two in (0..M).step_by(2) {
                let a = vld1q_s8(a.add(8 * two));
                for i in 0..4 {
                    let sum = &mut sums[two + i / 2][i % 2];
                    *sum = arm::smmla(*sum, a, w[i]);
                }
            }
            sums
        }
    }

    #[inline(always)]
    unsafe fn wi_rows<const M: usize>(sums: [[int32x4_t; 2]; M]) -> [[int32x4_t; 2]; M] {
        unsafe {
            let mut out = sums;
            for two in (0..M).step_by(2) {
                for half in 0..2 {
                    let pair = |i: usize| vreinterpretq_s64_s32(sums[two + half][i]);
                    out[two][half] = vreinterpretq_s32_s64(vzip1q_s64(pair(0), pair(1)));
                    out[two + 1][half] = vreinterpretq_s32_s64(vzip2q_s64(pair(0), pair(1)));
                }
            }
            out
        }
    }

    #[inline(always)]
    unsafe fn pack_weights(codes: *const u8, signed: bool, offset: u8, out: *mut i8) {
        unsafe {
            let offset = vdupq_n_s8(if signed { 0 } else { offset as i8 });
            for two in 0..4 {
                for half in 0..2 {
                    let row = |r: usize| vsubq_s8(vld1q_s8(codes.add(32 * (2 * two + r) + 16 * half).cast()), offset);
                    let steps = arm::zip_halves(row(0), row(1));
                    for step in 0..2 {
                        vst1q_s8(out.add(64 * (2 * half + step) + 16 * two), steps[step]);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn pack_acts(codes: [*const i8; 4], out: *mut i8, stride: usize) {
        unsafe {
            for two in 0..2 {
                for half in 0..2 {
                    let token = |t: usize| vld1q_s8(codes[2 * two + t].add(16 * half));
                    let steps = arm::zip_halves(token(0), token(1));
                    for step in 0..2 {
                        vst1q_s8(out.add((2 * half + step) * stride + 16 * two), steps[step]);
                    }
                }
            }
        }
    }
}
