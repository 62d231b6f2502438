//! Ops with a carried state: several sequences, an empty one, slots out of order, any chunking.

use super::{Device, Random, U, WAVES, close};
use hanzo_kernels::args::{GatedDelta, ShortConv};

#[test]
fn short_conv_is_within_its_bound_and_carries_the_state_over_any_chunking() {
    for (cols, taps, biased, act) in
        [(64usize, 4usize, false, 0u32), (33, 3, true, 16), (7, 1, false, 16), (20, 2, true, 4)]
    {
        let random = &mut Random(cols as u64);
        let (total, past) = (13, taps - 1);
        let (w, b) = (random.floats(cols * taps, 0.7), random.floats(cols, 1.0));
        let x = random.floats(total * cols, 1.0);
        let before = random.floats(4 * past * cols, 1.0);
        // Slot 2 of 4; two sequences, of which the first one is empty.
        let run = |chunks: &[usize]| {
            let mut device = Device::default();
            let (weight, bias, state) = (device.floats(&w), device.floats(&b), device.state(&before));
            let (mut at, mut all) = (0, Vec::new());
            for n in chunks {
                let px = device.floats(&x[at * cols..(at + n) * cols]);
                let (slots, offsets) = (device.words(&[1, 2]), device.words(&[0, 0, *n as u32]));
                let y = device.out(n * cols);
                let args = ShortConv {
                    x: px,
                    weight,
                    bias,
                    slots,
                    offsets,
                    state,
                    y,
                    cols: cols as u32,
                    weight_stride: taps as u32,
                    slot_stride: (past * cols) as u32,
                };
                let set =
                    [("THREADS", 64), ("COLS", 16), ("TAPS", taps as u32), ("ACT", act), ("BIASED", biased.into())];
                device.run(&args, &set, [cols.div_ceil(16) as u32, 2, 1]);
                all.extend(device.0.f32s(y));
                at += n;
            }
            (all, device.0.f32s(state))
        };
        let (y, state) = run(&[total]);
        let mut rows = before[2 * past * cols..3 * past * cols].to_vec();
        rows.extend(&x);
        let (mut want, mut size) = (Vec::new(), Vec::new());
        for t in 0..total {
            for c in 0..cols {
                let term = |j: usize| f64::from(w[c * taps + j]) * f64::from(rows[(t + j) * cols + c]);
                let bias = if biased { f64::from(b[c]) } else { 0.0 };
                let sum = (0..taps).map(term).sum::<f64>() + bias;
                let s = (0..taps).map(|j| term(j).abs()).sum::<f64>() + bias.abs();
                let sigmoid = 1.0 / (1.0 + (-sum).exp());
                want.push(match act {
                    0 => sum * sigmoid,
                    4 => sigmoid,
                    _ => sum,
                });
                // The slope of either activation is below 1.1.
                size.push(1.1 * (taps + 1) as f64 * U * s + 12.0 * U * sum.abs().max(1.0));
            }
        }
        close("short conv", &y, &want, |i| size[i]);
        let keep = rows.len() - past * cols;
        let mut after = before.clone();
        after[2 * past * cols..3 * past * cols].copy_from_slice(&rows[keep..]);
        assert_eq!(state, after);
        for chunks in [&[1; 13][..], &[2, 5, 1, 5], &[12, 1]] {
            assert_eq!(run(chunks), (y.clone(), state.clone()), "{chunks:?}");
        }
    }
}

#[test]
fn gated_delta_is_within_its_bound_at_every_wave_size() {
    for wave in WAVES {
        for (heads, shared_by, d_k, d_v, split, threads) in [
            (2usize, 1usize, 16usize, 16usize, 1u32, 64u32),
            (4, 2, 32, 24, 1, 64),
            (3, 3, 8, 40, 4, 64),
            (2, 1, 128, 20, 4, 64),
            (1, 1, 200, 9, 8, 64),
        ] {
            let random = &mut Random(d_k as u64);
            let (n, key_heads) = (6, heads / shared_by);
            let [q, k] = [0, 1].map(|_| random.floats(n * key_heads * d_k, 1.0));
            let v = random.floats(n * heads * d_v, 1.0);
            let decay: Vec<f32> = random.floats(n * heads, 0.5).iter().map(|g| -g.abs()).collect();
            let beta = random.floats(n * heads, 0.4);
            let each = heads * d_k * d_v;
            let before = random.floats(3 * each, 0.3);
            let eps = 1e-6f32;
            let mut device = Device::default();
            let [pq, pk, pv, pdecay, pbeta] = [&q, &k, &v, &decay, &beta].map(|x| device.floats(x));
            // Two tokens in slot 2, four in slot 0, then a sequence that is not there.
            let (slots, offsets) = (device.words(&[2, 0, 77]), device.words(&[0, 2, n as u32, n as u32]));
            let (state, y) = (device.state(&before), device.out(n * heads * d_v));
            let args = GatedDelta {
                q: pq,
                k: pk,
                v: pv,
                decay: pdecay,
                beta: pbeta,
                slots,
                offsets,
                state,
                y,
                heads: heads as u32,
                shared_by: shared_by as u32,
                d_k: d_k as u32,
                d_v: d_v as u32,
                slot_stride: each as u32,
                eps,
            };
            let columns = (threads / split) as usize;
            let groups = [d_v.div_ceil(columns) as u32, heads as u32, 3];
            device.run(&args, &[("THREADS", threads), ("WAVE", wave), ("SPLIT", split)], groups);
            let mut s: Vec<f64> = before.iter().map(|x| f64::from(*x)).collect();
            let mut want = Vec::new();
            for t in 0..n {
                let slot = if t < 2 { 2 } else { 0 };
                for h in 0..heads {
                    let unit = |x: &[f32]| {
                        let x = &x[t * key_heads * d_k + h / shared_by * d_k..][..d_k];
                        let sum = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() + f64::from(eps);
                        x.iter().map(|x| f64::from(*x) / sum.sqrt()).collect::<Vec<_>>()
                    };
                    let (q, k) = (unit(&q), unit(&k));
                    let keep = f64::from(decay[t * heads + h]).exp();
                    let s = &mut s[slot * each + h * d_k * d_v..][..d_k * d_v];
                    for j in 0..d_v {
                        (0..d_k).for_each(|i| s[i * d_v + j] *= keep);
                        let seen: f64 = (0..d_k).map(|i| k[i] * s[i * d_v + j]).sum();
                        let u = f64::from(beta[t * heads + h]) * (f64::from(v[(t * heads + h) * d_v + j]) - seen);
                        (0..d_k).for_each(|i| s[i * d_v + j] += k[i] * u);
                        want.push((0..d_k).map(|i| q[i] * s[i * d_v + j]).sum());
                    }
                }
            }
            // Numbers of about 1, n steps, sums of d_k terms whose sizes add up to sqrt(d_k) at most.
            let bound = (n as f64 + 1.0) * (d_k as f64 + 20.0) * U * (d_k as f64).sqrt().max(2.0);
            close(&format!("wave {wave}, {d_k} x {d_v}"), &device.0.f32s(y), &want, |_| bound);
            close("state", &device.0.f32s(state), &s, |_| bound);
        }
    }
}
