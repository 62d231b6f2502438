//! SentencePiece-style merging: the neighbours whose union is the token of highest score merge first, the leftmost of
//! equals; a character that is no token is spelled in byte tokens.
//!
//! White space is escaped by the caller. There are no words here: one heap runs over a whole text, in O(n log n).

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use super::vocab::Vocab;

/// Scores and byte tokens over one vocabulary.
pub(super) struct Spm {
    /// One score per id.
    pub scores: Vec<f32>,
    /// The token of each byte.
    pub byte_token: [Option<u32>; 256],
    /// Emitted for a character that neither the vocabulary nor its byte tokens can spell.
    pub unknown: Option<u32>,
}

/// A stretch of the text that is one symbol; `length` 0 once it has merged into its left neighbour.
#[derive(Clone, Copy)]
struct Symbol {
    start: u32,
    length: u32,
    previous: u32,
    next: u32,
}

/// No neighbour.
const END: u32 = u32::MAX;

/// A candidate: symbol `left` and the one behind it would make a token of `length` bytes.
struct Candidate {
    score: f32,
    left: u32,
    length: u32,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Candidate) -> Ordering {
        // `+ 0.0` makes the two zeros equal.
        (self.score + 0.0).total_cmp(&(other.score + 0.0)).then(Reverse(self.left).cmp(&Reverse(other.left)))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Candidate) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Candidate) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Candidate {}

impl Spm {
    /// Appends the ids of `text`, in which spaces stand as in the vocabulary's pieces, to `out`.
    pub(super) fn encode(&self, vocab: &Vocab, text: &str, out: &mut Vec<u32>) {
        let mut symbols: Vec<Symbol> = Vec::with_capacity(text.len());
        for (start, char) in text.char_indices() {
            let index = symbols.len() as u32;
            symbols.push(Symbol {
                start: start as u32,
                length: char.len_utf8() as u32,
                previous: index.wrapping_sub(1), // END for the first
                next: index + 1,
            });
        }
        let Some(last) = symbols.last_mut() else { return };
        last.next = END;

        let bytes = text.as_bytes();
        let mut heap = BinaryHeap::with_capacity(symbols.len());
        for left in 0..symbols.len() as u32 - 1 {
            self.consider(vocab, bytes, &symbols, left, &mut heap);
        }
        while let Some(Candidate { left, length, .. }) = heap.pop() {
            let symbol = symbols[left as usize];
            if symbol.length == 0 || symbol.next == END {
                continue;
            }
            let right = symbols[symbol.next as usize];
            if symbol.length + right.length != length {
                continue; // one of the two has merged since
            }
            symbols[symbol.next as usize].length = 0;
            symbols[left as usize].length = length;
            symbols[left as usize].next = right.next;
            if right.next != END {
                symbols[right.next as usize].previous = left;
            }
            if symbol.previous != END {
                self.consider(vocab, bytes, &symbols, symbol.previous, &mut heap);
            }
            self.consider(vocab, bytes, &symbols, left, &mut heap);
        }
        for symbol in symbols.iter().filter(|symbol| symbol.length > 0) {
            self.emit(vocab, &bytes[symbol.start as usize..][..symbol.length as usize], out);
        }
    }

    fn consider(&self, vocab: &Vocab, text: &[u8], symbols: &[Symbol], left: u32, heap: &mut BinaryHeap<Candidate>) {
        let symbol = symbols[left as usize];
        if symbol.next == END {
            return;
        }
        let length = symbol.length + symbols[symbol.next as usize].length;
        if let Some(id) = vocab.find(&text[symbol.start as usize..][..length as usize]) {
            let score = self.scores.get(id as usize).copied().unwrap_or(0.0);
            heap.push(Candidate { score, left, length });
        }
    }

    fn emit(&self, vocab: &Vocab, spelling: &[u8], out: &mut Vec<u32>) {
        if let Some(id) = vocab.find(spelling) {
            out.push(id);
            return;
        }
        let start = out.len();
        for &byte in spelling {
            let Some(id) = self.byte_token[usize::from(byte)] else {
                out.truncate(start);
                out.extend(self.unknown);
                return;
            };
            out.push(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::vocab::TokenKind;

    fn encode(text: &str) -> Vec<u32> {
        let tokens = [("a", -9.0), ("b", -9.0), ("ab", -2.0), ("ba", -1.0), ("aba", -3.0), ("aa", -2.0)];
        let mut vocab = Vocab::with_capacity(6, 16);
        for (token, _) in tokens {
            vocab.push(TokenKind::Normal, |arena| arena.extend_from_slice(token.as_bytes()));
        }
        vocab.build_index(false);
        let mut byte_token = [None; 256];
        byte_token[0xC3] = Some(100);
        byte_token[0xA9] = Some(101);
        let spm = Spm { scores: tokens.iter().map(|&(_, score)| score).collect(), byte_token, unknown: Some(99) };
        let mut out = Vec::new();
        spm.encode(&vocab, text, &mut out);
        out
    }

    #[test]
    fn the_highest_score_merges_first_and_the_leftmost_of_equals() {
        assert_eq!(encode("aba"), [4], "ba first, then a + ba");
        assert_eq!(encode("aaa"), [5, 0]);
        assert_eq!(encode("aab"), [5, 1], "aa and ab score the same: the left one");
    }

    #[test]
    fn what_is_no_token_is_spelled_in_bytes_or_is_one_unknown() {
        assert_eq!(encode("é"), [100, 101]);
        assert_eq!(encode("è"), [99], "0xA8 has no token");
        assert!(encode("").is_empty());
    }
}
