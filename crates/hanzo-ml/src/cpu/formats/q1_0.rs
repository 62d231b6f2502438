//! Q1_0: 128 elements in 18 bytes: f16 d, then one bit an element. `value = d` where it is set, else `-d`.

use hanzo_gguf::Format;

use super::{Ahead, Codes, CpuFormat, Scales, half_at};
use crate::cpu::isa::{Isa, read};

/// Codes 0 and 2 with offset 1, one scale for four chunks.
#[allow(non_camel_case_types)]
pub(crate) struct Q1_0;

impl CpuFormat for Q1_0 {
    const FORMAT: Format = Format::Q1_0;
    const GROUP: usize = 32;
    const CODES: Codes = Codes::Unsigned { offset: 1 };

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            let d = half_at::<I>(block);
            s.0[..4].fill(d);
        }
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, chunk: usize, _: &Ahead) -> I::B {
        unsafe { I::add_at(I::splat(0), read(block.add(2 + 4 * chunk)), 2) }
    }
}
