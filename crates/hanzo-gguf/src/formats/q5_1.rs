//! Q5_1: 32 elements in 24 bytes, `value = d * code + m`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..4 | `m`, f16 |
//! | 4..8 | bit 4 of the codes: bit `j` of the little-endian word belongs to element `j` |
//! | 8..24 | bits 0..4: byte `j` holds element `j` in its low nibble and element `j + 16` in its high nibble |

use super::{BlockFormat, f16_at, u32_at};

/// 5-bit codes above a minimum, one scale and minimum per 32.
#[allow(non_camel_case_types)]
pub struct Q5_1;

impl BlockFormat<32, 24> for Q5_1 {
    fn to_float(block: &[u8; 24], out: &mut [f32; 32]) {
        let (d, m) = (f16_at(block, 0), f16_at(block, 2));
        let high = u32_at(block, 4);
        for j in 0..16 {
            let byte = block[8 + j];
            let low = (byte & 15) | ((high >> j) as u8 & 1) << 4;
            let upper = (byte >> 4) | ((high >> (j + 16)) as u8 & 1) << 4;
            out[j] = d * f32::from(low) + m;
            out[j + 16] = d * f32::from(upper) + m;
        }
    }
}
