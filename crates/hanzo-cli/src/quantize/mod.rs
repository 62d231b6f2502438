//! Making a smaller copy of a model: which tensor becomes what ([`mix`]), and the streaming conversion.
//!
//! The source stays mapped, the copy is written tensor by tensor: memory stays near a few megabytes a thread. How values
//! are packed is the formats' business, not this module's.

pub mod imatrix;
pub mod mix;

use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::Context as _;
use hanzo_gguf::{Format, Gguf, GgufWriter, TensorInfo, formats};
use regex::Regex;
use serde::Serialize;

use crate::failure::{Failure, Interrupted};
use crate::progress::Progress;
use imatrix::Imatrix;
use mix::Mix;

/// Elements that a worker converts at a time: 1 MiB of floats.
const CHUNK: u64 = 1 << 18;
/// The version of the block layouts that readers check for.
const QUANTIZATION_VERSION: u32 = 2;

/// What to make of a model.
pub struct Options {
    /// The choice of formats.
    pub mix: &'static Mix,
    /// One format for every matrix.
    pub pure: bool,
    /// Exceptions by tensor name; the first that fits wins over the mix.
    pub exceptions: Vec<(Regex, Format)>,
    /// Importance of the columns.
    pub imatrix: Option<Imatrix>,
    /// Allow sources that are quantized already.
    pub allow_requantize: bool,
    /// Worker threads.
    pub threads: usize,
    /// Measure the error of every converted tensor.
    pub measure: bool,
}

/// What happens to one tensor.
#[derive(Debug, Serialize)]
pub struct Step {
    /// The tensor.
    pub tensor: String,
    /// Its shape, contiguous dimension first.
    pub shape: Vec<u64>,
    /// Its format in the source.
    #[serde(serialize_with = "format_name")]
    pub from: Format,
    /// Its format in the copy.
    #[serde(serialize_with = "format_name")]
    pub to: Format,
    /// Its size in the copy.
    pub bytes: u64,
    /// Whether an importance matrix had an entry for it.
    pub weighted: bool,
    /// What the conversion cost, if measured.
    pub error: Option<Error>,
}

fn format_name<S: serde::Serializer>(format: &Format, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(format.name())
}

/// The difference between a tensor and its copy.
#[derive(Clone, Copy, Debug, Default, Serialize, PartialEq)]
pub struct Error {
    /// Root of the mean squared difference.
    pub rmse: f64,
    /// `rmse` over the root mean square of the source: 0 is exact, 1 is as bad as zeros.
    pub relative_rmse: f64,
    /// The largest difference.
    pub max_error: f64,
}

/// Sums from which an [`Error`] is made.
#[derive(Clone, Copy, Default)]
struct Sums {
    elements: u64,
    squares: f64,
    errors: f64,
    max: f64,
}

impl Sums {
    fn of(values: &[f32], back: &[f32]) -> Sums {
        let mut sums = Sums { elements: values.len() as u64, ..Sums::default() };
        for (&v, &b) in values.iter().zip(back) {
            let (v, e) = (f64::from(v), f64::from(v) - f64::from(b));
            sums.squares += v * v;
            sums.errors += e * e;
            sums.max = sums.max.max(e.abs());
        }
        sums
    }

    fn join(self, other: Sums) -> Sums {
        Sums {
            elements: self.elements + other.elements,
            squares: self.squares + other.squares,
            errors: self.errors + other.errors,
            max: self.max.max(other.max),
        }
    }

    fn error(self) -> Error {
        let relative_rmse = if self.errors == 0.0 { 0.0 } else { (self.errors / self.squares).sqrt() };
        Error { rmse: (self.errors / self.elements.max(1) as f64).sqrt(), relative_rmse, max_error: self.max }
    }
}

/// Decides what happens to every tensor, in the source's order.
///
/// # Errors
/// A tensor that would be quantized again without leave, an exception that cannot be, an importance of another model.
pub fn plan(gguf: &Gguf, options: &Options) -> anyhow::Result<Vec<Step>> {
    let metadata = gguf.metadata();
    let arch = metadata.str("general.architecture")?;
    let model = mix::Model {
        layers: metadata.opt_u32(&format!("{arch}.block_count"))?.unwrap_or(0),
        experts: metadata.opt_u32(&format!("{arch}.expert_count"))?.unwrap_or(0) > 0,
        tied: gguf.tensor("output.weight").is_none(),
    };
    let steps = gguf.tensors().iter().map(|tensor| step(tensor, &model, options));
    let steps = steps.collect::<anyhow::Result<Vec<_>>>()?;
    if options.imatrix.is_some() && !steps.iter().any(|s| s.weighted) {
        return Err(Failure::new("the importance matrix has no entry for any tensor that is quantized")
            .remedy("it was made for another model, or the type needs none")
            .into());
    }
    Ok(steps)
}

fn step(tensor: &TensorInfo, model: &mix::Model, options: &Options) -> anyhow::Result<Step> {
    let dims = tensor.dims.iter().rposition(|d| *d > 1).map_or(1, |last| last + 1);
    let exception = options.exceptions.iter().find(|(pattern, _)| pattern.is_match(&tensor.name));
    let from = tensor.format;
    let to = match exception {
        _ if !from.is_weight() => from,
        Some((_, format)) => {
            let row = tensor.row_len();
            if !row.is_multiple_of(format.block_len() as u64) {
                return Err(Failure::usage(format!(
                    "tensor `{}` has rows of {row} elements, which {format} cannot hold (blocks of {})",
                    tensor.name,
                    format.block_len()
                ))
                .remedy("choose a format with shorter blocks for it")
                .into());
            }
            *format
        }
        None => match options.mix.format(&tensor.name, dims, model, options.pure) {
            Some(format) => mix::fitting(format, tensor.row_len()),
            // Small and sensitive: as floats they become F32, packed ones stay what they are.
            None if from.is_block() => from,
            None => Format::F32,
        },
    };
    if from.is_block() && from != to && !options.allow_requantize {
        return Err(Failure::new(format!(
            "tensor `{}` is {from} already: quantizing again adds its errors up",
            tensor.name
        ))
        .remedy("start from an F32, F16 or BF16 model, or say --allow-requantize")
        .into());
    }
    let weighted = match &options.imatrix {
        Some(imatrix) if to.is_block() && to != from => {
            imatrix.get(&tensor.name, tensor.row_len(), matrices(tensor))?.is_some()
        }
        _ => false,
    };
    let bytes = usize::try_from(tensor.row_len()).ok().and_then(|row| to.row_bytes(row)).unwrap_or(0) as u64;
    let bytes = bytes.saturating_mul(tensor.rows());
    Ok(Step { tensor: tensor.name.clone(), shape: tensor.dims.clone(), from, to, bytes, weighted, error: None })
}

/// Matrices stacked in a tensor: its experts.
fn matrices(tensor: &TensorInfo) -> u64 {
    tensor.dims.iter().skip(2).product()
}

/// Writes the copy to `path`, which appears only when all is done; once `cancel` is raised nothing is left of it. Returns the steps with their
/// errors, if measured.
pub fn run(
    gguf: &Gguf,
    mut steps: Vec<Step>,
    options: &Options,
    path: &Path,
    progress: &Progress,
    cancel: &AtomicBool,
) -> anyhow::Result<Vec<Step>> {
    let mut writer = GgufWriter::create(path)?;
    let metadata = writer.metadata_mut();
    metadata.copy_from(gguf.metadata());
    for key in ["split.no", "split.count", "split.tensors.count"] {
        metadata.remove(key);
    }
    metadata.set("general.file_type", options.mix.file_type);
    metadata.set("general.quantization_version", QUANTIZATION_VERSION);
    if let Some(imatrix) = &options.imatrix {
        metadata.set("quantize.imatrix.entries_count", u32::try_from(imatrix.len())?);
        if let Some(dataset) = &imatrix.dataset {
            metadata.set("quantize.imatrix.dataset", dataset.as_str());
        }
        if let Some(chunks) = imatrix.chunks {
            metadata.set("quantize.imatrix.chunks_count", chunks);
        }
    }
    for step in &steps {
        writer.declare(&step.tensor, &step.shape, step.to)?;
    }
    let mut data = writer.begin()?;
    for (tensor, step) in gguf.tensors().iter().zip(&mut steps) {
        if cancel.load(Ordering::SeqCst) {
            return Err(Interrupted.into());
        }
        if step.from == step.to {
            data.tensor(&step.tensor, gguf.data(tensor))?;
            progress.add(tensor.size());
            continue;
        }
        let importance = match &options.imatrix {
            Some(imatrix) if step.weighted => imatrix.get(&tensor.name, tensor.row_len(), matrices(tensor))?,
            _ => None,
        };
        let job = Job { tensor, source: gguf.data(tensor), to: step.to, importance, measure: options.measure };
        let write = |packed: &[u8]| match cancel.load(Ordering::SeqCst) {
            true => Err(Interrupted.into()),
            false => data.append(packed).map_err(Into::into),
        };
        let sums = convert(&job, options.threads, write, progress)?;
        step.error = options.measure.then(|| sums.error());
    }
    if cancel.load(Ordering::SeqCst) {
        return Err(Interrupted.into());
    }
    data.land()?;
    Ok(steps)
}

/// One tensor's conversion.
struct Job<'a> {
    tensor: &'a TensorInfo,
    source: &'a [u8],
    to: Format,
    /// Of every matrix, one after the other.
    importance: Option<&'a [f32]>,
    measure: bool,
}

impl Job<'_> {
    /// Runs of rows small enough to convert in one go; none crosses from one matrix into the next.
    fn chunks(&self) -> Vec<Range<u64>> {
        let rows_per_matrix = self.tensor.dims.get(1).copied().unwrap_or(1);
        let rows_at_once = (CHUNK / self.tensor.row_len()).max(1);
        let mut chunks = Vec::new();
        let mut row = 0;
        while row < self.tensor.rows() {
            let end_of_matrix = (row / rows_per_matrix + 1) * rows_per_matrix;
            let end = (row + rows_at_once).min(end_of_matrix);
            chunks.push(row..end);
            row = end;
        }
        chunks
    }

    fn convert(&self, rows: Range<u64>) -> anyhow::Result<(Vec<u8>, Sums)> {
        let name = &self.tensor.name;
        let row_len = usize::try_from(self.tensor.row_len())?;
        let (first, count) = (usize::try_from(rows.start)?, usize::try_from(rows.end - rows.start)?);
        let from_bytes = self.tensor.format.row_bytes(row_len).context("a row of the source is whole blocks")?;
        let to_bytes = self.to.row_bytes(row_len).context("a row of the copy is whole blocks")?;
        let mut values = vec![0.0; count * row_len];
        let source = &self.source[first * from_bytes..(first + count) * from_bytes];
        formats::to_float(self.tensor.format, source, &mut values);
        let mut packed = vec![0; count * to_bytes];
        let importance = self.importance(rows.start, row_len);
        formats::from_float(self.to, &values, importance, &mut packed)
            .with_context(|| format!("cannot quantize rows {} to {} of tensor `{name}`", rows.start, rows.end - 1))?;
        let mut sums = Sums::default();
        if self.measure {
            let mut back = vec![0.0; values.len()];
            formats::to_float(self.to, &packed, &mut back);
            sums = Sums::of(&values, &back);
        }
        Ok((packed, sums))
    }

    /// The importance for rows of the matrix that `row` is in; none if all its columns are unknown.
    fn importance(&self, row: u64, row_len: usize) -> Option<&[f32]> {
        let all = self.importance?;
        let matrix = usize::try_from(row / self.tensor.dims.get(1).copied().unwrap_or(1)).ok()?;
        let columns = all.get(matrix * row_len..(matrix + 1) * row_len)?;
        columns.iter().any(|v| *v > 0.0).then_some(columns)
    }
}

/// Converts a tensor on `threads` threads and hands its bytes to `write` in order.
fn convert(
    job: &Job,
    threads: usize,
    mut write: impl FnMut(&[u8]) -> anyhow::Result<()>,
    progress: &Progress,
) -> anyhow::Result<Sums> {
    let chunks = job.chunks();
    let threads = threads.max(1);
    let mut sums = Sums::default();
    // A window at a time: what waits to be written stays small.
    for window in chunks.chunks(threads * 4) {
        let results: Vec<Mutex<Option<anyhow::Result<_>>>> = window.iter().map(|_| Mutex::new(None)).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                let (Some(rows), Some(result)) = (window.get(i), results.get(i)) else { break };
                let converted = job.convert(rows.clone());
                if let Ok(mut slot) = result.lock() {
                    *slot = Some(converted);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.min(window.len()) {
                scope.spawn(work);
            }
            work();
        });
        for (result, rows) in results.into_iter().zip(window) {
            let result = result.into_inner().ok().flatten().context("a worker of quantize failed")?;
            let (packed, more) = result?;
            write(&packed)?;
            sums = sums.join(more);
            progress.add(job.source.len() as u64 / job.tensor.rows() * (rows.end - rows.start));
        }
    }
    Ok(sums)
}

#[cfg(test)]
mod tests;
