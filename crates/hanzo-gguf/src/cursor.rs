//! A bounds-checked walk over a file's header: every read names its field, so that every error does.
//! Knows integers and length-prefixed strings, not what they mean.

use std::fmt::Arguments;

use crate::error::ErrorKind;

pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Cursor { bytes, at: 0 }
    }

    pub(crate) fn position(&self) -> usize {
        self.at
    }

    pub(crate) fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// What has not been read.
    pub(crate) fn rest(&self) -> &'a [u8] {
        &self.bytes[self.at..]
    }

    /// The next `len` bytes.
    pub(crate) fn take(&mut self, len: u64, field: Arguments<'_>) -> Result<&'a [u8], ErrorKind> {
        match usize::try_from(len).ok().filter(|&len| len <= self.remaining()) {
            Some(len) => {
                let taken = &self.bytes[self.at..self.at + len];
                self.at += len;
                Ok(taken)
            }
            None => Err(self.truncated(len, field)),
        }
    }

    #[cold]
    fn truncated(&self, needs: u64, field: Arguments<'_>) -> ErrorKind {
        ErrorKind::Truncated { field: field.to_string(), at: self.at as u64, needs, has: self.remaining() as u64 }
    }

    pub(crate) fn array<const N: usize>(&mut self, field: Arguments<'_>) -> Result<[u8; N], ErrorKind> {
        match self.bytes[self.at..].first_chunk::<N>() {
            Some(bytes) => {
                self.at += N;
                Ok(*bytes)
            }
            None => Err(self.truncated(N as u64, field)),
        }
    }

    pub(crate) fn u32(&mut self, field: Arguments<'_>) -> Result<u32, ErrorKind> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, field: Arguments<'_>) -> Result<u64, ErrorKind> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// A count of items that take at least `each` bytes: refused if the rest of the file cannot hold them, so that
    /// nothing is ever allocated from a claim.
    pub(crate) fn count(&mut self, each: u64, field: Arguments<'_>) -> Result<usize, ErrorKind> {
        let at = self.at as u64;
        let count = self.u64(field)?;
        self.check_count(count, each, at, field)
    }

    /// [`Cursor::count`] for a count already read at byte `at`.
    pub(crate) fn check_count(&self, count: u64, each: u64, at: u64, field: Arguments<'_>) -> Result<usize, ErrorKind> {
        let has = self.remaining() as u64;
        match usize::try_from(count) {
            Ok(fits) if count <= has / each => Ok(fits),
            _ => Err(ErrorKind::Count { field: field.to_string(), at, count, each, has }),
        }
    }

    /// A string's bytes: a 64-bit length, then that many bytes.
    pub(crate) fn string(&mut self, field: Arguments<'_>) -> Result<&'a [u8], ErrorKind> {
        let len = self.u64(format_args!("the length of {field}"))?;
        self.take(len, field)
    }

    /// A string that must be UTF-8 and at most `limit` bytes: a key or a name.
    pub(crate) fn name(&mut self, limit: usize, field: Arguments<'_>) -> Result<&'a str, ErrorKind> {
        let len = self.u64(format_args!("the length of {field}"))?;
        let at = self.at as u64;
        if len > limit as u64 {
            return Err(ErrorKind::NameLength { field: field.to_string(), at, len, limit: limit as u64 });
        }
        let bytes = self.take(len, field)?;
        std::str::from_utf8(bytes).map_err(|_| ErrorKind::NotUtf8 { field: field.to_string(), at })
    }
}
