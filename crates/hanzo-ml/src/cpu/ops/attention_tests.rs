//! Attention against f64, against itself in other chunkings, and its splits against the whole.

use super::super::attention_exact::attention_exact;
use super::super::kv::kv_store;
use super::super::kv::tests::Cache;
use super::super::math::tests::isas;
use super::*;
use hanzo_gguf::Format;

/// One sequence: `n` positions of `n_kv` heads in shuffled pages, and queries for all positions.
struct Case {
    n: usize,
    n_kv: usize,
    d_k: usize,
    d_v: usize,
    heads: AttentionHeads,
    k: Cache,
    v: Cache,
    q: Vec<f32>,
    pages: Vec<u32>,
    visible_end: Option<Vec<u32>>,
    sinks: Option<Vec<f32>>,
    exact: bool,
}

fn wave(n: usize, seed: f32, size: f32) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * 0.618 + seed).sin() * (i as f32 * 0.0137 + seed * 3.0).cos() * size).collect()
}

impl Case {
    fn new(n: usize, n_kv: usize, group: usize, d_k: usize, d_v: usize, format: Format) -> Case {
        let count = n.div_ceil(PAGE);
        // Pages in a scrambled order, page 0 unused.
        let pages: Vec<u32> = (0..count).map(|i| ((i * 7 + 3) % count.max(1) + 1) as u32).collect();
        let pages = if count % 7 == 0 { (1..=count as u32).rev().collect() } else { pages };
        let (mut k, mut v) = (Cache::new(format, count + 1, n_kv, d_k), Cache::new(format, count + 1, n_kv, d_v));
        let slots: Vec<u32> = (0..n).map(|p| crate::cpu::ops::kv::slot_of(p as u32, &pages, 0)).collect();
        let (kx, vx) = (wave(n * n_kv * d_k, 0.3, 1.5), wave(n * n_kv * d_v, 1.9, 2.0));
        kv_store(IsaLevel::Portable, k.rows(), 0, Mat::new(&kx, n, n_kv * d_k), &slots);
        kv_store(IsaLevel::Portable, v.rows(), 0, Mat::new(&vx, n, n_kv * d_v), &slots);
        let scale = 1.0 / (d_k as f32).sqrt();
        let heads = AttentionHeads { group, scale, window: None, softcap: None, split: None };
        let q = wave(n * n_kv * group * d_k, 4.1, 2.5);
        Case { n, n_kv, d_k, d_v, heads, k, v, q, pages, visible_end: None, sinks: None, exact: false }
    }

    /// All heads of the tokens `from..to`, computed in one call a KV head.
    fn run(&mut self, isa: IsaLevel, from: usize, to: usize, out: &mut [f32]) {
        let (g, n) = (self.heads.group, to - from);
        let (qs, os) = (self.n_kv * g * self.d_k, self.n_kv * g * self.d_v);
        let positions: Vec<u32> = (from as u32..to as u32).collect();
        // Pages that have left the window of every token in the call are not in its table.
        let first = self.heads.window.map_or(0, |w| (from + 1).saturating_sub(w as usize) / PAGE);
        let mut scratch = vec![f32::NAN; attention_scratch(self.d_k, self.d_v)];
        for head in 0..self.n_kv {
            let input = AttentionInput {
                q: Mat::strided(&self.q[from * qs + head * g * self.d_k..], n, g * self.d_k, qs),
                positions: &positions,
                visible_end: self.visible_end.as_ref().map(|v| &v[from..to]),
                k: self.k.rows(),
                v: self.v.rows(),
                head,
                pages: &self.pages[first..],
                first_page: first as u32,
            };
            let sinks = self.sinks.as_ref().map(|s| &s[head * g..(head + 1) * g]);
            let out = MatMut::strided(&mut out[head * g * self.d_v..], n, g * self.d_v, os);
            let form = if self.exact { attention_exact } else { attention };
            form(isa, &self.heads, &input, sinks, out, &mut scratch);
        }
    }

    /// Checks `out` `[n, n_kv * group * d_v]` against f64 on the stored rows, with the module's bound.
    fn check(&self, out: &[f32], what: &str) {
        let u = 2f64.powi(-24);
        // In the f64 form only the result is rounded.
        let tight = |rel: f64| if self.exact { 2.0 * u } else { rel };
        let (g, d_k, d_v) = (self.heads.group, self.d_k, self.d_v);
        let slot = |p: usize| crate::cpu::ops::kv::slot_of(p as u32, &self.pages, 0) as usize;
        for head in 0..self.n_kv {
            let k: Vec<Vec<f32>> = (0..self.n).map(|p| self.k.row(slot(p), head)).collect();
            let v: Vec<Vec<f32>> = (0..self.n).map(|p| self.v.row(slot(p), head)).collect();
            for t in 0..self.n {
                let hi = self.visible_end.as_ref().map_or(t + 1, |e| (e[t] as usize).max(t + 1));
                let lo = self.heads.window.map_or(0, |w| (t + 1).saturating_sub(w as usize));
                for h in 0..g {
                    let q = &self.q[((t * self.n_kv + head) * g + h) * d_k..][..d_k];
                    let scale = self.heads.scale as f64;
                    let (mut s, mut e) = (Vec::new(), 0f64);
                    for k in &k[lo..hi] {
                        let dot: f64 = q.iter().zip(k).map(|(a, b)| *a as f64 * *b as f64).sum();
                        let size: f64 = q.iter().zip(k).map(|(a, b)| (*a as f64 * *b as f64).abs()).sum();
                        e = e.max((d_k + 2) as f64 * u * scale * size);
                        let x = scale * dot;
                        s.push(self.heads.softcap.map_or(x, |c| c as f64 * (x / c as f64).tanh()));
                    }
                    e += self.heads.softcap.map_or(0.0, |c| 12.0 * u * c as f64);
                    let sink = self.sinks.as_ref().map(|x| x[head * g + h] as f64);
                    let m = s.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
                    let spread = s.iter().map(|s| (s - m).abs()).fold(0.0, f64::max);
                    let w: Vec<f64> = s.iter().map(|s| (s - m).exp()).collect();
                    let l = w.iter().sum::<f64>() + sink.map_or(0.0, |s| (s - m).exp());
                    let n = w.len();
                    let splits = self.heads.split.map_or(0, |s| n.div_ceil(s) + 1);
                    let counted = (2 * n + 12 * (n / GROUP + 2) + 20 * splits + 40) as f64;
                    let rel = 4.0 * e + (4.0 * spread + counted) * u;
                    for c in 0..d_v {
                        let want: f64 = w.iter().zip(&v[lo..hi]).map(|(w, v)| w * v[c] as f64).sum::<f64>() / l;
                        let size: f64 = w.iter().zip(&v[lo..hi]).map(|(w, v)| w * (v[c] as f64).abs()).sum::<f64>() / l;
                        let got = out[((t * self.n_kv + head) * g + h) * d_v + c] as f64;
                        assert!(
                            (got - want).abs() <= tight(rel) * size,
                            "{what} token {t} head {head}.{h}: {got} {want}"
                        );
                    }
                }
            }
        }
    }

    fn out(&self) -> Vec<f32> {
        vec![f32::NAN; self.n * self.n_kv * self.heads.group * self.d_v]
    }

    /// Whole prompt in one call within the bound; then chunks of 1, 7 and 33 bit-equal.
    fn prove(mut self, what: &str) {
        for exact in [false, true] {
            self.exact = exact;
            self.prove_form(&format!("{what}, exact {exact}"));
        }
    }

    fn prove_form(&mut self, what: &str) {
        for isa in isas() {
            let mut whole = self.out();
            let n = self.n;
            self.run(isa, 0, n, &mut whole);
            self.check(&whole, &format!("{what} {isa:?}"));
            let width = whole.len() / n;
            for chunk in [1, 7, 33] {
                let mut parts = self.out();
                for from in (0..n).step_by(chunk) {
                    let to = (from + chunk).min(n);
                    self.run(isa, from, to, &mut parts[from * width..]);
                }
                assert!(parts == whole, "{what} {isa:?}: chunks of {chunk} change bits");
            }
        }
    }
}

#[test]
fn causal_attention_is_within_its_bound_and_bit_equal_in_any_chunking_for_every_cache_format() {
    for format in crate::cache::CACHE_FORMATS {
        Case::new(101, 2, 3, 64, 64, format).prove(format.name());
    }
}

#[test]
fn odd_head_sizes_and_different_key_and_value_sizes_work() {
    Case::new(70, 1, 2, 80, 72, Format::F16).prove("80/72");
    Case::new(40, 1, 1, 5, 3, Format::F32).prove("5/3");
    Case::new(66, 1, 4, 256, 128, Format::BF16).prove("256/128");
}

#[test]
fn a_window_forgets_pages_and_keys_behind_it() {
    for window in [1, 31, 32, 33, 50] {
        let mut case = Case::new(140, 1, 2, 32, 32, Format::F16);
        case.heads.window = Some(window);
        case.prove(&format!("window {window}"));
    }
}

#[test]
fn softcap_sinks_and_non_causal_spans_follow_their_formulas() {
    let mut case = Case::new(90, 2, 2, 64, 32, Format::F16);
    case.heads.softcap = Some(2.0);
    case.sinks = Some(vec![0.5, -3.0, 4.0, 30.0]);
    // Tokens 40..77 see each other whole.
    case.visible_end = Some((0..90).map(|t| if (40..77).contains(&t) { 77 } else { 0 }).collect());
    case.prove("softcap, sinks, span");
}

#[test]
fn a_group_larger_than_a_block_is_the_same_as_its_heads_one_by_one() {
    let mut case = Case::new(35, 1, 100, 16, 16, Format::F16);
    let isa = IsaLevel::detect();
    let mut whole = case.out();
    case.run(isa, 0, 35, &mut whole);
    case.check(&whole, "group of 100");
}

#[test]
fn latent_attention_reads_values_as_a_prefix_of_the_keys() {
    let mut case = Case::new(50, 1, 16, 576, 512, Format::F16);
    // The case's values become the first 512 elements of its keys.
    for p in 0..50u32 {
        let slot = crate::cpu::ops::kv::slot_of(p, &case.pages, 0);
        let row = case.k.row(slot as usize, 0);
        kv_store(IsaLevel::Portable, case.v.rows(), 0, Mat::new(&row[..512], 1, 512), &[slot]);
    }
    let mut with_values = case.out();
    let isa = IsaLevel::detect();
    case.run(isa, 0, 50, &mut with_values);
    case.check(&with_values, "latent");
    let positions: Vec<u32> = (0..50).collect();
    let k = case.k.rows();
    let input = AttentionInput {
        q: Mat::new(&case.q, 50, 16 * 576),
        positions: &positions,
        visible_end: None,
        k,
        v: k.prefix(512),
        head: 0,
        pages: &case.pages,
        first_page: 0,
    };
    let mut prefix = vec![0.0; with_values.len()];
    let mut scratch = vec![0.0; attention_scratch(576, 512)];
    attention(isa, &case.heads, &input, None, MatMut::new(&mut prefix, 50, 16 * 512), &mut scratch);
    assert!(prefix == with_values);
}

#[test]
fn splits_computed_apart_and_merged_are_bit_equal_to_the_whole_and_within_the_bound() {
    let n = 333;
    let mut case = Case::new(n, 1, 3, 64, 64, Format::F16);
    case.heads.window = Some(200);
    case.sinks = Some(vec![1.0, -1.0, 0.0]);
    // Whole groups, and splits that begin and end within one.
    for (isa, split) in isas().flat_map(|isa| [(isa, 64), (isa, 32), (isa, 96)]) {
        case.heads.split = Some(split);
        let mut whole = case.out();
        case.run(isa, 0, n, &mut whole);
        case.check(&whole, "split");
        let n_splits = n.div_ceil(split);
        let positions: Vec<u32> = (0..n as u32).collect();
        let (mut o, mut ml) = (vec![f32::NAN; n_splits * whole.len()], vec![f32::NAN; n_splits * n * 3 * 2]);
        let mut scratch = vec![f32::NAN; attention_scratch(64, 64)];
        let input = AttentionInput {
            q: Mat::new(&case.q, n, 3 * 64),
            positions: &positions,
            visible_end: None,
            k: case.k.rows(),
            v: case.v.rows(),
            head: 0,
            pages: &case.pages,
            first_page: 0,
        };
        for (i, (o, ml)) in o.chunks_mut(whole.len()).zip(ml.chunks_mut(n * 6)).enumerate() {
            attention_partial(isa, &case.heads, &input, i, MatMut::new(o, n, 192), ml, &mut scratch);
        }
        let mut merged = case.out();
        let sinks = case.sinks.as_deref();
        attention_merge(isa, &case.heads, n_splits, &o, &ml, sinks, MatMut::new(&mut merged, n, 192));
        assert!(merged == whole, "{isa:?} splits of {split}");
    }
}

#[test]
fn rows_never_written_in_the_last_page_do_not_reach_the_output() {
    // The cache is filled with 0xff, which reads as NaN: a result within the bound has not touched it.
    Case::new(33, 1, 1, 64, 64, Format::F16).prove("tail");
}
