//! Writes the small good files of the mutation test as a corpus to start from, into the folder given.

#[allow(dead_code)] // exercising is for the other binary
#[path = "../../tests/exercise/mod.rs"]
mod exercise;

fn main() -> std::io::Result<()> {
    let folder = std::env::args_os().nth(1).unwrap_or_else(|| "corpus/gguf".into());
    std::fs::create_dir_all(&folder)?;
    for (i, file) in exercise::seeds().iter().enumerate() {
        std::fs::write(std::path::Path::new(&folder).join(format!("seed-{i}")), file)?;
    }
    Ok(())
}
