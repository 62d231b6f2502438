//! IQ2_XXS: 256 elements in 66 bytes, 8 groups of 32, `value = d * (scale + 1/2) / 4 * sign * grid`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..66 | group `g` is two little-endian words at `2 + 8 g` |
//!
//! The first word is four row numbers of [`IQ2_XXS_GRID`], one byte for each 8 elements. The second holds four 7-bit rows of
//! [`KSIGNS`] from bit 0 up, and the group's scale in bits 28..32.

use super::tables::{IQ2_XXS_GRID, KSIGNS};
use super::{BlockFormat, f16_at, signed_row, u32_at};

/// Points of an 8-dimensional codebook with paired signs, 4-bit scales per 32.
#[allow(non_camel_case_types)]
pub struct IQ2_XXS;

impl BlockFormat<256, 66> for IQ2_XXS {
    fn to_float(block: &[u8; 66], out: &mut [f32; 256]) {
        let d = f16_at(block, 0);
        for (group, values) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let rows = &block[2 + 8 * group..][..4];
            let word = u32_at(block, 6 + 8 * group);
            let scale = d * (0.5 + (word >> 28) as f32) * 0.25;
            for (i, values) in values.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let signs = KSIGNS[(word >> (7 * i) & 127) as usize];
                *values = signed_row(IQ2_XXS_GRID[usize::from(rows[i])].to_le_bytes(), signs, scale);
            }
        }
    }
}
