//! Q1_0: 128 elements in 18 bytes, `value = d` where the bit is set, else `-d`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..18 | element `8 i + j` (`j < 8`) is bit `j` of byte `2 + i` |

use super::{BlockFormat, f16_at, flip_sign};

/// One bit a weight, one scale per 128.
#[allow(non_camel_case_types)]
pub struct Q1_0;

impl BlockFormat<128, 18> for Q1_0 {
    fn to_float(block: &[u8; 18], out: &mut [f32; 128]) {
        let d = f16_at(block, 0);
        for (values, &bits) in out.as_chunks_mut::<8>().0.iter_mut().zip(&block[2..]) {
            for (j, value) in values.iter_mut().enumerate() {
                *value = flip_sign(d, !u32::from(bits) >> j & 1);
            }
        }
    }
}
