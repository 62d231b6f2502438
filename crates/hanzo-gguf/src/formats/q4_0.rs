//! Q4_0: 32 elements in 18 bytes, `value = d * (code - 8)`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..18 | codes: byte `j` holds element `j` in its low nibble and element `j + 16` in its high nibble |

use super::fit::{Block, Integers, codes, fit_scale};
use super::{BlockFormat, Encode, f16_at};

/// 4-bit codes around zero, one scale per 32.
#[allow(non_camel_case_types)]
pub struct Q4_0;

type Codes = Integers<-8, 7>;

impl BlockFormat<32, 18> for Q4_0 {
    const FROM_FLOAT: Option<Encode<32, 18>> = Some(from_float);

    fn to_float(block: &[u8; 18], out: &mut [f32; 32]) {
        let d = f16_at(block, 0);
        for j in 0..16 {
            let byte = block[2 + j];
            out[j] = d * f32::from((byte & 15) as i8 - 8);
            out[j + 16] = d * f32::from((byte >> 4) as i8 - 8);
        }
    }
}

fn from_float(x: &[f32; 32], importance: Option<&[f32; 32]>, block: &mut [u8; 18]) {
    let source = Block::new(x, importance);
    let d = source.half(fit_scale::<Codes, 32>(&source.x, &source.w));
    let codes = codes::<Codes, 32>(&source.x, source.units(d));
    block[..2].copy_from_slice(&d.to_le_bytes());
    for j in 0..16 {
        block[2 + j] = codes[j] | codes[j + 16] << 4;
    }
}
