//! Q5_0: 32 elements in 22 bytes: f16 d, 32 high bits, 16 bytes of nibbles (low ones first). `value = d * (q - 16)`.

use hanzo_gguf::Format;

use super::{Ahead, Codes, CpuFormat, Scales, half_at};
use crate::cpu::isa::{Isa, read};

/// Offset 16, one scale.
#[allow(non_camel_case_types)]
pub(crate) struct Q5_0;

impl CpuFormat for Q5_0 {
    const FORMAT: Format = Format::Q5_0;
    const GROUP: usize = 32;
    const CODES: Codes = Codes::Unsigned { offset: 16 };

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            s.0[0] = half_at::<I>(block);
        }
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, _: usize, _: &Ahead) -> I::B {
        unsafe { I::add_at(I::nibbles(block.add(6)), read(block.add(2)), 16) }
    }
}
