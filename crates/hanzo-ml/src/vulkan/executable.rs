//! A lowered Plan on a device: its memory, the steps it runs, and what they cost. Recording is in `record`.

use super::cache::VulkanCache;
use super::commands::Pool;
use super::device::Device;
use super::error::unsupported;
use super::memory::{Buffer, Use};
use super::physical::DeviceKind;
use super::pipelines::ARGS;
use super::profile::Stamps;
use super::record::Take;
use super::weights::VulkanWeights;
use crate::backend::{Cache, CompileOptions, Executable, KernelTime, OpTime, StepReport, Weights};
use crate::batch::{Batch, Input};
use crate::error::{Error, Result};
use crate::gpu::{self, Program, StepWriter};
use crate::plan::{DType, Plan, Sizes, Value, ValueId};
use ash::vk;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Seconds that one submission should take at most: half of what an impatient driver's watchdog may allow.
const SUBMISSION: f64 = 0.05;
/// Bytes by which the eager arm moves the arena's values, times what it asks for.
const SHIFT: u64 = 256;
/// Recorded variants of a step that are kept.
const TAKES: usize = 6;

/// Memory that the host writes each step: device-local where the host can write there, else staged and copied.
pub(super) struct HostWritten {
    pub host: Buffer,
    pub local: Option<Buffer>,
}

impl HostWritten {
    fn new(device: &Arc<Device>, bytes: u64, what: &str) -> Result<HostWritten> {
        let mut host = Buffer::new(device, Use::Step, bytes, what)?;
        if let Some(m) = host.mapped_mut() {
            m.fill(0);
        }
        let direct = device.heaps.step_is_local();
        let local = if direct { None } else { Some(Buffer::new(device, Use::Device, bytes, what)?) };
        Ok(HostWritten { host, local })
    }

    /// Where kernels read it.
    pub fn address(&self) -> u64 {
        self.local.as_ref().unwrap_or(&self.host).address()
    }
}

/// A value that enters or leaves: its bytes in the arena and on the host.
pub(super) struct Port {
    pub value: ValueId,
    pub arena: u64,
    /// Offset in the host buffer.
    pub host: u64,
    /// Bytes for the bucket.
    pub bytes: u64,
}

/// A Plan compiled for a Vulkan device.
pub struct VulkanExecutable {
    pub(super) device: Arc<Device>,
    pub(super) weights: Arc<dyn Weights>,
    pub(super) program: Program,
    /// One a launch.
    pub(super) pipelines: Vec<vk::Pipeline>,
    pub(super) arena: Buffer,
    pub(super) step: HostWritten,
    pub(super) rows: Option<HostWritten>,
    pub(super) inputs: Vec<Port>,
    pub(super) input_memory: Buffer,
    pub(super) outputs: Vec<Port>,
    pub(super) output_memory: Buffer,
    pub(super) pool: Pool,
    pub(super) takes: Vec<Take>,
    /// The cache that `takes` were recorded for.
    recorded_for: u64,
    pub(super) stamps: Option<Stamps>,
    pub(super) poison: bool,
    /// Where the arena's values begin.
    pub(super) shift: u64,
    /// Nothing recorded is kept, and each launch is a submission of its own.
    eager: bool,
    /// Seconds each launch may take, by a cautious guess, times `pace`.
    guess: Vec<f64>,
    pace: f64,
    writer: StepWriter,
    bucket: Sizes,
    last: Sizes,
    /// What the last step's wait took.
    expected: Duration,
    /// Seconds of each launch in the last profiled step.
    times: Vec<f64>,
    costs: StepReport,
}

impl VulkanExecutable {
    /// Compiles pipelines and takes memory.
    pub(super) fn new(
        device: &Arc<Device>,
        weights: &Arc<dyn Weights>,
        program: Program,
        options: &CompileOptions,
    ) -> Result<VulkanExecutable> {
        let pipelines = pipelines(device, &program)?;
        let plan = &program.plan;
        // The eager arm's values lie elsewhere.
        let shift = u64::from(options.eager.unwrap_or(0)) * SHIFT;
        let arena = Buffer::new(device, Use::Device, program.arena_bytes + shift, "activations")?;
        let step = HostWritten::new(device, 4 * program.step.words as u64, "the step buffer")?;
        let reads_rows =
            program.launches.iter().flat_map(|l| &l.relocations).any(|(_, p)| p.buffer == gpu::Buffer::Rows);
        let rows = match reads_rows {
            true => {
                let bytes = 4 * (options.bucket.n_tokens * plan.n_embd) as u64;
                Some(HostWritten::new(device, bytes, "embedding rows")?)
            }
            false => None,
        };
        let ports = |values: &[ValueId]| -> (Vec<Port>, u64) {
            let mut at = 0;
            let port = |v: &ValueId| {
                let range = &program.schedule.ranges[v.0 as usize];
                let port = Port { value: *v, arena: range.start as u64 + shift, host: at, bytes: range.len() as u64 };
                at += port.bytes.next_multiple_of(256);
                port
            };
            (values.iter().map(port).collect(), at)
        };
        let (inputs, input_bytes) = ports(&plan.inputs);
        let (outputs, output_bytes) = ports(&plan.outputs);
        let mut input_memory = Buffer::new(device, Use::Upload, input_bytes, "inputs")?;
        if let Some(m) = input_memory.mapped_mut() {
            m.fill(0);
        }
        let output_memory = Buffer::new(device, Use::Readback, output_bytes, "outputs")?;
        let guess = guess(device, &program, options);
        Ok(VulkanExecutable {
            device: Arc::clone(device),
            weights: Arc::clone(weights),
            pipelines,
            arena,
            step,
            rows,
            inputs,
            input_memory,
            outputs,
            output_memory,
            pool: Pool::new(device, device.compute().family)?,
            takes: Vec::with_capacity(TAKES),
            recorded_for: 0,
            stamps: None,
            poison: false,
            shift,
            eager: options.eager.is_some(),
            guess,
            pace: 1.0,
            writer: StepWriter::new(program.step.clone()),
            bucket: options.bucket,
            last: Sizes::default(),
            expected: Duration::ZERO,
            times: vec![0.0; program.launches.len()],
            costs: StepReport::default(),
            program,
        })
    }

    fn known(&self, v: ValueId, ports: &[Port]) -> Result<(&Value, u64)> {
        let plan = &self.program.plan;
        let named = |x: &Value| Error::Batch(format!("{} is neither an input nor an output", x.name));
        let Some(x) = plan.values.get(v.0 as usize) else {
            return Err(Error::Batch(format!("value {} does not exist", v.0)));
        };
        ports.iter().find(|p| p.value == v).map(|p| (x, p.host)).ok_or_else(|| named(x))
    }

    /// Rows of a value that a take copies to the host.
    pub(super) fn live_bytes(&self, port: &Port, sizes: &Sizes) -> u64 {
        let x = self.program.plan.val(port.value);
        match x.dtype {
            // Its planes lie where the bucket's do.
            DType::Q8 => port.bytes,
            d => ((x.rows.eval(sizes) * d.row_bytes(x.cols)) as u64).min(port.bytes),
        }
    }

    /// The last launch (exclusive) of a submission that begins with launch `from`.
    pub(super) fn submission_end(&self, from: usize, to: usize) -> usize {
        if self.eager {
            return to.min(from + 1);
        }
        let mut seconds = 0.0;
        for i in from..to {
            seconds += self.guess[i] * self.pace;
            if seconds > SUBMISSION && i > from {
                return i;
            }
        }
        to
    }

    /// Forgets recorded commands; nothing is in flight.
    fn forget(&mut self) {
        for take in self.takes.drain(..) {
            self.pool.free(&take.commands);
        }
    }

    /// The recorded commands for these parts and sizes.
    fn take(&mut self, body: bool, head: bool, sizes: &Sizes, cache: &VulkanCache) -> Result<usize> {
        let same = |t: &Take| {
            (t.body, t.head) == (body, head)
                && self.outputs.iter().zip(&t.outputs).all(|(p, n)| self.live_bytes(p, sizes) == *n)
        };
        if let (Some(i), false) = (self.takes.iter().position(same), self.eager) {
            return Ok(i);
        }
        if self.takes.len() == TAKES || self.eager {
            self.forget();
        }
        let take = self.record(body, head, sizes, cache)?;
        self.takes.push(take);
        Ok(self.takes.len() - 1)
    }

    /// Submits a take and waits for it.
    fn play(&mut self, take: usize) -> Result<()> {
        let start = Instant::now();
        let t = &self.takes[take];
        let mut value = 0;
        for c in &t.commands {
            value = self.device.submit(self.device.compute(), std::slice::from_ref(c), None)?;
        }
        let submitted = start.elapsed();
        self.device.wait_step(value, &mut self.expected)?;
        let total = start.elapsed().as_secs_f64();
        self.costs.dispatches += t.launches.len();
        self.costs.barriers += t.barriers;
        self.costs.submissions += t.commands.len();
        self.costs.submit += submitted.as_secs_f64();
        self.costs.wait += total - submitted.as_secs_f64();
        if let Some(stamps) = &mut self.stamps {
            let at = stamps.read(t.stamps.len())?;
            for (i, launch) in t.stamps.iter().enumerate() {
                if let Some(l) = launch {
                    self.times[*l] += at(i) - at(i - 1);
                }
            }
            let whole = at(t.stamps.len().saturating_sub(1));
            self.costs.gpu = Some(self.costs.gpu.unwrap_or(0.0) + whole);
        }
        self.keep_pace(take, total);
        Ok(())
    }

    /// Learns from a step how fast the device is, and cuts steps anew if submissions turn out too long or too short.
    fn keep_pace(&mut self, take: usize, seconds: f64) {
        let t = &self.takes[take];
        let guessed: f64 = self.guess[t.launches.clone()].iter().sum();
        let each = seconds / t.commands.len().max(1) as f64;
        let short = t.commands.len() > 1 && each < SUBMISSION / 4.0;
        if guessed <= 0.0 || (each < 1.8 * SUBMISSION && !short) {
            return;
        }
        let pace = seconds / guessed;
        if (pace / self.pace - 1.0).abs() > 0.2 {
            self.pace = pace;
            self.forget();
        }
    }
}

/// The pipeline of each launch.
fn pipelines(device: &Arc<Device>, program: &Program) -> Result<Vec<vk::Pipeline>> {
    let mut unique: HashMap<(hanzo_kernels::Key, &[u32]), usize> = HashMap::new();
    let mut wanted: Vec<(hanzo_kernels::Key, &[u32])> = Vec::new();
    let mut of = Vec::with_capacity(program.launches.len());
    for l in &program.launches {
        if l.args.len() > ARGS {
            return Err(unsupported(format!("{} takes {} bytes of arguments; {ARGS} fit", l.kernel, l.args.len())));
        }
        let most = device.info().max_groups;
        if l.groups.iter().zip(most).any(|(n, most)| *n > most) {
            let what = format!(
                "{} needs {:?} workgroups, the device runs {most:?}; use a smaller --ubatch",
                l.kernel, l.groups
            );
            return Err(unsupported(what));
        }
        let next = wanted.len();
        let i = *unique.entry((l.kernel, &l.constants)).or_insert(next);
        if i == next {
            wanted.push((l.kernel, &l.constants));
        }
        of.push(i);
    }
    let made = device.kernels(&wanted)?;
    Ok(of.into_iter().map(|i| made[i]).collect())
}

/// A cautious guess of each launch's seconds, to cut long steps into submissions. What a CPU device runs is not cut: it has
/// no watchdog.
fn guess(device: &Device, program: &Program, options: &CompileOptions) -> Vec<f64> {
    let (flops, bytes) = match device.info().kind {
        DeviceKind::Cpu => return vec![0.0; program.launches.len()],
        DeviceKind::Discrete => (2e12, 1e11),
        _ => (3e11, 2e10),
    };
    let mut of_op: HashMap<usize, usize> = HashMap::new();
    program.launches.iter().for_each(|l| *of_op.entry(l.op).or_insert(0) += 1);
    let launch = |op: usize| {
        let c = program.plan.cost(op, &options.bucket, options.n_ctx);
        let seconds = c.flops / flops + (c.weight_bytes + c.value_bytes) / bytes;
        seconds / of_op.get(&op).copied().unwrap_or(1) as f64
    };
    program.launches.iter().map(|l| launch(l.op)).collect()
}

impl Executable for VulkanExecutable {
    fn plan(&self) -> &Plan {
        &self.program.plan
    }

    fn barriers(&self) -> usize {
        self.program.barriers.iter().filter(|b| **b).count()
    }

    fn arena_bytes(&self) -> usize {
        self.program.arena_bytes as usize
    }

    fn value_mut(&mut self, v: ValueId) -> Result<&mut [f32]> {
        let (x, at) = self.known(v, &self.inputs)?;
        let n = x.rows.eval(&self.bucket) * x.dtype.row_bytes(x.cols) / 4;
        let at = at as usize / 4;
        self.input_memory.floats_mut().get_mut(at..at + n).ok_or_else(|| unsupported("inputs cannot be written".into()))
    }

    fn value(&self, v: ValueId) -> Result<&[f32]> {
        let (ports, memory) = match self.inputs.iter().any(|p| p.value == v) {
            true => (&self.inputs, &self.input_memory),
            false => (&self.outputs, &self.output_memory),
        };
        let (x, at) = self.known(v, ports)?;
        let n = x.rows.eval(&self.last) * x.dtype.row_bytes(x.cols) / 4;
        let at = at as usize / 4;
        memory.floats().get(at..at + n).ok_or_else(|| unsupported("outputs cannot be read".into()))
    }

    fn run(&mut self, batch: &Batch<'_>, cache: &mut dyn Cache, sink: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
        let mut sizes = batch.sizes();
        if sizes.n_tokens > self.bucket.n_tokens || sizes.n_seqs > self.bucket.n_seqs {
            return Err(Error::Batch(format!("a step of {sizes:?} in an executable for {:?}", self.bucket)));
        }
        if cfg!(debug_assertions) {
            batch.check(&self.program.plan, usize::MAX, cache.pages(), cache.slots())?;
        }
        let cache = cache.as_any_mut().downcast_mut::<VulkanCache>();
        let Some(cache) = cache.filter(|c| Arc::ptr_eq(c.device(), &self.device)) else {
            return Err(unsupported("this cache belongs to another backend".into()));
        };
        if let Some(w) = self.weights.as_any().downcast_ref::<VulkanWeights>() {
            w.ready()?;
        }
        if self.recorded_for != cache.id() {
            self.forget();
            self.recorded_for = cache.id();
        }
        self.costs = StepReport::default();
        self.times.fill(0.0);
        let start = Instant::now();
        self.writer.body(batch, self.step.host.words_mut())?;
        if let (Input::Embeddings(e), Some(rows)) = (batch.input, &mut self.rows) {
            rows.host.floats_mut()[..e.len()].copy_from_slice(e);
        }
        let mut record = start.elapsed();
        let chunk = self.bucket.n_out.max(1);
        let mut first = 0;
        loop {
            let start = Instant::now();
            let out_rows = &batch.out_rows[first..(first + chunk).min(batch.out_rows.len())];
            sizes.n_out = out_rows.len();
            // A step without output rows ends where the head begins.
            let head = self.program.plan.head.is_none() || !out_rows.is_empty();
            self.writer.head(batch, out_rows, self.step.host.words_mut());
            let take = self.take(first == 0, head, &sizes, cache)?;
            record += start.elapsed();
            self.play(take)?;
            self.output_memory.refresh()?;
            self.last = sizes;
            if let Some(v) = self.program.plan.outputs.last()
                && head
            {
                sink(first, self.value(*v)?);
            }
            first += chunk;
            if first >= batch.out_rows.len() {
                break;
            }
        }
        self.costs.record = record.as_secs_f64();
        self.device.validated()
    }

    fn profile(&self) -> Vec<OpTime> {
        if self.stamps.is_none() {
            return Vec::new();
        }
        let mut all: Vec<OpTime> = Vec::new();
        for (l, seconds) in self.program.launches.iter().zip(&self.times) {
            match all.last_mut() {
                Some(t) if t.op == l.op => t.seconds += seconds,
                _ => all.push(OpTime { op: l.op, name: op_name(&self.program.plan, l.op), seconds: *seconds }),
            }
        }
        all
    }

    fn set_profile(&mut self, on: bool) {
        if on == self.stamps.is_some() {
            return;
        }
        self.forget();
        // One before each submission and one behind each launch; a device without timestamps stays unprofiled.
        self.stamps = if on { Stamps::new(&self.device, 2 * self.program.launches.len() + 2).ok() } else { None };
    }

    fn report(&self) -> Option<StepReport> {
        let mut r = self.costs.clone();
        if self.stamps.is_some() {
            let time = |(l, seconds): (&gpu::Launch, &f64)| KernelTime {
                op: l.op,
                kernel: l.kernel.to_string(),
                groups: l.groups,
                seconds: *seconds,
            };
            r.kernels = self.program.launches.iter().zip(&self.times).map(time).collect();
        }
        Some(r)
    }

    fn set_poison(&mut self, on: bool) {
        if on != self.poison {
            self.forget();
            self.poison = on;
        }
    }
}

/// Kind and first output, for people.
fn op_name(plan: &Plan, op: usize) -> String {
    let op = &plan.ops[op];
    let out = op.writes().first().map_or("", |v| plan.val(*v).name.as_str()).to_string();
    format!("{} {out}", op.kind()).trim_end().to_string()
}

impl Drop for VulkanExecutable {
    fn drop(&mut self) {
        // A step that failed half-way may have left work behind.
        let _ = self.device.settle();
    }
}
