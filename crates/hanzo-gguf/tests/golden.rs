//! `to_float` against golden vectors: packed blocks and their exact values, for every block format.
//!
//! The data in `tests/data/golden` is made from the reference Python package `gguf` with random block bytes; two
//! independent decoders agreed on it bit for bit.

use hanzo_gguf::{Format, formats};
use std::path::PathBuf;

fn golden(file: String) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden").join(file);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn every_block_format_decodes_golden_blocks_bit_for_bit() {
    let manifest = String::from_utf8(golden("MANIFEST.tsv".into())).expect("MANIFEST.tsv is text");
    let mut checked = 0;
    for line in manifest.lines().skip(1) {
        let fields: Vec<&str> = line.split('\t').collect();
        let format = Format::from_name(fields[0]).expect("a format of the table");
        let number = |i: usize| fields[i].parse::<usize>().expect("a number");
        assert_eq!((format.id() as usize, format.block_len(), format.block_bytes()), (number(1), number(2), number(3)));

        let packed = golden(format!("{format}.bin"));
        let want: Vec<u32> = golden(format!("{format}.f32"))
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes(b.try_into().expect("four bytes")))
            .collect();
        assert_eq!(packed.len(), number(4) * format.block_bytes());
        let mut got = vec![0.0; want.len()];
        formats::to_float(format, &packed, &mut got);
        let bad: Vec<usize> = (0..want.len()).filter(|&i| got[i].to_bits() != want[i]).collect();
        assert!(bad.is_empty(), "{format}: {} values differ, first at element {}", bad.len(), bad[0]);
        checked += 1;
    }
    assert_eq!(checked, 25);
}
