//! `hanzo bench --op ... --device vulkan:N`: the speed of GPU kernels, one at a time.

use std::num::NonZeroUsize;

use anyhow::Context as _;
use hanzo_gguf::Format;
use hanzo_ml::gpu::MatrixUnit;
use serde_json::{Value, json};

use crate::bench::gpu::attention::{self, Attention};
use crate::bench::gpu::contraction::{self, Case, Contraction};
use crate::bench::gpu::glu::Glu;
use crate::bench::gpu::lab::{Effort, Lab};
use crate::bench::gpu::report::{self, Fields, What};
use crate::bench::gpu::rows::Norm;
use crate::bench::gpu::stream::{self, Fill, ReadRoof};
use crate::bench::gpu::subject::Subject;
use crate::bench::gpu::sweep;
use crate::bench::report::{OutputFormat, csv, object};
use crate::cli::Context;
use crate::failure::Failure;
use crate::output;

/// Configurations of a sweep that are told.
const TOLD: usize = 4;

/// Flags that only GPU kernels have.
#[derive(clap::Args)]
pub struct GpuFlags {
    /// Kernels by name instead of those the engine would take, e.g. gemm_dot,gemm_coop
    #[arg(long, value_name = "KERNEL", value_delimiter = ',', requires = "device")]
    kernel: Vec<String>,
    /// Tuning constants, e.g. ROWS=2,THREADS=256
    #[arg(long = "const", value_name = "NAME=N", value_delimiter = ',', value_parser = parse_constant, requires = "device")]
    constants: Vec<(String, u32)>,
    /// Try other constants too and tell the fastest
    #[arg(long, requires = "device")]
    sweep: bool,
    /// Experts of moe-matvec and moe-gemm (default: 128)
    #[arg(long, value_name = "N", requires = "device")]
    experts: Option<NonZeroUsize>,
    /// Experts that each token uses (default: 8)
    #[arg(long, value_name = "N", requires = "device")]
    active: Option<NonZeroUsize>,
    /// MiB of weights to visit before any of them again (0: one copy)
    #[arg(long, value_name = "MIB", requires = "device")]
    working_set: Option<u64>,
    /// Launches in a row at most (default: 200)
    #[arg(long, value_name = "N", requires = "device")]
    launches: Option<NonZeroUsize>,
    /// Milliseconds that a row of launches should take at most (default: 30)
    #[arg(long, value_name = "MS", requires = "device")]
    row_ms: Option<NonZeroUsize>,
}

impl GpuFlags {
    /// The first of them that was given.
    pub fn given(&self) -> Option<&'static str> {
        let all = [
            ("--kernel", !self.kernel.is_empty()),
            ("--const", !self.constants.is_empty()),
            ("--sweep", self.sweep),
            ("--experts", self.experts.is_some()),
            ("--active", self.active.is_some()),
            ("--working-set", self.working_set.is_some()),
            ("--launches", self.launches.is_some()),
            ("--row-ms", self.row_ms.is_some()),
        ];
        all.into_iter().find(|flag| flag.1).map(|flag| flag.0)
    }
}

fn parse_constant(text: &str) -> Result<(String, u32), String> {
    let (name, value) = text.split_once('=').ok_or("it is not NAME=N, e.g. ROWS=2")?;
    let value = value.trim().parse().map_err(|_| format!("`{value}` is no number"))?;
    Ok((name.trim().to_ascii_uppercase(), value))
}

/// `vulkan:1`, or `vulkan` for the first.
pub fn parse_device(text: &str) -> Result<usize, String> {
    let number = match text.split_once(':') {
        None if text == "vulkan" => Some(0),
        Some(("vulkan", n)) => n.parse().ok(),
        _ => None,
    };
    number.ok_or_else(|| "it is neither cpu, cpu:ISA nor a GPU, e.g. vulkan:0 (see `hanzo devices`)".into())
}

/// An op that can be measured on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Op {
    /// Weights once from memory, for few tokens
    Matvec,
    /// Tiles of weights, for many tokens
    Gemm,
    /// As matvec, by experts
    MoeMatvec,
    /// As gemm, by experts
    MoeGemm,
    /// Gate, up, what combines them and its quantization, for few tokens; the shape is one matrix'
    Glu,
    /// As glu, by experts
    MoeGlu,
    /// RMS norm of a sum; the shape is runs of a row and their columns
    Norm,
    /// Attention of the last tokens over an f16 cache; the shape is keys and columns of a head (--const NKV=8,GROUP=4)
    Attention,
    /// Reads and writes alone: the device's roofs
    Copy,
    /// A launch that does nothing
    Empty,
}

impl Op {
    /// As the command line has it.
    pub fn name(self) -> &'static str {
        match self {
            Op::Matvec => "matvec",
            Op::Gemm => "gemm",
            Op::MoeMatvec => "moe-matvec",
            Op::MoeGemm => "moe-gemm",
            Op::Glu => "glu",
            Op::MoeGlu => "moe-glu",
            Op::Norm => "norm",
            Op::Attention => "attention",
            Op::Copy => "copy",
            Op::Empty => "empty",
        }
    }

    fn is_moe(self) -> bool {
        matches!(self, Op::MoeMatvec | Op::MoeGemm | Op::MoeGlu)
    }
}

/// What to measure, from the common flags.
pub struct Request<'a> {
    pub op: Op,
    pub device: usize,
    pub formats: Vec<Format>,
    pub shapes: &'a [(usize, usize)],
    pub tokens: Vec<usize>,
    pub repetitions: usize,
    pub output: OutputFormat,
}

/// Lines as they come.
struct Lines {
    output: OutputFormat,
    all: Vec<Fields>,
    failures: usize,
}

impl Lines {
    /// Keeps a line; JSON lines are printed at once, so that an end from outside loses nothing.
    fn add(&mut self, line: Fields) -> anyhow::Result<()> {
        if self.output == OutputFormat::Jsonl {
            use std::io::Write;
            let mut out = output::stdout();
            writeln!(out, "{}", object(line.clone()))?;
            out.finish()?;
        }
        self.all.push(line);
        Ok(())
    }

    /// Notes what could not be measured, and goes on.
    fn fail(&mut self, what: &What, kernel: &str, format: Option<Format>, why: String) -> anyhow::Result<()> {
        self.failures += 1;
        output::stderr_line(format_args!("{} {}: {why}", what.op, what.shape));
        if self.output == OutputFormat::Jsonl {
            let format = format.map(|f| f.name());
            let line = [("op", json!(what.op)), ("shape", json!(what.shape)), ("n_tokens", json!(what.tokens))];
            let more = [("kernel", json!(kernel)), ("format", json!(format)), ("error", json!(why))];
            self.add(line.into_iter().chain(more).collect())?;
            self.all.pop();
        }
        Ok(())
    }

    fn finish(self) -> anyhow::Result<()> {
        use std::io::Write;
        let mut out = output::stdout();
        match self.output {
            OutputFormat::Md if self.all.is_empty() => {}
            OutputFormat::Md => report::table(&self.all, &mut out)?,
            OutputFormat::Json => writeln!(out, "{:#}", self.all.into_iter().map(object).collect::<Value>())?,
            OutputFormat::Jsonl => {}
            OutputFormat::Csv => csv(self.all.into_iter(), &mut out)?,
        }
        out.finish()?;
        match self.failures {
            0 => Ok(()),
            n => Err(Failure::new(format!("{n} of the measurements failed; see above")).into()),
        }
    }
}

fn or(flag: Option<NonZeroUsize>, default: usize) -> usize {
    flag.map_or(default, NonZeroUsize::get)
}

/// Measures.
pub fn run(request: &Request<'_>, flags: &GpuFlags, context: &Context) -> anyhow::Result<()> {
    let effort = Effort {
        launches: or(flags.launches, 200),
        seconds: 1e-3 * or(flags.row_ms, 30) as f64,
        repetitions: request.repetitions,
        working_set: flags.working_set.map(|mib| mib << 20),
    };
    let cache = context.settings.cache.as_ref().map(|c| c.join("pipelines"));
    let mut lab = Lab::open(request.device, cache, effort)?;
    context.note(format_args!("on {}", lab.info()));
    let mut lines = Lines { output: request.output, all: Vec::new(), failures: 0 };
    match request.op {
        Op::Empty => {
            for e in stream::empty(&lab)? {
                lines.add(report::empty_fields(&lab, &e))?;
            }
        }
        Op::Copy => copy(&mut lab, &mut lines)?,
        _ => {
            let roof = lab.roof()?;
            if request.shapes.is_empty() {
                return Err(Failure::usage(format!("--op {} needs --shape", request.op.name())).into());
            }
            for &shape in request.shapes {
                for &tokens in &request.tokens {
                    case(&lab, request, flags, shape, tokens, roof, &mut lines)?;
                }
            }
        }
    }
    lines.finish()
}

/// Reads of memory in every way and of what caches may hold, and writes.
fn copy(lab: &mut Lab, lines: &mut Lines) -> anyhow::Result<()> {
    let roof = lab.roof()?;
    let mut read = ReadRoof::new(&lab.gpu, lab.working_set())?;
    let what = |shape: u64| What { op: "copy", shape: output::human_bytes(shape), tokens: 0 };
    let mut best: Option<(f64, Vec<(String, u32)>)> = None;
    for way in read.ways() {
        let figures = lab.measure(&read, &way)?;
        let seconds = figures.dependent().min(figures.independent());
        if best.as_ref().is_none_or(|b| seconds < b.0) {
            best = Some((seconds, way));
        }
        lines.add(report::fields(lab, &what(read.bytes()), &read, &figures, roof))?;
    }
    let (_, way) = best.context("there is a way to read")?;
    for mib in [256, 128, 64, 32, 16, 8] {
        if mib << 20 < lab.working_set() {
            read.shrink(mib << 20);
            let figures = lab.measure(&read, &way)?;
            lines.add(report::fields(lab, &what(read.bytes()), &read, &figures, roof))?;
        }
    }
    let fill = Fill::new(&lab.gpu, lab.working_set())?;
    let figures = lab.measure(&fill, &[("THREADS".to_string(), 1024.min(lab.info().max_threads))])?;
    lines.add(report::fields(lab, &what(fill.bytes()), &fill, &figures, roof))
}

/// One shape and number of tokens in every format, by every kernel.
fn case(
    lab: &Lab,
    request: &Request<'_>,
    flags: &GpuFlags,
    (rows, cols): (usize, usize),
    tokens: usize,
    roof: f64,
    lines: &mut Lines,
) -> anyhow::Result<()> {
    let op = request.op;
    let what = What { op: op.name(), shape: format!("{rows}x{cols}"), tokens };
    if op == Op::Norm {
        let norm = Norm::new(&lab.gpu, tokens, rows, cols)?;
        return one(lab, flags, &what, &norm, roof, lines);
    }
    if op == Op::Attention {
        let number =
            |name: &str, default: usize| flags.constants.iter().find(|c| c.0 == name).map_or(default, |c| c.1 as usize);
        let (n_kv, group) = (number("NKV", 8), number("GROUP", 4));
        let case = attention::Case { tokens, keys: rows, d: cols, n_kv, group };
        return one(lab, flags, &what, &Attention::new(&lab.gpu, case, lab.working_set())?, roof, lines);
    }
    if request.formats.is_empty() {
        return Err(Failure::usage(format!("--op {} needs --format", op.name())).into());
    }
    let experts = op.is_moe().then_some((or(flags.experts, 128), or(flags.active, 8)));
    if experts.is_some_and(|(n, k)| k > n) {
        return Err(Failure::usage("--active is more than --experts").into());
    }
    let matrices = lab.gpu.features.matrix.has(MatrixUnit::Coop) && lab.gpu.features.wave == 32;
    for &format in &request.formats {
        let case = Case { format, rows, cols, tokens, experts };
        let few = matches!(op, Op::Matvec | Op::MoeMatvec);
        let named: Vec<&'static str> =
            flags.kernel.iter().filter_map(|k| hanzo_kernels::op(k)).map(|o| o.name.as_str()).collect();
        if named.len() < flags.kernel.len() {
            return Err(Failure::usage(format!("--kernel {}: there is no such kernel", flags.kernel.join(","))).into());
        }
        let kernels = if named.is_empty() { contraction::kernels(&case, few, matrices) } else { named };
        let mut ready = match Contraction::new(&lab.gpu, case, lab.working_set()) {
            Ok(ready) => ready,
            Err(e) => {
                lines.fail(&what, "", Some(format), format!("{e:#}"))?;
                continue;
            }
        };
        if matches!(op, Op::Glu | Op::MoeGlu) {
            match Glu::new(&lab.gpu, &ready) {
                Ok(glu) => one(lab, flags, &what, &glu, roof, lines)?,
                Err(e) => lines.fail(&what, "", Some(format), format!("{e:#}"))?,
            }
            continue;
        }
        for kernel in kernels {
            if kernel.starts_with("gemm_coop") {
                ready.prepare_halves(&lab.gpu)?;
            }
            one(lab, flags, &what, &ready.with(kernel), roof, lines)?;
        }
    }
    Ok(())
}

/// One subject, with the constants asked for or the best of a sweep.
fn one(
    lab: &Lab,
    flags: &GpuFlags,
    what: &What,
    subject: &dyn Subject,
    roof: f64,
    lines: &mut Lines,
) -> anyhow::Result<()> {
    let key = subject.kernel();
    let told = if flags.sweep {
        sweep::search(lab, subject, &flags.constants).map(|found| (found.best(TOLD), found.failures))
    } else {
        lab.measure(subject, &flags.constants).map(|f| (vec![f], Vec::new()))
    };
    match told {
        Ok((all, failures)) => {
            for figures in all {
                lines.add(report::fields(lab, what, subject, &figures, roof))?;
            }
            failures.into_iter().try_for_each(|why| lines.fail(what, key.op, key.format, why))
        }
        Err(e) => lines.fail(what, key.op, key.format, format!("{e:#}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_constants_are_read_from_the_command_line() {
        assert_eq!(parse_device("vulkan:2"), Ok(2));
        assert_eq!(parse_device("vulkan"), Ok(0));
        assert!(parse_device("cuda:0").is_err() && parse_device("vulkan:x").is_err());
        assert_eq!(parse_constant("rows=2"), Ok(("ROWS".into(), 2)));
        assert!(parse_constant("ROWS").is_err());
    }

    #[test]
    fn every_kernel_that_is_measured_gets_its_arguments_and_is_right() {
        if std::env::var("HANZO_NO_GPU_TESTS").is_ok_and(|v| v == "1") {
            return;
        }
        #[derive(clap::Parser)]
        struct Only {
            #[command(flatten)]
            flags: GpuFlags,
            #[arg(long)]
            device: Option<usize>,
        }
        let flags = ["bench", "--device", "0", "--experts", "8", "--active", "2", "--const", "NKV=2,GROUP=4"];
        let mut flags = <Only as clap::Parser>::parse_from(flags).flags;
        let effort = Effort { launches: 4, seconds: 1e-3, repetitions: 1, working_set: Some(0) };
        let lab = Lab::open(0, None, effort).expect("a Vulkan driver (or HANZO_NO_GPU_TESTS=1)");
        let mut lines = Lines { output: OutputFormat::Md, all: Vec::new(), failures: 0 };
        let (matrix, keys, runs) = ((96, 256), (100, 64), (2, 128));
        for (op, shape, tokens) in [
            (Op::Attention, keys, 1),
            (Op::Attention, keys, 20),
            (Op::Norm, runs, 3),
            (Op::Matvec, matrix, 1),
            (Op::Matvec, matrix, 3),
            (Op::Gemm, matrix, 70),
            (Op::MoeMatvec, matrix, 1),
            (Op::MoeGemm, matrix, 20),
            (Op::Glu, matrix, 2),
            (Op::MoeGlu, matrix, 1),
        ] {
            if op != Op::Attention {
                flags.constants.clear();
            }
            let float = !matches!(op, Op::Glu | Op::MoeGlu);
            let formats = if float { vec![Format::Q4_K, Format::F16] } else { vec![Format::Q6_K] };
            let output = OutputFormat::Md;
            let request = Request { op, device: 0, formats, shapes: &[], tokens: vec![], repetitions: 1, output };
            case(&lab, &request, &flags, shape, tokens, 1e9, &mut lines).unwrap();
        }
        // The reasons are on stderr.
        assert_eq!((lines.failures, lines.all.len()), (0, 15));
        assert_eq!(stream::empty(&lab).unwrap().len(), 5);
    }
}
