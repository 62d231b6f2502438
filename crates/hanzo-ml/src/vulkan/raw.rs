//! Kernels by hand, for tests of kernels and for measurements: SPIR-V in, buffers of bytes, one launch at a time.
//! No Plan and no engine may enter here.

use super::commands::Order;
use super::device::{Device, VulkanOptions};
use super::error::unsupported;
use super::memory::{Buffer, Use};
use super::pipelines::{ARGS, Source};
use crate::error::Result;
use ash::vk;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

/// A device to launch kernels on.
#[derive(Clone, Debug)]
pub struct Gpu {
    device: Arc<Device>,
}

/// A kernel with its constants set.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    pub(super) pipeline: vk::Pipeline,
}

/// Device memory; its address goes into arguments.
pub struct Memory {
    pub(super) buffer: Buffer,
}

impl Memory {
    /// Its device address, a multiple of 256.
    pub fn address(&self) -> u64 {
        self.buffer.address()
    }

    /// Its bytes.
    pub fn bytes(&self) -> u64 {
        self.buffer.bytes()
    }
}

/// One launch.
pub struct Dispatch<'a> {
    /// The kernel.
    pub kernel: Kernel,
    /// Its arguments in their declared layout, at most 128 bytes, addresses in place.
    pub args: &'a [u8],
    /// Workgroups.
    pub groups: [u32; 3],
}

impl Gpu {
    /// Opens device `index`.
    pub fn open(index: usize, options: &VulkanOptions) -> Result<Gpu> {
        Ok(Gpu { device: Device::open(index, options)? })
    }

    /// On an open device.
    pub fn on(device: &Arc<Device>) -> Gpu {
        Gpu { device: Arc::clone(device) }
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The subgroup size that kernels should ask for.
    pub fn wave(&self) -> u32 {
        self.device.info().wave
    }

    /// Names of the kernels launched on the device so far.
    pub fn launched(&self) -> BTreeSet<String> {
        self.device.pipelines.launched()
    }

    /// Makes a kernel; `constants` are specialization constants 0, 1, ...: THREADS, WAVE, then the kernel's own.
    pub fn kernel(&self, name: &str, spirv: &[u32], constants: &[u32]) -> Result<Kernel> {
        Ok(Kernel { pipeline: self.device.pipelines(&[Source { name, spirv, constants }])?[0] })
    }

    /// Device memory with these bytes.
    pub fn upload(&self, bytes: &[u8]) -> Result<Memory> {
        let m = self.zeros(bytes.len())?;
        let range = 0..bytes.len() as u64;
        self.device.write(&m.buffer, std::slice::from_ref(&range), bytes)?;
        Ok(m)
    }

    /// Device memory of zeros.
    pub fn zeros(&self, bytes: usize) -> Result<Memory> {
        self.filled(bytes, 0)
    }

    /// Device memory filled with a word.
    pub fn filled(&self, bytes: usize, word: u32) -> Result<Memory> {
        let buffer = Buffer::new(&self.device, Use::Device, bytes as u64, "a buffer")?;
        self.device.once_and_wait(|r| r.fill(&buffer, 0..bytes as u64, word))?;
        Ok(Memory { buffer })
    }

    /// The bytes of device memory.
    pub fn read(&self, m: &Memory) -> Result<Vec<u8>> {
        let range = 0..m.bytes();
        self.device.download(&m.buffer, std::slice::from_ref(&range))
    }

    /// Launches one kernel and waits.
    pub fn launch(&self, kernel: Kernel, args: &[u8], groups: [u32; 3]) -> Result<()> {
        self.launch_all(&[Dispatch { kernel, args, groups }], true).map(|_| ())
    }

    /// Launches kernels, with a barrier between neighbours or without, and waits. Gives the seconds from submission to the
    /// end as the host saw them.
    pub fn launch_all(&self, list: &[Dispatch<'_>], barriers: bool) -> Result<f64> {
        list.iter().try_for_each(check)?;
        let start = Instant::now();
        self.device.once_and_wait(|r| {
            for (i, d) in list.iter().enumerate() {
                if barriers && i > 0 {
                    r.barrier(Order::Kernels);
                }
                r.dispatch(d.kernel.pipeline, d.args, d.groups);
            }
        })?;
        Ok(start.elapsed().as_secs_f64())
    }
}

/// Refuses what no device takes.
pub(super) fn check(d: &Dispatch<'_>) -> Result<()> {
    let (args, groups) = (d.args.len(), d.groups);
    if args > ARGS || args % 4 != 0 {
        return Err(unsupported(format!("{args} bytes of arguments; at most {ARGS}, a multiple of 4")));
    }
    if groups.contains(&0) {
        return Err(unsupported(format!("a launch of {groups:?} workgroups")));
    }
    Ok(())
}
