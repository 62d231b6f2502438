//! The Vulkan backend: a lowered Plan as pre-recorded command buffers.
//!
//! Kernels are `hanzo-kernels`', launches and barriers come from `gpu`; here is what is Vulkan's own: devices, memory,
//! uploads, pipelines, recording and submission. Nothing is linked: without a Vulkan loader only opening a device fails.

mod backend;
mod cache;
pub mod chain;
mod commands;
mod coop2;
mod device;
mod error;
mod executable;
mod instance;
mod memory;
mod physical;
mod pipelines;
mod profile;
pub mod raw;
mod record;
mod upload;
mod weights;

pub use backend::VulkanBackend;
pub use cache::VulkanCache;
pub use coop2::WorkgroupMatrices;
pub use device::{Device, VulkanOptions};
pub use executable::VulkanExecutable;
pub use instance::Instance;
pub use physical::{Component, DeviceInfo, DeviceKind, MatrixShape, devices};
pub use weights::VulkanWeights;

#[cfg(test)]
mod executable_tests;
#[cfg(test)]
mod masked_tests;
#[cfg(test)]
mod tests;
