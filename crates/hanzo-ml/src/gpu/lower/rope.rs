//! Lowering of rotation and cache stores: what happens to q, k and v between their projections and attention, one launch an
//! op. All three ops are one kernel, which norms, turns and stores heads, any of these or none. Where attention does that for
//! itself (lever `attention_prologue`), there is no launch here.

use super::Lowering;
use super::attention::{self, cache_code, values_in_key_order};
use crate::error::Result;
use crate::gpu::launch::{Features, Ptr};
use crate::plan::{CacheSlot, Op, RopeConvention, RopeSpec, ValueId, WeightId};
use hanzo_kernels::args::QkNormRope;

/// What a launch does; the parts that are absent are left out of its grid.
struct Heads<'a> {
    /// Columns of a q or k head.
    d: usize,
    q: Option<(ValueId, Option<WeightId>, ValueId)>,
    /// Keys, and where they go if not to the cache.
    k: Option<(ValueId, Option<WeightId>, Option<ValueId>)>,
    v: Option<ValueId>,
    cache: Option<CacheSlot>,
    rope: Option<&'a RopeSpec>,
    eps: f32,
}

/// Threads that take a head.
pub(super) fn threads(d: usize, d_v: usize, features: &Features) -> u32 {
    (d.max(d_v) as u32).div_ceil(2).next_multiple_of(features.wave).clamp(32, 128)
}

/// Adds the op's launches; false if the op is not one of this file's.
pub(super) fn lower(cx: &mut Lowering<'_>, op: &Op) -> Result<bool> {
    let heads = match op {
        Op::Rope { x, head_dim, rope, out } => {
            Heads { d: *head_dim, q: Some((*x, None, *out)), k: None, v: None, cache: None, rope: Some(rope), eps: 0.0 }
        }
        Op::KvStore { k, store } => Heads {
            d: cx.plan.groups[store.cache.group.0 as usize].d_k,
            q: None,
            k: Some((*k, None, None)),
            v: store.v,
            cache: Some(store.cache),
            rope: None,
            eps: 0.0,
        },
        Op::QkNormRope { .. } if cx.followers().any(|op| matches!(op, Op::Attention { .. })) => {
            return attention::with_prologue(cx, op);
        }
        Op::QkNormRope { q, k, q_norm, k_norm, eps, head_dim, rope, q_out, k_out, store } => Heads {
            d: *head_dim,
            q: Some((*q, *q_norm, *q_out)),
            k: Some((*k, *k_norm, *k_out)),
            v: store.and_then(|s| s.v),
            cache: store.map(|s| s.cache),
            rope: Some(rope),
            eps: *eps,
        },
        _ => return Ok(false),
    };
    launch(cx, &heads)?;
    Ok(true)
}

fn launch(cx: &mut Lowering<'_>, h: &Heads<'_>) -> Result<()> {
    let count = |cx: &Lowering<'_>, v: Option<ValueId>, d: usize| v.map_or(0, |v| cx.cols(v) / d);
    let value = |cx: &Lowering<'_>, v: Option<ValueId>| v.map_or(Ptr::NONE, |v| cx.value(v));
    let (q, k) = (h.q.map(|q| q.0), h.k.map(|k| k.0));
    let k_out = h.k.and_then(|k| k.2);
    let group = h.cache.map(|c| &cx.plan.groups[c.group.0 as usize]);
    let d_v = h.v.and(group).map_or(0, |g| g.d_v);
    let (nq, nk, nv) = (count(cx, q, h.d), count(cx, k, h.d), count(cx, h.v, d_v.max(1)));
    let (kt, vt) = match group {
        Some(g) => (cache_code(g.type_k, h.d)?, if d_v == 0 { 0 } else { cache_code(g.type_v, d_v)? }),
        None => (0, 0),
    };
    let (kc, vc) = h.cache.map_or((Ptr::NONE, Ptr::NONE), |c| cx.cache(c));
    let slots = h.cache.map_or(Ptr::NONE, |c| cx.step.group(c.group.0 as usize)[0]);
    let norm = |w: Option<Option<WeightId>>| w.flatten();
    let (q_norm, k_norm) = (norm(h.q.map(|q| q.1)), norm(h.k.map(|k| k.1)));
    // Every absent part is an op that has one of the others.
    let Some(rows) = q.or(k) else { return Ok(()) };
    let args = QkNormRope {
        q: value(cx, q),
        k: value(cx, k),
        v: value(cx, h.v),
        q_norm: cx.optional_vector(q_norm),
        k_norm: cx.optional_vector(k_norm),
        live: cx.live(rows),
        angles: h.rope.map_or(Ptr::NONE, |r| cx.step.rope(r)),
        slots,
        q_out: value(cx, h.q.map(|q| q.2)),
        k_out: value(cx, k_out),
        kc,
        vc: if h.v.is_some() { vc } else { Ptr::NONE },
        eps: h.eps,
    };
    let neox = h.rope.is_none_or(|r| r.convention == RopeConvention::Neox);
    let set = [
        ("THREADS", threads(h.d, d_v, cx.features)),
        ("DQK", h.d as u32),
        ("DV", d_v as u32),
        ("NQ", nq as u32),
        ("NK", nk as u32),
        ("NV", nv as u32),
        ("NDIMS", h.rope.map_or(0, |r| r.n_dims) as u32),
        ("NEOX", neox.into()),
        ("QNORM", q_norm.is_some().into()),
        ("KNORM", k_norm.is_some().into()),
        ("KSTORE", k_out.is_none().into()),
        ("KT", kt),
        ("VT", vt),
        ("VKEY", values_in_key_order(d_v).into()),
    ];
    let tokens = cx.max_rows(rows) as u32;
    cx.launch(None, &args, &set, [(nq + nk + nv) as u32, tokens, 1])
}
