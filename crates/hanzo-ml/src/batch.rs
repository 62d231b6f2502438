//! One step's data: everything that changes from step to step and that no executable may bake in.

use crate::error::{Error, Result};
use crate::plan::{Plan, Sizes};
use std::ops::Range;

/// What enters the first layer.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// Token ids, `[n_tokens]`.
    Tokens(&'a [u32]),
    /// Embedding rows, `[n_tokens, n_embd]`, such as an image encoder's output.
    Embeddings(&'a [f32]),
}

/// One page group's block tables.
#[derive(Clone, Copy, Debug, Default)]
pub struct GroupTables<'a> {
    /// Page ids of all sequences, one after another.
    pub pages: &'a [u32],
    /// `[n_seqs + 1]`: sequence `s` owns `pages[offsets[s]..offsets[s + 1]]`; entry `i` holds positions
    /// `first[s] * PAGE + i * PAGE ..`.
    pub offsets: &'a [u32],
    /// `[n_seqs]`: index of the first page that is still there (pages out of a window are freed).
    pub first: &'a [u32],
}

/// How output rows become what the caller wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pooling {
    /// Each output row by itself.
    #[default]
    None,
    /// The mean over a sequence's rows.
    Mean,
    /// The last row of a sequence.
    Last,
}

/// A step: some tokens of some sequences. Tokens of a sequence are contiguous and in order.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Tokens or embedding rows.
    pub input: Input<'a>,
    /// Cache positions, `[n_tokens]`: the row a token's key goes to, and what the causal mask compares.
    pub positions: &'a [u32],
    /// Rotary positions, `[n_axes][n_tokens]`; empty means the cache positions on every axis.
    pub rope_positions: &'a [u32],
    /// `[n_seqs + 1]` token offsets.
    pub seq_offsets: &'a [u32],
    /// Block tables, one a page group.
    pub groups: &'a [GroupTables<'a>],
    /// `[n_states][n_seqs]` recurrent state slots.
    pub state_slots: &'a [u32],
    /// Token ranges whose members see each other whole (image tokens).
    pub spans: &'a [Range<u32>],
    /// Adapter (LoRA) of each sequence, 0 for none; empty for none at all.
    pub adapters: &'a [u32],
    /// Token rows that go through the output head, ascending.
    pub out_rows: &'a [u32],
    /// What becomes of the output rows.
    pub pooling: Pooling,
}

impl Batch<'_> {
    /// The sizes this step binds.
    pub fn sizes(&self) -> Sizes {
        Sizes {
            n_tokens: self.positions.len(),
            n_seqs: self.seq_offsets.len().saturating_sub(1),
            n_out: self.out_rows.len(),
        }
    }

    /// Checks the step against a Plan: every length, order and index, so that no backend has to.
    ///
    /// `n_vocab` bounds token ids, `pages[g]` the page ids of group `g`.
    pub fn check(&self, plan: &Plan, n_vocab: usize, pages: &[usize], slots: &[usize]) -> Result<()> {
        let s = self.sizes();
        let bad = |what: String| Err(Error::Batch(what));
        match self.input {
            Input::Tokens(t) => {
                if t.len() != s.n_tokens {
                    return bad(format!("{} tokens but {} positions", t.len(), s.n_tokens));
                }
                if let Some(t) = t.iter().find(|t| **t as usize >= n_vocab) {
                    return bad(format!("token id {t} is outside the vocabulary of {n_vocab}"));
                }
            }
            Input::Embeddings(e) => {
                if e.len() != s.n_tokens * plan.n_embd {
                    return bad(format!("{} embedding elements, expected {} x {}", e.len(), s.n_tokens, plan.n_embd));
                }
            }
        }
        let axes = plan.n_pos_axes;
        if !self.rope_positions.is_empty() && self.rope_positions.len() != axes * s.n_tokens {
            return bad(format!("{} rope positions, expected {axes} x {}", self.rope_positions.len(), s.n_tokens));
        }
        if self.seq_offsets.first() != Some(&0)
            || self.seq_offsets.last() != Some(&(s.n_tokens as u32))
            || self.seq_offsets.windows(2).any(|w| w[0] > w[1])
        {
            return bad(format!("sequence offsets {:?} do not cover {} tokens", self.seq_offsets, s.n_tokens));
        }
        if self.out_rows.windows(2).any(|w| w[0] >= w[1])
            || self.out_rows.last().is_some_and(|r| *r as usize >= s.n_tokens)
        {
            return bad("output rows are not ascending token rows".into());
        }
        if self.groups.len() != plan.groups.len() {
            return bad(format!("{} block tables for {} page groups", self.groups.len(), plan.groups.len()));
        }
        for (g, t) in self.groups.iter().enumerate() {
            if t.offsets.len() != s.n_seqs + 1 || t.first.len() != s.n_seqs || t.offsets.windows(2).any(|w| w[0] > w[1])
            {
                return bad(format!("page group {g}: malformed block table offsets"));
            }
            if t.offsets.last().is_some_and(|n| *n as usize > t.pages.len()) {
                return bad(format!("page group {g}: block table is shorter than its offsets say"));
            }
            if let Some(p) = t.pages.iter().find(|p| **p as usize >= pages.get(g).copied().unwrap_or(0)) {
                return bad(format!("page group {g}: page {p} does not exist"));
            }
            for q in 0..s.n_seqs {
                let (a, b) = (self.seq_offsets[q] as usize, self.seq_offsets[q + 1] as usize);
                let p = &self.positions[a..b];
                if p.windows(2).any(|w| w[0].checked_add(1) != Some(w[1])) {
                    return bad(format!("sequence {q}: positions are not consecutive"));
                }
                let have = (t.first[q] as usize + (t.offsets[q + 1] - t.offsets[q]) as usize) * crate::cache::PAGE;
                if let Some(last) = p.last()
                    && (*last as usize >= have || (p[0] as usize) < t.first[q] as usize * crate::cache::PAGE)
                {
                    return bad(format!("sequence {q}: position {last} has no page in group {g}"));
                }
            }
        }
        if self.state_slots.len() != plan.states.len() * s.n_seqs {
            return bad(format!("{} state slots for {} states", self.state_slots.len(), plan.states.len()));
        }
        for (i, slot) in self.state_slots.iter().enumerate() {
            let limit = slots.get(i / s.n_seqs.max(1)).copied().unwrap_or(0);
            if *slot as usize >= limit {
                return bad(format!("state slot {slot} does not exist"));
            }
        }
        if self.spans.iter().any(|r| r.start > r.end || r.end as usize > s.n_tokens) {
            return bad("a non-causal span lies outside the step".into());
        }
        if !self.adapters.is_empty() && self.adapters.len() != s.n_seqs {
            return bad(format!("{} adapters for {} sequences", self.adapters.len(), s.n_seqs));
        }
        Ok(())
    }
}
