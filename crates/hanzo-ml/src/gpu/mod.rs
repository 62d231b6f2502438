//! What all GPU backends share: a Plan lowered to a list of kernel launches, the barriers between them, and the step buffer.
//!
//! A [`Program`] is data: which kernel runs when, on which bytes. It is made without a device ([`lower::program`]) and run
//! by one (`vulkan/`). No device handle and no kernel text may enter here.

mod barriers;
mod features;
mod launch;
pub mod lower;
mod step;

pub use barriers::{barriers, verify};
pub use features::{Features, Mask, MatrixUnit, MatrixUnits};
pub use launch::{Buffer, Launch, Program, Ptr, Touch};
pub use step::{GroupLayout, StepLayout, StepWriter};
