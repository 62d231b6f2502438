//! IQ3_XXS: 256 elements in 98 bytes, 8 groups of 32, `value = d * (scale + 1/2) / 2 * sign * grid`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..66 | byte `2 + i`: row of [`IQ3_XXS_GRID`] for elements `4 i..4 i + 4` |
//! | 66..98 | group `g`'s little-endian word at `66 + 4 g`: four 7-bit rows of [`KSIGNS`] from bit 0 up (one for each 8 elements), scale in bits 28..32 |

use super::tables::{IQ3_XXS_GRID, KSIGNS};
use super::{BlockFormat, f16_at, signed_row, u32_at};

/// Points of a 4-dimensional codebook with paired signs, 4-bit scales per 32.
#[allow(non_camel_case_types)]
pub struct IQ3_XXS;

impl BlockFormat<256, 98> for IQ3_XXS {
    fn to_float(block: &[u8; 98], out: &mut [f32; 256]) {
        let d = f16_at(block, 0);
        for (group, values) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let word = u32_at(block, 66 + 4 * group);
            let scale = d * (0.5 + (word >> 28) as f32) * 0.5;
            for (i, values) in values.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                let signs = KSIGNS[(word >> (i / 2 * 7) & 127) as usize] >> (i % 2 * 4);
                let row = IQ3_XXS_GRID[usize::from(block[2 + 8 * group + i])];
                *values = signed_row(row.to_le_bytes(), signs, scale);
            }
        }
    }
}
