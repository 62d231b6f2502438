//! The gate: every oracle on a backend, under every lever set, as a report.
//!
//! An oracle's cases are drawn first, so that the backend can make ready at once whatever they will need, and lever sets
//! under which a case is the same program are run once.

use super::case::{Bound, Case, Measured, Reference, Rounding, RunOptions};
use super::oracles::{Context, ORACLES, Oracle, RealMatrix, chunking_differences, chunkings, weight_formats};
use super::{golden, mutate, replay};
use crate::backend::{Backend, Wanted};
use crate::error::Result;
use crate::levers::{LEVERS, Lever, LeverKind, LeverSet, rewrite};
use crate::plan::Plan;
use hanzo_gguf::Format;
use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Instant;

/// Pairs of levers tried alone.
const PAIRS: usize = 8;

/// What to run.
#[derive(Clone, Debug)]
pub struct GateOptions {
    /// Only rows whose oracle, op or format contains this (ASCII case ignored).
    pub filter: Option<String>,
    /// A golden directory to check `to_float` against.
    pub golden: Option<PathBuf>,
    /// Lever sets by name.
    pub lever_sets: Vec<(String, LeverSet)>,
    /// Plant faults instead of looking for them.
    pub mutate: bool,
    /// Run the replay probe ([`super::replay`]) instead.
    pub replay: bool,
    /// Seeds random inputs.
    pub seed: u64,
    /// Matrices of a real model, used besides random ones.
    pub real: Vec<RealMatrix>,
}

impl Default for GateOptions {
    fn default() -> Self {
        GateOptions {
            filter: None,
            golden: None,
            lever_sets: LeverSet::gate_sets(PAIRS),
            mutate: false,
            replay: false,
            seed: 1,
            real: Vec::new(),
        }
    }
}

impl GateOptions {
    /// Does the filter let a row's name pass?
    pub fn wants(&self, names: &[&str]) -> bool {
        let Some(filter) = &self.filter else { return true };
        let filter = filter.to_ascii_lowercase();
        names.iter().any(|n| n.to_ascii_lowercase().contains(&filter))
    }

    /// Does the filter let anything pass? Asked before a device is opened. Names of oracles and formats are known at once,
    /// those of ops when cases are drawn; faults, replays and golden blocks are taken to have it, and tell when they run.
    pub fn wants_anything(&self) -> bool {
        let elsewhere = self.mutate || self.replay || self.golden.is_some();
        let formats: Vec<&str> = weight_formats().map(Format::name).collect();
        if elsewhere || self.wants(&formats) || ORACLES.iter().any(|o| self.wants(&[o.name])) {
            return true;
        }
        let context = Context { seed: self.seed, real: &self.real };
        self.wants(&["chunks"])
            || ORACLES.iter().any(|oracle| {
                let mut found = false;
                (oracle.cases)(&context, &mut |case| found |= self.wants(&[case.op, &case.format]));
                found
            })
    }
}

/// Where the gate is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event<'a> {
    /// A part begins: an oracle, or the faults of a format.
    Begins {
        /// Its name.
        name: &'a str,
        /// Its cases.
        cases: usize,
    },
    /// A case of it is done.
    Case,
    /// It is done.
    Ends {
        /// Its name.
        name: &'a str,
        /// Its cases.
        cases: usize,
        /// Runs of them.
        runs: usize,
        /// Runs left out, because another lever set had given the same program.
        same: usize,
        /// Seconds it took.
        seconds: f64,
    },
}

/// Where events go.
pub type Progress<'a> = &'a mut dyn FnMut(Event<'_>);

/// A part of the gate's work, from its first event to its last.
pub(super) struct Part<'a> {
    name: &'a str,
    cases: usize,
    start: Instant,
}

impl<'a> Part<'a> {
    pub fn begin(name: &'a str, cases: usize, progress: Progress<'_>) -> Part<'a> {
        progress(Event::Begins { name, cases });
        Part { name, cases, start: Instant::now() }
    }

    pub fn end(self, runs: usize, same: usize, progress: Progress<'_>) {
        let Part { name, cases, start } = self;
        progress(Event::Ends { name, cases, runs, same, seconds: start.elapsed().as_secs_f64() });
    }
}

/// What an oracle found for one op and format.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The oracle.
    pub oracle: String,
    /// The op.
    pub op: String,
    /// The format of weights or cache, or `-`.
    pub format: String,
    /// Runs: cases times options that give different programs.
    pub runs: usize,
    /// What was found.
    pub found: Measured,
    /// The first run that failed, in words.
    pub first_bad: Option<String>,
}

impl Row {
    /// A row of one run.
    pub fn new(oracle: &str, op: &str, format: &str, found: Measured) -> Row {
        Row { oracle: oracle.into(), op: op.into(), format: format.into(), runs: 1, found, first_bad: None }
    }

    /// Did everything stay within its bound? An op that the backend has no kernel for at all is told apart
    /// ([`Row::unsupported`]); one that it refuses only sometimes has failed.
    pub fn passed(&self) -> bool {
        let refused = self.found.unsupported.is_some() && !self.unsupported();
        self.found.nbad == 0 && self.found.failure.is_none() && !refused
    }

    /// Has the backend no kernel for this op?
    pub fn unsupported(&self) -> bool {
        self.found.unsupported.is_some() && self.found.cases == 0
    }
}

/// The gate's findings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GateReport {
    /// The backend.
    pub backend: String,
    /// One a (oracle, op, format).
    pub rows: Vec<Row>,
    /// One a planted fault, if faults were planted.
    pub faults: Vec<mutate::Planted>,
    /// `nbad=N over M formats`, if a golden directory was checked.
    pub golden: Option<String>,
    /// Runs left out, because another lever set had given the same program.
    pub same: usize,
}

impl GateReport {
    /// Nothing beyond a bound, nothing that could not run, no fault that went unseen.
    pub fn passed(&self) -> bool {
        self.rows.iter().all(Row::passed) && self.survivors().next().is_none()
    }

    /// Elements beyond their bound.
    pub fn nbad(&self) -> usize {
        self.rows.iter().map(|r| r.found.nbad).sum()
    }

    /// Faults that no comparison noticed.
    pub fn survivors(&self) -> impl Iterator<Item = &mutate::Planted> {
        self.faults.iter().filter(|f| f.fate == mutate::Fate::Survived)
    }

    /// Rows of ops that the backend has no kernel for.
    pub fn unsupported(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|r| r.unsupported())
    }
}

/// Lever sets that a Plan tells apart: those that rewrite it differently, or differ in a kernel variant of the backend.
fn distinct<'s>(plan: &Plan, sets: &'s [(String, LeverSet)], backend: &str) -> Vec<(&'s str, LeverSet)> {
    let variants = |s: LeverSet| -> Vec<bool> {
        let of = |(i, l): (usize, &Lever)| matches!(l.kind, LeverKind::Variant).then(|| s.has(i));
        LEVERS.iter().enumerate().filter_map(of).collect()
    };
    let mut seen: Vec<(Plan, Vec<bool>)> = Vec::new();
    let mut new = |s: LeverSet| {
        let key = (rewrite(plan, s), variants(s));
        let fresh = !seen.contains(&key);
        if fresh {
            seen.push(key);
        }
        fresh
    };
    sets.iter().map(|(name, s)| (name.as_str(), s.within(backend))).filter(|(_, s)| new(*s)).collect()
}

/// How the cases of a unit are run.
struct Runs<'s> {
    /// By the name of the lever set.
    each: Vec<(&'s str, RunOptions)>,
    /// Further options that give a program of these.
    same: usize,
}

/// The options that make a difference to each unit: one case, or several that are compared with each other. Whatever the
/// backend needs for their runs is ready afterwards.
fn runs<'s>(
    units: &[&[Case]],
    pinned: fn(&Case) -> &'static [bool],
    backend: &dyn Backend,
    options: &'s GateOptions,
) -> Vec<Runs<'s>> {
    let choices = |unit: &&[Case]| -> Vec<(&'s str, RunOptions)> {
        let Some(first) = unit.first() else { return Vec::new() };
        let sets = distinct(&first.plan, &options.lever_sets, backend.name());
        let both = |(name, levers)| {
            pinned(first).iter().map(move |&deterministic| (name, RunOptions { levers, deterministic }))
        };
        sets.into_iter().flat_map(both).collect()
    };
    let choices: Vec<_> = units.iter().map(choices).collect();
    let mut wanted: Vec<Wanted<'_>> = Vec::new();
    for (unit, choices) in units.iter().zip(&choices) {
        wanted.extend(choices.iter().flat_map(|(_, o)| unit.iter().map(|case| case.wanted(*o))));
    }
    let mut programs = backend.prepare(&wanted).into_iter();
    let mut all = Vec::new();
    for (unit, choices) in units.iter().zip(choices) {
        let mut runs = Runs { each: Vec::new(), same: 0 };
        let mut seen: HashSet<Vec<u64>> = HashSet::new();
        for choice in choices {
            let programs: Vec<Option<u64>> = programs.by_ref().take(unit.len()).collect();
            // One that cannot be told apart is run.
            let known: Option<Vec<u64>> = programs.into_iter().collect();
            match known.is_none_or(|program| seen.insert(program)) {
                true => runs.each.push(choice),
                false => runs.same += 1,
            }
        }
        all.push(runs);
    }
    all
}

/// Adds a finding to its row.
fn record(rows: &mut Vec<Row>, (oracle, op): (&Oracle, &str), case: &Case, found: Measured, run: &str) {
    let same = |r: &&mut Row| r.oracle == oracle.name && r.op == op && r.format == case.format;
    let stopped = found.failure.clone().or(found.unsupported.clone());
    let bad = (found.nbad > 0 || stopped.is_some()).then(|| {
        let why = stopped.unwrap_or_else(|| format!("error {:.3e}, bound {:.3e}", found.error, found.bound));
        format!("{} ({:?}, {run}): {why}", case.about, case.precision)
    });
    if let Some(row) = rows.iter_mut().find(same) {
        row.runs += 1;
        row.found.merge(&found);
        row.first_bad = row.first_bad.take().or(bad);
    } else {
        let mut row = Row::new(oracle.name, op, &case.format, found);
        row.first_bad = bad;
        rows.push(row);
    }
}

/// Whole Plans are long enough to be run one way; single ops are run pinned as well.
fn pinned(case: &Case) -> &'static [bool] {
    if case.bound == Bound::Carried { &[false, true] } else { &[false] }
}

/// Runs a case on every backend with every options that make a difference.
fn run_case(reports: &mut [GateReport], oracle: &Oracle, case: &Case, backends: &[(&dyn Backend, &Runs<'_>)]) {
    let rounding = Rounding::of(backends.iter().map(|b| b.0), case);
    let reference = match Reference::with_rounding(case, rounding) {
        Ok(r) => r,
        Err(e) => {
            let found = Measured { failure: Some(e.to_string()), ..Measured::default() };
            return reports
                .iter_mut()
                .for_each(|r| record(&mut r.rows, (oracle, case.op), case, found.clone(), "reference"));
        }
    };
    for (report, (backend, runs)) in reports.iter_mut().zip(backends) {
        report.same += runs.same;
        let weights = backend.load(&case.plan, &case.tensors);
        for (name, options) in &runs.each {
            let found = reference.check_loaded(case, *backend, &weights, *options);
            let run = format!("levers: {name}, deterministic: {}", options.deterministic);
            record(&mut report.rows, (oracle, case.op), case, found.outputs, &run);
            if found.stored.cases > 0 {
                record(&mut report.rows, (oracle, "kv_store"), case, found.stored, &run);
            }
        }
    }
}

/// Runs the cases of an oracle.
fn run_oracle(
    reports: &mut [GateReport],
    oracle: &Oracle,
    cases: &[Case],
    backends: &[&dyn Backend],
    options: &GateOptions,
    progress: Progress<'_>,
) {
    let part = Part::begin(oracle.name, cases.len(), progress);
    let units: Vec<&[Case]> = cases.iter().map(std::slice::from_ref).collect();
    let all: Vec<Vec<Runs<'_>>> = backends.iter().map(|b| runs(&units, pinned, *b, options)).collect();
    for (i, case) in cases.iter().enumerate() {
        let backends: Vec<_> = backends.iter().copied().zip(all.iter().map(|runs| &runs[i])).collect();
        run_case(reports, oracle, case, &backends);
        progress(Event::Case);
    }
    let sum = |f: fn(&Runs<'_>) -> usize| all.iter().flatten().map(f).sum();
    part.end(sum(|r| r.each.len()), sum(|r| r.same), progress);
}

/// Runs the gate on one backend.
///
/// # Errors
/// A golden directory that cannot be read. Whatever goes wrong in a backend becomes a row.
pub fn run(backend: &dyn Backend, options: &GateOptions, progress: Progress<'_>) -> Result<GateReport> {
    Ok(run_all(&[backend], options, progress)?.remove(0))
}

/// As [`run`] for several backends, such as one CPU at several instruction sets: every case is drawn and worked out
/// once. One report a backend.
pub fn run_all(backends: &[&dyn Backend], options: &GateOptions, progress: Progress<'_>) -> Result<Vec<GateReport>> {
    let mut rows = Vec::new();
    let mut summary = None;
    if let Some(dir) = &options.golden {
        let part = Part::begin("to_float_golden", 0, progress);
        rows = golden::check(dir)?;
        part.end(rows.len(), 0, progress);
        rows.retain(|r| options.wants(&[&r.oracle, &r.op, &r.format]));
        summary = Some(golden::summary(&rows));
    }
    let report = |backend: &&dyn Backend| GateReport {
        backend: backend.name().to_string(),
        rows: rows.clone(),
        faults: Vec::new(),
        golden: summary.clone(),
        same: 0,
    };
    let mut reports: Vec<GateReport> = backends.iter().map(report).collect();
    if options.mutate {
        for (report, faults) in reports.iter_mut().zip(mutate::run(backends, options, progress)) {
            report.faults = faults;
        }
        return Ok(reports);
    }
    if options.replay {
        for (report, backend) in reports.iter_mut().zip(backends) {
            (report.rows, report.faults) = replay::run(*backend, options, progress);
        }
        return Ok(reports);
    }
    let context = Context { seed: options.seed, real: &options.real };
    for oracle in ORACLES {
        let mut cases = Vec::new();
        (oracle.cases)(&context, &mut |case| {
            if options.wants(&[oracle.name, case.op, &case.format]) {
                cases.push(case);
            }
        });
        if !cases.is_empty() {
            run_oracle(&mut reports, oracle, &cases, backends, options, progress);
        }
        if oracle.name == "plan_numeric" && options.wants(&[oracle.name, "chunks"]) {
            chunks(&mut reports, &context, backends, options, progress);
        }
    }
    Ok(reports)
}

/// Bit-equality of chunkings, under every lever set.
fn chunks(
    reports: &mut [GateReport],
    context: &Context<'_>,
    backends: &[&dyn Backend],
    options: &GateOptions,
    progress: Progress<'_>,
) {
    let all = chunkings(context);
    let part = Part::begin("chunks", all.len() * backends.len(), progress);
    let units: Vec<&[Case]> = all.iter().map(Vec::as_slice).collect();
    let (mut done, mut left_out) = (0, 0);
    for (report, backend) in reports.iter_mut().zip(backends) {
        let mut row = Row::new("plan_numeric", "chunks", "deterministic", Measured::default());
        row.runs = 0;
        for (cases, runs) in units.iter().zip(runs(&units, |_| &[true], *backend, options)) {
            for (name, o) in runs.each {
                let found = chunking_differences(cases, *backend, o.levers);
                if row.first_bad.is_none() && (found.nbad > 0 || found.failure.is_some()) {
                    row.first_bad = Some(format!("{:?}, levers: {name}", cases[0].precision));
                }
                row.runs += cases.len();
                row.found.merge(&found);
            }
            report.same += runs.same * cases.len();
            left_out += runs.same * cases.len();
            progress(Event::Case);
        }
        done += row.runs;
        report.rows.push(row);
    }
    part.end(done, left_out, progress);
}

impl std::fmt::Display for GateReport {
    /// A table: a line a row, then what failed, then what survived.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if !self.rows.is_empty() {
            let head = ["oracle", "op", "format", "runs", "cases", "nbad", "error", "bound", "used"];
            let [oracle, op, format, runs, cases, nbad, error, bound, used] = head;
            writeln!(
                f,
                "{oracle:<26} {op:<16} {format:<14} {runs:>5} {cases:>9} {nbad:>6} {error:>10} {bound:>10} {used:>7}"
            )?;
        }
        for r in &self.rows {
            let m = &r.found;
            if r.unsupported() {
                writeln!(f, "{:<26} {:<16} {:<14} no kernel on {}", r.oracle, r.op, r.format, self.backend)?;
                continue;
            }
            let used = if m.bound > 0.0 { format!("{:.1}%", 100.0 * m.ratio) } else { "exact".into() };
            writeln!(
                f,
                "{:<26} {:<16} {:<14} {:>5} {:>9} {:>6} {:>10.3e} {:>10.3e} {used:>7}",
                r.oracle, r.op, r.format, r.runs, m.cases, m.nbad, m.error, m.bound
            )?;
        }
        for r in self.rows.iter().filter(|r| !r.passed()) {
            let why = r.first_bad.clone().or(r.found.failure.clone()).unwrap_or_default();
            writeln!(f, "FAILED {} {} {}: {why}", r.oracle, r.op, r.format)?;
        }
        if !self.faults.is_empty() {
            mutate::table(f, &self.faults)?;
        }
        let verdict = if self.passed() { "passed" } else { "FAILED" };
        if self.faults.is_empty() || !self.rows.is_empty() {
            let (rows, runs) = (self.rows.len(), self.rows.iter().map(|r| r.runs).sum::<usize>());
            let (nbad, same) = (self.nbad(), self.same);
            let same = if same > 0 { format!(" ({same} more were the same program)") } else { String::new() };
            writeln!(f, "gate {verdict} on {}: {rows} rows, {runs} runs{same}, nbad={nbad}", self.backend)?;
        }
        if !self.faults.is_empty() {
            let fate = |fate| self.faults.iter().filter(|p| p.fate == fate).count();
            let (caught, survived) = (fate(mutate::Fate::Caught), fate(mutate::Fate::Survived));
            writeln!(f, "gate {verdict} on {}: {caught} planted faults caught, {survived} survived", self.backend)?;
        }
        match &self.golden {
            Some(line) => writeln!(f, "{line}"),
            None => Ok(()),
        }
    }
}
