//! The assembler: parses the headers of `ops/*.kc` and `formats/*.kc` and prints a kernel's whole text for a target.
//!
//! Pure text to text, used by `build.rs` and by the library alike. What a kernel computes may not enter here.

mod header;
mod part;
mod print;

pub use header::{Arg, ArgKind, Class, FormatFile, Formats, HeaderError, OpFile, Shared};
pub use part::expand;
pub use print::{Target, constants, print};

/// Name of a kernel: `op` or `op.format`.
pub fn key(op: &OpFile, format: Option<&FormatFile>) -> String {
    match format {
        Some(f) => format!("{}.{}", op.name, f.name.to_ascii_lowercase()),
        None => op.name.clone(),
    }
}

impl OpFile {
    /// Is the op built with this format?
    pub fn takes(&self, format: &FormatFile) -> bool {
        match self.formats {
            Formats::None => false,
            Formats::Block => format.class == Class::Block,
            Formats::Float => format.class == Class::Float,
            Formats::All => true,
        }
    }

    /// Bytes of the argument struct, and the offset of each argument in it.
    pub fn layout(&self) -> (usize, Vec<usize>) {
        let mut at = 0usize;
        let mut offsets = Vec::new();
        for a in &self.args {
            let (size, align) = a.kind.size();
            at = at.next_multiple_of(align);
            offsets.push(at);
            at += size;
        }
        (at.next_multiple_of(8), offsets)
    }
}
