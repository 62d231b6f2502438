//! Ops, Plans, levers, numeric oracles, and the backends that run them.
//!
//! An architecture describes its forward pass as a [`plan::Plan`]: a flat list of ops over typed values. The plain Plan
//! is the meaning; every fusion is a lever, a named rewrite of the Plan ([`levers`]). A backend compiles a Plan for a
//! bucket of sizes into an executable. Nothing here knows about prompts or text.
#![deny(missing_docs)]

pub mod backend;
pub mod batch;
pub mod cache;
pub mod devices;
pub mod error;
pub mod gpu;
pub mod levers;
pub mod oracle;
pub mod placement;
pub mod plan;
pub mod settings;

pub use error::Error;

pub mod cpu;
pub mod vulkan;
