//! MXFP4: 32 elements in 17 bytes: an E8M0 exponent, then 16 bytes of nibbles (low ones first) that are E2M1 floats.
//!
//! Table values are doubled, so the scale is half of 2^(e - 127): exact, down to the subnormal 2^-128.

use hanzo_gguf::Format;
use hanzo_gguf::formats::tables::KVALUES_FP4;

use super::{Codes, CpuFormat, Scales};
use crate::cpu::isa::{Isa};

/// Codes by table, one scale.
#[allow(non_camel_case_types)]
pub(crate) struct MXFP4;

impl CpuFormat for MXFP4 {
    const FORMAT: Format = Format::MXFP4;
    const GROUP: usize = 32;
    const CODES: Codes = Codes::Signed;

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            let e = u32::from(*block);
            s[0] = f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 });
        }
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, _: usize) -> I::B {
        unsafe {
            I::lookup_signed(&KVALUES_FP4, I::nibbles(block.add(1)))
        }
    }
}
