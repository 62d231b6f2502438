//! The few statistics that reports need. Pure functions of samples.

/// Mean; 0 of nothing.
pub fn mean(samples: &[f64]) -> f64 {
    if samples.is_empty() { 0.0 } else { samples.iter().sum::<f64>() / samples.len() as f64 }
}

/// Standard deviation of the sample (n - 1); 0 of fewer than two.
pub fn std_dev(samples: &[f64]) -> f64 {
    if samples.len() < 2 {
        return 0.0;
    }
    let mean = mean(samples);
    (samples.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (samples.len() - 1) as f64).sqrt()
}

/// Middle of the sorted samples, or the mean of the two there; 0 of nothing.
pub fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    match n {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// Smallest and largest; zeros of nothing.
pub fn range(samples: &[f64]) -> (f64, f64) {
    if samples.is_empty() {
        return (0.0, 0.0);
    }
    samples.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(lo, hi), x| (lo.min(*x), hi.max(*x)))
}

/// An estimate with its 95% confidence interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    pub estimate: f64,
    pub low: f64,
    pub high: f64,
}

impl Interval {
    /// Is `x` inside?
    pub fn contains(&self, x: f64) -> bool {
        (self.low..=self.high).contains(&x)
    }
}

/// The geometric mean of ratios, with Student's interval over their logarithms: the blocks are the samples.
pub fn ratio_interval(ratios: &[f64]) -> Interval {
    let logs: Vec<f64> = ratios.iter().map(|r| r.ln()).collect();
    let centre = mean(&logs);
    let half = match logs.len() {
        0 | 1 => f64::INFINITY,
        n => student_975(n - 1) * std_dev(&logs) / (n as f64).sqrt(),
    };
    Interval { estimate: centre.exp(), low: (centre - half).exp(), high: (centre + half).exp() }
}

/// The 97.5% quantile of Student's t: a table for few degrees of freedom, the normal's expansion beyond (its first
/// correction term, (z^3 + z) / 4 df, is good to three digits there).
fn student_975(df: usize) -> f64 {
    const TABLE: [f64; 30] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
        2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
    ];
    const Z: f64 = 1.959_964;
    match df {
        0 => f64::INFINITY,
        df => TABLE.get(df - 1).copied().unwrap_or(Z + (Z.powi(3) + Z) / (4.0 * df as f64)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_samples_give_known_statistics() {
        let x = [2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0];
        assert_eq!(mean(&x), 5.0);
        assert!((std_dev(&x) - 2.138).abs() < 1e-3);
        assert_eq!((median(&x), median(&[3.0, 1.0, 2.0]), median(&[])), (4.5, 2.0, 0.0));
        assert_eq!((range(&x), std_dev(&[1.0])), ((2.0, 9.0), 0.0));
    }

    #[test]
    fn the_interval_of_seven_blocks_uses_six_degrees_of_freedom() {
        let ratios = [1.01, 1.02, 1.03, 1.02, 1.01, 1.02, 1.03];
        let i = ratio_interval(&ratios);
        let logs: Vec<f64> = ratios.iter().map(|r: &f64| r.ln()).collect();
        let half = 2.447 * std_dev(&logs) / 7f64.sqrt();
        assert!((i.high / i.estimate - half.exp()).abs() < 1e-12 && i.contains(1.02) && !i.contains(1.0));
        assert_eq!(ratio_interval(&[1.0]).high, f64::INFINITY);
        assert!((student_975(40) - 2.021).abs() < 2e-3 && (student_975(1000) - 1.962).abs() < 1e-3);
    }
}
