//! attn_decode with what qk_norm_rope does in front of it: the same bits as the two launches, in its output and in the cache.

use super::{Case, Ready, Rng, U, bytes_of, launch, words};
use hanzo_gguf::Format;
use hanzo_kernels::args::QkNormRope;
use hanzo_kernels::cache::{self, Order};

/// How queries and keys are made.
#[derive(Clone, Copy, Debug)]
struct Turn {
    turns: usize,
    neox: bool,
    norms: [u32; 2],
    /// Threads of a row.
    threads: u32,
}

const USUAL: Turn = Turn { turns: 64, neox: true, norms: [1, 1], threads: 64 };

/// One token after `before` others, by both ways.
fn same(case: Case, turn: Turn) {
    let c = &case;
    let mut r = Ready::new(c);
    let mut rng = Rng(5 + c.d_k as u64);
    let rows = |r: &mut Ready, x: Vec<f32>| r.memory.read(&bytes_of(&x));
    let (q, k, v) = (c.n_kv * c.group * c.d_k, c.n_kv * c.d_k, c.n_kv * c.d_v);
    let [q, k, v] = [q, k, v].map(|n| rng.floats(n)).map(|x| rows(&mut r, x));
    let norms = [0, 1].map(|_| rng.floats(c.d_k)).map(|x| rows(&mut r, x));
    let angles = rng.floats(turn.turns);
    let table = rows(&mut r, angles.clone());
    let before = c.sequences[0].0;
    let page = r.memory.u32s(r.at.pages)[(before / 32 - c.gone) as usize];
    let slots = r.memory.read(&words(&[32 * page + before % 32]));
    let caches = [r.at.k, r.at.v].map(|p| r.memory.bytes(p).to_vec());
    let [two, one] = [0, 1].map(|_| caches.clone().map(|b| r.memory.write(&b)));
    let eps = 1e-5f32;
    let norm = QkNormRope {
        q,
        k,
        v,
        q_norm: norms[0],
        k_norm: norms[1],
        live: r.at.live,
        angles: table,
        slots,
        q_out: r.memory.output(4 * c.n_kv * c.group * c.d_k),
        k_out: 0,
        kc: two[0],
        vc: two[1],
        eps,
    };
    let shared = [("NDIMS", turn.turns as u32), ("NEOX", turn.neox.into())];
    let mut set = r.constants();
    set.retain(|s| ["WAVE", "DV", "KT", "VT", "VKEY"].contains(&s.0));
    set.extend([
        ("DQK", c.d_k as u32),
        ("NQ", (c.n_kv * c.group) as u32),
        ("NK", c.n_kv as u32),
        ("NV", c.n_kv as u32),
    ]);
    set.extend([("QNORM", turn.norms[0]), ("KNORM", turn.norms[1]), ("KSTORE", 1), ("THREADS", turn.threads)]);
    set.extend(shared);
    launch(&mut r.memory, &norm, &set, [(c.group as u32 + 2) * c.n_kv as u32, 1, 1]);

    let heads = c.group.div_ceil(c.group.div_ceil(4)) as u32;
    let keys = if c.d_v > 128 { 32 } else { 64 };
    let (mut args, set, grid) = r.splits(keys, heads, &[]);
    (args.q, args.k, args.v) = (norm.q_out, two[0], two[1]);
    let want = r.combining(args, set, grid, 0).0;

    let (mut args, mut set, grid) = r.splits(keys, heads, &angles);
    (args.q, args.k_new, args.v_new, args.q_norm, args.k_norm) = (q, k, v, norms[0], norms[1]);
    ([args.k, args.v], [args.kc, args.vc]) = (one, one);
    set.extend([("PROLOGUE", 1), ("LIVE", 1), ("TURN", turn.threads), ("EPS", eps.to_bits())]);
    set.extend([("QNORM", turn.norms[0]), ("KNORM", turn.norms[1])]);
    set.extend(shared);
    let got = r.combining(args, set, [grid[0], grid[1], 1], 0).0;
    assert!(got.iter().zip(&want).all(|(g, w)| g.to_bits() == w.to_bits()), "{c:?} {turn:?}: {got:?}, not {want:?}");
    for (which, (one, two)) in one.iter().zip(&two).enumerate() {
        let (one, two) = (r.memory.bytes(*one), r.memory.bytes(*two));
        let first = one.iter().zip(two).position(|(a, b)| a != b);
        assert_eq!(first, None, "{c:?} {turn:?}: cache {which}");
        assert!(caches[which] != two, "{c:?}: nothing was stored");
    }
    // The two launches are held to f64 elsewhere; here only that the row was there to be seen.
    let (format, d) = (c.formats.1, c.d_v);
    if before == 0 && !c.sinks && !c.gate && format == Format::F32 && cache::values_order(d) == Order::Values {
        let value = r.memory.f32s(v);
        assert!(want.iter().enumerate().all(|(i, y)| {
            let x = value[i / d / c.group * d + i % d];
            f64::from((y - x).abs()) <= 16.0 * U * f64::from(x.abs())
        }));
    }
}

fn one_token(before: u32) -> Case {
    Case { sequences: vec![(before, 1)], ..Case::usual() }
}

#[test]
fn the_prologue_makes_the_same_bits_as_a_launch_of_its_own() {
    same(one_token(70), USUAL);
    for norms in [[0, 0], [1, 0], [0, 1]] {
        same(one_token(40), Turn { norms, ..USUAL });
    }
    same(one_token(70), Turn { neox: false, ..USUAL });
    for (neox, turns) in [(true, 24), (false, 24), (true, 0)] {
        same(one_token(5), Turn { neox, turns, ..USUAL });
    }
}

#[test]
fn the_row_of_the_step_is_seen_in_every_cache_format() {
    for format in [Format::F16, Format::F32, Format::BF16, Format::Q8_0, Format::Q4_0] {
        same(Case { formats: (format, format), ..one_token(70) }, USUAL);
        same(Case { formats: (format, format), d_k: 128, d_v: 128, ..one_token(0) }, USUAL);
    }
    same(Case { formats: (Format::F16, Format::Q8_0), ..one_token(33) }, USUAL);
}

#[test]
fn the_prologue_has_no_edge_at_pages_splits_and_windows() {
    for before in [0, 31, 32, 63, 64, 127, 128, 300] {
        same(one_token(before), USUAL);
    }
    for (window, gone) in [(1, 0), (17, 0), (32, 1), (40, 1)] {
        same(Case { window, gone, ..one_token(64) }, USUAL);
    }
    same(Case { splits: 1, ..one_token(200) }, USUAL);
}

#[test]
fn the_prologue_does_not_depend_on_the_wave() {
    for wave in [1, 8, 64] {
        same(Case { wave, sinks: true, gate: true, ..one_token(70) }, USUAL);
    }
    same(Case { wave: 32, ..one_token(70) }, Turn { threads: 32, ..USUAL });
}

#[test]
fn the_prologue_takes_heads_of_many_shapes() {
    same(Case { n_kv: 3, group: 1, ..one_token(9) }, USUAL);
    // Two workgroups share a key head: one of them stores.
    same(Case { n_kv: 1, group: 7, ..one_token(66) }, USUAL);
    same(Case { d_k: 128, d_v: 128, group: 4, ..one_token(66) }, Turn { turns: 128, ..USUAL });
    same(Case { n_kv: 1, d_k: 256, d_v: 256, ..one_token(40) }, Turn { turns: 256, threads: 128, ..USUAL });
    same(Case { n_kv: 1, d_k: 192, d_v: 160, ..one_token(40) }, Turn { turns: 64, threads: 96, ..USUAL });
    same(Case { d_k: 80, d_v: 80, ..one_token(40) }, USUAL);
    let formats = (Format::F32, Format::F16);
    same(Case { d_k: 20, d_v: 12, formats, ..one_token(40) }, Turn { turns: 20, ..USUAL });
    same(Case { d_k: 12, d_v: 20, formats, ..one_token(40) }, Turn { turns: 8, ..USUAL });
}
