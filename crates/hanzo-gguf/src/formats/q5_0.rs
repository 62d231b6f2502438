//! Q5_0: 32 elements in 22 bytes, `value = d * (code - 16)`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..6 | bit 4 of the codes: bit `j` of the little-endian word belongs to element `j` |
//! | 6..22 | bits 0..4: byte `j` holds element `j` in its low nibble and element `j + 16` in its high nibble |

use super::{BlockFormat, f16_at, u32_at};

/// 5-bit codes around zero, one scale per 32.
#[allow(non_camel_case_types)]
pub struct Q5_0;

impl BlockFormat<32, 22> for Q5_0 {
    fn to_float(block: &[u8; 22], out: &mut [f32; 32]) {
        let d = f16_at(block, 0);
        let high = u32_at(block, 2);
        for j in 0..16 {
            let byte = block[6 + j];
            let low = (byte & 15) | ((high >> j) as u8 & 1) << 4;
            let upper = (byte >> 4) | ((high >> (j + 16)) as u8 & 1) << 4;
            out[j] = d * f32::from(low as i8 - 16);
            out[j + 16] = d * f32::from(upper as i8 - 16);
        }
    }
}
