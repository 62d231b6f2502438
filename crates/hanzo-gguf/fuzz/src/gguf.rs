//! Any bytes: either a typed error, or a model that can be used in full, written, and read back the same.
#![no_main]

#[allow(dead_code)] // the seed files are for the other binary
#[path = "../../tests/exercise/mod.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    match hanzo_gguf::Gguf::from_bytes(bytes.to_vec()) {
        Ok(gguf) => exercise::exercise(&gguf),
        Err(error) => assert!(error.to_string().len() < 1000),
    }
});
