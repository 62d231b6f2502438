//! Recording: command pools, barriers, copies, dispatches, and small jobs that run once (page copies, readback).

use super::device::Device;
use super::error::failed;
use super::memory::{Buffer, Use};
use super::pipelines::Pipelines;
use crate::error::Result;
use ash::vk;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Jobs that may be in flight before the oldest is waited for.
const RING: usize = 8;

/// What a barrier orders.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// Kernels before kernels.
    Kernels,
    /// Everything before everything, on the device.
    All,
    /// Copies before kernels.
    CopyKernels,
    /// Kernels before copies.
    KernelsCopy,
    /// Copies before the host's reads.
    CopyHost,
}

/// A command buffer being recorded.
pub(super) struct Recorder<'d> {
    raw: &'d ash::Device,
    pipelines: &'d Pipelines,
    pub cmd: vk::CommandBuffer,
    bound: vk::Pipeline,
}

impl<'d> Recorder<'d> {
    /// Begins recording. `once`: it will be submitted once only.
    pub fn begin(device: &'d Device, cmd: vk::CommandBuffer, once: bool) -> Result<Recorder<'d>> {
        let (raw, pipelines) = (&device.raw, &device.pipelines);
        let mut info = vk::CommandBufferBeginInfo::default();
        if once {
            info = info.flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
        }
        // SAFETY: the command buffer is not in flight (callers wait) and its pool allows resets.
        unsafe { raw.begin_command_buffer(cmd, &info) }.map_err(failed("record commands"))?;
        Ok(Recorder { raw, pipelines, cmd, bound: vk::Pipeline::null() })
    }

    /// Ends recording.
    pub fn end(self) -> Result<vk::CommandBuffer> {
        // SAFETY: recording was begun.
        unsafe { self.raw.end_command_buffer(self.cmd) }.map_err(failed("record commands"))?;
        Ok(self.cmd)
    }

    /// A global memory barrier.
    pub fn barrier(&mut self, order: Order) {
        use vk::{AccessFlags2 as A, PipelineStageFlags2 as S};
        let kernels = (S::COMPUTE_SHADER, A::SHADER_STORAGE_READ | A::SHADER_STORAGE_WRITE);
        let copies = (S::ALL_TRANSFER, A::TRANSFER_READ | A::TRANSFER_WRITE);
        let all = (S::ALL_COMMANDS, A::MEMORY_READ | A::MEMORY_WRITE);
        let ((s0, a0), (s1, a1)) = match order {
            Order::Kernels => (kernels, kernels),
            Order::All => (all, all),
            Order::CopyKernels => (copies, kernels),
            Order::KernelsCopy => (kernels, copies),
            Order::CopyHost => (copies, (S::HOST, A::HOST_READ)),
        };
        // Only writes are made available.
        let writes = A::SHADER_STORAGE_WRITE | A::TRANSFER_WRITE | A::MEMORY_WRITE;
        let barrier = [vk::MemoryBarrier2::default()
            .src_stage_mask(s0)
            .src_access_mask(a0 & writes)
            .dst_stage_mask(s1)
            .dst_access_mask(a1)];
        let info = vk::DependencyInfo::default().memory_barriers(&barrier);
        // SAFETY: recording; the array outlives the call.
        unsafe { self.raw.cmd_pipeline_barrier2(self.cmd, &info) };
    }

    /// Dispatches a pipeline with its arguments (at most 128 bytes).
    pub fn dispatch(&mut self, pipeline: vk::Pipeline, args: &[u8], groups: [u32; 3]) {
        // SAFETY: recording; the layout has one push constant range of 128 bytes, and pipelines are made with it.
        unsafe {
            if self.bound != pipeline {
                self.raw.cmd_bind_pipeline(self.cmd, vk::PipelineBindPoint::COMPUTE, pipeline);
                self.bound = pipeline;
                self.pipelines.launches(pipeline);
            }
            if !args.is_empty() {
                self.raw.cmd_push_constants(self.cmd, self.pipelines.layout(), vk::ShaderStageFlags::COMPUTE, 0, args);
            }
            self.raw.cmd_dispatch(self.cmd, groups[0], groups[1], groups[2]);
        }
    }

    /// Copies `bytes` from one buffer to another.
    pub fn copy(&mut self, from: &Buffer, at: u64, to: &Buffer, to_at: u64, bytes: u64) {
        debug_assert!(at + bytes <= from.bytes() && to_at + bytes <= to.bytes());
        if bytes == 0 {
            return;
        }
        let region = [vk::BufferCopy { src_offset: from.offset() + at, dst_offset: to.offset() + to_at, size: bytes }];
        // SAFETY: recording; the ranges lie in their buffers.
        unsafe { self.raw.cmd_copy_buffer(self.cmd, from.handle(), to.handle(), &region) };
    }

    /// Fills a range (multiples of 4) with a word.
    pub fn fill(&mut self, buffer: &Buffer, range: Range<u64>, word: u32) {
        debug_assert!(range.start % 4 == 0 && range.end <= buffer.bytes().next_multiple_of(4));
        let bytes = (range.end - range.start).next_multiple_of(4);
        if bytes == 0 {
            return;
        }
        // SAFETY: recording; buffers are padded to 256 bytes.
        unsafe { self.raw.cmd_fill_buffer(self.cmd, buffer.handle(), buffer.offset() + range.start, bytes, word) };
    }

    /// Writes a timestamp once all kernels before it are done.
    pub fn timestamp(&mut self, pool: vk::QueryPool, index: u32) {
        // SAFETY: recording; the pool has that query, reset before.
        unsafe { self.raw.cmd_write_timestamp2(self.cmd, vk::PipelineStageFlags2::ALL_COMMANDS, pool, index) };
    }

    /// Resets queries.
    pub fn reset_queries(&mut self, pool: vk::QueryPool, queries: Range<u32>) {
        // SAFETY: recording; the pool has those queries.
        unsafe { self.raw.cmd_reset_query_pool(self.cmd, pool, queries.start, queries.end - queries.start) };
    }
}

/// A command pool of one thread, with its command buffers.
pub(super) struct Pool {
    device: Arc<Device>,
    raw: vk::CommandPool,
}

impl Pool {
    pub fn new(device: &Arc<Device>, family: u32) -> Result<Pool> {
        Ok(Pool { device: Arc::clone(device), raw: new_pool(&device.raw, family)? })
    }

    /// A new command buffer, which may be recorded again.
    pub fn command(&self) -> Result<vk::CommandBuffer> {
        Ok(new_commands(&self.device.raw, self.raw, 1)?[0])
    }

    /// Begins to record a new command buffer that will be submitted many times.
    pub fn record(&self) -> Result<Recorder<'_>> {
        Recorder::begin(&self.device, self.command()?, false)
    }

    /// Frees command buffers that are not in flight.
    pub fn free(&self, commands: &[vk::CommandBuffer]) {
        if !commands.is_empty() {
            // SAFETY: from this pool, not in flight (callers wait).
            unsafe { self.device.raw.free_command_buffers(self.raw, commands) };
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: its owner waited for what it submitted.
        unsafe { self.device.raw.destroy_command_pool(self.raw, None) };
    }
}

fn new_pool(raw: &ash::Device, family: u32) -> Result<vk::CommandPool> {
    let info = vk::CommandPoolCreateInfo::default()
        .queue_family_index(family)
        .flags(vk::CommandPoolCreateFlags::RESET_COMMAND_BUFFER);
    // SAFETY: a plain create.
    unsafe { raw.create_command_pool(&info, None) }.map_err(failed("create a command pool"))
}

fn new_commands(raw: &ash::Device, pool: vk::CommandPool, n: u32) -> Result<Vec<vk::CommandBuffer>> {
    let info = vk::CommandBufferAllocateInfo::default()
        .command_pool(pool)
        .level(vk::CommandBufferLevel::PRIMARY)
        .command_buffer_count(n);
    // SAFETY: the pool is used by one thread at a time.
    unsafe { raw.allocate_command_buffers(&info) }.map_err(failed("create command buffers"))
}

/// Command buffers for small jobs, used in turn.
pub(super) struct OneShots(Mutex<Ring>);

struct Ring {
    pool: vk::CommandPool,
    commands: Vec<vk::CommandBuffer>,
    /// Timeline value of each one's last use.
    values: [u64; RING],
    next: usize,
}

impl OneShots {
    pub fn new(raw: &ash::Device, family: u32) -> Result<OneShots> {
        let pool = new_pool(raw, family)?;
        // SAFETY: made above, and used by nothing.
        let commands =
            new_commands(raw, pool, RING as u32).inspect_err(|_| unsafe { raw.destroy_command_pool(pool, None) })?;
        Ok(OneShots(Mutex::new(Ring { pool, commands, values: [0; RING], next: 0 })))
    }

    /// Called once, with the device idle.
    pub fn destroy(&self, raw: &ash::Device) {
        let ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: by contract.
        unsafe { raw.destroy_command_pool(ring.pool, None) };
    }
}

impl Device {
    /// Records and submits a small job on the compute queue: after all that was submitted before it, before all that will
    /// be. Does not wait; gives the timeline value to wait for.
    pub(super) fn once(&self, record: impl FnOnce(&mut Recorder<'_>)) -> Result<u64> {
        let mut ring = self.one_shots.0.lock().unwrap_or_else(PoisonError::into_inner);
        let i = ring.next;
        ring.next = (i + 1) % RING;
        self.wait(self.compute(), ring.values[i])?;
        let mut r = Recorder::begin(self, ring.commands[i], true)?;
        r.barrier(Order::All);
        record(&mut r);
        r.barrier(Order::All);
        r.barrier(Order::CopyHost);
        let cmd = r.end()?;
        ring.values[i] = self.submit(self.compute(), &[cmd], None)?;
        Ok(ring.values[i])
    }

    /// As [`Device::once`], and waits.
    pub(super) fn once_and_wait(&self, record: impl FnOnce(&mut Recorder<'_>)) -> Result<()> {
        let value = self.once(record)?;
        self.wait(self.compute(), value)?;
        self.validated()
    }

    /// Reads ranges of device memory to the host, one after another.
    pub(super) fn download(self: &Arc<Device>, from: &Buffer, ranges: &[Range<u64>]) -> Result<Vec<u8>> {
        let total: u64 = ranges.iter().map(|r| r.end - r.start).sum();
        let host = Buffer::new(self, Use::Readback, total, "a readback")?;
        self.once_and_wait(|r| {
            let mut at = 0;
            for range in ranges {
                r.copy(from, range.start, &host, at, range.end - range.start);
                at += range.end - range.start;
            }
        })?;
        host.refresh()?;
        Ok(host.mapped().map(<[u8]>::to_vec).unwrap_or_default())
    }

    /// Writes bytes to ranges of device memory, one after another.
    pub(super) fn write(self: &Arc<Device>, to: &Buffer, ranges: &[Range<u64>], bytes: &[u8]) -> Result<()> {
        let mut host = Buffer::new(self, Use::Upload, bytes.len() as u64, "an upload")?;
        if let Some(m) = host.mapped_mut() {
            m.copy_from_slice(bytes);
        }
        self.once_and_wait(|r| {
            let mut at = 0;
            for range in ranges {
                r.copy(&host, at, to, range.start, range.end - range.start);
                at += range.end - range.start;
            }
        })
    }
}
