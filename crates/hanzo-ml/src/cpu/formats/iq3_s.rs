//! IQ3_S: 256 elements in 110 bytes: f16 d, 64 low index bytes, 8 bytes of ninth index bits, 32 sign bytes, 4 of scales.
//! `value = d * (2 scale + 1) * sign * grid`.

use hanzo_gguf::Format;
use hanzo_gguf::formats::tables::IQ3_S_GRID;

use super::{Codes, CpuFormat, Scales, half_at, nibble_bytes, scale_u8};
use crate::cpu::isa::{Isa, read};

/// Signed grid codes, eight scales.
#[allow(non_camel_case_types)]
pub(crate) struct IQ3_S;

impl CpuFormat for IQ3_S {
    const FORMAT: Format = Format::IQ3_S;
    const GROUP: usize = 32;
    const CODES: Codes = Codes::Signed;

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            let odd = nibble_bytes(read(block.add(106))) * 2 + 0x0101_0101_0101_0101;
            scale_u8::<I>(half_at::<I>(block), odd, s.as_mut_ptr());
        }
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, chunk: usize) -> I::B {
        unsafe {
            let low: [u8; 8] = read(block.add(2 + 8 * chunk));
            let high = usize::from(*block.add(66 + chunk));
            let row = |i: usize| IQ3_S_GRID[usize::from(low[i]) | (high << (8 - i) & 0x100)];
            let grid = I::from8([row(0), row(1), row(2), row(3), row(4), row(5), row(6), row(7)]);
            I::signed(I::negate_at(grid, read(block.add(74 + 4 * chunk))))
        }
    }
}
