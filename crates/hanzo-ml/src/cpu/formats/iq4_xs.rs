//! IQ4_XS: 256 elements in 136 bytes: f16 d, 16 bits and 4 bytes of scales, 128 bytes of nibbles that index 16 values.
//!
//! Group i has the low nibble i of the four bytes and bit pair i of the word; `value = d * (scale - 32) * table[q]`.

use hanzo_gguf::Format;
use hanzo_gguf::formats::tables::KVALUES_IQ4_NL;

use super::{Bytes, Codes, CpuFormat, Scales, half_at, minus_32, nibble_bytes, scale_i8};
use crate::cpu::isa::{Isa, read};

/// Codes by table, eight signed scales.
#[allow(non_camel_case_types)]
pub(crate) struct IQ4_XS;

/// The eight signed scales, one a byte.
///
/// # Safety
/// `block` is a block.
#[inline(always)]
pub(in crate::cpu) unsafe fn scale_bytes(block: *const u8) -> u64 {
    let (pairs, low) = unsafe { (read::<u16>(block.add(2)), read(block.add(4))) };
    // The eight bit pairs, one a byte, in bits 4 and 5.
    let x = u64::from(pairs);
    let x = (x | x << 24) & 0x0000_00ff_0000_00ff;
    let x = (x | x << 12) & 0x000f_000f_000f_000f;
    let high = (x | x << 6) & 0x0303_0303_0303_0303;
    minus_32(nibble_bytes(low) | high << 4)
}

impl CpuFormat for IQ4_XS {
    const FORMAT: Format = Format::IQ4_XS;
    const GROUP: usize = 32;
    const CODES: Codes = Codes::Signed;

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            scale_i8::<I>(half_at::<I>(block), scale_bytes(block), s.0.as_mut_ptr());
        }
    }

    const STRETCHES: &'static [usize] = &[8, 72];

    #[inline(always)]
    unsafe fn bytes<S: Bytes>(s: S, chunk: usize) -> S::B {
        unsafe { s.lookup_signed(&KVALUES_IQ4_NL, s.nibbles(8 + 16 * chunk)) }
    }
}
