//! GGUF: the container (memory-mapped reader, split files, streaming writer) and its block formats.
//!
//! * Reading: [`Gguf::open`] maps a model and checks its whole header; [`Gguf::metadata`] has typed getters,
//!   [`Gguf::data`] and [`Gguf::bytes`] give tensor data without a copy.
//! * Writing: [`GgufWriter`] takes metadata, then declarations, then data, tensor by tensor; a file lands whole or not
//!   at all ([`Landing`]).
//! * Formats: [`Format`] is the table, [`formats`] turns blocks into floats and back.
//!
//! ```no_run
//! use hanzo_gguf::{Gguf, formats};
//! let gguf = Gguf::open("model.gguf")?;
//! println!("{} layers", gguf.metadata().u32("llama.block_count")?);
//! let tensor = gguf.need_tensor("blk.0.attn_q.weight")?;
//! let mut floats = vec![0.0; tensor.elements() as usize]; // [rows, row_len]
//! formats::to_float(tensor.format, gguf.data(tensor), &mut floats);
//! # Ok::<(), hanzo_gguf::GgufError>(())
//! ```
//!
//! A file is never trusted: whatever its bytes, reading it gives a typed error ([`GgufError`]) or a model all of whose
//! data lies inside the file, and takes memory in proportion to the file's size, not to what it claims.
#![deny(missing_docs)]

mod array;
mod bytes;
mod cursor;
mod error;
mod format;
pub mod formats;
mod gguf;
mod landing;
mod metadata;
mod split;
mod value;
mod writer;

pub use array::{Array, MAX_ARRAY_DEPTH, Strings};
pub use bytes::TensorBytes;
pub use error::{ErrorKind, GgufError};
pub use format::Format;
pub use gguf::{DEFAULT_ALIGNMENT, Gguf, MAX_ALIGNMENT, MAX_DIMS, MAX_NAME_LEN, MIN_ALIGNMENT, TensorInfo};
pub use landing::Landing;
pub use metadata::Metadata;
pub use value::{Value, ValueType};
pub use writer::{GgufWriter, MAX_TENSOR_NAME_LEN, TensorWriter};
