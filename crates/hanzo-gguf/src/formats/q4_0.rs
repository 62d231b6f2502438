//! Q4_0: 32 elements in 18 bytes, `value = d * (code - 8)`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..18 | codes: byte `j` holds element `j` in its low nibble and element `j + 16` in its high nibble |

use super::{BlockFormat, f16_at};

/// 4-bit codes around zero, one scale per 32.
#[allow(non_camel_case_types)]
pub struct Q4_0;

impl BlockFormat<32, 18> for Q4_0 {
    fn to_float(block: &[u8; 18], out: &mut [f32; 32]) {
        let d = f16_at(block, 0);
        for j in 0..16 {
            let byte = block[2 + j];
            out[j] = d * f32::from((byte & 15) as i8 - 8);
            out[j + 16] = d * f32::from((byte >> 4) as i8 - 8);
        }
    }
}
