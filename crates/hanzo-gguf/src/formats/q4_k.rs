//! Q4_K: 256 elements in 144 bytes, 8 groups of 32, `value = d * scale * code - dmin * min`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..4 | `dmin`, f16 |
//! | 4..16 | 8 scales and 8 mins of 6 bits, see [`scales_mins`] |
//! | 16..144 | codes: element `64 c + j` (`j < 32`) is the low nibble of byte `16 + 32 c + j`, element `64 c + 32 + j` the high one |

use super::fit::Block;
use super::superblock::fit_scales_mins;
use super::{BlockFormat, Encode, f16_at};

/// 4-bit codes with 6-bit scales and minima per 32.
#[allow(non_camel_case_types)]
pub struct Q4_K;

/// The 8 scales and 8 mins (0..=63) of the 12 packed bytes of Q4_K and Q5_K.
///
/// For group `g < 4` they are the low 6 bits of bytes `g` and `4 + g`. For `g >= 4` the low nibbles are those of byte
/// `4 + g` (scale low, min high) and the upper two bits are bits 6..8 of bytes `g - 4` and `g`.
pub fn scales_mins(packed: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let (mut scales, mut mins) = ([0; 8], [0; 8]);
    for g in 0..4 {
        scales[g] = packed[g] & 63;
        mins[g] = packed[4 + g] & 63;
        scales[4 + g] = (packed[8 + g] & 15) | packed[g] >> 6 << 4;
        mins[4 + g] = packed[8 + g] >> 4 | packed[4 + g] >> 6 << 4;
    }
    (scales, mins)
}

impl BlockFormat<256, 144> for Q4_K {
    const FROM_FLOAT: Option<Encode<256, 144>> = Some(from_float);

    fn to_float(block: &[u8; 144], out: &mut [f32; 256]) {
        let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
        let (scales, mins) = scales_mins(block[4..].first_chunk().expect("12 of 140 bytes"));
        for (group, values) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let scale = d * f32::from(scales[group]);
            let min = dmin * f32::from(mins[group]);
            let bytes = &block[16 + group / 2 * 32..][..32];
            for (value, &byte) in values.iter_mut().zip(bytes) {
                *value = scale * f32::from(byte >> (group % 2 * 4) & 15) - min;
            }
        }
    }
}

fn from_float(x: &[f32; 256], importance: Option<&[f32; 256]>, block: &mut [u8; 144]) {
    let source = Block::new(x, importance);
    let fit = fit_scales_mins::<15, 63, 256, 32, 8>(&source);
    *block = [0; 144];
    block[..2].copy_from_slice(&fit.d.to_le_bytes());
    block[2..4].copy_from_slice(&fit.dmin.to_le_bytes());
    block[4..16].copy_from_slice(&pack_scales_mins(&fit.scales, &fit.mins));
    for (group, x) in source.x.as_chunks::<32>().0.iter().enumerate() {
        let codes = fit.group(&source, group).codes::<15, 32>(x);
        for (byte, code) in block[16 + group / 2 * 32..].iter_mut().zip(codes) {
            *byte |= code << (group % 2 * 4);
        }
    }
}

/// The inverse of [`scales_mins`].
pub(super) fn pack_scales_mins(scales: &[u8; 8], mins: &[u8; 8]) -> [u8; 12] {
    let mut packed = [0; 12];
    for g in 0..4 {
        packed[g] = scales[g] | scales[4 + g] >> 4 << 6;
        packed[4 + g] = mins[g] | mins[4 + g] >> 4 << 6;
        packed[8 + g] = (scales[4 + g] & 15) | mins[4 + g] << 4;
    }
    packed
}
