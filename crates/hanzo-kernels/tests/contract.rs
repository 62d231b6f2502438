//! The contractions against f64, on the host prelude: every block format, odd sizes, one row, tails, every wave size, and
//! mixtures of experts with empty ones. The bound is derived (accumulation only): activations are the same quantized ones.
#![cfg(unix)]

#[path = "contract/last.rs"]
mod last;

use hanzo_gguf::{Format, formats::to_float};
use hanzo_kernels::args::{
    Args, GemmDot, GemmF32, GluMatvec, Matvec, MatvecF32, MoeCombine, MoeDown, MoeSort, Quantize, Weight,
};
use hanzo_kernels::host::{HostKernel, Memory};
use hanzo_kernels::run::Run;
use hanzo_kernels::{Key, Target, format_file, formats, tables, text};

#[path = "contract/dead_ends.rs"]
mod dead_ends;

const U: f64 = 1.0 / (1u64 << 24) as f64;
/// Nothing to read or write.
const NONE: u64 = 0;

/// Compiles, runs: pointers in `args` are addresses in `memory`.
fn launch<A: Args<u64>>(
    format: Option<Format>,
    memory: &mut Memory,
    args: &A,
    constants: &[(&str, u32)],
    groups: [u32; 3],
) {
    let text = text(Key { op: A::OP, format }, Target::Host).expect("an op of this crate");
    let kernel = HostKernel::compile(&text, constants).unwrap_or_else(|e| panic!("{} {format:?}: {e}", A::OP));
    let mut pointers = Vec::new();
    let mut bytes = args.encode(&mut |at, address| pointers.push((at, address)));
    for (at, address) in pointers {
        bytes[at..at + 8].copy_from_slice(&address.to_le_bytes());
    }
    kernel.run(memory, &bytes, groups).unwrap_or_else(|e| panic!("{format:?} {constants:?}: {e}"));
}

/// SplitMix64 (Steele, Lea and Flood 2014).
struct Rng(u64);

impl Rng {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| (0..4).map(|_| self.bits() as u32 as f32 / 2f32.powi(31) - 1.0).sum()).collect()
    }

    /// Blocks of a format whose values are of the usual size.
    fn blocks(&mut self, format: Format, elements: usize) -> Vec<u8> {
        if !format.is_block() {
            let bits = |v: f32| match format {
                Format::F32 => v.to_le_bytes().to_vec(),
                Format::BF16 => v.to_le_bytes()[2..].to_vec(),
                // Halves of 2^-10 .. 2: a sign, a small exponent, any mantissa.
                _ => ((v.to_bits() >> 13 & 0x83ff) as u16 | 12 << 10 | (v.to_bits() >> 16 & 0x8000) as u16)
                    .to_le_bytes()
                    .to_vec(),
            };
            return self.floats(elements).into_iter().flat_map(bits).collect();
        }
        let mut values = vec![0.0; format.block_len()];
        let mut all = Vec::new();
        while all.len() < elements / format.block_len() * format.block_bytes() {
            let block: Vec<u8> = (0..format.block_bytes()).map(|_| self.bits() as u8).collect();
            to_float(format, &block, &mut values);
            let peak = values.iter().fold(0f32, |m, v| if v.is_finite() { m.max(v.abs()) } else { f32::INFINITY });
            if (1.0 / 1024.0..=4.0).contains(&peak) {
                all.extend(block);
            }
        }
        all
    }
}

fn bytes<T: Copy>(v: &[T], f: impl Fn(T) -> [u8; 4]) -> Vec<u8> {
    v.iter().flat_map(|x| f(*x)).collect()
}

fn read_f32(memory: &mut Memory, v: &[f32]) -> u64 {
    memory.read(&bytes(v, f32::to_le_bytes))
}

fn read_u32(memory: &mut Memory, v: &[u32]) -> u64 {
    memory.read(&bytes(v, u32::to_le_bytes))
}

/// A matrix `[experts, rows, cols]`.
struct Matrix {
    format: Format,
    rows: usize,
    cols: usize,
    values: Vec<f32>,
    device: Vec<u8>,
    planes: [u32; 3],
}

impl Matrix {
    fn new(format: Format, experts: usize, rows: usize, cols: usize, rng: &mut Rng) -> Matrix {
        let gguf = rng.blocks(format, experts * rows * cols);
        let mut values = vec![0.0; experts * rows * cols];
        to_float(format, &gguf, &mut values);
        let run = Run::whole(format, experts * rows, cols).expect("a weight");
        let mut memory = Memory::new();
        let mut padded = gguf.clone();
        padded.resize(gguf.len().next_multiple_of(4), 0);
        let (src, dst) = (memory.read(&padded), memory.output(run.layout().bytes as usize));
        let (args, groups) = run.pack(src, dst);
        launch(Some(format), &mut memory, &args, &[], groups);
        Matrix { format, rows, cols, values, device: memory.bytes(dst).to_vec(), planes: run.layout().planes() }
    }

    fn bind(&self, memory: &mut Memory) -> Weight<u64> {
        let table = format_file(self.format).and_then(|f| f.table.as_deref()).map_or(Vec::new(), tables::codebook);
        Weight { base: memory.read(&self.device), planes: self.planes, table: read_u32(memory, &table) }
    }

    fn row(&self, expert: usize, row: usize) -> &[f32] {
        &self.values[(expert * self.rows + row) * self.cols..][..self.cols]
    }

    fn units(&self) -> u32 {
        self.cols.div_ceil(32) as u32
    }

    /// `x w` and what f32 sums may be off by: see `oracle/interp/contraction.rs` of hanzo-ml. A weight's amplitude (its
    /// code's and its minimum's size) is at most three times the largest of its group, whose codes are random.
    fn dot(&self, expert: usize, row: usize, x: &[f64], additions: f64) -> (f64, f64) {
        let w = self.row(expert, row);
        let (mut v, mut size) = (0.0, 0.0);
        for (w, x) in w.chunks(32).zip(x.chunks(32)) {
            let top = w.iter().fold(0.0, |m: f64, w| m.max(f64::from(w.abs())));
            v += w.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
            size += x.iter().map(|x| 3.0 * top * x.abs()).sum::<f64>();
        }
        (v, (additions + 12.0) * U * size)
    }
}

/// Quantized rows by the rule of KERNEL-C.md, in Rust.
#[derive(Default, Debug, PartialEq)]
struct Acts {
    codes: Vec<i8>,
    d: Vec<u32>,
    sums: Vec<u32>,
}

impl Acts {
    fn push(&mut self, row: &[f32]) {
        for x in row.chunks(32) {
            let top = x.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
            let inverse = 127.0 / top;
            let broken = x.iter().any(|x| !x.is_finite());
            let usual = inverse.is_finite() && !broken;
            let code = |x: &f32| if usual { (x * inverse).round_ties_even() as i8 } else { 0 };
            let codes: Vec<i8> = x.iter().map(code).collect();
            let sum = |c: &[i8]| c.iter().map(|c| i32::from(*c)).sum::<i32>() as u32 & 0xffff;
            self.sums.push(sum(&codes[..16]) | sum(&codes[16..]) << 16);
            self.d.push(if broken {
                0x7fc0_0000
            } else if usual {
                (top / 127.0).to_bits()
            } else {
                0
            });
            self.codes.extend(codes);
        }
    }

    fn of(x: &[f32], cols: usize) -> Acts {
        let mut acts = Acts::default();
        x.chunks(cols).for_each(|row| acts.push(row));
        acts
    }

    /// As [`Acts::of`] in two terms, row after row.
    fn twice(x: &[f32], cols: usize) -> Acts {
        let mut acts = Acts::default();
        for row in x.chunks(cols) {
            let one = Acts::of(row, cols);
            let left = |(i, x): (usize, &f32)| x - f32::from_bits(one.d[i / 32]) * f32::from(one.codes[i]);
            let rest: Vec<f32> = row.iter().enumerate().map(left).collect();
            acts.push(row);
            acts.push(&rest);
        }
        acts
    }

    fn bind(&self, memory: &mut Memory) -> [u64; 3] {
        let codes: Vec<u8> = self.codes.iter().map(|c| *c as u8).collect();
        [memory.read(&codes), read_u32(memory, &self.d), read_u32(memory, &self.sums)]
    }

    fn row(&self, row: usize, cols: usize) -> Vec<f64> {
        let value = |i: usize| f64::from(self.codes[i]) * f64::from(f32::from_bits(self.d[i / 32]));
        (row * cols..(row + 1) * cols).map(value).collect()
    }
}

#[track_caller]
fn assert_near(got: f32, (want, bound): (f64, f64), what: &str) {
    let off = (f64::from(got) - want).abs();
    assert!(off <= bound + 1e-30, "{what}: {got} for {want}: off by {off:e}, bound {bound:e}");
}

fn blocks() -> Vec<Format> {
    formats().map(|f| f.0).filter(|f| f.is_block()).collect()
}

/// Columns of a row of a few units: one block, and more.
fn some_cols(format: Format) -> [usize; 2] {
    let len = format.block_len().max(32);
    [len, if len == 32 { 160 } else { 3 * len }]
}

#[test]
fn quantizing_gives_the_same_bits_as_the_rule() {
    let mut rng = Rng(1);
    let cols = 96;
    let mut x = rng.floats(cols * 7);
    x[3] = -40.0;
    (32..64).for_each(|i| x[i] = 0.0);
    (0..32).for_each(|i| x[64 + i] = if i == 0 { 127.0 } else { i as f32 + 0.5 });
    x[96] = f32::INFINITY;
    x[130] = f32::NAN;
    (0..32).for_each(|i| x[160 + i] *= 1e-38);
    (0..32).for_each(|i| x[192 + i] *= 1e-37);
    (0..32).for_each(|i| x[224 + i] *= 1e37);
    // The last row of the memory is not live.
    let (live, rows) = (6, 7);
    for (terms, want) in [(1, Acts::of(&x[..live * cols], cols)), (2, Acts::twice(&x[..live * cols], cols))] {
        for (wave, lanes) in [(1, 1), (8, 8), (32, 8), (64, 8), (4, 1)] {
            let mut m = Memory::new();
            let n = rows * terms * cols;
            let (xq, xd, xs) = (m.output(n), m.output(n / 8), m.output(n / 8));
            let args = Quantize {
                x: read_f32(&mut m, &x),
                xq,
                xd,
                xs,
                live: read_u32(&mut m, &[live as u32]),
                units: cols as u32 / 32,
            };
            let constants = [("WAVE", wave), ("LANES", lanes), ("TERMS", terms as u32)];
            launch(None, &mut m, &args, &constants, [(3 * lanes).div_ceil(64), rows as u32, 1]);
            let done = live * terms * cols;
            let got = Acts {
                codes: m.bytes(xq)[..done].iter().map(|c| *c as i8).collect(),
                d: m.u32s(xd)[..done / 32].to_vec(),
                sums: m.u32s(xs)[..done / 32].to_vec(),
            };
            assert_eq!(got, want, "{terms} terms, wave {wave}");
            assert!(m.bytes(xq)[done..].iter().all(|b| *b == 0xff), "a row that is not live was written");
        }
    }
}

/// A mat-vec of `live` rows of x in memory for `tokens`.
fn matvec(w: &Matrix, x: &[f32], live: usize, terms: usize, bias: Option<&[f32]>, constants: &[(&str, u32)]) {
    let (rows, cols) = (w.rows, w.cols);
    let tokens = x.len() / cols;
    let acts = if terms == 2 { Acts::twice(x, cols) } else { Acts::of(x, cols) };
    let mut m = Memory::new();
    let [xq, xd, xs] = acts.bind(&mut m);
    let get = |name: &str, default: u32| constants.iter().find(|c| c.0 == name).map_or(default, |c| c.1);
    let y = m.output(tokens * rows * 4);
    let args = Matvec {
        w: w.bind(&mut m),
        xq,
        xd,
        xs,
        bias: bias.map_or(NONE, |b| read_f32(&mut m, b)),
        y,
        live: read_u32(&mut m, &[live as u32]),
        ids: NONE,
        rows: rows as u32,
        units: w.units(),
        div: 1,
        bias_stride: 0,
    };
    let mut all = constants.to_vec();
    all.extend([("TERMS", terms as u32), ("BIAS", u32::from(bias.is_some()))]);
    let teams = get("THREADS", 128) / get("WAVE", 32) / get("SPLIT", 1);
    let per = teams * get("ROWS", 1) * get("REPEAT", 1);
    let groups = [(rows as u32).div_ceil(per), (tokens as u32).div_ceil(get("TOKENS", 1)), 1];
    launch(Some(w.format), &mut m, &args, &all, groups);
    check(w, &m.f32s(y), live, bias, &format!("matvec {} {rows}x{cols} {all:?}", w.format), |t, row| {
        let terms = (0..terms).map(|i| w.dot(0, row, &acts.row(t * terms + i, cols), cols as f64 / 8.0));
        terms.fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1))
    });
}

fn check(
    w: &Matrix,
    y: &[f32],
    live: usize,
    bias: Option<&[f32]>,
    what: &str,
    want: impl Fn(usize, usize) -> (f64, f64),
) {
    for t in 0..live {
        for row in 0..w.rows {
            let (mut v, mut e) = want(t, row);
            if let Some(bias) = bias {
                v += f64::from(bias[row]);
                e += U * v.abs();
            }
            assert_near(y[t * w.rows + row], (v, e), &format!("{what}, row {row} of token {t}"));
        }
    }
    assert!(y[live * w.rows..].iter().all(|v| v.is_nan()), "{what}: a row that is not live was written");
}

#[test]
fn matvec_meets_f64_for_every_format() {
    for format in blocks() {
        let rng = &mut Rng(u64::from(format.id()));
        for (rows, cols) in [(1, some_cols(format)[0]), (9, some_cols(format)[1])] {
            let w = Matrix::new(format, 1, rows, cols, rng);
            let bias = rng.floats(rows);
            let x = rng.floats(3 * cols);
            matvec(&w, &x[..cols], 1, 1, None, &[]);
            matvec(&w, &x, 2, 1, Some(&bias), &[("WAVE", 8), ("TOKENS", 2), ("ROWS", 2), ("UNITS", 2)]);
        }
    }
}

#[test]
fn matvec_meets_f64_for_every_constant() {
    let rng = &mut Rng(2);
    for format in [Format::Q4_K, Format::Q6_K, Format::Q8_0] {
        let w = Matrix::new(format, 1, 37, some_cols(format)[1], rng);
        let x = rng.floats(9 * w.cols);
        for wave in [1, 8, 32, 64] {
            matvec(&w, &x[..w.cols], 1, 2, None, &[("WAVE", wave), ("ROWS", 4)]);
            matvec(&w, &x, 9, 1, None, &[("WAVE", wave), ("TOKENS", 8), ("ROWS", 2)]);
        }
        matvec(&w, &x, 8, 2, None, &[("TOKENS", 4), ("SPLIT", 4), ("UNITS", 1)]);
        matvec(&w, &x, 9, 1, None, &[("SPLIT", 2), ("REPEAT", 3), ("ROWS", 2), ("WAVE", 8)]);
        matvec(&w, &x[..w.cols], 0, 1, None, &[("SPLIT", 2)]);
    }
}

/// silu(g) u and what is known of it, from `(value, bound)` of g and u.
fn silu_glu(g: (f64, f64), u: (f64, f64)) -> (f64, f64) {
    let act = g.0 / (1.0 + (-g.0).exp());
    // The slope of silu is at most 1.1; the function itself and the product take twelve roundings at most.
    let (v, e) = (act * u.0, 1.1 * g.1 * (u.0.abs() + u.1) + act.abs() * u.1);
    (v, e + 12.0 * U * v.abs())
}

#[test]
fn glu_matvec_meets_f64_and_its_planes_are_the_rule_of_its_floats() {
    let rng = &mut Rng(7);
    for format in [Format::Q4_K, Format::Q6_K, Format::Q4_0] {
        for (rows, moe) in [(64, false), (3, false), (96, true)] {
            let experts = if moe { 3 } else { 1 };
            let cols = some_cols(format)[1];
            let (g, u) = (Matrix::new(format, experts, rows, cols, rng), Matrix::new(format, experts, rows, cols, rng));
            // Three rows of x; with experts, two slots each.
            let (slots, live, div) = if moe { (6, 4, 2) } else { (3, 2, 1) };
            let x = rng.floats(3 * cols);
            let acts = Acts::of(&x, cols);
            let ids: Vec<u32> = (0..slots).map(|_| rng.below(experts) as u32).collect();
            for (wave, tokens, set) in [
                (8, 1, vec![("ROWS", 1)]),
                (32, 2, vec![("ROWS", 4)]),
                (64, 1, vec![("ROWS", 2), ("REPEAT", 4), ("UNITS", 1)]),
            ] {
                let tokens = if moe { 1 } else { tokens };
                let per_wave: u32 = set.iter().filter(|c| c.0 != "UNITS").map(|c| c.1).product();
                let span = 256 / wave * per_wave;
                let mut floats = Vec::new();
                for quant in 0..=u32::from(rows % 32 == 0) {
                    let mut m = Memory::new();
                    let [xq, xd, xs] = acts.bind(&mut m);
                    let (codes, groups) = ((slots * rows).next_multiple_of(64), slots * rows / 32);
                    let planes = codes + 2 * (4 * groups).next_multiple_of(64);
                    let y = m.output(if quant == 1 { planes } else { 4 * slots * rows });
                    let args = GluMatvec {
                        wg: g.bind(&mut m),
                        wu: u.bind(&mut m),
                        xq,
                        xd,
                        xs,
                        y,
                        live: read_u32(&mut m, &[live as u32]),
                        ids: read_u32(&mut m, &ids),
                        rows: rows as u32,
                        units: g.units(),
                        div: div as u32,
                        capacity: slots as u32,
                    };
                    let mut all = vec![("WAVE", wave), ("TOKENS", tokens), ("QUANT", quant), ("MOE", u32::from(moe))];
                    all.extend(&set);
                    let grid = [(rows as u32).div_ceil(span), (slots as u32).div_ceil(tokens), 1];
                    launch(Some(format), &mut m, &args, &all, grid);
                    if quant == 0 {
                        floats = m.f32s(y);
                        check(&g, &floats, live, None, &format!("glu {format} {all:?}"), |t, row| {
                            let (e, x) = (if moe { ids[t] as usize } else { 0 }, acts.row(t / div, cols));
                            let dot = |w: &Matrix| w.dot(e, row, &x, cols as f64 / 8.0);
                            silu_glu(dot(&g), dot(&u))
                        });
                    } else {
                        let want = Acts::of(&floats[..live * rows], rows);
                        let words = m.u32s(y);
                        let n = live * rows / 32;
                        let (d, s) = (codes / 4, codes / 4 + (4 * groups).next_multiple_of(64) / 4);
                        let got = Acts {
                            codes: m.bytes(y)[..live * rows].iter().map(|c| *c as i8).collect(),
                            d: words[d..d + n].to_vec(),
                            sums: words[s..s + n].to_vec(),
                        };
                        assert_eq!(got, want, "{format} {all:?}");
                    }
                }
            }
        }
    }
}

fn gemm(w: &Matrix, x: &[f32], live: usize, terms: usize, bias: Option<&[f32]>, constants: &[(&str, u32)]) {
    let (rows, cols) = (w.rows, w.cols);
    let tokens = x.len() / cols;
    let acts = if terms == 2 { Acts::twice(x, cols) } else { Acts::of(x, cols) };
    let mut m = Memory::new();
    let [xq, xd, xs] = acts.bind(&mut m);
    let get = |name: &str, default: u32| constants.iter().find(|c| c.0 == name).map_or(default, |c| c.1);
    let y = m.output(tokens * rows * 4);
    let args = GemmDot {
        w: w.bind(&mut m),
        xq,
        xd,
        xs,
        bias: bias.map_or(NONE, |b| read_f32(&mut m, b)),
        y,
        live: read_u32(&mut m, &[live as u32]),
        tiles: NONE,
        order: NONE,
        rows: rows as u32,
        units: w.units(),
        div: 1,
        bias_stride: 0,
    };
    let mut all = constants.to_vec();
    all.extend([("TERMS", terms as u32), ("BIAS", u32::from(bias.is_some()))]);
    let groups = [(rows as u32).div_ceil(get("BN", 64)), ((terms * tokens) as u32).div_ceil(get("BM", 64)), 1];
    launch(Some(w.format), &mut m, &args, &all, groups);
    check(w, &m.f32s(y), live, bias, &format!("gemm {} {rows}x{cols} {all:?}", w.format), |t, row| {
        let terms = (0..terms).map(|i| w.dot(0, row, &acts.row(t * terms + i, cols), cols as f64 / 8.0));
        terms.fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1))
    });
}

#[test]
fn gemm_dot_meets_f64_for_every_format() {
    for format in blocks() {
        let rng = &mut Rng(u64::from(format.id()));
        for (rows, tokens, live) in [(5, 3, 3), (70, 67, 66)] {
            let w = Matrix::new(format, 1, rows, some_cols(format)[usize::from(rows == 5)], rng);
            let (x, bias) = (rng.floats(tokens * w.cols), rng.floats(rows));
            gemm(&w, &x, live, 1, (rows == 5).then_some(&bias), &[]);
        }
    }
}

#[test]
fn gemm_dot_meets_f64_for_every_constant() {
    let rng = &mut Rng(3);
    for format in [Format::Q4_K, Format::Q6_K, Format::Q8_0] {
        let w = Matrix::new(format, 1, 37, some_cols(format)[1], rng);
        let x = rng.floats(19 * w.cols);
        for wave in [1, 8, 64] {
            gemm(&w, &x, 18, 2, None, &[("WAVE", wave), ("BM", 32), ("BN", 32), ("THREADS", 64), ("BU", 4)]);
        }
        gemm(&w, &x, 0, 1, None, &[]);
        gemm(&w, &x, 19, 1, None, &[("BM", 16), ("BN", 64), ("THREADS", 64), ("BU", 3)]);
        gemm(&w, &x, 19, 2, None, &[("BM", 32), ("BN", 128), ("THREADS", 256), ("BU", 6)]);
    }
}

#[test]
fn float_kernels_meet_f64_for_every_format() {
    for (format, _) in formats() {
        let rng = &mut Rng(u64::from(format.id()));
        let shapes = match format.is_block() {
            true => vec![(3, some_cols(format)[1], 2)],
            false => vec![(1, 1, 1), (3, 7, 2), (9, 64, 3), (66, 300, 5)],
        };
        for (rows, cols, tokens) in shapes {
            let w = Matrix::new(format, 1, rows, cols, rng);
            let (x, b) = (rng.floats(tokens * cols), rng.floats(rows));
            let live = tokens.min(4);
            let whole = u32::from(cols % 32 == 0);
            let what = format!("{format} {rows}x{cols}, {tokens} tokens");
            let want = |t: usize, row: usize| {
                let x: Vec<f64> = x[t * cols..][..cols].iter().map(|x| f64::from(*x)).collect();
                w.dot(0, row, &x, cols as f64)
            };
            for (wave, split) in [(8, 1), (32, 2), (8, 8)] {
                let mut m = Memory::new();
                let y = m.output(tokens * rows * 4);
                let args = MatvecF32 {
                    w: w.bind(&mut m),
                    x: read_f32(&mut m, &x),
                    bias: read_f32(&mut m, &b),
                    y,
                    live: read_u32(&mut m, &[live as u32]),
                    ids: NONE,
                    rows: rows as u32,
                    units: w.units(),
                    cols: cols as u32,
                    div: 1,
                    bias_stride: 0,
                };
                let set = [("WAVE", wave), ("ROWS", 2), ("TOKENS", 1), ("WHOLE", whole), ("BIAS", 1), ("SPLIT", split)];
                let span = 128 / wave / split * 2;
                launch(Some(format), &mut m, &args, &set, [(rows as u32).div_ceil(span), tokens as u32, 1]);
                check(&w, &m.f32s(y), live, Some(&b), &format!("matvec_f32 {what}, split {split}"), want);
            }
            let mut m = Memory::new();
            let y = m.output(tokens * rows * 4);
            let args = GemmF32 {
                w: w.bind(&mut m),
                x: read_f32(&mut m, &x),
                bias: NONE,
                y,
                live: read_u32(&mut m, &[live as u32]),
                tiles: NONE,
                order: NONE,
                rows: rows as u32,
                units: w.units(),
                cols: cols as u32,
                div: 1,
                bias_stride: 0,
            };
            launch(Some(format), &mut m, &args, &[("WHOLE", whole)], [(rows as u32).div_ceil(64), 1, 1]);
            check(&w, &m.f32s(y), live, None, &format!("gemm_f32 {what}"), want);
            let small = [("WHOLE", whole), ("THREADS", 64), ("BM", 16), ("BN", 16), ("TM", 2), ("TN", 2)];
            launch(Some(format), &mut m, &args, &small, [(rows as u32).div_ceil(16), 1, 1]);
            check(&w, &m.f32s(y), live, None, &format!("gemm_f32 in small tiles {what}"), want);
        }
    }
}

/// Sorted slots and their tiles.
fn sorted(ids: &[u32], live: usize, experts: usize, segments: u32, tile: usize) -> (Vec<u32>, Vec<u32>) {
    let mut m = Memory::new();
    let order = m.output(4 * ids.len());
    let tiles = m.output(4 * (1 + 3 * (ids.len().div_ceil(tile) + experts)));
    let args = MoeSort { ids: read_u32(&mut m, ids), order, tiles, live: read_u32(&mut m, &[live as u32]) };
    let set = [("THREADS", 64), ("EXPERTS", experts as u32), ("SEGMENTS", segments), ("TILE", tile as u32)];
    launch(None, &mut m, &args, &set, [1, 1, 1]);
    (m.u32s(order), m.u32s(tiles))
}

#[test]
fn sorting_is_stable_and_its_tiles_cover_every_slot_once() {
    let rng = &mut Rng(4);
    for (n, live, experts, segments, tile) in
        [(1, 1, 2, 1, 4), (40, 33, 6, 3, 4), (64, 64, 70, 2, 16), (50, 0, 5, 4, 8), (300, 299, 3, 16, 64)]
    {
        let ids: Vec<u32> = (0..n).map(|_| rng.below(experts.max(2) - 1) as u32).collect();
        let mut want: Vec<u32> = (0..live as u32).collect();
        want.sort_by_key(|s| ids[*s as usize]);
        let (order, tiles) = sorted(&ids, live, experts, segments, tile);
        assert_eq!(order[..live], want, "{n} slots");
        let mut next = 0;
        for t in tiles[1..1 + 3 * tiles[0] as usize].chunks(3) {
            assert_eq!(t[1], next, "tiles follow each other");
            assert!(t[2] > 0 && t[2] <= tile as u32);
            assert!(order[t[1] as usize..][..t[2] as usize].iter().all(|s| ids[*s as usize] == t[0]));
            next += t[2];
        }
        assert_eq!(next as usize, live);
    }
}

#[test]
fn experts_meet_f64_in_matvec_and_gemm() {
    let rng = &mut Rng(5);
    const EXPERTS: usize = 5;
    for format in [Format::Q4_K, Format::Q6_K, Format::Q4_0, Format::F16] {
        for (rows, k, tokens, live, per_slot) in [(3, 2, 1, 1, false), (35, 2, 9, 8, true), (17, 3, 40, 40, false)] {
            let w = Matrix::new(format, EXPERTS, rows, some_cols(format)[0].max(64), rng);
            let cols = w.cols;
            // Expert 0 gets nothing.
            let ids: Vec<u32> = (0..tokens * k).map(|_| 1 + rng.below(EXPERTS - 1) as u32).collect();
            let x_rows = if per_slot { tokens * k } else { tokens };
            let (x, bias) = (rng.floats(x_rows * cols), rng.floats(EXPERTS * rows));
            let acts = Acts::of(&x, cols);
            let (slots, n, div) = (tokens * k, live * k, if per_slot { 1 } else { k });
            let block = format.is_block();
            let want = |slot: usize, row: usize| {
                let e = ids[slot] as usize;
                let r = slot / div;
                let float = || x[r * cols..][..cols].iter().map(|x| f64::from(*x)).collect();
                let x: Vec<f64> = if block { acts.row(r, cols) } else { float() };
                let (v, bound) = w.dot(e, row, &x, if block { cols as f64 / 8.0 } else { cols as f64 });
                let v = v + f64::from(bias[e * rows + row]);
                (v, bound + U * v.abs())
            };
            let what = format!("{format} {rows}x{cols}, {tokens} tokens");
            for (wave, many) in [(8, false), (32, false), (32, true)] {
                let mut m = Memory::new();
                let y = m.output(slots * rows * 4);
                let (wt, bias) = (w.bind(&mut m), read_f32(&mut m, &bias));
                let live = read_u32(&mut m, &[n as u32]);
                let [xq, xd, xs] = acts.bind(&mut m);
                let (rows, units, div, bias_stride) = (rows as u32, w.units(), div as u32, rows as u32);
                let xf = read_f32(&mut m, &x);
                let set = [("WAVE", wave), ("MOE", 1), ("BIAS", 1)];
                let f = Some(format);
                if many {
                    let (order, tiles) = sorted(&ids, n, EXPERTS, 4, 64);
                    let (order, tiles) = (read_u32(&mut m, &order), read_u32(&mut m, &tiles));
                    let groups = [rows.div_ceil(64), (slots.div_ceil(64) + EXPERTS) as u32, 1];
                    if block {
                        let args =
                            GemmDot { w: wt, xq, xd, xs, bias, y, live, tiles, order, rows, units, div, bias_stride };
                        launch(f, &mut m, &args, &set, groups);
                    } else {
                        let cols = cols as u32;
                        let args =
                            GemmF32 { w: wt, x: xf, bias, y, live, tiles, order, rows, units, cols, div, bias_stride };
                        launch(f, &mut m, &args, &set, groups);
                    }
                } else {
                    let ids = read_u32(&mut m, &ids);
                    let groups = [rows.div_ceil(128 / wave), slots as u32, 1];
                    if block {
                        let args = Matvec { w: wt, xq, xd, xs, bias, y, live, ids, rows, units, div, bias_stride };
                        launch(f, &mut m, &args, &set, groups);
                    } else {
                        let cols = cols as u32;
                        let args = MatvecF32 { w: wt, x: xf, bias, y, live, ids, rows, units, cols, div, bias_stride };
                        launch(f, &mut m, &args, &set, groups);
                    }
                }
                check(&w, &m.f32s(y), n, None, &format!("{what}, many: {many}"), want);
            }
        }
    }
}

#[test]
fn the_experts_last_matrix_sums_a_tokens_slots() {
    let rng = &mut Rng(8);
    let experts = 4;
    for format in [Format::Q4_K, Format::Q6_K, Format::Q4_0] {
        for (rows, k, tokens, live, wave) in [(5, 2, 3, 2, 8), (70, 5, 1, 1, 32), (9, 1, 2, 2, 64), (1, 3, 1, 0, 1)] {
            let w = Matrix::new(format, experts, rows, some_cols(format)[0].max(64), rng);
            let ids: Vec<u32> = (0..tokens * k).map(|_| rng.below(experts) as u32).collect();
            let (x, bias) = (rng.floats(tokens * k * w.cols), rng.floats(experts * rows));
            let (weights, acts) = (rng.floats(tokens * k), Acts::of(&x, w.cols));
            let mut m = Memory::new();
            let [xq, xd, xs] = acts.bind(&mut m);
            let y = m.output(4 * tokens * rows);
            let args = MoeDown {
                w: w.bind(&mut m),
                xq,
                xd,
                xs,
                bias: read_f32(&mut m, &bias),
                ids: read_u32(&mut m, &ids),
                weights: read_f32(&mut m, &weights),
                y,
                live: read_u32(&mut m, &[live as u32]),
                rows: rows as u32,
                units: w.units(),
                slots: k as u32,
                bias_stride: rows as u32,
            };
            let set = [("WAVE", wave), ("ROWS", 2), ("UNITS", 3), ("BIAS", 1)];
            launch(Some(format), &mut m, &args, &set, [(rows as u32).div_ceil(128 / wave * 2), tokens as u32, 1]);
            check(&w, &m.f32s(y), live, None, &format!("moe_down {format} {rows} rows"), |t, row| {
                let (mut v, mut e) = (0.0, 0.0);
                for s in t * k..(t + 1) * k {
                    let (expert, weight) = (ids[s] as usize, f64::from(weights[s]));
                    // A slot's own sum, and one of all slots.
                    let additions = w.cols as f64 / 8.0 + k as f64;
                    let (dot, bound) = w.dot(expert, row, &acts.row(s, w.cols), additions);
                    let b = f64::from(bias[expert * rows + row]);
                    v += weight * (dot + b);
                    e += weight.abs() * (bound + (k as f64 + 3.0) * U * (dot.abs() + b.abs()));
                }
                (v, e)
            });
        }
    }
}

#[test]
fn combining_sums_in_slot_order() {
    let rng = &mut Rng(6);
    for (tokens, live, slots, cols) in [(1, 1, 1, 7), (5, 4, 8, 64), (3, 3, 2, 33)] {
        let (x, weights) = (rng.floats(tokens * slots * cols), rng.floats(tokens * slots));
        let mut m = Memory::new();
        let y = m.output(4 * tokens * cols);
        let args = MoeCombine {
            x: read_f32(&mut m, &x),
            weights: read_f32(&mut m, &weights),
            y,
            live: read_u32(&mut m, &[live as u32]),
            cols: cols as u32,
            slots: slots as u32,
        };
        let set = [("THREADS", 32), ("QUAD", u32::from(cols % 4 == 0))];
        launch(None, &mut m, &args, &set, [(cols as u32).div_ceil(32), tokens as u32, 1]);
        let got = m.f32s(y);
        for (i, got) in got.iter().enumerate() {
            let (t, c) = (i / cols, i % cols);
            let sum = (0..slots).fold(0.0f32, |s, k| s + weights[t * slots + k] * x[(t * slots + k) * cols + c]);
            assert_eq!(got.to_bits(), if t < live { f32::to_bits(sum) } else { u32::MAX }, "token {t}, column {c}");
        }
    }
}
