//! Rotation and cache stores: what happens to q, k and v between their projections and attention.

use super::Ctx;
use super::contract::{Needs, WorkerScratch};
use super::rows::{GRAIN, blocks_an_item};
use crate::batch::Batch;
use crate::cpu::memory::{CpuCache, CpuWeights, Vector};
use crate::cpu::ops::kv::{self, CacheRows};
use crate::cpu::ops::rope::{self, HeadNorm, RopeHeads};
use crate::cpu::ops::{Mat, MatMut};
use crate::plan::{CacheSlot, Op, Plan, RopeSpec, Sizes, Store, ValueId};
use std::ops::Range;

/// Cosines and sines of a step, one table for each distinct rotation of the Plan, shared by all layers.
pub(super) struct RopeTables {
    tables: Vec<RopeTable>,
}

struct RopeTable {
    spec: RopeSpec,
    frequencies: Vec<f64>,
    magnitude: f64,
    /// `[n_tokens, n_dims]`: cosines, then sines.
    values: Vec<f32>,
}

impl RopeTables {
    /// Tables for every rotation of a Plan, for at most `n_tokens` tokens.
    pub(super) fn new(plan: &Plan, weights: &CpuWeights, n_tokens: usize) -> RopeTables {
        let mut tables: Vec<RopeTable> = Vec::new();
        for op in &plan.ops {
            let (Op::Rope { rope, .. } | Op::QkNormRope { rope, .. }) = op else { continue };
            if tables.iter().any(|t| t.spec == *rope) {
                continue;
            }
            let factors = rope.factors.map(|w| weights.vector(w.0 as usize));
            let mut frequencies = vec![0.0; rope.n_dims / 2];
            rope::rope_frequencies(rope, factors.as_ref().map(Vector::get), &mut frequencies);
            tables.push(RopeTable {
                spec: rope.clone(),
                frequencies,
                magnitude: rope::rope_magnitude(rope),
                values: vec![0.0; n_tokens * rope.n_dims],
            });
        }
        RopeTables { tables }
    }

    fn index(&self, spec: &RopeSpec) -> usize {
        // ok: `new` made a table for every rotation of this very Plan.
        self.tables.iter().position(|t| t.spec == *spec).unwrap_or(0)
    }

    /// Computes the step's angles.
    pub(super) fn fill(&mut self, batch: &Batch<'_>) {
        let n = batch.positions.len();
        let positions = if batch.rope_positions.is_empty() { batch.positions } else { batch.rope_positions };
        for t in &mut self.tables {
            let d = t.spec.n_dims;
            let table = MatMut::new(&mut t.values[..n * d], n, d);
            rope::rope_table(positions, n, 0..n, &t.frequencies, t.spec.sections, t.magnitude, table);
        }
    }

    fn rows(&self, index: usize, rows: Range<usize>) -> Mat<'_> {
        let t = &self.tables[index];
        let d = t.spec.n_dims;
        Mat::new(&t.values[rows.start * d..rows.end * d], rows.len(), d)
    }
}

/// The physical row of every token, for each page group.
pub(super) fn fill_slots(slots: &mut [Vec<u32>], batch: &Batch<'_>) {
    for (slots, g) in slots.iter_mut().zip(batch.groups) {
        for (s, span) in batch.seq_offsets.windows(2).enumerate() {
            let pages = &g.pages[g.offsets[s] as usize..g.offsets[s + 1] as usize];
            let span = span[0] as usize..span[1] as usize;
            for (slot, position) in slots[span.clone()].iter_mut().zip(&batch.positions[span]) {
                *slot = kv::slot_of(*position, pages, g.first[s]);
            }
        }
    }
}

/// The key rows of a layer, and its value rows (`d_v` columns of the keys for latent attention).
pub(super) fn cache_rows(plan: &Plan, cache: &CpuCache, slot: CacheSlot, d_v: usize) -> (CacheRows, CacheRows) {
    let (g, m) = (&plan.groups[slot.group.0 as usize], &cache.groups[slot.group.0 as usize]);
    let layer = slot.layer as usize;
    // SAFETY: the memory holds `pages` pages a layer; the schedule keeps a layer's store and attention apart, and items
    // of one store write different rows.
    unsafe {
        let k = CacheRows::new(m.k(layer), m.pages, g.n_kv, g.d_k, g.type_k);
        let v = if g.d_v == 0 { k.prefix(d_v) } else { CacheRows::new(m.v(layer), m.pages, g.n_kv, g.d_v, g.type_v) };
        (k, v)
    }
}

/// `Rope`, `KvStore` or `QkNormRope`.
pub(super) struct StoreTask {
    kind: Kind,
    /// Tokens of a block.
    block: usize,
    threads: usize,
}

enum Kind {
    Rope {
        x: ValueId,
        heads: RopeHeads,
        table: usize,
        out: ValueId,
    },
    Store {
        k: ValueId,
        store: Store,
    },
    QkNormRope {
        q: ValueId,
        k: ValueId,
        q_norm: Option<Vector>,
        k_norm: Option<Vector>,
        eps: f32,
        heads: RopeHeads,
        table: usize,
        q_out: ValueId,
        k_out: Option<ValueId>,
        store: Option<Store>,
    },
}

impl StoreTask {
    pub(super) fn new(
        plan: &Plan,
        op: &Op,
        weights: &CpuWeights,
        ropes: &RopeTables,
        threads: usize,
        needs: &mut Needs,
    ) -> Option<StoreTask> {
        let vector = |w: &Option<crate::plan::WeightId>| w.map(|w| weights.vector(w.0 as usize));
        let heads =
            |rope: &RopeSpec, head_dim: usize| RopeHeads { convention: rope.convention, head_dim, n_dims: rope.n_dims };
        let (kind, cols) = match op {
            Op::Rope { x, head_dim, rope, out } => {
                let kind = Kind::Rope { x: *x, heads: heads(rope, *head_dim), table: ropes.index(rope), out: *out };
                (kind, plan.val(*x).cols)
            }
            Op::KvStore { k, store } => (Kind::Store { k: *k, store: *store }, plan.val(*k).cols),
            Op::QkNormRope { q, k, q_norm, k_norm, eps, head_dim, rope, q_out, k_out, store } => {
                needs.head = needs.head.max(*head_dim);
                let kind = Kind::QkNormRope {
                    q: *q,
                    k: *k,
                    q_norm: vector(q_norm),
                    k_norm: vector(k_norm),
                    eps: *eps,
                    heads: heads(rope, *head_dim),
                    table: ropes.index(rope),
                    q_out: *q_out,
                    k_out: *k_out,
                    store: *store,
                };
                (kind, plan.val(*q).cols)
            }
            _ => return None,
        };
        Some(StoreTask { kind, block: (GRAIN / cols.max(1)).max(1), threads })
    }

    /// Halves of the fused op: q, and k with v.
    fn halves(&self) -> usize {
        if matches!(self.kind, Kind::QkNormRope { .. }) { 2 } else { 1 }
    }

    /// Tokens of an item.
    fn tokens(&self, sizes: &Sizes) -> usize {
        self.block * blocks_an_item(sizes.n_tokens.div_ceil(self.block) * self.halves(), self.threads)
    }

    pub(super) fn items(&self, sizes: &Sizes) -> usize {
        sizes.n_tokens.div_ceil(self.tokens(sizes)) * self.halves()
    }

    pub(super) fn run(&self, ctx: &Ctx<'_>, item: usize, scratch: &mut WorkerScratch) {
        let (block, half) = (item / self.halves(), item % self.halves());
        let tokens = self.tokens(&ctx.sizes);
        let rows = block * tokens..((block + 1) * tokens).min(ctx.sizes.n_tokens);
        let isa = ctx.isa;
        match &self.kind {
            Kind::Rope { x, heads, table, out } => {
                let table = ctx.ropes.rows(*table, rows.clone());
                rope::rope(isa, *heads, ctx.mat(*x, rows.clone()), table, ctx.mat_mut(*out, rows));
            }
            Kind::Store { k, store } => {
                let (slots, k_rows, _) = target(ctx, store.cache, rows.clone());
                kv::kv_store(isa, k_rows, 0, ctx.mat(*k, rows.clone()), slots);
                store_values(ctx, store, rows);
            }
            Kind::QkNormRope { q, q_norm, eps, heads, table, q_out, .. } if half == 0 => {
                let norm = q_norm.as_ref().map(|w| HeadNorm { weight: Some(w.get()), eps: *eps });
                let table = ctx.ropes.rows(*table, rows.clone());
                rope::norm_rope(isa, *heads, norm, ctx.mat(*q, rows.clone()), table, ctx.mat_mut(*q_out, rows));
            }
            Kind::QkNormRope { k, k_norm, eps, heads, table, k_out, store, .. } => {
                let norm = k_norm.as_ref().map(|w| HeadNorm { weight: Some(w.get()), eps: *eps });
                let table = ctx.ropes.rows(*table, rows.clone());
                let x = ctx.mat(*k, rows.clone());
                if let Some(out) = k_out {
                    rope::norm_rope(isa, *heads, norm, x, table, ctx.mat_mut(*out, rows));
                } else if let Some(store) = store {
                    let (slots, k_rows, _) = target(ctx, store.cache, rows.clone());
                    rope::norm_rope_store(
                        isa,
                        *heads,
                        norm,
                        x,
                        table,
                        k_rows,
                        0,
                        slots,
                        scratch.head_row(heads.head_dim),
                    );
                    store_values(ctx, store, rows);
                }
            }
        }
    }
}

fn target<'a>(ctx: &'a Ctx<'_>, cache: CacheSlot, rows: Range<usize>) -> (&'a [u32], CacheRows, CacheRows) {
    let d_v = ctx.plan().groups[cache.group.0 as usize].d_v;
    let (k, v) = cache_rows(ctx.plan(), ctx.cache, cache, d_v.max(1));
    (&ctx.kv_slots[cache.group.0 as usize][rows], k, v)
}

fn store_values(ctx: &Ctx<'_>, store: &Store, rows: Range<usize>) {
    if let Some(v) = store.v {
        let (slots, _, v_rows) = target(ctx, store.cache, rows.clone());
        kv::kv_store(ctx.isa, v_rows, 0, ctx.mat(v, rows), slots);
    }
}
