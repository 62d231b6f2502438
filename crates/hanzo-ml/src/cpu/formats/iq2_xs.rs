//! IQ2_XS: 256 elements in 74 bytes: f16 d, 32 words of a 9-bit grid index and a 7-bit sign index, 8 bytes of scales.
//! `value = d * (2 scale + 1) / 8 * sign * grid` per group of 16; the product of d and the scale is exact.

use hanzo_gguf::Format;
use hanzo_gguf::formats::tables::IQ2_XS_GRID;

use super::{Codes, CpuFormat, Scales, half_at, nibble_bytes, scale_u8, signs7};
use crate::cpu::isa::{Isa, read};

/// Signed grid codes, sixteen scales.
#[allow(non_camel_case_types)]
pub(crate) struct IQ2_XS;

impl CpuFormat for IQ2_XS {
    const FORMAT: Format = Format::IQ2_XS;
    const GROUP: usize = 16;
    const CODES: Codes = Codes::Signed;

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            let d = half_at::<I>(block) * 0.125;
            for half in 0..2 {
                let odd = nibble_bytes(read(block.add(66 + 4 * half))) * 2 + 0x0101_0101_0101_0101;
                scale_u8::<I>(d, odd, s[8 * half..].as_mut_ptr());
            }
        }
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, chunk: usize) -> I::B {
        unsafe {
            let q: u64 = read(block.add(2 + 8 * chunk));
            let row = |i: u32| IQ2_XS_GRID[(q >> (16 * i) & 511) as usize];
            let grid = I::from4([row(0), row(1), row(2), row(3)]);
            // The four sign indices, each to seven bits of its own byte of the 28-bit form.
            let x = q >> 9 & 0x007f_007f_007f_007f;
            let x = (x | x >> 9) & 0x0000_3fff_0000_3fff;
            I::signed(I::negate_at(grid, signs7((x | x >> 18) as u32 & 0x0fff_ffff)))
        }
    }
}
