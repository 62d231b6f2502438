//! IQ1_M: 256 elements in 56 bytes, 16 groups of 16, `value = d * (2 * scale + 1) * (grid + delta)`.
//!
//! For elements `8 i..8 i + 8`:
//!
//! | bytes | what |
//! |---|---|
//! | 0..32 | byte `i`: bits 0..8 of the row of [`IQ1_S_GRID`] |
//! | 32..48 | nibble `i % 2` of byte `32 + i / 2`: bits 8..11 of the row, and a bit that makes `delta` -1/8 instead of 1/8 |
//! | 48..56 | four little-endian words: group `g`'s scale is bits `3 (g % 4)..` of word `g / 4`; bits 12..16 of word `w` are bits `4 w..` of `d`, f16 |

use super::iq1_s::{DELTA, shifted_row};
use super::tables::IQ1_S_GRID;
use super::{BlockFormat, f16_value, u16_at};

/// Points of a ternary codebook shifted by an eighth, 3-bit scales per 16.
#[allow(non_camel_case_types)]
pub struct IQ1_M;

/// The block's scale, gathered from the top nibbles of the four scale words.
#[inline]
pub fn scale(block: &[u8; 56]) -> f32 {
    let bits = (0..4).fold(0, |bits, w| bits | u16_at(block, 48 + 2 * w) >> 12 << (4 * w));
    f16_value(bits)
}

impl BlockFormat<256, 56> for IQ1_M {
    fn to_float(block: &[u8; 56], out: &mut [f32; 256]) {
        let d = scale(block);
        for (i, values) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let group = i / 2;
            let step = u16_at(block, 48 + group / 4 * 2) >> (group % 4 * 3) & 7;
            let nibble = usize::from(block[32 + i / 2] >> (i % 2 * 4) & 15);
            let delta = if nibble & 8 == 0 { DELTA } else { -DELTA };
            let row = IQ1_S_GRID[usize::from(block[i]) | (nibble & 7) << 8];
            *values = shifted_row(row, d * f32::from(2 * step + 1), delta);
        }
    }
}
