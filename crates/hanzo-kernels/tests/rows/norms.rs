//! Norms, and their rows quantized as they are written.

use super::{Device, Random, U, WAVES, close, planes_are};
use hanzo_kernels::args::{LayerNorm, RmsNorm};

/// Rows of the kinds that norms get wrong: usual, large, tiny, zero, one outlier, far from zero mean.
fn rows(cols: usize, n: usize, random: &mut Random) -> Vec<f32> {
    let mut x = Vec::new();
    for i in 0..n {
        let mut row = random.floats(cols, [1.0, 1e4, 1e-15, 0.0, 0.05, 1.0][i % 6]);
        match i % 6 {
            4 => row[cols / 2] = 300.0,
            5 => row.iter_mut().for_each(|x| *x += 100.0),
            _ => {}
        }
        x.extend(row);
    }
    x
}

/// A thread adds `n / threads` squares; a wave is added up twice, each lane taking its share of the waves before the
/// second time; the root halves what came before.
fn bound(n: usize, threads: u32, wave: u32) -> f64 {
    let shared = (threads / wave).div_ceil(wave);
    let adds = n.div_ceil(threads as usize) + (2 * wave.ilog2() + shared) as usize + 4;
    (adds as f64 / 2.0 + 7.0) * U
}

fn rms(x: &[f32], weight: Option<&[f32]>, group: usize, eps: f32) -> Vec<f64> {
    let run = |x: &[f32]| {
        let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / group as f64;
        let f = 1.0 / (mean + f64::from(eps)).sqrt();
        let w = |i: usize| weight.map_or(1.0, |w| f64::from(w[i]));
        x.iter().enumerate().map(|(i, x)| f64::from(*x) * f * w(i)).collect::<Vec<_>>()
    };
    x.chunks(group).flat_map(run).collect()
}

struct Case {
    cols: usize,
    group: usize,
    threads: u32,
    wave: u32,
    quant: u32,
    add: bool,
    weighted: bool,
}

fn check(case: &Case) {
    let Case { cols, group, threads, wave, quant, add, weighted } = *case;
    let (n, live) = (7, 6);
    let random = &mut Random(cols as u64 + 7 * u64::from(wave));
    let (x, y, w) = (rows(cols, n, random), rows(cols, n, random), random.floats(group, 1.0));
    let mut device = Device::default();
    let (a, b, weight) = (device.floats(&x), device.floats(&y), device.floats(&w));
    let (sum, out, live_at) = (device.out(n * cols), device.out(n * cols), device.words(&[live as u32]));
    let (yq, yd, ys) = (device.out(n * cols / 4), device.out(n * cols / 32), device.out(n * cols / 32));
    let eps = 1e-6;
    let runs = cols / group;
    let args = RmsNorm {
        a,
        b,
        weight,
        live: live_at,
        sum,
        y: out,
        yq,
        yd,
        ys,
        group: group as u32,
        runs: runs as u32,
        inverse: 1.0 / group as f32,
        eps,
    };
    let set = [
        ("THREADS", threads),
        ("WAVE", wave),
        ("ADD", add.into()),
        ("WEIGHTED", weighted.into()),
        ("VEC", (group % 4 == 0).into()),
        ("QUANT", quant),
    ];
    device.run(&args, &set, [runs as u32, n as u32, 1]);
    let total: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
    let source = if add { &total } else { &x };
    let used = live * cols;
    if add {
        assert_eq!(device.0.f32s(sum)[..used], source[..used]);
    }
    let want = rms(&source[..used], weighted.then_some(&w), group, eps);
    let limit = bound(group, threads, wave);
    let got = device.0.f32s(out);
    if quant != 1 {
        close(&format!("{cols} in {group}"), &got[..used], &want, |i| limit * want[i].abs() + 1e-44);
        assert!(got[used..].iter().all(|x| x.is_nan()), "a row that is not live was written");
    } else {
        assert!(got.iter().all(|x| x.is_nan()), "y was written");
    }
    if quant == 2 {
        planes_are(&device, [yq, yd, ys], &got[..used]);
    }
}

#[test]
fn rms_norm_is_within_its_bound_for_rows_and_heads_of_any_size() {
    for (i, wave) in WAVES.into_iter().enumerate() {
        for (cols, group, threads) in [(1, 1, 64), (33, 33, 64), (100, 100, 64), (1537, 1537, 256), (192, 64, 64)] {
            let (add, weighted) = (i % 2 == 0, i % 3 != 0);
            check(&Case { cols, group, threads: threads.max(wave), wave, quant: 0, add, weighted });
        }
        // More than the registers hold.
        check(&Case { cols: 2080, group: 2080, threads: 64, wave, quant: 0, add: true, weighted: true });
    }
}

#[test]
fn a_normed_row_is_quantized_by_the_exact_rule_as_it_is_written() {
    for wave in WAVES {
        for (cols, threads) in [(32, 64), (576, 64), (1024, 64), (4096, 1024)] {
            check(&Case { cols, group: cols, threads, wave, quant: 2, add: wave == 8, weighted: true });
        }
    }
    check(&Case { cols: 576, group: 576, threads: 256, wave: 32, quant: 1, add: true, weighted: true });
}

#[test]
fn layer_norm_is_within_its_bound() {
    for wave in WAVES {
        for (cols, threads, biased) in [(1, 64, true), (37, 64, false), (768, 256, true), (1100, 64, true)] {
            let n = 6;
            let random = &mut Random(cols as u64);
            let (x, w, b) = (rows(cols, n, random), random.floats(cols, 1.0), random.floats(cols, 1.0));
            let mut device = Device::default();
            let (px, weight, bias) = (device.floats(&x), device.floats(&w), device.floats(&b));
            let (live, y) = (device.words(&[n as u32]), device.out(n * cols));
            let eps = 1e-5f32;
            let args = LayerNorm { x: px, weight, bias, live, y, cols: cols as u32, eps };
            let set = [("THREADS", threads), ("WAVE", wave), ("BIASED", u32::from(biased))];
            device.run(&args, &set, [1, n as u32, 1]);
            let shared = (threads / wave).div_ceil(wave);
            let adds = (cols.div_ceil(threads as usize) + (2 * wave.ilog2() + shared) as usize + 4) as f64;
            for (row, got) in x.chunks(cols).zip(device.0.f32s(y).chunks(cols)) {
                let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / cols as f64;
                let size = row.iter().map(|x| f64::from(*x).abs()).sum::<f64>() / cols as f64;
                let var = row.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / cols as f64;
                let d = (var + f64::from(eps)).sqrt();
                let z: Vec<f64> = row.iter().map(|x| (f64::from(*x) - mean) / d).collect();
                let bias = |i: usize| if biased { f64::from(b[i]) } else { 0.0 };
                let want: Vec<f64> = z.iter().enumerate().map(|(i, z)| z * f64::from(w[i]) + bias(i)).collect();
                // The mean's error moves every element; relative to the deviation it may be large.
                close(&format!("{cols}"), got, &want, |i| {
                    let moved = (adds + 2.0) * U * size / d;
                    (moved * (1.0 + z[i].abs()) + ((adds + 2.0) / 2.0 + 8.0) * U * z[i].abs()) * f64::from(w[i].abs())
                        + U * want[i].abs()
                        + 1e-37
                });
            }
        }
    }
}
