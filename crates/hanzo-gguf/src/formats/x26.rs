//! A format that exists for tests only: 32 elements in 13 bytes, `value = 2^(e - 140) * (code - 4)`.
//!
//! It shows what adding a format takes: this file and its row in the table. The layout is like no other's on purpose: codes
//! cross byte borders, and the scale is an exponent at the end.
//!
//! | bytes | what |
//! |---|---|
//! | 0..12 | 3-bit codes: element `i` is bits `3 i..3 i + 3` of the 96-bit little-endian number |
//! | 12 | `e` |

use super::fit::{Block, Integers, codes, scale_error};
use super::{BlockFormat, Encode};

/// 3-bit codes around zero, one power of two per 32.
#[allow(non_camel_case_types)]
pub struct X26_TEST;

type Codes = Integers<-4, 3>;

/// The exponent of two that `e = 0` stands for.
const LOWEST: i32 = -140;

impl BlockFormat<32, 13> for X26_TEST {
    const FROM_FLOAT: Option<Encode<32, 13>> = Some(from_float);

    fn to_float(block: &[u8; 13], out: &mut [f32; 32]) {
        let scale = 2f64.powi(i32::from(block[12]) + LOWEST);
        let bits = number(block);
        for (i, value) in out.iter_mut().enumerate() {
            *value = (scale * f64::from((bits >> (3 * i) & 7) as i8 - 4)) as f32;
        }
    }
}

/// The codes as one number.
fn number(block: &[u8; 13]) -> u128 {
    block[..12].iter().rev().fold(0, |bits, &byte| bits << 8 | u128::from(byte))
}

fn from_float(x: &[f32; 32], importance: Option<&[f32; 32]>, block: &mut [u8; 13]) {
    let source = Block::new(x, importance);
    // The largest weight falls on a level from 2 to 4, or 1 to 2.
    let mut best = (f32::INFINITY, 0);
    for below in [1, 2] {
        let e = (source.exponent() - below - LOWEST).clamp(0, 255);
        let error = scale_error::<Codes, 32>(&source.x, &source.w, source.units_of_power(e + LOWEST));
        if error < best.0 {
            best = (error, e);
        }
    }
    let codes = codes::<Codes, 32>(&source.x, source.units_of_power(best.1 + LOWEST));
    let bits = codes.iter().rev().fold(0u128, |bits, &code| bits << 3 | u128::from(code));
    block[..12].copy_from_slice(&bits.to_le_bytes()[..12]);
    block[12] = best.1 as u8;
}

#[cfg(test)]
mod tests {
    use crate::Format;
    use crate::formats::{from_float, round_trip, to_float};

    #[test]
    fn the_row_alone_makes_the_format_known() {
        let format = Format::from_name("x26_test").expect("in the table");
        assert_eq!(Format::from_id(format.id()), Some(format));
        assert!(Format::ALL.contains(&format) && format.is_weight());
        assert_eq!(format.row_bytes(64), Some(26));
    }

    #[test]
    fn codes_cross_bytes_and_come_back() {
        let format = Format::from_id(0xF026).expect("in the table");
        let weights: Vec<f32> = (0..32).map(|i| ((i * 5 % 8) as f32 - 4.0) * 0.25).collect();
        let mut packed = [0; 13];
        from_float(format, &weights, None, &mut packed).expect("finite weights");
        let mut back = [0.0; 32];
        to_float(format, &packed, &mut back);
        assert_eq!(back.as_slice(), weights);
        assert_eq!(packed[12], 138);
        // Elements 0 to 2 have the codes 0, 5 and 2: bits 000 101 01|0.
        assert_eq!((packed[0], packed[1] & 1), (0b10_101_000, 0));
        assert_eq!(round_trip(format, &weights, None).expect("finite weights").rmse, 0.0);
    }
}
