//! Adding a format touches one file under `src/formats` and one row of the table, and nothing else in this crate.
//!
//! The witness is the synthetic format (feature `synthetic-format`): its name may occur only where a new format's would.

use std::path::{Path, PathBuf};

/// Text files of the crate, data and build output aside.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    for entry in entries {
        let path = entry.expect("an entry of the crate's folder").path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        if path.is_dir() {
            if !matches!(name, "data" | "target" | "corpus" | "artifacts") {
                sources(&path, found);
            }
        } else if name.ends_with(".rs") || name.ends_with(".toml") || name.ends_with(".md") || name.ends_with(".tsv") {
            found.push(path);
        }
    }
}

#[test]
fn a_format_is_one_file_and_one_row() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    sources(root, &mut files);
    assert!(files.len() > 40, "the walk sees the crate: {} files", files.len());

    let name = ["x", "26"].concat(); // apart, so that this file is no witness
    let mut mentions = Vec::new();
    for file in &files {
        let text = std::fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        let lines = text.lines().filter(|line| line.to_ascii_lowercase().contains(&name)).count();
        let place = file.strip_prefix(root).expect("a file of the crate").to_string_lossy().replace('\\', "/");
        if lines > 0 || place.contains(&name) {
            mentions.push((place, lines));
        }
    }
    mentions.sort();
    let own = format!("src/formats/{name}.rs");
    assert_eq!(mentions.len(), 2, "{mentions:?}");
    assert_eq!(mentions[0], ("src/format.rs".to_string(), 1), "one row of the table");
    assert_eq!(mentions[1].0, own);
}
