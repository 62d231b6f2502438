//! IQ3_S: 256 elements in 110 bytes, 8 groups of 32, `value = d * (2 * scale + 1) * sign * grid`.
//!
//! For elements `4 i..4 i + 4`:
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..66 | byte `2 + i`: bits 0..8 of the row of [`IQ3_S_GRID`] |
//! | 66..74 | bit `i % 8` of byte `66 + i / 8`: bit 8 of the row |
//! | 74..106 | sign bits: element `8 k + j` (`j < 8`) is bit `j` of byte `74 + k` |
//! | 106..110 | group `g`'s scale is nibble `g % 2` of byte `106 + g / 2` |

use super::tables::IQ3_S_GRID;
use super::{BlockFormat, f16_at, signed_row};

/// Points of a 4-dimensional codebook with free signs, 4-bit scales per 32.
#[allow(non_camel_case_types)]
pub struct IQ3_S;

impl BlockFormat<256, 110> for IQ3_S {
    fn to_float(block: &[u8; 110], out: &mut [f32; 256]) {
        let d = f16_at(block, 0);
        for (i, values) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let group = i / 8;
            let scale = d * f32::from(1 + 2 * (block[106 + group / 2] >> (group % 2 * 4) & 15));
            let high = usize::from(block[66 + i / 8] >> (i % 8) & 1);
            let row = IQ3_S_GRID[usize::from(block[2 + i]) | high << 8];
            *values = signed_row(row.to_le_bytes(), block[74 + i / 2] >> (i % 2 * 4), scale);
        }
    }
}
