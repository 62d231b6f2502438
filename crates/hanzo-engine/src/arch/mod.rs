//! Architectures: how the metadata and tensors of a model file become a Plan.
//!
//! Each architecture is one function, top to bottom like the maths, over a [`Builder`] that finds and checks weights.
//! [`ARCHITECTURES`] is the only list. What an architecture builds is the plain Plan: no fusion, no backend, no text.

mod builder;
mod gemma3;
mod llama;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3moe;
mod rope;
#[cfg(test)]
mod tests;

pub use builder::{Builder, Experts, Hyper, PlanOptions, TensorShape, Tensors};

use crate::error::{Error, Result};
use hanzo_gguf::Metadata;
use hanzo_ml::plan::Plan;

/// One row of the registry.
#[derive(Clone, Copy)]
pub struct Architecture {
    /// What `general.architecture` says.
    pub name: &'static str,
    /// Families it runs, for people.
    pub models: &'static str,
    build: fn(&mut Builder<'_>) -> Result<()>,
}

/// Every architecture there is. To add one: a file beside this one, and a row here.
pub const ARCHITECTURES: &[Architecture] = &[
    Architecture { name: "llama", models: "Llama 2 and 3, Mistral, Mixtral, SmolLM2", build: llama::build },
    Architecture { name: "qwen2", models: "Qwen 2 and 2.5, and their Coder models", build: qwen2::build },
    Architecture { name: "qwen3", models: "Qwen 3 (dense)", build: qwen3::build },
    Architecture { name: "qwen3moe", models: "Qwen 3 mixtures of experts", build: qwen3moe::build },
    Architecture { name: "gemma3", models: "Gemma 3 (text)", build: gemma3::build },
    Architecture { name: "phi3", models: "Phi 3, 3.5 and 4", build: phi3::build },
];

/// A model as a Plan.
#[derive(Clone, Debug)]
pub struct Built {
    /// The architecture's name.
    pub arch: String,
    /// The plain Plan; its output is the logits `[n_out, n_vocab]`.
    pub plan: Plan,
    /// Sizes everyone asks for.
    pub hyper: Hyper,
    /// Tensors in the file that the Plan does not read.
    pub unused: Vec<String>,
}

/// Builds the Plan of a model from its metadata and tensor directory.
///
/// Fails if the architecture is not in [`ARCHITECTURES`], if a key is missing or absurd, or with one error that lists
/// every tensor that is missing or has the wrong shape.
pub fn build(metadata: &Metadata, tensors: &dyn Tensors, options: &PlanOptions) -> Result<Built> {
    let name = metadata.str("general.architecture")?;
    let arch = ARCHITECTURES.iter().find(|a| a.name == name).ok_or_else(|| Error::Architecture {
        name: name.to_string(),
        supported: ARCHITECTURES.iter().map(|a| a.name).collect(),
    })?;
    let mut builder = Builder::new(arch.name, metadata, tensors, *options);
    (arch.build)(&mut builder)?;
    builder.finish()
}
