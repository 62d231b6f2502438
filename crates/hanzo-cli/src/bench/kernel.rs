//! One contraction alone: a mat-vec or a GEMM of packed weights, rows split over threads, weights out of cache.
//!
//! Copies of the matrix add up to a working set of at least [`TIMES_CACHE`] times the last-level cache and are visited in
//! turn, so that every byte comes from memory, as in a decode step. A repetition visits all of them, or as many as
//! [`PASS_SECONDS`] allow, and the next goes on from there. Activations are quantized before the clock starts.

use std::hint::black_box;
use std::ops::Range;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use hanzo_gguf::Format;
use hanzo_ml::cpu::contract::{
    ActBuf, ActKind, Contraction, Input, Job, Kernel, Scratch, Tokens, Weights, kernel, quantizer, rounds_to_bf16,
    scratch_bytes,
};
use hanzo_ml::cpu::isa::IsaLevel;
use hanzo_ml::cpu::memory::Buffer;
use hanzo_ml::oracle::random::{self, Rng};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::measure::stats;

/// The working set, in last-level caches.
pub const TIMES_CACHE: u64 = 4;
/// Without knowledge of the cache.
const DEFAULT_WORKING_SET: u64 = 256 << 20;
/// Seconds that a repetition takes, if a call does not take longer.
const PASS_SECONDS: f64 = 2.0;
/// Seconds from which a row of calls says how long one takes.
const TELLING_SECONDS: f64 = 0.05;
/// Rows that a thread's part is a multiple of: no kernel's tile is cut.
const ROW_STEP: usize = 16;

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub op: Contraction,
    pub format: Format,
    pub rows: usize,
    pub k: usize,
    pub tokens: usize,
    pub threads: usize,
    pub isa: IsaLevel,
    pub repetitions: usize,
    /// Bytes of the last-level cache, if known.
    pub cache: Option<u64>,
    /// Bytes that may be used for weights.
    pub memory: u64,
}

/// What came out.
#[derive(Clone, Debug)]
pub struct Measured {
    pub case: Case,
    /// Seconds a call, of each repetition.
    pub seconds: Vec<f64>,
    /// Bytes of one matrix, and how many there were.
    pub matrix_bytes: u64,
    pub copies: u64,
}

/// `4096x2048`: rows and columns.
pub fn parse_shape(text: &str) -> Result<(usize, usize), String> {
    let (rows, k) = text.split_once(['x', 'X']).ok_or("it is not ROWSxCOLUMNS, e.g. 4096x2048")?;
    let number = |n: &str| match n.trim().parse::<usize>() {
        Ok(n) if (1..=1 << 24).contains(&n) => Ok(n),
        _ => Err(format!("`{n}` is no size from 1 to 2^24")),
    };
    Ok((number(rows)?, number(k)?))
}

/// Measures a case.
pub fn run(case: &Case) -> anyhow::Result<Measured> {
    let Case { op, format, rows, k, tokens, threads, isa, .. } = *case;
    // As a model is run without `--exact`, in all but its output head.
    let kind = match format {
        _ if format.is_block() => ActKind::Int8,
        Format::BF16 if rounds_to_bf16(isa) => ActKind::Bf16,
        _ => ActKind::F32,
    };
    let unusable = |what: String| Failure::usage(format!("--format {format} --shape {rows}x{k}: {what}"));
    let run = kernel(op, format, kind, isa).ok_or_else(|| unusable(format!("there is no such kernel for {isa}")))?;
    let unit = format.block_len().max(if kind == ActKind::Int8 { 32 } else { 1 });
    let row_bytes = format.row_bytes(k).filter(|_| k.is_multiple_of(unit));
    let row_bytes = row_bytes.ok_or_else(|| unusable(format!("columns must be a multiple of {unit}")))?;
    let matrix_bytes = (rows * row_bytes) as u64;
    let wanted = case.cache.map_or(DEFAULT_WORKING_SET, |c| TIMES_CACHE * c);
    if matrix_bytes > case.memory {
        return Err(unusable(format!("one matrix takes {matrix_bytes} bytes, more than there is")).into());
    }
    let copies = wanted.div_ceil(matrix_bytes).clamp(1, (case.memory / matrix_bytes).max(1));

    let weights = weights(format, (copies * matrix_bytes) as usize)?;
    // Aligned, as the values of a Plan are.
    let mut x = Buffer::new(4 * tokens * k)?;
    for (i, word) in x.bytes_mut().chunks_exact_mut(4).enumerate() {
        word.copy_from_slice(&(((i * 37 % 101) as f32 - 50.0) / 17.0).to_ne_bytes());
    }
    let x = x.ptr().cast_const().cast::<f32>();
    let mut memory = ActBuf::new();
    let input = match kind {
        ActKind::F32 | ActKind::Bf16 => Input::F32 { data: x, stride: k },
        ActKind::Int8 => {
            let acts = memory.planes(tokens, k);
            for t in 0..tokens {
                // SAFETY: `isa` was looked up above, so this processor has it; planes and x hold `tokens` rows of k.
                unsafe { quantizer(isa)(&acts, t, 0..k / 32, x.add(t * k)) };
            }
            Input::Int8(acts)
        }
    };
    let mut out = vec![0f32; rows * tokens];
    let pass = Pass {
        kernel: run,
        weights: Weights { format, data: weights.ptr(), row_bytes, k },
        matrix_bytes: matrix_bytes as usize,
        copies: copies as usize,
        input,
        tokens,
        out: out.as_mut_ptr(),
        out_stride: rows,
    };
    let scratch = scratch_bytes(op, format, kind, isa, k, tokens);
    let seconds = passes(&pass, rows, threads, scratch, case.repetitions);
    black_box(&out);
    Ok(Measured { case: *case, seconds, matrix_bytes, copies })
}

/// Weights of the usual size: random blocks, whose codes and scales are as spread as a model's; floats of small magnitude. On
/// huge pages where there are any, as a model file's pages lie together in the page cache.
fn weights(format: Format, bytes: usize) -> anyhow::Result<Buffer> {
    let rng = &mut Rng::named(1, format.name());
    let mut all = Buffer::new(bytes)?;
    if format.is_block() {
        let pool: Vec<Vec<u8>> = (0..POOL).map(|_| random::block(format, rng)).collect();
        // In an order that no prefetcher or predictor learns.
        let blocks = all.bytes_mut().chunks_exact_mut(format.block_bytes());
        blocks.for_each(|b| b.copy_from_slice(&pool[rng.below(POOL)]));
    } else {
        // No byte above 0x3f: no float is large or has no number.
        let words = all.bytes_mut().chunks_exact_mut(4);
        words.for_each(|w| w.copy_from_slice(&(rng.bits() as u32 & 0x3f3f_3f3f).to_le_bytes()));
    }
    Ok(all)
}

/// Different blocks.
const POOL: usize = 509;

/// Everything a thread needs for calls on copy after copy, but its rows and scratch.
struct Pass {
    kernel: Kernel,
    /// The first copy.
    weights: Weights,
    matrix_bytes: usize,
    copies: usize,
    input: Input,
    tokens: usize,
    out: *mut f32,
    out_stride: usize,
}

// SAFETY: weights and input are only read; threads write disjoint rows of `out` (see `passes`).
unsafe impl Sync for Pass {}

/// What a thread has of its own.
struct Own {
    scratch: Scratch,
    /// The copy that it visits next.
    next: usize,
}

impl Pass {
    /// Contracts the rows of as many copies as there are calls.
    fn run(&self, rows: Range<usize>, calls: usize, own: &mut Own) {
        for _ in 0..calls {
            let data = self.weights.data.wrapping_add(own.next * self.matrix_bytes);
            own.next = (own.next + 1) % self.copies;
            let mut job = Job {
                w: Weights { data, ..self.weights },
                rows: rows.clone(),
                input: self.input,
                tokens: Tokens::Dense { first: 0, count: self.tokens },
                out: self.out,
                out_stride: self.out_stride,
                bias: None,
                packed: false,
                scratch: &mut own.scratch,
            };
            // SAFETY: the kernel was looked up for this processor; the pointers cover all rows and tokens; no other
            // thread has these rows.
            unsafe { (self.kernel)(&mut job) };
        }
    }
}

/// Seconds a call of each of `repetitions` passes, after one that warms up.
fn passes(pass: &Pass, rows: usize, threads: usize, scratch: usize, repetitions: usize) -> Vec<f64> {
    let per_thread = rows.div_ceil(threads).next_multiple_of(ROW_STEP);
    let part = |t: usize| (t * per_thread).min(rows)..((t + 1) * per_thread).min(rows);
    let own = |_| {
        let mut own = Own { scratch: Scratch::new(), next: 0 };
        own.scratch.reserve(scratch);
        own
    };
    let measure = |calls: usize, repetitions: usize| {
        timed(threads, repetitions, own, |t, own| {
            if !part(t).is_empty() {
                pass.run(part(t), calls, own);
            }
        })
    };
    let calls = calls_within(PASS_SECONDS, pass.copies, |calls| stats::median(&measure(calls, 1)));
    measure(calls, repetitions).into_iter().map(|s| s / calls as f64).collect()
}

/// The most calls, up to `all`, that take no longer than `limit` seconds, but one at least; `measure` says how long a row
/// of calls takes. Short rows are mostly the start of threads, so they only say whether a longer one can be tried.
fn calls_within(limit: f64, all: usize, mut measure: impl FnMut(usize) -> f64) -> usize {
    if all <= 1 {
        return 1;
    }
    let mut calls = 1;
    loop {
        let seconds = measure(calls);
        if seconds >= TELLING_SECONDS || calls == all {
            let each = seconds / calls as f64;
            return ((limit / each) as usize).clamp(1, all);
        }
        calls = calls.saturating_mul(16).min(all);
    }
}

/// Seconds that all threads need together for `work`, each with what `own` made for it, of each repetition after one that
/// warms up: from when the first of them begins to when the last is done.
pub(super) fn timed<T>(
    threads: usize,
    repetitions: usize,
    own: impl Fn(usize) -> T + Sync,
    work: impl Fn(usize, &mut T) + Sync,
) -> Vec<f64> {
    let barrier = Barrier::new(threads);
    let all = |t: usize| {
        let mut own = own(t);
        let mut spans = Vec::with_capacity(1 + repetitions);
        for _ in 0..=repetitions {
            // None begins before the last one has ended the repetition before. The threads leave one by one, so each has
            // a clock of its own: one of them could see the others begin, or even end, before it is woken.
            barrier.wait();
            let started = Instant::now();
            work(t, &mut own);
            spans.push((started, Instant::now()));
        }
        spans
    };
    let spans: Vec<Vec<Span>> = std::thread::scope(|scope| {
        let all = &all;
        let others: Vec<_> = (1..threads).map(|t| scope.spawn(move || all(t))).collect();
        let own = all(0);
        let joined = others.into_iter().map(|o| o.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        std::iter::once(own).chain(joined).collect()
    });
    (1..=repetitions).map(|i| together(spans.iter().map(|s| s[i])).as_secs_f64()).collect()
}

/// When a thread began and was done.
type Span = (Instant, Instant);

/// From the earliest beginning to the last end.
fn together(spans: impl Iterator<Item = Span>) -> Duration {
    let whole = spans.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)));
    whole.map_or(Duration::ZERO, |(began, done)| done.duration_since(began))
}

impl Measured {
    /// Bytes visited in turn.
    pub fn working_set(&self) -> u64 {
        self.copies * self.matrix_bytes
    }

    /// Every field by name.
    pub fn fields(&self) -> Vec<(&'static str, Value)> {
        let c = &self.case;
        let (best, _) = stats::range(&self.seconds);
        let median = stats::median(&self.seconds);
        let operations = 2.0 * (c.rows * c.k * c.tokens) as f64;
        vec![
            ("op", json!(if c.op == Contraction::MatVec { "matvec" } else { "gemm" })),
            ("format", json!(c.format.name())),
            ("rows", json!(c.rows)),
            ("columns", json!(c.k)),
            ("n_tokens", json!(c.tokens)),
            ("n_threads", json!(c.threads)),
            ("isa", json!(c.isa.name())),
            ("matrix_bytes", json!(self.matrix_bytes)),
            ("working_set", json!(self.working_set())),
            ("last_level_cache", json!(c.cache)),
            ("fits_cache", json!(c.cache.map(|cache| self.working_set() < TIMES_CACHE * cache))),
            ("median_us", json!(1e6 * median)),
            ("best_us", json!(1e6 * best)),
            ("gb_per_s", json!(self.matrix_bytes as f64 / median / 1e9)),
            ("gop_per_s", json!(operations / median / 1e9)),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(op: Contraction, format: Format) -> Case {
        Case {
            op,
            format,
            rows: 70,
            k: 256,
            tokens: if op == Contraction::MatVec { 1 } else { 9 },
            threads: 3,
            isa: IsaLevel::detect(),
            repetitions: 2,
            cache: Some(1 << 10),
            memory: 1 << 20,
        }
    }

    #[test]
    fn shapes_are_rows_by_columns() {
        assert_eq!(parse_shape("4096x2048"), Ok((4096, 2048)));
        for bad in ["4096", "0x32", "x", "99999999999x32", "4x-2"] {
            assert!(parse_shape(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_clock_runs_from_the_earliest_thread_to_the_last_whichever_was_late() {
        let zero = Instant::now();
        let at = |ms: u64| zero + Duration::from_millis(ms);
        // The first thread was woken when the second had all but done its work.
        for spans in
            [[(at(7), at(12)), (at(0), at(8))], [(at(0), at(8)), (at(7), at(12))], [(at(3), at(5)), (at(0), at(12))]]
        {
            assert_eq!(together(spans.into_iter()), Duration::from_millis(12));
        }
        let pause = |t: usize, calls: &mut u64| {
            *calls += 1;
            std::thread::sleep(Duration::from_millis(if t == 1 { 20 } else { 0 }));
        };
        let seconds = timed(3, 2, |_| 0, pause);
        assert!(seconds.len() == 2 && seconds.iter().all(|s| *s >= 0.02), "{seconds:?}");
    }

    #[test]
    fn a_pass_is_as_many_calls_as_fit_its_time_and_one_at_least() {
        // Seconds a row: a start of threads, and each call.
        let row = |start: f64, each: f64| move |calls: usize| start + each * calls as f64;
        assert_eq!(calls_within(2.0, 16, row(1e-4, 1e-3)), 16);
        assert_eq!(calls_within(2.0, 16, row(1e-4, 60.0)), 1);
        // Short calls are not taken for as long as the start of threads.
        let short = calls_within(2.0, 1_000_000, row(1e-4, 1e-5));
        assert!((190_000..=200_000).contains(&short), "{short}");
        let mut visited = Vec::new();
        calls_within(2.0, 40, |calls| {
            visited.push(calls);
            1e-6
        });
        assert_eq!(visited, [1, 16, 40]);
    }

    #[test]
    fn every_weight_format_can_be_measured_and_says_whether_it_fits_the_cache() {
        for format in Format::ALL.iter().copied().filter(|f| f.is_weight()) {
            for op in [Contraction::MatVec, Contraction::Gemm] {
                let measured = run(&case(op, format)).unwrap();
                assert_eq!(measured.seconds.len(), 2, "{format}");
                let field = |name: &str| measured.fields().into_iter().find(|(n, _)| *n == name).unwrap().1;
                assert_eq!(field("fits_cache"), json!(false), "{format}");
                assert!(field("gb_per_s").as_f64().unwrap() > 0.0, "{format}");
            }
        }
        let huge = run(&Case { cache: Some(1 << 30), ..case(Contraction::MatVec, Format::Q8_0) }).unwrap();
        assert!(huge.working_set() <= 1 << 20 && huge.fields().contains(&("fits_cache", json!(true))));
    }

    #[test]
    fn columns_that_are_no_whole_blocks_are_bad_usage() {
        let error = run(&Case { k: 100, ..case(Contraction::MatVec, Format::Q4_K) }).unwrap_err();
        assert_eq!(crate::failure::exit_code(&error), 2);
        assert!(error.to_string().contains("multiple of 256"), "{error}");
    }
}
