//! The meaning of a Plan: an interpreter in f64, one op after another, sequential and as plain as the maths.
//!
//! This is the specification that backends are held to, and what a new op is first written in. Fused ops are the
//! composition of the unfused meanings, literally. Every number carries the bound of an f32 computation of it
//! ([`super::num`]), so that running an op also derives what a backend may differ by. No speed may enter here: no
//! blocking, no threads, no tricks.

mod attention;
mod contraction;
mod elementwise;
mod norm;
mod recurrent;
mod rope;
mod route;

pub use contraction::quantize_row;

use super::array::Array;
use super::case::Rounding;
use super::num::Num;
use super::pages::{Memory, Part};
use super::random::Rng;
use super::weights::Weights;
use crate::backend::Precision;
use crate::batch::{Batch, Input};
use crate::cache::PAGE;
use crate::plan::{Op, Plan, Store, ValueId, WeightId};

/// What happens at a store.
pub enum Storing<'a> {
    /// The interpreter stores its own rows.
    Own,
    /// The rows of this memory, a backend's, are compared with the interpreter's and then taken over, so that what
    /// reads them later works on the same keys and values.
    Follow(&'a Memory),
}

/// What becomes of an op's result before the next op reads it.
#[derive(Clone, Debug, Default)]
pub enum After {
    /// Values and bounds are kept: bounds grow from op to op.
    #[default]
    Keep,
    /// Values are rounded to f32 and count as exact: an implementation that is as good as f32 allows.
    Round,
    /// Values move by plus or minus a share of their bound, at random, and count as exact: one sample of what rounding
    /// may do.
    Sample {
        /// Chooses the signs.
        rng: Rng,
        /// The share.
        share: f64,
    },
}

/// Runs Plans.
pub struct Interpreter<'a> {
    plan: &'a Plan,
    weights: &'a Weights,
    precision: Precision,
    /// What the backend may do beyond rounding as f32 does.
    pub rounding: Rounding,
    /// What stores do.
    pub storing: Storing<'a>,
    /// What happens between ops.
    pub after: After,
    /// What following stores found: error and bound of each element.
    pub stored: Vec<(f64, f64)>,
    values: Vec<Option<Array>>,
}

impl<'a> Interpreter<'a> {
    /// An interpreter of a checked Plan.
    pub fn new(plan: &'a Plan, weights: &'a Weights, precision: Precision) -> Interpreter<'a> {
        Interpreter {
            plan,
            weights,
            precision,
            rounding: Rounding::default(),
            storing: Storing::Own,
            after: After::Keep,
            stored: Vec::new(),
            values: Vec::new(),
        }
    }

    /// Runs a step that has passed [`Batch::check`], with the given input values; afterwards [`Interpreter::value`] has
    /// every value.
    pub fn run(&mut self, batch: &Batch<'_>, inputs: &[(ValueId, Array)], memory: &mut Memory) {
        self.values = vec![None; self.plan.values.len()];
        for (v, x) in inputs {
            self.values[v.0 as usize] = Some(x.clone());
        }
        let plan = self.plan;
        for op in &plan.ops {
            self.op(op, batch, memory);
            for v in op.writes() {
                for x in self.values[v.0 as usize].iter_mut().flat_map(|a| &mut a.data) {
                    match &mut self.after {
                        After::Keep => {}
                        After::Round => *x = Num::from(x.v as f32),
                        After::Sample { rng, share } => *x = Num::exact(x.v + x.e * *share * rng.sign()),
                    }
                }
            }
        }
    }

    /// A value of the last run.
    ///
    /// # Panics
    /// If no op has written it.
    pub fn value(&self, v: ValueId) -> &Array {
        self.values[v.0 as usize].as_ref().expect("a checked Plan reads only what was written")
    }

    fn set(&mut self, v: ValueId, x: Array) {
        self.values[v.0 as usize] = Some(x);
    }

    fn vector(&self, w: WeightId) -> Vec<Num> {
        self.weights.get(w).values.iter().map(|x| Num::exact(*x)).collect()
    }

    fn opt_vector(&self, w: Option<WeightId>) -> Option<Vec<Num>> {
        w.map(|w| self.vector(w))
    }

    fn op(&mut self, op: &Op, batch: &Batch<'_>, memory: &mut Memory) {
        match op {
            Op::Embed { table, scale, out } => {
                let rows = match batch.input {
                    Input::Embeddings(rows) => Array::from_f32(self.plan.n_embd, rows),
                    Input::Tokens(tokens) => {
                        let table = self.weights.get(*table);
                        let scaled = |x: &f64| Num::exact(*x) * Num::exact(f64::from(*scale));
                        let data = tokens.iter().flat_map(|t| table.row(0, *t as usize).iter().map(scaled)).collect();
                        Array { cols: table.cols, data }
                    }
                };
                self.set(*out, rows);
            }
            Op::RmsNorm { x, weight, eps, group, out } => {
                let y = norm::rms_norm(self.value(*x), self.opt_vector(*weight).as_deref(), *eps, *group);
                self.set(*out, y);
            }
            Op::LayerNorm { x, weight, bias, eps, out } => {
                let (weight, bias) = (self.vector(*weight), self.opt_vector(*bias));
                let y = norm::layer_norm(self.value(*x), &weight, bias.as_deref(), *eps);
                self.set(*out, y);
            }
            Op::Linear { x, member } => self.linear(*x, member),
            Op::LinearGroup { x, members } => members.iter().for_each(|m| self.linear(*x, m)),
            Op::Quantize { x, out } => {
                let y = contraction::quantize(self.value(*x));
                self.set(*out, y);
            }
            Op::Rope { x, head_dim, rope, out } => {
                let y = self.rope(self.value(*x), *head_dim, rope, batch);
                self.set(*out, y);
            }
            Op::KvStore { k, store } => {
                let k = self.value(*k).clone();
                self.store(&k, store, batch, memory);
            }
            Op::QkNormRope { q, k, q_norm, k_norm, eps, head_dim, rope, q_out, k_out, store } => {
                // Norm each head if it has a norm, then rotate, then store: the three ops it stands for.
                let normed = |x: ValueId, w: &Option<WeightId>| match w {
                    Some(w) => norm::rms_norm(self.value(x), Some(&self.vector(*w)), *eps, *head_dim),
                    None => self.value(x).clone(),
                };
                let q = self.rope(&normed(*q, q_norm), *head_dim, rope, batch);
                let k = self.rope(&normed(*k, k_norm), *head_dim, rope, batch);
                self.set(*q_out, q);
                if let Some(store) = store {
                    self.store(&k, store, batch, memory);
                }
                if let Some(k_out) = k_out {
                    self.set(*k_out, k);
                }
            }
            Op::Attention { q, spec, out } => {
                let y = self.attention(self.value(*q), spec, batch, memory);
                self.set(*out, y);
            }
            Op::Act { x, kind, out } => {
                let y = self.value(*x).map(|x| elementwise::activate(*kind, x));
                self.set(*out, y);
            }
            Op::Glu { gate, up, kind, out } => {
                let y = self.value(*gate).zip(self.value(*up), |g, u| elementwise::glu(*kind, g, u));
                self.set(*out, y);
            }
            Op::Add { a, b, out } => {
                let y = self.value(*a).zip(self.value(*b), |a, b| a + b);
                self.set(*out, y);
            }
            Op::Mul { a, b, out } => {
                let y = elementwise::multiply(self.value(*a), self.value(*b));
                self.set(*out, y);
            }
            Op::Scale { x, s, out } => {
                let y = self.value(*x).map(|x| x * Num::from(*s));
                self.set(*out, y);
            }
            Op::Softcap { x, cap, out } => {
                let y = self.value(*x).map(|x| elementwise::softcap(x, *cap));
                self.set(*out, y);
            }
            Op::AddRmsNorm { a, b, weight, eps, sum, out } => {
                let s = self.value(*a).zip(self.value(*b), |a, b| a + b);
                let y = norm::rms_norm(&s, self.opt_vector(*weight).as_deref(), *eps, s.cols);
                self.set(*sum, s);
                self.set(*out, y);
            }
            Op::RouteScores { logits, spec, out } => {
                let y = route::scores(self.value(*logits), spec);
                self.set(*out, y);
            }
            Op::RouteTopK { scores, spec, ids, weights } => {
                let (i, w) = route::top_k(self.value(*scores), self.opt_vector(spec.bias).as_deref(), spec);
                self.set(*ids, i);
                self.set(*weights, w);
            }
            Op::RouteNormalise { weights, spec, out } => {
                let y = route::normalise(self.value(*weights), spec);
                self.set(*out, y);
            }
            Op::MoeRoute { logits, spec, ids, weights } => {
                let scores = route::scores(self.value(*logits), spec);
                let (i, raw) = route::top_k(&scores, self.opt_vector(spec.bias).as_deref(), spec);
                self.set(*ids, i);
                self.set(*weights, route::normalise(&raw, spec));
            }
            Op::MoeLinear { x, ids, member } => self.moe_linear(*x, *ids, member),
            Op::MoeLinearGroup { x, ids, members } => members.iter().for_each(|m| self.moe_linear(*x, *ids, m)),
            Op::MoeCombine { x, weights, out } => {
                let y = route::combine(self.value(*x), self.value(*weights));
                self.set(*out, y);
            }
            Op::GatherRows { x, out } => {
                let x = self.value(*x);
                let data = batch.out_rows.iter().flat_map(|r| x.row(*r as usize).iter().copied()).collect();
                let y = Array { cols: x.cols, data };
                self.set(*out, y);
            }
            Op::ShortConv { .. } => self.short_conv(op, batch, memory),
            Op::GatedDelta { .. } => self.gated_delta(op, batch, memory),
            Op::Columns { x, first, out } => {
                let cols = self.plan.val(*out).cols;
                let y = Array::map_rows(self.value(*x), cols, |_, row| row[*first..*first + cols].to_vec());
                self.set(*out, y);
            }
            Op::Concat { a, b, out } => {
                let (a, b) = (self.value(*a), self.value(*b));
                let y = Array::map_rows(a, a.cols + b.cols, |r, row| [row, b.row(r)].concat());
                self.set(*out, y);
            }
            Op::Copy { x, out } => {
                let y = self.value(*x).clone();
                self.set(*out, y);
            }
            Op::AllReduce { xs, out } => {
                let mut y = self.value(xs[0]).clone();
                for (i, e) in y.data.iter_mut().enumerate() {
                    *e = Num::sum(xs.iter().map(|x| self.value(*x).data[i]));
                }
                self.set(*out, y);
            }
        }
    }

    /// Keys and values of this step's tokens go to the rows that the block table gives their positions.
    fn store(&mut self, k: &Array, store: &Store, batch: &Batch<'_>, memory: &mut Memory) {
        let v = store.v.map(|v| self.value(v).clone());
        let group = store.cache.group.0 as usize;
        let layer = store.cache.layer as usize;
        let n_kv = self.plan.groups[group].n_kv;
        for (t, slot) in slots(batch, group).into_iter().enumerate() {
            for (part, rows) in [(Part::Keys, Some(k)), (Part::Values, v.as_ref())] {
                let Some(rows) = rows else { continue };
                let d = rows.cols / n_kv;
                for head in 0..n_kv {
                    let row = &rows.row(t)[head * d..(head + 1) * d];
                    self.store_row(memory, (group, layer, part, head, slot), row);
                }
            }
        }
    }

    fn store_row(
        &mut self,
        memory: &mut Memory,
        (group, layer, part, head, slot): (usize, usize, Part, usize, usize),
        row: &[Num],
    ) {
        let values: Vec<f64> = row.iter().map(|x| x.v).collect();
        match self.storing {
            Storing::Own => memory.groups[group].write(layer, part, head, slot, &values),
            Storing::Follow(backend) => {
                let theirs = &backend.groups[group];
                let g = theirs.group();
                let format = if part == Part::Keys { g.type_k } else { g.type_v };
                let got = theirs.read(layer, part, head, slot);
                for (i, (x, got)) in row.iter().zip(&got).enumerate() {
                    let block = i - i % format.block_len();
                    let end = (block + format.block_len()).min(row.len());
                    let peak = row[block..end].iter().fold(0.0, |m: f64, x| m.max(x.magnitude()));
                    let bound = x.e + super::pages::storage_bound(format, x.magnitude(), peak);
                    self.stored.push(((got - x.v).abs(), bound));
                }
                let bytes = theirs.row(layer, part, head, slot).to_vec();
                memory.groups[group].set_row(layer, part, head, slot, &bytes);
            }
        }
    }
}

/// The physical row (`page * PAGE + offset`) of every token of the step in a page group.
fn slots(batch: &Batch<'_>, group: usize) -> Vec<usize> {
    let mut out = Vec::new();
    for seq in 0..batch.sizes().n_seqs {
        for t in batch.seq_offsets[seq]..batch.seq_offsets[seq + 1] {
            out.push(slot(batch, group, seq, batch.positions[t as usize]));
        }
    }
    out
}

/// The physical row of a position of a sequence.
fn slot(batch: &Batch<'_>, group: usize, seq: usize, position: u32) -> usize {
    let table = &batch.groups[group];
    let page = position as usize / PAGE - table.first[seq] as usize;
    table.pages[table.offsets[seq] as usize + page] as usize * PAGE + position as usize % PAGE
}
