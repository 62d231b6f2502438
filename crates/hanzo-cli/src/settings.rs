//! The environment of the command line, read once.
//!
//! No other module of this crate reads an environment variable; every one is listed in [`VARIABLES`]
//! (the levers' own are listed by the crate that defines them).

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use hanzo_ml::settings;

/// Where the model hub is, unless `HF_ENDPOINT` names a mirror.
pub const DEFAULT_HUB: &str = "https://huggingface.co";

/// Every variable this module reads: its name and its meaning.
pub const VARIABLES: &[(&str, &str)] = &[
    (
        "HANZO_CACHE",
        "folder for downloaded models and compiled GPU pipelines (default: $XDG_CACHE_HOME/hanzo, else ~/.cache/hanzo)",
    ),
    ("HANZO_PYTHON", "the Python whose pip fetches wheels (default: python3)"),
    ("HF_ENDPOINT", "the model hub or a mirror of it (default: https://huggingface.co)"),
    ("HF_TOKEN", "access token for gated repositories of the model hub"),
    ("SSL_CERT_FILE", "PEM file of the certificate authorities to trust (default: built in)"),
    ("XDG_CACHE_HOME", "base of the default cache folder"),
];

/// Variables that the tests of this project read, and nothing else does.
const OF_TESTS: [&str; 2] = ["HANZO_NO_GPU_TESTS", "HANZO_TEST_MODELS"];

/// Warnings about variables of the environment that are meant for this program, by their names, and that it does not know.
pub fn unknown_variables() -> Vec<String> {
    std::env::vars_os().filter(|(_, value)| !value.is_empty()).filter_map(|(name, _)| unknown(&name)).collect()
}

/// What to say of a variable that starts as ours do and is none of them.
fn unknown(name: &OsStr) -> Option<String> {
    let name = name.to_string_lossy();
    if !name.starts_with("HANZO_") || OF_TESTS.contains(&&*name) {
        return None;
    }
    let listed = settings::VARIABLES.iter().chain(VARIABLES).flat_map(|v| settings::spelled_out(v.0));
    let known: Vec<String> = listed.filter(|n| n.starts_with("HANZO_")).collect();
    let nearest = known.iter().min_by_key(|n| distance(n, &name.to_uppercase())).filter(|n| ***n != *name)?;
    let name = name.escape_debug();
    Some(format!(
        "warning: {name} is no variable of hanzo and changes nothing; the nearest is {nearest} (`hanzo levers --env` lists all)"
    ))
}

/// Characters to insert, remove or replace to make one name of the other.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    // Of what was read of `a`, to each beginning of `b`.
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// The settings a run starts with.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// The cache folder; `None` if neither `HANZO_CACHE`, `XDG_CACHE_HOME` nor a home folder is known.
    pub cache: Option<PathBuf>,
    /// The Python to run pip with.
    pub python: OsString,
    /// The hub's base URL, without a trailing slash.
    pub hub: String,
    /// The hub's access token.
    pub token: Option<String>,
    /// Certificate authorities to trust instead of the built-in ones.
    pub certificates: Option<PathBuf>,
}

impl Settings {
    /// Reads the process environment.
    pub fn from_env() -> Settings {
        Settings::read(|name| std::env::var_os(name), std::env::home_dir())
    }

    fn read(var: impl Fn(&str) -> Option<OsString>, home: Option<PathBuf>) -> Settings {
        let set = |name: &str| {
            debug_assert!(VARIABLES.iter().any(|(n, _)| *n == name), "{name} is missing from VARIABLES");
            var(name).filter(|v| !v.is_empty())
        };
        let text = |name: &str| set(name).map(|v| v.to_string_lossy().into_owned());
        // XDG: a relative path in XDG_CACHE_HOME is invalid and must be ignored.
        let xdg = set("XDG_CACHE_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
        let base = xdg.or_else(|| home.filter(|h| !h.as_os_str().is_empty()).map(|h| h.join(".cache")));
        Settings {
            cache: set("HANZO_CACHE").map(PathBuf::from).or_else(|| base.map(|b| b.join("hanzo"))),
            python: set("HANZO_PYTHON").unwrap_or_else(|| "python3".into()),
            hub: text("HF_ENDPOINT").map_or(DEFAULT_HUB.into(), |h| h.trim_end_matches('/').into()),
            token: text("HF_TOKEN"),
            certificates: set("SSL_CERT_FILE").map(PathBuf::from),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vars: &[(&str, &str)], home: Option<&str>) -> Settings {
        let find = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| OsString::from(v));
        Settings::read(find, home.map(PathBuf::from))
    }

    #[test]
    fn the_cache_folder_follows_hanzo_cache_then_xdg_then_home() {
        let cache = |vars: &[(&str, &str)]| read(vars, Some("/home/x")).cache.unwrap();
        assert_eq!(cache(&[("HANZO_CACHE", "/c"), ("XDG_CACHE_HOME", "/x")]), PathBuf::from("/c"));
        assert_eq!(cache(&[("HANZO_CACHE", ""), ("XDG_CACHE_HOME", "/x")]), PathBuf::from("/x/hanzo"));
        assert_eq!(cache(&[("XDG_CACHE_HOME", "not/absolute")]), PathBuf::from("/home/x/.cache/hanzo"));
        assert_eq!(read(&[], None).cache, None);
    }

    #[test]
    fn a_variable_that_looks_like_ours_and_is_none_is_named_with_the_nearest_that_is() {
        let said = |name: &str| unknown(OsStr::new(name));
        for (name, nearest) in [
            ("HANZO_NORM_QUANTISE", "HANZO_NORM_QUANTIZE "),
            ("HANZO_QKV_FALBACK", "HANZO_QKV_FALLBACK "),
            ("HANZO_isa", "HANZO_ISA "),
            ("HANZO_CACHES", "HANZO_CACHE "),
            ("HANZO_VK_MASKS", "HANZO_VK_MASK "),
            ("HANZO_PYTON", "HANZO_PYTHON "),
            ("HANZO_FOO", "HANZO_"),
        ] {
            let said = said(name).unwrap_or_default();
            assert!(said.starts_with("warning: ") && said.contains(name) && said.contains(nearest), "{name}: {said}");
        }
        let listed = settings::VARIABLES.iter().chain(VARIABLES).flat_map(|v| settings::spelled_out(v.0));
        for name in listed.chain(OF_TESTS.map(String::from)).chain(["PATH".into(), "HF_TOKEN".into(), "HANZO".into()]) {
            assert_eq!(said(&name), None);
        }
        assert_eq!((distance("", "abc"), distance("abc", ""), distance("kitten", "sitting")), (3, 3, 3));
    }

    #[test]
    fn a_hub_mirror_loses_its_trailing_slash() {
        assert_eq!(read(&[("HF_ENDPOINT", "http://m/")], None).hub, "http://m");
        assert_eq!(read(&[], None).hub, DEFAULT_HUB);
    }
}
