//! Quantized activations: one layout for every format, made once per op input.
//!
//! Per token row of k elements (k a multiple of 32), in planes: int8 codes; an f32 step `d` per 32; two exact i16 sums of
//! codes per 32, one per 16; and the products `d * sum` in f32, per 32 and per 16, which the formats with minima read.
//! `d = amax / 127` and `code = round_ties_even(x * (127 / amax))`, both in f32 and bit-equal on every instruction set.
//! Groups of zeros, or too small for 127 / amax to be finite, are zeros with `d = 0`. A group with an infinity or a NaN
//! has codes 0 and `d = NaN`, so that every output that reads it is NaN.

use std::ops::Range;

use super::Scratch;
use crate::cpu::isa::{Isa, IsaLevel};

/// The planes of quantized activation rows `[tokens, k]`, in memory owned elsewhere.
#[derive(Clone, Copy, Debug)]
pub struct Acts {
    /// Codes, k a row.
    pub codes: *mut i8,
    /// Steps, k / 32 a row.
    pub d: *mut f32,
    /// Sums of codes, k / 16 a row.
    pub sums: *mut i16,
    /// `d` times the sum of codes, k / 32 a row.
    pub dsums: *mut f32,
    /// `d` times the sum of codes, k / 16 a row.
    pub dsums16: *mut f32,
    /// Elements of a row.
    pub k: usize,
    /// Rows.
    pub tokens: usize,
}

// SAFETY: plain addresses; whoever dereferences them answers for the memory.
unsafe impl Send for Acts {}
// SAFETY: as above.
unsafe impl Sync for Acts {}

const PLANE_ALIGN: usize = 64;

/// Bytes of the five planes.
fn plane_bytes(tokens: usize, k: usize) -> [usize; 5] {
    let n = tokens * k;
    [n, n / 8, n / 8, n / 8, n / 4].map(|bytes| bytes.next_multiple_of(PLANE_ALIGN))
}

impl Acts {
    /// Bytes that the planes of `tokens` rows of `k` elements take.
    pub fn bytes(tokens: usize, k: usize) -> usize {
        plane_bytes(tokens, k).iter().sum()
    }

    /// Planes laid out in [`Acts::bytes`] bytes at `memory`, which is aligned to 64.
    ///
    /// # Panics
    /// If `k` is not a multiple of 32.
    pub fn at(memory: *mut u8, tokens: usize, k: usize) -> Acts {
        assert!(k.is_multiple_of(32), "quantized activations have rows of whole groups of 32, not {k} elements");
        let mut at = 0;
        let [codes, d, sums, dsums, dsums16] = plane_bytes(tokens, k).map(|bytes| {
            let plane = memory.wrapping_add(at);
            at += bytes;
            plane
        });
        Acts {
            codes: codes.cast(),
            d: d.cast(),
            sums: sums.cast(),
            dsums: dsums.cast(),
            dsums16: dsums16.cast(),
            k,
            tokens,
        }
    }

    /// The planes of one row.
    #[inline(always)]
    pub(in crate::cpu) fn row(&self, token: usize) -> ActRow {
        let groups = self.k / 32;
        ActRow {
            codes: self.codes.wrapping_add(token * self.k),
            d: self.d.wrapping_add(token * groups),
            sums: self.sums.wrapping_add(token * groups * 2),
            dsums: self.dsums.wrapping_add(token * groups),
            dsums16: self.dsums16.wrapping_add(token * groups * 2),
        }
    }
}

/// The planes of one token, each at its first element.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct ActRow {
    pub codes: *const i8,
    pub d: *const f32,
    pub sums: *const i16,
    pub dsums: *const f32,
    pub dsums16: *const f32,
}

impl ActRow {
    /// The planes from element `k` on, a multiple of 32.
    #[inline(always)]
    pub(in crate::cpu) fn from(self, k: usize) -> ActRow {
        ActRow {
            codes: self.codes.wrapping_add(k),
            d: self.d.wrapping_add(k / 32),
            sums: self.sums.wrapping_add(k / 16),
            dsums: self.dsums.wrapping_add(k / 32),
            dsums16: self.dsums16.wrapping_add(k / 16),
        }
    }
}

/// Quantized activations that own their memory: sized by the largest use, then reused.
#[derive(Debug, Default)]
pub struct ActBuf {
    memory: Scratch,
}

impl ActBuf {
    /// No memory yet.
    pub const fn new() -> ActBuf {
        ActBuf { memory: Scratch::new() }
    }

    /// Planes for `tokens` rows of `k` elements, valid until the next call or drop. Allocates only when it must grow.
    ///
    /// # Panics
    /// If `k` is not a multiple of 32.
    pub fn planes(&mut self, tokens: usize, k: usize) -> Acts {
        Acts::at(self.memory.reserve(Acts::bytes(tokens, k)), tokens, k)
    }
}

/// Quantizes the groups `groups` of 32 elements of row `token` of the planes, from the row `x` of k floats.
///
/// # Safety
/// The CPU supports the instruction set of the lookup; the planes and `x` are valid for the row; no other thread touches
/// these groups meanwhile.
pub type QuantizeRow = unsafe fn(acts: &Acts, token: usize, groups: Range<usize>, x: *const f32);

/// The quantizer of an instruction set (the portable one where the target has no such level).
pub fn quantizer(isa: IsaLevel) -> QuantizeRow {
    match isa {
        #[cfg(target_arch = "x86_64")]
        IsaLevel::Avx2 => super::entries::avx2::quantize,
        #[cfg(target_arch = "x86_64")]
        IsaLevel::Avx512 | IsaLevel::Avx512Vbmi | IsaLevel::Avx512Bf16 => super::entries::avx512::quantize,
        #[cfg(target_arch = "aarch64")]
        IsaLevel::Neon => super::entries::neon::quantize,
        #[cfg(target_arch = "aarch64")]
        IsaLevel::I8mm => super::entries::i8mm::quantize,
        _ => super::entries::portable::quantize,
    }
}

/// The body of [`QuantizeRow`].
#[inline(always)]
pub(super) unsafe fn quantize<I: Isa>(acts: &Acts, token: usize, groups: Range<usize>, x: *const f32) {
    debug_assert!(token < acts.tokens && groups.end <= acts.k / 32);
    let per_row = acts.k / 32;
    for group in groups {
        let at = token * per_row + group;
        // SAFETY: the group lies in the row, which the caller keeps valid.
        unsafe {
            let q = I::quantize(x.add(32 * group), acts.codes.add(32 * at));
            acts.d.add(at).write(q.d);
            acts.sums.add(2 * at).cast::<[i16; 2]>().write(q.sums);
            acts.dsums.add(at).write(q.d * f32::from(q.sums[0] + q.sums[1]));
            acts.dsums16.add(2 * at).cast::<[f32; 2]>().write(q.sums.map(|sum| q.d * f32::from(sum)));
        }
    }
}
