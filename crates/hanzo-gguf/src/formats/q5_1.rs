//! Q5_1: 32 elements in 24 bytes, `value = d * code + m`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..4 | `m`, f16 |
//! | 4..8 | bit 4 of the codes: bit `j` of the little-endian word belongs to element `j` |
//! | 8..24 | bits 0..4: byte `j` holds element `j` in its low nibble and element `j + 16` in its high nibble |

use super::fit::{Affine, Block, GroupSums, fit_affine};
use super::q5_0::split_bit_4;
use super::{BlockFormat, Encode, f16_at, u32_at};

/// 5-bit codes above a minimum, one scale and minimum per 32.
#[allow(non_camel_case_types)]
pub struct Q5_1;

impl BlockFormat<32, 24> for Q5_1 {
    const FROM_FLOAT: Option<Encode<32, 24>> = Some(from_float);

    fn to_float(block: &[u8; 24], out: &mut [f32; 32]) {
        let (d, m) = (f16_at(block, 0), f16_at(block, 2));
        let high = u32_at(block, 4);
        for j in 0..16 {
            let byte = block[8 + j];
            let low = (byte & 15) | ((high >> j) as u8 & 1) << 4;
            let upper = (byte >> 4) | ((high >> (j + 16)) as u8 & 1) << 4;
            out[j] = d * f32::from(low) + m;
            out[j + 16] = d * f32::from(upper) + m;
        }
    }
}

fn from_float(x: &[f32; 32], importance: Option<&[f32; 32]>, block: &mut [u8; 24]) {
    let source = Block::new(x, importance);
    let sums = GroupSums::new(&source.x, &source.w);
    let fit = fit_affine::<31, 32, false>(&source.x, &source.w, &sums);
    let d = source.half(fit.scale);
    // The format adds its minimum.
    let m = source.half(-fit.min);
    let codes = Affine { scale: source.units(d), min: -source.units(m) }.codes::<31, 32>(&source.x);
    block[..2].copy_from_slice(&d.to_le_bytes());
    block[2..4].copy_from_slice(&m.to_le_bytes());
    let (high, low) = split_bit_4(&codes);
    block[4..8].copy_from_slice(&high);
    block[8..].copy_from_slice(&low);
}
