//! Writes every kernel's text for every target, and its SPIR-V, into a folder, for the checks of `.ci/gpu-text`:
//! `KEY.TARGET` is the text, `KEY.spv` the words.
use hanzo_kernels::{Target, kernels, spirv, text};
use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    let Some(folder) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("usage: text FOLDER");
        std::process::exit(2);
    };
    std::fs::create_dir_all(&folder)?;
    for target in Target::ALL {
        for key in kernels(target) {
            if let Some(text) = text(key, target) {
                std::fs::write(folder.join(format!("{key}.{}", target.name())), text)?;
            }
            if let (Target::Glsl, Some(words)) = (target, spirv(key)) {
                let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
                std::fs::write(folder.join(format!("{key}.spv")), bytes)?;
            }
        }
    }
    Ok(())
}
