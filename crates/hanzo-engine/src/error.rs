//! The engine's error type: which file, key, tensor, option or sequence is at fault, and what to do about it.

use hanzo_gguf::GgufError;

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of the engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model file cannot be read, or its metadata is not what the architecture needs.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A Plan, a batch or a backend failed.
    #[error(transparent)]
    Ml(#[from] hanzo_ml::Error),
    /// No architecture of this name.
    #[error("architecture {name:?} is not supported; supported are {}", supported.join(", "))]
    Architecture {
        /// What `general.architecture` says.
        name: String,
        /// The names of the registry.
        supported: Vec<&'static str>,
    },
    /// A hyper-parameter that makes no sense.
    #[error("metadata key {key:?}: {what}")]
    Key {
        /// The full key.
        key: String,
        /// What is wrong with it.
        what: String,
    },
    /// Tensors the architecture needs and the file lacks or has in another shape. All of them, not only the first.
    #[error("{}", tensors(arch, missing, wrong))]
    Tensors {
        /// The architecture.
        arch: String,
        /// Names that are not in the file.
        missing: Vec<String>,
        /// Name and what is wrong with it.
        wrong: Vec<String>,
    },
    /// An option that does not go with this model.
    #[error("option {name}: {what}")]
    Option {
        /// The option, as the command line spells it.
        name: &'static str,
        /// What is wrong, and what would work.
        what: String,
    },
}

fn tensors(arch: &str, missing: &[String], wrong: &[String]) -> String {
    let mut parts = Vec::new();
    if !missing.is_empty() {
        parts.push(format!("{} missing tensors: {}", missing.len(), missing.join(", ")));
    }
    if !wrong.is_empty() {
        parts.push(format!("{} unusable tensors: {}", wrong.len(), wrong.join("; ")));
    }
    format!("the file does not hold a whole {arch} model: {}", parts.join("; "))
}
