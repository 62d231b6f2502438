//! Contractions on matrix units: many rows of x as f16, weights decoded to f16 tile by tile, sums in f32.
//!
//! Rows of x are turned to f16 once for all members of a group. Never chosen under exact precision or `deterministic`, and
//! not for F32 weights: routers are among them, and half precision would move their choices.

use super::Lowering;
use super::linear::{Experts, Source};
use super::variants::{Load, Task};
use crate::backend::Precision;
use crate::error::Result;
use crate::gpu::launch::Ptr;
use crate::plan::{Member, ValueId};
use hanzo_gguf::Format;
use hanzo_kernels::args::{GemmCoop, Q8ToHalf, RowsToHalf};

/// Tokens (slots of an expert) up to which the other kernels do better.
const FEW: usize = 16;
/// Rows of w that a workgroup covers.
const TILE_ROWS: u32 = 128;

/// Rows of x that a tile should have, if this contraction is for matrix units at all.
pub(super) fn tile(cx: &Lowering<'_>, task: Task, m: &Member, load: Load) -> Option<u32> {
    let w = cx.plan.wt(m.w);
    let refused = !cx.features.coop_f16
        || cx.features.wave != 32
        || cx.options.deterministic
        || cx.options.precision == Precision::Exact
        || !matches!(task, Task::Linear | Task::Moe)
        || w.format == Format::F32
        || w.rows < 32;
    let rows = load.experts.map_or(load.tokens, |(k, n)| (load.tokens * k).div_ceil(n.max(1)));
    match rows {
        _ if refused || load.tokens <= FEW => None,
        0..=32 => Some(32),
        33..=64 => Some(64),
        _ => Some(128),
    }
}

/// One matrix times the rows of `x`.
pub(super) fn contract(
    cx: &mut Lowering<'_>,
    source: Source,
    x: ValueId,
    m: &Member,
    experts: Option<Experts>,
    tile: u32,
) -> Result<()> {
    let w = cx.plan.wt(m.w);
    let (format, rows, units) = (w.format, w.rows as u32, cx.cols(x).div_ceil(32) as u32);
    let slots = cx.max_rows(m.out) as u32;
    let (xh, xscale) = halves(cx, source, x, units)?;
    let (live, bias, y) = (cx.live(m.out), cx.optional_vector(m.bias), cx.value(m.out));
    let (order, tiles) = match experts {
        Some(e) => super::moe_linear::sorted(cx, e, slots, live, tile)?,
        None => (Ptr::NONE, Ptr::NONE),
    };
    let args = GemmCoop {
        w: cx.weight(m.w)?,
        wscale: cx.row_scales(m.w)?,
        xh,
        xscale,
        bias,
        y,
        live,
        tiles,
        order,
        rows,
        units,
        div: experts.map_or(1, |e| e.div),
        bias_stride: rows,
    };
    let set = [("BM", tile), ("BIAS", u32::from(m.bias.is_some())), ("MOE", u32::from(experts.is_some()))];
    let spare = experts.map_or(0, |e| e.n as u32);
    cx.launch(Some(format), &args, &set, [slots.div_ceil(tile) + spare, rows.div_ceil(TILE_ROWS), 1])
}

/// The rows of `x` as f16 with their powers of two, made once an op.
fn halves(cx: &mut Lowering<'_>, source: Source, x: ValueId, units: u32) -> Result<(Ptr, Ptr)> {
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
