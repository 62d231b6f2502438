//! The step buffer: everything that changes from step to step, in one run of u32 words that the host writes and kernels
//! read. Offsets are fixed when a Plan is compiled; kernels get pointers into it.

use super::launch::{Buffer, Ptr};
use crate::batch::{Batch, Input};
use crate::cpu::ops::MatMut;
use crate::cpu::ops::kv::slot_of;
use crate::cpu::ops::rope::{rope_frequencies, rope_magnitude, rope_table};
use crate::error::{Error, Result};
use crate::plan::{Dim, Op, Plan, RopeSpec, Sizes, WeightId};
use std::ops::Range;

/// Words between the arrays' starts: 64 bytes.
const ALIGN: usize = 16;
/// Words of a header entry: 16 bytes, so that a pointer to it is aligned.
const ENTRY: usize = 4;

/// Arrays of one page group, as word ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupLayout {
    /// `[n_tokens]`: the row a token's key goes to, `page * PAGE + row`.
    pub slot: Range<usize>,
    /// `[n_tokens]`: index in `pages` of the block table of the token's sequence.
    pub table: Range<usize>,
    /// `[n_tokens]`: number of the first page in that table (earlier ones have left the window).
    pub first: Range<usize>,
    /// Block tables of all sequences.
    pub pages: Range<usize>,
}

/// One rotation's table: cosines, then sines, of each token.
#[derive(Clone, Debug, PartialEq)]
struct RopeLayout {
    spec: RopeSpec,
    frequencies: Vec<f64>,
    magnitude: f64,
    values: Range<usize>,
}

/// Where everything lies, in words.
#[derive(Clone, Debug, PartialEq)]
pub struct StepLayout {
    /// All words.
    pub words: usize,
    bucket: Sizes,
    /// Row counts that kernels ask for, each in its entry of the header.
    counts: Vec<Dim>,
    /// 1 if the batch carries embedding rows.
    rows_flag: usize,
    /// `[n_tokens]`.
    tokens: Range<usize>,
    /// `[n_out]` of this chunk.
    out_rows: Range<usize>,
    /// `[n_tokens]`: keys below are visible under a causal mask.
    ends: Range<usize>,
    /// `[n_tokens]`: keys below are visible under a full mask.
    full: Range<usize>,
    /// `[n_tokens]`: cache positions.
    positions: Range<usize>,
    /// `[n_seqs + 1]`.
    seq_offsets: Range<usize>,
    /// `[n_states][n_seqs]`.
    state_slots: Vec<Range<usize>>,
    groups: Vec<GroupLayout>,
    ropes: Vec<RopeLayout>,
}

impl StepLayout {
    /// The layout for a lowered Plan. `vector` gives an f32 weight's elements on the host.
    pub fn new(
        plan: &Plan,
        bucket: Sizes,
        n_ctx: usize,
        vector: &dyn Fn(WeightId) -> Option<Vec<f32>>,
    ) -> Result<StepLayout> {
        let mut counts = vec![Dim::Tokens, Dim::Seqs, Dim::Out];
        for v in &plan.values {
            if !counts.contains(&v.rows) {
                counts.push(v.rows);
            }
        }
        let mut words = (counts.len() + 1) * ENTRY;
        let rows_flag = counts.len() * ENTRY;
        let mut array = |n: usize| {
            let at = words.next_multiple_of(ALIGN);
            words = at + n.max(1);
            at..at + n
        };
        let n = bucket.n_tokens;
        let (tokens, out_rows, ends, full, positions) =
            (array(n), array(bucket.n_out.max(1)), array(n), array(n), array(n));
        let seq_offsets = array(bucket.n_seqs + 1);
        let state_slots = plan.states.iter().map(|_| array(bucket.n_seqs)).collect();
        let pages = bucket.n_seqs * (n_ctx.div_ceil(crate::cache::PAGE) + 1);
        let groups = (plan.groups.iter())
            .map(|_| GroupLayout { slot: array(n), table: array(n), first: array(n), pages: array(pages) })
            .collect();
        let mut ropes: Vec<RopeLayout> = Vec::new();
        for op in &plan.ops {
            let (Op::Rope { rope, .. } | Op::QkNormRope { rope, .. }) = op else { continue };
            if ropes.iter().any(|r| r.spec == *rope) {
                continue;
            }
            let factors = match rope.factors {
                Some(w) => Some(vector(w).ok_or_else(|| Error::Weight {
                    name: plan.wt(w).tensor.clone(),
                    what: "rotary factors must be an f32 vector".into(),
                })?),
                None => None,
            };
            let mut frequencies = vec![0.0; rope.n_dims / 2];
            rope_frequencies(rope, factors.as_deref(), &mut frequencies);
            let (magnitude, values) = (rope_magnitude(rope), array(n * rope.n_dims));
            ropes.push(RopeLayout { spec: rope.clone(), frequencies, magnitude, values });
        }
        Ok(StepLayout {
            words: words.next_multiple_of(ALIGN),
            bucket,
            counts,
            rows_flag,
            tokens,
            out_rows,
            ends,
            full,
            positions,
            seq_offsets,
            state_slots,
            groups,
            ropes,
        })
    }

    fn ptr(range: &Range<usize>) -> Ptr {
        Ptr { buffer: Buffer::Step, offset: 4 * range.start as u64, len: 4 * range.len() as u64 }
    }

    /// The whole buffer, for kernels that know where its arrays begin.
    pub fn all(&self) -> Ptr {
        StepLayout::ptr(&(0..self.words))
    }

    /// The word that holds the number of rows in use of a dimension.
    pub fn live(&self, dim: Dim) -> Ptr {
        // ok: `new` made an entry for every dimension of the Plan's values.
        let at = ENTRY * self.counts.iter().position(|d| *d == dim).unwrap_or(0);
        StepLayout::ptr(&(at..at + 1))
    }

    /// How many rows are in use by a pointer of [`StepLayout::live`], if every step of this bucket has as many: that of one
    /// token.
    pub fn known_rows(&self, live: Ptr) -> Option<usize> {
        let entry = (live.offset / 4) as usize / ENTRY;
        let one = (self.bucket.n_tokens, self.bucket.n_seqs, self.bucket.n_out) == (1, 1, 1);
        let dim = self.counts.get(entry).filter(|_| one && live.buffer == Buffer::Step)?;
        Some(dim.eval(&self.bucket))
    }

    /// The word that is 1 if the batch carries embedding rows ([`Buffer::Rows`]) instead of tokens.
    pub fn rows_flag(&self) -> Ptr {
        StepLayout::ptr(&(self.rows_flag..self.rows_flag + 1))
    }

    /// `[n_tokens]` token ids.
    pub fn tokens(&self) -> Ptr {
        StepLayout::ptr(&self.tokens)
    }

    /// `[n_out]` token rows of this chunk of the head.
    pub fn out_rows(&self) -> Ptr {
        StepLayout::ptr(&self.out_rows)
    }

    /// `[n_tokens]`: keys at positions below are visible to a token under a causal mask (spans included).
    pub fn ends(&self) -> Ptr {
        StepLayout::ptr(&self.ends)
    }

    /// `[n_tokens]`: keys at positions below are visible under a full mask.
    pub fn full(&self) -> Ptr {
        StepLayout::ptr(&self.full)
    }

    /// `[n_tokens]` cache positions.
    pub fn positions(&self) -> Ptr {
        StepLayout::ptr(&self.positions)
    }

    /// `[n_seqs + 1]` token offsets. Sequences beyond those of the step are empty.
    pub fn seq_offsets(&self) -> Ptr {
        StepLayout::ptr(&self.seq_offsets)
    }

    /// `[n_seqs]` slots of a recurrent state.
    pub fn state_slots(&self, state: usize) -> Ptr {
        StepLayout::ptr(&self.state_slots[state])
    }

    /// The arrays of a page group: slot, table, first, pages.
    pub fn group(&self, group: usize) -> [Ptr; 4] {
        let g = &self.groups[group];
        [&g.slot, &g.table, &g.first, &g.pages].map(StepLayout::ptr)
    }

    /// `[n_tokens, n_dims]` of a rotation: `n_dims / 2` cosines, then as many sines, f32.
    pub fn rope(&self, spec: &RopeSpec) -> Ptr {
        // ok: `new` made a table for every rotation of the Plan.
        let empty = 0..0;
        StepLayout::ptr(self.ropes.iter().find(|r| r.spec == *spec).map_or(&empty, |r| &r.values))
    }
}

/// Writes steps into a step buffer. Allocates nothing after it is made.
#[derive(Clone, Debug)]
pub struct StepWriter {
    layout: StepLayout,
    scratch: Vec<f32>,
}

impl StepWriter {
    /// A writer for a layout.
    pub fn new(layout: StepLayout) -> StepWriter {
        let most = layout.ropes.iter().map(|r| r.values.len()).max().unwrap_or(0);
        StepWriter { layout, scratch: vec![0.0; most] }
    }

    /// Words of the buffer.
    pub fn words(&self) -> usize {
        self.layout.words
    }

    /// Writes all of a step but its output rows. `words` is the whole buffer (it may be write-combined: nothing is read).
    pub fn body(&mut self, batch: &Batch<'_>, words: &mut [u32]) -> Result<()> {
        let l = &self.layout;
        let s = batch.sizes();
        if s.n_tokens > l.bucket.n_tokens || s.n_seqs > l.bucket.n_seqs {
            return Err(Error::Batch(format!("a step of {s:?} in an executable for {:?}", l.bucket)));
        }
        words[l.rows_flag] = u32::from(matches!(batch.input, Input::Embeddings(_)));
        if let Input::Tokens(t) = batch.input {
            words[l.tokens.clone()][..t.len()].copy_from_slice(t);
        }
        let at = |r: &Range<usize>, t: usize| r.start + t;
        words[l.positions.clone()][..s.n_tokens].copy_from_slice(batch.positions);
        for (t, p) in batch.positions.iter().enumerate() {
            words[at(&l.ends, t)] = p + 1;
        }
        for span in batch.spans {
            let span = span.start as usize..span.end as usize;
            if let Some(last) = span.clone().last() {
                words[at(&l.ends, span.start)..at(&l.ends, span.end)].fill(batch.positions[last] + 1);
            }
        }
        for (q, range) in batch.seq_offsets.windows(2).enumerate() {
            let seq = range[0] as usize..range[1] as usize;
            words[l.seq_offsets.start + q] = range[0];
            if let Some(last) = seq.clone().last() {
                words[at(&l.full, seq.start)..at(&l.full, seq.end)].fill(batch.positions[last] + 1);
            }
        }
        words[l.seq_offsets.start + s.n_seqs..l.seq_offsets.end].fill(s.n_tokens as u32);
        for (state, range) in l.state_slots.iter().enumerate() {
            let slots = &batch.state_slots[state * s.n_seqs..(state + 1) * s.n_seqs];
            words[range.clone()][..slots.len()].copy_from_slice(slots);
        }
        for (g, tables) in l.groups.iter().zip(batch.groups) {
            let n = tables.offsets.last().map_or(0, |n| *n as usize);
            if n > g.pages.len() {
                return Err(Error::Batch(format!("{n} pages in block tables of {}: compiled for less", g.pages.len())));
            }
            words[g.pages.clone()][..n].copy_from_slice(&tables.pages[..n]);
            for (q, range) in batch.seq_offsets.windows(2).enumerate() {
                let pages = &tables.pages[tables.offsets[q] as usize..tables.offsets[q + 1] as usize];
                for t in range[0] as usize..range[1] as usize {
                    words[at(&g.slot, t)] = slot_of(batch.positions[t], pages, tables.first[q]);
                    words[at(&g.table, t)] = tables.offsets[q];
                    words[at(&g.first, t)] = tables.first[q];
                }
            }
        }
        let rope_positions = if batch.rope_positions.is_empty() { batch.positions } else { batch.rope_positions };
        for r in &l.ropes {
            let (n, d) = (s.n_tokens, r.spec.n_dims);
            let values = &mut self.scratch[..n * d];
            let table = MatMut::new(&mut *values, n, d);
            rope_table(rope_positions, n, 0..n, &r.frequencies, r.spec.sections, r.magnitude, table);
            for (to, x) in words[r.values.clone()].iter_mut().zip(values) {
                *to = x.to_bits();
            }
        }
        Ok(())
    }

    /// Writes the output rows of one chunk of the head, and all row counts.
    pub fn head(&self, batch: &Batch<'_>, out_rows: &[u32], words: &mut [u32]) {
        let l = &self.layout;
        let sizes = Sizes { n_out: out_rows.len(), ..batch.sizes() };
        for (i, dim) in l.counts.iter().enumerate() {
            words[ENTRY * i] = dim.eval(&sizes) as u32;
        }
        words[l.out_rows.clone()][..out_rows.len()].copy_from_slice(out_rows);
    }
}
