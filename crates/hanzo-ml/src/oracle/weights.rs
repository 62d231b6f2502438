//! A Plan's weights in f64, and the magnitudes that bound a contraction over them.
//!
//! A kernel computes `s * sum(c a) - m * sum(a)` with the block's scale s, codes c and minimum m; what it may be off by
//! grows with `|s c| + |m|`, which can be far above `|s c - m|`. Where a format has no minimum the sum over codes is exact
//! in integers and `|s c|` is the weight's own magnitude. Else formats are not asked for their parts: setting every code
//! byte of a block to 0x00 and to 0xff (and keeping the others, see [`super::probe`]) gives the ends of the code range,
//! hence both terms.

use super::probe::Layout;
use crate::backend::WeightSource;
use crate::error::{Error, Result};
use crate::plan::{Plan, Weight, WeightId};
use hanzo_gguf::{Format, formats};

/// One weight.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// Format it came from.
    pub format: Format,
    /// Rows (per expert).
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Values, `[experts, rows, cols]`.
    pub values: Vec<f64>,
    /// Per element, `|s c| + |m|` or more. Empty where there is no m: the values' magnitudes serve.
    pub amplitude: Vec<f64>,
}

impl Matrix {
    /// From bytes of whole rows.
    pub fn new(format: Format, rows: usize, cols: usize, bytes: &[u8]) -> Matrix {
        let n = bytes.len() / format.block_bytes() * format.block_len();
        let mut values = vec![0.0; n];
        formats::to_float(format, bytes, &mut values);
        let has_minimum = format.is_block() && Layout::of(format).has_minimum();
        let amplitude = if has_minimum { amplitude(format, bytes, &values) } else { Vec::new() };
        Matrix { format, rows, cols, values: values.into_iter().map(f64::from).collect(), amplitude }
    }

    /// A row of an expert.
    pub fn row(&self, expert: usize, row: usize) -> &[f64] {
        let at = (expert * self.rows + row) * self.cols;
        &self.values[at..at + self.cols]
    }

    /// The amplitudes of a row of an expert.
    pub fn amplitude(&self, expert: usize, row: usize) -> Option<&[f64]> {
        let at = (expert * self.rows + row) * self.cols;
        self.amplitude.get(at..at + self.cols)
    }
}

/// `|w| + 2 max |ends of the code range|`: with `w = s c - m` and an end `-m`, `|s c| + |m| <= |w| + 2 |m|`.
fn amplitude(format: Format, bytes: &[u8], values: &[f32]) -> Vec<f64> {
    let layout = Layout::of(format);
    let mut out: Vec<f64> = values.iter().map(|v| f64::from(v.abs())).collect();
    let mut ends = vec![0.0f64; out.len()];
    let mut at_end = vec![0.0f32; out.len()];
    for fill in [0x00, 0xff] {
        let mut filled = bytes.to_vec();
        for block in filled.chunks_mut(format.block_bytes()) {
            for at in layout.codes() {
                block[at] = fill;
            }
        }
        formats::to_float(format, &filled, &mut at_end);
        for (m, v) in ends.iter_mut().zip(&at_end) {
            *m = m.max(f64::from(v.abs()));
        }
    }
    for (a, m) in out.iter_mut().zip(ends) {
        *a += 2.0 * m;
    }
    out
}

/// Every weight of a Plan.
#[derive(Clone, Debug, Default)]
pub struct Weights {
    matrices: Vec<Matrix>,
}

impl Weights {
    /// Reads a Plan's weights.
    pub fn load(plan: &Plan, source: &dyn WeightSource) -> Result<Weights> {
        let matrices = plan.weights.iter().map(|w| matrix(w, source)).collect::<Result<_>>()?;
        Ok(Weights { matrices })
    }

    /// A weight.
    pub fn get(&self, w: WeightId) -> &Matrix {
        &self.matrices[w.0 as usize]
    }
}

/// The row range of a tensor that a weight is, expert by expert.
fn matrix(w: &Weight, source: &dyn WeightSource) -> Result<Matrix> {
    let bytes = source.tensor(w)?;
    let row = w.row_bytes();
    let tensor = row * w.tensor_rows;
    if bytes.len() != tensor * w.experts || w.first_row + w.rows > w.tensor_rows {
        let what = format!("{} bytes, expected {} x {tensor}", bytes.len(), w.experts);
        return Err(Error::Weight { name: w.tensor.clone(), what });
    }
    let mut own = Vec::with_capacity(w.experts * w.expert_bytes());
    for e in 0..w.experts {
        let start = e * tensor + w.first_row * row;
        own.extend_from_slice(&bytes[start..start + w.rows * row]);
    }
    Ok(Matrix::new(w.format, w.rows, w.cols, &own))
}
