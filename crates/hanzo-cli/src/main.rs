//! The `hanzo` binary: runs, inspects and measures quantized language models.
//!
//! This file only starts [`cli::main`]. A command lives in `commands/<name>.rs`, what it prints goes
//! through [`output`], what goes wrong through [`failure`], the environment through [`settings`].
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod bench;
mod chat;
mod cli;
mod commands;
mod failure;
mod measure;
mod model;
mod output;
mod perplexity;
mod progress;
mod pull;
mod quantize;
mod settings;
mod short_flags;

fn main() -> std::process::ExitCode {
    cli::main()
}
