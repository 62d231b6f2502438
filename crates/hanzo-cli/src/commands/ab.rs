//! `hanzo ab LEVER`: what a lever does to speed and to results, measured in one process.
//!
//! A is the lever off, B on. Each block runs A B B A, so that a drift of the machine's speed cancels within it; blocks are
//! the samples of the interval. Both arms share the threads and, unless the lever changes their layout, the weights.

use std::io::Write;
use std::sync::Arc;

use hanzo_engine::context::{Context as Engine, Control, Rows};
use hanzo_engine::model::Model;
use hanzo_ml::levers::{LEVERS, Lever, LeverKind, LeverSet, find, rewrite};
use serde::Serialize;

use crate::bench::report::Markdown;
use crate::bench::row::ModelFacts;
use crate::cli::Context;
use crate::failure::Failure;
use crate::measure::contention::{self, Contention};
use crate::measure::stats::{self, Interval, ratio_interval};
use crate::measure::steps::{self, Test};
use crate::model::{EngineArgs, Loaded};
use crate::output;
use crate::progress::Unit;

/// The command's grammar.
#[derive(clap::Args)]
#[command(
    after_help = "The other levers stay as the environment has them (`hanzo levers`). A ratio above 1 means that \
                        the lever makes it faster; a verdict needs the whole 95% interval on one side."
)]
pub struct Args {
    /// The lever
    #[arg(required_unless_present = "all", conflicts_with = "all", value_parser = parse_lever)]
    lever: Option<usize>,
    /// Each lever in turn
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    engine: EngineArgs,
    /// Blocks of A B B A
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u32).range(2..))]
    blocks: u32,
    /// Prompt tokens of a run (0: no prefill test)
    #[arg(short = 'p', long, value_name = "N", default_value_t = 256)]
    n_prompt: usize,
    /// Tokens generated in a run (0: no decode test)
    #[arg(short = 'n', long, value_name = "N", default_value_t = 32)]
    n_gen: usize,
    /// Tokens in the cache before the clock starts
    #[arg(short = 'd', long, value_name = "N", default_value_t = 0)]
    n_depth: usize,
    /// The ratio that you expect, e.g. 1.02: printed beside the one found
    #[arg(long, value_name = "RATIO", value_parser = parse_ratio)]
    predict: Option<f64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn parse_lever(text: &str) -> Result<usize, String> {
    find(text).map_err(|e| e.to_string())
}

fn parse_ratio(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|r: &f64| r.is_finite() && *r > 0.0).ok_or_else(|| "it is no ratio above 0".into())
}

/// What a test found.
#[derive(Clone, Debug, Serialize)]
struct Found {
    test: String,
    /// Median speeds in tokens a second.
    off_ts: f64,
    on_ts: f64,
    /// On over off, block by block.
    ratios: Vec<f64>,
    ratio: f64,
    low: f64,
    high: f64,
    predicted: Option<f64>,
    verdict: String,
}

/// How far the two arms' logits are apart.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct Outputs {
    rows: usize,
    max_delta_logit: f64,
    top1_agree: usize,
}

/// What a lever did.
#[derive(Debug, Serialize)]
struct Report {
    lever: &'static str,
    reason: &'static str,
    model: String,
    threads: usize,
    isa: &'static str,
    blocks: u32,
    /// The two Plans are the same: there is nothing to measure.
    changes_nothing: bool,
    tests: Vec<Found>,
    outputs: Option<Outputs>,
    load_before: Option<[f64; 3]>,
    load_after: Option<[f64; 3]>,
    foreign_cpu: Option<f64>,
    steal: Option<f64>,
    contended: bool,
}

/// Measures one lever or all.
pub fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let tests: Vec<Test> = [
        (args.n_gen > 0).then_some(Test::Generate(args.n_gen)),
        (args.n_prompt > 0).then_some(Test::Prompt(args.n_prompt)),
    ]
    .into_iter()
    .flatten()
    .collect();
    if tests.is_empty() {
        return Err(Failure::usage("there is nothing to measure: -p and -n are both 0").into());
    }
    let mut options = args.engine.options()?;
    let longest = (args.n_depth + args.n_gen.max(args.n_prompt)).max(COMPARED_PROMPT + COMPARED_SINGLES);
    options.n_ctx = options.n_ctx.or(Some(longest));
    let loaded = args.engine.load_with(context, options)?;
    let indices = args.lever.map_or_else(|| (0..LEVERS.len()).collect(), |i| vec![i]);
    let mut reports = Vec::new();
    for i in indices {
        let report = measure(&args, &loaded, i, &tests, context)?;
        if !args.json {
            let mut out = output::stdout();
            print(&report, &mut out)?;
            out.finish()?;
        }
        reports.push(report);
    }
    if args.json {
        if args.all { output::print_json(&reports)? } else { reports.first().map_or(Ok(()), output::print_json)? }
    }
    Ok(())
}

/// The lever off, and on.
struct Arms {
    off: Engine,
    on: Engine,
}

impl Arms {
    fn new(loaded: &Loaded, index: usize) -> anyhow::Result<Arms> {
        let arm = |on: bool| -> anyhow::Result<Engine> {
            let levers = loaded.model.options().levers.set(index, on);
            if !LEVERS[index].changes_layout {
                return Ok(Engine::with_levers(&loaded.model, levers)?);
            }
            let options = hanzo_engine::model::ModelOptions { levers, ..loaded.model.options().clone() };
            let model = Model::load(loaded.model.gguf().file(), loaded.model.backend().clone(), options)?;
            Ok(Engine::new(&Arc::new(model))?)
        };
        Ok(Arms { off: arm(false)?, on: arm(true)? })
    }

    /// Seconds of one run.
    fn time(&mut self, on: bool, test: Test, depth: usize) -> anyhow::Result<f64> {
        Ok(steps::run(if on { &mut self.on } else { &mut self.off }, test, depth, &mut |_, _, _| ())?)
    }
}

fn measure(args: &Args, loaded: &Loaded, index: usize, tests: &[Test], context: &Context) -> anyhow::Result<Report> {
    let lever = &LEVERS[index];
    let mut report = Report {
        lever: lever.id,
        reason: lever.reason,
        model: ModelFacts::of(&loaded.model).name,
        threads: loaded.threads,
        isa: loaded.isa.name(),
        blocks: args.blocks,
        changes_nothing: changes_nothing(lever, index, &loaded.model),
        tests: Vec::new(),
        outputs: None,
        load_before: contention::load_average(),
        load_after: None,
        foreign_cpu: None,
        steal: None,
        contended: false,
    };
    if report.changes_nothing {
        return Ok(report);
    }
    let mut arms = Arms::new(loaded, index)?;
    let start = contention::now();
    let total = tests.len() as u64 * u64::from(args.blocks);
    let progress = context.progress(format!("lever {}", lever.id), Unit::Steps, Some(total));
    for &test in tests {
        let (mut off, mut on, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for warm_up in [false, true] {
            arms.time(warm_up, test, args.n_depth)?;
        }
        for _ in 0..args.blocks {
            let mut seconds = [0.0; 2];
            for arm in [false, true, true, false] {
                let s = arms.time(arm, test, args.n_depth)?;
                seconds[usize::from(arm)] += s;
                if arm { &mut on } else { &mut off }.push(test.tokens() as f64 / s);
            }
            ratios.push(seconds[0] / seconds[1]);
            progress.add(1);
        }
        let interval = ratio_interval(&ratios);
        report.tests.push(Found {
            test: test.name(args.n_depth),
            off_ts: stats::median(&off),
            on_ts: stats::median(&on),
            ratios,
            ratio: interval.estimate,
            low: interval.low,
            high: interval.high,
            predicted: args.predict,
            verdict: verdict(interval, args.predict),
        });
    }
    progress.finish();
    let worst = start.contention();
    report.outputs = Some(compare(&mut arms)?);
    report.load_after = contention::load_average();
    report.foreign_cpu = worst.map(|c| c.foreign);
    report.steal = worst.map(|c| c.steal);
    report.contended = worst.is_some_and(|c: Contention| c.is_too_much());
    Ok(report)
}

/// A rewrite that finds nothing to rewrite in this model, or a variant that no device of this run has.
fn changes_nothing(lever: &Lever, index: usize, model: &Model) -> bool {
    let with = |on: bool| -> LeverSet { model.options().levers.set(index, on) };
    let here = |on: bool| with(on).within(model.backend().name());
    match lever.kind {
        LeverKind::Rewrite(_) => rewrite(model.plan(), with(false)) == rewrite(model.plan(), with(true)),
        LeverKind::Variant => here(false) == here(true),
    }
}

/// In words: what the interval says, and whether the prediction lies in it.
fn verdict(found: Interval, predicted: Option<f64>) -> String {
    let effect = match found {
        i if i.low > 1.0 => "faster",
        i if i.high < 1.0 => "slower",
        _ => "no difference shown",
    };
    match predicted {
        None => effect.to_string(),
        Some(p) if found.contains(p) => format!("{effect}; as predicted"),
        Some(p) if found.low > p => format!("{effect}; more than predicted"),
        Some(_) => format!("{effect}; less than predicted"),
    }
}

/// Tokens that the arms are compared over: some in one step, the rest one by one.
const COMPARED_PROMPT: usize = 64;
const COMPARED_SINGLES: usize = 32;

/// Runs the same tokens through both arms.
fn compare(arms: &mut Arms) -> anyhow::Result<Outputs> {
    let mut off = Vec::new();
    rows(&mut arms.off, &mut |row| off.push(row.to_vec()))?;
    let mut outputs = Outputs::default();
    rows(&mut arms.on, &mut |row| {
        if let Some(other) = off.get(outputs.rows) {
            outputs.add(other, row);
        }
    })?;
    Ok(outputs)
}

fn rows(engine: &mut Engine, sink: &mut dyn FnMut(&[f32])) -> anyhow::Result<()> {
    let n = (COMPARED_PROMPT + COMPARED_SINGLES).min(engine.model().n_ctx());
    let ids = steps::tokens(n, engine.model().n_vocab());
    let (prompt, singles) = ids.split_at(COMPARED_PROMPT.min(n));
    let mut seq = engine.sequence()?;
    let mut eval =
        |ids: &[u32]| engine.eval(&mut seq, ids, Rows::From(0), &mut Control::default(), &mut |_, row| sink(row));
    eval(prompt)?;
    singles.chunks(1).try_for_each(eval)?;
    Ok(())
}

impl Outputs {
    fn add(&mut self, off: &[f32], on: &[f32]) {
        self.rows += 1;
        for (a, b) in off.iter().zip(on) {
            let delta = f64::from((a - b).abs());
            if delta > self.max_delta_logit || delta.is_nan() {
                self.max_delta_logit = delta;
            }
        }
        let best = |row: &[f32]| row.iter().enumerate().fold(0, |best, (i, x)| if *x > row[best] { i } else { best });
        self.top1_agree += usize::from(best(off) == best(on));
    }
}

fn print(report: &Report, out: &mut impl Write) -> std::io::Result<()> {
    writeln!(out, "{}: {}", report.lever, report.reason)?;
    if report.changes_nothing {
        return writeln!(out, "changes nothing in the Plan of {}: there is nothing to measure\n", report.model);
    }
    writeln!(
        out,
        "{}, {} threads, {}, {} blocks of off on on off",
        report.model, report.threads, report.isa, report.blocks
    )?;
    let headings = [
        ("test", true),
        ("off t/s", true),
        ("on t/s", true),
        ("on/off", true),
        ("95% interval", true),
        ("predicted", true),
        ("verdict", false),
    ];
    let mut table = Markdown::new(&headings);
    for t in &report.tests {
        table.row(vec![
            t.test.clone(),
            format!("{:.2}", t.off_ts),
            format!("{:.2}", t.on_ts),
            format!("{:.4}", t.ratio),
            format!("{:.4}-{:.4}", t.low, t.high),
            t.predicted.map_or(String::new(), |p| format!("{p:.4}")),
            t.verdict.clone(),
        ]);
    }
    table.write(out)?;
    if let Some(o) = &report.outputs {
        writeln!(
            out,
            "outputs: max |Δ logit| {:.3e}, top-1 equal in {} of {} rows",
            o.max_delta_logit, o.top1_agree, o.rows
        )?;
    }
    let load = |l: Option<[f64; 3]>| l.map_or("unknown".into(), |l| format!("{:.2}", l[0]));
    writeln!(out, "load average: {} before, {} after", load(report.load_before), load(report.load_after))?;
    match (report.foreign_cpu, report.steal) {
        (Some(foreign), Some(steal)) => {
            let mark = if report.contended { "CONTENDED: " } else { "" };
            writeln!(out, "{mark}{}\n", Contention { foreign, steal })
        }
        _ => writeln!(out, "foreign CPU use: unknown on this system\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_needs_the_whole_interval_on_one_side() {
        let i = |low, high| Interval { estimate: f64::sqrt(low * high), low, high };
        assert_eq!(verdict(i(1.01, 1.03), None), "faster");
        assert_eq!(verdict(i(0.9, 0.99), None), "slower");
        assert_eq!(verdict(i(0.99, 1.03), None), "no difference shown");
        assert_eq!(verdict(i(1.01, 1.03), Some(1.02)), "faster; as predicted");
        assert_eq!(verdict(i(1.01, 1.03), Some(1.1)), "faster; less than predicted");
        assert_eq!(verdict(i(1.01, 1.03), Some(1.0)), "faster; more than predicted");
    }

    #[test]
    fn outputs_are_compared_entry_by_entry() {
        let mut o = Outputs::default();
        o.add(&[1.0, 2.0], &[1.5, 2.0]);
        o.add(&[1.0, 2.0], &[3.0, 2.0]);
        assert_eq!(o, Outputs { rows: 2, max_delta_logit: 2.0, top1_agree: 1 });
        o.add(&[f32::NAN, 0.0], &[1.0, 0.0]);
        assert!(o.max_delta_logit.is_nan());
    }

    #[test]
    fn an_unknown_lever_is_refused_with_the_list() {
        assert!(parse_lever("nosuch").unwrap_err().contains("linear_pair"));
        assert_eq!(parse_lever("QKV").map(|i| LEVERS[i].id), Ok("qkv"));
        assert!(parse_ratio("0").is_err() && parse_ratio("x").is_err() && parse_ratio("1.02") == Ok(1.02));
    }
}
