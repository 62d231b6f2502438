//! An incomplete download: `F.part` (the bytes so far) and `F.part.json` (where they came from).

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use super::cache;
use crate::failure::Failure;
use crate::output::human_bytes;

/// Where the bytes of a partial file came from.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct State {
    /// A URL, or `wheels NAME`.
    pub source: String,
    /// The server's ETag or date of last change: the same bytes as long as it is the same.
    pub validator: Option<String>,
    /// Size of the whole, if the server said it.
    pub total: Option<u64>,
    /// Wheels that are wholly contained, and how many bytes they gave: what follows those is cut off.
    pub wheels: (usize, u64),
}

/// How far a download got that can be continued.
#[derive(Debug)]
pub struct Resume {
    /// Bytes that are there.
    pub len: u64,
    /// See [`State::validator`].
    pub validator: Option<String>,
    /// See [`State::total`].
    pub total: Option<u64>,
}

/// The partial file of one cache file. Only the holder of that file's lock may use it.
pub struct Partial {
    path: PathBuf,
    state: PathBuf,
}

impl Partial {
    /// The partial file of `path`.
    pub fn of(path: &Path) -> Partial {
        let part = cache::beside(path, ".part");
        let state = cache::beside(&part, ".json");
        Partial { path: part, state }
    }

    /// The file with the bytes.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that are there, 0 if none.
    pub fn len(&self) -> u64 {
        fs::metadata(&self.path).map_or(0, |m| m.len())
    }

    /// The recorded state, if there is one and the bytes are there too.
    pub fn state(&self) -> anyhow::Result<Option<State>> {
        Ok(cache::read_json(&self.state)?.filter(|_| self.path.is_file()))
    }

    /// Records the state.
    pub fn record(&self, state: &State) -> anyhow::Result<()> {
        cache::write_json(&self.state, state).map_err(|e| cache::storage_failure(&self.state, e).into())
    }

    /// How far a download from `url` can be continued, if at all. With a hash to check at the end, the beginning may
    /// come from anywhere; without one it must come from the same URL, which must say whether it is still the same.
    pub fn resumable(&self, url: &str, sha256: Option<&str>) -> anyhow::Result<Option<Resume>> {
        let (Some(state), len @ 1..) = (self.state()?, self.len()) else { return Ok(None) };
        let same_url = state.source == url;
        if sha256.is_none() && !(same_url && state.validator.is_some()) {
            return Ok(None);
        }
        let validator = state.validator.filter(|_| same_url);
        Ok(Some(Resume { len, validator, total: state.total.filter(|_| same_url) }))
    }

    /// Opens the file for writing, cut to `len` bytes, after recording `state`.
    pub fn open_at(&self, len: u64, state: &State) -> anyhow::Result<File> {
        let failure = |e| cache::storage_failure(&self.path, e);
        if len == 0 {
            // Never new bytes under an old state, nor old bytes under a new one.
            self.discard()?;
        }
        let file = File::options().create(true).truncate(false).write(true).open(&self.path).map_err(failure)?;
        file.set_len(len).map_err(failure)?;
        self.record(state)?;
        Ok(file)
    }

    /// Forgets everything.
    pub fn discard(&self) -> anyhow::Result<()> {
        cache::remove(&self.state)?;
        cache::remove(&self.path)?;
        Ok(())
    }

    /// Makes the partial file the file at `path`.
    pub fn land(&self, path: &Path, sha256: &str, source: &str) -> anyhow::Result<()> {
        cache::land(&self.path, path, sha256, source)?;
        cache::remove(&self.state)?;
        Ok(())
    }

    /// Fails early if `more` bytes will not fit.
    pub fn check_space(&self, more: u64) -> anyhow::Result<()> {
        let folder = self.path.parent().context("a partial file has a folder")?;
        match cache::free_bytes(folder) {
            Some(free) if free < more => Err(Failure::new(format!(
                "not enough space in `{}`: {} more are needed, {} are free",
                folder.display(),
                human_bytes(more),
                human_bytes(free)
            ))
            .remedy("free some space, or point HANZO_CACHE at a disk that has it; what is downloaded so far is kept")
            .into()),
            _ => Ok(()),
        }
    }
}
