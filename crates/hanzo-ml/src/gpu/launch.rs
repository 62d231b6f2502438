//! Launches: a kernel, its arguments as symbolic pointers, its grid, and the bytes it touches.

pub use super::features::Features;
use super::step::StepLayout;
use crate::plan::schedule::Schedule;
use crate::plan::{Plan, WeightId};
use hanzo_kernels::Key;
use hanzo_kernels::args::{Args, Field};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

/// A memory that launches point into. A backend says where each one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    /// Nothing: an argument that the kernel does not read.
    None,
    /// Activations and scratch.
    Arena,
    /// What changes from step to step; see [`StepLayout`].
    Step,
    /// Embedding rows `[n_tokens, n_embd]` that come with a batch instead of tokens.
    Rows,
    /// A weight in device layout (a vector: f32s).
    Weight(WeightId),
    /// One layer's keys of a page group, `[page][n_kv][PAGE][d_k]`.
    Keys(u16, u32),
    /// One layer's values of a page group, `[page][n_kv][PAGE][d_v]`.
    Values(u16, u32),
    /// One layer's recurrent states, `[slots][elements]` f32.
    State(u16, u32),
    /// The codebooks of all formats.
    Tables,
}

/// A symbolic pointer to a run of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ptr {
    /// The memory.
    pub buffer: Buffer,
    /// First byte.
    pub offset: u64,
    /// Bytes that may be touched through it.
    pub len: u64,
}

impl Ptr {
    /// The length of a memory whose size the Plan does not know (caches, states).
    pub const WHOLE: u64 = 1 << 60;

    /// No pointer.
    pub const NONE: Ptr = Ptr { buffer: Buffer::None, offset: 0, len: 0 };

    /// A part of the run.
    #[must_use]
    pub fn part(self, from: u64, len: u64) -> Ptr {
        debug_assert!(from + len <= self.len);
        Ptr { buffer: self.buffer, offset: self.offset + from, len }
    }
}

/// Bytes that a launch reads or writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Touch {
    /// The memory.
    pub buffer: Buffer,
    /// The bytes.
    pub range: Range<u64>,
    /// Written (and perhaps read), or only read.
    pub write: bool,
}

/// One kernel launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// Index of its op in the lowered Plan.
    pub op: usize,
    /// The kernel.
    pub kernel: Key,
    /// Specialization constants in the order of their ids: THREADS, WAVE, HALF_HW, then the op's own.
    pub constants: Vec<u32>,
    /// The argument struct; pointers are zero until relocated.
    pub args: Vec<u8>,
    /// Byte offset of each pointer in `args`, and what it points to.
    pub relocations: Vec<(usize, Ptr)>,
    /// Workgroups.
    pub groups: [u32; 3],
    /// What it reads and writes; weights, tables and the step buffer, which no launch writes, are left out.
    pub touches: Vec<Touch>,
}

impl Launch {
    /// A launch of the kernel of `A` with `format`. `set` overrides tuning constants by name.
    ///
    /// # Errors
    /// In words, if there is no such kernel or constant, or a grid that no device takes: a fault of the lowering.
    pub fn new<A: Args<Ptr>>(
        op: usize,
        format: Option<hanzo_gguf::Format>,
        features: &Features,
        args: &A,
        set: &[(&str, u32)],
        groups: [u32; 3],
    ) -> Result<Launch, String> {
        let kernel = Key { op: A::OP, format };
        let mut constants = hanzo_kernels::constants(A::OP);
        let standard = [("WAVE", features.wave), ("HALF_HW", u32::from(features.half_hw))];
        for (name, value) in standard.iter().chain(set) {
            match constants.iter_mut().find(|c| c.0 == *name) {
                Some(c) => c.1 = *value,
                None => return Err(format!("{kernel} has no constant {name}")),
            }
        }
        if groups.contains(&0) || groups[1].max(groups[2]) > 65535 {
            return Err(format!("{kernel} with a grid of {groups:?}"));
        }
        let mut touches = Vec::new();
        args.fields(&mut |_, field| {
            let (p, write) = match field {
                Field::Read(p) => (p, false),
                Field::Write(p) => (p, true),
                _ => return,
            };
            if !matches!(p.buffer, Buffer::None | Buffer::Step | Buffer::Rows | Buffer::Weight(_) | Buffer::Tables) {
                touches.push(Touch { buffer: p.buffer, range: p.offset..p.offset + p.len, write });
            }
        });
        let mut relocations = Vec::new();
        let bytes = args.encode(&mut |at, p| relocations.push((at, p)));
        let constants = constants.into_iter().map(|c| c.1).collect();
        Ok(Launch { op, kernel, constants, args: bytes, relocations, groups, touches })
    }
}

/// A Plan lowered for a bucket: what a device runs, again and again, on step buffers that differ.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// The Plan as it runs, after levers and lowering.
    pub plan: Plan,
    /// Levels and the arena: `schedule.ranges` are the bytes of inputs and outputs.
    pub schedule: Schedule,
    /// Bytes of the arena, scratch included.
    pub arena_bytes: u64,
    /// The launches in order.
    pub launches: Vec<Launch>,
    /// Is there a barrier before launch i? See [`super::barriers`].
    pub barriers: Vec<bool>,
    /// The first launch of the output head, which runs once a chunk of output rows (`launches.len()` without a head).
    pub head: usize,
    /// What the step buffer holds.
    pub step: StepLayout,
}

impl Program {
    /// Two programs with the same number do the same: what runs, on which bytes, with which barriers, and what enters and
    /// leaves where. Names and op numbers do not count.
    pub fn fingerprint(&self) -> u64 {
        let mut h = DefaultHasher::new();
        for l in &self.launches {
            (l.kernel, &l.constants, &l.args, &l.relocations, l.groups).hash(&mut h);
        }
        (&self.barriers, self.head, self.arena_bytes).hash(&mut h);
        for v in self.plan.inputs.iter().chain(&self.plan.outputs) {
            (v, &self.schedule.ranges[v.0 as usize]).hash(&mut h);
        }
        format!("{:?}", self.step).hash(&mut h);
        h.finish()
    }
}
