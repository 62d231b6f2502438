//! `hanzo inspect MODEL`: what a GGUF file holds: metadata, tensors, and how many bits its weights take.

use std::collections::BTreeMap;
use std::io::{self, Write};

use hanzo_gguf::{Array, Format, Gguf, Value};
use serde::Serialize;
use serde_json::json;

use super::resolve_model;
use crate::cli::Context;
use crate::output::{self, Align, Table, human_bytes};
use crate::pull::DEFAULT_MODEL;

/// Elements shown of an array, unless `--full`.
const SHOWN_ELEMENTS: usize = 8;
/// Characters shown of a string, unless `--full`.
const SHOWN_CHARS: usize = 100;

/// The command's grammar.
#[derive(clap::Args)]
pub struct Args {
    /// The model: a short name, a hub id `owner/repo[:file]`, a URL or a path
    #[arg(default_value = DEFAULT_MODEL)]
    model: String,
    /// Show the metadata only
    #[arg(long)]
    metadata: bool,
    /// Show the tensors only
    #[arg(long, conflicts_with = "metadata")]
    tensors: bool,
    /// Show long strings and arrays in full
    #[arg(long)]
    full: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Sums over the tensors of one format, or of all.
#[derive(Clone, Copy, Debug, Default, Serialize, PartialEq)]
struct Total {
    tensors: u64,
    elements: u64,
    bytes: u64,
}

impl Total {
    fn add(&mut self, elements: u64, bytes: u64) {
        self.tensors += 1;
        self.elements = self.elements.saturating_add(elements);
        self.bytes = self.bytes.saturating_add(bytes);
    }

    fn bits_per_weight(&self) -> f64 {
        if self.elements == 0 { 0.0 } else { self.bytes as f64 * 8.0 / self.elements as f64 }
    }
}

/// Totals per format, and of all.
fn totals(gguf: &Gguf) -> (BTreeMap<Format, Total>, Total) {
    let mut by_format = BTreeMap::<Format, Total>::new();
    let mut all = Total::default();
    for tensor in gguf.tensors() {
        by_format.entry(tensor.format).or_default().add(tensor.elements(), tensor.size());
        all.add(tensor.elements(), tensor.size());
    }
    (by_format, all)
}

/// Opens the model and prints what was asked for.
pub fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let gguf = Gguf::open(resolve_model(&args.model, context)?)?;
    if args.json {
        return output::print_json(&as_json(&gguf, &args));
    }
    let mut out = output::stdout();
    let everything = !args.metadata && !args.tensors;
    if everything {
        summary(&gguf, &mut out)?;
    }
    if everything || args.metadata {
        metadata(&gguf, args.full, &mut out)?;
    }
    if everything {
        writeln!(out)?;
    }
    if everything || args.tensors {
        tensors(&gguf, &mut out)?;
    }
    Ok(out.finish()?)
}

fn summary(gguf: &Gguf, out: &mut impl Write) -> io::Result<()> {
    let (by_format, all) = totals(gguf);
    let size: u64 = gguf.parts().iter().map(|p| p.len() as u64).sum();
    let parts = if gguf.parts().len() > 1 { format!(" in {} files", gguf.parts().len()) } else { String::new() };
    writeln!(out, "file      {} (GGUF version {})", gguf.file().display(), gguf.version())?;
    writeln!(out, "size      {}{parts}", human_bytes(size))?;
    writeln!(out, "weights   {} ({:.2} bits each)\n", human_count(all.elements), all.bits_per_weight())?;
    let mut table = Table::new(&[
        ("format", Align::Left),
        ("tensors", Align::Right),
        ("elements", Align::Right),
        ("bytes", Align::Right),
        ("bits", Align::Right),
        ("of bytes", Align::Right),
    ]);
    for (format, total) in &by_format {
        let share = total.bytes as f64 * 100.0 / all.bytes.max(1) as f64;
        table.row(vec![
            format.to_string(),
            total.tensors.to_string(),
            total.elements.to_string(),
            total.bytes.to_string(),
            format!("{:.3}", total.bits_per_weight()),
            format!("{share:.1}%"),
        ]);
    }
    table.write(out)?;
    writeln!(out)
}

fn metadata(gguf: &Gguf, full: bool, out: &mut impl Write) -> io::Result<()> {
    let columns =
        [("key", Align::Left), ("type", Align::Left), (if full { "value" } else { "value (shortened)" }, Align::Left)];
    let mut table = Table::new(&columns);
    for (key, value) in gguf.metadata().iter() {
        table.row(vec![printable(key), type_name(value), shown(value, full)]);
    }
    table.write(out)
}

fn tensors(gguf: &Gguf, out: &mut impl Write) -> io::Result<()> {
    let split = gguf.parts().len() > 1;
    let mut columns = vec![
        ("tensor", Align::Left),
        ("format", Align::Left),
        ("shape", Align::Left),
        ("bytes", Align::Right),
        ("offset", Align::Right),
    ];
    if split {
        columns.push(("file", Align::Right));
    }
    let mut table = Table::new(&columns);
    for tensor in gguf.tensors() {
        let shape: Vec<String> = tensor.dims.iter().map(u64::to_string).collect();
        let mut row = vec![
            printable(&tensor.name),
            tensor.format.to_string(),
            format!("[{}]", shape.join(", ")),
            tensor.size().to_string(),
            tensor.offset().to_string(),
        ];
        if split {
            row.push((tensor.part() + 1).to_string());
        }
        table.row(row);
    }
    table.write(out)
}

/// A name from a file, without the control characters that would drive a terminal.
fn printable(name: &str) -> String {
    if name.chars().any(char::is_control) { name.escape_debug().to_string() } else { name.into() }
}

fn type_name(value: &Value) -> String {
    match value {
        Value::Array(array) => format!("{}[{}]", array.element_type(), array.len()),
        other => other.value_type().to_string(),
    }
}

/// A value on one line; strings are quoted and escaped.
fn shown(value: &Value, full: bool) -> String {
    match value {
        Value::Array(array) => shown_array(array, full),
        Value::String(text) if !full => {
            // The quoted form of what is shown, with a mark where something is left out.
            match text.char_indices().nth(SHOWN_CHARS) {
                Some((cut, _)) => format!("{:?}... ({} bytes)", &text[..cut], text.len()),
                None => format!("{text:?}"),
            }
        }
        other => other.to_string(),
    }
}

fn shown_array(array: &Array, full: bool) -> String {
    let limit = if full { usize::MAX } else { SHOWN_ELEMENTS };
    let mut elements: Vec<String> = array.iter().take(limit).map(|v| shown(&v, full)).collect();
    if array.len() > limit {
        elements.push("...".into());
    }
    format!("[{}]", elements.join(", "))
}

/// `134.5 M`, `1.54 B`: counts as the field writes them.
fn human_count(n: u64) -> String {
    match n {
        0..1_000_000 => n.to_string(),
        1_000_000..1_000_000_000 => format!("{:.1} M", n as f64 / 1e6),
        _ => format!("{:.2} B", n as f64 / 1e9),
    }
}

fn as_json(gguf: &Gguf, args: &Args) -> serde_json::Value {
    let (by_format, all) = totals(gguf);
    let size: u64 = gguf.parts().iter().map(|p| p.len() as u64).sum();
    let mut document = json!({
        "file": gguf.file(),
        "version": gguf.version(),
        "parts": gguf.parts().len(),
        "file_bytes": size,
        "total": all,
        "bits_per_weight": all.bits_per_weight(),
        "formats": by_format.iter().map(|(f, t)| (f.to_string(), json!(t))).collect::<serde_json::Map<_, _>>(),
    });
    if !args.tensors {
        document["metadata"] = gguf.metadata().iter().map(|(key, value)| json_entry(key, value, args.full)).collect();
    }
    if !args.metadata {
        document["tensors"] = gguf
            .tensors()
            .iter()
            .map(|t| {
                let (shape, format) = (&t.dims, t.format.name());
                json!({"name": t.name, "format": format, "shape": shape, "bytes": t.size(), "offset": t.offset(), "part": t.part()})
            })
            .collect();
    }
    document
}

/// An array longer than what is shown is cut unless `full`; `len` always tells its true length.
fn json_entry(key: &str, value: &Value, full: bool) -> serde_json::Value {
    let mut entry = json!({"key": key, "type": value.value_type().name(), "value": json_value(value, full)});
    if let Value::Array(array) = value {
        entry["element_type"] = array.element_type().name().into();
        entry["len"] = array.len().into();
    }
    entry
}

fn json_value(value: &Value, full: bool) -> serde_json::Value {
    match value {
        Value::F32(v) => float(f64::from(*v), v.to_string()),
        Value::F64(v) => float(*v, v.to_string()),
        Value::Bool(v) => json!(v),
        Value::String(v) => json!(v),
        Value::Bytes(v) => json!(String::from_utf8_lossy(v)),
        Value::Array(array) => {
            let limit = if full { usize::MAX } else { SHOWN_ELEMENTS };
            array.iter().take(limit).map(|v| json_value(&v, full)).collect()
        }
        integer => match (integer.as_u64(), integer.as_i64()) {
            (Some(v), _) => json!(v),
            (_, Some(v)) => json!(v),
            _ => json!(integer.to_string()),
        },
    }
}

/// A finite float as the shortest number that reads back the same; JSON has no other floats, they become strings.
fn float(value: f64, shortest: String) -> serde_json::Value {
    match shortest.parse::<f64>() {
        Ok(parsed) if value.is_finite() => json!(parsed),
        _ => json!(shortest),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hanzo_gguf::GgufWriter;

    fn model() -> Gguf {
        let mut writer = GgufWriter::new(Vec::new());
        let metadata = writer.metadata_mut();
        metadata.set("general.architecture", "llama");
        metadata.set("a.long", "x".repeat(500));
        metadata.set("a.float", 1e-5_f32);
        metadata.set("a.nan", f32::NAN);
        metadata.set("a.many", (0..100_u32).collect::<Vec<_>>());
        writer.declare("w", &[32, 4], Format::Q8_0).unwrap();
        writer.declare("evil\u{1b}[2J", &[2], Format::F32).unwrap();
        let mut data = writer.begin().unwrap();
        data.append(&[0; 34 * 4]).unwrap();
        data.append(&[0; 8]).unwrap();
        Gguf::from_bytes(data.finish().unwrap()).unwrap()
    }

    fn text(write: impl Fn(&mut Vec<u8>) -> io::Result<()>) -> String {
        let mut out = Vec::new();
        write(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn long_values_are_shortened_unless_full() {
        let gguf = model();
        let short = text(|out| metadata(&gguf, false, out));
        assert!(short.contains("u32[100]") && short.contains("[0, 1, 2, 3, 4, 5, 6, 7, ...]"), "{short}");
        assert!(short.contains("... (500 bytes)") && short.lines().all(|l| l.len() < 200), "{short}");
        let full = text(|out| metadata(&gguf, true, out));
        assert!(full.contains("98, 99]") && full.contains(&"x".repeat(500)));
    }

    #[test]
    fn tensors_and_totals_add_up_and_names_cannot_drive_the_terminal() {
        let gguf = model();
        let table = text(|out| tensors(&gguf, out));
        assert!(table.contains("[32, 4]") && table.contains("136") && !table.contains('\u{1b}'), "{table}");
        let (by_format, all) = totals(&gguf);
        assert_eq!(by_format[&Format::Q8_0], Total { tensors: 1, elements: 128, bytes: 136 });
        assert_eq!(all, Total { tensors: 2, elements: 130, bytes: 144 });
        assert_eq!(by_format[&Format::Q8_0].bits_per_weight(), 8.5);
        assert!(text(|out| summary(&gguf, out)).contains("8.86 bits each"));
    }

    #[test]
    fn json_keeps_every_number_readable() {
        let args = Args { model: String::new(), metadata: false, tensors: false, full: false, json: true };
        let document = as_json(&model(), &args);
        let entry = |key: &str| document["metadata"].as_array().unwrap().iter().find(|e| e["key"] == key).unwrap();
        assert_eq!(entry("a.float")["value"], json!(1e-5));
        assert_eq!(entry("a.nan")["value"], json!("NaN"));
        assert_eq!(entry("a.many")["len"], json!(100));
        assert_eq!(entry("a.many")["value"], json!([0, 1, 2, 3, 4, 5, 6, 7]));
        assert_eq!(document["tensors"][0]["offset"].as_u64().unwrap() % 32, 0);
        assert_eq!(document["total"]["bytes"], json!(144));
    }
}
