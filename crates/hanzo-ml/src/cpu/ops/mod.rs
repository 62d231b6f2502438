//! The CPU's non-contraction ops: pure functions over views and slices.
//!
//! An op knows nothing of threads, plans or models: the executor splits rows or heads over threads and calls the op
//! on a range. No op allocates; scratch is the caller's. Every op takes the [`IsaLevel`] it runs at. Shapes that
//! disagree panic: plan compilation has checked them, and a wrong shape must never reach memory. Each module states
//! formulas, bytes, FLOPs and the derived bound that its tests hold it to, against an f64 reference, on every ISA.

pub mod attention;
pub mod attention_exact;
mod attention_tile;
pub mod elementwise;
pub mod gated_delta;
pub mod glu;
pub mod kv;
mod math;
pub mod moe;
pub mod norm;
pub mod rope;
pub mod rows;
pub mod short_conv;
mod simd;
mod view;

pub use super::isa::IsaLevel;
pub use view::{Mat, MatMut};
