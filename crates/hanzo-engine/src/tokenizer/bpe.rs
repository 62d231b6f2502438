//! Byte pair encoding: inside a word, the pair with the lowest rank merges first, the leftmost of equals.
//!
//! Symbols are ids from the start (one per byte), so a merge is one probe of a table keyed by a pair of ids: no strings
//! are built or compared. Short words scan for the lowest rank; long ones keep a heap over a linked list, so that a line
//! of a million letters costs O(n log n). Pre-tokenizers and special tokens do not enter here.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use hashbrown::HashMap;

use super::pre::decode_byte_level;
use super::vocab::Vocab;

/// Words up to this many bytes are merged by scanning.
const SCAN_LIMIT: usize = 40;
/// "No such id" and "no such rank".
const NONE: u32 = u32::MAX;

/// What a pair of symbols becomes.
#[derive(Clone, Copy)]
struct Merge {
    rank: u32,
    id: u32,
}

/// The merge rules over one vocabulary.
pub(super) struct Bpe {
    merges: HashMap<(u32, u32), Merge>,
    /// The symbol of each byte.
    byte_symbol: [u32; 256],
    /// Symbols that merges speak of and the vocabulary does not list: symbol `n_vocab + i`. They may take part in
    /// merges; what is left of them in a finished word is spelled byte by byte, as far as bytes have tokens.
    unlisted: Vec<Box<[u8]>>,
    n_vocab: u32,
}

/// Buffers reused from word to word.
#[derive(Default)]
pub(super) struct Scratch {
    symbols: Vec<u32>,
    ranks: Vec<Merge>,
    next: Vec<u32>,
    previous: Vec<u32>,
    heap: BinaryHeap<Reverse<(u32, u32, u32, u32)>>,
}

impl Bpe {
    /// Reads `merges`, each "left right" in the byte-level alphabet, most important first.
    ///
    /// Returns the rules and how many lines could not be read (no space, or characters outside the alphabet).
    pub(super) fn new<'a>(vocab: &Vocab, merges: impl ExactSizeIterator<Item = &'a str>) -> (Bpe, usize) {
        let mut bpe = Bpe {
            merges: HashMap::with_capacity(merges.len()),
            byte_symbol: [NONE; 256],
            unlisted: Vec::new(),
            n_vocab: vocab.len() as u32,
        };
        let mut interned = HashMap::new();
        for byte in 0..=255u8 {
            bpe.byte_symbol[usize::from(byte)] = bpe.symbol(vocab, &[byte], &mut interned);
        }
        let mut pair = Vec::new();
        let mut unreadable = 0;
        for (rank, line) in merges.enumerate() {
            pair.clear();
            // The separator is a space that is not the first character: the left side may not be empty.
            let at = line.char_indices().skip(1).find(|&(_, char)| char == ' ');
            let Some((left_text, right_text)) = at.map(|(at, _)| (&line[..at], &line[at + 1..])) else {
                unreadable += 1;
                continue;
            };
            let left_ok = decode_byte_level(left_text, &mut pair);
            let middle = pair.len();
            if !left_ok || !decode_byte_level(right_text, &mut pair) || middle == pair.len() {
                unreadable += 1;
                continue;
            }
            let left = bpe.symbol(vocab, &pair[..middle], &mut interned);
            let right = bpe.symbol(vocab, &pair[middle..], &mut interned);
            let id = bpe.symbol(vocab, &pair, &mut interned);
            let rank = rank as u32;
            bpe.merges.entry((left, right)).or_insert(Merge { rank, id });
        }
        (bpe, unreadable)
    }

    /// The bytes that no token spells, of those that texts hold: in a word, they are dropped where no merge takes them.
    /// Control codes but for tab and line ends do not count, nor 0xF1 and 0xF2, which begin unassigned characters only.
    pub(super) fn missing_bytes(&self) -> impl Iterator<Item = u8> {
        (0..=255u8)
            .filter(|byte| matches!(byte, b'\t' | b'\n' | b'\r' | 0x20..=0x7E | 0x80..))
            .filter(|byte| !matches!(byte, 0xC0 | 0xC1 | 0xF1 | 0xF2 | 0xF5..))
            .filter(|&byte| self.byte_symbol[usize::from(byte)] >= self.n_vocab)
    }

    fn symbol(&mut self, vocab: &Vocab, bytes: &[u8], interned: &mut HashMap<Box<[u8]>, u32>) -> u32 {
        if let Some(id) = vocab.find(bytes) {
            return id;
        }
        if let Some(&symbol) = interned.get(bytes) {
            return symbol;
        }
        let symbol = self.n_vocab + self.unlisted.len() as u32;
        self.unlisted.push(bytes.into());
        interned.insert(bytes.into(), symbol);
        symbol
    }

    fn merge(&self, left: u32, right: u32) -> Merge {
        let none = Merge { rank: NONE, id: NONE };
        self.merges.get(&(left, right)).copied().unwrap_or(none)
    }

    /// Appends the ids of `word` to `out`.
    pub(super) fn encode(&self, word: &[u8], scratch: &mut Scratch, out: &mut Vec<u32>) {
        scratch.symbols.clear();
        scratch.symbols.extend(word.iter().map(|&byte| self.byte_symbol[usize::from(byte)]));
        if word.len() <= SCAN_LIMIT {
            self.merge_by_scan(scratch);
        } else {
            self.merge_by_heap(scratch);
        }
        for &symbol in scratch.symbols.iter().filter(|&&symbol| symbol != NONE) {
            self.emit(symbol, out);
        }
    }

    fn emit(&self, symbol: u32, out: &mut Vec<u32>) {
        let Some(spelling) = symbol.checked_sub(self.n_vocab) else {
            out.push(symbol);
            return;
        };
        for &byte in &self.unlisted[spelling as usize] {
            let id = self.byte_symbol[usize::from(byte)];
            if id < self.n_vocab {
                out.push(id);
            }
        }
    }

    fn merge_by_scan(&self, scratch: &mut Scratch) {
        let Scratch { symbols, ranks, .. } = scratch;
        ranks.clear();
        ranks.extend(symbols.windows(2).map(|pair| self.merge(pair[0], pair[1])));
        loop {
            let mut best = Merge { rank: NONE, id: NONE };
            let mut at = 0;
            for (index, merge) in ranks.iter().enumerate() {
                if merge.rank < best.rank {
                    (best, at) = (*merge, index);
                }
            }
            if best.rank == NONE {
                return;
            }
            symbols[at] = best.id;
            symbols.remove(at + 1);
            ranks.remove(at);
            if at > 0 {
                ranks[at - 1] = self.merge(symbols[at - 1], symbols[at]);
            }
            if at < ranks.len() {
                ranks[at] = self.merge(symbols[at], symbols[at + 1]);
            }
        }
    }

    /// As [`Bpe::merge_by_scan`]; a symbol merged into its left neighbour is left behind as `NONE`.
    fn merge_by_heap(&self, scratch: &mut Scratch) {
        let Scratch { symbols, next, previous, heap, .. } = scratch;
        let count = symbols.len() as u32;
        next.clear();
        next.extend(1..=count);
        previous.clear();
        previous.extend((0..count).map(|index| index.wrapping_sub(1)));
        heap.clear();
        let push = |heap: &mut BinaryHeap<_>, at: u32, left: u32, right: u32| {
            let merge = self.merge(left, right);
            if merge.rank != NONE {
                heap.push(Reverse((merge.rank, at, left, right)));
            }
        };
        for at in 1..count {
            push(heap, at - 1, symbols[at as usize - 1], symbols[at as usize]);
        }
        while let Some(Reverse((_, at, left, right))) = heap.pop() {
            let behind = next[at as usize];
            // Stale: a neighbour has merged since. (A symbol at the end has `behind == count`.)
            if symbols[at as usize] != left || behind >= count || symbols[behind as usize] != right {
                continue;
            }
            symbols[at as usize] = self.merge(left, right).id;
            symbols[behind as usize] = NONE;
            let after = next[behind as usize];
            next[at as usize] = after;
            if after < count {
                previous[after as usize] = at;
                push(heap, at, symbols[at as usize], symbols[after as usize]);
            }
            let before = previous[at as usize];
            if before < count {
                push(heap, before, symbols[before as usize], symbols[at as usize]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::Rng;
    use crate::tokenizer::vocab::TokenKind;

    fn bpe(tokens: &[&str], merges: &[&str]) -> Bpe {
        let mut vocab = Vocab::with_capacity(tokens.len(), 64);
        for token in tokens {
            vocab.push(TokenKind::Normal, |arena| arena.extend_from_slice(token.as_bytes()));
        }
        vocab.build_index(true);
        Bpe::new(&vocab, merges.iter().copied()).0
    }

    fn encode(bpe: &Bpe, word: &str) -> Vec<u32> {
        let mut out = Vec::new();
        bpe.encode(word.as_bytes(), &mut Scratch::default(), &mut out);
        out
    }

    #[test]
    fn the_lowest_rank_merges_first_and_the_leftmost_of_equals() {
        let bpe = bpe(&["a", "b", "c", "aa", "bc", "ab"], &["b c", "a b", "a a"]);
        assert_eq!(encode(&bpe, "abc"), [0, 4]);
        assert_eq!(encode(&bpe, "ab"), [5]);
        assert_eq!(encode(&bpe, "aaa"), [3, 0]);
    }

    #[test]
    fn a_merge_may_pass_through_a_symbol_that_is_no_token() {
        let bpe = bpe(&["a", "b", "c", "abc"], &["a b", "ab c"]);
        assert_eq!(encode(&bpe, "abc"), [3]);
        assert_eq!(encode(&bpe, "ab"), [0, 1], "spelled out when it stays");
    }

    #[test]
    fn heap_and_scan_agree_on_random_words() {
        let tokens = ["a", "b", "c", "aa", "ab", "ba", "aab", "abab", "cc", "aaaa", "bb", "abb"];
        let merges = ["a a", "a b", "b a", "aa b", "ab ab", "c c", "aa aa", "b b", "a bb"];
        let bpe = bpe(&tokens, &merges);
        let mut rng = Rng::new(7);
        for _ in 0..2000 {
            let length = rng.next_u64() % 60;
            let word: Vec<u8> = (0..length).map(|_| b"abc"[(rng.next_u64() % 3) as usize]).collect();
            let run = |merge: &dyn Fn(&mut Scratch)| {
                let mut scratch = Scratch {
                    symbols: word.iter().map(|&byte| bpe.byte_symbol[usize::from(byte)]).collect(),
                    ..Scratch::default()
                };
                merge(&mut scratch);
                scratch.symbols.retain(|&symbol| symbol != NONE);
                scratch.symbols
            };
            assert_eq!(
                run(&|scratch| bpe.merge_by_scan(scratch)),
                run(&|scratch| bpe.merge_by_heap(scratch)),
                "{}",
                String::from_utf8_lossy(&word)
            );
        }
    }
}
