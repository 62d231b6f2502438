//! The tensor-core GEMMs of CUDA and HIP on the host, with their instructions emulated register by register (`tensor/words.h`): bit for bit what
//! `gemm_dot` gives, for a format of each kind. No hardware has run them yet.
#![cfg(unix)]

use hanzo_gguf::{Format, formats::to_float};
use hanzo_kernels::args::{Args, GemmDot, GemmMmaF16, GemmSimd, Weight};
use hanzo_kernels::host::{HostKernel, Memory};
use hanzo_kernels::run::Run;
use hanzo_kernels::{Key, Target, format_file, op, tables, text};

/// Each kernel, its wave size, and the registers of the step that tests use: fewer waves than on a GPU, so that tails are met.
const KERNELS: [(&str, u32); 3] = [("gemm_mma", 32), ("gemm_wmma", 32), ("gemm_mfma", 64)];
const ROWS: usize = 37;
const TOKENS: usize = 21;

/// SplitMix64 (Steele, Lea and Flood 2014).
struct Rng(u64);

impl Rng {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Blocks of finite values.
    fn blocks(&mut self, format: Format, elements: usize) -> Vec<u8> {
        let mut values = vec![0.0; format.block_len()];
        let mut all = Vec::new();
        while all.len() < elements / format.block_len() * format.block_bytes() {
            let block: Vec<u8> = (0..format.block_bytes()).map(|_| self.bits() as u8).collect();
            to_float(format, &block, &mut values);
            if values.iter().all(|v| v.abs() < 1e6) {
                all.extend(block);
            }
        }
        all
    }

    fn words(&mut self, n: usize, word: impl Fn(u64) -> u32) -> Vec<u8> {
        (0..n).flat_map(|_| word(self.bits()).to_le_bytes()).collect()
    }
}

/// A kernel's text for the host, with the emulated words where it needs them.
fn host_text(name: &'static str, format: Format) -> String {
    let text = text(Key { op: name, format: Some(format) }, Target::Host).expect("an op of this crate");
    if !name.starts_with("gemm_") || ["gemm_dot", "gemm_codes", "gemm_weight_stage"].contains(&name) {
        return text;
    }
    text.replacen("\n// math\n", &format!("{}\n// math\n", include_str!("tensor/words.h")), 1)
}

/// Compiles and runs a text.
fn run_text(
    text: &str,
    memory: &mut Memory,
    args: &impl Args<u64>,
    set: &[(&str, u32)],
    groups: [u32; 3],
) -> Result<(), String> {
    let kernel = HostKernel::compile(text, set).map_err(|e| e.to_string())?;
    let mut pointers = Vec::new();
    let mut bytes = args.encode(&mut |at, address| pointers.push((at, address)));
    for (at, address) in pointers {
        bytes[at..at + 8].copy_from_slice(&address.to_le_bytes());
    }
    kernel.run(memory, &bytes, groups).map_err(|e| e.to_string())
}

/// Compiles and runs a kernel.
fn run(
    name: &'static str,
    format: Format,
    memory: &mut Memory,
    args: &impl Args<u64>,
    set: &[(&str, u32)],
    groups: [u32; 3],
) {
    run_text(&host_text(name, format), memory, args, set, groups).unwrap_or_else(|e| panic!("{name} {format}: {e}"));
}

/// Both kernels' outputs for the same random weights and activations.
fn compare(format: Format, terms: u32, moe: bool) {
    let rng = &mut Rng(u64::from(format.id()) + u64::from(terms));
    let experts = if moe { 2 } else { 1 };
    let cols = format.block_len().max(96).next_multiple_of(format.block_len());
    let (units, x_rows) = (cols / 32, TOKENS * terms as usize);
    let weights = Run::whole(format, experts * ROWS, cols).expect("a weight");
    let mut memory = Memory::new();
    let mut gguf = rng.blocks(format, experts * ROWS * cols);
    gguf.resize(gguf.len().next_multiple_of(4), 0);
    let (src, base) = (memory.read(&gguf), memory.output(weights.layout().bytes as usize));
    let (pack, groups) = weights.pack(src, base);
    run("pack", format, &mut memory, &pack, &[], groups);
    let device = memory.bytes(base).to_vec();

    let mut memory = Memory::new();
    let table = format_file(format).and_then(|f| f.table.as_deref()).map_or(Vec::new(), tables::codebook);
    let table: Vec<u8> = table.iter().flat_map(|w| w.to_le_bytes()).collect();
    let list =
        |memory: &mut Memory, v: &[u32]| memory.read(&v.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>());
    let args = GemmDot {
        w: Weight { base: memory.read(&device), planes: weights.layout().planes(), table: memory.read(&table) },
        xq: memory.read(&rng.words(x_rows * units * 8, |b| b as u32)),
        xd: memory.read(&rng.words(x_rows * units, |b| ((b as u32 >> 9) as f32 / 8_388_608.0).to_bits())),
        xs: memory.read(&rng.words(x_rows * units, |b| b as u32 & 0x07ff_07ff)),
        bias: memory.read(&rng.words(experts * ROWS, |b| (b as u32 as f32).to_bits())),
        y: memory.output(4 * TOKENS * ROWS),
        live: list(&mut memory, &[TOKENS as u32 - 1]),
        // Slots in no order; the last is in no tile.
        tiles: list(&mut memory, &[2, 1, 0, 11, 0, 11, 9]),
        order: list(&mut memory, &(0..TOKENS as u32).map(|i| i * 8 % 21).collect::<Vec<_>>()),
        rows: ROWS as u32,
        units: units as u32,
        div: 1,
        bias_stride: ROWS as u32,
    };
    let own = [("TERMS", terms), ("BIAS", 1), ("MOE", u32::from(moe))];
    let groups = |bm: u32, bn: u32| [(ROWS as u32).div_ceil(bn), if moe { 3 } else { (x_rows as u32).div_ceil(bm) }, 1];
    run("gemm_dot", format, &mut memory, &args, &own, groups(64, 64));
    let want = memory.u32s(args.y);
    assert!(want[..20 * ROWS].iter().any(|w| f32::from_bits(*w).is_finite()));
    for (name, wave) in KERNELS {
        memory.bytes_mut(args.y).fill(0xff);
        let tile = [("WAVE", wave), ("THREADS", 4 * wave), ("BM", 32), ("BN", 64), ("WM", 2), ("MI", 1), ("NI", 2)];
        let set: Vec<(&str, u32)> = own.iter().chain(&tile).copied().collect();
        run(name, format, &mut memory, &args, &set, groups(32, 64));
        let got = memory.u32s(args.y);
        let wrong = want.iter().zip(&got).position(|(w, g)| w != g);
        assert_eq!(wrong, None, "{name} {format} with TERMS {terms}, MOE {moe}: {got:x?} is not {want:x?}");
    }
    // The same for codes as floats, at waves of any size.
    for (wave, threads, bm, bn, tm) in
        [(1, 64, 16, 32, 2), (8, 256, 64, 64, 4), (32, 64, 32, 32, 4), (64, 64, 16, 32, 2)]
    {
        memory.bytes_mut(args.y).fill(0xff);
        let tile = [("WAVE", wave), ("THREADS", threads), ("BM", bm), ("BN", bn), ("TM", tm), ("TN", 4)];
        let set: Vec<(&str, u32)> = own.iter().chain(&tile).copied().collect();
        run("gemm_codes", format, &mut memory, &args, &set, groups(bm, bn));
        assert!(want == memory.u32s(args.y), "gemm_codes {format} at waves of {wave} with TERMS {terms}, MOE {moe}");
    }
    // And where threads read their rows of x themselves.
    for (wave, threads, bn, bu) in [(1, 16, 16, 4), (8, 64, 16, 3), (32, 32, 8, 8), (64, 64, 5, 1)] {
        if terms == 1 {
            memory.bytes_mut(args.y).fill(0xff);
            let tile = [("WAVE", wave), ("THREADS", threads), ("BM", threads), ("BN", bn), ("BU", bu)];
            let set: Vec<(&str, u32)> = own.iter().chain(&tile).copied().collect();
            run("gemm_weight_stage", format, &mut memory, &args, &set, groups(threads, bn));
            assert!(want == memory.u32s(args.y), "gemm_weight_stage {format} at waves of {wave}, MOE {moe}");
        }
    }
}

#[test]
fn tensor_core_gemms_give_the_bits_of_gemm_dot() {
    // Groups of 32 and of 16, with and without minima, and one with a codebook.
    for format in [Format::Q8_0, Format::Q4_K, Format::Q6_K, Format::Q2_K, Format::IQ3_XXS] {
        compare(format, 1, false);
    }
}

#[test]
fn two_terms_of_activations_meet_in_one_row() {
    compare(Format::Q4_K, 2, false);
    compare(Format::Q6_K, 2, false);
}

#[test]
fn tiles_of_experts_go_to_their_slots() {
    compare(Format::Q4_K, 1, true);
}

#[test]
fn tensor_core_gemms_are_one_kernel_behind_the_arguments_of_gemm_dot() {
    let body = |name: &str| op(name).expect("an op").body.split_once("KERNEL {").expect("a kernel").1.to_string();
    let args = |name: &str| op(name).expect("an op").args.iter().map(|a| (a.name.clone(), a.kind)).collect::<Vec<_>>();
    for (name, _) in KERNELS {
        assert_eq!(body(name), body("gemm_mma"), "{name} differs from gemm_mma in more than its fragments");
        assert_eq!(args(name), args("gemm_dot"), "{name} takes other arguments than gemm_dot");
    }
}

/// A GEMM of halves as a test runs it.
#[derive(Clone, Copy)]
struct Tile {
    kernel: &'static str,
    /// Rows of x and of w.
    size: [u32; 2],
    /// Its constants beside BIAS and MOE.
    set: &'static [(&'static str, u32)],
    bfloat: bool,
}

const SIMD_16: Tile = Tile { kernel: "gemm_simd", size: [16, 64], set: &[("BM", 16)], bfloat: false };
const SIMD_32: Tile = Tile { kernel: "gemm_simd", size: [32, 64], set: &[("BM", 32)], bfloat: false };
/// Smaller than on a GPU, so that tails are met.
const MMA_32: Tile = Tile {
    kernel: "gemm_mma_f16",
    size: [32, 64],
    set: &[("THREADS", 128), ("BM", 32), ("BN", 64), ("MI", 1)],
    bfloat: false,
};
const MMA_BFLOAT: Tile = Tile {
    set: &[("THREADS", 64), ("BM", 16), ("BN", 32), ("WM", 1), ("MI", 1), ("NI", 1), ("STAGES", 2), ("BFLOAT", 1)],
    size: [16, 32],
    bfloat: true,
    ..MMA_32
};
const MMA_128: Tile = Tile { size: [128, 128], set: &[], ..MMA_32 };

/// A GEMM of halves against sums in f64 of the same halves. `edit` changes its text.
fn halves(tile: Tile, format: Format, moe: bool, edit: impl Fn(String) -> String) -> Result<(), String> {
    let Tile { kernel, size: [bm, bn], set, bfloat } = tile;
    let rng = &mut Rng(u64::from(format.id()) + u64::from(bm));
    let experts = if moe { 2 } else { 1 };
    // An odd number of units for the formats that can; more steps than stages.
    let cols = if format.block_len() > 32 { 2 * format.block_len() } else { 288 };
    let weights = Run::whole(format, experts * ROWS, cols).expect("a weight");
    let mut memory = Memory::new();
    let mut gguf = rng.blocks(format, experts * ROWS * cols);
    let mut w = vec![0.0; experts * ROWS * cols];
    to_float(format, &gguf, &mut w);
    gguf.resize(gguf.len().next_multiple_of(4), 0);
    let (src, base) = (memory.read(&gguf), memory.output(weights.layout().bytes as usize));
    let (pack, groups) = weights.pack(src, base);
    run("pack", format, &mut memory, &pack, &[], groups);
    let device = memory.bytes(base).to_vec();

    let mut memory = Memory::new();
    let table = format_file(format).and_then(|f| f.table.as_deref()).map_or(Vec::new(), tables::codebook);
    let list =
        |memory: &mut Memory, v: &[u32]| memory.read(&v.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>());
    let floats =
        |memory: &mut Memory, v: &[f32]| memory.read(&v.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>());
    // Powers of two that bring each row of w to about one, and any for the rows of x.
    let power = |row: &[f32]| 2f32.powi(-row.iter().fold(1e-20f32, |m, v| m.max(v.abs())).log2().floor() as i32);
    let wscale: Vec<f32> = w.chunks(cols).map(power).collect();
    let xscale: Vec<f32> = (0..TOKENS as i32).map(|t| 2f32.powi(t % 5 - 2)).collect();
    // Halves of 2^-4 .. 2, bfloat16s of 2^-3 .. 2, of either sign.
    let x = || if bfloat { (rng.bits() as u16 & 0x81ff) | 0x3e00 } else { (rng.bits() as u16 & 0x8fff) | 0x2c00 };
    let x: Vec<u16> = std::iter::repeat_with(x).take(TOKENS * cols).collect();
    let bias: Vec<f32> = (0..experts * ROWS).map(|i| i as f32 / 8.0).collect();
    let order: Vec<u32> = (0..TOKENS as u32).map(|i| i * 8 % 21).collect();
    let tiles = [(1usize, 0usize, 11usize), (0, 11, 9)];
    let x_bytes: Vec<u8> = x.iter().flat_map(|h| h.to_le_bytes()).collect();
    let (table, x) = (list(&mut memory, &table), (x, memory.read(&x_bytes)));
    let weight = Weight { base: memory.read(&device), planes: weights.layout().planes(), table };
    let (y, live) = (memory.output(4 * TOKENS * ROWS), list(&mut memory, &[TOKENS as u32 - 1]));
    let (wpower, xpower, biases) =
        (floats(&mut memory, &wscale), floats(&mut memory, &xscale), floats(&mut memory, &bias));
    let (tile_list, slots) = (list(&mut memory, &[2, 1, 0, 11, 0, 11, 9]), list(&mut memory, &order));
    let across = if moe { 3 } else { (TOKENS as u32).div_ceil(bm) };
    let set: Vec<(&str, u32)> = set.iter().copied().chain([("BIAS", 1), ("MOE", u32::from(moe))]).collect();
    let text = edit(host_text(kernel, format));
    macro_rules! launch {
        ($args:ident) => {{
            let args = $args {
                w: weight,
                wscale: wpower,
                xh: x.1,
                xscale: xpower,
                bias: biases,
                y,
                live,
                tiles: tile_list,
                order: slots,
                rows: ROWS as u32,
                units: (cols / 32) as u32,
                div: 1,
                bias_stride: ROWS as u32,
            };
            run_text(&text, &mut memory, &args, &set, [across, (ROWS as u32).div_ceil(bn), 1])?
        }};
    }
    match kernel {
        "gemm_simd" => launch!(GemmSimd),
        _ => launch!(GemmMmaF16),
    }
    let (got, x) = (memory.f32s(y), x.0);

    let value = |bits: u16| f64::from(if bfloat { f32::from_bits(u32::from(bits) << 16) } else { half_value(bits) });
    let rounded = |v: f32| f64::from(if bfloat { to_bfloat(v) } else { to_half(v) });
    // The expert of each slot; a slot in no tile stays untouched.
    let mut expert_of = vec![if moe { None } else { Some(0) }; TOKENS];
    for (expert, first, count) in tiles.iter().filter(|_| moe) {
        order[*first..first + count].iter().for_each(|slot| expert_of[*slot as usize] = Some(*expert));
    }
    if !moe {
        expert_of[TOKENS - 1] = None;
    }
    for (slot, expert) in expert_of.iter().enumerate() {
        for row in 0..ROWS {
            let g = got[slot * ROWS + row];
            let Some(expert) = expert else {
                if !g.is_nan() {
                    return Err(format!("{kernel} {format}: slot {slot} is in no tile and has {g}"));
                }
                continue;
            };
            let (w, at) = (&w[(expert * ROWS + row) * cols..][..cols], expert * ROWS + row);
            let (mut sum, mut size) = (0.0, 0.0);
            for (w, x) in w.iter().zip(&x[slot * cols..]) {
                let p = rounded(w * wscale[at]) * value(*x);
                sum += p;
                size += p.abs();
            }
            let scale = f64::from(wscale[at]) * f64::from(xscale[slot]);
            let want = sum / scale + f64::from(bias[at]);
            // f32 sums in any order: one rounding an addition, and two at the end.
            let bound = (cols as f64 + 2.0) * 2f64.powi(-24) * (size / scale + f64::from(bias[at]));
            if (f64::from(g) - want).abs().is_nan() || (f64::from(g) - want).abs() > bound {
                return Err(format!("{kernel} {format} slot {slot} row {row}: {g} is not {want} within {bound:e}"));
            }
        }
    }
    Ok(())
}

/// The same, as it is.
fn meets_f64(tile: Tile, format: Format, moe: bool) {
    halves(tile, format, moe, |text| text).unwrap_or_else(|e| panic!("{e}"));
}

/// x, a normal number, rounded to the nearest bfloat16, ties to even.
fn to_bfloat(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

/// A half that is a normal number.
fn half_value(h: u16) -> f32 {
    f32::from_bits(u32::from(h & 0x8000) << 16 | ((u32::from(h & 0x7fff) << 13) + (112 << 23)))
}

/// x, below 65504, rounded to the nearest half, ties to even.
fn to_half(x: f32) -> f32 {
    // Adding this power of two leaves 11 bits of x, or what is above 2^-24.
    let exponent = ((x.to_bits() >> 23 & 255) as i32 - 127).max(-14);
    let magic = f64::from(exponent + 42).exp2() * 1.5;
    (f64::from(x) + magic - magic) as f32
}

#[test]
fn the_half_gemm_of_metal_meets_f64() {
    for format in [Format::Q8_0, Format::Q6_K, Format::F32, Format::IQ3_XXS] {
        meets_f64(SIMD_32, format, false);
    }
    meets_f64(SIMD_16, Format::Q4_K, false);
    meets_f64(SIMD_32, Format::Q4_K, true);
}

#[test]
fn the_half_gemm_of_cuda_meets_f64() {
    for format in [Format::Q8_0, Format::Q6_K, Format::F16, Format::IQ3_XXS] {
        meets_f64(MMA_32, format, false);
    }
    meets_f64(MMA_BFLOAT, Format::BF16, false);
    meets_f64(MMA_BFLOAT, Format::Q4_K, true);
    meets_f64(MMA_32, Format::Q4_K, true);
    // As it is launched.
    meets_f64(MMA_128, Format::Q4_K, false);
}

#[test]
fn a_copy_that_is_not_waited_for_or_not_behind_a_barrier_is_caught() {
    let faulty = |from: &str, to: &str| {
        let edit = |text: String| {
            assert!(text.contains(from), "the kernel has no {from:?}");
            text.replacen(from, to, 1)
        };
        halves(MMA_32, Format::Q8_0, false, edit).expect_err(from)
    };
    let wait = "hz_copy_wait(STAGES - 2u);\n    BARRIER;";
    // It comes while the others read.
    assert!(faulty(wait, "hz_copy_wait(STAGES - 1u);\n    BARRIER;").contains("races"));
    assert!(faulty(wait, "hz_copy_wait(STAGES - 2u);").contains("races"));
    // Copies to where the step at hand is multiplied.
    assert!(faulty("u32 free = STAGES - 1u;", "u32 free = now;").contains("races"));
}
