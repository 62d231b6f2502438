//! BF16 weights with activations rounded to bf16, where a processor multiplies pairs of them: twice the rate of f32.
//!
//! Once a call (once an op, where a worker keeps what it packed: [`super::Job::packed`]) the rows of the job's tokens are
//! rounded to scratch, slice by slice of k, and then meet the weights as they lie in the file, in the tiles and the order of
//! [`super::float`]: one token or many, the same bits. Rounding is to the nearest, ties to even; subnormal floats count as
//! zero, of activations, weights, products and sums, for that is what the instruction does. Oracle:
//! `bf16_activations_numeric`. No other format may enter: only exact products of 8 by 8 bits make the pairs' sums f32.

use super::Job;
use super::float::{self, Product, Rows, SLICE};
use crate::cpu::isa::{Bf16, Isa};

/// Rounded rows that are kept at a time, at most: more would be too much for many threads.
const KEPT_BYTES: usize = 8 << 20;

/// bf16 by bf16.
struct Rounded;

impl<I: Isa + Bf16> Product<I> for Rounded {
    const W_BYTES: usize = 2;
    const X_BYTES: usize = 2;
    const STEP: usize = I::PAIRED;
    type W = I::P;
    type X = I::P;

    #[inline(always)]
    unsafe fn w(p: *const u8) -> I::P {
        unsafe { I::p_load(p, I::PAIRED) }
    }

    #[inline(always)]
    unsafe fn x(p: *const u8) -> I::P {
        unsafe { I::p_load(p, I::PAIRED) }
    }

    #[inline(always)]
    unsafe fn step(acc: I::W, w: I::P, x: I::P) -> I::W {
        unsafe { I::p_dot(acc, w, x) }
    }

    #[inline(always)]
    unsafe fn rest_of_lanes(acc: I::W, w: *const u8, x: *const u8, n: usize) -> I::W {
        unsafe { I::p_dot(acc, I::p_load(w, n), I::p_load(x, n)) }
    }
}

/// Elements from one rounded row of a slice to the next: whole cache lines.
const fn width(k: usize) -> usize {
    let k = k.next_multiple_of(32);
    if k < SLICE { k } else { SLICE }
}

/// Bytes of a rounded row, all slices.
const fn row_bytes(k: usize) -> usize {
    2 * k.div_ceil(SLICE) * width(k)
}

/// Rows of `k` elements that are rounded at once.
const fn batch(k: usize) -> usize {
    let rows = KEPT_BYTES / if k == 0 { 1 } else { row_bytes(k) };
    if rows == 0 { 1 } else { rows }
}

/// Bytes of scratch for `tokens` rows of `k` elements.
pub(super) fn scratch_bytes(k: usize, tokens: usize) -> usize {
    row_bytes(k) * tokens.min(batch(k))
}

/// The body of the kernel.
#[inline(always)]
pub(super) unsafe fn run<I: Bf16>(job: &mut Job<'_>) {
    let Some(x) = float::f32_rows(job) else { return };
    let (k, all) = (job.w.k, job.tokens);
    let bytes = scratch_bytes(k, all.len());
    let packed = job.packed && all.len() <= batch(k) && job.scratch.capacity() >= bytes;
    let memory = job.scratch.reserve(bytes);
    let mut first = 0;
    while first < all.len() {
        let tokens = batch(k).min(all.len() - first);
        job.tokens = all.part(first..first + tokens);
        let rows = Rows { data: memory, row: 2 * width(k), slice: 2 * width(k) * tokens, gathered: true };
        for token in 0..if packed { 0 } else { tokens } {
            for slice in 0..k.div_ceil(SLICE) {
                // SAFETY: the row is the job's; scratch holds all slices of a batch of tokens.
                unsafe {
                    let to = memory.add(slice * rows.slice + token * rows.row);
                    I::p_round(x.at(job, token, slice).cast(), SLICE.min(k - slice * SLICE), to);
                }
            }
        }
        // SAFETY: the caller's contract is this function's.
        unsafe { float::contract::<I, Rounded>(job, &rows) }
        first += tokens;
    }
    job.tokens = all;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_keeps_rows_of_one_batch_at_most() {
        for (k, tokens) in [(1, 1), (1024, 512), (12288, 512), (12288, 4096), (1 << 24, 7)] {
            let bytes = scratch_bytes(k, tokens);
            assert!(bytes <= KEPT_BYTES.max(row_bytes(k)), "{k} {tokens}: {bytes}");
            assert!(bytes >= row_bytes(k), "{k} {tokens}: {bytes}");
        }
    }
}
