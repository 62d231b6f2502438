//! `hanzo bench`: prefill and decode speed of models with llama-bench's flags, or the speed of one kernel.

use std::collections::BTreeSet;
use std::io::Write;
use std::num::NonZeroUsize;
use std::time::Duration;

use hanzo_engine::context::Context as Engine;
use hanzo_engine::model::ModelOptions;
use hanzo_gguf::Format;
use hanzo_ml::cpu::contract::Contraction;
use hanzo_ml::cpu::isa::IsaLevel;
use hanzo_ml::devices::HOST;
use serde_json::{Value, json};

use super::bench_gpu::{self, GpuFlags, Op, Request};
use super::{devices, resolve_model};
use crate::bench::kernel::{self, Case};
use crate::bench::placement;
use crate::bench::profile::{self, Profile};
use crate::bench::report::{self, Markdown, OutputFormat};
use crate::bench::roof;
use crate::bench::row::{ModelFacts, Row, Setup, TokenBytes};
use crate::bench::step_report;
use crate::cli::Context;
use crate::failure::Failure;
use crate::measure::contention::{self, Contention, LIMIT};
use crate::measure::steps::{self, Test};
use crate::model::device::{self, DeviceArgs, Placed};
use crate::model::{self, Loaded, environment, parse_cache_format, parse_isa, threads_parser};
use crate::output::{self, human_bytes};
use crate::progress::Unit;
use crate::pull::DEFAULT_MODEL;

/// The command's grammar.
#[derive(clap::Args)]
#[command(
    after_help = "Lists are separated by commas; every combination is measured. pp: a prompt, the last row of logits \
                        delivered. tg: single tokens, each with its full row of logits. Each repetition starts from an \
                        empty cache; one more warms up. With more than 5% of the processor in foreign hands (or stolen \
                        by the host) there is no result, unless --force marks it."
)]
pub struct Args {
    /// Models: short names, hub ids, URLs or paths
    #[arg(short, long, value_name = "MODEL", value_delimiter = ',', default_value = DEFAULT_MODEL)]
    model: Vec<String>,
    /// Prompt lengths (0: none)
    #[arg(short = 'p', long, value_name = "N", value_delimiter = ',', default_value = "512")]
    n_prompt: Vec<usize>,
    /// Numbers of tokens to generate (0: none)
    #[arg(short = 'n', long, value_name = "N", value_delimiter = ',', default_value = "128")]
    n_gen: Vec<usize>,
    /// Tokens in the cache before the clock starts
    #[arg(short = 'd', long, value_name = "N", value_delimiter = ',', default_value = "0")]
    n_depth: Vec<usize>,
    /// Repetitions of each test
    #[arg(short, long, value_name = "N", default_value = "5")]
    repetitions: NonZeroUsize,
    /// Threads (default: one a core that this process may use)
    #[arg(short, long, value_name = "N", value_delimiter = ',', value_parser = threads_parser())]
    threads: Vec<u16>,
    /// Tokens that are evaluated together at most [also: -ub]
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "512")]
    ubatch: Vec<NonZeroUsize>,
    /// Formats of cached keys [also: -ctk]
    #[arg(long, value_name = "FORMAT", value_delimiter = ',', value_parser = parse_cache_format, default_value = "f16")]
    cache_type_k: Vec<Format>,
    /// Formats of cached values [also: -ctv]
    #[arg(long, value_name = "FORMAT", value_delimiter = ',', value_parser = parse_cache_format, default_value = "f16")]
    cache_type_v: Vec<Format>,
    #[command(flatten)]
    devices: DeviceArgs,
    /// How to print the results
    #[arg(short, long, value_name = "FORMAT", default_value = "md")]
    output: OutputFormat,
    /// Use no instructions beyond these: portable, avx2, avx512, avx512vbmi, avx512bf16, neon, i8mm
    #[arg(long, value_name = "ISA", value_parser = parse_isa)]
    isa: Option<IsaLevel>,
    /// Measure on a contended machine too; the rows are marked
    #[arg(long)]
    force: bool,
    /// Print where the time goes, op by op
    #[arg(long, conflicts_with = "op")]
    profile: bool,
    /// Measure one kernel instead of a model
    #[arg(long, value_name = "OP", conflicts_with_all = [
        "n_prompt", "n_gen", "n_depth", "model", "ubatch", "cache_type_k", "cache_type_v", "n_gpu_layers", "n_cpu_moe",
        "override_tensor",
    ])]
    op: Option<Op>,
    /// The weights' formats, or `all`
    #[arg(long, value_name = "FORMAT", value_delimiter = ',', value_parser = parse_weight_formats, requires = "op")]
    format: Vec<Formats>,
    /// The weights' rows and columns, e.g. 4096x2048
    #[arg(long, value_name = "ROWSxCOLS", value_delimiter = ',', value_parser = kernel::parse_shape, requires = "op")]
    shape: Vec<(usize, usize)>,
    /// Tokens that are contracted together (default: 1 for matvec, 512 for gemm)
    #[arg(long, value_name = "N", value_delimiter = ',', requires = "op")]
    tokens: Vec<NonZeroUsize>,
    #[command(flatten)]
    gpu: GpuFlags,
}

/// What one word of `--format` names.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Formats(Vec<Format>);

fn parse_weight_formats(text: &str) -> Result<Formats, String> {
    if text.eq_ignore_ascii_case("all") {
        return Ok(Formats(Format::ALL.iter().copied().filter(|f| f.is_weight()).collect()));
    }
    let format = Format::from_name(text).filter(|f| f.is_weight());
    format.map(|f| Formats(vec![f])).ok_or_else(|| "it is no format of weights, e.g. Q4_K, or `all`".into())
}

/// The most floats of activations or results that a measurement of one kernel has.
const MOST_FLOATS: usize = 1 << 30;

/// Measures.
pub fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let tall = args.tokens.iter().max().map_or(1, |t| t.get());
    if let Some((rows, cols)) = args.shape.iter().find(|s| tall.saturating_mul(s.0.max(s.1)) > MOST_FLOATS) {
        let what = format!("--tokens {tall} of --shape {rows}x{cols} are more than 2^30 floats; ask for fewer");
        return Err(Failure::usage(what).into());
    }
    let place = place(&args)?;
    if let Place::Gpu(op, device) = place {
        let few = if matches!(op, Op::Gemm | Op::MoeGemm) { 512 } else { 1 };
        let request = Request {
            op,
            device,
            formats: args.format.iter().flat_map(|f| &f.0).copied().collect(),
            shapes: &args.shape,
            tokens: tokens(&args, few),
            repetitions: args.repetitions.get(),
            output: args.output,
        };
        // The device's own clock does not care what else the processor does.
        return bench_gpu::run(&request, &args.gpu, context);
    }
    if !args.force {
        refuse_if_busy()?;
    }
    match place {
        Place::Kernel(kernel, default, isa) => kernels((kernel, default), isa, &args),
        Place::Roofs(isa) => roofs(isa, &args),
        _ => models(&args, context),
    }
}

/// What is measured, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Models.
    Models,
    /// A kernel, or several, of this GPU.
    Gpu(Op, usize),
    /// A kernel of the CPU with the tokens it has unless told otherwise; an instruction set, if one was asked for.
    Kernel(Contraction, usize, Option<IsaLevel>),
    /// What the CPU can do at most.
    Roofs(Option<IsaLevel>),
}

/// What the flags ask for; those that would mean nothing there are refused.
fn place(args: &Args) -> anyhow::Result<Place> {
    let given = args.gpu.given();
    let Some(op) = args.op else {
        return match given {
            Some(flag) => {
                Err(Failure::usage(format!("{flag} is for one kernel: name it with --op, or leave {flag} out")).into())
            }
            None => Ok(Place::Models),
        };
    };
    let lists = [
        ("--shape", args.shape.is_empty()),
        ("--format", args.format.is_empty()),
        ("--tokens", args.tokens.is_empty()),
    ];
    if let Some((flag, _)) = lists.iter().find(|l| !l.1 && matches!(op, Op::Copy | Op::Empty)) {
        return Err(Failure::usage(format!("--op {} has no {flag}: leave it out", op.name())).into());
    }
    let isa = match &args.devices.device[..] {
        [] => args.isa,
        [host] if host.eq_ignore_ascii_case(HOST) => args.isa,
        [one] => match device::own_isa(one, args.isa)? {
            Some(isa) => Some(isa),
            None => {
                let gpu = bench_gpu::parse_device(&one.to_ascii_lowercase());
                return Ok(Place::Gpu(op, gpu.map_err(|e| Failure::usage(format!("--device {one}: {e}")))?));
            }
        },
        _ => return Err(Failure::usage("kernels are measured on one device at a time").into()),
    };
    let contraction = match op {
        Op::Copy => None,
        Op::Matvec => Some((Contraction::MatVec, 1)),
        Op::Gemm => Some((Contraction::Gemm, 512)),
        _ => {
            let what = format!("--op {} is measured on a GPU alone: name one with --device, e.g. vulkan:0", op.name());
            return Err(Failure::usage(what + " (see `hanzo devices`)").into());
        }
    };
    if let Some(flag) = given {
        let what = format!("{flag} is for kernels of a GPU: leave it out, or name a GPU with --device, e.g. vulkan:0");
        return Err(Failure::usage(what).into());
    }
    let Some((kernel, tokens)) = contraction else { return Ok(Place::Roofs(isa)) };
    if args.shape.is_empty() || args.format.is_empty() {
        let what =
            format!("--op {0} needs --shape and --format, e.g. --op {0} --shape 4096x2048 --format Q4_K", op.name());
        return Err(Failure::usage(what).into());
    }
    Ok(Place::Kernel(kernel, tokens, isa))
}

/// Looks at the machine before anything is loaded.
fn refuse_if_busy() -> anyhow::Result<()> {
    let start = contention::now();
    std::thread::sleep(Duration::from_millis(500));
    match start.contention() {
        Some(c) if c.is_too_much() => Err(too_busy(c, "before the first test").into()),
        _ => Ok(()),
    }
}

fn too_busy(c: Contention, when: &str) -> Failure {
    Failure::new(format!("{c} {when}: more than {:.0}%, so there is no result", 100.0 * LIMIT))
        .remedy("stop what else is running, or measure with --force, which marks the rows")
}

/// What a run over models has found so far.
#[derive(Default)]
struct Found {
    rows: Vec<Row>,
    profiles: Vec<(String, Profile)>,
    placements: Vec<(String, Placed)>,
    /// What the last step of each test cost, where a device tells: as text and as JSON.
    steps: Vec<Option<(String, Value)>>,
}

fn models(args: &Args, context: &Context) -> anyhow::Result<()> {
    let mut found = Found::default();
    let result = measure_all(args, context, &mut found);
    // What was measured before a failure is not lost.
    if result.is_ok() || !found.rows.is_empty() {
        print(args, &found)?;
    }
    result
}

fn measure_all(args: &Args, context: &Context, found: &mut Found) -> anyhow::Result<()> {
    let threads: Vec<Option<u16>> =
        if args.threads.is_empty() { vec![None] } else { args.threads.iter().copied().map(Some).collect() };
    let tests: Vec<Test> = {
        let prompts = args.n_prompt.iter().filter(|n| **n > 0).map(|n| Test::Prompt(*n));
        prompts.chain(args.n_gen.iter().filter(|n| **n > 0).map(|n| Test::Generate(*n))).collect()
    };
    if tests.is_empty() {
        return Err(Failure::usage("there is nothing to measure: -p and -n are both 0").into());
    }
    const MOST: usize = 1 << 31;
    let (run, depth) =
        (tests.iter().map(|t| t.tokens()).max().unwrap_or(0), args.n_depth.iter().max().copied().unwrap_or(0));
    if run > MOST || depth > MOST {
        return Err(Failure::usage(format!("-p, -n and -d take at most {MOST}")).into());
    }
    let longest = run + depth;
    for name in &args.model {
        let path = resolve_model(name, context)?;
        for &threads in &threads {
            for ubatch in &args.ubatch {
                for (&type_k, &type_v) in
                    args.cache_type_k.iter().flat_map(|k| args.cache_type_v.iter().map(move |v| (k, v)))
                {
                    let options = ModelOptions {
                        levers: environment()?.levers,
                        type_k,
                        type_v,
                        n_ctx: Some(longest),
                        n_ubatch: ubatch.get(),
                        ..ModelOptions::default()
                    };
                    let chosen = args.devices.open(threads, args.isa, context)?;
                    let loaded = model::load(&path, &chosen, options, context)?;
                    if !found.placements.iter().any(|(n, _)| n == name) {
                        found.placements.push((name.clone(), loaded.placed.clone()));
                    }
                    for &depth in &args.n_depth {
                        for &test in &tests {
                            measure(args, &loaded, test, depth, context, found)?;
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// Measures one test of a loaded model.
fn measure(
    args: &Args,
    loaded: &Loaded,
    test: Test,
    depth: usize,
    context: &Context,
    found: &mut Found,
) -> anyhow::Result<()> {
    let model = &loaded.model;
    let name = test.name(depth);
    let mut engine = Engine::new(model)?;
    engine.executables().try_for_each(|(_, executable)| loaded.placed.check(executable.plan()))?;
    let repetitions = args.repetitions.get();
    let progress = context.progress(&name, Unit::Steps, Some(repetitions as u64));
    steps::run(&mut engine, warm_up(test), depth, &mut |_, _, _| ())?;
    let mut profile = Profile::default();
    let timed = args.profile || environment()?.vulkan.profile;
    profile::switch(&mut engine, timed);
    let load_before = contention::load_average();
    let whole = contention::now();
    let mut worst: Option<Contention> = None;
    let mut samples = Vec::new();
    let mut last = 0;
    for i in 0..repetitions {
        let start = contention::now();
        let seconds = steps::run(&mut engine, test, depth, &mut |engine, n, took| {
            if args.profile {
                profile.add_step(engine, n, took);
            }
            last = n;
        })?;
        // Too short a time cannot be judged alone: the whole test is, below.
        if start.seconds() >= JUDGED_ALONE {
            judge(&mut worst, start.contention(), args, &format!("in repetition {} of {name}", i + 1))?;
        }
        samples.push(test.tokens() as f64 / seconds);
        progress.set(i as u64 + 1);
    }
    judge(&mut worst, whole.contention(), args, &format!("during {name}"))?;
    let one_minute = |load: Option<[f64; 3]>| load.map(|l| l[0]);
    found.rows.push(Row {
        model: ModelFacts::of(model),
        setup: setup(loaded),
        test,
        depth,
        samples,
        token_bytes: matches!(test, Test::Generate(_)).then(|| TokenBytes::of(model, depth + test.tokens() / 2)),
        load: [one_minute(load_before), one_minute(contention::load_average())],
        contention: worst,
    });
    let ran = engine.executables().find(|(sizes, _)| last <= sizes.n_tokens).filter(|_| timed);
    let step = ran.and_then(|(_, executable)| Some((executable.report()?, executable)));
    found.steps.push(match step {
        Some((report, executable)) => {
            let mut text = Vec::new();
            step_report::write(&name, &report, executable.plan(), &mut text)?;
            Some((String::from_utf8_lossy(&text).into_owned(), step_report::as_json(&report, executable.plan())))
        }
        None => None,
    });
    if args.profile {
        found.profiles.push((format!("{}, {name}", ModelFacts::of(model).name), profile));
    }
    Ok(())
}

/// Seconds from which ticks of 10 ms can tell 5%.
const JUDGED_ALONE: f64 = 0.5;

fn judge(worst: &mut Option<Contention>, now: Option<Contention>, args: &Args, when: &str) -> anyhow::Result<()> {
    let Some(now) = now else { return Ok(()) };
    if now.is_too_much() && !args.force {
        return Err(too_busy(now, when).into());
    }
    *worst = Some(worst.map_or(now, |w| w.worst(now)));
    Ok(())
}

/// The whole prompt, or a few tokens.
fn warm_up(test: Test) -> Test {
    match test {
        Test::Prompt(n) => Test::Prompt(n),
        Test::Generate(n) => Test::Generate(n.min(8)),
    }
}

fn setup(loaded: &Loaded) -> Setup {
    let o = loaded.model.options();
    Setup {
        backend: loaded.placed.devices().to_uppercase(),
        isa: loaded.isa.name().to_string(),
        threads: loaded.threads,
        ubatch: o.n_ubatch,
        type_k: o.type_k,
        type_v: o.type_v,
    }
}

fn print(args: &Args, found: &Found) -> anyhow::Result<()> {
    let mut out = output::stdout();
    let Found { rows, profiles, placements, steps } = found;
    match args.output {
        OutputFormat::Md => {
            report::write(rows, OutputFormat::Md, &mut out)?;
            footnotes(rows, placements, &mut out)?;
            for (name, profile) in profiles {
                profile.write(name, &mut out)?;
            }
            steps.iter().flatten().try_for_each(|(text, _)| write!(out, "{text}"))?;
        }
        OutputFormat::Json | OutputFormat::Jsonl => {
            let objects: Vec<Value> = rows
                .iter()
                .enumerate()
                .map(|(i, row)| {
                    let mut fields = row.fields();
                    let groups = |p: &Placed| placement::as_json(&placement::of(&p.plan, &p.names));
                    let placed = placements.iter().map(|(name, p)| (name.clone(), groups(p)));
                    fields.push(("placement", Value::Object(placed.collect())));
                    let devices = placements.iter().map(|(name, p)| (name.clone(), device::as_json(&p.shares)));
                    fields.push(("devices", Value::Object(devices.collect())));
                    fields.extend(profiles.get(i).map(|(_, p)| ("profile", p.as_json())));
                    fields.extend(steps.get(i).and_then(Option::as_ref).map(|(_, json)| ("last_step", json.clone())));
                    report::object(fields)
                })
                .collect();
            match args.output {
                OutputFormat::Json => writeln!(out, "{:#}", json!(objects))?,
                _ => objects.iter().try_for_each(|o| writeln!(out, "{o}"))?,
            }
        }
        OutputFormat::Csv => report::write(rows, OutputFormat::Csv, &mut out)?,
    }
    Ok(out.finish()?)
}

fn footnotes(rows: &[Row], placements: &[(String, Placed)], out: &mut impl Write) -> std::io::Result<()> {
    writeln!(out)?;
    for (name, placed) in placements {
        let groups = placement::of(&placed.plan, &placed.names);
        writeln!(out, "placement of {name}: {}", groups.iter().map(placement::line).collect::<Vec<_>>().join("; "))?;
        placed.used().try_for_each(|share| writeln!(out, "  {}", device::line(share)))?;
    }
    let per_token: BTreeSet<String> = rows
        .iter()
        .filter_map(|r| {
            let b = r.token_bytes?;
            let (weights, cache) = (human_bytes(b.weights as u64), human_bytes(b.cache as u64));
            Some(format!(
                "bytes read per token of {} in {}: {weights} weights, {cache} cache",
                r.model.name,
                r.test.name(r.depth)
            ))
        })
        .collect();
    per_token.iter().try_for_each(|line| writeln!(out, "{line}"))?;
    let load = |l: Option<f64>| l.map_or("unknown".into(), |l| format!("{l:.2}"));
    if let (Some(first), Some(last)) = (rows.first(), rows.last()) {
        writeln!(out, "load average: {} before, {} after", load(first.load[0]), load(last.load[1]))?;
    }
    match rows.iter().filter_map(|r| r.contention).reduce(Contention::worst) {
        Some(worst) => writeln!(out, "at worst: {worst}"),
        None => writeln!(out, "foreign CPU use: unknown on this system"),
    }
}

/// The numbers of tokens asked for, or a default.
fn tokens(args: &Args, default: usize) -> Vec<usize> {
    if args.tokens.is_empty() { vec![default] } else { args.tokens.iter().map(|t| t.get()).collect() }
}

/// The instruction set and the numbers of threads that kernels are measured with.
fn cpu_setup(isa: Option<IsaLevel>, args: &Args) -> anyhow::Result<(IsaLevel, Vec<usize>)> {
    let isa = isa.map_or_else(|| environment().map(|s| s.isa), Ok)?;
    let all = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = args.threads.iter().map(|t| usize::from(*t));
    Ok((isa, if args.threads.is_empty() { vec![all] } else { threads.collect() }))
}

/// Measures what the CPU can do at most.
fn roofs(isa: Option<IsaLevel>, args: &Args) -> anyhow::Result<()> {
    let (isa, threads) = cpu_setup(isa, args)?;
    let mut measured = Vec::new();
    for &threads in &threads {
        let start = contention::now();
        measured.extend(roof::run(isa, threads, args.repetitions.get(), devices::last_level_cache())?);
        judge(&mut None, start.contention(), args, "while the roofs were measured")?;
    }
    let mut out = output::stdout();
    let fields = || measured.iter().map(|m| m.fields());
    match args.output {
        OutputFormat::Md => {
            let columns = ["op", "way", "isa", "threads", "us", "GB/s", "G multiply-adds/s", "round trip ns"];
            let mut table = Markdown::new(&columns.map(|name| (name, !["op", "way", "isa"].contains(&name))));
            fields().for_each(|f| table.row(f.into_iter().map(|(_, v)| roof_cell(v)).collect()));
            table.write(&mut out)?;
        }
        OutputFormat::Json => writeln!(out, "{:#}", fields().map(report::object).collect::<Value>())?,
        OutputFormat::Jsonl => fields().try_for_each(|f| writeln!(out, "{}", report::object(f)))?,
        OutputFormat::Csv => report::csv(fields(), &mut out)?,
    }
    Ok(out.finish()?)
}

/// A roof's field in a table: counts as they are, what is measured to a tenth.
fn roof_cell(value: Value) -> String {
    match value {
        Value::String(text) => text,
        count if count.is_u64() => count.to_string(),
        other => other.as_f64().map_or_else(String::new, |x| format!("{x:.1}")),
    }
}

/// Measures the CPU's kernels alone.
fn kernels((contraction, default): (Contraction, usize), isa: Option<IsaLevel>, args: &Args) -> anyhow::Result<()> {
    let (isa, threads) = cpu_setup(isa, args)?;
    let mut measured = Vec::new();
    let formats = args.format.iter().flat_map(|f| &f.0);
    let shapes = || args.shape.iter().flat_map(|s| tokens(args, default).into_iter().map(move |t| (*s, t)));
    for (&format, ((rows, k), tokens)) in formats.flat_map(|f| shapes().map(move |s| (f, s))) {
        for &threads in &threads {
            let start = contention::now();
            let case = Case {
                op: contraction,
                format,
                rows,
                k,
                tokens,
                threads,
                isa,
                repetitions: args.repetitions.get(),
                cache: devices::last_level_cache(),
                memory: devices::available_memory().map_or(1 << 30, |m| m / 2),
            };
            measured.push(kernel::run(&case)?);
            let mut worst = None;
            judge(&mut worst, start.contention(), args, &format!("during {format} {rows}x{k}"))?;
            if let Some(c) = worst.filter(Contention::is_too_much) {
                output::stderr_line(format_args!("note: {format}: CONTENDED: {c}"));
            }
        }
    }
    let mut out = output::stdout();
    let fields = || measured.iter().map(|m| m.fields());
    match args.output {
        OutputFormat::Md => kernel_table(&measured, &mut out)?,
        OutputFormat::Json => writeln!(out, "{:#}", fields().map(report::object).collect::<Value>())?,
        OutputFormat::Jsonl => fields().try_for_each(|f| writeln!(out, "{}", report::object(f)))?,
        OutputFormat::Csv => report::csv(fields(), &mut out)?,
    }
    Ok(out.finish()?)
}

fn kernel_table(measured: &[kernel::Measured], out: &mut impl Write) -> std::io::Result<()> {
    const NUMBERS: [(&str, &str); 3] = [("median_us", "us"), ("gb_per_s", "GB/s"), ("gop_per_s", "Gop/s")];
    let mut table = Markdown::new(&[
        ("op", false),
        ("format", false),
        ("shape", true),
        ("tokens", true),
        ("threads", true),
        ("isa", false),
        (NUMBERS[0].1, true),
        (NUMBERS[1].1, true),
        (NUMBERS[2].1, true),
        ("working set", true),
        ("note", false),
    ]);
    for m in measured {
        let fields = m.fields();
        let text = |name: &str| match fields.iter().find(|(n, _)| *n == name).map(|(_, v)| v) {
            Some(Value::String(s)) => s.clone(),
            Some(v) => v.as_f64().map_or_else(|| v.to_string(), |x| format!("{x:.1}")),
            None => String::new(),
        };
        let note = match fields.iter().find(|(n, _)| *n == "fits_cache").map(|(_, v)| v) {
            Some(Value::Bool(true)) => "FITS: below 4 times the last-level cache",
            Some(Value::Bool(false)) => "",
            _ => "cache unknown",
        };
        let c = &m.case;
        table.row(vec![
            text("op"),
            text("format"),
            format!("{}x{}", c.rows, c.k),
            c.tokens.to_string(),
            c.threads.to_string(),
            text("isa"),
            text(NUMBERS[0].0),
            text(NUMBERS[1].0),
            text(NUMBERS[2].0),
            human_bytes(m.working_set()),
            note.to_string(),
        ]);
    }
    table.write(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_weights_by_name_or_all_of_them() {
        assert_eq!(parse_weight_formats("q4_k"), Ok(Formats(vec![Format::Q4_K])));
        assert!(parse_weight_formats("all").unwrap().0.len() >= 28);
        assert!(parse_weight_formats("I32").is_err());
    }

    #[test]
    fn a_roofs_threads_are_counted_and_its_rates_have_a_tenth() {
        let cells = [json!(2), json!(2.0), json!(40.26), json!("read"), Value::Null].map(roof_cell);
        assert_eq!(cells, ["2", "2.0", "40.3", "read", ""]);
    }

    #[derive(clap::Parser)]
    struct Only {
        #[command(flatten)]
        args: Args,
    }

    fn parsed(flags: &str) -> Args {
        <Only as clap::Parser>::parse_from(std::iter::once("bench").chain(flags.split_whitespace())).args
    }

    #[test]
    fn what_is_measured_follows_from_the_op_and_the_device() {
        let matvec = "--op matvec --shape 64x64 --format Q8_0";
        let portable = Some(IsaLevel::Portable);
        for (flags, want) in [
            ("", Place::Models),
            ("--device vulkan:0", Place::Models),
            ("--op copy", Place::Roofs(None)),
            ("--op copy --device CPU:portable", Place::Roofs(portable)),
            ("--op copy --isa portable --device cpu", Place::Roofs(portable)),
            ("--op copy --device Vulkan:1 --working-set 4", Place::Gpu(Op::Copy, 1)),
            ("--op norm --device vulkan:0 --shape 1x64", Place::Gpu(Op::Norm, 0)),
            (matvec, Place::Kernel(Contraction::MatVec, 1, None)),
            (format!("{matvec} --device cpu:portable").as_str(), Place::Kernel(Contraction::MatVec, 1, portable)),
            ("--op gemm --shape 64x64 --format Q8_0", Place::Kernel(Contraction::Gemm, 512, None)),
        ] {
            assert_eq!(place(&parsed(flags)).unwrap(), want, "{flags}");
        }
    }

    #[test]
    fn a_flag_that_would_mean_nothing_is_refused_in_a_line_with_its_remedy() {
        let gemm = "--op gemm --shape 64x64 --format Q8_0 --device cpu";
        let gpu_flags = [
            "--sweep",
            "--kernel x",
            "--const X=1",
            "--experts 128",
            "--active 8",
            "--working-set 1",
            "--launches 200",
            "--row-ms 30",
        ];
        for flag in gpu_flags {
            let name = flag.split(' ').next().unwrap();
            for (flags, remedy) in
                [(gemm, "vulkan:0"), ("--op copy --device cpu", "vulkan:0"), ("--device vulkan:0", "--op")]
            {
                let error = place(&parsed(&format!("{flags} {flag}"))).unwrap_err();
                let said = crate::failure::report(&error);
                assert_eq!(crate::failure::exit_code(&error), 2, "{said}");
                assert!(said.contains(name) && said.contains(remedy) && said.lines().count() == 1, "{said}");
            }
        }
        for flag in ["--shape 64x64", "--format Q8_0", "--tokens 2"] {
            for op in ["copy", "copy --device vulkan:0", "empty --device vulkan:0"] {
                let said = place(&parsed(&format!("--op {op} {flag}"))).unwrap_err().to_string();
                assert!(said.contains(flag.split(' ').next().unwrap()) && said.contains("leave it out"), "{said}");
            }
        }
        for flag in [
            "-m x",
            "--ubatch 512",
            "--cache-type-k f16",
            "--cache-type-v f16",
            "--n-gpu-layers 1",
            "--n-cpu-moe 1",
            "-p 1",
        ] {
            let flags = format!("bench --op copy {flag}");
            let error = <Only as clap::Parser>::try_parse_from(flags.split(' ')).err().unwrap();
            assert_eq!(error.kind(), clap::error::ErrorKind::ArgumentConflict, "{flag}: {error}");
        }
    }

    #[test]
    fn an_op_that_cannot_be_measured_there_says_which_device_it_needs() {
        for op in ["empty", "norm", "attention", "glu", "moe-matvec", "moe-gemm", "moe-glu"] {
            for device in ["", "--device cpu", "--device cpu:portable"] {
                let said = place(&parsed(&format!("--op {op} {device}"))).unwrap_err().to_string();
                assert!(said.contains(op) && said.contains("GPU") && said.contains("vulkan:0"), "{said}");
            }
        }
        for (flags, part) in [
            ("--op gemm --shape 64x64", "--op gemm needs --shape and --format"),
            ("--op copy --device tpu:0", "cpu:ISA"),
            ("--op copy --device cpu:mmx", "portable"),
            ("--op copy --device cpu,vulkan:0", "one device"),
        ] {
            let said = place(&parsed(flags)).unwrap_err().to_string();
            assert!(said.contains(part), "{said}");
        }
    }

    #[test]
    fn a_contended_repetition_is_refused_unless_forced() {
        let busy = Some(Contention { foreign: 0.3, steal: 0.0 });
        let error = judge(&mut None, busy, &parsed(""), "in repetition 2 of pp512").unwrap_err();
        assert!(error.to_string().contains("30.0%") && error.to_string().contains("repetition 2"), "{error}");
        let mut worst = None;
        judge(&mut worst, busy, &parsed("--force"), "").unwrap();
        assert_eq!(worst, busy);
    }
}
