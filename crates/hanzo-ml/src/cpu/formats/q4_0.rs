//! Q4_0: 32 elements in 18 bytes: f16 d, then 16 bytes of nibbles (low ones first). `value = d * (q - 8)`.

use hanzo_gguf::Format;

use super::{Ahead, Codes, CpuFormat, Scales, half_at};
use crate::cpu::isa::Isa;

/// Offset 8, one scale.
#[allow(non_camel_case_types)]
pub(crate) struct Q4_0;

impl CpuFormat for Q4_0 {
    const FORMAT: Format = Format::Q4_0;
    const GROUP: usize = 32;
    const CODES: Codes = Codes::Unsigned { offset: 8 };

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            s.0[0] = half_at::<I>(block);
        }
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, _: usize, _: &Ahead) -> I::B {
        unsafe { I::nibbles(block.add(2)) }
    }
}
