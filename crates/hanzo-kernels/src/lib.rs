//! The GPU kernels of the hanzo engine. Each is written once, in kernel-C (see `KERNEL-C.md`): `formats/` says how a block's
//! bits become codes and scales, `ops/` what is computed, `prelude/` what the few words mean on each backend.
//!
//! This crate gives kernels as text for a target ([`text`]), as SPIR-V for Vulkan ([`spirv`]), their argument structs
//! ([`args`]) and the device layout of weights ([`layout`]). It launches nothing and knows no device.
#![deny(missing_docs)]

mod archive;
pub mod args;
pub mod assemble;
pub mod cache;
#[cfg(all(unix, feature = "host"))]
pub mod host;
mod layout;
pub mod run;
mod shared;
pub mod tables;

pub use archive::{needs_matrix_units, spirv, spirv_bytes};
pub use assemble::Target;
pub use layout::{Layout, layout};
pub use shared::shared_bytes;

use assemble::{FormatFile, OpFile};
use hanzo_gguf::Format;
use std::sync::OnceLock;

mod sources {
    include!(concat!(env!("OUT_DIR"), "/sources.rs"));
}

/// A kernel's name: the op, and the format of the weight it reads, if any. Prints as `matvec.q4_k`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The op's name: a file of `ops/`.
    pub op: &'static str,
    /// The weight's format.
    pub format: Option<Format>,
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.format {
            Some(format) => write!(f, "{}.{}", self.op, format.name().to_ascii_lowercase()),
            None => f.write_str(self.op),
        }
    }
}

struct Sources {
    ops: Vec<OpFile>,
    formats: Vec<(Format, FormatFile)>,
}

fn sources() -> &'static Sources {
    static SOURCES: OnceLock<Sources> = OnceLock::new();
    // The build script parsed the same files without an error.
    SOURCES.get_or_init(|| Sources {
        ops: (sources::OPS.iter())
            .filter_map(|(backend, file, text)| OpFile::parse(file, text, *backend).ok())
            .collect(),
        formats: (sources::FORMATS.iter())
            .filter_map(|(file, text)| FormatFile::parse(file, text).ok())
            .filter_map(|f| Some((Format::from_name(&f.name)?, f)))
            .collect(),
    })
}

/// Every op file, the backends' own included.
pub fn ops() -> &'static [OpFile] {
    &sources().ops
}

/// Every format file with its format.
pub fn formats() -> impl Iterator<Item = (Format, &'static FormatFile)> {
    sources().formats.iter().map(|(f, file)| (*f, file))
}

/// The file of an op.
pub fn op(name: &str) -> Option<&'static OpFile> {
    sources().ops.iter().find(|o| o.name == name)
}

/// The file of a format.
pub fn format_file(format: Format) -> Option<&'static FormatFile> {
    sources().formats.iter().find(|(f, _)| *f == format).map(|(_, file)| file)
}

/// Every kernel of a target: the common ones and the target's own.
pub fn kernels(target: Target) -> impl Iterator<Item = Key> {
    let own = move |o: &&OpFile| o.backend.as_deref().is_none_or(|b| b == target.name());
    ops().iter().filter(own).flat_map(|o| {
        let with: Vec<Option<Format>> = match o.formats {
            assemble::Formats::None => vec![None],
            _ => formats().filter(|(_, f)| o.takes(f)).map(|(f, _)| Some(f)).collect(),
        };
        with.into_iter().map(|format| Key { op: &o.name, format })
    })
}

/// Every tuning constant of an op with its default, in the order of specialization ids: THREADS, WAVE, HALF_HW, then
/// the op's own.
pub fn constants(op: &str) -> Vec<(String, u32)> {
    self::op(op).map(|o| assemble::constants(o).collect()).unwrap_or_default()
}

/// Codes that share a scale in a format's units of 32: 16 or 32.
pub fn scale_group(format: Format) -> u32 {
    format_file(format).map_or(32, |f| f.group)
}

/// Words of a format's codebook, which each workgroup of a kernel copies first; 0 for most formats.
pub fn codebook_words(format: Format) -> u32 {
    format_file(format).and_then(|f| f.table.as_deref()).map_or(0, |t| tables::codebook(t).len() as u32)
}

/// A kernel's whole text for a target; none if there is no such kernel.
pub fn text(key: Key, target: Target) -> Option<String> {
    let op = op(key.op)?;
    let format = match key.format {
        Some(f) => Some(format_file(f)?),
        None => None,
    };
    let prelude = match target {
        Target::Glsl => sources::PRELUDE_VULKAN,
        Target::Cuda => sources::PRELUDE_CUDA,
        Target::Hip => sources::PRELUDE_HIP,
        Target::Msl => sources::PRELUDE_MSL,
        Target::Host => sources::PRELUDE_HOST,
    };
    let words = key.format.map_or(0, codebook_words);
    Some(assemble::print(target, op, format, prelude, [sources::MATH, sources::BLOCK], words))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_vulkan_kernel_is_in_the_archive() {
        for key in kernels(Target::Glsl) {
            let words = spirv(key).unwrap_or_default();
            assert_eq!(words.first(), Some(&0x0723_0203), "{key} has no SPIR-V");
        }
    }

    #[test]
    fn only_the_kernels_of_cooperative_matrices_need_matrix_units() {
        for key in kernels(Target::Glsl) {
            let own = op(key.op).is_some_and(|o| o.backend.is_some());
            assert_eq!(needs_matrix_units(key), own, "{key}");
        }
    }

    #[test]
    fn the_archive_keeps_within_its_budget() {
        let (packed, modules) = spirv_bytes();
        assert!(packed < 8 << 20 && modules < 64 << 20, "{packed} bytes packed, {modules} unpacked");
    }

    /// The build script warns where compiling takes over 60 s; what it compiles is the same on every machine.
    #[test]
    fn what_the_build_compiles_keeps_within_its_budget() {
        let texts: Vec<usize> =
            kernels(Target::Glsl).map(|key| text(key, Target::Glsl).map_or(0, |t| t.len())).collect();
        let (modules, bytes) = (texts.len(), texts.iter().sum::<usize>());
        const MODULES: usize = 600;
        const BYTES: usize = 24 << 20;
        assert!(
            modules <= MODULES && bytes <= BYTES,
            "{modules} modules of {MODULES}, {bytes} bytes of text of {BYTES}"
        );
    }

    #[test]
    fn every_kernel_prints_for_every_target() {
        for target in Target::ALL {
            for key in kernels(target) {
                let text = text(key, target).unwrap_or_default();
                assert!(!text.contains("KERNEL {") && !text.is_empty(), "{key} for {target:?}");
            }
        }
    }

    #[test]
    fn a_format_file_agrees_with_the_format_table() {
        for (format, file) in formats() {
            let (len, bytes) = (file.block_len as usize, file.block_bytes as usize);
            if format.is_block() {
                assert_eq!((len, bytes), (format.block_len(), format.block_bytes()), "{format}");
            } else {
                assert_eq!((len, bytes), (32, 32 * format.block_bytes()), "{format}");
            }
        }
    }
}
