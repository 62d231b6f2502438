//! IQ2_S: 256 elements in 82 bytes: f16 d, 32 low index bytes, 32 sign bytes, 8 bytes of high index bits, 8 of scales.
//! `value = d * (2 scale + 1) / 8 * sign * grid` per group of 16; the product of d and the scale is exact.

use hanzo_gguf::Format;
use hanzo_gguf::formats::tables::IQ2_S_GRID;

use super::{Ahead, Codes, CpuFormat, Scales, half_at, nibble_bytes, rows_of_8, scale_u8};
use crate::cpu::isa::{Isa, read};

/// Signed grid codes, sixteen scales.
#[allow(non_camel_case_types)]
pub(crate) struct IQ2_S;

impl CpuFormat for IQ2_S {
    const FORMAT: Format = Format::IQ2_S;
    const GROUP: usize = 16;
    const CODES: Codes = Codes::Signed;
    const ROWS: usize = 2;

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            let d = half_at::<I>(block) * 0.125;
            for half in 0..2 {
                let odd = nibble_bytes(read(block.add(74 + 4 * half))) * 2 + 0x0101_0101_0101_0101;
                scale_u8::<I>(d, odd, s.0[8 * half..].as_mut_ptr());
            }
        }
    }

    #[inline(always)]
    unsafe fn look_ahead<I: Isa>(block: *const u8, ahead: &mut Ahead) {
        unsafe {
            I::spill_pairs(ahead.index.as_mut_ptr(), I::load(block.add(2)), I::crumbs(block.add(66)));
        }
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, chunk: usize, ahead: &Ahead) -> I::B {
        unsafe {
            let grid = rows_of_8::<I, 1024>(&IQ2_S_GRID, ahead, chunk);
            I::signed(I::negate_at(grid, read(block.add(34 + 4 * chunk))))
        }
    }
}
