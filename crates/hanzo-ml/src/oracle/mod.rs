//! Numeric oracles: what every op means in f64, what an f32 computation of it may differ by, and the gate that holds
//! backends to it.
//!
//! - [`interp`] is the meaning: an interpreter of Plans, sequential, in f64. Its numbers ([`num`]) carry derived bounds.
//! - [`oracles`] make cases for every op and fusion: a small Plan, weights, steps. [`case`] compares a backend with the
//!   interpreter on them.
//! - [`gate`] runs all oracles under all lever sets; [`mutate`] plants faults and asks whether the gate notices;
//!   [`golden`] checks the decoders against recorded blocks.
//! - [`replay`] asks whether a compiled step depends on anything but the step's data.
//! - [`probe`] finds out what the bits of a format are for, so that nothing here asks which format it deals with.
//!
//! Nothing here may know how a backend works: it sees [`crate::backend`] and no more.

pub mod array;
pub mod case;
pub mod gate;
pub mod golden;
pub mod interp;
pub mod launched;
pub mod mutate;
pub mod num;
pub mod oracles;
pub mod pages;
pub mod probe;
pub mod random;
pub mod reference_backend;
pub mod replay;
pub mod weights;

#[cfg(test)]
mod tests;
