//! Fallbacks on device 0: with features masked the next row of the table runs, and meets its oracle like any other.

use super::tests::gpu;
use super::*;
use crate::backend::{Backend, Precision};
use crate::gpu::Mask;
use crate::gpu::lower::variants::{Ask, Input, Load, Task, constant, pick};
use crate::levers::LeverSet;
use crate::oracle::case::{Case, Reference, Rounding, RunOptions};
use crate::oracle::oracles::{Routing, linear_case, moe_case};
use crate::oracle::random::{Draw, Rng, weights};
use hanzo_gguf::Format;

const TOKENS: usize = 70;

fn cases(format: Format) -> [Case; 2] {
    let rng = &mut Rng::new(u64::from(format.id()) + 5);
    let w = weights(format, 45, 256, Draw::Usual, rng);
    let one = linear_case("linear", format, (45, 256, TOKENS), w, (1.0, true), rng);
    let moe = moe_case(&[format], (35, 256, TOKENS), Routing::Random, false, rng);
    [one, moe].map(|case| Case { precision: Precision::Int8, ..case })
}

#[test]
fn a_masked_device_runs_the_next_row_and_meets_its_oracle() {
    if gpu(VulkanOptions::default()).is_none() {
        return;
    }
    for (text, kernel, high) in [
        ("matrix", "gemm_dot", 64),
        ("matrix,threads=128", "gemm_dot", 32),
        ("matrix,threads=64", "gemm_dot", 16),
        ("matrix,dot,f16", "gemm_codes", 64),
        ("matrix,dot,threads=64", "gemm_codes", 16),
        ("matrix,shared=4096", "matvec", 1),
    ] {
        let mask = Mask::parse(text).expect("a mask");
        let options = VulkanOptions { validate: true, mask, int_dot: Some(true), ..Default::default() };
        let b = VulkanBackend::open(0, &options).expect("a backend");
        if b.features().wave > 32 {
            continue; // Then threads are whole waves, and other rows fit.
        }
        let load = Load { tokens: TOKENS, experts: None };
        let (task, input, format) = (Task::Linear, Input::Int8, Some(Format::Q4_K));
        let ask = Ask { task, input, load, rows: 45, format, halves: true, deterministic: false };
        let v = pick(&ask, b.features()).expect("a kernel");
        let bm = if kernel == "matvec" { 1 } else { constant(v, "BM") };
        assert_eq!((v.kernel, bm), (kernel, high), "{text}");
        // With minima and without, groups of 32 and of 16.
        for case in [Format::Q4_K, Format::Q6_K].iter().flat_map(|f| cases(*f)) {
            let reference = Reference::with_rounding(&case, Rounding::of(std::iter::once(&b as &dyn Backend), &case))
                .expect("a reference");
            let run = RunOptions { levers: LeverSet::default(), deterministic: false };
            let found = reference.check(&case, &b, run).outputs;
            assert!(
                found.nbad == 0 && found.failure.is_none() && found.unsupported.is_none(),
                "{text}: {} {}: {found:?}",
                case.about,
                case.format
            );
        }
    }
}
