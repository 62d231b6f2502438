//! What sampling on the device needs: the largest, the k largest, softmax.

use super::{Device, Rng};
use hanzo_kernels::args::{Argmax, Softmax, TopK};

/// Three kinds of rows: ties and a NaN in front of the largest, no number above minus infinity, and one number among NaNs.
fn rows(n: usize, rng: &mut Rng) -> Vec<f32> {
    let mut x = rng.floats(5 * n, 3.0);
    (0..n).step_by(7).for_each(|i| x[i] = (x[i] * 2.0).round());
    x[n - 2] = 50.0;
    x[300] = 50.0;
    x[299] = f32::NAN;
    x[n..2 * n].fill(f32::NEG_INFINITY);
    x[2 * n..3 * n].fill(f32::NAN);
    x[3 * n - 1] = -3.0;
    x[4 * n - 1] = f32::INFINITY;
    x
}

/// Indices of a row, best first, the lowest first among equals; NaNs as minus infinity.
fn order(row: &[f32]) -> Vec<u32> {
    let value = |i: &u32| Some(row[*i as usize]).filter(|x| !x.is_nan()).unwrap_or(f32::NEG_INFINITY);
    let mut order: Vec<u32> = (0..row.len() as u32).collect();
    // Zeros of either sign are equal.
    order.sort_by(|a, b| value(b).partial_cmp(&value(a)).expect("no NaN is left"));
    order
}

pub fn argmax(gpu: &mut impl Device) {
    // A vocabulary of odd size in slices that do not divide it, and more slices than threads.
    for (n, slice) in [(1037usize, 100usize), (4099, 33)] {
        let (x, slices) = (rows(n, &mut Rng(1)), n.div_ceil(slice));
        let (px, best, index, answer) = (gpu.floats(&x), gpu.out(5 * slices), gpu.out(5 * slices), gpu.out(5));
        let first =
            Argmax { x: px, from: 0, best, index, n: n as u32, slice: slice as u32, slices: slices as u32, last: 0 };
        gpu.launch(None, &first, &[("THREADS", 64)], [slices as u32, 5, 1]);
        let all = slices as u32;
        let second = Argmax { x: best, from: index, best: 0, index: answer, n: all, slice: all, slices: 1, last: 1 };
        gpu.launch(None, &second, &[("THREADS", 64)], [1, 5, 1]);
        let want: Vec<u32> = x.chunks(n).map(|row| order(row)[0]).collect();
        assert_eq!(gpu.words_at(answer), want);
        assert_eq!((want[0], want[1], want[2]), (300, 0, n as u32 - 1));
    }
}

pub fn top_k(gpu: &mut impl Device) {
    for (n, keep) in [(1501usize, 20usize), (700, 1), (777, 64)] {
        let x = rows(n, &mut Rng(2));
        let mut values = gpu.floats(&x);
        let mut index = gpu.out(1);
        let (mut left, mut first) = (n, 1);
        loop {
            let slices = left.div_ceil(128);
            let (v, i) = (gpu.out(5 * slices * keep), gpu.out(5 * slices * keep));
            let args = TopK {
                x: values,
                from: index,
                values: v,
                index: i,
                n: left as u32,
                slices: slices as u32,
                keep: keep as u32,
            };
            gpu.launch(None, &args, &[("THREADS", 64), ("SLICE", 128), ("FIRST", first)], [slices as u32, 5, 1]);
            (values, index, left, first) = (v, i, slices * keep, 0);
            if slices == 1 {
                break;
            }
        }
        let (values, index) = (gpu.floats_at(values), gpu.words_at(index));
        for (r, row) in x.chunks(n).enumerate() {
            let want = &order(row)[..keep];
            assert_eq!(index[r * keep..][..keep], *want, "row {r} of {n}, {keep} kept");
            for (got, i) in values[r * keep..].iter().zip(want) {
                let x = row[*i as usize];
                assert_eq!(*got, if x.is_nan() { f32::NEG_INFINITY } else { x });
            }
        }
    }
}

pub fn softmax(gpu: &mut impl Device) {
    // u: half the distance of 1 to the next f32.
    const U: f64 = 1.0 / (1u64 << 24) as f64;
    for (n, factor) in [(1usize, 1.0f32), (37, 0.7), (300, 1.4), (5001, 1.0)] {
        let mut x = Rng(n as u64).floats(3 * n, 4.0);
        x.iter_mut().for_each(|x| *x = x.clamp(-20.0, 20.0));
        x[n..2 * n].fill(f32::NEG_INFINITY);
        let (px, y) = (gpu.floats(&x), gpu.out(3 * n));
        let args = Softmax { x: px, y, n: n as u32, factor };
        gpu.launch(None, &args, &[], [3, 1, 1]);
        for (r, (row, got)) in x.chunks(n).zip(gpu.floats_at(y).chunks(n)).enumerate() {
            if r == 1 {
                assert!(got.iter().all(|x| *x == 0.0), "a row of minus infinity");
                continue;
            }
            let top = f64::from(row.iter().copied().fold(f32::MIN, f32::max));
            let e: Vec<f64> = row.iter().map(|x| (f64::from(factor) * (f64::from(*x) - top)).exp()).collect();
            let sum: f64 = e.iter().sum();
            // Two roundings of an exponent of at most 60, two functions of 2 ulp, the sum (a thread's share, then a tree) and the quotient.
            let share = n as f64 / f64::from(gpu.wave());
            let bound = (2.0 * 60.0 + 24.0 + share) * 2.0 * U;
            for (i, (got, e)) in got.iter().zip(e).enumerate() {
                let (want, got) = (e / sum, f64::from(*got));
                assert!((got - want).abs() <= bound * want, "softmax {r}, {i} of {n}: {got:e}, want {want:e}");
            }
        }
    }
}
