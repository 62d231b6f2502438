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

use super::fit::{Block, Integers, codes};
use super::superblock::fit_scales;
use super::{BlockFormat, Encode, f16_at};

/// 6-bit codes around zero with 8-bit scales per 16.
#[allow(non_camel_case_types)]
pub struct Q6_K;

type Codes = Integers<-32, 31>;

impl BlockFormat<256, 210> for Q6_K {
    const FROM_FLOAT: Option<Encode<256, 210>> = Some(from_float);

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

fn from_float(x: &[f32; 256], importance: Option<&[f32; 256]>, block: &mut [u8; 210]) {
    let source = Block::new(x, importance);
    let fit = fit_scales::<Codes, 256, 16, 16>(&source, -128, 127);
    let d = source.units(fit.d);
    *block = [0; 210];
    for (group, x) in source.x.as_chunks::<16>().0.iter().enumerate() {
        let codes = codes::<Codes, 16>(x, d * f32::from(fit.scales[group]));
        let (half, run, start) = (group / 8, group % 8 / 2, group % 2 * 16);
        for (j, code) in codes.into_iter().enumerate() {
            block[64 * half + run % 2 * 32 + start + j] |= (code & 15) << (run / 2 * 4);
            block[128 + 32 * half + start + j] |= code >> 4 << (run * 2);
        }
        block[192 + group] = fit.scales[group] as u8;
    }
    block[208..].copy_from_slice(&fit.d.to_le_bytes());
}
