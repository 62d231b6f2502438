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
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(align(32))]
pub(crate) struct Scales(pub [f32; 16]);

impl Scales {
    /// Not known yet.
    pub(crate) const NONE: Scales = Scales([0.0; 16]);
}

/// What the codes of a format are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Codes {
    /// Bytes 0..=127, from which `offset` is to be taken: `value = s * (code - offset) - m`.
    Unsigned { offset: u8 },
    /// Signed bytes, passed through [`Isa::signed`].
    Signed,
}

/// What a codebook format finds out about all chunks of a block at once, in vectors, before it looks rows up.
#[repr(align(32))]
pub(crate) struct Ahead {
    /// Codebook indices, in the order of the elements.
    pub index: [u16; 64],
    /// Per chunk: one sign bit an element, or four bytes of what else the format puts there.
    pub signs: [u32; 8],
}

impl Ahead {
    /// Nothing found out yet.
    #[inline(always)]
    pub(crate) const fn new() -> Ahead {
        Ahead { index: [0; 64], signs: [0; 8] }
    }
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
    /// Weight rows that a mat-vec takes at once: four keep its chains of multiply-adds apart; two where unpacking is so
    /// long that more only spills registers.
    const ROWS: usize = 4;

    /// A block's only scale is a power of two, and [`CpuFormat::power`] has its exponent.
    const POWER: bool = false;

    /// The exponent of the block's scale: [`CpuFormat::scales`] has the power.
    #[inline(always)]
    unsafe fn power(_block: *const u8) -> i32 {
        unreachable!("a format of powers has exponents")
    }

    /// Set where a group's scale is the block's times a small integer, its factor, and every `factor * (code - offset)` of
    /// groups of 16 fits a byte after this has been added: a GEMM whose dot product takes any byte then has one scale a
    /// block of 256. Such a format has [`CpuFormat::factors`].
    const PRODUCT: Option<u8> = None;

    /// The block's scale, and its groups' factors: [`CpuFormat::scales`] has their products.
    #[inline(always)]
    unsafe fn factors<I: Isa>(_block: *const u8) -> (f32, [i8; 16]) {
        unreachable!("a format with a product has factors")
    }

    /// Writes the scale, and if `HAS_MIN` the minimum, of each group of `block`.
    unsafe fn scales<I: Isa>(block: *const u8, s: &mut Scales, m: &mut Scales);

    /// What [`CpuFormat::codes`] wants to know of the whole block; called once a block, before it.
    #[inline(always)]
    unsafe fn look_ahead<I: Isa>(_block: *const u8, _ahead: &mut Ahead) {}

    /// The codes of elements `32 * chunk..32 * chunk + 32` of `block`; a format has these or [`CpuFormat::bytes`].
    /// Callers pass a constant `chunk`.
    #[inline(always)]
    unsafe fn codes<I: Isa>(block: *const u8, chunk: usize, _ahead: &Ahead) -> I::B {
        unsafe { Self::bytes(Row::<I>::of(block), chunk) }
    }

    /// Set where codes are made byte by byte of bytes at the same place in their groups of four, in blocks of 256: the
    /// stretches of 64 bytes of a block that have them. Such a format has [`CpuFormat::bytes`].
    const STRETCHES: &'static [usize] = &[];

    /// The codes of chunk `chunk` as vectors of `S`, see [`Bytes`]. Callers pass a constant `chunk`.
    #[inline(always)]
    unsafe fn bytes<S: Bytes>(_source: S, _chunk: usize) -> S::B {
        unreachable!("a format with stretches has bytes")
    }
}

/// Where the bytes of a block's codes come from, so that a format says once how codes are made of them: from one row, 32
/// at a time, or from the same four of many rows.
///
/// # Safety
/// As for [`Isa`]; places are within the format's stretches.
#[allow(clippy::missing_safety_doc)]
pub(crate) trait Bytes: Copy {
    /// Bytes of one or many rows.
    type B: Copy;
    /// The 32 bytes at place `at` of the block, or those of them that this source stands for.
    unsafe fn load(self, at: usize) -> Self::B;
    /// Likewise the 16 bytes at `at` as 32 nibbles: the low ones, then the high ones.
    unsafe fn nibbles(self, at: usize) -> Self::B;
    /// As [`Isa::field`].
    unsafe fn field<const SHIFT: u32, const MASK: u8>(self, x: Self::B) -> Self::B;
    /// As [`Isa::raise`].
    unsafe fn raise<const SHIFT: u32, const MASK: u8>(self, x: Self::B) -> Self::B;
    /// As [`Isa::or`].
    unsafe fn or(self, a: Self::B, b: Self::B) -> Self::B;
    /// As [`Isa::lookup_signed`].
    unsafe fn lookup_signed(self, table: &[i8; 16], index: Self::B) -> Self::B;
}

/// The bytes of one row's block.
pub(crate) struct Row<I>(pub *const u8, pub std::marker::PhantomData<I>);

impl<I> Clone for Row<I> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<I> Copy for Row<I> {}

impl<I: Isa> Row<I> {
    /// The block at `block`.
    #[inline(always)]
    fn of(block: *const u8) -> Self {
        Row(block, std::marker::PhantomData)
    }
}

impl<I: Isa> Bytes for Row<I> {
    type B = I::B;

    #[inline(always)]
    unsafe fn load(self, at: usize) -> I::B {
        unsafe { I::load(self.0.add(at)) }
    }

    #[inline(always)]
    unsafe fn nibbles(self, at: usize) -> I::B {
        unsafe { I::nibbles(self.0.add(at)) }
    }

    #[inline(always)]
    unsafe fn field<const SHIFT: u32, const MASK: u8>(self, x: I::B) -> I::B {
        unsafe { I::field::<SHIFT, MASK>(x) }
    }

    #[inline(always)]
    unsafe fn raise<const SHIFT: u32, const MASK: u8>(self, x: I::B) -> I::B {
        unsafe { I::raise::<SHIFT, MASK>(x) }
    }

    #[inline(always)]
    unsafe fn or(self, a: I::B, b: I::B) -> I::B {
        unsafe { I::or(a, b) }
    }

    #[inline(always)]
    unsafe fn lookup_signed(self, table: &[i8; 16], index: I::B) -> I::B {
        unsafe { I::lookup_signed(table, index) }
    }
}

/// The numbers that follow from a format's constants.
pub(crate) trait Shape: CpuFormat {
    /// Elements of a block.
    const LEN: usize = Self::FORMAT.block_len();
    /// Chunks of 32 elements in a block.
    const CHUNKS: usize = Self::LEN / 32;
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
            #[cfg(feature = "synthetic-format")]
            x26::X26_TEST,
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
pub(in crate::cpu) unsafe fn six_bit_pairs(packed: *const u8) -> (u64, u64) {
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

/// The nibbles of four bytes as eight bytes: low, high, low, high, and so on.
#[inline(always)]
pub(in crate::cpu) fn nibble_bytes(x: u32) -> u64 {
    let x = u64::from(x);
    let x = (x | x << 16) & 0x0000_ffff_0000_ffff;
    let x = (x | x << 8) & 0x00ff_00ff_00ff_00ff;
    (x | x << 4) & 0x0f0f_0f0f_0f0f_0f0f
}

/// The index `i` of a block, read from memory where `look_ahead` spilled it, one element: the optimizer would otherwise
/// load many and extract each.
#[inline(always)]
unsafe fn index(ahead: &Ahead, i: usize) -> usize {
    usize::from(unsafe { ahead.index.as_ptr().add(i).read_volatile() })
}

/// Four rows of a codebook of 8-byte rows, by the indices of chunk `chunk`.
///
/// # Safety
/// `look_ahead` has written indices below `N`, and the CPU has `I`.
#[inline(always)]
unsafe fn rows_of_8<I: Isa, const N: usize>(grid: &[u64; N], ahead: &Ahead, chunk: usize) -> I::B {
    unsafe {
        let row = |i: usize| *grid.get_unchecked(index(ahead, 4 * chunk + i));
        I::from4([row(0), row(1), row(2), row(3)])
    }
}

/// Eight rows of a codebook of 4-byte rows, by the indices of chunk `chunk`.
///
/// # Safety
/// As for [`rows_of_8`].
#[inline(always)]
unsafe fn rows_of_4<I: Isa, const N: usize>(grid: &[u32; N], ahead: &Ahead, chunk: usize) -> I::B {
    unsafe {
        let row = |i: usize| *grid.get_unchecked(index(ahead, 8 * chunk + i));
        I::from8([row(0), row(1), row(2), row(3), row(4), row(5), row(6), row(7)])
    }
}

/// Eight 3-bit fields, the low four of each of two 16-bit words, as bytes.
#[inline(always)]
pub(in crate::cpu) fn three_bit_bytes(x: u32) -> u64 {
    let x = u64::from(x);
    let x = (x | x << 16) & 0x0000_0fff_0000_0fff;
    let x = (x | x << 10) & 0x003f_003f_003f_003f;
    (x | x << 5) & 0x0707_0707_0707_0707
}

#[cfg(test)]
pub(crate) mod tests;
