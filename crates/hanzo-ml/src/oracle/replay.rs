//! The replay probe: does a compiled step depend on anything but the step's data?
//!
//! Two arms evaluate the same 340 tokens, teacher-forced, of a dense transformer and of one with experts, across page,
//! bucket and attention-split boundaries. The replay arm runs executables that were compiled once, over an arena filled
//! with NaN; the eager arm compiles anew for each step, with its memory elsewhere ([`CompileOptions::eager`]). Their
//! logits and caches must be the same, |Δ| = 0. Then the replay arm is given the last step's positions, or its block
//! tables: a backend that bakes them in would look like that, so the comparison must show it.

use super::case::{Case, Measured, Step};
use super::gate::{Event, GateOptions, Part, Progress, Row};
use super::mutate::{Fate, Planted};
use super::oracles::transformer;
use super::random::Rng;
use crate::backend::{Backend, Cache, CompileOptions, Executable, Precision, Wanted, Weights};
use crate::error::{Error, Result};
use crate::levers::LeverSet;
use crate::plan::Sizes;
use hanzo_gguf::Format;
use std::sync::Arc;

/// Tokens of a prefill step at most.
const UBATCH: usize = 64;

/// Output rows in a chunk of the head.
const HEAD_ROWS: usize = 8;

/// Sizes of steps: prompts of both sides of common bucket sizes, and single tokens that cross pages (at 64, 96, 128, ...)
/// and the places where attention might be split (128, 256).
fn steps() -> Vec<usize> {
    let singles = |n: usize| std::iter::repeat_n(1, n);
    let mut all = vec![37];
    all.extend(singles(60));
    all.extend([5, 4]);
    all.extend(singles(40));
    all.extend([33, 64]);
    all.extend(singles(40));
    all.extend([8, 9]);
    all.extend(singles(40));
    all
}

/// What may be stale.
#[derive(Clone, Copy)]
enum Fault {
    FrozenPosition,
    StaleTable,
}

impl Fault {
    const ALL: [(Fault, &'static str); 2] =
        [(Fault::FrozenPosition, "frozen position"), (Fault::StaleTable, "stale page table")];

    /// A step as an executable would see it that still has part of the step before.
    fn plant(self, before: &Step, step: &Step) -> Step {
        let mut stale = step.clone();
        match self {
            Fault::FrozenPosition => {
                let first = before.positions.first().copied().unwrap_or(0);
                stale.rope_positions = (first..first + step.positions.len() as u32).collect();
            }
            Fault::StaleTable => {
                for (table, old) in stale.tables.iter_mut().zip(&before.tables) {
                    let len = table.pages.len();
                    table.pages.clone_from(&old.pages);
                    // What the table never held is the page of padding.
                    table.pages.resize(len, 0);
                }
            }
        }
        stale
    }
}

/// How steps of up to `n_tokens` tokens are compiled.
fn compiled_for(case: &Case, n_tokens: usize, eager: Option<u32>) -> CompileOptions {
    CompileOptions {
        levers: LeverSet::default(),
        bucket: Sizes { n_tokens, n_seqs: 1, n_out: HEAD_ROWS.min(n_tokens) },
        precision: Precision::Int8,
        deterministic: false,
        n_ctx: case.n_ctx(),
        eager,
    }
}

/// One arm: executables, if they are kept, and what is remembered.
struct Arm<'a> {
    backend: &'a dyn Backend,
    case: &'a Case,
    weights: Arc<dyn Weights>,
    cache: Box<dyn Cache>,
    buckets: Vec<usize>,
    kept: Vec<(usize, Box<dyn Executable>)>,
    steps: u32,
}

impl<'a> Arm<'a> {
    fn new(backend: &'a dyn Backend, case: &'a Case) -> Result<Arm<'a>> {
        let mut buckets = backend.buckets(UBATCH);
        buckets.sort_unstable();
        buckets.dedup();
        let wanted =
            |n: &usize| Wanted { plan: &case.plan, source: &case.tensors, options: compiled_for(case, *n, None) };
        backend.prepare(&buckets.iter().map(wanted).collect::<Vec<_>>());
        Ok(Arm {
            backend,
            case,
            weights: backend.load(&case.plan, &case.tensors)?,
            cache: backend.alloc(&case.plan, &case.pages, &case.slots)?,
            buckets,
            kept: Vec::new(),
            steps: 0,
        })
    }

    fn compile(&self, n_tokens: usize, eager: Option<u32>) -> Result<Box<dyn Executable>> {
        self.backend.compile(&self.case.plan, &compiled_for(self.case, n_tokens, eager), &self.weights)
    }

    fn bucket(&self, n: usize) -> Result<usize> {
        let none = || Error::Batch(format!("{n} tokens fit no bucket of {:?}", self.buckets));
        self.buckets.iter().copied().find(|b| *b >= n).ok_or_else(none)
    }

    fn run(executable: &mut dyn Executable, cache: &mut dyn Cache, step: &Step) -> Result<Vec<f32>> {
        let mut rows = Vec::new();
        step.with_batch(|b| executable.run(b, cache, &mut |_, r| rows.extend_from_slice(r)))?;
        Ok(rows)
    }

    /// A step by an executable that was compiled once.
    fn replay(&mut self, step: &Step) -> Result<Vec<f32>> {
        let bucket = self.bucket(step.positions.len())?;
        let at = match self.kept.iter().position(|(b, _)| *b == bucket) {
            Some(at) => at,
            None => {
                let mut executable = self.compile(bucket, None)?;
                executable.set_poison(true);
                self.kept.push((bucket, executable));
                self.kept.len() - 1
            }
        };
        Arm::run(self.kept[at].1.as_mut(), self.cache.as_mut(), step)
    }

    /// A step by an executable of its own.
    fn eager(&mut self, step: &Step) -> Result<Vec<f32>> {
        self.steps += 1;
        let mut executable = self.compile(self.bucket(step.positions.len())?, Some(1 + self.steps % 7))?;
        Arm::run(executable.as_mut(), self.cache.as_mut(), step)
    }

    /// Every page but that of padding.
    fn pages(&self) -> Result<Vec<Vec<u8>>> {
        let of = |(g, n): (usize, &usize)| (1..*n as u32).map(move |p| (g, p));
        self.case.pages.iter().enumerate().flat_map(of).map(|(g, p)| self.cache.read_page(g, p)).collect()
    }
}

/// What differs between two runs: logits by their difference, bytes of the cache by one each.
fn compare(found: &mut Measured, want: &[f32], got: &[f32]) {
    if want.len() != got.len() {
        found.failure = Some(format!("{} logits for {}", got.len(), want.len()));
    }
    for (w, g) in want.iter().zip(got) {
        found.add(f64::from((w - g).abs()), 0.0);
    }
}

/// The eager arm's logits, step by step, and how far the replay arm is from them.
fn compare_arms(backend: &dyn Backend, case: &Case, progress: Progress<'_>) -> Result<(Vec<Vec<f32>>, Measured)> {
    let (mut replay, mut eager) = (Arm::new(backend, case)?, Arm::new(backend, case)?);
    let mut found = Measured::default();
    let mut logits = Vec::new();
    for step in &case.steps {
        let want = eager.eager(step)?;
        compare(&mut found, &want, &replay.replay(step)?);
        logits.push(want);
        progress(Event::Case);
    }
    for (w, g) in eager.pages()?.iter().zip(&replay.pages()?) {
        w.iter().zip(g).for_each(|(w, g)| found.add(if w == g { 0.0 } else { 1.0 }, 0.0));
    }
    Ok((logits, found))
}

fn fate(backend: &dyn Backend, case: &Case, fault: Fault, logits: &[Vec<f32>]) -> Result<(Fate, String)> {
    let mut arm = Arm::new(backend, case)?;
    let mut found = Measured::default();
    for (i, (step, want)) in case.steps.iter().zip(logits).enumerate() {
        let stale = (i > 0).then(|| fault.plant(&case.steps[i - 1], step));
        compare(&mut found, want, &arm.replay(stale.as_ref().unwrap_or(step))?);
    }
    let fate = if found.nbad > 0 { Fate::Caught } else { Fate::Survived };
    Ok((fate, format!("max |Δ| = {:.3e} in {} of {} logits", found.error, found.nbad, found.cases)))
}

/// Runs the probe on a backend: a row and the planted faults for each model.
pub fn run(backend: &dyn Backend, options: &GateOptions, progress: Progress<'_>) -> (Vec<Row>, Vec<Planted>) {
    let (mut rows, mut faults) = (Vec::new(), Vec::new());
    for moe in [false, true] {
        let rng = &mut Rng::named(options.seed, &format!("replay {moe}"));
        let case = transformer(moe, &steps(), Format::F16, rng);
        if !options.wants(&["replay", &case.format]) {
            continue;
        }
        let name = format!("replay {}", case.format);
        let part = Part::begin(&name, case.steps.len(), progress);
        let (logits, found) = match compare_arms(backend, &case, progress) {
            Ok(both) => both,
            Err(e @ Error::Unsupported { .. }) => {
                (Vec::new(), Measured { unsupported: Some(e.to_string()), ..Measured::default() })
            }
            Err(e) => (Vec::new(), Measured { failure: Some(e.to_string()), ..Measured::default() }),
        };
        let bad = found.failure.clone().or(found.unsupported.clone());
        let mut row = Row::new("replay", "plan", &case.format, found);
        row.runs = case.steps.len();
        row.first_bad = bad.or_else(|| (row.found.nbad > 0).then(|| format!("max |Δ| = {:.3e}", row.found.error)));
        let ran = row.first_bad.is_none();
        rows.push(row);
        for (fault, name) in Fault::ALL {
            let (fate, how) = match ran.then(|| fate(backend, &case, fault, &logits)) {
                Some(Ok(found)) => found,
                Some(Err(e)) => (Fate::Survived, e.to_string()),
                None => (Fate::Survived, "the arms differ without it".into()),
            };
            faults.push(Planted { fault: name.into(), op: "plan".into(), format: case.format.clone(), fate, how });
        }
        part.end((2 + Fault::ALL.len()) * case.steps.len(), 0, progress);
    }
    (rows, faults)
}
