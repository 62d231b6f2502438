//! Stop strings: text that ends a generation and is never shown, however it is cut into pieces on its way.

/// Watches a stream of text for any of several strings.
///
/// Text that may be the beginning of a stop string is held back until it is clear that it is not. The string that is
/// complete first ends the stream; of several that end at the same place the longest counts. The result depends on the
/// text only, never on how it was cut.
///
/// ```
/// use hanzo_engine::sample::StopMatcher;
/// let mut stop = StopMatcher::new(["###"]);
/// assert_eq!(stop.push("a#"), ("a", None));
/// assert_eq!(stop.push("b##"), ("#b", None));
/// assert_eq!(stop.push("# c"), ("", Some(0)));
/// ```
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<Stop>,
    /// Text not yet given out; it ends in the longest beginning of a stop string.
    held: String,
    /// What the last call gave out.
    text: String,
    found: Option<usize>,
}

#[derive(Clone, Debug)]
struct Stop {
    /// Its place in the list that `new` was given.
    index: usize,
    bytes: Box<[u8]>,
    /// For each length of a matched beginning, the next shorter beginning that also ends there (Knuth, Morris, Pratt).
    fallback: Box<[usize]>,
    /// How many bytes of the stop string the stream ends in.
    matched: usize,
}

impl Stop {
    fn new(index: usize, text: String) -> Stop {
        let bytes = text.into_bytes().into_boxed_slice();
        let mut fallback = vec![0; bytes.len() + 1];
        let mut length = 0;
        for at in 1..bytes.len() {
            while length > 0 && bytes[at] != bytes[length] {
                length = fallback[length];
            }
            length += usize::from(bytes[at] == bytes[length]);
            fallback[at + 1] = length;
        }
        Stop { index, bytes, fallback: fallback.into(), matched: 0 }
    }

    /// Advances by one byte; true if the stop string is complete.
    fn advance(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.fallback[self.matched];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        self.matched == self.bytes.len()
    }
}

impl StopMatcher {
    /// A matcher of `stops`; empty ones are ignored.
    pub fn new<S: Into<String>>(stops: impl IntoIterator<Item = S>) -> StopMatcher {
        let stops = stops.into_iter().map(Into::into).enumerate();
        StopMatcher {
            stops: stops.filter(|(_, stop)| !stop.is_empty()).map(|(index, stop)| Stop::new(index, stop)).collect(),
            held: String::new(),
            text: String::new(),
            found: None,
        }
    }

    /// Adds text; returns what may be shown now, and the stop string (its place in the list) that has ended the stream.
    /// After that, nothing comes out any more.
    pub fn push(&mut self, piece: &str) -> (&str, Option<usize>) {
        self.text.clear();
        if self.found.is_some() {
            return (&self.text, self.found);
        }
        let before = self.held.len();
        self.held.push_str(piece);
        for (at, &byte) in piece.as_bytes().iter().enumerate() {
            let mut longest: Option<&Stop> = None;
            for stop in &mut self.stops {
                if stop.advance(byte) && longest.is_none_or(|other| stop.bytes.len() > other.bytes.len()) {
                    longest = Some(stop);
                }
            }
            if let Some(stop) = longest {
                // Both ends of a stop string are ends of characters, so this cuts none.
                let shown = before + at + 1 - stop.bytes.len();
                self.found = Some(stop.index);
                self.text.push_str(&self.held[..shown]);
                self.held.clear();
                return (&self.text, self.found);
            }
        }
        let kept = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let shown = self.held.len() - kept;
        self.text.push_str(&self.held[..shown]);
        self.held.drain(..shown);
        (&self.text, None)
    }

    /// Ends the stream: what was held back comes out, since no stop string came of it.
    pub fn flush(&mut self) -> &str {
        self.text.clear();
        std::mem::swap(&mut self.text, &mut self.held);
        for stop in &mut self.stops {
            stop.matched = 0;
        }
        &self.text
    }

    /// The stop string that ended the stream, as its place in the list.
    pub fn found(&self) -> Option<usize> {
        self.found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::Rng;

    /// The definition: the earliest end, then the longest string.
    fn cut(text: &str, stops: &[&str]) -> (String, Option<usize>) {
        for end in (0..=text.len()).filter(|&end| text.is_char_boundary(end)) {
            let hit = stops
                .iter()
                .enumerate()
                .filter(|(_, stop)| !stop.is_empty() && text[..end].ends_with(**stop))
                .max_by_key(|(index, stop)| (stop.len(), std::cmp::Reverse(*index)));
            if let Some((index, stop)) = hit {
                return (text[..end - stop.len()].to_owned(), Some(index));
            }
        }
        (text.to_owned(), None)
    }

    #[test]
    fn the_text_decides_and_not_how_it_was_cut() {
        let mut rng = Rng::new(11);
        let sets: &[&[&str]] = &[&["aab"], &["ab", "aab", "b"], &["aba", "abab"], &["é", "éa"], &["", "ba"], &[]];
        for round in 0..3000 {
            let stops = sets[round % sets.len()];
            let text: String =
                (0..rng.next_u64() % 12).map(|_| ['a', 'b', 'é'][(rng.next_u64() % 3) as usize]).collect();
            let mut matcher = StopMatcher::new(stops.iter().copied());
            let mut shown = String::new();
            let mut piece = String::new();
            for char in text.chars() {
                piece.push(char);
                if rng.next_u64().is_multiple_of(2) {
                    shown.push_str(matcher.push(&std::mem::take(&mut piece)).0);
                }
            }
            shown.push_str(matcher.push(&piece).0);
            shown.push_str(matcher.flush());
            assert_eq!((shown, matcher.found()), cut(&text, stops), "{text:?} {stops:?}");
        }
    }

    #[test]
    fn only_a_possible_beginning_is_held_back() {
        let mut matcher = StopMatcher::new(["</s>", "<end>"]);
        assert_eq!(matcher.push("x < y <e"), ("x < y ", None));
        assert_eq!(matcher.push("no"), ("<eno", None));
        assert_eq!(matcher.push("<"), ("", None));
        assert_eq!(matcher.flush(), "<");
    }
}
