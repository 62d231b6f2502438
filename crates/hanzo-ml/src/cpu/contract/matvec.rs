//! Mat-vec: weights pass once from memory to registers, several rows at once, for one token or two.
//!
//! `out[row] = sum over groups of d * (s * sum(code * a) - m * sum(a))`. Bytes: the weights once, the activations once per
//! few rows from L1. Operations per 32 elements: the format's unpacking, one exact dot product (1 to 3 instructions), one
//! conversion, one fused multiply-add; a block's scales are multiplied by `d` eight at a time. Oracle:
//! `qmatvec_unified_numeric`.

use super::acts::ActRow;
use super::{Input, Job};
use crate::cpu::formats::{Ahead, CpuFormat, Scales, Shape};
use crate::cpu::isa::Isa;

/// Rows and tokens at once for more tokens.
const PAIR: usize = 2;
/// Prefetch distance in bytes, at least.
const AHEAD: usize = 4096;

/// The body of the mat-vec kernel of a format.
#[inline(always)]
pub(super) unsafe fn run<I: Isa, F: CpuFormat>(job: &mut Job<'_>) {
    // SAFETY: the caller's contract is this function's.
    unsafe {
        match (job.tokens.len(), F::ROWS) {
            (1, 4) => tiles::<I, F, 4, 1>(job),
            (1, _) => tiles::<I, F, 2, 1>(job),
            _ => tiles::<I, F, PAIR, PAIR>(job),
        }
    }
}

/// All rows and tokens of a job, `R` by `T`. Short tiles repeat the last row or token and drop the result.
#[inline(always)]
unsafe fn tiles<I: Isa, F: CpuFormat, const R: usize, const T: usize>(job: &mut Job<'_>) {
    let Input::Int8(acts) = job.input else {
        debug_assert!(false, "an int8 kernel was given f32 activations");
        return;
    };
    let count = job.tokens.len();
    let blocks = job.w.k / F::LEN;
    // Rows lie one after the other, so the same place one or more tiles ahead covers every line of the weights once.
    let tile_bytes = R * job.w.row_bytes;
    let distance = tile_bytes * AHEAD.div_ceil(tile_bytes.max(1));
    let mut row = job.rows.start;
    while row < job.rows.end {
        let mut w = [job.row(row); R];
        for r in 1..R {
            w[r] = job.row(row + r);
        }
        let mut token = 0;
        while token < count {
            let mut a = [acts.row(job.tokens.rows(token).0); T];
            for t in 1..T {
                a[t] = acts.row(job.tokens.rows((token + t).min(count - 1)).0);
            }
            // SAFETY: the rows and activation rows are the job's.
            let sums = unsafe { dots::<I, F, R, T>(&w, blocks, &a, distance) };
            for t in 0..T.min(count - token) {
                let out_row = job.tokens.rows(token + t).1;
                for r in 0..R.min(job.rows.end - row) {
                    // SAFETY: the row and the output row are the job's.
                    unsafe { job.write(out_row, row + r, sums[r][t]) };
                }
            }
            token += T;
        }
        row += R;
    }
}

/// The dot products of `R` rows with `T` tokens.
#[inline(always)]
pub(in crate::cpu) unsafe fn dots<I: Isa, F: CpuFormat, const R: usize, const T: usize>(
    w: &[*const u8; R],
    blocks: usize,
    a: &[ActRow; T],
    distance: usize,
) -> [[f32; T]; R] {
    unsafe {
        let mut acc = [[I::f_zero(); T]; R];
        let mut minima = [[I::f_zero(); T]; R];
        let mut minimum = [[0f32; T]; R];
        let mut ahead = [const { Ahead::new() }; R];
        for b in 0..blocks {
            let mut block = *w;
            let mut scaled = [[Scales::NONE; T]; R];
            for r in 0..R {
                block[r] = w[r].add(b * F::BYTES);
                for line in 0..F::BYTES.div_ceil(64) {
                    I::prefetch(block[r].wrapping_add(distance + 64 * line));
                }
                let (mut s, mut m) = (Scales::NONE, Scales::NONE);
                F::scales::<I>(block[r], &mut s, &mut m);
                F::look_ahead::<I>(block[r], &mut ahead[r]);
                for t in 0..T {
                    times_d::<I, F>(&s, a[t].d.add(b * F::CHUNKS), &mut scaled[r][t]);
                    if F::HAS_MIN && F::CHUNKS == 8 {
                        // Eight or sixteen groups: whole vectors of minima and sums.
                        for i in 0..F::HALVES {
                            let sums =
                                if F::GROUP == 32 { a[t].dsums.add(8 * b) } else { a[t].dsums16.add(16 * b + 8 * i) };
                            let m = I::f_load(m.0.as_ptr().add(8 * i));
                            minima[r][t] = I::f_fma(m, I::f_load(sums), minima[r][t]);
                        }
                    } else if F::HAS_MIN {
                        for g in 0..F::CHUNKS * F::HALVES {
                            let at = b * F::CHUNKS * F::HALVES + g;
                            let sum = if F::GROUP == 32 { *a[t].dsums.add(at) } else { *a[t].dsums16.add(at) };
                            minimum[r][t] = I::fma1(m.0[g], sum, minimum[r][t]);
                        }
                    }
                }
            }
            for_each_chunk!(F::CHUNKS, chunk, {
                let mut x = [I::splat(0); T];
                let mut fix = [I::fix_none(); T];
                for t in 0..T {
                    x[t] = I::load(a[t].codes.add(32 * (b * F::CHUNKS + chunk)).cast());
                    if F::SIGNED {
                        fix[t] = I::fix_signed(x[t]);
                    } else if F::OFFSET != 0 {
                        fix[t] = I::fix_unsigned(x[t], F::OFFSET);
                    }
                }
                for r in 0..R {
                    let codes = F::codes::<I>(block[r], chunk, &ahead[r]);
                    for t in 0..T {
                        let sum = if F::SIGNED {
                            I::dot_signed(codes, x[t], fix[t])
                        } else {
                            I::dot_unsigned(codes, x[t], fix[t])
                        };
                        let s = &scaled[r][t].0;
                        let s =
                            if F::GROUP == 32 { I::f_splat(s[chunk]) } else { I::f_splat2(s.as_ptr().add(2 * chunk)) };
                        acc[r][t] = I::f_fma(I::f_from_n(sum), s, acc[r][t]);
                    }
                }
            });
        }
        let mut out = [[0f32; T]; R];
        for r in 0..R {
            for t in 0..T {
                out[r][t] = I::f_sum(acc[r][t]);
                if F::HAS_MIN {
                    out[r][t] -= I::f_sum(minima[r][t]) + minimum[r][t];
                }
            }
        }
        out
    }
}

/// `out[g] = s[g] * d[g's 32]` for the groups of a block.
#[inline(always)]
unsafe fn times_d<I: Isa, F: CpuFormat>(s: &Scales, d: *const f32, out: &mut Scales) {
    unsafe {
        if F::CHUNKS == 8 {
            let d = I::f_load(d);
            let twice = I::f_twice(d);
            for i in 0..F::HALVES {
                let d = if F::GROUP == 32 { d } else { twice[i] };
                let product = I::f_mul(I::f_load(s.0.as_ptr().add(8 * i)), d);
                let out = out.0.as_mut_ptr().add(8 * i);
                // One scale a chunk is broadcast from memory; two are permuted from the register.
                if F::GROUP == 32 { I::f_spill(out, product) } else { I::f_store(out, product) }
            }
        } else {
            for g in 0..F::CHUNKS * F::HALVES {
                out.0[g] = s.0[g] * *d.add(g / F::HALVES);
            }
        }
    }
}
