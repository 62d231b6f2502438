//! Every file of `formats/`: its device layout loses no bit, and its units have the values of hanzo-gguf. The ops `pack`,
//! `unpack` and `dequant_test` run on the host, under its checks. A new format is tested because its file is there.
#![cfg(unix)]

use hanzo_gguf::{Format, formats::to_float};
use hanzo_kernels::args::{Args, DequantTest, Weight};
use hanzo_kernels::host::{HostKernel, Memory};
use hanzo_kernels::run::Run;
use hanzo_kernels::{Key, Target, format_file, formats, layout, tables, text};
use std::path::Path;

fn kernel(op: &'static str, format: Format) -> HostKernel {
    let text = text(Key { op, format: Some(format) }, Target::Host).expect("an op of this crate");
    HostKernel::compile(&text, &[]).unwrap_or_else(|e| panic!("{op}.{format}: {e}"))
}

/// Runs a kernel whose pointers are addresses in `memory`.
fn launch(kernel: &HostKernel, memory: &mut Memory, args: &impl Args<u64>, groups: [u32; 3]) {
    let mut pointers = Vec::new();
    let mut bytes = args.encode(&mut |at, address| pointers.push((at, address)));
    for (at, address) in pointers {
        bytes[at..at + 8].copy_from_slice(&address.to_le_bytes());
    }
    kernel.run(memory, &bytes, groups).unwrap_or_else(|e| panic!("{e}"));
}

/// Bytes that look random and are the same each time.
struct Noise(u64);

impl Noise {
    fn bytes(&mut self, n: usize) -> Vec<u8> {
        let mut next = || {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 >> 24) as u8
        };
        (0..n).map(|_| next()).collect()
    }
}

/// Shapes with an odd number of blocks, one block, several runs of 16 and, for floats, rows that are not whole units.
fn shapes(format: Format) -> Vec<(usize, usize)> {
    let len = format.block_len();
    match format.is_block() {
        true => vec![(1, len), (3, len), (5, 3 * len), (13, 5 * len)],
        false => vec![(1, 32), (3, 33), (7, 100), (5, 1), (9, 256), (37, 63)],
    }
}

/// The golden blocks of a format, as one row; the formats without any have none.
fn golden(format: Format) -> Option<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../hanzo-gguf/tests/data/golden");
    std::fs::read(dir.join(format!("{format}.bin"))).ok()
}

/// GGUF bytes of weights `(rows, cols, bytes)`: golden blocks and random ones, whose scales are sometimes subnormal, infinite
/// or no number.
fn weights(format: Format) -> Vec<(usize, usize, Vec<u8>)> {
    let mut noise = Noise(0x9e37_79b9_7f4a_7c15 ^ u64::from(format.id()));
    let random = shapes(format).into_iter().map(|(rows, cols)| {
        let bytes = rows * format.row_bytes(cols).expect("whole blocks");
        (rows, cols, noise.bytes(bytes))
    });
    let mut all: Vec<_> = random.collect();
    if let Some(bytes) = golden(format) {
        all.push((1, bytes.len() / format.block_bytes() * format.block_len(), bytes));
    }
    all
}

/// A weight in device layout, packed by runs of at most `run` bytes, the last run first. What no run writes stays 0xff.
fn pack(format: Format, rows: usize, cols: usize, gguf: &[u8], run: u64) -> Vec<u8> {
    let whole = Run::whole(format, rows, cols).expect("a weight");
    assert_eq!(whole.bytes(), 0..gguf.len() as u64, "{format}");
    let kernel = kernel("pack", format);
    let mut device = vec![0xff; whole.layout().bytes as usize];
    let runs: Vec<Run> = whole.split(run).collect();
    for part in runs.iter().rev() {
        let mut memory = Memory::new();
        let range = part.bytes();
        let mut bytes = gguf[range.start as usize..range.end as usize].to_vec();
        // What lies behind the run must not matter.
        bytes.resize(bytes.len().next_multiple_of(4), 0xaa);
        let (src, dst) = (memory.read(&bytes), memory.write(&device));
        let (args, groups) = part.pack(src, dst);
        launch(&kernel, &mut memory, &args, groups);
        device = memory.bytes(dst).to_vec();
    }
    device
}

/// The weight as an argument: its bytes in `memory`, with the format's codebook.
fn weight(memory: &mut Memory, format: Format, run: &Run, device: &[u8]) -> Weight<u64> {
    let table = format_file(format).and_then(|f| f.table.as_deref()).map_or(Vec::new(), tables::codebook);
    let words: Vec<u8> = table.iter().flat_map(|w| w.to_le_bytes()).collect();
    Weight { base: memory.read(device), planes: run.layout().planes(), table: memory.read(&words) }
}

fn unpack(format: Format, run: &Run, device: &[u8]) -> Vec<u8> {
    let mut memory = Memory::new();
    let w = weight(&mut memory, format, run, device);
    let bytes = (run.bytes().end - run.bytes().start) as usize;
    let dst = memory.output(bytes.next_multiple_of(4));
    let (args, groups) = run.unpack(w, dst);
    launch(&kernel("unpack", format), &mut memory, &args, groups);
    let mut out = memory.bytes(dst).to_vec();
    assert!(out[bytes..].iter().all(|&b| b == 0), "{format}: the tail is not zeros");
    out.truncate(bytes);
    out
}

#[test]
fn planes_add_up_and_begin_at_whole_16_bytes() {
    for (format, file) in formats() {
        assert_eq!(file.planes.iter().sum::<u32>(), file.block_bytes, "{format}");
        for (rows, cols) in shapes(format) {
            let l = layout(format, rows, cols).expect("a layout");
            let ends = l.offsets[1..file.planes.len()].iter().chain([&l.bytes]);
            for ((start, end), bytes) in l.offsets.iter().zip(ends).zip(&file.planes) {
                let used = l.blocks * u64::from(*bytes);
                assert!(start % 16 == 0 && (used..used + 16).contains(&(end - start)), "{format} {rows} x {cols}");
            }
        }
    }
}

#[test]
fn unpacking_what_was_packed_gives_the_same_bytes() {
    for (format, _) in formats() {
        for (rows, cols, gguf) in weights(format) {
            let device = pack(format, rows, cols, &gguf, u64::MAX);
            let run = Run::whole(format, rows, cols).expect("a weight");
            assert!(unpack(format, &run, &device) == gguf, "{format} {rows} x {cols}");
            for part in run.split(1) {
                let range = part.bytes();
                let want = &gguf[range.start as usize..range.end as usize];
                assert!(unpack(format, &part, &device) == want, "{format} {rows} x {cols}: {part:?}");
            }
        }
    }
}

#[test]
fn packing_by_runs_gives_what_packing_at_once_gives() {
    for (format, file) in formats() {
        let (rows, cols, gguf) = weights(format).into_iter().max_by_key(|w| w.2.len()).expect("weights");
        let whole = pack(format, rows, cols, &gguf, u64::MAX);
        for run in [1, 33 * u64::from(file.block_bytes)] {
            assert!(Run::whole(format, rows, cols).expect("a weight").split(run).count() > 1);
            assert!(pack(format, rows, cols, &gguf, run) == whole, "{format} {rows} x {cols} by {run} bytes");
        }
    }
}

#[test]
fn units_have_the_values_of_to_float_bit_for_bit() {
    for (format, _) in formats() {
        let kernel = kernel("dequant_test", format);
        for (rows, cols, gguf) in weights(format) {
            let device = pack(format, rows, cols, &gguf, u64::MAX);
            let run = Run::whole(format, rows, cols).expect("a weight");
            let row_units = cols.div_ceil(32);
            let units = rows * row_units;
            let mut memory = Memory::new();
            let w = weight(&mut memory, format, &run, &device);
            let y = memory.output(units * 128);
            let args = DequantTest { w, y, first_unit: 0, units: units as u32 };
            launch(&kernel, &mut memory, &args, [(units as u32).div_ceil(64), 1, 1]);
            let mut want = vec![0.0; rows * cols];
            to_float(format, &gguf, &mut want);
            let got = memory.f32s(y);
            for (i, want) in want.iter().enumerate() {
                let (row, col) = (i / cols, i % cols);
                let got = got[row * row_units * 32 + col];
                let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                assert!(same, "{format} {rows} x {cols}: row {row}, column {col} is {got:?}, not {want:?}");
            }
            let padding = got.chunks(row_units * 32).flat_map(|row| &row[cols..]);
            assert!(padding.into_iter().all(|v| v.to_bits() == 0), "{format} {rows} x {cols}: padding");
        }
    }
}

#[test]
fn a_run_is_none_for_what_kernels_cannot_count() {
    let whole = |rows, cols| Run::whole(Format::Q8_0, rows, cols);
    assert!(whole(1, 31).is_none() && whole(0, 32).is_none() && whole(1, 0).is_none());
    assert!(whole(1 << 32, 32).is_none() && whole(1, 32 << 27).is_none());
    assert!(Run::whole(Format::I32, 1, 32).is_none());
    let runs: Vec<_> = whole(5, 320).expect("a weight").split(17 * 34).map(|r| (r.first_block(), r.blocks())).collect();
    assert_eq!(runs, [(0, 16), (16, 16), (32, 16), (48, 2)]);
}
