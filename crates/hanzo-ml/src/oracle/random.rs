//! Reproducible random inputs: numbers, blocks of any format, activations. Nothing here knows of ops.

use hanzo_gguf::{Format, formats};

/// SplitMix64 (Steele, Lea and Flood 2014): small, seedable, the same everywhere.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// A generator for a named purpose, independent of the order in which others draw.
    pub fn named(seed: u64, name: &str) -> Rng {
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        Rng(seed ^ hash)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform below `n` (which is above zero).
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n.max(1) as u64) as usize
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Roughly Gaussian: the sum of 12 uniforms less 6.
    pub fn gauss(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }

    /// `n` roughly Gaussian floats.
    pub fn floats(&mut self, n: usize, scale: f64) -> Vec<f32> {
        (0..n).map(|_| (self.gauss() * scale) as f32).collect()
    }

    /// 1 or -1.
    pub fn sign(&mut self) -> f64 {
        if self.bits() >> 63 == 0 { 1.0 } else { -1.0 }
    }

    /// A random order of `0..n`.
    pub fn permutation(&mut self, n: usize) -> Vec<u32> {
        let mut p: Vec<u32> = (0..n as u32).collect();
        for i in (1..n).rev() {
            p.swap(i, self.below(i + 1));
        }
        p
    }
}

/// How random weights are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Draw {
    /// Random bytes whose values are of the usual size.
    Usual,
    /// Random bytes with the smallest scales the format has: subnormal halves, lowest exponents.
    Tiny,
    /// All bytes zero.
    Zero,
}

/// The largest magnitude of a block's values, infinite if any value is not finite.
fn peak(format: Format, block: &[u8], scratch: &mut [f32]) -> f32 {
    formats::to_float(format, block, scratch);
    scratch.iter().fold(0.0, |m, v| if v.is_finite() { m.max(v.abs()) } else { f32::INFINITY })
}

fn fill(block: &mut [u8], rng: &mut Rng) {
    for chunk in block.chunks_mut(8) {
        let bits = rng.bits().to_le_bytes();
        chunk.copy_from_slice(&bits[..chunk.len()]);
    }
}

/// A random block: random bytes, drawn again until its largest value is between 2^-10 and 4.
pub fn block(format: Format, rng: &mut Rng) -> Vec<u8> {
    let mut block = vec![0; format.block_bytes()];
    let mut values = vec![0.0; format.block_len()];
    loop {
        fill(&mut block, rng);
        if (1.0 / 1024.0..=4.0).contains(&peak(format, &block, &mut values)) {
            return block;
        }
    }
}

/// The `keep` blocks with the smallest largest value, zero excluded, of 2,000 random ones.
fn tiny_blocks(format: Format, rng: &mut Rng, keep: usize) -> Vec<Vec<u8>> {
    let mut values = vec![0.0; format.block_len()];
    let mut all: Vec<(f32, Vec<u8>)> = (0..2000)
        .filter_map(|_| {
            let mut block = vec![0; format.block_bytes()];
            fill(&mut block, rng);
            let p = peak(format, &block, &mut values);
            (p > 0.0 && p.is_finite()).then_some((p, block))
        })
        .collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all.truncate(keep);
    all.into_iter().map(|(_, b)| b).collect()
}

/// Random rows of a block or float format, `rows * cols` elements.
pub fn weights(format: Format, rows: usize, cols: usize, draw: Draw, rng: &mut Rng) -> Vec<u8> {
    let blocks = rows * cols / format.block_len();
    if draw == Draw::Zero {
        return vec![0; blocks * format.block_bytes()];
    }
    if !format.is_block() {
        let scale = if draw == Draw::Tiny { 1e-6 } else { 0.3 };
        let values = rng.floats(blocks, scale);
        return super::pages::encode(format, &values.into_iter().map(f64::from).collect::<Vec<_>>());
    }
    match draw {
        Draw::Tiny => {
            let pool = tiny_blocks(format, rng, 8);
            (0..blocks).flat_map(|_| pool[rng.below(pool.len())].clone()).collect()
        }
        _ => (0..blocks).flat_map(|_| block(format, rng)).collect(),
    }
}
