//! `hanzo pull MODEL...`: models into the cache, their paths on stdout.

use std::io::Write;
use std::path::PathBuf;

use serde::Serialize;

use crate::cli::Context;
use crate::output::{self, Align, Table, human_bytes};
use crate::pull::{self, DEFAULT_MODEL, Options};

/// The command's grammar.
#[derive(clap::Args)]
pub struct Args {
    /// Models: short names, hub ids `owner/repo[:file]`, URLs or paths
    #[arg(value_name = "MODEL", default_value = DEFAULT_MODEL)]
    models: Vec<String>,
    /// List the models known by name: size, and whether they are in the cache
    #[arg(short, long)]
    list: bool,
    /// Hash files in the cache in full, not only where size or time changed
    #[arg(long)]
    verify: bool,
    /// Ask the hub again which file a hub id means
    #[arg(long)]
    refresh: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Pulled<'a> {
    model: &'a str,
    path: PathBuf,
    bytes: Option<u64>,
}

/// Pulls each model in turn, or lists.
pub fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let mut options = Options::new(context);
    options.verify = args.verify;
    options.refresh = args.refresh;
    if args.list {
        return list(args.json, &options);
    }
    let mut pulled = Vec::new();
    for model in &args.models {
        let path = pull::resolve(model, &options)?;
        let bytes = std::fs::metadata(&path).ok().map(|m| m.len());
        pulled.push(Pulled { model, path, bytes });
    }
    if args.json {
        return output::print_json(&pulled);
    }
    let mut out = output::stdout();
    for model in pulled {
        writeln!(out, "{}", model.path.display())?;
    }
    Ok(out.finish()?)
}

fn list(json: bool, options: &Options) -> anyhow::Result<()> {
    let models = pull::list(options)?;
    if json {
        return output::print_json(&models);
    }
    let columns = [("name", Align::Left), ("size", Align::Right), ("cached", Align::Left), ("about", Align::Left)];
    let mut table = Table::new(&columns);
    for m in models {
        let cached = match (m.cached, m.partial_bytes) {
            (true, _) => "yes".into(),
            (false, 0) => "no".into(),
            (false, part) => format!("{}%", part.min(m.bytes) * 100 / m.bytes.max(1)),
        };
        table.row(vec![m.name.into(), human_bytes(m.bytes), cached, m.about.into()]);
    }
    let mut out = output::stdout();
    table.write(&mut out)?;
    Ok(out.finish()?)
}
