//! Q5_K: 256 elements in 176 bytes, 8 groups of 32, `value = d * scale * code - dmin * min`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..4 | `dmin`, f16 |
//! | 4..16 | 8 scales and 8 mins of 6 bits, as in [`q4_k::scales_mins`] |
//! | 16..48 | bit 4 of the codes: element `32 g + j` (`j < 32`) is bit `g` of byte `16 + j` |
//! | 48..176 | bits 0..4: element `64 c + j` (`j < 32`) is the low nibble of byte `48 + 32 c + j`, element `64 c + 32 + j` the high one |

use super::{BlockFormat, f16_at, q4_k};

/// 5-bit codes with 6-bit scales and minima per 32.
#[allow(non_camel_case_types)]
pub struct Q5_K;

impl BlockFormat<256, 176> for Q5_K {
    fn to_float(block: &[u8; 176], out: &mut [f32; 256]) {
        let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
        let (scales, mins) = q4_k::scales_mins(block[4..].first_chunk().expect("12 of 172 bytes"));
        let high = &block[16..48];
        for (group, values) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let scale = d * f32::from(scales[group]);
            let min = dmin * f32::from(mins[group]);
            let low = &block[48 + group / 2 * 32..][..32];
            for ((value, &low), &high) in values.iter_mut().zip(low).zip(high) {
                let code = (low >> (group % 2 * 4) & 15) | (high >> group & 1) << 4;
                *value = scale * f32::from(code) - min;
            }
        }
    }
}
