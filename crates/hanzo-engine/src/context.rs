//! Running a model: compiled buckets, the caches, and the step buffers that change from token to token.
//!
//! A step is some tokens of some sequences. Long inputs run in chunks of `n_ubatch` tokens; the smallest bucket that a
//! chunk fits is used. After the first step of a bucket nothing here allocates. Text and sampling do not enter.

use crate::error::{Error, Result};
use crate::kv::{Kv, NO_TOKEN, Sequence};
use crate::model::Model;
use hanzo_ml::backend::{CompileOptions, Executable};
use hanzo_ml::batch::{Batch, GroupTables, Input, Pooling};
use hanzo_ml::levers::LeverSet;
use hanzo_ml::plan::Sizes;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Output rows that go through the head at a time.
pub const HEAD_ROWS: usize = 8;
/// The most page groups a Plan may have.
const MAX_GROUPS: usize = 8;

/// Which tokens' logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// None: the tokens only fill the cache.
    None,
    /// The last one's.
    Last,
    /// Those of all tokens from this index on.
    From(usize),
}

impl Rows {
    fn range(self, n: usize) -> Range<usize> {
        match self {
            Rows::None => n..n,
            Rows::Last => n.saturating_sub(1)..n,
            Rows::From(i) => i.min(n)..n,
        }
    }
}

/// What may happen between the chunks of a long input.
#[derive(Default)]
pub struct Control<'a> {
    /// When raised, the evaluation ends with [`Error::Cancelled`]; what was evaluated stays in the sequence.
    pub cancel: Option<&'a AtomicBool>,
    /// Called after each chunk with the tokens done and all tokens.
    pub progress: Option<&'a mut dyn FnMut(usize, usize)>,
}

impl Control<'_> {
    /// Has the flag been raised?
    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_some_and(|c| c.load(Ordering::Relaxed))
    }
}

/// One sequence's part in a step.
pub struct Part<'a> {
    /// The sequence; it has grown by the tokens when the step is done.
    pub seq: &'a mut Sequence,
    /// The tokens to append.
    pub tokens: &'a [u32],
    /// Whose logits are wanted.
    pub rows: Rows,
}

/// A model being run: one owner, one thread.
pub struct Context {
    model: Arc<Model>,
    kv: Kv,
    /// Smallest first.
    buckets: Vec<Bucket>,
    step: Step,
}

struct Bucket {
    sizes: Sizes,
    executable: Box<dyn Executable>,
}

/// The buffers behind a [`Batch`].
#[derive(Default)]
struct Step {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    seq_offsets: Vec<u32>,
    out_rows: Vec<u32>,
    state_slots: Vec<u32>,
    groups: Vec<Tables>,
}

/// The buffers behind a [`GroupTables`].
#[derive(Default)]
struct Tables {
    pages: Vec<u32>,
    offsets: Vec<u32>,
    first: Vec<u32>,
}

impl Context {
    /// Compiles the model's Plan for decode and prefill and allocates its caches.
    pub fn new(model: &Arc<Model>) -> Result<Context> {
        Context::with_levers(model, model.options().levers)
    }

    /// As [`Context::new`], with other levers than the model was loaded with: two contexts of one model compare them. The
    /// sets may not differ in a lever that changes the layout of weights.
    pub fn with_levers(model: &Arc<Model>, levers: LeverSet) -> Result<Context> {
        let (plan, options, size) = (model.plan(), model.options(), model.kv_size());
        if plan.groups.len() > MAX_GROUPS {
            let what = format!("{} page groups, at most {MAX_GROUPS} are supported", plan.groups.len());
            return Err(hanzo_ml::Error::Batch(what).into());
        }
        let kv = Kv::new(&**model.backend(), plan, size)?;
        let mut wanted = model.backend().buckets(size.n_ubatch);
        wanted.retain(|n| (1..size.n_ubatch).contains(n));
        wanted.push(size.n_ubatch);
        wanted.sort_unstable();
        let mut buckets = Vec::new();
        for n_tokens in wanted {
            let sizes = Sizes { n_tokens, n_seqs: size.n_seqs.min(n_tokens), n_out: HEAD_ROWS.min(n_tokens) };
            if buckets.iter().any(|b: &Bucket| b.sizes == sizes) {
                continue;
            }
            let (precision, deterministic) = (options.precision, options.deterministic);
            let compile =
                CompileOptions { levers, bucket: sizes, precision, deterministic, n_ctx: size.n_ctx, eager: None };
            let executable = model.backend().compile(plan, &compile, model.weights())?;
            buckets.push(Bucket { sizes, executable });
        }
        let step = Step::new(plan.groups.len(), plan.states.len(), &kv, size.n_ubatch, size.n_seqs);
        Ok(Context { model: model.clone(), kv, buckets, step })
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The caches.
    pub fn kv(&mut self) -> &mut Kv {
        &mut self.kv
    }

    /// An empty sequence.
    pub fn sequence(&mut self) -> Result<Sequence> {
        self.kv.sequence()
    }

    /// The compiled buckets: their sizes and executables, smallest first.
    pub fn executables(&mut self) -> impl Iterator<Item = (Sizes, &mut Box<dyn Executable>)> {
        self.buckets.iter_mut().map(|b| (b.sizes, &mut b.executable))
    }

    /// Cuts `seq` back to what it has in common with `tokens`, leaving at least one token to evaluate. Returns how many
    /// are kept: fewer than there are in common (none) where a window or a state cannot be cut back.
    pub fn keep_prefix(&mut self, seq: &mut Sequence, tokens: &[u32]) -> Result<usize> {
        let common = seq.tokens().iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let keep = common.min(tokens.len().saturating_sub(1));
        if seq.truncate(keep, &mut self.kv).is_err() {
            seq.truncate(0, &mut self.kv)?;
        }
        Ok(seq.len())
    }

    /// Appends tokens to a sequence, in chunks. `sink` gets the index in `tokens` and the logits `[n_vocab]` of each wanted
    /// row, in order.
    pub fn eval(
        &mut self,
        seq: &mut Sequence,
        tokens: &[u32],
        rows: Rows,
        control: &mut Control<'_>,
        sink: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        let (len, more, n_ctx) = (seq.len(), tokens.len(), self.kv.n_ctx());
        if len + more > n_ctx {
            // Said before the first chunk, not after most of them.
            return Err(Error::ContextFull { len, more, n_ctx });
        }
        let wanted = rows.range(tokens.len());
        let n_ubatch = self.max_tokens();
        let mut done = 0;
        while done < tokens.len() {
            if control.is_cancelled() {
                return Err(Error::Cancelled);
            }
            let chunk = &tokens[done..(done + n_ubatch).min(tokens.len())];
            let from = wanted.start.saturating_sub(done).min(chunk.len());
            let mut parts = [Part { seq: &mut *seq, tokens: chunk, rows: Rows::From(from) }];
            self.step(&mut parts, &mut |_, row, logits| sink(done + row, logits))?;
            done += chunk.len();
            if let Some(progress) = &mut control.progress {
                progress(done, tokens.len());
            }
        }
        Ok(())
    }

    /// Appends embedding rows `[n, n_embd]` (an image, say) in one step; tokens within a span see each other whole.
    pub fn eval_embeddings(&mut self, seq: &mut Sequence, rows: &[f32], spans: &[Range<u32>]) -> Result<()> {
        let n = rows.len() / self.model.plan().n_embd.max(1);
        seq.reserve(&mut self.kv, n)?;
        let tokens = vec![NO_TOKEN; n];
        self.step.clear();
        self.step.push(seq, &tokens, n..n);
        self.run(Input::Embeddings(rows), spans, &mut |_, _| ())?;
        seq.commit(&tokens);
        Ok(())
    }

    /// The most tokens of one step.
    pub fn max_tokens(&self) -> usize {
        self.buckets.last().map_or(0, |b| b.sizes.n_tokens)
    }

    /// One step over several sequences: together at most [`Context::max_tokens`] tokens. `sink` gets the index of the part,
    /// the index of the token in the part, and the logits of each wanted row, in order.
    ///
    /// All or nothing: after an error no sequence has grown.
    pub fn step(&mut self, parts: &mut [Part<'_>], sink: &mut dyn FnMut(usize, usize, &[f32])) -> Result<()> {
        self.step.clear();
        for p in parts.iter_mut() {
            p.seq.reserve(&mut self.kv, p.tokens.len())?;
            self.step.push(p.seq, p.tokens, p.rows.range(p.tokens.len()));
        }
        let n_vocab = self.model.n_vocab();
        // Rows come in order, so the part and token of each are found by walking along.
        let (mut part, mut row) = (0, parts.first().map_or(0, |p| p.rows.range(p.tokens.len()).start));
        let step = std::mem::take(&mut self.step);
        let tables = step.tables();
        let result = self.run_batch(&step.batch(Input::Tokens(&step.tokens), &[], &tables), &mut |_, logits| {
            for logits in logits.chunks_exact(n_vocab) {
                while part < parts.len() && row >= parts[part].tokens.len() {
                    part += 1;
                    row = parts.get(part).map_or(0, |p| p.rows.range(p.tokens.len()).start);
                }
                sink(part, row, logits);
                row += 1;
            }
        });
        self.step = step;
        result?;
        parts.iter_mut().for_each(|p| p.seq.commit(p.tokens));
        Ok(())
    }

    fn run(&mut self, input: Input<'_>, spans: &[Range<u32>], sink: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
        let step = std::mem::take(&mut self.step);
        let tables = step.tables();
        let result = self.run_batch(&step.batch(input, spans, &tables), sink);
        self.step = step;
        result
    }

    fn run_batch(&mut self, batch: &Batch<'_>, sink: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
        let s = batch.sizes();
        let cache = self.kv.cache();
        batch.check(self.model.plan(), self.model.n_vocab(), cache.pages(), cache.slots())?;
        let fits = |b: &&mut Bucket| s.n_tokens <= b.sizes.n_tokens && s.n_seqs <= b.sizes.n_seqs;
        let Some(bucket) = self.buckets.iter_mut().find(fits) else {
            let what = format!("{} tokens of {} sequences are more than one step takes", s.n_tokens, s.n_seqs);
            return Err(hanzo_ml::Error::Batch(what).into());
        };
        Ok(bucket.executable.run(batch, cache, sink)?)
    }
}

impl Step {
    /// Buffers that never grow: room for the largest step.
    fn new(n_groups: usize, n_states: usize, kv: &Kv, n_tokens: usize, n_seqs: usize) -> Step {
        let pages = n_seqs * (kv.n_ctx().div_ceil(hanzo_ml::cache::PAGE) + 1);
        let table = || Tables {
            pages: Vec::with_capacity(pages),
            offsets: Vec::with_capacity(n_seqs + 1),
            first: Vec::with_capacity(n_seqs),
        };
        Step {
            tokens: Vec::with_capacity(n_tokens),
            positions: Vec::with_capacity(n_tokens),
            seq_offsets: Vec::with_capacity(n_seqs + 1),
            out_rows: Vec::with_capacity(n_tokens),
            state_slots: Vec::with_capacity(n_states * n_seqs),
            groups: (0..n_groups).map(|_| table()).collect(),
        }
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.seq_offsets.clear();
        self.seq_offsets.push(0);
        self.out_rows.clear();
        self.state_slots.clear();
        for g in &mut self.groups {
            g.pages.clear();
            g.offsets.clear();
            g.offsets.push(0);
            g.first.clear();
        }
    }

    /// Adds a sequence whose room is reserved. `rows` are the tokens whose logits are wanted.
    fn push(&mut self, seq: &Sequence, tokens: &[u32], rows: Range<usize>) {
        let (start, at) = (self.tokens.len(), seq.len());
        self.tokens.extend_from_slice(tokens);
        self.positions.extend((at..at + tokens.len()).map(|p| p as u32));
        self.out_rows.extend(rows.map(|r| (start + r) as u32));
        self.seq_offsets.push(self.tokens.len() as u32);
        for (g, t) in self.groups.iter_mut().enumerate() {
            let (first, pages) = seq.pages(g);
            t.pages.extend_from_slice(pages);
            t.offsets.push(t.pages.len() as u32);
            t.first.push(first as u32);
        }
        // The batch wants `[n_states][n_seqs]`: each state's slot goes behind those of the sequences before.
        let n = self.seq_offsets.len() - 1;
        for (s, slot) in seq.slots().iter().enumerate() {
            self.state_slots.insert(s * n + n - 1, *slot);
        }
    }

    fn tables(&self) -> [GroupTables<'_>; MAX_GROUPS] {
        let mut tables = [GroupTables::default(); MAX_GROUPS];
        for (t, g) in tables.iter_mut().zip(&self.groups) {
            *t = GroupTables { pages: &g.pages, offsets: &g.offsets, first: &g.first };
        }
        tables
    }

    fn batch<'a>(&'a self, input: Input<'a>, spans: &'a [Range<u32>], tables: &'a [GroupTables<'a>]) -> Batch<'a> {
        Batch {
            input,
            positions: &self.positions,
            rope_positions: &[],
            seq_offsets: &self.seq_offsets,
            groups: &tables[..self.groups.len()],
            state_slots: &self.state_slots,
            spans,
            adapters: &[],
            out_rows: &self.out_rows,
            pooling: Pooling::None,
        }
    }
}
