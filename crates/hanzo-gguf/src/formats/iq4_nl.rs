//! IQ4_NL: 32 elements in 18 bytes, `value = d * KVALUES_IQ4_NL[code]`.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..18 | codes: byte `j` holds element `j` in its low nibble and element `j + 16` in its high nibble |

use super::fit::{Block, Levels, codes, fit_scale};
use super::lanes::Lanes;
use super::tables::KVALUES_IQ4_NL;
use super::{BlockFormat, Encode, f16_at};

/// 4-bit codes into a non-linear table, one scale per 32.
#[allow(non_camel_case_types)]
pub struct IQ4_NL;

impl BlockFormat<32, 18> for IQ4_NL {
    const FROM_FLOAT: Option<Encode<32, 18>> = Some(from_float);

    fn to_float(block: &[u8; 18], out: &mut [f32; 32]) {
        let d = f16_at(block, 0);
        for j in 0..16 {
            let byte = block[2 + j];
            out[j] = d * f32::from(KVALUES_IQ4_NL[usize::from(byte & 15)]);
            out[j + 16] = d * f32::from(KVALUES_IQ4_NL[usize::from(byte >> 4)]);
        }
    }
}

fn from_float(x: &[f32; 32], importance: Option<&[f32; 32]>, block: &mut [u8; 18]) {
    let source = Block::new(x, importance);
    let d = source.half(fit_scale::<Codes, 32>(&source.x, &source.w));
    let codes = codes::<Codes, 32>(&source.x, source.units(d));
    block[..2].copy_from_slice(&d.to_le_bytes());
    for j in 0..16 {
        block[2 + j] = codes[j] | codes[j + 16] << 4;
    }
}

/// The levels of [`KVALUES_IQ4_NL`].
pub(super) struct Codes;

/// Entry `k`: half way between the levels `k` and `k + 1`.
const MIDDLES: [f32; 15] = {
    let mut middles = [0.0; 15];
    let mut k = 0;
    while k < 15 {
        middles[k] = (KVALUES_IQ4_NL[k] as f32 + KVALUES_IQ4_NL[k + 1] as f32) / 2.0;
        k += 1;
    }
    middles
};

/// Entry `k`: the distance of the levels `k` and `k + 1`.
const STEPS: [f32; 15] = {
    let mut steps = [0.0; 15];
    let mut k = 0;
    while k < 15 {
        steps[k] = KVALUES_IQ4_NL[k + 1] as f32 - KVALUES_IQ4_NL[k] as f32;
        k += 1;
    }
    steps
};

impl Levels for Codes {
    const LOW: f32 = -127.0;
    const HIGH: f32 = 113.0;
    const STEP: f32 = 23.5;

    /// Climbs every step whose middle `v` is above: sums of small integers, exact.
    #[inline(always)]
    fn nearest(v: Lanes) -> Lanes {
        let mut level = Lanes::splat(Self::LOW);
        for k in 0..15 {
            level = level + v.step_above(MIDDLES[k], STEPS[k]);
        }
        level
    }

    #[inline(always)]
    fn code(level: f32) -> u8 {
        MIDDLES.iter().map(|&middle| u8::from(level > middle)).sum()
    }
}
