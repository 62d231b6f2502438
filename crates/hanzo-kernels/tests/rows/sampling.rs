//! What sampling on the device needs: the largest, the k largest, softmax.

use super::{Device, Random, U, WAVES, close};
use hanzo_kernels::args::{Argmax, Softmax, TopK};

fn argmax(x: &[f32], rows: usize) -> Vec<u32> {
    let n = x.len() / rows;
    let (slice, slices) = (100usize, n.div_ceil(100));
    let mut device = Device::default();
    let (px, none) = (device.floats(x), 0);
    let (best, index, answer) = (device.out(rows * slices), device.out(rows * slices), device.out(rows));
    let first =
        Argmax { x: px, from: none, best, index, n: n as u32, slice: slice as u32, slices: slices as u32, last: 0 };
    device.run(&first, &[("THREADS", 64)], [slices as u32, rows as u32, 1]);
    let all = slices as u32;
    let second = Argmax { x: best, from: index, best: none, index: answer, n: all, slice: all, slices: 1, last: 1 };
    device.run(&second, &[("THREADS", 64)], [1, rows as u32, 1]);
    device.0.u32s(answer)
}

#[test]
fn argmax_is_the_lowest_of_the_largest_and_never_a_nan() {
    let random = &mut Random(5);
    let (rows, n) = (4, 1037);
    let mut x = random.floats(rows * n, 3.0);
    x[700] = 50.0;
    x[300] = 50.0;
    x[299] = f32::NAN;
    x[n..2 * n].fill(f32::NEG_INFINITY);
    x[2 * n..3 * n].fill(f32::NAN);
    x[2 * n + 1036] = -3.0;
    let got = argmax(&x, rows);
    let last = (0..n).fold(0, |m, i| if x[3 * n + i] > x[3 * n + m] { i } else { m });
    assert_eq!(got, [300, 0, 1036, last as u32]);
}

#[test]
fn top_k_gives_the_largest_in_order_over_any_number_of_slices() {
    let random = &mut Random(6);
    let (rows, n, keep) = (2, 1500, 20);
    let mut x = random.floats(rows * n, 3.0);
    (0..rows * n).step_by(7).for_each(|i| x[i] = (x[i] * 2.0).round());
    x[17] = f32::NAN;
    let mut device = Device::default();
    let (mut values, mut index, mut left, mut first) = (device.floats(&x), 0, n, 1);
    loop {
        let slices = left.div_ceil(128);
        let (v, i) = (device.out(rows * slices * keep), device.out(rows * slices * keep));
        let args = TopK {
            x: values,
            from: index,
            values: v,
            index: i,
            n: left as u32,
            slices: slices as u32,
            keep: keep as u32,
        };
        device.run(&args, &[("THREADS", 64), ("SLICE", 128), ("FIRST", first)], [slices as u32, rows as u32, 1]);
        (values, index, left, first) = (v, i, slices * keep, 0);
        if slices == 1 {
            break;
        }
    }
    for r in 0..rows {
        let row: Vec<f32> =
            x[r * n..(r + 1) * n].iter().map(|x| if x.is_nan() { f32::NEG_INFINITY } else { *x }).collect();
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
        let ids: Vec<usize> = device.0.u32s(index)[r * keep..][..keep].iter().map(|i| *i as usize).collect();
        assert_eq!(ids, order[..keep]);
        assert_eq!(
            device.0.f32s(values)[r * keep..][..keep],
            order[..keep].iter().map(|i| row[*i]).collect::<Vec<_>>()
        );
    }
}

#[test]
fn softmax_is_within_its_bound_at_any_temperature() {
    for wave in WAVES {
        for (n, factor) in [(1usize, 1.0f32), (37, 0.7), (300, 1.4)] {
            let random = &mut Random(n as u64);
            let mut x = random.floats(3 * n, 8.0);
            x[n..2 * n].fill(f32::NEG_INFINITY);
            let mut device = Device::default();
            let (px, y) = (device.floats(&x), device.out(3 * n));
            device.run(&Softmax { x: px, y, n: n as u32, factor }, &[("THREADS", 64), ("WAVE", wave)], [3, 1, 1]);
            for (r, (row, got)) in x.chunks(n).zip(device.0.f32s(y).chunks(n)).enumerate() {
                if r == 1 {
                    assert!(got.iter().all(|x| *x == 0.0));
                    continue;
                }
                let top = f64::from(row.iter().copied().fold(f32::MIN, f32::max));
                let e: Vec<f64> = row.iter().map(|x| (f64::from(factor) * (f64::from(*x) - top)).exp()).collect();
                let sum: f64 = e.iter().sum();
                let want: Vec<f64> = e.iter().map(|e| e / sum).collect();
                // Two roundings of an exponent of at most 60, then the sum.
                close("softmax", got, &want, |i| (2.0 * 60.0 + 24.0 + n as f64 / 32.0) * 2.0 * U * want[i]);
            }
        }
    }
}
