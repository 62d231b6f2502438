//! Q2_0: 64 elements in 18 bytes: f16 d, then 2 bits an element, lowest first. `value = d * (q - 1)`.

use hanzo_gguf::Format;

use super::{Ahead, Codes, CpuFormat, Scales, half_at};
use crate::cpu::isa::Isa;

/// Offset 1, one scale for two chunks.
#[allow(non_camel_case_types)]
pub(crate) struct Q2_0;

impl CpuFormat for Q2_0 {
    const FORMAT: Format = Format::Q2_0;
    const GROUP: usize = 32;
    const CODES: Codes = Codes::Unsigned { offset: 1 };

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            let d = half_at::<I>(block);
            s.0[..2].fill(d);
        }
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, chunk: usize, _: &Ahead) -> I::B {
        unsafe { I::crumbs(block.add(2 + 8 * chunk)) }
    }
}
