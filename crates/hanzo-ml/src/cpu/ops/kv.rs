//! Rows of the paged key/value cache: where they lie, how they are written, how their elements are read.
//!
//! One layer's keys are `[page][n_kv][PAGE][d]` elements, its values likewise, so that one head's rows within a page
//! are contiguous. A row is `d` elements of F16, F32, BF16, Q8_0 or Q4_0 (the quantized ones in blocks of 32 along
//! d). A *slot* is `page * PAGE + offset`, the physical row of a token. Bytes of a store: 4 read and one row's bytes
//! written per element. Attention's arithmetic is not here.
//!
//! Errors of a stored element: F32 exact; F16 and BF16 round to nearest even; Q8_0 at most d / 2 + u |x| with
//! d = max|block| / 127 rounded to a half (the two end codes: 2^-11 |x| more); Q4_0 at most d with d = max|block| / 8.

use super::simd::{Kernel, Simd};
use super::view::Mat;
use crate::cache::PAGE;
use crate::cpu::isa::IsaLevel;
use hanzo_gguf::Format;

/// One layer's key rows, or its value rows, in a page group. A plain description: copying it copies no data.
#[derive(Clone, Copy, Debug)]
pub struct CacheRows {
    ptr: *mut u8,
    pages: usize,
    n_kv: usize,
    dim: usize,
    row_bytes: usize,
    format: Format,
}

// SAFETY: a description of memory; `new`'s caller vouches for how threads use it.
unsafe impl Send for CacheRows {}
// SAFETY: as above.
unsafe impl Sync for CacheRows {}

impl CacheRows {
    /// `pages` pages of `n_kv` heads of [`PAGE`] rows of `dim` elements at `ptr`.
    ///
    /// Panics if the format cannot be a cache format or `dim` is not whole blocks: the plan has checked both.
    ///
    /// # Safety
    /// The memory stays valid while the description is used, and while an op runs no other thread writes rows that the
    /// op reads, or touches rows that it writes.
    pub unsafe fn new(ptr: *mut u8, pages: usize, n_kv: usize, dim: usize, format: Format) -> CacheRows {
        assert!(crate::cache::CACHE_FORMATS.contains(&format), "{format:?} is not a cache format");
        assert!(dim > 0 && dim % format.block_len() == 0, "rows of {dim} elements are not whole blocks of {format:?}");
        let row_bytes = dim / format.block_len() * format.block_bytes();
        CacheRows { ptr, pages, n_kv, dim, row_bytes, format }
    }

    /// The first `dim` elements of every row: the values of latent attention (MLA), which are part of the keys.
    pub fn prefix(self, dim: usize) -> CacheRows {
        assert!(dim <= self.dim && dim % self.format.block_len() == 0, "a prefix of whole blocks");
        CacheRows { dim, ..self }
    }

    /// Elements of a row.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Heads of a page.
    pub fn n_kv(&self) -> usize {
        self.n_kv
    }

    /// Pages there are.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Bytes from a row to the next.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// The rows' format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The [`PAGE`] rows of one head in one page.
    ///
    /// Panics if page or head is out of range.
    #[inline(always)]
    pub(crate) fn page_ptr(&self, page: u32, head: usize) -> *const u8 {
        assert!((page as usize) < self.pages && head < self.n_kv, "page {page} or head {head} does not exist");
        // SAFETY: within the memory that `new` was given.
        unsafe { self.ptr.add((page as usize * self.n_kv + head) * PAGE * self.row_bytes) }
    }

    /// Checks a store of `x` (heads `first_head..`, one row a slot).
    pub(crate) fn check(&self, slots: &[u32], first_head: usize, x: &Mat<'_>) {
        assert!(slots.len() == x.rows() && x.cols() % self.dim == 0, "one row of whole heads a slot");
        assert!(first_head + x.cols() / self.dim <= self.n_kv, "more heads than the cache has");
        assert!(slots.iter().all(|s| (*s as usize) < self.pages * PAGE), "a slot outside the cache");
    }

    /// Writes one head's row.
    ///
    /// # Safety
    /// `slot` and `head` exist, `x` is readable for `dim` floats, and the row is the caller's to write.
    #[inline(always)]
    pub(crate) unsafe fn store_row<S: Simd>(&self, s: S, slot: u32, head: usize, x: *const f32) {
        let (page, at) = (slot as usize / PAGE, slot as usize % PAGE);
        let n = self.dim;
        // SAFETY: the row lies within the cache; `x` has `dim` floats.
        unsafe {
            let row = self.ptr.add(((page * self.n_kv + head) * PAGE + at) * self.row_bytes);
            match self.format {
                Format::F32 => core::ptr::copy_nonoverlapping(x.cast::<u8>(), row, 4 * n),
                Format::F16 => store_f16(s, x, row.cast(), n),
                Format::BF16 => {
                    for i in 0..n {
                        row.cast::<u16>().add(i).write_unaligned(half::bf16::from_f32(*x.add(i)).to_bits());
                    }
                }
                Format::Q8_0 => (0..n / 32).for_each(|b| store_q8_0(x.add(32 * b), row.add(34 * b))),
                _ => (0..n / 32).for_each(|b| store_q4_0(x.add(32 * b), row.add(18 * b))),
            }
        }
    }
}

/// The physical row of `position`: `pages` is a sequence's block table whose entry 0 holds page number `first` of the
/// sequence (earlier ones have left the window). Panics if the position has no page.
pub fn slot_of(position: u32, pages: &[u32], first: u32) -> u32 {
    let page = position / PAGE as u32;
    assert!(page >= first, "position {position} has left the window");
    pages[(page - first) as usize] * PAGE as u32 + position % PAGE as u32
}

/// # Safety
/// `x` is readable and `out` writable for `n` elements.
#[inline(always)]
unsafe fn store_f16<S: Simd>(s: S, x: *const f32, out: *mut u16, n: usize) {
    let whole = n - n % S::LANES;
    // SAFETY: indices stay below `n`.
    unsafe {
        for i in (0..whole).step_by(S::LANES) {
            s.store_f16(out.add(i), s.load(x.add(i)));
        }
        for i in whole..n {
            out.add(i).write_unaligned(half::f16::from_f32_const(*x.add(i)).to_bits());
        }
    }
}

/// The element of largest magnitude in a block of 32.
///
/// # Safety
/// `x` is readable for 32 floats.
unsafe fn peak(x: *const f32) -> f32 {
    // SAFETY: the caller's.
    (0..32).map(|i| unsafe { *x.add(i) }).fold(0.0, |m: f32, v| if v.abs() > m.abs() { v } else { m })
}

/// # Safety
/// `x` is readable for 32 floats, `out` writable for 34 bytes.
unsafe fn store_q8_0(x: *const f32, out: *mut u8) {
    // SAFETY: the caller's.
    unsafe {
        let d = half::f16::from_f32_const(peak(x).abs() / 127.0);
        let inv = if d.to_bits() == 0 { 0.0 } else { 1.0 / d.to_f32_const() };
        out.cast::<u16>().write_unaligned(d.to_bits());
        for i in 0..32 {
            let q = (*x.add(i) * inv).round_ties_even().clamp(-127.0, 127.0);
            *out.add(2 + i) = q as i8 as u8;
        }
    }
}

/// # Safety
/// `x` is readable for 32 floats, `out` writable for 18 bytes.
unsafe fn store_q4_0(x: *const f32, out: *mut u8) {
    // SAFETY: the caller's.
    unsafe {
        let d = half::f16::from_f32_const(peak(x) / -8.0);
        let f = d.to_f32_const();
        let inv = if f == 0.0 { 0.0 } else { 1.0 / f };
        out.cast::<u16>().write_unaligned(d.to_bits());
        let code = |i: usize| ((*x.add(i) * inv).round_ties_even() + 8.0).clamp(0.0, 15.0) as u8;
        for i in 0..16 {
            *out.add(2 + i) = code(i) | code(i + 16) << 4;
        }
    }
}

struct Store<'a>(CacheRows, usize, Mat<'a>, &'a [u32]);
impl Kernel for Store<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Store(cache, first_head, x, slots) = self;
        for (t, &slot) in slots.iter().enumerate() {
            let row = x.row_ptr(t);
            for i in 0..x.cols() / cache.dim {
                // SAFETY: `check` has seen slots, heads and columns; the rows are ours by the contract of `new`.
                unsafe { cache.store_row(s, slot, first_head + i, row.add(i * cache.dim)) };
            }
        }
    }
}

/// Writes `x` `[n_tokens, heads * dim]` to the rows of `slots` (one a token), heads `first_head..`.
///
/// Panics if shapes, heads or slots do not fit the cache.
pub fn kv_store(isa: IsaLevel, cache: CacheRows, first_head: usize, x: Mat<'_>, slots: &[u32]) {
    cache.check(slots, first_head, &x);
    isa.run(Store(cache, first_head, x, slots))
}

/// How the elements of a cache row are read. `load` must be `#[inline(always)]`.
pub(crate) trait RowFormat: Copy {
    /// Elements `e..e + LANES` of `row` as floats; `e` is a multiple of LANES.
    ///
    /// # Safety
    /// The row has these elements.
    unsafe fn load<S: Simd>(s: S, row: *const u8, e: usize) -> S::F;

    /// Element `e`, for the columns after the last whole vector (formats without blocks only have those).
    ///
    /// # Safety
    /// The row has this element.
    unsafe fn get(row: *const u8, e: usize) -> f32;
}

#[derive(Clone, Copy)]
pub(crate) struct F32Rows;
#[derive(Clone, Copy)]
pub(crate) struct F16Rows;
#[derive(Clone, Copy)]
pub(crate) struct Bf16Rows;
#[derive(Clone, Copy)]
pub(crate) struct Q8Rows;
#[derive(Clone, Copy)]
pub(crate) struct Q4Rows;

// SAFETY of the blocks below: the caller promises that the row has the elements; block arithmetic follows the
// formats' layouts (Q8_0: 34 bytes, half d then 32 codes; Q4_0: 18 bytes, half d then 16 bytes of nibbles, low first).
impl RowFormat for F32Rows {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, row: *const u8, e: usize) -> S::F {
        unsafe { s.load(row.cast::<f32>().add(e)) }
    }
    #[inline(always)]
    unsafe fn get(row: *const u8, e: usize) -> f32 {
        unsafe { row.cast::<f32>().add(e).read_unaligned() }
    }
}

impl RowFormat for F16Rows {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, row: *const u8, e: usize) -> S::F {
        unsafe { s.load_f16(row.cast::<u16>().add(e)) }
    }
    #[inline(always)]
    unsafe fn get(row: *const u8, e: usize) -> f32 {
        half::f16::from_bits(unsafe { row.cast::<u16>().add(e).read_unaligned() }).to_f32_const()
    }
}

impl RowFormat for Bf16Rows {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, row: *const u8, e: usize) -> S::F {
        unsafe { s.load_bf16(row.cast::<u16>().add(e)) }
    }
    #[inline(always)]
    unsafe fn get(row: *const u8, e: usize) -> f32 {
        f32::from_bits((unsafe { row.cast::<u16>().add(e).read_unaligned() } as u32) << 16)
    }
}

impl RowFormat for Q8Rows {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, row: *const u8, e: usize) -> S::F {
        unsafe {
            let block = row.add(e / 32 * 34);
            let d = F16Rows::get(block, 0);
            s.mul(s.splat(d), s.load_i8(block.add(2 + e % 32).cast()))
        }
    }
    #[inline(always)]
    unsafe fn get(row: *const u8, e: usize) -> f32 {
        unsafe {
            let block = row.add(e / 32 * 34);
            F16Rows::get(block, 0) * *block.add(2 + e % 32).cast::<i8>() as f32
        }
    }
}

impl RowFormat for Q4Rows {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, row: *const u8, e: usize) -> S::F {
        unsafe {
            let block = row.add(e / 32 * 18);
            let d = F16Rows::get(block, 0);
            s.mul(s.splat(d), s.load_nibbles(block.add(2 + e % 16), e % 32 >= 16))
        }
    }
    #[inline(always)]
    unsafe fn get(row: *const u8, e: usize) -> f32 {
        unsafe {
            let block = row.add(e / 32 * 18);
            let b = *block.add(2 + e % 16);
            F16Rows::get(block, 0) * ((if e % 32 >= 16 { b >> 4 } else { b & 15 }) as f32 - 8.0)
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::math::tests::isas;
    use super::*;

    /// A cache of one layer's keys or values, filled with NaN-like bytes, for tests.
    pub(crate) struct Cache {
        pub bytes: Vec<u8>,
        dims: (usize, usize, usize, Format),
    }

    impl Cache {
        pub(crate) fn new(format: Format, pages: usize, n_kv: usize, dim: usize) -> Cache {
            let row = dim / format.block_len() * format.block_bytes();
            Cache { bytes: vec![0xff; pages * n_kv * PAGE * row], dims: (pages, n_kv, dim, format) }
        }
        pub(crate) fn rows(&mut self) -> CacheRows {
            let (pages, n_kv, dim, format) = self.dims;
            // SAFETY: the vector has exactly these rows; tests use one thread.
            unsafe { CacheRows::new(self.bytes.as_mut_ptr(), pages, n_kv, dim, format) }
        }
        /// One row, decoded by hanzo-gguf: an independent reading.
        pub(crate) fn row(&self, slot: usize, head: usize) -> Vec<f32> {
            let (_, n_kv, dim, format) = self.dims;
            let row = dim / format.block_len() * format.block_bytes();
            let at = ((slot / PAGE * n_kv + head) * PAGE + slot % PAGE) * row;
            let mut out = vec![0.0; dim];
            hanzo_gguf::formats::to_float(format, &self.bytes[at..at + row], &mut out);
            out
        }
    }

    #[test]
    fn stored_rows_read_back_within_the_formats_error_and_land_in_their_slot() {
        let (heads, d) = (2, 96);
        let x: Vec<f32> = (0..3 * heads * d).map(|i| (i as f32 * 0.77).sin() * (1.0 + (i % 7) as f32)).collect();
        let slots = [70u32, 5, 64];
        for isa in isas() {
            for format in crate::cache::CACHE_FORMATS {
                let mut cache = Cache::new(format, 3, heads, d);
                kv_store(isa, cache.rows(), 0, Mat::new(&x, 3, heads * d), &slots);
                for (t, slot) in slots.into_iter().enumerate() {
                    for h in 0..heads {
                        let want = &x[(t * heads + h) * d..][..d];
                        let got = cache.row(slot as usize, h);
                        for (b, (want, got)) in want.chunks(32).zip(got.chunks(32)).enumerate() {
                            let peak = want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                            for (w, g) in want.iter().zip(got) {
                                let bound = match format {
                                    Format::F32 => 0.0,
                                    Format::F16 => w.abs() / 2048.0,
                                    Format::BF16 => w.abs() / 256.0,
                                    Format::Q8_0 => peak / 253.0 + w.abs() / 2048.0,
                                    _ => peak / 7.9,
                                };
                                assert!((w - g).abs() <= bound, "{isa:?} {format:?} block {b}: {w} became {g}");
                            }
                        }
                    }
                }
            }
        }
    }

    struct Load<'a, R>(R, &'a [u8], &'a mut [f32]);
    impl<R: RowFormat> Kernel for Load<'_, R> {
        type Out = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for e in (0..self.2.len()).step_by(S::LANES) {
                // SAFETY: the row has as many elements as the output, a multiple of 16.
                unsafe { s.store(self.2.as_mut_ptr().add(e), R::load(s, self.1.as_ptr(), e)) };
            }
            for (e, v) in self.2.iter().enumerate() {
                // SAFETY: as above.
                assert_eq!(v.to_bits(), unsafe { R::get(self.1.as_ptr(), e) }.to_bits());
            }
        }
    }

    #[test]
    fn every_row_format_is_read_exactly_as_hanzo_gguf_reads_it() {
        let d = 64;
        let x: Vec<f32> = (0..d).map(|i| (i as f32 * 0.9).cos() * 3.0).collect();
        for isa in isas() {
            for format in crate::cache::CACHE_FORMATS {
                let mut cache = Cache::new(format, 1, 1, d);
                kv_store(isa, cache.rows(), 0, Mat::new(&x, 1, d), &[0]);
                let mut out = vec![0.0; d];
                match format {
                    Format::F32 => isa.run(Load(F32Rows, &cache.bytes, &mut out)),
                    Format::F16 => isa.run(Load(F16Rows, &cache.bytes, &mut out)),
                    Format::BF16 => isa.run(Load(Bf16Rows, &cache.bytes, &mut out)),
                    Format::Q8_0 => isa.run(Load(Q8Rows, &cache.bytes, &mut out)),
                    _ => isa.run(Load(Q4Rows, &cache.bytes, &mut out)),
                }
                assert_eq!(out, cache.row(0, 0), "{isa:?} {format:?}");
            }
        }
    }

    #[test]
    fn a_position_finds_its_slot_through_a_table_that_has_lost_its_first_pages() {
        assert_eq!(slot_of(70, &[9, 4, 7], 0), 7 * 32 + 6);
        assert_eq!(slot_of(70, &[7], 2), 7 * 32 + 6);
    }
}
