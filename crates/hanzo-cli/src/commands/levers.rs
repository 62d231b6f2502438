//! `hanzo levers`: the registry of levers, their state, and the environment variables that change it.

use std::io::Write;

use hanzo_ml::levers::{LEVERS, LeverKind, LeverSet};
use hanzo_ml::settings::{VARIABLES, spelled_out};
use serde::Serialize;

use crate::cli::Context;
use crate::model::environment;
use crate::output::{self, Align, Table};

/// The command's grammar.
#[derive(clap::Args)]
pub struct Args {
    /// List the environment variables instead
    #[arg(long)]
    env: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Entry {
    id: &'static str,
    /// In force, after the environment.
    on: bool,
    default_on: bool,
    /// `rewrite` of the Plan, or `variant` of a kernel.
    kind: &'static str,
    changes_layout: bool,
    reason: &'static str,
    regimes: Vec<&'static str>,
    backends: &'static [&'static str],
    oracle: &'static str,
}

#[derive(Serialize)]
struct Variable {
    name: String,
    effect: String,
    value: Option<String>,
}

/// Prints the registry.
pub fn run(args: Args, _context: &Context) -> anyhow::Result<()> {
    let levers = environment()?.levers;
    if args.env { variables(args.json) } else { registry(levers, args.json) }
}

fn registry(levers: LeverSet, json: bool) -> anyhow::Result<()> {
    let entry = |(i, l): (usize, &hanzo_ml::levers::Lever)| Entry {
        id: l.id,
        on: levers.has(i),
        default_on: l.default_on,
        kind: match l.kind {
            LeverKind::Rewrite(_) => "rewrite",
            LeverKind::Variant => "variant",
        },
        changes_layout: l.changes_layout,
        reason: l.reason,
        regimes: l.regimes.iter().map(|r| r.name()).collect(),
        backends: l.backends,
        oracle: l.oracle,
    };
    let entries: Vec<Entry> = LEVERS.iter().enumerate().map(entry).collect();
    if json {
        return output::print_json(&entries);
    }
    let columns = ["lever", "state", "kind", "backends", "oracle", "regimes"].map(|c| (c, Align::Left));
    let mut table = Table::new(&columns);
    for e in &entries {
        let state = match (e.on, e.on == e.default_on) {
            (true, true) => "on",
            (false, true) => "off",
            (true, false) => "on (set)",
            (false, false) => "off (set)",
        };
        let cells = [e.id, state, e.kind, &e.backends.join(" "), e.oracle, &e.regimes.join(", ")];
        table.row(cells.map(str::to_string).to_vec());
    }
    let mut out = output::stdout();
    table.write(&mut out)?;
    writeln!(out)?;
    for e in &entries {
        writeln!(out, "{}: {}", e.id, e.reason)?;
    }
    Ok(out.finish()?)
}

/// Every variable by its full name; those of levers are spelled out.
fn variables(json: bool) -> anyhow::Result<()> {
    let mut all: Vec<Variable> = Vec::new();
    let own = crate::settings::VARIABLES.iter().filter(|(name, _)| VARIABLES.iter().all(|(n, _)| n != name));
    for (name, effect) in VARIABLES.iter().chain(own) {
        all.extend(spelled_out(name).into_iter().map(|name| {
            let value = std::env::var(&name).ok();
            Variable { name, effect: effect.to_string(), value }
        }));
    }
    if json {
        return output::print_json(&all);
    }
    let mut table = Table::new(&["variable", "value", "effect"].map(|c| (c, Align::Left)));
    for v in all {
        table.row(vec![v.name, v.value.unwrap_or_else(|| "-".into()), v.effect]);
    }
    let mut out = output::stdout();
    table.write(&mut out)?;
    Ok(out.finish()?)
}
