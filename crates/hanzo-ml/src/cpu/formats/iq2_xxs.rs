//! IQ2_XXS: 256 elements in 66 bytes: f16 d, then per chunk four grid indices and a word of four 7-bit sign indices
//! and a 4-bit scale. `value = d * (2 scale + 1) / 8 * sign * grid`; the product of d and the scale is exact.

use hanzo_gguf::Format;
use hanzo_gguf::formats::tables::IQ2_XXS_GRID;

use super::{Ahead, Codes, CpuFormat, Scales, half_at};
use crate::cpu::isa::{Isa, read};

/// Signed grid codes, eight scales.
#[allow(non_camel_case_types)]
pub(crate) struct IQ2_XXS;

impl CpuFormat for IQ2_XXS {
    const FORMAT: Format = Format::IQ2_XXS;
    const GROUP: usize = 32;
    const CODES: Codes = Codes::Signed;
    const ROWS: usize = 2;

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            let d = half_at::<I>(block) * 0.125;
            for c in 0..8 {
                s.0[c] = d * (2 * (read::<u32>(block.add(6 + 8 * c)) >> 28) + 1) as f32;
            }
        }
    }

    #[inline(always)]
    unsafe fn look_ahead<I: Isa>(block: *const u8, ahead: &mut Ahead) {
        unsafe {
            let signs = I::with_parity(I::sevens(I::odd_words(block.add(2))));
            I::spill(ahead.signs.as_mut_ptr().cast(), signs);
        }
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, chunk: usize, ahead: &Ahead) -> I::B {
        unsafe {
            let row = |i: usize| IQ2_XXS_GRID[usize::from(*block.add(2 + 8 * chunk + i))];
            let grid = I::from4([row(0), row(1), row(2), row(3)]);
            I::signed(I::negate_at(grid, ahead.signs[chunk]))
        }
    }
}
