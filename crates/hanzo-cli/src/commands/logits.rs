//! `hanzo logits`: log-probabilities after a prompt, or their comparison with a reference file.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use hanzo_engine::context::{Context as Engine, Control};
use hanzo_engine::logits::log_probs;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::run::read_stdin;
use crate::cli::Context;
use crate::failure::Failure;
use crate::model::{EngineArgs, prompt};
use crate::output;
use crate::progress::Unit;

/// The command's grammar.
#[derive(clap::Args)]
pub struct Args {
    /// The text whose next token is asked for (default: standard input)
    #[arg(conflicts_with = "check")]
    text: Option<String>,
    #[command(flatten)]
    engine: EngineArgs,
    /// How many of the likeliest tokens to print
    #[arg(short = 'k', long, value_name = "K", default_value_t = 10)]
    top: usize,
    /// Print them after every token of the text, not only the last
    #[arg(long, conflicts_with = "check")]
    every: bool,
    /// Compare with a file: JSON with `cases`, each with `ids`, `top` (ten [id, log-probability] a position) and `nll`
    #[arg(long, value_name = "FILE")]
    check: Option<PathBuf>,
    /// Exit with code 1 if the largest difference is above X (of reference log-probabilities above -12)
    #[arg(long, value_name = "X", requires = "check")]
    max_delta: Option<f64>,
    /// Exit with code 1 if the mean difference is above X
    #[arg(long, value_name = "X", requires = "check")]
    mean_delta: Option<f64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Below this log-probability, the largest difference is not looked for: rounding of the reference dominates.
const FLOOR: f64 = -12.0;
/// A reference whose best two are further apart than this is sure of its best.
const SURE: f64 = 0.5;

#[derive(Deserialize)]
struct Reference {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    ids: Vec<u32>,
    /// For each position, the likeliest next tokens and their log-probabilities.
    top: Vec<Vec<(u32, f64)>>,
    /// For each position but the last, the negative log-likelihood of the token that follows.
    nll: Vec<f64>,
}

/// Prints or compares.
pub fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    match &args.check {
        Some(file) => check(&args, file, context),
        None => print_top(&args, context),
    }
}

fn print_top(args: &Args, context: &Context) -> anyhow::Result<()> {
    let text = match args.text.as_deref() {
        None if std::io::stdin().is_terminal() => {
            return Err(Failure::usage("there is no text").remedy("give one, pipe one in, or use --check FILE").into());
        }
        None | Some("-") => read_stdin()?,
        Some(text) => text.to_string(),
    };
    let loaded = args.engine.load(context)?;
    let tokenizer = prompt::tokenizer(&loaded.model)?;
    let ids = prompt::raw(&loaded.model, &text)?.ids;
    let piece = |id: u32| String::from_utf8_lossy(tokenizer.piece(id)).into_owned();
    let mut engine = Engine::new(&loaded.model)?;
    let mut seq = engine.sequence()?;
    let mut rows: Vec<(usize, Vec<(u32, f32)>)> = Vec::new();
    let from = if args.every { 0 } else { ids.len() - 1 };
    log_probs(&mut engine, &mut seq, &ids, from, &mut Control::default(), &mut |i, row| {
        rows.push((i, likeliest(row, args.top)));
    })?;
    if args.json {
        let positions = rows.iter().map(|(i, top)| {
            let top: Vec<_> =
                top.iter().map(|(id, lp)| json!({"id": id, "piece": piece(*id), "log_prob": lp})).collect();
            json!({"position": i, "id": ids[*i], "top": top})
        });
        return output::print_json(&json!({"ids": ids, "positions": positions.collect::<Vec<_>>()}));
    }
    let mut out = output::stdout();
    for (i, top) in &rows {
        if args.every {
            writeln!(out, "after token {i}, {} {:?}:", ids[*i], piece(ids[*i]))?;
        }
        for (id, lp) in top {
            writeln!(out, "{lp:>10.5}  {:>6.2}%  {id:>7}  {:?}", 100.0 * lp.exp(), piece(*id))?;
        }
    }
    Ok(out.finish()?)
}

/// The `k` largest, largest first, the lowest id of equals first.
fn likeliest(row: &[f32], k: usize) -> Vec<(u32, f32)> {
    let mut all: Vec<(u32, f32)> = row.iter().enumerate().map(|(id, lp)| (id as u32, *lp)).collect();
    let k = k.min(all.len());
    let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if k > 0 && k < all.len() {
        all.select_nth_unstable_by(k - 1, order);
    }
    all.truncate(k);
    all.sort_by(order);
    all
}

fn check(args: &Args, file: &Path, context: &Context) -> anyhow::Result<()> {
    let reference = read_reference(file)?;
    let longest = reference.cases.iter().map(|c| c.ids.len()).max().unwrap_or(0);
    let mut options = args.engine.options()?;
    options.n_ctx = options.n_ctx.or(Some(longest));
    let loaded = args.engine.load_with(context, options)?;
    let n_vocab = loaded.model.n_vocab();
    let ids = || reference.cases.iter().flat_map(|c| c.ids.iter().chain(c.top.iter().flatten().map(|(id, _)| id)));
    if let Some(id) = ids().find(|id| **id as usize >= n_vocab) {
        return Err(Failure::new(format!("`{}` has token {id}, but the model only {n_vocab} tokens", file.display()))
            .remedy("give the model that the reference was made with (-m)")
            .into());
    }
    let mut engine = Engine::new(&loaded.model)?;
    let mut found = Comparison::default();
    let total = reference.cases.iter().map(|c| c.ids.len() as u64).sum();
    let progress = context.progress("comparing", Unit::Steps, Some(total));
    for case in &reference.cases {
        let mut seq = engine.sequence()?;
        log_probs(&mut engine, &mut seq, &case.ids, 0, &mut Control::default(), &mut |i, row| {
            found.add(
                row,
                case.top.get(i).map_or(&[], Vec::as_slice),
                case.ids.get(i + 1).copied().zip(case.nll.get(i).copied()),
            );
            progress.add(1);
        })?;
    }
    progress.finish();
    let summary = found.summary(reference.cases.len());
    if args.json {
        output::print_json(&summary)?;
    } else {
        let mut out = output::stdout();
        let s = &summary;
        writeln!(
            out,
            "max |Δ log-prob|   {:.3e}  (of {} reference log-probabilities above {FLOOR})",
            s.max_delta, s.counted
        )?;
        writeln!(out, "mean |Δ log-prob|  {:.3e}  (of all {})", s.mean_delta, s.compared)?;
        writeln!(
            out,
            "top-1              {} of {} agree, {} differ where the reference's margin is above {SURE}",
            s.top1_agree, s.positions, s.sure_misses
        )?;
        writeln!(
            out,
            "mean NLL           {:.6}  (reference {:.6}, difference {:+.2e})",
            s.mean_nll,
            s.reference_nll,
            s.mean_nll - s.reference_nll
        )?;
        out.finish()?;
    }
    // Written so that NaN fails.
    let holds = |found: f64, limit: Option<f64>| limit.is_none_or(|limit| found <= limit);
    if holds(summary.max_delta, args.max_delta) && holds(summary.mean_delta, args.mean_delta) {
        return Ok(());
    }
    Err(Failure::new(format!("the log-probabilities are too far from those of `{}`", file.display())).into())
}

fn read_reference(file: &Path) -> anyhow::Result<Reference> {
    let unusable = |cause: anyhow::Error| {
        Failure::new(format!("cannot use the reference `{}`", file.display()))
            .because(cause)
            .remedy("it must be JSON with `cases`, each with `ids`, `top` and `nll`")
    };
    let bytes = std::fs::read(file).map_err(|e| unusable(e.into()))?;
    let reference: Reference = serde_json::from_slice(&bytes).map_err(|e| unusable(e.into()))?;
    if reference.cases.is_empty() {
        return Err(unusable(anyhow::anyhow!("there are no cases")).into());
    }
    if let Some(i) = reference.cases.iter().position(|c| c.ids.is_empty()) {
        return Err(unusable(anyhow::anyhow!("case {i} has no ids")).into());
    }
    Ok(reference)
}

/// Differences so far.
#[derive(Clone, Debug, Default)]
struct Comparison {
    max: f64,
    counted: usize,
    sum: f64,
    compared: usize,
    positions: usize,
    agree: usize,
    sure_misses: usize,
    nll: f64,
    reference_nll: f64,
    predicted: usize,
}

/// What a comparison found.
#[derive(Clone, Debug, Serialize)]
struct Summary {
    cases: usize,
    positions: usize,
    max_delta: f64,
    counted: usize,
    mean_delta: f64,
    compared: usize,
    top1_agree: usize,
    sure_misses: usize,
    mean_nll: f64,
    reference_nll: f64,
}

impl Comparison {
    /// Adds a position: our log-probabilities, the reference's likeliest, and the next token with its reference NLL.
    fn add(&mut self, row: &[f32], top: &[(u32, f64)], next: Option<(u32, f64)>) {
        for &(id, expected) in top {
            let delta = (f64::from(row[id as usize]) - expected).abs();
            self.sum += delta;
            self.compared += 1;
            if expected > FLOOR {
                self.counted += 1;
                // A NaN is the largest difference there is, and stays.
                if delta > self.max || delta.is_nan() {
                    self.max = delta;
                }
            }
        }
        if let Some(&(best, best_lp)) = top.first() {
            self.positions += 1;
            let margin = top.get(1).map_or(f64::INFINITY, |(_, second)| best_lp - second);
            if likeliest(row, 1).first().is_some_and(|(id, _)| *id == best) {
                self.agree += 1;
            } else if margin > SURE {
                self.sure_misses += 1;
            }
        }
        if let Some((id, expected)) = next {
            self.nll -= f64::from(row[id as usize]);
            self.reference_nll += expected;
            self.predicted += 1;
        }
    }

    fn summary(&self, cases: usize) -> Summary {
        let over = |sum: f64, n: usize| if n == 0 { 0.0 } else { sum / n as f64 };
        Summary {
            cases,
            positions: self.positions,
            max_delta: self.max,
            counted: self.counted,
            mean_delta: over(self.sum, self.compared),
            compared: self.compared,
            top1_agree: self.agree,
            sure_misses: self.sure_misses,
            mean_nll: over(self.nll, self.predicted),
            reference_nll: over(self.reference_nll, self.predicted),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_likeliest_come_in_order_and_ties_by_id() {
        let row = [-3.0, -1.0, -2.0, -1.0];
        assert_eq!(likeliest(&row, 3), [(1, -1.0), (3, -1.0), (2, -2.0)]);
        assert_eq!(likeliest(&row, 9).len(), 4);
        assert!(likeliest(&row, 0).is_empty());
    }

    #[test]
    fn the_largest_counts_above_the_floor_and_the_mean_counts_all() {
        let mut c = Comparison::default();
        c.add(&[-0.5, -1.5, -20.0], &[(0, -0.25), (1, -1.5), (2, -14.0)], Some((1, 1.25)));
        let s = c.summary(1);
        assert_eq!((s.max_delta, s.counted, s.compared), (0.25, 2, 3));
        assert!((s.mean_delta - 6.25 / 3.0).abs() < 1e-12);
        assert_eq!((s.top1_agree, s.sure_misses, s.mean_nll, s.reference_nll), (1, 0, 1.5, 1.25));
    }

    #[test]
    fn a_miss_is_bad_only_where_the_reference_is_sure_and_a_nan_is_never_good() {
        let mut c = Comparison::default();
        c.add(&[-1.0, -0.9], &[(0, -0.9), (1, -1.0)], None);
        c.add(&[-1.0, -0.9], &[(0, -0.2), (1, -1.9)], None);
        assert_eq!((c.positions, c.agree, c.sure_misses), (2, 0, 1));
        c.add(&[f32::NAN, -0.9], &[(0, -0.2)], None);
        c.add(&[-0.2, -0.9], &[(0, -0.2)], None);
        assert!(c.max.is_nan());
    }
}
