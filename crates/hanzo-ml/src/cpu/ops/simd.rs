//! The f32 vector vocabulary of the ops: one trait, four instances (portable, AVX2, AVX-512, Advanced SIMD).
//!
//! An op writes its loop once, as a [`Kernel`] generic over [`Simd`]; [`IsaLevel::run`] enters the loop
//! through a `#[target_feature]` function, so everything that is inlined into it is compiled for that ISA
//! (the pattern of crate `memchr`). Arithmetic methods are safe because a token of an instance exists only
//! inside such an entry; only memory access is `unsafe`. Nothing that knows an op may enter here.

use crate::cpu::isa::IsaLevel;

impl IsaLevel {
    /// Runs `kernel` compiled for this level, or for the machine's highest where this one is not available.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Out {
        let level = if self.is_available() { self } else { IsaLevel::detect() };
        match level {
            // SAFETY: an available level has the features that its entry enables.
            #[cfg(target_arch = "x86_64")]
            IsaLevel::Avx2 => return unsafe { x86::enter_avx2(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            IsaLevel::Avx512 | IsaLevel::Avx512Vbmi | IsaLevel::Avx512Bf16 => {
                return unsafe { x86::enter_avx512(kernel) };
            }
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            IsaLevel::Neon | IsaLevel::I8mm => return unsafe { neon::enter(kernel) },
            _ => {}
        }
        kernel.run(Portable(()))
    }
}

/// A loop written once and compiled for each ISA. `run` must be `#[inline(always)]`, as must be all it calls.
pub(crate) trait Kernel {
    type Out;
    fn run<S: Simd>(self, s: S) -> Self::Out;
}

/// Vectors of `LANES` floats. The value `self` is the proof that the ISA is there.
///
/// Memory methods: the pointer must be valid for `LANES` elements (or `n` where given) of the named type; no
/// alignment is asked for.
pub(crate) trait Simd: Copy {
    /// A vector of [`Simd::LANES`] floats.
    type F: Copy;
    /// Floats in a vector: a power of two, at most 16.
    const LANES: usize;
    /// Rows of the register tile of `attention`'s matrix product that fit the register file, two vectors wide.
    const TILE_ROWS: usize;

    fn splat(self, x: f32) -> Self::F;
    /// `[0, 1, 2, ...]`
    fn iota(self) -> Self::F;
    unsafe fn load(self, p: *const f32) -> Self::F;
    unsafe fn store(self, p: *mut f32, v: Self::F);
    /// The first `n < LANES` lanes from memory, the others zero.
    unsafe fn load_part(self, p: *const f32, n: usize) -> Self::F;
    /// Writes the first `n < LANES` lanes only.
    unsafe fn store_part(self, p: *mut f32, n: usize, v: Self::F);
    /// Half floats to f32, exactly.
    unsafe fn load_f16(self, p: *const u16) -> Self::F;
    /// bfloat16 to f32, exactly.
    unsafe fn load_bf16(self, p: *const u16) -> Self::F;
    /// Signed bytes to f32, exactly.
    unsafe fn load_i8(self, p: *const i8) -> Self::F;
    /// Nibbles (low or high half of `LANES` bytes) minus eight, to f32.
    unsafe fn load_nibbles(self, p: *const u8, high: bool) -> Self::F;
    /// f32 to half, round to nearest even.
    unsafe fn store_f16(self, p: *mut u16, v: Self::F);
    /// Hints that the cache line at `p` will be read soon; any address is fine.
    fn prefetch(self, p: *const u8);

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`: one rounding, two in the portable instance.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a > b ? a : b`: gives `b` if either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a < b ? a : b`: gives `b` if either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    fn abs(self, a: Self::F) -> Self::F;
    /// The nearest integer, ties to even, for |a| < 2^22.
    fn round(self, a: Self::F) -> Self::F;
    /// `p * 2^n` for integral n in [-160, 160] and p in [0.5, 2]: overflow gives infinity, underflow is gradual.
    fn scale_pow2(self, p: Self::F, n: Self::F) -> Self::F;
    /// Per lane `a < b ? yes : no`; `no` where a or b is NaN.
    fn select_lt(self, a: Self::F, b: Self::F, yes: Self::F, no: Self::F) -> Self::F;
    /// Sum of all lanes, as a binary tree.
    fn reduce_add(self, a: Self::F) -> f32;
    /// Largest lane.
    fn reduce_max(self, a: Self::F) -> f32;
    /// `a0 b0 a1 b1 ...`, low half and high half.
    fn interleave(self, a: Self::F, b: Self::F) -> (Self::F, Self::F);
    /// The inverse of [`Simd::interleave`]: even elements and odd elements of `a` followed by `b`.
    fn deinterleave(self, a: Self::F, b: Self::F) -> (Self::F, Self::F);
}

/// Eight floats as a plain array; the compiler vectorises for the target's baseline.
#[derive(Clone, Copy)]
pub(crate) struct Portable(());

const PL: usize = 8;

#[inline(always)]
fn zip(a: [f32; PL], b: [f32; PL], f: impl Fn(f32, f32) -> f32) -> [f32; PL] {
    let mut out = [0.0; PL];
    for i in 0..PL {
        out[i] = f(a[i], b[i]);
    }
    out
}

#[inline(always)]
fn map(a: [f32; PL], f: impl Fn(f32) -> f32) -> [f32; PL] {
    let mut out = [0.0; PL];
    for i in 0..PL {
        out[i] = f(a[i]);
    }
    out
}

/// Adding 1.5 * 2^23 leaves no fraction bits: the addition itself rounds to nearest even.
const MAGIC: f32 = 12_582_912.0;

/// `2^n` for integral n in [-126, 127]: the sum's low bits are the biased exponent, without a conversion to integer
/// (whose saturation does not vectorise).
#[inline(always)]
fn pow2(n: f32) -> f32 {
    f32::from_bits((n + (MAGIC + 127.0)).to_bits() << 23)
}

/// A half's value, without branches: its exponent and mantissa as an f32 that is 2^112 times too small, subnormals
/// included, then the exponent of infinity and NaN.
#[inline(always)]
fn half_to_f32(h: u16) -> f32 {
    let h = h as u32;
    let scaled = f32::from_bits((h & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    let special = if h & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(scaled.to_bits() | special | (h & 0x8000) << 16)
}

impl Simd for Portable {
    type F = [f32; PL];
    const LANES: usize = PL;
    const TILE_ROWS: usize = 4;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; PL]
    }
    #[inline(always)]
    fn iota(self) -> Self::F {
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::F {
        unsafe { p.cast::<[f32; PL]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Self::F) {
        unsafe { p.cast::<[f32; PL]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_part(self, p: *const f32, n: usize) -> Self::F {
        let mut v = [0.0; PL];
        for (i, x) in v.iter_mut().enumerate().take(n) {
            *x = unsafe { *p.add(i) };
        }
        v
    }
    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, n: usize, v: Self::F) {
        for (i, x) in v.iter().enumerate().take(n) {
            unsafe { *p.add(i) = *x };
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Self::F {
        let mut v = [0.0; PL];
        for (i, x) in v.iter_mut().enumerate() {
            *x = half_to_f32(unsafe { p.add(i).read_unaligned() });
        }
        v
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Self::F {
        let mut v = [0.0; PL];
        for (i, x) in v.iter_mut().enumerate() {
            *x = f32::from_bits((unsafe { p.add(i).read_unaligned() } as u32) << 16);
        }
        v
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> Self::F {
        let mut v = [0.0; PL];
        for (i, x) in v.iter_mut().enumerate() {
            *x = unsafe { *p.add(i) } as f32;
        }
        v
    }
    #[inline(always)]
    unsafe fn load_nibbles(self, p: *const u8, high: bool) -> Self::F {
        let mut v = [0.0; PL];
        for (i, x) in v.iter_mut().enumerate() {
            let b = unsafe { *p.add(i) };
            *x = (if high { b >> 4 } else { b & 15 }) as f32 - 8.0;
        }
        v
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: Self::F) {
        for (i, x) in v.iter().enumerate() {
            unsafe { p.add(i).write_unaligned(half::f16::from_f32_const(*x).to_bits()) };
        }
    }
    #[inline(always)]
    fn prefetch(self, _p: *const u8) {}

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |x, y| x + y)
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |x, y| x - y)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |x, y| x * y)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |x, y| x / y)
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        zip(zip(a, b, |x, y| x * y), c, |x, y| x + y)
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |x, y| if x > y { x } else { y })
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |x, y| if x < y { x } else { y })
    }
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        map(a, f32::abs)
    }
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::F {
        map(a, |x| (x + MAGIC) - MAGIC)
    }
    #[inline(always)]
    fn scale_pow2(self, p: Self::F, n: Self::F) -> Self::F {
        // Two factors, each a normal number; the first product is exact, so there is one rounding.
        zip(p, n, |p, n| {
            let half = (0.5 * n + MAGIC) - MAGIC;
            p * pow2(half) * pow2(n - half)
        })
    }
    #[inline(always)]
    fn select_lt(self, a: Self::F, b: Self::F, yes: Self::F, no: Self::F) -> Self::F {
        let mut out = no;
        for i in 0..PL {
            if a[i] < b[i] {
                out[i] = yes[i];
            }
        }
        out
    }
    #[inline(always)]
    fn reduce_add(self, a: Self::F) -> f32 {
        ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
    }
    #[inline(always)]
    fn reduce_max(self, a: Self::F) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, |m, x| if x > m { x } else { m })
    }
    #[inline(always)]
    fn interleave(self, a: Self::F, b: Self::F) -> (Self::F, Self::F) {
        ([a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3]], [a[4], b[4], a[5], b[5], a[6], b[6], a[7], b[7]])
    }
    #[inline(always)]
    fn deinterleave(self, a: Self::F, b: Self::F) -> (Self::F, Self::F) {
        ([a[0], a[2], a[4], a[6], b[0], b[2], b[4], b[6]], [a[1], a[3], a[5], a[7], b[1], b[3], b[5], b[7]])
    }
}

#[cfg(target_arch = "x86_64")]
#[path = "simd_x86.rs"]
mod x86;

#[cfg(target_arch = "aarch64")]
#[path = "simd_neon.rs"]
mod neon;

#[cfg(test)]
mod tests {
    use super::*;

    struct Probe<'a>(&'a [f32; 32], &'a [f32; 32]);

    /// What one instance computes on the first lanes of two arrays, as comparable rows.
    impl Kernel for Probe<'_> {
        type Out = Vec<(&'static str, Vec<f32>)>;
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Self::Out {
            let mut out = Vec::new();
            let mut chunks = |name, f: fn(S, S::F, S::F) -> S::F| {
                let mut row = vec![0.0; 32];
                for i in (0..32).step_by(S::LANES) {
                    // SAFETY: both arrays and `row` have 32 elements and LANES divides 32.
                    unsafe {
                        let v = f(s, s.load(self.0.as_ptr().add(i)), s.load(self.1.as_ptr().add(i)));
                        s.store(row.as_mut_ptr().add(i), v);
                    }
                }
                out.push((name, row));
            };
            chunks("add", |s, a, b| s.add(a, b));
            chunks("sub", |s, a, b| s.sub(a, b));
            chunks("mul", |s, a, b| s.mul(a, b));
            chunks("div", |s, a, b| s.div(a, b));
            chunks("max", |s, a, b| s.max(a, b));
            chunks("min", |s, a, b| s.min(a, b));
            chunks("abs", |s, a, _| s.abs(a));
            chunks("round", |s, a, _| s.round(a));
            chunks("select", |s, a, b| s.select_lt(a, b, s.splat(1.0), s.splat(2.0)));
            chunks("pow2", |s, a, b| s.scale_pow2(s.splat(1.25), s.round(s.mul(s.mul(a, b), s.splat(0.5)))));
            chunks("zip", |s, a, b| {
                let (lo, hi) = s.interleave(a, b);
                let (a2, b2) = s.deinterleave(lo, hi);
                s.add(s.sub(a2, a), s.sub(b2, b))
            });
            out
        }
    }

    #[test]
    fn every_instance_computes_the_same_lanes() {
        let mut a = [0.0f32; 32];
        let mut b = [0.0f32; 32];
        for i in 0..32 {
            a[i] = (i as f32 - 15.5) * 0.75;
            b[i] = 9.0 - i as f32 * 1.125;
        }
        let want = IsaLevel::Portable.run(Probe(&a, &b));
        for isa in IsaLevel::available() {
            assert_eq!(isa.run(Probe(&a, &b)), want, "{isa:?}");
        }
    }

    struct Half<'a>(&'a [f32], &'a mut [u16], &'a mut [f32]);
    impl Kernel for Half<'_> {
        type Out = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for i in (0..self.0.len()).step_by(S::LANES) {
                // SAFETY: the three slices have the same length, a multiple of 16.
                unsafe {
                    s.store_f16(self.1.as_mut_ptr().add(i), s.load(self.0.as_ptr().add(i)));
                    s.store(self.2.as_mut_ptr().add(i), s.load_f16(self.1.as_ptr().add(i)));
                }
            }
        }
    }

    #[test]
    fn half_conversion_rounds_to_nearest_even_and_back_is_exact_for_every_half() {
        // Every finite half, its neighbourhood midpoints (ties) and values just beside the ties.
        let mut x = Vec::new();
        for h in 0..=u16::MAX {
            let v = half::f16::from_bits(h).to_f32_const();
            if v.is_nan() {
                continue;
            }
            let next = half::f16::from_bits(h.wrapping_add(1)).to_f32_const();
            let tie = if next.is_finite() && v.is_finite() { (v + next) * 0.5 } else { v };
            x.extend([v, tie, f32::from_bits(tie.to_bits().wrapping_add(1))].map(|v| if v.is_nan() { 0.0 } else { v }));
        }
        x.resize(x.len().next_multiple_of(16), 0.0);
        for isa in IsaLevel::available() {
            let (mut bits, mut back) = (vec![0u16; x.len()], vec![0f32; x.len()]);
            isa.run(Half(&x, &mut bits, &mut back));
            for (i, &v) in x.iter().enumerate() {
                let want = half::f16::from_f32_const(v);
                assert_eq!(bits[i], want.to_bits(), "{isa:?} {v}");
                assert_eq!(back[i].to_bits(), want.to_f32_const().to_bits(), "{isa:?} {v}");
            }
        }
    }
}
