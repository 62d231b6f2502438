//! The methods that the two levels of aarch64 share: Advanced SIMD forms, pasted into both implementations by
//! [`neon_methods`], and the few instructions that stable Rust has no intrinsics for.
//!
//! A vector of 32 bytes, eight floats or eight integers is two registers of 16 bytes. Codes fit signed bytes in every
//! form (unsigned ones are at most 127, an offset taken off leaves -127..=127), so `sdot` serves all of them, and a
//! tile's packed weights never keep their offset.

use std::arch::aarch64::*;
use std::arch::asm;

/// Byte `i / 8` of the first eight, eight times each; of the first two here.
pub(super) const EIGHTS_LOW: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1];
/// Of the next two.
pub(super) const EIGHTS_HIGH: [u8; 16] = [2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3];
/// Each byte four times: of the first four bytes.
pub(super) const FOURS_LOW: [u8; 16] = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3];
/// Of the next four.
pub(super) const FOURS_HIGH: [u8; 16] = [4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7];
/// Right shifts that bring the two-bit fields of a byte down.
pub(super) const CRUMB_SHIFTS: [i8; 16] = [0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6];

/// `acc` plus the sums of four products of signed bytes a lane.
#[inline]
#[target_feature(enable = "neon,dotprod")]
pub(super) fn sdot(acc: int32x4_t, x: uint8x16_t, y: uint8x16_t) -> int32x4_t {
    let mut out = acc;
    // SAFETY: the function's feature has the instruction, which touches these registers alone.
    unsafe {
        asm!(
            "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inlateout(vreg) out, in(vreg) x, in(vreg) y,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    out
}

/// `acc` plus the sums of four products of signed bytes a lane, the second factors the four of lane `LANE`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
pub(super) fn sdot_lane<const LANE: usize>(acc: int32x4_t, x: int8x16_t, y: int8x16_t) -> int32x4_t {
    let mut out = acc;
    // SAFETY: as for `sdot`.
    unsafe {
        asm!(
            "sdot {0:v}.4s, {1:v}.16b, {2:v}.4b[{3}]",
            inlateout(vreg) out, in(vreg) x, in(vreg) y, const LANE,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    out
}

/// `acc` plus the product of two matrices of signed bytes, `x` of 2 by 8 and `y` of 2 by 8 transposed: row by row.
#[inline]
#[target_feature(enable = "neon,i8mm")]
pub(super) fn smmla(acc: int32x4_t, x: int8x16_t, y: int8x16_t) -> int32x4_t {
    let mut out = acc;
    // SAFETY: as for `sdot`.
    unsafe {
        asm!(
            "smmla {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inlateout(vreg) out, in(vreg) x, in(vreg) y,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    out
}

/// Fetches the cache line of `p` soon.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn prefetch(p: *const u8) {
    // SAFETY: a hint; addresses that are not there are ignored.
    unsafe { asm!("prfm pldl1keep, [{0}]", in(reg) p, options(nomem, nostack, preserves_flags)) }
}

/// Sixteen bytes of a constant.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn bytes(x: [u8; 16]) -> uint8x16_t {
    // SAFETY: sixteen bytes are read.
    unsafe { vld1q_u8(x.as_ptr()) }
}

/// 0xff in the bytes whose bit is set.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn mask(bits: u32) -> [uint8x16_t; 2] {
    let x = vreinterpretq_u8_u32(vdupq_n_u32(bits));
    let bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
    [vtstq_u8(vqtbl1q_u8(x, bytes(EIGHTS_LOW)), bit), vtstq_u8(vqtbl1q_u8(x, bytes(EIGHTS_HIGH)), bit)]
}

/// `if` a bit of `mask` is set, that of `yes`, else of `no`.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn choose(mask: u32, yes: uint32x4_t, no: uint32x4_t) -> uint32x4_t {
    vbslq_u32(vdupq_n_u32(mask), yes, no)
}

/// The four low fields of `BITS` bits of each word, as bytes: each step halves how far fields have to move.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn four_fields<const FAR: i32, const NEAR: i32>(x: uint32x4_t, field: u8) -> uint8x16_t {
    let pairs = choose(0xffff, x, vshlq_n_u32::<FAR>(x));
    let single = choose(0x00ff_00ff, pairs, vshlq_n_u32::<NEAR>(pairs));
    vandq_u8(vreinterpretq_u8_u32(single), vdupq_n_u8(field))
}

/// Transposes four rows of four 32-bit words.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn transpose4(r: [int8x16_t; 4]) -> [int8x16_t; 4] {
    let r = [
        vreinterpretq_s32_s8(r[0]),
        vreinterpretq_s32_s8(r[1]),
        vreinterpretq_s32_s8(r[2]),
        vreinterpretq_s32_s8(r[3]),
    ];
    let wide = vreinterpretq_s64_s32;
    let (a0, a1) = (wide(vzip1q_s32(r[0], r[1])), wide(vzip2q_s32(r[0], r[1])));
    let (b0, b1) = (wide(vzip1q_s32(r[2], r[3])), wide(vzip2q_s32(r[2], r[3])));
    [
        vreinterpretq_s8_s64(vzip1q_s64(a0, b0)),
        vreinterpretq_s8_s64(vzip2q_s64(a0, b0)),
        vreinterpretq_s8_s64(vzip1q_s64(a1, b1)),
        vreinterpretq_s8_s64(vzip2q_s64(a1, b1)),
    ]
}

/// The low halves of `a` and `b`, then their high halves.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn zip_halves(a: int8x16_t, b: int8x16_t) -> [int8x16_t; 2] {
    let (a, b) = (vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b));
    [vreinterpretq_s8_s64(vzip1q_s64(a, b)), vreinterpretq_s8_s64(vzip2q_s64(a, b))]
}

/// The shared methods of [`super::Isa`] for aarch64: all but the steps of the GEMM and the order of its codes.
macro_rules! neon_methods {
    () => {
        type B = [uint8x16_t; 2];
        type F = [float32x4_t; 2];
        type N = [int32x4_t; 2];
        /// Minus the offset times the sum of each lane's four activations.
        type Fix = [int32x4_t; 2];
        type W = [float32x4_t; 2];
        type Packed = i8;

        const PACKED_OFFSET: bool = false;

        #[inline(always)]
        unsafe fn load(p: *const u8) -> [uint8x16_t; 2] {
            unsafe { [vld1q_u8(p), vld1q_u8(p.add(16))] }
        }

        #[inline(always)]
        unsafe fn store(p: *mut u8, x: [uint8x16_t; 2]) {
            unsafe {
                vst1q_u8(p, x[0]);
                vst1q_u8(p.add(16), x[1]);
            }
        }

        #[inline(always)]
        unsafe fn spill(p: *mut u8, x: [uint8x16_t; 2]) {
            let p = p.cast::<uint8x16_t>();
            unsafe {
                p.write_volatile(x[0]);
                p.add(1).write_volatile(x[1]);
            }
        }

        #[inline(always)]
        unsafe fn load_dup(p: *const u8) -> [uint8x16_t; 2] {
            unsafe { [vld1q_u8(p); 2] }
        }

        #[inline(always)]
        unsafe fn splat(x: u8) -> [uint8x16_t; 2] {
            unsafe { [vdupq_n_u8(x); 2] }
        }

        #[inline(always)]
        unsafe fn from4(x: [u64; 4]) -> [uint8x16_t; 2] {
            unsafe {
                let pair = |a, b| vreinterpretq_u8_u64(vcombine_u64(vcreate_u64(a), vcreate_u64(b)));
                [pair(x[0], x[1]), pair(x[2], x[3])]
            }
        }

        #[inline(always)]
        unsafe fn from8(x: [u32; 8]) -> [uint8x16_t; 2] {
            unsafe {
                let half = |p| vreinterpretq_u8_u32(vld1q_u32(p));
                [half(x.as_ptr()), half(x.as_ptr().add(4))]
            }
        }

        #[inline(always)]
        unsafe fn nibbles(p: *const u8) -> [uint8x16_t; 2] {
            unsafe {
                let x = vld1q_u8(p);
                [vandq_u8(x, vdupq_n_u8(15)), vshrq_n_u8::<4>(x)]
            }
        }

        #[inline(always)]
        unsafe fn nibbles8(p: *const u8) -> [uint8x16_t; 2] {
            unsafe {
                let [low, high] = Self::nibbles(p);
                let (low, high) = (vreinterpretq_u64_u8(low), vreinterpretq_u64_u8(high));
                [vreinterpretq_u8_u64(vzip1q_u64(low, high)), vreinterpretq_u8_u64(vzip2q_u64(low, high))]
            }
        }

        #[inline(always)]
        unsafe fn nibble_pairs(p: *const u8) -> [uint8x16_t; 2] {
            unsafe {
                let [low, high] = Self::nibbles(p);
                [vzip1q_u8(low, high), vzip2q_u8(low, high)]
            }
        }

        #[inline(always)]
        unsafe fn threes(p: *const u8) -> [uint8x16_t; 2] {
            unsafe {
                let x = vreinterpretq_u16_u8(vld1q_u8(p));
                let half = |x| arm::four_fields::<10, 5>(x, 7);
                [half(vmovl_u16(vget_low_u16(x))), half(vmovl_high_u16(x))]
            }
        }

        #[inline(always)]
        unsafe fn sevens(x: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
            unsafe {
                let half = |x| arm::four_fields::<2, 1>(vreinterpretq_u32_u8(x), 127);
                [half(x[0]), half(x[1])]
            }
        }

        #[inline(always)]
        unsafe fn high_sevens(p: *const u8) -> [uint8x16_t; 2] {
            unsafe {
                let odd = |p: *const u8| vuzp2q_u8(vld1q_u8(p), vld1q_u8(p.add(16)));
                [vshrq_n_u8::<1>(odd(p)), vshrq_n_u8::<1>(odd(p.add(32)))]
            }
        }

        #[inline(always)]
        unsafe fn odd_words(p: *const u8) -> [uint8x16_t; 2] {
            unsafe {
                let word = |p: *const u8| vreinterpretq_u32_u8(vld1q_u8(p));
                let odd = |p: *const u8| vreinterpretq_u8_u32(vuzp2q_u32(word(p), word(p.add(16))));
                [odd(p), odd(p.add(32))]
            }
        }

        #[inline(always)]
        unsafe fn splat4(x: u32) -> [uint8x16_t; 2] {
            unsafe { [vreinterpretq_u8_u32(vdupq_n_u32(x)); 2] }
        }

        #[inline(always)]
        unsafe fn top_bits(p: *const u8) -> [uint8x16_t; 2] {
            unsafe {
                let x = vreinterpretq_s16_u8(vld1q_u8(p));
                let top = vshrq_n_s16::<15>(x);
                [vreinterpretq_u8_s16(vzip1q_s16(top, top)), vreinterpretq_u8_s16(vzip2q_s16(top, top))]
            }
        }

        #[inline(always)]
        unsafe fn eights(x: u32) -> [uint8x16_t; 2] {
            unsafe {
                let x = vreinterpretq_u8_u32(vdupq_n_u32(x));
                [vqtbl1q_u8(x, arm::bytes(arm::EIGHTS_LOW)), vqtbl1q_u8(x, arm::bytes(arm::EIGHTS_HIGH))]
            }
        }

        #[inline(always)]
        unsafe fn spill_pairs(out: *mut u16, low: [uint8x16_t; 2], high: [uint8x16_t; 2]) {
            unsafe {
                Self::spill(out.cast(), [vzip1q_u8(low[0], high[0]), vzip2q_u8(low[0], high[0])]);
                Self::spill(out.add(16).cast(), [vzip1q_u8(low[1], high[1]), vzip2q_u8(low[1], high[1])]);
            }
        }

        #[inline(always)]
        unsafe fn with_parity(x: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
            unsafe { [vsliq_n_u8::<7>(x[0], vcntq_u8(x[0])), vsliq_n_u8::<7>(x[1], vcntq_u8(x[1]))] }
        }

        #[inline(always)]
        unsafe fn crumbs(p: *const u8) -> [uint8x16_t; 2] {
            unsafe {
                let x = vld1_u8(p);
                let x = vcombine_u8(x, x);
                let shifts = vld1q_s8(arm::CRUMB_SHIFTS.as_ptr());
                let half = |index| {
                    let fours = vqtbl1q_u8(x, arm::bytes(index));
                    vandq_u8(vshlq_u8(fours, shifts), vdupq_n_u8(3))
                };
                [half(arm::FOURS_LOW), half(arm::FOURS_HIGH)]
            }
        }

        #[inline(always)]
        unsafe fn field<const SHIFT: u32, const MASK: u8>(x: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
            unsafe {
                let half = |x| {
                    // A constant count: becomes the immediate form.
                    let x = if SHIFT == 0 { x } else { vshlq_u8(x, vdupq_n_s8(-(SHIFT as i8))) };
                    if MASK == 0xff >> SHIFT { x } else { vandq_u8(x, vdupq_n_u8(MASK)) }
                };
                [half(x[0]), half(x[1])]
            }
        }

        #[inline(always)]
        unsafe fn raise<const SHIFT: u32, const MASK: u8>(x: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
            unsafe {
                let half = |x| {
                    let x = if MASK == 0xff >> SHIFT { x } else { vandq_u8(x, vdupq_n_u8(MASK)) };
                    vshlq_u8(x, vdupq_n_s8(SHIFT as i8))
                };
                [half(x[0]), half(x[1])]
            }
        }

        #[inline(always)]
        unsafe fn or(a: [uint8x16_t; 2], b: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
            unsafe { [vorrq_u8(a[0], b[0]), vorrq_u8(a[1], b[1])] }
        }

        #[inline(always)]
        unsafe fn add(a: [uint8x16_t; 2], b: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
            unsafe { [vaddq_u8(a[0], b[0]), vaddq_u8(a[1], b[1])] }
        }

        #[inline(always)]
        unsafe fn sub(a: [uint8x16_t; 2], b: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
            unsafe { [vsubq_u8(a[0], b[0]), vsubq_u8(a[1], b[1])] }
        }

        #[inline(always)]
        unsafe fn halves(a: [uint8x16_t; 2], b: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
            [a[0], b[1]]
        }

        #[inline(always)]
        unsafe fn at_least(x: [uint8x16_t; 2], v: u8) -> [uint8x16_t; 2] {
            unsafe {
                let v = vdupq_n_u8(v);
                [vshrq_n_u8::<7>(vcgeq_u8(x[0], v)), vshrq_n_u8::<7>(vcgeq_u8(x[1], v))]
            }
        }

        #[inline(always)]
        unsafe fn add_at(x: [uint8x16_t; 2], bits: u32, v: u8) -> [uint8x16_t; 2] {
            unsafe {
                let (m, v) = (arm::mask(bits), vdupq_n_u8(v));
                [vaddq_u8(x[0], vandq_u8(m[0], v)), vaddq_u8(x[1], vandq_u8(m[1], v))]
            }
        }

        #[inline(always)]
        unsafe fn negate_at(x: [uint8x16_t; 2], bits: u32) -> [uint8x16_t; 2] {
            unsafe {
                let m = arm::mask(bits);
                [vsubq_u8(veorq_u8(x[0], m[0]), m[0]), vsubq_u8(veorq_u8(x[1], m[1]), m[1])]
            }
        }

        #[inline(always)]
        unsafe fn signed(x: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
            x
        }

        #[inline(always)]
        unsafe fn lookup_signed(table: &[i8; 16], index: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
            unsafe {
                let table = vld1q_u8(table.as_ptr().cast());
                [vqtbl1q_u8(table, index[0]), vqtbl1q_u8(table, index[1])]
            }
        }

        #[inline(always)]
        unsafe fn prefetch(p: *const u8) {
            unsafe { arm::prefetch(p) }
        }

        #[inline(always)]
        unsafe fn fix_none() -> [int32x4_t; 2] {
            unsafe { [vdupq_n_s32(0); 2] }
        }

        #[inline(always)]
        unsafe fn fix_unsigned(a: [uint8x16_t; 2], offset: u8) -> [int32x4_t; 2] {
            unsafe {
                let minus = vdupq_n_u8(offset.wrapping_neg());
                [arm::sdot(vdupq_n_s32(0), minus, a[0]), arm::sdot(vdupq_n_s32(0), minus, a[1])]
            }
        }

        #[inline(always)]
        unsafe fn fix_signed(_: [uint8x16_t; 2]) -> [int32x4_t; 2] {
            unsafe { [vdupq_n_s32(0); 2] }
        }

        #[inline(always)]
        unsafe fn dot_unsigned(codes: [uint8x16_t; 2], a: [uint8x16_t; 2], fix: [int32x4_t; 2]) -> [int32x4_t; 2] {
            unsafe { [arm::sdot(fix[0], codes[0], a[0]), arm::sdot(fix[1], codes[1], a[1])] }
        }

        #[inline(always)]
        unsafe fn dot_signed(codes: [uint8x16_t; 2], a: [uint8x16_t; 2], fix: [int32x4_t; 2]) -> [int32x4_t; 2] {
            unsafe { [arm::sdot(fix[0], codes[0], a[0]), arm::sdot(fix[1], codes[1], a[1])] }
        }

        #[inline(always)]
        unsafe fn f_zero() -> [float32x4_t; 2] {
            unsafe { [vdupq_n_f32(0.0); 2] }
        }

        #[inline(always)]
        unsafe fn f_splat(x: f32) -> [float32x4_t; 2] {
            unsafe { [vdupq_n_f32(x); 2] }
        }

        #[inline(always)]
        unsafe fn f_splat2(p: *const f32) -> [float32x4_t; 2] {
            unsafe { [vdupq_n_f32(*p), vdupq_n_f32(*p.add(1))] }
        }

        #[inline(always)]
        unsafe fn f_load(p: *const f32) -> [float32x4_t; 2] {
            unsafe { [vld1q_f32(p), vld1q_f32(p.add(4))] }
        }

        #[inline(always)]
        unsafe fn f_store(p: *mut f32, x: [float32x4_t; 2]) {
            unsafe {
                vst1q_f32(p, x[0]);
                vst1q_f32(p.add(4), x[1]);
            }
        }

        /// Multiply-adds take one lane of a register for all of theirs: what is kept in registers is read from there.
        #[inline(always)]
        unsafe fn f_spill(p: *mut f32, x: [float32x4_t; 2]) {
            unsafe { Self::f_store(p, x) }
        }

        #[inline(always)]
        unsafe fn f_mul(a: [float32x4_t; 2], b: [float32x4_t; 2]) -> [float32x4_t; 2] {
            unsafe { [vmulq_f32(a[0], b[0]), vmulq_f32(a[1], b[1])] }
        }

        #[inline(always)]
        unsafe fn f_fma(a: [float32x4_t; 2], b: [float32x4_t; 2], c: [float32x4_t; 2]) -> [float32x4_t; 2] {
            unsafe { [vfmaq_f32(c[0], a[0], b[0]), vfmaq_f32(c[1], a[1], b[1])] }
        }

        #[inline(always)]
        unsafe fn f_sum(x: [float32x4_t; 2]) -> f32 {
            unsafe {
                let x = vaddq_f32(x[0], x[1]);
                vpadds_f32(vadd_f32(vget_low_f32(x), vget_high_f32(x)))
            }
        }

        #[inline(always)]
        unsafe fn f_from_n(x: [int32x4_t; 2]) -> [float32x4_t; 2] {
            unsafe { [vcvtq_f32_s32(x[0]), vcvtq_f32_s32(x[1])] }
        }

        #[inline(always)]
        unsafe fn f_from_u8(x: u64) -> [float32x4_t; 2] {
            unsafe {
                let x = vmovl_u8(vcreate_u8(x));
                [vcvtq_f32_u32(vmovl_u16(vget_low_u16(x))), vcvtq_f32_u32(vmovl_high_u16(x))]
            }
        }

        #[inline(always)]
        unsafe fn f_from_i8(x: u64) -> [float32x4_t; 2] {
            unsafe {
                let x = vmovl_s8(vcreate_s8(x));
                [vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), vcvtq_f32_s32(vmovl_high_s16(x))]
            }
        }

        #[inline(always)]
        unsafe fn f_twice(x: [float32x4_t; 2]) -> [[float32x4_t; 2]; 2] {
            unsafe {
                [[vzip1q_f32(x[0], x[0]), vzip2q_f32(x[0], x[0])], [vzip1q_f32(x[1], x[1]), vzip2q_f32(x[1], x[1])]]
            }
        }

        #[inline(always)]
        unsafe fn f16(bits: u16) -> f32 {
            unsafe { vgetq_lane_f32::<0>(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits)))) }
        }

        #[inline(always)]
        unsafe fn fma1(a: f32, b: f32, c: f32) -> f32 {
            a.mul_add(b, c)
        }

        #[inline(always)]
        unsafe fn quantize(x: *const f32, codes: *mut i8) -> Quantized {
            unsafe {
                let mut v = [vdupq_n_f32(0.0); 8];
                for i in 0..8 {
                    v[i] = vld1q_f32(x.add(4 * i));
                }
                // Magnitudes compare as integers, NaN above infinity: the result depends on no order.
                let mut m = [vdupq_n_u32(0); 2];
                for i in 0..8 {
                    let magnitude = vandq_u32(vreinterpretq_u32_f32(v[i]), vdupq_n_u32(0x7fff_ffff));
                    m[i % 2] = vmaxq_u32(m[i % 2], magnitude);
                }
                let top = vmaxvq_u32(vmaxq_u32(m[0], m[1]));
                let (d, inverse) = super::quantum(f32::from_bits(top));
                if inverse == 0.0 {
                    vst1q_s8(codes, vdupq_n_s8(0));
                    vst1q_s8(codes.add(16), vdupq_n_s8(0));
                    return Quantized { d, sums: [0; 2] };
                }
                // Conversion rounds to nearest, ties to even; |x * inverse| < 127.5, so that low bytes are the codes.
                let mut sums = [0i16; 2];
                for half in 0..2 {
                    let word = |i: usize| {
                        let q = vcvtnq_s32_f32(vmulq_n_f32(v[4 * half + i], inverse));
                        vreinterpretq_s16_s32(q)
                    };
                    let (a, b) = (vuzp1q_s16(word(0), word(1)), vuzp1q_s16(word(2), word(3)));
                    let q = vuzp1q_s8(vreinterpretq_s8_s16(a), vreinterpretq_s8_s16(b));
                    vst1q_s8(codes.add(16 * half), q);
                    sums[half] = vaddlvq_s8(q);
                }
                Quantized { d, sums }
            }
        }

        #[inline(always)]
        unsafe fn w_zero() -> [float32x4_t; 2] {
            unsafe { [vdupq_n_f32(0.0); 2] }
        }

        #[inline(always)]
        unsafe fn w_load(p: *const f32) -> [float32x4_t; 2] {
            unsafe { Self::f_load(p) }
        }

        #[inline(always)]
        unsafe fn w_load_f16(p: *const u16) -> [float32x4_t; 2] {
            unsafe {
                let x = vreinterpretq_f16_u16(vld1q_u16(p));
                [vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x)]
            }
        }

        #[inline(always)]
        unsafe fn w_load_bf16(p: *const u16) -> [float32x4_t; 2] {
            unsafe {
                // The high half of each float: zeros below it.
                let (x, zero) = (vld1q_u16(p), vdupq_n_u16(0));
                [vreinterpretq_f32_u16(vzip1q_u16(zero, x)), vreinterpretq_f32_u16(vzip2q_u16(zero, x))]
            }
        }

        #[inline(always)]
        unsafe fn w_store(p: *mut f32, x: [float32x4_t; 2]) {
            unsafe { Self::f_store(p, x) }
        }

        #[inline(always)]
        unsafe fn w_splat(x: f32) -> [float32x4_t; 2] {
            unsafe { [vdupq_n_f32(x); 2] }
        }

        #[inline(always)]
        unsafe fn w_mul(a: [float32x4_t; 2], b: [float32x4_t; 2]) -> [float32x4_t; 2] {
            unsafe { [vmulq_f32(a[0], b[0]), vmulq_f32(a[1], b[1])] }
        }

        #[inline(always)]
        unsafe fn w_fma(a: [float32x4_t; 2], b: [float32x4_t; 2], c: [float32x4_t; 2]) -> [float32x4_t; 2] {
            unsafe { [vfmaq_f32(c[0], a[0], b[0]), vfmaq_f32(c[1], a[1], b[1])] }
        }

        #[inline(always)]
        unsafe fn w_fnma(a: [float32x4_t; 2], b: [float32x4_t; 2], c: [float32x4_t; 2]) -> [float32x4_t; 2] {
            unsafe { [vfmsq_f32(c[0], a[0], b[0]), vfmsq_f32(c[1], a[1], b[1])] }
        }

        #[inline(always)]
        unsafe fn w_sum(x: [float32x4_t; 2]) -> f32 {
            unsafe { Self::f_sum(x) }
        }

        #[inline(always)]
        unsafe fn w_from_wi(x: [int32x4_t; 2]) -> [float32x4_t; 2] {
            unsafe { [vcvtq_f32_s32(x[0]), vcvtq_f32_s32(x[1])] }
        }

        #[inline(always)]
        unsafe fn wi_splat(p: *const i32) -> [int32x4_t; 2] {
            unsafe { [vdupq_n_s32(*p); 2] }
        }

        #[inline(always)]
        unsafe fn wi_zero() -> [int32x4_t; 2] {
            unsafe { [vdupq_n_s32(0); 2] }
        }
    };
}

pub(super) use neon_methods;
