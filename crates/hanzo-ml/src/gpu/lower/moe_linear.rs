//! Lowering of expert linears and of combining their outputs. Expert ids stay on the device: few tokens run slot by slot,
//! many are sorted by expert there, into tiles of one expert each, of which enough are launched for any routing.

use super::Lowering;
use super::linear::{Experts, Source, contract, glu};
use super::variants::{self, Task};
use crate::error::Result;
use crate::gpu::launch::Ptr;
use crate::plan::{Dim, Op, ValueId};
use hanzo_kernels::args::{MoeCombine, MoeSort};

/// Adds the op's launches; false if the op is not one of this file's.
pub(super) fn lower(cx: &mut Lowering<'_>, op: &Op) -> Result<bool> {
    let (x, ids) = match op {
        Op::MoeLinear { x, ids, .. } | Op::MoeLinearGroup { x, ids, .. } => (*x, *ids),
        Op::MoeCombine { x, weights, out } => {
            combine(cx, *x, *weights, *out)?;
            return Ok(true);
        }
        _ => return Ok(false),
    };
    let members = op.members();
    let k = cx.cols(ids);
    let div = if cx.plan.val(x).rows == Dim::Slots(k) { 1 } else { k as u32 };
    let n = members.first().map_or(1, |m| cx.plan.wt(m.w).experts);
    let experts = Experts { ids, k, n, div };
    if cx.followers().next().is_some() {
        glu(cx, x, members, Some(experts))?;
        return Ok(true);
    }
    let source = Source::of(cx, x);
    for m in members {
        contract(cx, Task::Moe, source, x, m, Some(experts))?;
    }
    Ok(true)
}

/// Slots by expert and the tiles that cover them; sorted once for all linears of one routing.
pub(super) fn sorted(cx: &mut Lowering<'_>, e: Experts, slots: u32, live: Ptr, tile: u32) -> Result<(Ptr, Ptr)> {
    let tiles = u64::from(slots.div_ceil(tile)) + e.n as u64;
    let order = cx.scratch("moe.order", 4 * u64::from(slots));
    let tiles = cx.scratch("moe.tiles", 4 + 12 * tiles);
    let ids = cx.value(e.ids);
    let threads = variants::most_threads(cx.features).max(cx.features.wave);
    let segments = (threads / e.n as u32).clamp(1, 64);
    let args = MoeSort { ids, order, tiles, live };
    let set = [("THREADS", threads), ("EXPERTS", e.n as u32), ("SEGMENTS", segments), ("TILE", tile)];
    // The last sort that was launched, if it is the same: memory alone does not say so, as another layer's ids may lie there.
    let last = cx.launches.iter().rev().find(|l| l.kernel.op == "moe_sort").cloned();
    let before = cx.launches.len();
    cx.launch(None, &args, &set, [1; 3])?;
    let same_ids = |op: usize| matches!(&cx.plan.ops[op], Op::MoeLinear { ids, .. } | Op::MoeLinearGroup { ids, .. } if *ids == e.ids);
    if let (Some(last), Some(new)) = (last, cx.launches.last())
        && same_ids(last.op)
        && (&last.constants, &last.relocations) == (&new.constants, &new.relocations)
    {
        cx.launches.truncate(before);
    }
    Ok((order, tiles))
}

fn combine(cx: &mut Lowering<'_>, x: ValueId, weights: ValueId, out: ValueId) -> Result<()> {
    let (cols, slots) = (cx.cols(out) as u32, cx.cols(weights) as u32);
    let quad = u32::from(cols.is_multiple_of(4));
    let threads = variants::threads(&[("THREADS", 128)], cx.features);
    let args =
        MoeCombine { x: cx.value(x), weights: cx.value(weights), y: cx.value(out), live: cx.live(out), cols, slots };
    let across = if quad == 1 { cols / 4 } else { cols };
    let groups = [across.div_ceil(threads), cx.max_rows(out) as u32, 1];
    cx.launch(None, &args, &[("THREADS", threads), ("QUAD", quad)], groups)
}
