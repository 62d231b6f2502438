//! `hanzo tokenize TEXT`: ids of a text, text of ids, and the exact comparison with a reference file.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use hanzo_engine::tokenizer::{AddSpecial, ParseSpecial, Tokenizer};
use hanzo_gguf::Gguf;
use serde::Deserialize;
use serde_json::json;

use super::ModelArg;
use crate::cli::Context;
use crate::failure::Failure;
use crate::output;

/// The command's grammar.
#[derive(clap::Args)]
pub struct Args {
    /// The text; without it, or as `-`, standard input
    #[arg(conflicts_with_all = ["decode", "check"])]
    text: Option<String>,
    #[command(flatten)]
    model: ModelArg,
    /// Print the ids only, as one list
    #[arg(long)]
    ids: bool,
    /// Add no tokens that open or close a text
    #[arg(long)]
    no_bos: bool,
    /// Take the names of special tokens in the text as plain text
    #[arg(long)]
    no_special: bool,
    /// Print the text of these ids, e.g. `1,2,3` or `[1, 2, 3]`
    #[arg(long, value_name = "IDS", value_parser = parse_ids, conflicts_with = "check")]
    decode: Option<Ids>,
    /// Compare with a file: a JSON list of `{text, ids}`; exit code 1 unless all are equal
    #[arg(long, value_name = "FILE")]
    check: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Ids as a user lists them.
#[derive(Clone, Debug, PartialEq)]
struct Ids(Vec<u32>);

fn parse_ids(text: &str) -> Result<Ids, String> {
    let inner = text.trim().trim_start_matches('[').trim_end_matches(']');
    let ids = inner.split(|c: char| c == ',' || c.is_whitespace()).filter(|s| !s.is_empty());
    let ids = ids.map(|s| s.parse().map_err(|_| format!("`{s}` is no token id"))).collect::<Result<_, _>>()?;
    Ok(Ids(ids))
}

/// A case of a reference file.
#[derive(Deserialize)]
struct Case {
    text: String,
    ids: Vec<u32>,
}

/// Loads the model's tokenizer and does one of the three.
pub fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let gguf = Gguf::open(args.model.resolve(context)?)?;
    let tokenizer = Tokenizer::from_gguf(gguf.metadata())
        .with_context(|| format!("cannot read the tokenizer of `{}`", gguf.file().display()))?;
    for warning in tokenizer.warnings() {
        context.note(format_args!("warning: {warning}"));
    }
    let add = if args.no_bos { AddSpecial::Never } else { AddSpecial::Always };
    let parse = if args.no_special { ParseSpecial::No } else { ParseSpecial::Yes };
    if let Some(file) = &args.check {
        return check(file, args.json, |text| tokenizer.encode(text, add, parse));
    }
    if let Some(Ids(ids)) = &args.decode {
        return decode(&tokenizer, ids, &args);
    }
    let text = match args.text.as_deref() {
        None | Some("-") => read_stdin()?,
        Some(text) => text.to_string(),
    };
    let ids = tokenizer.encode(&text, add, parse);
    let piece = |id: &u32| String::from_utf8_lossy(tokenizer.piece(*id)).into_owned();
    if args.json {
        let pieces: Vec<String> = ids.iter().map(piece).collect();
        return output::print_json(&json!({"text": text, "ids": ids, "pieces": pieces}));
    }
    let mut out = output::stdout();
    if args.ids {
        writeln!(out, "{ids:?}")?;
    } else {
        for id in &ids {
            // Parts of characters are shown as bytes: a lossy piece would hide what they are.
            match std::str::from_utf8(tokenizer.piece(*id)) {
                Ok(text) => writeln!(out, "{id:>8}  {text:?}")?,
                Err(_) => writeln!(out, "{id:>8}  b\"{}\"", tokenizer.piece(*id).escape_ascii())?,
            }
        }
    }
    Ok(out.finish()?)
}

fn read_stdin() -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    std::io::stdin().lock().read_to_end(&mut bytes).context("cannot read standard input")?;
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Failure::new(format!("standard input is not UTF-8 (byte {at})")).remedy("convert it, e.g. with iconv").into()
    })
}

fn decode(tokenizer: &Tokenizer, ids: &[u32], args: &Args) -> anyhow::Result<()> {
    if let Some(id) = ids.iter().find(|id| **id as usize >= tokenizer.n_vocab()) {
        return Err(
            Failure::usage(format!("there is no token {id}: the vocabulary has {}", tokenizer.n_vocab())).into()
        );
    }
    let text = tokenizer.decode(ids, !args.no_special);
    if args.json {
        return output::print_json(&json!({"ids": ids, "text": text}));
    }
    let mut out = output::stdout();
    writeln!(out, "{text}")?;
    Ok(out.finish()?)
}

/// Compares every case of `file` with what `encode` gives.
fn check(file: &Path, as_json: bool, encode: impl Fn(&str) -> Vec<u32>) -> anyhow::Result<()> {
    let unusable = |cause: anyhow::Error| {
        Failure::new(format!("cannot use the reference `{}`", file.display()))
            .because(cause)
            .remedy("it must be a JSON list of objects with `text` and `ids`")
    };
    let bytes = std::fs::read(file).map_err(|e| unusable(e.into()))?;
    let cases: Vec<Case> = serde_json::from_slice(&bytes).map_err(|e| unusable(e.into()))?;
    if cases.is_empty() {
        return Err(unusable(anyhow::anyhow!("the list is empty")).into());
    }
    let found: Vec<Vec<u32>> = cases.iter().map(|c| encode(&c.text)).collect();
    let wrong: Vec<usize> = (0..cases.len()).filter(|&i| found[i] != cases[i].ids).collect();
    let exact = cases.len() - wrong.len();
    if as_json {
        let mismatches: Vec<_> = wrong
            .iter()
            .map(|&i| json!({"case": i, "text": cases[i].text, "expected": cases[i].ids, "found": found[i]}))
            .collect();
        output::print_json(&json!({"exact": exact, "of": cases.len(), "mismatches": mismatches}))?;
    } else {
        let mut out = output::stdout();
        for &i in &wrong {
            let at = found[i].iter().zip(&cases[i].ids).take_while(|(a, b)| a == b).count();
            writeln!(out, "case {i}: {:?}", cases[i].text)?;
            writeln!(out, "  expected {:?}", cases[i].ids)?;
            writeln!(out, "  found    {:?}", found[i])?;
            writeln!(out, "  they differ from token {at} on")?;
        }
        writeln!(out, "{exact} of {} exact", cases.len())?;
        out.finish()?;
    }
    if wrong.is_empty() {
        return Ok(());
    }
    Err(Failure::new(format!("{} of {} texts are tokenized differently", wrong.len(), cases.len())).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_in_the_forms_people_paste() {
        for text in ["1,2,3", "[1, 2, 3]", " 1 2\n3 ", "1,2,3,"] {
            assert_eq!(parse_ids(text), Ok(Ids(vec![1, 2, 3])), "{text}");
        }
        assert_eq!(parse_ids(""), Ok(Ids(vec![])));
        assert!(parse_ids("1,x").is_err() && parse_ids("-1").is_err());
    }

    #[test]
    fn a_check_fails_unless_every_case_is_exact() {
        let file = std::env::temp_dir().join(format!("hanzo-tokenize-test-{}.json", std::process::id()));
        std::fs::write(&file, r#"[{"text": "a", "ids": [1]}, {"text": "ab", "ids": [1, 2]}]"#).unwrap();
        let encode = |text: &str| (1..=text.len() as u32).collect::<Vec<_>>();
        assert!(check(&file, false, encode).is_ok());
        let error = check(&file, false, |_| vec![1]).unwrap_err();
        assert_eq!(error.to_string(), "1 of 2 texts are tokenized differently");
        std::fs::write(&file, "[]").unwrap();
        assert!(check(&file, false, encode).is_err());
        std::fs::remove_file(file).unwrap();
    }
}
