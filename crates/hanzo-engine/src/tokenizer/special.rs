//! Special tokens: which ids end a generation, and where marks and user-defined tokens stand in a text.
//!
//! GGUF files name a few ids (`eos_token_id`, `eot_token_id`, ...); the other ends of generation are known by their text
//! only, so the list of well-known names lives here and nowhere else.

use aho_corasick::{AhoCorasick, MatchKind};

use super::TokenizerError;
use super::vocab::Vocab;

/// Texts that end a turn or a document, whatever the metadata says.
const END_OF_GENERATION: &[&str] = &[
    "<|eot_id|>",            // Llama 3
    "<|eom_id|>",            // Llama 3, before a tool's answer
    "<|im_end|>",            // ChatML
    "<|end|>",               // Phi 3
    "<|return|>",            // gpt-oss
    "<|call|>",              // gpt-oss
    "<|calls|>",             // Solar Open
    "<|flush|>",             // Solar Open
    "<end_of_turn>",         // Gemma
    "<turn|>",               // Gemma 4
    "<|tool_response>",      // Gemma 4
    "<eos>",                 // Gemma
    "<|endoftext|>",         // GPT-2, Qwen, Phi
    "<|end_of_text|>",       // Llama 3, Granite
    "<EOT>",                 // Refact
    "_<EOT>",                // CodeLlama
    "[EOT]",                 // Kimi
    "[EOS]",                 // Kimi
    "<end_of_utterance>",    // SmolVLM
    "<｜end▁of▁sentence｜>", // DeepSeek
    "[e~[",                  // MiniMax
    "<|ifm|im_end|>",        // K2
    "<|fim_pad|>",           // Qwen Coder: padding, the next repository, the next file
    "<fim-pad>",
    "<fim_pad>",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// The strike-through end tag of HTML is a token of several vocabularies, so `</s>` counts only as a control token.
const END_OF_SENTENCE: &str = "</s>";

/// How a token's text bears on the end of a generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ending {
    /// Not at all.
    No,
    /// It ends the generation.
    Always,
    /// It does if it is a control token.
    IfControl,
}

/// Looks `text` up among the well-known names.
pub(super) fn ending(text: &str) -> Ending {
    // Most of a vocabulary is ruled out by the first byte.
    if !matches!(text.as_bytes().first(), Some(b'<' | b'[' | b'_')) {
        Ending::No
    } else if text == END_OF_SENTENCE {
        Ending::IfControl
    } else if END_OF_GENERATION.contains(&text) {
        Ending::Always
    } else {
        Ending::No
    }
}

/// A stretch of text, or a token found in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fragment<'t> {
    /// To be encoded.
    Text(&'t str),
    /// Found.
    Token(u32),
}

/// Finds tokens in a text: from the left, the longest of those that start at the same place.
pub(super) struct Finder {
    automaton: Option<AhoCorasick>,
    /// The id of each pattern.
    ids: Vec<u32>,
}

impl Finder {
    /// A finder of `ids`; tokens without bytes are left out.
    ///
    /// # Errors
    /// If the tokens are too many or too long for an automaton.
    pub(super) fn new(vocab: &Vocab, ids: impl Iterator<Item = u32>) -> Result<Finder, TokenizerError> {
        let ids: Vec<u32> =
            ids.filter(|&id| std::str::from_utf8(vocab.piece(id)).is_ok_and(|piece| !piece.is_empty())).collect();
        if ids.is_empty() {
            return Ok(Finder { automaton: None, ids });
        }
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(ids.iter().map(|&id| vocab.piece(id)))
            .map_err(|error| TokenizerError::SpecialTokens(error.to_string()))?;
        Ok(Finder { automaton: Some(automaton), ids })
    }

    /// Cuts `text`. With `swallow(id)`, ASCII white space behind that token is dropped.
    pub(super) fn cut<'t>(&self, text: &'t str, swallow: impl Fn(u32) -> bool, mut each: impl FnMut(Fragment<'t>)) {
        let mut rest = text;
        while let Some(found) = self.automaton.as_ref().and_then(|automaton| automaton.find(rest)) {
            let id = self.ids[found.pattern().as_usize()];
            if found.start() > 0 {
                each(Fragment::Text(&rest[..found.start()]));
            }
            each(Fragment::Token(id));
            rest = &rest[found.end()..];
            if swallow(id) {
                rest = rest.trim_start_matches(|char: char| char.is_ascii_whitespace() || char == '\x0B');
            }
        }
        if !rest.is_empty() {
            each(Fragment::Text(rest));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::vocab::TokenKind;

    #[test]
    fn the_longest_token_at_the_leftmost_place_wins() {
        let mut vocab = Vocab::default();
        for text in ["<a>", "\n", "\n\n", "\n\n\n"] {
            vocab.push(TokenKind::UserDefined, |arena| arena.extend_from_slice(text.as_bytes()));
        }
        let finder = Finder::new(&vocab, 0..4).expect("builds");
        let mut found = Vec::new();
        finder.cut("x\n\n\n\n\n<a>  y", |id| id == 0, |fragment| found.push(fragment));
        use Fragment::{Text, Token};
        assert_eq!(found, [Text("x"), Token(3), Token(2), Token(0), Text("y")]);
    }

    #[test]
    fn names_end_a_generation_and_html_does_not() {
        assert_eq!(ending("<|im_end|>"), Ending::Always);
        assert_eq!(ending("</s>"), Ending::IfControl);
        assert_eq!(ending("<h1>"), Ending::No);
        assert_eq!(ending(""), Ending::No);
    }
}
