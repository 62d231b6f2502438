//! Lowering of attention: for a few tokens a launch over splits of the keys, the last workgroup of which sums them up and
//! quantizes its rows for the output projection (lever `attention_one_pass`; without, and for few key heads of many query heads, a
//! second launch does), for many tokens
//! one launch over tiles of rows. In steps of one token the former makes its own queries, key and value too (lever
//! `attention_prologue`).
//!
//! Grids depend on the bucket alone. How many keys a split takes, and which splits have none, follows in the kernel from
//! the step buffer.

use super::{Lowering, Q8, linear, rope};
use crate::backend::CompileOptions;
use crate::error::{Error, Result};
use crate::gpu::launch::{Features, Ptr};
use crate::plan::{Access, AttentionSpec, CacheSlot, Mask, Op, Plan, RopeConvention, Sizes, ValueId};
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
/// Pairs of columns that a thread holds at most while it makes its own rows, and those of one row.
const MOST_PAIRS: [usize; 2] = [8, 4];

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
        if spec.d_v % 4 != 0 || spec.d_v / 4 > threads(cx.features) {
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
    attend(cx, (*q, spec, *out), None)
}

/// Adds the launches of the attention that makes the rows of `op`, a `QkNormRope`, itself.
pub(super) fn with_prologue(cx: &mut Lowering<'_>, op: &Op) -> Result<bool> {
    let attention = cx.followers().find(|op| matches!(op, Op::Attention { .. })).cloned();
    let Some(Op::Attention { q, spec, out }) = attention else { return Ok(false) };
    attend(cx, (q, &spec, out), Some(op))
}

fn attend(
    cx: &mut Lowering<'_>,
    (q, spec, out): (ValueId, &AttentionSpec, ValueId),
    prologue: Option<&Op>,
) -> Result<bool> {
    let shape = Shape::new(cx, q, spec)?;
    // What quantizes the output, if that runs inside this op.
    let quantize = cx.followers().find(|op| matches!(op, Op::Quantize { .. })).cloned();
    // One variant for any number of tokens, where results may not depend on it.
    if few(cx.options) || cx.options.deterministic || spec.d_v > WIDEST_TILE {
        let fits = spec.d_v % 32 == 0;
        let planes = quantize.as_ref().filter(|_| fits);
        decode(cx, &shape, (q, spec, out), prologue, planes)?;
        if planes.is_some() {
            return Ok(true);
        }
    } else {
        prefill(cx, &shape, q, spec, out)?;
    }
    match &quantize {
        Some(op) => linear::lower(cx, op),
        None => Ok(true),
    }
}

/// Does attention go by splits in such a bucket?
fn few(options: &CompileOptions) -> bool {
    options.bucket.n_tokens <= FEW.max(4 * options.bucket.n_seqs)
}

/// May attention `i` make the rows of the `QkNormRope` `p` itself? Only in steps of one token: no other may need its key.
pub(super) fn prologue_fits(plan: &Plan, options: &CompileOptions, features: &Features, p: usize, i: usize) -> bool {
    let Op::QkNormRope { head_dim, k_out: None, store: Some(store), .. } = &plan.ops[p] else { return false };
    let Op::Attention { spec, .. } = &plan.ops[i] else { return false };
    let one = options.bucket == Sizes { n_tokens: 1, n_seqs: 1, n_out: 1 };
    let g = &plan.groups[spec.cache.group.0 as usize];
    let same =
        store.cache == spec.cache && store.v.is_some() && (*head_dim, g.d_k, g.d_v) == (spec.d_k, spec.d_k, spec.d_v);
    // Rows in blocks share words of scales, and their fused form was seen off by 4e-4 on an H200 (docs/log.md).
    let apart = !g.type_k.is_block() && !g.type_v.is_block();
    let alone = !plan.ops[p + 1..i].iter().any(|op| touches(op, spec.cache));
    let cut = Cut::new(options, features, spec, true);
    let (turn, widest) = (rope::threads(spec.d_k, spec.d_v, features) as usize, spec.d_k.max(spec.d_v));
    let pairs = widest.div_ceil(2 * turn);
    let held = (cut.heads + 2).div_ceil((cut.threads / turn).max(1)) * pairs;
    let fits = turn <= cut.threads && held <= MOST_PAIRS[0] && pairs <= MOST_PAIRS[1];
    one && same && apart && alone && fits && cut.shared(spec, cut.heads, cut.red) <= limit(features)
}

/// Does an op read or write rows of this cache?
fn touches(op: &Op, slot: CacheSlot) -> bool {
    let mut found = false;
    op.accesses(&mut |a| found |= matches!(a, Access::CacheRead(c) | Access::CacheWrite(c) if c == slot));
    found
}

/// Threads of a group that takes a split, or sums splits up.
fn threads(features: &Features) -> usize {
    features.max_threads.min(256) as usize
}

/// Workgroup memory that attention may take here.
fn limit(features: &Features) -> usize {
    MOST_SHARED.min(features.shared_bytes as usize)
}

/// The window as kernels take it: 0 for none.
fn window(spec: &AttentionSpec) -> u32 {
    spec.window.unwrap_or(0)
}

/// How attention over splits is cut into groups of threads.
struct Cut {
    threads: usize,
    /// Keys taken at a time.
    keys: usize,
    /// Query heads of one group of threads, and how many of them are summed up at a time.
    heads: usize,
    red: usize,
    /// Groups of heads of a key head.
    tiles: usize,
    splits: usize,
    /// Does the last group sum the splits up, if there is room for it?
    combine: bool,
    /// Waves of a group, if it makes its own rows.
    prologue: Option<usize>,
}

impl Cut {
    fn new(options: &CompileOptions, features: &Features, spec: &AttentionSpec, prologue: bool) -> Cut {
        let (group, threads) = (spec.n_head / spec.n_kv, threads(features));
        let narrow = group > MOST_HEADS / 2 && spec.n_kv * group.div_ceil(MOST_HEADS) <= FEW_GROUPS;
        let keys: usize = if spec.d_v > 128 || narrow { 32 } else { 64 };
        // Splits of one page leave sums to be made in nearly every step, which a launch of a group a head is faster at.
        let combine = options.levers.on("attention_one_pass") && !options.deterministic && !narrow;
        let prologue = prologue.then_some(threads / features.wave.max(1) as usize);
        let mut cut = Cut { threads, keys, heads: 1, red: 1, tiles: 1, splits: 1, combine, prologue };
        let limit = limit(features);
        let mut tiles = group.div_ceil(if narrow { MOST_HEADS / 2 } else { MOST_HEADS });
        while tiles < group && cut.shared(spec, group.div_ceil(tiles), 1) > limit {
            tiles += 1;
        }
        cut.heads = group.div_ceil(tiles);
        cut.tiles = group.div_ceil(cut.heads);
        cut.red = (2..=cut.heads).rev().find(|r| cut.shared(spec, cut.heads, *r) <= limit).unwrap_or(1);
        // A token sees at most so many runs of `keys` keys, the first and the last of which it may see in part.
        let seen = spec.window.map_or(options.n_ctx, |w| options.n_ctx.min(w as usize + 2 * keys));
        let tokens = options.bucket.n_tokens;
        let groups = if options.deterministic { 1 } else { tokens } * spec.n_kv * cut.tiles;
        let most = if options.deterministic { 8 } else { (FULL / groups).clamp(1, 128) };
        cut.splits = seen.div_ceil(keys).clamp(1, most);
        cut
    }

    /// Bytes of workgroup memory with so many heads, `red` of them summed up at a time.
    fn shared(&self, spec: &AttentionSpec, heads: usize, red: usize) -> usize {
        let done = if self.combine { spec.d_v } else { 0 };
        let each = spec.d_k + self.threads + self.keys + 1 + done;
        // Sums of squares, rows as floats, the row that is stored as it is stored.
        let own = self.prologue.map_or(0, |waves| 8 * waves + heads * spec.d_k + 2 * (spec.d_k + spec.d_v) + 20);
        4 * (heads * each + own) + 32 * red * self.threads + 32
    }
}

fn decode(
    cx: &mut Lowering<'_>,
    s: &Shape,
    (q, spec, out): (ValueId, &AttentionSpec, ValueId),
    prologue: Option<&Op>,
    quantize: Option<&Op>,
) -> Result<()> {
    let cut = Cut::new(cx.options, cx.features, spec, prologue.is_some());
    let Cut { threads, keys, heads, red, tiles, splits, .. } = cut;
    let counters = s.tokens * spec.n_kv * tiles;
    let one_pass = cut.combine && 2 * splits <= threads && counters <= COUNTERS;
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
    let mut args = AttnDecode {
        q: cx.value(q),
        k: s.k,
        v: s.v,
        k_new: Ptr::NONE,
        v_new: Ptr::NONE,
        q_norm: Ptr::NONE,
        k_norm: Ptr::NONE,
        kc: Ptr::NONE,
        vc: Ptr::NONE,
        step: cx.step.all(),
        part,
        top,
        sinks: when(one_pass, sinks),
        gate: when(one_pass, gate),
        y: when(one_pass, y),
        xq: when(one_pass, run.unwrap_or(Ptr::NONE)),
    };
    let word = |p: Ptr| (p.offset / 4) as u32;
    let last = [("SINKS", spec.sinks.is_some().into()), ("GATED", spec.gate.is_some().into()), ("QUANT", quant)];
    let mut set = s.set.clone();
    if let Some(Op::QkNormRope { q, k, q_norm, k_norm, eps, rope, store, .. }) = prologue {
        (args.q, args.k_new) = (cx.value(*q), cx.value(*k));
        args.v_new = store.and_then(|s| s.v).map_or(Ptr::NONE, |v| cx.value(v));
        (args.q_norm, args.k_norm) = (cx.optional_vector(*q_norm), cx.optional_vector(*k_norm));
        (args.kc, args.vc) = (s.k, s.v);
        set.extend([("PROLOGUE", 1), ("TURN", rope::threads(spec.d_k, spec.d_v, cx.features))]);
        set.extend([("QNORM", q_norm.is_some().into()), ("KNORM", k_norm.is_some().into()), ("EPS", eps.to_bits())]);
        set.extend([("NDIMS", rope.n_dims as u32), ("NEOX", (rope.convention == RopeConvention::Neox).into())]);
        set.push(("ANGLES", word(cx.step.rope(rope))));
    }
    set.extend([("THREADS", threads as u32), ("KEYS", keys as u32), ("SPLITS", splits as u32)]);
    set.extend([("SCALE", spec.scale.to_bits()), ("CAP", spec.softcap.unwrap_or(1.0).to_bits())]);
    set.extend([("LIVE_AT", word(live)), ("ENDS", word(s.ends)), ("POSITIONS", word(positions))]);
    set.extend([("TABLES", word(tables)), ("FIRSTS", word(firsts)), ("PAGES", word(pages))]);
    set.push(("LIVE", cx.step.known_rows(live).unwrap_or(0) as u32));
    set.extend([("HEADS", heads as u32), ("RED", red as u32), ("WINDOW", window(spec))]);
    if one_pass {
        set.extend(last);
        set.extend([("COMBINE", 1), ("TOP", first), ("XD", plane(|p| p.d)), ("XS", plane(|p| p.s))]);
    }
    cx.launch(None, &args, &set, [(spec.n_kv * tiles) as u32, splits as u32, s.tokens as u32])?;
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

#[cfg(test)]
mod tests {
    use crate::gpu::Program;
    use crate::gpu::launch::Buffer;
    use crate::gpu::lower::fixtures::{options, scalar, with};
    use crate::levers::{LeverSet, tests::layer_plan};

    fn program(tokens: usize, off: &str) -> Program {
        let options = options(with(LeverSet::default(), off, false), tokens);
        crate::gpu::lower::program(&layer_plan(false), &options, &scalar(), &|_| None).expect("it lowers")
    }

    fn count(p: &Program, kernel: &str) -> usize {
        p.launches.iter().filter(|l| l.kernel.op == kernel).count()
    }

    #[test]
    fn attention_of_one_token_is_one_launch_and_one_barrier_less_a_layer() {
        let barriers = |p: &Program| p.barriers.iter().filter(|b| **b).count();
        let (on, off) = (program(1, "weight_prefetch"), program(1, "attention_prologue"));
        assert_eq!([count(&on, "qk_norm_rope"), count(&on, "attn_decode")], [0, 2]);
        assert_eq!([count(&off, "qk_norm_rope"), count(&off, "attn_decode")], [2, 2]);
        assert_eq!(barriers(&on) + 2, barriers(&off));
        // It reads and writes its layer's rows: whoever reads them later waits.
        for l in on.launches.iter().filter(|l| l.kernel.op == "attn_decode") {
            let keys: Vec<bool> =
                (l.touches.iter()).filter_map(|t| matches!(t.buffer, Buffer::Keys(..)).then_some(t.write)).collect();
            assert_eq!(keys, [false, true]);
        }
    }

    #[test]
    fn rows_that_others_may_need_have_a_launch_of_their_own() {
        assert_eq!(count(&program(2, "weight_prefetch"), "qk_norm_rope"), 2);
        assert_eq!(count(&program(1, "kv_store"), "qk_norm_rope"), 4);
    }
}
