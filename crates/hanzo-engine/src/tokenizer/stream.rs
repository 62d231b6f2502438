//! Detokenizing while tokens arrive: no character is ever cut, and bytes that are no UTF-8 become U+FFFD.

use super::Tokenizer;

/// Turns ids into text as they arrive.
///
/// A character whose bytes are spread over several tokens comes out with the last of them. What comes out in all is
/// what [`Tokenizer::decode`] gives for the same ids, except that a space at the very start is kept: a stream usually
/// continues a prompt.
#[derive(Clone, Debug, Default)]
pub struct Detokenizer {
    render_special: bool,
    /// The next piece follows a special token, so its space prefix is dropped.
    at_start: bool,
    /// Bytes of a character that is not complete yet.
    pending: Vec<u8>,
    text: String,
}

impl Detokenizer {
    /// A stream that continues a text; with `render_special`, control tokens are rendered too.
    pub fn new(render_special: bool) -> Detokenizer {
        Detokenizer { render_special, ..Detokenizer::default() }
    }

    /// A stream from the start of a text: the space that encoding put in front is dropped again.
    pub(super) fn from_start(render_special: bool) -> Detokenizer {
        Detokenizer { at_start: true, ..Detokenizer::new(render_special) }
    }

    /// Adds a token; returns the text that is now complete (often a word, possibly nothing).
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> &str {
        self.text.clear();
        tokenizer.render(id, self.render_special, &mut self.at_start, &mut self.pending);
        self.drain(false);
        &self.text
    }

    /// Ends the stream: an incomplete character, if any, comes out as U+FFFD.
    pub fn flush(&mut self) -> &str {
        self.text.clear();
        self.drain(true);
        &self.text
    }

    /// Moves what is complete from `pending` to `text`.
    fn drain(&mut self, all: bool) {
        let mut rest = self.pending.as_slice();
        loop {
            let error = match std::str::from_utf8(rest) {
                Ok(valid) => {
                    self.text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => error,
            };
            let (valid, behind) = rest.split_at(error.valid_up_to());
            // `valid` is UTF-8, so nothing is replaced here.
            self.text.push_str(&String::from_utf8_lossy(valid));
            rest = behind;
            match error.error_len() {
                Some(length) => rest = &rest[length..],
                None if all => rest = &[],
                None => break,
            }
            self.text.push(char::REPLACEMENT_CHARACTER);
        }
        let kept = rest.len();
        let from = self.pending.len() - kept;
        self.pending.copy_within(from.., 0);
        self.pending.truncate(kept);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::Rng;

    /// Feeds `bytes` in pieces of random length.
    fn stream(bytes: &[u8], rng: &mut Rng) -> String {
        let mut stream = Detokenizer::new(false);
        let mut all = String::new();
        let mut rest = bytes;
        while !rest.is_empty() {
            let (piece, behind) = rest.split_at((rng.next_u64() as usize % 4).min(rest.len()));
            stream.pending.extend_from_slice(piece);
            stream.text.clear();
            stream.drain(false);
            all.push_str(&stream.text);
            rest = behind;
        }
        all.push_str(stream.flush());
        all
    }

    #[test]
    fn pieces_of_any_length_give_what_the_whole_gives() {
        let mut rng = Rng::new(3);
        for _ in 0..2000 {
            let bytes: Vec<u8> = (0..rng.next_u64() % 24)
                .map(|_| b"a \xC3\xA9\xF0\x9F\x99\x82\xED\xA0\xFF\x80"[(rng.next_u64() % 12) as usize])
                .collect();
            assert_eq!(stream(&bytes, &mut rng), String::from_utf8_lossy(&bytes), "{bytes:?}");
        }
        let text = "né 👩‍👩‍👧 東京";
        assert_eq!(stream(text.as_bytes(), &mut rng), text);
    }
}
