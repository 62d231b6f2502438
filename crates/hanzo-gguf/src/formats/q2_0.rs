//! Q2_0: 64 elements in 18 bytes, `value = d * (code - 1)`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..18 | 2-bit codes: element `4 i + j` (`j < 4`) is in byte `2 + i`, bits `2 j..2 j + 2` |

use super::{BlockFormat, f16_at};

/// 2-bit codes, one scale per 64.
#[allow(non_camel_case_types)]
pub struct Q2_0;

impl BlockFormat<64, 18> for Q2_0 {
    fn to_float(block: &[u8; 18], out: &mut [f32; 64]) {
        let d = f16_at(block, 0);
        for (values, &byte) in out.as_chunks_mut::<4>().0.iter_mut().zip(&block[2..]) {
            for (j, value) in values.iter_mut().enumerate() {
                *value = d * f32::from((byte >> (2 * j) & 3) as i8 - 1);
            }
        }
    }
}
