//! MXFP4: 32 elements in 17 bytes, `value = 2^(e - 128) * KVALUES_FP4[code]`.
//!
//! | bytes | what |
//! |---|---|
//! | 0 | `e`, the shared exponent (E8M0 of the OCP Microscaling specification v1.0) |
//! | 1..17 | codes: byte `j` holds element `j` in its low nibble and element `j + 16` in its high nibble |
//!
//! The table's values are doubled E2M1, so the exponent is one lower than the specification's 127. The specification
//! reserves `e = 255` for NaN; GGUF decoders read it as the power of two it would be, and so does this one.

use super::fit::{Block, Levels, codes, scale_error};
use super::lanes::Lanes;
use super::tables::KVALUES_FP4;
use super::{BlockFormat, Encode};

/// 4-bit floats, one power of two per 32.
pub struct MXFP4;

/// `2^(e - 128)`: half the block's scale. The first two are subnormal.
#[inline]
pub fn half_scale(e: u8) -> f32 {
    match e {
        0 => f32::from_bits(1 << 21),
        1 => f32::from_bits(1 << 22),
        _ => f32::from_bits((u32::from(e) - 1) << 23),
    }
}

impl BlockFormat<32, 17> for MXFP4 {
    const FROM_FLOAT: Option<Encode<32, 17>> = Some(from_float);

    fn to_float(block: &[u8; 17], out: &mut [f32; 32]) {
        let d = half_scale(block[0]);
        for j in 0..16 {
            let byte = block[1 + j];
            out[j] = d * f32::from(KVALUES_FP4[usize::from(byte & 15)]);
            out[j + 16] = d * f32::from(KVALUES_FP4[usize::from(byte >> 4)]);
        }
    }
}

fn from_float(x: &[f32; 32], importance: Option<&[f32; 32]>, block: &mut [u8; 17]) {
    let source = Block::new(x, importance);
    // The largest level is 12 = 1.5 * 2^3, so a half scale whose exponent is three lower than the largest weight's covers
    // that weight or clips it a little; one more or one less may leave a smaller error.
    let middle = source.exponent() - 3 + 128;
    let mut best = (f32::INFINITY, 0);
    for e in [middle, middle + 1, middle - 1] {
        let e = e.clamp(0, LARGEST_EXPONENT);
        let error = scale_error::<Codes, 32>(&source.x, &source.w, source.units_of_power(e - 128));
        if error < best.0 {
            best = (error, e);
        }
    }
    block[0] = best.1 as u8;
    let codes = codes::<Codes, 32>(&source.x, source.units_of_power(best.1 - 128));
    for j in 0..16 {
        block[1 + j] = codes[j] | codes[j + 16] << 4;
    }
}

/// The largest `e` that is written: with it all 16 values are finite.
const LARGEST_EXPONENT: i32 = 252;

/// The levels of [`KVALUES_FP4`], zero once.
struct Codes;

/// The middles between neighbouring magnitudes 0, 1, 2, 3, 4, 6, 8, 12 and their distances.
const MAGNITUDES: [(f32, f32); 7] =
    [(0.5, 1.0), (1.5, 1.0), (2.5, 1.0), (3.5, 1.0), (5.0, 2.0), (7.0, 2.0), (10.0, 4.0)];

impl Levels for Codes {
    const LOW: f32 = -12.0;
    const HIGH: f32 = 12.0;
    const STEP: f32 = 4.0;

    #[inline(always)]
    fn nearest(v: Lanes) -> Lanes {
        let magnitude = v.abs();
        let mut level = Lanes::splat(0.0);
        for (middle, step) in MAGNITUDES {
            level = level + magnitude.step_above(middle, step);
        }
        level.with_sign_of(v)
    }

    #[inline(always)]
    fn code(level: f32) -> u8 {
        let magnitude: u8 = MAGNITUDES.iter().map(|&(middle, _)| u8::from(level.abs() > middle)).sum();
        // A negative zero has a code of its own, that nobody needs.
        if level < 0.0 { magnitude | 8 } else { magnitude }
    }
}
