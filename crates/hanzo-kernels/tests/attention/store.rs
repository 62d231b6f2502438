//! qk_norm_rope: heads normed, turned and stored in the cache. What attention makes of the cache may not enter here.

use super::{Rng, U, bytes_of, launch, stored, words};
use hanzo_gguf::{Format, formats};
use hanzo_kernels::args::QkNormRope;
use hanzo_kernels::cache::{self, Order};
use hanzo_kernels::host::Memory;

/// What a case of norm, rotation and store is like.
#[derive(Clone, Debug)]
struct Heads {
    heads: [usize; 3],
    d: usize,
    d_v: usize,
    turns: usize,
    neox: bool,
    norms: [u32; 2],
    store: bool,
    formats: (Format, Format),
    wave: u32,
}

fn store(c: Heads) {
    let mut rng = Rng(c.d as u64 + c.turns as u64);
    let n = 5;
    let slots = [32u32, 33, 95, 64, 3];
    let [nq, nk, nv] = c.heads;
    let (q, k, v) = (rng.floats(n * nq * c.d), rng.floats(n * nk * c.d), rng.floats(n * nv * c.d_v));
    let weights = [rng.floats(c.d), rng.floats(c.d)];
    let angles = rng.floats(n * c.turns);
    let (kf, vf) = c.formats;
    let pages = 3;
    // Every bit of the cache that no token owns must stay as it is.
    let blank = |f: Format, d: usize, heads: usize| -> Vec<u8> {
        (0..pages * 32 * heads * f.row_bytes(d).unwrap_or(0)).map(|i| (i * 29 % 251) as u8).collect()
    };
    let mut memory = Memory::new();
    let (k_before, v_before) = (blank(kf, c.d, nk), blank(vf, c.d_v, nv));
    let v_order = cache::values_order(c.d_v);
    let m = &mut memory;
    // Three rows that are not of the step.
    let padded = |x: &[f32], cols: usize| bytes_of(&[x, &vec![f32::NAN; 3 * cols]].concat());
    let args = QkNormRope {
        q: m.read(&padded(&q, nq * c.d)),
        k: m.read(&padded(&k, nk * c.d)),
        v: m.read(&padded(&v, nv * c.d_v)),
        q_norm: m.read(&bytes_of(&weights[0])),
        k_norm: m.read(&bytes_of(&weights[1])),
        live: m.read(&words(&[n as u32])),
        angles: m.read(&padded(&angles, c.turns)),
        slots: m.read(&words(&[&slots[..], &[7; 3]].concat())),
        q_out: m.output(4 * q.len()),
        k_out: m.output(4 * k.len()),
        kc: m.write(&k_before),
        vc: m.write(&v_before),
        eps: 1e-5,
    };
    let set = [
        ("WAVE", c.wave),
        ("THREADS", 64),
        ("DQK", c.d as u32),
        ("DV", c.d_v as u32),
        ("NQ", nq as u32),
        ("NK", nk as u32),
        ("NV", nv as u32),
        ("NDIMS", c.turns as u32),
        ("NEOX", c.neox.into()),
        ("QNORM", c.norms[0]),
        ("KNORM", c.norms[1]),
        ("KSTORE", c.store.into()),
        ("KT", cache::code(kf, c.d).unwrap_or(0)),
        ("VT", cache::code(vf, c.d_v).unwrap_or(0)),
        ("VKEY", u32::from(v_order == Order::Keys)),
    ];
    launch(m, &args, &set, [(nq + nk + nv) as u32, n as u32 + 3, 1]);
    // Each head with its bound.
    let turned = |x: &[f32], t: usize, norm: u32, w: &[f32]| -> Vec<(f64, f64)> {
        let square = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / c.d as f64;
        let by = if norm == 0 { 1.0 } else { 1.0 / (square + 1e-5f32 as f64).sqrt() };
        let x: Vec<f64> =
            (x.iter().zip(w)).map(|(x, w)| f64::from(*x) * by * if norm == 1 { f64::from(*w) } else { 1.0 }).collect();
        let rel = if norm == 0 { 0.0 } else { (c.d as f64 / 2.0 + 8.0) * U };
        let half = c.turns / 2;
        (0..c.d)
            .map(|e| {
                if e >= c.turns {
                    return (x[e], rel * x[e].abs());
                }
                let (i, a, b) = if c.neox { (e % half, e % half, e % half + half) } else { (e / 2, e & !1, e | 1) };
                let (cos, sin) = (f64::from(angles[t * c.turns + i]), f64::from(angles[t * c.turns + half + i]));
                let (y, size) = if e == a {
                    (x[a] * cos - x[b] * sin, (x[a] * cos).abs() + (x[b] * sin).abs())
                } else {
                    (x[a] * sin + x[b] * cos, (x[a] * sin).abs() + (x[b] * cos).abs())
                };
                (y, (rel + 3.0 * U) * size)
            })
            .collect()
    };
    let near = |got: &[f32], want: &[(f64, f64)], what: &str| {
        for (i, (g, (w, b))) in got.iter().zip(want).enumerate() {
            assert!((f64::from(*g) - w).abs() <= *b, "{what} {c:?}: element {i} is {g}, not {w}");
        }
    };
    let q_out = memory.f32s(args.q_out);
    for (i, head) in q.chunks(c.d).enumerate() {
        near(&q_out[i * c.d..], &turned(head, i / nq, c.norms[0], &weights[0]), "q");
    }
    if nv == 0 && !c.store {
        for (i, head) in k.chunks(c.d).enumerate() {
            let k_out = memory.f32s(args.k_out);
            near(&k_out[i * c.d..(i + 1) * c.d], &turned(head, i / nk, c.norms[1], &weights[1]), "k");
        }
        assert!(memory.bytes(args.kc) == k_before, "{c:?}: the cache is not this launch's");
        return;
    }
    let k_rows = cache::to_rows(kf, c.d, Order::Keys, memory.bytes(args.kc));
    let v_rows = cache::to_rows(vf, c.d_v, v_order, memory.bytes(args.vc));
    let mut k_want = cache::to_rows(kf, c.d, Order::Keys, &k_before);
    let mut v_want = cache::to_rows(vf, c.d_v, v_order, &v_before);
    for (t, slot) in slots.iter().enumerate() {
        for h in 0..nk {
            let head = &k[(t * nk + h) * c.d..][..c.d];
            let want = turned(head, t, c.norms[1], &weights[1]);
            let bytes = kf.row_bytes(c.d).unwrap_or(0);
            let at = ((*slot as usize / 32 * nk + h) * 32 + *slot as usize % 32) * bytes;
            if c.turns == 0 && c.norms[1] == 0 {
                k_want[at..at + bytes].copy_from_slice(&stored(kf, head));
                continue;
            }
            // The stored row may differ by its rounding where the row itself may differ by its last bits.
            let mut got = vec![0.0; c.d];
            formats::to_float(kf, &k_rows[at..at + bytes], &mut got);
            for (b, block) in want.chunks(32).enumerate() {
                let peak = block.iter().fold(0.0, |m: f64, x| m.max(x.0.abs()));
                let step = |x: f64| match kf {
                    Format::F32 => U * x.abs(),
                    Format::F16 => x.abs() / 2048.0 + 1e-7,
                    Format::BF16 => x.abs() / 256.0,
                    Format::Q8_0 => peak / 250.0 + peak / 2048.0,
                    _ => peak / 7.9 + peak / 2048.0,
                };
                let want: Vec<(f64, f64)> = block.iter().map(|(x, e)| (*x, e + step(*x))).collect();
                near(&got[32 * b..], &want, "stored k");
            }
            k_want[at..at + bytes].copy_from_slice(&k_rows[at..at + bytes]);
        }
        for h in 0..nv {
            let bytes = vf.row_bytes(c.d_v).unwrap_or(0);
            let at = ((*slot as usize / 32 * nv + h) * 32 + *slot as usize % 32) * bytes;
            v_want[at..at + bytes].copy_from_slice(&stored(vf, &v[(t * nv + h) * c.d_v..][..c.d_v]));
        }
    }
    assert!(k_rows == k_want && v_rows == v_want, "{c:?}: stored rows, or rows that are not the step's");
}

fn usual_heads() -> Heads {
    let formats = (Format::F16, Format::F16);
    Heads { heads: [4, 2, 2], d: 64, d_v: 64, turns: 64, neox: true, norms: [1, 1], store: true, formats, wave: 32 }
}

#[test]
fn every_cache_format_is_stored_bit_for_bit_and_touches_nothing_else() {
    for format in [Format::F16, Format::F32, Format::BF16, Format::Q8_0, Format::Q4_0] {
        for d in [32, 96, 128] {
            let formats = (format, format);
            store(Heads { heads: [0, 2, 3], d, d_v: d, turns: 0, norms: [0, 0], formats, ..usual_heads() });
        }
        store(Heads { formats: (format, format), ..usual_heads() });
    }
    let formats = (Format::F32, Format::F16);
    store(Heads { heads: [0, 2, 3], d: 20, d_v: 12, turns: 0, norms: [0, 0], formats, ..usual_heads() });
    let formats = (Format::BF16, Format::Q8_0);
    store(Heads { heads: [1, 2, 0], d: 48, d_v: 32, norms: [1, 0], turns: 16, formats, ..usual_heads() });
}

#[test]
fn heads_are_normed_and_turned_both_ways_at_every_wave_size() {
    for neox in [true, false] {
        for (wave, d, turns) in [(1, 64, 64), (8, 96, 24), (32, 10, 6), (64, 128, 128)] {
            for (norms, store_k) in [([1, 1], false), ([0, 1], false), ([1, 0], false)] {
                let heads = [3, 2, 0];
                store(Heads { heads, d, turns, neox, norms, store: store_k, wave, ..usual_heads() });
            }
        }
        store(Heads { neox, turns: 24, ..usual_heads() });
    }
}
