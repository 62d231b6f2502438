//! The CPU backend.
pub mod contract;
pub(crate) mod formats;
pub mod isa;
pub mod ops;
