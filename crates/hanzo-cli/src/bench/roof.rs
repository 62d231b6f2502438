//! The CPU's roofs: bytes that its threads read from memory together, multiply-adds that they make in registers, and how
//! long a word takes from one thread to another and back, which tells whether they share a path to memory.
//! What kernels do is measured elsewhere; nothing of theirs runs here.

use std::hint::black_box;

use hanzo_ml::cpu::isa::IsaLevel;
use hanzo_ml::cpu::memory::Buffer;
use hanzo_ml::cpu::roof::{Unit, multiply_adds, read, round_trips};
use serde_json::{Value, json};

use super::kernel::{TIMES_CACHE, timed};
use crate::measure::stats;

/// Without knowledge of the cache.
const DEFAULT_WORKING_SET: u64 = 256 << 20;
/// The most that is read, where caches are very large.
const MOST_WORKING_SET: u64 = 512 << 20;
/// How far ahead lines are asked for.
const AHEAD: [usize; 4] = [0, 1 << 10, 4 << 10, 8 << 10];
/// Rounds of multiply-adds in a repetition: a few milliseconds.
const ROUNDS: usize = 2_000_000;
/// Round trips in a repetition: a few milliseconds.
const TRIPS: usize = 20_000;

/// One roof.
#[derive(Clone, Debug)]
pub struct Roof {
    /// `read`, `multiply-add` or `round trip`.
    op: &'static str,
    /// What it was reached with.
    way: String,
    isa: IsaLevel,
    threads: usize,
    /// Bytes read, multiply-adds made by all threads, or round trips, in one repetition.
    amount: f64,
    /// Seconds of each repetition.
    seconds: Vec<f64>,
}

impl Roof {
    /// Amount a second, of the median repetition.
    fn rate(&self) -> f64 {
        self.amount / stats::median(&self.seconds)
    }

    /// Every field by name.
    pub fn fields(&self) -> Vec<(&'static str, Value)> {
        let giga = |op: &str| json!((self.op == op).then_some(self.rate() / 1e9));
        vec![
            ("op", json!(self.op)),
            ("way", json!(self.way)),
            ("isa", json!(self.isa.name())),
            ("n_threads", json!(self.threads)),
            ("median_us", json!(1e6 * stats::median(&self.seconds))),
            ("gb_per_s", giga("read")),
            ("g_multiply_adds_per_s", giga("multiply-add")),
            ("round_trip_ns", json!((self.op == "round trip").then_some(1e9 / self.rate()))),
        ]
    }
}

/// Measures: the reads best first, then multiply-adds, then the round trip of two threads.
pub fn run(isa: IsaLevel, threads: usize, repetitions: usize, cache: Option<u64>) -> anyhow::Result<Vec<Roof>> {
    let bytes = cache.map_or(DEFAULT_WORKING_SET, |c| TIMES_CACHE * c).min(MOST_WORKING_SET) as usize;
    let mut memory = Buffer::new(bytes)?;
    memory.bytes_mut().fill(1);
    let part = bytes / threads / 64 * 64;
    let memory = memory.bytes();
    let mut reads = Vec::new();
    for ahead in AHEAD {
        let seconds = timed(
            threads,
            repetitions,
            |_| (),
            |t, ()| {
                black_box(read(isa, &memory[t * part..(t + 1) * part], ahead));
            },
        );
        let way = if ahead == 0 { "no prefetch".into() } else { format!("prefetch {} KiB ahead", ahead >> 10) };
        reads.push(Roof { op: "read", way, isa, threads, amount: (part * threads) as f64, seconds });
    }
    reads.sort_by(|a, b| b.rate().total_cmp(&a.rate()));
    for unit in [Unit::Int8, Unit::F32] {
        let seconds = timed(
            threads,
            repetitions,
            |_| (),
            |_, ()| {
                black_box(multiply_adds(isa, unit, ROUNDS));
            },
        );
        let (way, amount) = (unit.name().to_string(), (multiply_adds(isa, unit, 1) as usize * ROUNDS * threads) as f64);
        reads.push(Roof { op: "multiply-add", way, isa, threads, amount, seconds });
    }
    if threads > 1 {
        let seconds = timed(1, repetitions, |_| (), |_, ()| round_trips(TRIPS));
        let way = "two threads, a cache line".into();
        reads.push(Roof { op: "round trip", way, isa, threads: 2, amount: TRIPS as f64, seconds });
    }
    Ok(reads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roofs_have_the_best_read_first_and_a_rate_each() {
        let isa = IsaLevel::detect();
        let roofs = run(isa, 2, 1, Some(1 << 16)).unwrap();
        let rate = |r: &Roof, name: &str| r.fields().into_iter().find(|f| f.0 == name).and_then(|f| f.1.as_f64());
        let reads: Vec<f64> = roofs.iter().filter_map(|r| rate(r, "gb_per_s")).collect();
        assert_eq!(reads.len(), AHEAD.len());
        assert!(reads.is_sorted_by(|a, b| a >= b) && reads[3] > 0.0, "{reads:?}");
        let made: Vec<f64> = roofs.iter().filter_map(|r| rate(r, "g_multiply_adds_per_s")).collect();
        assert!(made.len() == 2 && made.iter().all(|x| *x > 0.0), "{made:?}");
        assert!(roofs.iter().filter_map(|r| rate(r, "round_trip_ns")).all(|ns| ns > 0.0 && ns < 1e9));
    }
}
