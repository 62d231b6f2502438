//! A GGUF file, opened: header, metadata and tensor directory read and checked, tensor data left where it is.
//! What a model is made of belongs to the engine.
//!
//! Layout (all integers little-endian): `GGUF`, version u32, tensor count u64, key count u64; per key a string, a
//! value type u32 and the value; per tensor a string, the number of dimensions u32, each dimension u64, a format id u32
//! and an offset u64 into the data section, which starts at the next multiple of `general.alignment` (32 by default).
//! A string is its length, u64, and its bytes. Source: the GGUF specification (docs/gguf.md of the ggml project).

use std::path::Path;
use std::sync::Arc;

use crate::array::string_value;
use crate::cursor::Cursor;
use crate::error::{ErrorKind, GgufError, memory_name, quoted};
use crate::{Array, Format, Metadata, TensorBytes, Value, ValueType, split};

/// The least `general.alignment` accepted: what an `f64` or a `u64` needs.
pub const MIN_ALIGNMENT: u64 = 8;
/// The largest `general.alignment` accepted: 16 MiB, beyond any page size in use on ordinary files.
pub const MAX_ALIGNMENT: u64 = 1 << 24;
/// The alignment of a file that does not say.
pub const DEFAULT_ALIGNMENT: u64 = 32;
/// The longest metadata key and tensor name accepted, in bytes (the specification's limit for keys).
pub const MAX_NAME_LEN: usize = u16::MAX as usize;
/// The most dimensions a tensor has.
pub const MAX_DIMS: usize = 4;

/// A tensor's entry in the directory: what it is called, its shape and format, and where its data lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name, e.g. `blk.0.attn_q.weight`.
    pub name: String,
    /// 1 to 4 dimensions, none 0. `dims[0]` is the length of a contiguous row: a weight that maps `n` inputs to `m`
    /// outputs is `[n, m]`.
    pub dims: Vec<u64>,
    /// How the elements are packed.
    pub format: Format,
    part: u32,
    offset: u64,
    size: u64,
}

impl TensorInfo {
    /// The number of elements.
    pub fn elements(&self) -> u64 {
        self.dims.iter().product()
    }

    /// Elements in a row, `dims[0]`.
    pub fn row_len(&self) -> u64 {
        self.dims[0]
    }

    /// The number of rows: the product of all dimensions but the first.
    pub fn rows(&self) -> u64 {
        self.dims[1..].iter().product()
    }

    /// Bytes of the whole tensor.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Which file of a split model holds the data, from 0.
    pub fn part(&self) -> usize {
        self.part as usize
    }

    /// Where the data starts in that file, in bytes from the file's start.
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

/// A GGUF model, memory-mapped: one file, or all parts of a split one.
///
/// Opening reads the header and checks all of it; tensor data is not touched until it is used, and never copied.
/// All data handed out lies inside the file, whatever the file says.
///
/// ```
/// use hanzo_gguf::{Format, Gguf, GgufWriter};
/// // Write a model with one 2 x 2 matrix into memory, then read it.
/// let mut writer = GgufWriter::new(Vec::new());
/// writer.metadata_mut().set("general.architecture", "llama");
/// writer.declare("output.weight", &[2, 2], Format::F32)?;
/// let mut data = writer.begin()?;
/// data.tensor("output.weight", &[0; 16])?;
/// let gguf = Gguf::from_bytes(data.finish()?)?;
///
/// assert_eq!(gguf.metadata().str("general.architecture")?, "llama");
/// let tensor = gguf.tensor("output.weight").unwrap();
/// assert_eq!((tensor.format, tensor.rows()), (Format::F32, 2));
/// assert_eq!(gguf.data(tensor), [0; 16]);
/// # Ok::<(), hanzo_gguf::GgufError>(())
/// ```
pub struct Gguf {
    version: u32,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    /// Positions in `tensors`, sorted by name.
    sorted: Vec<u32>,
    /// The whole file of each part.
    parts: Vec<TensorBytes>,
}

impl Gguf {
    /// Maps the file at `path`, and the other parts if it is one of a split model (any part will do; they lie in the
    /// same folder and are named `NAME-00001-of-0000N.gguf`). Metadata is the first part's.
    ///
    /// The file must not be changed in place while it is open (that is undefined behaviour in whoever reads the
    /// mapping); replacing it by rename, as [`GgufWriter`](crate::GgufWriter) does, is fine.
    ///
    /// # Errors
    /// Anything wrong with the file, see [`ErrorKind`].
    pub fn open(path: impl AsRef<Path>) -> Result<Gguf, GgufError> {
        let file: Arc<Path> = Arc::from(path.as_ref());
        let opened = TensorBytes::map(&file).and_then(|bytes| File::parse(bytes, &file));
        let opened = opened.map_err(|kind| GgufError::new(&file, kind))?;
        if opened.split.is_some() {
            return Gguf::join(split::open_all(&file, opened)?);
        }
        Gguf::join(vec![(file, opened)])
    }

    /// Reads a model from bytes in memory. They may be one of a split model's parts only if it has one part.
    ///
    /// # Errors
    /// As [`Gguf::open`]; the file's name is `<memory>`.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Gguf, GgufError> {
        let file = memory_name();
        let opened = match File::parse(TensorBytes::aligned(bytes), &file) {
            Ok(File { split: Some(split), .. }) => Err(ErrorKind::SplitInMemory { count: split.count }),
            other => other,
        };
        Gguf::join(vec![(file.clone(), opened.map_err(|kind| GgufError::new(&file, kind))?)])
    }

    /// Joins the parts, in their order; there is at least one.
    fn join(files: Vec<(Arc<Path>, File)>) -> Result<Gguf, GgufError> {
        let names: Vec<Arc<Path>> = files.iter().map(|(name, _)| name.clone()).collect();
        let mut files = files.into_iter().map(|(_, file)| file);
        let Some(File { version, metadata, mut tensors, bytes, .. }) = files.next() else {
            unreachable!("a model has at least one file");
        };
        let mut parts = vec![bytes];
        for file in files {
            let part = parts.len() as u32;
            tensors.extend(file.tensors.into_iter().map(|tensor| TensorInfo { part, ..tensor }));
            parts.push(file.bytes);
        }
        let mut sorted: Vec<u32> = (0..tensors.len() as u32).collect();
        sorted.sort_unstable_by(|&a, &b| tensors[a as usize].name.cmp(&tensors[b as usize].name));
        for pair in sorted.windows(2) {
            let [first, second] = [&tensors[pair[0] as usize], &tensors[pair[1] as usize]];
            if first.name == second.name {
                let file = &names[first.part.max(second.part) as usize];
                return Err(GgufError::new(file, ErrorKind::DuplicateTensor { tensor: first.name.clone() }));
            }
        }
        Ok(Gguf { version, metadata, tensors, sorted, parts })
    }

    /// The format's version: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The path given to [`Gguf::open`] (of the first part, for a split model), or `<memory>`.
    pub fn file(&self) -> &Path {
        self.metadata.file()
    }

    /// The metadata.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tensors, in the file's order, part after part.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        let at = self.sorted.binary_search_by(|&i| self.tensors[i as usize].name.as_str().cmp(name)).ok()?;
        Some(&self.tensors[self.sorted[at] as usize])
    }

    /// The tensor of that name.
    ///
    /// # Errors
    /// [`ErrorKind::MissingTensor`], naming file and tensor.
    pub fn need_tensor(&self, name: &str) -> Result<&TensorInfo, GgufError> {
        self.tensor(name).ok_or_else(|| self.metadata.error(ErrorKind::MissingTensor { tensor: name.to_owned() }))
    }

    /// A tensor's data, zero-copy: `rows() * row_bytes` bytes, row after row.
    ///
    /// # Panics
    /// If `tensor` comes from another model and lies outside this one.
    pub fn data(&self, tensor: &TensorInfo) -> &[u8] {
        let start = tensor.offset as usize;
        &self.parts[tensor.part()][start..start + tensor.size as usize]
    }

    /// [`Gguf::data`] as a handle that keeps the mapping alive without the `Gguf`.
    ///
    /// # Panics
    /// As [`Gguf::data`].
    pub fn bytes(&self, tensor: &TensorInfo) -> TensorBytes {
        let start = tensor.offset as usize;
        self.parts[tensor.part()].slice(start..start + tensor.size as usize)
    }

    /// The files as a whole, one a part: for advice to the system (`madvise`), checksums, and their sizes.
    pub fn parts(&self) -> &[TensorBytes] {
        &self.parts
    }
}

impl std::fmt::Debug for Gguf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gguf")
            .field("file", &self.file())
            .field("version", &self.version)
            .field("keys", &self.metadata.len())
            .field("tensors", &self.tensors.len())
            .field("parts", &self.parts.len())
            .finish()
    }
}

/// One file, parsed: a whole model, or a part of one.
pub(crate) struct File {
    version: u32,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    bytes: TensorBytes,
    /// What the file says of the split, if it has more than one part.
    pub(crate) split: Option<split::Part>,
}

impl File {
    /// Parses and checks everything but the tensors' data. `name` is for the metadata getters' errors.
    pub(crate) fn parse(bytes: TensorBytes, name: &Arc<Path>) -> Result<File, ErrorKind> {
        let mut cursor = Cursor::new(&bytes);
        let version = read_version(&mut cursor)?;
        let tensor_count_at = cursor.position() as u64;
        let tensor_count = cursor.u64(format_args!("tensor_count"))?;
        // The least key: an empty name's length, a type and one byte.
        let key_count = cursor.count(8 + 4 + 1, format_args!("metadata_kv_count"))?;

        // Not pre-allocated from the count: a damaged one would cost several times the file's size.
        let mut entries = Vec::new();
        for i in 0..key_count {
            entries.push(read_entry(&mut cursor, &bytes, i)?);
        }
        let metadata = Metadata::of_file(name.clone(), entries)?;
        let alignment = alignment(&metadata)?;

        // The least tensor: an empty name's length, the number of dimensions, one dimension, a format and an offset.
        let least = 8 + 4 + 8 + 4 + 8;
        let tensor_count = cursor.check_count(tensor_count, least, tensor_count_at, format_args!("tensor_count"))?;
        let mut tensors = Vec::new();
        for i in 0..tensor_count {
            tensors.push(read_tensor(&mut cursor, i, alignment)?);
        }
        place_tensors(&mut tensors, cursor.position() as u64, alignment, bytes.len() as u64)?;
        let split = split::Part::of(&metadata, tensors.len())?;
        Ok(File { version, metadata, tensors, bytes, split })
    }

    pub(crate) fn tensor_count(&self) -> usize {
        self.tensors.len()
    }
}

/// Reads magic and version.
fn read_version(cursor: &mut Cursor<'_>) -> Result<u32, ErrorKind> {
    if cursor.remaining() == 0 {
        return Err(ErrorKind::Empty);
    }
    let start = cursor.rest();
    if !start.starts_with(b"GGUF") {
        return Err(ErrorKind::Magic { found: start[..start.len().min(4)].to_vec(), hint: magic_hint(start) });
    }
    cursor.take(4, format_args!("the magic"))?;
    let version = cursor.u32(format_args!("version"))?;
    match version {
        2 | 3 => Ok(version),
        // The low half of a little-endian version is never zero; a big-endian file's is, until version 65536.
        _ if version & 0xffff == 0 && version != 0 => Err(ErrorKind::BigEndian { version: version.swap_bytes() }),
        _ => Err(ErrorKind::Version { version }),
    }
}

/// What a file that is not GGUF looks like.
fn magic_hint(start: &[u8]) -> &'static str {
    let starts = |with: &[&[u8]]| with.iter().any(|with| start.starts_with(with));
    if starts(&[b"lmgg", b"fmgg", b"tjgg", b"algg"]) {
        // ggml, ggmf, ggjt and ggla, stored as little-endian integers.
        "; it is a ggml model of before GGUF: convert the original model again"
    } else if starts(&[b"version https://git-lfs"]) {
        "; it is a Git LFS pointer, not the file itself: run `git lfs pull`"
    } else if starts(&[b"<!", b"<h", b"<?xml"]) {
        "; it is a web page: the download link was wrong or needed a login"
    } else if starts(&[b"PK", b"\x1f\x8b", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"]) {
        "; it is an archive: unpack it"
    } else if start.get(8) == Some(&b'{') {
        "; it looks like safetensors: convert it to GGUF"
    } else {
        ": give the path of a GGUF model"
    }
}

/// Reads the key-value pair number `i`.
fn read_entry(cursor: &mut Cursor<'_>, file: &TensorBytes, i: usize) -> Result<(String, Value), ErrorKind> {
    let key = cursor.name(MAX_NAME_LEN, format_args!("metadata key {i}"))?;
    let at = cursor.position() as u64;
    let id = cursor.u32(format_args!("the type of metadata key {}", quoted(key)))?;
    let ty = ValueType::from_id(id).ok_or_else(|| {
        let field = format!("the type of metadata key {}", quoted(key));
        ErrorKind::ValueType { field, at, id }
    })?;
    let value = match (ty, ty.size()) {
        (ValueType::Array, _) => Value::Array(Array::read(cursor, file, format_args!("metadata key {}", quoted(key)))?),
        (_, None) => string_value(cursor.string(format_args!("metadata key {}", quoted(key)))?),
        (_, Some(size)) => {
            let at = cursor.position() as u64;
            let bytes = cursor.take(size as u64, format_args!("metadata key {}", quoted(key)))?;
            // Every pattern of bits is a number; only a bool can be wrong.
            Value::from_scalar_bytes(ty, bytes).ok_or_else(|| {
                let field = format!("metadata key {}", quoted(key));
                ErrorKind::Bool { field, at, found: bytes[0] }
            })?
        }
    };
    Ok((key.to_owned(), value))
}

/// The file's alignment, from its metadata.
pub(crate) fn alignment(metadata: &Metadata) -> Result<u64, ErrorKind> {
    const KEY: &str = "general.alignment";
    let Some(value) = metadata.get(KEY) else { return Ok(DEFAULT_ALIGNMENT) };
    let Some(found) = value.as_integer() else {
        let found = crate::error::type_in_words(value.value_type());
        return Err(ErrorKind::wrong_type(KEY, found, "an integer"));
    };
    match u64::try_from(found) {
        Ok(found) if found.is_power_of_two() && (MIN_ALIGNMENT..=MAX_ALIGNMENT).contains(&found) => Ok(found),
        _ => Err(ErrorKind::Alignment { found }),
    }
}

/// Reads the directory entry of tensor number `i`; its offset is still that in the data section.
fn read_tensor(cursor: &mut Cursor<'_>, i: usize, alignment: u64) -> Result<TensorInfo, ErrorKind> {
    let name = cursor.name(MAX_NAME_LEN, format_args!("the name of tensor {i}"))?;
    let dim_count = cursor.u32(format_args!("the number of dimensions of tensor {}", quoted(name)))?;
    if !(1..=MAX_DIMS as u32).contains(&dim_count) {
        return Err(ErrorKind::DimCount { tensor: name.to_owned(), found: dim_count });
    }
    let mut dims = Vec::with_capacity(dim_count as usize);
    for d in 0..dim_count {
        dims.push(cursor.u64(format_args!("dimension {d} of tensor {}", quoted(name)))?);
    }
    let id = cursor.u32(format_args!("the type of tensor {}", quoted(name)))?;
    let format = Format::from_id(id).ok_or_else(|| {
        let tensor = name.to_owned();
        ErrorKind::TensorType { tensor, id, hint: type_hint(id) }
    })?;
    let size = tensor_size(name, &dims, format)?;
    let offset = cursor.u64(format_args!("the offset of tensor {}", quoted(name)))?;
    if offset % alignment != 0 {
        return Err(ErrorKind::TensorOffset { tensor: name.to_owned(), offset, alignment });
    }
    Ok(TensorInfo { name: name.to_owned(), dims, format, part: 0, offset, size })
}

/// What a tensor type id that has no row in the table of formats stands for.
fn type_hint(id: u32) -> &'static str {
    match id {
        4 | 5 => " (Q4_2 or Q4_3), which was withdrawn from the format: convert the model again",
        9 | 15 => " (Q8_1 or Q8_K), which is for activations only: quantize the model again",
        31..=33 => {
            " (Q4_0 repacked for one kind of CPU), which was withdrawn from the format: quantize the model again to Q4_0"
        }
        36..=38 => {
            " (IQ4_NL repacked for one kind of CPU), which was withdrawn from the format: quantize the model again to IQ4_NL"
        }
        _ => ", which this program does not know: the file is damaged, or made for a newer program",
    }
}

/// Checks a tensor's shape and returns its size in bytes.
pub(crate) fn tensor_size(name: &str, dims: &[u64], format: Format) -> Result<u64, ErrorKind> {
    if !(1..=MAX_DIMS).contains(&dims.len()) {
        return Err(ErrorKind::DimCount { tensor: name.to_owned(), found: dims.len() as u32 });
    }
    if dims.contains(&0) {
        return Err(ErrorKind::ZeroDim { tensor: name.to_owned(), dims: dims.to_vec() });
    }
    if dims[0] % format.block_len() as u64 != 0 {
        return Err(ErrorKind::RowLength { tensor: name.to_owned(), row: dims[0], format });
    }
    // 63 bits, so that the sum of an offset inside a file and a size never overflows; usize, so that it can be sliced.
    let product = |from: u64, factors: &[u64]| factors.iter().try_fold(from, |n, &f| n.checked_mul(f));
    let elements = product(1, dims);
    let size = product(dims[0] / format.block_len() as u64, &dims[1..])
        .and_then(|blocks| blocks.checked_mul(format.block_bytes() as u64))
        .filter(|&size| size <= i64::MAX as u64 && usize::try_from(size).is_ok());
    match (elements, size) {
        (Some(_), Some(size)) => Ok(size),
        _ => Err(ErrorKind::DimOverflow { tensor: name.to_owned(), dims: dims.to_vec() }),
    }
}

/// Turns offsets in the data section, which starts at or after byte `directory_end`, into offsets in the file, and
/// checks that every tensor lies in the file and none overlap.
fn place_tensors(
    tensors: &mut [TensorInfo],
    directory_end: u64,
    alignment: u64,
    file_len: u64,
) -> Result<(), ErrorKind> {
    let data_start = directory_end.next_multiple_of(alignment);
    for tensor in tensors.iter_mut() {
        let start = data_start.saturating_add(tensor.offset);
        let end = start.saturating_add(tensor.size);
        if end > file_len {
            return Err(ErrorKind::TensorRange { tensor: tensor.name.clone(), start, end, file_len });
        }
        tensor.offset = start;
    }
    let mut by_offset: Vec<u32> = (0..tensors.len() as u32).collect();
    by_offset.sort_unstable_by_key(|&i| tensors[i as usize].offset);
    for pair in by_offset.windows(2) {
        let [first, second] = [&tensors[pair[0] as usize], &tensors[pair[1] as usize]];
        if first.offset + first.size > second.offset {
            let (at, second) = (second.offset, second.name.clone());
            return Err(ErrorKind::TensorOverlap { first: first.name.clone(), second, at });
        }
    }
    Ok(())
}
