//! IQ4_NL: 32 elements in 18 bytes, `value = d * KVALUES_IQ4_NL[code]`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..18 | codes: byte `j` holds element `j` in its low nibble and element `j + 16` in its high nibble |

use super::tables::KVALUES_IQ4_NL;
use super::{BlockFormat, f16_at};

/// 4-bit codes into a non-linear table, one scale per 32.
#[allow(non_camel_case_types)]
pub struct IQ4_NL;

impl BlockFormat<32, 18> for IQ4_NL {
    fn to_float(block: &[u8; 18], out: &mut [f32; 32]) {
        let d = f16_at(block, 0);
        for j in 0..16 {
            let byte = block[2 + j];
            out[j] = d * f32::from(KVALUES_IQ4_NL[usize::from(byte & 15)]);
            out[j + 16] = d * f32::from(KVALUES_IQ4_NL[usize::from(byte >> 4)]);
        }
    }
}
