//! Q6_K: 256 elements in 210 bytes: 128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales, f16 d.
//!
//! Each half has 64 low bytes and 32 high bytes: chunk j of a half takes low bytes 32 (j % 2).., nibble j / 2, and high
//! field j. `value = d * scale * (q - 32)` per group of 16.

use hanzo_gguf::Format;

use super::{Bytes, Codes, CpuFormat, Scales, half_at, scale_i8};
use crate::cpu::isa::{Isa, read};

/// Offset 32, sixteen signed scales.
#[allow(non_camel_case_types)]
pub(crate) struct Q6_K;

impl CpuFormat for Q6_K {
    const FORMAT: Format = Format::Q6_K;
    const GROUP: usize = 16;
    const CODES: Codes = Codes::Unsigned { offset: 32 };

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            let d = half_at::<I>(block.add(208));
            scale_i8::<I>(d, read(block.add(192)), s.0.as_mut_ptr());
            scale_i8::<I>(d, read(block.add(200)), s.0[8..].as_mut_ptr());
        }
    }

    const STRETCHES: &'static [usize] = &[0, 64, 128];

    #[inline(always)]
    unsafe fn bytes<S: Bytes>(s: S, chunk: usize) -> S::B {
        unsafe {
            let q = s.load(64 * (chunk / 4) + 32 * (chunk % 2));
            let h = s.load(128 + 32 * (chunk / 4));
            match chunk % 4 {
                0 => s.or(s.field::<0, 15>(q), s.raise::<4, 3>(h)),
                1 => s.or(s.field::<0, 15>(q), s.raise::<2, 12>(h)),
                2 => s.or(s.field::<4, 15>(q), s.field::<0, 48>(h)),
                _ => s.or(s.field::<4, 15>(q), s.field::<2, 48>(h)),
            }
        }
    }
}
