//! The cache folder: where files lie, how they are checked, locked, and landed atomically.
//!
//! Beside a file `F` lie `F.json` (its record: size, time, SHA-256, source), `F.lock` (held while pulling) and,
//! while incomplete, `F.part` with `F.part.json`. The network may not enter here.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use anyhow::Context as _;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::failure::Failure;

/// What is known about a file in the cache. The full hash is only computed again when size or time changed.
#[derive(Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Record {
    /// Size in bytes.
    pub bytes: u64,
    /// Modification time, nanoseconds since 1970.
    pub modified_ns: u64,
    /// SHA-256 in lower-case hex.
    pub sha256: String,
    /// Where it came from.
    pub source: String,
}

/// The state of a file in the cache.
#[derive(Debug, PartialEq, Eq)]
pub enum State {
    /// Not there.
    Missing,
    /// There, and as it was when it landed.
    Good,
    /// There, but not what it should be: why.
    Corrupt(String),
}

/// Appends a suffix to a file's whole name: `x.gguf` to `x.gguf.part`.
pub fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(suffix);
    name.into()
}

/// Checks `path` against its record and, if given, the hash it must have. `thorough` hashes in any case.
pub fn check(path: &Path, expected: Option<&str>, thorough: bool) -> anyhow::Result<State> {
    let metadata = match fs::metadata(path) {
        Ok(m) if m.is_file() => m,
        Ok(_) => return Ok(State::Corrupt("it is not a file".into())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(State::Missing),
        Err(e) => return Err(e).with_context(|| format!("cannot look at `{}`", path.display())),
    };
    let record: Option<Record> = read_json(&beside(path, ".json"))?;
    let Some(wanted) = expected.or(record.as_ref().map(|r| r.sha256.as_str())) else {
        return Ok(State::Corrupt("it has no record of what it should be".into()));
    };
    let modified_ns = modified_ns(&metadata);
    if let Some(r) = &record
        && !thorough
        && r.sha256 == wanted
        && (r.bytes, r.modified_ns) == (metadata.len(), modified_ns)
    {
        return Ok(State::Good);
    }
    if let Some(r) = record.as_ref().filter(|r| r.sha256 == wanted && r.bytes != metadata.len()) {
        return Ok(State::Corrupt(format!("it has {} bytes, not {}", metadata.len(), r.bytes)));
    }
    let (_, sha256) = hash_file(path)?;
    if sha256 != wanted {
        return Ok(State::Corrupt(format!("its SHA-256 is {sha256}, not {wanted}")));
    }
    let source = record.map_or_else(|| "found in the cache".into(), |r| r.source);
    let record = Record { bytes: metadata.len(), modified_ns, sha256, source };
    // A cache that cannot be written is still a cache that can be read.
    let _ = write_json(&beside(path, ".json"), &record);
    Ok(State::Good)
}

/// Makes `part` the file at `path`: synced, recorded, renamed. Afterwards it is whole or it is not there.
pub fn land(part: &Path, path: &Path, sha256: &str, source: &str) -> anyhow::Result<()> {
    let landing = || -> io::Result<()> {
        File::open(part)?.sync_all()?;
        let metadata = fs::metadata(part)?;
        let record = Record {
            bytes: metadata.len(),
            modified_ns: modified_ns(&metadata),
            sha256: sha256.into(),
            source: source.into(),
        };
        // The record first: a crash in between leaves a record that fits no file, and the next pull replaces it.
        write_json(&beside(path, ".json"), &record)?;
        fs::rename(part, path)?;
        sync_parent(path)
    };
    landing().map_err(|e| storage_failure(path, e).into())
}

/// The SHA-256 of a file and its size.
pub fn hash_file(path: &Path) -> anyhow::Result<(u64, String)> {
    let mut hasher = Sha256::new();
    let bytes = hash_into(path, &mut hasher).with_context(|| format!("cannot read `{}`", path.display()))?;
    Ok((bytes, hex(hasher)))
}

/// Feeds a whole file to `hasher`; returns its size.
pub fn hash_into(path: &Path, hasher: &mut Sha256) -> io::Result<u64> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; 1 << 18];
    let mut bytes = 0;
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(bytes),
            Ok(n) => {
                hasher.update(&buffer[..n]);
                bytes += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// A finished hash in lower-case hex.
pub fn hex(hasher: Sha256) -> String {
    hasher.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// Holds the lock of `path` until dropped. The kernel releases it when the holder dies, however it dies.
pub struct Lock(#[allow(dead_code)] File);

/// Locks `path` against other processes; calls `waiting` once if another one holds it.
pub fn lock(path: &Path, waiting: impl FnOnce()) -> anyhow::Result<Lock> {
    let parent = path.parent().context("a file in the cache has a folder")?;
    fs::create_dir_all(parent).map_err(|e| storage_failure(parent, e))?;
    let lock = beside(path, ".lock");
    // The lock file stays: deleting it would let two processes lock two different files of one name.
    let file =
        File::options().create(true).truncate(false).write(true).open(&lock).map_err(|e| storage_failure(&lock, e))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(fs::TryLockError::WouldBlock) => {
            waiting();
            file.lock().with_context(|| format!("cannot lock `{}`", lock.display()))?;
        }
        Err(fs::TryLockError::Error(e)) => return Err(storage_failure(&lock, e).into()),
    }
    Ok(Lock(file))
}

/// A failure to write below the cache, with the remedy that fits.
pub fn storage_failure(path: &Path, error: io::Error) -> Failure {
    let remedy = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free some space, or point HANZO_CACHE at a disk that has it; what is downloaded so far is kept"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "point HANZO_CACHE at a folder that you can write to"
        }
        _ => "check the disk and the folder, or point HANZO_CACHE elsewhere",
    };
    Failure::new(format!("cannot write `{}`", path.display())).because(error).remedy(remedy)
}

/// Reads a JSON file; `None` if it is missing or not what it should be (then it is as good as missing).
pub fn read_json<T: DeserializeOwned>(path: &Path) -> anyhow::Result<Option<T>> {
    match fs::read(path) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| format!("cannot read `{}`", path.display())),
    }
}

/// Writes a JSON file atomically.
pub fn write_json<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    let temporary = beside(path, &format!(".{}.tmp", std::process::id()));
    let written = serde_json::to_vec_pretty(value)
        .map_err(io::Error::other)
        .and_then(|json| fs::write(&temporary, json))
        .and_then(|()| File::open(&temporary)?.sync_all())
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Removes a file if it is there.
pub fn remove(path: &Path) -> Result<(), Failure> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(storage_failure(path, e)),
        _ => Ok(()),
    }
}

fn modified_ns(metadata: &fs::Metadata) -> u64 {
    let since = metadata.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
    since.map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
}

fn sync_parent(path: &Path) -> io::Result<()> {
    #[cfg(unix)]
    if let Some(parent) = path.parent() {
        File::open(parent)?.sync_all()?;
    }
    Ok(())
}

/// Bytes that an unprivileged user can still write in `folder`'s file system; `None` where that is unknown.
pub fn free_bytes(folder: &Path) -> Option<u64> {
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt;
        let path = std::ffi::CString::new(folder.as_os_str().as_bytes()).ok()?;
        // SAFETY: an all-zero statvfs is a valid value of that plain C struct.
        let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: `path` is NUL-terminated and `stat` is writable; both outlive the call.
        if unsafe { libc::statvfs(path.as_ptr(), &mut stat) } != 0 {
            return None;
        }
        #[allow(clippy::unnecessary_cast)] // the fields' types differ between platforms
        (stat.f_bavail as u64).checked_mul(stat.f_frsize as u64)
    }
    #[cfg(not(unix))]
    {
        let _ = folder;
        None
    }
}
