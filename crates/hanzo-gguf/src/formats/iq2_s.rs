//! IQ2_S: 256 elements in 82 bytes, 16 groups of 16, `value = d * (scale + 1/2) / 4 * sign * grid`.
//!
//! For elements `8 i..8 i + 8`:
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..34 | byte `2 + i`: bits 0..8 of the row of [`IQ2_S_GRID`] |
//! | 34..66 | byte `34 + i`: sign bits, bit `j` for element `8 i + j` |
//! | 66..74 | byte `66 + i / 4`, bits `2 (i % 4)..`: bits 8..10 of the row |
//! | 74..82 | group `g`'s scale is nibble `g % 2` of byte `74 + g / 2` |

use super::tables::IQ2_S_GRID;
use super::{BlockFormat, f16_at, signed_row};

/// Points of an 8-dimensional codebook with free signs, 4-bit scales per 16.
#[allow(non_camel_case_types)]
pub struct IQ2_S;

impl BlockFormat<256, 82> for IQ2_S {
    fn to_float(block: &[u8; 82], out: &mut [f32; 256]) {
        let d = f16_at(block, 0);
        for (i, values) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let group = i / 2;
            let scale = d * (0.5 + f32::from(block[74 + group / 2] >> (group % 2 * 4) & 15)) * 0.25;
            let high = usize::from(block[66 + i / 4] >> (i % 4 * 2) & 3);
            let row = IQ2_S_GRID[usize::from(block[2 + i]) | high << 8];
            *values = signed_row(row.to_le_bytes(), block[34 + i], scale);
        }
    }
}
