//! TQ2_0: 256 ternary elements in 66 bytes, `value = d * (code - 1)`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..64 | 2-bit codes: element `128 n + 32 s + j` (`j < 32`) is in byte `32 n + j`, bits `2 s..2 s + 2` |
//! | 64..66 | `d`, f16 |
//!
//! Code 3 (value `2 d`) is readable but no writer makes it.

use super::{BlockFormat, f16_at};

/// Ternary codes, four to a byte, one scale per 256.
#[allow(non_camel_case_types)]
pub struct TQ2_0;

impl BlockFormat<256, 66> for TQ2_0 {
    fn to_float(block: &[u8; 66], out: &mut [f32; 256]) {
        let d = f16_at(block, 64);
        for (run, values) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (value, &byte) in values.iter_mut().zip(&block[run / 4 * 32..][..32]) {
                *value = d * f32::from((byte >> (run % 4 * 2) & 3) as i8 - 1);
            }
        }
    }
}
