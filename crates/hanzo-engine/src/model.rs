//! A model, loaded: its file, its Plan, its weights on a backend, and its tokenizer. Sequences and steps are [`Context`]'s.
//!
//! [`Context`]: crate::context::Context

use crate::arch::{self, Built, PlanOptions};
use crate::chat::ChatTemplate;
use crate::error::{Error, Result};
use crate::kv::KvSize;
use crate::tokenizer::{Tokenizer, TokenizerError};
use hanzo_gguf::{Format, Gguf, TensorBytes};
use hanzo_ml::backend::{Backend, Precision, WeightSource, Weights};
use hanzo_ml::cache::{CACHE_FORMATS, CacheGroup};
use hanzo_ml::levers::LeverSet;
use hanzo_ml::plan::{Plan, Weight};
use std::path::Path;
use std::sync::Arc;

/// The context of a session that does not ask for one, unless the model was trained for less.
pub const DEFAULT_CONTEXT: usize = 8192;

/// How a model is run. Nothing of it is in the model file.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelOptions {
    /// Fusions and kernel variants in force.
    pub levers: LeverSet,
    /// How weights meet activations.
    pub precision: Precision,
    /// Any chunking or batching gives bit-equal results, at some cost in speed.
    pub deterministic: bool,
    /// Format of cached keys (`-ctk`).
    pub type_k: Format,
    /// Format of cached values (`-ctv`).
    pub type_v: Format,
    /// The longest sequence in tokens (`-c`); by default the training length, at most [`DEFAULT_CONTEXT`].
    pub n_ctx: Option<usize>,
    /// Tokens of one prefill step (`--ubatch`).
    pub n_ubatch: usize,
    /// Sequences that can be held at the same time (`--parallel`).
    pub n_seqs: usize,
}

impl Default for ModelOptions {
    fn default() -> Self {
        ModelOptions {
            levers: LeverSet::default(),
            precision: Precision::Int8,
            deterministic: false,
            type_k: Format::F16,
            type_v: Format::F16,
            n_ctx: None,
            n_ubatch: 512,
            n_seqs: 1,
        }
    }
}

impl ModelOptions {
    /// f32 activations and an f32 cache throughout (`--exact`).
    #[must_use]
    pub fn exact(self) -> Self {
        ModelOptions { precision: Precision::Exact, type_k: Format::F32, type_v: Format::F32, ..self }
    }
}

/// A loaded model.
pub struct Model {
    gguf: Gguf,
    built: Built,
    backend: Arc<dyn Backend>,
    weights: Arc<dyn Weights>,
    tokenizer: std::result::Result<Tokenizer, TokenizerError>,
    options: ModelOptions,
    n_ctx: usize,
    warnings: Vec<String>,
}

impl Model {
    /// Opens a GGUF file (following its splits), builds its Plan and makes its weights resident on `backend`.
    pub fn load(path: impl AsRef<Path>, backend: Arc<dyn Backend>, options: ModelOptions) -> Result<Model> {
        Model::from_gguf(Gguf::open(path)?, backend, options)
    }

    /// As [`Model::load`], from an opened file.
    pub fn from_gguf(gguf: Gguf, backend: Arc<dyn Backend>, options: ModelOptions) -> Result<Model> {
        check_options(&options)?;
        let metadata = gguf.metadata();
        let arch = metadata.str("general.architecture")?;
        let trained = metadata.opt_u32(&format!("{arch}.context_length"))?.map(|n| n as usize);
        let n_ctx = options.n_ctx.unwrap_or(trained.unwrap_or(DEFAULT_CONTEXT).min(DEFAULT_CONTEXT));
        let plan_options = PlanOptions { n_ctx, type_k: options.type_k, type_v: options.type_v };
        let built = match arch::build(metadata, &gguf, &plan_options) {
            // The Plan's own check would say so less kindly.
            Err(Error::Ml(e)) => {
                check_float_cache_would_do(&gguf, &plan_options)?;
                return Err(Error::Ml(e));
            }
            built => built?,
        };
        let tokenizer = Tokenizer::from_gguf(metadata);
        let warnings = warnings(&built, trained, n_ctx, &tokenizer);
        let weights = backend.load(&built.plan, &FileWeights(&gguf))?;
        Ok(Model { gguf, built, backend, weights, tokenizer, options, n_ctx, warnings })
    }

    /// The file.
    pub fn gguf(&self) -> &Gguf {
        &self.gguf
    }

    /// The Plan and the sizes it was built with.
    pub fn built(&self) -> &Built {
        &self.built
    }

    /// The plain Plan.
    pub fn plan(&self) -> &Plan {
        &self.built.plan
    }

    /// Token ids there are: columns of a row of logits.
    pub fn n_vocab(&self) -> usize {
        self.built.hyper.n_vocab
    }

    /// The longest sequence, in tokens.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// What the model was loaded with.
    pub fn options(&self) -> &ModelOptions {
        &self.options
    }

    /// Where the model runs.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// The weights on the backend.
    pub fn weights(&self) -> &Arc<dyn Weights> {
        &self.weights
    }

    /// The tokenizer, or why there is none. A model without one still gives logits for token ids.
    pub fn tokenizer(&self) -> std::result::Result<&Tokenizer, &TokenizerError> {
        self.tokenizer.as_ref()
    }

    /// The chat template of the file, or the default for models without one; or why there is neither.
    pub fn chat_template(&self) -> Result<ChatTemplate> {
        let tokenizer = self.tokenizer().map_err(|e| Error::NoText { why: e.to_string() })?;
        Ok(ChatTemplate::from_gguf(self.gguf.metadata(), tokenizer)?)
    }

    /// How much the caches hold.
    pub fn kv_size(&self) -> KvSize {
        KvSize { n_ctx: self.n_ctx, n_seqs: self.options.n_seqs, n_ubatch: self.options.n_ubatch.min(self.n_ctx) }
    }

    /// What a user should know but need not stop for, one sentence each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

/// Tensors straight from the file's mapping.
struct FileWeights<'a>(&'a Gguf);

impl WeightSource for FileWeights<'_> {
    fn tensor(&self, weight: &Weight) -> hanzo_ml::error::Result<TensorBytes> {
        let missing = || hanzo_ml::Error::Weight { name: weight.tensor.clone(), what: "is not in the file".into() };
        self.0.tensor(&weight.tensor).map(|t| self.0.bytes(t)).ok_or_else(missing)
    }
}

fn check_options(o: &ModelOptions) -> Result<()> {
    let bad = |name, what: &str| Err(Error::Option { name, what: what.into() });
    match o {
        o if o.n_ctx == Some(0) => bad("--ctx-size", "must be at least 1"),
        o if o.n_ubatch == 0 => bad("--ubatch", "must be at least 1"),
        o if o.n_seqs == 0 => bad("--parallel", "must be at least 1"),
        o => [("-ctk", o.type_k), ("-ctv", o.type_v)].into_iter().try_for_each(|(name, format)| {
            let names: Vec<&str> = CACHE_FORMATS.iter().map(|f| f.name()).collect();
            let what = format!("{format} is no cache format; there are {}", names.join(", "));
            if CACHE_FORMATS.contains(&format) { Ok(()) } else { Err(Error::Option { name, what }) }
        }),
    }
}

/// If the Plan is sound with a float cache, the cache formats were the trouble: says which, and why.
fn check_float_cache_would_do(gguf: &Gguf, options: &PlanOptions) -> Result<()> {
    let floats = PlanOptions { type_k: Format::F16, type_v: Format::F16, ..*options };
    let Ok(built) = arch::build(gguf.metadata(), gguf, &floats) else { return Ok(()) };
    let misfit = |name, format: Format, d: fn(&CacheGroup) -> usize| {
        let head = built.plan.groups.iter().map(d).find(|d| format.row_bytes(*d).is_none());
        head.map_or(Ok(()), |d| {
            let block = format.block_len();
            let what = format!("heads of {d} elements are not whole {format} blocks of {block}; use f16");
            Err(Error::Option { name, what })
        })
    };
    misfit("-ctk", options.type_k, |g| g.d_k)?;
    misfit("-ctv", options.type_v, |g| g.d_v)
}

fn warnings(
    built: &Built,
    trained: Option<usize>,
    n_ctx: usize,
    tokenizer: &std::result::Result<Tokenizer, TokenizerError>,
) -> Vec<String> {
    let mut w = Vec::new();
    if let Some(t) = trained.filter(|t| n_ctx > *t) {
        w.push(format!("a context of {n_ctx} tokens is beyond the {t} that the model was trained for"));
    }
    if !built.unused.is_empty() {
        w.push(format!("{} tensors are not used: {}", built.unused.len(), list(&built.unused)));
    }
    match tokenizer {
        Ok(t) => {
            w.extend(t.warnings().iter().cloned());
            let (ids, rows) = (t.n_vocab(), built.hyper.n_vocab);
            if ids > rows {
                w.push(format!("the tokenizer has {ids} ids but the model only {rows} embedding rows"));
            } else if ids < rows {
                w.push(format!("the tokenizer has only {ids} ids for {rows} embedding rows: the others have no text"));
            }
        }
        Err(e) => w.push(format!("no text, only token ids: {e}")),
    }
    w
}

/// The first few of many names.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 5;
    let shown = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN { format!("{shown}, ...") } else { shown }
}
