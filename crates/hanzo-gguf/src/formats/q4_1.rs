//! Q4_1: 32 elements in 20 bytes, `value = d * code + m`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..4 | `m`, f16 |
//! | 4..20 | codes: byte `j` holds element `j` in its low nibble and element `j + 16` in its high nibble |

use super::fit::{Affine, Block, GroupSums, fit_affine};
use super::{BlockFormat, Encode, f16_at};

/// 4-bit codes above a minimum, one scale and minimum per 32.
#[allow(non_camel_case_types)]
pub struct Q4_1;

impl BlockFormat<32, 20> for Q4_1 {
    const FROM_FLOAT: Option<Encode<32, 20>> = Some(from_float);

    fn to_float(block: &[u8; 20], out: &mut [f32; 32]) {
        let (d, m) = (f16_at(block, 0), f16_at(block, 2));
        for j in 0..16 {
            let byte = block[4 + j];
            out[j] = d * f32::from(byte & 15) + m;
            out[j + 16] = d * f32::from(byte >> 4) + m;
        }
    }
}

fn from_float(x: &[f32; 32], importance: Option<&[f32; 32]>, block: &mut [u8; 20]) {
    let source = Block::new(x, importance);
    let sums = GroupSums::new(&source.x, &source.w);
    let fit = fit_affine::<15, 32, false>(&source.x, &source.w, &sums);
    let d = source.half(fit.scale);
    // The format adds its minimum.
    let m = source.half(-fit.min);
    let codes = Affine { scale: source.units(d), min: -source.units(m) }.codes::<15, 32>(&source.x);
    block[..2].copy_from_slice(&d.to_le_bytes());
    block[2..4].copy_from_slice(&m.to_le_bytes());
    for j in 0..16 {
        block[4 + j] = codes[j] | codes[j + 16] << 4;
    }
}
