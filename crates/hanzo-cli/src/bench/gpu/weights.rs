//! Matrices of any format and size from a few blocks that are real ones, resident on a device as often as asked.

use anyhow::Context as _;
use hanzo_gguf::Format;
use hanzo_gguf::formats::{from_float, to_float};
use hanzo_kernels::args::Args;
use hanzo_kernels::run::Run;
use hanzo_kernels::{Key, Layout, format_file, tables};
use hanzo_ml::vulkan::raw::Memory;

use super::subject::{Arg, Constants, Machine, code, launch};
use crate::failure::Failure;

/// Different blocks of a matrix.
const POOL: usize = 64;
/// GGUF bytes that go to the device at once.
const PART: u64 = 128 << 20;

/// Numbers that look random and are the same each time.
#[derive(Clone, Debug)]
pub struct Noise(pub u64);

impl Noise {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = self.0 ^ self.0 >> 32;
        x.wrapping_mul(0xd6e8_feb8_6659_fd93) >> 16
    }

    /// About normal with a deviation of 1: the sum of four uniform numbers.
    pub fn normal(&mut self) -> f32 {
        let x = self.next();
        let sum: u64 = (0..4).map(|i| x >> (12 * i) & 0xfff).sum();
        (sum as f32 - 8190.0) / 2365.0
    }
}

/// A matrix `[rows, cols]` (rows of all experts).
pub struct Matrix {
    pub format: Format,
    pub rows: usize,
    pub cols: usize,
    pool: Vec<Vec<u8>>,
}

impl Matrix {
    pub fn new(format: Format, rows: usize, cols: usize) -> anyhow::Result<Matrix> {
        Matrix::seeded(format, rows, cols, 1)
    }

    /// Matrices of different seeds differ.
    pub fn seeded(format: Format, rows: usize, cols: usize, seed: u64) -> anyhow::Result<Matrix> {
        let len = if format.is_block() { format.block_len() } else { 32 };
        if !cols.is_multiple_of(len.max(32)) || Run::whole(format, rows, cols).is_none() {
            let what = format!("a {rows}x{cols} matrix of {format}: columns must be a multiple of {}", len.max(32));
            return Err(Failure::usage(what).into());
        }
        let mut noise = Noise(u64::from(format.id()) + seed);
        let bytes = format.row_bytes(len).context("whole blocks")?;
        let pool = (0..POOL).map(|_| block(format, len, bytes, &mut noise)).collect();
        Ok(Matrix { format, rows, cols, pool })
    }

    /// GGUF bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.pool[0].len() * (self.cols / self.block_len())
    }

    fn block_len(&self) -> usize {
        if self.format.is_block() { self.format.block_len() } else { 32 }
    }

    /// A block of the matrix, by its number.
    fn block(&self, i: u64) -> &[u8] {
        &self.pool[(i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize % POOL]
    }

    /// The values of a row.
    pub fn row(&self, row: usize) -> Vec<f32> {
        let per_row = (self.cols / self.block_len()) as u64;
        let first = row as u64 * per_row;
        let bytes: Vec<u8> = (first..first + per_row).flat_map(|i| self.block(i)).copied().collect();
        let mut values = vec![0f32; self.cols];
        to_float(self.format, &bytes, &mut values);
        values
    }
}

/// A block of normal numbers; of bits, where a format cannot be written.
fn block(format: Format, len: usize, bytes: usize, noise: &mut Noise) -> Vec<u8> {
    let values: Vec<f32> = (0..len).map(|_| 0.05 * noise.normal()).collect();
    let mut out = vec![0; bytes];
    if from_float(format, &values, None, &mut out).is_err() {
        // No byte is above 0x3f: no scale is large, infinite or no number.
        out.iter_mut().for_each(|b| *b = noise.next() as u8 & 0x3f);
    }
    out
}

/// Copies of a matrix in device layout.
pub struct Resident {
    pub matrix: Matrix,
    pub layout: Layout,
    copies: Vec<Memory>,
    table: Memory,
    /// A power of two for each row, for matrix units; made when it is asked for.
    scales: Option<Memory>,
}

impl Resident {
    /// Puts so many copies on the device: GGUF bytes go there in parts and are packed there.
    pub fn new(gpu: &Machine, matrix: Matrix, copies: usize) -> anyhow::Result<Resident> {
        let Matrix { format, rows, cols, .. } = matrix;
        let whole = Run::whole(format, rows, cols).context("a weight that kernels can count")?;
        let layout = *whole.layout();
        let memories: Vec<Memory> =
            (0..copies.max(1)).map(|_| gpu.zeros(layout.bytes as usize)).collect::<Result<_, _>>()?;
        let key = Key { op: "pack", format: Some(format) };
        let kernel = gpu.kernel("pack", code(key)?, &Constants::of(key, gpu, &[], &[])?.values())?;
        for part in whole.split(PART) {
            let (first, n) = (u64::from(part.first_block()), u64::from(part.blocks()));
            let mut bytes = Vec::with_capacity(n as usize * matrix.pool[0].len() + 16);
            (first..first + n).for_each(|i| bytes.extend_from_slice(matrix.block(i)));
            bytes.resize(bytes.len().next_multiple_of(16), 0);
            let src = gpu.upload(&bytes)?;
            for m in &memories {
                let (args, groups) = part.pack(src.address(), m.address());
                let mut pointers = Vec::new();
                let mut bytes = args.encode(&mut |at, p: u64| pointers.push((at, p)));
                for (at, p) in pointers {
                    bytes[at..at + 8].copy_from_slice(&p.to_le_bytes());
                }
                gpu.launch(kernel, &bytes, groups)?;
            }
        }
        let words = format_file(format).and_then(|f| f.table.as_deref()).map_or(vec![0], tables::codebook);
        let table = gpu.upload(&words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>())?;
        Ok(Resident { matrix, layout, copies: memories, table, scales: None })
    }

    pub fn copies(&self) -> usize {
        self.copies.len()
    }

    /// Copy `i` as an argument.
    pub fn weight(&self, i: usize) -> Arg {
        Arg::Weight { base: self.copies[i].address(), planes: self.layout.planes(), table: self.table.address() }
    }

    /// The powers of two of the rows.
    pub fn scales(&self) -> Option<&Memory> {
        self.scales.as_ref()
    }

    /// Makes the powers of two of the rows.
    pub fn make_scales(&mut self, gpu: &Machine) -> anyhow::Result<()> {
        let Matrix { format, rows, cols, .. } = self.matrix;
        let scale = gpu.zeros(4 * rows)?;
        let key = Key { op: "row_scale", format: Some(format) };
        let (rows, units) = (rows as u32, (cols / 32) as u32);
        let args =
            [("w", self.weight(0)), ("scale", (&scale).into()), ("rows", Arg::U32(rows)), ("units", Arg::U32(units))];
        launch(gpu, key, &[], &args, |c| [rows.div_ceil(c.get("THREADS") / c.get("WAVE")), 1, 1])?;
        self.scales = Some(scale);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_weight_format_has_finite_rows_that_are_not_all_zeros() {
        for format in Format::ALL.iter().copied().filter(|f| f.is_weight() && format_file(*f).is_some()) {
            let row = Matrix::new(format, 2, 512).unwrap().row(1);
            assert!(row.iter().all(|x| x.is_finite()) && row.iter().any(|x| *x != 0.0), "{format}");
        }
        assert!(Matrix::new(Format::Q4_K, 2, 100).is_err());
    }
}
