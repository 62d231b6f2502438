//! Weights from the mapped file to the device: workers fill staging slots, the copy queue (if there is one) moves them, and
//! the `pack` kernel permutes blocks into the device layout. Knows bytes and blocks, not Plans.

use super::backend::{constants, features};
use super::commands::{Order, Pool, Recorder};
use super::error::unsupported;
use super::memory::{Buffer, Use};
use super::physical::DeviceInfo;
use super::weights::WeightMemory;
use crate::error::{Error, Result};
use crate::gpu::lower::table_offset;
use crate::plan::Weight;
use ash::vk;
use hanzo_gguf::{Format, TensorBytes};
use hanzo_kernels::args::{self, Args};
use hanzo_kernels::{Key, Layout};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Bytes of a staging slot at most (few in tests, so that small weights come in many chunks).
const SLOT: u64 = if cfg!(test) { 16 << 10 } else { 16 << 20 };
/// Staging slots, and threads that fill them.
const SLOTS: usize = 4;
/// Chunks begin at multiples of this many blocks, so that no two share a word of a plane.
const CHUNK_BLOCKS: u64 = 64;
/// The kernel that permutes blocks.
const PACK: &str = "pack";
/// The kernel that works out rows' powers of two.
const ROW_SCALE: &str = "row_scale";
/// Threads of [`PACK`]: its default.
const PACK_THREADS: u32 = 256;
/// Threads of [`ROW_SCALE`]: its default.
const ROW_SCALE_THREADS: u32 = 128;

/// Rows of a tensor in the model file: `rows` of each expert's `tensor_rows`, from `first` on.
pub(super) struct Rows {
    pub bytes: TensorBytes,
    pub row_bytes: usize,
    pub rows: usize,
    pub tensor_rows: usize,
    pub first: usize,
    pub experts: usize,
}

impl Rows {
    /// Row `r`, counted over all experts.
    fn row(&self, r: usize) -> &[u8] {
        let at = (r / self.rows * self.tensor_rows + self.first + r % self.rows) * self.row_bytes;
        &self.bytes[at..at + self.row_bytes]
    }

    /// Are all rows one run of bytes?
    fn run(&self) -> Option<&[u8]> {
        let at = self.first * self.row_bytes;
        let whole = self.rows == self.tensor_rows || self.experts == 1;
        whole.then(|| &self.bytes[at..at + self.experts * self.rows * self.row_bytes])
    }

    /// Every element as f32.
    pub fn to_floats(&self, w: &Weight) -> Vec<f32> {
        let mut out = vec![0.0; self.experts * self.rows * w.cols];
        for (r, x) in out.chunks_exact_mut(w.cols.max(1)).enumerate() {
            hanzo_gguf::formats::to_float(w.format, self.row(r), x);
        }
        out
    }

    /// Writes blocks `from..to`, of `block` bytes each and `row_blocks` a row; a row that ends within a block is padded
    /// with zeros.
    fn blocks(&self, from: u64, to: u64, block: usize, row_blocks: u64, out: &mut [u8]) {
        if let Some(run) = self.run()
            && row_blocks * block as u64 == self.row_bytes as u64
        {
            out.copy_from_slice(&run[from as usize * block..to as usize * block]);
            return;
        }
        let (mut at, mut out) = (from, out);
        while at < to {
            let (r, first) = ((at / row_blocks) as usize, (at % row_blocks) as usize);
            let n = (row_blocks as usize - first).min((to - at) as usize);
            let (now, rest) = out.split_at_mut(n * block);
            let row = &self.row(r)[first * block..];
            let have = row.len().min(now.len());
            now[..have].copy_from_slice(&row[..have]);
            now[have..].fill(0);
            out = rest;
            at += n as u64;
        }
    }
}

/// A matrix on its way.
struct Matrix {
    rows: Rows,
    layout: Layout,
    format: Format,
    /// Bytes of a block in the model file.
    block: usize,
    /// Elements of a block; 32 for floats.
    block_len: usize,
    /// Bytes of a block in each plane.
    planes: Vec<u32>,
}

enum What {
    /// Blocks to pack.
    Matrix(Matrix),
    /// Bytes as they are.
    Vector(Vec<u8>),
}

/// One weight to upload.
pub(super) struct Job {
    weight: usize,
    what: What,
}

impl Job {
    /// A matrix, to be put into device layout.
    pub fn matrix(weight: usize, w: &Weight, rows: Rows, layout: Layout) -> Job {
        let block = if w.format.is_block() { w.format.block_bytes() } else { 32 * w.format.block_bytes() };
        let planes = hanzo_kernels::format_file(w.format).map(|f| f.planes.clone()).unwrap_or_default();
        Job {
            weight,
            what: What::Matrix(Matrix {
                rows,
                layout,
                format: w.format,
                block,
                block_len: w.format.block_len().max(32),
                planes,
            }),
        }
    }

    /// A vector of f32.
    pub fn vector(weight: usize, x: &[f32]) -> Job {
        Job { weight, what: What::Vector(x.iter().flat_map(|x| x.to_le_bytes()).collect()) }
    }

    /// Bytes of such a unit.
    fn unit(&self) -> u64 {
        match &self.what {
            What::Matrix(m) => m.block as u64,
            What::Vector(_) => 1,
        }
    }

    /// Units that a chunk counts (blocks, or bytes of a vector) and how many of them fit a slot.
    fn units(&self) -> (u64, u64) {
        match &self.what {
            What::Matrix(m) => (m.layout.blocks, SLOT / m.block as u64 / CHUNK_BLOCKS * CHUNK_BLOCKS),
            What::Vector(b) => (b.len() as u64, SLOT),
        }
    }
}

/// A part of a job that fits a slot.
struct Chunk<'j> {
    job: &'j Job,
    from: u64,
    to: u64,
}

impl Chunk<'_> {
    fn bytes(&self) -> u64 {
        (self.to - self.from) * self.job.unit()
    }
}

/// A worker's slot: staging memory, its copy on the device (behind a copy queue), and command buffers.
struct Slot<'m> {
    memory: &'m WeightMemory,
    host: Buffer,
    local: Option<Buffer>,
    /// Copies; none without a copy queue.
    transfer: Option<(Pool, vk::CommandBuffer)>,
    _compute: Pool,
    command: vk::CommandBuffer,
    /// Timeline value of its last use.
    busy: u64,
}

/// Uploads everything; returns when it is on the device, or at the first failure.
pub(super) fn run(memory: &WeightMemory, jobs: &[Job]) -> Result<()> {
    let mut chunks = Vec::new();
    for job in jobs {
        let (units, step) = job.units();
        let mut from = 0;
        while from < units {
            let to = (from + step).min(units);
            chunks.push(Chunk { job, from, to });
            from = to;
        }
    }
    let kernels = kernels(memory, jobs, PACK)?;
    // Memory of the host that a device reads is dear to make: small weights take no more than they fill, and one slot.
    let slot_bytes = chunks.iter().map(Chunk::bytes).max().unwrap_or(0);
    let slots = chunks.iter().map(Chunk::bytes).sum::<u64>().div_ceil(SLOT / 4) as usize;
    let next = AtomicUsize::new(0);
    let failure: Mutex<Option<Error>> = Mutex::new(None);
    let work = || {
        let all = || -> Result<()> {
            let mut slot = Slot::new(memory, slot_bytes)?;
            while let Some(c) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
                if memory.stop.load(Ordering::Relaxed) {
                    break;
                }
                slot.send(c, &kernels)?;
            }
            slot.finish()
        };
        if let Err(e) = all() {
            memory.stop.store(true, Ordering::Relaxed);
            failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(SLOTS).min(chunks.len()).min(slots);
    std::thread::scope(|s| {
        (1..threads).for_each(|_| drop(s.spawn(work)));
        work();
    });
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)?;
    if memory.stop.load(Ordering::Relaxed) || !features(memory.device.info()).matrix.read_halves() {
        return Ok(());
    }
    row_scales(memory, jobs)
}

/// Works out the power of two of every row of every matrix, behind its planes: what matrix units need.
fn row_scales(memory: &WeightMemory, jobs: &[Job]) -> Result<()> {
    let info = memory.device.info();
    let kernels = kernels(memory, jobs, ROW_SCALE)?;
    let rows_a_group = ROW_SCALE_THREADS / features(info).wave;
    memory.device.once_and_wait(|r| {
        for job in jobs {
            let What::Matrix(m) = &job.what else { continue };
            let (Some(to), Some((_, kernel))) =
                (memory.buffers[job.weight].as_ref(), kernels.iter().find(|k| k.0 == m.format))
            else {
                continue;
            };
            let (weight, rows) = (to.address(), (m.layout.blocks / m.layout.row_blocks) as u32);
            let units = m.layout.row_blocks * m.block_len as u64 / 32;
            let table = memory.tables.address() + table_offset(m.format);
            let w = args::Weight { base: weight, planes: m.layout.planes(), table };
            let args = args::RowScale { w, scale: weight + m.layout.row_scales, rows, units: units as u32 };
            r.dispatch(*kernel, &encode(&args), [rows.div_ceil(rows_a_group), 1, 1]);
        }
        r.barrier(Order::All);
    })
}

/// An argument struct's bytes.
fn encode<A: Args<u64>>(args: &A) -> Vec<u8> {
    let mut places = Vec::new();
    let mut bytes = args.encode(&mut |at, p| places.push((at, p)));
    for (at, p) in places {
        bytes[at..at + 8].copy_from_slice(&u64::to_le_bytes(p));
    }
    bytes
}

/// The pipelines of an op for the matrices' formats.
fn kernels(memory: &WeightMemory, jobs: &[Job], op: &'static str) -> Result<Vec<(Format, vk::Pipeline)>> {
    let mut formats: Vec<Format> = Vec::new();
    for job in jobs {
        if let What::Matrix(Matrix { format, .. }) = &job.what
            && !formats.contains(format)
        {
            formats.push(*format);
        }
    }
    let constants = constants(op, memory.device.info());
    let wanted: Vec<(Key, &[u32])> =
        formats.iter().map(|f| (Key { op, format: Some(*f) }, constants.as_slice())).collect();
    Ok(formats.into_iter().zip(memory.device.kernels(&wanted)?).collect())
}

/// The kernels that uploading a matrix of this format takes, with their constants.
pub(super) fn wanted(format: Format, info: &DeviceInfo) -> Vec<(Key, Vec<u32>)> {
    let ops: &[&'static str] = if features(info).matrix.read_halves() { &[PACK, ROW_SCALE] } else { &[PACK] };
    ops.iter().map(|op| (Key { op, format: Some(format) }, constants(op, info))).collect()
}

/// Permutes blocks `from..to`, which lie at `source`, into the planes of the weight at `to_weight`.
fn pack(r: &mut Recorder<'_>, kernel: vk::Pipeline, source: u64, weight: u64, job: &Matrix, blocks: Range<u64>) {
    let part = |p: usize| job.planes.get(p).copied().unwrap_or(0);
    let [p1, p2, p3] = job.layout.planes();
    let n = (blocks.end - blocks.start) as u32;
    let most = (0..4).map(part).max().unwrap_or(0);
    let threads = PACK_THREADS;
    let groups = (n * most).div_ceil(4).div_ceil(threads).clamp(1, 4096);
    let pack = args::Pack {
        src: source,
        dst: weight,
        p1,
        p2,
        p3,
        b0: part(0),
        b1: part(1),
        b2: part(2),
        b3: part(3),
        block_bytes: job.block as u32,
        row_blocks: job.layout.row_blocks as u32,
        row_bytes: job.layout.row_blocks as u32 * job.block as u32,
        first_block: blocks.start as u32,
        blocks: n,
        stride: groups * threads,
    };
    r.dispatch(kernel, &encode(&pack), [groups, job.planes.len() as u32, 1]);
}

impl<'m> Slot<'m> {
    fn new(memory: &'m WeightMemory, bytes: u64) -> Result<Slot<'m>> {
        let device = &memory.device;
        let (copies, kernels) = (device.transfer().family, device.compute().family);
        let staged = device.staged();
        let transfer = if staged {
            let pool = Pool::new(device, copies)?;
            let command = pool.command()?;
            Some((pool, command))
        } else {
            None
        };
        let compute = Pool::new(device, kernels)?;
        Ok(Slot {
            memory,
            host: Buffer::new(device, Use::Upload, bytes, "a staging buffer")?,
            local: if staged { Some(Buffer::new(device, Use::Device, bytes, "a staging buffer")?) } else { None },
            transfer,
            command: compute.command()?,
            _compute: compute,
            busy: 0,
        })
    }

    /// Fills the slot with a chunk and submits its copy and its kernel.
    fn send(&mut self, chunk: &Chunk<'_>, kernels: &[(Format, vk::Pipeline)]) -> Result<()> {
        let device = &self.memory.device;
        device.wait(device.compute(), self.busy)?;
        let Some(to) = self.memory.buffers[chunk.job.weight].as_ref() else { return Ok(()) };
        let (from, end) = (chunk.from, chunk.to);
        let bytes = chunk.bytes();
        let Some(out) = self.host.mapped_mut().and_then(|m| m.get_mut(..bytes as usize)) else {
            return Err(unsupported("staging memory cannot be written".into()));
        };
        match &chunk.job.what {
            What::Matrix(m) => m.rows.blocks(from, end, m.block, m.layout.row_blocks, out),
            What::Vector(x) => out.copy_from_slice(&x[from as usize..end as usize]),
        }
        let mut wait = None;
        let mut source = &self.host;
        if let (Some((_, command)), Some(local)) = (&self.transfer, &self.local) {
            let mut r = Recorder::begin(device, *command, true)?;
            r.copy(&self.host, 0, local, 0, bytes);
            let queue = device.transfer();
            wait = Some((queue.timeline, device.submit(queue, &[r.end()?], None)?));
            source = local;
        }
        let mut r = Recorder::begin(device, self.command, true)?;
        match &chunk.job.what {
            What::Matrix(m) => {
                let Some((_, kernel)) = kernels.iter().find(|k| k.0 == m.format) else { return Ok(()) };
                pack(&mut r, *kernel, source.address(), to.address(), m, from..end);
            }
            What::Vector(_) => r.copy(source, 0, to, from, bytes),
        }
        r.barrier(Order::All);
        self.busy = device.submit(device.compute(), &[r.end()?], wait)?;
        self.memory.done.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        let device = &self.memory.device;
        device.wait(device.compute(), self.busy)
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        // Also on the way out of a failure: pools and buffers must not be in use.
        let _ = self.finish();
    }
}
