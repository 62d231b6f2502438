//! The table of contraction kernels: which one serves which op, input and number of tokens, with which constants.
//!
//! The first row that fits is taken. Under `deterministic` there is one row a kind, whatever the number of tokens, so that a
//! token's sums are the same in every batch. Shapes decide only what leaves the order of sums alone or is the same for
//! every number of tokens ([`units_in_flight`]). No Plan and no device may enter here.

use crate::gpu::launch::Features;

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
}

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// What it computes.
    pub task: Task,
    /// From what.
    pub input: Input,
    /// The most tokens it is for (slots an expert gets on average, for the GEMMs of [`Task::Moe`]).
    pub tokens: usize,
    /// The fewest rows of the matrix.
    pub rows: usize,
    /// The op file.
    pub kernel: &'static str,
    /// Tuning constants other than the kernel's defaults.
    pub constants: &'static [(&'static str, u32)],
}

const ANY: usize = usize::MAX;

const fn row(
    task: Task,
    input: Input,
    (tokens, rows): (usize, usize),
    kernel: &'static str,
    constants: &'static [(&'static str, u32)],
) -> Variant {
    Variant { task, input, tokens, rows, kernel, constants }
}

const TILE_16: &[(&str, u32)] = &[("THREADS", 64), ("BM", 16), ("BN", 32), ("TM", 2), ("TN", 4), ("BU", 4)];
const TILE_32: &[(&str, u32)] = &[("THREADS", 128), ("BM", 32), ("BN", 64), ("TM", 4), ("TN", 4), ("BU", 2)];
const TILE_64: &[(&str, u32)] = &[("THREADS", 256), ("BM", 64), ("BN", 64), ("TM", 4), ("TN", 4), ("BU", 2)];
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
    row(Task::Head, Input::Int8, (1, 0), "matvec", &[("ROWS", 4)]),
    row(Task::Head, Input::Int8, (2, 0), "matvec", &[("TOKENS", 2), ("ROWS", 2)]),
    row(Task::Head, Input::Int8, (4, 0), "matvec", &[("TOKENS", 4), ("ROWS", 2)]),
    // A chunk of the head has room for eight rows and mostly one: pairs that are not there cost their empty workgroups alone.
    row(Task::Head, Input::Int8, (8, 0), "matvec", &[("TOKENS", 2), ("ROWS", 2)]),
    row(Task::Head, Input::Int8, (20, 0), "gemm_dot", TILE_32),
    row(Task::Head, Input::Int8, (ANY, 0), "gemm_dot", TILE_64),
    row(Task::Linear, Input::Float, (1, 0), "matvec_f32", &[("ROWS", 1)]),
    row(Task::Linear, Input::Float, (2, 0), "matvec_f32", &[("TOKENS", 2), ("ROWS", 1)]),
    row(Task::Linear, Input::Float, (4, 0), "matvec_f32", &[("TOKENS", 4), ("ROWS", 1)]),
    row(Task::Linear, Input::Float, (16, 1024), "gemm_f32", FLOATS_16),
    row(Task::Linear, Input::Float, (ANY, 1024), "gemm_f32", FLOATS_64),
    row(Task::Linear, Input::Float, (32, 0), "matvec_f32", &[("TOKENS", 4), ("ROWS", 1)]),
    row(Task::Linear, Input::Float, (ANY, 0), "gemm_f32", FLOATS_FEW),
    row(Task::Moe, Input::Int8, (12, 0), "gemm_dot", TILE_16),
    row(Task::Moe, Input::Int8, (40, 0), "gemm_dot", TILE_32),
    row(Task::Moe, Input::Int8, (ANY, 0), "gemm_dot", TILE_64),
    row(Task::Moe, Input::Float, (12, 0), "gemm_f32", FLOATS_16),
    row(Task::Moe, Input::Float, (ANY, 0), "gemm_f32", FLOATS_64),
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

/// What serves every number of tokens where results must not depend on it.
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

/// The variant for a matrix of `rows` rows; none where no kernel does the task for so many tokens.
pub fn choose(
    task: Task,
    input: Input,
    load: Load,
    rows: usize,
    deterministic: bool,
    features: &Features,
) -> Option<&'static Variant> {
    let fits = |v: &&Variant, tokens: usize| {
        // A tile's threads are fixed: whole waves, and not more than there may be. Mat-vecs take any number.
        let tile = v.kernel.starts_with("gemm");
        let threads = v.constants.iter().find(|c| c.0 == "THREADS").map_or(features.wave, |c| c.1);
        let runs = !tile || (features.wave..=most_threads(features)).contains(&threads);
        (v.task, v.input) == (task, input) && tokens <= v.tokens && rows >= v.rows && runs
    };
    let pinned = || PINNED.iter().find(|v| fits(v, load.tokens));
    if deterministic {
        return pinned();
    }
    let found = match (task, load.experts) {
        (Task::Moe, Some((k, experts))) => {
            let average = (load.tokens * k).div_ceil(experts.max(1));
            let slots = MOE_SLOTS.iter().find(|v| fits(v, load.tokens));
            slots.or_else(|| VARIANTS.iter().find(|v| fits(v, average)))
        }
        _ => VARIANTS.iter().find(|v| fits(v, load.tokens)),
    };
    // Mat-vecs run in waves of any size, tiles do not.
    found.or_else(pinned)
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
    MOE_SLOTS.iter().chain(VARIANTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn constant(v: &Variant, name: &str) -> u32 {
        let default = || hanzo_kernels::constants(v.kernel).into_iter().find(|c| c.0 == name).map(|c| c.1);
        v.constants.iter().find(|c| c.0 == name).map(|c| c.1).or_else(default).unwrap_or(1)
    }

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
            let [threads, bm, bn, tm, tn] = ["THREADS", "BM", "BN", "TM", "TN"].map(|name| constant(v, name));
            assert_eq!(threads, (bm / tm) * (bn / tn), "{v:?}");
            assert!(tm * tn <= 16 && tm.is_multiple_of(2), "{v:?}");
            assert!((bm + bn) * constant(v, "BU") <= 4 * threads, "{v:?}");
        }
    }

    #[test]
    fn every_number_of_tokens_has_a_kernel_at_every_wave_size() {
        for (deterministic, wave) in [1, 8, 32, 64, 128].into_iter().flat_map(|w| [(false, w), (true, w)]) {
            let features = Features {
                wave,
                half_hw: false,
                int_dot: true,
                coop_f16: false,
                shared_bytes: 32768,
                max_threads: 256,
                prefetch_bytes: 0,
            };
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
        let features = |wave| Features {
            wave,
            half_hw: false,
            int_dot: true,
            coop_f16: false,
            shared_bytes: 32768,
            max_threads: 256,
            prefetch_bytes: 0,
        };
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
