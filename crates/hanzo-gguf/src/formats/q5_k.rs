//! Q5_K: 256 elements in 176 bytes, 8 groups of 32, `value = d * scale * code - dmin * min`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..4 | `dmin`, f16 |
//! | 4..16 | 8 scales and 8 mins of 6 bits, as in [`q4_k::scales_mins`] |
//! | 16..48 | bit 4 of the codes: element `32 g + j` (`j < 32`) is bit `g` of byte `16 + j` |
//! | 48..176 | bits 0..4: element `64 c + j` (`j < 32`) is the low nibble of byte `48 + 32 c + j`, element `64 c + 32 + j` the high one |

use super::fit::Block;
use super::superblock::fit_scales_mins;
use super::{BlockFormat, Encode, f16_at, q4_k};

/// 5-bit codes with 6-bit scales and minima per 32.
#[allow(non_camel_case_types)]
pub struct Q5_K;

impl BlockFormat<256, 176> for Q5_K {
    const FROM_FLOAT: Option<Encode<256, 176>> = Some(from_float);

    fn to_float(block: &[u8; 176], out: &mut [f32; 256]) {
        let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
        let (scales, mins) = q4_k::scales_mins(block[4..].first_chunk().expect("12 of 172 bytes"));
        let high = &block[16..48];
        for (group, values) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let scale = d * f32::from(scales[group]);
            let min = dmin * f32::from(mins[group]);
            let low = &block[48 + group / 2 * 32..][..32];
            for ((value, &low), &high) in values.iter_mut().zip(low).zip(high) {
                let code = (low >> (group % 2 * 4) & 15) | (high >> group & 1) << 4;
                *value = scale * f32::from(code) - min;
            }
        }
    }
}

fn from_float(x: &[f32; 256], importance: Option<&[f32; 256]>, block: &mut [u8; 176]) {
    let source = Block::new(x, importance);
    let fit = fit_scales_mins::<31, 63, 256, 32, 8>(&source);
    *block = [0; 176];
    block[..2].copy_from_slice(&fit.d.to_le_bytes());
    block[2..4].copy_from_slice(&fit.dmin.to_le_bytes());
    block[4..16].copy_from_slice(&q4_k::pack_scales_mins(&fit.scales, &fit.mins));
    for (group, x) in source.x.as_chunks::<32>().0.iter().enumerate() {
        let codes = fit.group(&source, group).codes::<31, 32>(x);
        for (j, code) in codes.into_iter().enumerate() {
            block[16 + j] |= code >> 4 << group;
            block[48 + group / 2 * 32 + j] |= (code & 15) << (group % 2 * 4);
        }
    }
}
