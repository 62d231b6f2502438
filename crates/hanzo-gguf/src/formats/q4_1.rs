//! Q4_1: 32 elements in 20 bytes, `value = d * code + m`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..4 | `m`, f16 |
//! | 4..20 | codes: byte `j` holds element `j` in its low nibble and element `j + 16` in its high nibble |

use super::{BlockFormat, f16_at};

/// 4-bit codes above a minimum, one scale and minimum per 32.
#[allow(non_camel_case_types)]
pub struct Q4_1;

impl BlockFormat<32, 20> for Q4_1 {
    fn to_float(block: &[u8; 20], out: &mut [f32; 32]) {
        let (d, m) = (f16_at(block, 0), f16_at(block, 2));
        for j in 0..16 {
            let byte = block[4 + j];
            out[j] = d * f32::from(byte & 15) + m;
            out[j + 16] = d * f32::from(byte >> 4) + m;
        }
    }
}
