//! Contractions with f32 activations: native for F32, F16 and BF16 weights, and the exact path of every block format.
//!
//! `out[token][row] = sum over k of w * a`, one chain of fused multiply-adds per (row, token) over `NR` lanes, then the
//! lanes, then what is left of k: the same order for any tile, so that mat-vec and GEMM are one kernel. Plain floats are
//! converted in registers. Rows of block formats are decoded by `to_float` into scratch, a few at a time, and used for
//! all tokens: no matrix of floats is ever built. Oracle: `qmatvec_unified_numeric` with f32
//! activations.

use hanzo_gguf::Format;
use hanzo_gguf::formats::to_float;

use super::{Input, Job};
use crate::cpu::isa::{Isa, read};

/// Weight rows of a tile.
const ROWS: usize = 4;
/// Prefetch distance in bytes, at least.
const AHEAD: usize = 8192;
/// Activation bytes that stay in L2 while all rows pass.
const TOKEN_BYTES: usize = 256 << 10;

/// A plain float type of weights.
pub(super) trait Plain: 'static {
    const BYTES: usize;
    /// `NR` weights.
    unsafe fn lanes<I: Isa>(p: *const u8) -> I::W;
    /// One weight.
    unsafe fn one<I: Isa>(p: *const u8) -> f32;
}

/// f32 weights.
pub(super) struct F32;
/// Half float weights.
pub(super) struct F16;
/// bfloat16 weights.
pub(super) struct BF16;

impl Plain for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn lanes<I: Isa>(p: *const u8) -> I::W {
        unsafe { I::w_load(p.cast()) }
    }

    #[inline(always)]
    unsafe fn one<I: Isa>(p: *const u8) -> f32 {
        unsafe { read(p) }
    }
}

impl Plain for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn lanes<I: Isa>(p: *const u8) -> I::W {
        unsafe { I::w_load_f16(p.cast()) }
    }

    #[inline(always)]
    unsafe fn one<I: Isa>(p: *const u8) -> f32 {
        unsafe { I::f16(read(p)) }
    }
}

impl Plain for BF16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn lanes<I: Isa>(p: *const u8) -> I::W {
        unsafe { I::w_load_bf16(p.cast()) }
    }

    #[inline(always)]
    unsafe fn one<I: Isa>(p: *const u8) -> f32 {
        f32::from_bits(u32::from(unsafe { read::<u16>(p) }) << 16)
    }
}

/// Bytes of scratch for rows of `k` elements.
pub(super) fn scratch_bytes(format: Format, k: usize) -> usize {
    if format.is_block() { ROWS * k * 4 } else { 0 }
}

/// The body of the kernel of plain float weights.
#[inline(always)]
pub(super) unsafe fn run<I: Isa, P: Plain>(job: &mut Job<'_>) {
    let count = job.tokens.len();
    // Tokens in batches that stay in L2 while the rows pass; every batch reads the rows again.
    let batch = (TOKEN_BYTES / (4 * job.w.k.max(1))).max(2 * I::FT) / I::FT * I::FT;
    let mut first = 0;
    while first < count {
        let last = count.min(first + batch);
        let mut row = job.rows.start;
        while row < job.rows.end {
            let mut w = [job.row(row); ROWS];
            for r in 1..ROWS {
                w[r] = job.row(row + r);
            }
            // SAFETY: the rows are the job's.
            unsafe { tokens::<I, P>(job, &w, row, first, last) };
            row += ROWS;
        }
        first = last;
    }
}

/// The body of the kernel of block formats.
#[inline(always)]
pub(super) unsafe fn run_decoded<I: Isa>(job: &mut Job<'_>) {
    let k = job.w.k;
    let decoded = job.scratch.reserve(scratch_bytes(job.w.format, k)).cast::<f32>();
    let mut row = job.rows.start;
    while row < job.rows.end {
        let mut w = [decoded.cast_const().cast::<u8>(); ROWS];
        for r in 0..ROWS {
            // SAFETY: scratch holds ROWS rows of k floats; the packed row is the job's.
            unsafe {
                let to = decoded.add(r * k);
                let packed = std::slice::from_raw_parts(job.row(row + r), job.w.format.row_bytes(k).unwrap_or(0));
                to_float(job.w.format, packed, std::slice::from_raw_parts_mut(to, k));
                w[r] = to.cast_const().cast();
            }
        }
        // SAFETY: the rows are the job's, decoded.
        unsafe { tokens::<I, F32>(job, &w, row, 0, job.tokens.len()) };
        row += ROWS;
    }
}

/// One tile of rows with tokens `first..last`: by `FT` (as 6, 3 or 2), then one by one.
#[inline(always)]
unsafe fn tokens<I: Isa, P: Plain>(job: &Job<'_>, w: &[*const u8; ROWS], row: usize, first: usize, last: usize) {
    let mut token = first;
    unsafe {
        while token + I::FT <= last {
            match I::FT {
                6 => tile::<I, P, 6>(job, w, row, token),
                3 => tile::<I, P, 3>(job, w, row, token),
                _ => tile::<I, P, 2>(job, w, row, token),
            }
            token += match I::FT {
                6 => 6,
                3 => 3,
                _ => 2,
            };
        }
        while token < last {
            tile::<I, P, 1>(job, w, row, token);
            token += 1;
        }
    }
}

/// `ROWS` rows with `T` tokens.
#[inline(always)]
unsafe fn tile<I: Isa, P: Plain, const T: usize>(job: &Job<'_>, w: &[*const u8; ROWS], row: usize, token: usize) {
    let Input::F32 { data, stride } = job.input else {
        debug_assert!(false, "an f32 kernel was given int8 activations");
        return;
    };
    let k = job.w.k;
    unsafe {
        let mut a = [data; T];
        for t in 0..T {
            a[t] = data.add(job.tokens.rows(token + t).0 * stride);
        }
        let mut acc = [[I::w_zero(); T]; ROWS];
        let whole = k / I::NR * I::NR;
        // Rows lie one after the other: the same place one or more tiles ahead. Other tokens find the rows in a cache.
        let tile_bytes = ROWS * job.w.row_bytes;
        let distance = tile_bytes * AHEAD.div_ceil(tile_bytes.max(1));
        let mut i = 0;
        while i < whole {
            if T == 1 && (i * P::BYTES).is_multiple_of(64) {
                for r in 0..ROWS {
                    I::prefetch(w[r].wrapping_add(i * P::BYTES + distance));
                }
            }
            let mut x = [I::w_zero(); T];
            for t in 0..T {
                x[t] = I::w_load(a[t].add(i));
            }
            for r in 0..ROWS {
                let v = P::lanes::<I>(w[r].add(i * P::BYTES));
                for t in 0..T {
                    acc[r][t] = I::w_fma(v, x[t], acc[r][t]);
                }
            }
            i += I::NR;
        }
        for r in 0..ROWS.min(job.rows.end - row) {
            for t in 0..T {
                let mut sum = I::w_sum(acc[r][t]);
                for i in whole..k {
                    sum = I::fma1(P::one::<I>(w[r].add(i * P::BYTES)), *a[t].add(i), sum);
                }
                job.write(job.tokens.rows(token + t).1, row + r, sum);
            }
        }
    }
}
