//! Chains of launches, recorded once and run many times, timed by the device's own clock: for measurements of kernels.
//! No Plan and no engine may enter here.

use super::commands::{Order, Pool};
use super::device::Device;
use super::error::failed;
use super::raw::{Dispatch, Gpu, Memory, check};
use crate::error::Result;
use ash::vk;
use std::sync::Arc;
use std::time::Instant;

/// A recorded chain of launches.
pub struct Chain {
    cmd: vk::CommandBuffer,
    /// Holds the command buffer.
    _pool: Pool,
    /// Two timestamps, if the queue has a clock.
    queries: Option<Queries>,
    device: Arc<Device>,
}

struct Queries {
    raw: vk::QueryPool,
    device: Arc<Device>,
}

impl Drop for Queries {
    fn drop(&mut self) {
        // SAFETY: its chain waits for every submission before it returns.
        unsafe { self.device.raw.destroy_query_pool(self.raw, None) };
    }
}

/// How long a chain took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Took {
    /// Seconds from before the first launch to the end of the last, by the device's clock; none if it has none.
    pub device: Option<f64>,
    /// Seconds from submission to the end, as the host saw them.
    pub host: f64,
}

impl Took {
    /// By the device's clock if it has one.
    pub fn seconds(self) -> f64 {
        self.device.unwrap_or(self.host)
    }
}

impl Gpu {
    /// Fills memory with a word.
    pub fn fill(&self, m: &Memory, word: u32) -> Result<()> {
        self.device().once_and_wait(|r| r.fill(&m.buffer, 0..m.bytes(), word))
    }

    /// Records launches, with a barrier between neighbours or without. What they point to must outlive the chain's runs.
    pub fn record(&self, list: &[Dispatch<'_>], barriers: bool) -> Result<Chain> {
        list.iter().try_for_each(check)?;
        let device = self.device();
        let queries = device.info().families.timestamps.then(|| queries(device)).transpose()?;
        let pool = Pool::new(device, device.compute().family)?;
        let mut r = pool.record()?;
        if let Some(q) = &queries {
            r.reset_queries(q.raw, 0..2);
            r.timestamp(q.raw, 0);
        }
        for (i, d) in list.iter().enumerate() {
            if barriers && i > 0 {
                r.barrier(Order::Kernels);
            }
            r.dispatch(d.kernel.pipeline, d.args, d.groups);
        }
        if let Some(q) = &queries {
            r.timestamp(q.raw, 1);
        }
        r.barrier(Order::All);
        let cmd = r.end()?;
        Ok(Chain { cmd, _pool: pool, queries, device: Arc::clone(device) })
    }
}

impl Chain {
    /// Runs the chain and waits.
    pub fn run(&self) -> Result<Took> {
        let start = Instant::now();
        let value = self.device.submit(self.device.compute(), &[self.cmd], None)?;
        self.device.wait(self.device.compute(), value)?;
        let host = start.elapsed().as_secs_f64();
        let Some(q) = &self.queries else { return Ok(Took { device: None, host }) };
        let mut ticks = [0u64; 2];
        let flags = vk::QueryResultFlags::TYPE_64 | vk::QueryResultFlags::WAIT;
        // SAFETY: both queries were written by the submission that was waited for.
        unsafe { self.device.raw.get_query_pool_results(q.raw, 0, &mut ticks, flags) }
            .map_err(failed("read its clock"))?;
        let ns = ticks[1].wrapping_sub(ticks[0]) as f64 * f64::from(self.device.info().timestamp_ns);
        Ok(Took { device: Some(1e-9 * ns), host })
    }
}

fn queries(device: &Arc<Device>) -> Result<Queries> {
    let info = vk::QueryPoolCreateInfo::default().query_type(vk::QueryType::TIMESTAMP).query_count(2);
    // SAFETY: a plain create.
    let raw = unsafe { device.raw.create_query_pool(&info, None) }.map_err(failed("create a query pool"))?;
    Ok(Queries { raw, device: Arc::clone(device) })
}
