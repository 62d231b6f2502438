//! `hanzo chat`: a conversation, turn by turn.

use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use hanzo_engine::generate::StopReason;

use crate::chat::conversation::Conversation;
use crate::chat::input::{self, Line, Lines, Piped, Terminal};
use crate::chat::session::{OnFull, Session, Turn, TurnOptions};
use crate::chat::slash::{self, Entered, HELP, Slash};
use crate::cli::Context;
use crate::failure::{self, Failure};
use crate::model::interrupt::{self, Impatience};
use crate::model::reply::{ReasoningTo, Reply, timings_line};
use crate::model::sampling::{SamplingArgs, check_vocabulary};
use crate::model::{EngineArgs, prompt};
use crate::output::{self, Verbosity};
use crate::progress::Unit;

/// The command's grammar.
#[derive(clap::Args)]
#[command(after_help = "Type /help in the chat for its commands. With input from a pipe, each line is a message, \
                        only answers are printed, and the exit code is 1 if one did not fit or a command failed.")]
pub struct Args {
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// What the model is told before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Go on with a conversation that /save wrote
    #[arg(long, value_name = "FILE")]
    load: Option<PathBuf>,
    /// Tokens of one reply at most (-1: until the model stops or the context is full)
    #[arg(short, long, value_name = "N", default_value_t = -1, allow_negative_numbers = true)]
    n_predict: i64,
    /// Ask a thinking model not to think first
    #[arg(long)]
    no_think: bool,
    /// Show a thinking model's reasoning though the output is no terminal
    #[arg(long)]
    show_thinking: bool,
    /// When the conversation no longer fits the context
    #[arg(long, value_name = "WHAT", default_value = "stop")]
    on_full: OnFull,
}

/// Talks until the user leaves.
pub fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let interactive = input::is_interactive();
    let options = TurnOptions {
        sampler: args.sampling.params()?,
        stops: args.sampling.stop.clone(),
        max_tokens: usize::try_from(args.n_predict).ok(),
        thinking: args.no_think.then_some(false),
        on_full: args.on_full,
    };
    let mut conversation = Conversation::new(args.system.as_deref());
    if let Some(file) = &args.load {
        conversation = Conversation::load(file)?;
        if args.system.is_some() {
            conversation.set_system(args.system.as_deref());
        }
    }
    let loaded = args.engine.load(context)?;
    check_vocabulary(&options.sampler, loaded.model.n_vocab())?;
    let template = prompt::template(&loaded.model, context)?;
    let session = Session::new(&loaded.model, template)?;
    let cancel = interrupt::catch(Impatience::Waits)?;
    let mut lines: Box<dyn Lines> = if interactive {
        Box::new(Terminal::new(context.settings.cache.as_ref().map(|c| c.join("chat-history")))?)
    } else {
        Box::new(Piped(std::io::stdin().lock()))
    };
    if interactive {
        context.note(format_args!(
            "{}, context of {} tokens; /help lists commands, Ctrl-D leaves",
            args.engine.model.model,
            session.n_ctx()
        ));
    }
    let reasoning_to = if interactive || args.show_thinking { ReasoningTo::Stdout } else { ReasoningTo::Nowhere };
    let mut chat = Chat { session, conversation, options, reasoning_to, cancel, context, failed: 0 };
    chat.talk(&mut *lines)?;
    // Who types has seen it; a program asks for the exit code.
    match chat.failed {
        n if n > 0 && !interactive => {
            Err(Failure::new(format!("{n} of the lines could not be obeyed: see above")).into())
        }
        _ => Ok(()),
    }
}

struct Chat<'a> {
    session: Session,
    conversation: Conversation,
    options: TurnOptions,
    reasoning_to: ReasoningTo,
    cancel: &'static AtomicBool,
    context: &'a Context,
    /// Questions that did not fit, and commands that failed: none of them ends the chat.
    failed: usize,
}

impl Chat<'_> {
    fn talk(&mut self, lines: &mut dyn Lines) -> anyhow::Result<()> {
        loop {
            let text = match input::message(lines)? {
                Line::Text(text) => text,
                Line::Interrupted => {
                    self.context.note(format_args!("(Ctrl-D or /exit leaves)"));
                    continue;
                }
                Line::End => return Ok(()),
            };
            match slash::parse(&text) {
                Entered::Nothing => {}
                Entered::Wrong(what) => self.context.note(format_args!("{what}")),
                Entered::Command(Slash::Exit) => return Ok(()),
                Entered::Command(command) => self.obey(command)?,
                Entered::Text(text) => {
                    self.conversation.user(&text);
                    self.answer()?;
                }
            }
        }
    }

    /// Acts on a command; what was asked for goes to stdout, remarks to stderr.
    fn obey(&mut self, command: Slash) -> anyhow::Result<()> {
        match command {
            Slash::Help => say(HELP)?,
            Slash::Clear => {
                self.conversation.clear();
                self.context.note(format_args!("the conversation is forgotten"));
            }
            Slash::System(None) => say(self.conversation.system().unwrap_or("(no system message)"))?,
            Slash::System(Some(text)) => {
                let text = Some(text.as_str()).filter(|t| !t.eq_ignore_ascii_case("none"));
                self.conversation.clear();
                self.conversation.set_system(text);
                let what = if text.is_some() { "set" } else { "removed" };
                self.context.note(format_args!("the system message is {what}; the conversation starts anew"));
            }
            Slash::Save(file) => {
                let result = self.conversation.save(&file);
                self.report(result, format_args!("saved to {}", file.display()));
            }
            Slash::Load(file) => {
                let loaded = Conversation::load(&file).map(|c| self.conversation = c);
                let n = self.conversation.messages().len();
                self.report(loaded, format_args!("loaded {n} messages"));
            }
            Slash::Stats => say(&self.stats())?,
            Slash::Regen => {
                if self.conversation.forget_answer() {
                    self.answer()?;
                } else {
                    self.context.note(format_args!("there is no answer yet"));
                }
            }
            Slash::Drop => {
                let done = self.conversation.drop_oldest();
                let what = if done { "the oldest exchange is forgotten" } else { "there is nothing to forget" };
                self.context.note(format_args!("{what}"));
            }
            Slash::Think(thinking) => self.options.thinking = thinking,
            // The loop has acted on it.
            Slash::Exit => {}
        }
        Ok(())
    }

    /// A command of the chat that failed does not end it.
    fn report(&mut self, result: anyhow::Result<()>, done: std::fmt::Arguments<'_>) {
        match result {
            Ok(()) => self.context.note(done),
            Err(error) => {
                self.failed += 1;
                output::stderr_line(format_args!("{}", failure::report(&error)));
            }
        }
    }

    /// Lets the model answer, and says what the user should know about it.
    fn answer(&mut self) -> anyhow::Result<()> {
        interrupt::lower();
        let n_ctx = self.session.n_ctx();
        let progress = self.context.progress("reading", Unit::Steps, None);
        let mut reply = Reply::streamed(self.reasoning_to);
        let Chat { session, conversation, options, cancel, context, failed, .. } = self;
        let mut report =
            |done: usize, all: usize| if done < all { progress.set(done as u64) } else { progress.finish() };
        let turn = session.answer(conversation, options, &mut reply, cancel, &mut report)?;
        drop(progress);
        match turn {
            Turn::Answered { outcome, dropped } => {
                if dropped > 0 {
                    context.note(format_args!("(the {dropped} oldest exchanges were forgotten to make room)"));
                }
                match outcome.stop {
                    StopReason::Cancelled => context.note(format_args!("(stopped)")),
                    StopReason::Length => context.note(format_args!("(cut off after {} tokens: -n)", outcome.timings.generated)),
                    StopReason::ContextFull => context.note(format_args!(
                        "(cut off: the context of {n_ctx} tokens is full; /drop forgets the oldest exchange, /clear all, -c makes it longer)"
                    )),
                    StopReason::Eog | StopReason::StopString(_) => {}
                }
                if context.verbosity >= Verbosity::Verbose {
                    context.note(format_args!("{}", timings_line(&outcome.timings, outcome.stop)));
                }
            }
            Turn::Cancelled => {
                conversation.withdraw();
                context.note(format_args!("(stopped before the answer; the question is withdrawn)"));
            }
            Turn::Full(tokens) => {
                *failed += 1;
                conversation.withdraw();
                output::stderr_line(format_args!(
                    "the conversation takes {tokens} tokens, the context has {n_ctx}: the question is withdrawn; \
                     /drop forgets the oldest exchange, /clear all; start with a larger -c, or with --on-full drop"
                ));
            }
        }
        Ok(())
    }

    fn stats(&self) -> String {
        let (cached, last) = self.session.stats();
        let n_ctx = self.session.n_ctx();
        let last = last.map_or("no reply yet".into(), |o| timings_line(&o.timings, o.stop));
        format!("{last}\ncontext: {cached} of {n_ctx} tokens, {} messages", self.conversation.messages().len())
    }
}

fn say(text: &str) -> anyhow::Result<()> {
    let mut out = output::stdout();
    writeln!(out, "{text}")?;
    Ok(out.finish()?)
}
