//! What packing costs: the error of values after a round trip through a format.
//!
//! Only measures; which error is acceptable is the caller's business.

use super::{FormatError, from_float, to_float};
use crate::format::Format;

/// The error of packing and unpacking. All sums run in f64.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoundTrip {
    /// The format.
    pub format: Format,
    /// How many values.
    pub elements: usize,
    /// Root of the mean squared error, in the values' unit.
    pub rmse: f64,
    /// `rmse` over the root mean square of the values: 0 is exact, 1 is as bad as storing zeros.
    pub relative_rmse: f64,
    /// The same as `relative_rmse`, squares weighted by the importance given (equal to it if none was).
    pub weighted_relative_rmse: f64,
    /// Largest magnitude of an error.
    pub max_error: f64,
}

impl std::fmt::Display for RoundTrip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}: rmse {:.4e} ({:.3}%), max error {:.4e} over {} values",
            self.format,
            self.rmse,
            100.0 * self.relative_rmse,
            self.max_error,
            self.elements
        )
    }
}

/// Packs `src` as [`from_float`] does, unpacks it, and measures the difference.
///
/// # Errors
/// Those of [`from_float`].
pub fn round_trip(format: Format, src: &[f32], importance: Option<&[f32]>) -> Result<RoundTrip, FormatError> {
    let size = FormatError::Size { format, elements: src.len(), bytes: 0 };
    let mut packed = vec![0; format.row_bytes(src.len()).ok_or(size)?];
    from_float(format, src, importance, &mut packed)?;
    let mut back = vec![0.0; src.len()];
    to_float(format, &packed, &mut back);

    let (mut square, mut error, mut max_error) = (0f64, 0f64, 0f64);
    let (mut weighted_square, mut weighted_error) = (0f64, 0f64);
    for (i, (&x, &y)) in src.iter().zip(&back).enumerate() {
        let w = importance.map_or(1.0, |w| f64::from(w[i % w.len()]));
        let (x, e) = (f64::from(x), f64::from(x) - f64::from(y));
        square += x * x;
        error += e * e;
        weighted_square += w * x * x;
        weighted_error += w * e * e;
        max_error = max_error.max(e.abs());
    }
    let relative = |error: f64, square: f64| if error == 0.0 { 0.0 } else { (error / square).sqrt() };
    Ok(RoundTrip {
        format,
        elements: src.len(),
        rmse: if src.is_empty() { 0.0 } else { (error / src.len() as f64).sqrt() },
        relative_rmse: relative(error, square),
        weighted_relative_rmse: relative(weighted_error, weighted_square),
        max_error,
    })
}
