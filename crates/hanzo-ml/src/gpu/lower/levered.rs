//! Rows of the table of contraction kernels that a lever must choose: dead ends and what pays on some devices only.
//!
//! They stand before those of [`super::variants`] while their lever is on. No row that is on by default may enter here.

use super::variants::{Ask, Input, Task, Variant, fits, row};
use crate::gpu::launch::Features;
use crate::levers::LeverSet;

/// A row, and the levers of which one must be on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Levered {
    /// Ids of levers.
    pub levers: &'static [&'static str],
    /// The row.
    pub variant: Variant,
}

const fn with(levers: &'static [&'static str], variant: Variant) -> Levered {
    Levered { levers, variant }
}

const RAW: &[&str] = &["quantize_in_matvec", "norm_in_matvec"];

/// Every such row.
pub const LEVERED: &[Levered] = &[
    // Large workgroups: each makes the row's codes again.
    with(RAW, row(Task::Linear, Input::Raw, (1, 4096), "matvec_raw", &[("THREADS", 512), ("ROWS", 2)])),
    with(RAW, row(Task::Linear, Input::Raw, (1, 0), "matvec_raw", &[("THREADS", 512), ("ROWS", 1)])),
    with(RAW, row(Task::Glu, Input::Raw, (1, 8193), "matvec_raw", &[("THREADS", 512), ("ROWS", 2)])),
    with(RAW, row(Task::Glu, Input::Raw, (1, 0), "matvec_raw", &[("THREADS", 1024), ("ROWS", 1)])),
];

/// The first row whose lever is on that fits; never under `deterministic`.
pub fn pick(ask: &Ask, levers: LeverSet, features: &Features) -> Option<&'static Variant> {
    let on = |l: &&Levered| l.levers.iter().any(|id| levers.on(id));
    let tokens = ask.load.each(ask.task);
    let fits = |l: &&Levered| !ask.deterministic && fits(&l.variant, ask, tokens, features);
    LEVERED.iter().filter(on).find(fits).map(|l| &l.variant)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_levered_row_names_levers_that_are_off_by_default_and_constants_of_its_kernel() {
        for l in LEVERED {
            for id in l.levers {
                let at = crate::levers::find(id).expect("a lever");
                assert!(!crate::levers::LEVERS[at].default_on, "{id}");
            }
            let known = hanzo_kernels::constants(l.variant.kernel);
            assert!(l.variant.constants.iter().all(|c| known.iter().any(|k| k.0 == c.0)), "{l:?}");
        }
    }
}
