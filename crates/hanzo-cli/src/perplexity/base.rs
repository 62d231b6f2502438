//! A model's log-probabilities as a file, to compare another model with: two bytes an entry.
//!
//! Layout, little-endian: `HANZOKL1`, u32 n_vocab, u32 n_ctx, u32 n_chunks, the chunks' token ids (u32), then for each
//! predicted position a row: f32 largest log-probability, f32 step, and n_vocab u16 codes, log-probability = largest -
//! code * step. Entries more than [`RANGE`] below the largest are stored as that: together they carry less than 1e-7 of
//! the probability. The step is at most RANGE / 65535 = 3.7e-4, so an entry is off by 1.9e-4 at most.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::Chunks;
use crate::failure::Failure;

const MAGIC: &[u8; 8] = b"HANZOKL1";
/// Nats below the largest log-probability that a row can tell apart.
pub const RANGE: f32 = 24.0;
const LEVELS: f32 = 65535.0;

/// Writes a base; the file appears when it is complete.
pub struct Writer {
    out: BufWriter<File>,
    part: PathBuf,
    file: PathBuf,
    codes: Vec<u8>,
}

impl Writer {
    /// Starts `file` with its head.
    pub fn create(file: &Path, n_vocab: usize, chunks: &Chunks) -> anyhow::Result<Writer> {
        let mut file = file.to_path_buf();
        if let Ok(there) = std::fs::metadata(&file) {
            if !there.is_file() {
                anyhow::bail!("`{}` is no regular file: choose another", file.display());
            }
            file = file.canonicalize().with_context(|| format!("cannot look at `{}`", file.display()))?;
        }
        let mut part = file.as_os_str().to_owned();
        part.push(".part");
        let part = PathBuf::from(part);
        let create = File::create(&part).with_context(|| format!("cannot write `{}`", part.display()))?;
        let mut out = BufWriter::with_capacity(1 << 20, create);
        out.write_all(MAGIC)?;
        for n in [n_vocab, chunks.n_ctx, chunks.len()] {
            out.write_all(&u32::try_from(n)?.to_le_bytes())?;
        }
        chunks.ids.iter().try_for_each(|id| out.write_all(&id.to_le_bytes()))?;
        Ok(Writer { out, part, file, codes: Vec::new() })
    }

    /// Adds a row of log-probabilities.
    pub fn row(&mut self, log_probs: &[f32]) -> std::io::Result<()> {
        self.codes.clear();
        encode(log_probs, &mut self.codes);
        self.out.write_all(&self.codes)
    }

    /// Completes the file.
    pub fn finish(mut self) -> anyhow::Result<()> {
        let done = self.out.flush().and_then(|()| std::fs::rename(&self.part, &self.file));
        done.with_context(|| format!("cannot write `{}`", self.file.display()))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Gone already if the file was completed.
        let _ = std::fs::remove_file(&self.part);
    }
}

/// Appends a row's bytes.
fn encode(log_probs: &[f32], out: &mut Vec<u8>) {
    let (low, top) = log_probs.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(lo, hi), x| (lo.min(*x), hi.max(*x)));
    let step = (top - low.max(top - RANGE)) / LEVELS;
    out.extend(top.to_le_bytes());
    out.extend(step.to_le_bytes());
    for lp in log_probs {
        let code = if step > 0.0 { ((top - lp) / step).round().min(LEVELS) } else { 0.0 };
        out.extend((code as u16).to_le_bytes());
    }
}

/// Reads a base row by row.
#[derive(Debug)]
pub struct Reader {
    input: BufReader<File>,
    file: PathBuf,
    n_vocab: usize,
    chunks: Chunks,
    bytes: Vec<u8>,
    row: Vec<f32>,
}

impl Reader {
    /// Opens `file` and reads its head. Sizes are checked against the file's before anything is allocated.
    pub fn open(file: &Path) -> anyhow::Result<Reader> {
        let unusable = |what: &str| {
            Failure::new(format!("`{}` is no base of log-probabilities: {what}", file.display()))
                .remedy("make one with `hanzo perplexity --save-base`")
        };
        let opened = File::open(file).with_context(|| format!("cannot read `{}`", file.display()))?;
        let size = opened.metadata()?.len();
        let mut input = BufReader::with_capacity(1 << 20, opened);
        let mut head = [0u8; 20];
        input.read_exact(&mut head).map_err(|_| unusable("it is too short"))?;
        if &head[..8] != MAGIC {
            return Err(unusable("it begins with something else").into());
        }
        let number = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let [n_vocab, n_ctx, n_chunks] = [number(8), number(12), number(16)].map(u64::from);
        if n_vocab == 0 || n_ctx < 4 || n_chunks == 0 {
            return Err(unusable("its head makes no sense").into());
        }
        let rows = u128::from(n_chunks) * u128::from(n_ctx - 1 - n_ctx / 2);
        let expected = 20 + 4 * u128::from(n_chunks) * u128::from(n_ctx) + rows * (8 + 2 * u128::from(n_vocab));
        if expected != u128::from(size) {
            return Err(unusable(&format!("it has {size} bytes where its head asks for {expected}")).into());
        }
        let mut ids = vec![0u8; (4 * n_chunks * n_ctx) as usize];
        input.read_exact(&mut ids)?;
        let ids: Vec<u32> = ids.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        if let Some(id) = ids.iter().find(|id| u64::from(**id) >= n_vocab) {
            return Err(unusable(&format!("token {id} is beyond its vocabulary of {n_vocab}")).into());
        }
        let n_vocab = n_vocab as usize;
        let chunks = Chunks { n_ctx: n_ctx as usize, ids };
        let (bytes, row) = (vec![0; 8 + 2 * n_vocab], vec![0.0; n_vocab]);
        Ok(Reader { input, file: file.to_path_buf(), n_vocab, chunks, bytes, row })
    }

    /// Entries of a row.
    pub fn n_vocab(&self) -> usize {
        self.n_vocab
    }

    /// The tokens that the rows belong to.
    pub fn chunks(&self) -> &Chunks {
        &self.chunks
    }

    /// The next row.
    pub fn next_row(&mut self) -> anyhow::Result<&[f32]> {
        let read = self.input.read_exact(&mut self.bytes);
        read.with_context(|| format!("cannot read `{}`", self.file.display()))?;
        decode(&self.bytes, &mut self.row);
        Ok(&self.row)
    }
}

fn decode(bytes: &[u8], row: &mut [f32]) {
    let float = |at: usize| f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let (top, step) = (float(0), float(4));
    for (lp, code) in row.iter_mut().zip(bytes[8..].chunks_exact(2)) {
        *lp = top - f32::from(u16::from_le_bytes([code[0], code[1]])) * step;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("hanzo-base-test-{}-{name}", std::process::id()))
    }

    #[test]
    fn rows_come_back_within_half_a_step() {
        let chunks = Chunks::cut((0..8).collect(), 8, None, None);
        let rows: Vec<Vec<f32>> = (0..3).map(|r| (0..10).map(|i| -0.5 - (i * (r + 1)) as f32).collect()).collect();
        let path = file("round");
        let mut writer = Writer::create(&path, 10, &chunks).unwrap();
        rows.iter().for_each(|r| writer.row(r).unwrap());
        assert!(!path.exists());
        writer.finish().unwrap();
        let mut reader = Reader::open(&path).unwrap();
        assert_eq!((reader.chunks(), reader.n_vocab()), (&chunks, 10));
        for row in &rows {
            let top = row[0];
            for (found, lp) in reader.next_row().unwrap().iter().zip(row) {
                assert!((found - lp.max(top - RANGE)).abs() <= RANGE / LEVELS, "{found} {lp}");
            }
        }
        assert!(reader.next_row().is_err());
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn equal_and_impossible_log_probabilities_survive() {
        let mut bytes = Vec::new();
        encode(&[-1.0, -1.0], &mut bytes);
        let mut row = [0.0; 2];
        decode(&bytes, &mut row);
        assert_eq!(row, [-1.0, -1.0]);
        bytes.clear();
        encode(&[0.0, f32::NEG_INFINITY], &mut bytes);
        decode(&bytes, &mut row);
        assert!(row[0] == 0.0 && (row[1] + RANGE).abs() < 1e-3, "{row:?}");
    }

    #[test]
    fn damaged_files_are_refused_with_a_reason() {
        let path = file("damaged");
        let chunks = Chunks::cut((0..8).collect(), 8, None, None);
        let mut writer = Writer::create(&path, 10, &chunks).unwrap();
        (0..3).for_each(|_| writer.row(&[-1.0; 10]).unwrap());
        writer.finish().unwrap();
        let good = std::fs::read(&path).unwrap();
        let mut huge = good.clone();
        huge[8..20].fill(0xff);
        let mut beyond = good.clone();
        beyond[20] = 10;
        let damaged =
            [(&good[..10], "too short"), (&good[..60], "bytes where"), (&huge, "bytes where"), (&beyond, "token 10")];
        for (bytes, why) in damaged {
            std::fs::write(&path, bytes).unwrap();
            let error = Reader::open(&path).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        std::fs::write(&path, "something else entirely").unwrap();
        assert!(Reader::open(&path).unwrap_err().to_string().contains("begins with"));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_base_that_is_not_finished_leaves_nothing() {
        let path = file("dropped");
        drop(Writer::create(&path, 10, &Chunks::cut(vec![0; 8], 8, None, None)).unwrap());
        let part = format!("{}.part", path.display());
        assert!(!path.exists() && !Path::new(&part).exists());
    }
}
