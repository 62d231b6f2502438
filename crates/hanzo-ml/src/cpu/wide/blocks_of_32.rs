//! Formats of small blocks: Q4_0 to Q8_0, IQ4_NL, MXFP4, NVFP4. A unit is 128 elements whose blocks lie in at most two
//! overlapping vectors (three for Q8_0): one permutation brings all codes together, another all scales to their lanes.

use std::arch::x86_64::*;

use super::{Acc, Bytes, Unit, WideFormat, add, biased, high, low, sixteens};
use crate::cpu::formats::iq4_nl::IQ4_NL;
use crate::cpu::formats::mxfp4::MXFP4;
use crate::cpu::formats::nvfp4::NVFP4;
use crate::cpu::formats::q4_0::Q4_0;
use crate::cpu::formats::q4_1::Q4_1;
use crate::cpu::formats::q5_0::Q5_0;
use crate::cpu::formats::q5_1::Q5_1;
use crate::cpu::formats::q8_0::Q8_0;
use hanzo_gguf::formats::tables::{KVALUES_FP4, KVALUES_IQ4_NL};

/// Four blocks of 32: the low nibbles of each (elements 0..16), then the high ones.
const FOUR: &[[u8; 16]] = &[sixteens(0), sixteens(4)];

/// Two vectors that cover `SPAN` bytes, 64 to 128, from the first on and up to the last.
#[derive(Clone, Copy)]
struct Span(__m512i, __m512i);

#[inline(always)]
unsafe fn span<const SPAN: usize>(w: *const u8) -> Span {
    unsafe { Span(_mm512_loadu_si512(w.cast()), _mm512_loadu_si512(w.add(SPAN - 64).cast())) }
}

impl Span {
    #[inline(always)]
    unsafe fn bytes(self, at: &Bytes) -> __m512i {
        unsafe { _mm512_permutex2var_epi8(self.0, at.load(), self.1) }
    }

    /// Half floats by the places of their bytes (the first 32).
    #[inline(always)]
    unsafe fn halves(self, at: &Bytes) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm512_castsi512_si256(self.bytes(at))) }
    }
}

/// The index of byte `at` of `span` bytes in the two vectors.
const fn place(at: usize, span: usize) -> u8 {
    (if at < 64 { at } else { 128 + at - span }) as u8
}

/// 16 bytes from `first` on of each of four blocks.
const fn codes_of_four(first: usize, block: usize) -> Bytes {
    let mut at = [0; 64];
    let mut i = 0;
    while i < 64 {
        at[i] = place(i / 16 * block + first + i % 16, 4 * block);
        i += 1;
    }
    Bytes(at)
}

/// The half float at `first` of each of four blocks, in four lanes.
const fn half_of_four(first: usize, block: usize) -> Bytes {
    let mut at = [0; 64];
    let mut i = 0;
    while i < 32 {
        at[i] = place(i / 8 * block + first + i % 2, 4 * block);
        i += 1;
    }
    Bytes(at)
}

/// Two words of bits of each of four blocks, at `first`: the low ones of all, then the high ones.
const fn bits_of_four(first: usize, block: usize) -> Bytes {
    let mut at = [0; 64];
    let mut i = 0;
    while i < 16 {
        at[i] = place(i % 8 / 2 * block + first + 2 * (i / 8) + i % 2, 4 * block);
        i += 1;
    }
    Bytes(at)
}

/// Adds what the nibbles `codes` of four blocks give, times `scales`.
#[inline(always)]
unsafe fn nibbles<F: WideFormat, const T: usize>(
    codes: [__m512i; 2],
    scales: __m512,
    x: &[Unit; T],
    acc: &mut [Acc; T],
) {
    unsafe {
        for t in 0..T {
            let start = if <F as WideFormat>::OFFSET == 0 { _mm512_setzero_si512() } else { x[t].fix::<F>(0) };
            let sum = _mm512_dpbusd_epi32(start, codes[0], x[t].codes(0));
            let sum = _mm512_dpbusd_epi32(sum, codes[1], x[t].codes(1));
            add(&mut acc[t], 0, sum, _mm512_mul_ps(scales, x[t].steps::<F>(0)));
        }
    }
}

/// Minus each of four products, in the first of its four lanes.
#[inline(always)]
unsafe fn minus_sums(dsums: *const f32, out: *mut f32) {
    for lane in 0..16 {
        unsafe { out.add(lane).write(if lane % 4 == 0 { -*dsums.add(lane / 4) } else { 0.0 }) };
    }
}

/// The nibbles with a fifth bit.
#[inline(always)]
unsafe fn fives(q: __m512i, bits: __m512i) -> [__m512i; 2] {
    unsafe {
        let bits = _mm512_castsi512_si128(bits);
        let (a, b) = (_mm_cvtsi128_si64(bits) as u64, _mm_extract_epi64::<1>(bits) as u64);
        let sixteen = _mm512_set1_epi8(16);
        [_mm512_mask_add_epi8(low(q), a, low(q), sixteen), _mm512_mask_add_epi8(high(q), b, high(q), sixteen)]
    }
}

macro_rules! halves_and_nibbles {
    ($format:ident, $block:literal, d $d:literal $(, m $m:literal)? $(, bits $bits:literal)?, codes $codes:literal $(, values $values:ident)?) => {
        impl WideFormat for $format {
            const UNIT: usize = 128;
            const QUADS: &'static [[u8; 16]] = FOUR;
            const SUMS: usize = 1;
            const LANES: bool = true;
            $(
                const MINIMA: u16 = { let _ = $m; 0xffff };
                const OWN: usize = 1;

                #[inline(always)]
                unsafe fn own(_: *const f32, dsums: *const f32, _: *const f32, out: *mut f32) {
                    unsafe { minus_sums(dsums, out) }
                }
            )?

            #[inline(always)]
            unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) {
                static CODES: Bytes = codes_of_four($codes, $block);
                static D: Bytes = half_of_four($d, $block);
                unsafe {
                    let span = span::<{ 4 * $block }>(w);
                    let q = span.bytes(&CODES);
                    $(
                        static M: Bytes = half_of_four($m, $block);
                        let m = span.halves(&M);
                        for t in 0..T {
                            acc[t].minima = _mm512_fmadd_ps(m, x[t].own::<Self>(0), acc[t].minima);
                        }
                    )?
                    let codes = [low(q), high(q)];
                    $(
                        let values = biased(&$values);
                        let codes = codes.map(|q| _mm512_shuffle_epi8(values, q));
                    )?
                    $(
                        static BITS: Bytes = bits_of_four($bits, $block);
                        let codes = { let _ = codes; fives(q, span.bytes(&BITS)) };
                    )?
                    nibbles::<Self, T>(codes, span.halves(&D), x, acc);
                }
            }
        }
    };
}

halves_and_nibbles!(Q4_0, 18, d 0, codes 2);
halves_and_nibbles!(Q4_1, 20, d 0, m 2, codes 4);
halves_and_nibbles!(Q5_0, 22, d 0, bits 2, codes 6);
halves_and_nibbles!(Q5_1, 24, d 0, m 2, bits 4, codes 8);
halves_and_nibbles!(IQ4_NL, 18, d 0, codes 2, values KVALUES_IQ4_NL);

/// The byte at `first` of each of `n` blocks, as the low byte of `16 / n` dwords; the mask of those bytes is [`LOW_BYTES`].
const fn byte_of_each(first: usize, block: usize, n: usize) -> Bytes {
    let mut at = [0; 64];
    let mut i = 0;
    while i < 64 {
        at[i] = place(i * n / 64 * block + first, n * block);
        i += 1;
    }
    Bytes(at)
}

/// The low byte of each dword.
const LOW_BYTES: u64 = 0x1111_1111_1111_1111;

impl WideFormat for MXFP4 {
    const UNIT: usize = 128;
    const QUADS: &'static [[u8; 16]] = FOUR;
    const SUMS: usize = 1;
    const LANES: bool = true;

    #[inline(always)]
    unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) {
        static CODES: Bytes = codes_of_four(1, 17);
        static E: Bytes = byte_of_each(0, 17, 4);
        unsafe {
            let span = span::<68>(w);
            let q = span.bytes(&CODES);
            let values = biased(&KVALUES_FP4);
            let codes = [_mm512_shuffle_epi8(values, low(q)), _mm512_shuffle_epi8(values, high(q))];
            let e = _mm512_maskz_permutex2var_epi8(LOW_BYTES, span.0, E.load(), span.1);
            // 2^(e - 128): the exponent is e - 1; below 2, a subnormal with one bit.
            let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, _mm512_set1_epi32(1)));
            let subnormal = _mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2));
            let scales = _mm512_mask_sllv_epi32(normal, subnormal, _mm512_set1_epi32(0x0020_0000), e);
            nibbles::<Self, T>(codes, _mm512_castsi512_ps(scales), x, acc);
        }
    }
}

/// Eight groups of 16, each its first eight elements, then each its last eight.
const fn eights_of_groups(first: u8) -> [u8; 16] {
    let mut quads = [0; 16];
    let mut i = 0;
    while i < 16 {
        quads[i] = first + 4 * (i as u8 / 2) + i as u8 % 2;
        i += 1;
    }
    quads
}

impl WideFormat for NVFP4 {
    const UNIT: usize = 128;
    const QUADS: &'static [[u8; 16]] = &[eights_of_groups(0), eights_of_groups(2)];
    const SUMS: usize = 1;
    const LANES: bool = true;

    #[inline(always)]
    unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) {
        /// Two blocks' nibbles.
        static CODES: Bytes = {
            let mut at = [0; 64];
            let mut i = 0;
            while i < 64 {
                at[i] = place(i / 32 * 36 + 4 + i % 32, 72);
                i += 1;
            }
            Bytes(at)
        };
        /// Two blocks' four scales, each in the low bytes of two words.
        static E: Bytes = {
            let mut at = [0; 64];
            let mut i = 0;
            while i < 32 {
                at[i] = place(i / 16 * 36 + i % 16 / 4, 72);
                i += 1;
            }
            Bytes(at)
        };
        const EVEN: u64 = 0x5555_5555;
        unsafe {
            let span = span::<72>(w);
            let q = span.bytes(&CODES);
            let values = biased(&KVALUES_FP4);
            let codes = [_mm512_shuffle_epi8(values, low(q)), _mm512_shuffle_epi8(values, high(q))];
            let e = _mm512_castsi512_si256(_mm512_maskz_permutex2var_epi8(EVEN, span.0, E.load(), span.1));
            let e = _mm256_and_si256(e, _mm256_set1_epi16(0x7f));
            let number = _mm256_cmpneq_epi16_mask(e, _mm256_set1_epi16(0x7f));
            // Seven bits are a half float's exponent and mantissa times 2^(7 - 15): subnormals come out right. Halved.
            let scales = _mm512_cvtph_ps(_mm256_maskz_slli_epi16::<7>(number, e));
            nibbles::<Self, T>(codes, _mm512_mul_ps(scales, _mm512_set1_ps(128.0)), x, acc);
        }
    }
}

impl WideFormat for Q8_0 {
    const UNIT: usize = 128;
    const QUADS: &'static [[u8; 16]] = &[super::chunks(0, 1), super::chunks(2, 3)];
    const LANES: bool = true;

    #[inline(always)]
    unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) {
        /// Two blocks' codes, from 68 bytes.
        static CODES: Bytes = {
            let mut at = [0; 64];
            let mut i = 0;
            while i < 64 {
                at[i] = place(i / 32 * 34 + 2 + i % 32, 68);
                i += 1;
            }
            Bytes(at)
        };
        /// Two blocks' half floats, each in eight lanes.
        static D: Bytes = {
            let mut at = [0; 64];
            let mut i = 0;
            while i < 32 {
                at[i] = place(i / 16 * 34 + i % 2, 68);
                i += 1;
            }
            Bytes(at)
        };
        unsafe {
            for s in 0..2 {
                let span = span::<68>(w.add(68 * s));
                let codes = _mm512_xor_si512(span.bytes(&CODES), _mm512_set1_epi8(-128));
                let scales = span.halves(&D);
                for t in 0..T {
                    let sum = _mm512_dpbusd_epi32(x[t].fix::<Self>(s), codes, x[t].codes(s));
                    add(&mut acc[t], s, sum, _mm512_mul_ps(scales, x[t].steps::<Self>(s)));
                }
            }
        }
    }
}
