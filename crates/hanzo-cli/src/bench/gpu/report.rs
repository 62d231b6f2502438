//! What was measured, as fields by name and as a table.

use std::io::{self, Write};

use serde_json::{Value, json};

use super::lab::{Figures, Lab};
use super::stream::Empty;
use super::subject::Subject;
use crate::bench::report::Markdown;
use crate::measure::stats;
use crate::output::human_bytes;

/// One line of results.
pub type Fields = Vec<(&'static str, Value)>;

/// What a line is about.
#[derive(Clone, Debug)]
pub struct What {
    /// The op as the command line names it.
    pub op: &'static str,
    /// `4096x4096`; empty where there is none.
    pub shape: String,
    pub tokens: usize,
}

/// A subject's figures beside the device's read roof.
pub fn fields(lab: &Lab, what: &What, subject: &dyn Subject, f: &Figures, roof: f64) -> Fields {
    let key = subject.kernel();
    let (bytes, operations) = (subject.bytes() as f64, subject.operations());
    let (dependent, independent) = (f.dependent(), f.independent());
    let visited = subject.working_set().min(subject.bytes() * f.launches as u64);
    vec![
        ("op", json!(what.op)),
        ("device", json!(lab.info().name)),
        ("kernel", json!(key.op)),
        ("format", json!(key.format.map(|f| f.name()))),
        ("shape", json!(what.shape)),
        ("n_tokens", json!(what.tokens)),
        ("constants", json!(f.constants.tuning())),
        ("groups", json!(f.groups)),
        ("launches", json!(f.launches)),
        ("bytes", json!(subject.bytes())),
        ("working_set", json!(visited)),
        ("cold", json!(visited >= lab.working_set())),
        ("us", json!(1e6 * dependent)),
        ("us_best", json!(1e6 * stats::range(&f.dependent).0)),
        ("us_independent", json!(1e6 * independent)),
        ("gb_per_s", json!(1e-9 * bytes / dependent)),
        ("gb_per_s_independent", json!(1e-9 * bytes / independent)),
        ("roof_gb_per_s", json!(1e-9 * roof)),
        ("of_roof", json!(bytes / dependent / roof)),
        ("of_roof_independent", json!(bytes / independent / roof)),
        ("gop_per_s", json!(1e-9 * operations / dependent)),
        ("worst_error", json!(f.check.worst)),
        ("checked", json!(f.check.samples)),
    ]
}

/// A launch that does nothing.
pub fn empty_fields(lab: &Lab, e: &Empty) -> Fields {
    vec![
        ("op", json!("empty")),
        ("device", json!(lab.info().name)),
        ("groups", json!([e.groups, 1, 1])),
        ("pipelines", json!(if e.alternating { 2 } else { 1 })),
        ("us", json!(1e6 * e.dependent)),
        ("us_independent", json!(1e6 * e.independent)),
    ]
}

/// Lines as a table for people.
pub fn table(lines: &[Fields], out: &mut impl Write) -> io::Result<()> {
    const COLUMNS: [(&str, &str, bool); 15] = [
        ("kernel", "kernel", false),
        ("format", "format", false),
        ("shape", "shape", true),
        ("n_tokens", "tokens", true),
        ("constants", "constants", false),
        ("groups", "groups", true),
        ("pipelines", "pipelines", true),
        ("us", "us", true),
        ("us_independent", "us indep.", true),
        ("gb_per_s", "GB/s", true),
        ("gb_per_s_independent", "GB/s indep.", true),
        ("of_roof", "of roof", true),
        ("gop_per_s", "Gop/s", true),
        ("working_set", "working set", true),
        ("cold", "note", false),
    ];
    let find = |line: &Fields, name: &str| line.iter().find(|(n, _)| *n == name).map(|(_, v)| v.clone());
    let used: Vec<_> = COLUMNS.iter().filter(|c| lines.iter().any(|l| find(l, c.0).is_some())).collect();
    let mut table = Markdown::new(&used.iter().map(|c| (c.1, c.2)).collect::<Vec<_>>());
    for line in lines {
        let cell = |name: &str| match (name, find(line, name)) {
            ("cold", Some(Value::Bool(cold))) => if cold { "" } else { "FITS a cache perhaps" }.to_string(),
            ("working_set", Some(v)) => v.as_u64().map_or_else(String::new, human_bytes),
            ("of_roof", Some(v)) => v.as_f64().map_or_else(String::new, |x| format!("{:.0}%", 100.0 * x)),
            (_, Some(Value::String(s))) => s,
            (_, Some(Value::Array(a))) => {
                let all: Vec<String> = a.iter().map(Value::to_string).collect();
                all.join("x")
            }
            (_, Some(Value::Number(n))) if n.is_f64() => n.as_f64().map_or_else(String::new, significant),
            (_, Some(Value::Null) | None) => String::new(),
            (_, Some(v)) => v.to_string(),
        };
        table.row(used.iter().map(|c| cell(c.0)).collect());
    }
    table.write(out)
}

/// Three digits or more.
fn significant(x: f64) -> String {
    match x.abs() {
        a if a >= 100.0 => format!("{x:.0}"),
        a if a >= 10.0 => format!("{x:.1}"),
        a if a >= 0.01 => format!("{x:.2}"),
        _ => format!("{x:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_the_columns_that_its_lines_have() {
        let lines: Vec<Fields> = vec![
            vec![("kernel", json!("matvec")), ("us", json!(12.345)), ("cold", json!(false))],
            vec![("kernel", json!("gemm_dot")), ("us", json!(0.001)), ("format", Value::Null)],
        ];
        let mut out = Vec::new();
        table(&lines, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("12.3") && text.contains("0.0010") && text.contains("FITS"), "{text}");
        assert!(!text.contains("GB/s"), "{text}");
    }
}
