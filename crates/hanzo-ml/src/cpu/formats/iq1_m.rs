//! IQ1_M: 256 elements in 56 bytes: 32 low index bytes, 16 bytes of nibbles (3 high index bits and a sign for each 8
//! elements), then four words of four 3-bit scales each, whose top nibbles together are the f16 d.
//! `value = d * (2 scale + 1) * (grid +- 1/8)` per group of 16: codes are eight times the bracket.

use hanzo_gguf::Format;

use super::iq1_s::IQ1_GRID_8;
use super::{Ahead, Codes, CpuFormat, Scales, rows_of_8, scale_u8, three_bit_bytes};
use crate::cpu::isa::{Isa, read};

/// Codes 8 grid +- 1, sixteen scales.
#[allow(non_camel_case_types)]
pub(crate) struct IQ1_M;

impl CpuFormat for IQ1_M {
    const FORMAT: Format = Format::IQ1_M;
    const GROUP: usize = 16;
    const CODES: Codes = Codes::Signed;
    const ROWS: usize = 2;

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            // The top nibbles of the four words.
            let words: u64 = read(block.add(48));
            let d = words >> 12 & 0xf | words >> 24 & 0xf0 | words >> 36 & 0xf00 | words >> 48 & 0xf000;
            let d = I::f16(d as u16) * 0.125;
            for half in 0..2 {
                let odd = three_bit_bytes((words >> (32 * half)) as u32) * 2 + 0x0101_0101_0101_0101;
                scale_u8::<I>(d, odd, s.0[8 * half..].as_mut_ptr());
            }
        }
    }

    #[inline(always)]
    unsafe fn look_ahead<I: Isa>(block: *const u8, ahead: &mut Ahead) {
        unsafe {
            let nibbles = I::nibble_pairs(block.add(32));
            I::spill_pairs(ahead.index.as_mut_ptr(), I::load(block), I::field::<0, 7>(nibbles));
            // A byte for each 8 elements: +1, or -1 where the nibble's top bit is set.
            let delta = I::sub(I::splat(1), I::field::<2, 2>(nibbles));
            I::spill(ahead.signs.as_mut_ptr().cast(), I::signed(delta));
        }
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(_: *const u8, chunk: usize, ahead: &Ahead) -> I::B {
        unsafe {
            // Signed form is an offset, so the sum of one operand in it and a plain one is in it too.
            I::add(rows_of_8::<I, 2048>(&IQ1_GRID_8, ahead, chunk), I::eights(ahead.signs[chunk]))
        }
    }
}
