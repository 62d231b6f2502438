//! From `tokenizer.ggml.*` to a [`Tokenizer`]: the keys, their defaults, and what is odd about real files.
//!
//! The keys are those of the GGUF specification; where a file leaves one out, the default is the one files are written
//! for. What can be put right with a remark becomes a warning; what would give wrong ids is an error.

use hanzo_gguf::{GgufError, Metadata, Strings};

use super::bpe::Bpe;
use super::pre::{self, Splitter, decode_byte_level};
use super::special::{Ending, Finder, ending};
use super::spm::Spm;
use super::vocab::{TokenKind, Vocab};
use super::{Algorithm, SPACE_MARK, Tokenizer};

/// Why metadata makes no tokenizer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A key has the wrong type.
    #[error(transparent)]
    Metadata(#[from] GgufError),
    /// A key is not there.
    #[error("metadata key `{key}` is missing: the file has no tokenizer; use the original file, or convert it again")]
    Missing {
        /// The key.
        key: &'static str,
    },
    /// A tokenizer this engine does not speak.
    #[error(
        "tokenizer model `{model}`{about} is not supported; \
         supported are `gpt2` (byte-level BPE) and `llama` (SentencePiece with scores)"
    )]
    Model {
        /// `tokenizer.ggml.model`.
        model: String,
        /// What that is, with a leading space, if it is known.
        about: &'static str,
    },
    /// Two arrays that belong together differ in length.
    #[error("metadata key `{key}` has {found} entries, but the vocabulary has {expected} tokens")]
    Length {
        /// The key of the array that is too short.
        key: &'static str,
        /// Tokens.
        expected: usize,
        /// Entries.
        found: usize,
    },
    /// More text than offsets of 32 bits reach.
    #[error("metadata key `tokenizer.ggml.tokens` holds {bytes} bytes: more than 4 GiB is no vocabulary")]
    TooLarge {
        /// The size of all tokens.
        bytes: usize,
    },
    /// The special tokens make no automaton.
    #[error("the special tokens of `tokenizer.ggml.tokens` cannot be searched for: {0}")]
    SpecialTokens(String),
}

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const SCORES: &str = "tokenizer.ggml.scores";
const KINDS: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";

/// Further keys of ids that end a generation.
const END_KEYS: [&str; 2] = ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// What the models that are not supported are, for the error.
const OTHER_MODELS: &[(&str, &str)] = &[
    ("bert", " (WordPiece, wpm)"),
    ("t5", " (SentencePiece unigram, ugm)"),
    ("rwkv", " (RWKV's greedy trie)"),
    ("plamo2", " (PLaMo's unigram table)"),
    ("plamo3", " (PLaMo's unigram table)"),
    ("gemma4", " (BPE over raw UTF-8)"),
    ("whitespace", " (words at white space)"),
    ("no_vocab", " (none at all)"),
    ("none", " (none at all)"),
];

enum Model {
    ByteLevel,
    SentencePiece,
}

impl Tokenizer {
    /// Reads the tokenizer of a model file.
    ///
    /// # Errors
    /// If there is none, if it is of a model that is not supported, or if its arrays do not fit together.
    pub fn from_gguf(metadata: &Metadata) -> Result<Tokenizer, TokenizerError> {
        let mut warnings = Vec::new();
        let model = match metadata.opt_str(MODEL)?.ok_or(TokenizerError::Missing { key: MODEL })? {
            "gpt2" => Model::ByteLevel,
            "llama" => Model::SentencePiece,
            other => {
                let about = OTHER_MODELS.iter().find(|(name, _)| *name == other).map_or("", |(_, about)| about);
                let model = other.to_owned();
                return Err(TokenizerError::Model { model, about });
            }
        };
        let tokens = metadata.opt_strs(TOKENS)?.ok_or(TokenizerError::Missing { key: TOKENS })?;
        let (vocab, named_ends) = read_vocab(metadata, &model, &tokens, &mut warnings)?;

        let mut ids = SpecialIds { metadata, n_vocab: vocab.len(), warnings: &mut warnings };
        // SentencePiece files that name none mean SentencePiece's own ids.
        let fallback =
            |id| matches!(model, Model::SentencePiece).then_some(id).filter(|&id| (id as usize) < vocab.len());
        let bos = ids.get("tokenizer.ggml.bos_token_id").or(fallback(1));
        let eos = ids.get("tokenizer.ggml.eos_token_id").or(fallback(2));
        let unknown = ids.get("tokenizer.ggml.unknown_token_id").or(fallback(0));
        let padding = ids.get("tokenizer.ggml.padding_token_id");
        let mut ends: Vec<u32> = eos.into_iter().chain(END_KEYS.iter().filter_map(|key| ids.get(key))).collect();
        ends.extend(named_ends);
        drop_turn_internal_ends(&vocab, &mut ends);
        ends.sort_unstable();
        ends.dedup();
        if ends.is_empty() {
            warnings.push("the vocabulary names no end-of-generation token: generation ends at its limit only".into());
        }

        let (algorithm, default_add_bos) = match model {
            Model::ByteLevel => byte_level(metadata, &vocab, &mut warnings)?,
            Model::SentencePiece => (sentence_piece(metadata, &vocab, unknown, &mut warnings)?, true),
        };
        let add_bos = metadata.opt_bool("tokenizer.ggml.add_bos_token")?.unwrap_or(default_add_bos);
        let add_eos = metadata.opt_bool("tokenizer.ggml.add_eos_token")?.unwrap_or(false);
        if add_bos && bos.is_none() {
            warnings.push(
                "a text should open with BOS, but `tokenizer.ggml.bos_token_id` is missing: none is added".into(),
            );
        }
        if add_eos && eos.is_none() {
            warnings.push(
                "a text should close with EOS, but `tokenizer.ggml.eos_token_id` is missing: none is added".into(),
            );
        }

        let of_kind = |kinds: &'static [TokenKind]| {
            let vocab = &vocab;
            (0..vocab.len() as u32).filter(move |&id| kinds.contains(&vocab.kind(id)))
        };
        let special: Vec<u32> = of_kind(&[TokenKind::Control, TokenKind::Unknown, TokenKind::UserDefined]).collect();
        let all_special = Finder::new(&vocab, special.iter().copied())?;
        let user_defined = Finder::new(&vocab, of_kind(&[TokenKind::UserDefined]))?;
        let swallowing = swallowing(metadata, &vocab, &special)?;
        Ok(Tokenizer {
            vocab,
            algorithm,
            all_special,
            user_defined,
            special,
            bos,
            eos,
            unknown,
            padding,
            add_bos,
            add_eos,
            ends,
            swallowing,
            warnings,
        })
    }
}

/// Ids named by metadata keys; one that is unusable is left out with a warning.
struct SpecialIds<'a> {
    metadata: &'a Metadata,
    n_vocab: usize,
    warnings: &'a mut Vec<String>,
}

impl SpecialIds<'_> {
    fn get(&mut self, key: &str) -> Option<u32> {
        match self.metadata.opt_u32(key) {
            Ok(Some(id)) if (id as usize) < self.n_vocab => Some(id),
            Ok(None) => None,
            Ok(Some(id)) => {
                let n_vocab = self.n_vocab;
                self.warnings.push(format!("`{key}` = {id} is ignored: the vocabulary has {n_vocab} tokens"));
                None
            }
            Err(error) => {
                self.warnings.push(format!("`{key}` is ignored: {error}"));
                None
            }
        }
    }
}

/// Reads the tokens; also returns the ids whose names end a generation.
fn read_vocab(
    metadata: &Metadata,
    model: &Model,
    tokens: &Strings<'_>,
    warnings: &mut Vec<String>,
) -> Result<(Vocab, Vec<u32>), TokenizerError> {
    let kinds = metadata.opt_i32s(KINDS)?;
    let expected = tokens.len();
    if let Some(found) = kinds.as_ref().map(Vec::len).filter(|&found| found < expected) {
        return Err(TokenizerError::Length { key: KINDS, expected, found });
    }
    let bytes: usize = tokens.iter().map(<[u8]>::len).sum();
    if bytes > u32::MAX as usize || expected >= u32::MAX as usize {
        return Err(TokenizerError::TooLarge { bytes });
    }
    let mut vocab = Vocab::with_capacity(expected, bytes);
    let mut ends = Vec::new();
    let mut renamed = Vec::new();
    for (id, token) in tokens.iter().enumerate() {
        let code = kinds.as_ref().map_or(1, |kinds| kinds[id]);
        let mut kind = TokenKind::from_code(i64::from(code));
        let text = std::str::from_utf8(token).ok();
        match text.map_or(Ending::No, ending) {
            Ending::Always => {
                ends.push(id as u32);
                if kind != TokenKind::Control {
                    renamed.push(text.unwrap_or_default());
                    kind = TokenKind::Control;
                }
            }
            Ending::IfControl if kind == TokenKind::Control => ends.push(id as u32),
            _ => {}
        }
        vocab.push(kind, |arena| match (kind, text, model) {
            (TokenKind::Byte, Some(text), _) => match byte_of(text) {
                Some(byte) => arena.push(byte),
                None => arena.extend_from_slice(token),
            },
            (TokenKind::Normal, Some(text), Model::SentencePiece) => {
                let mut parts = text.split(SPACE_MARK);
                arena.extend_from_slice(parts.next().unwrap_or_default().as_bytes());
                for part in parts {
                    arena.push(b' ');
                    arena.extend_from_slice(part.as_bytes());
                }
            }
            (TokenKind::Normal, Some(text), Model::ByteLevel) => {
                if !decode_byte_level(text, arena) {
                    arena.extend_from_slice(token);
                }
            }
            _ => arena.extend_from_slice(token),
        });
    }
    if !renamed.is_empty() {
        let names = renamed.join("`, `");
        warnings.push(format!(
            "`{names}` end a generation by their names, but are not marked as control tokens; they are taken as such"
        ));
    }
    vocab.build_index(matches!(model, Model::ByteLevel));
    Ok((vocab, ends))
}

/// `<0x0A>` is the byte 10.
fn byte_of(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

/// In the formats of gpt-oss and Solar Open, `<|end|>` closes a message and not a turn: there, `<|return|>` or
/// `<|flush|>` stand beside `<|call|>` or `<|calls|>`. In Gemma 4, `</s>` is HTML.
fn drop_turn_internal_ends(vocab: &Vocab, ends: &mut Vec<u32>) {
    let has = |name: &str| ends.iter().any(|&id| vocab.piece(id) == name.as_bytes());
    let calls = has("<|call|>") || has("<|calls|>");
    let message_end = calls && (has("<|return|>") || has("<|flush|>"));
    let html = has("<|tool_response>");
    ends.retain(|&id| {
        let piece = vocab.piece(id);
        !(message_end && piece == b"<|end|>" || html && piece == b"</s>")
    });
}

/// Phi 3's special tokens take the white space behind them along.
fn swallowing(metadata: &Metadata, vocab: &Vocab, special: &[u32]) -> Result<Vec<u32>, TokenizerError> {
    let name = metadata.opt_str("general.name")?.unwrap_or_default().to_lowercase();
    if !name.contains("phi-3") && !name.contains("phi3") {
        return Ok(Vec::new());
    }
    let exempt: [&[u8]; 3] = [b"<unk>", b"<s>", b"<|endoftext|>"];
    Ok(special.iter().copied().filter(|&id| !exempt.contains(&vocab.piece(id))).collect())
}

/// Also returns whether BOS is added by default.
fn byte_level(
    metadata: &Metadata,
    vocab: &Vocab,
    warnings: &mut Vec<String>,
) -> Result<(Algorithm, bool), TokenizerError> {
    let named = metadata.opt_str(PRE)?;
    let found = named.and_then(|name| Some((name, pre::find(name)?)));
    let (name, pre) = match found {
        Some((name, pre)) => (name, pre),
        None => {
            let what = named.map_or_else(
                || "no pre-tokenizer is named".into(),
                |name| format!("pre-tokenizer `{name}` is not known"),
            );
            warnings
                .push(format!("{what} (`{PRE}`): using `{}`; token ids may differ from the model's own", pre::DEFAULT));
            (pre::DEFAULT, &pre::TABLE[0])
        }
    };
    let name = pre.name(name);
    let merges = metadata.opt_strs(MERGES)?.ok_or(TokenizerError::Missing { key: MERGES })?;
    let (bpe, unreadable) = Bpe::new(vocab, merges.iter().map(|line| std::str::from_utf8(line).unwrap_or_default()));
    if unreadable > 0 {
        warnings.push(format!("{unreadable} of {} lines of `{MERGES}` cannot be read; they are skipped", merges.len()));
    }
    let missing: Vec<String> = bpe.missing_bytes().map(|byte| format!("{byte:#04x}")).collect();
    if !missing.is_empty() {
        warnings.push(format!("no token spells the bytes {}: characters that need them lose them", missing.join(" ")));
    }
    let algorithm = Algorithm::ByteLevel {
        splitter: Splitter::new(pre),
        bpe: Box::new(bpe),
        ignore_merges: pre.ignore_merges,
        pre: name,
    };
    Ok((algorithm, pre.add_bos))
}

fn sentence_piece(
    metadata: &Metadata,
    vocab: &Vocab,
    unknown: Option<u32>,
    warnings: &mut Vec<String>,
) -> Result<Algorithm, TokenizerError> {
    let scores = metadata.opt_f32s(SCORES)?.ok_or(TokenizerError::Missing { key: SCORES })?;
    if scores.len() < vocab.len() {
        return Err(TokenizerError::Length { key: SCORES, expected: vocab.len(), found: scores.len() });
    }
    let mut byte_token = [None; 256];
    for id in (0..vocab.len() as u32).rev() {
        if let (TokenKind::Byte, [byte]) = (vocab.kind(id), vocab.piece(id)) {
            byte_token[usize::from(*byte)] = Some(id);
        }
    }
    let missing = byte_token.iter().filter(|token| token.is_none()).count();
    if missing > 0 {
        let fate = if unknown.is_some() { "become the unknown token" } else { "are dropped" };
        warnings.push(format!("{missing} of 256 byte tokens are missing: characters that need them {fate}"));
    }
    Ok(Algorithm::SentencePiece {
        spm: Box::new(Spm { scores, byte_token, unknown }),
        add_space_prefix: metadata.opt_bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true),
        remove_extra_whitespaces: metadata.opt_bool("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(false),
    })
}
