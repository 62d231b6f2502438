//! Q2_K: 256 elements in 84 bytes, 16 groups of 16, `value = d * scale * code - dmin * min`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..16 | group `g`: scale in the low nibble, min in the high nibble |
//! | 16..80 | 2-bit codes: element `128 n + 32 s + j` (`j < 32`) is in byte `16 + 32 n + j`, bits `2 s..2 s + 2` |
//! | 80..82 | `d`, f16 |
//! | 82..84 | `dmin`, f16 |

use super::fit::Block;
use super::superblock::fit_scales_mins;
use super::{BlockFormat, Encode, f16_at};

/// 2-bit codes with 4-bit scales and minima per 16.
#[allow(non_camel_case_types)]
pub struct Q2_K;

impl BlockFormat<256, 84> for Q2_K {
    const FROM_FLOAT: Option<Encode<256, 84>> = Some(from_float);

    fn to_float(block: &[u8; 84], out: &mut [f32; 256]) {
        let (d, dmin) = (f16_at(block, 80), f16_at(block, 82));
        for (group, values) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = d * f32::from(block[group] & 15);
            let min = dmin * f32::from(block[group] >> 4);
            let (half, shift, start) = (group / 8, group % 8 / 2 * 2, group % 2 * 16);
            let bytes = &block[16 + 32 * half + start..][..16];
            for (value, &byte) in values.iter_mut().zip(bytes) {
                *value = scale * f32::from(byte >> shift & 3) - min;
            }
        }
    }
}

fn from_float(x: &[f32; 256], importance: Option<&[f32; 256]>, block: &mut [u8; 84]) {
    let source = Block::new(x, importance);
    let fit = fit_scales_mins::<3, 15, 256, 16, 16>(&source);
    *block = [0; 84];
    for (group, x) in source.x.as_chunks::<16>().0.iter().enumerate() {
        block[group] = fit.scales[group] | fit.mins[group] << 4;
        let codes = fit.group(&source, group).codes::<3, 16>(x);
        let (half, shift, start) = (group / 8, group % 8 / 2 * 2, group % 2 * 16);
        for (byte, code) in block[16 + 32 * half + start..].iter_mut().zip(codes) {
            *byte |= code << shift;
        }
    }
    block[80..82].copy_from_slice(&fit.d.to_le_bytes());
    block[82..].copy_from_slice(&fit.dmin.to_le_bytes());
}
