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
    /// The file has no usable tokenizer, so the model speaks token ids only.
    #[error("this model cannot read or write text: {why}")]
    NoText {
        /// What is wrong with the tokenizer.
        why: String,
    },
    /// The chat template cannot be used.
    #[error(transparent)]
    Chat(#[from] crate::chat::ChatError),
    /// No token can be chosen, or the sampling parameters make no sense.
    #[error(transparent)]
    Sample(#[from] crate::sample::SampleError),
    /// Logits that are no distribution.
    #[error(
        "the logits after token {position} are not numbers ({nan} NaN and {infinite} infinite of {n_vocab}): a weight or a scale of \
         the model is broken, or its activations overflow; try --exact, or another device"
    )]
    NotANumber {
        /// Index of the token among those evaluated.
        position: usize,
        /// How many are NaN.
        nan: usize,
        /// How many are infinite.
        infinite: usize,
        /// All of them.
        n_vocab: usize,
    },
    /// A sequence would grow beyond the context.
    #[error("the context is full: {len} tokens and {more} more do not fit {n_ctx}; raise --ctx-size")]
    ContextFull {
        /// Tokens there.
        len: usize,
        /// Tokens to be added.
        more: usize,
        /// The most there can be.
        n_ctx: usize,
    },
    /// All pages or state slots are taken.
    #[error("the cache is full: {group} needs {needed} more and has {free} free; drop a sequence or raise --parallel")]
    CacheFull {
        /// The page group or state.
        group: String,
        /// Pages or slots needed.
        needed: usize,
        /// Pages or slots free.
        free: usize,
    },
    /// A sequence cannot be cut back to this length.
    #[error("cannot go back from {from} tokens to {to}: {what}")]
    Truncate {
        /// Tokens there.
        from: usize,
        /// The length asked for.
        to: usize,
        /// Why not.
        what: String,
    },
    /// The caller's flag was raised.
    #[error("cancelled")]
    Cancelled,
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
