//! Results as text: markdown for people, JSON, JSON lines and CSV for programs.

use std::io::{self, Write};

use serde_json::{Map, Value};

use super::row::Row;
use crate::measure::stats;
use crate::output::human_bytes;

/// A format of `-o`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum OutputFormat {
    /// A markdown table
    Md,
    /// One JSON array
    Json,
    /// One JSON object a line
    Jsonl,
    /// Comma-separated values
    Csv,
}

/// Writes all rows in a format.
pub fn write(rows: &[Row], format: OutputFormat, out: &mut impl Write) -> io::Result<()> {
    let objects = rows.iter().map(|r| object(r.fields()));
    match format {
        OutputFormat::Md => markdown(rows, out),
        OutputFormat::Json => writeln!(out, "{:#}", Value::Array(objects.collect())),
        OutputFormat::Jsonl => objects.into_iter().try_for_each(|o| writeln!(out, "{o}")),
        OutputFormat::Csv => csv(rows.iter().map(Row::fields), out),
    }
}

/// Named fields as a JSON object.
pub fn object(fields: Vec<(&'static str, Value)>) -> Value {
    Value::Object(fields.into_iter().map(|(name, value)| (name.to_string(), value)).collect::<Map<_, _>>())
}

/// A heading line and one line a record; every text is quoted, `null` is empty.
pub fn csv(records: impl Iterator<Item = Vec<(&'static str, Value)>>, out: &mut impl Write) -> io::Result<()> {
    for (i, fields) in records.enumerate() {
        if i == 0 {
            writeln!(out, "{}", fields.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(","))?;
        }
        let cell = |value: &Value| match value {
            Value::Null => String::new(),
            Value::Number(n) => n.to_string(),
            Value::Bool(b) => b.to_string(),
            Value::String(text) => quoted(text),
            other => quoted(&other.to_string()),
        };
        writeln!(out, "{}", fields.iter().map(|(_, value)| cell(value)).collect::<Vec<_>>().join(","))?;
    }
    Ok(())
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "\"\""))
}

fn markdown(rows: &[Row], out: &mut impl Write) -> io::Result<()> {
    let mut table = Markdown::new(&[
        ("model", false),
        ("size", true),
        ("params", true),
        ("backend", false),
        ("isa", false),
        ("threads", true),
        ("ubatch", true),
        ("cache", false),
        ("test", true),
        ("t/s", true),
        ("min-max", true),
        ("GB/s", true),
        ("note", false),
    ]);
    for row in rows {
        let (m, s) = (&row.model, &row.setup);
        let (min, max) = stats::range(&row.samples);
        let cache = |f: hanzo_gguf::Format| f.name().to_lowercase();
        table.row(vec![
            m.name.clone(),
            human_bytes(m.bytes),
            format!("{:.2} M", m.parameters as f64 / 1e6),
            s.backend.clone(),
            s.isa.clone(),
            s.threads.to_string(),
            s.ubatch.to_string(),
            if s.type_k == s.type_v { cache(s.type_k) } else { format!("{}/{}", cache(s.type_k), cache(s.type_v)) },
            row.test.name(row.depth),
            format!("{:.2} ± {:.2}", row.speed(), stats::std_dev(&row.samples)),
            format!("{min:.2}-{max:.2}"),
            row.gigabytes_per_second().map_or(String::new(), |g| format!("{g:.1}")),
            match row.contention {
                Some(c) if row.is_contended() => format!("CONTENDED: {c}"),
                Some(_) => String::new(),
                None => "contention unknown".into(),
            },
        ]);
    }
    table.write(out)
}

/// A markdown table, aligned for reading as plain text too. Columns that are empty throughout are left out.
pub struct Markdown {
    headings: Vec<(String, bool)>,
    rows: Vec<Vec<String>>,
}

impl Markdown {
    /// Headings, and whether a column holds numbers.
    pub fn new(headings: &[(&str, bool)]) -> Markdown {
        Markdown { headings: headings.iter().map(|(h, right)| (h.to_string(), *right)).collect(), rows: Vec::new() }
    }

    /// Adds a row, one cell a heading.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// Writes the table.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let used = |c: &usize| self.rows.iter().any(|r| r.get(*c).is_some_and(|cell| !cell.is_empty()));
        let columns: Vec<usize> = (0..self.headings.len()).filter(used).collect();
        let width = |c: usize| {
            let cells = self.rows.iter().filter_map(|r| r.get(c)).map(|cell| cell.chars().count());
            cells.max().unwrap_or(0).max(self.headings[c].0.chars().count()).max(3)
        };
        let line = |cells: &dyn Fn(usize) -> String| {
            let padded = columns.iter().map(|&c| {
                let (cell, width) = (cells(c), width(c));
                if self.headings[c].1 { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
            });
            format!("| {} |", padded.collect::<Vec<_>>().join(" | "))
        };
        writeln!(out, "{}", line(&|c| self.headings[c].0.clone()))?;
        let rule = |c: usize| {
            let dashes = "-".repeat(width(c) - 1);
            if self.headings[c].1 { format!("{dashes}:") } else { format!("{dashes}-") }
        };
        writeln!(out, "{}", line(&rule))?;
        self.rows.iter().try_for_each(|r| writeln!(out, "{}", line(&|c| r.get(c).cloned().unwrap_or_default())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::row::example;

    fn text(format: OutputFormat) -> String {
        let mut out = Vec::new();
        write(&[example(), example()], format, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn markdown_has_llama_benchs_columns_and_marks_a_contended_row() {
        let md = text(OutputFormat::Md);
        let lines: Vec<&str> = md.lines().collect();
        assert_eq!(lines.len(), 4, "{md}");
        for heading in ["model", "size", "params", "backend", "threads", "test", "t/s"] {
            assert!(lines[0].contains(heading), "{heading} in {md}");
        }
        assert!(
            lines[2].contains("100.00 ± 1.00") && lines[2].contains("tg128") && lines[2].contains("98.0 MiB"),
            "{md}"
        );
        assert!(lines[2].contains("CONTENDED") && lines[2].contains("99.00-101.00"), "{md}");
        let widths: Vec<usize> = lines.iter().map(|l| l.chars().count()).collect();
        assert!(widths.iter().all(|w| *w == widths[0]), "{md}");
    }

    #[test]
    fn programs_get_every_field_in_every_format() {
        let array: Vec<Value> = serde_json::from_str(&text(OutputFormat::Json)).unwrap();
        let line: Value = serde_json::from_str(text(OutputFormat::Jsonl).lines().next().unwrap()).unwrap();
        assert_eq!((array.len(), &array[0]), (2, &line));
        assert_eq!(line["model_type"], "llama 135M Q4_1");
        let csv = text(OutputFormat::Csv);
        let (head, first) = (csv.lines().next().unwrap(), csv.lines().nth(1).unwrap());
        assert!(head.starts_with("model_type,model_filename,model_size,"));
        // The quoted commas aside, there are as many cells as names.
        assert!(first.contains("\"a,b.gguf\"") && first.contains("\"[99.0,100.0,101.0]\""), "{first}");
        assert_eq!(first.split(',').count() - 3, head.split(',').count());
    }
}
