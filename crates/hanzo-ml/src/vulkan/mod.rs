//! The Vulkan backend: a lowered Plan as pre-recorded command buffers.
//!
//! Kernels are `hanzo-kernels`', launches and barriers come from `gpu`; here is what is Vulkan's own: devices, memory,
//! uploads, pipelines, recording and submission. Nothing is linked: without a Vulkan loader only opening a device fails.

// Parts of the device layer that only the executable uses; it lands next.
#![allow(dead_code)]

mod commands;
mod device;
mod error;
mod instance;
mod memory;
mod physical;
mod pipelines;
pub mod raw;

pub use device::{Device, VulkanOptions};
pub use instance::Instance;
pub use physical::{Component, DeviceInfo, DeviceKind, MatrixShape, devices};

#[cfg(test)]
mod tests;
