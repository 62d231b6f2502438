//! Lowering of expert linears and of combining their outputs. Expert ids stay on the device: few tokens run slot by slot,
//! many are sorted by expert there, into tiles of one expert each, of which enough are launched for any routing.

use super::Lowering;
use super::linear::{Experts, Routing, Source, contract, glu};
use super::variants::{self, Input, Load, Task};
use crate::backend::CompileOptions;
use crate::error::Result;
use crate::gpu::launch::{Features, Ptr};
use crate::plan::{DType, Dim, Member, Op, Plan, ValueId};
use hanzo_kernels::args::{MoeCombine, MoeDown, MoeSort};

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
    let follower = cx.followers().next().cloned();
    match (follower, members) {
        (None, _) => {}
        (Some(Op::MoeCombine { weights, .. }), [m]) if cx.followers().any(|op| matches!(op, Op::AddRmsNorm { .. })) => {
            super::matvec_norm::lower(cx, x, m, Some((experts, weights)))?;
            return Ok(true);
        }
        (Some(Op::MoeCombine { weights, out, .. }), [m]) => {
            down(cx, x, m, experts, weights, out)?;
            return Ok(true);
        }
        _ => {
            glu(cx, x, members, Some(experts), None)?;
            return Ok(true);
        }
    }
    let source = Source::of(cx, x);
    for m in members {
        contract(cx, Task::Moe, source, x, m, Some(experts))?;
    }
    Ok(true)
}

/// The routing of one token, and the gate, up and glu of the experts that it chooses.
pub(super) fn routed(
    cx: &mut Lowering<'_>,
    x: ValueId,
    ids: ValueId,
    members: &[Member],
    r: Routing<'_>,
) -> Result<()> {
    let k = cx.cols(ids);
    let experts = Experts { ids, k, n: r.spec.n_expert, div: k as u32 };
    glu(cx, x, members, Some(experts), Some(r))
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

/// Can one kernel run this expert linear and the combination of its outputs?
pub(super) fn down_fits(plan: &Plan, options: &CompileOptions, features: &Features, op: &Op, out: ValueId) -> bool {
    let Op::MoeLinear { x, ids, member } = op else { return false };
    let (w, k) = (plan.wt(member.w), plan.val(*ids).cols);
    let load = Load { tokens: plan.val(out).rows.eval(&options.bucket), experts: Some((k, w.experts)) };
    let kernel = variants::choose(Task::MoeDown, Input::Int8, load, w.rows, options.deterministic, features);
    plan.val(*x).dtype == DType::Q8 && plan.val(*x).rows == Dim::Slots(k) && kernel.is_some()
}

/// The experts' matrix and the weighted sum of their outputs.
fn down(cx: &mut Lowering<'_>, x: ValueId, m: &Member, e: Experts, weights: ValueId, out: ValueId) -> Result<()> {
    let w = cx.plan.wt(m.w);
    let (format, rows, units, slots) = (w.format, w.rows as u32, (w.cols / 32) as u32, e.k as u32);
    let load = Load { tokens: cx.max_rows(out), experts: Some((e.k, e.n)) };
    let v = variants::choose(Task::MoeDown, Input::Int8, load, w.rows, cx.options.deterministic, cx.features);
    let constants = v.map_or(&[][..], |v| v.constants);
    let per_wave = constants.iter().find(|c| c.0 == "ROWS").map_or(1, |c| c.1);
    let threads = variants::threads(constants, cx.features);
    let in_flight = variants::units_in_flight((units * slots) as usize, cx.features.wave);
    let q = cx.q8(x);
    let args = MoeDown {
        w: cx.weight(m.w)?,
        xq: q.q,
        xd: q.d,
        xs: q.s,
        bias: cx.optional_vector(m.bias),
        ids: cx.value(e.ids),
        weights: cx.value(weights),
        y: cx.value(out),
        live: cx.live(out),
        rows,
        units,
        slots,
        bias_stride: rows,
    };
    let mut set = constants.to_vec();
    set.extend([("THREADS", threads), ("UNITS", in_flight), ("BIAS", u32::from(m.bias.is_some()))]);
    let span = threads / cx.features.wave * per_wave;
    cx.launch(Some(format), &args, &set, [rows.div_ceil(span), cx.max_rows(out) as u32, 1])
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
