//! A reply on its way to the user: the answer to stdout as it comes, reasoning apart from it.
//!
//! On a terminal, control characters of the model's text are shown and not obeyed. A reader that leaves is remembered,
//! since the engine's callbacks return nothing.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};

use hanzo_engine::generate::{Piece, StopReason, Timings};

use crate::output::{self, Stdout};

const DIM: &str = "\u{1b}[2m";
const PLAIN: &str = "\u{1b}[0m";

/// Where reasoning goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningTo {
    /// It is only collected.
    Nowhere,
    /// Stderr.
    Stderr,
    /// Stdout, dimmed: for a terminal.
    Stdout,
}

/// Streams and collects a reply.
pub struct Reply {
    /// `None`: only collected.
    out: Option<Stdout>,
    reasoning_to: ReasoningTo,
    /// Stdout is a terminal.
    visible: bool,
    dimmed: bool,
    error: Option<io::Error>,
    /// Everything between the tags.
    pub reasoning: String,
    /// Everything else.
    pub answer: String,
}

impl Reply {
    /// A reply that streams to stdout.
    pub fn streamed(reasoning_to: ReasoningTo) -> Reply {
        let visible = io::stdout().is_terminal();
        Reply { out: Some(output::stdout()), visible, ..Reply::collected(reasoning_to) }
    }

    /// A reply that is only collected.
    pub fn collected(reasoning_to: ReasoningTo) -> Reply {
        Reply {
            out: None,
            reasoning_to,
            visible: false,
            dimmed: false,
            error: None,
            reasoning: String::new(),
            answer: String::new(),
        }
    }

    /// Takes a piece.
    pub fn push(&mut self, piece: Piece<'_>) {
        let shown = match piece {
            Piece::Answer(text) => {
                self.answer.push_str(text);
                let gap = self.dim(false);
                format!("{gap}{}", self.readable(text))
            }
            Piece::Reasoning(text) => {
                self.reasoning.push_str(text);
                match self.reasoning_to {
                    ReasoningTo::Nowhere => return,
                    ReasoningTo::Stderr => {
                        let dimmed = io::stderr().is_terminal();
                        let text = if dimmed {
                            Cow::Owned(format!("{DIM}{}{PLAIN}", shown_controls(text)))
                        } else {
                            text.into()
                        };
                        let _ = io::stderr().lock().write_all(text.as_bytes());
                        self.dimmed = true;
                        return;
                    }
                    ReasoningTo::Stdout => format!("{}{}", self.dim(true), self.readable(text)),
                }
            }
        };
        self.write(&shown);
    }

    /// Ends the reply; everything is on its way. Fails if stdout did.
    pub fn end(&mut self) -> io::Result<()> {
        let gap = self.dim(false);
        self.write(gap);
        if self.out.is_some() && !self.answer.is_empty() && !self.answer.ends_with('\n') {
            self.write("\n");
        }
        self.error.take().map_or(Ok(()), Err)
    }

    /// Has stdout failed?
    pub fn failed(&self) -> bool {
        self.error.is_some()
    }

    fn readable<'t>(&self, text: &'t str) -> Cow<'t, str> {
        if self.visible { shown_controls(text) } else { text.into() }
    }

    /// Switches between reasoning and answer; returns what belongs between them on stdout.
    fn dim(&mut self, on: bool) -> &'static str {
        let was = std::mem::replace(&mut self.dimmed, on);
        match (was, on, self.reasoning_to, self.visible) {
            (true, false, ReasoningTo::Stderr, _) => {
                let _ = io::stderr().lock().write_all(b"\n\n");
                ""
            }
            (false, true, ReasoningTo::Stdout, true) => DIM,
            (true, false, ReasoningTo::Stdout, true) => "\u{1b}[0m\n\n",
            (true, false, ReasoningTo::Stdout, false) => "\n\n",
            _ => "",
        }
    }

    fn write(&mut self, text: &str) {
        if let (Some(out), None) = (&mut self.out, &self.error)
            && let Err(e) = out.write_all(text.as_bytes()).and_then(|()| out.flush())
        {
            self.error = Some(e);
        }
    }
}

/// Control characters as their pictures (`␛`), so that a model cannot drive the terminal.
fn shown_controls(text: &str) -> Cow<'_, str> {
    let hostile = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(hostile) {
        return text.into();
    }
    let picture = |c: char| match c {
        c if !hostile(c) => c,
        '\u{7f}' => '\u{2421}',
        c if (c as u32) < 0x20 => char::from_u32(0x2400 + c as u32).unwrap_or(char::REPLACEMENT_CHARACTER),
        _ => char::REPLACEMENT_CHARACTER,
    };
    text.chars().map(picture).collect::<String>().into()
}

/// Why a generation ended, as JSON and notes name it.
pub fn stop_name(stop: StopReason) -> &'static str {
    match stop {
        StopReason::Eog => "end",
        StopReason::Length => "length",
        StopReason::StopString(_) => "stop_string",
        StopReason::Cancelled => "cancelled",
        StopReason::ContextFull => "context_full",
    }
}

/// One line of counts and speeds.
pub fn timings_line(t: &Timings, stop: StopReason) -> String {
    let cached = if t.cached_tokens > 0 { format!(" (and {} from the cache)", t.cached_tokens) } else { String::new() };
    format!(
        "prompt {} tokens{cached} in {:.2} s, {:.1} t/s; reply {} tokens in {:.2} s, {:.1} t/s; ended by {}",
        t.prompt_tokens,
        t.prompt.as_secs_f64(),
        t.prompt_per_second(),
        t.generated,
        t.generation.as_secs_f64(),
        t.generated_per_second(),
        stop_name(stop),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_cannot_drive_the_terminal() {
        assert_eq!(shown_controls("a\n\tb é"), "a\n\tb é");
        assert_eq!(shown_controls("\u{1b}[2J\u{7f}\u{9b}"), "␛[2J␡\u{fffd}");
    }

    #[test]
    fn reasoning_and_answer_are_collected_apart() {
        let mut reply = Reply::collected(ReasoningTo::Nowhere);
        for piece in [Piece::Reasoning("hm"), Piece::Answer("a"), Piece::Answer("b")] {
            reply.push(piece);
        }
        assert!(reply.end().is_ok());
        assert_eq!((reply.reasoning.as_str(), reply.answer.as_str()), ("hm", "ab"));
    }
}
