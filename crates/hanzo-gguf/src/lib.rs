//! GGUF: the container (memory-mapped reader, split files, streaming writer) and its block formats.
#![deny(missing_docs)]

mod format;
pub mod formats;

pub use format::Format;
