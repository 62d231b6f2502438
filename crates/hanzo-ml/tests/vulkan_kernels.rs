//! The kernels that no Plan asks for on some device (`oracle::launched::BY_HAND`), launched by hand on device 0 for every format they are built with,
//! against what they should give: bit for bit, but for softmax. Whatever a Plan asks for is the gate's (`hanzo gate --every-kernel`).
//!
//! Needs a Vulkan driver and fails without one, unless `HANZO_NO_GPU_TESTS=1` says that there is none on purpose.

#[path = "kernels/contractions.rs"]
mod contractions;
#[path = "kernels/math.rs"]
mod math;
// The cases, which the host harness runs as well.
#[path = "../../hanzo-kernels/tests/shared/mod.rs"]
mod shared;

use hanzo_gguf::Format;
use hanzo_kernels::args::Args;
use hanzo_kernels::{Key, spirv};
use hanzo_ml::levers::{LeverSet, find};
use hanzo_ml::oracle::launched::{BY_HAND, kernels_of};
use hanzo_ml::vulkan::VulkanOptions;
use hanzo_ml::vulkan::raw::{Gpu, Memory};
use shared::{Device, formats, halves, memory, sampling};
use std::collections::BTreeSet;

/// What a check launched, by name.
type Launched = BTreeSet<String>;
/// Runs an op's kernels.
type Check = fn(&mut Vulkan) -> Launched;

/// Each op with its check: it launches every kernel of the op.
const CHECKS: [(&str, Check); 16] = [
    ("argmax", |d| here(d, sampling::argmax)),
    ("top_k", |d| here(d, sampling::top_k)),
    ("softmax", |d| here(d, sampling::softmax)),
    ("read_roof", |d| here(d, memory::read_roof)),
    ("fill", |d| here(d, memory::fill)),
    ("prefetch", |d| here(d, memory::prefetch)),
    ("q8_to_half", |d| here(d, halves::q8_to_half)),
    ("rows_to_half", |d| here(d, halves::rows_to_half)),
    ("row_scale", |d| here(d, |d| formats::row_scale(d, &every_format()))),
    ("dequant_test", |d| here(d, |d| formats::dequant_test(d, &every_format()))),
    ("embed", |d| here(d, |d| formats::embed(d, &every_format()))),
    ("unpack", |d| here(d, |d| formats::unpack(d, &every_format()))),
    ("math_test", |d| here(d, math::quotients)),
    ("gemm_dot", |_| contractions::with(true, LeverSet::default())),
    ("gemm_codes", |_| contractions::with(false, LeverSet::default())),
    ("gemm_weight_stage", |_| contractions::with(true, weight_stage())),
];

/// The default levers, and the one that chooses `gemm_weight_stage`.
fn weight_stage() -> LeverSet {
    LeverSet::default().set(find("gemm_weight_stage").expect("a lever"), true)
}

fn here(device: &mut Vulkan, check: fn(&mut Vulkan)) -> Launched {
    check(device);
    device.forget();
    device.gpu.launched()
}

fn every_format() -> Vec<Format> {
    hanzo_kernels::formats().map(|f| f.0).collect()
}

/// The checks of some ops; each must have launched every kernel of its op.
fn check(wanted: &[&str]) {
    let Some(mut device) = device() else { return };
    for (op, check) in CHECKS.iter().filter(|c| wanted.contains(&c.0)) {
        let launched = check(&mut device);
        let left: Vec<Key> = kernels_of(op).filter(|key| !launched.contains(&key.to_string())).collect();
        assert_eq!(left, [], "the check of {op} does not launch them");
    }
}

#[test]
fn every_kernel_launched_by_hand_has_its_check_here() {
    let checked: BTreeSet<&str> = CHECKS.iter().map(|c| c.0).collect();
    let left: Vec<&&str> = BY_HAND.iter().filter(|op| !checked.contains(**op)).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_samplers_kernels_give_the_largest_the_lowest_first_and_probabilities() {
    check(&["argmax", "top_k", "softmax"]);
}

#[test]
fn memory_is_read_whole_and_written_where_it_is_meant() {
    check(&["read_roof", "prefetch", "fill"]);
}

#[test]
fn rows_become_the_halves_that_matrix_units_read() {
    check(&["q8_to_half", "rows_to_half"]);
}

#[test]
fn every_format_gives_its_floats_its_rows_their_scales_and_its_bytes_back() {
    check(&["dequant_test", "embed", "row_scale", "unpack"]);
}

#[test]
fn tiles_meet_their_oracle_for_every_format_with_and_without_int8_dot_products() {
    check(&["gemm_dot", "gemm_codes", "gemm_weight_stage"]);
}

#[test]
fn quotients_of_a_few_numbers_are_exact() {
    check(&["math_test"]);
}

/// Device 0, and what was put into its memory.
struct Vulkan {
    gpu: Gpu,
    memories: Vec<Memory>,
}

/// Device 0, or nothing if the environment says that this machine has no driver.
fn device() -> Option<Vulkan> {
    let on_purpose = std::env::var("HANZO_NO_GPU_TESTS").is_ok_and(|v| v == "1");
    let open = || Gpu::open(0, &VulkanOptions::default()).expect("a Vulkan driver (or HANZO_NO_GPU_TESTS=1)");
    (!on_purpose).then(|| Vulkan { gpu: open(), memories: Vec::new() })
}

impl Vulkan {
    /// Gives back all memory.
    fn forget(&mut self) {
        self.memories.clear();
    }

    fn keep(&mut self, memory: hanzo_ml::error::Result<Memory>) -> u64 {
        self.memories.push(memory.expect("memory"));
        self.memories.last().map_or(0, Memory::address)
    }
}

impl Device for Vulkan {
    fn wave(&self) -> u32 {
        self.gpu.wave()
    }

    fn words(&mut self, x: &[u32]) -> u64 {
        self.keep(self.gpu.upload(&x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>()))
    }

    fn out(&mut self, n: usize) -> u64 {
        self.keep(self.gpu.filled(4 * n, !0))
    }

    fn words_at(&mut self, at: u64) -> Vec<u32> {
        let memory = self.memories.iter().find(|m| m.address() == at).expect("memory at this address");
        let bytes = self.gpu.read(memory).expect("a download");
        bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
    }

    fn launch<A: Args<u64>>(&mut self, format: Option<Format>, args: &A, set: &[(&str, u32)], groups: [u32; 3]) {
        let key = Key { op: A::OP, format };
        let value = |(name, default): (String, u32)| match set.iter().find(|s| s.0 == name) {
            Some(s) => s.1,
            None if name == "WAVE" => self.gpu.wave(),
            None => default,
        };
        let constants: Vec<u32> = hanzo_kernels::constants(A::OP).into_iter().map(value).collect();
        let code = spirv(key).unwrap_or_else(|| panic!("no SPIR-V of {key}"));
        let kernel = self.gpu.kernel(&key.to_string(), code, &constants).unwrap_or_else(|e| panic!("{key}: {e}"));
        let mut places = Vec::new();
        let mut bytes = args.encode(&mut |at, p| places.push((at, p)));
        places.iter().for_each(|(at, p)| bytes[*at..at + 8].copy_from_slice(&u64::to_le_bytes(*p)));
        self.gpu.launch(kernel, &bytes, groups).unwrap_or_else(|e| panic!("{key}: {e}"));
    }
}
