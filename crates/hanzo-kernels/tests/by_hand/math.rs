//! The words and the functions of `prelude/math.kc` on the CPU, by the op `math_test`: exactly, or within 2 ulp, with and without a fused
//! multiply-add (Vulkan may split it). The host keeps subnormal numbers.

use super::shared::math as cases;
use hanzo_kernels::args::{Args, MathTest};
use hanzo_kernels::host::{HostKernel, Memory};
use hanzo_kernels::{Key, Target, text};

fn evaluate(which: u32, fused: bool, x: &[u32], z: &[u32]) -> Vec<u32> {
    let split = "\nFN f32 split_fma(f32 a, f32 b, f32 c) { volatile f32 p = a * b; return p + c; }\n#define fma_ split_fma\n\n// math\n";
    let mut text = text(Key { op: MathTest::<u64>::OP, format: None }, Target::Host).unwrap();
    if !fused {
        text = text.replacen("\n// math\n", split, 1);
    }
    let kernel = HostKernel::compile(&text, &[("WHICH", which)]).unwrap();
    let mut memory = Memory::new();
    let bytes = |v: &[u32]| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let (x_at, z_at) = (memory.read(&bytes(x)), memory.read(&bytes(z)));
    let args = MathTest { x: x_at, z: z_at, y: memory.output(4 * x.len()), count: x.len() as u32 };
    let mut places = Vec::new();
    let mut encoded = args.encode(&mut |at, p| places.push((at, p)));
    places.iter().for_each(|(at, p)| encoded[*at..at + 8].copy_from_slice(&u64::to_le_bytes(*p)));
    kernel.run(&mut memory, &encoded, [x.len().div_ceil(64) as u32, 1, 1]).unwrap();
    memory.u32s(args.y)
}

fn fused(which: u32, x: &[u32], z: &[u32]) -> Vec<u32> {
    evaluate(which, true, x, z)
}

#[test]
fn functions_are_within_two_ulp() {
    cases::functions(&fused, false);
}

#[test]
fn functions_are_within_two_ulp_where_a_fused_multiply_add_is_split() {
    cases::functions(&|which, x, z| evaluate(which, false, x, z), false);
}

#[test]
fn division_is_correctly_rounded() {
    cases::division(&fused);
    cases::quotients(&fused, &[1.0f32.to_bits(), 2f32.to_bits()], &[3f32.to_bits(), 7f32.to_bits()]);
}

#[test]
fn square_roots_are_correctly_rounded() {
    cases::roots(&fused);
}

#[test]
fn halves_are_exact() {
    cases::halves(&fused);
}

#[test]
fn integers_and_bytes_are_exact() {
    cases::integers(&fused);
}

#[test]
fn rounding_to_integers_takes_ties_to_even() {
    cases::rounding(&fused);
}
