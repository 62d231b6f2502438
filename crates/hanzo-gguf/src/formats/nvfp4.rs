//! NVFP4: 64 elements in 36 bytes, 4 groups of 16, `value = scale / 2 * KVALUES_FP4[code]`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..4 | scale of each group, unsigned E4M3 (see [`half_scale`]) |
//! | 4..36 | codes: byte `4 + 8 g + j` (`j < 8`) holds element `16 g + j` in its low nibble and `16 g + 8 + j` in its high one |

use super::BlockFormat;
use super::tables::KVALUES_FP4;

/// 4-bit floats, one 8-bit float scale per 16.
pub struct NVFP4;

/// Half of an unsigned E4M3 scale (bias 7, four exponent bits in 3..7, the top bit ignored).
///
/// Exponent 0 is subnormal (`mantissa * 2^-9`). The byte 0x7f, E4M3's NaN, reads as zero, as GGUF decoders do.
#[inline]
pub fn half_scale(byte: u8) -> f32 {
    let exponent = u32::from(byte >> 3 & 15);
    let mantissa = u32::from(byte & 7);
    if byte == 0x7f {
        0.0
    } else if exponent == 0 {
        mantissa as f32 * f32::from_bits((127 - 10) << 23)
    } else {
        f32::from_bits((exponent + 127 - 8) << 23 | mantissa << 20)
    }
}

impl BlockFormat<64, 36> for NVFP4 {
    fn to_float(block: &[u8; 36], out: &mut [f32; 64]) {
        for (group, values) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let d = half_scale(block[group]);
            for j in 0..8 {
                let byte = block[4 + 8 * group + j];
                values[j] = d * f32::from(KVALUES_FP4[usize::from(byte & 15)]);
                values[j + 8] = d * f32::from(KVALUES_FP4[usize::from(byte >> 4)]);
            }
        }
    }
}
