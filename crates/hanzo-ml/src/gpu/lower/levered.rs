//! Rows of the table of contraction kernels that a lever must choose: dead ends and what pays on some devices only.
//!
//! They stand before those of [`super::variants`] while their lever is on. No row that needs no lever may enter here.

use super::variants::{
    ANY, Ask, FEW_FOR_TILES, FEW_TOKENS, HALF_32, HIGH_32, Input, MFMA_32, MMA_32, TILE_32, Task, Variant, fits, row,
    tile,
};
use crate::gpu::features::MatrixUnit;
use crate::gpu::launch::Features;
use crate::levers::LeverSet;

/// A row, and the levers of which one must be on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Levered {
    /// Ids of levers.
    pub levers: &'static [&'static str],
    /// The row.
    pub variant: Variant,
}

const fn with(levers: &'static [&'static str], variant: Variant) -> Levered {
    Levered { levers, variant }
}

const RAW: &[&str] = &["quantize_in_matvec", "norm_in_matvec"];
/// 32 rows of x a tile, for the kernels that multiply floats.
const FLOATS_32: &[(&str, u32)] = &[("THREADS", 128), ("BM", 32), ("BN", 64), ("TM", 4), ("TN", 4)];

/// A tile of experts of 32 rows, whatever the tokens; matrix units as in [`super::variants`].
const fn low(input: Input, unit: MatrixUnit, kernel: &'static str, set: &'static [(&'static str, u32)]) -> Levered {
    with(&["moe_tile_32"], tile(Task::Moe, input, unit, ANY, kernel, set))
}

/// The same without matrix units.
const fn low_scalar(input: Input, kernel: &'static str, set: &'static [(&'static str, u32)]) -> Levered {
    let variant = row(Task::Moe, input, (ANY, 0), kernel, set);
    with(&["moe_tile_32"], Variant { over: FEW_TOKENS, ..variant })
}

const fn stage(task: Task) -> Levered {
    let variant = row(task, Input::Int8, (ANY, 16), "gemm_weight_stage", &[]);
    with(&["gemm_weight_stage"], Variant { over: FEW_FOR_TILES, ..variant })
}

const fn naive(task: Task) -> Levered {
    with(&["gemm_coop_naive"], tile(task, Input::Half, MatrixUnit::Coop, ANY, "gemm_coop_naive", &[]))
}

/// Every such row.
pub const LEVERED: &[Levered] = &[
    // Large workgroups: each makes the row's codes again.
    with(RAW, row(Task::Linear, Input::Raw, (1, 4096), "matvec_raw", &[("THREADS", 512), ("ROWS", 2)])),
    with(RAW, row(Task::Linear, Input::Raw, (1, 0), "matvec_raw", &[("THREADS", 512), ("ROWS", 1)])),
    with(RAW, row(Task::Glu, Input::Raw, (1, 8193), "matvec_raw", &[("THREADS", 512), ("ROWS", 2)])),
    with(RAW, row(Task::Glu, Input::Raw, (1, 0), "matvec_raw", &[("THREADS", 1024), ("ROWS", 1)])),
    stage(Task::Linear),
    stage(Task::Moe),
    naive(Task::Linear),
    naive(Task::Moe),
    low(Input::Half, MatrixUnit::Coop, "gemm_coop", HIGH_32),
    low(Input::Half, MatrixUnit::HalfFirst, "gemm_mma_f16", HALF_32),
    low(Input::Int8, MatrixUnit::MmaInt8, "gemm_mma", MMA_32),
    low(Input::Half, MatrixUnit::MmaHalf, "gemm_mma_f16", HALF_32),
    low(Input::Int8, MatrixUnit::Wmma, "gemm_wmma", MMA_32),
    low(Input::Int8, MatrixUnit::Mfma, "gemm_mfma", MFMA_32),
    low(Input::Half, MatrixUnit::Simdgroup, "gemm_simd", HIGH_32),
    low_scalar(Input::Int8, "gemm_dot", TILE_32),
    low_scalar(Input::Int8, "gemm_codes", FLOATS_32),
    low_scalar(Input::Float, "gemm_f32", FLOATS_32),
];

/// The first row whose lever is on that fits; never under `deterministic`.
pub fn pick(ask: &Ask, levers: LeverSet, features: &Features) -> Option<&'static Variant> {
    let on = |l: &&Levered| l.levers.iter().any(|id| levers.on(id));
    let tokens = ask.load.each(ask.task);
    let fits = |l: &&Levered| !ask.deterministic && fits(&l.variant, ask, tokens, features);
    LEVERED.iter().filter(on).find(fits).map(|l| &l.variant)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::features::MatrixUnits;
    use crate::gpu::lower::fixtures;
    use crate::gpu::lower::variants::{Load, constant};

    #[test]
    fn every_levered_row_names_levers_and_constants_of_its_kernel() {
        for l in LEVERED {
            for id in l.levers {
                assert!(crate::levers::find(id).is_ok(), "{id}");
            }
            let known = hanzo_kernels::constants(l.variant.kernel);
            assert!(l.variant.constants.iter().all(|c| known.iter().any(|k| k.0 == c.0)), "{l:?}");
        }
    }

    #[test]
    fn each_dead_end_of_a_gemm_is_one_levers_and_falls_back_where_a_device_lacks_what_it_needs() {
        let coop = Features { matrix: MatrixUnits::NONE.with(MatrixUnit::Coop), ..fixtures::scalar() };
        let slow = Features { int_dot: false, ..fixtures::scalar() };
        let ask = |tokens, experts| {
            let (task, load) = (if experts { Task::Moe } else { Task::Linear }, Load { tokens, experts: None });
            let load = if experts { Load { experts: Some((8, 16)), ..load } } else { load };
            Ask { task, input: Input::Int8, load, rows: 256, format: None, halves: true, deterministic: false }
        };
        let found = |lever, ask: &Ask, f: &Features| pick(ask, fixtures::with(LeverSet::default(), lever, true), f);
        let kernel = |lever, ask: &Ask, f: &Features| found(lever, ask, f).map(|v| v.kernel);
        for experts in [false, true] {
            let many = ask(512, experts);
            assert_eq!(kernel("gemm_weight_stage", &many, &coop), Some("gemm_weight_stage"));
            assert_eq!(kernel("gemm_weight_stage", &many, &slow), None);
            assert_eq!(kernel("gemm_coop_naive", &many, &coop), Some("gemm_coop_naive"));
            assert_eq!(kernel("gemm_coop_naive", &many, &fixtures::scalar()), None);
            assert_eq!(kernel("gemm_coop_naive", &ask(16, experts), &coop), None);
            assert_eq!(pick(&many, LeverSet::default(), &coop), None);
            assert_eq!(pick(&Ask { deterministic: true, ..many }, LeverSet::all(), &coop), None);
        }
        let low = |f: &Features| found("moe_tile_32", &ask(512, true), f).map(|v| (v.kernel, constant(v, "BM")));
        assert_eq!([low(&coop), low(&slow)], [Some(("gemm_coop", 32)), Some(("gemm_codes", 32))]);
        assert_eq!(low(&fixtures::scalar()), Some(("gemm_dot", 32)));
        assert_eq!(low(&Features::hip("gfx942")), Some(("gemm_mfma", 32)));
        assert_eq!(kernel("moe_tile_32", &ask(FEW_TOKENS, true), &coop), None, "few tokens run slot by slot");
    }
}
