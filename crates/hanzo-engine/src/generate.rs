//! From a prompt's tokens to text, piece by piece: evaluate, sample, detokenize, stop.

use crate::chat::ReasoningSplitter;
use crate::context::{Context, Control, Rows};
use crate::error::{Error, Result};
use crate::kv::Sequence;
use crate::sample::{Sampler, SamplerParams, StopMatcher};
use crate::tokenizer::{Detokenizer, Tokenizer};
use std::time::{Duration, Instant};

/// What to generate and when to stop.
#[derive(Clone, Debug, Default)]
pub struct GenerateOptions {
    /// The most tokens; without a limit, until the model stops or the context is full.
    pub max_tokens: Option<usize>,
    /// How to choose tokens.
    pub sampler: SamplerParams,
    /// Strings that end the text and are not part of it.
    pub stops: Vec<String>,
    /// Go on behind tokens that end a generation (for measuring).
    pub ignore_eog: bool,
    /// Show control tokens as text.
    pub render_special: bool,
    /// Keeps reasoning apart from the answer; without one, everything is answer.
    pub reasoning: Option<ReasoningSplitter>,
}

/// A piece of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// The model's thoughts.
    Reasoning(&'a str),
    /// What it says.
    Answer(&'a str),
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The model ended it.
    Eog,
    /// The most tokens were reached.
    Length,
    /// A stop string came, by its place in the list.
    StopString(usize),
    /// The caller's flag was raised.
    Cancelled,
    /// No further token fits the context.
    ContextFull,
}

/// Counts and times of a generation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timings {
    /// Prompt tokens that were evaluated.
    pub prompt_tokens: usize,
    /// Prompt tokens that were in the cache already.
    pub cached_tokens: usize,
    /// Time spent on the prompt.
    pub prompt: Duration,
    /// Tokens generated, the one that ended it included.
    pub generated: usize,
    /// Time spent on generating, sampling and detokenizing included.
    pub generation: Duration,
}

impl Timings {
    /// Prompt tokens a second.
    pub fn prompt_per_second(&self) -> f64 {
        self.prompt_tokens as f64 / self.prompt.as_secs_f64().max(1e-9)
    }

    /// Generated tokens a second.
    pub fn generated_per_second(&self) -> f64 {
        self.generated as f64 / self.generation.as_secs_f64().max(1e-9)
    }
}

/// How a generation ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Why it ended.
    pub stop: StopReason,
    /// Counts and times.
    pub timings: Timings,
}

/// A generation under way. [`generate`] drives one to its end.
pub struct Generator<'a> {
    context: &'a mut Context,
    seq: &'a mut Sequence,
    sampler: Sampler,
    matcher: StopMatcher,
    text: Detokenizer,
    reasoning: Option<ReasoningSplitter>,
    max_tokens: usize,
    ignore_eog: bool,
    logits: Vec<f32>,
    /// The last token chosen, if it is not evaluated yet.
    next: Option<u32>,
    stop: Option<StopReason>,
    timings: Timings,
}

impl<'a> Generator<'a> {
    /// Evaluates `prompt`, of which `seq` may hold a prefix already: what differs is cut off. Cancelled on the way, the
    /// generation has ended before it began.
    pub fn new(
        context: &'a mut Context,
        seq: &'a mut Sequence,
        prompt: &[u32],
        options: &GenerateOptions,
        control: &mut Control<'_>,
    ) -> Result<Generator<'a>> {
        if prompt.is_empty() {
            return Err(Error::Option { name: "prompt", what: "has no tokens; nothing can follow it".into() });
        }
        let started = Instant::now();
        options.sampler.check_vocabulary(context.model().n_vocab())?;
        let mut sampler = Sampler::new(options.sampler.clone())?;
        prompt.iter().for_each(|t| sampler.accept(*t));
        let mut logits = vec![0.0; context.model().n_vocab()];
        let cached = context.keep_prefix(seq, prompt)?;
        let new = &prompt[cached..];
        let stop = match context.eval(seq, new, Rows::Last, control, &mut |_, row| logits.copy_from_slice(row)) {
            Err(Error::Cancelled) => Some(StopReason::Cancelled),
            evaluated => evaluated.map(|()| None)?,
        };
        let timings = Timings {
            prompt_tokens: new.len(),
            cached_tokens: cached,
            prompt: started.elapsed(),
            ..Timings::default()
        };
        Ok(Generator {
            context,
            seq,
            sampler,
            matcher: StopMatcher::new(options.stops.iter().cloned()),
            text: Detokenizer::new(options.render_special),
            reasoning: options.reasoning.clone(),
            max_tokens: options.max_tokens.unwrap_or(usize::MAX),
            ignore_eog: options.ignore_eog,
            logits,
            next: None,
            stop,
            timings,
        })
    }

    /// Generates one token and gives `piece` the text that is now certain: often one piece, sometimes none. Returns why
    /// the generation ended, once it has.
    pub fn step(&mut self, control: &Control<'_>, piece: &mut dyn FnMut(Piece<'_>)) -> Result<Option<StopReason>> {
        if self.stop.is_some() {
            return Ok(self.stop);
        }
        let started = Instant::now();
        let stop = self.advance(control, piece);
        self.timings.generation += started.elapsed();
        if let Some(reason) = stop? {
            // Nothing more can come of what was held back; a stop string's own beginning is gone already.
            if !matches!(reason, StopReason::StopString(_)) {
                let Generator { text, matcher, reasoning, .. } = self;
                deliver(matcher.push(text.flush()).0, reasoning, piece);
                deliver(matcher.flush(), reasoning, piece);
            }
            if let Some(r) = &mut self.reasoning {
                emit(r.flush(), piece);
            }
            self.stop = Some(reason);
        }
        Ok(self.stop)
    }

    fn advance(&mut self, control: &Control<'_>, piece: &mut dyn FnMut(Piece<'_>)) -> Result<Option<StopReason>> {
        if control.is_cancelled() {
            return Ok(Some(StopReason::Cancelled));
        }
        if self.timings.generated >= self.max_tokens {
            return Ok(Some(StopReason::Length));
        }
        if let Some(token) = self.next.take() {
            if self.seq.len() >= self.context.model().n_ctx() {
                return Ok(Some(StopReason::ContextFull));
            }
            let Generator { context, seq, logits, .. } = self;
            let keep = &mut |_: usize, row: &[f32]| logits.copy_from_slice(row);
            context.eval(seq, &[token], Rows::Last, &mut Control::default(), keep)?;
        }
        let token = self.sampler.sample(&self.logits)?;
        self.sampler.accept(token);
        self.next = Some(token);
        self.timings.generated += 1;
        let model = self.context.model().clone();
        let tokenizer = usable(model.tokenizer())?;
        if tokenizer.is_eog(token) && !self.ignore_eog {
            return Ok(Some(StopReason::Eog));
        }
        let (text, found) = self.matcher.push(self.text.push(tokenizer, token));
        deliver(text, &mut self.reasoning, piece);
        match found {
            Some(i) => Ok(Some(StopReason::StopString(i))),
            None if self.timings.generated >= self.max_tokens => Ok(Some(StopReason::Length)),
            None => Ok(None),
        }
    }

    /// Counts and times so far.
    pub fn timings(&self) -> &Timings {
        &self.timings
    }

    /// The token chosen last, which is not in the sequence yet.
    pub fn last_token(&self) -> Option<u32> {
        self.next
    }
}

/// Generates until something ends it.
pub fn generate(
    context: &mut Context,
    seq: &mut Sequence,
    prompt: &[u32],
    options: &GenerateOptions,
    control: &mut Control<'_>,
    piece: &mut dyn FnMut(Piece<'_>),
) -> Result<Outcome> {
    usable(context.model().tokenizer())?;
    let mut generator = Generator::new(context, seq, prompt, options, control)?;
    loop {
        if let Some(stop) = generator.step(control, piece)? {
            return Ok(Outcome { stop, timings: generator.timings });
        }
    }
}

/// The tokenizer, or an error of this crate that says why there is none.
fn usable<E: std::fmt::Display>(tokenizer: std::result::Result<&Tokenizer, E>) -> Result<&Tokenizer> {
    tokenizer.map_err(|e| Error::NoText { why: e.to_string() })
}

fn deliver(text: &str, reasoning: &mut Option<ReasoningSplitter>, piece: &mut dyn FnMut(Piece<'_>)) {
    match reasoning {
        Some(r) => emit(r.push(text), piece),
        None if text.is_empty() => {}
        None => piece(Piece::Answer(text)),
    }
}

fn emit(delta: crate::chat::ReplyDelta<'_>, piece: &mut dyn FnMut(Piece<'_>)) {
    if !delta.reasoning.is_empty() {
        piece(Piece::Reasoning(delta.reasoning));
    }
    if !delta.answer.is_empty() {
        piece(Piece::Answer(delta.answer));
    }
}
