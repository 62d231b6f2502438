//! Mat-vec on AVX-512 with VBMI: 64 codes an instruction, from blocks as they are in the file. One file a family of formats.
//!
//! `out[row] = sum over groups of d * (s * sum(code * a) - m * sum(a))`, as in [`super::contract`], whose mat-vec of 32-byte
//! vectors this replaces on such processors. What binds that one is instructions: 12 to 25 a 32 elements. Here a format reads
//! a *unit* (64 to 512 elements, whole blocks) with byte permutations over two vectors, and activations lie in the order in
//! which the codes come out: [`prepare`] puts them there once a call, so that no code is ever moved to its place. An
//! integer sum starts at minus the codes' offset times the activations (exact), and takes as many vectors as share their
//! scales lane by lane. Nothing here knows of threads or Plans; other instruction sets may not enter.
//!
//! The order of a sum depends on the format alone: one token or two, any rows, give the same bits. What k has beyond whole
//! units goes through the narrow kernel. Oracle: `qmatvec_unified_numeric`.

#![allow(
    clippy::needless_range_loop,
    reason = "index loops of constant length over several arrays unroll; iterators hide it"
)]

use std::arch::x86_64::*;

use hanzo_gguf::Format;

use super::contract::{Input, Job, Kernel, dots};
use super::formats::iq1_m::IQ1_M;
use super::formats::iq1_s::IQ1_S;
use super::formats::iq2_s::IQ2_S;
use super::formats::iq2_xs::IQ2_XS;
use super::formats::iq2_xxs::IQ2_XXS;
use super::formats::iq3_s::IQ3_S;
use super::formats::iq3_xxs::IQ3_XXS;
use super::formats::iq4_nl::IQ4_NL;
use super::formats::iq4_xs::IQ4_XS;
use super::formats::mxfp4::MXFP4;
use super::formats::nvfp4::NVFP4;
use super::formats::q1_0::Q1_0;
use super::formats::q2_0::Q2_0;
use super::formats::q2_k::Q2_K;
use super::formats::q3_k::Q3_K;
use super::formats::q4_0::Q4_0;
use super::formats::q4_1::Q4_1;
use super::formats::q4_k::Q4_K;
use super::formats::q5_0::Q5_0;
use super::formats::q5_1::Q5_1;
use super::formats::q5_k::Q5_K;
use super::formats::q6_k::Q6_K;
use super::formats::q8_0::Q8_0;
use super::formats::tq1_0::TQ1_0;
use super::formats::tq2_0::TQ2_0;
use super::formats::{Codes, CpuFormat, Shape};
use super::isa::{Avx512, read};

mod blocks_of_32;
mod codebook;
mod k_quants;
mod ternary;

/// Tokens whose activations are prepared at once.
const BATCH: usize = 4;
/// Prefetch distance in bytes.
const AHEAD: usize = 8192;
/// Accumulators a token, so that no multiply-add waits for the one before.
const CHAINS: usize = 4;

/// The floats of a token that a row's products are added to.
#[derive(Clone, Copy)]
pub(super) struct Acc {
    /// Products of scales and sums.
    pub sums: [__m512; CHAINS],
    /// Minima times sums of activations; a format says which lanes count ([`WideFormat::MINIMA`]).
    pub minima: __m512,
}

/// A unit of a token's activations, prepared: vectors of codes, then a vector of fixes a sum, then the format's own floats.
#[derive(Clone, Copy)]
pub(super) struct Unit(*const u8);

/// A format that has a kernel here.
///
/// # Safety
/// As for [`CpuFormat`]: implementations read the unit's bytes from `w` and no others, on a CPU with AVX-512 VBMI.
#[allow(clippy::missing_safety_doc)]
pub(super) trait WideFormat: CpuFormat {
    /// Elements of a unit.
    const UNIT: usize;
    /// For each vector of codes and each of its dwords: which four elements of the unit (their index / 4) they are, or
    /// [`NONE`].
    const QUADS: &'static [[u8; 16]];
    /// Integer sums a unit; consecutive vectors of codes share one.
    const SUMS: usize = Self::QUADS.len();
    /// What is to be taken off each code.
    const OFFSET: u8 = match Self::CODES {
        Codes::Signed => 128,
        Codes::Unsigned { offset } => offset,
    };
    /// True if every sum has a vector of the activations' steps, lane by lane.
    const LANES: bool = false;
    /// The lanes of [`Acc::minima`] that are taken off the sums.
    const MINIMA: u16 = 0;
    /// Vectors of floats of the format's own after those.
    const OWN: usize = 0;

    /// Writes the format's own floats of a unit, from its steps (one per 32) and their products with sums of activations (per
    /// 32, per 16).
    #[inline(always)]
    unsafe fn own(_d: *const f32, _dsums: *const f32, _dsums16: *const f32, _out: *mut f32) {}

    /// Adds the products of a unit of a row with those of each token.
    unsafe fn unit<const T: usize>(w: *const u8, x: &[Unit; T], acc: &mut [Acc; T]);
}

/// A dword of a code vector that stands for no element; its activations are 0.
pub(super) const NONE: u8 = 255;

/// Bytes of a prepared unit, and where its parts begin.
trait Layout: WideFormat {
    const VECTORS: usize = Self::QUADS.len();
    const FIXES: usize = 64 * Self::VECTORS;
    const STEPS: usize = Self::FIXES + 64 * Self::SUMS;
    const OWN_AT: usize = Self::STEPS + if Self::LANES { 64 * Self::SUMS } else { 0 };
    const UNIT_BYTES: usize = Self::OWN_AT + 64 * Self::OWN;
    /// Bytes of a unit of weights.
    const W_BYTES: usize = Self::UNIT / Self::FORMAT.block_len() * Self::FORMAT.block_bytes();
}

impl<F: WideFormat> Layout for F {}

impl Unit {
    /// Codes of vector `v`.
    #[inline(always)]
    unsafe fn codes(self, v: usize) -> __m512i {
        unsafe { _mm512_load_si512(self.0.add(64 * v).cast()) }
    }

    /// What sum `s` starts at.
    #[inline(always)]
    unsafe fn fix<F: WideFormat>(self, s: usize) -> __m512i {
        unsafe { _mm512_load_si512(self.0.add(F::FIXES + 64 * s).cast()) }
    }

    /// The activations' steps in the lanes of sum `s`.
    #[inline(always)]
    unsafe fn steps<F: WideFormat>(self, s: usize) -> __m512 {
        unsafe { _mm512_load_ps(self.0.add(F::STEPS + 64 * s).cast()) }
    }

    /// The format's own vector `i`.
    #[inline(always)]
    unsafe fn own<F: WideFormat>(self, i: usize) -> __m512 {
        unsafe { _mm512_load_ps(self.0.add(F::OWN_AT + 64 * i).cast()) }
    }
}

macro_rules! table {
    ($($format:ident,)*) => {
        /// The mat-vec of a format that has one here.
        pub(super) fn kernel(format: Format) -> Option<Kernel> {
            match format {
                $( Format::$format => Some(matvec::<$format> as Kernel), )*
                _ => None,
            }
        }

        /// Bytes of scratch that it needs for rows of `k` elements.
        pub(super) fn scratch_bytes(format: Format, k: usize) -> usize {
            match format {
                $( Format::$format => prepared_bytes::<$format>(k), )*
                _ => 0,
            }
        }
    };
}
table!(
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, NVFP4, TQ1_0, TQ2_0, Q1_0, Q2_0,
    IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S,
);

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,avx2,fma,f16c,bmi2")]
unsafe fn matvec<F: WideFormat>(job: &mut Job<'_>) {
    unsafe { run::<F>(job) }
}

/// Bytes of scratch for rows of `k` elements.
fn prepared_bytes<F: WideFormat>(k: usize) -> usize {
    BATCH * (k / F::UNIT) * F::UNIT_BYTES
}

/// The body of the mat-vec of a format.
#[inline(always)]
unsafe fn run<F: WideFormat>(job: &mut Job<'_>) {
    let units = job.w.k / F::UNIT;
    let bytes = prepared_bytes::<F>(job.w.k);
    let packed = job.packed && job.tokens.len() <= BATCH && job.scratch.capacity() >= bytes;
    let memory = job.scratch.reserve(bytes);
    let mut first = 0;
    while first < job.tokens.len() {
        let batch = BATCH.min(job.tokens.len() - first);
        // SAFETY: scratch holds a batch; rows and tokens are the job's.
        unsafe {
            for t in 0..if packed { 0 } else { batch } {
                prepare::<F>(job, first + t, units, memory.add(t * units * F::UNIT_BYTES));
            }
            let mut t = 0;
            while t + 1 < batch {
                rows::<F, 2>(job, memory, units, first, t);
                t += 2;
            }
            if t < batch {
                rows::<F, 1>(job, memory, units, first, t);
            }
        }
        first += batch;
    }
}

/// Puts a token's activations into the order of the codes.
#[inline(always)]
unsafe fn prepare<F: WideFormat>(job: &Job<'_>, token: usize, units: usize, out: *mut u8) {
    let Input::Int8(acts) = job.input else {
        debug_assert!(false, "an int8 kernel was given f32 activations");
        return;
    };
    let row = acts.row(job.tokens.rows(token).0);
    let groups = F::UNIT / 32;
    for u in 0..units {
        unsafe {
            let out = out.add(u * F::UNIT_BYTES);
            let quads = row.codes.add(u * F::UNIT).cast::<u32>();
            let d = row.d.add(u * groups);
            for s in 0..F::SUMS {
                let of = F::VECTORS / F::SUMS;
                let mut sum = _mm512_setzero_si512();
                for v in s * of..(s + 1) * of {
                    let to = out.add(64 * v).cast::<u32>();
                    for lane in 0..16 {
                        let quad = F::QUADS[v][lane];
                        let x = if quad == NONE { 0 } else { quads.add(usize::from(quad)).read_unaligned() };
                        to.add(lane).write(x);
                    }
                    if <F as WideFormat>::OFFSET != 0 {
                        sum = _mm512_dpbusd_epi32(
                            sum,
                            _mm512_set1_epi8(<F as WideFormat>::OFFSET as i8),
                            _mm512_load_si512(to.cast()),
                        );
                    }
                }
                let fix = _mm512_sub_epi32(_mm512_setzero_si512(), sum);
                _mm512_store_si512(out.add(F::FIXES + 64 * s).cast(), fix);
                if F::LANES {
                    let to = out.add(F::STEPS + 64 * s).cast::<f32>();
                    for lane in 0..16 {
                        let quad = F::QUADS[s * of][lane];
                        to.add(lane).write(if quad == NONE { 0.0 } else { *d.add(usize::from(quad) / 8) });
                    }
                }
            }
            if F::OWN > 0 {
                let (dsums, dsums16) = (row.dsums.add(u * groups), row.dsums16.add(2 * u * groups));
                F::own(d, dsums, dsums16, out.add(F::OWN_AT).cast());
            }
        }
    }
}

/// All rows of a job with tokens `first + t..first + t + T`, which are number `t` and on of those prepared.
#[inline(always)]
unsafe fn rows<F: WideFormat, const T: usize>(job: &Job<'_>, memory: *const u8, units: usize, first: usize, t: usize) {
    let Input::Int8(acts) = job.input else { return };
    let mut x = [memory; T];
    for i in 0..T {
        x[i] = memory.wrapping_add((t + i) * units * F::UNIT_BYTES);
    }
    let blocks = units * F::UNIT / F::LEN;
    let rest = (job.w.k - units * F::UNIT) / F::LEN;
    for row in job.rows.clone() {
        // SAFETY: the row, the prepared units and the tokens are the job's.
        unsafe {
            let w = job.row(row);
            let zero = Acc { sums: [_mm512_setzero_ps(); CHAINS], minima: _mm512_setzero_ps() };
            let mut acc = [zero; T];
            for u in 0..units {
                let w = w.add(u * F::W_BYTES);
                for line in 0..F::W_BYTES.div_ceil(64) {
                    _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(AHEAD + 64 * line).cast());
                }
                let mut at = [Unit(memory); T];
                for i in 0..T {
                    at[i] = Unit(x[i].add(u * F::UNIT_BYTES));
                }
                F::unit::<T>(w, &at, &mut acc);
            }
            let mut tail = [0f32; T];
            if rest > 0 {
                let mut a = [acts.row(job.tokens.rows(first + t).0); T];
                for i in 0..T {
                    a[i] = acts.row(job.tokens.rows(first + t + i).0).from(units * F::UNIT);
                }
                tail = dots::<Avx512, F, 1, T>(&[w.add(blocks * F::BYTES)], rest, &a, AHEAD)[0];
            }
            for i in 0..T {
                let s = &acc[i].sums;
                let mut sum = _mm512_add_ps(_mm512_add_ps(s[0], s[1]), _mm512_add_ps(s[2], s[3]));
                if F::MINIMA != 0 {
                    sum = _mm512_mask_sub_ps(sum, !0, sum, _mm512_maskz_mov_ps(F::MINIMA, acc[i].minima));
                }
                job.write(job.tokens.rows(first + t + i).1, row, _mm512_reduce_add_ps(sum) + tail[i]);
            }
        }
    }
}

/// `sums[chain] += factor * sum`.
#[inline(always)]
unsafe fn add(acc: &mut Acc, chain: usize, sum: __m512i, factor: __m512) {
    let c = chain % CHAINS;
    acc.sums[c] = unsafe { _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), factor, acc.sums[c]) };
}

/// A vector of byte indices, for permutations.
#[repr(align(64))]
pub(super) struct Bytes(pub [u8; 64]);

impl Bytes {
    #[inline(always)]
    unsafe fn load(&self) -> __m512i {
        unsafe { _mm512_load_si512(self.0.as_ptr().cast()) }
    }
}

/// A vector of lane indices.
#[repr(align(64))]
pub(super) struct Lanes(pub [u32; 16]);

impl Lanes {
    #[inline(always)]
    unsafe fn load(&self) -> __m512i {
        unsafe { _mm512_load_si512(self.0.as_ptr().cast()) }
    }
}

/// The quads of two chunks of 32, one after the other.
const fn chunks(a: u8, b: u8) -> [u8; 16] {
    let mut quads = [0; 16];
    let mut i = 0;
    while i < 8 {
        quads[i] = 8 * a + i as u8;
        quads[8 + i] = 8 * b + i as u8;
        i += 1;
    }
    quads
}

/// The quads of 64 bytes of nibbles, 16 a chunk: the low ones of four chunks, the first quad at `first`.
const fn sixteens(first: u8) -> [u8; 16] {
    let mut quads = [0; 16];
    let mut i = 0;
    while i < 16 {
        quads[i] = first + 8 * (i as u8 / 4) + i as u8 % 4;
        i += 1;
    }
    quads
}

/// Lane indices: eight times `a`, eight times `b`.
const fn eights(a: u32, b: u32) -> Lanes {
    let mut lanes = [a; 16];
    let mut i = 8;
    while i < 16 {
        lanes[i] = b;
        i += 1;
    }
    Lanes(lanes)
}

/// Lane indices: four times each.
const fn fours(of: [u32; 4]) -> Lanes {
    let mut lanes = [0; 16];
    let mut i = 0;
    while i < 16 {
        lanes[i] = of[i / 4];
        i += 1;
    }
    Lanes(lanes)
}

/// A half float in all lanes.
#[inline(always)]
unsafe fn half(p: *const u8) -> __m512 {
    unsafe { _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(read::<u16>(p))))) }
}

/// Nibbles of each byte.
#[inline(always)]
unsafe fn low(q: __m512i) -> __m512i {
    unsafe { _mm512_and_si512(q, _mm512_set1_epi8(15)) }
}

#[inline(always)]
unsafe fn high(q: __m512i) -> __m512i {
    unsafe { _mm512_and_si512(_mm512_srli_epi16::<4>(q), _mm512_set1_epi8(15)) }
}

/// A table of sixteen signed bytes in the form of the dot product's unsigned side, plus 128, four times.
#[inline(always)]
unsafe fn biased(table: &[i8; 16]) -> __m512i {
    unsafe {
        let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
        _mm512_xor_si512(table, _mm512_set1_epi8(-128))
    }
}

/// `a & mask | b`.
#[inline(always)]
unsafe fn and_or(a: __m512i, mask: u8, b: __m512i) -> __m512i {
    unsafe { _mm512_ternarylogic_epi32::<0xea>(a, _mm512_set1_epi8(mask as i8), b) }
}
