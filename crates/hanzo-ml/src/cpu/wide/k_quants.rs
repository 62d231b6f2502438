//! Q2_K to Q6_K and IQ4_XS: a unit is a block of 256, whose scales are made floats in one vector.

use std::arch::x86_64::*;

use super::{Acc, Lanes, Unit, WideFormat, add, and_or, chunks, eights, fours, half, high, low, sixteens};
use crate::cpu::formats::{iq4_xs, q2_k::Q2_K, q3_k, q4_k::Q4_K, q5_k::Q5_K, q6_k::Q6_K, six_bit_pairs};
use crate::cpu::isa::read;
use hanzo_gguf::formats::tables::KVALUES_IQ4_NL;
use iq4_xs::IQ4_XS;
use q3_k::Q3_K;

/// Chunks of vectors that hold 64 bytes' low nibbles, then their high ones.
const NIBBLES: &[[u8; 16]] = &[chunks(0, 2), chunks(1, 3), chunks(4, 6), chunks(5, 7)];
/// Chunks of vectors that hold one bit pair of 64 bytes each.
const PAIRS: &[[u8; 16]] = &[chunks(0, 4), chunks(1, 5), chunks(2, 6), chunks(3, 7)];

static OF_NIBBLES: [Lanes; 4] = [eights(0, 2), eights(1, 3), eights(4, 6), eights(5, 7)];
static OF_PAIRS: [Lanes; 4] =
    [fours([0, 1, 8, 9]), fours([2, 3, 10, 11]), fours([4, 5, 12, 13]), fours([6, 7, 14, 15])];
static IN_ORDER: [Lanes; 4] =
    [fours([0, 1, 2, 3]), fours([4, 5, 6, 7]), fours([8, 9, 10, 11]), fours([12, 13, 14, 15])];
/// Eight times lane 0, eight times lane 1.
static TWO: Lanes = eights(0, 1);

/// Each of eight steps, then each of the eight products.
#[inline(always)]
unsafe fn steps_and_sums(d: *const f32, dsums: *const f32, out: *mut f32) {
    unsafe {
        out.copy_from_nonoverlapping(d, 8);
        out.add(8).copy_from_nonoverlapping(dsums, 8);
    }
}

/// Each of eight steps twice.
#[inline(always)]
unsafe fn steps_twice(d: *const f32, out: *mut f32) {
    for i in 0..16 {
        unsafe { out.add(i).write(*d.add(i / 2)) };
    }
}

/// Two half floats, each in eight lanes.
#[inline(always)]
unsafe fn two_halves(p: *const u8) -> __m512 {
    unsafe {
        let halves = _mm_cvtph_ps(_mm_cvtsi32_si128(read(p)));
        _mm512_permutexvar_ps(TWO.load(), _mm512_castps128_ps512(halves))
    }
}

/// Bits moved up by `lower` places in the lower half and by `upper` in the upper one, within 64 (down if negative): whoever reads
/// a bit masks it, so that what came from the next byte does not matter.
#[inline(always)]
unsafe fn turned(x: __m512i, lower: i64, upper: i64) -> __m512i {
    unsafe {
        let (a, b) = (lower.rem_euclid(64), upper.rem_euclid(64));
        _mm512_rolv_epi64(x, _mm512_setr_epi64(a, a, a, a, b, b, b, b))
    }
}

#[inline(always)]
unsafe fn twice(p: *const u8) -> __m512i {
    unsafe { _mm512_broadcast_i64x4(_mm256_loadu_si256(p.cast())) }
}

#[inline(always)]
unsafe fn masked(x: __m512i, mask: u8) -> __m512i {
    unsafe { _mm512_and_si512(x, _mm512_set1_epi8(mask as i8)) }
}

/// The codes of each of a block's four vectors, with the factors in `lanes`, for formats of four sums.
#[inline(always)]
unsafe fn four<F: WideFormat, const T: usize>(
    codes: [__m512i; 4],
    factors: [__m512; T],
    lanes: &[Lanes; 4],
    x: &[Unit; T],
    acc: &mut [Acc; T],
) {
    unsafe {
        for v in 0..4 {
            for t in 0..T {
                let start = if <F as WideFormat>::OFFSET == 0 { _mm512_setzero_si512() } else { x[t].fix::<F>(v) };
                let sum = _mm512_dpbusd_epi32(start, codes[v], x[t].codes(v));
                add(&mut acc[t], v, sum, _mm512_permutexvar_ps(lanes[v].load(), factors[t]));
            }
        }
    }
}

/// Scales and minima of Q4_K and Q5_K, times d and dmin.
#[inline(always)]
unsafe fn scales_and_minima(w: *const u8) -> __m512 {
    unsafe {
        let (scales, minima) = six_bit_pairs(w.add(4));
        let both = _mm512_cvtepu8_epi32(_mm_set_epi64x(minima as i64, scales as i64));
        _mm512_mul_ps(_mm512_cvtepi32_ps(both), two_halves(w))
    }
}

/// The block's scales times each token's steps, the first vector of its own floats.
#[inline(always)]
unsafe fn factors<F: WideFormat, const T: usize>(scales: __m512, x: &[Unit; T]) -> [__m512; T] {
    let mut factors = [scales; T];
    for t in 0..T {
        factors[t] = unsafe { _mm512_mul_ps(scales, x[t].own::<F>(0)) };
    }
    factors
}

/// The factors of Q4_K and Q5_K; adds the minima, which are among them.
#[inline(always)]
unsafe fn with_minima<F: WideFormat, const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) -> [__m512; T] {
    unsafe {
        let factors = factors::<F, T>(scales_and_minima(w), x);
        for t in 0..T {
            acc[t].minima = _mm512_add_ps(acc[t].minima, factors[t]);
        }
        factors
    }
}

impl WideFormat for Q4_K {
    const UNIT: usize = 256;
    const QUADS: &'static [[u8; 16]] = NIBBLES;
    const MINIMA: u16 = 0xff00;
    const OWN: usize = 1;

    #[inline(always)]
    unsafe fn own(d: *const f32, dsums: *const f32, _: *const f32, out: *mut f32) {
        unsafe { steps_and_sums(d, dsums, out) }
    }

    #[inline(always)]
    unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) {
        unsafe {
            let factors = with_minima::<Self, T>(w, x, acc);
            let (a, b) = (_mm512_loadu_si512(w.add(16).cast()), _mm512_loadu_si512(w.add(80).cast()));
            four::<Self, T>([low(a), high(a), low(b), high(b)], factors, &OF_NIBBLES, x, acc);
        }
    }
}

impl WideFormat for Q5_K {
    const UNIT: usize = 256;
    const QUADS: &'static [[u8; 16]] = NIBBLES;
    const MINIMA: u16 = 0xff00;
    const OWN: usize = 1;

    #[inline(always)]
    unsafe fn own(d: *const f32, dsums: *const f32, _: *const f32, out: *mut f32) {
        unsafe { steps_and_sums(d, dsums, out) }
    }

    #[inline(always)]
    unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) {
        unsafe {
            let factors = with_minima::<Self, T>(w, x, acc);
            let (a, b, h) =
                (_mm512_loadu_si512(w.add(48).cast()), _mm512_loadu_si512(w.add(112).cast()), twice(w.add(16)));
            // Bit c of the high bytes belongs to chunk c; it comes to bit 4.
            let code = |q: __m512i, lower: i64, upper: i64| and_or(q, 15, masked(turned(h, 4 - lower, 4 - upper), 16));
            let (ah, bh) = (_mm512_srli_epi16::<4>(a), _mm512_srli_epi16::<4>(b));
            let codes = [code(a, 0, 2), code(ah, 1, 3), code(b, 4, 6), code(bh, 5, 7)];
            four::<Self, T>(codes, factors, &OF_NIBBLES, x, acc);
        }
    }
}

impl WideFormat for Q6_K {
    const UNIT: usize = 256;
    const QUADS: &'static [[u8; 16]] = &[chunks(0, 1), chunks(2, 3), chunks(4, 5), chunks(6, 7)];
    const OWN: usize = 1;

    #[inline(always)]
    unsafe fn own(d: *const f32, _: *const f32, _: *const f32, out: *mut f32) {
        unsafe { steps_twice(d, out) }
    }

    #[inline(always)]
    unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) {
        unsafe {
            let scales = _mm512_cvtepi8_epi32(_mm_loadu_si128(w.add(192).cast()));
            let scales = _mm512_mul_ps(_mm512_cvtepi32_ps(scales), half(w.add(208)));
            let factors = factors::<Self, T>(scales, x);
            let mut codes = [_mm512_setzero_si512(); 4];
            for i in 0..2 {
                let (q, h) = (_mm512_loadu_si512(w.add(64 * i).cast()), twice(w.add(128 + 32 * i)));
                // Field j of the high bytes belongs to chunk j; it comes to bits 4 and 5.
                codes[2 * i] = and_or(q, 15, masked(turned(h, 4, 2), 48));
                codes[2 * i + 1] = and_or(_mm512_srli_epi16::<4>(q), 15, masked(turned(h, 0, -2), 48));
            }
            four::<Self, T>(codes, factors, &IN_ORDER, x, acc);
        }
    }
}

impl WideFormat for Q3_K {
    const UNIT: usize = 256;
    const QUADS: &'static [[u8; 16]] = PAIRS;
    const OWN: usize = 1;

    #[inline(always)]
    unsafe fn own(d: *const f32, _: *const f32, _: *const f32, out: *mut f32) {
        unsafe { steps_twice(d, out) }
    }

    #[inline(always)]
    unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) {
        unsafe {
            let (first, last) = q3_k::scale_bytes(w);
            let scales = _mm512_cvtepi8_epi32(_mm_set_epi64x(last as i64, first as i64));
            let scales = _mm512_mul_ps(_mm512_cvtepi32_ps(scales), half(w.add(108)));
            let factors = factors::<Self, T>(scales, x);
            let (q, h) = (_mm512_loadu_si512(w.add(32).cast()), twice(w));
            // Bit c of the high bytes belongs to chunk c; it comes to bit 2.
            let code = |q: __m512i, j: i64| and_or(q, 3, masked(turned(h, 2 - j, -2 - j), 4));
            let codes = [
                code(q, 0),
                code(_mm512_srli_epi16::<2>(q), 1),
                code(_mm512_srli_epi16::<4>(q), 2),
                code(_mm512_srli_epi16::<6>(q), 3),
            ];
            four::<Self, T>(codes, factors, &OF_PAIRS, x, acc);
        }
    }
}

impl WideFormat for Q2_K {
    const UNIT: usize = 256;
    const QUADS: &'static [[u8; 16]] = PAIRS;
    const MINIMA: u16 = 0xffff;
    const OWN: usize = 2;

    #[inline(always)]
    unsafe fn own(d: *const f32, _: *const f32, dsums16: *const f32, out: *mut f32) {
        unsafe {
            steps_twice(d, out);
            out.add(16).copy_from_nonoverlapping(dsums16, 16);
        }
    }

    #[inline(always)]
    unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) {
        unsafe {
            let packed = _mm_loadu_si128(w.cast());
            let nibble = _mm_set1_epi8(15);
            let float = |x: __m128i| _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_and_si128(x, nibble)));
            let scales = _mm512_mul_ps(float(packed), half(w.add(80)));
            let minima = _mm512_mul_ps(float(_mm_srli_epi16::<4>(packed)), half(w.add(82)));
            let factors = factors::<Self, T>(scales, x);
            for t in 0..T {
                acc[t].minima = _mm512_fmadd_ps(minima, x[t].own::<Self>(1), acc[t].minima);
            }
            let q = _mm512_loadu_si512(w.add(16).cast());
            let codes = [
                masked(q, 3),
                masked(_mm512_srli_epi16::<2>(q), 3),
                masked(_mm512_srli_epi16::<4>(q), 3),
                masked(_mm512_srli_epi16::<6>(q), 3),
            ];
            four::<Self, T>(codes, factors, &OF_PAIRS, x, acc);
        }
    }
}

impl WideFormat for IQ4_XS {
    const UNIT: usize = 256;
    const QUADS: &'static [[u8; 16]] = &[sixteens(0), sixteens(4), sixteens(32), sixteens(36)];
    const SUMS: usize = 2;
    const OWN: usize = 1;

    #[inline(always)]
    unsafe fn own(d: *const f32, _: *const f32, _: *const f32, out: *mut f32) {
        unsafe {
            out.copy_from_nonoverlapping(d, 8);
            out.add(8).write_bytes(0, 8);
        }
    }

    #[inline(always)]
    unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) {
        unsafe {
            let scales = _mm512_cvtepi8_epi32(_mm_cvtsi64_si128(iq4_xs::scale_bytes(w) as i64));
            let scales = _mm512_mul_ps(_mm512_cvtepi32_ps(scales), half(w));
            let factors = factors::<Self, T>(scales, x);
            let values = super::biased(&KVALUES_IQ4_NL);
            for i in 0..2 {
                let q = _mm512_loadu_si512(w.add(8 + 64 * i).cast());
                let (a, b) = (_mm512_shuffle_epi8(values, low(q)), _mm512_shuffle_epi8(values, high(q)));
                for t in 0..T {
                    let sum = _mm512_dpbusd_epi32(x[t].fix::<Self>(i), a, x[t].codes(2 * i));
                    let sum = _mm512_dpbusd_epi32(sum, b, x[t].codes(2 * i + 1));
                    add(&mut acc[t], i, sum, _mm512_permutexvar_ps(IN_ORDER[i].load(), factors[t]));
                }
            }
        }
    }
}
