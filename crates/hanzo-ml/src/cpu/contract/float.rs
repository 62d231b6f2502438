//! Contractions with float activations: native for F32, F16 and BF16 weights, and the exact path of every block format.
//!
//! `out[token][row] = sum over k of w * a`. k is cut into slices of [`SLICE`]; a slice is one chain of multiply-adds per
//! (row, token) over the lanes of a vector, then the lanes, then what is left of k; slices are added in turn. The order is
//! the same for any number of rows and tokens, so that mat-vec and GEMM are one kernel. A single token meets rows one after
//! another, one stream of memory; several meet them in tiles, the tokens of a slice in L1, its rows in L2. Plain floats are
//! converted in registers. Rows of block formats are decoded by `to_float` into scratch, a few at a time, and used for
//! all tokens: no matrix of floats is ever built. Oracle: `qmatvec_unified_numeric` with f32 activations.
//!
//! How a weight meets an activation is a [`Product`]; those of bf16 by bf16 are in `super::rounded`.

use hanzo_gguf::Format;
use hanzo_gguf::formats::to_float;

use super::{Input, Job};
use crate::cpu::isa::{Isa, read};

/// Weight rows of a tile.
const ROWS: usize = 4;
/// Elements of a slice of k.
pub(super) const SLICE: usize = 1024;
/// Prefetch distance in bytes where rows pass one after another.
const AHEAD: usize = 8192;
/// Activation bytes of a slice that stay in L1 while rows pass, if that is more than one tile's.
const TOKEN_BYTES: usize = 16 << 10;
/// Weight bytes of a slice that stay in L2 while tokens pass.
const ROW_BYTES: usize = 256 << 10;

/// How weights of one type meet activations of one type.
///
/// # Safety
/// Implementations read the elements that their arguments say, on a CPU that has `I`.
#[allow(clippy::missing_safety_doc)]
pub(super) trait Product<I: Isa>: 'static {
    /// Bytes of a weight.
    const W_BYTES: usize;
    /// Bytes of an activation.
    const X_BYTES: usize;
    /// Elements of a step.
    const STEP: usize;
    type W: Copy;
    type X: Copy;
    /// The weights of a step.
    unsafe fn w(p: *const u8) -> Self::W;
    /// The activations of a step.
    unsafe fn x(p: *const u8) -> Self::X;
    unsafe fn step(acc: I::W, w: Self::W, x: Self::X) -> I::W;
    /// What is left of a slice, `n` elements (too few for a step, perhaps none), as far as it joins the lanes.
    unsafe fn rest_of_lanes(acc: I::W, _w: *const u8, _x: *const u8, _n: usize) -> I::W {
        acc
    }
    /// The same as far as it joins the lanes' sum.
    unsafe fn rest_of_sum(sum: f32, _w: *const u8, _x: *const u8, _n: usize) -> f32 {
        sum
    }
}

/// A plain float type of weights, multiplied with f32.
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

impl<I: Isa, P: Plain> Product<I> for P {
    const W_BYTES: usize = P::BYTES;
    const X_BYTES: usize = 4;
    const STEP: usize = I::NR;
    type W = I::W;
    type X = I::W;

    #[inline(always)]
    unsafe fn w(p: *const u8) -> I::W {
        unsafe { P::lanes::<I>(p) }
    }

    #[inline(always)]
    unsafe fn x(p: *const u8) -> I::W {
        unsafe { I::w_load(p.cast()) }
    }

    #[inline(always)]
    unsafe fn step(acc: I::W, w: I::W, x: I::W) -> I::W {
        unsafe { I::w_fma(w, x, acc) }
    }

    #[inline(always)]
    unsafe fn rest_of_sum(mut sum: f32, w: *const u8, x: *const u8, n: usize) -> f32 {
        for i in 0..n {
            sum = unsafe { I::fma1(P::one::<I>(w.add(i * P::BYTES)), read(x.add(4 * i)), sum) };
        }
        sum
    }
}

/// Where the activations of a job lie.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    /// The first element of the first row.
    pub data: *const u8,
    /// Bytes from one row to the next.
    pub row: usize,
    /// Bytes from one slice of a row to the next.
    pub slice: usize,
    /// Row `t` is token `t`; else it is where the job's token says.
    pub gathered: bool,
}

impl Rows {
    /// Slice `slice` of token `token`.
    #[inline(always)]
    pub(super) fn at(&self, job: &Job<'_>, token: usize, slice: usize) -> *const u8 {
        let row = if self.gathered { token } else { job.tokens.rows(token).0 };
        self.data.wrapping_add(row * self.row + slice * self.slice)
    }
}

/// A job's f32 rows.
#[inline(always)]
pub(super) fn f32_rows(job: &Job<'_>) -> Option<Rows> {
    let Input::F32 { data, stride } = job.input else {
        debug_assert!(false, "a float kernel was given int8 activations");
        return None;
    };
    Some(Rows { data: data.cast(), row: 4 * stride, slice: 4 * SLICE, gathered: false })
}

/// Bytes of scratch for rows of `k` elements.
pub(super) fn scratch_bytes(format: Format, k: usize) -> usize {
    if format.is_block() { ROWS * k * 4 } else { 0 }
}

/// The body of the kernel of plain float weights.
#[inline(always)]
pub(super) unsafe fn run<I: Isa, P: Plain>(job: &mut Job<'_>) {
    if let Some(x) = f32_rows(job) {
        // SAFETY: the caller's contract is this function's.
        unsafe { contract::<I, P>(job, &x) }
    }
}

/// The body of the kernel of block formats.
#[inline(always)]
pub(super) unsafe fn run_decoded<I: Isa>(job: &mut Job<'_>) {
    let k = job.w.k;
    let Some(x) = f32_rows(job) else { return };
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
        for slice in 0..k.div_ceil(SLICE) {
            // SAFETY: the rows are the job's, decoded.
            unsafe { tokens::<I, F32>(job, &x, &w, (row, slice), 0, job.tokens.len(), 0) };
        }
        row += ROWS;
    }
}

/// All rows and tokens of a job.
#[inline(always)]
pub(super) unsafe fn contract<I: Isa, P: Product<I>>(job: &Job<'_>, x: &Rows) {
    // SAFETY: the caller's contract is this function's.
    unsafe {
        match job.tokens.len() {
            0 => {}
            1 => rows_in_turn::<I, P>(job, x),
            _ => blocks::<I, P>(job, x),
        }
    }
}

/// One token with rows one after another.
#[inline(always)]
unsafe fn rows_in_turn<I: Isa, P: Product<I>>(job: &Job<'_>, x: &Rows) {
    let k = job.w.k;
    let out_row = job.tokens.rows(0).1;
    for row in job.rows.clone() {
        let mut total = 0f32;
        for slice in 0..k.div_ceil(SLICE) {
            let from = slice * SLICE;
            // SAFETY: the row and the token are the job's.
            let sum =
                unsafe { one::<I, P>(job.row(row).add(from * P::W_BYTES), x.at(job, 0, slice), SLICE.min(k - from)) };
            total = if slice == 0 { sum } else { total + sum };
        }
        // SAFETY: as above.
        unsafe { job.write(out_row, row, total) };
    }
}

/// Steps of a cache line of weights.
const fn steps_a_line(step_bytes: usize) -> usize {
    if step_bytes >= 64 { 1 } else { 64 / step_bytes }
}

/// One row with one token: `n` elements.
#[inline(always)]
unsafe fn one<I: Isa, P: Product<I>>(w: *const u8, x: *const u8, n: usize) -> f32 {
    let (w_step, x_step) = (P::STEP * P::W_BYTES, P::STEP * P::X_BYTES);
    let line = steps_a_line(w_step);
    let steps = n / P::STEP;
    unsafe {
        let mut acc = I::w_zero();
        let mut step = 0;
        while step + line <= steps {
            I::prefetch(w.wrapping_add(step * w_step + AHEAD));
            for _ in 0..line {
                acc = P::step(acc, P::w(w.add(step * w_step)), P::x(x.add(step * x_step)));
                step += 1;
            }
        }
        while step < steps {
            acc = P::step(acc, P::w(w.add(step * w_step)), P::x(x.add(step * x_step)));
            step += 1;
        }
        let (w, x, rest) = (w.add(steps * w_step), x.add(steps * x_step), n - steps * P::STEP);
        if rest > 0 {
            acc = P::rest_of_lanes(acc, w, x, rest);
        }
        P::rest_of_sum(I::w_sum(acc), w, x, rest)
    }
}

/// Several tokens: tiles, in an order that finds tokens in L1 and rows in L2.
#[inline(always)]
unsafe fn blocks<I: Isa, P: Product<I>>(job: &Job<'_>, x: &Rows) {
    let (k, count) = (job.w.k, job.tokens.len());
    let width = SLICE.min(k).max(1);
    let token_block = (TOKEN_BYTES / (width * P::X_BYTES) / I::FT).max(1) * I::FT;
    let row_block = (ROW_BYTES / (width * P::W_BYTES)).next_multiple_of(ROWS);
    // Rows that meet one block of tokens come from memory: the same place one or more tiles further is asked for. Those that
    // meet several are in L2 but for the first, and asking for them again takes slots that the products need.
    let tile_bytes = ROWS * job.w.row_bytes;
    let ahead = if count <= token_block { tile_bytes * AHEAD.div_ceil(tile_bytes.max(1)) } else { 0 };
    let mut row = job.rows.start;
    while row < job.rows.end {
        let last_row = job.rows.end.min(row + row_block);
        for slice in 0..k.div_ceil(SLICE) {
            let mut first = 0;
            while first < count {
                let last = count.min(first + token_block);
                let mut at = row;
                while at < last_row {
                    let mut w = [job.row(at); ROWS];
                    for r in 1..ROWS {
                        w[r] = job.row(at + r);
                    }
                    // SAFETY: the rows and tokens are the job's.
                    unsafe { tokens::<I, P>(job, x, &w, (at, slice), first, last, ahead) };
                    at += ROWS;
                }
                first = last;
            }
        }
        row = last_row;
    }
}

/// One slice of `ROWS` rows with tokens `first..last`: by `FT` (as 6, 3 or 2), then by two, then one. Asks for weights `ahead` bytes
/// further (0: for none).
#[inline(always)]
unsafe fn tokens<I: Isa, P: Product<I>>(
    job: &Job<'_>,
    x: &Rows,
    w: &[*const u8; ROWS],
    at: (usize, usize),
    first: usize,
    last: usize,
    mut ahead: usize,
) {
    let mut token = first;
    unsafe {
        while token + I::FT <= last {
            match I::FT {
                6 => tile::<I, P, 6>(job, x, w, at, token, ahead),
                3 => tile::<I, P, 3>(job, x, w, at, token, ahead),
                _ => tile::<I, P, 2>(job, x, w, at, token, ahead),
            }
            token += match I::FT {
                n @ (6 | 3) => n,
                _ => 2,
            };
            ahead = 0;
        }
        while token + 2 <= last {
            tile::<I, P, 2>(job, x, w, at, token, ahead);
            token += 2;
            ahead = 0;
        }
        if token < last {
            tile::<I, P, 1>(job, x, w, at, token, ahead);
        }
    }
}

/// One slice of `ROWS` rows with `T` tokens; the first row and the slice are `at`.
#[inline(always)]
unsafe fn tile<I: Isa, P: Product<I>, const T: usize>(
    job: &Job<'_>,
    x: &Rows,
    w: &[*const u8; ROWS],
    (row, slice): (usize, usize),
    token: usize,
    ahead: usize,
) {
    let (w_step, x_step) = (P::STEP * P::W_BYTES, P::STEP * P::X_BYTES);
    let line = steps_a_line(w_step);
    let from = slice * SLICE;
    let n = SLICE.min(job.w.k - from);
    let steps = n / P::STEP;
    unsafe {
        let mut b = *w;
        for r in 0..ROWS {
            b[r] = w[r].add(from * P::W_BYTES);
        }
        let mut a = [x.data; T];
        for t in 0..T {
            a[t] = x.at(job, token + t, slice);
        }
        let mut acc = [[I::w_zero(); ROWS]; T];
        let mut step = 0;
        while step < steps {
            if ahead > 0 && step.is_multiple_of(line) {
                for r in 0..ROWS {
                    I::prefetch(b[r].wrapping_add(step * w_step + ahead));
                }
            }
            let mut v = [P::x(a[0].add(step * x_step)); T];
            for t in 1..T {
                v[t] = P::x(a[t].add(step * x_step));
            }
            for r in 0..ROWS {
                let u = P::w(b[r].add(step * w_step));
                for t in 0..T {
                    acc[t][r] = P::step(acc[t][r], u, v[t]);
                }
            }
            step += 1;
        }
        let rest = n - steps * P::STEP;
        for r in 0..ROWS {
            b[r] = b[r].add(steps * w_step);
        }
        for t in 0..T {
            a[t] = a[t].add(steps * x_step);
        }
        if rest > 0 {
            for t in 0..T {
                for r in 0..ROWS {
                    acc[t][r] = P::rest_of_lanes(acc[t][r], b[r], a[t], rest);
                }
            }
        }
        let mut sums = [[0f32; ROWS]; T];
        for t in 0..T {
            sums[t] = I::w_sum4(acc[t]);
        }
        if rest > 0 {
            for t in 0..T {
                for r in 0..ROWS {
                    sums[t][r] = P::rest_of_sum(sums[t][r], b[r], a[t], rest);
                }
            }
        }
        finish(job, &sums, (token, row), slice == 0, from + n == job.w.k);
    }
}

/// Adds a slice's sums to the results of their tokens and rows; the first slice's are the results so far, the last one's
/// get the bias. A call, so that nothing of it takes registers from a tile.
#[inline(never)]
unsafe fn finish(job: &Job<'_>, sums: &[[f32; ROWS]], (token, row): (usize, usize), is_first: bool, is_last: bool) {
    let rows = ROWS.min(job.rows.end - row);
    for (t, sums) in sums.iter().enumerate() {
        let mut results = *sums;
        unsafe {
            let out = job.out.add(job.tokens.rows(token + t).1 * job.out_stride + row);
            if rows == ROWS {
                if !is_first {
                    let so_far = out.cast::<[f32; ROWS]>().read_unaligned();
                    for r in 0..ROWS {
                        results[r] += so_far[r];
                    }
                }
                if is_last {
                    let bias = job.bias.map_or([0.0; ROWS], |b| b.add(row).cast::<[f32; ROWS]>().read_unaligned());
                    for r in 0..ROWS {
                        results[r] += bias[r];
                    }
                }
                out.cast::<[f32; ROWS]>().write_unaligned(results);
            } else {
                for r in 0..rows {
                    if !is_first {
                        results[r] += *out.add(r);
                    }
                    if is_last {
                        results[r] += job.bias.map_or(0.0, |bias| *bias.add(row + r));
                    }
                    out.add(r).write(results[r]);
                }
            }
        }
    }
}
