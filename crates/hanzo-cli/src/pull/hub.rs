//! The model hub: what a repository holds, and which of its files a user means.

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use ureq::http::{HeaderMap, StatusCode};

use super::http::{self, Client};
use super::spec::HubId;
use crate::failure::Failure;

/// What is taken from a repository when the user names no file.
pub const DEFAULT_QUANT: &str = "Q4_K_M";
/// A listing of more pages than this (of 1000 files each) is not a model repository.
const MOST_PAGES: usize = 50;

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HubFile {
    /// Its path in the repository.
    pub path: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// Its SHA-256, which the hub knows for large files.
    pub sha256: Option<String>,
}

/// The URL of a file's contents.
pub fn file_url(hub: &str, id: &HubId, path: &str) -> String {
    format!("{hub}/{}/resolve/{}/{}", id.repo, escape(&id.revision), escape_path(path))
}

/// All `.gguf` files of a repository.
pub fn list(client: &Client, hub: &str, id: &HubId) -> anyhow::Result<Vec<HubFile>> {
    let mut url = format!("{hub}/api/models/{}/tree/{}?recursive=true", id.repo, escape(&id.revision));
    let mut files = Vec::new();
    for _ in 0..MOST_PAGES {
        let (page, headers) = client.json(&url)?.map_err(|status| listing_failure(id, &url, status))?;
        files.extend(entries(&page).with_context(|| format!("{url}: not a listing of files"))?);
        match next_page(&headers) {
            Some(next) if next.starts_with(&format!("{hub}/")) => url = next,
            _ => return Ok(files),
        }
    }
    Err(Failure::new(format!("`{}` has more files than a model's repository would", id.repo))
        .remedy("give the file's own URL")
        .into())
}

fn listing_failure(id: &HubId, url: &str, status: StatusCode) -> Failure {
    let failure = Failure::new(format!("cannot list `{}`: the hub answered {status} to {url}", id.repo));
    failure.remedy(match status {
        // The hub does not tell strangers which private repositories exist.
        StatusCode::UNAUTHORIZED | StatusCode::NOT_FOUND => {
            "check owner and name; for a private or gated repository set HF_TOKEN to an access token"
        }
        other => http::status_remedy(other),
    })
}

fn entries(page: &serde_json::Value) -> Option<Vec<HubFile>> {
    let mut files = Vec::new();
    for entry in page.as_array()? {
        let path = entry.get("path")?.as_str()?;
        if entry.get("type")?.as_str()? != "file" || !path.to_ascii_lowercase().ends_with(".gguf") {
            continue;
        }
        let lfs = entry.get("lfs");
        let bytes = lfs.and_then(|l| l.get("size")).or(entry.get("size"))?.as_u64()?;
        let oid = lfs.and_then(|l| l.get("oid")).and_then(|o| o.as_str());
        let sha256 = oid.map(|o| o.trim_start_matches("sha256:").to_ascii_lowercase());
        files.push(HubFile { path: path.into(), bytes, sha256: sha256.filter(|h| is_sha256(h)) });
    }
    Some(files)
}

fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// `Link: <URL>; rel="next"`.
fn next_page(headers: &HeaderMap) -> Option<String> {
    let link = headers.get("link")?.to_str().ok()?;
    link.split(',').find_map(|part| {
        let (url, rel) = part.trim().strip_prefix('<')?.split_once('>')?;
        rel.contains("rel=\"next\"").then(|| url.to_string())
    })
}

/// The files that `wanted` means: one file, or all parts of a split one in order.
///
/// `wanted` is a path, a glob or a quantization name; `None` means [`DEFAULT_QUANT`], or the only model there is.
/// A quantization name that fits several takes the shortest path (`x-Q4_K_M` before `x-UD-Q4_K_M`).
pub fn choose(files: &[HubFile], id: &HubId) -> Result<Vec<HubFile>, Failure> {
    let wanted = id.file.as_deref();
    let models = models(files, wanted.is_some_and(|w| w.to_ascii_lowercase().ends_with(".gguf")));
    let fitting: Vec<&Vec<HubFile>> = match wanted {
        None => {
            let default = by_quant(&models, DEFAULT_QUANT);
            if default.is_empty() && models.len() == 1 { vec![&models[0]] } else { default }
        }
        Some(w) if w.contains(['*', '?']) => {
            models.iter().filter(|m| m.iter().any(|f| glob(w.as_bytes(), f.path.as_bytes()))).collect()
        }
        Some(w) => match models.iter().find(|m| m.iter().any(|f| f.path == w)) {
            Some(exact) => vec![exact],
            None => by_quant(&models, w),
        },
    };
    let chosen = match (fitting.len(), wanted) {
        (0, _) => return Err(nothing_fits(id, &models)),
        (2.., Some(w)) if w.contains(['*', '?']) => {
            let names: Vec<&str> = fitting.iter().map(|m| m[0].path.as_str()).collect();
            return Err(Failure::new(format!("`{w}` fits several files of `{}`: {}", id.repo, names.join(", ")))
                .remedy("write a pattern that fits one"));
        }
        _ => fitting.into_iter().min_by_key(|m| (m[0].path.len(), m[0].path.clone())).cloned().unwrap_or_default(),
    };
    if let Some((_, _, count)) = split_part(&chosen[0].path)
        && chosen.len() != count
    {
        return Err(Failure::new(format!("`{}`: {} of {count} parts are there", chosen[0].path, chosen.len()))
            .remedy("the repository is incomplete: choose another file"));
    }
    Ok(chosen)
}

fn nothing_fits(id: &HubId, models: &[Vec<HubFile>]) -> Failure {
    let wanted = id.file.as_deref().unwrap_or(DEFAULT_QUANT);
    if models.is_empty() {
        return Failure::new(format!("`{}` holds no GGUF model", id.repo))
            .remedy("look for a repository whose name ends in -GGUF");
    }
    let names: Vec<&str> = models.iter().map(|m| m[0].path.as_str()).collect();
    Failure::new(format!("`{}` holds nothing that fits `{wanted}`", id.repo)).remedy(format!(
        "write `{}:FILE` with one of: {}",
        id.repo,
        names.join(", ")
    ))
}

/// The models of a listing: parts of one split file together, files that only accompany a model left out.
fn models(files: &[HubFile], companions_too: bool) -> Vec<Vec<HubFile>> {
    let mut models: Vec<(String, Vec<HubFile>)> = Vec::new();
    let mut files: Vec<&HubFile> = files.iter().collect();
    files.sort_by(|a, b| a.path.cmp(&b.path));
    for file in files {
        let name = file.path.rsplit('/').next().unwrap_or_default().to_ascii_lowercase();
        if !companions_too && (name.contains("mmproj") || name.starts_with("imatrix")) {
            continue;
        }
        let stem = split_part(&file.path).map_or(file.path.as_str(), |(stem, _, _)| stem);
        match models.iter_mut().find(|(s, _)| s == stem) {
            Some((_, parts)) => parts.push(file.clone()),
            None => models.push((stem.to_string(), vec![file.clone()])),
        }
    }
    models.into_iter().map(|(_, parts)| parts).collect()
}

/// `STEM-00002-of-00005.gguf` as (STEM, 2, 5).
fn split_part(path: &str) -> Option<(&str, usize, usize)> {
    let (rest, count) = path.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let digits = |s: &str| (s.len() == 5).then(|| s.parse().ok()).flatten();
    Some((stem, digits(number)?, digits(count)?))
}

/// Models with `quant` as a word of their path, in any case: `Q4_K` is no word of `x-Q4_K_M.gguf`.
fn by_quant<'m>(models: &'m [Vec<HubFile>], quant: &str) -> Vec<&'m Vec<HubFile>> {
    let quant = quant.to_ascii_lowercase();
    let in_word = |b: Option<&u8>| b.is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_');
    let fits = |path: &str| {
        let path = path.to_ascii_lowercase();
        path.match_indices(&quant).any(|(at, _)| {
            let bytes = path.as_bytes();
            !in_word(at.checked_sub(1).and_then(|i| bytes.get(i))) && !in_word(bytes.get(at + quant.len()))
        })
    };
    models.iter().filter(|m| fits(&m[0].path)).collect()
}

/// `*` fits any run of bytes, `?` one byte.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut retry: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                retry = Some((p, t));
                p += 1;
            }
            Some(&c) if c == b'?' || c == text[t] => {
                p += 1;
                t += 1;
            }
            _ => match &mut retry {
                // The last star takes one byte more.
                Some((star, from)) => {
                    *from += 1;
                    (p, t) = (*star + 1, *from);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&c| c == b'*')
}

fn escape_path(path: &str) -> String {
    path.split('/').map(escape).collect::<Vec<_>>().join("/")
}

/// Percent-encodes all but RFC 3986's unreserved characters.
fn escape(segment: &str) -> String {
    segment
        .bytes()
        .map(|b| match b {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(b).to_string(),
            _ => format!("%{b:02X}"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose_from(paths: &[&str], wanted: Option<&str>) -> Result<Vec<String>, String> {
        let files: Vec<_> = paths.iter().map(|p| HubFile { path: p.to_string(), bytes: 1, sha256: None }).collect();
        let id = HubId { repo: "o/r".into(), revision: "main".into(), file: wanted.map(str::to_string) };
        let chosen = choose(&files, &id).map_err(|e| crate::failure::report(&e.into()))?;
        Ok(chosen.into_iter().map(|f| f.path).collect())
    }

    #[test]
    fn the_default_is_q4_k_m_or_the_only_model() {
        let paths = ["m-Q4_K_S.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf"];
        assert_eq!(choose_from(&paths, None).unwrap(), ["m-Q4_K_M.gguf"]);
        assert_eq!(choose_from(&["only-F16.gguf", "mmproj-F16.gguf"], None).unwrap(), ["only-F16.gguf"]);
        let error = choose_from(&["a-Q8_0.gguf", "b-Q6_K.gguf"], None).unwrap_err();
        assert!(error.contains("a-Q8_0.gguf, b-Q6_K.gguf"), "{error}");
        assert!(choose_from(&[], None).unwrap_err().contains("holds no GGUF"));
    }

    #[test]
    fn a_file_is_chosen_by_path_quant_or_glob() {
        let paths = ["m.q4_k_m.gguf", "m.q4_k.gguf", "sub/m.IQ2_XS.gguf", "sub/m.IQ2_XXS.gguf", "mmproj.gguf"];
        assert_eq!(choose_from(&paths, Some("Q4_K")).unwrap(), ["m.q4_k.gguf"]);
        assert_eq!(choose_from(&paths, Some("iq2_xs")).unwrap(), ["sub/m.IQ2_XS.gguf"]);
        assert_eq!(choose_from(&paths, Some("sub/m.IQ2_XXS.gguf")).unwrap(), ["sub/m.IQ2_XXS.gguf"]);
        assert_eq!(choose_from(&paths, Some("*XXS*")).unwrap(), ["sub/m.IQ2_XXS.gguf"]);
        assert_eq!(choose_from(&paths, Some("mmproj.gguf")).unwrap(), ["mmproj.gguf"]);
        assert!(choose_from(&paths, Some("sub/*")).unwrap_err().contains("fits several"));
        assert!(choose_from(&paths, Some("Q3_K")).is_err());
    }

    #[test]
    fn a_split_model_is_taken_whole_or_not_at_all() {
        let paths = ["q/m-Q4_K_M-00002-of-00002.gguf", "q/m-Q4_K_M-00001-of-00002.gguf", "m-Q8_0.gguf"];
        let expected = ["q/m-Q4_K_M-00001-of-00002.gguf", "q/m-Q4_K_M-00002-of-00002.gguf"];
        assert_eq!(choose_from(&paths, None).unwrap(), expected);
        assert_eq!(choose_from(&paths, Some(paths[0])).unwrap(), expected);
        assert!(choose_from(&paths[..1], None).unwrap_err().contains("1 of 2 parts"));
    }

    #[test]
    fn globs_backtrack() {
        for (pattern, text, fits) in [
            ("*", "", true),
            ("a*b*c", "axxbxbxc", true),
            ("a*b*c", "axxbxbx", false),
            ("?b", "ab", true),
            ("?b", "b", false),
            ("*.gguf", "x/y.gguf", true),
            ("", "x", false),
        ] {
            assert_eq!(glob(pattern.as_bytes(), text.as_bytes()), fits, "{pattern} {text}");
        }
    }

    #[test]
    fn listings_give_sizes_and_hashes_of_large_files() {
        let oid = "ab".repeat(32);
        let page = serde_json::json!([
            {"type": "directory", "path": "d.gguf"},
            {"type": "file", "path": "README.md", "size": 3},
            {"type": "file", "path": "x y.gguf", "size": 9, "oid": "1", "lfs": {"oid": oid, "size": 12}},
            {"type": "file", "path": "small.gguf", "size": 5, "oid": "1"},
        ]);
        let files = entries(&page).unwrap();
        assert_eq!(files[0], HubFile { path: "x y.gguf".into(), bytes: 12, sha256: Some(oid) });
        assert_eq!(files[1], HubFile { path: "small.gguf".into(), bytes: 5, sha256: None });
        assert!(entries(&serde_json::json!({"error": "x"})).is_none());
        assert_eq!(escape_path("x y/ä.gguf"), "x%20y/%C3%A4.gguf");
    }
}
