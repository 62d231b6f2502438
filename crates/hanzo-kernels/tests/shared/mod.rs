//! Kernels against what they should give, whatever runs them: the host harness at several waves (`by_hand.rs`) and Vulkan devices
//! (`hanzo-ml/tests/vulkan_kernels.rs`). Bit for bit, but where a bound is derived. No way to run a kernel may enter here.

pub mod formats;
pub mod halves;
pub mod math;
pub mod memory;
pub mod sampling;

use hanzo_gguf::{Format, formats::to_float};
use hanzo_kernels::args::Args;

/// What runs kernels.
pub trait Device {
    /// Its wave.
    fn wave(&self) -> u32;
    /// Memory with these words; its address.
    fn words(&mut self, x: &[u32]) -> u64;
    /// Memory of `n` words with every bit set.
    fn out(&mut self, n: usize) -> u64;
    /// All words of the memory at an address.
    fn words_at(&mut self, at: u64) -> Vec<u32>;
    /// Launches the kernel of `A`; `set` are constants other than its defaults.
    fn launch<A: Args<u64>>(&mut self, format: Option<Format>, args: &A, set: &[(&str, u32)], groups: [u32; 3]);

    /// Memory with these floats.
    fn floats(&mut self, x: &[f32]) -> u64 {
        self.words(&x.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
    }

    /// Memory with these bytes, a multiple of four.
    fn bytes(&mut self, x: &[u8]) -> u64 {
        self.words(&x.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect::<Vec<_>>())
    }

    /// All words of a memory as floats.
    fn floats_at(&mut self, at: u64) -> Vec<f32> {
        self.words_at(at).into_iter().map(f32::from_bits).collect()
    }
}

/// SplitMix64 (Steele, Lea and Flood 2014).
pub struct Rng(pub u64);

impl Rng {
    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Roughly Gaussian: the sum of 12 uniforms less 6.
    pub fn gauss(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }

    /// Roughly Gaussian floats.
    pub fn floats(&mut self, n: usize, scale: f64) -> Vec<f32> {
        (0..n).map(|_| (self.gauss() * scale) as f32).collect()
    }

    /// Random blocks of values of a usual size: no device flushes what makes them.
    pub fn weights(&mut self, format: Format, elements: usize) -> Vec<u8> {
        let (len, bytes) = (format.block_len(), format.block_bytes());
        let mut values = vec![0.0; len];
        let mut all = Vec::new();
        while all.len() < elements / len * bytes {
            let block: Vec<u8> = (0..bytes).map(|_| self.bits() as u8).collect();
            to_float(format, &block, &mut values);
            let top = values.iter().fold(0.0, |m: f32, v| if v.is_finite() { m.max(v.abs()) } else { f32::INFINITY });
            if (1e-4..1e4).contains(&top) {
                all.extend(block);
            }
        }
        all
    }
}
