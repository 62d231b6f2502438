//! Q5_K: 256 elements in 176 bytes: as Q4_K, with 32 bytes of high bits before the nibbles.
//!
//! Bit c of high byte i is the fifth bit of element i of chunk c.

use hanzo_gguf::Format;

use super::{Bytes, Codes, CpuFormat, Scales, half_at, scale_u8, six_bit_pairs};
use crate::cpu::isa::Isa;

/// Eight groups of 32 with minima.
#[allow(non_camel_case_types)]
pub(crate) struct Q5_K;

impl CpuFormat for Q5_K {
    const FORMAT: Format = Format::Q5_K;
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

    const STRETCHES: &'static [usize] = &[16, 80, 112];

    #[inline(always)]
    unsafe fn bytes<S: Bytes>(s: S, chunk: usize) -> S::B {
        unsafe {
            let q = s.load(48 + 32 * (chunk / 2));
            let low = if chunk.is_multiple_of(2) { s.field::<0, 15>(q) } else { s.field::<4, 15>(q) };
            let h = s.load(16);
            let high = match chunk {
                0 => s.raise::<4, 1>(h),
                1 => s.raise::<3, 2>(h),
                2 => s.raise::<2, 4>(h),
                3 => s.raise::<1, 8>(h),
                4 => s.field::<0, 16>(h),
                5 => s.field::<1, 16>(h),
                6 => s.field::<2, 16>(h),
                _ => s.field::<3, 16>(h),
            };
            s.or(low, high)
        }
    }
}
