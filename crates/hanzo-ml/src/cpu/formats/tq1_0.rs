//! TQ1_0: 256 elements in 54 bytes: 52 bytes of five trits each, f16 d. `value = d * (trit - 1)`.
//!
//! A byte is the fraction trits / 3^5 scaled to 256: trit n is the integer part of 3 * (byte * 3^n mod 256) / 256. Elements
//! 0..160 are trits 0..5 of bytes 0..32, 160..240 of bytes 32..48, 240..256 trits 0..4 of bytes 48..52.

use hanzo_gguf::Format;

use super::{Ahead, Codes, CpuFormat, Scales, half_at};
use crate::cpu::isa::{Isa, read};

/// `x * 3^n` of each byte, wrapping.
#[inline(always)]
unsafe fn times3<I: Isa>(x: I::B, n: usize) -> I::B {
    let mut x = x;
    for _ in 0..n {
        x = unsafe { I::add(I::add(x, x), x) };
    }
    x
}

/// Three times each byte, wrapping.
#[inline(always)]
fn times3_bytes(x: u32) -> u32 {
    const EVEN: u32 = 0x00ff_00ff;
    let thrice = |x: u32| ((x & EVEN) * 3) & EVEN;
    thrice(x) | (thrice(x >> 8) << 8)
}

/// Offset 1, one scale for eight chunks.
#[allow(non_camel_case_types)]
pub(crate) struct TQ1_0;

impl CpuFormat for TQ1_0 {
    const FORMAT: Format = Format::TQ1_0;
    const GROUP: usize = 32;
    const CODES: Codes = Codes::Unsigned { offset: 1 };

    #[inline(always)]
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, _: &mut Scales) {
        unsafe {
            let d = half_at::<I>(block.add(52));
            s.0[..8].fill(d);
        }
    }

    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, chunk: usize, _: &Ahead) -> I::B {
        unsafe {
            let fraction = match chunk {
                0..5 => times3::<I>(I::load(block), chunk),
                5..7 => {
                    let x = I::load_dup(block.add(32));
                    let trit = 2 * (chunk - 5);
                    I::halves(times3::<I>(x, trit), times3::<I>(x, trit + 1))
                }
                _ => {
                    let x = times3::<I>(I::load_dup(block.add(32)), 4);
                    let q: u32 = read(block.add(48));
                    let (q3, q9) = (times3_bytes(q), times3_bytes(times3_bytes(q)));
                    let last = I::from8([0, 0, 0, 0, q, q3, q9, times3_bytes(q9)]);
                    I::halves(x, last)
                }
            };
            // 3 * fraction / 256 reaches 1 at 86 and 2 at 171.
            I::add(I::at_least(fraction, 86), I::at_least(fraction, 171))
        }
    }
}
