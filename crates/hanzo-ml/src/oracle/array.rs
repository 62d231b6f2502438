//! Arrays of numbers with their bounds. Nothing here knows of ops.

use super::num::Num;

/// `[rows, cols]`, row by row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Array {
    /// Columns of a row.
    pub cols: usize,
    /// The elements, `rows * cols` of them.
    pub data: Vec<Num>,
}

impl Array {
    /// Zeros.
    pub fn zeros(rows: usize, cols: usize) -> Array {
        Array { cols, data: vec![Num::ZERO; rows * cols] }
    }

    /// From f32 values known exactly to both sides.
    pub fn from_f32(cols: usize, data: &[f32]) -> Array {
        Array { cols, data: data.iter().map(|x| Num::from(*x)).collect() }
    }

    /// From a function of one row of `x` to one row.
    pub fn map_rows(x: &Array, cols: usize, mut f: impl FnMut(usize, &[Num]) -> Vec<Num>) -> Array {
        let mut data = Vec::with_capacity(x.rows() * cols);
        for r in 0..x.rows() {
            data.extend(f(r, x.row(r)));
        }
        Array { cols, data }
    }

    /// Element by element.
    pub fn map(&self, f: impl Fn(Num) -> Num) -> Array {
        Array { cols: self.cols, data: self.data.iter().map(|x| f(*x)).collect() }
    }

    /// Element by element of two arrays of one shape.
    pub fn zip(&self, o: &Array, f: impl Fn(Num, Num) -> Num) -> Array {
        Array { cols: self.cols, data: self.data.iter().zip(&o.data).map(|(a, b)| f(*a, *b)).collect() }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.data.len().checked_div(self.cols).unwrap_or(0)
    }

    /// One row.
    pub fn row(&self, r: usize) -> &[Num] {
        &self.data[r * self.cols..(r + 1) * self.cols]
    }

    /// The values rounded to f32.
    pub fn to_f32(&self) -> Vec<f32> {
        self.data.iter().map(|x| x.v as f32).collect()
    }
}
