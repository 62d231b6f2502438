//! NVFP4: 64 elements in 36 bytes: four unsigned E4M3 scales, then 8 bytes of nibbles for each 16 elements.
//!
//! A group's first eight elements are the low nibbles. Table values are doubled, so scales are half the E4M3 value;
//! 0x7f reads as zero and the top bit is ignored.

use hanzo_gguf::Format;
use hanzo_gguf::formats::tables::KVALUES_FP4;

use super::{Ahead, Codes, CpuFormat, Scales};
use crate::cpu::isa::Isa;

/// Half the value of an unsigned E4M3 float (bias 7).
static HALF_E4M3: [f32; 256] = {
    // Its seven bits are an f32's exponent and mantissa times 2^(7 - 127); halved. Subnormals come out right.
    const REBIAS: f32 = f32::from_bits((127 + 119) << 23);
    let mut table = [0.0; 256];
    let mut x = 0;
    while x < 256 {
        let bits = if x == 0x7f { 0 } else { x as u32 & 0x7f };
        table[x] = f32::from_bits(bits << 20) * REBIAS;
        x += 1;
    }
    table
};

/// Codes by table, four scales.
#[allow(non_camel_case_types)]
pub(crate) struct NVFP4;

impl CpuFormat for NVFP4 {
    const FORMAT: Format = Format::NVFP4;
    const GROUP: usize = 16;
    const CODES: Codes = Codes::Signed;

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            for i in 0..4 {
                s.0[i] = HALF_E4M3[usize::from(*block.add(i))];
            }
        }
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, chunk: usize, _: &Ahead) -> I::B {
        unsafe { I::lookup_signed(&KVALUES_FP4, I::nibbles8(block.add(4 + 16 * chunk))) }
    }
}
