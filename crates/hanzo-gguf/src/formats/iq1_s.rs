//! IQ1_S: 256 elements in 50 bytes, 8 groups of 32, `value = d * (2 * scale + 1) * (grid + delta)`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..34 | byte `2 + i`: bits 0..8 of the row of [`IQ1_S_GRID`] for elements `8 i..8 i + 8` |
//! | 34..50 | group `g`'s little-endian word at `34 + 2 g`: four times three bits, bits 8..11 of its rows, from bit 0 up; scale in bits 12..15; bit 15 makes `delta` -1/8 instead of 1/8 |

use super::tables::IQ1_S_GRID;
use super::{BlockFormat, f16_at, u16_at};

/// Points of a ternary codebook shifted by an eighth, 3-bit scales per 32.
#[allow(non_camel_case_types)]
pub struct IQ1_S;

/// How far a group's points are shifted, up or down.
pub const DELTA: f32 = 0.125;

/// `scale * (grid + delta)` for the eight elements of a row.
#[inline]
pub(super) fn shifted_row(row: u64, scale: f32, delta: f32) -> [f32; 8] {
    row.to_le_bytes().map(|point| scale * (f32::from(point as i8) + delta))
}

impl BlockFormat<256, 50> for IQ1_S {
    fn to_float(block: &[u8; 50], out: &mut [f32; 256]) {
        let d = f16_at(block, 0);
        for (group, values) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let word = u16_at(block, 34 + 2 * group);
            let scale = d * f32::from(2 * (word >> 12 & 7) + 1);
            let delta = if word >> 15 == 0 { DELTA } else { -DELTA };
            for (i, values) in values.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let high = usize::from(word >> (3 * i) & 7);
                let row = IQ1_S_GRID[usize::from(block[2 + 4 * group + i]) | high << 8];
                *values = shifted_row(row, scale, delta);
            }
        }
    }
}
