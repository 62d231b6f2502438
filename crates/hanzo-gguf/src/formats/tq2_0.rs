//! TQ2_0: 256 ternary elements in 66 bytes, `value = d * (code - 1)`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..64 | 2-bit codes: element `128 n + 32 s + j` (`j < 32`) is in byte `32 n + j`, bits `2 s..2 s + 2` |
//! | 64..66 | `d`, f16 |
//!
//! Code 3 (value `2 d`) is readable but no writer makes it.

use super::fit::Block;
use super::{BlockFormat, Encode, f16_at};
use half::f16;

/// Ternary codes, four to a byte, one scale per 256.
#[allow(non_camel_case_types)]
pub struct TQ2_0;

impl BlockFormat<256, 66> for TQ2_0 {
    const FROM_FLOAT: Option<Encode<256, 66>> = Some(from_float);

    fn to_float(block: &[u8; 66], out: &mut [f32; 256]) {
        let d = f16_at(block, 64);
        for (run, values) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (value, &byte) in values.iter_mut().zip(&block[run / 4 * 32..][..32]) {
                *value = d * f32::from((byte >> (run % 4 * 2) & 3) as i8 - 1);
            }
        }
    }
}

fn from_float(x: &[f32; 256], importance: Option<&[f32; 256]>, block: &mut [u8; 66]) {
    let (d, digits) = fit_ternary(x, importance);
    *block = [0; 66];
    for (run, digits) in digits.as_chunks::<32>().0.iter().enumerate() {
        for (byte, digit) in block[run / 4 * 32..].iter_mut().zip(digits) {
            *byte |= digit << (run % 4 * 2);
        }
    }
    block[64..].copy_from_slice(&d.to_le_bytes());
}

/// The best scale of 256 ternary weights, and their digits (0, 1, 2 for `-d`, 0, `d`).
///
/// For a scale `d` the weights above `d / 2` are not zero; so the best choice is a number of largest weights, and their
/// weighted mean is its scale. All 256 choices are tried: the one that takes most off the error,
/// `(sum w |x|)^2 / sum w` over the chosen, is the least squares solution. Weights that are ternary come back exactly.
pub(super) fn fit_ternary(x: &[f32; 256], importance: Option<&[f32; 256]>) -> (f16, [u8; 256]) {
    let source = Block::new(x, importance);
    let mut order: [(f32, f32); 256] = std::array::from_fn(|i| (source.x[i].abs(), source.w[i]));
    order.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(b.1.total_cmp(&a.1)));
    let (mut weight, mut sum) = (0f64, 0f64);
    let (mut best_gain, mut best) = (0f64, 0f32);
    for (x, w) in order {
        weight += f64::from(w);
        sum += f64::from(w) * f64::from(x);
        if sum * sum / weight > best_gain {
            best_gain = sum * sum / weight;
            best = (sum / weight) as f32;
        }
    }
    let d = source.half(best);
    let threshold = source.units(d) / 2.0;
    // A scale that rounds to zero stores zeros.
    let digits =
        source.x.map(|x| if threshold == 0.0 { 1 } else { 1 + u8::from(x > threshold) - u8::from(x < -threshold) });
    (d, digits)
}
