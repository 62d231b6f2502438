//! IQ2_XS: 256 elements in 74 bytes, 16 groups of 16, `value = d * (scale + 1/2) / 4 * sign * grid`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..66 | elements `8 i..8 i + 8` are the little-endian word at `2 + 2 i`: row of [`IQ2_XS_GRID`] in bits 0..9, row of [`KSIGNS`] in bits 9..16 |
//! | 66..74 | group `g`'s scale is nibble `g % 2` of byte `66 + g / 2` |

use super::tables::{IQ2_XS_GRID, KSIGNS};
use super::{BlockFormat, f16_at, signed_row, u16_at};

/// Points of an 8-dimensional codebook with paired signs, 4-bit scales per 16.
#[allow(non_camel_case_types)]
pub struct IQ2_XS;

impl BlockFormat<256, 74> for IQ2_XS {
    fn to_float(block: &[u8; 74], out: &mut [f32; 256]) {
        let d = f16_at(block, 0);
        for (i, values) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let group = i / 2;
            let scale = d * (0.5 + f32::from(block[66 + group / 2] >> (group % 2 * 4) & 15)) * 0.25;
            let word = usize::from(u16_at(block, 2 + 2 * i));
            *values = signed_row(IQ2_XS_GRID[word & 511].to_le_bytes(), KSIGNS[word >> 9], scale);
        }
    }
}
