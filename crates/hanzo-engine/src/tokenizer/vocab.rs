//! The vocabulary: the bytes every id stands for, and the way back from bytes to an id.
//!
//! All pieces lie in one arena, and the index holds ids only (it compares against the arena), so that a vocabulary of a
//! quarter million tokens loads with a handful of allocations. Merging and metadata do not enter here.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

/// What a token is: `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TokenKind {
    /// Text (1, and whatever code is not known).
    #[default]
    Normal,
    /// Stands for what the vocabulary cannot spell (2).
    Unknown,
    /// A mark such as `<|im_end|>`: found in text only when special tokens are parsed, rendered only on request (3).
    Control,
    /// Text that is always one token, found before anything else (4).
    UserDefined,
    /// A place holder: no text encodes to it, and it renders only on request (5).
    Unused,
    /// One byte, written `<0xNN>` (6).
    Byte,
}

impl TokenKind {
    /// The kind that GGUF writes as `code`.
    pub(super) fn from_code(code: i64) -> TokenKind {
        match code {
            2 => TokenKind::Unknown,
            3 => TokenKind::Control,
            4 => TokenKind::UserDefined,
            5 => TokenKind::Unused,
            6 => TokenKind::Byte,
            _ => TokenKind::Normal,
        }
    }

    /// Whether text may spell the token even where special tokens are not parsed.
    pub(super) fn is_text(self) -> bool {
        matches!(self, TokenKind::Normal | TokenKind::UserDefined)
    }

    /// Whether the token renders only where special tokens are rendered.
    pub(super) fn is_hidden(self) -> bool {
        !self.is_text() && self != TokenKind::Byte
    }
}

/// Ids and their bytes.
#[derive(Default)]
pub(super) struct Vocab {
    arena: Vec<u8>,
    /// Piece `id` is `arena[ends[id - 1]..ends[id]]`.
    ends: Vec<u32>,
    kinds: Vec<TokenKind>,
    index: HashTable<u32>,
    hasher: DefaultHashBuilder,
    longest: usize,
}

impl Vocab {
    pub(super) fn with_capacity(tokens: usize, bytes: usize) -> Vocab {
        Vocab {
            arena: Vec::with_capacity(bytes),
            ends: Vec::with_capacity(tokens),
            kinds: Vec::with_capacity(tokens),
            index: HashTable::with_capacity(tokens),
            ..Vocab::default()
        }
    }

    /// Appends the next token; `spell` writes its bytes at the end of the arena.
    pub(super) fn push(&mut self, kind: TokenKind, spell: impl FnOnce(&mut Vec<u8>)) {
        spell(&mut self.arena);
        self.ends.push(self.arena.len() as u32);
        self.kinds.push(kind);
    }

    /// Makes every text token findable by its bytes. Of two tokens with the same bytes the normal one wins, then the
    /// lower id. Kinds other than these two are left out: no text may spell them by accident.
    ///
    /// SentencePiece vocabularies leave out user-defined tokens too (`user_defined` false): they are found before
    /// merging, and merging must not find them where an escaped space was a character of the text.
    pub(super) fn build_index(&mut self, user_defined: bool) {
        let kinds: &[TokenKind] = &[TokenKind::Normal, TokenKind::UserDefined];
        for &wanted in &kinds[..1 + usize::from(user_defined)] {
            for id in 0..self.len() as u32 {
                if wanted == self.kinds[id as usize] {
                    let hash = self.hasher.hash_one(self.piece(id));
                    let Vocab { arena, ends, index, .. } = self;
                    let bytes = slice(arena, ends, id);
                    if !bytes.is_empty() && index.find(hash, |&other| slice(arena, ends, other) == bytes).is_none() {
                        let hasher = &self.hasher;
                        index.insert_unique(hash, id, |&other| hasher.hash_one(slice(arena, ends, other)));
                        self.longest = self.longest.max(bytes.len());
                    }
                }
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of `id`; empty for an id out of range.
    pub(super) fn piece(&self, id: u32) -> &[u8] {
        slice(&self.arena, &self.ends, id)
    }

    /// The kind of `id`; unused for an id out of range.
    pub(super) fn kind(&self, id: u32) -> TokenKind {
        self.kinds.get(id as usize).copied().unwrap_or(TokenKind::Unused)
    }

    /// The text token spelled `bytes`.
    pub(super) fn find(&self, bytes: &[u8]) -> Option<u32> {
        if bytes.len() > self.longest {
            return None;
        }
        let hash = self.hasher.hash_one(bytes);
        self.index.find(hash, |&id| self.piece(id) == bytes).copied()
    }
}

fn slice<'a>(arena: &'a [u8], ends: &[u32], id: u32) -> &'a [u8] {
    let id = id as usize;
    match ends.get(id) {
        Some(&end) => &arena[if id == 0 { 0 } else { ends[id - 1] as usize }..end as usize],
        None => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_text_tokens_are_found_and_the_normal_one_wins() {
        let mut vocab = Vocab::with_capacity(5, 16);
        for (kind, text) in [
            (TokenKind::UserDefined, "ab"),
            (TokenKind::Normal, "ab"),
            (TokenKind::Control, "<s>"),
            (TokenKind::Normal, ""),
            (TokenKind::UserDefined, "\n\n"),
        ] {
            vocab.push(kind, |arena| arena.extend_from_slice(text.as_bytes()));
        }
        vocab.build_index(true);
        assert_eq!(vocab.find(b"ab"), Some(1));
        assert_eq!(vocab.find(b"\n\n"), Some(4));
        assert_eq!(vocab.find(b"<s>"), None);
        assert_eq!(vocab.find(b""), None);
        assert_eq!(vocab.piece(2), b"<s>");
        assert_eq!(vocab.piece(99), b"");
    }
}
