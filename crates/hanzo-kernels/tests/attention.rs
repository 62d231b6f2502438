//! Attention (and in `store` what fills its cache) on the CPU, every thread checked, against f64: all cache formats, windows, spans, sinks, gates, latent
//! values, page and split edges, waves of 1, 8, 32 and 64.
#![cfg(unix)]
use hanzo_gguf::{Format, formats};
use hanzo_kernels::args::{Args, AttnCombine, AttnDecode, AttnPrefill};
use hanzo_kernels::cache::{self, Order};
use hanzo_kernels::host::{HostKernel, Memory};
use hanzo_kernels::{Key, Target, text};

#[path = "attention/prologue.rs"]
mod prologue;
#[path = "attention/store.rs"]
mod store;

const U: f64 = 1.0 / (1u64 << 24) as f64;

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.next()).collect()
    }
}

fn encode<A: Args<u64>>(args: &A) -> Vec<u8> {
    let mut pointers = Vec::new();
    let mut bytes = args.encode(&mut |at, p| pointers.push((at, p)));
    pointers.iter().for_each(|(at, p)| bytes[*at..at + 8].copy_from_slice(&p.to_le_bytes()));
    bytes
}

fn launch<A: Args<u64>>(memory: &mut Memory, args: &A, set: &[(&str, u32)], groups: [u32; 3]) {
    let text = text(Key { op: A::OP, format: None }, Target::Host).expect("a kernel");
    let kernel = HostKernel::compile(&text, set).unwrap_or_else(|e| panic!("{} {set:?}: {e}", A::OP));
    kernel.run(memory, &encode(args), groups).unwrap_or_else(|e| panic!("{} {set:?}: {e}", A::OP));
}

fn bytes_of(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn words(x: &[u32]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// A row as a cache stores it: the rule of the CPU's kernels, written again.
fn stored(format: Format, row: &[f32]) -> Vec<u8> {
    let half = |x: f32| {
        let mut out = [0; 2];
        formats::from_float(Format::F16, &[x], None, &mut out).expect("a half");
        out
    };
    let float = |h: [u8; 2]| {
        let mut x = [0.0];
        formats::to_float(Format::F16, &h, &mut x);
        x[0]
    };
    match format {
        Format::Q8_0 | Format::Q4_0 => (row.chunks(32))
            .flat_map(|b| {
                let peak = b.iter().fold(0.0f32, |m, x| if x.abs() > m.abs() { *x } else { m });
                let d = half(if format == Format::Q8_0 { peak.abs() / 127.0 } else { peak / -8.0 });
                let inv = if float(d) == 0.0 { 0.0 } else { 1.0 / float(d) };
                let code = |x: f32| (x * inv).round_ties_even();
                let codes: Vec<u8> = match format {
                    Format::Q8_0 => b.iter().map(|x| code(*x).clamp(-127.0, 127.0) as i8 as u8).collect(),
                    _ => {
                        let c = |i: usize| (code(b[i]) + 8.0).clamp(0.0, 15.0) as u8;
                        (0..16).map(|i| c(i) | c(i + 16) << 4).collect()
                    }
                };
                [d.to_vec(), codes].concat()
            })
            .collect(),
        _ => {
            let mut out = vec![0; format.row_bytes(row.len()).expect("whole rows")];
            formats::from_float(format, row, None, &mut out).expect("a float format");
            out
        }
    }
}

/// What a case of attention is like.
#[derive(Clone, Debug)]
struct Case {
    n_kv: usize,
    group: usize,
    d_k: usize,
    d_v: usize,
    formats: (Format, Format),
    latent: bool,
    window: u32,
    cap: f32,
    sinks: bool,
    gate: bool,
    scale: f32,
    /// Of each sequence: tokens in the cache before the step, tokens of the step.
    sequences: Vec<(u32, u32)>,
    /// Tokens that see each other whole.
    span: std::ops::Range<usize>,
    /// Pages of each sequence that are gone.
    gone: u32,
    wave: u32,
    splits: u32,
}

impl Case {
    fn usual() -> Case {
        Case {
            n_kv: 2,
            group: 2,
            d_k: 64,
            d_v: 64,
            formats: (Format::F16, Format::F16),
            latent: false,
            window: 0,
            cap: 0.0,
            sinks: false,
            gate: false,
            scale: 0.3,
            sequences: vec![(70, 3)],
            span: 0..0,
            gone: 0,
            wave: 32,
            splits: 4,
        }
    }

    fn tokens(&self) -> usize {
        self.sequences.iter().map(|s| s.1 as usize).sum()
    }
}

/// Everything of a case that kernels read.
struct Ready {
    case: Case,
    memory: Memory,
    q: Vec<f32>,
    sinks: Vec<f32>,
    gate: Vec<f32>,
    /// Rows by `[position][kv head]` of each sequence, decoded.
    keys: Vec<Vec<Vec<f32>>>,
    values: Vec<Vec<Vec<f32>>>,
    /// Positions and one past the last visible key of each token.
    positions: Vec<u32>,
    ends: Vec<u32>,
    at: Addresses,
}

#[derive(Clone, Copy, Default)]
struct Addresses {
    q: u64,
    k: u64,
    v: u64,
    sinks: u64,
    gate: u64,
    live: u64,
    ends: u64,
    positions: u64,
    tables: u64,
    firsts: u64,
    pages: u64,
}

impl Ready {
    fn new(case: &Case) -> Ready {
        let c = case.clone();
        let mut rng = Rng(c.d_k as u64 * 31 + c.group as u64);
        let heads = c.n_kv * c.group;
        let n = c.tokens();
        let mut positions = Vec::new();
        let mut ends = Vec::new();
        for (before, new) in &c.sequences {
            positions.extend(*before..before + new);
            ends.extend(before + 1..before + new + 1);
        }
        if let Some(last) = c.span.clone().last() {
            let end = ends[last];
            ends[c.span.clone()].fill(end);
        }
        // Pages of all sequences, numbered backwards so that none is where its index says.
        let counts: Vec<usize> = c.sequences.iter().map(|(b, n)| (b + n).div_ceil(32) as usize).collect();
        let total: usize = counts.iter().sum::<usize>() + 1;
        let mut next = total as u32;
        let mut tables = Vec::new();
        let mut pages = Vec::new();
        let (kf, vf) = c.formats;
        let v_order = if c.latent { Order::Keys } else { cache::values_order(c.d_v) };
        let page_bytes = |f: Format, d: usize| 32 * c.n_kv * f.row_bytes(d).expect("whole blocks");
        // What nobody wrote is all ones: NaNs in every format.
        let (mut k_rows, mut v_rows) =
            (vec![0xff; total * page_bytes(kf, c.d_k)], vec![0xff; total * page_bytes(vf, c.d_v)]);
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        let decode = |f: Format, bytes: &[u8], d: usize| {
            let mut out = vec![0.0; d];
            formats::to_float(f, bytes, &mut out);
            out
        };
        for (i, (before, new)) in c.sequences.iter().enumerate() {
            let first = pages.len() as u32;
            let (mut k_all, mut v_all) = (Vec::new(), Vec::new());
            let mut page = 0;
            for p in 0..before + new {
                if p % 32 == 0 {
                    next -= 1;
                    page = next as usize;
                    if p / 32 >= c.gone {
                        pages.push(page as u32);
                    }
                }
                for h in 0..c.n_kv {
                    let mut put = |rows: &mut Vec<u8>, f: Format, d: usize| {
                        let row = stored(f, &rng.floats(d));
                        let at = ((page * c.n_kv + h) * 32 + p as usize % 32) * row.len();
                        rows[at..at + row.len()].copy_from_slice(&row);
                        decode(f, &row, d)
                    };
                    let k = put(&mut k_rows, kf, c.d_k);
                    let v = if c.latent { k[..c.d_v].to_vec() } else { put(&mut v_rows, vf, c.d_v) };
                    k_all.push(k);
                    v_all.push(v);
                }
            }
            assert_eq!(counts[i] as u32 - c.gone, pages.len() as u32 - first);
            tables.extend(vec![first; *new as usize]);
            keys.push(k_all);
            values.push(v_all);
        }
        let pad = |mut x: Vec<u32>| {
            // Rows beyond those of the step hold what an earlier step left.
            x.extend([7; 3]);
            words(&x)
        };
        let (q, sinks, gate) = (rng.floats(n * heads * c.d_k), rng.floats(heads), rng.floats(n * heads * c.d_v));
        let mut memory = Memory::new();
        let k_pages = cache::from_rows(kf, c.d_k, Order::Keys, &k_rows);
        let k = memory.read(&k_pages);
        let at = Addresses {
            q: memory.read(&bytes_of(&q)),
            k,
            v: if c.latent { k } else { memory.read(&cache::from_rows(vf, c.d_v, v_order, &v_rows)) },
            sinks: memory.read(&bytes_of(&sinks)),
            gate: memory.read(&bytes_of(&gate)),
            live: memory.read(&words(&[n as u32])),
            ends: memory.read(&pad(ends.clone())),
            positions: memory.read(&pad(positions.clone())),
            tables: memory.read(&pad(tables)),
            firsts: memory.read(&pad(vec![c.gone; n])),
            pages: memory.read(&words(&pages)),
        };
        Ready { case: c, memory, q, sinks, gate, keys, values, positions, ends, at }
    }

    /// Output and bound of every element, `[tokens][heads][d_v]`.
    fn want(&self) -> Vec<(f64, f64)> {
        let c = &self.case;
        let heads = c.n_kv * c.group;
        let mut out = Vec::new();
        let mut seq_of = Vec::new();
        c.sequences.iter().enumerate().for_each(|(i, s)| seq_of.extend(vec![i; s.1 as usize]));
        for (t, seq) in seq_of.into_iter().enumerate() {
            let next = self.positions[t] + 1;
            let lo = if c.window > 0 { next.saturating_sub(c.window) } else { 0 }.max(32 * c.gone);
            for h in 0..heads {
                let q = &self.q[(t * heads + h) * c.d_k..][..c.d_k];
                let row = |p: u32| p as usize * c.n_kv + h / c.group;
                let mut reach = 0.0f64;
                let scores: Vec<f64> = (lo..self.ends[t])
                    .map(|p| {
                        let k = &self.keys[seq][row(p)];
                        let terms = q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k));
                        reach = reach.max(terms.clone().map(f64::abs).sum::<f64>() * f64::from(c.scale));
                        let s = terms.sum::<f64>() * f64::from(c.scale);
                        if c.cap > 0.0 { f64::from(c.cap) * (s / f64::from(c.cap)).tanh() } else { s }
                    })
                    .collect();
                let sink = c.sinks.then(|| f64::from(self.sinks[h]));
                let top = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
                let low = scores.iter().copied().fold(f64::INFINITY, f64::min);
                let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let total = weights.iter().sum::<f64>() + sink.map_or(0.0, |s| (s - top).exp());
                // The bound of cpu/ops/attention.rs, exp at 2 ulp.
                let n = scores.len() as f64;
                let e = (c.d_k as f64 + 2.0) * U * reach + if c.cap > 0.0 { 12.0 * U * f64::from(c.cap) } else { 0.0 };
                let factor = 4.0 * e
                    + (4.0 * (top - low) + 2.0 * n + 12.0 * (n / 32.0 + 2.0) + 20.0 * f64::from(c.splits) + 48.0) * U;
                for j in 0..c.d_v {
                    let v = |p: u32| f64::from(self.values[seq][row(p)][j]);
                    let terms = (lo..self.ends[t]).zip(&weights).map(|(p, w)| w * v(p) / total);
                    let (mut o, mut size) = (terms.clone().sum::<f64>(), terms.map(f64::abs).sum::<f64>());
                    if c.gate {
                        let g = f64::from(self.gate[(t * heads + h) * c.d_v + j]);
                        o /= 1.0 + (-g).exp();
                        size /= 1.0 + (-g).exp();
                    }
                    out.push((o, factor * size + 8.0 * U * o.abs() + 1e-37));
                }
            }
        }
        out
    }

    fn constants(&self) -> Vec<(&'static str, u32)> {
        let c = &self.case;
        let (kt, vt) = (cache::code(c.formats.0, c.d_k), cache::code(c.formats.1, c.d_v));
        let keys = c.latent || cache::values_order(c.d_v) == Order::Keys;
        let kt = kt.expect("a format");
        vec![
            ("WAVE", c.wave),
            ("DK", c.d_k as u32),
            ("DV", c.d_v as u32),
            ("NKV", c.n_kv as u32),
            ("GROUP", c.group as u32),
            ("KT", kt),
            ("VT", if c.latent { kt } else { vt.expect("a format") }),
            ("VD", if c.latent { c.d_k } else { c.d_v } as u32),
            ("VKEY", u32::from(keys)),
            ("CAPPED", u32::from(c.cap > 0.0)),
        ]
    }

    /// Constants of attn_decode, and its arguments without anything that it needs to combine.
    fn splits(
        &mut self,
        keys: u32,
        heads: u32,
        angles: &[f32],
    ) -> (AttnDecode<u64>, Vec<(&'static str, u32)>, [u32; 3]) {
        let c = self.case.clone();
        let a = self.at;
        let mut args = AttnDecode {
            q: a.q,
            k: a.k,
            v: a.v,
            k_new: 0,
            v_new: 0,
            q_norm: 0,
            k_norm: 0,
            kc: 0,
            vc: 0,
            step: 0,
            part: 0,
            top: 0,
            sinks: 0,
            gate: 0,
            y: 0,
            xq: 0,
        };
        let mut set = self.constants();
        let scalars = [("SCALE", c.scale.to_bits()), ("CAP", c.cap.to_bits())];
        set.extend([("KEYS", keys), ("SPLITS", c.splits), ("HEADS", heads), ("RED", 3.min(heads))]);
        set.extend(scalars.into_iter().chain([("WINDOW", c.window)]));
        // The step's arrays one after another, as in a step buffer.
        let m = &mut self.memory;
        let arrays = [
            ("LIVE_AT", m.u32s(a.live)),
            ("ENDS", m.u32s(a.ends)),
            ("POSITIONS", m.u32s(a.positions)),
            ("TABLES", m.u32s(a.tables)),
            ("FIRSTS", m.u32s(a.firsts)),
            ("ANGLES", angles.iter().map(|x| x.to_bits()).collect()),
            ("PAGES", m.u32s(a.pages)),
        ];
        let mut step = Vec::new();
        for (name, array) in arrays {
            step.resize(step.len().next_multiple_of(16), 7);
            set.push((name, step.len() as u32));
            step.extend(array);
        }
        args.step = m.read(&words(&step));
        let tiles = (c.group as u32).div_ceil(heads);
        (args, set, [c.n_kv as u32 * tiles, c.splits, c.tokens() as u32 + 2])
    }

    /// Output of attn_decode and attn_combine; with `quant` the planes as well.
    fn decode(&mut self, keys: u32, heads: u32, quant: bool) -> (Vec<f32>, [Vec<u8>; 3]) {
        let c = self.case.clone();
        let (n, all) = (c.tokens(), c.n_kv * c.group);
        let (mut args, set, grid) = self.splits(keys, heads, &[]);
        let (a, m) = (self.at, &mut self.memory);
        args.part = m.output(4 * n * all * c.splits as usize * c.d_v);
        args.top = m.output(8 * n * all * c.splits as usize);
        launch(m, &args, &set, grid);
        let cols = all * c.d_v;
        let (y, xq, xd, xs) =
            (m.output(4 * n * cols), m.output(n * cols), m.output(n * cols / 8), m.output(n * cols / 8));
        let args = AttnCombine {
            part: args.part,
            top: args.top,
            live: a.live,
            sinks: a.sinks,
            gate: a.gate,
            y,
            xq,
            xd,
            xs,
            ends: a.ends,
            positions: a.positions,
            firsts: a.firsts,
            window: c.window,
        };
        let set = [
            ("WAVE", c.wave),
            ("KEYS", keys),
            ("SPLITS", c.splits),
            ("DV", c.d_v as u32),
            ("HEADS", all as u32),
            ("SINKS", u32::from(c.sinks)),
            ("GATED", u32::from(c.gate)),
            ("QUANT", u32::from(quant)),
        ];
        launch(m, &args, &set, [all as u32, n as u32 + 2, 1]);
        (m.f32s(y), [xq, xd, xs].map(|p| m.bytes(p).to_vec()))
    }

    /// As [`Ready::decode`], in one launch.
    fn one_pass(&mut self, keys: u32, heads: u32, quant: u32) -> (Vec<f32>, [Vec<u8>; 3]) {
        let (args, set, grid) = self.splits(keys, heads, &[]);
        self.combining(args, set, grid, quant)
    }

    /// Launches what combines its splits itself.
    fn combining(
        &mut self,
        mut args: AttnDecode<u64>,
        mut set: Vec<(&'static str, u32)>,
        grid: [u32; 3],
        quant: u32,
    ) -> (Vec<f32>, [Vec<u8>; 3]) {
        let c = self.case.clone();
        let (n, all) = (c.tokens(), c.n_kv * c.group);
        let (a, m) = (self.at, &mut self.memory);
        let (cols, counters) = (all * c.d_v, n * grid[0] as usize);
        (args.sinks, args.gate) = (a.sinks, a.gate);
        // A counter for each group of heads, a few words that are nobody's, then the maxima. The planes likewise.
        let first = counters.next_multiple_of(2) + 6;
        args.part = m.output(4 * n * all * c.splits as usize * c.d_v);
        args.top = m.output(4 * first + 8 * n * all * c.splits as usize);
        m.bytes_mut(args.top)[..4 * counters].fill(0);
        let (codes, rest) = ((n * cols).next_multiple_of(64), (n * cols / 8).next_multiple_of(64));
        (args.y, args.xq) = (m.output(4 * n * cols), m.output(codes + 2 * rest));
        set.extend([("SINKS", u32::from(c.sinks)), ("GATED", u32::from(c.gate)), ("QUANT", quant)]);
        set.extend([
            ("COMBINE", 1),
            ("TOP", first as u32),
            ("XD", codes as u32 / 4),
            ("XS", (codes + rest) as u32 / 4),
        ]);
        let mut before = None;
        // Twice, since the first launch has to leave the counters as it found them.
        for _ in 0..2 {
            launch(m, &args, &set, grid);
            assert!(m.bytes(args.top)[..4 * counters].iter().all(|b| *b == 0), "counters of {c:?}");
            assert!(m.bytes(args.top)[4 * counters..4 * first].iter().all(|b| *b == 0xff), "words in front of {c:?}");
            let planes = m.bytes(args.xq);
            let from = |at: usize, len: usize| planes[at..at + len].to_vec();
            let all = [from(0, n * cols), from(codes, n * cols / 8), from(codes + rest, n * cols / 8)];
            let now = (m.bytes(args.y).to_vec(), all);
            assert!(before.is_none_or(|b| b == now), "a second launch of {c:?}");
            before = Some(now);
        }
        (m.f32s(args.y), before.expect("two launches").1)
    }

    fn prefill(&mut self) -> Vec<f32> {
        let c = self.case.clone();
        let (n, all) = (c.tokens(), c.n_kv * c.group);
        let (rows, wide) = (if c.d_v > 128 { 32 } else { 64 }, c.d_v.div_ceil(64) * 16);
        let a = self.at;
        let y = self.memory.output(4 * n * all * c.d_v);
        let tiles = ((n + 2) * c.group).div_ceil(rows) as u32 + 1;
        let args = AttnPrefill {
            q: a.q,
            k: a.k,
            v: a.v,
            live: a.live,
            sinks: a.sinks,
            gate: a.gate,
            y,
            ends: a.ends,
            positions: a.positions,
            tables: a.tables,
            firsts: a.firsts,
            pages: a.pages,
            window: c.window,
            tiles,
            scale: c.scale,
            cap: c.cap,
        };
        let mut set = self.constants();
        let keys = if wide > 32 { 8 } else { 512 / wide as u32 };
        set.extend([("ROWS", rows as u32), ("KEYS", keys), ("WIDE", wide as u32)]);
        set.extend([("SINKS", u32::from(c.sinks)), ("GATED", u32::from(c.gate))]);
        launch(&mut self.memory, &args, &set, [tiles, c.n_kv as u32, 1]);
        self.memory.f32s(y)
    }
}

#[track_caller]
fn compare(what: &str, case: &Case, got: &[f32], want: &[(f64, f64)]) {
    assert_eq!(got.len(), want.len());
    for (i, (got, (want, bound))) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs();
        assert!(error <= *bound, "{what} {case:?}: element {i} is {got}, not {want}: off by {error:e} of {bound:e}");
    }
}

fn both(case: Case) {
    let mut r = Ready::new(&case);
    let want = r.want();
    let heads = case.group.div_ceil(case.group.div_ceil(4)) as u32;
    let keys = if case.d_v > 128 { 32 } else { 64 };
    compare("decode", &case, &r.decode(keys, heads, false).0, &want);
    compare("decode in one pass", &case, &r.one_pass(keys, heads, 0).0, &want);
    if case.d_v <= 256 {
        compare("prefill", &case, &r.prefill(), &want);
    }
}

#[test]
fn attention_reads_every_cache_format() {
    for format in [Format::F16, Format::F32, Format::BF16, Format::Q8_0, Format::Q4_0] {
        both(Case { formats: (format, format), ..Case::usual() });
    }
    both(Case { formats: (Format::F16, Format::Q8_0), ..Case::usual() });
    both(Case { formats: (Format::Q4_0, Format::F32), d_k: 32, d_v: 32, ..Case::usual() });
}

#[test]
fn attention_is_the_same_maths_at_every_wave_size() {
    for wave in [1, 8, 64] {
        both(Case { wave, sinks: true, gate: true, ..Case::usual() });
    }
}

#[test]
fn windows_end_where_they_should() {
    for (window, gone) in [(1, 0), (17, 0), (32, 0), (40, 1), (1000, 0)] {
        both(Case { window, gone, sequences: vec![(64, 5), (33, 2)], ..Case::usual() });
    }
}

#[test]
fn soft_caps_sinks_and_gates_are_applied() {
    both(Case { cap: 2.0, scale: 1.0, ..Case::usual() });
    both(Case { sinks: true, ..Case::usual() });
    both(Case { gate: true, cap: 5.0, window: 40, sinks: true, ..Case::usual() });
}

#[test]
fn tokens_of_a_span_see_each_other() {
    both(Case { sequences: vec![(0, 40), (3, 4)], span: 11..20, ..Case::usual() });
}

#[test]
fn heads_of_many_shapes_work() {
    both(Case { n_kv: 3, group: 1, ..Case::usual() });
    both(Case { n_kv: 1, group: 7, ..Case::usual() });
    both(Case { n_kv: 1, group: 20, d_k: 32, d_v: 96, ..Case::usual() });
    both(Case { d_k: 128, d_v: 128, group: 4, ..Case::usual() });
    both(Case { n_kv: 1, d_k: 256, d_v: 256, ..Case::usual() });
    both(Case { n_kv: 1, d_k: 192, d_v: 160, ..Case::usual() });
    both(Case { d_k: 20, d_v: 12, formats: (Format::F32, Format::F16), ..Case::usual() });
    both(Case { d_k: 12, d_v: 20, formats: (Format::F16, Format::F32), ..Case::usual() });
    both(Case { d_k: 80, d_v: 80, ..Case::usual() });
}

#[test]
fn values_may_be_part_of_the_keys() {
    both(Case { n_kv: 1, group: 4, d_k: 48, d_v: 32, latent: true, ..Case::usual() });
    both(Case { n_kv: 1, group: 8, d_k: 576, d_v: 512, latent: true, sequences: vec![(40, 1)], ..Case::usual() });
    let formats = (Format::Q8_0, Format::Q8_0);
    both(Case { n_kv: 1, group: 3, d_k: 96, d_v: 64, latent: true, formats, ..Case::usual() });
}

#[test]
fn pages_splits_and_tiles_have_no_edge() {
    for before in [0, 30, 31, 32, 62, 63, 64, 127, 128, 300] {
        both(Case { sequences: vec![(before, 2)], d_k: 32, d_v: 32, group: 3, ..Case::usual() });
    }
    both(Case { sequences: vec![(0, 1)], splits: 1, ..Case::usual() });
    both(Case { sequences: vec![(300, 1)], splits: 64, ..Case::usual() });
    both(Case { sequences: vec![(0, 70), (5, 30), (100, 1), (31, 2), (0, 33)], d_k: 32, d_v: 32, ..Case::usual() });
}

#[track_caller]
fn quantized(y: &[f32], [q, d, s]: &[Vec<u8>; 3]) {
    for (i, group) in y.chunks(32).enumerate() {
        let amax = group.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let (scale, inv) = (amax / 127.0, 127.0 / amax);
        let codes: Vec<i8> = group.iter().map(|x| (x * inv).round_ties_even() as i8).collect();
        assert!(q[32 * i..32 * (i + 1)].iter().zip(&codes).all(|(a, b)| *a as i8 == *b), "codes of group {i}");
        assert_eq!(d[4 * i..4 * i + 4], scale.to_le_bytes(), "scale of group {i}");
        let sum = |c: &[i8]| c.iter().map(|c| i16::from(*c)).sum::<i16>().to_le_bytes();
        assert_eq!(s[4 * i..4 * i + 4], [sum(&codes[..16]), sum(&codes[16..])].concat(), "sums of group {i}");
    }
}

#[test]
fn one_launch_combines_and_quantizes() {
    let case = Case { d_v: 64, gate: true, ..Case::usual() };
    let mut r = Ready::new(&case);
    let (y, _) = r.decode(64, 2, false);
    quantized(&y, &r.decode(64, 2, true).1);
}

#[test]
fn the_last_workgroup_quantizes_what_it_combines() {
    for (gate, group, before, splits) in [(true, 2, 70, 4), (false, 2, 70, 4), (true, 3, 300, 16), (false, 5, 20, 1)] {
        for wave in [8, 32] {
            let sequences = vec![(before, 2), (3, 1)];
            let mut r = Ready::new(&Case { gate, group, sequences, splits, wave, sinks: gate, ..Case::usual() });
            let (y, _) = r.one_pass(64, 2, 0);
            let (none, planes) = r.one_pass(64, 2, 1);
            quantized(&y, &planes);
            assert!(none.iter().all(|y| y.is_nan()), "rows that nobody reads are not written");
            let (both, planes) = r.one_pass(64, 2, 2);
            quantized(&y, &planes);
            assert_eq!(both, y);
        }
    }
}
