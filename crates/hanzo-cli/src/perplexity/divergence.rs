//! How far one model's predictions are from another's, over the rows of a text.

use serde::Serialize;

use crate::measure::stats;

/// Differences so far: a base's rows against ours.
#[derive(Clone, Debug, Default)]
pub struct Divergence {
    /// Kullback-Leibler divergence of each position, in nats.
    kl: Vec<f64>,
    agree: usize,
    base_nll: f64,
    nll_difference: Vec<f64>,
    /// Sum of squared differences of the next token's probability.
    square: f64,
}

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    pub positions: usize,
    pub base_perplexity: f64,
    /// Difference of the mean log-likelihoods, ours worse if positive, and its standard error (paired).
    pub nll_difference: f64,
    pub nll_difference_error: f64,
    pub mean_kl: f64,
    pub mean_kl_error: f64,
    pub median_kl: f64,
    pub kl_99: f64,
    pub max_kl: f64,
    pub top1_agreement: f64,
    /// Root mean square of the difference of the next token's probability.
    pub rms_probability_difference: f64,
}

impl Divergence {
    /// Adds a position: the base's log-probabilities, ours, and the token that follows.
    ///
    /// `KL(base || ours) = sum of p * (ln p - ln q)`; the base is normalised again, since its file has rounded it.
    pub fn add(&mut self, base: &[f32], ours: &[f32], next: u32) {
        let sum: f64 = base.iter().map(|lp| f64::from(*lp).exp()).sum();
        let shift = sum.ln();
        let mut kl = 0.0;
        for (p, q) in base.iter().zip(ours) {
            let lp = f64::from(*p) - shift;
            let probability = lp.exp();
            if probability > 0.0 {
                kl += probability * (lp - f64::from(*q));
            }
        }
        // Rounding can leave a hair below zero.
        self.kl.push(if kl < 0.0 { 0.0 } else { kl });
        self.agree += usize::from(best(base) == best(ours));
        let (p, q) = (f64::from(base[next as usize]) - shift, f64::from(ours[next as usize]));
        self.base_nll -= p;
        self.nll_difference.push(p - q);
        self.square += (p.exp() - q.exp()).powi(2);
    }

    /// The sums as figures.
    pub fn summary(&self) -> Summary {
        let n = self.kl.len().max(1) as f64;
        let error = |samples: &[f64]| stats::std_dev(samples) / n.sqrt();
        let mut sorted = self.kl.clone();
        sorted.sort_by(f64::total_cmp);
        let at = |share: f64| sorted.get(((n - 1.0) * share).round() as usize).copied().unwrap_or(0.0);
        Summary {
            positions: self.kl.len(),
            base_perplexity: (self.base_nll / n).exp(),
            nll_difference: stats::mean(&self.nll_difference),
            nll_difference_error: error(&self.nll_difference),
            mean_kl: stats::mean(&self.kl),
            mean_kl_error: error(&self.kl),
            median_kl: stats::median(&self.kl),
            kl_99: at(0.99),
            max_kl: at(1.0),
            top1_agreement: self.agree as f64 / n,
            rms_probability_difference: (self.square / n).sqrt(),
        }
    }
}

/// The first of the largest.
fn best(row: &[f32]) -> usize {
    row.iter().enumerate().fold(0, |best, (i, lp)| if *lp > row[best] { i } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ln(p: &[f64]) -> Vec<f32> {
        p.iter().map(|p| p.ln() as f32).collect()
    }

    #[test]
    fn a_model_does_not_diverge_from_itself() {
        let mut d = Divergence::default();
        let row = ln(&[0.5, 0.25, 0.25]);
        (0..3).for_each(|i| d.add(&row, &row, i));
        let s = d.summary();
        assert!(s.mean_kl < 1e-7 && s.nll_difference.abs() < 1e-7 && s.top1_agreement == 1.0, "{s:?}");
        assert!((s.base_perplexity - (32f64).powf(1.0 / 3.0)).abs() < 1e-5);
    }

    #[test]
    fn known_distributions_give_the_known_divergence() {
        let mut d = Divergence::default();
        d.add(&ln(&[0.5, 0.5]), &ln(&[0.25, 0.75]), 0);
        let s = d.summary();
        let expected = 0.5 * (2f64).ln() + 0.5 * (2.0f64 / 3.0).ln();
        assert!((s.mean_kl - expected).abs() < 1e-6 && s.max_kl == s.mean_kl, "{s:?}");
        assert!((s.nll_difference - (2f64).ln()).abs() < 1e-6);
        assert!((s.rms_probability_difference - 0.25).abs() < 1e-6);
        assert_eq!(s.top1_agreement, 0.0);
    }
}
