//! Q5_1: 32 elements in 24 bytes: f16 d and m, 32 high bits, 16 bytes of nibbles. `value = d * q + m`.

use hanzo_gguf::Format;

use super::{Ahead, Codes, CpuFormat, Scales, half_at};
use crate::cpu::isa::{Isa, read};

/// The minimum is minus the block's m.
#[allow(non_camel_case_types)]
pub(crate) struct Q5_1;

impl CpuFormat for Q5_1 {
    const FORMAT: Format = Format::Q5_1;
    const GROUP: usize = 32;
    const HAS_MIN: bool = true;
    const CODES: Codes = Codes::Unsigned { offset: 0 };

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, m: &mut Scales) {
        unsafe {
            s.0[0] = half_at::<I>(block);
            m.0[0] = -half_at::<I>(block.add(2));
        }
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, _: usize, _: &Ahead) -> I::B {
        unsafe { I::add_at(I::nibbles(block.add(8)), read(block.add(4)), 16) }
    }
}
