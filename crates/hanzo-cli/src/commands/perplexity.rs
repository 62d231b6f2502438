//! `hanzo perplexity -f TEXT`: how well a model predicts a text, and how far it is from another model.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context as _;
use hanzo_engine::context::{Context as Engine, Control};
use hanzo_engine::logits::{Nll, log_probs};
use hanzo_engine::model::Model;
use hanzo_engine::tokenizer::{AddSpecial, ParseSpecial};
use serde_json::{Value, json};

use super::run::read_stdin;
use crate::cli::Context;
use crate::failure::{Failure, Interrupted};
use crate::model::interrupt::{self, Impatience};
use crate::model::{EngineArgs, prompt};
use crate::output;
use crate::perplexity::Chunks;
use crate::perplexity::base::{Reader, Writer};
use crate::perplexity::divergence::Divergence;
use crate::progress::Unit;

/// The context of a chunk, unless `-c` says otherwise.
const DEFAULT_CHUNK: usize = 512;

/// The command's grammar.
#[derive(clap::Args)]
#[command(
    after_help = "The text is cut into chunks of -c tokens (default 512); the second half of each is predicted. \
                        A base takes two bytes for each token of the vocabulary and each predicted token."
)]
pub struct Args {
    /// The text, as UTF-8 (`-`: standard input)
    #[arg(short, long, value_name = "FILE", required_unless_present = "base")]
    file: Option<PathBuf>,
    #[command(flatten)]
    engine: EngineArgs,
    /// Stop after N chunks
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    chunks: Option<u32>,
    /// Write all log-probabilities to a file that --base can compare with
    #[arg(long, value_name = "FILE")]
    save_base: Option<PathBuf>,
    /// Compare with a base, on the base's own text
    #[arg(long, value_name = "FILE", conflicts_with_all = ["file", "save_base", "ctx_size"])]
    base: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Measures, and writes or compares a base.
pub fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let mut base = args.base.as_deref().map(Reader::open).transpose()?;
    let n_ctx = match (&base, args.engine.ctx_size) {
        (Some(base), _) => base.chunks().n_ctx,
        (None, Some(n)) => n.get(),
        (None, None) => DEFAULT_CHUNK,
    };
    if n_ctx < 4 {
        return Err(Failure::usage(format!("a chunk of {n_ctx} tokens predicts nothing; -c must be at least 4")).into());
    }
    // The text is read before the model is loaded: it fails faster.
    let text = match (&base, &args.file) {
        (Some(_), _) | (None, None) => None,
        (None, Some(file)) if file.as_os_str() == "-" => Some(read_stdin()?),
        (None, Some(file)) => {
            Some(std::fs::read_to_string(file).with_context(|| format!("cannot read the text `{}`", file.display()))?)
        }
    };
    let mut options = args.engine.options()?;
    options.n_ctx = Some(n_ctx);
    let loaded = args.engine.load_with(context, options)?;
    let limit = args.chunks.map(|n| n as usize);
    let chunks = match (&base, text) {
        (Some(base), _) => base_chunks(base, &loaded.model, limit)?,
        (None, text) => text_chunks(&text.unwrap_or_default(), &loaded.model, n_ctx, limit)?,
    };
    let mut writer =
        args.save_base.as_deref().map(|file| Writer::create(file, loaded.model.n_vocab(), &chunks)).transpose()?;
    let mut engine = Engine::new(&loaded.model)?;
    let (nll, divergence) = measure(&mut engine, &chunks, writer.as_mut(), base.as_mut(), context)?;
    if let Some(writer) = writer {
        writer.finish()?;
    }
    report(&args, &chunks, &nll, base.is_some().then_some(&divergence))
}

/// The chunks of a text.
fn text_chunks(text: &str, model: &Model, n_ctx: usize, limit: Option<usize>) -> anyhow::Result<Chunks> {
    let tokenizer = prompt::tokenizer(model)?;
    let ids = tokenizer.encode(text, AddSpecial::Always, ParseSpecial::No);
    let bos = tokenizer.bos().filter(|_| tokenizer.adds_bos());
    let n = ids.len();
    let chunks = Chunks::cut(ids, n_ctx, bos, limit);
    if chunks.len() == 0 {
        return Err(Failure::new(format!("the text has {n} tokens, less than one chunk of {n_ctx}"))
            .remedy("give a longer text, or a smaller -c")
            .into());
    }
    Ok(chunks)
}

/// The chunks of a base that fits the model.
fn base_chunks(base: &Reader, model: &Model, limit: Option<usize>) -> anyhow::Result<Chunks> {
    if base.n_vocab() != model.n_vocab() {
        let (theirs, ours) = (base.n_vocab(), model.n_vocab());
        return Err(Failure::new(format!("the base is of a vocabulary of {theirs} tokens, the model's has {ours}"))
            .remedy("compare models with the same tokenizer")
            .into());
    }
    let Chunks { n_ctx, ids } = base.chunks().clone();
    // The base's chunks have their BOS already.
    Ok(Chunks::cut(ids, n_ctx, None, limit))
}

/// Predicts every chunk.
fn measure(
    engine: &mut Engine,
    chunks: &Chunks,
    mut writer: Option<&mut Writer>,
    mut base: Option<&mut Reader>,
    context: &Context,
) -> anyhow::Result<(Nll, Divergence)> {
    let cancel = interrupt::catch(Impatience::Ends)?;
    let progress = context.progress("predicting", Unit::Steps, Some((chunks.len() * chunks.n_ctx) as u64));
    let mut nll = Nll::default();
    let mut divergence = Divergence::default();
    for chunk in chunks.iter() {
        let mut seq = engine.sequence()?;
        // The last token is only predicted: nothing follows it.
        let ids = &chunk[..chunk.len() - 1];
        let mut failed: anyhow::Result<()> = Ok(());
        let mut control = Control { cancel: Some(cancel), progress: None };
        let result = log_probs(engine, &mut seq, ids, chunks.first(), &mut control, &mut |i, row| {
            let next = chunk[i + 1];
            nll.add(row[next as usize]);
            let mut both = || -> anyhow::Result<()> {
                if let Some(writer) = &mut writer {
                    writer.row(row)?;
                }
                if let Some(base) = &mut base {
                    divergence.add(base.next_row()?, row, next);
                }
                Ok(())
            };
            if failed.is_ok() {
                failed = both();
            }
        });
        match result {
            Err(hanzo_engine::Error::Cancelled) => return Err(Interrupted.into()),
            result => result?,
        }
        failed?;
        progress.add(chunks.n_ctx as u64);
    }
    Ok((nll, divergence))
}

fn report(args: &Args, chunks: &Chunks, nll: &Nll, divergence: Option<&Divergence>) -> anyhow::Result<()> {
    let (perplexity, error) = (nll.perplexity(), nll.std_error() * nll.perplexity());
    let summary = divergence.map(Divergence::summary);
    if args.json {
        let mut object = json!({
            "perplexity": perplexity,
            "perplexity_error": error,
            "mean_nll": nll.mean(),
            "tokens": nll.n,
            "chunks": chunks.len(),
            "n_ctx": chunks.n_ctx,
        });
        if let (Some(summary), Value::Object(map)) = (&summary, &mut object) {
            map.insert("base".into(), serde_json::to_value(summary)?);
        }
        return output::print_json(&object);
    }
    let mut out = output::stdout();
    writeln!(
        out,
        "perplexity      {perplexity:.4} ± {error:.4}  ({} tokens in {} chunks of {})",
        nll.n,
        chunks.len(),
        chunks.n_ctx
    )?;
    if let Some(s) = summary {
        writeln!(out, "base            {:.4}", s.base_perplexity)?;
        writeln!(out, "Δ mean NLL      {:+.6} ± {:.6}", s.nll_difference, s.nll_difference_error)?;
        writeln!(
            out,
            "KL divergence   {:.6} ± {:.6} mean, {:.6} median, {:.6} at 99%, {:.6} max",
            s.mean_kl, s.mean_kl_error, s.median_kl, s.kl_99, s.max_kl
        )?;
        writeln!(out, "top-1           {:.3}% agree", 100.0 * s.top1_agreement)?;
        writeln!(out, "Δ probability   {:.3}% RMS of the next token's", 100.0 * s.rms_probability_difference)?;
    }
    Ok(out.finish()?)
}
