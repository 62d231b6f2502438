//! AVX-512 F, BW, VL, DQ and VNNI: mask registers for signs and high bits, dot products by `vpdpbusd`, GEMM tiles of 16
//! rows with embedded broadcasts of the activations.
//!
//! `vpdpbusd` multiplies unsigned by signed bytes. Codes are the unsigned side: those with an offset keep it, signed
//! ones get 128 added, and the accumulator starts at minus the offset times the sum of the activations. Exact.

use std::arch::x86_64::*;

use super::x86::{transpose4, transpose8, ymm_methods};
use super::{Isa, Quantized};

/// AVX-512 F, BW, VL, DQ, VNNI, beside AVX2, FMA, F16C and BMI2.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

/// Adds four products a lane: four codes of each row at `w`, four of one token at `a`.
#[inline(always)]
unsafe fn step(acc: __m512i, w: *const u8, a: *const u8) -> __m512i {
    unsafe { _mm512_dpbusd_epi32(acc, _mm512_loadu_si512(w.cast()), _mm512_set1_epi32(super::read(a))) }
}

impl Isa for Avx512 {
    ymm_methods!();

    /// Minus the offset times the sum of each lane's four activations.
    type Fix = __m256i;
    type W = __m512;
    type WI = __m512i;
    type Packed = u8;

    const NR: usize = 16;
    const VECTORS: usize = 3;
    const MR: usize = 4;
    const FT: usize = 6;
    const STEP: usize = 4;
    const PACKED_OFFSET: bool = true;
    const POWERS: bool = true;

    #[inline(always)]
    unsafe fn add_at(x: __m256i, bits: u32, v: u8) -> __m256i {
        unsafe { _mm256_mask_add_epi8(x, bits, x, _mm256_set1_epi8(v as i8)) }
    }

    #[inline(always)]
    unsafe fn negate_at(x: __m256i, bits: u32) -> __m256i {
        unsafe { _mm256_mask_sub_epi8(x, bits, _mm256_setzero_si256(), x) }
    }

    #[inline(always)]
    unsafe fn signed(x: __m256i) -> __m256i {
        unsafe { _mm256_xor_si256(x, _mm256_set1_epi8(-128)) }
    }

    #[inline(always)]
    unsafe fn lookup_signed(table: &[i8; 16], index: __m256i) -> __m256i {
        // The table is biased, outside the caller's loop, instead of every result.
        unsafe { _mm256_shuffle_epi8(Self::signed(Self::load_dup(table.as_ptr().cast())), index) }
    }

    #[inline(always)]
    unsafe fn fix_none() -> __m256i {
        unsafe { _mm256_setzero_si256() }
    }

    #[inline(always)]
    unsafe fn fix_unsigned(a: __m256i, offset: u8) -> __m256i {
        unsafe {
            let zero = _mm256_setzero_si256();
            _mm256_sub_epi32(zero, _mm256_dpbusd_epi32(zero, _mm256_set1_epi8(offset as i8), a))
        }
    }

    #[inline(always)]
    unsafe fn fix_signed(a: __m256i) -> __m256i {
        unsafe { Self::fix_unsigned(a, 128) }
    }

    #[inline(always)]
    unsafe fn dot_unsigned(codes: __m256i, a: __m256i, fix: __m256i) -> __m256i {
        unsafe { _mm256_dpbusd_epi32(fix, codes, a) }
    }

    #[inline(always)]
    unsafe fn dot_signed(codes: __m256i, a: __m256i, fix: __m256i) -> __m256i {
        unsafe { _mm256_dpbusd_epi32(fix, codes, a) }
    }

    #[inline(always)]
    unsafe fn w_zero() -> __m512 {
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn w_load(p: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn w_load_f16(p: *const u16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }

    #[inline(always)]
    unsafe fn w_load_bf16(p: *const u16) -> __m512 {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn w_store(p: *mut f32, x: __m512) {
        unsafe { _mm512_storeu_ps(p, x) }
    }

    #[inline(always)]
    unsafe fn w_splat(x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn w_mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn w_fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn w_fnma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fnmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn w_sum(x: __m512) -> f32 {
        unsafe {
            let halves = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
            Self::f_sum(halves)
        }
    }

    #[inline(always)]
    unsafe fn w_sum4(x: [__m512; 4]) -> [f32; 4] {
        unsafe {
            // Lane i and lane i + 8 of each, two a vector; then i and i + 4, all four; then as in `w_sum`.
            let eights = |a, b| _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
            let (a, b) = (eights(x[0], x[1]), eights(x[2], x[3]));
            let x = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
            let x = _mm512_add_ps(x, _mm512_permute_ps::<0x4e>(x));
            let x = _mm512_add_ps(x, _mm512_permute_ps::<0xb1>(x));
            let first = _mm512_maskz_compress_ps(0x1111, x);
            let mut sums = [0f32; 4];
            _mm_storeu_ps(sums.as_mut_ptr(), _mm512_castps512_ps128(first));
            sums
        }
    }

    #[inline(always)]
    unsafe fn w_from_wi(x: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(x) }
    }

    #[inline(always)]
    unsafe fn w_times_power(x: __m512, power: __m512) -> __m512 {
        unsafe { _mm512_scalef_ps(x, power) }
    }

    #[inline(always)]
    unsafe fn wi_splat(p: *const i32) -> __m512i {
        unsafe { _mm512_set1_epi32(*p) }
    }

    #[inline(always)]
    unsafe fn wi_zero() -> __m512i {
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    unsafe fn wi_steps<const M: usize>(mut sums: [__m512i; M], w: *const u8, a: *const u8) -> [__m512i; M] {
        for t in 0..M {
            sums[t] = unsafe { step(sums[t], w, a.add(4 * t)) };
        }
        sums
    }

    #[inline(always)]
    unsafe fn pack_weights(codes: *const u8, _signed: bool, _offset: u8, out: *mut u8) {
        unsafe {
            for half in 0..2 {
                let mut rows = [_mm256_setzero_si256(); 8];
                for r in 0..8 {
                    rows[r] = _mm256_loadu_si256(codes.add(32 * (8 * half + r)).cast());
                }
                let steps = transpose8(rows);
                for step in 0..8 {
                    _mm256_storeu_si256(out.add(64 * step + 32 * half).cast(), steps[step]);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn pack_acts(codes: [*const i8; 4], out: *mut u8, stride: usize) {
        unsafe {
            let steps = transpose4(codes);
            for step in 0..4 {
                _mm_storeu_si128(out.add(step * stride).cast(), _mm256_castsi256_si128(steps[step]));
                _mm_storeu_si128(out.add((step + 4) * stride).cast(), _mm256_extracti128_si256::<1>(steps[step]));
            }
        }
    }
}
