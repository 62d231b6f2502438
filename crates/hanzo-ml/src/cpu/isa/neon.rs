//! Advanced SIMD with FEAT_DotProd: dot products by `sdot`, GEMM tiles of 8 rows by 4 tokens, activations by lane.
//!
//! The tile, from the 32 registers: 8 rows by 4 tokens are 8 integer and 8 float accumulators; a step of four codes takes
//! 2 registers of weights and 1 that holds all four tokens' activations, since `sdot` multiplies by any lane of it: 19
//! registers in the loop. A step is 3 loads (2, if weights come in pairs) and 8 `sdot`; a group of 32 is 64 `sdot`, 8
//! conversions, 8 multiplies and 8 multiply-adds for 1024 products. Two vector pipes with a `sdot` each (Neoverse N1) give
//! 23 products a cycle, four (Neoverse V1) 46; loads need a third of the memory pipes. Twelve rows would fit too, with 31
//! registers, for 4 loads in 12 `sdot` instead of 3 in 8: not worth a tile that is no power of two, as loads do not bind.
//!
//! Mat-vec takes 4 rows by 1 token: 8 accumulators of 4 floats, and as many for minima. Per 32 codes of a row 2 `sdot`, 2
//! conversions and 2 multiply-adds by a lane of the scales. The contraction in f32 takes 4 rows by 2 tokens: 16
//! accumulators, 4 activations and 2 weights; 3 tokens would take all 32 registers.

use std::arch::aarch64::*;

use super::arm::{self, neon_methods};
use super::{Isa, Quantized};

/// Advanced SIMD, FEAT_DotProd.
#[derive(Clone, Copy)]
pub(crate) struct Neon;

impl Isa for Neon {
    neon_methods!();

    type WI = [int32x4_t; 2];

    const NR: usize = 8;
    const MR: usize = 4;
    const FT: usize = 2;
    const STEP: usize = 4;

    #[inline(always)]
    unsafe fn wi_steps<const M: usize>(
        mut sums: [[int32x4_t; 2]; M],
        w: *const i8,
        a: *const i8,
    ) -> [[int32x4_t; 2]; M] {
        unsafe {
            let w = [vld1q_s8(w), vld1q_s8(w.add(16))];
            for four in (0..M).step_by(4) {
                let a = vld1q_s8(a.add(4 * four));
                for half in 0..2 {
                    sums[four][half] = arm::sdot_lane::<0>(sums[four][half], w[half], a);
                    sums[four + 1][half] = arm::sdot_lane::<1>(sums[four + 1][half], w[half], a);
                    sums[four + 2][half] = arm::sdot_lane::<2>(sums[four + 2][half], w[half], a);
                    sums[four + 3][half] = arm::sdot_lane::<3>(sums[four + 3][half], w[half], a);
                }
            }
            sums
        }
    }

    #[inline(always)]
    unsafe fn pack_weights(codes: *const u8, signed: bool, offset: u8, out: *mut i8) {
        unsafe {
            let offset = vdupq_n_s8(if signed { 0 } else { offset as i8 });
            for four in 0..2 {
                for half in 0..2 {
                    let row = |r: usize| vsubq_s8(vld1q_s8(codes.add(32 * (4 * four + r) + 16 * half).cast()), offset);
                    let steps = arm::transpose4([row(0), row(1), row(2), row(3)]);
                    for step in 0..4 {
                        vst1q_s8(out.add(32 * (4 * half + step) + 16 * four), steps[step]);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn pack_acts(codes: [*const i8; 4], out: *mut i8, stride: usize) {
        unsafe {
            for half in 0..2 {
                let token = |t: usize| vld1q_s8(codes[t].add(16 * half));
                let steps = arm::transpose4([token(0), token(1), token(2), token(3)]);
                for step in 0..4 {
                    vst1q_s8(out.add((4 * half + step) * stride), steps[step]);
                }
            }
        }
    }
}
