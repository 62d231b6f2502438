//! One Plan over several devices: who runs what, the copies between them, and a backend that drives them.
//!
//! - [`assign`] decides where each op runs, from what the user asked for ([`Placement`]).
//! - [`mod@place`] rewrites the Plan: devices on values and weights, [`crate::plan::Op::Copy`] where a value crosses.
//! - [`cut`] parts it into one Plan a device and, within those, segments of consecutive ops.
//! - [`SplitBackend`] runs the segments in order on their backends; values cross through the host.
//! - [`report`] says where everything is, for people to read and for programs to check.
//!
//! No op is computed here, and nothing here knows what kind of device a backend drives.

pub mod assign;
mod cache;
pub mod cut;
mod executable;
pub mod place;
pub mod report;
mod split;

pub use assign::{HOST, Override, Placement};
pub use split::{Policy, SplitBackend};
