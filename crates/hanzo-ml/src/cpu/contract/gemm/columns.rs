//! Unpacking of weight tiles by columns, where an instruction set has it: AVX-512, for formats whose codes are made byte by
//! byte ([`CpuFormat::bytes`]).
//!
//! The blocks of 16 rows are transposed as they are, four bytes at a time, so that a vector has the same four bytes of
//! every row; codes made of it are in the dot product's order, 64 at a time. Scales are made a row at a time and
//! transposed likewise. Results are those of unpacking by rows, byte for byte; tests compare them.

use super::{MOST_ROWS, Tile};
use crate::cpu::formats::CpuFormat;
use crate::cpu::isa::Isa;

/// Instruction sets, as GEMM tiles unpack by columns on them.
pub(in crate::cpu::contract) trait Columns: Isa {
    /// Unpacks block `b` of a panel, whose rows' blocks are at `rows` (as many as the panel has rows), if this instruction
    /// set can; else says so. The format has [`CpuFormat::STRETCHES`].
    ///
    /// # Safety
    /// Rows are readable for a block and `tile` is a panel with room for block `b`, on a CPU with the features.
    #[inline(always)]
    unsafe fn unpack<F: CpuFormat>(_rows: &[*const u8; MOST_ROWS], _b: usize, _tile: &Tile<Self>) -> bool {
        false
    }
}

impl Columns for crate::cpu::isa::Portable {}
#[cfg(target_arch = "x86_64")]
impl Columns for crate::cpu::isa::Avx2 {}
#[cfg(target_arch = "aarch64")]
impl Columns for crate::cpu::isa::Neon {}
#[cfg(target_arch = "aarch64")]
impl Columns for crate::cpu::isa::I8mm {}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use super::super::{Form, Tile};
    use super::Columns;
    use crate::cpu::formats::{Bytes, CpuFormat, Scales, Shape};
    use crate::cpu::isa::{Avx512, Isa};

    /// Bytes of a block, at most.
    const MOST_BYTES: usize = 256;

    /// The words of 16 blocks: the one at place `at` of the blocks is the vector at byte `16 * at`.
    #[repr(align(64))]
    struct Words {
        _bytes: [u8; 16 * MOST_BYTES],
    }

    /// Sixteen rows of sixteen words.
    #[repr(align(64))]
    struct Square([[u32; 16]; 16]);

    impl Columns for Avx512 {
        #[inline(always)]
        unsafe fn unpack<F: CpuFormat>(rows: &[*const u8; 16], b: usize, tile: &Tile<Self>) -> bool {
            const { assert!(F::STRETCHES.is_empty() || (F::CHUNKS == 8 && F::BYTES <= MOST_BYTES)) };
            unsafe {
                scales::<F>(rows, b, tile);
                let mut words = std::mem::MaybeUninit::<Words>::uninit();
                let words = words.as_mut_ptr().cast::<u8>();
                for &at in F::STRETCHES {
                    transpose(rows.map(|row| row.add(at)), words.add(16 * at));
                }
                let out = tile.codes.add(b * 256 * Avx512::NR);
                if <F as Form<Avx512>>::PRODUCTS {
                    let factors = factors::<F>(rows);
                    for_each_chunk!(8, chunk, {
                        for half in 0..2 {
                            let factors = factors.0[2 * chunk + half].as_ptr();
                            let product = Product::new::<F>(_mm512_load_si512(factors.cast()));
                            for step in 4 * half..4 * half + 4 {
                                let codes = product.of(F::bytes(Column { words, step }, chunk));
                                _mm512_storeu_si512(out.add(64 * (8 * chunk + step)).cast(), codes);
                            }
                        }
                    });
                } else {
                    for_each_chunk!(8, chunk, {
                        for step in 0..8 {
                            let codes = F::bytes(Column { words, step }, chunk);
                            _mm512_storeu_si512(out.add(64 * (8 * chunk + step)).cast(), codes);
                        }
                    });
                }
            }
            true
        }
    }

    /// Scales and minima of block `b`.
    #[inline(always)]
    unsafe fn scales<F: CpuFormat>(rows: &[*const u8; 16], b: usize, tile: &Tile<Avx512>) {
        let groups = 256 / F::GROUP;
        let (mut s, mut m) = ([Scales::NONE; 16], [Scales::NONE; 16]);
        unsafe {
            if F::HAS_MIN || !<F as Form<Avx512>>::PRODUCTS {
                for r in 0..16 {
                    let (mut row_s, mut row_m) = (Scales::NONE, Scales::NONE);
                    F::scales::<Avx512>(rows[r], &mut row_s, &mut row_m);
                    if groups == 8 && F::HAS_MIN {
                        // Both fit one row of the square.
                        row_s.0[8..].copy_from_slice(&row_m.0[..8]);
                    } else if F::HAS_MIN {
                        m[r] = row_m;
                    }
                    s[r] = row_s;
                }
            }
            let to = |p: *mut f32| p.add(b * groups * 16);
            let mut square = Square([[0; 16]; 16]);
            if !<F as Form<Avx512>>::PRODUCTS {
                transpose(s.each_ref().map(|row| row.0.as_ptr().cast()), square.0.as_mut_ptr().cast());
                let from = square.0.as_ptr().cast::<f32>();
                to(tile.scales).copy_from_nonoverlapping(from, groups * 16);
                if F::HAS_MIN && groups == 8 {
                    to(tile.minima).copy_from_nonoverlapping(from.add(8 * 16), 8 * 16);
                }
            } else {
                for r in 0..16 {
                    tile.scales.add(b * 16 + r).write(F::factors::<Avx512>(rows[r]).0);
                }
            }
            if F::HAS_MIN && groups == 16 {
                transpose(m.each_ref().map(|row| row.0.as_ptr().cast()), square.0.as_mut_ptr().cast());
                to(tile.minima).copy_from_nonoverlapping(square.0.as_ptr().cast(), 16 * 16);
            }
        }
    }

    /// The factors of 16 groups: in each 16-bit half of a row's word.
    #[inline(always)]
    unsafe fn factors<F: CpuFormat>(rows: &[*const u8; 16]) -> Square {
        let (mut of_rows, mut of_groups) = (Square([[0; 16]; 16]), Square([[0; 16]; 16]));
        unsafe {
            for r in 0..16 {
                let factors = F::factors::<Avx512>(rows[r]).1;
                for g in 0..16 {
                    of_rows.0[r][g] = u32::from(factors[g] as u8) * 0x1_0001;
                }
            }
            transpose(of_rows.0.each_ref().map(|row| row.as_ptr().cast()), of_groups.0.as_mut_ptr().cast());
        }
        of_groups
    }

    /// Multiplies codes by a factor a row.
    #[derive(Clone, Copy)]
    struct Product {
        factors: __m512i,
        /// What is added afterwards, in each byte.
        add: __m512i,
    }

    impl Product {
        #[inline(always)]
        unsafe fn new<F: CpuFormat>(factors: __m512i) -> Product {
            unsafe {
                let taken = _mm512_set1_epi16(i16::from(<F as Form<Avx512>>::TAKEN));
                let offset = _mm512_set1_epi16(i16::from(F::OFFSET));
                let add = _mm512_sub_epi16(taken, _mm512_mullo_epi16(offset, factors));
                let low = _mm512_and_si512(add, _mm512_set1_epi16(0xff));
                Product { factors, add: _mm512_or_si512(low, _mm512_slli_epi16::<8>(low)) }
            }
        }

        #[inline(always)]
        unsafe fn of(self, codes: __m512i) -> __m512i {
            unsafe {
                let low = _mm512_set1_epi16(0xff);
                let even = _mm512_mullo_epi16(_mm512_and_si512(codes, low), self.factors);
                let odd = _mm512_mullo_epi16(_mm512_srli_epi16::<8>(codes), self.factors);
                let even = _mm512_and_si512(even, low);
                _mm512_add_epi8(_mm512_or_si512(even, _mm512_slli_epi16::<8>(odd)), self.add)
            }
        }
    }

    /// Step `step` (four codes of each of 16 rows) of a chunk.
    #[derive(Clone, Copy)]
    struct Column {
        words: *const u8,
        step: usize,
    }

    impl Column {
        #[inline(always)]
        unsafe fn word(self, at: usize) -> __m512i {
            unsafe { _mm512_loadu_si512(self.words.add(16 * at).cast()) }
        }
    }

    impl Bytes for Column {
        type B = __m512i;

        #[inline(always)]
        unsafe fn load(self, at: usize) -> __m512i {
            unsafe { self.word(at + 4 * self.step) }
        }

        #[inline(always)]
        unsafe fn nibbles(self, at: usize) -> __m512i {
            unsafe {
                let x = self.word(at + 4 * (self.step % 4));
                let x = if self.step < 4 { x } else { _mm512_srli_epi16::<4>(x) };
                _mm512_and_si512(x, _mm512_set1_epi8(15))
            }
        }

        #[inline(always)]
        unsafe fn field<const SHIFT: u32, const MASK: u8>(self, x: __m512i) -> __m512i {
            unsafe {
                let x = _mm512_srl_epi16(x, _mm_cvtsi32_si128(SHIFT as i32));
                _mm512_and_si512(x, _mm512_set1_epi8(MASK as i8))
            }
        }

        #[inline(always)]
        unsafe fn raise<const SHIFT: u32, const MASK: u8>(self, x: __m512i) -> __m512i {
            unsafe {
                let x = _mm512_and_si512(x, _mm512_set1_epi8(MASK as i8));
                _mm512_sll_epi16(x, _mm_cvtsi32_si128(SHIFT as i32))
            }
        }

        #[inline(always)]
        unsafe fn or(self, a: __m512i, b: __m512i) -> __m512i {
            unsafe { _mm512_or_si512(a, b) }
        }

        #[inline(always)]
        unsafe fn lookup_signed(self, table: &[i8; 16], index: __m512i) -> __m512i {
            unsafe {
                let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
                _mm512_shuffle_epi8(_mm512_xor_si512(table, _mm512_set1_epi8(-128)), index)
            }
        }
    }

    /// Transposes 16 words of each of 16 rows to `out`.
    #[inline(always)]
    unsafe fn transpose(rows: [*const u8; 16], out: *mut u8) {
        unsafe {
            let mut a = [_mm512_setzero_si512(); 16];
            for r in 0..16 {
                a[r] = _mm512_loadu_si512(rows[r].cast());
            }
            // Pairs of rows, then fours: in each lane of 128 bits, word w of four rows.
            let mut b = a;
            for r in 0..8 {
                b[2 * r] = _mm512_unpacklo_epi32(a[2 * r], a[2 * r + 1]);
                b[2 * r + 1] = _mm512_unpackhi_epi32(a[2 * r], a[2 * r + 1]);
            }
            // a[4 q + w]: word w of each lane, of rows 4 q..4 q + 4.
            for q in 0..4 {
                let of = |r: usize| b[4 * q + r];
                a[4 * q] = _mm512_unpacklo_epi64(of(0), of(2));
                a[4 * q + 1] = _mm512_unpackhi_epi64(of(0), of(2));
                a[4 * q + 2] = _mm512_unpacklo_epi64(of(1), of(3));
                a[4 * q + 3] = _mm512_unpackhi_epi64(of(1), of(3));
            }
            // Lanes: word w of lane l is word 4 l + w.
            for w in 0..4 {
                let even = _mm512_shuffle_i32x4::<0b10_00_10_00>(a[w], a[4 + w]);
                let odd = _mm512_shuffle_i32x4::<0b11_01_11_01>(a[w], a[4 + w]);
                let even_high = _mm512_shuffle_i32x4::<0b10_00_10_00>(a[8 + w], a[12 + w]);
                let odd_high = _mm512_shuffle_i32x4::<0b11_01_11_01>(a[8 + w], a[12 + w]);
                let out = |l: usize| out.add(64 * (4 * l + w)).cast();
                _mm512_storeu_si512(out(0), _mm512_shuffle_i32x4::<0b10_00_10_00>(even, even_high));
                _mm512_storeu_si512(out(2), _mm512_shuffle_i32x4::<0b11_01_11_01>(even, even_high));
                _mm512_storeu_si512(out(1), _mm512_shuffle_i32x4::<0b10_00_10_00>(odd, odd_high));
                _mm512_storeu_si512(out(3), _mm512_shuffle_i32x4::<0b11_01_11_01>(odd, odd_high));
            }
        }
    }
    #[cfg(test)]
    mod tests {
        use hanzo_gguf::Format;

        use super::super::super::unpack_rows;
        use super::*;
        use crate::cpu::formats::{self, for_each_cpu_format};
        use crate::cpu::isa::IsaLevel;
        use crate::oracle::random::{Rng, block};

        /// A panel of two blocks: codes, scales, minima.
        struct Panel([u8; 2 * 256 * 16], [f32; 2 * 256], [f32; 2 * 256]);

        impl Panel {
            fn new() -> Panel {
                Panel([0; 2 * 256 * 16], [0.0; 2 * 256], [0.0; 2 * 256])
            }

            fn tile(&mut self) -> Tile<Avx512> {
                let (scales, minima) = (self.1.as_mut_ptr(), self.2.as_mut_ptr());
                Tile { codes: self.0.as_mut_ptr(), scales, minima, slice: 512 }
            }
        }

        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
        fn compare<F: CpuFormat>() -> bool {
            if F::STRETCHES.is_empty() {
                return false;
            }
            let mut rng = Rng::new(7);
            let blocks: Vec<Vec<u8>> = (0..32).map(|_| block(F::FORMAT, &mut rng)).collect();
            let (mut by_columns, mut by_rows) = (Panel::new(), Panel::new());
            let mut unpacked = [0; 256 * 16];
            for b in 0..2 {
                let rows = std::array::from_fn(|r| blocks[16 * b + r].as_ptr());
                // SAFETY: the rows are blocks, the panels have room for two.
                unsafe {
                    assert!(Avx512::unpack::<F>(&rows, b, &by_columns.tile()));
                    unpack_rows::<Avx512, F>(&rows, b, &by_rows.tile(), unpacked.as_mut_ptr());
                }
            }
            assert!(by_columns.0 == by_rows.0, "{:?}: codes", F::FORMAT);
            assert_eq!(by_columns.1, by_rows.1, "{:?}: scales", F::FORMAT);
            assert_eq!(by_columns.2, by_rows.2, "{:?}: minima", F::FORMAT);
            true
        }

        #[test]
        fn unpacking_by_columns_gives_the_bytes_of_unpacking_by_rows() {
            if !IsaLevel::Avx512.is_available() {
                return;
            }
            let mut compared = Vec::<Format>::new();
            macro_rules! all {
                ($( $(#[$attr:meta])* $file:ident :: $format:ident, )*) => {
                    $( $(#[$attr])* {
                        // SAFETY: the level is available.
                        if unsafe { compare::<formats::$file::$format>() } {
                            compared.push(Format::$format);
                        }
                    } )*
                };
            }
            for_each_cpu_format!(all);
            use Format::*;
            assert_eq!(compared, [Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS, TQ2_0]);
        }
    }
}
