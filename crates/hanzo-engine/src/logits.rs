//! Log-probabilities of given tokens: what `logits` and `perplexity` are made of. One row of the vocabulary at a time.

use crate::context::{Context, Control, Rows};
use crate::error::{Error, Result};
use crate::kv::Sequence;

/// Turns logits into log-probabilities in place: `x - max - ln(sum(exp(x - max)))`, summed in f64.
pub fn log_softmax(row: &mut [f32]) {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    let sum: f64 = row.iter().map(|x| (*x as f64 - max).exp()).sum();
    let shift = max + sum.ln();
    row.iter_mut().for_each(|x| *x = (*x as f64 - shift) as f32);
}

/// Evaluates `ids` after what `seq` holds and gives `sink` the log-probabilities `[n_vocab]` of the token after each id
/// from index `from` on: `sink(i, row)` is the distribution of `ids[i + 1]`.
///
/// At most one row of the vocabulary is held besides the head's chunk, however many ids there are.
///
/// # Errors
/// Those of [`Context::eval`], and [`Error::NotANumber`] for the first row that is no distribution; nothing of it or after it reaches `sink`.
pub fn log_probs(
    context: &mut Context,
    seq: &mut Sequence,
    ids: &[u32],
    from: usize,
    control: &mut Control<'_>,
    sink: &mut dyn FnMut(usize, &[f32]),
) -> Result<()> {
    let mut row = vec![0.0; context.model().n_vocab()];
    let mut broken = None;
    context.eval(seq, ids, Rows::From(from), control, &mut |i, logits| {
        row.copy_from_slice(logits);
        log_softmax(&mut row);
        if broken.is_none() && row.iter().any(|x| x.is_nan()) {
            broken = Some(not_a_number(i, logits));
        }
        if broken.is_none() {
            sink(i, &row);
        }
    })?;
    broken.map_or(Ok(()), Err)
}

/// Logits that are no distribution: any NaN or infinity above, or nothing but infinities below.
fn not_a_number(position: usize, logits: &[f32]) -> Error {
    let count = |bad: fn(&f32) -> bool| logits.iter().filter(|x| bad(x)).count();
    let (nan, infinite) = (count(|x| x.is_nan()), count(|x| x.is_infinite()));
    Error::NotANumber { position, nan, infinite, n_vocab: logits.len() }
}

/// The negative log-likelihood of some tokens, in nats.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Nll {
    /// Sum over the tokens.
    pub sum: f64,
    /// Sum of the squares.
    pub sum_sq: f64,
    /// Tokens.
    pub n: usize,
}

impl Nll {
    /// Adds one token's log-probability.
    pub fn add(&mut self, log_prob: f32) {
        let nll = -log_prob as f64;
        self.sum += nll;
        self.sum_sq += nll * nll;
        self.n += 1;
    }

    /// Mean over the tokens.
    pub fn mean(&self) -> f64 {
        self.sum / self.n as f64
    }

    /// `exp(mean)`.
    pub fn perplexity(&self) -> f64 {
        self.mean().exp()
    }

    /// Standard error of the mean; that of the perplexity is this times the perplexity.
    pub fn std_error(&self) -> f64 {
        let n = self.n as f64;
        let variance = (self.sum_sq / n - self.mean().powi(2)).max(0.0);
        (variance / (n - 1.0).max(1.0)).sqrt()
    }
}

/// The likelihood of `ids[from + 1..]` given what is before each of them.
pub fn nll(
    context: &mut Context,
    seq: &mut Sequence,
    ids: &[u32],
    from: usize,
    control: &mut Control<'_>,
) -> Result<Nll> {
    let mut nll = Nll::default();
    log_probs(context, seq, ids, from, control, &mut |i, row| {
        if let Some(next) = ids.get(i + 1) {
            nll.add(row[*next as usize]);
        }
    })?;
    Ok(nll)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_softmax_sums_to_one_and_survives_large_logits() {
        let mut row = [1000.0, 1001.0, 999.0, -1e30];
        log_softmax(&mut row);
        let sum: f64 = row.iter().map(|x| (*x as f64).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6, "{row:?}");
        assert!((row[1] - row[0] - 1.0).abs() < 1e-6);
    }

    #[test]
    fn logits_that_are_no_distribution_are_counted_with_their_position() {
        let e = not_a_number(7, &[f32::NAN, 1.0, f32::INFINITY, f32::NAN]).to_string();
        assert!(e.contains("token 7") && e.contains("2 NaN") && e.contains("1 infinite") && e.contains("of 4"), "{e}");
        for mut row in [vec![f32::NAN, 0.0], vec![f32::INFINITY, 0.0], vec![f32::NEG_INFINITY; 2]] {
            log_softmax(&mut row);
            assert!(row.iter().any(|x| x.is_nan()));
        }
    }

    #[test]
    fn perplexity_of_a_uniform_guess_is_the_number_of_choices() {
        let mut nll = Nll::default();
        (0..10).for_each(|_| nll.add(-(50f32.ln())));
        assert!((nll.perplexity() - 50.0).abs() < 1e-3 && nll.std_error() < 1e-3);
    }
}
