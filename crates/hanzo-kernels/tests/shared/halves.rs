//! Rows as halves with a power of two each: what matrix units read. Exact: a product by a power of two, one product by a code, one rounding.

use super::{Device, Rng};
use half::f16;
use hanzo_kernels::args::{Q8ToHalf, RowsToHalf};

/// The power of two that brings `top` into [2^14, 2^15), as far as floats go; 1 for zero and for what is not finite.
pub fn power(top: f32) -> f32 {
    let exponent = (top.to_bits() >> 23 & 255) as i32;
    if top == 0.0 || exponent == 255 { 1.0 } else { 2f32.powi((14 + 127 - exponent.max(15)).min(126)) }
}

/// Rows of halves and their powers against what they should be; rows that do not count are left alone.
fn assert_rows((got, powers): (&[u32], &[f32]), want: &[(f32, Vec<f16>)], units: usize, live: usize) {
    for (r, (row, (power, halves))) in got.chunks(16 * units).zip(want).enumerate() {
        if r >= live {
            assert!(row.iter().all(|w| *w == !0) && powers[r].to_bits() == !0, "row {r} does not count");
            continue;
        }
        assert_eq!(powers[r], *power, "row {r}");
        let got: Vec<u16> = row.iter().flat_map(|w| [*w as u16, (w >> 16) as u16]).collect();
        assert_eq!(got, halves.iter().map(|h| h.to_bits()).collect::<Vec<_>>(), "row {r}");
    }
}

pub fn q8_to_half(gpu: &mut impl Device) {
    let rng = &mut Rng(1);
    for units in [1usize, 3, 41] {
        let (rows, live) = (5, 4);
        let codes: Vec<u8> = (0..rows * units * 32).map(|_| rng.bits() as u8).collect();
        // Rows of very different sizes, and one of zeros.
        let size = |r: usize| [1.0, 1e-30, 1e30, 0.0, 1.0][r];
        let scales: Vec<f32> = (0..rows * units).map(|i| (rng.unit() * size(i / units)) as f32).collect();
        let (xq, xd) = (gpu.bytes(&codes), gpu.floats(&scales));
        let (xh, xscale, n) = (gpu.out(rows * units * 16), gpu.out(rows), gpu.words(&[live as u32]));
        let args = Q8ToHalf { xq, xd, xh, xscale, live: n, units: units as u32 };
        gpu.launch(None, &args, &[], [rows as u32, 1, 1]);
        let want = |r: usize| {
            let d = &scales[r * units..][..units];
            let power = power(127.0 * d.iter().copied().fold(0.0, f32::max));
            let codes = codes[r * units * 32..][..units * 32].iter().enumerate();
            (power, codes.map(|(i, c)| f16::from_f32(d[i / 32] * power * f32::from(c.cast_signed()))).collect())
        };
        let want: Vec<_> = (0..rows).map(want).collect();
        assert_rows((&gpu.words_at(xh), &gpu.floats_at(xscale)), &want, units, live);
    }
}

pub fn rows_to_half(gpu: &mut impl Device) {
    let rng = &mut Rng(1);
    for cols in [1usize, 32, 71, 1300] {
        let (rows, live, units) = (6, 5, cols.div_ceil(32));
        let size = |r: usize| [1.0, 1e-30, 1e30, 0.0, 1.0, 1.0][r];
        let mut x: Vec<f32> = (0..rows * cols).map(|i| (rng.gauss() * size(i / cols)) as f32).collect();
        // Not finite: a power of 1, and halves that overflow as halves do.
        x[5 * cols - 1] = f32::NEG_INFINITY;
        let (px, n) = (gpu.floats(&x), gpu.words(&[live as u32]));
        let (xh, xscale) = (gpu.out(rows * units * 16), gpu.out(rows));
        let args = RowsToHalf { x: px, xh, xscale, live: n, cols: cols as u32, units: units as u32 };
        gpu.launch(None, &args, &[], [rows as u32, 1, 1]);
        let want = |row: &[f32]| {
            let power = power(row.iter().fold(0.0, |m: f32, x| m.max(x.abs())));
            let mut halves: Vec<f16> = row.iter().map(|x| f16::from_f32(x * power)).collect();
            halves.resize(32 * units, f16::ZERO);
            (power, halves)
        };
        let want: Vec<_> = x.chunks(cols).map(want).collect();
        assert_rows((&gpu.words_at(xh), &gpu.floats_at(xscale)), &want, units, live);
    }
}
