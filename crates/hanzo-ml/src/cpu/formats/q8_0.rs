//! Q8_0: 32 elements in 34 bytes: f16 d, then 32 signed bytes. `value = d * q`.

use hanzo_gguf::Format;

use super::{Ahead, Codes, CpuFormat, Scales, half_at};
use crate::cpu::isa::Isa;

/// Codes as they are stored, one scale.
#[allow(non_camel_case_types)]
pub(crate) struct Q8_0;

impl CpuFormat for Q8_0 {
    const FORMAT: Format = Format::Q8_0;
    const GROUP: usize = 32;
    const CODES: Codes = Codes::Signed;

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            s.0[0] = half_at::<I>(block);
        }
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, _: usize, _: &Ahead) -> I::B {
        unsafe { I::signed(I::load(block.add(2))) }
    }
}
