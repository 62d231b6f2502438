//! The k largest of a row, without sorting the row.

use std::cmp::Ordering;

/// A token and its logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub logit: f32,
    pub id: u32,
}

impl Candidate {
    /// Larger logits first, then lower ids. No candidate is NaN; the two zeros are equal.
    pub(super) fn order(&self, other: &Candidate) -> Ordering {
        (other.logit + 0.0).total_cmp(&(self.logit + 0.0)).then(self.id.cmp(&other.id))
    }
}

/// Sorts: larger logits first, then lower ids.
pub(super) fn sort(candidates: &mut [Candidate]) {
    candidates.sort_unstable_by(Candidate::order);
}

/// Puts the `k` largest of `logits` into `candidates`, sorted; NaN and -inf are left out, so they may be fewer.
///
/// One pass with a growing threshold: a buffer of 2 k fills with whatever exceeds the k-th largest so far, and is cut
/// back to k when it is full. Most logits cost one comparison.
pub(super) fn largest(logits: &[f32], k: usize, candidates: &mut Vec<Candidate>) {
    candidates.clear();
    candidates.reserve(2 * k);
    let mut threshold = f32::NEG_INFINITY;
    for (id, &logit) in logits.iter().enumerate() {
        if logit > threshold {
            candidates.push(Candidate { logit, id: id as u32 });
            if candidates.len() == 2 * k {
                let (_, kth, _) = candidates.select_nth_unstable_by(k - 1, Candidate::order);
                threshold = kth.logit; // later equals have higher ids: they lose the tie anyway
                candidates.truncate(k);
            }
        }
    }
    sort(candidates);
    candidates.truncate(k);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::Rng;

    #[test]
    fn the_selection_equals_a_full_sort() {
        let mut rng = Rng::new(5);
        let mut candidates = Vec::new();
        for round in 0..500 {
            let logits: Vec<f32> = (0..rng.next_u64() % 300)
                .map(|_| match rng.next_u64() % 20 {
                    0 => f32::NAN,
                    1 => f32::NEG_INFINITY,
                    2 => -0.0,
                    n => (n as f32 - 9.0).floor(),
                })
                .collect();
            let k = 1 + round % 40;
            largest(&logits, k, &mut candidates);
            let all = logits.iter().enumerate().map(|(id, &logit)| Candidate { logit, id: id as u32 });
            let mut sorted: Vec<_> = all.filter(|c| c.logit > f32::NEG_INFINITY).collect();
            sort(&mut sorted);
            sorted.truncate(k);
            assert_eq!(candidates, sorted);
        }
    }
}
