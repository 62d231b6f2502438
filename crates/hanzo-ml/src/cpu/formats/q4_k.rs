//! Q4_K: 256 elements in 144 bytes: f16 d and dmin, 12 bytes of 6-bit scales and minima, 128 bytes of nibbles.
//!
//! Chunks 2 i and 2 i + 1 are the low and the high nibbles of the 32 bytes i; `value = d * scale * q - dmin * minimum`.

use hanzo_gguf::Format;

use super::{Bytes, Codes, CpuFormat, Scales, half_at, scale_u8, six_bit_pairs};
use crate::cpu::isa::Isa;

/// Eight groups of 32 with minima.
#[allow(non_camel_case_types)]
pub(crate) struct Q4_K;

impl CpuFormat for Q4_K {
    const FORMAT: Format = Format::Q4_K;
    const GROUP: usize = 32;
    const HAS_MIN: bool = true;
    const CODES: Codes = Codes::Unsigned { offset: 0 };

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, m: &mut Scales) {
        unsafe {
            let (scales, minima) = six_bit_pairs(block.add(4));
            scale_u8::<I>(half_at::<I>(block), scales, s.0.as_mut_ptr());
            scale_u8::<I>(half_at::<I>(block.add(2)), minima, m.0.as_mut_ptr());
        }
    }

    const STRETCHES: &'static [usize] = &[16, 80];

    #[inline(always)]
    unsafe fn bytes<S: Bytes>(s: S, chunk: usize) -> S::B {
        unsafe {
            let q = s.load(16 + 32 * (chunk / 2));
            if chunk.is_multiple_of(2) { s.field::<0, 15>(q) } else { s.field::<4, 15>(q) }
        }
    }
}
