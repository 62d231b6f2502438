//! What a command prints: stdout that ends quietly when its reader leaves, JSON, tables and sizes.
//!
//! Results go to stdout through [`stdout`] (never `println!`, which panics on a closed pipe); notes, progress
//! and errors go to stderr. No command logic enters here.

use std::io::{self, BufWriter, StdoutLock, Write};

use serde::Serialize;

/// How much a command says on stderr.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbosity {
    /// Errors only.
    Quiet,
    /// Progress and notes.
    Normal,
    /// Also decisions and timings.
    Verbose,
    /// Also debugging detail.
    Debug,
}

/// The reader of our stdout went away.
#[derive(Debug)]
struct ClosedStdout;

impl std::fmt::Display for ClosedStdout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("stdout was closed by its reader")
    }
}

impl std::error::Error for ClosedStdout {}

/// A buffered, locked stdout. Call [`Stdout::finish`] at the end: an error on drop would be lost.
pub struct Stdout(BufWriter<MarkedStdout>);

/// Marks a broken pipe on stdout, to tell it from one on a socket.
struct MarkedStdout(StdoutLock<'static>);

fn mark(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe => io::Error::new(io::ErrorKind::BrokenPipe, ClosedStdout),
        _ => error,
    }
}

impl Write for MarkedStdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(mark)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(mark)
    }
}

/// Locks stdout for the rest of a command.
pub fn stdout() -> Stdout {
    Stdout(BufWriter::with_capacity(1 << 16, MarkedStdout(io::stdout().lock())))
}

impl Stdout {
    /// Flushes everything.
    pub fn finish(mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// True if the error is only that the reader of stdout left, as in `hanzo inspect | head`.
pub fn is_closed_stdout(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|c| c.downcast_ref::<io::Error>())
        .any(|e| e.get_ref().is_some_and(|inner| inner.is::<ClosedStdout>()))
}

/// Prints one value as indented JSON and a newline.
pub fn print_json<T: Serialize + ?Sized>(value: &T) -> anyhow::Result<()> {
    let mut out = stdout();
    // serde_json hides the io::Error, and with it a closed pipe: format first.
    writeln!(out, "{}", serde_json::to_string_pretty(value)?)?;
    Ok(out.finish()?)
}

/// Writes a line to stderr; a closed stderr is nothing we could report.
pub fn stderr_line(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// A size in binary units: `512 B`, `93.8 MiB`.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // 1023.95 would print as 1024.0.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// How a table's column is aligned.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// A plain text table: two spaces between columns, widths by content, no frame.
pub struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings.
    pub fn new(columns: &[(&str, Align)]) -> Table {
        Table { columns: columns.iter().map(|(h, a)| (h.to_string(), *a)).collect(), rows: Vec::new() }
    }

    /// Adds a row; missing cells stay empty.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// Writes the headings and all rows.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let mut widths: Vec<usize> = self.columns.iter().map(|(h, _)| h.chars().count()).collect();
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let headings: Vec<String> = self.columns.iter().map(|(h, _)| h.clone()).collect();
        for row in std::iter::once(&headings).chain(&self.rows) {
            let mut line = String::new();
            for (((_, align), width), cell) in self.columns.iter().zip(&widths).zip(row) {
                if !line.is_empty() {
                    line.push_str("  ");
                }
                match align {
                    Align::Left => line.push_str(&format!("{cell:<width$}")),
                    Align::Right => line.push_str(&format!("{cell:>width$}")),
                }
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_round_without_reaching_the_next_unit() {
        let cases = [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (98_362_432, "93.8 MiB"), (1 << 40, "1.0 TiB")];
        for (bytes, text) in cases {
            assert_eq!(human_bytes(bytes), text);
        }
        assert_eq!(human_bytes(1024 * 1024 - 1), "1.0 MiB");
    }

    #[test]
    fn a_table_aligns_by_content_and_leaves_no_trailing_space() {
        let mut table = Table::new(&[("name", Align::Left), ("bytes", Align::Right), ("note", Align::Left)]);
        table.row(vec!["a".into(), "12345".into(), "x".into()]);
        table.row(vec!["longer".into(), "1".into(), String::new()]);
        let mut text = Vec::new();
        table.write(&mut text).unwrap();
        let expected = "name    bytes  note\na       12345  x\nlonger      1\n";
        assert_eq!(String::from_utf8(text).unwrap(), expected);
    }

    #[test]
    fn only_a_marked_broken_pipe_ends_quietly() {
        let socket = anyhow::Error::from(io::Error::from(io::ErrorKind::BrokenPipe));
        assert!(!is_closed_stdout(&socket));
        let stdout = anyhow::Error::from(mark(io::Error::from(io::ErrorKind::BrokenPipe))).context("printing");
        assert!(is_closed_stdout(&stdout));
    }
}
