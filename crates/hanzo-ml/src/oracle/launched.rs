//! Which kernels a Vulkan device must have launched, by a gate or by a test: all that it can run. No kernel is run here.

use hanzo_kernels::{Key, Target, kernels};
use std::collections::BTreeSet;

/// Ops whose kernels a gate need not launch: no Plan asks for them on some device. `tests/vulkan_kernels.rs` launches every one of them, for every
/// format, and fails if it leaves one out.
pub const BY_HAND: &[&str] = &[
    // Measures how fast memory is read, and keeps what comes next in a cache that lavapipe does not have.
    "read_roof",
    "prefetch",
    // What a sampler on the device is made of.
    "argmax",
    "top_k",
    "softmax",
    // What matrix units read.
    "row_scale",
    "q8_to_half",
    "rows_to_half",
    // Words, formats and layouts, for tests.
    "math_test",
    "dequant_test",
    "unpack",
    // For devices without int8 dot products, or with: a gate meets one of the two.
    "gemm_codes",
    "gemm_dot",
    "gemm_weight_stage",
];

/// The kernels of an op for Vulkan, one a format that it is built with.
pub fn kernels_of(op: &str) -> impl Iterator<Item = Key> {
    kernels(Target::Glsl).filter(move |key| key.op == op)
}

/// The kernels that a device `reaches` ([`crate::backend::Backend::reaches`]), has not launched, and no test launches by hand. Those that need matrix
/// units are for devices that have them: run on the H200 only.
pub fn unlaunched(launched: &BTreeSet<String>, reaches: &dyn Fn(Key) -> bool) -> Vec<Key> {
    let due = |key: &Key| !BY_HAND.contains(&key.op) && reaches(*key);
    kernels(Target::Glsl).filter(due).filter(|key| !launched.contains(&key.to_string())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hanzo_kernels::needs_matrix_units;

    #[test]
    fn a_kernel_that_nothing_launches_is_missed_and_one_launched_by_hand_is_not() {
        let none = BTreeSet::new();
        let missed = unlaunched(&none, &|key| !needs_matrix_units(key));
        assert!(
            missed.iter().any(|k| k.op == "matvec") && missed.iter().all(|k| k.op != "gemm_coop" && k.op != "argmax")
        );
        assert!(unlaunched(&none, &|_| true).iter().any(|k| k.op == "gemm_coop"));
        let all = kernels(Target::Glsl).map(|k| k.to_string()).collect();
        assert_eq!(unlaunched(&all, &|_| true), []);
        assert!(BY_HAND.iter().all(|op| kernels_of(op).next().is_some()), "an op of BY_HAND is gone");
    }
}
