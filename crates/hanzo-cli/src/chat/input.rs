//! Where messages come from: a line editor at a terminal, plain lines from a pipe; and how lines make a message.

use std::io::{BufRead, IsTerminal};
use std::path::PathBuf;

use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};

/// One line, or its absence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    Text(String),
    /// Ctrl-C.
    Interrupted,
    /// Ctrl-D, or the pipe's end.
    End,
}

/// A source of lines.
pub trait Lines {
    /// The next line, without its end.
    fn next(&mut self, prompt: &str) -> anyhow::Result<Line>;
    /// A whole message was read.
    fn remember(&mut self, _message: &str) {}
}

/// A terminal with line editing and a history in a file.
pub struct Terminal {
    editor: DefaultEditor,
    history: Option<PathBuf>,
}

impl Terminal {
    /// With the history in `history`, if there is a place for it. A history that cannot be read is empty.
    pub fn new(history: Option<PathBuf>) -> anyhow::Result<Terminal> {
        let config = Config::builder().max_history_size(1000)?.auto_add_history(false).build();
        let mut editor = DefaultEditor::with_config(config)?;
        if let Some(file) = &history {
            let _ = editor.load_history(file);
        }
        Ok(Terminal { editor, history })
    }
}

impl Lines for Terminal {
    fn next(&mut self, prompt: &str) -> anyhow::Result<Line> {
        match self.editor.readline(prompt) {
            Ok(text) => Ok(Line::Text(text)),
            Err(ReadlineError::Interrupted) => Ok(Line::Interrupted),
            Err(ReadlineError::Eof) => Ok(Line::End),
            Err(error) => Err(error.into()),
        }
    }

    fn remember(&mut self, message: &str) {
        // A history that cannot be written costs nothing but itself.
        let _ = self.editor.add_history_entry(message);
        if let Some(file) = &self.history {
            let _ = file.parent().map(std::fs::create_dir_all);
            let _ = self.editor.save_history(file);
        }
    }
}

/// Lines from a pipe or a file; bytes that are no UTF-8 become U+FFFD.
pub struct Piped<R>(pub R);

impl<R: BufRead> Lines for Piped<R> {
    fn next(&mut self, _prompt: &str) -> anyhow::Result<Line> {
        let mut bytes = Vec::new();
        if self.0.read_until(b'\n', &mut bytes)? == 0 {
            return Ok(Line::End);
        }
        let text = String::from_utf8_lossy(&bytes);
        let text = text.strip_suffix('\n').unwrap_or(&text);
        Ok(Line::Text(text.strip_suffix('\r').unwrap_or(text).to_string()))
    }
}

/// Is somebody typing, and reading the answers on the same terminal?
pub fn is_interactive() -> bool {
    std::io::stdin().is_terminal() && std::io::stdout().is_terminal()
}

/// What opens and closes a message of several lines.
const FENCE: &str = "\"\"\"";

/// The next message: one line; several, each but the last ending in a backslash; or all between two fences. The end of
/// input ends a message that was begun.
pub fn message(lines: &mut dyn Lines) -> anyhow::Result<Line> {
    let mut text = String::new();
    let mut fenced = false;
    let mut begun = false;
    loop {
        let line = match lines.next(if begun { "... " } else { "> " })? {
            Line::Text(line) => line,
            Line::End if begun => return Ok(done(lines, text)),
            other => return Ok(other),
        };
        if !begun && line.trim() == FENCE {
            (fenced, begun) = (true, true);
            continue;
        }
        if fenced && line.trim() == FENCE {
            return Ok(done(lines, text));
        }
        if !text.is_empty() {
            text.push('\n');
        }
        match line.strip_suffix('\\').filter(|_| !fenced) {
            Some(line) => text.push_str(line),
            None => {
                text.push_str(&line);
                if !fenced {
                    return Ok(done(lines, text));
                }
            }
        }
        begun = true;
    }
}

fn done(lines: &mut dyn Lines, text: String) -> Line {
    if !text.trim().is_empty() {
        lines.remember(&text);
    }
    Line::Text(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(input: &[u8]) -> Vec<String> {
        let mut lines = Piped(input);
        let mut all = Vec::new();
        while let Line::Text(text) = message(&mut lines).unwrap() {
            all.push(text);
        }
        all
    }

    #[test]
    fn lines_make_messages() {
        assert_eq!(messages(b"one\ntwo\r\n\nlast"), ["one", "two", "", "last"]);
        assert_eq!(messages(b"a\\\nb\\\nc\nd\n"), ["a\nb\nc", "d"]);
        assert_eq!(messages(b"\"\"\"\na\\\n\nb\n\"\"\"\nc\n"), ["a\\\n\nb", "c"]);
        assert_eq!(messages(b"\"\"\"\nnever closed\n"), ["never closed"]);
        assert_eq!(messages(b"\xff\n"), ["\u{fffd}"]);
        assert!(messages(b"").is_empty());
    }
}
