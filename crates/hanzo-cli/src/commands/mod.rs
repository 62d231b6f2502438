//! The commands of `hanzo`, one file each: `Args` (its grammar) and `run`.

pub mod ab;
pub mod bench;
pub mod bench_gpu;
pub mod chat;
pub mod completions;
pub mod devices;
pub mod gate;
pub mod inspect;
pub mod levers;
pub mod logits;
pub mod perplexity;
pub mod pull;
pub mod quantize;
pub mod run;
pub mod tokenize;

use std::path::PathBuf;

use crate::cli::Context;
use crate::pull::{self as model_pull, Options};

/// `-m MODEL`, as every command that runs a model takes it.
#[derive(clap::Args)]
pub struct ModelArg {
    /// The model: a short name, a hub id `owner/repo[:file]`, a URL or a path
    #[arg(short, long, value_name = "MODEL", default_value = model_pull::DEFAULT_MODEL)]
    pub model: String,
}

impl ModelArg {
    /// The model's file on this machine, downloaded if need be.
    pub fn resolve(&self, context: &Context) -> anyhow::Result<PathBuf> {
        resolve_model(&self.model, context)
    }
}

/// The file of a model given as a positional argument; see [`ModelArg::resolve`].
pub fn resolve_model(spec: &str, context: &Context) -> anyhow::Result<PathBuf> {
    model_pull::resolve(spec, &Options::new(context))
}
