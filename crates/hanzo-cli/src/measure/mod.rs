//! Measuring on a machine that others use too: statistics, and how much of the processor was not ours.
//!
//! What is measured, and how it is reported, stay with `bench` and `ab`.

pub mod contention;
pub mod stats;
pub mod steps;
