//! Q2_K: 256 elements in 84 bytes: 16 bytes of scale and minimum nibbles, 64 bytes of 2-bit codes, f16 d and dmin.
//!
//! Chunk c has field c % 4 of the 32 bytes c / 4; `value = d * scale * q - dmin * minimum` per group of 16.

use hanzo_gguf::Format;

use super::{Bytes, Codes, CpuFormat, Scales, half_at, scale_u8};
use crate::cpu::isa::{Isa, read};

/// Sixteen groups of 16 with minima.
#[allow(non_camel_case_types)]
pub(crate) struct Q2_K;

impl CpuFormat for Q2_K {
    const FORMAT: Format = Format::Q2_K;
    const GROUP: usize = 16;
    const HAS_MIN: bool = true;
    const CODES: Codes = Codes::Unsigned { offset: 0 };
    /// 0 to 45.
    const PRODUCT: Option<u8> = Some(0);

    #[inline(always)]
    unsafe fn factors<I: Isa>(block: *const u8) -> (f32, [i8; 16]) {
        unsafe {
            let packed: u128 = read(block);
            let low = packed & 0x0f0f_0f0f_0f0f_0f0f_0f0f_0f0f_0f0f_0f0f;
            (half_at::<I>(block.add(80)), low.to_le_bytes().map(|x| x as i8))
        }
    }

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, m: &mut Scales) {
        unsafe {
            let d = half_at::<I>(block.add(80));
            let dmin = half_at::<I>(block.add(82));
            for half in 0..2 {
                let packed: u64 = read(block.add(8 * half));
                scale_u8::<I>(d, packed & 0x0f0f_0f0f_0f0f_0f0f, s.0[8 * half..].as_mut_ptr());
                scale_u8::<I>(dmin, packed >> 4 & 0x0f0f_0f0f_0f0f_0f0f, m.0[8 * half..].as_mut_ptr());
            }
        }
    }

    const STRETCHES: &'static [usize] = &[16];

    #[inline(always)]
    unsafe fn bytes<S: Bytes>(s: S, chunk: usize) -> S::B {
        unsafe {
            let q = s.load(16 + 32 * (chunk / 4));
            match chunk % 4 {
                0 => s.field::<0, 3>(q),
                1 => s.field::<2, 3>(q),
                2 => s.field::<4, 3>(q),
                _ => s.field::<6, 3>(q),
            }
        }
    }
}
