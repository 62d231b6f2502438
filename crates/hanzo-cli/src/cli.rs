//! The command line: its grammar, the dispatch to `commands/`, and how a run ends.
//!
//! A new command is a file `commands/<name>.rs` with `Args` and `run`, one variant of [`Command`] and one
//! arm of [`dispatch`]. Nothing else may enter here: no I/O besides warnings about the environment and
//! the final error message.

use std::process::ExitCode;

use clap::{ArgAction, CommandFactory, Parser, Subcommand};

use crate::commands::{
    ab, bench, chat, completions, devices, gate, inspect, levers, logits, perplexity, pull, quantize, run, tokenize,
};
use crate::model::environment;
use crate::output::{self, Verbosity};
use crate::settings::{self, Settings};
use crate::{failure, progress, short_flags};

/// What every command gets: the settings and how talkative it should be.
pub struct Context {
    /// The environment, read once at start.
    pub settings: Settings,
    /// From `-q` and `-v`.
    pub verbosity: Verbosity,
}

impl Context {
    /// A progress bar that respects `-q`.
    pub fn progress(&self, label: impl Into<String>, unit: progress::Unit, total: Option<u64>) -> progress::Progress {
        progress::Progress::new(label, unit, total, self.verbosity != Verbosity::Quiet)
    }

    /// Prints a line to stderr unless `-q` was given.
    pub fn note(&self, line: std::fmt::Arguments<'_>) {
        if self.verbosity != Verbosity::Quiet {
            output::stderr_line(line);
        }
    }
}

/// Run quantized (GGUF) language models: fast, measured, explained.
#[derive(Parser)]
#[command(name = "hanzo", version, propagate_version = true, arg_required_else_help = true)]
#[command(after_help = "A model is a short name (`hanzo pull --list`), a hub id `owner/repo[:file]`, a URL or a path.")]
struct Cli {
    /// Say more on stderr (twice: debugging detail)
    #[arg(short, long, global = true, action = ArgAction::Count, conflicts_with = "quiet", help_heading = "Global options")]
    verbose: u8,
    /// Say nothing on stderr but errors: no progress, no notes
    #[arg(short, long, global = true, help_heading = "Global options")]
    quiet: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Answer one prompt
    Run(run::Args),
    /// Talk with a model
    Chat(chat::Args),
    /// Measure the speed of prefill and decode, or of one kernel
    Bench(bench::Args),
    /// Measure what a lever does: interleaved runs with it off and on
    Ab(ab::Args),
    /// Print log-probabilities, or compare them with a reference file
    Logits(logits::Args),
    /// Measure how well a model predicts a text
    Perplexity(perplexity::Args),
    /// Download a model into the cache and print its path
    Pull(pull::Args),
    /// Show what a model's file holds: metadata, tensors, formats
    Inspect(inspect::Args),
    /// Show the tokens of a text, or the text of tokens
    Tokenize(tokenize::Args),
    /// Make a smaller copy of a model
    Quantize(quantize::Args),
    /// Hold every kernel to its derived error bound; exit code 1 if any fails
    Gate(gate::Args),
    /// List the levers: named optimisations that can be switched
    Levers(levers::Args),
    /// Show the processor, its features, caches and memory, and the GPUs
    Devices(devices::Args),
    /// Print a completion script for a shell
    Completions(completions::Args),
}

fn dispatch(command: Command, context: &Context) -> anyhow::Result<()> {
    match command {
        Command::Run(args) => run::run(args, context),
        Command::Chat(args) => chat::run(args, context),
        Command::Bench(args) => bench::run(args, context),
        Command::Ab(args) => ab::run(args, context),
        Command::Logits(args) => logits::run(args, context),
        Command::Perplexity(args) => perplexity::run(args, context),
        Command::Pull(args) => pull::run(args, context),
        Command::Inspect(args) => inspect::run(args, context),
        Command::Tokenize(args) => tokenize::run(args, context),
        Command::Quantize(args) => quantize::run(args, context),
        Command::Gate(args) => gate::run(args, context),
        Command::Levers(args) => levers::run(args, context),
        Command::Devices(args) => devices::run(args, context),
        Command::Completions(args) => completions::run(args, context),
    }
}

/// The grammar, for shell completions and tests.
pub fn grammar() -> clap::Command {
    Cli::command()
}

/// Parses, runs, and turns the outcome into an exit code: 0, 1 for a failure, 2 for bad usage.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse_from(short_flags::spell_out(std::env::args_os())) {
        Ok(cli) => cli,
        Err(error) => {
            let code = if error.use_stderr() { 2 } else { 0 };
            // A reader that left (`hanzo --help | head -1`) is no failure.
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    let verbosity = match (cli.quiet, cli.verbose) {
        (true, _) => Verbosity::Quiet,
        (false, 0) => Verbosity::Normal,
        (false, 1) => Verbosity::Verbose,
        (false, _) => Verbosity::Debug,
    };
    let context = Context { settings: Settings::from_env(), verbosity };
    let outcome = environment().and_then(|_| {
        settings::unknown_variables().iter().for_each(|warning| context.note(format_args!("{warning}")));
        dispatch(cli.command, &context)
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if output::is_closed_stdout(&error) => ExitCode::SUCCESS,
        Err(error) if failure::is_interrupted(&error) => ExitCode::from(failure::INTERRUPTED),
        Err(error) => {
            output::stderr_line(format_args!("{}", failure::report(&error)));
            ExitCode::from(failure::exit_code(&error))
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_grammar_is_consistent() {
        super::grammar().debug_assert();
    }
}
