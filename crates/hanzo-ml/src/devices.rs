//! The devices of this system by name: `cpu`, `cpu:portable`, `vulkan:0`. What they can do is their backends' matter.

use crate::backend::Backend;
use crate::cpu::isa::IsaLevel;
use crate::cpu::{CpuBackend, CpuOptions};
use crate::error::{Error, Result};
use crate::settings::Settings;
use crate::vulkan::{self, DeviceInfo, Instance, VulkanBackend};
use std::path::PathBuf;
use std::sync::Arc;

/// The host's name.
pub const HOST: &str = "cpu";

/// How devices are opened.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// What the environment says.
    pub settings: Settings,
    /// Threads of the CPU; 0: one a core.
    pub threads: usize,
    /// Folder for what is worth keeping between runs, such as compiled pipelines.
    pub cache: Option<PathBuf>,
}

/// A device that can be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// What it is, for people.
    pub about: String,
}

/// The Vulkan devices of this system, usable or not.
///
/// # Errors
/// If there is no Vulkan loader.
pub fn vulkan_devices() -> Result<Vec<DeviceInfo>> {
    vulkan::devices(&Instance::new(false)?)
}

/// Every device that [`open`] takes, the host first.
pub fn list() -> Vec<Listed> {
    let host = Listed { name: HOST.into(), about: IsaLevel::detect().name().into() };
    let levels = IsaLevel::available().map(|isa| Listed {
        name: format!("{HOST}:{}", isa.name()),
        about: format!("the same with no instructions beyond {}", isa.name()),
    });
    // A system without Vulkan has no Vulkan devices.
    let vulkan = vulkan_devices().unwrap_or_default().into_iter().filter(|d| d.missing.is_empty());
    let vulkan = vulkan.map(|d| Listed { name: format!("vulkan:{}", d.index), about: d.name });
    std::iter::once(host).chain(levels).chain(vulkan).collect()
}

/// The first device that is not the CPU, if there is one.
pub fn first_gpu() -> Option<String> {
    let usable = |d: &DeviceInfo| d.missing.is_empty() && d.kind != vulkan::DeviceKind::Cpu;
    let found = vulkan_devices().unwrap_or_default().into_iter().find(usable);
    found.map(|d| format!("vulkan:{}", d.index))
}

fn unknown<T>(name: &str) -> Result<T> {
    let there: Vec<String> = list().into_iter().map(|d| format!("{} ({})", d.name, d.about)).collect();
    let what = format!("`{name}` is no device of this system; there are {}", there.join(", "));
    Err(Error::Setting { name: "--device".into(), what })
}

/// Opens a device.
///
/// # Errors
/// If there is none of this name (the message lists those there are), or it cannot be used.
pub fn open(name: &str, options: &OpenOptions) -> Result<Arc<dyn Backend>> {
    let lower = name.to_ascii_lowercase();
    let (family, which) = lower.split_once(':').map_or((lower.as_str(), None), |(f, w)| (f, Some(w)));
    let cpu = |isa| -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(CpuBackend::new(CpuOptions {
            threads: options.threads,
            isa,
            huge_pages: options.settings.huge_pages,
        })?))
    };
    match (family, which) {
        ("cpu", None) => cpu(options.settings.isa),
        ("cpu", Some(isa)) => match IsaLevel::from_name(isa) {
            Some(isa) => cpu(isa),
            None => unknown(name),
        },
        ("vulkan", which) => {
            let Ok(index) = which.unwrap_or("0").parse() else { return unknown(name) };
            // Without a loader that is the error; with one, a wrong number lists what there is.
            if !vulkan_devices()?.iter().any(|d| d.index == index) {
                return unknown(name);
            }
            let options = options.settings.vulkan.options(options.cache.clone());
            Ok(Arc::new(VulkanBackend::open(index, &options)?))
        }
        _ => unknown(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> OpenOptions {
        let settings = Settings::from_lookup(|_| None).expect("no settings");
        OpenOptions { settings, threads: 1, cache: None }
    }

    #[test]
    fn the_host_can_be_opened_by_name_with_any_of_its_instruction_sets() {
        for name in ["cpu", "CPU", "cpu:portable"] {
            assert_eq!(open(name, &options()).map(|b| b.name().to_string()), Ok("cpu".to_string()));
        }
        assert!(list().iter().any(|d| d.name == "cpu:portable"));
    }

    #[test]
    fn an_unknown_device_is_an_error_that_lists_what_there_is() {
        for name in ["tpu:0", "cpu:mmx", "vulkan:x"] {
            let error = open(name, &options()).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(error.contains(name) && error.contains("cpu:portable"), "{error}");
        }
        // With no such number, or no Vulkan at all, it is an error too, and not the CPU.
        assert!(open("vulkan:99", &options()).is_err());
    }
}
