//! `hanzo run PROMPT`: one prompt, one answer, streamed.

use std::io::{IsTerminal, Read};
use std::time::Duration;

use anyhow::Context as _;
use hanzo_engine::chat::Message;
use hanzo_engine::context::{Context as Engine, Control};
use hanzo_engine::generate::{GenerateOptions, Generator, Outcome, StopReason};
use serde_json::json;

use crate::cli::Context;
use crate::failure::{Failure, Interrupted};
use crate::model::interrupt::{self, Impatience};
use crate::model::reply::{ReasoningTo, Reply, stop_name, timings_line};
use crate::model::sampling::{SamplingArgs, check_vocabulary};
use crate::model::{EngineArgs, prompt};
use crate::output::{self, Verbosity};
use crate::progress::Unit;

/// The command's grammar.
#[derive(clap::Args)]
#[command(after_help = "The answer goes to stdout and nothing else does; a thinking model's reasoning goes to stderr \
                        if that is a terminal (or with -v). Exit code 130 after Ctrl-C.")]
pub struct Args {
    /// The prompt; several words are joined, `-` stands for standard input, which is read too if there are none
    #[arg(value_name = "PROMPT")]
    prompt: Vec<String>,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// What the model is told before the prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Continue the prompt as it is, without the model's chat template
    #[arg(long)]
    raw: bool,
    /// Tokens to generate at most (-1: until the model stops or the context is full)
    #[arg(short, long, value_name = "N", default_value_t = -1, allow_negative_numbers = true)]
    n_predict: i64,
    /// Ask a thinking model not to think first
    #[arg(long, conflicts_with = "raw")]
    no_think: bool,
    /// Print one JSON object at the end instead of text as it comes
    #[arg(long)]
    json: bool,
}

/// Answers the prompt.
pub fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let text = prompt_text(&args.prompt, std::io::stdin().is_terminal(), read_stdin)?;
    let sampler = args.sampling.params()?;
    let seed = sampler.seed;
    let loaded = args.engine.load(context)?;
    check_vocabulary(&sampler, loaded.model.n_vocab())?;
    let prompt = if args.raw {
        prompt::raw(&loaded.model, &text)?
    } else {
        let template = prompt::template(&loaded.model, context)?;
        let system = args.system.iter().map(|s| Message::new("system", s.as_str()));
        let messages: Vec<Message> = system.chain([Message::new("user", text)]).collect();
        prompt::chat(&loaded.model, &template, &messages, args.no_think.then_some(false))?
    };
    let options = GenerateOptions {
        max_tokens: usize::try_from(args.n_predict).ok(),
        sampler,
        stops: args.sampling.stop.clone(),
        reasoning: prompt.reasoning,
        ..GenerateOptions::default()
    };
    let reasoning_to = match context.verbosity {
        Verbosity::Quiet => ReasoningTo::Nowhere,
        Verbosity::Normal if !std::io::stderr().is_terminal() => ReasoningTo::Nowhere,
        _ => ReasoningTo::Stderr,
    };
    let mut reply = if args.json { Reply::collected(ReasoningTo::Nowhere) } else { Reply::streamed(reasoning_to) };
    let mut engine = Engine::new(&loaded.model)?;
    let outcome = generate(&mut engine, &prompt.ids, &options, &mut reply, context)?;
    reply.end()?;
    drop(engine);
    if args.json {
        print_json(&args, &reply, &outcome, seed, loaded.load_time)?;
    }
    if context.verbosity >= Verbosity::Verbose {
        let load = loaded.load_time.as_secs_f64();
        context.note(format_args!("loaded in {load:.2} s; {}", timings_line(&outcome.timings, outcome.stop)));
    }
    match outcome.stop {
        StopReason::Cancelled => Err(Interrupted.into()),
        StopReason::ContextFull => {
            let n = loaded.model.n_ctx();
            context.note(format_args!("note: the context of {n} tokens is full; -c makes it longer"));
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Evaluates the prompt and generates until something ends it, be it a reader that leaves.
fn generate(
    engine: &mut Engine,
    ids: &[u32],
    options: &GenerateOptions,
    reply: &mut Reply,
    context: &Context,
) -> anyhow::Result<Outcome> {
    let cancel = interrupt::catch(Impatience::Ends)?;
    let progress = context.progress("reading the prompt", Unit::Steps, Some(ids.len() as u64));
    let mut seq = engine.sequence()?;
    let mut report = |done: usize, _: usize| progress.set(done as u64);
    let mut control = Control { cancel: Some(cancel), progress: Some(&mut report) };
    let mut generator = Generator::new(engine, &mut seq, ids, options, &mut control)?;
    progress.finish();
    let control = Control { cancel: Some(cancel), progress: None };
    loop {
        let stop = generator.step(&control, &mut |piece| reply.push(piece))?;
        let timings = *generator.timings();
        match stop {
            Some(stop) => return Ok(Outcome { stop, timings }),
            None if reply.failed() => return Ok(Outcome { stop: StopReason::Length, timings }),
            None => {}
        }
    }
}

fn print_json(
    args: &Args,
    reply: &Reply,
    outcome: &Outcome,
    seed: Option<u64>,
    load_time: Duration,
) -> anyhow::Result<()> {
    let t = &outcome.timings;
    let stop_string = match outcome.stop {
        StopReason::StopString(i) => args.sampling.stop.get(i),
        _ => None,
    };
    output::print_json(&json!({
        "model": args.engine.model.model,
        "text": reply.answer,
        "reasoning": reply.reasoning,
        "stop": stop_name(outcome.stop),
        "stop_string": stop_string,
        "seed": seed,
        "tokens": { "prompt": t.prompt_tokens + t.cached_tokens, "generated": t.generated },
        "timings": {
            "load_s": load_time.as_secs_f64(),
            "prompt_s": t.prompt.as_secs_f64(),
            "prompt_per_s": t.prompt_per_second(),
            "generation_s": t.generation.as_secs_f64(),
            "generated_per_s": t.generated_per_second(),
        },
    }))
}

/// The prompt from its words; `read` is asked for what stdin holds.
fn prompt_text(
    words: &[String],
    stdin_is_terminal: bool,
    read: impl FnOnce() -> anyhow::Result<String>,
) -> anyhow::Result<String> {
    let wants_stdin = words.is_empty() || words.iter().any(|w| w == "-");
    if words.is_empty() && stdin_is_terminal {
        return Err(Failure::usage("there is no prompt")
            .remedy("give one: hanzo run \"Why is the sky blue?\", pipe one in, or start `hanzo chat`")
            .into());
    }
    let stdin = if wants_stdin { read()? } else { String::new() };
    let stdin = stdin.strip_suffix('\n').map_or(stdin.as_str(), |s| s.strip_suffix('\r').unwrap_or(s));
    let words = words.iter().map(|w| if w == "-" { stdin } else { w });
    let text = if wants_stdin && words.len() == 0 { stdin.to_string() } else { words.collect::<Vec<_>>().join(" ") };
    if text.is_empty() {
        return Err(Failure::usage("the prompt is empty").into());
    }
    Ok(text)
}

/// All of standard input, as text.
pub fn read_stdin() -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    std::io::stdin().lock().read_to_end(&mut bytes).context("cannot read standard input")?;
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Failure::new(format!("standard input is not UTF-8 (byte {at})")).remedy("convert it, e.g. with iconv").into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(words: &[&str], terminal: bool) -> anyhow::Result<String> {
        let words: Vec<String> = words.iter().map(|w| w.to_string()).collect();
        prompt_text(&words, terminal, || Ok("piped\ntext\r\n".to_string()))
    }

    #[test]
    fn a_prompt_comes_from_words_or_stdin_or_both() {
        assert_eq!(text(&["Why", "is it?"], true).unwrap(), "Why is it?");
        assert_eq!(text(&["Why?"], false).unwrap(), "Why?");
        assert_eq!(text(&[], false).unwrap(), "piped\ntext");
        assert_eq!(text(&["-"], true).unwrap(), "piped\ntext");
        assert_eq!(text(&["Sum up:", "-"], false).unwrap(), "Sum up: piped\ntext");
        for nothing in [text(&[], true), text(&[""], false)] {
            assert_eq!(crate::failure::exit_code(&nothing.unwrap_err()), 2);
        }
    }
}
