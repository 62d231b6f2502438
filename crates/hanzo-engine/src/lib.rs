//! The engine: an architecture becomes a Plan, a prompt becomes tokens, tokens become text.
#![deny(missing_docs)]

pub mod arch;
pub mod chat;
pub mod error;
pub mod sample;
pub mod tokenizer;

pub use error::{Error, Result};
