//! IQ1, IQ2 and IQ3: codebook rows found in registers, 64 indices at once.
//!
//! A unit is one block of 64 indices or two of 32. Rows come as fields of two or three bits ([`planes`]), four rows a qword,
//! which `vpmultishiftqb` takes apart; the vectors of a block have a chunk of 32 in each qword, or a group of 16 in each dword,
//! so that they share their scales. Signs are bits of the index beside the field, in one table of signed values: those of a
//! block come by one affine transformation over bits (two by group), which transposes the sign bytes of a qword, so that byte i
//! has element i's sign of each row, and makes the sign that is the parity of the others.

use std::arch::x86_64::*;

use super::{Acc, Bytes, Lanes, Unit, WideFormat, add, and_or};
use crate::cpu::formats::iq1_m::IQ1_M;
use crate::cpu::formats::iq1_s::IQ1_S;
use crate::cpu::formats::iq2_s::IQ2_S;
use crate::cpu::formats::iq2_xs::IQ2_XS;
use crate::cpu::formats::iq2_xxs::IQ2_XXS;
use crate::cpu::formats::iq3_s::IQ3_S;
use crate::cpu::formats::iq3_xxs::IQ3_XXS;
use crate::cpu::isa::read;
use hanzo_gguf::formats::tables;

mod planes;

use planes::{Index, Planes, Steps, planes_of_4, planes_of_8, rows, rows_ascending, steps};

/// What IQ2's two-bit fields stand for.
const VALUES_2: [u8; 3] = [8, 25, 43];

/// What the fields of IQ3_XXS stand for.
const VALUES_3_XXS: [u8; 8] = [4, 12, 20, 28, 36, 44, 52, 62];
/// What those of IQ3_S stand for.
const VALUES_3_S: [u8; 8] = [1, 3, 5, 7, 9, 11, 13, 15];
/// What those of IQ1 stand for: -1, 0 and 1, the field itself less 1.
const VALUES_1: [u8; 3] = [0xff, 0, 1];

static IQ2_XXS_PLANES: Planes<256> = planes_of_8(&tables::IQ2_XXS_GRID, &VALUES_2);
static IQ2_XS_PLANES: Planes<512> = planes_of_8(&tables::IQ2_XS_GRID, &VALUES_2);
static IQ2_S_PLANES: Planes<1024> = planes_of_8(&tables::IQ2_S_GRID, &VALUES_2);
static IQ3_XXS_PLANES: Planes<256> = planes_of_4(&tables::IQ3_XXS_GRID, &VALUES_3_XXS);
static IQ3_S_PLANES: Planes<512> = planes_of_4(&tables::IQ3_S_GRID, &VALUES_3_S);
static IQ1_PLANES: Planes<2048> = planes_of_8(&tables::IQ1_S_GRID, &VALUES_1);
static IQ1_STEPS: Steps = steps(&planes_of_8(&tables::IQ1_S_GRID, &VALUES_1));

/// How the four vectors of a block by chunk put their indices into a table together: where the field begins and where the sign
/// is. The signs of all four are there; each looks at its own.
const PLACES: [(u8, u8); 4] = [(0, 5), (0, 4), (3, 2), (3, 1)];

/// Signed values plus 128 for [`PLACES`].
const fn by_places<const N: usize>(values: &[u8; N]) -> [Bytes; 4] {
    let mut tables = [[128; 64]; 4];
    let mut i = 0;
    while i < 256 {
        let (v, index) = (i / 64, i % 64);
        let (field, sign) = PLACES[v];
        let value = values[(index >> field) % N.next_power_of_two() % N];
        tables[v][index] = if index >> sign & 1 == 1 { 128 - value } else { 128 + value };
        i += 1;
    }
    let [a, b, c, d] = tables;
    [Bytes(a), Bytes(b), Bytes(c), Bytes(d)]
}

/// Signed values of IQ2 plus 128 by the lowest two bits, negative if any other is set.
static SIGNED_2: Bytes = {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        let value = VALUES_2[i % 4 % 3];
        table[i] = if i > 3 { 128 - value } else { 128 + value };
        i += 1;
    }
    Bytes(table)
};
static SIGNED_2_BY_PLACES: [Bytes; 4] = by_places(&VALUES_2);
static SIGNED_3_XXS: [Bytes; 4] = by_places(&VALUES_3_XXS);
static SIGNED_3_S: [Bytes; 4] = by_places(&VALUES_3_S);

/// The same eight bytes in each qword.
const fn qwords(bytes: [u8; 8]) -> Bytes {
    let mut all = [0; 64];
    let mut i = 0;
    while i < 64 {
        all[i] = bytes[i % 8];
        i += 1;
    }
    Bytes(all)
}

/// Sixteen floats.
#[repr(align(64))]
struct Floats([f32; 16]);

impl Floats {
    #[inline(always)]
    unsafe fn at(&self, index: __m512i) -> __m512 {
        unsafe { _mm512_permutexvar_ps(index, _mm512_load_ps(self.0.as_ptr())) }
    }
}

/// `unit * (2 s + 1)`, s the `bits` low bits of an index of four.
const fn odd(unit: f32, bits: u32) -> Floats {
    let mut table = [0.0; 16];
    let mut i = 0;
    while i < 16 {
        table[i] = unit * (2 * (i as u32 % (1 << bits)) + 1) as f32;
        i += 1;
    }
    Floats(table)
}

/// Quads of two blocks whose vectors have a chunk in each qword, a row of eight of it each.
const fn by_chunk() -> [[u8; 16]; 8] {
    let mut quads = [[0; 16]; 8];
    let mut i = 0;
    while i < 128 {
        let (block, v, lane) = (i / 64, i / 16 % 4, i % 16);
        quads[i / 16][lane] = (64 * block + 8 * (lane / 2) + 2 * v + lane % 2) as u8;
        i += 1;
    }
    quads
}

/// The same for one block.
const fn by_chunk_of_one() -> [[u8; 16]; 4] {
    let [a, b, c, d, ..] = by_chunk();
    [a, b, c, d]
}

/// Quads of two blocks whose vectors have a group of 16 in each dword: the halves of its first row, then of its second.
const fn by_group() -> [[u8; 16]; 8] {
    let mut quads = [[0; 16]; 8];
    let mut i = 0;
    while i < 128 {
        let (block, v, lane) = (i / 64, i / 16 % 4, i % 16);
        quads[i / 16][lane] = (64 * block + 4 * lane + v) as u8;
        i += 1;
    }
    quads
}

/// Bits at which the fields of vector `v` of a block begin in a qword of rows of eight, for [`by_chunk`]; they come to bit `up`
/// of their bytes.
const fn row_of_8(v: u8, up: u8) -> Bytes {
    let mut at = [0; 8];
    let mut i = 0;
    while i < 8 {
        at[i as usize] = (64 + 32 * (i / 4) + 8 * v + 2 * (i % 4) - up) % 64;
        i += 1;
    }
    qwords(at)
}

/// The same for [`by_group`].
const fn halves_of_8(v: u8, up: u8) -> Bytes {
    let mut at = [0; 8];
    let mut i = 0;
    while i < 8 {
        at[i as usize] = (64 + 32 * (v % 2) + 8 * (v / 2 + 2 * (i / 4)) + 2 * (i % 4) - up) % 64;
        i += 1;
    }
    qwords(at)
}

/// The same for rows of four, [`by_chunk`]: two a qword of the vector's four.
const fn rows_of_4(v: u8, up: u8) -> Bytes {
    let mut at = [0; 8];
    let mut i = 0;
    while i < 8 {
        at[i as usize] = (64 + 32 * (i % 4 / 2) + 8 * (v % 2 * 2 + i / 4) + 3 * (i % 2) - up) % 64;
        i += 1;
    }
    qwords(at)
}

/// For [`PLACES`].
static ROWS_OF_8: [Bytes; 4] = [row_of_8(0, 0), row_of_8(1, 0), row_of_8(2, 3), row_of_8(3, 3)];
static HALVES_OF_8: [Bytes; 4] = [halves_of_8(0, 0), halves_of_8(1, 0), halves_of_8(2, 0), halves_of_8(3, 0)];
/// For [`PLACES`].
static ROWS_OF_4: [Bytes; 4] = [rows_of_4(0, 0), rows_of_4(1, 0), rows_of_4(2, 3), rows_of_4(3, 3)];
/// Those of IQ1, whose fields come to bit 3: eight times the field.
static ROWS_OF_8_UP: [Bytes; 4] = [row_of_8(0, 3), row_of_8(1, 3), row_of_8(2, 3), row_of_8(3, 3)];
static HALVES_OF_8_UP: [Bytes; 4] = [halves_of_8(0, 3), halves_of_8(1, 3), halves_of_8(2, 3), halves_of_8(3, 3)];

/// Where the bits of a byte are, and its parity without the eighth: what [`signs`] takes out of sign bytes.
static SEVEN_AND_PARITY: Bytes = qwords([1, 2, 4, 8, 16, 32, 64, 0x7f]);

/// The same for halves of rows: of each byte four bits, twice.
static LOW_HALVES: Bytes = qwords([1, 2, 4, 8, 1, 2, 4, 8]);
static HIGH_HALVES: Bytes = qwords([16, 32, 64, 128, 16, 32, 64, 128]);
static HIGH_HALVES_PARITY: Bytes = qwords([16, 32, 64, 0x7f, 16, 32, 64, 0x7f]);
static BITS: Bytes = qwords([1, 2, 4, 8, 16, 32, 64, 128]);

/// Transposes the eight bytes of each qword: bit `7 - p` of byte i is the parity of those bits of byte p that `taken` has in its
/// byte i.
#[inline(always)]
unsafe fn signs(bytes: __m512i, taken: &Bytes) -> __m512i {
    unsafe { _mm512_gf2p8affine_epi64_epi8::<0>(taken.load(), bytes) }
}

/// `mask` of `a`, the rest of `b`.
#[inline(always)]
unsafe fn select(mask: u8, a: __m512i, b: __m512i) -> __m512i {
    unsafe { _mm512_ternarylogic_epi32::<0xca>(_mm512_set1_epi8(mask as i8), a, b) }
}

/// The codes of a block by chunk: fields `BITS` wide of its rows, with signs at the bits of [`PLACES`].
#[inline(always)]
unsafe fn codes_by_chunk<const BITS: u32>(
    rows: [__m512i; 4],
    fields: &[Bytes; 4],
    signs: __m512i,
    tables: &[Bytes; 4],
) -> [__m512i; 4] {
    unsafe {
        let mut codes = rows;
        for v in 0..4 {
            let field = _mm512_multishift_epi64_epi8(fields[v].load(), rows[v]);
            let index = select(((1 << BITS) - 1) << PLACES[v].0, field, signs);
            codes[v] = _mm512_permutexvar_epi8(index, tables[v].load());
        }
        codes
    }
}

/// The codes of a block of IQ2 by group, from sign bytes that are bytes 2 to 5 of each qword; `high` takes out their upper halves.
#[inline(always)]
unsafe fn codes_by_group(rows: __m512i, bytes: __m512i, high: &Bytes) -> [__m512i; 4] {
    unsafe {
        let halves = [signs(bytes, &LOW_HALVES), signs(bytes, high)];
        let mut codes = [rows; 4];
        for v in 0..4 {
            // Even dwords hold rows 0 and 1, odd ones rows 2 and 3.
            let of = _mm512_set1_epi64(i64::from_ne_bytes(bits_of_rows(v as u8 / 2)));
            let field = _mm512_multishift_epi64_epi8(HALVES_OF_8[v].load(), rows);
            let index = select(3, field, _mm512_and_si512(halves[v % 2], of));
            codes[v] = _mm512_permutexvar_epi8(index, SIGNED_2.load());
        }
        codes
    }
}

/// The bit that has a row's signs, in four bytes, and that of the row two further on.
const fn bits_of_rows(row: u8) -> [u8; 8] {
    let (a, b) = (0x20 >> row, 0x08 >> row);
    [a, a, a, a, b, b, b, b]
}

/// The even dwords of two vectors, two of the first and two of the second in turn.
#[inline(always)]
unsafe fn even_dwords([a, b]: [__m512i; 2]) -> __m512i {
    unsafe { _mm512_castps_si512(_mm512_shuffle_ps::<0x88>(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b))) }
}

/// 32 bytes, and 32 bytes `stride` further on, eight of each in turn.
#[inline(always)]
unsafe fn interleaved(p: *const u8, stride: usize) -> __m512i {
    static TURNS: Lanes = Lanes([0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23]);
    unsafe {
        let a = _mm512_castsi256_si512(_mm256_loadu_si256(p.cast()));
        let b = _mm512_castsi256_si512(_mm256_loadu_si256(p.add(stride).cast()));
        _mm512_permutex2var_epi32(a, TURNS.load(), b)
    }
}

/// Four bytes of 32, a qword each, to places in it.
const fn four_bytes_at(places: [usize; 4]) -> Bytes {
    let mut from = [0; 64];
    let mut i = 0;
    while i < 32 {
        from[8 * (i / 4) + places[i % 4]] = i as u8;
        i += 1;
    }
    Bytes(from)
}

/// Bytes of 32 at `p`, by a permutation.
#[inline(always)]
unsafe fn spread(p: *const u8, from: &Bytes) -> __m512i {
    unsafe { _mm512_permutexvar_epi8(from.load(), _mm512_castsi256_si512(_mm256_loadu_si256(p.cast()))) }
}

/// Eight words of 16 bits, each four times.
#[inline(always)]
unsafe fn four_times(p: *const u8) -> __m512i {
    const WORDS: [u8; 16] = [0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3];
    static PAIRS: Bytes = {
        let mut bytes = [0; 64];
        let mut i = 0;
        while i < 64 {
            bytes[i] = WORDS[i % 16] + 4 * (i as u8 / 16);
            i += 1;
        }
        Bytes(bytes)
    };
    unsafe { _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(p.cast())), PAIRS.load()) }
}

/// Scales of nibbles, a byte a chunk: low for its first 16 elements.
#[inline(always)]
unsafe fn nibble_scales(p: *const u8) -> __m512 {
    static NIBBLES: Bytes = qwords([0, 0, 0, 0, 4, 0, 0, 0]);
    unsafe {
        let bytes = _mm512_cvtepu8_epi64(_mm_cvtsi64_si128(read(p)));
        EIGHTHS.at(_mm512_multishift_epi64_epi8(NIBBLES.load(), bytes))
    }
}

/// A half float in all lanes.
#[inline(always)]
unsafe fn half_everywhere(p: *const u8) -> __m512 {
    unsafe { _mm512_cvtph_ps(_mm256_set1_epi16(p.cast::<i16>().read_unaligned())) }
}

/// The products of four vectors, in two chains: half the latency, so that more units are under way at once.
#[inline(always)]
unsafe fn dot(start: __m512i, codes: [__m512i; 4], a: [__m512i; 4]) -> __m512i {
    unsafe {
        let first = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(start, codes[0], a[0]), codes[1], a[1]);
        let second = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes[2], a[2]);
        _mm512_add_epi32(first, _mm512_dpbusd_epi32(second, codes[3], a[3]))
    }
}

/// Adds the products of block `b` of a unit, whose four vectors of codes share `scales`.
#[inline(always)]
unsafe fn add_block<F: WideFormat, const T: usize>(
    b: usize,
    codes: [__m512i; 4],
    scales: __m512,
    x: &[Unit; T],
    acc: &mut [Acc; T],
) {
    unsafe {
        for t in 0..T {
            let mut a = codes;
            for v in 0..4 {
                a[v] = x[t].codes(4 * b + v);
            }
            let sum = dot(x[t].fix::<F>(b), codes, a);
            add(&mut acc[t], b, sum, _mm512_mul_ps(scales, x[t].steps::<F>(b)));
        }
    }
}

/// Bytes 2, 3, 5 and 6, which [`signs`] brings to the bits of [`PLACES`]: a word's sign indices; in bytes 0 and 4 its scale comes
/// first.
static SIGNS_AND_SCALE_ABOVE: Bytes = qwords([60, 0, 32, 39, 60, 46, 53, 0]);

/// Signs and scales of words of four 7-bit sign indices and a 4-bit scale, of which each qword has one.
#[inline(always)]
unsafe fn signs_and_scales(words: __m512i, fields: &Bytes, table: &Floats) -> (__m512i, __m512) {
    unsafe {
        let fields = _mm512_multishift_epi64_epi8(fields.load(), words);
        (signs(fields, &SEVEN_AND_PARITY), table.at(fields))
    }
}

static EIGHTHS: Floats = odd(0.125, 4);

impl WideFormat for IQ2_XXS {
    const UNIT: usize = 512;
    const QUADS: &'static [[u8; 16]] = &by_chunk();
    const SUMS: usize = 2;
    const LANES: bool = true;

    #[inline(always)]
    unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) {
        unsafe {
            // A qword a chunk: four indices, then their signs and the scale.
            let q = [_mm512_loadu_si512(w.add(2).cast()), _mm512_loadu_si512(w.add(68).cast())];
            let low = even_dwords(q);
            let rows = rows(&IQ2_XXS_PLANES, Index { low, high: [0; 3] });
            for b in 0..2 {
                let (signs, scales) = signs_and_scales(q[b], &SIGNS_AND_SCALE_ABOVE, &EIGHTHS);
                let scales = _mm512_mul_ps(scales, half_everywhere(w.add(66 * b)));
                let codes = codes_by_chunk::<2>([rows[b]; 4], &ROWS_OF_8, signs, &SIGNED_2_BY_PLACES);
                add_block::<Self, T>(b, codes, scales, x, acc);
            }
        }
    }
}

impl WideFormat for IQ2_XS {
    const UNIT: usize = 512;
    const QUADS: &'static [[u8; 16]] = &by_group();
    const SUMS: usize = 2;
    const LANES: bool = true;

    #[inline(always)]
    unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) {
        /// Even bytes of the two blocks, eight of each in turn.
        static EVEN: Bytes = {
            let mut bytes = [0; 64];
            let mut i = 0;
            while i < 64 {
                bytes[i] = (64 * (i / 8 % 2) + 16 * (i / 16) + 2 * (i % 8)) as u8;
                i += 1;
            }
            Bytes(bytes)
        };
        static ODD: Bytes = {
            let mut bytes = EVEN.0;
            let mut i = 0;
            while i < 64 {
                bytes[i] += 1;
                i += 1;
            }
            Bytes(bytes)
        };
        static SIGNS: Bytes = qwords([0, 0, 9, 25, 41, 57, 0, 0]);
        unsafe {
            // A qword a chunk: four words of a 9-bit index and seven signs.
            let q = [_mm512_loadu_si512(w.add(2).cast()), _mm512_loadu_si512(w.add(76).cast())];
            let low = _mm512_permutex2var_epi8(q[0], EVEN.load(), q[1]);
            let high = _mm512_permutex2var_epi8(q[0], ODD.load(), q[1]);
            let ninth = _mm512_test_epi8_mask(high, _mm512_set1_epi8(1));
            let rows = rows(&IQ2_XS_PLANES, Index { low, high: [ninth, 0, 0] });
            for b in 0..2 {
                let w = w.add(74 * b);
                let bytes = _mm512_multishift_epi64_epi8(SIGNS.load(), q[b]);
                let scales = _mm512_mul_ps(nibble_scales(w.add(66)), half_everywhere(w));
                let codes = codes_by_group(rows[b], bytes, &HIGH_HALVES_PARITY);
                add_block::<Self, T>(b, codes, scales, x, acc);
            }
        }
    }
}

impl WideFormat for IQ2_S {
    const UNIT: usize = 512;
    const QUADS: &'static [[u8; 16]] = &by_group();
    const SUMS: usize = 2;
    const LANES: bool = true;

    #[inline(always)]
    unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) {
        static BY_GROUP: Bytes = four_bytes_at([2, 3, 4, 5]);
        static HIGH: Bytes = qwords([0, 2, 4, 6, 8, 10, 12, 14]);
        unsafe {
            // Bits 8 and 9 of a chunk's four indices are a byte: two of each block in turn.
            let high = |b: usize| _mm_cvtsi64_si128(read(w.add(66 + 82 * b)));
            let high = _mm512_cvtepu16_epi64(_mm_unpacklo_epi16(high(0), high(1)));
            let high = _mm512_multishift_epi64_epi8(HIGH.load(), high);
            let bit = |i: i8| _mm512_test_epi8_mask(high, _mm512_set1_epi8(i));
            let index = Index { low: interleaved(w.add(2), 82), high: [bit(1), bit(2), 0] };
            let rows = rows(&IQ2_S_PLANES, index);
            for b in 0..2 {
                let w = w.add(82 * b);
                let scales = _mm512_mul_ps(nibble_scales(w.add(74)), half_everywhere(w));
                let codes = codes_by_group(rows[b], spread(w.add(34), &BY_GROUP), &HIGH_HALVES);
                add_block::<Self, T>(b, codes, scales, x, acc);
            }
        }
    }
}

/// A chunk's eight indices in each qword of a pair: first halves of both, then second ones.
#[inline(always)]
unsafe fn halves(indices: __m512i) -> __m512i {
    unsafe { _mm512_shuffle_epi32::<0xd8>(indices) }
}

impl WideFormat for IQ3_XXS {
    const UNIT: usize = 256;
    const QUADS: &'static [[u8; 16]] = &by_chunk_of_one();
    const SUMS: usize = 1;
    const LANES: bool = true;

    #[inline(always)]
    unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) {
        static SIGNS_AND_SCALE: Bytes = qwords([28, 32, 0, 7, 28, 14, 21, 32]);
        static QUARTERS: Floats = odd(0.25, 4);
        unsafe {
            let index = Index { low: halves(_mm512_loadu_si512(w.add(2).cast())), high: [0; 3] };
            let [a, b] = rows(&IQ3_XXS_PLANES, index);
            let words = _mm512_cvtepu32_epi64(_mm256_loadu_si256(w.add(66).cast()));
            let (signs, scales) = signs_and_scales(words, &SIGNS_AND_SCALE, &QUARTERS);
            let scales = _mm512_mul_ps(scales, half_everywhere(w));
            let codes = codes_by_chunk::<3>([a, a, b, b], &ROWS_OF_4, signs, &SIGNED_3_XXS);
            add_block::<Self, T>(0, codes, scales, x, acc);
        }
    }
}

impl WideFormat for IQ3_S {
    const UNIT: usize = 256;
    const QUADS: &'static [[u8; 16]] = &by_chunk_of_one();
    const SUMS: usize = 1;
    const LANES: bool = true;

    #[inline(always)]
    unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) {
        static BY_CHUNK: Bytes = four_bytes_at([2, 3, 5, 6]);
        static ONES: Floats = odd(1.0, 4);
        unsafe {
            // The ninth bits, four at a time in the order of `halves`.
            let bits: u64 = read(w.add(66));
            let swapped = (bits ^ bits >> 4) & 0x00f0_00f0_00f0_00f0;
            let bits = bits ^ swapped ^ swapped << 4;
            let index = Index { low: halves(_mm512_loadu_si512(w.add(2).cast())), high: [bits, 0, 0] };
            let [a, b] = rows(&IQ3_S_PLANES, index);
            let signs = signs(spread(w.add(74), &BY_CHUNK), &BITS);
            // Nibble c comes to the bottom of both dwords of chunk c.
            let nibbles = _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28);
            let scales = ONES.at(_mm512_srlv_epi32(_mm512_set1_epi32(read(w.add(106))), nibbles));
            let scales = _mm512_mul_ps(scales, half_everywhere(w));
            let codes = codes_by_chunk::<3>([a, a, b, b], &ROWS_OF_4, signs, &SIGNED_3_S);
            add_block::<Self, T>(0, codes, scales, x, acc);
        }
    }
}

/// Codes of IQ1 are 8 (grid + 1) + 1 + delta: the field at bits 3 and 4, then 2 where delta is 1.
const IQ1_OFFSET: u8 = 9;

/// 2 in each byte where the bit at `at` of its qword is clear.
#[inline(always)]
unsafe fn deltas(words: __m512i, at: &Bytes) -> __m512i {
    unsafe { _mm512_andnot_si512(_mm512_multishift_epi64_epi8(at.load(), words), _mm512_set1_epi8(2)) }
}

/// The rows of two blocks of IQ1, from low index bytes and vectors that have three high bits at `shift` in each byte.
#[inline(always)]
unsafe fn ternary_rows<const SHIFT: u32>(low: __m512i, fields: [__m512i; 2]) -> [__m512i; 2] {
    unsafe {
        let high = even_dwords(fields);
        let bit = |i: u32| _mm512_test_epi8_mask(high, _mm512_set1_epi8(1 << (i + SHIFT)));
        let index = Index { low, high: [bit(0), bit(1), bit(2)] };
        rows_ascending::<SHIFT>(&IQ1_PLANES, &IQ1_STEPS, index, high)
    }
}

/// The codes of a block of IQ1.
#[inline(always)]
unsafe fn ternary_codes(rows: __m512i, fields: &[Bytes; 4], deltas: [__m512i; 4]) -> [__m512i; 4] {
    unsafe {
        let mut codes = deltas;
        for v in 0..4 {
            codes[v] = and_or(_mm512_multishift_epi64_epi8(fields[v].load(), rows), 0x18, deltas[v]);
        }
        codes
    }
}

/// Scales of three bits, an eighth for the codes.
static THREE_BITS: Floats = odd(0.125, 3);

impl WideFormat for IQ1_S {
    const UNIT: usize = 512;
    const QUADS: &'static [[u8; 16]] = &by_chunk();
    const SUMS: usize = 2;
    const OFFSET: u8 = IQ1_OFFSET;
    const LANES: bool = true;

    #[inline(always)]
    unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) {
        /// Index bits at 4 to 6 of each byte; the scale at the bottom of bytes 0 and 4.
        static INDEX_AND_SCALE: Bytes = qwords([12, 15, 18, 21, 12, 15, 18, 21]);
        static DELTA: Bytes = qwords([14; 8]);
        unsafe {
            // A word a chunk: four times three index bits, a 3-bit scale, a sign.
            let words = [four_times(w.add(34)), four_times(w.add(84))];
            let fields = words.map(|word| _mm512_multishift_epi64_epi8(INDEX_AND_SCALE.load(), word));
            let rows = ternary_rows::<4>(interleaved(w.add(2), 50), fields);
            for b in 0..2 {
                let scales = _mm512_mul_ps(THREE_BITS.at(fields[b]), half_everywhere(w.add(50 * b)));
                let delta = deltas(words[b], &DELTA);
                let codes = ternary_codes(rows[b], &ROWS_OF_8_UP, [delta; 4]);
                add_block::<Self, T>(b, codes, scales, x, acc);
            }
        }
    }
}

impl WideFormat for IQ1_M {
    const UNIT: usize = 512;
    const QUADS: &'static [[u8; 16]] = &by_group();
    const SUMS: usize = 2;
    const OFFSET: u8 = IQ1_OFFSET;
    const LANES: bool = true;

    #[inline(always)]
    unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]) {
        static INDEX: Bytes = qwords([0, 4, 8, 12, 0, 4, 8, 12]);
        static DELTAS: [Bytes; 2] = [qwords([2, 2, 2, 2, 10, 10, 10, 10]), qwords([6, 6, 6, 6, 14, 14, 14, 14])];
        /// Field g of the four words, at the bottom of dword g.
        static SCALES: Bytes = {
            let mut at = [0; 64];
            let mut g = 0;
            while g < 16 {
                at[4 * g] = (16 * (g / 4) + 3 * (g % 4)) as u8;
                g += 1;
            }
            Bytes(at)
        };
        unsafe {
            // A nibble a row: three index bits and a sign; a word a chunk.
            let words = [four_times(w.add(32)), four_times(w.add(88))];
            let fields = words.map(|word| _mm512_multishift_epi64_epi8(INDEX.load(), word));
            let rows = ternary_rows::<0>(interleaved(w, 56), fields);
            for b in 0..2 {
                let packed: u64 = read(w.add(48 + 56 * b));
                let d = _mm_cvtsi32_si128(_pext_u64(packed, 0xf000_f000_f000_f000) as i32);
                let d = _mm512_broadcastss_ps(_mm_cvtph_ps(d));
                let scales = _mm512_multishift_epi64_epi8(SCALES.load(), _mm512_set1_epi64(packed as i64));
                let scales = _mm512_mul_ps(THREE_BITS.at(scales), d);
                let (first, second) = (deltas(words[b], &DELTAS[0]), deltas(words[b], &DELTAS[1]));
                let codes = ternary_codes(rows[b], &HALVES_OF_8_UP, [first, first, second, second]);
                add_block::<Self, T>(b, codes, scales, x, acc);
            }
        }
    }
}

#[cfg(test)]
mod tests;
