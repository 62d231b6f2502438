//! Lowering of attention: for a few tokens a launch over splits of the keys, the last workgroup of which sums them up and
//! quantizes its rows for the output projection (lever `attention_one_pass`; without, a second launch does), for many tokens
//! one launch over tiles of rows.
//!
//! Grids depend on the bucket alone. How many keys a split takes, and which splits have none, follows in the kernel from
//! the step buffer.

use super::{Lowering, Q8, linear};
use crate::error::{Error, Result};
use crate::gpu::launch::Ptr;
use crate::plan::{AttentionSpec, Mask, Op, ValueId};
use hanzo_gguf::Format;
use hanzo_kernels::args::{AttnCombine, AttnDecode, AttnPrefill};
use hanzo_kernels::cache::{self, Order};

/// The number that kernels know a cache format by.
pub(super) fn cache_code(format: Format, d: usize) -> Result<u32> {
    cache::code(format, d).ok_or_else(|| Error::Unsupported {
        backend: "gpu",
        what: format!("no kernels for {format} cache rows of {d} elements; choose another cache type (-ctk, -ctv)"),
    })
}

/// Are values of `d` columns kept in the keys' order?
pub(super) fn values_in_key_order(d: usize) -> bool {
    cache::values_order(d) == Order::Keys
}

/// The most query heads that one group of threads takes.
const MOST_HEADS: usize = 8;
/// So few groups of that many heads leave most of a device idle while there are few keys: then halves of them take a page.
const FEW_GROUPS: usize = 4;
/// Workgroup memory that attention may take, so that several groups fit on a unit.
const MOST_SHARED: usize = 48 << 10;
/// The widest value rows that the tiled kernel holds sums for.
const WIDEST_TILE: usize = 256;
/// Tokens up to which splits beat tiles: a tile goes through its keys one page after another.
const FEW: usize = 16;
/// Words of scratch that count finished splits, one for each group of heads that one workgroup takes.
const COUNTERS: usize = 4096;
/// Groups of threads that fill a device.
const FULL: usize = 512;

/// Constants and pointers that both kernels share.
struct Shape {
    tokens: usize,
    group: usize,
    set: Vec<(&'static str, u32)>,
    k: Ptr,
    v: Ptr,
    ends: Ptr,
    tables: [Ptr; 4],
}

impl Shape {
    fn new(cx: &Lowering<'_>, q: ValueId, spec: &AttentionSpec) -> Result<Shape> {
        let g = &cx.plan.groups[spec.cache.group.0 as usize];
        let latent = g.d_v == 0;
        let kt = cache_code(g.type_k, spec.d_k)?;
        let vt = if latent { kt } else { cache_code(g.type_v, spec.d_v)? };
        // Each thread sums up at least one run of four columns.
        if spec.d_v % 4 != 0 || spec.d_v / 4 > threads(cx) {
            let what = format!("no attention kernel for values of {} columns; run it on the CPU (-ngl)", spec.d_v);
            return Err(Error::Unsupported { backend: "gpu", what });
        }
        let (k, v) = cx.cache(spec.cache);
        let group = spec.n_head / spec.n_kv;
        let set = vec![
            ("DK", spec.d_k as u32),
            ("DV", spec.d_v as u32),
            ("NKV", spec.n_kv as u32),
            ("GROUP", group as u32),
            ("KT", kt),
            ("VT", vt),
            ("VD", if latent { spec.d_k } else { spec.d_v } as u32),
            ("VKEY", (latent || values_in_key_order(spec.d_v)).into()),
            ("CAPPED", spec.softcap.is_some().into()),
        ];
        Ok(Shape {
            tokens: cx.max_rows(q),
            group,
            set,
            k,
            v: if latent { k } else { v },
            ends: if spec.mask == Mask::Full { cx.step.full() } else { cx.step.ends() },
            tables: cx.step.group(spec.cache.group.0 as usize),
        })
    }
}

/// Adds the op's launches; false if the op is not one of this file's.
pub(super) fn lower(cx: &mut Lowering<'_>, op: &Op) -> Result<bool> {
    let Op::Attention { q, spec, out } = op else { return Ok(false) };
    let shape = Shape::new(cx, *q, spec)?;
    // What quantizes the output, if that runs inside this op.
    let quantize = cx.followers().next().cloned();
    let few = shape.tokens <= FEW.max(4 * cx.options.bucket.n_seqs);
    // One variant for any number of tokens, where results may not depend on it.
    if few || cx.options.deterministic || spec.d_v > WIDEST_TILE {
        let fits = spec.d_v % 32 == 0;
        let planes = quantize.as_ref().filter(|_| fits);
        decode(cx, &shape, *q, spec, *out, planes)?;
        if planes.is_some() {
            return Ok(true);
        }
    } else {
        prefill(cx, &shape, *q, spec, *out)?;
    }
    match &quantize {
        Some(op) => linear::lower(cx, op),
        None => Ok(true),
    }
}

/// Threads of a group that takes a split, or sums splits up.
fn threads(cx: &Lowering<'_>) -> usize {
    cx.features.max_threads.min(256) as usize
}

/// The window as kernels take it: 0 for none.
fn window(spec: &AttentionSpec) -> u32 {
    spec.window.unwrap_or(0)
}

fn decode(
    cx: &mut Lowering<'_>,
    s: &Shape,
    q: ValueId,
    spec: &AttentionSpec,
    out: ValueId,
    quantize: Option<&Op>,
) -> Result<()> {
    let threads = threads(cx);
    let narrow = s.group > MOST_HEADS / 2 && spec.n_kv * s.group.div_ceil(MOST_HEADS) <= FEW_GROUPS;
    let keys: usize = if spec.d_v > 128 || narrow { 32 } else { 64 };
    // Query heads of one group of threads, and how many of them are summed up at a time.
    let lever = cx.options.levers.on("attention_one_pass") && !cx.options.deterministic;
    let done = if lever { spec.d_v } else { 0 };
    let shared =
        |heads: usize, red: usize| 4 * heads * (spec.d_k + threads + keys + 1 + done) + 32 * red * threads + 32;
    let limit = MOST_SHARED.min(cx.features.shared_bytes as usize);
    let mut tiles = s.group.div_ceil(if narrow { MOST_HEADS / 2 } else { MOST_HEADS });
    while tiles < s.group && shared(s.group.div_ceil(tiles), 1) > limit {
        tiles += 1;
    }
    let heads = s.group.div_ceil(tiles);
    let tiles = s.group.div_ceil(heads);
    let red = (2..=heads).rev().find(|r| shared(heads, *r) <= limit).unwrap_or(1);
    // A token sees at most so many runs of `keys` keys, the first and the last of which it may see in part.
    let seen = spec.window.map_or(cx.options.n_ctx, |w| cx.options.n_ctx.min(w as usize + 2 * keys));
    let groups = if cx.options.deterministic { 1 } else { s.tokens } * spec.n_kv * tiles;
    let most = if cx.options.deterministic { 8 } else { (FULL / groups).clamp(1, 128) };
    let splits = seen.div_ceil(keys).clamp(1, most);
    let counters = s.tokens * spec.n_kv * tiles;
    let one_pass = lever && 2 * splits <= threads && counters <= COUNTERS;
    // The f32 rows are left out if nothing but the quantization reads them.
    let planes = match quantize {
        Some(Op::Quantize { out, .. }) => Some(cx.q8(*out)),
        _ => None,
    };
    let read =
        cx.plan.outputs.contains(&out) || cx.plan.consumers()[out.0 as usize].len() > usize::from(planes.is_some());
    let quant = if planes.is_none() { 0 } else { 1 + u32::from(read) };
    let rows = (s.tokens * spec.n_head * splits) as u64;
    // One split leaves nothing to sum up.
    let (part, top, first) = match (one_pass, splits) {
        (true, 1) => (Ptr::NONE, Ptr::NONE, 0),
        (true, _) => {
            let (part, counts) = (cx.scratch("attention sums", 4 * rows * spec.d_v as u64), 4 * COUNTERS as u64);
            let top = cx.scratch("attention counts and weights", counts + 8 * rows);
            cx.zeroed(top.part(0, counts));
            (part, top, COUNTERS as u32)
        }
        _ => (cx.scratch("attention sums", 4 * rows * spec.d_v as u64), cx.scratch("attention weights", 8 * rows), 0),
    };
    let live = cx.live(q);
    let positions = cx.step.positions();
    let [_, tables, firsts, pages] = s.tables;
    let sinks = cx.optional_vector(spec.sinks);
    let gate = spec.gate.map_or(Ptr::NONE, |g| cx.value(g));
    let y = if quant == 1 { Ptr::NONE } else { cx.value(out) };
    let when = |on: bool, p: Ptr| if on { p } else { Ptr::NONE };
    let run = planes.map(|p| Ptr { len: p.s.offset + p.s.len - p.q.offset, ..p.q });
    let plane = |p: fn(&Q8) -> Ptr| planes.map_or(0, |all| ((p(&all).offset - all.q.offset) / 4) as u32);
    let args = AttnDecode {
        q: cx.value(q),
        k: s.k,
        v: s.v,
        live,
        part,
        top,
        sinks: when(one_pass, sinks),
        gate: when(one_pass, gate),
        y: when(one_pass, y),
        xq: when(one_pass, run.unwrap_or(Ptr::NONE)),
        ends: s.ends,
        positions,
        tables,
        firsts,
        pages,
        scale: spec.scale,
        cap: spec.softcap.unwrap_or(1.0),
    };
    let last = [("SINKS", spec.sinks.is_some().into()), ("GATED", spec.gate.is_some().into()), ("QUANT", quant)];
    let mut set = s.set.clone();
    set.extend([("THREADS", threads as u32), ("KEYS", keys as u32), ("SPLITS", splits as u32)]);
    set.extend([("HEADS", heads as u32), ("RED", red as u32), ("WINDOW", window(spec))]);
    if one_pass {
        set.extend(last);
        set.extend([("COMBINE", 1), ("TOP", first), ("XD", plane(|p| p.d)), ("XS", plane(|p| p.s))]);
    }
    cx.launch(None, &args, &set, [splits as u32, (spec.n_kv * tiles) as u32, s.tokens as u32])?;
    if one_pass {
        return Ok(());
    }
    let args = AttnCombine {
        part,
        top,
        live,
        sinks,
        gate,
        y,
        xq: planes.map_or(Ptr::NONE, |p| p.q),
        xd: planes.map_or(Ptr::NONE, |p| p.d),
        xs: planes.map_or(Ptr::NONE, |p| p.s),
        ends: s.ends,
        positions,
        firsts,
        window: window(spec),
    };
    let mut set = vec![
        ("THREADS", threads as u32),
        ("KEYS", keys as u32),
        ("SPLITS", splits as u32),
        ("DV", spec.d_v as u32),
        ("HEADS", spec.n_head as u32),
    ];
    set.extend(last);
    cx.launch(None, &args, &set, [spec.n_head as u32, s.tokens as u32, 1])
}

fn prefill(cx: &mut Lowering<'_>, s: &Shape, q: ValueId, spec: &AttentionSpec, out: ValueId) -> Result<()> {
    let rows = if spec.d_v > 128 { 32 } else { 64 };
    let wide = spec.d_v.div_ceil(64) * 16;
    let keys = if wide > 32 { 8 } else { 512 / wide };
    let tiles = (s.tokens * s.group).div_ceil(rows) as u32;
    let [_, tables, firsts, pages] = s.tables;
    let args = AttnPrefill {
        q: cx.value(q),
        k: s.k,
        v: s.v,
        live: cx.live(q),
        sinks: cx.optional_vector(spec.sinks),
        gate: spec.gate.map_or(Ptr::NONE, |g| cx.value(g)),
        y: cx.value(out),
        ends: s.ends,
        positions: cx.step.positions(),
        tables,
        firsts,
        pages,
        window: window(spec),
        tiles,
        scale: spec.scale,
        cap: spec.softcap.unwrap_or(1.0),
    };
    let mut set = s.set.clone();
    set.extend([("ROWS", rows as u32), ("KEYS", keys as u32), ("WIDE", wide as u32)]);
    set.extend([("SINKS", spec.sinks.is_some().into()), ("GATED", spec.gate.is_some().into())]);
    cx.launch(None, &args, &set, [tiles, spec.n_kv as u32, 1])
}
