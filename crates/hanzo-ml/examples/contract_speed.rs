//! Speed of the CPU contractions on one thread: `contract_speed [FORMAT,..|all] [ISA] [ROWSxK] [TOKENS]`.
//!
//! Mat-vec of one token: GB/s of weights, once with copies of the matrix that add up to 256 MiB (out of cache, beside the
//! speed of plainly reading such a buffer), once with one matrix over and over; and of up to four tokens, 10^9 operations
//! (two per multiply-add) a second. GEMM: the same for TOKENS tokens. Best of several runs, in the thread's CPU time where
//! the system has such a clock: this is the kernel's own speed, not a benchmark of the machine.

use std::hint::black_box;

use hanzo_gguf::Format;
use hanzo_ml::cpu::contract::{
    ActBuf, ActKind, Contraction, Input, Job, Scratch, Tokens, Weights, kernel, quantizer, rounds_to_bf16,
};
use hanzo_ml::cpu::isa::IsaLevel;
use hanzo_ml::cpu::memory::Buffer;
use hanzo_ml::oracle::random::{Rng, block};

const WORKING_SET: usize = 256 << 20;

/// Seconds of CPU time of this thread.
#[cfg(unix)]
fn now() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the struct it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Seconds since the program's first question.
#[cfg(not(unix))]
fn now() -> f64 {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    START.get_or_init(std::time::Instant::now).elapsed().as_secs_f64()
}

/// Seconds of the best of at least `n` runs of `f`, and at least 0.2 s of them.
fn best(n: usize, mut f: impl FnMut()) -> f64 {
    let start = now();
    let mut best = f64::INFINITY;
    let mut runs = 0;
    while runs < n || now() - start < 0.2 {
        let t = now();
        f();
        best = best.min(now() - t);
        runs += 1;
    }
    best
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let arg = |i: usize, default: &str| args.get(i).cloned().unwrap_or_else(|| default.to_string());
    let formats: Vec<Format> = match arg(0, "all").as_str() {
        "all" => Format::ALL.iter().copied().filter(|f| f.is_weight()).collect(),
        names => names.split(',').map(|n| Format::from_name(n).expect("a format's name")).collect(),
    };
    let isa = IsaLevel::from_name(&arg(1, IsaLevel::detect().name())).expect("an instruction set's name");
    let (rows, k): (usize, usize) =
        arg(2, "3072x1024").split_once('x').map(|(r, k)| (r.parse().unwrap(), k.parse().unwrap())).unwrap();
    let tokens: usize = arg(3, "512").parse().expect("a number of tokens");

    // Aligned, as a model's weights and activations are.
    let mut weights = Buffer::new(WORKING_SET).expect("memory");
    let memory = weights.bytes_mut();
    let mut seed = 1u64;
    for word in memory.chunks_exact_mut(8) {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // No byte above 0x3f: half floats stay finite and small.
        word.copy_from_slice(&(seed >> 8 & 0x3f3f_3f3f_3f3f_3f3f).to_le_bytes());
    }
    let read = best(3, || {
        let sums = memory.chunks_exact(64).fold([0u64; 8], |mut sums, line| {
            for (sum, word) in sums.iter_mut().zip(line.chunks_exact(8)) {
                *sum ^= u64::from_ne_bytes(word.try_into().unwrap());
            }
            sums
        });
        black_box(sums);
    });
    println!("{isa}, {rows} x {k}, {tokens} tokens; plain read {:.1} GB/s", WORKING_SET as f64 / read / 1e9);
    println!(
        "| format | bits | matvec GB/s | in cache | Gop/s | 4 tokens | GEMM Gop/s |\n|---|---|---|---|---|---|---|"
    );

    let mut x = Buffer::new(4 * tokens * k).expect("memory");
    for (i, word) in x.bytes_mut().chunks_exact_mut(4).enumerate() {
        word.copy_from_slice(&(((i * 37 % 101) as f32 - 50.0) / 17.0).to_ne_bytes());
    }
    let x = x.ptr().cast_const().cast::<f32>();
    let mut acts_memory = ActBuf::new();
    let acts = acts_memory.planes(tokens, k);
    for t in 0..tokens {
        // SAFETY: the level is the caller's word; planes and x have `tokens` rows of k.
        unsafe { quantizer(isa)(&acts, t, 0..k / 32, x.add(t * k)) };
    }
    let mut scratch = Scratch::new();
    let mut out = vec![0f32; rows * tokens];
    for format in formats {
        let row_bytes = format.row_bytes(k).expect("k is a multiple of every block");
        let bytes = rows * row_bytes;
        let copies = (WORKING_SET / bytes).max(1);
        assert!(bytes <= WORKING_SET, "at most {WORKING_SET} bytes of weights");
        let plain = Input::F32 { data: x, stride: k };
        let (kind, input) = match format {
            _ if format.is_block() => (ActKind::Int8, Input::Int8(acts)),
            Format::BF16 if rounds_to_bf16(isa) => (ActKind::Bf16, plain),
            _ => (ActKind::F32, plain),
        };
        if format.is_block() {
            // Blocks whose values are of the usual size: subnormal scales would be slow.
            let rng = &mut Rng::named(1, format.name());
            let pool: Vec<Vec<u8>> = (0..509).map(|_| block(format, rng)).collect();
            memory.chunks_exact_mut(format.block_bytes()).for_each(|b| b.copy_from_slice(&pool[rng.below(509)]));
        }
        let mut call = |op: Contraction, copy: usize, count: usize| {
            let data = memory[copy * bytes..].as_ptr();
            let mut job = Job {
                w: Weights { format, data, row_bytes, k },
                rows: 0..rows,
                input,
                tokens: Tokens::Dense { first: 0, count },
                out: out.as_mut_ptr(),
                out_stride: rows,
                bias: None,
                packed: false,
                scratch: &mut scratch,
            };
            // SAFETY: the level is the caller's word; every pointer covers its rows.
            unsafe { kernel(op, format, kind, isa).expect("a kernel of this CPU")(&mut job) };
        };
        let cold = best(3, || (0..copies).for_each(|copy| call(Contraction::MatVec, copy, 1))) / copies as f64;
        let warm = best(20, || call(Contraction::MatVec, 0, 1));
        let few = tokens.min(4);
        let four = best(20, || call(Contraction::MatVec, 0, few));
        let gemm = best(3, || call(Contraction::Gemm, 0, tokens));
        let ops = 2.0 * (rows * k) as f64;
        println!(
            "| {format} | {:.2} | {:.1} | {:.1} | {:.0} | {:.0} | {:.0} |",
            8.0 * bytes as f64 / (rows * k) as f64,
            bytes as f64 / cold / 1e9,
            bytes as f64 / warm / 1e9,
            ops / warm / 1e9,
            ops * few as f64 / four / 1e9,
            ops * tokens as f64 / gemm / 1e9,
        );
    }
}
