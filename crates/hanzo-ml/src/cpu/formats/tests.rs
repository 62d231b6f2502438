//! Every format's codes and scales against `to_float`, on every instruction set, and blocks for the contractions' tests.

use hanzo_gguf::Format;
use hanzo_gguf::formats::to_float;

use super::*;
use crate::cpu::isa::Portable;
use crate::cpu::isa::{self, IsaLevel};

/// A small deterministic generator (SplitMix64).
pub(crate) struct Rng(pub u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Roughly Gaussian, variance 1.
    pub(crate) fn normal(&mut self) -> f32 {
        let sum: f32 = (0..12).map(|_| (self.next() >> 40) as f32 / (1 << 24) as f32).sum();
        sum - 6.0
    }
}

/// What the float scales of random blocks are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ScaleKind {
    /// Normal half floats around 2^-7, either sign.
    Normal,
    /// Subnormal half floats.
    Subnormal,
    /// Zero.
    Zero,
}

/// A half float of a kind, as bits.
fn half_bits(rng: &mut Rng, kind: ScaleKind) -> u16 {
    let x = rng.next();
    match kind {
        ScaleKind::Normal => (x as u16 & 0x83ff) | (6 + (x >> 32) as u16 % 4) << 10,
        ScaleKind::Subnormal => x as u16 & 0x83ff,
        ScaleKind::Zero => 0,
    }
}

/// Packed rows of random blocks: every byte random but the float scales.
pub(crate) fn random_rows(format: Format, rng: &mut Rng, bytes: usize, kind: ScaleKind) -> Vec<u8> {
    let mut data: Vec<u8> = (0..bytes).map(|_| rng.next() as u8).collect();
    for block in data.chunks_exact_mut(format.block_bytes()) {
        let halves: &[usize] = match format {
            Format::Q4_1 | Format::Q5_1 | Format::Q4_K | Format::Q5_K => &[0, 2],
            Format::Q2_K => &[80, 82],
            Format::Q3_K => &[108],
            Format::Q6_K => &[208],
            Format::TQ1_0 => &[52],
            Format::TQ2_0 => &[64],
            Format::IQ1_M => {
                let d = half_bits(rng, kind);
                for i in 0..4 {
                    block[49 + 2 * i] = block[49 + 2 * i] & 0x0f | (d >> (4 * i) << 4) as u8;
                }
                &[]
            }
            Format::MXFP4 => {
                block[0] = match kind {
                    ScaleKind::Normal => 118 + rng.next() as u8 % 8,
                    ScaleKind::Subnormal => rng.next() as u8 % 2,
                    ScaleKind::Zero => 0,
                };
                &[]
            }
            Format::NVFP4 => {
                for scale in &mut block[..4] {
                    *scale = match kind {
                        ScaleKind::Normal => rng.next() as u8 % 0x7f,
                        ScaleKind::Subnormal => rng.next() as u8 % 8,
                        ScaleKind::Zero => [0, 0x7f][rng.next() as usize % 2],
                    };
                }
                &[]
            }
            #[cfg(feature = "synthetic-format")]
            Format::X26_TEST => {
                block[12] = match kind {
                    ScaleKind::Normal => 130 + rng.next() as u8 % 8,
                    ScaleKind::Subnormal => rng.next() as u8 % 20,
                    ScaleKind::Zero => 0,
                };
                &[]
            }
            _ => &[0],
        };
        for &at in halves {
            let bits = half_bits(rng, kind);
            block[at..at + 2].copy_from_slice(&bits.to_le_bytes());
        }
    }
    data
}

/// One block in the normal form: per element the code (offset taken off), and its group's scale and minimum.
pub(crate) fn normal_form<F: CpuFormat>(block: &[u8]) -> Vec<(i32, f32, f32)> {
    let (mut s, mut m) = (Scales::NONE, Scales::NONE);
    // SAFETY: the portable instruction set runs anywhere; `block` is one block.
    unsafe { F::scales::<Portable>(block.as_ptr(), &mut s, &mut m) };
    let mut ahead = Ahead::new();
    // SAFETY: as above.
    unsafe { F::look_ahead::<Portable>(block.as_ptr(), &mut ahead) };
    let mut out = Vec::new();
    for chunk in 0..F::CHUNKS {
        // SAFETY: as above.
        let codes = unsafe { F::codes::<Portable>(block.as_ptr(), chunk, &ahead) };
        for (i, code) in codes.into_iter().enumerate() {
            let code = if F::SIGNED { i32::from(code as i8) } else { i32::from(code) - i32::from(F::OFFSET) };
            let group = (32 * chunk + i) / F::GROUP;
            out.push((code, s.0[group], if F::HAS_MIN { m.0[group] } else { 0.0 }));
        }
    }
    out
}

fn normal_form_gives_to_float<F: CpuFormat>() {
    let mut rng = Rng(F::FORMAT.id().into());
    for kind in [ScaleKind::Normal, ScaleKind::Subnormal, ScaleKind::Zero] {
        for block in random_rows(F::FORMAT, &mut rng, 200 * F::BYTES, kind).chunks_exact(F::BYTES) {
            let mut exact = vec![0f32; F::FORMAT.block_len()];
            to_float(F::FORMAT, block, &mut exact);
            for (i, ((code, s, m), exact)) in normal_form::<F>(block).into_iter().zip(exact).enumerate() {
                let value = s * code as f32 - m;
                assert_eq!(value, exact, "{} element {i}: {s} * {code} - {m}", F::FORMAT);
                assert!((-128..=127).contains(&code));
            }
        }
    }
}

/// Codes and scales on `I` equal the portable ones.
fn same_as_portable<I: Isa, F: CpuFormat>() {
    let mut rng = Rng(7);
    for kind in [ScaleKind::Normal, ScaleKind::Subnormal] {
        for block in random_rows(F::FORMAT, &mut rng, 100 * F::BYTES, kind).chunks_exact(F::BYTES) {
            let (mut s, mut m) = (Scales::NONE, Scales::NONE);
            let (mut s0, mut m0) = (Scales::NONE, Scales::NONE);
            // SAFETY: the caller checked that the CPU has `I`; `block` is one block.
            unsafe {
                F::scales::<I>(block.as_ptr(), &mut s, &mut m);
                F::scales::<Portable>(block.as_ptr(), &mut s0, &mut m0);
            }
            let (mut ahead, mut ahead0) = (Ahead::new(), Ahead::new());
            // SAFETY: as above.
            unsafe {
                F::look_ahead::<I>(block.as_ptr(), &mut ahead);
                F::look_ahead::<Portable>(block.as_ptr(), &mut ahead0);
            }
            assert_eq!((s, m), (s0, m0), "{} scales", F::FORMAT);
            for chunk in 0..F::CHUNKS {
                let mut codes = [0u8; 32];
                // SAFETY: as above.
                let expected = unsafe {
                    I::store(codes.as_mut_ptr(), F::codes::<I>(block.as_ptr(), chunk, &ahead));
                    let mut expected = [0u8; 32];
                    let plain = F::codes::<Portable>(block.as_ptr(), chunk, &ahead0);
                    let plain = if F::SIGNED { I::signed(I::load(plain.as_ptr())) } else { I::load(plain.as_ptr()) };
                    I::store(expected.as_mut_ptr(), plain);
                    expected
                };
                assert_eq!(codes, expected, "{} chunk {chunk}", F::FORMAT);
            }
        }
    }
}

macro_rules! all_formats {
    ($( $(#[$attr:meta])* $module:ident :: $format:ident, )*) => {
        #[test]
        fn every_format_in_normal_form_equals_to_float_bit_for_bit() {
            $( $(#[$attr])* normal_form_gives_to_float::<$module::$format>(); )*
        }

        #[test]
        fn every_format_unpacks_alike_on_every_instruction_set() {
            for level in IsaLevel::available() {
                match level {
                    IsaLevel::Portable => {}
                    #[cfg(target_arch = "x86_64")]
                    IsaLevel::Avx2 => { $( $(#[$attr])* same_as_portable::<isa::Avx2, $module::$format>(); )* }
                    #[cfg(target_arch = "x86_64")]
                    IsaLevel::Avx512 | IsaLevel::Avx512Vbmi | IsaLevel::Avx512Bf16 => { $( $(#[$attr])* same_as_portable::<isa::Avx512, $module::$format>(); )* }
                    #[cfg(target_arch = "aarch64")]
                    IsaLevel::Neon => { $( $(#[$attr])* same_as_portable::<isa::Neon, $module::$format>(); )* }
                    #[cfg(target_arch = "aarch64")]
                    IsaLevel::I8mm => { $( $(#[$attr])* same_as_portable::<isa::I8mm, $module::$format>(); )* }
                    _ => panic!("{level} is of another architecture"),
                }
            }
        }
    };
}
for_each_cpu_format!(all_formats);

#[test]
fn every_block_format_has_a_cpu_file() {
    let mut seen = Vec::new();
    macro_rules! push {
        ($( $(#[$attr:meta])* $module:ident :: $format:ident, )*) => {
            $( $(#[$attr])* seen.push(<$module::$format as CpuFormat>::FORMAT); )*
        };
    }
    for_each_cpu_format!(push);
    for &format in Format::ALL {
        assert_eq!(seen.contains(&format), format.is_block(), "{format}");
    }
}

#[test]
fn six_bit_scales_become_signed() {
    for x in 0..64u64 {
        let bytes = minus_32(x * 0x0101_0101_0101_0101).to_le_bytes();
        assert!(bytes.iter().all(|&b| i64::from(b as i8) == x as i64 - 32), "{x}");
    }
}
