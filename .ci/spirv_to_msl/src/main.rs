//! Turns SPIR-V files into Metal text with SPIRV-Cross: for each argument `X.spv`, writes `X.cross.msl` beside it.
use spirv_cross2::compile::msl::{CompilerOptions, MslVersion};
use spirv_cross2::{Compiler, Module, targets::Msl};

fn translate(path: &str) -> Result<(), Box<dyn std::error::Error>> {
    let bytes = std::fs::read(path)?;
    let words: Vec<u32> = bytes.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect();
    let compiler = Compiler::<Msl>::new(Module::from_words(&words))?;
    let mut options = CompilerOptions::default();
    options.version = MslVersion::new(3, 0, 0);
    let text = compiler.compile(&options)?;
    std::fs::write(path.replace(".spv", ".cross.msl"), text.to_string())?;
    Ok(())
}

fn main() {
    let mut failed = 0;
    for path in std::env::args().skip(1) {
        if let Err(e) = translate(&path) {
            eprintln!("{path}: {e}");
            failed += 1;
        }
    }
    std::process::exit(if failed == 0 { 0 } else { 1 });
}
