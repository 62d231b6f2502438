//! Writing GGUF, version 3, in one pass: metadata and tensor directory first, then the data, tensor by tensor, so that
//! a model is never in memory as a whole. Quantizing is the caller's matter.

use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;

use crate::error::{ErrorKind, GgufError, memory_name};
use crate::gguf::{alignment, tensor_size};
use crate::value::encode_string;
use crate::{Format, Landing, MAX_NAME_LEN, Metadata};

/// The longest tensor name written, in bytes: longer ones are legal to read, but widely used readers refuse them.
pub const MAX_TENSOR_NAME_LEN: usize = 63;

/// A tensor declared.
struct Declared {
    name: String,
    dims: Vec<u64>,
    format: Format,
    size: u64,
}

/// A GGUF file about to be written: set metadata, declare tensors, then [`GgufWriter::begin`].
///
/// ```
/// use hanzo_gguf::{Format, Gguf, GgufWriter};
/// let path = std::env::temp_dir().join(format!("writer-doc-{}.gguf", std::process::id()));
/// let mut writer = GgufWriter::create(&path)?;
/// writer.metadata_mut().set("general.architecture", "llama");
/// writer.declare("a", &[32, 2], Format::Q8_0)?;
/// writer.declare("b", &[3], Format::F32)?;
/// let mut data = writer.begin()?;
/// data.append(&[1; 34])?; // "a" in two pieces
/// data.append(&[2; 34])?;
/// data.tensor("b", &[0; 12])?;
/// data.land()?; // the file appears at its path only now
/// assert_eq!(Gguf::open(&path)?.tensors().len(), 2);
/// # std::fs::remove_file(&path).unwrap();
/// # Ok::<(), hanzo_gguf::GgufError>(())
/// ```
#[must_use = "nothing is written before begin()"]
pub struct GgufWriter<W> {
    sink: W,
    file: Arc<Path>,
    metadata: Metadata,
    tensors: Vec<Declared>,
}

impl GgufWriter<Landing> {
    /// Starts a file that appears at `path` when [`TensorWriter::land`] is called, and not before.
    ///
    /// # Errors
    /// If the temporary file beside `path` cannot be created.
    pub fn create(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        let file: Arc<Path> = Arc::from(path.as_ref());
        match Landing::create(&file) {
            Ok(sink) => Ok(GgufWriter { sink, file, metadata: Metadata::new(), tensors: Vec::new() }),
            Err(e) => Err(GgufError::new(&file, ErrorKind::io("create a temporary file beside it", e))),
        }
    }
}

impl<W: Write> GgufWriter<W> {
    /// Starts a file written to `sink`: a `Vec<u8>`, a pipe. Unbuffered sinks should be wrapped in a `BufWriter`.
    pub fn new(sink: W) -> Self {
        GgufWriter { sink, file: memory_name(), metadata: Metadata::new(), tensors: Vec::new() }
    }

    /// The metadata to be written.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The metadata to be written, to set keys or copy another model's
    /// ([`Metadata::copy_from`]). `general.alignment` takes effect.
    pub fn metadata_mut(&mut self) -> &mut Metadata {
        &mut self.metadata
    }

    /// Declares the next tensor: its data will follow in the order of declaration. `dims[0]` is the length of a row.
    ///
    /// # Errors
    /// A name over [`MAX_TENSOR_NAME_LEN`] bytes, a shape that is none, a row that is not a whole number of blocks.
    pub fn declare(&mut self, name: &str, dims: &[u64], format: Format) -> Result<(), GgufError> {
        let fail = |kind| GgufError::new(&self.file, kind);
        if name.len() > MAX_TENSOR_NAME_LEN {
            let (len, limit) = (name.len() as u64, MAX_TENSOR_NAME_LEN as u64);
            return Err(fail(ErrorKind::NameLength {
                field: format!("the name of tensor {name:?}"),
                at: 0,
                len,
                limit,
            }));
        }
        let size = tensor_size(name, dims, format).map_err(fail)?;
        self.tensors.push(Declared { name: name.to_owned(), dims: dims.to_vec(), format, size });
        Ok(())
    }

    /// Writes the header: from here on, data is expected, and metadata and tensors are fixed.
    ///
    /// # Errors
    /// A tensor declared twice, a key over [`MAX_NAME_LEN`] bytes, an unusable `general.alignment`, or the sink's.
    pub fn begin(mut self) -> Result<TensorWriter<W>, GgufError> {
        let (header, alignment) = self.header().map_err(|kind| GgufError::new(&self.file, kind))?;
        let written = self.sink.write_all(&header);
        written.map_err(|e| GgufError::new(&self.file, ErrorKind::io("write the header", e)))?;
        let GgufWriter { sink, file, tensors, .. } = self;
        Ok(TensorWriter { sink, file, tensors, alignment, current: 0, filled: 0, position: header.len() as u64 })
    }

    /// The header, padded to where the data starts, and the alignment.
    fn header(&self) -> Result<(Vec<u8>, u64), ErrorKind> {
        let alignment = alignment(&self.metadata)?;
        let mut names: Vec<&str> = self.tensors.iter().map(|t| t.name.as_str()).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(ErrorKind::DuplicateTensor { tensor: pair[0].to_owned() });
        }

        let mut out = Vec::new();
        out.extend(b"GGUF");
        out.extend(3_u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in self.metadata.iter() {
            if key.len() > MAX_NAME_LEN {
                let (len, limit) = (key.len() as u64, MAX_NAME_LEN as u64);
                return Err(ErrorKind::NameLength { field: "a metadata key".to_owned(), at: 0, len, limit });
            }
            encode_string(key.as_bytes(), &mut out);
            out.extend(value.value_type().id().to_le_bytes());
            value.encode(&mut out);
        }
        let mut offset = 0_u64;
        for tensor in &self.tensors {
            encode_string(tensor.name.as_bytes(), &mut out);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(tensor.format.id().to_le_bytes());
            out.extend(offset.to_le_bytes());
            let end = offset.checked_add(tensor.size).and_then(|end| end.checked_next_multiple_of(alignment));
            offset = end.ok_or_else(|| {
                let (tensor, dims) = (tensor.name.clone(), tensor.dims.clone());
                ErrorKind::DimOverflow { tensor, dims }
            })?;
        }
        out.resize(out.len().next_multiple_of(alignment as usize), 0);
        Ok((out, alignment))
    }
}

/// The data section of a GGUF file being written: every tensor's bytes, in the order of declaration.
///
/// Padding between tensors is written here. See [`GgufWriter`] for an example.
#[must_use = "the file is complete only after finish() or land()"]
pub struct TensorWriter<W> {
    sink: W,
    file: Arc<Path>,
    tensors: Vec<Declared>,
    alignment: u64,
    /// The tensor whose turn it is, and how many of its bytes are written.
    current: usize,
    filled: u64,
    /// Bytes of the file written.
    position: u64,
}

impl<W: Write> TensorWriter<W> {
    /// The tensor whose data comes next (or is being written), and how many of its bytes are still to come.
    pub fn expected(&self) -> Option<(&str, u64)> {
        self.tensors.get(self.current).map(|t| (t.name.as_str(), t.size - self.filled))
    }

    fn fail(&self, kind: ErrorKind) -> GgufError {
        GgufError::new(&self.file, kind)
    }

    /// Appends bytes to the current tensor, in pieces of any size; the tensor ends when it has all its bytes.
    ///
    /// # Errors
    /// More bytes than the current tensor has left (nothing is written then), or the sink's.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), GgufError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let Some(tensor) = self.tensors.get(self.current) else {
            return Err(self.fail(ErrorKind::WriteSize {
                tensor: self.tensors.last().map(|t| t.name.clone()).unwrap_or_default(),
                found: self.tensors.last().map_or(0, |t| t.size).saturating_add(bytes.len() as u64),
                expected: self.tensors.last().map_or(0, |t| t.size),
            }));
        };
        let filled = self.filled.saturating_add(bytes.len() as u64);
        if filled > tensor.size {
            let (tensor, expected) = (tensor.name.clone(), tensor.size);
            return Err(self.fail(ErrorKind::WriteSize { tensor, found: filled, expected }));
        }
        let complete = filled == tensor.size;
        self.write(bytes)?;
        self.filled = filled;
        if complete {
            self.current += 1;
            self.filled = 0;
            let end = self.position.next_multiple_of(self.alignment);
            while self.position < end {
                let zeros = [0; 4096];
                let n = (end - self.position).min(zeros.len() as u64) as usize;
                self.write(&zeros[..n])?;
            }
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), GgufError> {
        let written = self.sink.write_all(bytes);
        written.map_err(|e| self.fail(ErrorKind::io("write tensor data", e)))?;
        self.position += bytes.len() as u64;
        Ok(())
    }

    /// Checks that `name` is the tensor whose turn it is, none of it written yet; returns its size in bytes.
    fn start(&self, name: &str) -> Result<u64, GgufError> {
        match self.tensors.get(self.current) {
            Some(tensor) if tensor.name == name && self.filled == 0 => Ok(tensor.size),
            other => {
                let expected = other.map(|t| t.name.clone()).unwrap_or_default();
                Err(self.fail(ErrorKind::WriteOrder { found: name.to_owned(), expected }))
            }
        }
    }

    /// Writes the whole of tensor `name`, which must be the next one declared.
    ///
    /// # Errors
    /// Another tensor's turn, a wrong number of bytes (nothing is written then), or the sink's.
    pub fn tensor(&mut self, name: &str, bytes: &[u8]) -> Result<(), GgufError> {
        let expected = self.start(name)?;
        if bytes.len() as u64 != expected {
            let found = bytes.len() as u64;
            return Err(self.fail(ErrorKind::WriteSize { tensor: name.to_owned(), found, expected }));
        }
        self.append(bytes)
    }

    /// Writes the whole of tensor `name` from a reader, which must end where the tensor does.
    ///
    /// # Errors
    /// Another tensor's turn, a reader that ends too early or too late, the reader's or the sink's.
    pub fn tensor_from(&mut self, name: &str, mut reader: impl Read) -> Result<(), GgufError> {
        let expected = self.start(name)?;
        let mut buffer = vec![0; expected.min(1 << 20) as usize];
        let mut left = expected;
        while left > 0 {
            let n = left.min(buffer.len() as u64) as usize;
            let got = read_some(&mut reader, &mut buffer[..n]);
            let got = got.map_err(|e| self.fail(ErrorKind::io("read tensor data", e)))?;
            if got == 0 {
                let found = expected - left;
                return Err(self.fail(ErrorKind::WriteSize { tensor: name.to_owned(), found, expected }));
            }
            self.append(&buffer[..got])?;
            left -= got as u64;
        }
        match read_some(&mut reader, &mut [0]) {
            Ok(0) => Ok(()),
            Ok(_) => Err(self.fail(ErrorKind::WriteSize { tensor: name.to_owned(), found: expected + 1, expected })),
            Err(e) => Err(self.fail(ErrorKind::io("read tensor data", e))),
        }
    }

    /// Checks that every tensor has its data, flushes, and returns the sink.
    ///
    /// # Errors
    /// A tensor without all its data, or the sink's.
    pub fn finish(mut self) -> Result<W, GgufError> {
        if let Some(tensor) = self.tensors.get(self.current) {
            let (tensor, found, expected) = (tensor.name.clone(), self.filled, tensor.size);
            return Err(self.fail(ErrorKind::WriteSize { tensor, found, expected }));
        }
        let flushed = self.sink.flush();
        flushed.map_err(|e| self.fail(ErrorKind::io("write tensor data", e)))?;
        Ok(self.sink)
    }
}

impl TensorWriter<Landing> {
    /// [`TensorWriter::finish`], then the file appears at its path.
    ///
    /// # Errors
    /// As `finish`; a full disk; a refused rename. The path is unchanged then.
    pub fn land(self) -> Result<(), GgufError> {
        let file = self.file.clone();
        let landed = self.finish()?.land();
        landed.map_err(|e| GgufError::new(&file, ErrorKind::io("move the finished file into place", e)))
    }
}

/// One read, repeated while the system interrupts it.
fn read_some(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match reader.read(buffer) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            other => return other,
        }
    }
}
