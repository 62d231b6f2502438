//! Formats of one scale a block and one or two bits a code: TQ1_0, TQ2_0, Q1_0, Q2_0. A block's sums are added up with the
//! activations' steps first and meet its scale once.

use std::arch::x86_64::*;

use super::{Acc, Bytes, CHAINS, NONE, Unit, WideFormat, chunks, half};
use crate::cpu::formats::q1_0::Q1_0;
use crate::cpu::formats::q2_0::Q2_0;
use crate::cpu::formats::tq1_0::TQ1_0;
use crate::cpu::formats::tq2_0::TQ2_0;
use crate::cpu::isa::read;

/// Adds `scale` times the sum over vectors of products and steps.
#[inline(always)]
unsafe fn block<F: WideFormat, const V: usize, const T: usize>(
    codes: [__m512i; V],
    scale: __m512,
    chain: usize,
    x: &[Unit; T],
    acc: &mut [Acc; T],
) {
    unsafe {
        for t in 0..T {
            let mut of_block = [_mm512_setzero_ps(); 2];
            for v in 0..V {
                let sum = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(x[t].fix::<F>(v), codes[v], x[t].codes(v)));
                let steps = x[t].steps::<F>(v);
                of_block[v % 2] =
                    if v < 2 { _mm512_mul_ps(sum, steps) } else { _mm512_fmadd_ps(sum, steps, of_block[v % 2]) };
            }
            let sum = if V > 1 { _mm512_add_ps(of_block[0], of_block[1]) } else { of_block[0] };
            let c = chain % CHAINS;
            acc[t].sums[c] = _mm512_fmadd_ps(sum, scale, acc[t].sums[c]);
        }
    }
}

/// A bit pair of each byte.
#[inline(always)]
unsafe fn pair<const SHIFT: u32>(q: __m512i) -> __m512i {
    unsafe { _mm512_and_si512(_mm512_srli_epi16::<SHIFT>(q), _mm512_set1_epi8(3)) }
}

impl WideFormat for TQ2_0 {
    const UNIT: usize = 256;
    const QUADS: &'static [[u8; 16]] = &[chunks(0, 4), chunks(1, 5), chunks(2, 6), chunks(3, 7)];
    const LANES: bool = true;

    #[inline(always)]
    unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) {
        unsafe {
            let q = _mm512_loadu_si512(w.cast());
            let codes = [pair::<0>(q), pair::<2>(q), pair::<4>(q), pair::<6>(q)];
            block::<Self, 4, T>(codes, half(w.add(64)), 0, x, acc);
        }
    }
}

/// The elements of trit `n` of all 52 bytes: 32 of chunk n, 16 from 160 + 16 n on, four from 240 + 4 n on (n below 4).
const fn trits(n: u8) -> [u8; 16] {
    let mut quads = [NONE; 16];
    let mut i = 0;
    while i < 8 {
        quads[i] = 8 * n + i as u8;
        i += 1;
    }
    while i < 12 {
        quads[i] = 40 + 4 * n + i as u8 - 8;
        i += 1;
    }
    if n < 4 {
        quads[12] = 60 + n;
    }
    quads
}

/// `3 x / 256` of each byte, rounded down, from the complement of x.
#[inline(always)]
unsafe fn trit(not_x: __m512i) -> __m512i {
    unsafe {
        // The complement of an average rounded up is the average of the complements rounded down: floor((x + floor(x / 2)) / 2)
        // is floor(3 x / 4), whose top two bits are wanted.
        let not_half = _mm512_avg_epu8(not_x, _mm512_set1_epi8(-1));
        let not_sum = _mm512_avg_epu8(not_x, not_half);
        // Bits 6 and 7 to 0 and 1, and their complement.
        _mm512_gf2p8affine_epi64_epi8::<3>(not_sum, _mm512_set1_epi64(0x4080_0000_0000_0000))
    }
}

impl WideFormat for TQ1_0 {
    const UNIT: usize = 256;
    const QUADS: &'static [[u8; 16]] = &[trits(0), trits(1), trits(2), trits(3), trits(4)];
    const LANES: bool = true;

    #[inline(always)]
    unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) {
        const BYTES: u64 = (1 << 52) - 1;
        unsafe {
            // The complement of 3 x is 3 times that of x, plus 2.
            let ones = _mm512_set1_epi8(-1);
            let mut not_x = _mm512_xor_si512(_mm512_maskz_loadu_epi8(BYTES, w.cast()), ones);
            let mut codes = [_mm512_setzero_si512(); 5];
            for n in 0..5 {
                codes[n] = trit(not_x);
                let twice = _mm512_add_epi8(not_x, not_x);
                not_x = _mm512_sub_epi8(_mm512_add_epi8(twice, not_x), _mm512_add_epi8(ones, ones));
            }
            block::<Self, 5, T>(codes, half(w.add(52)), 0, x, acc);
        }
    }
}

impl WideFormat for Q1_0 {
    const UNIT: usize = 128;
    const QUADS: &'static [[u8; 16]] = &[chunks(0, 1), chunks(2, 3)];
    const LANES: bool = true;

    #[inline(always)]
    unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) {
        unsafe {
            let two = _mm512_set1_epi8(2);
            let codes =
                [_mm512_maskz_mov_epi8(read::<u64>(w.add(2)), two), _mm512_maskz_mov_epi8(read::<u64>(w.add(10)), two)];
            block::<Self, 2, T>(codes, half(w), 0, x, acc);
        }
    }
}

impl WideFormat for Q2_0 {
    const UNIT: usize = 64;
    const QUADS: &'static [[u8; 16]] = &[chunks(0, 1)];
    const LANES: bool = true;

    #[inline(always)]
    unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) {
        /// Two bytes to each eight.
        static TWO: Bytes = {
            let mut at = [0; 64];
            let mut i = 0;
            while i < 64 {
                at[i] = (i / 8 * 2 + i % 2) as u8;
                i += 1;
            }
            Bytes(at)
        };
        unsafe {
            let q = _mm512_castsi128_si512(_mm_loadu_si128(w.add(2).cast()));
            let q = _mm512_permutexvar_epi8(TWO.load(), q);
            let fields = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x0e0c_0a08_0604_0200), q);
            block::<Self, 1, T>([pair::<0>(fields)], half(w), 0, x, acc);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::IsaLevel;

    #[test]
    fn trits_are_three_times_the_fraction_for_every_byte() {
        if !IsaLevel::Avx512Vbmi.is_available() {
            return;
        }
        #[target_feature(enable = "avx512f,avx512bw,gfni")]
        unsafe fn of(x: &mut [u8; 64]) {
            unsafe { _mm512_storeu_si512(x.as_mut_ptr().cast(), trit(_mm512_loadu_si512(x.as_ptr().cast()))) }
        }
        for first in (0..256usize).step_by(64) {
            let mut x: [u8; 64] = std::array::from_fn(|i| !(first + i) as u8);
            // SAFETY: the level was checked.
            unsafe { of(&mut x) };
            for (i, trit) in x.into_iter().enumerate() {
                assert_eq!(usize::from(trit), 3 * (first + i) / 256, "{}", first + i);
            }
        }
    }
}
