//! MXFP4: 32 elements in 17 bytes, `value = 2^(e - 128) * KVALUES_FP4[code]`.
//!
//! | bytes | what |
//! |---|---|
//! | 0 | `e`, the shared exponent (E8M0 of the OCP Microscaling specification v1.0) |
//! | 1..17 | codes: byte `j` holds element `j` in its low nibble and element `j + 16` in its high nibble |
//!
//! The table's values are doubled E2M1, so the exponent is one lower than the specification's 127. The specification
//! reserves `e = 255` for NaN; GGUF decoders read it as the power of two it would be, and so does this one.

use super::BlockFormat;
use super::tables::KVALUES_FP4;

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
    fn to_float(block: &[u8; 17], out: &mut [f32; 32]) {
        let d = half_scale(block[0]);
        for j in 0..16 {
            let byte = block[1 + j];
            out[j] = d * f32::from(KVALUES_FP4[usize::from(byte & 15)]);
            out[j + 16] = d * f32::from(KVALUES_FP4[usize::from(byte >> 4)]);
        }
    }
}
