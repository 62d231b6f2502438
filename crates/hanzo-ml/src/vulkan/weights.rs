//! A Plan's weights on a device: matrices in device layout, vectors as f32, and the codebooks. Memory is taken at once;
//! the bytes stream in behind (`upload`) while pipelines are compiled.

use super::device::Device;
use super::error::NAME;
use super::memory::{Buffer, Use};
use super::upload::{self, Job, Rows};
use crate::backend::{WeightSource, Weights};
use crate::error::{Error, Result};
use crate::gpu::lower::{codebooks, is_matrix};
use crate::plan::{Plan, Weight, WeightId};
use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;

/// Weights on a Vulkan device.
pub struct VulkanWeights {
    memory: Arc<WeightMemory>,
    /// Vectors' elements on the host: small, and lowering reads some.
    floats: Vec<Option<Vec<f32>>>,
    uploader: Mutex<Option<JoinHandle<Result<()>>>>,
    uploaded: OnceLock<Result<()>>,
}

/// What the uploading thread shares.
pub(super) struct WeightMemory {
    pub device: Arc<Device>,
    pub buffers: Vec<Option<Buffer>>,
    pub tables: Buffer,
    total: u64,
    pub done: AtomicU64,
    pub stop: AtomicBool,
}

impl VulkanWeights {
    /// Takes memory for every weight that an op of the Plan reads and starts to upload them.
    pub(super) fn load(device: &Arc<Device>, plan: &Plan, source: &dyn WeightSource) -> Result<VulkanWeights> {
        let mut used = vec![false; plan.weights.len()];
        for op in &plan.ops {
            op.accesses(&mut |a| {
                if let crate::plan::Access::Weight(w) = a {
                    used[w.0 as usize] = true;
                }
            });
        }
        let scales = super::backend::features(device.info()).matrix.read_halves();
        let (mut buffers, mut floats, mut jobs) = (Vec::new(), Vec::new(), Vec::new());
        let mut total = 0;
        for (i, w) in plan.weights.iter().enumerate() {
            buffers.push(None);
            floats.push(None);
            if !used[i] {
                continue;
            }
            let rows = rows(w, source)?;
            let bytes;
            if is_matrix(plan, WeightId(i as u32)) {
                let layout = hanzo_kernels::layout(w.format, w.experts * w.rows, w.cols)
                    .ok_or_else(|| wrong(w, format!("there are no {} kernels for rows of {}", w.format, w.cols)))?;
                bytes = if scales { layout.bytes_with_scales } else { layout.bytes };
                jobs.push(Job::matrix(i, w, rows, layout));
            } else {
                let x = rows.to_floats(w);
                bytes = 4 * x.len() as u64;
                jobs.push(Job::vector(i, &x));
                floats[i] = Some(x);
            }
            total += bytes;
            buffers[i] = Some(Buffer::new(device, Use::Device, bytes, &format!("weight {}", w.tensor))?);
        }
        let mut tables = Vec::new();
        for (_, words) in codebooks() {
            tables.extend(words.iter().flat_map(|w| w.to_le_bytes()));
            tables.resize(tables.len().next_multiple_of(16), 0);
        }
        let bytes = tables.len() as u64;
        let table_buffer = Buffer::new(device, Use::Device, bytes, "codebooks")?;
        if bytes > 0 {
            device.write(&table_buffer, std::slice::from_ref(&(0..bytes)), &tables)?;
        }
        let memory = Arc::new(WeightMemory {
            device: Arc::clone(device),
            buffers,
            tables: table_buffer,
            total: total + bytes,
            done: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        });
        let shared = Arc::clone(&memory);
        let thread = std::thread::Builder::new().name("hanzo-upload".into());
        let uploader = thread
            .spawn(move || upload::run(&shared, &jobs))
            .map_err(|e| super::error::device(format!("cannot start a thread to upload weights: {e}")))?;
        Ok(VulkanWeights { memory, floats, uploader: Mutex::new(Some(uploader)), uploaded: OnceLock::new() })
    }

    /// Waits until every weight is on the device.
    pub fn ready(&self) -> Result<()> {
        if let Some(done) = self.uploaded.get() {
            return done.clone();
        }
        let mut thread = self.uploader.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take() {
            let panicked = || Err(super::error::device("the upload of weights panicked".into()));
            let _ = self.uploaded.set(thread.join().unwrap_or_else(|_| panicked()));
        }
        self.uploaded.get().cloned().unwrap_or(Ok(()))
    }

    /// Bytes on the device so far, and in all.
    pub fn progress(&self) -> (u64, u64) {
        (self.memory.done.load(Ordering::Relaxed), self.memory.total)
    }

    /// The elements of an f32 vector.
    pub(super) fn vector(&self, w: WeightId) -> Option<Vec<f32>> {
        self.floats.get(w.0 as usize)?.clone()
    }

    /// A weight's address.
    pub(super) fn address(&self, w: WeightId) -> Option<u64> {
        self.memory.buffers.get(w.0 as usize)?.as_ref().map(Buffer::address)
    }

    /// The codebooks' address.
    pub(super) fn tables(&self) -> u64 {
        self.memory.tables.address()
    }

    /// The device they are on.
    pub(super) fn device(&self) -> &Arc<Device> {
        &self.memory.device
    }

    /// A weight's memory, for tests that read it back.
    #[cfg(test)]
    pub(super) fn buffer(&self, w: usize) -> Option<&Buffer> {
        self.memory.buffers.get(w)?.as_ref()
    }
}

impl Drop for VulkanWeights {
    fn drop(&mut self) {
        self.memory.stop.store(true, Ordering::Relaxed);
        let _ = self.ready();
        // Executables wait for their steps; a failed one may have left work behind.
        let _ = self.memory.device.settle();
    }
}

impl Weights for VulkanWeights {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn extra_bytes(&self) -> usize {
        self.memory.total as usize
    }
}

fn wrong(w: &Weight, what: String) -> Error {
    Error::Weight { name: w.tensor.clone(), what }
}

/// The elements of a weight that is kept as plain f32, from the model file.
pub(super) fn vector(plan: &Plan, id: WeightId, source: &dyn WeightSource) -> Option<Vec<f32>> {
    let w = plan.weights.get(id.0 as usize).filter(|_| !is_matrix(plan, id))?;
    rows(w, source).ok().map(|rows| rows.to_floats(w))
}

/// The weight's rows in the model file, checked.
fn rows(w: &Weight, source: &dyn WeightSource) -> Result<Rows> {
    let bytes = source.tensor(w)?;
    let Some(row) = w.format.row_bytes(w.cols) else {
        return Err(wrong(w, format!("rows of {} are not whole {} blocks", w.cols, w.format)));
    };
    let need = w.experts.checked_mul(w.tensor_rows).and_then(|n| n.checked_mul(row));
    if need != Some(bytes.len()) || w.first_row + w.rows > w.tensor_rows {
        let what = format!("has {} bytes, expected {} x {} rows of {row}", bytes.len(), w.experts, w.tensor_rows);
        return Err(wrong(w, what));
    }
    if w.experts.checked_mul(w.rows).is_none_or(|n| n > u32::MAX as usize) {
        return Err(wrong(w, format!("{} x {} rows are more than {NAME} kernels count", w.experts, w.rows)));
    }
    Ok(Rows { bytes, row_bytes: row, rows: w.rows, tensor_rows: w.tensor_rows, first: w.first_row, experts: w.experts })
}
