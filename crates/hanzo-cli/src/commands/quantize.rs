//! `hanzo quantize IN OUT TYPE`: a smaller copy of a model.

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use hanzo_gguf::{Format, Gguf, formats};
use regex::Regex;
use serde_json::json;

use super::resolve_model;
use crate::cli::Context;
use crate::failure::Failure;
use crate::model::interrupt::{self, Impatience};
use crate::output::{self, Align, Table, human_bytes};
use crate::progress::Unit;
use crate::quantize::imatrix::Imatrix;
use crate::quantize::mix::{self, MIXES, Mix};
use crate::quantize::{self, Options, Step};

/// The command's grammar.
#[derive(clap::Args)]
#[command(after_help = types_help())]
pub struct Args {
    /// The model to quantize: a short name, a hub id `owner/repo[:file]`, a URL or a path
    #[arg(value_name = "IN")]
    input: String,
    /// Where the copy goes; it appears there only when it is complete
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// What to make of it, e.g. Q4_K_M
    #[arg(value_name = "TYPE", value_parser = parse_mix)]
    mix: &'static Mix,
    /// Give tensors whose name fits REGEX this format; may be repeated, the first that fits wins
    #[arg(long = "tensor-type", value_name = "REGEX=TYPE", value_parser = parse_exception)]
    tensor_types: Vec<(Regex, Format)>,
    /// Weigh errors by an importance matrix (GGUF, or the older .dat)
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// One format for all matrices: none gets more bits for its role
    #[arg(long)]
    pure: bool,
    /// Accept tensors that are quantized already
    #[arg(long)]
    allow_requantize: bool,
    /// Replace OUT if it exists
    #[arg(long)]
    force: bool,
    /// Print every tensor with its formats and the error that packing it made
    #[arg(long)]
    report: bool,
    /// Print what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,
    /// Worker threads (default: as many as this process may use)
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn types_help() -> String {
    let names: Vec<&str> = MIXES.iter().map(|m| m.name).collect();
    format!(
        "Types: {}.\nRows that are no whole number of blocks get the nearest format of shorter blocks.",
        names.join(" ")
    )
}

fn parse_mix(text: &str) -> Result<&'static Mix, String> {
    mix::find(text)
        .ok_or_else(|| format!("it is none of {}", MIXES.iter().map(|m| m.name).collect::<Vec<_>>().join(", ")))
}

fn parse_exception(text: &str) -> Result<(Regex, Format), String> {
    let (pattern, name) = text.rsplit_once('=').ok_or("it has no `=` between the pattern and the type")?;
    let regex = Regex::new(pattern).map_err(|e| format!("the pattern is no regular expression: {e}"))?;
    let format = Format::from_name(name).filter(|f| formats::writable().any(|w| w == *f));
    let format = format.ok_or_else(|| {
        format!("`{name}` is none of {}", formats::writable().map(Format::name).collect::<Vec<_>>().join(", "))
    })?;
    Ok((regex, format))
}

/// Do both names lead to one file?
fn same_file(a: &std::path::Path, b: &std::path::Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// Plans, converts, reports.
pub fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    if args.output.exists() && !args.force && !args.dry_run {
        return Err(Failure::new(format!("`{}` exists already", args.output.display()))
            .remedy("choose another name, or say --force to replace it")
            .into());
    }
    let input = resolve_model(&args.input, context)?;
    if same_file(&input, &args.output) {
        return Err(
            Failure::usage(format!("`{}` is the input itself: choose another output", args.output.display())).into()
        );
    }
    let gguf = Gguf::open(input)?;
    let threads = args.threads.map_or_else(|| std::thread::available_parallelism().map_or(1, usize::from), usize::from);
    let options = Options {
        mix: args.mix,
        pure: args.pure,
        exceptions: args.tensor_types,
        imatrix: args.imatrix.as_deref().map(Imatrix::open).transpose()?,
        allow_requantize: args.allow_requantize,
        threads,
        measure: args.report,
    };
    let steps = quantize::plan(&gguf, &options)?;
    for (pattern, _) in &options.exceptions {
        if !steps.iter().any(|s| pattern.is_match(&s.tensor)) {
            context.note(format_args!("note: no tensor fits `{pattern}`"));
        }
    }
    let started = Instant::now();
    let steps = if args.dry_run {
        steps
    } else {
        let total: u64 = gguf.tensors().iter().map(|t| t.size()).sum();
        let progress = context.progress(format!("quantizing to {}", args.mix.name), Unit::Bytes, Some(total));
        let cancel = interrupt::catch(Impatience::Ends)?;
        quantize::run(&gguf, steps, &options, &args.output, &progress, cancel)?
    };
    let seconds = started.elapsed().as_secs_f64();
    let before: u64 = gguf.tensors().iter().map(|t| t.size()).sum();
    let after: u64 = steps.iter().map(|s| s.bytes).sum();
    let elements: u64 = gguf.tensors().iter().map(|t| t.elements()).sum();
    let bits = after as f64 * 8.0 / elements.max(1) as f64;
    if args.json {
        return output::print_json(&json!({
            "output": args.output, "type": args.mix.name, "dry_run": args.dry_run, "seconds": seconds,
            "bytes_before": before, "bytes_after": after, "bits_per_weight": bits, "tensors": steps,
        }));
    }
    let mut out = output::stdout();
    if args.report || args.dry_run {
        table(&steps, args.report && !args.dry_run).write(&mut out)?;
    }
    let (before, after) = (human_bytes(before), human_bytes(after));
    let did = if args.dry_run { "would be" } else { "is" };
    let time = if args.dry_run { String::new() } else { format!(", made in {seconds:.1} s") };
    writeln!(out, "{} {did} {after} of tensors, from {before}: {bits:.2} bits a weight{time}", args.output.display())?;
    Ok(out.finish()?)
}

fn table(steps: &[Step], errors: bool) -> Table {
    let mut columns = vec![
        ("tensor", Align::Left),
        ("shape", Align::Left),
        ("from", Align::Left),
        ("to", Align::Left),
        ("bytes", Align::Right),
    ];
    if errors {
        columns.extend([("rmse", Align::Right), ("relative", Align::Right), ("max error", Align::Right)]);
    }
    let mut table = Table::new(&columns);
    for step in steps {
        let shape: Vec<String> = step.shape.iter().map(u64::to_string).collect();
        let mut row = vec![
            step.tensor.clone(),
            format!("[{}]", shape.join(", ")),
            step.from.to_string(),
            format!("{}{}", step.to, if step.weighted { " (weighted)" } else { "" }),
            step.bytes.to_string(),
        ];
        if let Some(e) = step.error.filter(|_| errors) {
            row.push(format!("{:.3e}", e.rmse));
            row.push(format!("{:.3}%", e.relative_rmse * 100.0));
            row.push(format!("{:.3e}", e.max_error));
        }
        table.row(row);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exceptions_are_checked_while_parsing() {
        let (regex, format) = parse_exception("a=b|attn_v=q6_k").unwrap();
        assert_eq!((regex.as_str(), format), ("a=b|attn_v", Format::Q6_K));
        for wrong in ["attn_v", "(=Q4_0", "x=Q9_9", "x=IQ2_XXS", "x=I32"] {
            assert!(parse_exception(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_mix("q4_k_m").unwrap().name, "Q4_K_M");
        assert!(parse_mix("IQ2_XXS").unwrap_err().contains("Q4_K_M"));
    }
}
