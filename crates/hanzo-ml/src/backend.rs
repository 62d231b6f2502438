//! The contract between a Plan and whatever runs it.
//!
//! A backend loads weights, allocates caches, and compiles `(Plan, levers, bucket)` into an [`Executable`]. Nothing that
//! changes from step to step is compiled in: it comes with each [`Batch`].

use crate::batch::Batch;
use crate::error::Result;
use crate::levers::LeverSet;
use crate::plan::{Plan, Sizes, ValueId, Weight};
use hanzo_gguf::TensorBytes;
use hanzo_kernels::Key;
use std::any::Any;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The most tokens of a decode step: one of each of a few sequences, or a few guessed ahead.
pub const DECODE_TOKENS: usize = 4;

/// Where a backend gets a weight's bytes.
pub trait WeightSource {
    /// The bytes of a whole tensor, `[experts, tensor_rows, row bytes]`.
    fn tensor(&self, weight: &Weight) -> Result<TensorBytes>;
}

/// How weights meet activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Activations quantized to int8 per 32 for block formats; f32 for float weights, or rounded to bf16 for BF16 weights where a
    /// lever does so (`bf16_activations`).
    #[default]
    Int8,
    /// f32 activations throughout.
    Exact,
}

/// Whether a backend rounds something in a way of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Rounds {
    /// It does not.
    #[default]
    Never,
    /// On some of its devices.
    Somewhere,
    /// Always.
    Always,
}

/// How a Plan is compiled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CompileOptions {
    /// Fusions and variants in force. Rewrites are applied by the backend.
    pub levers: LeverSet,
    /// The most tokens, sequences and output rows of one step; a head runs in chunks of `n_out`.
    pub bucket: Sizes,
    /// Activation precision.
    pub precision: Precision,
    /// Pin one kernel variant and K order, so that any chunking or batching gives bit-equal results.
    pub deterministic: bool,
    /// The longest sequence a step may see, in tokens: sizes block tables and the split of attention.
    pub n_ctx: usize,
    /// The eager arm of the replay probe: memory lies elsewhere (the arena's values this many alignments further on), and
    /// nothing is prepared ahead of a step that need not be.
    pub eager: Option<u32>,
}

/// Weights resident on a backend.
pub trait Weights: Send + Sync {
    /// The backend's own type.
    fn as_any(&self) -> &dyn Any;
    /// Bytes held beyond the model file's mapping.
    fn extra_bytes(&self) -> usize;
}

/// Caches and states resident on a backend.
pub trait Cache: Send {
    /// The backend's own type.
    fn as_any_mut(&mut self) -> &mut dyn Any;
    /// Pages of each group, page 0 (padding) included.
    fn pages(&self) -> &[usize];
    /// Slots of each state.
    fn slots(&self) -> &[usize];
    /// Copies page `from` to page `to` over all layers of a group.
    fn copy_page(&mut self, group: usize, from: u32, to: u32) -> Result<()>;
    /// Copies a state slot over all layers.
    fn copy_slot(&mut self, state: usize, from: u32, to: u32) -> Result<()>;
    /// Zeroes a state slot: what a new sequence starts from.
    fn clear_slot(&mut self, state: usize, slot: u32) -> Result<()>;
    /// Bytes of a page over all layers, keys then values, layer by layer.
    fn read_page(&self, group: usize, page: u32) -> Result<Vec<u8>>;
    /// Puts back what [`Cache::read_page`] gave.
    fn write_page(&mut self, group: usize, page: u32, bytes: &[u8]) -> Result<()>;
    /// Bytes allocated.
    fn bytes(&self) -> usize;
}

/// Time spent in one op.
#[derive(Clone, Debug, PartialEq)]
pub struct OpTime {
    /// Index in the compiled Plan.
    pub op: usize,
    /// Kind and first output, for people.
    pub name: String,
    /// Seconds in the last step.
    pub seconds: f64,
}

/// Time spent in one kernel launch.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    /// Index of its op in the compiled Plan.
    pub op: usize,
    /// The kernel, as `matvec.q4_k`.
    pub kernel: String,
    /// Workgroups.
    pub groups: [u32; 3],
    /// Seconds in the last step.
    pub seconds: f64,
}

/// What the last step cost: its kernels, and all that is around them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepReport {
    /// Kernels launched.
    pub dispatches: usize,
    /// Barriers among them.
    pub barriers: usize,
    /// Submissions to the device.
    pub submissions: usize,
    /// Seconds the host took to write the step's data and to record commands (if it had to).
    pub record: f64,
    /// Seconds the host took to submit.
    pub submit: f64,
    /// Seconds the host waited for the device.
    pub wait: f64,
    /// Seconds the device took from the first kernel to the last, if it was profiled.
    pub gpu: Option<f64>,
    /// Time per launch, if it was profiled.
    pub kernels: Vec<KernelTime>,
}

/// A compiled Plan.
pub trait Executable: Send {
    /// The Plan as it runs, after rewrites and lowering.
    fn plan(&self) -> &Plan;
    /// Barriers a step takes.
    fn barriers(&self) -> usize;
    /// Bytes of activations and scratch.
    fn arena_bytes(&self) -> usize;
    /// The storage of an input or output value; sized for the bucket. An input keeps what it was given, over steps too.
    fn value_mut(&mut self, v: ValueId) -> Result<&mut [f32]>;
    /// The rows an output value holds after the last step (of its last chunk, for values of the head).
    fn value(&self, v: ValueId) -> Result<&[f32]>;
    /// Runs a step. The batch must have passed [`Batch::check`] (backends check again only in debug builds). The head runs in
    /// chunks; after each, `sink` gets the index of its first output row and the rows of the last output value.
    fn run(&mut self, batch: &Batch<'_>, cache: &mut dyn Cache, sink: &mut dyn FnMut(usize, &[f32])) -> Result<()>;
    /// Time per op of the last step, if profiling is on.
    fn profile(&self) -> Vec<OpTime>;
    /// Turns profiling on or off.
    fn set_profile(&mut self, on: bool);
    /// What the last step cost, on a device with something to tell.
    fn report(&self) -> Option<StepReport> {
        None
    }
    /// Fills the arena with NaN before each step, on a device that can: what is read before it is written shows.
    fn set_poison(&mut self, _on: bool) {}
}

/// A compilation that is to come; see [`Backend::prepare`].
#[derive(Clone, Copy)]
pub struct Wanted<'a> {
    /// The Plan.
    pub plan: &'a Plan,
    /// Where its weights will come from.
    pub source: &'a dyn WeightSource,
    /// How it will be compiled.
    pub options: CompileOptions,
}

/// What a device has compiled so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Compiled {
    /// Kernels compiled.
    pub made: usize,
    /// Kernels asked for that were there.
    pub reused: usize,
    /// Seconds that somebody waited for kernels to be compiled.
    pub seconds: f64,
    /// Seconds that threads spent compiling them, all together.
    pub busy: f64,
}

/// A device family.
pub trait Backend: Send + Sync {
    /// Name, as in `--device`: `cpu`, `cuda:0`.
    fn name(&self) -> &str;
    /// Unit roundoff of what its matrix units read instead of f32 or int8 (2^-11 for f16), 0 if it has none: part of the
    /// bound that oracles hold its contractions of steps of up to so many tokens to.
    fn staging(&self, _tokens: usize) -> f64 {
        0.0
    }
    /// May its contractions read a scale below the smallest normal float as zero? Part of the same bound.
    fn flushes(&self) -> bool {
        false
    }
    /// With these levers, are activations that meet BF16 weights under [`Precision::Int8`] rounded to bf16, the output head's
    /// aside? Oracles then work on the rounded ones.
    fn rounds_to_bf16(&self, _levers: LeverSet) -> Rounds {
        Rounds::Never
    }
    /// The sizes, in tokens, to compile for so that steps of up to `n_ubatch` tokens run well; the largest is `n_ubatch`.
    fn buckets(&self, n_ubatch: usize) -> Vec<usize> {
        vec![DECODE_TOKENS.min(n_ubatch), n_ubatch]
    }
    /// Makes a Plan's weights resident.
    fn load(&self, plan: &Plan, source: &dyn WeightSource) -> Result<Arc<dyn Weights>>;
    /// Allocates `pages[g]` pages a group (page 0 is padding) and `slots[s]` slots a state.
    fn alloc(&self, plan: &Plan, pages: &[usize], slots: &[usize]) -> Result<Box<dyn Cache>>;
    /// Makes ready at once what these compilations will need, and tells their programs apart: two with equal numbers run the
    /// same program. None: no telling (a backend that prepares nothing, or a Plan that it cannot compile).
    fn prepare(&self, wanted: &[Wanted<'_>]) -> Vec<Option<u64>> {
        vec![None; wanted.len()]
    }
    /// What was compiled so far, on a device that compiles.
    fn compiled(&self) -> Option<Compiled> {
        None
    }
    /// Names of the kernels launched so far, on a device that launches kernels.
    fn launched(&self) -> BTreeSet<String> {
        BTreeSet::new()
    }
    /// Can the device run this kernel, and would some Plan have it do so?
    fn reaches(&self, kernel: Key) -> bool {
        let _ = kernel;
        false
    }
    /// Compiles a Plan.
    fn compile(&self, plan: &Plan, options: &CompileOptions, weights: &Arc<dyn Weights>)
    -> Result<Box<dyn Executable>>;
}
