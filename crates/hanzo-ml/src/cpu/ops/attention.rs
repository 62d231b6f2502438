//! Attention over a paged cache: online softmax, one KV head and its query heads at a time.
//!
//! For query row (token t at position p, head g): `s_j = softcap(scale q . k_j)` over the visible keys j,
//! `out = sum_j e^(s_j - m) v_j / (sum_j e^(s_j - m) + e^(sink - m))`, m the running maximum (Milakov and Gimelshein 2018,
//! arXiv 1805.02867; blocked as in FlashAttention, arXiv 2205.14135). Visible: `lo <= j < hi`, `hi = p + 1` or the end of
//! the token's non-causal span, `lo = p + 1 - window`. FLOPs: `2 (d_k + d_v)` per visible (row, key); bytes: one key and
//! one value row per key and block of up to [`BLOCK_ROWS`] rows.
//!
//! One form serves decode and prefill. Keys come in groups of [`GROUP`], whole pages at positions that are multiples of it:
//! one maximum, one rescale a group. A page's keys are transposed once into scratch, so that scores run over 32 keys
//! in vector lanes with no horizontal sums; values are widened once; both products use one register tile, which leaves
//! out keys that none of its rows sees. Every
//! (token, head) row goes through the same groups, in the same order, with the same chains of additions, whatever rows
//! share its block (a key that it does not see adds zero): any chunking of a prompt, and any split of heads or tokens over
//! threads, gives the same bits. (One exception without consequence: a zero output may differ in sign.) With [`AttentionHeads::split`] keys are taken in
//! splits of fixed size, each with its own (m, l, o), merged in index order; [`attention_partial`] and
//! [`attention_merge`] do the same with the splits on different threads, to the same bits.
//!
//! Bound, u = 2^-24, against exact arithmetic on the stored rows, with n visible keys, S the largest |s_j - m|. A score is
//! a chain of d_k products: off by at most E = (d_k + 2) u |scale| sum|q||k_j| (plus 12 u cap with a soft-cap). A weight's
//! relative error is E for itself and E for the maximum, (S + 4) u for subtraction and exp; rescaling adds at most
//! (S + 6 groups) u over all groups, and a merge 10 u a split. Sums of n terms add n u in numerator and denominator. So
//! |error| <= (4 E + (4 S + 2 n + 12 groups + 20 splits + 40) u) sum_j w_j |v_j|.

use super::attention_tile::{ask, load_keys, load_values, padded, scores, tile_rows, weighted_values};
use super::kv::CacheRows;
use super::math::{self, Unary};
use super::simd::{Kernel, Simd};
use super::view::{Mat, MatMut};
use crate::cache::PAGE;
use crate::cpu::isa::IsaLevel;

/// Query rows (tokens times heads) that share one pass over the keys: a multiple of every tile size. A page is transposed
/// and widened once a block, for about as much work as six rows' products.
pub const BLOCK_ROWS: usize = 192;

/// Rows of a full tile on the widest instruction set: blocks of other numbers of rows end with smaller, slower ones.
pub const TILE: usize = 12;

/// Keys between two rescales.
pub const GROUP: usize = 2 * PAGE;

/// What is the same for all tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionHeads {
    /// Query heads in this call: all or some of those that share the KV head.
    pub group: usize,
    /// Multiplies the scores.
    pub scale: f32,
    /// A query at p sees keys in `(p - window, p]`.
    pub window: Option<u32>,
    /// `cap * tanh(s / cap)`.
    pub softcap: Option<f32>,
    /// Tokens in a split, a multiple of [`PAGE`]; none: one split.
    pub split: Option<usize>,
}

/// Some tokens of one sequence, and where the sequence's keys and values are.
#[derive(Clone, Copy, Debug)]
pub struct AttentionInput<'a> {
    /// `[n_tokens, group * d_k]`.
    pub q: Mat<'a>,
    /// `[n_tokens]`.
    pub positions: &'a [u32],
    /// `[n_tokens]`: one past the last visible key, where it is not the token's own position.
    pub visible_end: Option<&'a [u32]>,
    /// The layer's keys.
    pub k: CacheRows,
    /// The layer's values; for latent attention a prefix of the keys.
    pub v: CacheRows,
    /// The KV head.
    pub head: usize,
    /// The sequence's block table; entry i holds page number `first_page + i`.
    pub pages: &'a [u32],
    /// Page number of `pages[0]`: earlier ones have left the window.
    pub first_page: u32,
}

impl AttentionInput<'_> {
    /// The visible keys of token `t`.
    #[inline(always)]
    pub(super) fn visible(&self, heads: &AttentionHeads, t: usize) -> (usize, usize) {
        let next = self.positions[t] as usize + 1;
        let hi = self.visible_end.map_or(next, |v| next.max(v[t] as usize));
        (heads.window.map_or(0, |w| next.saturating_sub(w as usize)), hi)
    }

    pub(super) fn check(&self, heads: &AttentionHeads, out: &MatMut<'_>, scratch: &[f32]) {
        let n = self.positions.len();
        assert!(heads.group > 0 && self.q.cols() == heads.group * self.k.dim() && self.q.rows() == n, "queries");
        assert!(out.rows() == n && out.cols() == heads.group * self.v.dim(), "output");
        assert!(self.visible_end.is_none_or(|v| v.len() == n), "one end a token");
        assert!(heads.split.is_none_or(|s| s > 0 && s % PAGE == 0), "splits are whole pages");
        assert!(scratch.len() >= attention_scratch(self.k.dim(), self.v.dim()), "scratch");
    }
}

/// Floats of scratch that [`attention`] and [`attention_partial`] need.
pub const fn attention_scratch(d_k: usize, d_v: usize) -> usize {
    BLOCK_ROWS * panels(d_k) + group_floats(d_k, d_v) + BLOCK_ROWS * GROUP + 2 * BLOCK_ROWS * padded(d_v)
}

/// Floats of a query row in panels.
const fn panels(d_k: usize) -> usize {
    d_k.next_multiple_of(PAGE)
}

/// Floats of a group's transposed keys, or of its widened values: they are never needed at the same time, and in one
/// buffer they stay in the first-level cache.
const fn group_floats(d_k: usize, d_v: usize) -> usize {
    if d_k > padded(d_v) { GROUP * d_k } else { GROUP * padded(d_v) }
}

/// A block's scratch, cut up.
struct Scratch {
    /// A tile's panels `[d_k / PAGE][rows of tile][PAGE]`, then the next tile's.
    q: *mut f32,
    /// Keys `[page][d_k][PAGE]`, then values `[GROUP][stride]`.
    keys: *mut f32,
    /// A tile's panels `[page][rows of tile][PAGE]`, then the next tile's.
    p: *mut f32,
    /// `[BLOCK_ROWS][stride]`: this split's unnormalised output.
    o: *mut f32,
    /// `[BLOCK_ROWS][stride]`: the merged output of the splits so far.
    total: *mut f32,
    stride: usize,
}

impl Scratch {
    fn new(buffer: &mut [f32], d_k: usize, d_v: usize) -> Scratch {
        let stride = padded(d_v);
        assert!(buffer.len() >= attention_scratch(d_k, d_v));
        let q = buffer.as_mut_ptr();
        // SAFETY: the parts add up to `attention_scratch`.
        unsafe {
            let keys = q.add(BLOCK_ROWS * panels(d_k));
            let p = keys.add(group_floats(d_k, d_v));
            let o = p.add(BLOCK_ROWS * GROUP);
            let total = o.add(BLOCK_ROWS * stride);
            Scratch { q, keys, p, o, total, stride }
        }
    }
}

/// Running maximum and sum of every row of a block.
struct Softmax {
    m: [f32; BLOCK_ROWS],
    l: [f32; BLOCK_ROWS],
}

impl Softmax {
    #[inline(always)]
    fn empty() -> Softmax {
        Softmax { m: [f32::NEG_INFINITY; BLOCK_ROWS], l: [0.0; BLOCK_ROWS] }
    }
}

#[derive(Clone, Copy)]
struct Exp;
impl Unary for Exp {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F) -> S::F {
        math::exp(s, x)
    }
}

/// What is subtracted from scores whose maximum is `m`: never minus infinity, whose difference would be NaN.
#[inline(always)]
fn shift(m: f32) -> f32 {
    if m == f32::NEG_INFINITY { 0.0 } else { m }
}

/// A block: rows `first..first + rows` of (token, head), flattened.
struct Block {
    first: usize,
    rows: usize,
    lo: [usize; BLOCK_ROWS],
    hi: [usize; BLOCK_ROWS],
    /// The keys that any row sees, and those that all see.
    any: (usize, usize),
    all: (usize, usize),
}

impl Block {
    #[inline(always)]
    fn new(heads: &AttentionHeads, input: &AttentionInput<'_>, first: usize, rows: usize) -> Block {
        let (lo, hi) = ([0; BLOCK_ROWS], [0; BLOCK_ROWS]);
        let mut block = Block { first, rows, lo, hi, any: (usize::MAX, 0), all: (0, usize::MAX) };
        let (mut t, mut head) = (first / heads.group, first % heads.group);
        let mut seen = input.visible(heads, t);
        for r in 0..rows {
            if head == heads.group {
                (t, head) = (t + 1, 0);
                seen = input.visible(heads, t);
            }
            head += 1;
            (block.lo[r], block.hi[r]) = seen;
            block.any = (block.any.0.min(seen.0), block.any.1.max(seen.1));
            block.all = (block.all.0.max(seen.0), block.all.1.min(seen.1));
        }
        block
    }

    /// The keys of a group that row `r` sees, counted from its first, if any.
    #[inline(always)]
    fn seen(&self, r: usize, keys: &Keys) -> Option<(usize, usize)> {
        let (lo, hi) = (self.lo[r], self.hi[r]);
        (lo < keys.to && hi > keys.from).then(|| (lo.max(keys.from) - keys.base, hi.min(keys.to) - keys.base))
    }

    /// The same for any of `rows`.
    #[inline(always)]
    fn seen_by_any(&self, rows: core::ops::Range<usize>, keys: &Keys) -> Option<(usize, usize)> {
        if self.all.0 <= keys.from && keys.to <= self.all.1 {
            return Some((keys.from - keys.base, keys.to - keys.base));
        }
        let union = |a: Option<(usize, usize)>, b: (usize, usize)| Some(a.map_or(b, |a| (a.0.min(b.0), a.1.max(b.1))));
        rows.filter_map(|r| self.seen(r, keys)).fold(None, union).filter(|(from, to)| from < to)
    }
}

/// A group of keys, or what a split has of it.
struct Keys {
    /// A multiple of [`GROUP`].
    base: usize,
    from: usize,
    to: usize,
}

/// Copies the block's queries into their tiles' panels.
///
/// # Safety
/// The scratch is that of [`Scratch::new`]; shapes are checked.
#[inline(always)]
unsafe fn pack_queries<S: Simd>(s: S, input: &AttentionInput<'_>, group: usize, block: &Block, scratch: &Scratch) {
    let d = input.k.dim();
    let (mut t, mut head) = (block.first / group, block.first % group);
    let mut row = 0;
    while row < block.rows {
        let n = tile_rows::<S>(block.rows - row);
        for r in 0..n {
            if head == group {
                (t, head) = (t + 1, 0);
            }
            // SAFETY: the row exists and has d_k elements from its head's first column; so have the tile's panels.
            unsafe {
                let src = input.q.row_ptr(t).add(head * d);
                let dst = scratch.q.add(row * panels(d) + r * PAGE);
                for e in (0..d).step_by(PAGE) {
                    copy(s, src.add(e), dst.add(e * n), PAGE.min(d - e));
                }
            }
            head += 1;
        }
        row += n;
    }
}

/// # Safety
/// `x` is readable and `out` writable for `n` floats.
#[inline(always)]
unsafe fn copy<S: Simd>(s: S, x: *const f32, out: *mut f32, n: usize) {
    let whole = n - n % S::LANES;
    // SAFETY: indices stay below `n`.
    unsafe {
        for i in (0..whole).step_by(S::LANES) {
            s.store(out.add(i), s.load(x.add(i)));
        }
        for i in whole..n {
            *out.add(i) = *x.add(i);
        }
    }
}

/// The scores of one row in place: scale, soft-cap, mask. Returns the largest.
///
/// Key `j` of the `PAGES` pages, whose scores are `step` floats apart, is visible if `from <= j < to`.
///
/// # Safety
/// `p` is readable and writable for [`PAGE`] floats a page.
#[inline(always)]
unsafe fn mask<S: Simd, const PAGES: usize>(
    s: S,
    heads: &AttentionHeads,
    (p, step): (*mut f32, usize),
    (from, to): (usize, usize),
) -> f32 {
    let scale = s.splat(heads.scale);
    let none = s.splat(f32::NEG_INFINITY);
    let mut top = none;
    for page in 0..PAGES {
        for i in (0..PAGE).step_by(S::LANES) {
            // SAFETY: i < PAGE.
            unsafe {
                let p = p.add(page * step + i);
                let mut v = s.mul(scale, s.load(p));
                if let Some(cap) = heads.softcap {
                    v = s.mul(s.splat(cap), math::tanh(s, s.div(v, s.splat(cap))));
                }
                if from > 0 || to < PAGES * PAGE {
                    let j = s.add(s.iota(), s.splat((page * PAGE + i) as f32));
                    v = s.select_lt(j, s.splat(from as f32), none, s.select_lt(j, s.splat(to as f32), v, none));
                }
                s.store(p, v);
                top = s.max(top, v);
            }
        }
    }
    s.reduce_max(top)
}

/// A row's masked scores minus `by` become weights. Returns their sum.
///
/// # Safety
/// As [`mask`].
#[inline(always)]
unsafe fn exponentiate<S: Simd, const PAGES: usize>(s: S, (p, step): (*mut f32, usize), by: f32) -> f32 {
    let by = s.splat(by);
    let mut sum = s.splat(0.0);
    for page in 0..PAGES {
        for i in (0..PAGE).step_by(S::LANES) {
            // SAFETY: i < PAGE.
            unsafe {
                let p = p.add(page * step + i);
                let w = math::exp(s, s.sub(s.load(p), by));
                s.store(p, w);
                sum = s.add(sum, w);
            }
        }
    }
    s.reduce_add(sum)
}

/// The scores of a tile of `rows` rows become weights: [`mask`], the new maximum, [`exponentiate`], each for all rows before
/// the next, since a row's are a chain. Row `r` of the tile sees `seen(r)`, if anything, of the pages' keys, and has its
/// maximum, rescale (as a logarithm) and sum at `r`; those of a row that sees nothing stay.
///
/// # Safety
/// `p` is readable and writable for `rows` rows of [`PAGE`] floats, `PAGES` times.
#[inline(always)]
unsafe fn soften<S: Simd, const PAGES: usize>(
    s: S,
    heads: &AttentionHeads,
    p: *mut f32,
    rows: usize,
    seen: impl Fn(usize) -> Option<(usize, usize)>,
    (m, alpha, sums): (&mut [f32], &mut [f32], &mut [f32]),
) {
    let step = rows * PAGE;
    let mut top = [f32::NEG_INFINITY; TILE];
    for (r, top) in top.iter_mut().enumerate().take(rows) {
        // SAFETY: the caller's.
        unsafe {
            let p = p.add(r * PAGE);
            match seen(r) {
                Some(range) => *top = mask::<S, PAGES>(s, heads, (p, step), range),
                // Below any maximum: weights of zero.
                None => (0..PAGES).for_each(|page| {
                    for i in (0..PAGE).step_by(S::LANES) {
                        s.store(p.add(page * step + i), s.splat(f32::NEG_INFINITY));
                    }
                }),
            }
        }
    }
    for r in 0..rows {
        let new = m[r].max(top[r]);
        if seen(r).is_some() {
            alpha[r] = m[r] - shift(new);
        }
        m[r] = new;
    }
    for r in 0..rows {
        // SAFETY: the caller's.
        sums[r] = unsafe { exponentiate::<S, PAGES>(s, (p.add(r * PAGE), step), shift(m[r])) };
    }
}

/// The weights of a tile, rows `row..row + n` of the block, for the keys `seen` of a group: those that any of them sees.
/// The results of [`soften`] go to `alpha` and `sums`; rows that see nothing keep theirs.
///
/// # Safety
/// The scratch is that of [`Scratch::new`], its queries packed and its keys those of the group; `n` is a result of
/// [`tile_rows`].
#[inline(always)]
unsafe fn weigh<S: Simd>(
    s: S,
    heads: &AttentionHeads,
    (block, scratch, d): (&Block, &Scratch, usize),
    (row, n): (usize, usize),
    (keys, seen): (&Keys, (usize, usize)),
    state: &mut Softmax,
    (alpha, sums): (&mut [f32; BLOCK_ROWS], &mut [f32; BLOCK_ROWS]),
) {
    let pages = (seen.0 / PAGE, seen.1.div_ceil(PAGE));
    let step = n * PAGE;
    // SAFETY: the panels of a tile begin at its first row's share of q and p.
    unsafe {
        let p = scratch.p.add(row * GROUP);
        for page in pages.0..pages.1 {
            let at = page * PAGE;
            let range = (seen.0.saturating_sub(at), (seen.1 - at).min(PAGE));
            let (q, kt) = (scratch.q.add(row * panels(d)), scratch.keys.add(at * d));
            scores(s, n, q, kt, d, p.add(page * step), range);
        }
        let p = p.add(pages.0 * step);
        let first = pages.0 * PAGE;
        let within = |(from, to): (usize, usize)| (from.saturating_sub(first), to.saturating_sub(first));
        let seen = |r: usize| block.seen(row + r, keys).map(within);
        let at = row..row + n;
        let rows = (&mut state.m[at.clone()], &mut alpha[at.clone()], &mut sums[at]);
        match pages.1 - pages.0 {
            1 => soften::<S, 1>(s, heads, p, n, seen, rows),
            _ => soften::<S, 2>(s, heads, p, n, seen, rows),
        }
    }
}

/// Adds the keys `keys.0..keys.1` of the sequence to every row's (m, l, o).
///
/// # Safety
/// The scratch is that of [`Scratch::new`], its queries packed; shapes are checked.
#[inline(always)]
unsafe fn accumulate<S: Simd>(
    s: S,
    heads: &AttentionHeads,
    input: &AttentionInput<'_>,
    block: &Block,
    keys: (usize, usize),
    scratch: &Scratch,
    state: &mut Softmax,
) {
    let d = input.k.dim();
    let (lo, hi) = (block.any.0.max(keys.0), block.any.1.min(keys.1));
    if lo >= hi {
        return;
    }
    let page_of = |key: usize| input.pages[key / PAGE - input.first_page as usize];
    let page_ptr = |rows: &CacheRows, key: usize| rows.page_ptr(page_of(key), input.head);
    // The page after the one of `key`: the next keys', and after the last the next head's first, which lies behind this head's.
    let next_ptr = |rows: &CacheRows, key: usize| match key / PAGE * PAGE + PAGE {
        next if next < hi => page_ptr(rows, next),
        _ => page_ptr(rows, lo).wrapping_add(PAGE * rows.row_bytes()),
    };
    // Nothing before this block has asked for its first pages, unless it was the head before.
    for rows in [&input.k, &input.v] {
        let keys = (hi - lo / PAGE * PAGE).min(PAGE);
        ask(s, page_ptr(rows, lo), keys * rows.row_bytes());
    }
    for number in lo / GROUP..hi.div_ceil(GROUP) {
        let base = number * GROUP;
        // A split may begin or end within a group.
        let group = Keys { base, from: base.max(keys.0), to: keys.1.min(base + GROUP) };
        let used = (hi - base).min(GROUP);
        let pages = lo.saturating_sub(base) / PAGE..used.div_ceil(PAGE);
        let mut alpha = [0.0f32; BLOCK_ROWS];
        let mut sums = [0.0f32; BLOCK_ROWS];
        // SAFETY: `page_ptr` checks the page; the scratch parts have the sizes that the callees name.
        unsafe {
            for i in pages.clone() {
                let (page, next) = (page_ptr(&input.k, base + i * PAGE), next_ptr(&input.k, base + i * PAGE));
                load_keys(s, &input.k, page, next, scratch.keys.add(i * PAGE * d));
            }
            let mut row = 0;
            while row < block.rows {
                let n = tile_rows::<S>(block.rows - row);
                if let Some(seen) = block.seen_by_any(row..row + n, &group) {
                    let to = (&mut alpha, &mut sums);
                    weigh(s, heads, (block, scratch, d), (row, n), (&group, seen), state, to);
                }
                row += n;
            }
            // Rows that see nothing of this group keep alpha = e^0 and add a sum of zero.
            math::map_row(s, Exp, alpha.as_ptr(), alpha.as_mut_ptr(), block.rows);
            for r in 0..block.rows {
                state.l[r] = state.l[r] * alpha[r] + sums[r];
            }
            for i in pages {
                let (page, next) = (page_ptr(&input.v, base + i * PAGE), next_ptr(&input.v, base + i * PAGE));
                let v = scratch.keys.add(i * PAGE * scratch.stride);
                load_values(s, &input.v, page, next, (used - i * PAGE).min(PAGE), v, scratch.stride);
            }
            let mut row = 0;
            while row < block.rows {
                let n = tile_rows::<S>(block.rows - row);
                if let Some(seen) = block.seen_by_any(row..row + n, &group) {
                    let o = scratch.o.add(row * scratch.stride);
                    let (p, alpha) = (scratch.p.add(row * GROUP), alpha.as_ptr().add(row));
                    weighted_values(s, n, p, scratch.keys, seen, o, scratch.stride, alpha);
                }
                row += n;
            }
        }
    }
}

/// Merges one split's (m, l, o) into a row's running ones.
///
/// # Safety
/// `total` and `o` hold `n` floats.
#[inline(always)]
unsafe fn merge_row<S: Simd>(s: S, into: (&mut f32, &mut f32, *mut f32), m: f32, l: f32, o: *const f32, n: usize) {
    let (total_m, total_l, total) = into;
    let new = total_m.max(m);
    let mut f = [*total_m - shift(new), m - shift(new)];
    // SAFETY: two floats; then rows of n floats.
    unsafe {
        math::map_row(s, Exp, f.as_ptr(), f.as_mut_ptr(), 2);
        math::zip_row(s, Blend(f[0], f[1]), total, o, total, n);
    }
    *total_m = new;
    *total_l = *total_l * f[0] + l * f[1];
}

/// `x * f.0 + y * f.1`
#[derive(Clone, Copy)]
struct Blend(f32, f32);
impl math::Binary for Blend {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F, y: S::F) -> S::F {
        s.fma(y, s.splat(self.1), s.mul(x, s.splat(self.0)))
    }
}

/// `out = o / (l + e^(sink - m))`; zero where no key was visible.
///
/// # Safety
/// `o` and `out` hold `n` floats.
#[inline(always)]
unsafe fn finish_row<S: Simd>(s: S, m: f32, l: f32, sink: Option<f32>, o: *const f32, out: *mut f32, n: usize) {
    let (mut l, mut f) = (l, 1.0);
    if let Some(sink) = sink {
        let top = m.max(sink);
        let mut e = [m - shift(top), sink - shift(top)];
        // SAFETY: two floats.
        unsafe { math::map_row(s, Exp, e.as_ptr(), e.as_mut_ptr(), 2) };
        l = l * e[0] + e[1];
        f = e[0];
    }
    let by = if l == 0.0 { 0.0 } else { f / l };
    // SAFETY: the caller's.
    unsafe { super::norm::scale_by(s, o, by, None, out, n) };
}

struct Whole<'a> {
    heads: &'a AttentionHeads,
    input: &'a AttentionInput<'a>,
    sinks: Option<&'a [f32]>,
    out: MatMut<'a>,
    scratch: &'a mut [f32],
}

impl Kernel for Whole<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Whole { heads, input, sinks, out, scratch } = self;
        let scratch = Scratch::new(scratch, input.k.dim(), input.v.dim());
        let (n, d_v) = (input.positions.len() * heads.group, input.v.dim());
        for first in (0..n).step_by(BLOCK_ROWS) {
            let block = Block::new(heads, input, first, BLOCK_ROWS.min(n - first));
            let (lo, hi) = block.any;
            let split = heads.split.unwrap_or(hi.next_multiple_of(PAGE).max(PAGE));
            let splits = lo / split..hi.div_ceil(split);
            let merge = splits.len() > 1;
            let mut whole = Softmax::empty();
            // SAFETY: shapes are checked by `attention`; the scratch parts have their sizes.
            unsafe {
                pack_queries(s, input, heads.group, &block, &scratch);
                if merge {
                    core::ptr::write_bytes(scratch.total, 0, block.rows * scratch.stride);
                }
                for i in splits {
                    let mut state = Softmax::empty();
                    core::ptr::write_bytes(scratch.o, 0, block.rows * scratch.stride);
                    accumulate(s, heads, input, &block, (i * split, (i + 1) * split), &scratch, &mut state);
                    if !merge {
                        whole = state;
                        break;
                    }
                    for r in 0..block.rows {
                        let at = r * scratch.stride;
                        let into = (&mut whole.m[r], &mut whole.l[r], scratch.total.add(at));
                        merge_row(s, into, state.m[r], state.l[r], scratch.o.add(at), d_v);
                    }
                }
                let from = if merge { scratch.total } else { scratch.o };
                for r in 0..block.rows {
                    let (t, g) = ((first + r) / heads.group, (first + r) % heads.group);
                    let (o, dst) = (from.add(r * scratch.stride), out.row_ptr(t).add(g * d_v));
                    finish_row(s, whole.m[r], whole.l[r], sinks.map(|x| x[g]), o, dst, d_v);
                }
            }
        }
    }
}

/// Attention of some tokens of one sequence for one KV head: `out` `[n_tokens, group * d_v]`.
///
/// `sinks` `[group]` are extra logits that take probability and give nothing. The tokens' own keys and values are in
/// the cache already. `scratch`: [`attention_scratch`] floats, contents ignored. Panics if shapes disagree, or a
/// visible key has no page.
pub fn attention(
    isa: IsaLevel,
    heads: &AttentionHeads,
    input: &AttentionInput<'_>,
    sinks: Option<&[f32]>,
    out: MatMut<'_>,
    scratch: &mut [f32],
) {
    input.check(heads, &out, scratch);
    assert!(sinks.is_none_or(|x| x.len() == heads.group), "one sink a head");
    isa.run(Whole { heads, input, sinks, out, scratch })
}

struct Partial<'a> {
    heads: &'a AttentionHeads,
    input: &'a AttentionInput<'a>,
    keys: (usize, usize),
    o: MatMut<'a>,
    ml: &'a mut [f32],
    scratch: &'a mut [f32],
}

impl Kernel for Partial<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Partial { heads, input, keys, o, ml, scratch } = self;
        let scratch = Scratch::new(scratch, input.k.dim(), input.v.dim());
        let (n, d_v) = (input.positions.len() * heads.group, input.v.dim());
        for first in (0..n).step_by(BLOCK_ROWS) {
            let block = Block::new(heads, input, first, BLOCK_ROWS.min(n - first));
            let mut state = Softmax::empty();
            // SAFETY: shapes are checked by `attention_partial`; the scratch parts have their sizes.
            unsafe {
                pack_queries(s, input, heads.group, &block, &scratch);
                core::ptr::write_bytes(scratch.o, 0, block.rows * scratch.stride);
                accumulate(s, heads, input, &block, keys, &scratch, &mut state);
                for r in 0..block.rows {
                    let at = first + r;
                    let dst = o.row_ptr(at / heads.group).add(at % heads.group * d_v);
                    core::ptr::copy_nonoverlapping(scratch.o.add(r * scratch.stride), dst, d_v);
                    (ml[2 * at], ml[2 * at + 1]) = (state.m[r], state.l[r]);
                }
            }
        }
    }
}

/// Split `index` of [`attention`]: the unnormalised output `o` `[n_tokens, group * d_v]`, and each row's maximum and sum
/// in `ml` `[n_tokens * group][2]`. A split without visible keys gives zeros and a maximum of minus infinity.
///
/// Panics as [`attention`] does, and without [`AttentionHeads::split`].
pub fn attention_partial(
    isa: IsaLevel,
    heads: &AttentionHeads,
    input: &AttentionInput<'_>,
    index: usize,
    o: MatMut<'_>,
    ml: &mut [f32],
    scratch: &mut [f32],
) {
    input.check(heads, &o, scratch);
    let split = heads.split.expect("a partial needs a split size");
    assert!(ml.len() >= 2 * input.positions.len() * heads.group, "a maximum and a sum a row");
    isa.run(Partial { heads, input, keys: (index * split, (index + 1) * split), o, ml, scratch })
}

struct Merge<'a> {
    n_splits: usize,
    group: usize,
    o: &'a [f32],
    ml: &'a [f32],
    sinks: Option<&'a [f32]>,
    out: MatMut<'a>,
}

impl Kernel for Merge<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Merge { n_splits, group, o, ml, sinks, out } = self;
        let (rows, d_v) = (out.rows() * group, out.cols() / group);
        for row in 0..rows {
            let (t, g) = (row / group, row % group);
            let (mut m, mut l) = (f32::NEG_INFINITY, 0.0);
            // SAFETY: `attention_merge` has checked the lengths; `dst` is one head of one output row.
            unsafe {
                let dst = out.row_ptr(t).add(g * d_v);
                core::ptr::write_bytes(dst, 0, d_v);
                for i in 0..n_splits {
                    let at = i * rows + row;
                    let part = o.as_ptr().add(at * d_v);
                    merge_row(s, (&mut m, &mut l, dst), ml[2 * at], ml[2 * at + 1], part, d_v);
                }
                finish_row(s, m, l, sinks.map(|x| x[g]), dst, dst, d_v);
            }
        }
    }
}

/// Merges splits `0..n_splits` in index order: `o` `[n_splits][n_tokens][group * d_v]`, `ml` `[n_splits][n_tokens *
/// group][2]` from [`attention_partial`], into `out` `[n_tokens, group * d_v]`. Bit-equal to [`attention`].
pub fn attention_merge(
    isa: IsaLevel,
    heads: &AttentionHeads,
    n_splits: usize,
    o: &[f32],
    ml: &[f32],
    sinks: Option<&[f32]>,
    out: MatMut<'_>,
) {
    let rows = out.rows() * heads.group;
    assert!(out.cols() % heads.group == 0 && sinks.is_none_or(|x| x.len() == heads.group), "shapes differ");
    assert!(o.len() >= n_splits * out.rows() * out.cols() && ml.len() >= n_splits * rows * 2, "partials are missing");
    isa.run(Merge { n_splits, group: heads.group, o, ml, sinks, out })
}

#[cfg(test)]
#[path = "attention_tests.rs"]
mod tests;
