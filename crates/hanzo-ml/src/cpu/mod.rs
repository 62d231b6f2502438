//! The CPU backend.

mod backend;
pub mod contract;
mod exec;
pub(crate) mod formats;
mod huge;
pub mod isa;
pub mod memory;
pub mod ops;
pub mod pool;
pub mod roof;
#[cfg(target_arch = "x86_64")]
mod wide;

pub use backend::{CpuBackend, CpuOptions};
pub use huge::HugePages;
