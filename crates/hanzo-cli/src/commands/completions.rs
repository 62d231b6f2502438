//! `hanzo completions SHELL`: a completion script on stdout.

use std::io::Write;

use clap_complete::Shell;

use crate::cli::{self, Context};
use crate::output;

/// The command's grammar.
#[derive(clap::Args)]
pub struct Args {
    /// The shell to write for
    shell: Shell,
}

/// Prints the script.
pub fn run(args: Args, _context: &Context) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut cli::grammar(), "hanzo", &mut script);
    let mut out = output::stdout();
    out.write_all(&script)?;
    Ok(out.finish()?)
}
