//! Importance matrices: how much each input column of a matrix matters, measured on text by other programs.
//!
//! Two files are read. The GGUF form has, per weight `W`, a tensor `W.in_sum2` `[columns, matrices]` (the sum of squared
//! inputs) and a tensor `W.counts` `[1, matrices]` (over how many tokens); a mixture has one matrix per expert. The old
//! binary form (`.dat`) is little-endian: i32 entries, then per entry i32 name length, name, i32 calls, i32 values, and
//! the f32 values (summed over calls); what may follow is ignored. Columns come out as means of squared inputs.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use hanzo_gguf::{Format, Gguf, formats};

use crate::failure::Failure;

/// An importance matrix file.
pub struct Imatrix {
    entries: HashMap<String, Vec<f32>>,
    /// What the file says it was measured on.
    pub dataset: Option<String>,
    /// What the file says of how much text it was measured on.
    pub chunks: Option<u32>,
}

impl Imatrix {
    /// Reads either form.
    pub fn open(path: &Path) -> anyhow::Result<Imatrix> {
        let bytes = std::fs::read(path);
        let read = bytes.map_err(anyhow::Error::new).and_then(|bytes| match bytes.starts_with(b"GGUF") {
            true => from_gguf(&Gguf::from_bytes(bytes)?),
            false => from_dat(&bytes),
        });
        read.map_err(|cause| {
            Failure::new(format!("cannot use the importance matrix `{}`", path.display()))
                .because(cause)
                .remedy("give the output of an imatrix program for this very model: GGUF or the older .dat")
                .into()
        })
    }

    /// Number of weights with an entry.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// The importance of the columns of each of a weight's `matrices`, if the file has it: `columns` values per matrix.
    ///
    /// # Errors
    /// If the entry has another size.
    pub fn get(&self, name: &str, columns: u64, matrices: u64) -> Result<Option<&[f32]>, Failure> {
        let Some(values) = self.entries.get(name) else { return Ok(None) };
        let expected = columns.saturating_mul(matrices);
        if values.len() as u64 != expected {
            let message =
                format!("the importance matrix has {} columns for tensor `{name}`, not {expected}", values.len());
            return Err(Failure::new(message).remedy("it was made for another model"));
        }
        Ok(Some(values))
    }
}

fn from_gguf(gguf: &Gguf) -> anyhow::Result<Imatrix> {
    let mut entries = HashMap::new();
    for sums in gguf.tensors() {
        let Some(name) = sums.name.strip_suffix(".in_sum2") else { continue };
        let counts = gguf.need_tensor(&format!("{name}.counts"))?;
        ensure!(sums.format == Format::F32 && counts.format == Format::F32, "entry `{name}` is not of F32");
        let mut values = vec![0.0; usize::try_from(sums.elements())?];
        formats::to_float(Format::F32, gguf.data(sums), &mut values);
        let mut n = vec![0.0; usize::try_from(counts.elements())?];
        formats::to_float(Format::F32, gguf.data(counts), &mut n);
        ensure!(n.len() as u64 == sums.rows(), "entry `{name}` has {} counts for {} matrices", n.len(), sums.rows());
        for (matrix, n) in values.chunks_mut(usize::try_from(sums.row_len())?).zip(n) {
            // No token went there: all columns alike, which is what zeros mean to the caller.
            matrix.iter_mut().for_each(|v| *v = if n > 0.0 { *v / n } else { 0.0 });
        }
        entries.insert(name.to_string(), checked(name, values)?);
    }
    ensure!(!entries.is_empty(), "it has no tensor `*.in_sum2`: it is a GGUF file of another kind");
    let metadata = gguf.metadata();
    let dataset = metadata.opt_strs("imatrix.datasets")?.and_then(|d| d.get_str(0)).map(str::to_string);
    Ok(Imatrix { entries, dataset, chunks: metadata.opt_u32("imatrix.chunk_count")? })
}

/// What is left of a `.dat` file.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, n: usize) -> anyhow::Result<&'a [u8]> {
        let split = self.0.split_at_checked(n).context("the file is cut short, or is no importance matrix")?;
        self.0 = split.1;
        Ok(split.0)
    }

    fn count(&mut self, what: &str) -> anyhow::Result<usize> {
        let value = i32::from_le_bytes(self.take(4)?.try_into()?);
        usize::try_from(value).ok().with_context(|| format!("the {what} is {value}"))
    }

    fn text(&mut self) -> anyhow::Result<&'a str> {
        let len = self.count("length of a name")?;
        std::str::from_utf8(self.take(len)?).context("a name is not UTF-8")
    }
}

fn from_dat(bytes: &[u8]) -> anyhow::Result<Imatrix> {
    let mut rest = Rest(bytes);
    let mut entries = HashMap::new();
    for _ in 0..rest.count("number of entries")? {
        let name = rest.text()?;
        let calls = rest.count("number of calls")?.max(1) as f32;
        let columns = rest.count("number of columns")?;
        let (values, _) = rest.take(columns.saturating_mul(4))?.as_chunks::<4>();
        let values = values.iter().map(|b| f32::from_le_bytes(*b) / calls).collect();
        entries.insert(name.to_string(), checked(name, values)?);
    }
    ensure!(!entries.is_empty(), "it has no entries");
    // What newer writers append: the number of chunks and the name of the dataset.
    let chunks = rest.count("number of chunks").ok().and_then(|n| u32::try_from(n).ok());
    let dataset = rest.text().ok().map(str::to_string);
    Ok(Imatrix { entries, dataset, chunks })
}

fn checked(name: &str, values: Vec<f32>) -> anyhow::Result<Vec<f32>> {
    match values.iter().position(|v| !v.is_finite() || *v < 0.0) {
        Some(i) => bail!("column {i} of entry `{name}` is {}, and must be a finite number of at least 0", values[i]),
        None => Ok(values),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hanzo_gguf::GgufWriter;

    fn file(name: &str, bytes: &[u8]) -> std::path::PathBuf {
        let path = std::env::temp_dir().join(format!("hanzo-imatrix-test-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn le(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    #[test]
    fn the_gguf_form_divides_by_the_count_of_each_expert() {
        let mut writer = GgufWriter::new(Vec::new());
        writer.metadata_mut().set("imatrix.datasets", vec!["wiki"]);
        writer.metadata_mut().set("imatrix.chunk_count", 7_u32);
        writer.declare("w.weight.in_sum2", &[2, 3], Format::F32).unwrap();
        writer.declare("w.weight.counts", &[1, 3], Format::F32).unwrap();
        let mut data = writer.begin().unwrap();
        data.append(&le(&[2.0, 4.0, 9.0, 3.0, 5.0, 5.0])).unwrap();
        data.append(&le(&[2.0, 3.0, 0.0])).unwrap();
        let path = file("a.gguf", &data.finish().unwrap());
        let imatrix = Imatrix::open(&path).unwrap();
        assert_eq!(imatrix.get("w.weight", 2, 3).unwrap().unwrap(), [1.0, 2.0, 3.0, 1.0, 0.0, 0.0]);
        assert_eq!((imatrix.dataset.as_deref(), imatrix.chunks), (Some("wiki"), Some(7)));
        assert!(imatrix.get("other", 2, 3).unwrap().is_none());
        assert!(imatrix.get("w.weight", 4, 3).is_err());
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn the_old_form_is_read_and_damage_is_an_error() {
        let mut bytes = Vec::new();
        let int = |bytes: &mut Vec<u8>, v: i32| bytes.extend(v.to_le_bytes());
        int(&mut bytes, 1);
        int(&mut bytes, 8);
        bytes.extend(b"w.weight");
        int(&mut bytes, 2);
        int(&mut bytes, 3);
        bytes.extend(le(&[2.0, 4.0, 0.0]));
        let whole = bytes.len();
        int(&mut bytes, 12);
        int(&mut bytes, 4);
        bytes.extend(b"wiki");
        let path = file("b.dat", &bytes);
        let imatrix = Imatrix::open(&path).unwrap();
        assert_eq!(imatrix.get("w.weight", 3, 1).unwrap().unwrap(), [1.0, 2.0, 0.0]);
        assert_eq!((imatrix.dataset.as_deref(), imatrix.chunks, imatrix.len()), (Some("wiki"), Some(12), 1));
        for cut in 0..whole {
            std::fs::write(&path, &bytes[..cut]).unwrap();
            assert!(Imatrix::open(&path).is_err(), "{cut}");
        }
        std::fs::write(&path, &bytes[..whole]).unwrap();
        assert_eq!(Imatrix::open(&path).unwrap().chunks, None);
        for at in 0..whole {
            let mut damaged = bytes.clone();
            damaged[at] = 0xff;
            std::fs::write(&path, damaged).unwrap();
            let _ = Imatrix::open(&path); // whatever it says, it must say it
        }
        std::fs::remove_file(path).unwrap();
    }
}
