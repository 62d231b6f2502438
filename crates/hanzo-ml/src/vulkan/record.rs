//! Recording a lowered Plan: launches with their addresses resolved, barriers only where the program has them, copies in
//! front and behind. A take is recorded once for an executable, cache and sizes of outputs, and submitted many times.

use super::cache::VulkanCache;
use super::commands::{Order, Recorder};
use super::error::unsupported;
use super::executable::VulkanExecutable;
use super::pipelines::ARGS;
use super::weights::VulkanWeights;
use crate::error::Result;
use crate::gpu::{Buffer, Launch, Ptr};
use crate::plan::Sizes;
use ash::vk;
use std::ops::Range;

/// Every bit set is a NaN as a float, and an index that is out of range as an integer.
const POISON: u32 = u32::MAX;

/// A recorded step, or part of one.
pub(super) struct Take {
    /// Does it run the body, and the head?
    pub body: bool,
    pub head: bool,
    /// Bytes of each output that it copies to the host.
    pub outputs: Vec<u64>,
    /// The launches it runs.
    pub launches: Range<usize>,
    /// Barriers in it, those at its ends included.
    pub barriers: usize,
    /// What each timestamp follows: a launch, or the start of a submission.
    pub stamps: Vec<Option<usize>>,
    /// One a submission.
    pub commands: Vec<vk::CommandBuffer>,
}

impl VulkanExecutable {
    /// Records a take. A command buffer that fails to record stays in the pool until the executable goes.
    pub(super) fn record(&self, body: bool, head: bool, sizes: &Sizes, cache: &VulkanCache) -> Result<Take> {
        let split = self.program.head;
        let end = if head { self.program.launches.len() } else { split };
        let launches = if body { 0 } else { split }..end;
        let outputs: Vec<u64> = self.outputs.iter().map(|p| self.live_bytes(p, sizes)).collect();
        let mut take = Take {
            body,
            head,
            outputs,
            launches: launches.clone(),
            barriers: 0,
            stamps: Vec::new(),
            commands: Vec::new(),
        };
        let mut next = launches.start;
        loop {
            let to = self.submission_end(next, end);
            let mut r = self.pool.record()?;
            if next == launches.start {
                self.front(&mut r, &mut take);
            } else {
                r.barrier(Order::Kernels);
                take.barriers += 1;
            }
            self.stamp(&mut r, &mut take, None);
            for i in next..to {
                if self.program.barriers[i] && i != next {
                    r.barrier(Order::Kernels);
                    take.barriers += 1;
                }
                let launch = &self.program.launches[i];
                let mut args = [0; ARGS];
                let args = &mut args[..launch.args.len()];
                self.resolve(launch, cache, args)?;
                r.dispatch(self.pipelines[i], args, launch.groups);
                self.stamp(&mut r, &mut take, Some(i));
            }
            if to == end {
                self.back(&mut r, &mut take);
            }
            take.commands.push(r.end()?);
            next = to;
            if next >= end {
                return Ok(take);
            }
        }
    }

    /// What comes before the first launch: all that ran before is done; poison, then what the host wrote, is in place.
    fn front(&self, r: &mut Recorder<'_>, take: &mut Take) {
        r.barrier(Order::All);
        take.barriers += 1;
        if let Some(s) = &self.stamps {
            s.reset(r, 0, s.len());
        }
        let mut copied = false;
        if take.body && self.poison {
            r.fill(&self.arena, 0..self.arena.bytes(), POISON);
            r.barrier(Order::All);
            copied = true;
        }
        let rows = self.rows.as_ref().filter(|_| take.body);
        for w in std::iter::once(&self.step).chain(rows) {
            if let Some(local) = &w.local {
                r.copy(&w.host, 0, local, 0, w.host.bytes());
                copied = true;
            }
        }
        if take.body {
            for p in &self.inputs {
                r.copy(&self.input_memory, p.host, &self.arena, p.arena, p.bytes);
                copied = true;
            }
        }
        if copied {
            r.barrier(Order::CopyKernels);
            take.barriers += 1;
        }
    }

    /// What comes behind the last launch: outputs go to the host.
    fn back(&self, r: &mut Recorder<'_>, take: &mut Take) {
        if take.outputs.iter().all(|n| *n == 0) {
            return;
        }
        r.barrier(Order::KernelsCopy);
        for (p, bytes) in self.outputs.iter().zip(&take.outputs) {
            r.copy(&self.arena, p.arena, &self.output_memory, p.host, *bytes);
        }
        r.barrier(Order::CopyHost);
        take.barriers += 2;
    }

    fn stamp(&self, r: &mut Recorder<'_>, take: &mut Take, launch: Option<usize>) {
        if let Some(s) = &self.stamps
            && take.stamps.len() < s.len()
        {
            s.stamp(r, take.stamps.len());
            take.stamps.push(launch);
        }
    }

    /// A launch's arguments with addresses in them.
    fn resolve(&self, launch: &Launch, cache: &VulkanCache, args: &mut [u8]) -> Result<()> {
        args.copy_from_slice(&launch.args);
        for (at, p) in &launch.relocations {
            let address = self.address(*p, cache).ok_or_else(|| {
                unsupported(format!(
                    "{} reads {:?}, which this executable or cache does not have",
                    launch.kernel, p.buffer
                ))
            })?;
            args[*at..at + 8].copy_from_slice(&address.to_le_bytes());
        }
        Ok(())
    }

    fn address(&self, p: Ptr, cache: &VulkanCache) -> Option<u64> {
        let weights = || self.weights.as_any().downcast_ref::<VulkanWeights>();
        let base = match p.buffer {
            Buffer::None => return Some(0),
            Buffer::Arena => self.arena.address() + self.shift,
            Buffer::Step => self.step.address(),
            Buffer::Rows => self.rows.as_ref()?.address(),
            Buffer::Weight(w) => weights()?.address(w)?,
            Buffer::Tables => weights()?.tables(),
            Buffer::Keys(group, layer) => cache.keys(group, layer)?,
            Buffer::Values(group, layer) => cache.values(group, layer)?,
            Buffer::State(state, layer) => cache.state(state, layer)?,
        };
        Some(base + p.offset)
    }
}
