//! IQ4_NL: 32 elements in 18 bytes: f16 d, then 16 bytes of nibbles (low ones first) that index 16 signed values.

use hanzo_gguf::Format;
use hanzo_gguf::formats::tables::KVALUES_IQ4_NL;

use super::{Ahead, Codes, CpuFormat, Scales, half_at};
use crate::cpu::isa::Isa;

/// Codes by table, one scale.
#[allow(non_camel_case_types)]
pub(crate) struct IQ4_NL;

impl CpuFormat for IQ4_NL {
    const FORMAT: Format = Format::IQ4_NL;
    const GROUP: usize = 32;
    const CODES: Codes = Codes::Signed;

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            s.0[0] = half_at::<I>(block);
        }
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, _: usize, _: &Ahead) -> I::B {
        unsafe { I::lookup_signed(&KVALUES_IQ4_NL, I::nibbles(block.add(2))) }
    }
}
