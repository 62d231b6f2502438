//! Speed of the CPU's non-contraction ops on one core: attention decode and prefill, norms, GLUs.
//!
//! `cargo run --release -p hanzo-ml --example ops_bench [ISA]`, an instruction set by name. Decode walks a cache larger than the
//! last-level cache, so that its figure is memory speed; norms and GLUs run on a row that fits the second level.
//! Figures are the best of several repetitions; print them next to the machine's load.

use hanzo_gguf::Format;
use hanzo_ml::cache::PAGE;
use hanzo_ml::cpu::ops::attention::{AttentionHeads, AttentionInput, attention, attention_scratch};
use hanzo_ml::cpu::ops::kv::CacheRows;
use hanzo_ml::cpu::ops::{IsaLevel, Mat, MatMut, glu, norm};
use hanzo_ml::plan::{Activation, GluKind};
use std::time::Instant;

/// Best time of one call, over repetitions that fill about 0.3 s.
fn best(mut f: impl FnMut()) -> f64 {
    let (mut best, start) = (f64::INFINITY, Instant::now());
    while start.elapsed().as_secs_f64() < 0.3 || best.is_infinite() {
        let t = Instant::now();
        f();
        best = best.min(t.elapsed().as_secs_f64());
    }
    best
}

/// Bits of halves near 1, in a fixed pseudo-random pattern.
fn halves(n: usize) -> Vec<u16> {
    (0..n as u32).map(|i| (0x3800 | (i.wrapping_mul(2_654_435_761) >> 18) & 0x87ff) as u16).collect()
}

fn attend(isa: IsaLevel, name: &str, context: usize, n: usize, group: usize, d: usize, layers: usize) {
    let pages = context.div_ceil(PAGE);
    let mut k = halves(layers * pages * PAGE * d);
    let mut v = k.clone();
    let table: Vec<u32> = (0..(layers * pages) as u32).collect();
    let q: Vec<f32> = (0..n * group * d).map(|i| (i as f32 * 0.7).sin() * 0.2).collect();
    let mut out = vec![0.0; n * group * d];
    let mut scratch = vec![0.0; attention_scratch(d, d)];
    let positions: Vec<u32> = ((context - n) as u32..context as u32).collect();
    let heads = AttentionHeads { group, scale: 1.0 / (d as f32).sqrt(), window: None, softcap: None, split: None };
    // SAFETY: both vectors hold these rows, and only this thread uses them.
    let (k, v) = unsafe {
        let rows = |p: *mut u16| CacheRows::new(p.cast(), layers * pages, 1, d, Format::F16);
        (rows(k.as_mut_ptr()), rows(v.as_mut_ptr()))
    };
    let t = best(|| {
        for layer in 0..layers {
            let input = AttentionInput {
                q: Mat::new(&q, n, group * d),
                positions: &positions,
                visible_end: None,
                k,
                v,
                head: 0,
                pages: &table[layer * pages..],
                first_page: 0,
            };
            attention(isa, &heads, &input, None, MatMut::new(&mut out, n, group * d), &mut scratch);
        }
    }) / layers as f64;
    let seen: f64 = positions.iter().map(|p| *p as f64 + 1.0).sum();
    let (gb, gflop) = ((context * d * 4) as f64 / 1e9, seen * (group * d * 4) as f64 / 1e9);
    println!(
        "{name:<10} n={n:<5} context={context:<6} group={group} d={d:<4} {:8.1} us  {:7.1} GB/s of KV  {:7.1} GFLOP/s",
        t * 1e6,
        gb / t,
        gflop / t
    );
}

fn main() {
    let isa = std::env::args().nth(1).map_or(IsaLevel::detect(), |name| {
        let level = IsaLevel::from_name(&name).filter(|level| level.is_available());
        level.unwrap_or_else(|| panic!("`{name}` is none of {}", IsaLevel::available_names()))
    });
    println!("{isa:?}");
    for (group, d) in [(1, 64), (3, 64), (6, 128), (8, 128), (4, 256), (1, 128)] {
        attend(isa, "decode", 4096, 1, group, d, (96 << 20) / (4096 * d * 4));
    }
    attend(isa, "decode L2", 512, 1, 3, 64, 1);
    for (group, d) in [(3, 64), (6, 128), (1, 64), (1, 128), (4, 256)] {
        attend(isa, "prefill", 512, 512, group, d, 1);
    }
    attend(isa, "prefill", 4096, 512, 3, 64, 1);

    let (rows, cols) = (16, 4096);
    let x: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.3).sin() * 3.0).collect();
    let (y, w) = (x.clone(), x[..cols].to_vec());
    let (mut a, mut b) = (vec![0.0; rows * cols], vec![0.0; rows * cols]);
    let m = |v: &'_ [f32]| -> Mat<'static> {
        // SAFETY: the vectors outlive every use in this function.
        unsafe { Mat::from_raw(v.as_ptr(), rows, cols, cols) }
    };
    let report = |name: &str, bytes: usize, t: f64| {
        let n = (rows * cols) as f64;
        println!("{name:<24} {:7.3} ns/element  {:7.1} GB/s", t / n * 1e9, n * bytes as f64 / t / 1e9);
    };
    let t = best(|| norm::rms_norm(isa, m(&x), Some(&w), 1e-6, cols, MatMut::new(&mut b, rows, cols)));
    report("rms_norm", 8, t);
    let t = best(|| {
        let (sum, out) = (MatMut::new(&mut a, rows, cols), MatMut::new(&mut b, rows, cols));
        norm::add_rms_norm(isa, m(&x), m(&y), Some(&w), 1e-6, sum, out)
    });
    report("add_rms_norm", 16, t);
    for act in [Activation::Silu, Activation::GeluTanh, Activation::GeluErf] {
        let t = best(|| glu::glu(isa, GluKind::Plain(act), m(&x), m(&y), MatMut::new(&mut a, rows, cols)));
        report(&format!("glu {act:?}"), 12, t);
    }
}
