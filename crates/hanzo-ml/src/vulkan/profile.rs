//! Timestamps around launches. Only executables with profiling on have any: headline figures run without.

use super::commands::Recorder;
use super::device::Device;
use super::error::{failed, unsupported};
use crate::error::Result;
use ash::vk;
use std::sync::Arc;

/// A pool of timestamps.
pub(super) struct Stamps {
    device: Arc<Device>,
    pool: vk::QueryPool,
    /// Read back here.
    ticks: Vec<u64>,
}

impl Stamps {
    pub fn new(device: &Arc<Device>, queries: usize) -> Result<Stamps> {
        if !device.info().families.timestamps {
            return Err(unsupported(format!("{} has no timestamps on its compute queue", device.info().name)));
        }
        let info =
            vk::QueryPoolCreateInfo::default().query_type(vk::QueryType::TIMESTAMP).query_count(queries.max(1) as u32);
        // SAFETY: a plain create.
        let pool = unsafe { device.raw.create_query_pool(&info, None) }.map_err(failed("create timestamps"))?;
        Ok(Stamps { device: Arc::clone(device), pool, ticks: vec![0; queries] })
    }

    /// Queries in the pool.
    pub fn len(&self) -> usize {
        self.ticks.len()
    }

    /// Resets queries `from..to`.
    pub fn reset(&self, r: &mut Recorder<'_>, from: usize, to: usize) {
        r.reset_queries(self.pool, from as u32..to as u32);
    }

    /// Writes query `index` when everything before it is done.
    pub fn stamp(&self, r: &mut Recorder<'_>, index: usize) {
        r.timestamp(self.pool, index as u32);
    }

    /// The first `n` queries in seconds, from an unknown start; their work is done.
    pub fn read(&mut self, n: usize) -> Result<impl Fn(usize) -> f64 + '_> {
        let flags = vk::QueryResultFlags::TYPE_64 | vk::QueryResultFlags::WAIT;
        // SAFETY: as many results as queries are read.
        unsafe { self.device.raw.get_query_pool_results(self.pool, 0, &mut self.ticks[..n], flags) }
            .map_err(|r| self.device.error(r, "read timestamps"))?;
        let period = self.device.info().timestamp_ns as f64 * 1e-9;
        let first = self.ticks.first().copied().unwrap_or(0);
        Ok(move |i: usize| self.ticks[i].wrapping_sub(first) as f64 * period)
    }
}

impl Drop for Stamps {
    fn drop(&mut self) {
        // SAFETY: its owner waited for the steps that use it.
        unsafe { self.device.raw.destroy_query_pool(self.pool, None) };
    }
}
