//! Reasoning apart from the answer: models that think first wrap it in tags, which arrive in pieces.

/// What a piece of a reply adds; reasoning always comes before the answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReplyDelta<'a> {
    /// Text between the tags.
    pub reasoning: &'a str,
    /// Text behind them.
    pub answer: &'a str,
}

/// Splits a streamed reply into reasoning and answer.
///
/// Reasoning is what stands between the tags at the start of the reply, white space around them aside; a tag that comes
/// later is text. Where the template has opened the tag already, at the end of the prompt, the reply starts inside it.
/// Text that may be part of a tag is held back until that is clear; how the reply is cut into pieces makes no difference.
///
/// ```
/// use hanzo_engine::chat::ReasoningSplitter;
/// let mut splitter = ReasoningSplitter::new("<|im_start|>assistant\n");
/// assert_eq!(splitter.push("<thi").reasoning, "");
/// assert_eq!(splitter.push("nk>\n2 + 2?").reasoning, "2 + 2?");
/// assert_eq!(splitter.push("</think>\n\nFour.").answer, "Four.");
/// ```
#[derive(Clone, Debug)]
pub struct ReasoningSplitter {
    open: String,
    close: String,
    state: State,
    held: String,
    reasoning: String,
    answer: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Nothing but white space and the beginning of the opening tag so far.
    Start,
    /// Behind the opening tag, nothing but white space so far.
    Opened,
    Reasoning,
    /// Behind the closing tag, nothing but white space so far.
    Closed,
    Answer,
}

impl ReasoningSplitter {
    /// A splitter at `<think>` and `</think>` for the reply to `prompt`, the text that a template has rendered.
    pub fn new(prompt: &str) -> ReasoningSplitter {
        ReasoningSplitter::with_tags(prompt, "<think>", "</think>")
    }

    /// As [`ReasoningSplitter::new`], with other tags. An empty `open` or `close` means that nothing is split.
    pub fn with_tags(prompt: &str, open: &str, close: &str) -> ReasoningSplitter {
        let state = if open.is_empty() || close.is_empty() {
            State::Answer
        } else if prompt.trim_end().ends_with(open) {
            State::Opened
        } else {
            State::Start
        };
        ReasoningSplitter {
            open: open.to_owned(),
            close: close.to_owned(),
            state,
            held: String::new(),
            reasoning: String::new(),
            answer: String::new(),
        }
    }

    /// Adds a piece of the reply; returns what it makes certain.
    pub fn push(&mut self, piece: &str) -> ReplyDelta<'_> {
        self.reasoning.clear();
        self.answer.clear();
        self.held.push_str(piece);
        while self.step() {}
        ReplyDelta { reasoning: &self.reasoning, answer: &self.answer }
    }

    /// Ends the reply: what was held back comes out as what it now must be.
    pub fn flush(&mut self) -> ReplyDelta<'_> {
        self.reasoning.clear();
        self.answer.clear();
        match self.state {
            State::Start | State::Answer => self.answer.push_str(&self.held),
            State::Opened | State::Reasoning => self.reasoning.push_str(self.held.trim_end()),
            State::Closed => {}
        }
        self.held.clear();
        ReplyDelta { reasoning: &self.reasoning, answer: &self.answer }
    }

    /// Whether the reply is (as far as is known) still inside the tags.
    pub fn is_reasoning(&self) -> bool {
        matches!(self.state, State::Opened | State::Reasoning)
    }

    /// Advances by one state, if what is held allows it.
    fn step(&mut self) -> bool {
        let blank = self.held.len() - self.held.trim_start().len();
        let next = match self.state {
            State::Start => {
                let text = &self.held[blank..];
                if text.starts_with(&self.open) {
                    self.held.drain(..blank + self.open.len());
                    State::Opened
                } else if self.open.starts_with(text) {
                    return false;
                } else {
                    State::Answer
                }
            }
            State::Opened | State::Closed => {
                self.held.drain(..blank);
                match self.state {
                    _ if self.held.is_empty() => return false,
                    State::Opened => State::Reasoning,
                    _ => State::Answer,
                }
            }
            State::Reasoning => {
                if let Some(at) = self.held.find(&self.close) {
                    self.reasoning.push_str(self.held[..at].trim_end());
                    self.held.drain(..at + self.close.len());
                    State::Closed
                } else {
                    let certain = self.held.len() - partial(&self.held, &self.close);
                    let certain = self.held[..certain].trim_end().len();
                    self.reasoning.push_str(&self.held[..certain]);
                    self.held.drain(..certain);
                    return false;
                }
            }
            State::Answer => {
                self.answer.push_str(&self.held);
                self.held.clear();
                return false;
            }
        };
        self.state = next;
        true
    }
}

/// The length of the longest end of `text` with which `tag` begins; less than the whole tag.
fn partial(text: &str, tag: &str) -> usize {
    let lengths = tag.char_indices().map(|(at, _)| at).rev();
    lengths.into_iter().find(|&length| text.ends_with(&tag[..length])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::Rng;

    fn split(prompt: &str, reply: &str, mut cut: impl FnMut() -> bool) -> (String, String) {
        let mut splitter = ReasoningSplitter::new(prompt);
        let (mut reasoning, mut answer, mut piece) = (String::new(), String::new(), String::new());
        let mut take = |delta: ReplyDelta<'_>| {
            reasoning.push_str(delta.reasoning);
            answer.push_str(delta.answer);
        };
        for char in reply.chars() {
            piece.push(char);
            if cut() {
                take(splitter.push(&piece));
                piece.clear();
            }
        }
        take(splitter.push(&piece));
        take(splitter.flush());
        (reasoning, answer)
    }

    #[test]
    fn any_cut_gives_the_same_split() {
        let cases = [
            (
                "",
                "\n<think>\n a < b </thinner> \n</think>\n\nSo </think> it is.",
                "a < b </thinner>",
                "So </think> it is.",
            ),
            ("…<think>\n", "\nhm\n\n</think>\n\nYes", "hm", "Yes"),
            ("…<think>", "never closed </thi", "never closed </thi", ""),
            ("", "plain <think> text", "", "plain <think> text"),
            ("", " <thin", "", " <thin"),
            ("", "<think>\n\n</think>\n\nquick", "", "quick"),
            ("", "<think>é</think>  ", "é", ""),
            ("", "", "", ""),
        ];
        let mut rng = Rng::new(2);
        for (prompt, reply, reasoning, answer) in cases {
            for _ in 0..200 {
                let got = split(prompt, reply, || rng.next_u64().is_multiple_of(3));
                assert_eq!(got, (reasoning.to_owned(), answer.to_owned()), "{reply:?}");
            }
        }
    }
}
