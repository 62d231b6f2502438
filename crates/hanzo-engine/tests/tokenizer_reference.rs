//! Token ids equal the reference, for three real models.
//!
//! `data/tokenizer-*.json` hold what these texts can touch of each model's vocabulary: every token and every merge that
//! is a part of some text (dropping the others cannot change a result), each token with the id it has in the model. The
//! ids are those of `llama-tokenize`. With `HANZO_TEST_MODELS` set to a folder of GGUF files, the whole vocabularies are
//! checked too.

use std::path::Path;

use hanzo_engine::tokenizer::{AddSpecial, Detokenizer, ParseSpecial, Tokenizer};
use hanzo_gguf::{Array, Gguf, Metadata, Value};
use serde_json::Value as Json;

const MODELS: [&str; 3] = ["smollm2", "gemma3-270m", "qwen2.5-coder-1.5b"];

struct Trimmed {
    tokenizer: Tokenizer,
    /// The model's id of each id here.
    original: Vec<u32>,
    cases: Vec<(String, Vec<u32>)>,
}

fn cases(json: &Json) -> Vec<(String, Vec<u32>)> {
    let ids = |json: &Json| -> Vec<u32> { serde_json::from_value(json.clone()).expect("ids") };
    let case = |case: &Json| (case["text"].as_str().expect("text").to_owned(), ids(&case["ids"]));
    json.as_array().expect("cases").iter().map(case).collect()
}

fn trimmed(model: &str) -> Trimmed {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/tokenizer-{model}.json"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let json: Json = serde_json::from_str(&text).expect("JSON");
    let tokens = json["tokens"].as_array().expect("tokens");
    let original: Vec<u32> = tokens.iter().map(|token| token[0].as_u64().expect("id") as u32).collect();
    let texts = |json: &Json| -> Vec<String> { serde_json::from_value(json.clone()).expect("strings") };

    let mut metadata = Metadata::new();
    let mut set = |key: &str, value: Value| metadata.set(format!("tokenizer.ggml.{key}"), value);
    for key in ["model", "pre"] {
        set(key, Value::String(json[key].as_str().expect("a string").to_owned()));
    }
    let names = tokens.iter().map(|token| token[2].as_str().expect("text"));
    set("tokens", Value::Array(Array::strings(names)));
    let kinds: Vec<i32> = tokens.iter().map(|token| token[1].as_i64().expect("type") as i32).collect();
    set("token_type", Value::Array(Array::from(kinds)));
    if json["model"] == "gpt2" {
        set("merges", Value::Array(Array::strings(texts(&json["merges"]))));
    } else {
        let scores: Vec<f32> = tokens.iter().map(|token| token[3].as_f64().expect("score") as f32).collect();
        set("scores", Value::Array(Array::from(scores)));
    }
    for key in ["bos", "eos", "unknown"] {
        if let Some(id) = json[key].as_u64() {
            let here = original.iter().position(|&original| u64::from(original) == id).expect("kept");
            set(&format!("{key}_token_id"), Value::U32(here as u32));
        }
    }
    for (key, name) in [("add_bos", "add_bos_token"), ("add_space_prefix", "add_space_prefix")] {
        if let Some(flag) = json[key].as_bool() {
            set(name, Value::Bool(flag));
        }
    }
    let tokenizer = Tokenizer::from_gguf(&metadata).expect("a tokenizer");
    Trimmed { tokenizer, original, cases: cases(&json["cases"]) }
}

#[test]
fn ids_equal_the_reference() {
    for model in MODELS {
        let Trimmed { tokenizer, original, cases } = trimmed(model);
        assert!(cases.len() > 20);
        for (text, expected) in cases {
            let ids = tokenizer.encode(&text, AddSpecial::Always, ParseSpecial::Yes);
            let ids: Vec<u32> = ids.iter().map(|&id| original[id as usize]).collect();
            assert_eq!(ids, expected, "{model}: {text:?}");
        }
    }
}

#[test]
fn texts_come_back_whole_and_piece_by_piece() {
    for model in MODELS {
        let Trimmed { tokenizer, cases, .. } = trimmed(model);
        for (text, _) in cases {
            let ids = tokenizer.encode(&text, AddSpecial::Never, ParseSpecial::Yes);
            // SmolLM2's vocabulary lacks a few bytes, and U+2581 is a space to SentencePiece.
            let lossy = match model {
                "smollm2" => text.chars().any(|char| char as u32 > 0x3_0000 || char.is_control()),
                "gemma3-270m" => text.contains('\u{2581}'),
                _ => false,
            };
            if !lossy {
                assert_eq!(tokenizer.decode(&ids, true), text, "{model}");
            }
            let mut stream = Detokenizer::new(true);
            let mut pieces = String::new();
            for &id in &ids {
                pieces.push_str(stream.push(&tokenizer, id));
            }
            pieces.push_str(stream.flush());
            assert_eq!(pieces, tokenizer.decode(&ids, true), "{model}");
        }
    }
}

#[test]
fn whole_vocabularies_equal_the_reference_where_models_are_given() {
    let Ok(folder) = std::env::var("HANZO_TEST_MODELS") else { return };
    let files = ["smollm2.gguf", "gemma3-270m.gguf", "qwen1.5b.gguf"];
    for (model, file) in MODELS.into_iter().zip(files) {
        let gguf = Gguf::open(Path::new(&folder).join(file)).expect("a model");
        let tokenizer = Tokenizer::from_gguf(gguf.metadata()).expect("a tokenizer");
        for (text, expected) in trimmed(model).cases {
            let ids = tokenizer.encode(&text, AddSpecial::Always, ParseSpecial::Yes);
            assert_eq!(ids, expected, "{model}: {text:?}");
        }
    }
}
