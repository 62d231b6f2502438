//! The engine: an architecture becomes a Plan, a prompt becomes tokens, tokens become text.
#![deny(missing_docs)]

pub mod arch;
pub mod chat;
pub mod context;
pub mod error;
pub mod generate;
pub mod kv;
pub mod logits;
pub mod model;
pub mod sample;
pub mod scheduler;
pub mod tokenizer;

pub use error::{Error, Result};
