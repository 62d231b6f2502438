//! Q5_0: 32 elements in 22 bytes, `value = d * (code - 16)`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..6 | bit 4 of the codes: bit `j` of the little-endian word belongs to element `j` |
//! | 6..22 | bits 0..4: byte `j` holds element `j` in its low nibble and element `j + 16` in its high nibble |

use super::fit::{Block, Integers, codes, fit_scale};
use super::{BlockFormat, Encode, f16_at, u32_at};

/// 5-bit codes around zero, one scale per 32.
#[allow(non_camel_case_types)]
pub struct Q5_0;

type Codes = Integers<-16, 15>;

impl BlockFormat<32, 22> for Q5_0 {
    const FROM_FLOAT: Option<Encode<32, 22>> = Some(from_float);

    fn to_float(block: &[u8; 22], out: &mut [f32; 32]) {
        let d = f16_at(block, 0);
        let high = u32_at(block, 2);
        for j in 0..16 {
            let byte = block[6 + j];
            let low = (byte & 15) | ((high >> j) as u8 & 1) << 4;
            let upper = (byte >> 4) | ((high >> (j + 16)) as u8 & 1) << 4;
            out[j] = d * f32::from(low as i8 - 16);
            out[j + 16] = d * f32::from(upper as i8 - 16);
        }
    }
}

fn from_float(x: &[f32; 32], importance: Option<&[f32; 32]>, block: &mut [u8; 22]) {
    let source = Block::new(x, importance);
    let d = source.half(fit_scale::<Codes, 32>(&source.x, &source.w));
    let codes = codes::<Codes, 32>(&source.x, source.units(d));
    block[..2].copy_from_slice(&d.to_le_bytes());
    let (high, low) = split_bit_4(&codes);
    block[2..6].copy_from_slice(&high);
    block[6..].copy_from_slice(&low);
}

/// 5-bit codes as the word of their upper bits and the bytes of their lower nibbles.
pub(super) fn split_bit_4(codes: &[u8; 32]) -> ([u8; 4], [u8; 16]) {
    let high = (0..32).fold(0u32, |word, j| word | u32::from(codes[j] >> 4) << j);
    (high.to_le_bytes(), std::array::from_fn(|j| (codes[j] & 15) | (codes[j + 16] & 15) << 4))
}
