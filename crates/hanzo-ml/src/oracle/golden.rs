//! `to_float_golden`: decoders against recorded blocks and their exact values, bit for bit.
//!
//! A golden directory has `MANIFEST.tsv` (`type`, `ggml_type_id`, `elements_per_block`, `bytes_per_block`, `blocks`) and
//! for each type `TYPE.bin`, packed blocks, and `TYPE.f32`, their values as little-endian f32.

use super::gate::Row;
use crate::error::{Error, Result};
use crate::oracle::case::Measured;
use hanzo_gguf::{Format, formats};
use std::path::Path;

/// Checks every format of a golden directory.
pub fn check(dir: &Path) -> Result<Vec<Row>> {
    let bad = |file: &Path, what: String| Error::Setting {
        name: "golden".into(),
        what: format!("{}: {what}", file.display()),
    };
    let read = |name: &str| {
        let file = dir.join(name);
        std::fs::read(&file).map_err(|e| bad(&file, format!("{e}; a golden directory has it")))
    };
    let manifest_file = dir.join("MANIFEST.tsv");
    let manifest = String::from_utf8_lossy(&read("MANIFEST.tsv")?).into_owned();
    let mut rows = Vec::new();
    for line in manifest.lines().skip(1).filter(|l| !l.trim().is_empty()) {
        let fields: Vec<&str> = line.split('\t').collect();
        let number = |i: usize| fields.get(i).and_then(|f| f.trim().parse::<usize>().ok());
        let (Some(name), Some(id), Some(len), Some(bytes), Some(blocks)) =
            (fields.first(), number(1), number(2), number(3), number(4))
        else {
            return Err(bad(&manifest_file, format!("line `{line}` is not a name and four numbers")));
        };
        let Some(format) = Format::from_name(name) else {
            return Err(bad(&manifest_file, format!("format {name} is unknown to this build")));
        };
        let packed = read(&format!("{name}.bin"))?;
        let want = read(&format!("{name}.f32"))?;
        let mut found = Measured::default();
        if (format.id() as usize, format.block_len(), format.block_bytes()) != (id, len, bytes)
            || packed.len() != blocks * bytes
            || want.len() != blocks * len * 4
        {
            found.failure = Some(format!("{format}: id, block size or file length differs from the manifest"));
        } else {
            let mut got = vec![0.0f32; blocks * len];
            formats::to_float(format, &packed, &mut got);
            for (got, want) in got.iter().zip(want.as_chunks::<4>().0) {
                let want = f32::from_le_bytes(*want);
                let same = got.to_bits() == want.to_bits();
                found.add(if same { 0.0 } else { f64::from((got - want).abs()).max(super::num::TINY) }, 0.0);
            }
        }
        rows.push(Row::new("to_float_golden", "to_float", format.name(), found));
    }
    Ok(rows)
}

/// The last line of a golden report: `nbad=N over M formats`.
pub fn summary(rows: &[Row]) -> String {
    let golden: Vec<&Row> = rows.iter().filter(|r| r.oracle == "to_float_golden").collect();
    let failed = golden.iter().filter(|r| r.found.failure.is_some()).count();
    let nbad: usize = golden.iter().map(|r| r.found.nbad).sum();
    format!("nbad={} over {} formats", nbad + failed, golden.len())
}
