//! GGUF: the container (memory-mapped reader, split files, streaming writer) and its block formats.
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
