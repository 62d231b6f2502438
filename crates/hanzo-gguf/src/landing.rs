//! Files that appear whole or not at all: written under a temporary name beside their place, then renamed into it.
//! Knows nothing of GGUF.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A file being written that lands at its path only when [`Landing::land`] is called: a reader never sees half of it,
/// and what was there before stays until then. Dropped without landing, it leaves nothing behind; what a killed process left
/// beside its path, the next one to write there removes.
///
/// ```
/// use hanzo_gguf::Landing;
/// use std::io::Write;
/// let path = std::env::temp_dir().join(format!("landing-doc-{}", std::process::id()));
/// let mut file = Landing::create(&path)?;
/// file.write_all(b"whole")?;
/// assert!(!path.exists());
/// file.land()?;
/// assert_eq!(std::fs::read(&path)?, b"whole");
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Landing {
    path: PathBuf,
    temporary: PathBuf,
    file: BufWriter<File>,
}

impl Landing {
    /// Starts a file that will land at `path`, beside it under a temporary name.
    ///
    /// # Errors
    /// If `path` has no file name or is there and no regular file, or the temporary file cannot be created.
    pub fn create(path: impl AsRef<Path>) -> io::Result<Landing> {
        let mut path = path.as_ref().to_path_buf();
        if path.file_name().is_none() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path has no file name"));
        }
        if let Ok(there) = fs::metadata(&path) {
            // Land on what a link points to; never rename over a device, a pipe or a socket.
            path = fs::canonicalize(&path)?;
            if there.is_dir() {
                return Err(io::Error::new(io::ErrorKind::IsADirectory, "the path is a directory"));
            }
            if !there.is_file() {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path is no regular file; choose another"));
            }
        }
        sweep(&path);
        let (temporary, file) = create_temporary(&path)?;
        Ok(Landing { path, temporary, file: BufWriter::with_capacity(1 << 20, file) })
    }

    /// Where the file will land.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes everything to the disk and renames the file into its place, replacing what was there.
    ///
    /// # Errors
    /// If the disk is full or the rename is refused; then nothing has changed at the path.
    pub fn land(mut self) -> io::Result<()> {
        self.file.flush()?;
        self.file.get_ref().sync_all()?;
        fs::rename(&self.temporary, &self.path)
    }
}

/// How old a leftover must be: a file is locked only after it was made.
const STALE: Duration = Duration::from_secs(60);

/// What temporary names begin and end with.
const TEMPORARY: (&str, &str) = (".landing-", ".tmp");

/// Removes temporary files beside `path` that nobody is writing: those that are written are locked, and a lock goes with its process. What cannot
/// be looked at or removed stays.
fn sweep(path: &Path) {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let ours = name.to_str().is_some_and(|n| n.starts_with(TEMPORARY.0) && n.ends_with(TEMPORARY.1));
        let regular = entry.file_type().is_ok_and(|t| t.is_file());
        let age = || entry.metadata().ok()?.modified().ok()?.elapsed().ok();
        if ours
            && regular
            && age().is_some_and(|age| age >= STALE)
            && let Ok(file) = OpenOptions::new().write(true).open(entry.path())
            && file.try_lock().is_ok()
        {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Creates a file of a new name beside `path`, locked as long as it is written.
fn create_temporary(path: &Path) -> io::Result<(PathBuf, File)> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    loop {
        // The process id alone is not unique: a killed container's leftover has the id that the next one gets. Short,
        // because `path`'s own name may be as long as names can be.
        let count = COUNTER.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}{}-{count}{}", TEMPORARY.0, std::process::id(), TEMPORARY.1);
        let temporary = path.with_file_name(name);
        match OpenOptions::new().write(true).create_new(true).open(&temporary) {
            Ok(file) => {
                // Where a file system has no locks, leftovers stay, and so does this.
                let _ = file.try_lock();
                return Ok((temporary, file));
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
            Err(e) => return Err(e),
        }
    }
}

impl Write for Landing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Seek for Landing {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        // After a landing the temporary name is gone already; if removing fails there is no one to tell.
        let _ = fs::remove_file(&self.temporary);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn what_a_killed_process_left_is_removed_and_what_is_being_written_is_not() {
        let folder = std::env::temp_dir().join(format!("hanzo-landing-test-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let old = SystemTime::now() - 2 * STALE;
        let leave = |name: &str| {
            let file = File::create(folder.join(name)).expect("a file");
            file.set_modified(old).expect("a time");
        };
        leave(".landing-1-0.tmp");
        leave("landing-1-0.tmp");
        File::create(folder.join(".landing-2-0.tmp")).expect("a new file");
        let slow = Landing::create(folder.join("slow")).expect("a file to be written");
        slow.file.get_ref().set_modified(old).expect("a time");
        Landing::create(folder.join("next")).expect("a file").land().expect("landed");
        let there = |name: &str| folder.join(name).exists();
        assert!(!there(".landing-1-0.tmp"), "a leftover");
        assert!(there("landing-1-0.tmp") && there(".landing-2-0.tmp") && there("next"));
        slow.land().expect("landed");
        assert!(there("slow"));
        fs::remove_dir_all(folder).expect("clean up");
    }
}
