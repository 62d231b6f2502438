//! Ten thousand damaged files: no panic, no allocation beyond a small multiple of the file, no hang; and the damage
//! reaches every check, not just the first ones.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use hanzo_gguf::{Array, Format, Gguf, GgufError, Metadata};

mod exercise;

use exercise::{seeds, write};

/// The system's allocator, with the bytes in use and their peak counted.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every request goes to the system's allocator unchanged; only counters are kept beside.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let in_use = IN_USE.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(in_use, Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// SplitMix64 (Steele, Lea, Flood 2014): small, seeded, good enough to damage files with.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `n`, which is not 0.
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// Damages a file in one to three places; half of the time where an integer of the file is, judging by its zeros.
fn mutate(random: &mut Random, seeds: &[Vec<u8>]) -> Vec<u8> {
    const NUMBERS: [u64; 14] = [
        0,
        1,
        2,
        7,
        9,
        32,
        33,
        64,
        255,
        0x7fff_ffff,
        0xffff_ffff,
        0x7fff_ffff_ffff_ffff,
        0x8000_0000_0000_0000,
        0xffff_ffff_ffff_ffff,
    ];
    let mut file = seeds[random.below(seeds.len())].clone();
    for _ in 0..1 + random.below(3) {
        if file.is_empty() {
            break;
        }
        let at = random.below(file.len());
        // A little-endian integer's first byte: not zero, with zeros after it.
        let integer =
            (at..file.len().saturating_sub(4)).find(|&i| file[i] != 0 && file[i + 1..i + 4] == [0; 3]).unwrap_or(at);
        let patch = |file: &mut Vec<u8>, at: usize, bytes: &[u8]| {
            let n = bytes.len().min(file.len() - at);
            file[at..at + n].copy_from_slice(&bytes[..n]);
        };
        match random.below(10) {
            0 => file[at] ^= 1 << random.below(8),
            1 => file[at] = random.next() as u8,
            2 => file.truncate(at),
            3 => {
                let end = (at + 1 + random.below(16)).min(file.len());
                file.drain(at..end);
            }
            4 => {
                let end = (at + 1 + random.below(64)).min(file.len());
                let copy = file[at..end].to_vec();
                let to = random.below(file.len());
                file.splice(to..to, copy);
            }
            5 => {
                let other = &seeds[random.below(seeds.len())];
                let from = random.below(other.len());
                file.truncate(at);
                file.extend(&other[from..]);
            }
            6 | 7 => file[integer] = random.pick(&NUMBERS) as u8,
            8 => patch(&mut file, integer, &(random.pick(&NUMBERS) as u32).to_le_bytes()),
            _ => patch(&mut file, integer, &random.pick(&NUMBERS).to_le_bytes()),
        }
    }
    file
}

/// An error kind's name.
fn name(error: &GgufError) -> String {
    let debug = format!("{:?}", error.kind());
    debug.split([' ', '(']).next().unwrap_or_default().to_owned()
}

/// Peak memory that reading `file` takes beyond what was in use, and the outcome.
fn read(file: Vec<u8>) -> (usize, Result<Gguf, GgufError>) {
    let before = IN_USE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = Gguf::from_bytes(file);
    (PEAK.load(Relaxed) - before, result)
}

/// The most memory that reading a file of `n` bytes may take: a key of the least size takes 13 bytes of the file, and
/// some more as an entry of a growing list; an error text has some length whatever the file.
fn allowed(n: usize) -> usize {
    12 * n + 1024
}

/// Files of a megabyte made of as many of the smallest pieces as fit: the most memory for a byte.
fn dense() -> Vec<(&'static str, Vec<u8>)> {
    const MEGABYTE: usize = 1 << 20;
    // Keys of three bytes, so that 2^17 of them differ.
    let mut keys = Metadata::new();
    for i in 0..MEGABYTE / 16 {
        let digits = [i >> 12, i >> 6, i].map(|d| (b'0' + (d & 63) as u8) as char);
        keys.set(String::from_iter(digits), 0_u8);
    }
    let mut strings = Metadata::new();
    strings.set("k", Array::strings(vec![[0_u8; 0]; MEGABYTE / 8]));
    let mut arrays = Metadata::new();
    arrays.set("k", Array::nested(vec![Array::from(Vec::<u8>::new()); MEGABYTE / 12]));
    let mut array_keys = Metadata::new();
    for i in 0..MEGABYTE / 27 {
        let digits = [i >> 12, i >> 6, i].map(|d| (b'0' + (d & 63) as u8) as char);
        array_keys.set(String::from_iter(digits), Vec::<u8>::new());
    }
    let names: Vec<String> = (0..MEGABYTE / 68).map(|i| format!("{i:x}")).collect();
    let tensors: Vec<(&str, &[u64], Format)> = names.iter().map(|n| (n.as_str(), &[1][..], Format::I8)).collect();
    vec![
        ("keys", write(&keys, &[])),
        ("strings", write(&strings, &[])),
        ("arrays in an array", write(&arrays, &[])),
        ("keys of arrays", write(&array_keys, &[])),
        ("tensors", write(&Metadata::new(), &tensors)),
    ]
}

#[test]
fn ten_thousand_damaged_files_neither_panic_nor_hang_nor_fill_the_memory() {
    let seeds = seeds();
    for seed in &seeds {
        exercise::exercise(&Gguf::from_bytes(seed.clone()).unwrap());
    }
    let mut random = Random(20_261_129);
    let mut outcomes = BTreeMap::<String, usize>::new();
    let mut worst = (0.0_f64, 0);
    for _ in 0..10_000 {
        let file = mutate(&mut random, &seeds);
        let len = file.len();
        let start = Instant::now();
        let (peak, result) = read(file);
        assert!(peak <= allowed(len), "reading {len} bytes took {peak} bytes of memory");
        if peak as f64 / (len + 256) as f64 > worst.0 {
            worst = (peak as f64 / (len + 256) as f64, len);
        }
        let outcome = match &result {
            Ok(gguf) => {
                exercise::exercise(gguf);
                "(read and used)".to_owned()
            }
            Err(error) => {
                assert!(error.to_string().len() < 600);
                name(error)
            }
        };
        assert!(start.elapsed() < Duration::from_secs(5));
        *outcomes.entry(outcome).or_default() += 1;
    }
    for (what, file) in dense() {
        let (len, start) = (file.len(), Instant::now());
        let (peak, result) = read(file);
        assert!(peak <= allowed(len), "reading {len} bytes of {what} took {peak} bytes of memory");
        println!("{len} bytes of {what}: {:.1} x the file, {:?}", peak as f64 / len as f64, start.elapsed());
        drop(result.unwrap());
    }
    println!("peak memory at most {:.1} x (file + 256 bytes), at {} bytes", worst.0, worst.1);
    for (outcome, count) in &outcomes {
        println!("{count:6}  {outcome}");
    }
    // The damage reaches every check that damage to one file can reach.
    for kind in [
        "(read and used)",
        "Alignment",
        "BigEndian",
        "Bool",
        "Count",
        "DimCount",
        "DimOverflow",
        "DuplicateKey",
        "DuplicateTensor",
        "Empty",
        "Magic",
        "NameLength",
        "NotUtf8",
        "RowLength",
        "SplitInMemory",
        "SplitValue",
        "TensorOffset",
        "TensorOverlap",
        "TensorRange",
        "TensorType",
        "Truncated",
        "ValueType",
        "Version",
        "ZeroDim",
    ] {
        assert!(outcomes.contains_key(kind), "no damaged file was refused for {kind}");
    }
}
