//! A search for better constants: one axis after another, keeping the best so far, twice over.

use super::lab::{Figures, Lab};
use super::subject::Subject;

/// Rounds over all axes.
const ROUNDS: usize = 2;

/// What a search found.
pub struct Found {
    /// The subject's own constants.
    start: Figures,
    /// Everything else.
    others: Vec<Figures>,
    /// What was wrong, in words.
    pub failures: Vec<String>,
}

impl Found {
    /// The fastest by dependent launches, and last the start.
    pub fn best(&self, n: usize) -> Vec<Figures> {
        let mut all: Vec<&Figures> = self.others.iter().filter(|f| f.dependent() < self.start.dependent()).collect();
        all.sort_by(|a, b| a.dependent().total_cmp(&b.dependent()));
        all.truncate(n);
        all.into_iter().chain([&self.start]).cloned().collect()
    }
}

/// Searches from the subject's own constants with `set`.
///
/// # Errors
/// If the start cannot be measured. Constants that do not go together are skipped, wrong results are told.
pub fn search(lab: &Lab, subject: &dyn Subject, set: &[(String, u32)]) -> anyhow::Result<Found> {
    let start = lab.measure(subject, set)?;
    let mut best = (start.dependent(), set.to_vec());
    let mut tried = vec![start.constants.clone()];
    let mut found = Found { start, others: Vec::new(), failures: Vec::new() };
    for _ in 0..ROUNDS {
        let before = best.0;
        for axis in subject.axes() {
            for choice in axis {
                let mut with = best.1.clone();
                with.retain(|(name, _)| !choice.iter().any(|(n, _)| n == name));
                with.extend(choice.iter().map(|(name, value)| (name.to_string(), *value)));
                // What the caller set stays as it is.
                if set.iter().any(|s| !with.contains(s)) {
                    continue;
                }
                let constants = super::subject::Constants::of(subject.kernel(), &lab.gpu, &subject.fixed(), &with)?;
                if tried.contains(&constants) || subject.grid(&constants).is_err() {
                    continue;
                }
                tried.push(constants.clone());
                match lab.measure(subject, &with) {
                    Ok(figures) => {
                        if figures.dependent() < best.0 {
                            best = (figures.dependent(), with);
                        }
                        found.others.push(figures);
                    }
                    Err(e) => found.failures.push(format!("{} with {}: {e:#}", subject.kernel(), constants.tuning())),
                }
            }
        }
        if best.0 >= before {
            break;
        }
    }
    Ok(found)
}
