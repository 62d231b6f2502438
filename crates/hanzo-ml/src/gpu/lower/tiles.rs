//! GEMMs over tiles: the same arguments whatever multiplies them, so that a row of the table is all a device's own kernel takes.
//!
//! Integers: int8 planes times codes, summed exactly in each unit; every kernel gives the bits of `gemm_dot`, the scalar twin.
//! Halves: rows of x are turned to f16 once for all members of a group, weights are decoded to f16 tile by tile, sums are f32.
//! Halves are never taken under exact precision or `deterministic`, and not for F32 weights: routers are among them, and half
//! precision would move their choices.

use super::linear::{Experts, Source};
use super::variants::{Variant, constant};
use super::{Lowering, Q8};
use crate::backend::Precision;
use crate::error::{Error, Result};
use crate::gpu::launch::Ptr;
use crate::plan::{Member, ValueId};
use hanzo_gguf::Format;
use hanzo_kernels::args::{
    GemmCodes, GemmCoop, GemmCoop2, GemmCoopNaive, GemmDot, GemmMfma, GemmMma, GemmMmaF16, GemmSimd, GemmWeightStage,
    GemmWmma, Q8ToHalf, RowsToHalf,
};

/// May the operands of this matrix be rounded to halves?
pub(super) fn halves_allowed(cx: &Lowering<'_>, format: Format) -> bool {
    cx.options.precision != Precision::Exact && format != Format::F32
}

/// One matrix times int8 rows, in one term or two.
pub(super) fn integers(
    cx: &mut Lowering<'_>,
    v: &Variant,
    q: Q8,
    m: &Member,
    experts: Option<Experts>,
    terms: u32,
) -> Result<()> {
    let w = cx.plan.wt(m.w);
    let (format, rows, units) = (w.format, w.rows as u32, (w.cols / 32) as u32);
    let slots = cx.max_rows(m.out) as u32;
    let (high, wide) = (constant(v, "BM"), constant(v, "BN"));
    let (live, bias, y) = (cx.live(m.out), cx.optional_vector(m.bias), cx.value(m.out));
    let (order, tiles) = match experts {
        Some(e) => super::moe_linear::sorted(cx, e, slots, live, high)?,
        None => (Ptr::NONE, Ptr::NONE),
    };
    let (w, div, bias_stride) = (cx.weight(m.w)?, experts.map_or(1, |e| e.div), rows);
    let Q8 { q: xq, d: xd, s: xs } = q;
    let mut set = v.constants.to_vec();
    let moe = u32::from(experts.is_some());
    set.extend([("TERMS", terms), ("BIAS", u32::from(m.bias.is_some())), ("MOE", moe)]);
    let spare = experts.map_or(0, |e| e.n as u32);
    let groups = [rows.div_ceil(wide), (terms * slots).div_ceil(high) + spare, 1];
    macro_rules! launch {
        ($args:ident) => {{
            let args = $args { w, xq, xd, xs, bias, y, live, tiles, order, rows, units, div, bias_stride };
            cx.launch(Some(format), &args, &set, groups)
        }};
    }
    match v.kernel {
        "gemm_dot" => launch!(GemmDot),
        "gemm_codes" => launch!(GemmCodes),
        "gemm_weight_stage" => launch!(GemmWeightStage),
        "gemm_mma" => launch!(GemmMma),
        "gemm_wmma" => launch!(GemmWmma),
        "gemm_mfma" => launch!(GemmMfma),
        kernel => Err(unknown(kernel)),
    }
}

/// One matrix times the rows of `x` as halves.
pub(super) fn halves(
    cx: &mut Lowering<'_>,
    v: &Variant,
    source: Source,
    x: ValueId,
    m: &Member,
    experts: Option<Experts>,
) -> Result<()> {
    let w = cx.plan.wt(m.w);
    let (format, rows, units) = (w.format, w.rows as u32, cx.cols(x).div_ceil(32) as u32);
    let slots = cx.max_rows(m.out) as u32;
    let high = constant(v, "BM");
    let (xh, xscale) = rows_as_halves(cx, source, x, units)?;
    let (live, bias, y) = (cx.live(m.out), cx.optional_vector(m.bias), cx.value(m.out));
    let (order, tiles) = match experts {
        Some(e) => super::moe_linear::sorted(cx, e, slots, live, high)?,
        None => (Ptr::NONE, Ptr::NONE),
    };
    let (w, wscale) = (cx.weight(m.w)?, cx.row_scales(m.w)?);
    let (div, bias_stride) = (experts.map_or(1, |e| e.div), rows);
    let mut set = v.constants.to_vec();
    set.extend([("BIAS", u32::from(m.bias.is_some())), ("MOE", u32::from(experts.is_some()))]);
    let tiles_of_x = slots.div_ceil(high) + experts.map_or(0, |e| e.n as u32);
    macro_rules! launch {
        ($args:ident, $wide:expr) => {{
            let args = $args { w, wscale, xh, xscale, bias, y, live, tiles, order, rows, units, div, bias_stride };
            cx.launch(Some(format), &args, &set, [tiles_of_x, rows.div_ceil($wide), 1])
        }};
    }
    match v.kernel {
        "gemm_coop" => launch!(GemmCoop, 128),
        "gemm_coop_naive" => launch!(GemmCoopNaive, constant(v, "BN")),
        "gemm_coop2" => launch!(GemmCoop2, constant(v, "BN")),
        "gemm_simd" => launch!(GemmSimd, 64),
        "gemm_mma_f16" => launch!(GemmMmaF16, constant(v, "BN")),
        kernel => Err(unknown(kernel)),
    }
}

/// The table names a kernel that no launch is made for.
fn unknown(kernel: &str) -> Error {
    Error::Unsupported {
        backend: "gpu",
        what: format!("the variant table names {kernel}, a tile that lowering does not know"),
    }
}

/// The rows of `x` as f16 with their powers of two, made once an op.
fn rows_as_halves(cx: &mut Lowering<'_>, source: Source, x: ValueId, units: u32) -> Result<(Ptr, Ptr)> {
    let rows = cx.max_rows(x) as u32;
    let xh = cx.scratch("coop.x", 64 * u64::from(rows) * u64::from(units));
    let xscale = cx.scratch("coop.scale", 4 * u64::from(rows));
    let made = |op: &str| cx.launches.iter().rev().take_while(|l| l.op == cx.op).any(|l| l.kernel.op == op);
    let live = cx.live(x);
    match source {
        Source::Int8(q) if !made("q8_to_half") => {
            cx.launch(None, &Q8ToHalf { xq: q.q, xd: q.d, xh, xscale, live, units }, &[], [rows, 1, 1])?;
        }
        Source::Float(p) if !made("rows_to_half") => {
            let cols = cx.cols(x) as u32;
            cx.launch(None, &RowsToHalf { x: p, xh, xscale, live, cols, units }, &[], [rows, 1, 1])?;
        }
        _ => {}
    }
    Ok((xh, xscale))
}
