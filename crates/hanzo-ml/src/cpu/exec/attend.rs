//! Attention: an item is one sequence's block of query tokens for one key/value head.

use super::Ctx;
use super::contract::{Needs, WorkerScratch};
use super::store::cache_rows;
use crate::backend::Precision;
use crate::batch::Batch;
use crate::cpu::memory::{CpuWeights, Vector};
use crate::cpu::ops::attention::{self, AttentionHeads, AttentionInput};
use crate::cpu::ops::attention_exact::attention_exact;
use crate::cpu::ops::glu;
use crate::plan::{Activation, AttentionSpec, GluKind, Mask, ValueId};

/// `Attention`, bound.
pub(super) struct AttendTask {
    q: ValueId,
    out: ValueId,
    spec: AttentionSpec,
    sinks: Option<Vector>,
    heads: AttentionHeads,
    /// Query tokens of an item.
    block: usize,
    /// f64 inside.
    exact: bool,
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

impl AttendTask {
    pub(super) fn new(
        q: ValueId,
        spec: &AttentionSpec,
        out: ValueId,
        weights: &CpuWeights,
        precision: Precision,
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
            exact: precision == Precision::Exact,
        }
    }

    /// Items: blocks of each sequence, times key/value heads.
    pub(super) fn items(&self, batch: &Batch<'_>) -> usize {
        let blocks = |w: &[u32]| ((w[1] - w[0]) as usize).div_ceil(self.block);
        batch.seq_offsets.windows(2).map(blocks).sum::<usize>() * self.spec.n_kv
    }

    pub(super) fn run(&self, ctx: &Ctx<'_>, item: usize, scratch: &mut WorkerScratch) {
        let (mut block, head) = (item / self.spec.n_kv, item % self.spec.n_kv);
        for (s, w) in ctx.batch.seq_offsets.windows(2).enumerate() {
            let (start, end) = (w[0] as usize, w[1] as usize);
            let blocks = (end - start).div_ceil(self.block);
            if block >= blocks {
                block -= blocks;
                continue;
            }
            // The longest blocks first: they see the most keys.
            let from = start + (blocks - 1 - block) * self.block;
            return self.attend(ctx, s, from..(from + self.block).min(end), head, scratch);
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
        let out = || ctx.part_mut(self.out, tokens.clone(), columns.clone());
        let attention = if self.exact { attention_exact } else { attention::attention };
        attention(ctx.isa, &self.heads, &input, sinks, out(), scratch.floats());
        if let Some(gate) = spec.gate {
            let gate = ctx.part(gate, tokens.clone(), columns.clone());
            let x = ctx.part(self.out, tokens.clone(), columns.clone());
            glu::glu(ctx.isa, GluKind::Plain(Activation::Sigmoid), gate, x, out());
        }
    }
}
