//! The table of contraction kernels: which one serves which op, input and number of tokens, with which constants.
//!
//! The first row that fits is taken: tiles on matrix units, by what the device has, then the rows that every device can run.
//! Under `deterministic` there is one row a kind, whatever the number of tokens, so that a
//! token's sums are the same in every batch. Shapes decide only what leaves the order of sums alone or is the same for
//! every number of tokens ([`units_in_flight`]). No Plan and no device may enter here.

use crate::gpu::features::{Features, MatrixUnit};
use hanzo_gguf::Format;
use hanzo_kernels::Key;

/// What is contracted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Task {
    /// Rows of one matrix.
    Linear,
    /// Rows of one matrix from activations in two int8 terms: the output head.
    Head,
    /// Each slot by its expert's matrix.
    Moe,
    /// Gate and up of one format, and what combines them, in one kernel.
    Glu,
    /// As `Glu`, each slot by its expert's matrices.
    MoeGlu,
    /// Each slot by its expert's matrix, and the weighted sum of a token's slots.
    MoeDown,
}

impl Task {
    /// Its name in listings.
    pub fn name(self) -> &'static str {
        match self {
            Task::Linear => "linear",
            Task::Head => "head",
            Task::Moe => "moe_linear",
            Task::Glu => "linear_glu",
            Task::MoeGlu => "moe_linear_glu",
            Task::MoeDown => "moe_linear_combine",
        }
    }
}

/// What activations are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Input {
    /// Quantized to int8: block formats.
    Int8,
    /// Floats: float weights, and every format under exact precision.
    Float,
    /// Either, turned to halves, where both operands may be rounded to them.
    Half,
    /// One row of floats that the kernel quantizes itself (see [`super::levered`]).
    Raw,
}

/// What a device must have for a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Nothing.
    Nothing,
    /// Fast int8 dot products.
    IntDot,
    /// A matrix unit, and its wave.
    Unit(MatrixUnit),
}

impl Need {
    /// Its name in listings.
    pub fn name(self) -> &'static str {
        match self {
            Need::Nothing => "",
            Need::IntDot => "dot",
            Need::Unit(unit) => unit.name(),
        }
    }

    fn met(self, features: &Features) -> bool {
        match self {
            Need::Nothing => true,
            Need::IntDot => features.int_dot,
            Need::Unit(MatrixUnit::HalfFirst) if !features.matrix.has(MatrixUnit::MmaHalf) => false,
            Need::Unit(unit) => features.matrix.has(unit) && features.wave == unit.wave(),
        }
    }
}

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// What it computes.
    pub task: Task,
    /// From what.
    pub input: Input,
    /// What a device must have.
    pub needs: Need,
    /// More tokens of a step than these.
    pub over: usize,
    /// The most tokens it is for (slots an expert gets on average, for the GEMMs of [`Task::Moe`]).
    pub tokens: usize,
    /// The fewest, counted likewise.
    pub least: usize,
    /// The fewest rows of the matrix.
    pub rows: usize,
    /// The op file.
    pub kernel: &'static str,
    /// Tuning constants other than the kernel's defaults.
    pub constants: &'static [(&'static str, u32)],
}

pub(super) const ANY: usize = usize::MAX;

pub(super) const fn row(
    task: Task,
    input: Input,
    (tokens, rows): (usize, usize),
    kernel: &'static str,
    constants: &'static [(&'static str, u32)],
) -> Variant {
    let dot = matches!(kernel.as_bytes(), b"gemm_dot" | b"gemm_weight_stage");
    let needs = if dot { Need::IntDot } else { Need::Nothing };
    Variant { task, input, needs, over: 0, tokens, least: 0, rows, kernel, constants }
}

/// A tile on matrix units, for matrices that are worth one.
pub(super) const fn tile(
    task: Task,
    input: Input,
    unit: MatrixUnit,
    tokens: usize,
    kernel: &'static str,
    constants: &'static [(&'static str, u32)],
) -> Variant {
    let (needs, over) = (Need::Unit(unit), FEW_FOR_TILES);
    Variant { task, input, needs, over, tokens, least: 0, rows: 32, kernel, constants }
}

/// Tokens of a step up to which mat-vecs and small tiles do better than matrix units.
pub const FEW_FOR_TILES: usize = 16;

/// Rows of the tensor-core GEMMs of integers: 32 rows of x by 128 of w with four waves, and 64 by 128 with eight.
pub(super) const MMA_32: &[(&str, u32)] = &[("THREADS", 128), ("BM", 32), ("BN", 128), ("WM", 1), ("MI", 2), ("NI", 2)];
const MMA_64: &[(&str, u32)] = &[("THREADS", 256), ("BM", 64), ("BN", 128), ("WM", 2), ("MI", 2), ("NI", 2)];
/// The same for waves of 64, which are half as many.
pub(super) const MFMA_32: &[(&str, u32)] =
    &[("THREADS", 128), ("BM", 32), ("BN", 128), ("WM", 1), ("MI", 2), ("NI", 4)];
const MFMA_64: &[(&str, u32)] = &[("THREADS", 256), ("BM", 64), ("BN", 128), ("WM", 2), ("MI", 2), ("NI", 4)];
/// Rows of the tensor-core GEMM of halves: 32, 64 or 128 rows of x by 128 of w with eight waves.
pub(super) const HALF_32: &[(&str, u32)] = &[("BM", 32), ("WM", 1), ("MI", 2), ("NI", 1)];
const HALF_64: &[(&str, u32)] = &[("BM", 64), ("WM", 2), ("MI", 2), ("NI", 2)];
const HALF_128: &[(&str, u32)] = &[("BM", 128), ("WM", 2), ("MI", 4), ("NI", 2)];
pub(super) const HIGH_32: &[(&str, u32)] = &[("BM", 32)];
const HIGH_64: &[(&str, u32)] = &[("BM", 64)];
const HIGH_128: &[(&str, u32)] = &[("BM", 128)];

macro_rules! tiles {
    ($task:expr) => {
        [
            tile($task, Input::Half, MatrixUnit::Coop, 32, "gemm_coop", HIGH_32),
            tile($task, Input::Half, MatrixUnit::Coop, 64, "gemm_coop", HIGH_64),
            tile($task, Input::Half, MatrixUnit::Coop, ANY, "gemm_coop", HIGH_128),
            tile($task, Input::Half, MatrixUnit::HalfFirst, 32, "gemm_mma_f16", HALF_32),
            tile($task, Input::Half, MatrixUnit::HalfFirst, 64, "gemm_mma_f16", HALF_64),
            tile($task, Input::Half, MatrixUnit::HalfFirst, ANY, "gemm_mma_f16", HALF_128),
            tile($task, Input::Int8, MatrixUnit::MmaInt8, 32, "gemm_mma", MMA_32),
            tile($task, Input::Int8, MatrixUnit::MmaInt8, ANY, "gemm_mma", MMA_64),
            tile($task, Input::Half, MatrixUnit::MmaHalf, 32, "gemm_mma_f16", HALF_32),
            tile($task, Input::Half, MatrixUnit::MmaHalf, 64, "gemm_mma_f16", HALF_64),
            tile($task, Input::Half, MatrixUnit::MmaHalf, ANY, "gemm_mma_f16", HALF_128),
            tile($task, Input::Int8, MatrixUnit::Wmma, 32, "gemm_wmma", MMA_32),
            tile($task, Input::Int8, MatrixUnit::Wmma, ANY, "gemm_wmma", MMA_64),
            tile($task, Input::Int8, MatrixUnit::Mfma, 32, "gemm_mfma", MFMA_32),
            tile($task, Input::Int8, MatrixUnit::Mfma, ANY, "gemm_mfma", MFMA_64),
            tile($task, Input::Half, MatrixUnit::Simdgroup, 16, "gemm_simd", &[("BM", 16)]),
            tile($task, Input::Half, MatrixUnit::Simdgroup, ANY, "gemm_simd", HIGH_32),
        ]
    };
}

/// Tiles on matrix units: the same rows for one matrix and for experts.
const TILES: [[Variant; 17]; 2] = [tiles!(Task::Linear), tiles!(Task::Moe)];

/// Tiles on matrices of a workgroup: lever `coop2`, and only where a whole tile is worth it. Both tiles go through workgroup
/// memory, once each: two of each would be faster still, but are 72 KiB.
const WIDE_TILES: [Variant; 2] = [
    wide(Task::Linear, &[("BM", 128), ("STAGE", 1), ("DOUBLE", 1)]),
    wide(Task::Moe, &[("BM", 128), ("DOUBLE", 1), ("MOE", 1)]),
];

const fn wide(task: Task, constants: &'static [(&'static str, u32)]) -> Variant {
    Variant { least: 65, ..tile(task, Input::Half, MatrixUnit::Coop2, ANY, "gemm_coop2", constants) }
}

/// Bytes of workgroup memory that a driver may keep for itself in a kernel with matrices of a workgroup.
pub const COOP2_RESERVED: u32 = 8 << 10;

/// The head's activations are integers in two terms, which tiles of integers add up.
const HEAD_TILES: [Variant; 3] = [
    tile(Task::Head, Input::Int8, MatrixUnit::MmaInt8, ANY, "gemm_mma", MMA_64),
    tile(Task::Head, Input::Int8, MatrixUnit::Wmma, ANY, "gemm_wmma", MMA_64),
    tile(Task::Head, Input::Int8, MatrixUnit::Mfma, ANY, "gemm_mfma", MFMA_64),
];

const TILE_16: &[(&str, u32)] = &[("THREADS", 64), ("BM", 16), ("BN", 32), ("TM", 2), ("TN", 4), ("BU", 4)];
pub(super) const TILE_32: &[(&str, u32)] = &[("THREADS", 128), ("BM", 32), ("BN", 64), ("TM", 4), ("TN", 4), ("BU", 2)];
const TILE_64: &[(&str, u32)] = &[("THREADS", 256), ("BM", 64), ("BN", 64), ("TM", 4), ("TN", 4), ("BU", 2)];
const CODES_16: &[(&str, u32)] = FLOATS_16;
const CODES_64: &[(&str, u32)] = FLOATS_64;
const FLOATS_16: &[(&str, u32)] = &[("THREADS", 64), ("BM", 16), ("BN", 32), ("TM", 2), ("TN", 4)];
/// For matrices of so few rows that larger tiles leave most of a device idle.
const FLOATS_FEW: &[(&str, u32)] = &[("THREADS", 64), ("BM", 16), ("BN", 16), ("TM", 2), ("TN", 2)];
const FLOATS_64: &[(&str, u32)] = &[("THREADS", 256), ("BM", 64), ("BN", 64), ("TM", 4), ("TN", 4)];

/// Every variant.
pub const VARIANTS: &[Variant] = &[
    row(Task::Linear, Input::Int8, (1, 16384), "matvec", &[("ROWS", 2)]),
    row(Task::Linear, Input::Int8, (1, 0), "matvec", &[("ROWS", 1)]),
    row(Task::Linear, Input::Int8, (2, 0), "matvec", &[("TOKENS", 2), ("ROWS", 2)]),
    row(Task::Linear, Input::Int8, (4, 0), "matvec", &[("TOKENS", 4), ("ROWS", 2)]),
    row(Task::Linear, Input::Int8, (8, 0), "matvec", &[("TOKENS", 8), ("ROWS", 1)]),
    row(Task::Linear, Input::Int8, (16, 0), "gemm_dot", TILE_16),
    row(Task::Linear, Input::Int8, (40, 0), "gemm_dot", TILE_32),
    row(Task::Linear, Input::Int8, (ANY, 0), "gemm_dot", TILE_64),
    row(Task::Linear, Input::Int8, (ANY, 0), "gemm_dot", TILE_32),
    row(Task::Linear, Input::Int8, (ANY, 0), "gemm_dot", TILE_16),
    row(Task::Linear, Input::Int8, (16, 0), "gemm_codes", CODES_16),
    row(Task::Linear, Input::Int8, (ANY, 0), "gemm_codes", CODES_64),
    row(Task::Linear, Input::Int8, (ANY, 0), "gemm_codes", CODES_16),
    row(Task::Head, Input::Int8, (1, 0), "matvec", &[("ROWS", 4)]),
    row(Task::Head, Input::Int8, (2, 0), "matvec", &[("TOKENS", 2), ("ROWS", 2)]),
    row(Task::Head, Input::Int8, (4, 0), "matvec", &[("TOKENS", 4), ("ROWS", 2)]),
    // A chunk of the head has room for eight rows and mostly one: pairs that are not there cost their empty workgroups alone.
    row(Task::Head, Input::Int8, (8, 0), "matvec", &[("TOKENS", 2), ("ROWS", 2)]),
    row(Task::Head, Input::Int8, (20, 0), "gemm_dot", TILE_32),
    row(Task::Head, Input::Int8, (ANY, 0), "gemm_dot", TILE_64),
    row(Task::Head, Input::Int8, (ANY, 0), "gemm_dot", TILE_32),
    row(Task::Head, Input::Int8, (ANY, 0), "gemm_codes", CODES_64),
    row(Task::Head, Input::Int8, (ANY, 0), "gemm_codes", CODES_16),
    row(Task::Linear, Input::Float, (1, 0), "matvec_f32", &[("ROWS", 1)]),
    row(Task::Linear, Input::Float, (2, 0), "matvec_f32", &[("TOKENS", 2), ("ROWS", 1)]),
    row(Task::Linear, Input::Float, (4, 0), "matvec_f32", &[("TOKENS", 4), ("ROWS", 1)]),
    row(Task::Linear, Input::Float, (16, 1024), "gemm_f32", FLOATS_16),
    row(Task::Linear, Input::Float, (ANY, 1024), "gemm_f32", FLOATS_64),
    row(Task::Linear, Input::Float, (ANY, 1024), "gemm_f32", FLOATS_16),
    row(Task::Linear, Input::Float, (32, 0), "matvec_f32", &[("TOKENS", 4), ("ROWS", 1)]),
    row(Task::Linear, Input::Float, (ANY, 0), "gemm_f32", FLOATS_FEW),
    row(Task::Moe, Input::Int8, (12, 0), "gemm_dot", TILE_16),
    row(Task::Moe, Input::Int8, (40, 0), "gemm_dot", TILE_32),
    row(Task::Moe, Input::Int8, (ANY, 0), "gemm_dot", TILE_64),
    row(Task::Moe, Input::Int8, (ANY, 0), "gemm_dot", TILE_32),
    row(Task::Moe, Input::Int8, (ANY, 0), "gemm_dot", TILE_16),
    row(Task::Moe, Input::Int8, (12, 0), "gemm_codes", CODES_16),
    row(Task::Moe, Input::Int8, (ANY, 0), "gemm_codes", CODES_64),
    row(Task::Moe, Input::Int8, (ANY, 0), "gemm_codes", CODES_16),
    row(Task::Moe, Input::Float, (12, 0), "gemm_f32", FLOATS_16),
    row(Task::Moe, Input::Float, (ANY, 0), "gemm_f32", FLOATS_64),
    row(Task::Moe, Input::Float, (ANY, 0), "gemm_f32", FLOATS_16),
    row(Task::Glu, Input::Int8, (1, 0), "glu_matvec", &[("ROWS", 1)]),
    row(Task::Glu, Input::Int8, (2, 0), "glu_matvec", &[("TOKENS", 2), ("ROWS", 1)]),
    row(Task::Glu, Input::Int8, (4, 0), "glu_matvec", &[("TOKENS", 4), ("ROWS", 1)]),
    row(Task::MoeGlu, Input::Int8, (FEW_TOKENS, 0), "glu_matvec", &[("ROWS", 1)]),
    row(Task::MoeDown, Input::Int8, (FEW_TOKENS, 0), "moe_down", &[("ROWS", 1)]),
];

/// Tokens up to which experts run slot by slot: beyond, an expert's matrix is worth sorting its slots for.
pub const FEW_TOKENS: usize = 8;

/// Experts slot by slot.
const MOE_SLOTS: [Variant; 2] = [
    row(Task::Moe, Input::Int8, (FEW_TOKENS, 0), "matvec", &[("ROWS", 1)]),
    row(Task::Moe, Input::Float, (FEW_TOKENS, 0), "matvec_f32", &[("ROWS", 1)]),
];

/// What serves every number of tokens where results must not depend on it, and where nothing else fits.
const PINNED: [Variant; 5] = [
    row(Task::Linear, Input::Int8, (ANY, 0), "matvec", &[("TOKENS", 4), ("ROWS", 2)]),
    row(Task::Head, Input::Int8, (ANY, 0), "matvec", &[("TOKENS", 4), ("ROWS", 2)]),
    row(Task::Linear, Input::Float, (ANY, 0), "matvec_f32", &[("TOKENS", 4), ("ROWS", 1)]),
    row(Task::Moe, Input::Int8, (ANY, 0), "matvec", &[("ROWS", 1)]),
    row(Task::Moe, Input::Float, (ANY, 0), "matvec_f32", &[("ROWS", 1)]),
];

/// How many tokens there are, and for experts how they spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// The most tokens of a step.
    pub tokens: usize,
    /// `(slots of a token, experts)`.
    pub experts: Option<(usize, usize)>,
}

impl Load {
    /// The tokens that a matrix of the task meets: a step's, or slots that an expert gets on average.
    pub(super) fn each(self, task: Task) -> usize {
        match self.experts {
            Some((k, experts)) if task == Task::Moe => (self.tokens * k).div_ceil(experts.max(1)),
            _ => self.tokens,
        }
    }
}

/// What a contraction asks for.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// What it computes.
    pub task: Task,
    /// From what: [`Input::Int8`] or [`Input::Float`].
    pub input: Input,
    /// For how many tokens.
    pub load: Load,
    /// Rows of the matrix.
    pub rows: usize,
    /// The format of the matrix, whose codebook takes room; none: not known.
    pub format: Option<Format>,
    /// May both operands be rounded to halves?
    pub halves: bool,
    /// Must a token's sums be the same in every batch?
    pub deterministic: bool,
}

/// The variant for a contraction; none where no kernel does the task for so many tokens.
pub fn pick(ask: &Ask, features: &Features) -> Option<&'static Variant> {
    let of_all = |v: &&Variant| fits(v, ask, ask.load.tokens, features);
    let pinned = || PINNED.iter().find(of_all);
    if ask.deterministic {
        return pinned();
    }
    let each = ask.load.each(ask.task);
    let sorted = || many().find(|v| fits(v, ask, each, features));
    let found = match (ask.task, ask.load.experts) {
        (Task::Moe, Some(_)) => MOE_SLOTS.iter().find(of_all).or_else(sorted),
        _ => sorted(),
    };
    // Mat-vecs run in waves of any size, tiles do not.
    found.or_else(pinned)
}

/// Does a row do what is asked, for so many tokens a matrix, on such a device?
pub(super) fn fits(v: &Variant, ask: &Ask, tokens: usize, features: &Features) -> bool {
    let input = v.input == ask.input || v.input == Input::Half && ask.halves;
    v.task == ask.task
        && input
        && (v.least..=v.tokens).contains(&tokens)
        && ask.load.tokens > v.over
        && ask.rows >= v.rows
        && runs(v, ask.format, features)
}

/// Can a device run it? A tile's threads are fixed: whole waves, and not more than there may be; and its workgroup memory must
/// be there. Mat-vecs take any number of threads.
fn runs(v: &Variant, format: Option<Format>, features: &Features) -> bool {
    if !v.kernel.starts_with("gemm") {
        return v.needs.met(features);
    }
    let threads = constant(v, "THREADS");
    let kept = if v.needs == Need::Unit(MatrixUnit::Coop2) { u64::from(COOP2_RESERVED) } else { 0 };
    let bytes = || Some(kept + hanzo_kernels::shared_bytes(Key { op: v.kernel, format }, v.constants)?);
    v.needs.met(features)
        && threads.is_multiple_of(features.wave)
        && (features.wave..=most_threads(features)).contains(&threads)
        && bytes().is_some_and(|n| n <= u64::from(features.shared_bytes))
}

/// Does some row choose this kernel for a matrix of this format on such a device, whatever the levers?
pub fn reaches(kernel: &str, format: Format, features: &Features) -> bool {
    let levered = super::levered::LEVERED.iter().map(|l| &l.variant);
    all().chain(&PINNED).chain(levered).any(|v| {
        // F32 matrices are never rounded to halves.
        let halves = v.input != Input::Half || format != Format::F32;
        v.kernel == kernel && halves && runs(v, Some(format), features)
    })
}

/// A row's value of a constant: its own, or the kernel's default; 1 if there is none of that name.
pub fn constant(v: &Variant, name: &str) -> u32 {
    let own = v.constants.iter().find(|c| c.0 == name).map(|c| c.1);
    let default = || hanzo_kernels::constants(v.kernel).into_iter().find(|c| c.0 == name).map(|c| c.1);
    own.or_else(default).unwrap_or(1)
}

/// As [`pick`], with operands as they are.
pub fn choose(
    task: Task,
    input: Input,
    load: Load,
    rows: usize,
    deterministic: bool,
    features: &Features,
) -> Option<&'static Variant> {
    pick(&Ask { task, input, load, rows, format: None, halves: false, deterministic }, features)
}

/// Units that a lane should have in flight: up to four, if at most a quarter of the turns is spent beyond the row's end.
pub fn units_in_flight(units: usize, lanes: u32) -> u32 {
    let turns = units.div_ceil(lanes.max(1) as usize);
    let fits = |n: &usize| 4 * (turns.next_multiple_of(*n) - turns) <= turns;
    (1..=4usize).rev().find(fits).unwrap_or(1) as u32
}

/// Waves that share a row, and make a workgroup, where there are too few rows (or tiles of them) to fill a device with
/// whole workgroups; none where there are enough. No more than have units of their own.
pub fn waves_of_few_rows(rows: usize, units: usize, features: &Features) -> Option<u32> {
    const FULL: usize = 1024;
    let most = units.div_ceil(features.wave.max(1) as usize).min((most_threads(features) / features.wave) as usize);
    let split = [8, 4, 2, 1].into_iter().find(|s| *s <= most.max(1) && rows * s <= FULL);
    split.map(|s| s as u32)
}

/// Waves that share a row of a matrix that runs alone, and units of a lane in flight, for one token: where all waves of a
/// wide device are there at once, the longest wave binds. Each wave of a workgroup waits for its copy of a codebook, so
/// that such formats gain nothing. None: as [`units_in_flight`] says. Measured on an H200 over all formats.
pub fn waves_of_long_rows(
    format: Format,
    (rows, units): (usize, usize),
    alone: bool,
    threads: u32,
    wave: u32,
) -> Option<(u32, u32)> {
    const RESIDENT: usize = 8192;
    let turns = units / wave.max(1) as usize;
    let waves = threads / wave.max(1);
    match hanzo_kernels::codebook_words(format) {
        _ if rows > RESIDENT || turns < 2 => return None,
        0 => {}
        1..1024 => return None,
        // Registers for two units let more workgroups share what copying costs.
        _ => return Some((1, 2)),
    }
    if !alone {
        return None;
    }
    let many = turns == 3 || (turns >= 8 && hanzo_kernels::scale_group(format) == 16);
    let (split, in_flight) = if many { (4, 1) } else { (2, 2) };
    waves.is_multiple_of(split).then_some((split, in_flight))
}

/// How a glu that writes quantized rows is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GluShape {
    /// Threads of a workgroup.
    pub threads: u32,
    /// Rows of each matrix that a wave has at once.
    pub rows: u32,
    /// How often a workgroup takes so many.
    pub repeat: u32,
}

/// The cut for matrices of `rows` rows and `tokens` rows of x a workgroup; `one`: for one token of a dense layer. A workgroup
/// makes whole groups of 32 rows; few rows leave few workgroups, so that more waves share those 32, but for experts, of whom
/// there are several. A wave of one token takes its rows one by one, but of formats whose units take so few registers that two
/// at once hide more (H200, docs/reports/h200-vulkan.md).
pub fn glu_shape(format: Format, rows: usize, tokens: u32, experts: bool, one: bool, features: &Features) -> GluShape {
    use Format::*;
    let light = matches!(format, Q4_0 | Q4_1 | Q5_0 | Q5_1 | IQ2_XXS | IQ4_NL | IQ4_XS | TQ2_0 | Q1_0 | Q2_0);
    let threads = threads(&[("THREADS", if rows <= 8192 && !experts { 1024 } else { 512 })], features);
    let teams = threads / features.wave;
    let most = (32 / teams.min(32)).min(8 / tokens);
    let rows = if one && !light { 1 } else { most };
    GluShape { threads, rows, repeat: 32u32.div_ceil(teams * rows) }
}

/// Threads of a workgroup that is not a fixed tile: what `constants` say, or 128, but whole waves and not more than there
/// may be.
pub fn threads(constants: &[(&str, u32)], features: &Features) -> u32 {
    let asked = constants.iter().find(|c| c.0 == "THREADS").map_or(128, |c| c.1);
    asked.min(most_threads(features)).max(features.wave)
}

/// The most threads of a workgroup: 1024, what the device allows, and 32 waves, which every device takes.
pub fn most_threads(features: &Features) -> u32 {
    let waves = if features.wave > 1 { 32 * features.wave } else { 1024 };
    features.max_threads.min(waves).min(1024)
}

/// Every variant in the order of choice, for listings.
pub fn all() -> impl Iterator<Item = &'static Variant> {
    MOE_SLOTS.iter().chain(many())
}

/// The rows for any number of tokens.
fn many() -> impl Iterator<Item = &'static Variant> {
    WIDE_TILES.iter().chain(TILES.iter().flatten()).chain(&HEAD_TILES).chain(VARIANTS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::lower::fixtures;

    #[test]
    fn every_constant_is_one_of_its_kernel() {
        for v in all().chain(&PINNED) {
            let known = hanzo_kernels::constants(v.kernel);
            for (name, _) in v.constants {
                assert!(known.iter().any(|c| c.0 == *name), "{} has no {name}", v.kernel);
            }
        }
    }

    #[test]
    fn tiles_add_up() {
        for v in all().filter(|v| v.kernel.starts_with("gemm")) {
            if let Need::Unit(unit) = v.needs {
                let [threads, bm, bn, wm, mi, ni] =
                    ["THREADS", "BM", "BN", "WM", "MI", "NI"].map(|name| constant(v, name));
                // Other half tiles are laid out by their kernels alone.
                if v.input == Input::Int8 || v.kernel == "gemm_mma_f16" {
                    assert_eq!((threads, bm), (unit.wave() * wm * (bn / 16 / ni), wm * mi * 16), "{v:?}");
                }
                if v.kernel == "gemm_mma_f16" {
                    assert!((2 * bn).is_multiple_of(threads) && (8 * bm).is_multiple_of(threads), "{v:?}");
                } else if v.input == Input::Int8 {
                    assert!((bm + bn) * constant(v, "BU") <= 4 * threads, "{v:?}");
                }
                continue;
            }
            let [threads, bm, bn, tm, tn] = ["THREADS", "BM", "BN", "TM", "TN"].map(|name| constant(v, name));
            assert_eq!(threads, (bm / tm) * (bn / tn), "{v:?}");
            assert!(tm * tn <= 16 && tm.is_multiple_of(2), "{v:?}");
            let items = if v.kernel == "gemm_dot" { (bm + bn) * constant(v, "BU") } else { bm + bn };
            assert!(items <= 4 * threads, "{v:?}");
        }
    }

    #[test]
    fn only_kernels_that_ask_take_more_memory_than_every_launch_gets() {
        let mine = |v: &&Variant| v.needs != Need::Unit(MatrixUnit::Coop2) && v.kernel.starts_with("gemm");
        for v in all().chain(&PINNED).filter(mine) {
            let asks = hanzo_kernels::op(v.kernel).is_some_and(|o| o.asks);
            for (format, _) in hanzo_kernels::formats() {
                let bytes = hanzo_kernels::shared_bytes(Key { op: v.kernel, format: Some(format) }, v.constants);
                let most = if asks { 227 << 10 } else { 48 << 10 };
                assert!(bytes.is_some_and(|n| n <= most), "{v:?} {format}: {bytes:?}");
            }
        }
    }

    #[test]
    fn every_number_of_tokens_has_a_kernel_at_every_wave_size() {
        for (deterministic, wave) in [1, 8, 32, 64, 128].into_iter().flat_map(|w| [(false, w), (true, w)]) {
            let features = Features { wave, max_threads: 256, ..fixtures::scalar() };
            let f = &features;
            for input in [Input::Int8, Input::Float] {
                for tokens in [1, 2, 3, 5, 8, 9, 17, 33, 64, 512, 4096] {
                    let load = Load { tokens, experts: None };
                    assert!(choose(Task::Linear, input, load, 1, deterministic, f).is_some());
                    let load = Load { tokens, experts: Some((8, 128)) };
                    assert!(choose(Task::Moe, input, load, 1, deterministic, f).is_some());
                }
            }
            let load = Load { tokens: 100, experts: None };
            assert!(choose(Task::Head, Input::Int8, load, 1, deterministic, f).is_some());
        }
    }

    #[test]
    fn few_rows_are_cut_while_lanes_have_units_and_the_device_room() {
        let features = |wave| Features { wave, max_threads: 256, ..fixtures::scalar() };
        let waves = |rows, units, wave| waves_of_few_rows(rows, units, &features(wave));
        assert_eq!([waves(128, 64, 32), waves(128, 64, 8), waves(8, 64, 64)], [Some(2), Some(8), Some(1)]);
        assert_eq!([waves(512, 256, 32), waves(1024, 64, 32), waves(1025, 64, 32)], [Some(2), Some(1), None]);
        assert_eq!([waves(1, 0, 128), waves(1, 1 << 20, 128)], [Some(1), Some(2)]);
    }

    #[test]
    fn no_lane_waits_for_units_that_are_not_there() {
        assert_eq!([32, 64, 96, 128, 192, 384, 160].map(|n| units_in_flight(n, 32)), [1, 2, 3, 4, 3, 4, 3]);
    }
}
