//! Functions of single elements, moves, and the embedding of a float table.

use super::{Device, Random, U, close, planes_are};
use hanzo_kernels::args::{CopyRows, Elementwise, Glu};

const SHAPES: [(usize, usize); 4] = [(1, 1), (5, 37), (3, 64), (9, 100)];

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// erf by its series, or one less the continued fraction of erfc.
fn erf(x: f64) -> f64 {
    let a = x.abs();
    let y = if a < 3.0 {
        let (mut sum, mut term) = (a, a);
        for k in 1..100 {
            term *= -a * a / f64::from(k);
            sum += term / f64::from(2 * k + 1);
        }
        sum * 2.0 / std::f64::consts::PI.sqrt()
    } else {
        let f = (1..60).rev().fold(0.0, |f, k| f64::from(k) / 2.0 / (a + f));
        1.0 - (-a * a).exp() / (a + f) / std::f64::consts::PI.sqrt()
    };
    y.copysign(x)
}

/// An activation, and its bound: in units of u of the result, and absolute where that is its nature.
fn activation(kind: u32, x: f64) -> (f64, f64) {
    match kind {
        0 => (x * sigmoid(x), 10.0 * U * (x * sigmoid(x)).abs()),
        1 => {
            let z = 2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            (x * sigmoid(z), (6.0 * z.abs().min(90.0) + 10.0) * U * (x * sigmoid(z)).abs())
        }
        2 => (0.5 * x * (1.0 + erf(x * 0.5f64.sqrt())), 8.0 * U * x.abs()),
        3 => (x.max(0.0).powi(2), U * x * x),
        4 => (sigmoid(x), 8.0 * U * sigmoid(x)),
        _ => (x.max(0.0) + (-x.abs()).exp().ln_1p(), 10.0 * U * (x.max(0.0) + (-x.abs()).exp().ln_1p())),
    }
}

/// Usual numbers, then the far ends, zeros and small ones.
fn values(n: usize, random: &mut Random) -> Vec<f32> {
    const SPECIAL: [f32; 12] = [0.0, -0.0, 1e-8, -1e-8, 20.0, -20.0, 80.0, -80.0, 1e4, -1e4, 0.5, -1e-30];
    let mut x = random.floats(n, 3.0);
    for (to, s) in x.iter_mut().skip(3).step_by(3).zip(SPECIAL) {
        *to = s;
    }
    x
}

#[test]
fn every_element_wise_op_is_within_its_bound() {
    for kind in (0..6).chain(16..21) {
        for (rows, cols) in SHAPES {
            let random = &mut Random(u64::from(kind) + 1);
            let (x, z) = (values(rows * cols, random), random.floats(rows * cols, 3.0));
            let mut device = Device::default();
            let (a, b, y) = (device.floats(&x), device.floats(&z), device.out(rows * cols));
            let live = device.words(&[rows as u32]);
            let s = if kind == 17 { 30.0 } else { 0.3f32 };
            let vec = cols % 4 == 0;
            let groups = cols.div_ceil(if vec { 256 } else { 64 }) as u32;
            let args = Elementwise { a, b, live, y, cols: cols as u32, s };
            let set = [("THREADS", 64), ("KIND", kind), ("VEC", vec.into())];
            device.run(&args, &set, [groups, rows as u32, 1]);
            let s = f64::from(s);
            let both: Vec<(f64, f64)> = (x.iter().enumerate())
                .map(|(i, x)| {
                    let x = f64::from(*x);
                    let w = match kind {
                        16 => x * s,
                        17 => s * (x / s).tanh(),
                        18 => x + f64::from(z[i]),
                        19 => x * f64::from(z[i]),
                        20 => x * f64::from(z[i / cols]),
                        _ => return activation(kind, x),
                    };
                    (w, if kind == 17 { 8.0 } else { 1.0 } * U * w.abs())
                })
                .collect();
            let want: Vec<f64> = both.iter().map(|b| b.0).collect();
            close(&format!("kind {kind}"), &device.0.f32s(y), &want, |i| both[i].1 + 1e-37);
        }
    }
}

#[test]
fn glu_is_within_its_bound_and_quantized_by_the_exact_rule() {
    for (kind, wave) in [(0, 1), (1, 8), (2, 32), (3, 64), (4, 8), (5, 32), (6, 32), (6, 1)] {
        for (rows, cols, quant) in [(1, 1, 0), (5, 37, 0), (3, 64, 2), (9, 160, 2), (2, 1056, 2)] {
            let random = &mut Random(u64::from(kind) + 11);
            let (g, u) = (values(rows * cols, random), random.floats(rows * cols, 9.0));
            let mut device = Device::default();
            let (gate, up, y) = (device.floats(&g), device.floats(&u), device.out(rows * cols));
            let live = device.words(&[rows as u32]);
            let planes = [4, 32, 32].map(|per| device.out(rows * cols / per));
            let [yq, yd, ys] = planes;
            let vec = cols % 4 == 0;
            let groups = cols.div_ceil(if vec { 256 } else { 64 }) as u32;
            let (alpha, limit) = (1.702f32, 7.0f32);
            let args = Glu { gate, up, live, y, yq, yd, ys, cols: cols as u32, alpha, limit };
            let set = [("THREADS", 64), ("WAVE", wave), ("KIND", kind), ("VEC", vec.into()), ("QUANT", quant)];
            device.run(&args, &set, [groups, rows as u32, 1]);
            let both: Vec<(f64, f64)> = (g.iter().zip(&u))
                .map(|(g, u)| {
                    let (g, u) = (f64::from(*g), f64::from(*u));
                    if kind < 6 {
                        let (a, e) = activation(kind, g);
                        return (a * u, e * u.abs() + U * (a * u).abs());
                    }
                    let (g, u) = (g.min(f64::from(limit)), u.clamp(-f64::from(limit), f64::from(limit)));
                    let z = f64::from(alpha) * g;
                    let w = (u + 1.0) * g * sigmoid(z);
                    (w, (12.0 + z.abs().min(90.0)) * U * (w.abs() + (g * sigmoid(z)).abs()))
                })
                .collect();
            let got = device.0.f32s(y);
            let want: Vec<f64> = both.iter().map(|b| b.0).collect();
            close(&format!("kind {kind}"), &got, &want, |i| both[i].1 + 1e-36);
            if quant == 2 {
                planes_are(&device, planes, &got);
            }
        }
    }
}

#[test]
fn columns_concat_and_gather_move_bits() {
    for (rows, cols) in SHAPES {
        let bits: Vec<u32> = (0..(rows * cols) as u32).map(|i| i.wrapping_mul(0x9e37_79b1) | 0x7f80_0000).collect();
        let more: Vec<u32> = (0..(rows * 8) as u32).collect();
        for (join, gather, first, cols_b) in
            [(0, 0, 0, 0), (0, 0, cols / 3, 0), (0, 0, cols - 1, 0), (1, 0, 0, 5), (1, 0, 0, 8), (0, 1, 0, 0)]
        {
            let taken = cols - first;
            let ids: Vec<u32> = (0..rows as u32).rev().collect();
            let mut device = Device::default();
            let (a, b, live) = (device.words(&bits), device.words(&more), device.words(&[rows as u32]));
            let (out_rows, y) = (device.words(&ids), device.out(rows * (taken + cols_b)));
            let vec = [cols, first, taken, cols_b].iter().all(|n| n % 4 == 0);
            let args = CopyRows {
                a,
                b,
                live,
                out_rows,
                y,
                cols_a: taken as u32,
                cols_b: cols_b as u32,
                stride: cols as u32,
                first: first as u32,
            };
            let groups = (taken + cols_b).div_ceil(if vec { 256 } else { 64 }) as u32;
            let set = [("THREADS", 64), ("JOIN", join), ("GATHER", gather), ("VEC", vec.into())];
            device.run(&args, &set, [groups, rows as u32, 1]);
            let row = |r: usize| {
                let from = if gather == 1 { ids[r] as usize } else { r };
                let a = bits[from * cols + first..(from + 1) * cols].iter();
                a.chain(&more[r * cols_b..(r + 1) * cols_b]).copied().collect::<Vec<_>>()
            };
            assert_eq!(device.0.u32s(y), (0..rows).flat_map(row).collect::<Vec<_>>());
        }
    }
}
