//! The inner loops of attention: a page of keys transposed, a page of values widened, and one register tile.
//!
//! Both products of attention are `C[rows, keys or columns] += A[rows, k] B[k, ..]` with A broadcast and B in vectors,
//! so one tile serves both. A lies in panels `[k / 32][rows][32]`, for queries and weights alike: rows are copied to it
//! as vectors, and a tile's broadcasts have constant offsets. Each element of C is one chain of additions in the order of k, whatever the number of
//! rows in the tile: that is what makes a query's result independent of its neighbours. Masks and softmax are not here.

use super::kv::{Bf16Rows, CacheRows, F16Rows, F32Rows, Q4Rows, Q8Rows, RowFormat};
use super::simd::Simd;
use crate::cache::PAGE;
use hanzo_gguf::Format;

/// Columns of a widened value row: whole tiles of two of the widest vectors.
pub(crate) const fn padded(d_v: usize) -> usize {
    d_v.next_multiple_of(32)
}

/// Rows of the next tile when `left` rows remain: the largest size the ISA has registers for.
#[inline(always)]
pub(crate) fn tile_rows<S: Simd>(left: usize) -> usize {
    match left {
        12.. if S::TILE_ROWS >= 12 => 12,
        8.. if S::TILE_ROWS >= 8 => 8,
        6.. if S::TILE_ROWS >= 6 => 6,
        4.. => 4,
        _ => left,
    }
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Asks for `bytes` bytes at `p`: a hint.
#[inline(always)]
pub(crate) fn ask<S: Simd>(s: S, p: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(LINE) {
        s.prefetch(p.wrapping_add(line));
    }
}

/// A page's keys as `kt[d][PAGE]`. Meanwhile the page at `next` is asked for: pages lie anywhere, so the hardware's
/// prefetchers cannot know it, and a transposition's order of reading hides even the current one from them.
///
/// # Safety
/// `page` holds [`PAGE`] rows of `k`; `kt` is writable for `d * PAGE` floats. `next` is only hinted at.
#[inline(always)]
pub(crate) unsafe fn load_keys<S: Simd>(s: S, k: &CacheRows, page: *const u8, next: *const u8, kt: *mut f32) {
    let (d, row) = (k.dim(), k.row_bytes());
    // SAFETY: the caller's; the format is the rows' own.
    unsafe {
        match k.format() {
            Format::F16 => transpose::<S, F16Rows>(s, page, next, row, d, kt),
            Format::F32 => transpose::<S, F32Rows>(s, page, next, row, d, kt),
            Format::BF16 => transpose::<S, Bf16Rows>(s, page, next, row, d, kt),
            Format::Q8_0 => transpose::<S, Q8Rows>(s, page, next, row, d, kt),
            _ => transpose::<S, Q4Rows>(s, page, next, row, d, kt),
        }
    }
}

/// # Safety
/// As [`load_keys`], rows of format `R`.
#[inline(always)]
unsafe fn transpose<S: Simd, R: RowFormat>(
    s: S,
    page: *const u8,
    mut next: *const u8,
    row: usize,
    d: usize,
    kt: *mut f32,
) {
    let whole = d - d % S::LANES;
    let squares = PAGE / S::LANES * (whole / S::LANES).max(1);
    let lines = (PAGE * row).div_ceil(LINE * squares);
    for key in (0..PAGE).step_by(S::LANES) {
        for e in (0..whole).step_by(S::LANES) {
            for _ in 0..lines {
                s.prefetch(next);
                next = next.wrapping_add(LINE);
            }
            let mut x = [s.splat(0.0); 16];
            for (i, x) in x.iter_mut().enumerate().take(S::LANES) {
                // SAFETY: row key + i exists and has elements e..e + LANES.
                *x = unsafe { R::load(s, page.add((key + i) * row), e) };
            }
            // log2(LANES) perfect shuffles of the rows transpose a square.
            let mut step = 1;
            while step < S::LANES {
                let mut y = x;
                for i in 0..S::LANES / 2 {
                    (y[2 * i], y[2 * i + 1]) = s.interleave(x[i], x[i + S::LANES / 2]);
                }
                x = y;
                step *= 2;
            }
            for (i, x) in x.iter().enumerate().take(S::LANES) {
                // SAFETY: e + i < d.
                unsafe { s.store(kt.add((e + i) * PAGE + key), *x) };
            }
        }
    }
    for e in whole..d {
        for key in 0..PAGE {
            // SAFETY: e < d, key < PAGE.
            unsafe { *kt.add(e * PAGE + key) = R::get(page.add(key * row), e) };
        }
    }
}

/// The first `keys` rows of a page's values as `out[key][stride]`; columns beyond `dim` are zero. The
/// page at `next` is asked for meanwhile.
///
/// # Safety
/// `page` holds the rows of `v`; `out` is writable for `keys * stride` floats.
#[inline(always)]
pub(crate) unsafe fn load_values<S: Simd>(
    s: S,
    v: &CacheRows,
    page: *const u8,
    next: *const u8,
    keys: usize,
    out: *mut f32,
    stride: usize,
) {
    let (d, row) = (v.dim(), v.row_bytes());
    // SAFETY: the caller's; the format is the rows' own.
    unsafe {
        match v.format() {
            Format::F16 => widen::<S, F16Rows>(s, (page, next), row, keys, d, out, stride),
            Format::F32 => widen::<S, F32Rows>(s, (page, next), row, keys, d, out, stride),
            Format::BF16 => widen::<S, Bf16Rows>(s, (page, next), row, keys, d, out, stride),
            Format::Q8_0 => widen::<S, Q8Rows>(s, (page, next), row, keys, d, out, stride),
            _ => widen::<S, Q4Rows>(s, (page, next), row, keys, d, out, stride),
        }
    }
}

/// # Safety
/// As [`load_values`], rows of format `R` and `d` elements.
#[inline(always)]
unsafe fn widen<S: Simd, R: RowFormat>(
    s: S,
    (page, next): (*const u8, *const u8),
    row: usize,
    keys: usize,
    d: usize,
    out: *mut f32,
    stride: usize,
) {
    let whole = d - d % S::LANES;
    for key in 0..keys {
        for line in (0..row).step_by(LINE) {
            s.prefetch(next.wrapping_add(key * row + line));
        }
        // SAFETY: key < keys and every column is below d <= stride.
        unsafe {
            let (src, dst) = (page.add(key * row), out.add(key * stride));
            for e in (0..whole).step_by(S::LANES) {
                s.store(dst.add(e), R::load(s, src, e));
            }
            for e in whole..d {
                *dst.add(e) = R::get(src, e);
            }
            for e in d..stride {
                *dst.add(e) = 0.0;
            }
        }
    }
}

/// Where a tile's A operand lies: element (r, k) at `ptr + r * row + k * col`.
#[derive(Clone, Copy)]
pub(crate) struct Broadcast {
    pub ptr: *const f32,
    pub row: usize,
    pub col: usize,
}

/// A tile's accumulators: `R` rows of `V` vectors.
type Acc<S, const R: usize, const V: usize> = [[<S as Simd>::F; V]; R];

/// What a tile starts from: zero, or `c[r][..] * rescale[r]`.
///
/// # Safety
/// `c` covers `R` rows of `V` vectors, `rescale` `R` floats.
#[inline(always)]
unsafe fn start<S: Simd, const R: usize, const V: usize>(
    s: S,
    c: (*mut f32, usize),
    rescale: Option<*const f32>,
) -> Acc<S, R, V> {
    let mut acc = [[s.splat(0.0); V]; R];
    if let Some(alpha) = rescale {
        for (r, acc) in acc.iter_mut().enumerate() {
            for (i, x) in acc.iter_mut().enumerate() {
                // SAFETY: the caller's.
                *x = unsafe { s.mul(s.splat(*alpha.add(r)), s.load(c.0.add(r * c.1 + i * S::LANES))) };
            }
        }
    }
    acc
}

/// `acc[r] += sum over k in 0..n of a[r][k] * b[k][..V LANES]`.
///
/// # Safety
/// `a` covers `R` rows and `n` columns, `b` `n` rows of `V` vectors.
#[inline(always)]
unsafe fn add_products<S: Simd, const R: usize, const V: usize>(
    s: S,
    acc: &mut Acc<S, R, V>,
    a: Broadcast,
    b: (*const f32, usize),
    n: usize,
) {
    for k in 0..n {
        // SAFETY: the caller's.
        unsafe {
            let mut row = [s.splat(0.0); V];
            for (i, x) in row.iter_mut().enumerate() {
                *x = s.load(b.0.add(k * b.1 + i * S::LANES));
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                let x = s.splat(*a.ptr.add(r * a.row + k * a.col));
                for (acc, b) in acc.iter_mut().zip(row) {
                    *acc = s.fma(x, b, *acc);
                }
            }
        }
    }
}

/// # Safety
/// `c` is writable for `R` rows of `V` vectors.
#[inline(always)]
unsafe fn finish<S: Simd, const R: usize, const V: usize>(s: S, acc: &Acc<S, R, V>, c: (*mut f32, usize)) {
    for (r, acc) in acc.iter().enumerate() {
        for (i, x) in acc.iter().enumerate() {
            // SAFETY: the caller's.
            unsafe { s.store(c.0.add(r * c.1 + i * S::LANES), *x) };
        }
    }
}

/// `c[r][..2 LANES] = init + sum over k in from..to of a[r][k] * b[k][..2 LANES]`, init being zero or
/// `c[r][..] * rescale[r]`.
///
/// # Safety
/// `a` covers `R` rows and `from..to`, `b` rows `from..to`, `c` `R` rows of two vectors, `rescale` `R` floats.
#[inline(always)]
pub(crate) unsafe fn tile<S: Simd, const R: usize>(
    s: S,
    a: Broadcast,
    b: (*const f32, usize),
    (from, to): (usize, usize),
    c: (*mut f32, usize),
    rescale: Option<*const f32>,
) {
    // SAFETY: the caller's.
    unsafe {
        let mut acc = start::<S, R, 2>(s, c, rescale);
        let a = Broadcast { ptr: a.ptr.add(from * a.col), ..a };
        add_products(s, &mut acc, a, (b.0.add(from * b.1), b.1), to.saturating_sub(from));
        finish(s, &acc, c);
    }
}

/// As [`tile`], `V` vectors wide, with A in panels `[k / PAGE][R][PAGE]`.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn panel_tile<S: Simd, const R: usize, const V: usize>(
    s: S,
    a: *const f32,
    b: (*const f32, usize),
    (from, to): (usize, usize),
    c: (*mut f32, usize),
    rescale: Option<*const f32>,
) {
    // SAFETY: the caller's; a panel's columns end at `end`.
    unsafe {
        let mut acc = start::<S, R, V>(s, c, rescale);
        let mut k = from;
        while k < to {
            let end = to.min((k / PAGE + 1) * PAGE);
            let a = Broadcast { ptr: a.add(k / PAGE * (R * PAGE) + k % PAGE), row: PAGE, col: 1 };
            add_products(s, &mut acc, a, (b.0.add(k * b.1), b.1), end - k);
            k = end;
        }
        finish(s, &acc, c);
    }
}

/// Expands `$size!(rows)` for the size of a tile, a result of [`tile_rows`].
macro_rules! for_tile_rows {
    ($rows:expr, $size:ident) => {
        match $rows {
            12 if S::TILE_ROWS >= 12 => $size!(12),
            8 if S::TILE_ROWS >= 8 => $size!(8),
            6 if S::TILE_ROWS >= 6 => $size!(6),
            4 => $size!(4),
            3 => $size!(3),
            2 => $size!(2),
            _ => $size!(1),
        }
    };
}

/// Scores of a tile of `rows` queries against the keys `from..to` of a page and some beside them: `c[r][PAGE]` from the
/// panels `q` and `kt[d][PAGE]`. What is beside them may also stay as it was.
///
/// # Safety
/// `rows` is a result of [`tile_rows`]; the arrays have the sizes named, and `from < to <= PAGE`.
#[inline(always)]
pub(crate) unsafe fn scores<S: Simd>(
    s: S,
    rows: usize,
    q: *const f32,
    kt: *const f32,
    d: usize,
    c: *mut f32,
    (from, to): (usize, usize),
) {
    macro_rules! size {
        ($r:literal) => {{
            let mut key = from - from % S::LANES;
            // SAFETY: the caller's; LANES divides PAGE.
            unsafe {
                while key + S::LANES < to {
                    panel_tile::<S, $r, 2>(s, q, (kt.add(key), PAGE), (0, d), (c.add(key), PAGE), None);
                    key += 2 * S::LANES;
                }
                if key < to {
                    panel_tile::<S, $r, 1>(s, q, (kt.add(key), PAGE), (0, d), (c.add(key), PAGE), None);
                }
            }
        }};
    }
    for_tile_rows!(rows, size)
}

/// `o[r][..stride] = o[r] * alpha[r] + sum over keys in range of p[r][key] * v[key]` for a tile of `rows` rows.
///
/// # Safety
/// `rows` is a result of [`tile_rows`]; `p` are panels of the range's keys, `v` is `[keys][stride]`, `o` `[rows][stride]`,
/// `alpha` `[rows]`; `stride` is a result of [`padded`].
#[inline(always)]
pub(crate) unsafe fn weighted_values<S: Simd>(
    s: S,
    rows: usize,
    p: *const f32,
    v: *const f32,
    range: (usize, usize),
    o: *mut f32,
    stride: usize,
    alpha: *const f32,
) {
    macro_rules! size {
        ($r:literal) => {{
            for e in (0..stride).step_by(2 * S::LANES) {
                // SAFETY: the caller's.
                unsafe { panel_tile::<S, $r, 2>(s, p, (v.add(e), stride), range, (o.add(e), stride), Some(alpha)) };
            }
        }};
    }
    for_tile_rows!(rows, size)
}
