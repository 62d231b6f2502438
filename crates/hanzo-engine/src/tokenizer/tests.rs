use std::time::{Duration, Instant};

use hanzo_gguf::{Array, Metadata, Value};

use super::pre::BYTE_TO_CHAR;
use super::*;
use crate::sample::Rng;

fn set(metadata: &mut Metadata, key: &str, value: impl Into<Value>) {
    metadata.set(format!("tokenizer.ggml.{key}"), value.into());
}

fn tokens(metadata: &mut Metadata, tokens: &[(&str, i32)]) {
    set(metadata, "tokens", Value::Array(Array::strings(tokens.iter().map(|(text, _)| *text))));
    set(metadata, "token_type", Value::Array(Array::from(tokens.iter().map(|(_, kind)| *kind).collect::<Vec<i32>>())));
}

/// All bytes, some merges, and `extra` tokens behind them (256 + 8 is the first).
fn byte_level(pre: &str, extra: &[(&str, i32)]) -> Metadata {
    let bytes: Vec<String> = BYTE_TO_CHAR.iter().map(char::to_string).collect();
    let merges = ["h e", "l l", "Ġ Ġ", "Ġ he", "he ll", "hell o", "a a", "aa aa"];
    let merged: Vec<String> = merges.iter().map(|merge| merge.replacen(' ', "", 1)).collect();
    let mut all: Vec<(&str, i32)> = bytes.iter().chain(&merged).map(|text| (text.as_str(), 1)).collect();
    all.extend(extra);
    let mut metadata = Metadata::new();
    set(&mut metadata, "model", "gpt2");
    set(&mut metadata, "pre", pre);
    tokens(&mut metadata, &all);
    set(&mut metadata, "merges", Value::Array(Array::strings(merges)));
    metadata
}

const EXTRA: u32 = 256 + 8;

/// `<unk>`, `<s>`, `</s>`, the bytes, and a few words.
fn sentence_piece(extra: &[(&str, i32, f32)]) -> Metadata {
    let bytes: Vec<String> = (0..256).map(|byte| format!("<0x{byte:02X}>")).collect();
    let mut all = vec![("<unk>", 2, 0.0), ("<s>", 3, 0.0), ("</s>", 3, 0.0)];
    all.extend(bytes.iter().map(|byte| (byte.as_str(), 6, 0.0)));
    let words = [("▁", -5.0), ("a", -6.0), ("b", -7.0), ("ab", -1.0), ("▁ab", -2.0), ("▁▁", -3.0)];
    all.extend(words.map(|(word, score)| (word, 1, score)));
    all.extend(extra);
    let mut metadata = Metadata::new();
    set(&mut metadata, "model", "llama");
    tokens(&mut metadata, &all.iter().map(|&(text, kind, _)| (text, kind)).collect::<Vec<_>>());
    let scores: Vec<f32> = all.iter().map(|&(_, _, score)| score).collect();
    set(&mut metadata, "scores", Value::Array(Array::from(scores)));
    metadata
}

/// Ids in [`sentence_piece`].
const SPACE: u32 = 259;
const A: u32 = 260;
const B: u32 = 261;
const AB: u32 = 262;
const SPACE_AB: u32 = 263;
const SPACES: u32 = 264;

fn tokenizer(metadata: &Metadata) -> Tokenizer {
    Tokenizer::from_gguf(metadata).expect("a tokenizer")
}

fn plain(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, AddSpecial::Never, ParseSpecial::No)
}

#[test]
fn any_text_comes_back_from_a_byte_level_vocabulary() {
    let mut rng = Rng::new(4);
    for pre in Tokenizer::pre_tokenizers() {
        let tokenizer = tokenizer(&byte_level(pre, &[]));
        let expected = |warning: &String| warning.contains("end-of-generation") || warning.contains("BOS");
        assert!(tokenizer.warnings().iter().all(expected), "{:?}", tokenizer.warnings());
        for _ in 0..40 {
            let char = |rng: &mut Rng| match rng.next_u64() % 4 {
                0 => char::from((rng.next_u64() % 128) as u8),
                1 => b"hel o'\n\r\t12"[(rng.next_u64() % 11) as usize].into(),
                2 => char::from_u32((rng.next_u64() % 0x3000) as u32).unwrap_or('?'),
                _ => char::from_u32((rng.next_u64() % 0x11_0000) as u32).unwrap_or(' '),
            };
            let text: String = (0..rng.next_u64() % 80).map(|_| char(&mut rng)).collect();
            let ids = plain(&tokenizer, &text);
            assert_eq!(tokenizer.decode(&ids, false), text, "{pre}");
        }
    }
}

#[test]
fn a_line_of_a_megabyte_is_encoded_in_about_no_time() {
    let byte_level = tokenizer(&byte_level("qwen2", &[]));
    let sentence_piece = tokenizer(&sentence_piece(&[]));
    for text in ["a".repeat(1 << 20), " ".repeat(1 << 20), format!("{}x", "\n".repeat(1 << 20))] {
        for tokenizer in [&byte_level, &sentence_piece] {
            let start = Instant::now();
            let ids = plain(tokenizer, &text);
            assert!(!ids.is_empty());
            // A quadratic loop takes many minutes; the limit leaves room for a busy machine.
            assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
        }
    }
}

#[test]
fn control_tokens_are_parsed_on_request_only() {
    let extra = [("<|im_start|>", 3), ("<|im_end|>", 3), ("<tool>", 4)];
    let tokenizer = tokenizer(&byte_level("gpt-2", &extra));
    let text = "<|im_start|>hello<tool><|im_end|>";
    let parsed = tokenizer.encode(text, AddSpecial::Never, ParseSpecial::Yes);
    assert_eq!(parsed, [EXTRA, EXTRA - 3, EXTRA + 2, EXTRA + 1]);
    let plain = plain(&tokenizer, text);
    assert!(!plain.contains(&EXTRA) && !plain.contains(&(EXTRA + 1)));
    assert!(plain.contains(&(EXTRA + 2)), "user-defined tokens are always found");
    assert_eq!(tokenizer.decode(&plain, false), text);
    assert_eq!(tokenizer.decode(&parsed, false), "hello<tool>");
    assert_eq!(tokenizer.decode(&parsed, true), text);
    assert_eq!(tokenizer.special_id("<|im_end|>"), Some(EXTRA + 1));
    assert_eq!(tokenizer.piece(EXTRA + 1), b"<|im_end|>");
    assert_eq!(tokenizer.kind(EXTRA + 2), TokenKind::UserDefined);
}

#[test]
fn bos_and_eos_follow_the_metadata_and_the_callers_wish() {
    let mut metadata = byte_level("gpt-2", &[("<s>", 3), ("</s>", 3)]);
    set(&mut metadata, "bos_token_id", EXTRA);
    set(&mut metadata, "eos_token_id", EXTRA + 1);
    let a = plain(&tokenizer(&metadata), "a");
    assert_eq!(tokenizer(&metadata).encode("a", AddSpecial::Always, ParseSpecial::Yes), a, "neither by default");
    set(&mut metadata, "add_bos_token", true);
    set(&mut metadata, "add_eos_token", true);
    let tokenizer = tokenizer(&metadata);
    let encode = |text, add| tokenizer.encode(text, add, ParseSpecial::Yes);
    assert_eq!(encode("a", AddSpecial::Never), a);
    assert_eq!(encode("a", AddSpecial::Always), [EXTRA, a[0], EXTRA + 1]);
    assert_eq!(encode("<s>a", AddSpecial::Always), [EXTRA, EXTRA, a[0], EXTRA + 1]);
    assert_eq!(encode("<s>a</s>", AddSpecial::IfMissing), [EXTRA, a[0], EXTRA + 1]);
    assert_eq!(encode("a", AddSpecial::IfMissing), [EXTRA, a[0], EXTRA + 1]);
    assert_eq!(encode("", AddSpecial::Always), [EXTRA, EXTRA + 1]);
    assert!(tokenizer.adds_bos() && tokenizer.adds_eos());
}

#[test]
fn every_end_of_generation_is_known_by_key_or_name() {
    let extra = [("<|im_end|>", 3), ("</s>", 1), ("<x>", 3), ("<y>", 3), ("<|eot_id|>", 1)];
    let mut metadata = byte_level("llama-bpe", &extra);
    set(&mut metadata, "eos_token_id", EXTRA + 2);
    set(&mut metadata, "eot_token_id", EXTRA + 3);
    set(&mut metadata, "eom_token_id", 99_999_u32);
    let tokenizer = tokenizer(&metadata);
    assert_eq!(tokenizer.eog(), [EXTRA, EXTRA + 2, EXTRA + 3, EXTRA + 4], "`</s>` is text here");
    assert!(tokenizer.is_eog(EXTRA) && !tokenizer.is_eog(EXTRA + 1) && !tokenizer.is_eog(u32::MAX));
    let all = tokenizer.warnings().join("\n");
    assert!(all.contains("`tokenizer.ggml.eom_token_id` = 99999 is ignored"), "{all}");
    assert!(all.contains("`<|eot_id|>`"), "{all}");
    assert!(all.contains("BOS"), "llama-bpe wants one: {all}");
}

#[test]
fn in_formats_with_calls_the_end_of_a_message_is_no_end() {
    let tokenizer = tokenizer(&byte_level("gpt-4o", &[("<|end|>", 3), ("<|return|>", 3), ("<|call|>", 3)]));
    assert_eq!(tokenizer.eog(), [EXTRA + 1, EXTRA + 2]);
}

#[test]
fn an_unknown_pre_tokenizer_is_named_and_the_default_used() {
    let tokenizer = tokenizer(&byte_level("frobnicate", &[("<|im_end|>", 3)]));
    assert_eq!(tokenizer.pre_tokenizer(), Some("default"));
    assert_eq!(tokenizer.warnings().len(), 1);
    assert!(tokenizer.warnings()[0].contains("`frobnicate`"), "{:?}", tokenizer.warnings());
}

#[test]
fn what_is_not_supported_says_what_is() {
    let mut metadata = byte_level("gpt-2", &[]);
    set(&mut metadata, "model", "t5");
    let error = Tokenizer::from_gguf(&metadata).expect_err("not supported").to_string();
    assert!(error.contains("`t5` (SentencePiece unigram, ugm)") && error.contains("`gpt2`"), "{error}");
    let error = Tokenizer::from_gguf(&Metadata::new()).expect_err("empty").to_string();
    assert!(error.contains("`tokenizer.ggml.model`"), "{error}");
    let mut metadata = sentence_piece(&[]);
    set(&mut metadata, "scores", Value::Array(Array::from(vec![0.0_f32])));
    let error = Tokenizer::from_gguf(&metadata).expect_err("too short").to_string();
    assert!(error.contains("`tokenizer.ggml.scores` has 1 entries"), "{error}");
    let mut metadata = byte_level("gpt-2", &[]);
    set(&mut metadata, "token_type", "x");
    assert!(matches!(Tokenizer::from_gguf(&metadata), Err(TokenizerError::Metadata(_))));
}

#[test]
fn a_space_is_put_in_front_and_taken_away_again() {
    let mut metadata = sentence_piece(&[]);
    let prefixing = tokenizer(&metadata);
    assert_eq!(plain(&prefixing, "ab"), [SPACE_AB]);
    assert_eq!(plain(&prefixing, " ab"), [SPACE, SPACE_AB], "ab, then ▁ab, which leaves one space");
    assert!(plain(&prefixing, "").is_empty());
    let ids = prefixing.encode("ab</s>ab b", AddSpecial::Always, ParseSpecial::Yes);
    assert_eq!(ids, [1, SPACE_AB, 2, SPACE_AB, SPACE, B]);
    assert_eq!(prefixing.decode(&ids, true), "<s>ab</s>ab b");
    assert_eq!(Detokenizer::new(false).push(&prefixing, SPACE_AB), " ab", "a stream continues a text");
    set(&mut metadata, "add_space_prefix", false);
    let bare = tokenizer(&metadata);
    assert_eq!(plain(&bare, "ab"), [AB]);
    assert_eq!(plain(&bare, "  a"), [SPACES, A]);
    assert_eq!(bare.decode(&[SPACE_AB], false), " ab");
    set(&mut metadata, "remove_extra_whitespaces", true);
    assert_eq!(plain(&tokenizer(&metadata), "  ab   b "), [AB, SPACE, B]);
}

#[test]
fn characters_outside_the_vocabulary_become_bytes_and_come_back() {
    let tokenizer = tokenizer(&sentence_piece(&[]));
    let ids = plain(&tokenizer, "é\n");
    assert_eq!(ids, [SPACE, 3 + 0xC3, 3 + 0xA9, 3 + 0x0A]);
    assert_eq!(tokenizer.decode(&ids, false), "é\n");
    assert_eq!(tokenizer.piece(3 + 0xC3), [0xC3]);
    let mut stream = Detokenizer::new(false);
    assert_eq!(stream.push(&tokenizer, 3 + 0xC3), "");
    assert_eq!(stream.push(&tokenizer, 3 + 0xA9), "é");
    assert_eq!(stream.push(&tokenizer, 3 + 0xC3), "");
    assert_eq!(stream.flush(), "\u{FFFD}");
}

#[test]
fn text_cannot_spell_a_byte_or_control_token() {
    let tokenizer = tokenizer(&sentence_piece(&[("<0x", 1, -1.0), ("<0x0A", 1, -1.0), ("<", 1, -9.0), ("0", 1, -9.0)]));
    for text in ["<0x0A>", "<s>", "<unk>"] {
        let ids = plain(&tokenizer, text);
        assert!(!ids.contains(&(3 + 0x0A)) && !ids.contains(&1) && !ids.contains(&0), "{ids:?}");
        assert_eq!(tokenizer.decode(&ids, false), text);
    }
}

#[test]
fn a_word_that_is_a_token_may_skip_its_merges() {
    let hello = [("helloo", 1), ("<|im_end|>", 3)];
    assert_eq!(plain(&tokenizer(&byte_level("llama-bpe", &hello)), "helloo"), [EXTRA]);
    assert_eq!(plain(&tokenizer(&byte_level("gpt-2", &hello)), "helloo").len(), 2);
}

#[test]
fn phi_3_marks_take_the_white_space_behind_them_along() {
    let mut metadata = byte_level("gpt-2", &[("<|end|>", 3)]);
    let text = "<|end|>\n a";
    assert_eq!(tokenizer(&metadata).encode(text, AddSpecial::Never, ParseSpecial::Yes).len(), 4);
    metadata.set("general.name", "Phi-3 mini");
    assert_eq!(tokenizer(&metadata).encode(text, AddSpecial::Never, ParseSpecial::Yes).len(), 2);
}
