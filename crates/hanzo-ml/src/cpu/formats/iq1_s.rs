//! IQ1_S: 256 elements in 50 bytes: f16 d, 32 low index bytes, then per chunk a word of four 3-bit high index parts, a
//! 3-bit scale and a sign. `value = d * (2 scale + 1) * (grid +- 1/8)`: codes are eight times the bracket.

use hanzo_gguf::Format;
use hanzo_gguf::formats::tables::IQ1_S_GRID;

use super::{Codes, CpuFormat, Scales, half_at};
use crate::cpu::isa::{Isa, read};

/// Codes 8 grid +- 1, eight scales.
#[allow(non_camel_case_types)]
pub(crate) struct IQ1_S;

impl CpuFormat for IQ1_S {
    const FORMAT: Format = Format::IQ1_S;
    const GROUP: usize = 32;
    const CODES: Codes = Codes::Signed;

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            let d = half_at::<I>(block) * 0.125;
            for c in 0..8 {
                let word = u32::from(read::<u16>(block.add(34 + 2 * c)));
                s[c] = d * (word >> 11 & 14 | 1) as f32;
            }
        }
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, chunk: usize) -> I::B {
        unsafe {
            let low: [u8; 4] = read(block.add(2 + 4 * chunk));
            let word = usize::from(read::<u16>(block.add(34 + 2 * chunk)));
            let row = |i: usize| IQ1_S_GRID[usize::from(low[i]) | (word << 8 >> (3 * i) & 0x700)];
            let grid = I::from4([row(0), row(1), row(2), row(3)]);
            let delta = if word & 0x8000 == 0 { 1 } else { 0xff };
            I::signed(I::add(I::raise::<3, 0x1f>(grid), I::splat(delta)))
        }
    }
}
