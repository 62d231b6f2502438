//! How each block format presents itself to the CPU contractions: one file a format, one row in [`for_each_cpu_format`].
//!
//! The normal form: 32 elements (a chunk) have integer codes, and `value = s * code - m` with a scale and, for some
//! formats, a minimum per group of 16 or 32. A format says how to get the codes of a chunk into a vector and the scales
//! of a block into an array, once, for every instruction set. `s` and `m` are the same f32 products that
//! `hanzo_gguf::formats::to_float` forms (exact unless a file says otherwise). Formats know nothing of activations,
//! rows or accumulators.
#![allow(
    clippy::needless_range_loop,
    reason = "index loops of constant length over several arrays unroll; iterators hide it"
)]

use hanzo_gguf::Format;

use super::isa::Isa;

/// Scales (or minima) of a block's groups; a block has at most 16.
pub(crate) type Scales = [f32; 16];

/// What the codes of a format are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Codes {
    /// Bytes 0..=127, from which `offset` is to be taken: `value = s * (code - offset) - m`.
    Unsigned { offset: u8 },
    /// Signed bytes, passed through [`Isa::signed`].
    Signed,
}

/// A block format, as the CPU contractions read it.
///
/// # Safety
/// Implementations read at most `BYTES` bytes from `block`, which callers keep valid, on a CPU with `I`'s features.
#[allow(clippy::missing_safety_doc)]
pub(crate) trait CpuFormat: 'static {
    /// Its row in the table of formats.
    const FORMAT: Format;
    /// Elements that share a scale: 16 or 32.
    const GROUP: usize;
    /// True if groups have minima.
    const HAS_MIN: bool = false;
    /// The form of its codes.
    const CODES: Codes;

    /// Writes the scale, and if `HAS_MIN` the minimum, of each group of `block`.
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, m: &mut Scales);

    /// The codes of elements `32 * chunk..32 * chunk + 32` of `block`. Callers pass a constant `chunk`.
    unsafe fn codes<I: Isa>(block: *const u8, chunk: usize) -> I::B;
}

/// The numbers that follow from a format's constants.
pub(crate) trait Shape: CpuFormat {
    /// Chunks of 32 elements in a block.
    const CHUNKS: usize = Self::FORMAT.block_len() / 32;
    /// Bytes of a block.
    const BYTES: usize = Self::FORMAT.block_bytes();
    /// Groups in a chunk.
    const HALVES: usize = 32 / Self::GROUP;
    /// True if the codes are signed bytes.
    const SIGNED: bool = matches!(Self::CODES, Codes::Signed);
    /// What is to be taken off an unsigned code.
    const OFFSET: u8 = match Self::CODES {
        Codes::Unsigned { offset } => offset,
        Codes::Signed => 0,
    };
}

impl<F: CpuFormat> Shape for F {}

/// Calls `$callback!` with the list of `module::Type` of every block format that the CPU reads.
macro_rules! for_each_cpu_format {
    ($callback:ident) => {
        $callback! {
            q4_0::Q4_0, q4_1::Q4_1, q5_0::Q5_0, q5_1::Q5_1, q8_0::Q8_0,
            q2_k::Q2_K, q3_k::Q3_K, q4_k::Q4_K, q5_k::Q5_K, q6_k::Q6_K,
            iq1_s::IQ1_S, iq1_m::IQ1_M, iq2_xxs::IQ2_XXS, iq2_xs::IQ2_XS, iq2_s::IQ2_S,
            iq3_xxs::IQ3_XXS, iq3_s::IQ3_S, iq4_nl::IQ4_NL, iq4_xs::IQ4_XS,
            tq1_0::TQ1_0, tq2_0::TQ2_0, mxfp4::MXFP4, nvfp4::NVFP4, q1_0::Q1_0, q2_0::Q2_0,
        }
    };
}
pub(crate) use for_each_cpu_format;

macro_rules! modules {
    ($( $(#[$attr:meta])* $module:ident :: $format:ident, )*) => { $( $(#[$attr])* pub(crate) mod $module; )* };
}
for_each_cpu_format!(modules);

/// The 6-bit scales and minima of Q4_K and Q5_K, eight of each, one a byte.
///
/// Twelve bytes hold, per group 0..4, the scale (bytes 0..4) and the minimum (4..8) in their low six bits; groups 4..8
/// have their low nibbles in bytes 8..12 and their high two bits on top of the first eight bytes.
#[inline(always)]
unsafe fn six_bit_pairs(packed: *const u8) -> (u64, u64) {
    let [a, b, c] = unsafe { super::isa::read::<[u32; 3]>(packed) };
    let high = |x: u32| x >> 2 & 0x3030_3030;
    let scales = u64::from(a & 0x3f3f_3f3f) | u64::from(c & 0x0f0f_0f0f | high(a)) << 32;
    let minima = u64::from(b & 0x3f3f_3f3f) | u64::from(c >> 4 & 0x0f0f_0f0f | high(b)) << 32;
    (scales, minima)
}

/// Writes `d * x` for eight unsigned bytes.
#[inline(always)]
unsafe fn scale_u8<I: Isa>(d: f32, x: u64, out: *mut f32) {
    unsafe { I::f_store(out, I::f_mul(I::f_splat(d), I::f_from_u8(x))) }
}

/// Writes `d * x` for eight signed bytes.
#[inline(always)]
unsafe fn scale_i8<I: Isa>(d: f32, x: u64, out: *mut f32) {
    unsafe { I::f_store(out, I::f_mul(I::f_splat(d), I::f_from_i8(x))) }
}

/// The half float at `p`.
#[inline(always)]
unsafe fn half_at<I: Isa>(p: *const u8) -> f32 {
    unsafe { I::f16(super::isa::read::<u16>(p)) }
}

/// Takes 32 from each byte 0..=63, giving signed bytes.
#[inline(always)]
fn minus_32(x: u64) -> u64 {
    // x + 0xe0 without carries between bytes: the top three bits of 0xe0 and bit 5 of x decide the top three.
    const BIT_5: u64 = 0x2020_2020_2020_2020;
    let x = x ^ BIT_5;
    x | ((x & BIT_5) * 6)
}

/// Four 7-bit sign indices (28 bits) as 32 sign bits: each index with its parity on top.
#[inline(always)]
fn signs7(x: u32) -> u32 {
    let s = x & 0x7f | x << 1 & 0x7f00 | x << 2 & 0x7f_0000 | x << 3 & 0x7f00_0000;
    let p = s ^ s >> 4;
    let p = p ^ p >> 2;
    let p = p ^ p >> 1;
    s | (p & 0x0101_0101) << 7
}

/// The nibbles of four bytes as eight bytes: low, high, low, high, and so on.
#[inline(always)]
fn nibble_bytes(x: u32) -> u64 {
    let x = u64::from(x);
    let x = (x | x << 16) & 0x0000_ffff_0000_ffff;
    let x = (x | x << 8) & 0x00ff_00ff_00ff_00ff;
    (x | x << 4) & 0x0f0f_0f0f_0f0f_0f0f
}

#[cfg(test)]
pub(crate) mod tests;
