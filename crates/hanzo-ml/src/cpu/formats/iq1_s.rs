//! IQ1_S: 256 elements in 50 bytes: f16 d, 32 low index bytes, then per chunk a word of four 3-bit high index parts, a
//! 3-bit scale and a sign. `value = d * (2 scale + 1) * (grid +- 1/8)`: codes are eight times the bracket.

use hanzo_gguf::Format;
use hanzo_gguf::formats::tables::IQ1_S_GRID;

use super::{Ahead, Codes, CpuFormat, Scales, half_at, rows_of_8};
use crate::cpu::isa::{Isa, read};

/// The codebook of IQ1_S and IQ1_M times eight.
pub(super) static IQ1_GRID_8: [u64; 2048] = {
    let mut table = [0; 2048];
    let mut i = 0;
    while i < 2048 {
        // Bytes are -1, 0 or 1: shifted by three, without what comes from the byte below.
        table[i] = IQ1_S_GRID[i] << 3 & 0xf8f8_f8f8_f8f8_f8f8;
        i += 1;
    }
    table
};

/// Codes 8 grid +- 1, eight scales.
#[allow(non_camel_case_types)]
pub(crate) struct IQ1_S;

impl CpuFormat for IQ1_S {
    const FORMAT: Format = Format::IQ1_S;
    const GROUP: usize = 32;
    const CODES: Codes = Codes::Signed;
    const ROWS: usize = 2;

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            let d = half_at::<I>(block) * 0.125;
            for c in 0..8 {
                let word = u32::from(read::<u16>(block.add(34 + 2 * c)));
                s.0[c] = d * (word >> 11 & 14 | 1) as f32;
            }
        }
    }

    #[inline(always)]
    unsafe fn look_ahead<I: Isa>(block: *const u8, ahead: &mut Ahead) {
        unsafe {
            I::spill_pairs(ahead.index.as_mut_ptr(), I::load(block.add(2)), I::threes(block.add(34)));
            // Per chunk +1, or -1 where the top bit of the word is set.
            let delta = I::or(I::top_bits(block.add(34)), I::splat(1));
            I::spill(ahead.signs.as_mut_ptr().cast(), I::signed(delta));
        }
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(_: *const u8, chunk: usize, ahead: &Ahead) -> I::B {
        unsafe {
            // Signed form is an offset, so the sum of one operand in it and a plain one is in it too.
            I::add(rows_of_8::<I, 2048>(&IQ1_GRID_8, ahead, chunk), I::splat4(ahead.signs[chunk]))
        }
    }
}
