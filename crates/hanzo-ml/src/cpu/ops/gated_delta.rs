//! The gated delta rule (Yang et al. 2024, arXiv 2412.06464): linear attention with a decaying, self-correcting state.
//!
//! Per head, with k and q divided by `sqrt(sum x^2 + eps)`: `S = e^g S; u = beta (v - S^T k); S += k u^T; out = S^T q`;
//! S is `[d_k, d_v]`. FLOPs per token and head: `8 d_k d_v`; bytes: the state, read and written once a token by
//! [`gated_delta_steps`], once a chunk by [`gated_delta_chunks`].
//!
//! Chunked form. With G_t the sum of decays up to t in the chunk, unrolling the recurrence gives
//! `u_t = beta_t (v_t - e^G_t S_0^T k_t) - sum_{i<t} beta_t e^(G_t - G_i) (k_i . k_t) u_i` (a triangular system, solved
//! row by row), `out_t = e^G_t S_0^T q_t + sum_{i<=t} e^(G_t - G_i) (k_i . q_t) u_i`, and
//! `S_C = e^G_C S_0 + sum_i e^(G_C - G_i) k_i u_i^T`: matrix products of [`CHUNK`] rows.
//!
//! Bounds: each form is held to the running error bound of its own formula (`oracle::num`). The forms differ by
//! rounding, and a chunk starts at the call's first token, so a deterministic run uses the steps throughout.

use super::attention_tile::{Broadcast, tile};
use super::math::{self, Unary};
use super::norm::{scale_by, sum_squares};
use super::simd::{Kernel, Simd};
use super::view::{Mat, MatMut};
use crate::cpu::isa::IsaLevel;
use core::ops::Range;

/// Tokens of a chunk.
pub const CHUNK: usize = 32;

/// Sizes of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaHeads {
    /// Value heads.
    pub n_head: usize,
    /// Key heads; divides `n_head`; value head h reads key head `h / (n_head / n_key_head)`.
    pub n_key_head: usize,
    /// Elements of a key or query head.
    pub d_k: usize,
    /// Elements of a value head.
    pub d_v: usize,
    /// Added to the sum of squares of a key or query head.
    pub eps: f32,
}

/// The tokens of one sequence in this step.
#[derive(Clone, Copy, Debug)]
pub struct DeltaInput<'a> {
    /// `[n_tokens, n_key_head * d_k]`.
    pub q: Mat<'a>,
    /// `[n_tokens, n_key_head * d_k]`.
    pub k: Mat<'a>,
    /// `[n_tokens, n_head * d_v]`.
    pub v: Mat<'a>,
    /// Logarithms of the decay, `[n_tokens, n_head]`, at most 0.
    pub decay: Mat<'a>,
    /// `[n_tokens, n_head]`.
    pub beta: Mat<'a>,
}

impl DeltaInput<'_> {
    fn check(&self, h: &DeltaHeads, heads: &Range<usize>, state: &[f32], out: &MatMut<'_>) {
        let n = self.q.rows();
        assert!(h.n_key_head > 0 && h.n_head % h.n_key_head == 0 && heads.end <= h.n_head, "heads");
        let shape = |m: &Mat<'_>, cols| m.rows() == n && m.cols() == cols;
        assert!(shape(&self.q, h.n_key_head * h.d_k) && shape(&self.k, h.n_key_head * h.d_k), "queries or keys");
        assert!(shape(&self.v, h.n_head * h.d_v) && shape(&self.decay, h.n_head) && shape(&self.beta, h.n_head));
        assert!(state.len() == heads.len() * h.d_k * h.d_v, "state");
        assert!(out.rows() == n && out.cols() == heads.len() * h.d_v, "output");
    }
}

/// Floats of scratch that either form needs.
pub const fn gated_delta_scratch(d_k: usize, d_v: usize) -> usize {
    3 * CHUNK * d_k + 2 * CHUNK * d_v + 2 * CHUNK * CHUNK + d_k
}

#[derive(Clone, Copy)]
struct Exp;
impl Unary for Exp {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F) -> S::F {
        math::exp(s, x)
    }
}

#[inline(always)]
fn exp_one<S: Simd>(s: S, x: f32) -> f32 {
    s.reduce_max(math::exp(s, s.splat(x)))
}

/// `out = x / sqrt(sum x^2 + eps)`.
///
/// # Safety
/// `x` is readable and `out` writable for `n` floats.
#[inline(always)]
unsafe fn unit<S: Simd>(s: S, x: *const f32, n: usize, eps: f32, out: *mut f32) {
    // SAFETY: the caller's.
    unsafe { scale_by(s, x, 1.0 / (sum_squares(s, x, n) + eps).sqrt(), None, out, n) }
}

struct Steps<'a> {
    h: &'a DeltaHeads,
    input: &'a DeltaInput<'a>,
    heads: Range<usize>,
    state: &'a mut [f32],
    out: MatMut<'a>,
    scratch: &'a mut [f32],
}

impl Kernel for Steps<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Steps { h, input, heads, state, out, scratch } = self;
        let (d_k, d_v) = (h.d_k, h.d_v);
        let (k, q) = scratch.split_at_mut(d_k);
        for (slot, head) in heads.enumerate() {
            let key = head / (h.n_head / h.n_key_head) * d_k;
            let st = state[slot * d_k * d_v..].as_mut_ptr();
            for t in 0..input.q.rows() {
                // SAFETY: `check` has seen all shapes; columns stay below d_v, rows below d_k.
                unsafe {
                    unit(s, input.k.row_ptr(t).add(key), d_k, h.eps, k.as_mut_ptr());
                    unit(s, input.q.row_ptr(t).add(key), d_k, h.eps, q.as_mut_ptr());
                    let keep = s.splat(exp_one(s, *input.decay.row_ptr(t).add(head)));
                    let beta = s.splat(*input.beta.row_ptr(t).add(head));
                    let v = input.v.row_ptr(t).add(head * d_v);
                    let dst = out.row_ptr(t).add(slot * d_v);
                    let mut c = 0;
                    while c < d_v {
                        let n = (d_v - c).min(S::LANES);
                        let load = |p: *const f32| if n == S::LANES { s.load(p) } else { s.load_part(p, n) };
                        let store = |p: *mut f32, x| if n == S::LANES { s.store(p, x) } else { s.store_part(p, n, x) };
                        // Two chains each, so that additions overlap.
                        let mut seen = [s.splat(0.0); 2];
                        for i in 0..d_k {
                            seen[i & 1] = s.fma(s.splat(k[i]), load(st.add(i * d_v + c)), seen[i & 1]);
                        }
                        let seen = s.mul(keep, s.add(seen[0], seen[1]));
                        let u = s.mul(beta, s.sub(load(v.add(c)), seen));
                        let mut y = [s.splat(0.0); 2];
                        for i in 0..d_k {
                            let p = st.add(i * d_v + c);
                            let x = s.fma(s.splat(k[i]), u, s.mul(keep, load(p)));
                            store(p, x);
                            y[i & 1] = s.fma(s.splat(q[i]), x, y[i & 1]);
                        }
                        store(dst.add(c), s.add(y[0], y[1]));
                        c += n;
                    }
                }
            }
        }
    }
}

/// The recurrence, token by token, for value heads `heads` of one sequence.
///
/// `state` `[heads, d_k, d_v]` is updated; `out` `[n_tokens, heads * d_v]` holds these heads' columns; `scratch`:
/// [`gated_delta_scratch`] floats. Panics if shapes disagree.
pub fn gated_delta_steps(
    isa: IsaLevel,
    h: &DeltaHeads,
    input: &DeltaInput<'_>,
    heads: Range<usize>,
    state: &mut [f32],
    out: MatMut<'_>,
    scratch: &mut [f32],
) {
    input.check(h, &heads, state, &out);
    assert!(scratch.len() >= gated_delta_scratch(h.d_k, h.d_v), "scratch");
    isa.run(Steps { h, input, heads, state, out, scratch })
}

/// `c[r][..cols] = c[r] * rescale[r] (or zero) + sum over k in range of a[r][k] b[k]`.
///
/// # Safety
/// `a` covers `rows` rows and the range, `b` `[..][b.1]` and `c` `[rows][c.1]` `cols` columns, `rescale` `rows` floats.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn product<S: Simd>(
    s: S,
    a: Broadcast,
    rows: usize,
    range: (usize, usize),
    b: (*const f32, usize),
    c: (*mut f32, usize),
    cols: usize,
    rescale: Option<*const f32>,
) {
    let whole = cols - cols % (2 * S::LANES);
    let mut r = 0;
    while r < rows {
        // SAFETY: rows r.. and columns below `cols` only.
        unsafe {
            let a = Broadcast { ptr: a.ptr.add(r * a.row), ..a };
            let f = rescale.map(|f| f.add(r));
            let n = if rows - r >= 4 { 4 } else { 1 };
            for e in (0..whole).step_by(2 * S::LANES) {
                let (b, c) = ((b.0.add(e), b.1), (c.0.add(r * c.1 + e), c.1));
                if n == 4 {
                    tile::<S, 4>(s, a, b, range, c, f);
                } else {
                    tile::<S, 1>(s, a, b, range, c, f);
                }
            }
            for i in 0..n {
                for e in whole..cols {
                    let p = c.0.add((r + i) * c.1 + e);
                    let mut x = f.map_or(0.0, |f| *f.add(i) * *p);
                    for k in range.0..range.1 {
                        x += *a.ptr.add(i * a.row + k * a.col) * *b.0.add(k * b.1 + e);
                    }
                    *p = x;
                }
            }
            r += n;
        }
    }
}

/// Dot product in one vector chain.
///
/// # Safety
/// `x` and `y` are readable for `n` floats.
#[inline(always)]
unsafe fn dot<S: Simd>(s: S, x: *const f32, y: *const f32, n: usize) -> f32 {
    let mut sum = s.splat(0.0);
    let whole = n - n % S::LANES;
    // SAFETY: indices stay below `n`.
    unsafe {
        for i in (0..whole).step_by(S::LANES) {
            sum = s.fma(s.load(x.add(i)), s.load(y.add(i)), sum);
        }
        if whole < n {
            sum = s.fma(s.load_part(x.add(whole), n - whole), s.load_part(y.add(whole), n - whole), sum);
        }
    }
    s.reduce_add(sum)
}

struct Chunks<'a>(Steps<'a>);

impl Kernel for Chunks<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Steps { h, input, heads, state, out, scratch } = self.0;
        let (d_k, d_v) = (h.d_k, h.d_v);
        let base = scratch.as_mut_ptr();
        // SAFETY: the parts add up to `gated_delta_scratch`; `check` has seen all shapes.
        unsafe {
            let k = base;
            let q = k.add(CHUNK * d_k);
            let faded = q.add(CHUNK * d_k);
            let u = faded.add(CHUNK * d_k);
            let y = u.add(CHUNK * d_v);
            let kk = y.add(CHUNK * d_v);
            let qk = kk.add(CHUNK * CHUNK);
            let fade = qk.add(CHUNK * CHUNK);
            for (slot, head) in heads.enumerate() {
                let key = head / (h.n_head / h.n_key_head) * d_k;
                let st = state[slot * d_k * d_v..].as_mut_ptr();
                for first in (0..input.q.rows()).step_by(CHUNK) {
                    let n = CHUNK.min(input.q.rows() - first);
                    let (mut g, mut eg, mut beta) = ([0.0f32; CHUNK], [0.0f32; CHUNK], [0.0f32; CHUNK]);
                    let mut sum = 0.0;
                    for t in 0..n {
                        unit(s, input.k.row_ptr(first + t).add(key), d_k, h.eps, k.add(t * d_k));
                        unit(s, input.q.row_ptr(first + t).add(key), d_k, h.eps, q.add(t * d_k));
                        sum += *input.decay.row_ptr(first + t).add(head);
                        g[t] = sum;
                        beta[t] = *input.beta.row_ptr(first + t).add(head);
                    }
                    math::map_row(s, Exp, g.as_ptr(), eg.as_mut_ptr(), CHUNK);
                    for t in 0..n {
                        let mut between = [0.0f32; CHUNK];
                        for i in 0..=t {
                            between[i] = g[t] - g[i];
                        }
                        math::map_row(s, Exp, between.as_ptr(), between.as_mut_ptr(), CHUNK);
                        for (i, fade) in between.into_iter().enumerate().take(n) {
                            let (a, b) = (kk.add(t * CHUNK + i), qk.add(t * CHUNK + i));
                            let ki = k.add(i * d_k);
                            *a = if i < t { -(beta[t] * fade * dot(s, ki, k.add(t * d_k), d_k)) } else { 0.0 };
                            *b = if i <= t { fade * dot(s, ki, q.add(t * d_k), d_k) } else { 0.0 };
                        }
                    }
                    // u: what the state at the chunk's start leaves to correct, then the chunk's own corrections.
                    let rows = |p: *const f32| Broadcast { ptr: p, row: d_k, col: 1 };
                    product(s, rows(k), n, (0, d_k), (st, d_v), (u, d_v), d_v, None);
                    for t in 0..n {
                        let v = input.v.row_ptr(first + t).add(head * d_v);
                        for c in 0..d_v {
                            let p = u.add(t * d_v + c);
                            *p = beta[t] * (*v.add(c) - eg[t] * *p);
                        }
                        let a = Broadcast { ptr: kk.add(t * CHUNK), row: CHUNK, col: 1 };
                        let one = 1.0f32;
                        product(s, a, 1, (0, t), (u, d_v), (u.add(t * d_v), d_v), d_v, Some(&one));
                    }
                    product(s, rows(q), n, (0, d_k), (st, d_v), (y, d_v), d_v, None);
                    let a = Broadcast { ptr: qk, row: CHUNK, col: 1 };
                    product(s, a, n, (0, n), (u, d_v), (y, d_v), d_v, Some(eg.as_ptr()));
                    for t in 0..n {
                        let dst = out.row_ptr(first + t).add(slot * d_v);
                        core::ptr::copy_nonoverlapping(y.add(t * d_v), dst, d_v);
                        let f = exp_one(s, g[n - 1] - g[t]);
                        scale_by(s, k.add(t * d_k), f, None, faded.add(t * d_k), d_k);
                    }
                    (0..d_k).for_each(|i| *fade.add(i) = eg[n - 1]);
                    let a = Broadcast { ptr: faded, row: 1, col: d_k };
                    product(s, a, d_k, (0, n), (u, d_v), (st, d_v), d_v, Some(fade));
                }
            }
        }
    }
}

/// The same as [`gated_delta_steps`] in chunks of [`CHUNK`] tokens, for prefill.
pub fn gated_delta_chunks(
    isa: IsaLevel,
    h: &DeltaHeads,
    input: &DeltaInput<'_>,
    heads: Range<usize>,
    state: &mut [f32],
    out: MatMut<'_>,
    scratch: &mut [f32],
) {
    input.check(h, &heads, state, &out);
    assert!(scratch.len() >= gated_delta_scratch(h.d_k, h.d_v), "scratch");
    isa.run(Chunks(Steps { h, input, heads, state, out, scratch }))
}

#[cfg(test)]
mod tests {
    use super::super::math::tests::isas;
    use super::*;
    use crate::oracle::num::Num;

    struct Case {
        h: DeltaHeads,
        n: usize,
        data: [Vec<f32>; 5],
        state: Vec<f32>,
    }

    impl Case {
        fn new(n: usize, n_head: usize, n_key_head: usize, d_k: usize, d_v: usize) -> Case {
            let h = DeltaHeads { n_head, n_key_head, d_k, d_v, eps: 1e-6 };
            let wave = |len: usize, f: f32| (0..len).map(|i| (i as f32 * f + f).sin()).collect::<Vec<f32>>();
            let decay = wave(n * n_head, 0.77).iter().map(|x| -0.3 * x.abs() - 0.01).collect();
            let beta = wave(n * n_head, 1.9).iter().map(|x| 0.5 + 0.45 * x).collect();
            let (q, k, v) =
                (wave(n * n_key_head * d_k, 0.31), wave(n * n_key_head * d_k, 0.53), wave(n * n_head * d_v, 0.29));
            Case { h, n, data: [q, k, v, decay, beta], state: wave(n_head * d_k * d_v, 0.17) }
        }

        fn run(&self, isa: IsaLevel, chunks: bool, from: usize, to: usize, state: &mut [f32], out: &mut [f32]) {
            let h = &self.h;
            let widths = [h.n_key_head * h.d_k, h.n_key_head * h.d_k, h.n_head * h.d_v, h.n_head, h.n_head];
            let m = |i: usize| Mat::new(&self.data[i][from * widths[i]..], to - from, widths[i]);
            let input = DeltaInput { q: m(0), k: m(1), v: m(2), decay: m(3), beta: m(4) };
            let mut scratch = vec![f32::NAN; gated_delta_scratch(h.d_k, h.d_v)];
            // One head at a time, as threads would.
            let (s, w) = (h.d_k * h.d_v, h.n_head * h.d_v);
            for head in 0..h.n_head {
                let out = MatMut::strided(&mut out[head * h.d_v..], to - from, h.d_v, w);
                let f = if chunks { gated_delta_chunks } else { gated_delta_steps };
                f(isa, h, &input, head..head + 1, &mut state[head * s..(head + 1) * s], out, &mut scratch);
            }
        }

        /// The recurrence with running bounds: outputs and final state.
        fn exact(&self) -> (Vec<Num>, Vec<Num>) {
            let DeltaHeads { n_head, n_key_head, d_k, d_v, eps } = self.h;
            let mut state: Vec<Num> = self.state.iter().map(|x| Num::from(*x)).collect();
            let mut out = vec![Num::ZERO; self.n * n_head * d_v];
            let unit = |x: &[f32]| -> Vec<Num> {
                let x: Vec<Num> = x.iter().map(|x| Num::from(*x)).collect();
                let f = Num::ONE / (Num::sum(x.iter().map(|x| *x * *x)) + Num::from(eps)).sqrt();
                x.iter().map(|x| *x * f).collect()
            };
            for t in 0..self.n {
                for head in 0..n_head {
                    let key = (t * n_key_head + head / (n_head / n_key_head)) * d_k;
                    let (q, k) = (unit(&self.data[0][key..key + d_k]), unit(&self.data[1][key..key + d_k]));
                    let keep = Num::from(self.data[3][t * n_head + head]).exp();
                    let beta = Num::from(self.data[4][t * n_head + head]);
                    let s = &mut state[head * d_k * d_v..][..d_k * d_v];
                    s.iter_mut().for_each(|s| *s = *s * keep);
                    for j in 0..d_v {
                        let v = Num::from(self.data[2][(t * n_head + head) * d_v + j]);
                        let u = beta * (v - Num::sum((0..d_k).map(|i| k[i] * s[i * d_v + j])));
                        (0..d_k).for_each(|i| s[i * d_v + j] = s[i * d_v + j] + k[i] * u);
                        out[(t * n_head + head) * d_v + j] = Num::sum((0..d_k).map(|i| s[i * d_v + j] * q[i]));
                    }
                }
            }
            (out, state)
        }
    }

    fn within(got: &[f32], want: &[Num], what: &str) {
        for (i, (g, w)) in got.iter().zip(want).enumerate() {
            assert!((*g as f64 - w.v).abs() <= w.e, "{what} element {i}: {g}, want {} within {:e}", w.v, w.e);
        }
    }

    #[test]
    fn steps_and_chunks_are_within_the_running_bound_of_the_recurrence() {
        for case in [Case::new(75, 4, 2, 16, 32), Case::new(33, 1, 1, 24, 20), Case::new(3, 2, 2, 64, 64)] {
            let (want, want_state) = case.exact();
            for isa in isas() {
                for chunks in [false, true] {
                    let (mut state, mut out) = (case.state.clone(), vec![f32::NAN; want.len()]);
                    case.run(isa, chunks, 0, case.n, &mut state, &mut out);
                    within(&out, &want, &format!("{isa:?} chunks {chunks} output"));
                    within(&state, &want_state, &format!("{isa:?} chunks {chunks} state"));
                }
            }
        }
    }

    #[test]
    fn steps_are_bit_equal_in_any_chunking_of_the_prompt() {
        let case = Case::new(40, 2, 1, 16, 16);
        let w = 2 * 16;
        for isa in isas() {
            let (mut s1, mut o1) = (case.state.clone(), vec![0.0; 40 * w]);
            case.run(isa, false, 0, 40, &mut s1, &mut o1);
            let (mut s2, mut o2) = (case.state.clone(), vec![0.0; 40 * w]);
            for from in (0..40).step_by(7) {
                let to = (from + 7).min(40);
                case.run(isa, false, from, to, &mut s2, &mut o2[from * w..]);
            }
            assert!(s1 == s2 && o1 == o2, "{isa:?}");
        }
    }

    #[test]
    fn chunks_carry_the_state_across_calls_within_the_bound() {
        let case = Case::new(70, 2, 2, 32, 32);
        let (want, want_state) = case.exact();
        let w = 2 * 32;
        for isa in isas() {
            let (mut state, mut out) = (case.state.clone(), vec![0.0; 70 * w]);
            for (from, to, chunks) in [(0, 45, true), (45, 46, false), (46, 70, true)] {
                case.run(isa, chunks, from, to, &mut state, &mut out[from * w..]);
            }
            within(&out, &want, "output");
            within(&state, &want_state, "state");
        }
    }
}
