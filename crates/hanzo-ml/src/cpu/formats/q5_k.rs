//! Q5_K: 256 elements in 176 bytes: as Q4_K, with 32 bytes of high bits before the nibbles.
//!
//! Bit c of high byte i is the fifth bit of element i of chunk c.

use hanzo_gguf::Format;

use super::{Ahead, Codes, CpuFormat, Scales, half_at, scale_u8, six_bit_pairs};
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

    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, chunk: usize, _: &Ahead) -> I::B {
        unsafe {
            let q = I::load(block.add(48 + 32 * (chunk / 2)));
            let low = if chunk.is_multiple_of(2) { I::field::<0, 15>(q) } else { I::field::<4, 15>(q) };
            let h = I::load(block.add(16));
            let high = match chunk {
                0 => I::raise::<4, 1>(h),
                1 => I::raise::<3, 2>(h),
                2 => I::raise::<2, 4>(h),
                3 => I::raise::<1, 8>(h),
                4 => I::field::<0, 16>(h),
                5 => I::field::<1, 16>(h),
                6 => I::field::<2, 16>(h),
                _ => I::field::<3, 16>(h),
            };
            I::or(low, high)
        }
    }
}
