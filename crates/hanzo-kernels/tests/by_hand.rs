//! Kernels that no other test of this crate runs on the host harness: what uploads, samplers, matrix units and measurements are made of. The same
//! cases run on Vulkan devices (`hanzo-ml/tests/vulkan_kernels.rs`).
#![cfg(unix)]

#[path = "by_hand/math.rs"]
mod math;
mod shared;

use hanzo_gguf::Format;
use hanzo_kernels::args::Args;
use hanzo_kernels::host::{HostKernel, Memory};
use hanzo_kernels::{Key, Target, text};
use shared::{Device, formats, halves, memory, sampling};

/// The host harness at a wave.
struct Host {
    wave: u32,
    memory: Memory,
}

impl Device for Host {
    fn wave(&self) -> u32 {
        self.wave
    }

    fn words(&mut self, x: &[u32]) -> u64 {
        self.memory.read(&x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    fn out(&mut self, n: usize) -> u64 {
        self.memory.output(4 * n)
    }

    fn words_at(&mut self, at: u64) -> Vec<u32> {
        self.memory.u32s(at)
    }

    fn launch<A: Args<u64>>(&mut self, format: Option<Format>, args: &A, set: &[(&str, u32)], groups: [u32; 3]) {
        let key = Key { op: A::OP, format };
        let text = text(key, Target::Host).unwrap_or_else(|| panic!("there is no {key}"));
        let set = [set, &[("WAVE", self.wave)]].concat();
        let mut places = Vec::new();
        let mut bytes = args.encode(&mut |at, p| places.push((at, p)));
        places.iter().for_each(|(at, p)| bytes[*at..at + 8].copy_from_slice(&u64::to_le_bytes(*p)));
        let kernel = HostKernel::compile(&text, &set).unwrap_or_else(|e| panic!("{key}: {e}"));
        kernel.run(&mut self.memory, &bytes, groups).unwrap_or_else(|e| panic!("{key} at waves of {}: {e}", self.wave));
    }
}

fn at_every_wave(check: impl Fn(&mut Host)) {
    for wave in [1, 8, 32, 64] {
        check(&mut Host { wave, memory: Memory::new() });
    }
}

/// With minima and without, groups of 32 and of 16, a codebook, and floats.
const SOME: [Format; 5] = [Format::Q4_K, Format::Q6_K, Format::Q8_0, Format::IQ3_XXS, Format::F16];

#[test]
fn a_samplers_kernels_give_the_largest_the_lowest_first_and_probabilities() {
    at_every_wave(|host| {
        sampling::argmax(host);
        sampling::top_k(host);
        sampling::softmax(host);
    });
}

#[test]
fn memory_is_read_whole_and_written_where_it_is_meant() {
    at_every_wave(|host| {
        memory::read_roof(host);
        memory::prefetch(host);
        memory::fill(host);
    });
}

#[test]
fn rows_become_the_halves_that_matrix_units_read() {
    at_every_wave(|host| {
        halves::q8_to_half(host);
        halves::rows_to_half(host);
    });
}

#[test]
fn formats_give_their_row_scales_and_embeddings() {
    at_every_wave(|host| formats::row_scale(host, &SOME));
    let host = &mut Host { wave: 32, memory: Memory::new() };
    formats::embed(host, &SOME);
    formats::dequant_test(host, &SOME);
    formats::unpack(host, &SOME);
}
