//! IQ4_XS: 256 elements in 136 bytes, 8 groups of 32, `value = d * (scale - 32) * KVALUES_IQ4_NL[code]`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..4 | bits 4..6 of the scales: group `g` has bits `2 g..2 g + 2` of the little-endian word |
//! | 4..8 | bits 0..4 of the scales: group `g` has nibble `g % 2` of byte `4 + g / 2` |
//! | 8..136 | codes: byte `8 + 16 g + j` (`j < 16`) holds element `32 g + j` in its low nibble and `32 g + 16 + j` in its high one |

use super::fit::{Block, codes};
use super::iq4_nl::Codes;
use super::superblock::fit_scales;
use super::tables::KVALUES_IQ4_NL;
use super::{BlockFormat, Encode, f16_at, u16_at};

/// 4-bit codes into a non-linear table, 6-bit scales per 32.
#[allow(non_camel_case_types)]
pub struct IQ4_XS;

/// The 8 group scales of a block, with their offset of 32 taken off (-32..=31).
pub fn scales(block: &[u8; 136]) -> [i8; 8] {
    let high = u16_at(block, 2);
    std::array::from_fn(|g| {
        let low = block[4 + g / 2] >> (g % 2 * 4) & 15;
        (low | ((high >> (2 * g)) as u8 & 3) << 4) as i8 - 32
    })
}

impl BlockFormat<256, 136> for IQ4_XS {
    const FROM_FLOAT: Option<Encode<256, 136>> = Some(from_float);

    fn to_float(block: &[u8; 136], out: &mut [f32; 256]) {
        let d = f16_at(block, 0);
        let scales = scales(block);
        for (group, values) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let scale = d * f32::from(scales[group]);
            let bytes = &block[8 + 16 * group..][..16];
            for (j, &byte) in bytes.iter().enumerate() {
                values[j] = scale * f32::from(KVALUES_IQ4_NL[usize::from(byte & 15)]);
                values[j + 16] = scale * f32::from(KVALUES_IQ4_NL[usize::from(byte >> 4)]);
            }
        }
    }
}

fn from_float(x: &[f32; 256], importance: Option<&[f32; 256]>, block: &mut [u8; 136]) {
    let source = Block::new(x, importance);
    let fit = fit_scales::<Codes, 256, 32, 8>(&source, -32, 31);
    let d = source.units(fit.d);
    *block = [0; 136];
    block[..2].copy_from_slice(&fit.d.to_le_bytes());
    for (group, x) in source.x.as_chunks::<32>().0.iter().enumerate() {
        let stored = (fit.scales[group] + 32) as u8;
        block[2 + group / 4] |= stored >> 4 << (group % 4 * 2);
        block[4 + group / 2] |= (stored & 15) << (group % 2 * 4);
        let codes = codes::<Codes, 32>(x, d * f32::from(fit.scales[group]));
        for j in 0..16 {
            block[8 + 16 * group + j] = codes[j] | codes[j + 16] << 4;
        }
    }
}
