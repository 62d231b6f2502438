//! Attention: an item is one sequence's block of query tokens for one key/value head.

use super::Ctx;
use super::contract::{Needs, QuantizeTask, WorkerScratch};
use super::store::cache_rows;
use crate::backend::Precision;
use crate::batch::Batch;
use crate::cpu::memory::{CpuWeights, Vector};
use crate::cpu::ops::attention::{self, AttentionHeads, AttentionInput};
use crate::cpu::ops::attention_exact::attention_exact;
use crate::cpu::ops::{Mat, MatMut, glu};
use crate::plan::{Activation, AttentionSpec, GluKind, Mask, ValueId};

/// Items a thread: the first see the most keys, several times as many as the last.
const ITEMS_A_THREAD: usize = 8;
/// Query rows of an item at least: with fewer, their products cost no more than widening the keys and values.
const SMALL_BLOCK_ROWS: usize = 48;

/// `Attention`, bound.
pub(super) struct AttendTask {
    q: ValueId,
    out: ValueId,
    spec: AttentionSpec,
    sinks: Option<Vector>,
    heads: AttentionHeads,
    /// Query tokens of an item at most, and a number of them that makes whole tiles.
    block: usize,
    unit: usize,
    threads: usize,
    /// f64 inside.
    exact: bool,
    /// Quantizes the output on the way: its rows are in the worker's memory alone.
    quantize: Option<QuantizeTask>,
}

/// One past the last key each token sees: its own position plus one, or the end of its non-causal span.
pub(super) struct Visible {
    ends: Vec<u32>,
    full: Vec<u32>,
    spans: bool,
}

impl Visible {
    pub(super) fn new(n_tokens: usize) -> Visible {
        Visible { ends: vec![0; n_tokens], full: vec![0; n_tokens], spans: false }
    }

    /// Computes the step's ends.
    pub(super) fn fill(&mut self, batch: &Batch<'_>) {
        for (t, p) in batch.positions.iter().enumerate() {
            self.ends[t] = p + 1;
        }
        self.spans = !batch.spans.is_empty();
        for span in batch.spans {
            let span = span.start as usize..span.end as usize;
            if let Some(last) = span.clone().last() {
                self.ends[span].fill(batch.positions[last] + 1);
            }
        }
        for seq in batch.seq_offsets.windows(2) {
            let seq = seq[0] as usize..seq[1] as usize;
            if let Some(last) = seq.clone().last() {
                self.full[seq].fill(batch.positions[last] + 1);
            }
        }
    }
}

/// The greatest common divisor; `b` is not zero.
fn gcd(a: usize, b: usize) -> usize {
    if a.is_multiple_of(b) { b } else { gcd(b, a % b) }
}

impl AttendTask {
    pub(super) fn new(
        q: ValueId,
        spec: &AttentionSpec,
        out: ValueId,
        weights: &CpuWeights,
        precision: Precision,
        threads: usize,
        needs: &mut Needs,
    ) -> AttendTask {
        let group = spec.n_head / spec.n_kv;
        needs.floats = needs.floats.max(attention::attention_scratch(spec.d_k, spec.d_v));
        let heads =
            AttentionHeads { group, scale: spec.scale, window: spec.window, softcap: spec.softcap, split: None };
        AttendTask {
            q,
            out,
            spec: spec.clone(),
            sinks: spec.sinks.map(|w| weights.vector(w.0 as usize)),
            heads,
            block: (attention::BLOCK_ROWS / group).max(1),
            unit: attention::TILE / gcd(attention::TILE, group),
            threads,
            exact: precision == Precision::Exact,
            quantize: None,
        }
    }

    /// The same, with the quantization of what it makes.
    pub(super) fn quantizing(self, quantize: QuantizeTask, needs: &mut Needs) -> AttendTask {
        let scratch = attention::attention_scratch(self.spec.d_k, self.spec.d_v);
        needs.floats = needs.floats.max(scratch + self.block * self.heads.group * self.spec.d_v);
        debug_assert!(quantize.input() == self.out);
        AttendTask { quantize: Some(quantize), ..self }
    }

    /// Query tokens of an item in this step: as many as share a pass over the keys, but fewer where threads would have
    /// nothing to do.
    fn block(&self, batch: &Batch<'_>) -> usize {
        let each = batch.positions.len() * self.spec.n_kv / (self.threads * ITEMS_A_THREAD);
        let whole = |tokens: usize| if tokens < self.unit { tokens.max(1) } else { tokens - tokens % self.unit };
        whole(each.max(SMALL_BLOCK_ROWS / self.heads.group).min(self.block))
    }

    /// Items: blocks of each sequence, times key/value heads.
    pub(super) fn items(&self, batch: &Batch<'_>) -> usize {
        let size = self.block(batch);
        let blocks = |w: &[u32]| ((w[1] - w[0]) as usize).div_ceil(size);
        batch.seq_offsets.windows(2).map(blocks).sum::<usize>() * self.spec.n_kv
    }

    pub(super) fn run(&self, ctx: &Ctx<'_>, item: usize, scratch: &mut WorkerScratch) {
        let size = self.block(ctx.batch);
        let (mut block, head) = (item / self.spec.n_kv, item % self.spec.n_kv);
        for (s, w) in ctx.batch.seq_offsets.windows(2).enumerate() {
            let (start, end) = (w[0] as usize, w[1] as usize);
            let blocks = (end - start).div_ceil(size);
            if block >= blocks {
                block -= blocks;
                continue;
            }
            // The longest blocks first: they see the most keys.
            let from = start + (blocks - 1 - block) * size;
            return self.attend(ctx, s, from..(from + size).min(end), head, scratch);
        }
    }

    fn attend(
        &self,
        ctx: &Ctx<'_>,
        seq: usize,
        tokens: std::ops::Range<usize>,
        head: usize,
        scratch: &mut WorkerScratch,
    ) {
        let spec = &self.spec;
        let group = self.heads.group;
        let tables = &ctx.batch.groups[spec.cache.group.0 as usize];
        let (k, v) = cache_rows(ctx.plan(), ctx.cache, spec.cache, spec.d_v);
        let visible_end = match spec.mask {
            Mask::Full => Some(&ctx.visible.full[tokens.clone()]),
            Mask::Causal if ctx.visible.spans => Some(&ctx.visible.ends[tokens.clone()]),
            Mask::Causal => None,
        };
        let input = AttentionInput {
            q: ctx.part(self.q, tokens.clone(), head * group * spec.d_k..(head + 1) * group * spec.d_k),
            positions: &ctx.batch.positions[tokens.clone()],
            visible_end,
            k,
            v,
            head,
            pages: &tables.pages[tables.offsets[seq] as usize..tables.offsets[seq + 1] as usize],
            first_page: tables.first[seq],
        };
        let sinks = self.sinks.as_ref().map(|s| &s.get()[head * group..(head + 1) * group]);
        let columns = head * group * spec.d_v..(head + 1) * group * spec.d_v;
        let (floats, made) = scratch.floats().split_at_mut(attention::attention_scratch(spec.d_k, spec.d_v));
        let mut out = match self.quantize {
            Some(_) => MatMut::new(&mut made[..tokens.len() * columns.len()], tokens.len(), columns.len()),
            None => ctx.part_mut(self.out, tokens.clone(), columns.clone()),
        };
        let attention = if self.exact { attention_exact } else { attention::attention };
        attention(ctx.isa, &self.heads, &input, sinks, out.reborrow(), floats);
        if let Some(gate) = spec.gate {
            let gate = ctx.part(gate, tokens.clone(), columns.clone());
            // SAFETY: the rows of `out` itself, which `glu` allows.
            let x = unsafe { Mat::from_raw(out.row_ptr(0), tokens.len(), columns.len(), out.stride()) };
            glu::glu(ctx.isa, GluKind::Plain(Activation::Sigmoid), gate, x, out.reborrow());
        }
        if let Some(quantize) = &self.quantize {
            quantize.run_on(ctx, tokens, columns, made.as_ptr());
        }
    }
}
