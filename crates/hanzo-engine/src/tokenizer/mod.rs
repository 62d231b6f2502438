//! Tokenizers from GGUF metadata: text to ids, and ids to text.
//!
//! Two models are spoken: byte-level byte pair encoding (`gpt2`, with the pre-tokenizers of [`Tokenizer::pre_tokenizers`])
//! and SentencePiece-style merging by score (`llama`). Everything is read from `tokenizer.ggml.*`; no other file and no
//! network is involved, and no chat template or model enters here.
//!
//! The merge loops are our own rather than the crate `tokenizers`: a model file carries the vocabulary in the form these
//! loops want, so a vocabulary of 151936 tokens and as many merges loads in tens of milliseconds instead of being
//! rebuilt as strings; special tokens, pre-tokenizers and byte fallback follow GGUF's rules rather than `tokenizer.json`'s;
//! and a line of a megabyte without a space costs O(n log n).

mod bpe;
mod gguf;
mod pre;
mod special;
mod spm;
mod stream;
mod vocab;

use std::borrow::Cow;

pub use gguf::TokenizerError;
pub use stream::Detokenizer;
pub use vocab::TokenKind;

use bpe::{Bpe, Scratch};
use pre::Splitter;
use special::{Finder, Fragment};
use spm::Spm;
use vocab::Vocab;

/// What [`Tokenizer::encode`] does about the tokens that open and close a text, if the model wants any.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AddSpecial {
    /// Adds none.
    Never,
    /// Adds them even where the text spells them out already.
    Always,
    /// Adds those that the text does not spell out: for the output of a chat template.
    IfMissing,
}

/// What [`Tokenizer::encode`] does about control tokens that the text spells out, such as `<|im_start|>`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ParseSpecial {
    /// They are text like any other: the safe choice for what a user has written.
    No,
    /// They become the tokens they name: for prompts that a template has made.
    Yes,
}

/// A vocabulary with its rules.
pub struct Tokenizer {
    vocab: Vocab,
    algorithm: Algorithm,
    /// Control, unknown and user-defined tokens.
    all_special: Finder,
    /// User-defined tokens only.
    user_defined: Finder,
    special: Vec<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    unknown: Option<u32>,
    padding: Option<u32>,
    add_bos: bool,
    add_eos: bool,
    /// In ascending order.
    ends: Vec<u32>,
    /// White space behind these special tokens belongs to them (Phi 3); in ascending order.
    swallowing: Vec<u32>,
    warnings: Vec<String>,
}

enum Algorithm {
    /// `gpt2`.
    ByteLevel { splitter: Splitter, bpe: Box<Bpe>, ignore_merges: bool, pre: &'static str },
    /// `llama`.
    SentencePiece { spm: Box<Spm>, add_space_prefix: bool, remove_extra_whitespaces: bool },
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("model", &self.model())
            .field("pre_tokenizer", &self.pre_tokenizer())
            .field("n_vocab", &self.n_vocab())
            .field("bos", &self.bos)
            .field("eos", &self.eos)
            .field("ends", &self.ends)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// The ids of `text`.
    ///
    /// User-defined tokens are always found first; control tokens as `parse` says; BOS and EOS are added as the model's
    /// rules and `add` say.
    pub fn encode(&self, text: &str, add: AddSpecial, parse: ParseSpecial) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 2);
        let bos = self.bos.filter(|_| self.add_bos && add != AddSpecial::Never);
        ids.extend(bos);
        let body = ids.len();
        self.encode_body(text, parse, &mut ids);
        if add == AddSpecial::IfMissing && bos.is_some() && ids.get(body) == bos.as_ref() {
            ids.remove(0);
        }
        let eos = self.eos.filter(|_| self.add_eos && add != AddSpecial::Never);
        if add != AddSpecial::IfMissing || ids.last() != eos.as_ref() {
            ids.extend(eos);
        }
        ids
    }

    fn encode_body(&self, text: &str, parse: ParseSpecial, ids: &mut Vec<u32>) {
        let finder = match parse {
            ParseSpecial::Yes => &self.all_special,
            ParseSpecial::No => &self.user_defined,
        };
        let mut scratch = Scratch::default();
        let mut at_start = true; // of the text, or behind a special token
        finder.cut(
            text,
            |id| self.swallowing.binary_search(&id).is_ok(),
            |fragment| match fragment {
                Fragment::Token(id) => {
                    ids.push(id);
                    at_start = true;
                }
                Fragment::Text(text) => {
                    self.encode_text(text, at_start, &mut scratch, ids);
                    at_start = false;
                }
            },
        );
    }

    fn encode_text(&self, text: &str, at_start: bool, scratch: &mut Scratch, ids: &mut Vec<u32>) {
        match &self.algorithm {
            Algorithm::ByteLevel { splitter, bpe, ignore_merges, .. } => splitter.split(text, &mut |word| {
                let word = word.as_bytes();
                match self.vocab.find(word).filter(|_| *ignore_merges || word.len() == 1) {
                    Some(id) => ids.push(id),
                    None => bpe.encode(word, scratch, ids),
                }
            }),
            Algorithm::SentencePiece { spm, add_space_prefix, remove_extra_whitespaces } => {
                let mut text = if text.contains(SPACE_MARK) {
                    Cow::Owned(text.replace(SPACE_MARK, " "))
                } else {
                    Cow::Borrowed(text)
                };
                if *remove_extra_whitespaces {
                    text = Cow::Owned(text.split(' ').filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" "));
                }
                if *add_space_prefix && at_start && !text.is_empty() {
                    text.to_mut().insert(0, ' ');
                }
                spm.encode(&self.vocab, &text, ids);
            }
        }
    }

    /// The text of `ids`; bytes that are no UTF-8 become U+FFFD. Control tokens appear only with `render_special`.
    ///
    /// For byte-level vocabularies this inverts [`Tokenizer::encode`] for every text; the space that a SentencePiece
    /// vocabulary puts in front is dropped again.
    pub fn decode(&self, ids: &[u32], render_special: bool) -> String {
        let mut stream = Detokenizer::from_start(render_special);
        let mut text = String::new();
        for &id in ids {
            text.push_str(stream.push(self, id));
        }
        text.push_str(stream.flush());
        text
    }

    /// Appends the bytes of `id` as they read in a text. `at_start`: a space prefix is due to be dropped.
    fn render(&self, id: u32, render_special: bool, at_start: &mut bool, out: &mut Vec<u8>) {
        let kind = self.vocab.kind(id);
        if kind.is_hidden() && !render_special {
            *at_start |= kind == TokenKind::Control;
            return;
        }
        let mut piece = self.vocab.piece(id);
        let Algorithm::SentencePiece { add_space_prefix, .. } = &self.algorithm else {
            out.extend_from_slice(piece);
            return;
        };
        let is_text = matches!(kind, TokenKind::Normal | TokenKind::Byte);
        if *add_space_prefix && *at_start && is_text {
            piece = piece.strip_prefix(b" ").unwrap_or(piece);
        }
        *at_start = !is_text;
        out.extend_from_slice(piece);
    }

    /// The bytes `id` stands for (part of a character, perhaps); the name of a control token; nothing for an id that is
    /// out of range.
    pub fn piece(&self, id: u32) -> &[u8] {
        self.vocab.piece(id)
    }

    /// What `id` is; [`TokenKind::Unused`] for an id out of range.
    pub fn kind(&self, id: u32) -> TokenKind {
        self.vocab.kind(id)
    }

    /// The control, unknown or user-defined token spelled `text`.
    pub fn special_id(&self, text: &str) -> Option<u32> {
        self.special.iter().copied().find(|&id| self.vocab.piece(id) == text.as_bytes())
    }

    /// Whether `id` ends a generation: EOS, the end of a turn, and their kin.
    pub fn is_eog(&self, id: u32) -> bool {
        self.ends.binary_search(&id).is_ok()
    }

    /// Every id for which [`Tokenizer::is_eog`] holds, ascending.
    pub fn eog(&self) -> &[u32] {
        &self.ends
    }

    /// The token that opens a text.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that closes a text.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The token for what cannot be spelled.
    pub fn unknown(&self) -> Option<u32> {
        self.unknown
    }

    /// The token that fills up a batch.
    pub fn padding(&self) -> Option<u32> {
        self.padding
    }

    /// Whether [`Tokenizer::encode`] opens a text with [`Tokenizer::bos`].
    pub fn adds_bos(&self) -> bool {
        self.add_bos && self.bos.is_some()
    }

    /// Whether [`Tokenizer::encode`] closes a text with [`Tokenizer::eos`].
    pub fn adds_eos(&self) -> bool {
        self.add_eos && self.eos.is_some()
    }

    /// The number of ids.
    pub fn n_vocab(&self) -> usize {
        self.vocab.len()
    }

    /// The model, as `tokenizer.ggml.model` calls it.
    pub fn model(&self) -> &'static str {
        match self.algorithm {
            Algorithm::ByteLevel { .. } => "gpt2",
            Algorithm::SentencePiece { .. } => "llama",
        }
    }

    /// The pre-tokenizer in use, if the model has one.
    pub fn pre_tokenizer(&self) -> Option<&'static str> {
        match self.algorithm {
            Algorithm::ByteLevel { pre, .. } => Some(pre),
            Algorithm::SentencePiece { .. } => None,
        }
    }

    /// The names in `tokenizer.ggml.pre` that are known.
    pub fn pre_tokenizers() -> impl Iterator<Item = &'static str> {
        pre::names()
    }

    /// What was odd about the metadata, one sentence each: worth showing, not worth stopping for.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

/// What SentencePiece writes for a space. Pieces hold plain spaces here, so texts are mapped the same way.
const SPACE_MARK: char = '\u{2581}';

#[cfg(test)]
mod tests;
