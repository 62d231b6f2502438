//! The Advanced SIMD instance of [`Simd`] and its entry: two registers of four floats, for both levels of aarch64.
//!
//! Eight lanes rather than four keep the latency of one chain of multiply-adds apart over two registers. The register tile
//! of `attention`'s products, six rows by two vectors, is 24 accumulators, 4 vectors and a factor: 29 of 32 registers.

use super::{Kernel, Simd};
use core::arch::aarch64::*;
use core::arch::asm;

#[derive(Clone, Copy)]
pub(crate) struct Neon(());

/// Runs `kernel` with Advanced SIMD, which every aarch64 target of Rust's standard library has.
#[target_feature(enable = "neon")]
pub(super) fn enter<K: Kernel>(kernel: K) -> K::Out {
    kernel.run(Neon(()))
}

/// Two registers.
type F = [float32x4_t; 2];

/// The first `n <= 4` floats at `p`, the others zero.
///
/// # Safety
/// `p` is valid for `n` floats.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load_some(p: *const f32, n: usize) -> float32x4_t {
    unsafe {
        let two = |p: *const f32| vcombine_f32(vld1_f32(p), vdup_n_f32(0.0));
        match n {
            0 => vdupq_n_f32(0.0),
            1 => vsetq_lane_f32::<0>(*p, vdupq_n_f32(0.0)),
            2 => two(p),
            3 => vsetq_lane_f32::<2>(*p.add(2), two(p)),
            _ => vld1q_f32(p),
        }
    }
}

/// Writes the first `n <= 4` lanes.
///
/// # Safety
/// `p` is valid for `n` floats.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn store_some(p: *mut f32, n: usize, v: float32x4_t) {
    unsafe {
        match n {
            0 => {}
            1 => *p = vgetq_lane_f32::<0>(v),
            2 => vst1_f32(p, vget_low_f32(v)),
            3 => {
                vst1_f32(p, vget_low_f32(v));
                *p.add(2) = vgetq_lane_f32::<2>(v);
            }
            _ => vst1q_f32(p, v),
        }
    }
}

/// Eight signed words as floats.
#[inline]
#[target_feature(enable = "neon")]
fn from_words(x: int16x8_t) -> F {
    [vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), vcvtq_f32_s32(vmovl_high_s16(x))]
}

/// `a > b ? a : b`.
#[inline]
#[target_feature(enable = "neon")]
fn larger(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    vbslq_f32(vcgtq_f32(a, b), a, b)
}

/// `a < b ? a : b`.
#[inline]
#[target_feature(enable = "neon")]
fn smaller(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    vbslq_f32(vcltq_f32(a, b), a, b)
}

/// See [`Simd::scale_pow2`]: two factors, each a normal number; the first product is exact, so there is one rounding.
#[inline]
#[target_feature(enable = "neon")]
fn scale(p: float32x4_t, n: float32x4_t) -> float32x4_t {
    let n = vcvtq_s32_f32(n);
    let half = vshrq_n_s32::<1>(n);
    let pow2 = |n| vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127))));
    vmulq_f32(vmulq_f32(p, pow2(half)), pow2(vsubq_s32(n, half)))
}

// SAFETY of every `unsafe` block in this impl: pointers are the caller's duty, nothing else is needed.
impl Simd for Neon {
    type F = F;
    const LANES: usize = 8;
    const TILE_ROWS: usize = 6;

    #[inline(always)]
    fn splat(self, x: f32) -> F {
        unsafe { [vdupq_n_f32(x); 2] }
    }
    #[inline(always)]
    fn iota(self) -> F {
        unsafe {
            let all = [0.0f32, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
            self.load(all.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> F {
        unsafe { [vld1q_f32(p), vld1q_f32(p.add(4))] }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: F) {
        unsafe {
            vst1q_f32(p, v[0]);
            vst1q_f32(p.add(4), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn load_part(self, p: *const f32, n: usize) -> F {
        unsafe {
            match n {
                0..4 => [load_some(p, n), vdupq_n_f32(0.0)],
                _ => [vld1q_f32(p), load_some(p.add(4), n - 4)],
            }
        }
    }
    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, n: usize, v: F) {
        unsafe {
            match n {
                0..4 => store_some(p, n, v[0]),
                _ => {
                    vst1q_f32(p, v[0]);
                    store_some(p.add(4), n - 4, v[1]);
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> F {
        unsafe {
            let x = vreinterpretq_f16_u16(vld1q_u16(p));
            [vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x)]
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> F {
        unsafe {
            // The high half of each float: zeros below it.
            let (x, zero) = (vld1q_u16(p), vdupq_n_u16(0));
            [vreinterpretq_f32_u16(vzip1q_u16(zero, x)), vreinterpretq_f32_u16(vzip2q_u16(zero, x))]
        }
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> F {
        unsafe { from_words(vmovl_s8(vld1_s8(p))) }
    }
    #[inline(always)]
    unsafe fn load_nibbles(self, p: *const u8, high: bool) -> F {
        unsafe {
            let b = vld1_u8(p);
            let n = if high { vshr_n_u8::<4>(b) } else { vand_u8(b, vdup_n_u8(15)) };
            from_words(vsubl_s8(vreinterpret_s8_u8(n), vdup_n_s8(8)))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: F) {
        unsafe {
            let x = vcvt_high_f16_f32(vcvt_f16_f32(v[0]), v[1]);
            vst1q_u16(p, vreinterpretq_u16_f16(x))
        }
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        unsafe {
            // A hint: addresses that are not there are ignored.
            asm!("prfm pldl1keep, [{0}]", in(reg) p, options(nomem, nostack, preserves_flags))
        }
    }

    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        unsafe { [vaddq_f32(a[0], b[0]), vaddq_f32(a[1], b[1])] }
    }
    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        unsafe { [vsubq_f32(a[0], b[0]), vsubq_f32(a[1], b[1])] }
    }
    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        unsafe { [vmulq_f32(a[0], b[0]), vmulq_f32(a[1], b[1])] }
    }
    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        unsafe { [vdivq_f32(a[0], b[0]), vdivq_f32(a[1], b[1])] }
    }
    #[inline(always)]
    fn fma(self, a: F, b: F, c: F) -> F {
        unsafe { [vfmaq_f32(c[0], a[0], b[0]), vfmaq_f32(c[1], a[1], b[1])] }
    }
    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        unsafe { [larger(a[0], b[0]), larger(a[1], b[1])] }
    }
    #[inline(always)]
    fn min(self, a: F, b: F) -> F {
        unsafe { [smaller(a[0], b[0]), smaller(a[1], b[1])] }
    }
    #[inline(always)]
    fn abs(self, a: F) -> F {
        unsafe { [vabsq_f32(a[0]), vabsq_f32(a[1])] }
    }
    #[inline(always)]
    fn round(self, a: F) -> F {
        unsafe { [vrndnq_f32(a[0]), vrndnq_f32(a[1])] }
    }
    #[inline(always)]
    fn scale_pow2(self, p: F, n: F) -> F {
        unsafe { [scale(p[0], n[0]), scale(p[1], n[1])] }
    }
    #[inline(always)]
    fn select_lt(self, a: F, b: F, yes: F, no: F) -> F {
        unsafe { [vbslq_f32(vcltq_f32(a[0], b[0]), yes[0], no[0]), vbslq_f32(vcltq_f32(a[1], b[1]), yes[1], no[1])] }
    }
    #[inline(always)]
    fn reduce_add(self, a: F) -> f32 {
        unsafe {
            let h = vaddq_f32(a[0], a[1]);
            vpadds_f32(vadd_f32(vget_low_f32(h), vget_high_f32(h)))
        }
    }
    #[inline(always)]
    fn reduce_max(self, a: F) -> f32 {
        unsafe {
            // A number wins over a NaN.
            vmaxnmvq_f32(vmaxnmq_f32(a[0], a[1]))
        }
    }
    #[inline(always)]
    fn interleave(self, a: F, b: F) -> (F, F) {
        unsafe { ([vzip1q_f32(a[0], b[0]), vzip2q_f32(a[0], b[0])], [vzip1q_f32(a[1], b[1]), vzip2q_f32(a[1], b[1])]) }
    }
    #[inline(always)]
    fn deinterleave(self, a: F, b: F) -> (F, F) {
        unsafe { ([vuzp1q_f32(a[0], a[1]), vuzp1q_f32(b[0], b[1])], [vuzp2q_f32(a[0], a[1]), vuzp2q_f32(b[0], b[1])]) }
    }
}
