//! Driver results as the crate's errors. Nothing that calls Vulkan may enter here.

use crate::error::Error;
use ash::vk;

/// This backend's name in errors.
pub(super) const NAME: &str = "vulkan";

/// An error of the driver while it did `what`.
pub(super) fn failed(what: &str) -> impl FnOnce(vk::Result) -> Error + '_ {
    move |r| match r {
        vk::Result::ERROR_OUT_OF_DEVICE_MEMORY => Error::Memory(format!(
            "the device refused to {what}; place fewer layers on it (-ngl) or use a smaller context"
        )),
        vk::Result::ERROR_OUT_OF_HOST_MEMORY => Error::Memory(format!("the Vulkan driver had no memory to {what}")),
        r => device(format!("the driver could not {what}: {r} ({})", r.as_raw())),
    }
}

/// A failure of the device.
pub(super) fn device(what: String) -> Error {
    Error::Device { backend: NAME, what }
}

/// Something that this device or driver does not have.
pub(super) fn unsupported(what: String) -> Error {
    Error::Unsupported { backend: NAME, what }
}

/// Bytes for people.
pub(super) fn mib(bytes: u64) -> String {
    match bytes {
        b if b >= 10 << 30 => format!("{:.1} GiB", b as f64 / (1u64 << 30) as f64),
        b => format!("{:.1} MiB", b as f64 / (1u64 << 20) as f64),
    }
}
