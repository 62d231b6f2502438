//! Codebooks as byte planes, packed at compile time: a row's 2- or 3-bit fields are two bytes, its lower half's and its upper
//! half's, and a vector of indices becomes a vector of either by permutations over the plane. No block formats here.

use std::arch::x86_64::*;

/// Bytes that vectors are taken from.
#[repr(align(64))]
pub(super) struct Table<const N: usize>(pub [u8; N]);

impl<const N: usize> Table<N> {
    /// Bytes `64 * i..64 * i + 64`.
    #[inline(always)]
    unsafe fn vector(&self, i: usize) -> __m512i {
        debug_assert!(64 * i + 64 <= N);
        unsafe { _mm512_load_si512(self.0.as_ptr().add(64 * i).cast()) }
    }
}

/// A codebook: the fields of each row's lower half, then of each row's upper half.
pub(super) struct Planes<const N: usize>(pub [Table<N>; 2]);

/// Which of `values` a magnitude is.
const fn field(values: &[u8], magnitude: u8) -> u8 {
    let mut i = 0;
    while values[i] != magnitude {
        i += 1;
    }
    i as u8
}

/// Rows of eight, four fields of two bits a byte.
pub(super) const fn planes_of_8<const N: usize>(grid: &[u64; N], values: &[u8]) -> Planes<N> {
    let mut planes = [[0; N]; 2];
    let mut i = 0;
    while i < 8 * N {
        let (row, e) = (i / 8, i % 8);
        planes[e / 4][row] |= field(values, (grid[row] >> (8 * e)) as u8) << (2 * (e % 4));
        i += 1;
    }
    Planes([Table(planes[0]), Table(planes[1])])
}

/// Rows of four, two fields of three bits a byte.
pub(super) const fn planes_of_4<const N: usize>(grid: &[u32; N], values: &[u8]) -> Planes<N> {
    let mut planes = [[0; N]; 2];
    let mut i = 0;
    while i < 4 * N {
        let (row, e) = (i / 4, i % 4);
        planes[e / 2][row] |= field(values, (grid[row] >> (8 * e)) as u8) << (3 * (e % 2));
        i += 1;
    }
    Planes([Table(planes[0]), Table(planes[1])])
}

/// A plane of 2048 ascending bytes in three tables: among 16 of them is one step at most.
pub(super) struct Steps {
    /// Number of the first of each 16.
    pub first: Table<128>,
    /// Where among each 16 the next number begins.
    pub step: Table<128>,
    /// The byte of each number.
    pub bytes: Table<128>,
}

/// The upper plane of a codebook of rows of eight trits in ascending order.
pub(super) const fn steps(grid: &Planes<2048>) -> Steps {
    let plane = &grid.0[1].0;
    let (mut first, mut step, mut bytes) = ([0; 128], [16; 128], [0; 128]);
    let mut number = 0;
    bytes[0] = plane[0];
    let mut i = 0;
    while i < 2048 {
        if i % 16 == 0 && plane[i] == bytes[number] {
            first[i / 16] = number as u8;
        } else if plane[i] != bytes[number] {
            assert!(plane[i] > bytes[number], "the codebook ascends");
            number += 1;
            bytes[number] = plane[i];
            if i % 16 == 0 {
                first[i / 16] = number as u8;
            } else {
                assert!(step[i / 16] == 16, "one step in sixteen rows at most");
                step[i / 16] = (i % 16) as u8;
            }
        }
        i += 1;
    }
    Steps { first: Table(first), step: Table(step), bytes: Table(bytes) }
}

/// 64 indices: their low bytes, and a mask of each higher bit.
#[derive(Clone, Copy)]
pub(super) struct Index {
    /// Bits 0 to 7.
    pub low: __m512i,
    /// Bits 8 to 10, as many as the codebook needs.
    pub high: [__mmask64; 3],
}

/// The bytes of a plane at 64 indices: per 256 rows two permutations and a choice by bit 7, then one by each higher bit.
#[inline(always)]
unsafe fn look_up<const N: usize>(plane: &Table<N>, index: Index) -> __m512i {
    unsafe {
        let upper = _mm512_movepi8_mask(index.low);
        let mut found = [index.low; 8];
        let mut count = N / 256;
        for i in 0..count {
            let of = |i: usize| _mm512_permutex2var_epi8(plane.vector(i), index.low, plane.vector(i + 1));
            found[i] = if N > 512 {
                // Each permutation in the lanes that are its own: the others still are indices after the first.
                let x = _mm512_mask2_permutex2var_epi8(plane.vector(4 * i), index.low, !upper, plane.vector(4 * i + 1));
                _mm512_mask2_permutex2var_epi8(plane.vector(4 * i + 2), x, upper, plane.vector(4 * i + 3))
            } else {
                _mm512_mask_blend_epi8(upper, of(4 * i), of(4 * i + 2))
            };
        }
        let mut bit = 0;
        while count > 1 {
            count /= 2;
            for i in 0..count {
                found[i] = _mm512_mask_blend_epi8(index.high[bit], found[2 * i], found[2 * i + 1]);
            }
            bit += 1;
        }
        found[0]
    }
}

/// Lower and upper halves of rows: dwords 0 and 1 of each four of the first, each with that of the second, then dwords 2 and 3.
#[inline(always)]
unsafe fn join(lower: __m512i, upper: __m512i) -> [__m512i; 2] {
    unsafe { [_mm512_unpacklo_epi32(lower, upper), _mm512_unpackhi_epi32(lower, upper)] }
}

/// The rows at 64 indices, four to a qword: lower halves in its first four bytes, upper halves in the others. Of each four
/// dwords of indices the first two are qwords of the first vector, the others of the second.
///
/// # Safety
/// The CPU has AVX-512 VBMI.
#[inline(always)]
pub(super) unsafe fn rows<const N: usize>(planes: &Planes<N>, index: Index) -> [__m512i; 2] {
    unsafe { join(look_up(&planes.0[0], index), look_up(&planes.0[1], index)) }
}

/// The same where the upper plane ascends; `high` has bits 8 to 10 of each index at bits `SHIFT` to `SHIFT + 2` of its byte.
///
/// # Safety
/// As for [`rows`].
#[inline(always)]
pub(super) unsafe fn rows_ascending<const SHIFT: u32>(
    planes: &Planes<2048>,
    steps: &Steps,
    index: Index,
    high: __m512i,
) -> [__m512i; 2] {
    unsafe {
        let nibble = _mm512_set1_epi8(15);
        // Bits 4 to 10, which is what a permutation of 128 bytes reads.
        let of_16 = _mm512_ternarylogic_epi32::<0xca>(
            nibble,
            _mm512_srli_epi16::<4>(index.low),
            if SHIFT == 4 { high } else { _mm512_slli_epi16::<4>(high) },
        );
        let first = _mm512_permutex2var_epi8(steps.first.vector(0), of_16, steps.first.vector(1));
        let step = _mm512_permutex2var_epi8(steps.step.vector(0), of_16, steps.step.vector(1));
        let beyond = _mm512_cmpge_epu8_mask(_mm512_and_si512(index.low, nibble), step);
        let number = _mm512_mask_add_epi8(first, beyond, first, _mm512_set1_epi8(1));
        let upper = _mm512_permutex2var_epi8(steps.bytes.vector(0), number, steps.bytes.vector(1));
        join(look_up(&planes.0[0], index), upper)
    }
}
