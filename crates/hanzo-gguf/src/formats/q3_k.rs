//! Q3_K: 256 elements in 110 bytes, 16 groups of 16, `value = d * (scale - 32) * (code - 4)`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..32 | bit 2 of the codes: element `32 i + j` (`j < 32`) is bit `i` of byte `j` |
//! | 32..96 | bits 0..2: element `128 n + 32 s + j` (`j < 32`) is in byte `32 + 32 n + j`, bits `2 s..2 s + 2` |
//! | 96..108 | 16 scales of 6 bits, see [`scales`] |
//! | 108..110 | `d`, f16 |

use super::fit::{Block, Integers, codes};
use super::superblock::fit_scales;
use super::{BlockFormat, Encode, f16_at};

/// 3-bit codes with 6-bit scales per 16.
#[allow(non_camel_case_types)]
pub struct Q3_K;

type Codes = Integers<-4, 3>;

/// The 16 scales of the 12 packed bytes, with their offset of 32 taken off (-32..=31).
///
/// Bits 0..4 of scale `g` are nibble `g / 8` of byte `g % 8`; bits 4..6 are bits `2 (g / 4)..` of byte `8 + g % 4`.
pub fn scales(packed: &[u8; 12]) -> [i8; 16] {
    std::array::from_fn(|g| {
        let low = packed[g % 8] >> (g / 8 * 4) & 15;
        let high = packed[8 + g % 4] >> (g / 4 * 2) & 3;
        (low | high << 4) as i8 - 32
    })
}

impl BlockFormat<256, 110> for Q3_K {
    const FROM_FLOAT: Option<Encode<256, 110>> = Some(from_float);

    fn to_float(block: &[u8; 110], out: &mut [f32; 256]) {
        let d = f16_at(block, 108);
        let scales = scales(block[96..].first_chunk().expect("12 of 14 bytes"));
        for (group, values) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = d * f32::from(scales[group]);
            let (half, shift, start) = (group / 8, group % 8 / 2 * 2, group % 2 * 16);
            let high = &block[start..][..16];
            let low = &block[32 + 32 * half + start..][..16];
            for ((value, &low), &high) in values.iter_mut().zip(low).zip(high) {
                let code = (low >> shift & 3) | (high >> (group / 2) & 1) << 2;
                *value = scale * f32::from(code as i8 - 4);
            }
        }
    }
}

fn from_float(x: &[f32; 256], importance: Option<&[f32; 256]>, block: &mut [u8; 110]) {
    let source = Block::new(x, importance);
    let fit = fit_scales::<Codes, 256, 16, 16>(&source, -32, 31);
    let d = source.units(fit.d);
    *block = [0; 110];
    for (group, x) in source.x.as_chunks::<16>().0.iter().enumerate() {
        let codes = codes::<Codes, 16>(x, d * f32::from(fit.scales[group]));
        let (half, shift, start) = (group / 8, group % 8 / 2 * 2, group % 2 * 16);
        for (j, code) in codes.into_iter().enumerate() {
            block[start + j] |= code >> 2 << (group / 2);
            block[32 + 32 * half + start + j] |= (code & 3) << shift;
        }
    }
    block[96..108].copy_from_slice(&pack_scales(&fit.scales));
    block[108..].copy_from_slice(&fit.d.to_le_bytes());
}

/// The inverse of [`scales`].
fn pack_scales(scales: &[i8; 16]) -> [u8; 12] {
    let mut packed = [0; 12];
    for (g, &scale) in scales.iter().enumerate() {
        let stored = (scale + 32) as u8;
        packed[g % 8] |= (stored & 15) << (g / 8 * 4);
        packed[8 + g % 4] |= stored >> 4 << (g / 4 * 2);
    }
    packed
}
