//! Turns the codebooks in `tables/*.tsv` into Rust arrays.
//!
//! A table is data: one row a line, entries parted by tabs. Each row becomes one integer whose lowest byte is the
//! row's first entry, so that `row.to_le_bytes()[i]` is entry `i` on every machine. Nothing else is generated here.

use std::fmt::Write as _;
use std::path::Path;

/// File stem, Rust name, integer type, entries in a row, rows, documentation.
type Table = (&'static str, &'static str, &'static str, usize, usize, &'static str);

const TABLES: &[Table] = &[
    ("iq2_xxs_grid", "IQ2_XXS_GRID", "u64", 8, 256, "Magnitudes of IQ2_XXS: 256 points in 8 dimensions."),
    ("iq2_xs_grid", "IQ2_XS_GRID", "u64", 8, 512, "Magnitudes of IQ2_XS: 512 points in 8 dimensions."),
    ("iq2_s_grid", "IQ2_S_GRID", "u64", 8, 1024, "Magnitudes of IQ2_S: 1024 points in 8 dimensions."),
    ("iq3_xxs_grid", "IQ3_XXS_GRID", "u32", 4, 256, "Magnitudes of IQ3_XXS: 256 points in 4 dimensions."),
    ("iq3_s_grid", "IQ3_S_GRID", "u32", 4, 512, "Magnitudes of IQ3_S: 512 points in 4 dimensions."),
    (
        "iq1_s_grid",
        "IQ1_S_GRID",
        "u64",
        8,
        2048,
        "Ternary points of IQ1_S and IQ1_M: 2048 points in 8 dimensions; each byte is an `i8` of -1, 0 or 1.",
    ),
    ("ksigns", "KSIGNS", "u8", 1, 128, "Sign bytes of seven free bits: bit 7 makes the number of set bits even."),
    ("kvalues_iq4_nl", "KVALUES_IQ4_NL", "i8", 1, 16, "The 16 values of IQ4_NL and IQ4_XS codes, ascending."),
    (
        "kvalues_fp4",
        "KVALUES_FP4",
        "i8",
        1,
        16,
        "The 16 values of FP4 (E2M1) codes, doubled to be whole: multiply by half the scale.",
    ),
];

fn main() {
    println!("cargo::rerun-if-changed=tables");
    let root = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let out = std::env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let mut code = String::new();
    for table in TABLES {
        let path = Path::new(&root).join("tables").join(format!("{}.tsv", table.0));
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        write_table(&mut code, table, &text);
    }
    let path = Path::new(&out).join("tables.rs");
    std::fs::write(&path, code).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}

/// Appends one `pub static` array. A table that is not what its entry in `TABLES` says stops the build.
fn write_table(code: &mut String, &(stem, name, ty, width, rows, doc): &Table, text: &str) {
    let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
    assert_eq!(lines.len(), rows, "tables/{stem}.tsv: rows");
    writeln!(code, "/// {doc}\npub static {name}: [{ty}; {rows}] = [").expect("writing to a string");
    for (number, line) in lines.iter().enumerate() {
        let entries: Vec<i16> = line
            .split('\t')
            .map(|e| e.trim().parse().unwrap_or_else(|e| panic!("tables/{stem}.tsv:{}: {e}", number + 1)))
            .collect();
        assert_eq!(entries.len(), width, "tables/{stem}.tsv:{}: entries in the row", number + 1);
        if ty == "i8" {
            writeln!(code, "    {},", entries[0]).expect("writing to a string");
            continue;
        }
        let row = entries.iter().enumerate().fold(0u64, |row, (i, &entry)| {
            assert!((-128..256).contains(&entry), "tables/{stem}.tsv:{}: {entry} is not a byte", number + 1);
            row | u64::from(entry as u8) << (8 * i)
        });
        writeln!(code, "    {row:#x},").expect("writing to a string");
    }
    code.push_str("];\n\n");
}
