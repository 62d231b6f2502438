//! Tiles for devices with and without int8 dot products: a gate meets one of the two.

use hanzo_ml::backend::{Backend, Precision};
use hanzo_ml::gpu::Mask;
use hanzo_ml::levers::LeverSet;
use hanzo_ml::oracle::case::{Case, Reference, Rounding, RunOptions};
use hanzo_ml::oracle::oracles::{Routing, linear_case, moe_case};
use hanzo_ml::oracle::random::{Draw, Rng, weights};
use hanzo_ml::vulkan::{VulkanBackend, VulkanOptions};
use std::collections::BTreeSet;

/// More than mat-vecs take.
const TOKENS: usize = 37;

/// Every block format's linear and experts against their oracles on a device with int8 dot products, or without, under some levers; what it launched.
pub fn with(int_dot: bool, levers: LeverSet) -> BTreeSet<String> {
    let mask = Mask::parse(if int_dot { "matrix" } else { "matrix,dot" }).expect("a mask");
    let options = VulkanOptions { mask, int_dot: Some(int_dot), ..VulkanOptions::default() };
    let b = VulkanBackend::open(0, &options).expect("a backend");
    for (format, _) in hanzo_kernels::formats().filter(|f| f.0.is_block()) {
        let rng = &mut Rng::named(4, format.name());
        let cols = format.block_len().max(64);
        let w = weights(format, 45, cols, Draw::Usual, rng);
        let one = linear_case("linear", format, (45, cols, TOKENS), w, (1.0, true), rng);
        let moe = moe_case(&[format], (35, cols, TOKENS), Routing::Random, false, rng);
        for case in [one, moe].map(|case| Case { precision: Precision::Int8, ..case }) {
            let rounding = Rounding::of(std::iter::once(&b as &dyn Backend), &case);
            let reference = Reference::with_rounding(&case, rounding).expect("a reference");
            let run = RunOptions { levers, deterministic: false };
            let found = reference.check(&case, &b, run).outputs;
            let stopped = found.failure.is_some() || found.unsupported.is_some();
            assert!(found.cases > 0 && found.nbad == 0 && !stopped, "{} {format}: {found:?}", case.about);
        }
    }
    b.launched()
}
