//! Who keeps a file's bytes alive: a mapping of the file or a buffer, shared by reference count.
//! Knows nothing of GGUF.

use std::fmt;
use std::fs::File;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;
#[cfg(target_os = "linux")]
use memmap2::UncheckedAdvice;

use crate::error::ErrorKind;

/// Alignment in bytes of a whole file's first byte, mapped or in memory (one cache line, one AVX-512 register).
const BASE_ALIGNMENT: usize = 64;

enum Backing {
    Mapped(Mmap),
    Buffer { buffer: Vec<u8>, start: usize, len: usize },
}

impl Backing {
    fn bytes(&self) -> &[u8] {
        match self {
            Backing::Mapped(map) => map,
            Backing::Buffer { buffer, start, len } => &buffer[*start..*start + *len],
        }
    }
}

/// A read-only range of a file's bytes that keeps the mapping (or buffer) alive: cheap to clone, `Deref` to `[u8]`.
///
/// A model's weights outlive the [`Gguf`](crate::Gguf) through these handles; no byte is copied.
/// Tensor data starts on a multiple of the file's alignment (at least [`MIN_ALIGNMENT`](crate::MIN_ALIGNMENT)) in
/// memory too, up to 64 bytes.
#[derive(Clone)]
pub struct TensorBytes {
    backing: Arc<Backing>,
    range: Range<usize>,
}

impl TensorBytes {
    /// Maps a whole file.
    pub(crate) fn map(path: &Path) -> Result<Self, ErrorKind> {
        // Looked at before it is opened: opening a pipe would block.
        let info = std::fs::metadata(path).map_err(|e| ErrorKind::io("open the file", e))?;
        if info.is_dir() {
            return Err(ErrorKind::NotAFile { what: "a directory" });
        }
        if !info.is_file() {
            return Err(ErrorKind::NotAFile { what: "a pipe or device" });
        }
        let file = File::open(path).map_err(|e| ErrorKind::io("open the file", e))?;
        let len = file.metadata().map_err(|e| ErrorKind::io("read the file's size", e))?.len();
        if len == 0 {
            return Err(ErrorKind::Empty);
        }
        let map = map_file(&file).map_err(|e| ErrorKind::io("map the file into memory", e))?;
        Ok(Self::whole(Backing::Mapped(map)))
    }

    /// A whole file given as bytes; copied only if the buffer is not aligned well enough.
    pub(crate) fn aligned(bytes: Vec<u8>) -> Self {
        let misalignment = bytes.as_ptr() as usize % BASE_ALIGNMENT;
        if misalignment == 0 {
            return Self::from(bytes);
        }
        let len = bytes.len();
        let mut buffer = Vec::with_capacity(len + BASE_ALIGNMENT - 1);
        let start = (BASE_ALIGNMENT - buffer.as_ptr() as usize % BASE_ALIGNMENT) % BASE_ALIGNMENT;
        buffer.resize(start, 0);
        buffer.extend_from_slice(&bytes);
        Self::whole(Backing::Buffer { buffer, start, len })
    }

    fn whole(backing: Backing) -> Self {
        let range = 0..backing.bytes().len();
        TensorBytes { backing: Arc::new(backing), range }
    }

    /// The bytes `range` of this range.
    ///
    /// # Panics
    /// If `range` reaches past the end, as slicing does.
    pub fn slice(&self, range: Range<usize>) -> TensorBytes {
        assert!(range.start <= range.end && range.end <= self.range.len(), "range {range:?} of {}", self.range.len());
        let start = self.range.start;
        TensorBytes { backing: self.backing.clone(), range: start + range.start..start + range.end }
    }
}

impl TensorBytes {
    /// Lets the system take back the memory of a range of a mapped file until it is read again, from the page cache or the file.
    /// For whoever has made a copy; no effect on bytes that are no mapping, and never on what is read.
    ///
    /// # Panics
    /// If `range` reaches past the end, as slicing does.
    pub fn release(&self, range: Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.range.len(), "{range:?} of {} bytes", self.range.len());
        #[cfg(target_os = "linux")]
        if let Backing::Mapped(map) = &*self.backing {
            // SAFETY: a read-only mapping of a file: pages that go are read again, the same.
            let _ = unsafe {
                map.unchecked_advise_range(UncheckedAdvice::DontNeed, self.range.start + range.start, range.len())
            };
        }
    }
}

impl Deref for TensorBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.backing.bytes()[self.range.clone()]
    }
}

impl From<Vec<u8>> for TensorBytes {
    fn from(buffer: Vec<u8>) -> Self {
        let len = buffer.len();
        Self::whole(Backing::Buffer { buffer, start: 0, len })
    }
}

impl fmt::Debug for TensorBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TensorBytes({} bytes)", self.range.len())
    }
}

fn map_file(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the mapping is read-only and private to this module. What remains is the contract of every mapped model
    // file, stated at `Gguf::open`: nobody truncates or rewrites the file in place while it is open (this crate's own
    // writer, like any download tool worth its name, replaces files by rename, which leaves the mapping intact).
    unsafe { Mmap::map(file) }
}
