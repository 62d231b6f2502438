//! TQ2_0: 256 elements in 66 bytes: 64 bytes of 2-bit codes, f16 d. `value = d * (q - 1)`.
//!
//! Chunk c has field c % 4 of the 32 bytes c / 4.

use hanzo_gguf::Format;

use super::{Bytes, Codes, CpuFormat, Scales, half_at};
use crate::cpu::isa::Isa;

/// Offset 1, one scale for eight chunks.
#[allow(non_camel_case_types)]
pub(crate) struct TQ2_0;

impl CpuFormat for TQ2_0 {
    const FORMAT: Format = Format::TQ2_0;
    const GROUP: usize = 32;
    const CODES: Codes = Codes::Unsigned { offset: 1 };

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            let d = half_at::<I>(block.add(64));
            s.0[..8].fill(d);
        }
    }

    const STRETCHES: &'static [usize] = &[0];

    #[inline(always)]
    unsafe fn bytes<S: Bytes>(s: S, chunk: usize) -> S::B {
        unsafe {
            let q = s.load(32 * (chunk / 4));
            match chunk % 4 {
                0 => s.field::<0, 3>(q),
                1 => s.field::<2, 3>(q),
                2 => s.field::<4, 3>(q),
                _ => s.field::<6, 3>(q),
            }
        }
    }
}
