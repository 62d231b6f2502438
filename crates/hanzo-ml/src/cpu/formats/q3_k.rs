//! Q3_K: 256 elements in 110 bytes: 32 bytes of high bits, 64 of 2-bit codes, 12 of 6-bit scales, f16 d.
//!
//! Chunk c has field c % 4 of the 32 code bytes c / 4 and bit c of the high bytes; `value = d * (scale - 32) * (q - 4)`.

use hanzo_gguf::Format;

use super::{Bytes, Codes, CpuFormat, Scales, half_at, minus_32, scale_i8};
use crate::cpu::isa::{Isa, read};

/// Offset 4, sixteen signed scales.
#[allow(non_camel_case_types)]
pub(crate) struct Q3_K;

/// The sixteen signed scales, one a byte.
///
/// # Safety
/// `block` is a block.
#[inline(always)]
pub(in crate::cpu) unsafe fn scale_bytes(block: *const u8) -> (u64, u64) {
    // Low nibbles: byte i has scale i and scale 8 + i. High pairs: byte i has those of scales i, 4 + i, 8 + i, 12 + i.
    let (low, high) = unsafe { (read::<u64>(block.add(96)), u64::from(read::<u32>(block.add(104)))) };
    let first = low & 0x0f0f_0f0f_0f0f_0f0f | (high & 0x0303_0303) << 4 | (high & 0x0c0c_0c0c) << 34;
    let last = low >> 4 & 0x0f0f_0f0f_0f0f_0f0f | (high & 0x3030_3030) | (high & 0xc0c0_c0c0) << 30;
    (minus_32(first), minus_32(last))
}

impl CpuFormat for Q3_K {
    const FORMAT: Format = Format::Q3_K;
    const GROUP: usize = 16;
    const CODES: Codes = Codes::Unsigned { offset: 4 };
    /// -4..=3 times -32..=31 is -124 to 128.
    const PRODUCT: Option<u8> = Some(124);

    #[inline(always)]
    unsafe fn factors<I: Isa>(block: *const u8) -> (f32, [i8; 16]) {
        let (first, last) = unsafe { scale_bytes(block) };
        let factors = u128::from(first) | u128::from(last) << 64;
        (unsafe { half_at::<I>(block.add(108)) }, factors.to_le_bytes().map(|x| x as i8))
    }

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            let d = half_at::<I>(block.add(108));
            let (first, last) = scale_bytes(block);
            scale_i8::<I>(d, first, s.0.as_mut_ptr());
            scale_i8::<I>(d, last, s.0[8..].as_mut_ptr());
        }
    }

    const STRETCHES: &'static [usize] = &[0, 32];

    #[inline(always)]
    unsafe fn bytes<S: Bytes>(s: S, chunk: usize) -> S::B {
        unsafe {
            let q = s.load(32 + 32 * (chunk / 4));
            let low = match chunk % 4 {
                0 => s.field::<0, 3>(q),
                1 => s.field::<2, 3>(q),
                2 => s.field::<4, 3>(q),
                _ => s.field::<6, 3>(q),
            };
            let h = s.load(0);
            let high = match chunk {
                0 => s.raise::<2, 1>(h),
                1 => s.raise::<1, 2>(h),
                2 => s.field::<0, 4>(h),
                3 => s.field::<1, 4>(h),
                4 => s.field::<2, 4>(h),
                5 => s.field::<3, 4>(h),
                6 => s.field::<4, 4>(h),
                _ => s.field::<5, 4>(h),
            };
            s.or(low, high)
        }
    }
}
