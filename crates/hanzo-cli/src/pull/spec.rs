//! What a user may write for a model: a short name, a hub id, a URL, a path. Parsing only, no I/O but `is_file`.

use std::path::{Path, PathBuf};

use super::names::{self, Model};
use crate::failure::Failure;

/// A parsed model specification.
#[derive(Debug)]
pub enum Spec {
    /// A short name with pinned contents.
    Name(&'static Model),
    /// A repository of the model hub, and what to take from it.
    Hub(HubId),
    /// Any other URL.
    Url(String),
    /// A file on this machine.
    Path(PathBuf),
}

/// `owner/repo[:file]` at a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubId {
    /// `owner/repo`.
    pub repo: String,
    /// A branch, tag or commit.
    pub revision: String,
    /// A file, a glob or a quantization name; `None` asks for the default.
    pub file: Option<String>,
}

/// Parses `text`; `hub` is the hub's base URL, whose file URLs are treated as hub ids.
///
/// # Errors
/// When the text is none of the four, or names a file that is not there.
pub fn parse(text: &str, hub: &str) -> Result<Spec, Failure> {
    let text = text.trim();
    if text.is_empty() {
        return Err(unknown(text));
    }
    if let Some(scheme_end) = text.find("://") {
        return match &text[..scheme_end] {
            "http" | "https" => Ok(hub_url(text, hub).map_or_else(|| Spec::Url(text.into()), Spec::Hub)),
            scheme => Err(Failure::new(format!("`{text}`: the scheme `{scheme}` is not supported"))
                .remedy("use an http:// or https:// URL, or download the file yourself and give its path")),
        };
    }
    // A short name wins over a file of that name in the current folder: `./smollm2` still names the file.
    if let Some(model) = names::find(text) {
        return Ok(Spec::Name(model));
    }
    let path = Path::new(text);
    if path.is_file() {
        return Ok(Spec::Path(path.to_path_buf()));
    }
    if path.is_dir() {
        return Err(Failure::new(format!("`{text}` is a folder")).remedy("give the .gguf file inside it"));
    }
    // A device, a pipe or a socket: models are mapped into memory, which takes a file of a known size.
    if path.exists() {
        return Err(Failure::new(format!("`{text}` is not a regular file")).remedy("give the path of a .gguf file"));
    }
    if let Some(id) = hub_id(text) {
        return Ok(Spec::Hub(id));
    }
    let looks_like_a_path = text.contains(['/', '\\']) || text.to_ascii_lowercase().ends_with(".gguf");
    if looks_like_a_path {
        return Err(Failure::new(format!("no such file: `{text}`"))
            .remedy("check the path; `hanzo pull --list` shows the models known by name"));
    }
    Err(unknown(text))
}

fn unknown(text: &str) -> Failure {
    let known: Vec<&str> = names::MODELS.iter().map(|m| m.name).collect();
    Failure::new(format!("unknown model `{text}`"))
        .remedy(format!("use one of {}, a hub id `owner/repo[:file]`, a URL or a path", known.join(", ")))
}

/// `owner/repo` or `owner/repo:file`. Two segments that end in `.gguf` are a path, not a repository.
fn hub_id(text: &str) -> Option<HubId> {
    let (repo, file) = match text.split_once(':') {
        Some((repo, file)) => (repo, Some(file).filter(|f| !f.is_empty())),
        None => (text, None),
    };
    let valid = |segment: &str| {
        !segment.is_empty()
            && !segment.starts_with(['.', '-', '~'])
            && segment.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    let (owner, name) = repo.split_once('/')?;
    let is_path = file.is_none() && name.to_ascii_lowercase().ends_with(".gguf");
    if !valid(owner) || !valid(name) || is_path {
        return None;
    }
    Some(HubId { repo: repo.into(), revision: "main".into(), file: file.map(str::to_string) })
}

/// `HUB/owner/repo/{resolve,blob}/REVISION/FILE` as a browser shows it.
fn hub_url(url: &str, hub: &str) -> Option<HubId> {
    let rest = url.strip_prefix(hub)?.strip_prefix('/')?;
    let rest = rest.split(['?', '#']).next()?;
    let mut segments = rest.splitn(5, '/');
    let (owner, name, kind) = (segments.next()?, segments.next()?, segments.next()?);
    let (revision, file) = (segments.next()?, segments.next()?);
    if !matches!(kind, "resolve" | "blob") || revision.is_empty() || file.is_empty() || file.contains('%') {
        return None;
    }
    let id = hub_id(&format!("{owner}/{name}:{file}"))?;
    Some(HubId { revision: revision.into(), ..id })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HUB: &str = "https://hub.example";

    fn hub(text: &str) -> (String, String, Option<String>) {
        match parse(text, HUB) {
            Ok(Spec::Hub(id)) => (id.repo, id.revision, id.file),
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn the_four_kinds_are_told_apart() {
        assert!(matches!(parse("smollm2", HUB), Ok(Spec::Name(m)) if m.name == "smollm2"));
        assert!(matches!(parse(" SmolLM2 ", HUB), Ok(Spec::Name(_))));
        assert!(matches!(parse("http://h/x.gguf", HUB), Ok(Spec::Url(u)) if u == "http://h/x.gguf"));
        let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        assert!(matches!(parse(manifest, HUB), Ok(Spec::Path(p)) if p == Path::new(manifest)));
        let main = || "main".to_string();
        assert_eq!(hub("a/b"), ("a/b".into(), main(), None));
        assert_eq!(hub("a/b:"), ("a/b".into(), main(), None));
        assert_eq!(hub("a/b.gguf:Q4_K_M"), ("a/b.gguf".into(), main(), Some("Q4_K_M".into())));
        assert_eq!(hub("a/b-GGUF:sub/*.gguf"), ("a/b-GGUF".into(), main(), Some("sub/*.gguf".into())));
    }

    #[test]
    fn a_hub_file_url_is_a_hub_id() {
        let expected = ("a/b".to_string(), "v1".to_string(), Some("d/x.gguf".to_string()));
        assert_eq!(hub("https://hub.example/a/b/resolve/v1/d/x.gguf?download=true"), expected);
        assert_eq!(hub("https://hub.example/a/b/blob/v1/d/x.gguf"), expected);
        assert!(matches!(parse("https://hub.example/a/b", HUB), Ok(Spec::Url(_))));
        assert!(matches!(parse("https://hub.example.org/a/b/resolve/v1/x.gguf", HUB), Ok(Spec::Url(_))));
    }

    #[cfg(unix)]
    #[test]
    fn what_is_there_but_no_regular_file_is_said_to_be_that() {
        let failure = parse("/dev/null", HUB).map(|s| panic!("{s:?}")).unwrap_err();
        assert!(failure.to_string().contains("`/dev/null` is not a regular file"), "{failure}");
    }

    #[test]
    fn what_is_none_of_them_says_what_would_be() {
        for text in ["", "nosuchname", "dir/nosuch.gguf", "/a/b/c", "./a/b", "~/x", "ftp://x/y", "a//b", "src"] {
            let failure = parse(text, HUB).map(|s| panic!("{text}: {s:?}")).unwrap_err();
            let report = crate::failure::report(&failure.into());
            assert!(report.contains("remedy:"), "{report}");
        }
    }
}
