//! The CPU backend.

mod backend;
pub mod contract;
mod exec;
pub(crate) mod formats;
pub mod isa;
pub mod memory;
pub mod ops;
pub mod pool;

pub use backend::{CpuBackend, CpuOptions};
