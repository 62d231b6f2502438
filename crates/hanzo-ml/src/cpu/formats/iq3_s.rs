//! IQ3_S: 256 elements in 110 bytes: f16 d, 64 low index bytes, 8 bytes of ninth index bits, 32 sign bytes, 4 of scales.
//! `value = d * (2 scale + 1) * sign * grid`.

use hanzo_gguf::Format;
use hanzo_gguf::formats::tables::IQ3_S_GRID;

use super::{Ahead, Codes, CpuFormat, Scales, half_at, nibble_bytes, rows_of_4, scale_u8};
use crate::cpu::isa::{Isa, read};

/// Signed grid codes, eight scales.
#[allow(non_camel_case_types)]
pub(crate) struct IQ3_S;

impl CpuFormat for IQ3_S {
    const FORMAT: Format = Format::IQ3_S;
    const GROUP: usize = 32;
    const CODES: Codes = Codes::Signed;
    const ROWS: usize = 2;

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            let odd = nibble_bytes(read(block.add(106))) * 2 + 0x0101_0101_0101_0101;
            scale_u8::<I>(half_at::<I>(block), odd, s.0.as_mut_ptr());
        }
    }

    #[inline(always)]
    unsafe fn look_ahead<I: Isa>(block: *const u8, ahead: &mut Ahead) {
        unsafe {
            for half in 0..2 {
                let high = I::add_at(I::splat(0), read(block.add(66 + 4 * half)), 1);
                I::spill_pairs(ahead.index[32 * half..].as_mut_ptr(), I::load(block.add(2 + 32 * half)), high);
            }
        }
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, chunk: usize, ahead: &Ahead) -> I::B {
        unsafe {
            let grid = rows_of_4::<I, 512>(&IQ3_S_GRID, ahead, chunk);
            I::signed(I::negate_at(grid, read(block.add(74 + 4 * chunk))))
        }
    }
}
