//! Q8_0: 32 elements in 34 bytes, `value = d * code`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..34 | codes, i8, in element order |

use super::fit::{Block, Integers, codes, fit_scale};
use super::{BlockFormat, Encode, f16_at};

/// Signed bytes, one scale per 32.
#[allow(non_camel_case_types)]
pub struct Q8_0;

type Codes = Integers<-127, 127>;

impl BlockFormat<32, 34> for Q8_0 {
    const FROM_FLOAT: Option<Encode<32, 34>> = Some(from_float);

    fn to_float(block: &[u8; 34], out: &mut [f32; 32]) {
        let d = f16_at(block, 0);
        for (value, &code) in out.iter_mut().zip(&block[2..]) {
            *value = d * f32::from(code as i8);
        }
    }
}

fn from_float(x: &[f32; 32], importance: Option<&[f32; 32]>, block: &mut [u8; 34]) {
    let source = Block::new(x, importance);
    let d = source.half(fit_scale::<Codes, 32>(&source.x, &source.w));
    let codes = codes::<Codes, 32>(&source.x, source.units(d));
    block[..2].copy_from_slice(&d.to_le_bytes());
    for (byte, code) in block[2..].iter_mut().zip(codes) {
        *byte = code.wrapping_sub(127); // codes count from -127
    }
}
