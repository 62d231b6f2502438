//! IQ2_XS: 256 elements in 74 bytes: f16 d, 32 words of a 9-bit grid index and a 7-bit sign index, 8 bytes of scales.
//! `value = d * (2 scale + 1) / 8 * sign * grid` per group of 16; the product of d and the scale is exact.

use hanzo_gguf::Format;
use hanzo_gguf::formats::tables::IQ2_XS_GRID;

use super::{Ahead, Codes, CpuFormat, Scales, half_at, nibble_bytes, scale_u8};
use crate::cpu::isa::{Isa, read};

/// Signed grid codes, sixteen scales.
#[allow(non_camel_case_types)]
pub(crate) struct IQ2_XS;

impl CpuFormat for IQ2_XS {
    const FORMAT: Format = Format::IQ2_XS;
    const GROUP: usize = 16;
    const CODES: Codes = Codes::Signed;
    const ROWS: usize = 2;

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            let d = half_at::<I>(block) * 0.125;
            for half in 0..2 {
                let odd = nibble_bytes(read(block.add(66 + 4 * half))) * 2 + 0x0101_0101_0101_0101;
                scale_u8::<I>(d, odd, s.0[8 * half..].as_mut_ptr());
            }
        }
    }

    #[inline(always)]
    unsafe fn look_ahead<I: Isa>(block: *const u8, ahead: &mut Ahead) {
        unsafe {
            let signs = I::with_parity(I::high_sevens(block.add(2)));
            I::spill(ahead.signs.as_mut_ptr().cast(), signs);
        }
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, chunk: usize, ahead: &Ahead) -> I::B {
        unsafe {
            let row = |i: usize| IQ2_XS_GRID[usize::from(read::<u16>(block.add(2 + 8 * chunk + 2 * i)) & 511)];
            let grid = I::from4([row(0), row(1), row(2), row(3)]);
            I::signed(I::negate_at(grid, ahead.signs[chunk]))
        }
    }
}
