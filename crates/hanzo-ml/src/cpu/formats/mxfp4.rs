//! MXFP4: 32 elements in 17 bytes: an E8M0 exponent, then 16 bytes of nibbles (low ones first) that are E2M1 floats.
//!
//! Table values are doubled, so the scale is half of 2^(e - 127): exact, down to the subnormal 2^-128.

use hanzo_gguf::Format;
use hanzo_gguf::formats::tables::KVALUES_FP4;

use super::{Ahead, Codes, CpuFormat, Scales};
use crate::cpu::isa::Isa;

/// Half the value of an E8M0 exponent: 2^(e - 128).
static HALF_E8M0: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut e = 0;
    while e < 256 {
        table[e] = f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e as u32 - 1) << 23 });
        e += 1;
    }
    table
};

/// Codes by table, one scale.
#[allow(non_camel_case_types)]
pub(crate) struct MXFP4;

impl CpuFormat for MXFP4 {
    const FORMAT: Format = Format::MXFP4;
    const GROUP: usize = 32;
    const CODES: Codes = Codes::Signed;
    const POWER: bool = true;

    #[inline(always)]
    unsafe fn power(block: *const u8) -> i32 {
        unsafe { i32::from(*block) - 128 }
    }

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            s.0[0] = HALF_E8M0[usize::from(*block)];
        }
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, _: usize, _: &Ahead) -> I::B {
        unsafe { I::lookup_signed(&KVALUES_FP4, I::nibbles(block.add(1))) }
    }
}
