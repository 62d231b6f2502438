//! Settings from the environment, read once into a value.
//!
//! This is the only module of the libraries that reads environment variables. [`VARIABLES`] lists every one of them;
//! `hanzo levers --env` prints the list.

use crate::cpu::HugePages;
use crate::cpu::isa::IsaLevel;
use crate::error::{Error, Result};
use crate::gpu::Mask;
use crate::levers::{LEVERS, LeverSet};
use crate::vulkan::VulkanOptions;
use std::ffi::OsString;
use std::path::PathBuf;

/// Every environment variable and what it does; `<LEVER>` stands for a lever's id in capitals.
pub const VARIABLES: &[(&str, &str)] = &[
    ("HANZO_<LEVER>", "on | off: switch one lever"),
    ("HANZO_<LEVER>_FALLBACK", "1: the lever is off"),
    ("HANZO_PLAN", "plain: every lever off"),
    ("HANZO_ISA", "portable | avx2 | avx512 | avx512vbmi | avx512bf16 | neon | i8mm: use no instructions beyond these"),
    (
        "HANZO_HUGE_PAGES",
        "on | off: copy weights to huge pages on the CPU, or read them where the file is mapped (default: copy up to 8 GiB \
         and half the available memory, where the system gives huge pages)",
    ),
    ("HANZO_VK_VALIDATE", "1: run Vulkan under the Khronos validation layer"),
    ("HANZO_VK_PROFILE", "1: `hanzo bench` times every kernel on Vulkan and prints what each test's last step cost"),
    ("HANZO_VK_INT_DOT", "on | off: use the packed int8 dot product, or not, whatever the device says of its speed"),
    (
        "HANZO_VK_MASK",
        "features not to use, so that a lesser device's kernels run: matrix or the name of a matrix unit (coop, coop2), dot, \
         f16, shared=BYTES, threads=N, joined by commas",
    ),
    ("HANZO_VK_QUEUE", "compute | graphics: the kind of queue to prefer (default: compute)"),
    (
        "HANZO_VK_PREFETCH",
        "MiB of weights to read ahead beside attention (lever weight_prefetch; default: by the device)",
    ),
    ("HANZO_CACHE", "folder for downloaded models (default: the XDG cache folder)"),
];

/// The names that an entry of [`VARIABLES`] stands for: itself, or one a lever.
pub fn spelled_out(entry: &str) -> Vec<String> {
    match entry.contains("<LEVER>") {
        true => LEVERS.iter().map(|l| entry.replace("<LEVER>", &l.id.to_ascii_uppercase())).collect(),
        false => vec![entry.to_string()],
    }
}

/// What the environment says of Vulkan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VulkanSettings {
    /// Run under the validation layer.
    pub validate: bool,
    /// Time every kernel and print each step's costs.
    pub profile: bool,
    /// Use the packed int8 dot product, or not; `None`: as the device says.
    pub int_dot: Option<bool>,
    /// Bytes of weights to read ahead beside attention; `None`: by the device.
    pub prefetch_bytes: Option<u64>,
    /// Prefer a queue that can also draw.
    pub graphics_queue: bool,
    /// What lowering is not to use of a device.
    pub mask: Mask,
}

impl VulkanSettings {
    /// How to open a device, with a folder for its pipeline cache.
    pub fn options(&self, pipeline_cache: Option<PathBuf>) -> VulkanOptions {
        VulkanOptions {
            validate: self.validate,
            int_dot: self.int_dot,
            prefetch_bytes: self.prefetch_bytes,
            graphics_queue: self.graphics_queue,
            mask: self.mask,
            pipeline_cache,
            ..VulkanOptions::default()
        }
    }

    fn from_lookup(get: impl Fn(&str) -> Option<String>) -> Result<VulkanSettings> {
        let choice = |name: &str, yes: &str, no: &str| match get(name).as_deref() {
            None | Some("") => Ok(None),
            Some(v) if v == yes => Ok(Some(true)),
            Some(v) if v == no => Ok(Some(false)),
            Some(v) => Err(Error::Setting { name: name.into(), what: format!("is `{v}`; expected {yes} or {no}") }),
        };
        let prefetch = match get("HANZO_VK_PREFETCH").as_deref() {
            None | Some("") => None,
            Some(v) => match v.parse::<u16>() {
                Ok(mib) => Some(u64::from(mib) << 20),
                Err(_) => {
                    let what = format!("is `{v}`; expected a number of MiB");
                    return Err(Error::Setting { name: "HANZO_VK_PREFETCH".into(), what });
                }
            },
        };
        let text = get("HANZO_VK_MASK").unwrap_or_default();
        let mask = Mask::parse(&text).ok_or_else(|| Error::Setting {
            name: "HANZO_VK_MASK".into(),
            what: format!("is `{text}`; expected {}", Mask::WORDS),
        })?;
        Ok(VulkanSettings {
            mask,
            validate: choice("HANZO_VK_VALIDATE", "1", "0")?.unwrap_or(false),
            profile: choice("HANZO_VK_PROFILE", "1", "0")?.unwrap_or(false),
            int_dot: choice("HANZO_VK_INT_DOT", "on", "off")?,
            prefetch_bytes: prefetch,
            graphics_queue: choice("HANZO_VK_QUEUE", "graphics", "compute")?.unwrap_or(false),
        })
    }
}

/// What the environment says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Levers in force.
    pub levers: LeverSet,
    /// Instruction set in force.
    pub isa: IsaLevel,
    /// Whether the CPU's weights are copied to huge pages.
    pub huge_pages: HugePages,
    /// How Vulkan devices are used.
    pub vulkan: VulkanSettings,
}

impl Settings {
    /// Reads the process environment.
    pub fn from_env() -> Result<Settings> {
        Settings::from_os_lookup(|name| std::env::var_os(name))
    }

    /// What is read here is text; a folder need not be.
    fn from_os_lookup(get: impl Fn(&str) -> Option<OsString>) -> Result<Settings> {
        let names = VARIABLES.iter().filter(|v| v.0 != "HANZO_CACHE").flat_map(|v| spelled_out(v.0));
        for name in names {
            if get(&name).is_some_and(|value| value.to_str().is_none()) {
                return Err(Error::Setting { name, what: "is not UTF-8; set it to text, or unset it".into() });
            }
        }
        Settings::from_lookup(|name| get(name).and_then(|value| value.into_string().ok()))
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
        let isa = match get("HANZO_ISA").as_deref() {
            None | Some("") => IsaLevel::detect(),
            Some(v) => match IsaLevel::from_name(v) {
                Some(i) if i.is_available() => i,
                _ => {
                    return bad("HANZO_ISA", v, &format!("one of {}, which this CPU has", IsaLevel::available_names()));
                }
            },
        };
        let vulkan = VulkanSettings::from_lookup(&get)?;
        let huge_pages = match get("HANZO_HUGE_PAGES").as_deref() {
            None | Some("") => HugePages::Auto,
            Some("on") => HugePages::On,
            Some("off") => HugePages::Off,
            Some(v) => return bad("HANZO_HUGE_PAGES", v, "on or off"),
        };
        Ok(Settings { levers, isa, huge_pages, vulkan })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::levers::find;

    fn read(pairs: &[(&str, &str)]) -> Result<Settings> {
        Settings::from_lookup(|name| pairs.iter().find(|p| p.0 == name).map(|p| p.1.to_string()))
    }

    #[test]
    fn a_lever_is_switched_by_its_name_and_by_its_fallback() {
        let i = find("linear_pair").expect("a lever");
        assert_eq!(read(&[]).map(|s| s.levers), Ok(LeverSet::default()));
        assert!(!read(&[("HANZO_LINEAR_PAIR", "off")]).expect("settings").levers.has(i));
        assert!(!read(&[("HANZO_LINEAR_PAIR_FALLBACK", "1")]).expect("settings").levers.has(i));
        assert_eq!(read(&[("HANZO_PLAN", "plain")]).map(|s| s.levers), Ok(LeverSet::NONE));
        let one = read(&[("HANZO_PLAN", "plain"), ("HANZO_LINEAR_PAIR", "on")]).expect("settings").levers;
        assert_eq!(one, LeverSet::NONE.set(i, true));
    }

    #[test]
    fn a_wrong_value_names_the_variable_and_what_it_takes() {
        for (name, value, want) in [
            ("HANZO_QKV", "maybe", "on or off"),
            ("HANZO_QKV_FALLBACK", "yes", "1 or 0"),
            ("HANZO_PLAN", "fast", "plain"),
            ("HANZO_ISA", "sse9", "portable"),
            ("HANZO_HUGE_PAGES", "yes", "on or off"),
            ("HANZO_VK_VALIDATE", "yes", "1 or 0"),
            ("HANZO_VK_INT_DOT", "1", "on or off"),
            ("HANZO_VK_QUEUE", "copy", "graphics or compute"),
            ("HANZO_VK_PREFETCH", "all", "MiB"),
            ("HANZO_VK_MASK", "coop3", "shared=BYTES"),
        ] {
            let e = read(&[(name, value)]).expect_err(name).to_string();
            assert!(e.contains(name) && e.contains(value) && e.contains(want), "{e}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_value_that_is_no_text_is_an_error_that_names_its_variable() {
        use std::os::unix::ffi::OsStringExt;
        let set =
            |which: &'static str| move |name: &str| (name == which).then(|| OsString::from_vec(b"on\xff".to_vec()));
        for name in ["HANZO_QKV", "HANZO_QKV_FALLBACK", "HANZO_ISA", "HANZO_PLAN", "HANZO_VK_MASK", "HANZO_HUGE_PAGES"]
        {
            let error = Settings::from_os_lookup(set(name)).expect_err(name).to_string();
            assert!(error.contains(&format!("{name}: is not UTF-8")), "{error}");
        }
        assert_eq!(Settings::from_os_lookup(set("HANZO_CACHE")), read(&[]));
    }

    #[test]
    fn an_entry_for_levers_stands_for_a_name_of_each() {
        let names: Vec<String> = VARIABLES.iter().flat_map(|v| spelled_out(v.0)).collect();
        for name in ["HANZO_QKV", "HANZO_NORM_QUANTIZE_FALLBACK", "HANZO_ISA"] {
            assert!(names.iter().any(|n| n == name), "{name}");
        }
        assert_eq!(names.len(), VARIABLES.len() - 2 + 2 * LEVERS.len());
    }

    #[test]
    fn vulkan_is_left_alone_unless_the_environment_says_otherwise() {
        assert_eq!(read(&[]).map(|s| s.vulkan), Ok(VulkanSettings::default()));
        let all = [
            ("HANZO_VK_VALIDATE", "1"),
            ("HANZO_VK_PROFILE", "1"),
            ("HANZO_VK_INT_DOT", "on"),
            ("HANZO_VK_QUEUE", "graphics"),
            ("HANZO_VK_PREFETCH", "8"),
            ("HANZO_VK_MASK", "dot,threads=64"),
        ];
        let mask = Mask { int_dot: true, max_threads: Some(64), ..Mask::default() };
        let want = VulkanSettings {
            mask,
            validate: true,
            profile: true,
            int_dot: Some(true),
            prefetch_bytes: Some(8 << 20),
            graphics_queue: true,
        };
        assert_eq!(read(&all).map(|s| s.vulkan), Ok(want));
        assert!(all.iter().all(|v| VARIABLES.iter().any(|known| known.0 == v.0)));
    }

    #[test]
    fn an_instruction_set_can_be_lowered() {
        assert_eq!(read(&[("HANZO_ISA", "portable")]).map(|s| s.isa), Ok(IsaLevel::Portable));
    }
}
