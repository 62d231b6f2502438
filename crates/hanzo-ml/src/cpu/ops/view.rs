//! Views of matrices of floats: rows of `cols` contiguous elements, `stride` elements apart.
//!
//! Ops take views instead of slices so that the executor can hand out row ranges and column ranges (a head's
//! columns, one member of a fused QKV output) of one buffer to several threads. No arithmetic enters here.

use core::marker::PhantomData;

/// A read-only matrix view `[rows, cols]`.
#[derive(Clone, Copy, Debug)]
pub struct Mat<'a> {
    ptr: *const f32,
    rows: usize,
    cols: usize,
    stride: usize,
    life: PhantomData<&'a [f32]>,
}

// SAFETY: a `Mat` is a shared borrow of floats.
unsafe impl Send for Mat<'_> {}
// SAFETY: as above.
unsafe impl Sync for Mat<'_> {}

/// Whether `rows` rows of `cols` elements, `stride` apart, lie within `len` elements without overlapping.
fn fits(len: usize, rows: usize, cols: usize, stride: usize) -> bool {
    rows == 0
        || cols == 0
        || ((stride >= cols || rows == 1)
            && (rows - 1).checked_mul(stride).and_then(|n| n.checked_add(cols)).is_some_and(|n| n <= len))
}

impl<'a> Mat<'a> {
    /// A contiguous matrix. Panics if `data` is shorter than `rows * cols`.
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// Rows `stride` elements apart. Panics if the last row ends beyond `data`.
    pub fn strided(data: &'a [f32], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(fits(data.len(), rows, cols, stride), "a view of {rows} x {cols} exceeds its buffer");
        Mat { ptr: data.as_ptr(), rows, cols, stride, life: PhantomData }
    }

    /// A view of memory that other views may also point into.
    ///
    /// # Safety
    /// Every row is readable for `'a`, and no element is written by another thread meanwhile. An op whose
    /// documentation allows it may be given the same rows as its output.
    pub unsafe fn from_raw(ptr: *const f32, rows: usize, cols: usize, stride: usize) -> Self {
        Mat { ptr, rows, cols, stride, life: PhantomData }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }
    /// Elements in a row.
    pub fn cols(&self) -> usize {
        self.cols
    }
    /// Elements from the start of a row to the start of the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Row `i` as a slice. Panics if `i` is out of range.
    pub fn row(&self, i: usize) -> &'a [f32] {
        // SAFETY: `row_ptr` checks `i`; the constructor's caller vouches for the row.
        unsafe { core::slice::from_raw_parts(self.row_ptr(i), self.cols) }
    }

    /// The address of row `i`. Panics if `i` is out of range.
    #[inline(always)]
    pub(crate) fn row_ptr(&self, i: usize) -> *const f32 {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: row `i` lies within the view's memory.
        unsafe { self.ptr.add(i * self.stride) }
    }

    /// Rows `start..end`.
    pub fn range(&self, start: usize, end: usize) -> Mat<'a> {
        assert!(start <= end && end <= self.rows);
        // SAFETY: a subset of the rows of this view (`start == rows` gives no row to read).
        Mat { ptr: self.ptr.wrapping_add(start * self.stride), rows: end - start, ..*self }
    }
}

/// A writable matrix view `[rows, cols]`; its elements belong to it alone.
#[derive(Debug)]
pub struct MatMut<'a> {
    ptr: *mut f32,
    rows: usize,
    cols: usize,
    stride: usize,
    life: PhantomData<&'a mut [f32]>,
}

// SAFETY: a `MatMut` is an exclusive borrow of the floats of its rows.
unsafe impl Send for MatMut<'_> {}

impl<'a> MatMut<'a> {
    /// A contiguous matrix. Panics if `data` is shorter than `rows * cols`.
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// Rows `stride` elements apart. Panics if the last row ends beyond `data`.
    pub fn strided(data: &'a mut [f32], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(fits(data.len(), rows, cols, stride), "a view of {rows} x {cols} exceeds its buffer");
        MatMut { ptr: data.as_mut_ptr(), rows, cols, stride, life: PhantomData }
    }

    /// A view of part of a buffer that other threads write other parts of.
    ///
    /// # Safety
    /// Every row is readable and writable for `'a`, rows do not overlap (`stride >= cols`), and no other view
    /// of these elements is used meanwhile, save a [`Mat`] of exactly the same rows handed to the same op.
    pub unsafe fn from_raw(ptr: *mut f32, rows: usize, cols: usize, stride: usize) -> Self {
        MatMut { ptr, rows, cols, stride, life: PhantomData }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }
    /// Elements in a row.
    pub fn cols(&self) -> usize {
        self.cols
    }
    /// Elements from the start of a row to the start of the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Row `i` as a slice. Panics if `i` is out of range.
    pub fn row(&self, i: usize) -> &[f32] {
        // SAFETY: `row_ptr` checks `i`; the constructor's caller vouches for the row.
        unsafe { core::slice::from_raw_parts(self.row_ptr(i), self.cols) }
    }

    /// Row `i` as a writable slice. Panics if `i` is out of range.
    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        // SAFETY: as `row`, and `self` is borrowed exclusively.
        unsafe { core::slice::from_raw_parts_mut(self.row_ptr(i), self.cols) }
    }

    /// The address of row `i`. Panics if `i` is out of range.
    #[inline(always)]
    pub(crate) fn row_ptr(&self, i: usize) -> *mut f32 {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: row `i` lies within the view's memory.
        unsafe { self.ptr.add(i * self.stride) }
    }

    /// The address of the first element, whether or not there is one.
    pub(crate) fn first_ptr(&self) -> *mut f32 {
        self.ptr
    }

    /// The same rows for a shorter time.
    pub fn reborrow(&mut self) -> MatMut<'_> {
        MatMut { life: PhantomData, ..*self }
    }

    /// The same rows, to read.
    pub fn as_mat(&self) -> Mat<'_> {
        Mat { ptr: self.ptr, rows: self.rows, cols: self.cols, stride: self.stride, life: PhantomData }
    }
}
