//! A case: a small Plan, its weights, and steps to run; and the comparison of a backend with the interpreter on it.

use super::array::Array;
use super::interp::{After, Interpreter, Storing};
use super::num::{Num, TINY};
use super::pages::Memory;
use super::random::Rng;
use super::weights::Weights;
use crate::backend::{self, Backend, CompileOptions, Precision, Rounds, Wanted, WeightSource};
use crate::batch::{Batch, GroupTables, Input, Pooling};
use crate::error::{Error, Result};
use crate::levers::LeverSet;
use crate::plan::{DType, Dim, Plan, Sizes, ValueId, Weight};
use hanzo_gguf::{Format, TensorBytes};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// One page group's block tables, owned; see [`GroupTables`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tables {
    /// Page ids of all sequences.
    pub pages: Vec<u32>,
    /// `[n_seqs + 1]`.
    pub offsets: Vec<u32>,
    /// `[n_seqs]`.
    pub first: Vec<u32>,
}

/// A step, owned; see [`Batch`].
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// Token ids; ignored if `embeddings` is there.
    pub tokens: Vec<u32>,
    /// Embedding rows instead of tokens.
    pub embeddings: Option<Vec<f32>>,
    /// Cache positions.
    pub positions: Vec<u32>,
    /// Rotary positions, or empty.
    pub rope_positions: Vec<u32>,
    /// `[n_seqs + 1]`.
    pub seq_offsets: Vec<u32>,
    /// One a page group.
    pub tables: Vec<Tables>,
    /// `[n_states][n_seqs]`.
    pub state_slots: Vec<u32>,
    /// Non-causal spans.
    pub spans: Vec<Range<u32>>,
    /// Output rows.
    pub out_rows: Vec<u32>,
    /// Input values: `[rows, cols]` each; ids are given as whole numbers.
    pub inputs: Vec<(ValueId, Vec<f32>)>,
}

impl Step {
    /// A step of one sequence of `n` tokens from position 0 and no cache: for ops without memory.
    pub fn plain(n: usize) -> Step {
        Step {
            tokens: vec![0; n],
            positions: (0..n as u32).collect(),
            seq_offsets: vec![0, n as u32],
            ..Step::default()
        }
    }

    /// Calls `f` with the borrowed form.
    pub fn with_batch<T>(&self, f: impl FnOnce(&Batch<'_>) -> T) -> T {
        let groups: Vec<GroupTables<'_>> = (self.tables.iter())
            .map(|t| GroupTables { pages: &t.pages, offsets: &t.offsets, first: &t.first })
            .collect();
        f(&Batch {
            input: match &self.embeddings {
                Some(rows) => Input::Embeddings(rows),
                None => Input::Tokens(&self.tokens),
            },
            positions: &self.positions,
            rope_positions: &self.rope_positions,
            seq_offsets: &self.seq_offsets,
            groups: &groups,
            state_slots: &self.state_slots,
            spans: &self.spans,
            adapters: &[],
            out_rows: &self.out_rows,
            pooling: Pooling::None,
        })
    }

    /// The sizes it binds.
    pub fn sizes(&self) -> Sizes {
        self.with_batch(|b| b.sizes())
    }
}

/// Tensors by name.
#[derive(Clone, Debug, Default)]
pub struct Tensors(pub HashMap<String, TensorBytes>);

impl Tensors {
    /// Adds or replaces a tensor.
    pub fn put(&mut self, name: &str, bytes: Vec<u8>) {
        self.0.insert(name.to_string(), TensorBytes::from(bytes));
    }
}

impl WeightSource for Tensors {
    fn tensor(&self, weight: &Weight) -> Result<TensorBytes> {
        self.0
            .get(&weight.tensor)
            .cloned()
            .ok_or_else(|| Error::Weight { name: weight.tensor.clone(), what: "the case does not have it".into() })
    }
}

/// How the allowed difference of a case's outputs is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Bounds carried from op to op: a proof, for a few ops in a row.
    Carried,
    /// For whole Plans, where carried bounds grow beyond use. Noise null: `draws` runs in which every number of every op
    /// moves up or down by a share of its own op's bound. Worst cases add n roundings of a sum in one direction;
    /// independent ones add up to sqrt(n) of them (Higham and Mary 2019, SIAM J. Sci. Comput. 41: with high probability),
    /// so the share is `1 / sqrt(n)` for the shortest contraction of the Plan. The bound is six times the root mean square
    /// of the effect over a row of outputs.
    Noise {
        /// Number of runs.
        draws: usize,
    },
}

/// A small Plan with everything it needs.
#[derive(Clone, Debug)]
pub struct Case {
    /// The op it is about.
    pub op: &'static str,
    /// Format of the weights or cache it is about, or `-`.
    pub format: String,
    /// What is special about it.
    pub about: String,
    /// The plain Plan.
    pub plan: Plan,
    /// Its weights.
    pub tensors: Tensors,
    /// What is run, in order, on one cache.
    pub steps: Vec<Step>,
    /// Pages a group.
    pub pages: Vec<usize>,
    /// Slots a state.
    pub slots: Vec<usize>,
    /// How weights meet activations.
    pub precision: Precision,
    /// Output rows in a chunk of the head, if fewer than the most of a step.
    pub chunk: Option<usize>,
    /// How its outputs are bounded.
    pub bound: Bound,
    /// Bits must be those of the correctly rounded value: the bound is zero.
    pub exact: bool,
}

impl Case {
    /// Tokens of its largest step.
    pub fn most_tokens(&self) -> usize {
        self.steps.iter().map(|s| s.sizes().n_tokens).max().unwrap_or(0)
    }

    /// A case about an op.
    pub fn new(op: &'static str, format: impl ToString, plan: Plan, step: Step) -> Case {
        Case {
            op,
            format: format.to_string(),
            about: String::new(),
            plan,
            tensors: Tensors::default(),
            steps: vec![step],
            pages: Vec::new(),
            slots: Vec::new(),
            precision: Precision::Exact,
            chunk: None,
            bound: Bound::Carried,
            exact: false,
        }
    }

    /// The longest sequence of its steps: whole pages, freed ones included.
    pub fn n_ctx(&self) -> usize {
        let pages = |t: &Tables| {
            let spans = t.offsets.windows(2).zip(&t.first);
            spans.map(|(w, first)| (first + w[1] - w[0]) as usize).max().unwrap_or(0)
        };
        let longest = |s: &Step| s.tables.iter().map(pages).max().unwrap_or(0) * crate::cache::PAGE;
        let last = |s: &Step| s.positions.iter().max().map_or(0, |p| *p as usize + 1);
        self.steps.iter().map(|s| longest(s).max(last(s))).max().unwrap_or(0)
    }

    /// How it is compiled.
    pub fn compile_options(&self, options: RunOptions) -> CompileOptions {
        CompileOptions {
            levers: options.levers,
            bucket: self.bucket(),
            precision: self.precision,
            deterministic: options.deterministic,
            n_ctx: self.n_ctx(),
            eager: None,
        }
    }

    /// The compilation that a run of it will take.
    pub fn wanted(&self, options: RunOptions) -> Wanted<'_> {
        Wanted { plan: &self.plan, source: &self.tensors, options: self.compile_options(options) }
    }

    /// The smallest bucket its steps fit into.
    fn bucket(&self) -> Sizes {
        let sizes = || self.steps.iter().map(Step::sizes);
        let n_out = sizes().map(|s| s.n_out).max().unwrap_or(0);
        Sizes {
            n_tokens: sizes().map(|s| s.n_tokens).max().unwrap_or(0),
            n_seqs: sizes().map(|s| s.n_seqs).max().unwrap_or(0),
            n_out: self.chunk.map_or(n_out, |c| c.min(n_out)).max(1),
        }
    }
}

/// What a comparison found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// Elements compared.
    pub cases: usize,
    /// Elements beyond their bound.
    pub nbad: usize,
    /// The largest ratio of error to bound.
    pub ratio: f64,
    /// The error there.
    pub error: f64,
    /// The bound there.
    pub bound: f64,
    /// What kept the case from running at all.
    pub failure: Option<String>,
    /// What the backend says it has no kernel for.
    pub unsupported: Option<String>,
}

impl Measured {
    /// One element.
    pub fn add(&mut self, error: f64, bound: f64) {
        self.cases += 1;
        // Not a number counts as beyond any bound.
        if error.is_nan() || error > bound {
            self.nbad += 1;
        }
        let ratio = match (error, bound) {
            (e, _) if e.is_nan() => f64::INFINITY,
            (0.0, _) => 0.0,
            (e, b) => e / b,
        };
        if ratio > self.ratio || self.bound == 0.0 && self.ratio == 0.0 {
            (self.ratio, self.error, self.bound) = (ratio, error, bound);
        }
    }

    /// Two findings together.
    pub fn merge(&mut self, o: &Measured) {
        self.cases += o.cases;
        self.nbad += o.nbad;
        if o.ratio > self.ratio || self.bound == 0.0 && self.ratio == 0.0 {
            (self.ratio, self.error, self.bound) = (o.ratio, o.error, o.bound);
        }
        if self.failure.is_none() {
            self.failure.clone_from(&o.failure);
        }
        if self.unsupported.is_none() {
            self.unsupported.clone_from(&o.unsupported);
        }
    }
}

/// What a comparison found, apart for what a backend gives and what it remembers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Findings {
    /// The case's outputs.
    pub outputs: Measured,
    /// Rows stored in the cache, if the case has one: to be off by the storage format's rounding is their nature, which
    /// would hide how close the outputs are.
    pub stored: Measured,
}

impl Findings {
    /// Both together.
    pub fn all(&self) -> Measured {
        let mut all = self.outputs.clone();
        all.merge(&self.stored);
        all
    }
}

/// Output values of a step: those of the Plan's `outputs`, whole.
pub type Outputs = Vec<Vec<f32>>;

/// How a backend is to run a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunOptions {
    /// Levers in force.
    pub levers: LeverSet,
    /// One variant, one order.
    pub deterministic: bool,
}

/// Runs a case on a backend; `each` gets every step's outputs, and the pages after it.
pub fn run_backend(
    case: &Case,
    backend: &dyn Backend,
    options: RunOptions,
    each: &mut dyn FnMut(usize, &Outputs, &Memory) -> Result<()>,
) -> Result<()> {
    case.plan.check()?;
    let weights = backend.load(&case.plan, &case.tensors)?;
    run_loaded(case, backend, &weights, options, each)
}

/// As [`run_backend`] with the case's weights, which are there already.
pub fn run_loaded(
    case: &Case,
    backend: &dyn Backend,
    weights: &Arc<dyn backend::Weights>,
    options: RunOptions,
    each: &mut dyn FnMut(usize, &Outputs, &Memory) -> Result<()>,
) -> Result<()> {
    case.plan.check()?;
    let mut cache = backend.alloc(&case.plan, &case.pages, &case.slots)?;
    let mut exe = backend.compile(&case.plan, &case.compile_options(options), weights)?;
    let mut pages = Memory::new(&case.plan, &case.pages, &case.slots);
    for (i, step) in case.steps.iter().enumerate() {
        for (v, data) in &step.inputs {
            let ids = case.plan.val(*v).dtype == DType::I32;
            let storage = exe.value_mut(*v)?;
            for (to, x) in storage.iter_mut().zip(data) {
                *to = if ids { f32::from_bits(*x as i32 as u32) } else { *x };
            }
        }
        let mut last_rows = Vec::new();
        step.with_batch(|b| exe.run(b, cache.as_mut(), &mut |_, rows| last_rows.extend_from_slice(rows)))?;
        let sizes = step.sizes();
        let mut outputs = Vec::new();
        for (n, v) in case.plan.outputs.iter().enumerate() {
            let value = case.plan.val(*v);
            let len = value.rows.eval(&sizes) * value.cols;
            let rows = if value.rows == Dim::Out && n + 1 == case.plan.outputs.len() {
                last_rows.clone()
            } else {
                exe.value(*v)?.to_vec()
            };
            let Some(rows) = rows.get(..len) else {
                let what = format!("{} has {} elements after the step, expected {len}", value.name, rows.len());
                return Err(Error::Batch(what));
            };
            let ids = value.dtype == DType::I32;
            outputs.push(rows.iter().map(|x| if ids { x.to_bits() as i32 as f32 } else { *x }).collect());
        }
        for (g, group) in pages.groups.iter_mut().enumerate() {
            for (p, page) in group.pages.iter_mut().enumerate() {
                *page = cache.read_page(g, p as u32)?;
            }
        }
        each(i, &outputs, &pages)?;
    }
    Ok(())
}

/// What a backend may do beyond rounding as f32 does.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rounding {
    /// See [`Backend::staging`].
    pub staging: f64,
    /// See [`Backend::flushes`].
    pub flushes: bool,
    /// See [`Backend::rounds_to_bf16`]; a [`Reference`] asks the backend that it checks.
    pub bf16: Rounds,
}

impl Rounding {
    /// What any of these may do to a case.
    pub fn of<'b>(backends: impl Iterator<Item = &'b dyn Backend>, case: &Case) -> Rounding {
        backends.fold(Rounding::default(), |r, b| Rounding {
            staging: r.staging.max(b.staging(case.most_tokens())),
            flushes: r.flushes || b.flushes(),
            bf16: Rounds::Never,
        })
    }
}

/// What the outputs of a case should be, worked out once and compared with many runs.
pub struct Reference<'a> {
    case: &'a Case,
    weights: Weights,
    rounding: Rounding,
    /// One array an output, one list a step; none where the answer depends on the keys a backend stored.
    fixed: Option<Vec<Vec<Array>>>,
    /// The same where activations of BF16 weights are rounded, on some devices or always: worked out when a backend asks.
    fixed_bf16: [OnceLock<Option<Vec<Vec<Array>>>>; 2],
}

impl<'a> Reference<'a> {
    /// Works out a case.
    pub fn new(case: &'a Case) -> Result<Reference<'a>> {
        Reference::with_rounding(case, Rounding::default())
    }

    /// As [`Reference::new`], for backends that round so at most.
    pub fn with_rounding(case: &'a Case, rounding: Rounding) -> Result<Reference<'a>> {
        case.plan.check()?;
        let weights = Weights::load(&case.plan, &case.tensors)?;
        let mut r = Reference { case, weights, rounding, fixed: None, fixed_bf16: Default::default() };
        r.fixed = r.fix(rounding);
        Ok(r)
    }

    /// Every step's outputs, unless they depend on what a backend stored.
    fn fix(&self, rounding: Rounding) -> Option<Vec<Vec<Array>>> {
        match self.case.bound {
            Bound::Noise { draws } => Some(self.noise_null(draws, rounding)),
            Bound::Carried if self.case.plan.groups.is_empty() => Some(self.interpret(After::Keep, rounding)),
            Bound::Carried => None,
        }
    }

    /// What a backend with these levers is held to: its rounding, and the outputs if they are fixed.
    fn held_to(&self, backend: &dyn Backend, levers: LeverSet) -> (Rounding, &Option<Vec<Vec<Array>>>) {
        let case = self.case;
        let concerned = case.precision == Precision::Int8
            && case.plan.ops.iter().flat_map(|o| o.members()).any(|m| case.plan.wt(m.w).format == Format::BF16);
        let bf16 = if concerned { backend.rounds_to_bf16(levers) } else { Rounds::Never };
        let rounding = Rounding { bf16, ..self.rounding };
        let fixed = match bf16 {
            Rounds::Never => &self.fixed,
            Rounds::Somewhere => self.fixed_bf16[0].get_or_init(|| self.fix(rounding)),
            Rounds::Always => self.fixed_bf16[1].get_or_init(|| self.fix(rounding)),
        };
        (rounding, fixed)
    }

    fn inputs(&self, step: &Step) -> Vec<(ValueId, Array)> {
        let array = |v: ValueId, x: &[f32]| Array::from_f32(self.case.plan.val(v).cols, x);
        step.inputs.iter().map(|(v, x)| (*v, array(*v, x))).collect()
    }

    /// Every step's outputs, the interpreter keeping its own cache.
    fn interpret(&self, after: After, rounding: Rounding) -> Vec<Vec<Array>> {
        let case = self.case;
        let mut memory = Memory::new(&case.plan, &case.pages, &case.slots);
        let mut interp = Interpreter::new(&case.plan, &self.weights, case.precision);
        interp.rounding = rounding;
        interp.after = after;
        let mut all = Vec::new();
        for step in &case.steps {
            step.with_batch(|b| interp.run(b, &self.inputs(step), &mut memory));
            all.push(case.plan.outputs.iter().map(|v| interp.value(*v).clone()).collect());
        }
        all
    }

    fn noise_null(&self, draws: usize, rounding: Rounding) -> Vec<Vec<Array>> {
        // The centre is exact: f64 all the way, F32 caches aside.
        let mut centre = self.interpret(After::Keep, rounding);
        let plan = &self.case.plan;
        let terms = plan.ops.iter().flat_map(|o| o.members()).map(|m| plan.wt(m.w).cols).min().unwrap_or(1);
        let share = 1.0 / (terms as f64).sqrt();
        let sample = |i: usize| self.interpret(After::Sample { rng: Rng::new(0x0153 + i as u64), share }, rounding);
        let samples: Vec<_> = (0..draws).map(sample).collect();
        for (s, outputs) in centre.iter_mut().enumerate() {
            for (o, array) in outputs.iter_mut().enumerate() {
                for r in 0..array.rows() {
                    let row = r * array.cols..(r + 1) * array.cols;
                    let squares = |x: &Vec<Vec<Array>>| -> f64 {
                        row.clone().map(|i| (x[s][o].data[i].v - array.data[i].v).powi(2)).sum()
                    };
                    let mean = samples.iter().map(squares).sum::<f64>() / (draws * array.cols).max(1) as f64;
                    for i in row {
                        array.data[i].e = 6.0 * mean.sqrt();
                    }
                }
            }
        }
        centre
    }

    /// Largest ratio of what another case's meaning differs from this one's by, to the bound: above 2, no backend can be
    /// within the bound of both.
    pub fn distance(&self, other: &Reference<'_>) -> f64 {
        let (Some(a), Some(b)) = (&self.fixed, &other.fixed) else { return f64::INFINITY };
        let pairs = a.iter().flatten().zip(b.iter().flatten()).flat_map(|(a, b)| a.data.iter().zip(&b.data));
        pairs.fold(0.0, |m: f64, (a, b)| m.max((a.v - b.v).abs() / (allowed(a, self.case.exact) + TINY)))
    }

    /// Runs `given` (the case itself, or a corrupted copy) on a backend and compares with what the case means.
    pub fn check(&self, given: &Case, backend: &dyn Backend, options: RunOptions) -> Findings {
        let weights = given.plan.check().and_then(|()| backend.load(&given.plan, &given.tensors));
        self.check_loaded(given, backend, &weights, options)
    }

    /// As [`Reference::check`] with the weights of `given` as the backend has loaded them: once for many options.
    pub fn check_loaded(
        &self,
        given: &Case,
        backend: &dyn Backend,
        weights: &Result<Arc<dyn backend::Weights>>,
        options: RunOptions,
    ) -> Findings {
        let mut findings = Findings::default();
        let found = &mut findings.outputs;
        let case = self.case;
        let mut memory = Memory::new(&case.plan, &case.pages, &case.slots);
        let (rounding, fixed) = self.held_to(backend, options.levers);
        let mut each = |i: usize, got: &Outputs, theirs: &Memory| {
            let step = &case.steps[i];
            let want: Vec<Array> = match fixed {
                Some(fixed) => fixed[i].clone(),
                None => {
                    // The interpreter checks what was stored, then works on the same keys and values.
                    let mut follower = Interpreter::new(&case.plan, &self.weights, case.precision);
                    follower.rounding = rounding;
                    follower.storing = Storing::Follow(theirs);
                    step.with_batch(|b| follower.run(b, &self.inputs(step), &mut memory));
                    for (error, bound) in follower.stored.drain(..) {
                        findings.stored.add(error, bound);
                    }
                    case.plan.outputs.iter().map(|v| follower.value(*v).clone()).collect()
                }
            };
            for ((want, got), v) in want.iter().zip(got).zip(&case.plan.outputs) {
                let integers = case.plan.val(*v).dtype == DType::I32;
                for (w, g) in want.data.iter().zip(got) {
                    let value = if case.exact { f64::from(w.v as f32) } else { w.v };
                    // What goes through matrix units is rounded on the way, and only there.
                    let staged = self.rounding.staging > 0.0 && !options.deterministic;
                    let value = if staged { w.v } else { value };
                    found.add((f64::from(*g) - value).abs(), allowed(w, (case.exact && !staged) || integers));
                }
            }
            Ok(())
        };
        let loaded = weights.as_ref().map_err(Error::clone);
        match loaded.and_then(|weights| run_loaded(given, backend, weights, options, &mut each)) {
            Ok(()) => {}
            Err(e @ Error::Unsupported { .. }) => found.unsupported = Some(e.to_string()),
            Err(e) => found.failure = Some(e.to_string()),
        }
        findings
    }
}

/// The bound on an element: its own, the rounding of the result to f32 being part of it, and a flush of tiny results.
fn allowed(x: &Num, exact: bool) -> f64 {
    if exact { 0.0 } else { x.e + TINY }
}
