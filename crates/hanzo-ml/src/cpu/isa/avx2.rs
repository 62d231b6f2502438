//! AVX2 with FMA, F16C and BMI2: dot products by `vpmaddubsw`, GEMM tiles of 8 rows by `vpmaddwd` on i16 codes.

use std::arch::x86_64::*;

use super::x86::{transpose4, transpose8, ymm_methods};
use super::{Isa, Quantized};

/// AVX2, FMA, F16C, BMI2.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

/// 0xff in the bytes whose bit is set.
#[inline(always)]
unsafe fn mask(bits: u32) -> __m256i {
    unsafe {
        let spread = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
        let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits as i32), spread);
        let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
        _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit)
    }
}

/// Adds four products a lane: four codes of each row at `w`, four of one token at `a`.
#[inline(always)]
unsafe fn step(acc: __m256i, w: *const i16, a: *const i16) -> __m256i {
    unsafe {
        let first = _mm256_madd_epi16(_mm256_loadu_si256(w.cast()), _mm256_set1_epi32(super::read(a.cast())));
        let second =
            _mm256_madd_epi16(_mm256_loadu_si256(w.add(16).cast()), _mm256_set1_epi32(super::read(a.add(2).cast())));
        _mm256_add_epi32(_mm256_add_epi32(acc, first), second)
    }
}

impl Isa for Avx2 {
    ymm_methods!();

    /// i16 pair products of the offset alone.
    type Fix = __m256i;
    type W = __m256;
    type WI = __m256i;
    type Packed = i16;

    const NR: usize = 8;
    const MR: usize = 4;
    const FT: usize = 3;
    const STEP: usize = 4;
    const PACKED_OFFSET: bool = false;

    #[inline(always)]
    unsafe fn add_at(x: __m256i, bits: u32, v: u8) -> __m256i {
        unsafe { _mm256_add_epi8(x, _mm256_and_si256(mask(bits), _mm256_set1_epi8(v as i8))) }
    }

    #[inline(always)]
    unsafe fn negate_at(x: __m256i, bits: u32) -> __m256i {
        unsafe {
            let m = mask(bits);
            _mm256_sub_epi8(_mm256_xor_si256(x, m), m)
        }
    }

    #[inline(always)]
    unsafe fn signed(x: __m256i) -> __m256i {
        x
    }

    #[inline(always)]
    unsafe fn lookup_signed(table: &[i8; 16], index: __m256i) -> __m256i {
        unsafe { _mm256_shuffle_epi8(Self::load_dup(table.as_ptr().cast()), index) }
    }

    #[inline(always)]
    unsafe fn fix_none() -> __m256i {
        unsafe { _mm256_setzero_si256() }
    }

    #[inline(always)]
    unsafe fn fix_unsigned(a: __m256i, offset: u8) -> __m256i {
        unsafe { _mm256_maddubs_epi16(_mm256_set1_epi8(offset as i8), a) }
    }

    #[inline(always)]
    unsafe fn fix_signed(_: __m256i) -> __m256i {
        unsafe { _mm256_setzero_si256() }
    }

    #[inline(always)]
    unsafe fn dot_unsigned(codes: __m256i, a: __m256i, fix: __m256i) -> __m256i {
        unsafe {
            // At most 2 * 127 * 127 = 32258 in magnitude, before and after the fix: nothing saturates.
            let pairs = _mm256_sub_epi16(_mm256_maddubs_epi16(codes, a), fix);
            _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
        }
    }

    #[inline(always)]
    unsafe fn dot_signed(codes: __m256i, a: __m256i, _: __m256i) -> __m256i {
        unsafe {
            // |-128| is 128 as an unsigned byte, and 2 * 128 * 127 = 32512 does not saturate.
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(a, codes));
            _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
        }
    }

    #[inline(always)]
    unsafe fn w_zero() -> __m256 {
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn w_load(p: *const f32) -> __m256 {
        unsafe { _mm256_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn w_load_f16(p: *const u16) -> __m256 {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }

    #[inline(always)]
    unsafe fn w_load_bf16(p: *const u16) -> __m256 {
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn w_store(p: *mut f32, x: __m256) {
        unsafe { _mm256_storeu_ps(p, x) }
    }

    #[inline(always)]
    unsafe fn w_splat(x: f32) -> __m256 {
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn w_mul(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn w_fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn w_fnma(a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fnmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn w_sum(x: __m256) -> f32 {
        unsafe { Self::f_sum(x) }
    }

    #[inline(always)]
    unsafe fn w_from_wi(x: __m256i) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(x) }
    }

    #[inline(always)]
    unsafe fn wi_splat(p: *const i32) -> __m256i {
        unsafe { _mm256_set1_epi32(*p) }
    }

    #[inline(always)]
    unsafe fn wi_zero() -> __m256i {
        unsafe { _mm256_setzero_si256() }
    }

    #[inline(always)]
    unsafe fn wi_steps<const M: usize>(mut sums: [__m256i; M], w: *const i16, a: *const i16) -> [__m256i; M] {
        for t in 0..M {
            sums[t] = unsafe { step(sums[t], w, a.add(4 * t)) };
        }
        sums
    }

    #[inline(always)]
    unsafe fn pack_weights(codes: *const u8, signed: bool, offset: u8, out: *mut i16) {
        unsafe {
            let offset = _mm256_set1_epi8(if signed { 0 } else { offset as i8 });
            let mut rows = [offset; 8];
            for r in 0..8 {
                rows[r] = _mm256_sub_epi8(_mm256_loadu_si256(codes.add(32 * r).cast()), offset);
            }
            // Within each half: codes 0 and 1 of its four rows, then codes 2 and 3.
            let pairs =
                _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
            let steps = transpose8(rows);
            for step in 0..8 {
                let x = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_shuffle_epi8(steps[step], pairs));
                let to = out.add(32 * step);
                _mm256_storeu_si256(to.cast(), _mm256_cvtepi8_epi16(_mm256_castsi256_si128(x)));
                _mm256_storeu_si256(to.add(16).cast(), _mm256_cvtepi8_epi16(_mm256_extracti128_si256::<1>(x)));
            }
        }
    }

    #[inline(always)]
    unsafe fn pack_acts(codes: [*const i8; 4], out: *mut i16, stride: usize) {
        unsafe {
            let steps = transpose4(codes);
            for step in 0..4 {
                let low = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(steps[step]));
                let high = _mm256_cvtepi8_epi16(_mm256_extracti128_si256::<1>(steps[step]));
                _mm256_storeu_si256(out.add(step * stride).cast(), low);
                _mm256_storeu_si256(out.add((step + 4) * stride).cast(), high);
            }
        }
    }
}
