//! Settings from the environment, read once into a value.
//!
//! This is the only module of the libraries that reads environment variables. [`VARIABLES`] lists every one of them;
//! `hanzo levers --env` prints the list.

use crate::error::{Error, Result};
use crate::levers::{LEVERS, LeverSet};

/// Every environment variable and what it does; `<LEVER>` stands for a lever's id in capitals.
pub const VARIABLES: &[(&str, &str)] = &[
    ("HANZO_<LEVER>", "on | off: switch one lever"),
    ("HANZO_<LEVER>_FALLBACK", "1: the lever is off"),
    ("HANZO_PLAN", "plain: every lever off"),
    ("HANZO_CACHE", "folder for downloaded models (default: the XDG cache folder)"),
];

/// What the environment says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Levers in force.
    pub levers: LeverSet,
}

impl Settings {
    /// Reads the process environment.
    pub fn from_env() -> Result<Settings> {
        Settings::from_lookup(|name| std::env::var(name).ok())
    }

    /// Reads from any lookup, for tests.
    pub fn from_lookup(get: impl Fn(&str) -> Option<String>) -> Result<Settings> {
        let bad = |name: &str, got: &str, want: &str| {
            Err(Error::Setting { name: name.to_string(), what: format!("is `{got}`; expected {want}") })
        };
        let mut levers = match get("HANZO_PLAN").as_deref() {
            None | Some("") => LeverSet::default(),
            Some("plain") => LeverSet::NONE,
            Some(v) => return bad("HANZO_PLAN", v, "plain"),
        };
        for (i, l) in LEVERS.iter().enumerate() {
            let name = format!("HANZO_{}", l.id.to_ascii_uppercase());
            match get(&name).as_deref() {
                None | Some("") => {}
                Some("on" | "1") => levers = levers.set(i, true),
                Some("off" | "0") => levers = levers.set(i, false),
                Some(v) => return bad(&name, v, "on or off"),
            }
            let name = name + "_FALLBACK";
            match get(&name).as_deref() {
                None | Some("" | "0") => {}
                Some("1") => levers = levers.set(i, false),
                Some(v) => return bad(&name, v, "1 or 0"),
            }
        }
        Ok(Settings { levers })
    }
}
