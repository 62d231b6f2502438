//! Q6_K: 256 elements in 210 bytes, 16 groups of 16, `value = d * scale * (code - 32)`.
//!
//! Element `128 n + 32 s + j` (`n < 2`, `s < 4`, `j < 32`) has its bits in two places:
//!
//! | bytes | what |
//! |---|---|
//! | 0..128 | bits 0..4: byte `64 n + 32 (s % 2) + j`, low nibble for `s < 2`, else high |
//! | 128..192 | bits 4..6: byte `128 + 32 n + j`, bits `2 s..2 s + 2` |
//! | 192..208 | 16 scales, i8 |
//! | 208..210 | `d`, f16 |

use super::{BlockFormat, f16_at};

/// 6-bit codes around zero with 8-bit scales per 16.
#[allow(non_camel_case_types)]
pub struct Q6_K;

impl BlockFormat<256, 210> for Q6_K {
    fn to_float(block: &[u8; 210], out: &mut [f32; 256]) {
        let d = f16_at(block, 208);
        for (group, values) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = d * f32::from(block[192 + group] as i8);
            let (half, run, start) = (group / 8, group % 8 / 2, group % 2 * 16);
            let low = &block[64 * half + run % 2 * 32 + start..][..16];
            let high = &block[128 + 32 * half + start..][..16];
            for ((value, &low), &high) in values.iter_mut().zip(low).zip(high) {
                let code = (low >> (run / 2 * 4) & 15) | (high >> (run * 2) & 3) << 4;
                *value = scale * f32::from(code as i8 - 32);
            }
        }
    }
}
