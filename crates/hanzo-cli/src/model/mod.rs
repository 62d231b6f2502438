//! A model as commands run it: the flags they share, loading, prompts, replies and Ctrl-C.
//!
//! Which flags a command has and what it prints stay with the command; how tokens are computed is the engine's.

pub mod device;
pub mod interrupt;
pub mod prompt;
pub mod reply;
pub mod sampling;

use std::io::IsTerminal;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use hanzo_engine::model::{Model, ModelOptions};
use hanzo_gguf::Format;
use hanzo_ml::backend::Precision;
use hanzo_ml::cache::CACHE_FORMATS;
use hanzo_ml::cpu::isa::IsaLevel;
use hanzo_ml::settings::Settings;

use crate::cli::Context;
use crate::commands::ModelArg;
use crate::failure::Failure;
use device::{Chosen, DeviceArgs, Placed};

const HEADING: &str = "Engine options";

/// How a model is run: the same flags in every command that runs one.
#[derive(clap::Args)]
pub struct EngineArgs {
    #[command(flatten)]
    pub model: ModelArg,
    /// Threads (default: one a core that this process may use)
    #[arg(short, long, value_name = "N", value_parser = threads_parser(), help_heading = HEADING)]
    pub threads: Option<u16>,
    /// The longest sequence in tokens (default: what the model was trained for, at most 8192)
    #[arg(short, long, value_name = "N", help_heading = HEADING)]
    pub ctx_size: Option<NonZeroUsize>,
    /// Tokens that are evaluated together at most [also: -ub]
    #[arg(long, value_name = "N", default_value = "512", help_heading = HEADING)]
    pub ubatch: NonZeroUsize,
    /// Format of cached keys: f16, f32, bf16, q8_0, q4_0 [also: -ctk] (default: f16; with --exact f32)
    #[arg(long, value_name = "FORMAT", value_parser = parse_cache_format, help_heading = HEADING)]
    pub cache_type_k: Option<Format>,
    /// Format of cached values, as for keys [also: -ctv]
    #[arg(long, value_name = "FORMAT", value_parser = parse_cache_format, help_heading = HEADING)]
    pub cache_type_v: Option<Format>,
    /// Full f32 activations and cache: the reference path, slow
    #[arg(long, help_heading = HEADING)]
    pub exact: bool,
    /// Bit-equal results however a prompt is cut into batches, at some cost in speed
    #[arg(long, help_heading = HEADING)]
    pub deterministic: bool,
    /// Use no instructions beyond these: portable, avx2, avx512, avx512vbmi, avx512bf16, neon, i8mm (default: HANZO_ISA, else the best there is)
    #[arg(long, value_name = "ISA", value_parser = parse_isa, help_heading = HEADING)]
    pub isa: Option<IsaLevel>,
    #[command(flatten)]
    pub devices: DeviceArgs,
}

/// `-t`: a sane number of threads.
pub fn threads_parser() -> clap::builder::RangedI64ValueParser<u16> {
    clap::value_parser!(u16).range(1..=1024)
}

/// A cache's format by name.
pub fn parse_cache_format(text: &str) -> Result<Format, String> {
    Format::from_name(text).filter(|f| CACHE_FORMATS.contains(f)).ok_or_else(|| {
        let names: Vec<String> = CACHE_FORMATS.iter().map(|f| f.name().to_lowercase()).collect();
        format!("it is none of {}", names.join(", "))
    })
}

/// An instruction set that this processor has.
pub fn parse_isa(text: &str) -> Result<IsaLevel, String> {
    IsaLevel::from_name(text)
        .filter(|isa| isa.is_available())
        .ok_or_else(|| format!("this processor has {}", IsaLevel::available_names()))
}

/// The levers and the instruction set that the environment asks for.
pub fn environment() -> anyhow::Result<Settings> {
    Settings::from_env().map_err(|e| Failure::usage("the environment is not usable").because(e).into())
}

/// A model, ready.
pub struct Loaded {
    pub model: Arc<Model>,
    /// Threads and instruction set of the CPU.
    pub threads: usize,
    pub isa: IsaLevel,
    /// Where everything is.
    pub placed: Placed,
    pub load_time: Duration,
}

impl EngineArgs {
    /// What the flags and the environment ask for.
    pub fn options(&self) -> anyhow::Result<ModelOptions> {
        let float = if self.exact { Format::F32 } else { Format::F16 };
        Ok(ModelOptions {
            levers: environment()?.levers,
            precision: if self.exact { Precision::Exact } else { Precision::Int8 },
            deterministic: self.deterministic,
            type_k: self.cache_type_k.unwrap_or(float),
            type_v: self.cache_type_v.unwrap_or(float),
            n_ctx: self.ctx_size.map(NonZeroUsize::get),
            n_ubatch: self.ubatch.get(),
            n_seqs: 1,
        })
    }

    /// Resolves, downloads if need be, and loads the model; prints its warnings.
    pub fn load(&self, context: &Context) -> anyhow::Result<Loaded> {
        self.load_with(context, self.options()?)
    }

    /// As [`EngineArgs::load`], with changed options.
    pub fn load_with(&self, context: &Context, options: ModelOptions) -> anyhow::Result<Loaded> {
        let chosen = self.devices.open(self.threads, self.isa, context)?;
        let path = self.model.resolve(context)?;
        load(&path, &chosen, options, context)
    }
}

/// Loads a file; says so on a terminal if it takes long.
pub fn load(path: &Path, chosen: &Chosen, options: ModelOptions, context: &Context) -> anyhow::Result<Loaded> {
    let started = Instant::now();
    let backend = &chosen.backend;
    let model =
        patiently(format!("loading {}", path.display()), context, || Model::load(path, backend.clone(), options))
            .map_err(|e| Failure::new(format!("cannot load `{}`", path.display())).because(e))?;
    let load_time = started.elapsed();
    let placed = chosen.place(model.plan())?;
    if placed.asked {
        placed.used().for_each(|share| context.note(format_args!("{}", device::line(share))));
    }
    for warning in model.warnings() {
        context.note(format_args!("warning: {warning}"));
    }
    Ok(Loaded { model: Arc::new(model), threads: chosen.threads, isa: chosen.isa, placed, load_time })
}

/// Runs `work`; after a second, says what is being waited for, if somebody is looking.
fn patiently<T>(what: String, context: &Context, work: impl FnOnce() -> T) -> T {
    if !std::io::stderr().is_terminal() {
        return work();
    }
    std::thread::scope(|scope| {
        let (done, waiting) = channel::<()>();
        scope.spawn(move || {
            if waiting.recv_timeout(Duration::from_secs(1)) == Err(RecvTimeoutError::Timeout) {
                context.note(format_args!("{what} ..."));
            }
        });
        let result = work();
        drop(done);
        result
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_formats_are_named_in_any_case_and_others_are_refused_by_name() {
        assert_eq!(parse_cache_format("q8_0"), Ok(Format::Q8_0));
        assert_eq!(parse_cache_format("F16"), Ok(Format::F16));
        assert!(parse_cache_format("q4_k").unwrap_err().contains("q8_0"));
        assert!(parse_isa("sse9").unwrap_err().contains("portable"));
        for level in IsaLevel::ALL {
            let parsed = parse_isa(level.name());
            match level.is_available() {
                true => assert_eq!(parsed, Ok(level)),
                false => assert!(parsed.unwrap_err().contains(IsaLevel::detect().name())),
            }
        }
    }
}
