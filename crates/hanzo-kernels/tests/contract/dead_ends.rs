//! The kernels of levers that are off by default. No other kernel's test may enter here.

use super::*;
use hanzo_kernels::args::MatvecRaw;

/// `[sum, normed]` of a row as the kernel makes them, in Rust: f64 sums, so within a few units in the last place.
fn normed(x: &[f32], other: &[f32], gain: &[f32]) -> [Vec<f32>; 2] {
    let sum: Vec<f32> = x.iter().zip(other).map(|(a, b)| a + b).collect();
    let squares: f64 = sum.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
    let factor = 1.0 / (squares / sum.len() as f64 + 1e-6).sqrt();
    let row = sum.iter().zip(gain).map(|(v, g)| (f64::from(*v) * factor * f64::from(*g)) as f32).collect();
    [sum, row]
}

/// One launch over one row; `y` and the sum that it keeps.
fn raw(ws: [&Matrix; 2], [x, other, gain, bias]: [&[f32]; 4], set: &[(&str, u32)]) -> (Vec<f32>, Vec<u8>, Vec<f32>) {
    let get = |name: &str, default: u32| set.iter().find(|c| c.0 == name).map_or(default, |c| c.1);
    let (rows, cols) = (ws[0].rows, ws[0].cols);
    let mut m = Memory::new();
    let groups = rows / 32;
    let planes = rows.next_multiple_of(64) + 2 * (4 * groups).next_multiple_of(64);
    let y = m.output(if get("QUANT", 0) == 1 { planes } else { 4 * rows });
    let sum = m.output(4 * cols);
    let args = MatvecRaw {
        w: ws[0].bind(&mut m),
        wu: ws[1].bind(&mut m),
        x: read_f32(&mut m, x),
        other: read_f32(&mut m, other),
        gain: read_f32(&mut m, gain),
        bias: read_f32(&mut m, bias),
        sum,
        y,
        rows: rows as u32,
        inverse: 1.0 / cols as f32,
        eps: 1e-6,
    };
    let span = get("THREADS", 512) / get("WAVE", 32) * get("ROWS", 1);
    launch(Some(ws[0].format), &mut m, &args, set, [(rows as u32).div_ceil(span), 1, 1]);
    (m.f32s(y), m.bytes(y).to_vec(), m.f32s(sum))
}

#[test]
fn a_row_quantized_in_each_workgroup_gives_f64s_product_of_the_same_codes() {
    for (i, format) in blocks().into_iter().enumerate() {
        let rng = &mut Rng(40 + u64::from(format.id()));
        let (rows, cols) = (37, some_cols(format)[i % 2]);
        let w = Matrix::new(format, 1, rows, cols, rng);
        let (x, bias) = (rng.floats(cols), rng.floats(rows));
        let acts = Acts::of(&x, cols);
        let wave = [8, 32, 64, 1][i % 4];
        let set = [
            ("WAVE", wave),
            ("THREADS", 64),
            ("LANES", if wave < 8 { 1 } else { 8 }),
            ("ROWS", 1 + i as u32 % 3),
            ("COLS", cols as u32),
            ("NORM", 0),
            ("BIAS", 1),
            ("GLU", 0),
            ("QUANT", 0),
        ];
        let (y, _, sum) = raw([&w, &w], [&x, &[], &[], &bias], &set);
        check(&w, &y, 1, Some(&bias), &format!("raw {format} {set:?}"), |_, row| {
            w.dot(0, row, &acts.row(0, cols), cols as f64 / 8.0)
        });
        assert!(sum.iter().all(|v| v.is_nan()), "nothing was added");
    }
}

#[test]
fn norm_glu_and_quantization_in_one_launch_meet_f64() {
    let rng = &mut Rng(41);
    for (format, rows, cols) in [(Format::Q4_K, 64, 768), (Format::Q6_K, 96, 256), (Format::Q4_0, 32, 2016)] {
        let (g, u) = (Matrix::new(format, 1, rows, cols, rng), Matrix::new(format, 1, rows, cols, rng));
        let (x, other, gain) = (rng.floats(cols), rng.floats(cols), rng.floats(cols));
        let [sum, row] = normed(&x, &other, &gain);
        let acts = Acts::of(&row, cols);
        // The norm moves an element by a few units in the last place, so a code may round the other way: by one.
        let (exact, widest) =
            (acts.row(0, cols), acts.d.iter().map(|d| f64::from(f32::from_bits(*d))).fold(0.0, f64::max));
        let dot = |w: &Matrix, r: usize| {
            let (v, e) = w.dot(0, r, &exact, cols as f64 / 8.0);
            let flips = exact.len() as f64 / 64.0;
            let top = w.row(0, r).iter().fold(0.0f64, |m, w| m.max(f64::from(w.abs())));
            (v, e + flips * widest * top + 8.0 * U * v.abs())
        };
        for (wave, threads, per_wave) in [(8, 128, 2), (32, 256, 4), (64, 64, 8)] {
            let mut floats = Vec::new();
            for quant in [0, 1] {
                let span = threads / wave * per_wave;
                if quant == 1 && span % 32 != 0 {
                    continue;
                }
                let set = [
                    ("WAVE", wave),
                    ("THREADS", threads),
                    ("ROWS", per_wave),
                    ("UNITS", 1),
                    ("COLS", cols as u32),
                    ("NORM", 2),
                    ("QUANT", quant),
                ];
                let (y, bytes, kept) = raw([&g, &u], [&x, &other, &gain, &[]], &set);
                let what = format!("{format} {set:?}");
                assert_eq!(kept, sum, "{what}");
                if quant == 0 {
                    floats = y;
                    check(&g, &floats, 1, None, &what, |_, r| silu_glu(dot(&g, r), dot(&u, r)));
                } else {
                    let want = Acts::of(&floats, rows);
                    let (d, s) = (rows.next_multiple_of(64), (4 * rows / 32usize).next_multiple_of(64));
                    let words = |at: usize| {
                        let words = bytes[at..at + rows / 8].chunks_exact(4);
                        words.map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect::<Vec<_>>()
                    };
                    let codes = bytes[..rows].iter().map(|c| *c as i8).collect();
                    assert_eq!(Acts { codes, d: words(d), sums: words(d + s) }, want, "{what}");
                }
            }
        }
    }
}
