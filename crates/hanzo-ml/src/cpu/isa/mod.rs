//! The instruction sets that CPU kernels are written against: one trait, five implementations, chosen once as a value.
//!
//! A kernel is a generic `#[inline(always)]` body over `Isa`; a small `#[target_feature]` function per instruction set
//! (see `contract::entries`) gives the body its features, so that every operation below becomes one or two
//! instructions in place. Nothing here knows of formats, tensors or threads, and nothing is global: an [`IsaLevel`] is
//! detected once by whoever builds the backend and passed on.
//!
//! The vocabulary: `B` is 32 bytes (the codes of 32 elements), `F` eight f32, `N` eight i32 (the partial dot products of
//! 32 bytes, four bytes a lane), `W` and `WI` the `NR` f32 or i32 lanes of a GEMM tile, one weight row a lane.
#![allow(
    clippy::needless_range_loop,
    reason = "index loops of constant length over several arrays unroll; iterators hide it"
)]

#[cfg(target_arch = "aarch64")]
mod arm;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
#[cfg(target_arch = "aarch64")]
mod i8mm;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) use i8mm::I8mm;
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;
pub(crate) use portable::Portable;

/// An instruction set that the CPU kernels exist for. Those of one architecture build on each other, and all on
/// [`IsaLevel::Portable`]; there is no order between those of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IsaLevel {
    /// Plain Rust: any CPU.
    Portable,
    /// x86-64 with AVX2, FMA, F16C and BMI2.
    Avx2,
    /// x86-64 with AVX-512 F, BW, VL, DQ and VNNI.
    Avx512,
    /// The same with AVX-512 VBMI and GFNI: Ice Lake, Zen 4 and later.
    Avx512Vbmi,
    /// The same with AVX512_BF16: Zen 4, Sapphire Rapids and later.
    Avx512Bf16,
    /// aarch64 with Advanced SIMD and FEAT_DotProd. Without it (most of Armv8.0 and Armv8.1) a CPU has `Portable` alone.
    Neon,
    /// aarch64 with FEAT_I8MM as well.
    I8mm,
}

impl IsaLevel {
    /// All levels, each architecture's lowest first.
    pub const ALL: [IsaLevel; 7] = [
        IsaLevel::Portable,
        IsaLevel::Avx2,
        IsaLevel::Avx512,
        IsaLevel::Avx512Vbmi,
        IsaLevel::Avx512Bf16,
        IsaLevel::Neon,
        IsaLevel::I8mm,
    ];

    /// True if this CPU (and its operating system) supports the level.
    pub fn is_available(self) -> bool {
        match self {
            IsaLevel::Portable => true,
            #[cfg(target_arch = "x86_64")]
            IsaLevel::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("bmi2")
            }
            #[cfg(target_arch = "x86_64")]
            IsaLevel::Avx512 => {
                IsaLevel::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            IsaLevel::Avx512Vbmi => {
                IsaLevel::Avx512.is_available()
                    && is_x86_feature_detected!("avx512vbmi")
                    && is_x86_feature_detected!("gfni")
            }
            #[cfg(target_arch = "x86_64")]
            IsaLevel::Avx512Bf16 => IsaLevel::Avx512Vbmi.is_available() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(target_arch = "aarch64")]
            IsaLevel::Neon => {
                std::arch::is_aarch64_feature_detected!("neon") && std::arch::is_aarch64_feature_detected!("dotprod")
            }
            #[cfg(target_arch = "aarch64")]
            IsaLevel::I8mm => IsaLevel::Neon.is_available() && std::arch::is_aarch64_feature_detected!("i8mm"),
            // Another architecture's.
            _ => false,
        }
    }

    /// The levels that this CPU supports, lowest first.
    pub fn available() -> impl Iterator<Item = IsaLevel> {
        Self::ALL.into_iter().filter(|level| level.is_available())
    }

    /// The highest level that this CPU supports.
    pub fn detect() -> IsaLevel {
        Self::ALL.into_iter().rev().find(|level| level.is_available()).unwrap_or(IsaLevel::Portable)
    }

    /// What this CPU has, for messages: the names of [`IsaLevel::available`].
    pub fn available_names() -> String {
        Self::available().map(IsaLevel::name).collect::<Vec<_>>().join(", ")
    }

    /// The level's name, as settings and reports write it.
    pub const fn name(self) -> &'static str {
        match self {
            IsaLevel::Portable => "portable",
            IsaLevel::Avx2 => "avx2",
            IsaLevel::Avx512 => "avx512",
            IsaLevel::Avx512Vbmi => "avx512vbmi",
            IsaLevel::Avx512Bf16 => "avx512bf16",
            IsaLevel::Neon => "neon",
            IsaLevel::I8mm => "i8mm",
        }
    }

    /// The level of a name, ASCII case ignored.
    pub fn from_name(name: &str) -> Option<IsaLevel> {
        Self::ALL.into_iter().find(|level| level.name().eq_ignore_ascii_case(name))
    }
}

impl std::fmt::Display for IsaLevel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// The scale of one quantized activation group and the exact sums of its two halves.
#[derive(Clone, Copy)]
pub(crate) struct Quantized {
    /// Value of one code step: amax / 127.
    pub d: f32,
    /// Sum of codes 0..16 and of codes 16..32.
    pub sums: [i16; 2],
}

/// The operations that formats and contractions need, on one instruction set.
///
/// # Safety
/// Every method may run only on a CPU with the instruction set's features, inside a function that enables them
/// (otherwise the intrinsics are calls). Pointers are valid for the bytes that the method names; none needs alignment.
#[allow(clippy::missing_safety_doc)]
pub(crate) trait Isa: Copy + 'static {
    /// 32 bytes.
    type B: Copy;
    /// Eight f32.
    type F: Copy;
    /// Eight i32.
    type N: Copy;
    /// What [`Isa::dot_unsigned`] and [`Isa::dot_signed`] take off a product for the codes' offset.
    type Fix: Copy;
    /// `NR` f32.
    type W: Copy;
    /// `NR` i32.
    type WI: Copy;
    /// One packed code of the GEMM, weights and activations: i8-sized or i16.
    type Packed: Copy;

    /// Weight rows in a vector of a GEMM tile.
    const NR: usize;
    /// Vectors of `NR` weight rows in a GEMM tile.
    const VECTORS: usize = 1;
    /// Tokens in a full GEMM block.
    const MR: usize;
    /// Tokens that the f32 contraction takes at once, beside one.
    const FT: usize;
    /// Codes of a row that one step of a GEMM tile takes: 4 or 8.
    const STEP: usize;
    /// True if packed GEMM weights keep their offset, which the sums then start without (minus the offset times the sum of
    /// the activations), and may have any byte as code; false if [`Isa::pack_weights`] takes it off.
    const PACKED_OFFSET: bool;
    /// True if [`Isa::w_times_power`] runs where the tile's other operations do not.
    const POWERS: bool = false;

    // -- bytes -----------------------------------------------------------------------------------------------------
    unsafe fn load(p: *const u8) -> Self::B;
    unsafe fn store(p: *mut u8, x: Self::B);
    /// Stores to `p`, aligned to 32, so that what is read from there comes from memory: the optimizer would keep the
    /// vector and extract each element, and shuffles are scarcer than loads.
    unsafe fn spill(p: *mut u8, x: Self::B);
    /// 16 bytes, twice.
    unsafe fn load_dup(p: *const u8) -> Self::B;
    unsafe fn splat(x: u8) -> Self::B;
    unsafe fn from4(x: [u64; 4]) -> Self::B;
    unsafe fn from8(x: [u32; 8]) -> Self::B;
    /// 16 bytes as 32 nibbles: the 16 low ones, then the 16 high ones.
    unsafe fn nibbles(p: *const u8) -> Self::B;
    /// 16 bytes as 32 nibbles: 8 low, 8 high of the first eight bytes, then the same of the others.
    unsafe fn nibbles8(p: *const u8) -> Self::B;
    /// 16 bytes as 32 nibbles: low, high, low, high, and so on.
    unsafe fn nibble_pairs(p: *const u8) -> Self::B;
    /// 8 bytes as 32 two-bit fields, lowest first.
    unsafe fn crumbs(p: *const u8) -> Self::B;
    /// Eight 16-bit words as 32 three-bit fields: the low four of each, lowest first.
    unsafe fn threes(p: *const u8) -> Self::B;
    /// Eight 32-bit words as 32 seven-bit fields: the low four of each, lowest first.
    unsafe fn sevens(x: Self::B) -> Self::B;
    /// Thirty-two 16-bit words (64 bytes) as the seven high bits of each.
    unsafe fn high_sevens(p: *const u8) -> Self::B;
    /// 64 bytes: the odd ones of their sixteen 32-bit words.
    unsafe fn odd_words(p: *const u8) -> Self::B;
    /// Four bytes, eight times.
    unsafe fn splat4(x: u32) -> Self::B;
    /// 0xff in the four bytes of each of eight 16-bit words that has its top bit set, else 0.
    unsafe fn top_bits(p: *const u8) -> Self::B;
    /// Four bytes, each eight times.
    unsafe fn eights(x: u32) -> Self::B;
    /// Spills `low[i] + 256 * high[i]` of 32 bytes to `out`, aligned to 32 (see [`Isa::spill`]).
    unsafe fn spill_pairs(out: *mut u16, low: Self::B, high: Self::B);
    /// Seven-bit fields with their parity in the top bit.
    unsafe fn with_parity(x: Self::B) -> Self::B;
    /// `(x >> SHIFT) & MASK` of each byte; `MASK` has at most `8 - SHIFT` bits.
    unsafe fn field<const SHIFT: u32, const MASK: u8>(x: Self::B) -> Self::B;
    /// `(x & MASK) << SHIFT` of each byte; `MASK << SHIFT` fits a byte.
    unsafe fn raise<const SHIFT: u32, const MASK: u8>(x: Self::B) -> Self::B;
    unsafe fn or(a: Self::B, b: Self::B) -> Self::B;
    /// Wrapping sum.
    unsafe fn add(a: Self::B, b: Self::B) -> Self::B;
    /// Wrapping difference.
    unsafe fn sub(a: Self::B, b: Self::B) -> Self::B;
    /// The first 16 bytes of `a`, the last 16 of `b`.
    unsafe fn halves(a: Self::B, b: Self::B) -> Self::B;
    /// 1 where a byte is at least `v` (unsigned), else 0.
    unsafe fn at_least(x: Self::B, v: u8) -> Self::B;
    /// Adds `v` to the bytes whose bit is set.
    unsafe fn add_at(x: Self::B, bits: u32, v: u8) -> Self::B;
    /// Negates the bytes whose bit is set.
    unsafe fn negate_at(x: Self::B, bits: u32) -> Self::B;
    /// Signed codes in this instruction set's form (AVX-512: plus 128, since its dot product wants one unsigned side).
    unsafe fn signed(x: Self::B) -> Self::B;
    /// Signed codes by index 0..16, in the form of [`Isa::signed`].
    unsafe fn lookup_signed(table: &[i8; 16], index: Self::B) -> Self::B;
    /// Fetches the cache line of `p` soon; any address is allowed.
    unsafe fn prefetch(p: *const u8);

    // -- dot products ----------------------------------------------------------------------------------------------
    /// The fix of unsigned codes without an offset.
    unsafe fn fix_none() -> Self::Fix;
    unsafe fn fix_unsigned(a: Self::B, offset: u8) -> Self::Fix;
    unsafe fn fix_signed(a: Self::B) -> Self::Fix;
    /// Sums of four `(code - offset) * a` a lane; codes 0..=127, `a` -127..=127. Exact.
    unsafe fn dot_unsigned(codes: Self::B, a: Self::B, fix: Self::Fix) -> Self::N;
    /// Sums of four `code * a` a lane; codes in the form of [`Isa::signed`], `a` -127..=127. Exact.
    unsafe fn dot_signed(codes: Self::B, a: Self::B, fix: Self::Fix) -> Self::N;

    // -- eight floats ----------------------------------------------------------------------------------------------
    unsafe fn f_zero() -> Self::F;
    unsafe fn f_splat(x: f32) -> Self::F;
    /// Four lanes of the float at `p`, then four of the next.
    unsafe fn f_splat2(p: *const f32) -> Self::F;
    unsafe fn f_load(p: *const f32) -> Self::F;
    unsafe fn f_store(p: *mut f32, x: Self::F);
    /// As [`Isa::spill`].
    unsafe fn f_spill(p: *mut f32, x: Self::F);
    unsafe fn f_mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, fused where the instruction set fuses.
    unsafe fn f_fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Sum of the lanes, pairwise by halves.
    unsafe fn f_sum(x: Self::F) -> f32;
    unsafe fn f_from_n(x: Self::N) -> Self::F;
    /// Eight unsigned bytes, exact.
    unsafe fn f_from_u8(x: u64) -> Self::F;
    /// Eight signed bytes, exact.
    unsafe fn f_from_i8(x: u64) -> Self::F;
    /// Each lane twice: lanes 0..4, then lanes 4..8.
    unsafe fn f_twice(x: Self::F) -> [Self::F; 2];
    /// A half float by its bits, exact, subnormals included.
    unsafe fn f16(bits: u16) -> f32;
    /// `a * b + c` of one float, fused where the instruction set fuses.
    unsafe fn fma1(a: f32, b: f32, c: f32) -> f32;
    /// Quantizes 32 floats to codes (see `contract::acts`), bit-equal on every instruction set.
    unsafe fn quantize(x: *const f32, codes: *mut i8) -> Quantized;

    // -- GEMM tiles ------------------------------------------------------------------------------------------------
    unsafe fn w_zero() -> Self::W;
    unsafe fn w_load(p: *const f32) -> Self::W;
    /// `NR` half floats, exact.
    unsafe fn w_load_f16(p: *const u16) -> Self::W;
    /// `NR` bfloat16, exact.
    unsafe fn w_load_bf16(p: *const u16) -> Self::W;
    unsafe fn w_store(p: *mut f32, x: Self::W);
    unsafe fn w_splat(x: f32) -> Self::W;
    unsafe fn w_mul(a: Self::W, b: Self::W) -> Self::W;
    unsafe fn w_fma(a: Self::W, b: Self::W, c: Self::W) -> Self::W;
    /// `c - a * b`, fused where the instruction set fuses.
    unsafe fn w_fnma(a: Self::W, b: Self::W, c: Self::W) -> Self::W;
    /// Sum of the lanes, pairwise by halves.
    unsafe fn w_sum(x: Self::W) -> f32;
    /// [`Isa::w_sum`] of each, bit for bit.
    #[inline(always)]
    unsafe fn w_sum4(x: [Self::W; 4]) -> [f32; 4] {
        unsafe { [Self::w_sum(x[0]), Self::w_sum(x[1]), Self::w_sum(x[2]), Self::w_sum(x[3])] }
    }
    /// `x * 2^power`, rounded like a product, where [`Isa::POWERS`].
    #[inline(always)]
    unsafe fn w_times_power(_x: Self::W, _power: Self::W) -> Self::W {
        unreachable!("without an instruction for it, powers are multiplied with")
    }
    unsafe fn w_from_wi(x: Self::WI) -> Self::W;
    /// The integer at `p` in all lanes.
    unsafe fn wi_splat(p: *const i32) -> Self::WI;
    unsafe fn wi_zero() -> Self::WI;
    /// One step of `M` tokens, a multiple of four: packed weights at `w` (`NR * STEP` codes), packed activations at `a`
    /// (`M * STEP` codes). Where the sum of a row and token lies among `sums` is the instruction set's affair.
    unsafe fn wi_steps<const M: usize>(
        sums: [Self::WI; M],
        w: *const Self::Packed,
        a: *const Self::Packed,
    ) -> [Self::WI; M];
    /// The sums of steps as one [`Isa::WI`] a token, one row a lane.
    #[inline(always)]
    unsafe fn wi_rows<const M: usize>(sums: [Self::WI; M]) -> [Self::WI; M] {
        sums
    }
    /// Packs 32 codes of `NR` rows (`[NR][32]` bytes at `codes`, as a format gives them, `offset` not yet taken off) to
    /// steps of `[NR][STEP]`, in the lane order that [`Isa::wi_steps`] wants.
    unsafe fn pack_weights(codes: *const u8, signed: bool, offset: u8, out: *mut Self::Packed);
    /// Packs 32 activation codes of four tokens to steps of `[4 tokens][STEP]`, `stride` packed codes apart.
    unsafe fn pack_acts(codes: [*const i8; 4], out: *mut Self::Packed, stride: usize);
}

/// What an instruction set that multiplies bf16 by bf16 has beside the rest: `P` is a vector of [`Bf16::PAIRED`] of them.
///
/// # Safety
/// As for [`Isa`]; the CPU also has the bf16 instructions.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "no implementation on this architecture yet"))]
#[allow(clippy::missing_safety_doc)]
pub(crate) trait Bf16: Isa {
    type P: Copy;
    /// Elements of a vector: two a lane of [`Isa::W`].
    const PAIRED: usize;
    /// The first `n` elements, zeros beyond.
    unsafe fn p_load(p: *const u8, n: usize) -> Self::P;
    /// Adds the products of a lane's two pairs to the lane.
    unsafe fn p_dot(acc: Self::W, w: Self::P, x: Self::P) -> Self::W;
    /// Rounds `n` floats to the nearest bf16, ties to even, subnormal ones to zero; writes zeros up to a whole vector.
    unsafe fn p_round(x: *const f32, n: usize, out: *mut u8);
}

/// The step and its inverse for a group whose largest magnitude is `amax`.
///
/// A group of zeros, or one so small that the inverse overflows, quantizes to zeros with step 0. One that holds an
/// infinity or a NaN gets zeros with step NaN: the fault stays visible in every output that reads it.
#[inline(always)]
fn quantum(amax: f32) -> (f32, f32) {
    if !amax.is_finite() {
        return (f32::NAN, 0.0);
    }
    let inverse = 127.0 / amax;
    if inverse.is_finite() { (amax / 127.0, inverse) } else { (0.0, 0.0) }
}

/// `T` at `p`, which needs no alignment.
///
/// # Safety
/// `p` is valid for `size_of::<T>()` bytes, and any bit pattern is a `T`.
#[inline(always)]
pub(crate) unsafe fn read<T: Copy>(p: *const u8) -> T {
    unsafe { p.cast::<T>().read_unaligned() }
}

#[cfg(target_endian = "big")]
compile_error!("GGUF blocks are read in place: big-endian targets are not supported");

#[cfg(test)]
mod tests;
