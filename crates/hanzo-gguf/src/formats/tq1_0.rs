//! TQ1_0: 256 ternary elements in 54 bytes, `value = d * (digit - 1)`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..32 | element `32 n + j` (`n < 5`, `j < 32`) is ternary digit `n` of byte `j` |
//! | 32..48 | element `160 + 16 n + j` (`n < 5`, `j < 16`) is ternary digit `n` of byte `32 + j` |
//! | 48..52 | element `240 + 4 n + j` (`n < 4`, `j < 4`) is ternary digit `n` of byte `48 + j` |
//! | 52..54 | `d`, f16 |
//!
//! A byte is a fraction of 256 written in base three, first digit most significant: multiplying by 3^n modulo 256 drops
//! the first `n` digits, and the next one is the whole part of three times what remains.

use super::tq2_0::fit_ternary;
use super::{BlockFormat, Encode, f16_at};

/// Ternary codes, five to a byte, one scale per 256.
#[allow(non_camel_case_types)]
pub struct TQ1_0;

/// The runs of bytes: first byte, number of bytes, digits in each.
const RUNS: [(usize, usize, usize); 3] = [(0, 32, 5), (32, 16, 5), (48, 4, 4)];
const POWERS: [u8; 5] = [1, 3, 9, 27, 81];

/// Ternary digit `n` of a byte, 0..=2.
#[inline]
fn digit(byte: u8, n: usize) -> u8 {
    ((u16::from(byte.wrapping_mul(POWERS[n])) * 3) >> 8) as u8
}

impl BlockFormat<256, 54> for TQ1_0 {
    const FROM_FLOAT: Option<Encode<256, 54>> = Some(from_float);

    fn to_float(block: &[u8; 54], out: &mut [f32; 256]) {
        let d = f16_at(block, 52);
        let mut values = out.iter_mut();
        for (start, bytes, digits) in RUNS {
            for n in 0..digits {
                for (&byte, value) in block[start..start + bytes].iter().zip(values.by_ref()) {
                    *value = d * f32::from(digit(byte, n) as i8 - 1);
                }
            }
        }
    }
}

fn from_float(x: &[f32; 256], importance: Option<&[f32; 256]>, block: &mut [u8; 54]) {
    let (d, digits) = fit_ternary(x, importance);
    let mut first = 0;
    for (start, bytes, count) in RUNS {
        for j in 0..bytes {
            let number = (0..5).fold(0u16, |number, n| {
                let digit = if n < count { digits[first + n * bytes + j] } else { 0 };
                number * 3 + u16::from(digit)
            });
            // Rounded up, so that the digits come back although 3^5 = 243 does not divide 256.
            block[start + j] = (number * 256).div_ceil(243) as u8;
        }
        first += bytes * count;
    }
    block[52..].copy_from_slice(&d.to_le_bytes());
}
