//! Routing.

use super::{Device, Random, U, WAVES, close};
use hanzo_kernels::args::MoeRoute;

#[derive(Clone, Copy)]
struct Spec {
    experts: usize,
    top: usize,
    score: u32,
    biased: bool,
    groups: usize,
    kept: usize,
    normalise: bool,
    scale: f32,
}

fn largest(x: &[f64], n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|a, b| x[*b].total_cmp(&x[*a]));
    order.truncate(n);
    order
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let top = x.iter().fold(f64::NEG_INFINITY, |m, x| m.max(*x));
    let e: Vec<f64> = x.iter().map(|x| (x - top).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.iter().map(|e| e / sum).collect()
}

/// Ids and weights of one token.
fn exact(spec: &Spec, logits: &[f32], bias: &[f32]) -> (Vec<usize>, Vec<f64>) {
    let x: Vec<f64> = logits.iter().map(|x| f64::from(*x)).collect();
    let scores = match spec.score {
        0 => softmax(&x),
        1 => x.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
        _ => x,
    };
    let add = |i: usize| if spec.biased { f64::from(bias[i]) } else { 0.0 };
    let mut choice: Vec<f64> = scores.iter().enumerate().map(|(i, s)| f64::from((s + add(i)) as f32)).collect();
    if spec.groups > 1 {
        let size = spec.experts / spec.groups;
        let strength = |g: &[f64]| largest(g, 2).into_iter().map(|i| g[i]).sum::<f64>();
        let kept = largest(&choice.chunks(size).map(strength).collect::<Vec<_>>(), spec.kept);
        let keep = |i: usize| kept.contains(&(i / size));
        choice.iter_mut().enumerate().filter(|(i, _)| !keep(*i)).for_each(|(_, c)| *c = f64::NEG_INFINITY);
    }
    let ids = largest(&choice, spec.top);
    let mut w: Vec<f64> = ids.iter().map(|i| scores[*i]).collect();
    if spec.score == 2 {
        w = softmax(&w);
    }
    if spec.normalise {
        let sum: f64 = w.iter().sum();
        w.iter_mut().for_each(|w| *w /= sum);
    }
    (ids, w.iter().map(|w| w * f64::from(spec.scale)).collect())
}

fn launch(spec: &Spec, stages: u32, wave: u32, x: &[f32], bias: &[f32], tokens: usize) -> (Vec<u32>, Vec<f32>) {
    let mut device = Device::default();
    let (px, pb, live) = (device.floats(x), device.floats(bias), device.words(&[tokens as u32]));
    let n = tokens * if stages == 1 { spec.experts } else { spec.top };
    let (ids, y) = (device.out(tokens * spec.top), device.out(n));
    let args = MoeRoute { x: px, bias: pb, live, ids, y, scale: spec.scale };
    let set = [
        ("THREADS", 64),
        ("WAVE", wave),
        ("STAGES", stages),
        ("SCORE", spec.score),
        ("EXPERTS", spec.experts as u32),
        ("TOP", spec.top as u32),
        ("BIASED", spec.biased.into()),
        ("GROUPS", spec.groups as u32),
        ("KEPT", spec.kept as u32),
        ("NORMALISE", spec.normalise.into()),
    ];
    device.run(&args, &set, [tokens as u32, 1, 1]);
    (device.0.u32s(ids), device.0.f32s(y))
}

const BASE: Spec =
    Spec { experts: 8, top: 2, score: 0, biased: false, groups: 1, kept: 1, normalise: true, scale: 1.0 };

#[test]
fn ids_are_exact_and_weights_within_the_bound_in_one_launch_and_in_three() {
    let tokens = 9;
    for (i, score) in [0, 1, 2].into_iter().enumerate() {
        let kinds = [
            BASE,
            Spec { top: 1, normalise: false, ..BASE },
            Spec { experts: 5, top: 5, scale: 2.5, ..BASE },
            Spec { experts: 128, top: 8, ..BASE },
            Spec { experts: 160, top: 6, ..BASE },
            Spec { experts: 33, top: 4, biased: true, ..BASE },
            Spec { experts: 32, top: 4, groups: 8, kept: 3, ..BASE },
            Spec { experts: 32, top: 6, groups: 4, kept: 2, biased: true, scale: 2.5, ..BASE },
        ];
        for (k, spec) in kinds.into_iter().enumerate() {
            let spec = Spec { score, ..spec };
            let wave = WAVES[(i + k) % 4];
            let random = &mut Random(k as u64 + 1);
            for ties in [false, true] {
                let n = tokens * spec.experts;
                let logits: Vec<f32> = match ties {
                    true => (0..n).map(|_| (random.next() * 4.0).round().clamp(-1.0, 2.0) * 0.75).collect(),
                    false => random.floats(n, 4.0),
                };
                let bias = if ties { vec![0.25; spec.experts] } else { random.floats(spec.experts, 0.5) };
                let (ids, weights) = launch(&spec, 7, wave, &logits, &bias, tokens);
                for t in 0..tokens {
                    let (want_ids, want) = exact(&spec, &logits[t * spec.experts..][..spec.experts], &bias);
                    let got: Vec<usize> = ids[t * spec.top..][..spec.top].iter().map(|i| *i as usize).collect();
                    assert_eq!(got, want_ids, "score {score}, kind {k}, ties {ties}");
                    let bound = (2.0 * 16.0 + spec.experts as f64 + 24.0) * 2.0 * U;
                    close("weights", &weights[t * spec.top..][..spec.top], &want, |i| bound * want[i].abs());
                }
                // One stage after the other gives the same bits.
                let (_, scores) = launch(&spec, 1, wave, &logits, &bias, tokens);
                let (ids2, raw) = launch(&spec, 2, wave, &scores, &bias, tokens);
                let (_, weights2) = launch(&spec, 4, wave, &raw, &bias, tokens);
                assert_eq!((ids, weights), (ids2, weights2));
            }
        }
    }
}

#[test]
fn ids_are_distinct_whatever_the_logits() {
    let spec = Spec { experts: 32, top: 6, groups: 4, kept: 2, ..BASE };
    for fill in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0] {
        for score in [0, 1, 2] {
            let mut logits = vec![fill; 64];
            logits[40..44].copy_from_slice(&[f32::NAN, 1.0, f32::NEG_INFINITY, f32::INFINITY]);
            let (ids, _) = launch(&Spec { score, ..spec }, 7, 32, &logits, &[0.0; 32], 2);
            for ids in ids.chunks(6) {
                let mut sorted = ids.to_vec();
                sorted.sort_unstable();
                sorted.dedup();
                assert!(sorted.len() == 6 && sorted[5] < 32, "{ids:?}");
            }
        }
    }
}
