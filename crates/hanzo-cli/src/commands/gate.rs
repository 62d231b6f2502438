//! `hanzo gate`: every numeric oracle on a backend, under every lever set; or, with `--mutate`, planted faults that the
//! oracles must notice; or, with `--replay`, compiled steps against steps compiled anew. Exit code 1 if anything is beyond its bound, cannot run, or goes unseen.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use hanzo_ml::backend::Backend;
use hanzo_ml::cpu::isa::IsaLevel;
use hanzo_ml::devices::{self, OpenOptions};
use hanzo_ml::levers::LeverSet;
use hanzo_ml::oracle::gate::{self, Event, GateOptions, GateReport};
use hanzo_ml::oracle::launched;
use hanzo_ml::oracle::mutate::Fate;
use hanzo_ml::oracle::oracles;
use hanzo_ml::oracle::reference_backend::ReferenceBackend;
use serde::Serialize;

use super::resolve_model;
use crate::cli::Context;
use crate::failure::Failure;
use crate::model::device::own_isa;
use crate::model::{environment, threads_parser};
use crate::output;
use crate::progress::Unit;

/// The command's grammar.
#[derive(clap::Args)]
pub struct Args {
    /// Also check the decoders against a directory of golden blocks (MANIFEST.tsv, TYPE.bin, TYPE.f32)
    #[arg(long, value_name = "DIR")]
    golden: Option<PathBuf>,
    /// Plant faults in weights, steps and Plans instead; every one must be noticed
    #[arg(long)]
    mutate: bool,
    /// Compare compiled steps, replayed, with steps compiled anew, over 340 tokens; and plant stale data
    #[arg(long, conflicts_with_all = ["mutate", "golden", "model"])]
    replay: bool,
    /// Also fail if a kernel is left that the device can run and has not launched, and that no test launches by hand
    #[arg(long, conflicts_with_all = ["mutate", "replay", "filter", "quick"])]
    every_kernel: bool,
    /// Only with every lever off and with every lever at its default, instead of all sets
    #[arg(long)]
    quick: bool,
    /// Only oracles, ops or formats whose name contains this
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// What to test: a device (`hanzo devices`), or `reference`, the interpreter itself
    #[arg(long, value_name = "NAME", default_value = "cpu")]
    device: String,
    /// Instruction set of the CPU's kernels: portable, avx2, avx512, avx512vbmi, avx512bf16, neon, i8mm (default: HANZO_ISA, else the best this CPU has)
    #[arg(long, value_parser = isa)]
    isa: Option<IsaLevel>,
    /// Threads (default: one a core)
    #[arg(short, long, value_name = "N", value_parser = threads_parser())]
    threads: Option<u16>,
    /// Seed of the random inputs
    #[arg(long, default_value_t = GateOptions::default().seed)]
    seed: u64,
    /// Also test matrices of this model: a short name, a hub id, a URL or a path
    #[arg(short, long, value_name = "MODEL")]
    model: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn isa(name: &str) -> Result<IsaLevel, String> {
    let names = || IsaLevel::ALL.map(IsaLevel::name).join(", ");
    IsaLevel::from_name(name).ok_or_else(|| format!("expected one of {}", names()))
}

#[derive(Serialize)]
struct Row<'r> {
    oracle: &'r str,
    op: &'r str,
    format: &'r str,
    runs: usize,
    cases: usize,
    nbad: usize,
    /// The largest error in units of its bound, and both.
    ratio: f64,
    error: f64,
    bound: f64,
    /// `passed`, `failed` or `no kernel`.
    verdict: &'static str,
    first_bad: Option<&'r str>,
}

#[derive(Serialize)]
struct Fault<'r> {
    fault: &'r str,
    op: &'r str,
    format: &'r str,
    /// `caught`, `survived` or `no kernel`.
    fate: &'static str,
    how: &'r str,
}

#[derive(Serialize)]
struct Report<'r> {
    backend: &'r str,
    isa: Option<&'static str>,
    passed: bool,
    nbad: usize,
    golden: Option<&'r str>,
    /// Runs left out, because another lever set had given the same program.
    same_program: usize,
    rows: Vec<Row<'r>>,
    faults: Vec<Fault<'r>>,
}

fn report<'r>(r: &'r GateReport, isa: Option<IsaLevel>) -> Report<'r> {
    let row = |r: &'r gate::Row| Row {
        oracle: &r.oracle,
        op: &r.op,
        format: &r.format,
        runs: r.runs,
        cases: r.found.cases,
        nbad: r.found.nbad,
        ratio: r.found.ratio,
        error: r.found.error,
        bound: r.found.bound,
        verdict: match (r.unsupported(), r.passed()) {
            (true, _) => "no kernel",
            (_, true) => "passed",
            _ => "failed",
        },
        first_bad: r.first_bad.as_deref(),
    };
    let faults = r.faults.iter().map(|f| Fault {
        fault: &f.fault,
        op: &f.op,
        format: &f.format,
        fate: match f.fate {
            Fate::Caught => "caught",
            Fate::Survived => "survived",
            Fate::NoKernel => "no kernel",
        },
        how: &f.how,
    });
    Report {
        backend: &r.backend,
        isa: isa.map(IsaLevel::name),
        passed: r.passed(),
        nbad: r.nbad(),
        golden: r.golden.as_deref(),
        same_program: r.same,
        rows: r.rows.iter().map(row).collect(),
        faults: faults.collect(),
    }
}

/// Shows where the gate is: a bar on a terminal, and a line for each part that is done.
fn shown(context: &Context) -> impl FnMut(Event<'_>) {
    let start = Instant::now();
    let mut progress = None;
    move |event| match event {
        Event::Begins { name, cases } => progress = Some(context.progress(name, Unit::Steps, Some(cases as u64))),
        Event::Case => progress.iter().for_each(|p| p.add(1)),
        Event::Ends { name, cases, runs, same, seconds } => {
            progress = None;
            let total = start.elapsed().as_secs_f64();
            context.note(format_args!(
                "{name}: {cases} cases, {runs} runs ({same} more the same program), {seconds:.1} s of {total:.1}"
            ));
        }
    }
}

/// Fails if the device has left a kernel out.
fn launched_all(backend: &dyn Backend) -> anyhow::Result<()> {
    let left = launched::unlaunched(&backend.launched(), &|kernel| backend.reaches(kernel));
    if left.is_empty() {
        return Ok(());
    }
    let names: Vec<String> = left.iter().map(ToString::to_string).collect();
    let what = "an oracle must reach each, or a test (`oracle::launched::BY_HAND`)";
    Err(Failure::new(format!("{} kernels were never launched: {}; {what}", left.len(), names.join(" "))).into())
}

/// Runs the gate.
pub fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let real = match &args.model {
        Some(model) => oracles::real_matrices(&resolve_model(model, context)?)?,
        None => Vec::new(),
    };
    let lever_sets = match args.quick {
        true => vec![("none".to_string(), LeverSet::NONE), ("default".to_string(), LeverSet::default())],
        false => GateOptions::default().lever_sets,
    };
    let options = GateOptions {
        lever_sets,
        filter: args.filter,
        golden: args.golden,
        mutate: args.mutate,
        replay: args.replay,
        seed: args.seed,
        real,
    };
    let nothing = || {
        let filter = options.filter.as_deref().unwrap_or_default();
        Failure::usage(format!("no oracle, op or format contains `{filter}`"))
            .remedy("see a gate's table for their names, or leave --filter out")
    };
    if !options.wants_anything() {
        return Err(nothing().into());
    }
    let mut settings = environment()?;
    let own = own_isa(&args.device, args.isa)?;
    settings.isa = args.isa.unwrap_or(settings.isa);
    let cache = context.settings.cache.as_ref().map(|c| c.join("pipelines"));
    let opening = OpenOptions { settings, threads: args.threads.map_or(0, usize::from), cache };
    let backend: Arc<dyn Backend> = match args.device.as_str() {
        "reference" => Arc::new(ReferenceBackend),
        name => devices::open(name, &opening).map_err(|e| Failure::usage(e.to_string()))?,
    };
    let isa = own.or(args.device.eq_ignore_ascii_case(devices::HOST).then_some(settings.isa));
    if let Some(isa) = isa.filter(|_| !args.json) {
        context.note(format_args!("{} kernels", isa.name()));
    }
    if args.every_kernel && backend.compiled().is_none() {
        return Err(Failure::usage(format!("{} launches no kernels: leave --every-kernel out", backend.name())).into());
    }
    let found = gate::run(backend.as_ref(), &options, &mut shown(context))?;
    if let Some(c) = backend.compiled() {
        context.note(format_args!(
            "{} kernels compiled in {:.1} s ({:.1} s of threads), {} reused",
            c.made, c.seconds, c.busy, c.reused
        ));
    }
    if found.rows.is_empty() && found.faults.is_empty() {
        return Err(nothing().into());
    }
    if args.json {
        output::print_json(&report(&found, isa))?;
    } else {
        let mut out = output::stdout();
        write!(out, "{found}")?;
        out.finish()?;
    }
    if !found.passed() {
        let failed = found.rows.iter().filter(|r| !r.passed()).count();
        let survived = found.survivors().count();
        return Err(Failure::new(format!("the gate failed: {failed} rows, {survived} faults unseen")).into());
    }
    if args.every_kernel {
        launched_all(backend.as_ref())?;
    }
    Ok(())
}
