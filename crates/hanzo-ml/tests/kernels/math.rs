//! The words and functions that kernels rely on: division, square roots, halves and bytes exactly, the others within 2 ulp. Results below
//! 2^-126 may be zero, as math.kc says, but for what works on bits.

use super::shared::{Device, math as cases};
use super::{Vulkan, device};
use hanzo_kernels::args::MathTest;
use std::cell::RefCell;

fn evaluate(device: &mut Vulkan, which: u32, x: &[u32], z: &[u32]) -> Vec<u32> {
    let (x_at, z_at, y) = (device.words(x), device.words(z), device.out(x.len()));
    let args = MathTest { x: x_at, z: z_at, y, count: x.len() as u32 };
    device.launch(None, &args, &[("WHICH", which)], [(x.len() as u32).div_ceil(64), 1, 1]);
    let got = device.words_at(y);
    device.forget();
    got
}

/// A few quotients.
pub fn quotients(device: &mut Vulkan) {
    let device = RefCell::new(device);
    let x: Vec<u32> = (1..200).map(|i| (i as f32 * 0.37).to_bits()).collect();
    let z: Vec<u32> = x.iter().rev().copied().collect();
    cases::quotients(&|which, x, z| evaluate(&mut device.borrow_mut(), which, x, z), &x, &z);
}

#[test]
fn functions_are_within_two_ulp_on_the_device() {
    let Some(device) = device() else { return };
    let device = RefCell::new(device);
    cases::functions(&|which, x, z| evaluate(&mut device.borrow_mut(), which, x, z), true);
}

#[test]
fn division_is_correctly_rounded_on_the_device() {
    let Some(device) = device() else { return };
    let device = RefCell::new(device);
    cases::division(&|which, x, z| evaluate(&mut device.borrow_mut(), which, x, z));
}

#[test]
fn square_roots_of_normal_numbers_are_correctly_rounded_on_the_device() {
    let Some(device) = device() else { return };
    let device = RefCell::new(device);
    cases::roots(&|which, x, z| evaluate(&mut device.borrow_mut(), which, x, z));
}

#[test]
fn halves_are_exact_on_the_device() {
    let Some(device) = device() else { return };
    let device = RefCell::new(device);
    cases::halves(&|which, x, z| evaluate(&mut device.borrow_mut(), which, x, z));
}

#[test]
fn integer_words_are_exact_on_the_device() {
    let Some(device) = device() else { return };
    let device = RefCell::new(device);
    cases::integers(&|which, x, z| evaluate(&mut device.borrow_mut(), which, x, z));
}

#[test]
fn rounding_to_integers_takes_ties_to_even_on_the_device() {
    let Some(device) = device() else { return };
    let device = RefCell::new(device);
    cases::rounding(&|which, x, z| evaluate(&mut device.borrow_mut(), which, x, z));
}
