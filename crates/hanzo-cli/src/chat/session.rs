//! The model's side of a chat: one sequence that is kept between turns, so that only what is new is evaluated.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use hanzo_engine::chat::ChatTemplate;
use hanzo_engine::context::{Context as Engine, Control};
use hanzo_engine::generate::{GenerateOptions, Generator, Outcome, StopReason};
use hanzo_engine::kv::Sequence;
use hanzo_engine::model::Model;
use hanzo_engine::sample::SamplerParams;

use super::conversation::Conversation;
use crate::model::prompt;
use crate::model::reply::Reply;

/// What to do about a conversation that no longer fits the context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum OnFull {
    /// Say so, and leave the choice to the user
    Stop,
    /// Forget the oldest exchanges
    Drop,
}

/// Room for a reply that [`OnFull::Drop`] makes: a quarter of the context, at most this.
const REPLY_ROOM: usize = 512;

/// How a turn is run.
pub struct TurnOptions {
    pub sampler: SamplerParams,
    pub stops: Vec<String>,
    pub max_tokens: Option<usize>,
    pub thinking: Option<bool>,
    pub on_full: OnFull,
}

/// How a turn went.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Turn {
    /// The model said something.
    Answered {
        outcome: Outcome,
        /// Exchanges that were forgotten to make room.
        dropped: usize,
    },
    /// Ctrl-C came before the model could say anything.
    Cancelled,
    /// The conversation does not fit: its tokens.
    Full(usize),
}

/// A model in conversation.
pub struct Session {
    model: Arc<Model>,
    engine: Engine,
    seq: Sequence,
    template: ChatTemplate,
    last: Option<Outcome>,
    turns: u64,
}

impl Session {
    /// Ready for the first question.
    pub fn new(model: &Arc<Model>, template: ChatTemplate) -> anyhow::Result<Session> {
        let mut engine = Engine::new(model)?;
        let seq = engine.sequence()?;
        Ok(Session { model: model.clone(), engine, seq, template, last: None, turns: 0 })
    }

    /// The most tokens of a conversation.
    pub fn n_ctx(&self) -> usize {
        self.model.n_ctx()
    }

    /// Tokens in the cache, and the outcome of the last reply.
    pub fn stats(&self) -> (usize, Option<Outcome>) {
        (self.seq.len(), self.last)
    }

    /// Lets the model answer the last message; the answer is streamed and then added to the conversation.
    pub fn answer(
        &mut self,
        conversation: &mut Conversation,
        options: &TurnOptions,
        reply: &mut Reply,
        cancel: &AtomicBool,
        progress: &mut dyn FnMut(usize, usize),
    ) -> anyhow::Result<Turn> {
        let n_ctx = self.n_ctx();
        let room = match options.on_full {
            OnFull::Stop => 1,
            OnFull::Drop => (n_ctx / 4).clamp(1, REPLY_ROOM),
        };
        let mut dropped = 0;
        let prompt = loop {
            let messages = conversation.messages();
            let prompt = prompt::chat(&self.model, &self.template, messages, options.thinking)?;
            if prompt.ids.len() + room <= n_ctx {
                break prompt;
            }
            if options.on_full == OnFull::Stop || !conversation.drop_oldest() {
                return Ok(Turn::Full(prompt.ids.len()));
            }
            dropped += 1;
        };
        // Each turn draws from its own place, so that an answer asked for again is another one; all are repeatable.
        let seed = options.sampler.seed.map(|s| s.wrapping_add(self.turns));
        self.turns += 1;
        let generate = GenerateOptions {
            max_tokens: options.max_tokens,
            sampler: SamplerParams { seed, ..options.sampler.clone() },
            stops: options.stops.clone(),
            reasoning: prompt.reasoning,
            ..GenerateOptions::default()
        };
        let mut control = Control { cancel: Some(cancel), progress: Some(progress) };
        let Session { engine, seq, .. } = self;
        let mut generator = Generator::new(engine, seq, &prompt.ids, &generate, &mut control)?;
        let control = Control { cancel: Some(cancel), progress: None };
        let stop = loop {
            let stop = generator.step(&control, &mut |piece| reply.push(piece))?;
            if let Some(stop) = stop.or_else(|| reply.failed().then_some(StopReason::Cancelled)) {
                break stop;
            }
        };
        let outcome = Outcome { stop, timings: *generator.timings() };
        reply.end()?;
        if reply.answer.is_empty() && reply.reasoning.is_empty() && stop == StopReason::Cancelled {
            return Ok(Turn::Cancelled);
        }
        conversation.assistant(&reply.answer, &reply.reasoning);
        self.last = Some(outcome);
        Ok(Turn::Answered { outcome, dropped })
    }
}
