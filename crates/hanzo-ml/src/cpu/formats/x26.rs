//! X26_TEST, the format that exists for tests only: 32 elements in 13 bytes: 96 bits of 3-bit codes, lowest first, then an
//! exponent. `value = 2^(e - 140) * (q - 4)`.

use hanzo_gguf::Format;

use super::{Ahead, Codes, CpuFormat, Scales};
use crate::cpu::isa::{Isa, read};

/// Offset 4, one scale that is a power of two.
#[allow(non_camel_case_types)]
pub(crate) struct X26_TEST;

impl CpuFormat for X26_TEST {
    const FORMAT: Format = Format::X26_TEST;
    const GROUP: usize = 32;
    const CODES: Codes = Codes::Unsigned { offset: 4 };

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        // Below 2^-126 the float is subnormal: one bit at 2^-149 steps.
        let e = u32::from(unsafe { *block.add(12) });
        s.0[0] = f32::from_bits(if e > 13 { (e - 13) << 23 } else { 1 << (e + 9) });
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, _: usize, _: &Ahead) -> I::B {
        unsafe {
            // Four codes are twelve bits: three bytes hold eight.
            let mut words = [0u16; 8];
            for i in 0..4 {
                let three = u32::from(read::<u16>(block.add(3 * i))) | u32::from(*block.add(3 * i + 2)) << 16;
                words[2 * i] = (three & 0xfff) as u16;
                words[2 * i + 1] = (three >> 12) as u16;
            }
            I::threes(words.as_ptr().cast())
        }
    }
}
