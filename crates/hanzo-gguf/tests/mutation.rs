//! Ten thousand damaged files: no panic, no allocation beyond a small multiple of the file, no hang; and the damage
//! reaches every check, not just the first ones.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use hanzo_gguf::{Array, Format, Gguf, GgufError, Metadata};

mod damage;
mod exercise;

use damage::{Random, mutate};
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

/// Held by each test, so that the counters count one of them.
static ALONE: Mutex<()> = Mutex::new(());

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
/// some more as an entry of a growing list; an error text has some length whatever the file. Measured on [`dense`]: at
/// most 7.6 x (keys of empty arrays), 5.3 x for keys of one byte.
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
    let _alone = ALONE.lock();
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

#[test]
fn damaged_parts_of_a_split_model_neither_panic_nor_hang() {
    let _alone = ALONE.lock();
    let folder = std::env::temp_dir().join(format!("hanzo-gguf-damage-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let part = |no: u16, name: &str| {
        let mut metadata = Metadata::new();
        metadata.set("split.no", no);
        metadata.set("split.count", 2_u16);
        metadata.set("split.tensors.count", 2_i32);
        write(&metadata, &[(name, &[4], Format::F32)])
    };
    let parts = [part(0, "a"), part(1, "b")];
    let paths = [1, 2].map(|no| folder.join(format!("m-0000{no}-of-00002.gguf")));
    let mut random = Random(7);
    let mut outcomes = BTreeMap::<String, usize>::new();
    for i in 0..500 {
        let damaged = i % 2;
        std::fs::write(&paths[damaged], mutate(&mut random, &parts[damaged..][..1])).unwrap();
        std::fs::write(&paths[1 - damaged], &parts[1 - damaged]).unwrap();
        let outcome = match Gguf::open(&paths[random.below(2)]) {
            Ok(gguf) => {
                exercise::touch(&gguf);
                "(read and used)".to_owned()
            }
            Err(error) => {
                assert!(error.file().starts_with(&folder));
                name(&error)
            }
        };
        *outcomes.entry(outcome).or_default() += 1;
    }
    std::fs::remove_dir_all(&folder).unwrap();
    println!("parts of a split model: {outcomes:?}");
    for kind in ["(read and used)", "SplitValue", "Truncated", "TensorRange"] {
        assert!(outcomes.contains_key(kind), "no damaged part led to {kind}");
    }
}
