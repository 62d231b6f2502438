//! Weights of every format in device layout: their floats, their rows' powers of two, and their bytes back.

use super::{Device, Rng, halves::power};
use hanzo_gguf::Format;
use hanzo_gguf::formats::to_float;
use hanzo_kernels::args::{DequantTest, Embed, RowScale, Weight};
use hanzo_kernels::run::Run;
use hanzo_kernels::{format_file, tables};

/// Rows of each weight: more than a workgroup of `row_scale` takes, and odd.
const ROWS: usize = 19;

/// A weight on the device: what it was made of, and what it lies in.
struct Packed {
    run: Run,
    cols: usize,
    bytes: Vec<u8>,
    device: u64,
    table: u64,
}

impl Packed {
    fn new(gpu: &mut impl Device, format: Format) -> Packed {
        // Float rows end within a unit.
        let cols = if format.is_block() { 2 * format.block_len() } else { 70 };
        let bytes = Rng(u64::from(format.id())).weights(format, ROWS * cols);
        let run = Run::whole(format, ROWS, cols).expect("a weight");
        let mut padded = bytes.clone();
        padded.resize(bytes.len().next_multiple_of(4) + 16, 0);
        let source = gpu.bytes(&padded);
        let device = gpu.out(run.layout().bytes.div_ceil(4) as usize);
        let (pack, groups) = run.pack(source, device);
        gpu.launch(Some(format), &pack, &[], groups);
        let table = format_file(format).and_then(|f| f.table.as_deref());
        let table = gpu.words(&table.map_or(vec![0; 4], tables::codebook));
        Packed { run, cols, bytes, device, table }
    }

    fn weight(&self) -> Weight<u64> {
        Weight { base: self.device, planes: self.run.layout().planes(), table: self.table }
    }

    fn floats(&self, format: Format) -> Vec<f32> {
        let mut all = vec![0.0; ROWS * self.cols];
        to_float(format, &self.bytes, &mut all);
        all
    }
}

pub fn dequant_test(gpu: &mut impl Device, formats: &[Format]) {
    for &format in formats {
        let w = Packed::new(gpu, format);
        // From the second unit on.
        let units = ROWS * w.cols.div_ceil(32);
        let y = gpu.out(32 * (units - 1));
        let args = DequantTest { w: w.weight(), y, first_unit: 1, units: units as u32 - 1 };
        gpu.launch(Some(format), &args, &[], [units.div_ceil(64) as u32, 1, 1]);
        let mut want = Vec::new();
        for row in w.floats(format).chunks(w.cols) {
            want.extend_from_slice(row);
            want.resize(want.len().next_multiple_of(32), 0.0);
        }
        assert!(gpu.floats_at(y) == want[32..], "{format}");
    }
}

pub fn row_scale(gpu: &mut impl Device, formats: &[Format]) {
    for &format in formats {
        let w = Packed::new(gpu, format);
        let scale = gpu.out(ROWS);
        let units = w.cols.div_ceil(32) as u32;
        let args = RowScale { w: w.weight(), scale, rows: ROWS as u32, units };
        let groups = (ROWS as u32).div_ceil(128 / gpu.wave());
        gpu.launch(Some(format), &args, &[("THREADS", 128)], [groups, 1, 1]);
        let floats = w.floats(format);
        let want: Vec<f32> = floats.chunks(w.cols).map(|r| power(r.iter().fold(0.0, |m, x| m.max(x.abs())))).collect();
        assert_eq!(gpu.floats_at(scale), want, "{format}");
    }
}

pub fn unpack(gpu: &mut impl Device, formats: &[Format]) {
    for &format in formats {
        let w = Packed::new(gpu, format);
        let back = gpu.out(w.bytes.len().div_ceil(4));
        let (args, groups) = w.run.unpack(w.weight(), back);
        gpu.launch(Some(format), &args, &[], groups);
        let got: Vec<u8> = gpu.words_at(back).iter().flat_map(|x| x.to_le_bytes()).collect();
        assert!(got[..w.bytes.len()] == w.bytes, "{format}");
    }
}

/// Rows by their ids as they are and times a factor, and rows that a batch brings; those that do not count are left alone.
pub fn embed(gpu: &mut impl Device, formats: &[Format]) {
    for &format in formats {
        let w = Packed::new(gpu, format);
        let (cols, floats, ids) = (w.cols, w.floats(format), [3u32, 0, ROWS as u32 - 1, 3, 7]);
        let given: Vec<f32> = Rng(5).floats(ids.len() * cols, 1.0);
        let (tokens, live, brought) = (gpu.words(&ids), gpu.words(&[ids.len() as u32 - 1]), gpu.floats(&given));
        for (scale, flag) in [(1.0f32, 0), (0.3, 0), (1.0, 1)] {
            let (y, flag_at) = (gpu.out(ids.len() * cols), gpu.words(&[flag]));
            let units = cols.div_ceil(32) as u32;
            let w = w.weight();
            let args = Embed { w, live, tokens, flag: flag_at, given: brought, y, cols: cols as u32, units, scale };
            let set = [("SCALED", u32::from(scale != 1.0))];
            gpu.launch(Some(format), &args, &set, [cols.div_ceil(4 * 128) as u32, ids.len() as u32, 1]);
            let got = gpu.floats_at(y);
            for (r, (id, got)) in ids.iter().zip(got.chunks(cols)).enumerate() {
                let row = if flag != 0 { &given[r * cols..] } else { &floats[*id as usize * cols..] };
                let counts = r + 1 < ids.len();
                let right = |(got, want): (&f32, &f32)| if counts { *got == want * scale } else { got.to_bits() == !0 };
                assert!(got.iter().zip(row).all(right), "{format}, row {r}, scale {scale}, rows given: {flag}");
            }
        }
    }
}
