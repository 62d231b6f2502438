//! The container's errors: what is wrong, in which file and field, at which byte, and what to do about it.
//! Only reading and writing GGUF files and their metadata; the block formats' errors live with the formats.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{Format, ValueType};

/// Why a GGUF file could not be read or written: the file, and an [`ErrorKind`] naming field and remedy.
///
/// ```
/// let error = hanzo_gguf::Gguf::from_bytes(b"GGUF\x03\0\0\0".to_vec()).unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "<memory>: tensor_count at byte 8 needs 8 bytes, but only 0 remain: the file is cut short or damaged; fetch it again"
/// );
/// ```
#[derive(Clone)]
pub struct GgufError {
    file: Arc<Path>,
    // Boxed: a Result stays small on paths that succeed.
    kind: Box<ErrorKind>,
}

impl GgufError {
    pub(crate) fn new(file: &Arc<Path>, kind: ErrorKind) -> Self {
        GgufError { file: file.clone(), kind: Box::new(kind) }
    }

    /// The file concerned; `<memory>` for [`Gguf::from_bytes`](crate::Gguf::from_bytes).
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// What is wrong, to match on.
    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }
}

impl fmt::Display for GgufError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.file.display(), self.kind)
    }
}

impl fmt::Debug for GgufError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GgufError").field("file", &self.file).field("kind", &self.kind).finish()
    }
}

impl std::error::Error for GgufError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&*self.kind)
    }
}

/// A name from a file, printed quoted, escaped (a hostile file must not drive the terminal) and at most 96 characters.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MAX: usize = 96;
        match self.0.char_indices().nth(MAX) {
            None => write!(f, "{:?}", self.0),
            Some((cut, _)) => write!(f, "{:?}... ({} bytes)", &self.0[..cut], self.0.len()),
        }
    }
}

/// Shorthand for the error texts below and for the reader's field names.
pub(crate) fn quoted(name: &str) -> impl fmt::Display + '_ {
    Quoted(name)
}

/// What is wrong with a GGUF file or with a request to it.
///
/// `field` says which field in words, `at` is its byte offset in the file (of the part, for a split file).
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    // ---- the file as such ----
    /// The operating system refused.
    #[error("cannot {action}: {source}")]
    Io {
        /// What was attempted, e.g. `open the file`.
        action: &'static str,
        /// The system's answer.
        source: Arc<std::io::Error>,
    },
    /// A directory, pipe or device.
    #[error("is {what}, not a file; give the path of a .gguf file")]
    NotAFile {
        /// What the path is.
        what: &'static str,
    },
    /// Zero bytes long.
    #[error("the file is empty; fetch it again")]
    Empty,
    /// The first four bytes are not `GGUF`.
    #[error("is not a GGUF file: it starts with \"{}\", not \"GGUF\"{hint}", found.escape_ascii())]
    Magic {
        /// The first bytes (up to four).
        found: Vec<u8>,
        /// What the file looks like instead, with a remedy; may be empty.
        hint: &'static str,
    },
    /// The version's bytes are in big-endian order.
    #[error(
        "is a big-endian GGUF (version {version}); only little-endian files are supported: convert it, or fetch the little-endian file"
    )]
    BigEndian {
        /// The version, read in the file's byte order.
        version: u32,
    },
    /// A version other than 2 and 3.
    #[error("has GGUF version {version} at byte 4; versions 2 and 3 are supported: convert the model again")]
    Version {
        /// The version in the file.
        version: u32,
    },

    // ---- any field ----
    /// A field reaches past the file's end.
    #[error(
        "{field} at byte {at} needs {needs} bytes, but only {has} remain: the file is cut short or damaged; fetch it again"
    )]
    Truncated {
        /// The field.
        field: String,
        /// Its byte offset.
        at: u64,
        /// Bytes it needs at least.
        needs: u64,
        /// Bytes left in the file.
        has: u64,
    },
    /// A count that the rest of the file cannot hold.
    #[error(
        "{field} at byte {at} is {count}, at {each} bytes or more each, but only {has} bytes remain: the file is cut short or damaged; fetch it again"
    )]
    Count {
        /// The field.
        field: String,
        /// Its byte offset.
        at: u64,
        /// The claimed count.
        count: u64,
        /// Least bytes one item takes.
        each: u64,
        /// Bytes left in the file.
        has: u64,
    },
    /// A key or tensor name is not UTF-8.
    #[error("{field} at byte {at} is not UTF-8: the file is damaged; fetch or convert it again")]
    NotUtf8 {
        /// The field.
        field: String,
        /// Its byte offset.
        at: u64,
    },
    /// A key or tensor name is longer than the format allows.
    #[error(
        "{field} at byte {at} is {len} bytes, over the limit of {limit}: the file is damaged; fetch or convert it again"
    )]
    NameLength {
        /// The field.
        field: String,
        /// Its byte offset (0 while writing).
        at: u64,
        /// Its length in bytes.
        len: u64,
        /// The limit in bytes.
        limit: u64,
    },

    // ---- metadata in a file ----
    /// A metadata value has a type that GGUF does not define.
    #[error(
        "{field} at byte {at} is {id}, which is no GGUF value type (0 to 12): the file is damaged or newer than this program"
    )]
    ValueType {
        /// The field.
        field: String,
        /// Its byte offset.
        at: u64,
        /// The type id found.
        id: u32,
    },
    /// A boolean is neither 0 nor 1.
    #[error(
        "{field} at byte {at} is {found}, and a bool must be 0 or 1: the file is damaged; fetch or convert it again"
    )]
    Bool {
        /// The field.
        field: String,
        /// Its byte offset.
        at: u64,
        /// The byte found.
        found: u8,
    },
    /// Arrays within arrays, too deep.
    #[error("{field} at byte {at} nests arrays more than {limit} deep: the file is damaged or hostile")]
    Nesting {
        /// The field.
        field: String,
        /// Its byte offset.
        at: u64,
        /// The deepest nesting accepted.
        limit: usize,
    },
    /// A key occurs twice.
    #[error("metadata key {} occurs twice: convert the model again", quoted(key))]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// `general.alignment` cannot be used.
    #[error(
        "general.alignment is {found}; it must be a power of two from {} to {}: the file is damaged, or convert it again",
        crate::MIN_ALIGNMENT,
        crate::MAX_ALIGNMENT
    )]
    Alignment {
        /// The value found.
        found: i128,
    },

    // ---- tensors ----
    /// A tensor's type is not known.
    #[error("tensor {} has type {id}{hint}", quoted(tensor))]
    TensorType {
        /// The tensor.
        tensor: String,
        /// The type id found.
        id: u32,
        /// What the id stands for, with a remedy.
        hint: &'static str,
    },
    /// The number of dimensions is not 1 to 4.
    #[error("tensor {} has {found} dimensions; 1 to 4 are possible: the file is damaged or hostile", quoted(tensor))]
    DimCount {
        /// The tensor.
        tensor: String,
        /// The number found.
        found: u32,
    },
    /// A dimension is zero.
    #[error(
        "tensor {} has dimensions {dims:?}; none may be 0: the file is damaged, or convert it again",
        quoted(tensor)
    )]
    ZeroDim {
        /// The tensor.
        tensor: String,
        /// Its dimensions.
        dims: Vec<u64>,
    },
    /// The product of the dimensions, or the size in bytes, does not fit.
    #[error(
        "tensor {} has dimensions {dims:?}, whose size overflows 63 bits: the file is damaged or hostile",
        quoted(tensor)
    )]
    DimOverflow {
        /// The tensor.
        tensor: String,
        /// Its dimensions.
        dims: Vec<u64>,
    },
    /// A row is not a whole number of blocks.
    #[error(
        "tensor {} has rows of {row} elements, but {format} packs blocks of {}: the file is damaged, or quantize it to a format with a shorter block",
        quoted(tensor), format.block_len()
    )]
    RowLength {
        /// The tensor.
        tensor: String,
        /// Elements in a row.
        row: u64,
        /// Its format.
        format: Format,
    },
    /// A tensor's offset is not a multiple of the alignment.
    #[error(
        "tensor {} has offset {offset}, not a multiple of the alignment {alignment}: convert the model again",
        quoted(tensor)
    )]
    TensorOffset {
        /// The tensor.
        tensor: String,
        /// Its offset in the data section.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// A tensor reaches past the file's end.
    #[error(
        "tensor {} lies at bytes {start} to {end}, but the file has {file_len}: the file is cut short; fetch it again",
        quoted(tensor)
    )]
    TensorRange {
        /// The tensor.
        tensor: String,
        /// First byte in the file.
        start: u64,
        /// One past its last byte.
        end: u64,
        /// The file's length in bytes.
        file_len: u64,
    },
    /// Two tensors share bytes.
    #[error("tensors {} and {} overlap at byte {at}: convert the model again", quoted(first), quoted(second))]
    TensorOverlap {
        /// The tensor that starts first.
        first: String,
        /// The tensor that starts inside it.
        second: String,
        /// Where the second starts, in bytes of the file.
        at: u64,
    },
    /// A tensor name occurs twice (in one file, or in two parts of a split model).
    #[error("tensor {} occurs twice: convert the model again", quoted(tensor))]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
    },

    // ---- split models ----
    /// A part of a split model whose name does not say where the others are.
    #[error(
        "is part {no} of {count} of a split model, but its name is not of the form NAME-{no:05}-of-{count:05}.gguf: rename the parts back"
    )]
    SplitName {
        /// The part's number, from 1.
        no: u64,
        /// The number of parts.
        count: u64,
    },
    /// A part of a split model is not there.
    #[error("this part of a split model is missing (part {no} of {count}): fetch it into the same folder")]
    SplitMissing {
        /// The part's number, from 1.
        no: u64,
        /// The number of parts.
        count: u64,
    },
    /// A part of a split model came from memory.
    #[error("is one of {count} parts of a split model, and bytes in memory have no other parts: open it by its path")]
    SplitInMemory {
        /// The number of parts.
        count: u64,
    },
    /// `split.no` or `split.count` or `split.tensors.count` contradicts the file's name, the other parts or the tensors found.
    #[error("{key} is {found}, expected {expected}: parts of different models are mixed; fetch all parts again")]
    SplitValue {
        /// The metadata key.
        key: &'static str,
        /// The value found.
        found: u64,
        /// The value the other parts or the file name call for.
        expected: u64,
    },

    // ---- asking for metadata and tensors ----
    /// A needed key is not there.
    #[error(
        "metadata key {} is missing: the model was converted for another program or version; convert it again",
        quoted(key)
    )]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A key holds another type than asked for.
    #[error("metadata key {} is {found}, expected {expected}: convert the model again", quoted(key))]
    WrongType {
        /// The key.
        key: String,
        /// The type found, in words.
        found: String,
        /// The type asked for, in words.
        expected: &'static str,
    },
    /// A number does not fit the type asked for.
    #[error("metadata key {} is {found}, out of range for {expected}: convert the model again", quoted(key))]
    OutOfRange {
        /// The key.
        key: String,
        /// The value found.
        found: String,
        /// The type asked for.
        expected: &'static str,
    },
    /// An array has another length than asked for.
    #[error("metadata key {} has {found} elements, expected {expected}: convert the model again", quoted(key))]
    WrongLength {
        /// The key.
        key: String,
        /// The array's length.
        found: usize,
        /// The length asked for.
        expected: usize,
    },
    /// A needed tensor is not there.
    #[error(
        "tensor {} is missing: the file is incomplete or of another architecture; convert the model again",
        quoted(tensor)
    )]
    MissingTensor {
        /// The tensor.
        tensor: String,
    },

    // ---- writing ----
    /// Data was given for a tensor that is not the next one declared.
    #[error(
        "data for tensor {} was given, but {} comes next: write tensors in the order of their declaration",
        quoted(found),
        quoted(expected)
    )]
    WriteOrder {
        /// The tensor given.
        found: String,
        /// The tensor whose turn it is; empty after the last one.
        expected: String,
    },
    /// A tensor's data is longer or shorter than its declaration.
    #[error("tensor {} was declared with {expected} bytes and got {found}", quoted(tensor))]
    WriteSize {
        /// The tensor.
        tensor: String,
        /// Bytes given (the least number known, when more came than fit).
        found: u64,
        /// Bytes declared.
        expected: u64,
    },
}

impl ErrorKind {
    pub(crate) fn io(action: &'static str, source: std::io::Error) -> Self {
        ErrorKind::Io { action, source: Arc::new(source) }
    }

    pub(crate) fn wrong_type(key: &str, found: String, expected: &'static str) -> Self {
        ErrorKind::WrongType { key: key.to_owned(), found, expected }
    }
}

/// A value type with its article, as error texts name it.
pub(crate) fn type_in_words(ty: ValueType) -> String {
    // As spoken: an i32, an f32, an array; a u8, a bool, a string.
    let article = if ty.name().starts_with(['i', 'f', 'a']) { "an" } else { "a" };
    format!("{article} {ty}")
}

/// The name under which bytes in memory appear in errors.
pub(crate) fn memory_name() -> Arc<Path> {
    Arc::from(PathBuf::from("<memory>"))
}
