//! IQ1_M: 256 elements in 56 bytes: 32 low index bytes, 16 bytes of nibbles (3 high index bits and a sign for each 8
//! elements), then four words of four 3-bit scales each, whose top nibbles together are the f16 d.
//! `value = d * (2 scale + 1) * (grid +- 1/8)` per group of 16: codes are eight times the bracket.

use hanzo_gguf::Format;
use hanzo_gguf::formats::tables::IQ1_S_GRID;

use super::{Codes, CpuFormat, Scales};
use crate::cpu::isa::{Isa, read};

/// Codes 8 grid +- 1, sixteen scales.
#[allow(non_camel_case_types)]
pub(crate) struct IQ1_M;

impl CpuFormat for IQ1_M {
    const FORMAT: Format = Format::IQ1_M;
    const GROUP: usize = 16;
    const CODES: Codes = Codes::Signed;

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            let words: [u16; 4] = read(block.add(48));
            let d = words[0] >> 12 | words[1] >> 8 & 0xf0 | words[2] >> 4 & 0xf00 | words[3] & 0xf000;
            let d = I::f16(d) * 0.125;
            for i in 0..16 {
                s[i] = d * f32::from((words[i / 4] >> (3 * (i % 4)) & 7) * 2 + 1);
            }
        }
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, chunk: usize) -> I::B {
        unsafe {
            let low: [u8; 4] = read(block.add(4 * chunk));
            let nibbles = usize::from(read::<u16>(block.add(32 + 2 * chunk)));
            let row = |i: usize| IQ1_S_GRID[usize::from(low[i]) | (nibbles << 8 >> (4 * i) & 0x700)];
            let grid = I::from4([row(0), row(1), row(2), row(3)]);
            // +1, or -1 where bit 3 of the nibble is set.
            let delta = |i: usize| 0x0101_0101_0101_0101 * if nibbles >> (4 * i) & 8 == 0 { 1 } else { 0xff };
            let delta = I::from4([delta(0), delta(1), delta(2), delta(3)]);
            I::signed(I::add(I::raise::<3, 0x1f>(grid), delta))
        }
    }
}
