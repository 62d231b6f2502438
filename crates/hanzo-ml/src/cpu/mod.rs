//! The CPU backend.
pub mod ops;
