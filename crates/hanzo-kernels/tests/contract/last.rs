//! What workgroups of a mat-vec do besides, the last one or each: the same bits as the launches that it stands for, whichever
//! workgroup is the last (the harness runs several orders), and a counter left as it was.

use super::{Acts, Matrix, NONE, Rng, launch, read_f32, read_u32};
use hanzo_gguf::Format;
use hanzo_kernels::args::{
    GluMatvec, GluRouted, Matvec, MatvecF32, MatvecGroup, MatvecNorm, MoeDown, MoeRoute, RmsNorm, RouterSelect,
};
use hanzo_kernels::host::Memory;

/// Words of a buffer.
fn words(m: &Memory, address: u64) -> Vec<u32> {
    m.u32s(address)
}

struct Norm {
    format: Format,
    rows: usize,
    /// Of a token; 0: one matrix.
    slots: usize,
    wave: u32,
    threads: u32,
    per_wave: u32,
    split: u32,
    quant: u32,
    weighted: bool,
}

/// `sum`, `y` and the planes (codes, scales, sums) of the launches that one stands for, and of the one.
fn both_ways(c: &Norm, rng: &mut Rng) -> [[Vec<u32>; 5]; 2] {
    let (experts, cols) = (if c.slots > 0 { 4 } else { 1 }, c.format.block_len().max(64));
    let n = c.slots.max(1);
    let w = Matrix::new(c.format, experts, c.rows, cols, rng);
    let (x, bias, residual) = (rng.floats(n * cols), rng.floats(experts * c.rows), rng.floats(c.rows));
    let (gain, shares) = (rng.floats(c.rows), rng.floats(n));
    let ids: Vec<u32> = (0..n).map(|_| rng.below(experts) as u32).collect();
    let acts = Acts::of(&x, cols);
    let (rows, units, groups) = (c.rows as u32, w.units(), c.rows / 32);
    let (eps, inverse) = (1e-6f32, 1.0 / c.rows as f32);

    // The launches apart.
    let mut m = Memory::new();
    let [xq, xd, xs] = acts.bind(&mut m);
    let (wt, bias_at, live) = (w.bind(&mut m), read_f32(&mut m, &bias), read_u32(&mut m, &[1]));
    let made = m.output(4 * c.rows);
    let mut set = vec![("WAVE", c.wave), ("BIAS", 1), ("UNITS", 2)];
    let grid = [rows.div_ceil(128 / c.wave / c.split), 1, 1];
    if c.slots == 0 {
        set.push(("SPLIT", c.split));
        let (bias, y, ids) = (bias_at, made, NONE);
        let args = Matvec { w: wt, xq, xd, xs, bias, y, live, ids, rows, units, div: 1, bias_stride: 0 };
        launch(Some(c.format), &mut m, &args, &set, grid);
    } else {
        let (ids, weights) = (read_u32(&mut m, &ids), read_f32(&mut m, &shares));
        let (bias, y, slots, bias_stride) = (bias_at, made, c.slots as u32, rows);
        let args = MoeDown { w: wt, xq, xd, xs, bias, ids, weights, y, live, rows, units, slots, bias_stride };
        launch(Some(c.format), &mut m, &args, &set, grid);
    }
    let made = m.f32s(made);
    let b = read_f32(&mut m, &made);
    let (sum, y) = (m.output(4 * c.rows), m.output(4 * c.rows));
    let (yq, yd, ys) = (m.output(c.rows), m.output(4 * groups), m.output(4 * groups));
    let (a, weight) = (read_f32(&mut m, &residual), read_f32(&mut m, &gain));
    let args = RmsNorm { a, b, weight, live, sum, y, yq, yd, ys, group: rows, runs: 1, inverse, eps };
    let set = [
        ("WAVE", c.wave),
        ("THREADS", c.threads),
        ("ADD", 1),
        ("WEIGHTED", c.weighted.into()),
        ("QUANT", c.quant),
        ("MASK", 0),
    ];
    launch(None, &mut m, &args, &set, [1, 1, 1]);
    let apart = [sum, y, yq, yd, ys].map(|p| words(&m, p));

    // In one.
    let mut m = Memory::new();
    let pad = |bytes: &mut Vec<u8>| bytes.resize(bytes.len().next_multiple_of(64), 0);
    let mut planes: Vec<u8> = acts.codes.iter().map(|c| *c as u8).collect();
    pad(&mut planes);
    let xd = planes.len() as u32 / 4;
    planes.extend(acts.d.iter().flat_map(|d| d.to_le_bytes()));
    pad(&mut planes);
    let xs = planes.len() as u32 / 4;
    planes.extend(acts.sums.iter().flat_map(|s| s.to_le_bytes()));
    let (yd, room) = (c.rows.next_multiple_of(64) / 4, (4 * groups).next_multiple_of(64));
    let args = MatvecNorm {
        w: w.bind(&mut m),
        x: m.read(&planes),
        bias: read_f32(&mut m, &bias),
        ids: read_u32(&mut m, &ids),
        weights: read_f32(&mut m, &shares),
        a: read_f32(&mut m, &residual),
        gain: read_f32(&mut m, &gain),
        sum: m.output(4 * c.rows),
        passed: m.output(4 * c.rows),
        count: m.write(&[0; 4]),
        y: m.output(4 * c.rows),
        yq: m.output(4 * yd + 2 * room),
        rows,
        units,
    };
    let set = [
        ("WAVE", c.wave),
        ("THREADS", c.threads),
        ("ROWS", c.per_wave),
        ("SPLIT", c.split),
        ("SLOTS", c.slots as u32),
        ("BIAS", 1),
        ("WEIGHTED", c.weighted.into()),
        ("QUANT", c.quant),
        ("XD", xd),
        ("XS", xs),
        ("YD", yd as u32),
        ("YS", (yd + room / 4) as u32),
        ("INVERSE", inverse.to_bits()),
        ("EPS", eps.to_bits()),
    ];
    // Twice: the first launch has to leave the counter as it found it.
    for _ in 0..2 {
        launch(Some(c.format), &mut m, &args, &set, [rows.div_ceil(c.threads / c.wave / c.split * c.per_wave), 1, 1]);
        assert_eq!(words(&m, args.count), [0]);
    }
    let all = words(&m, args.yq);
    let plane = |from: usize, n: usize| all[from..from + n].to_vec();
    let planes = [plane(0, c.rows / 4), plane(yd, groups), plane(yd + room / 4, groups)];
    let [q, d, s] = planes;
    [apart, [words(&m, args.sum), words(&m, args.y), q, d, s]]
}

#[test]
fn a_row_is_normed_by_the_last_workgroup_as_by_a_launch_of_its_own() {
    let rng = &mut Rng(11);
    for (i, wave) in [1, 8, 32, 64].into_iter().enumerate() {
        for (format, rows, slots, threads, per_wave, split, quant) in [
            (Format::Q4_K, 64, 0, 128, 1, 2, 1),
            (Format::Q6_K, 160, 3, 128, 2, 1, 2),
            (Format::Q4_0, 36, 2, 64, 1, 1, 0),
            (Format::IQ3_XXS, 288, 0, 128, 2, 2, 2),
        ] {
            let weighted = (i + slots) % 2 == 0;
            let c = Norm { format, rows, slots, wave, threads, per_wave, split, quant, weighted };
            let [apart, one] = both_ways(&c, rng);
            for (what, (a, b)) in ["sum", "y", "codes", "scales", "sums"].iter().zip(apart.iter().zip(&one)) {
                assert_eq!(a, b, "{what} of {format} {rows} rows, {slots} slots, wave {wave}, quant {quant}");
            }
        }
    }
}

#[test]
fn experts_are_selected_by_the_last_workgroup_as_by_a_launch_of_its_own() {
    let rng = &mut Rng(12);
    for wave in [1, 8, 32, 64] {
        for (format, n, cols, split, top, score) in [
            (Format::F32, 8, 64, 1, 2, 0),
            (Format::BF16, 33, 40, 1, 4, 1),
            (Format::F16, 130, 160, 2, 8, 2),
            (Format::F32, 40, 300, 1, 40, 0),
        ] {
            let threads = 128;
            let split: u32 = if threads / wave >= split { split } else { 1 };
            let w = Matrix::new(format, 1, n, cols, rng);
            let (x, added, bias) = (rng.floats(cols), rng.floats(n), rng.floats(n));
            let (cols, units) = (cols as u32, w.units());
            let mut m = Memory::new();
            let (added, bias) = (read_f32(&mut m, &added), read_f32(&mut m, &bias));
            let (x, live) = (read_f32(&mut m, &x), read_u32(&mut m, &[1]));
            let wt = w.bind(&mut m);
            let y = m.output(4 * n);
            let set = [
                ("WAVE", wave),
                ("THREADS", threads),
                ("SPLIT", split),
                ("WHOLE", u32::from(cols % 32 == 0)),
                ("BIAS", 1),
            ];
            let grid = [(n as u32).div_ceil(threads / wave / split), 1, 1];
            let (rows, ids) = (n as u32, NONE);
            let args = MatvecF32 { w: wt, x, bias: added, y, live, ids, rows, units, cols, div: 1, bias_stride: 0 };
            launch(Some(format), &mut m, &args, &set, grid);
            let made = m.f32s(y);
            let logits = read_f32(&mut m, &made);
            let routing = [
                ("WAVE", wave),
                ("THREADS", threads),
                ("SCORE", score),
                ("EXPERTS", n as u32),
                ("TOP", top),
                ("BIASED", 1),
            ];
            let (ids, y) = (m.output(4 * top as usize), m.output(4 * top as usize));
            launch(None, &mut m, &MoeRoute { x: logits, bias, live, ids, y, scale: 1.5 }, &routing, [1, 1, 1]);
            let want = (words(&m, ids), words(&m, y));

            let args = RouterSelect {
                w: wt,
                x,
                added,
                logits: m.output(4 * n),
                count: m.write(&[0; 4]),
                bias,
                ids: m.output(4 * top as usize),
                y: m.output(4 * top as usize),
                units,
                cols,
                scale: 1.5,
            };
            let mut all = routing.to_vec();
            all.extend([("SPLIT", split), ("WHOLE", u32::from(cols % 32 == 0)), ("ADDED", 1)]);
            for _ in 0..2 {
                launch(Some(format), &mut m, &args, &all, grid);
                assert_eq!(words(&m, args.count), [0]);
            }
            assert_eq!((words(&m, args.ids), words(&m, args.y)), want, "{format}, {n} experts, wave {wave}");
            assert_eq!(m.f32s(args.logits), made);
        }
    }
}

#[test]
fn a_glu_that_routes_writes_what_a_routing_and_a_glu_do() {
    let rng = &mut Rng(13);
    for wave in [1u32, 8, 32, 64] {
        for (format, experts, top, score, quant, per_wave) in [
            (Format::Q4_K, 5, 2, 0, 1, 1),
            (Format::Q6_K, 33, 4, 2, 0, 2),
            (Format::IQ3_XXS, 3, 3, 1, 1, 2),
            (Format::Q4_0, 130, 1, 0, 0, 1),
        ] {
            let (threads, rows, cols) = (128u32, 64usize, format.block_len().max(64));
            let repeat = if quant == 1 { (32 * wave).div_ceil(threads * per_wave) } else { 1 };
            let [g, u] = [0; 2].map(|_| Matrix::new(format, experts, rows, cols, rng));
            let acts = Acts::of(&rng.floats(cols), cols);
            let logits = rng.floats(experts);
            let k = top as usize;
            let (codes, groups) = ((k * rows).next_multiple_of(64), k * rows / 32);
            let room = if quant == 1 { codes + 2 * (4 * groups).next_multiple_of(64) } else { 4 * k * rows };
            let mut m = Memory::new();
            let [xq, xd, xs] = acts.bind(&mut m);
            let (wg, wu, logits) = (g.bind(&mut m), u.bind(&mut m), read_f32(&mut m, &logits));
            let routing =
                [("WAVE", wave), ("THREADS", threads), ("SCORE", score), ("EXPERTS", experts as u32), ("TOP", top)];
            let [ids, y] = [0; 2].map(|_| m.output(4 * k));
            let live = read_u32(&mut m, &[1]);
            launch(None, &mut m, &MoeRoute { x: logits, bias: NONE, live, ids, y, scale: 1.5 }, &routing, [1, 1, 1]);
            let (chosen, shares) = (words(&m, ids), words(&m, y));
            let (ids, live) = (read_u32(&mut m, &chosen), read_u32(&mut m, &[top]));
            let (rows, units) = (rows as u32, g.units());
            let made = m.output(room);
            let shape =
                [("WAVE", wave), ("THREADS", threads), ("ROWS", per_wave), ("REPEAT", repeat), ("QUANT", quant)];
            let mut set = shape.to_vec();
            set.push(("MOE", 1));
            let grid = [rows.div_ceil(threads / wave * per_wave * repeat), top, 1];
            let args = GluMatvec { wg, wu, xq, xd, xs, y: made, live, ids, rows, units, div: top, capacity: top };
            launch(Some(format), &mut m, &args, &set, grid);
            let want = (chosen, shares, words(&m, made));

            let (ids, weights, y) = (m.output(4 * k), m.output(4 * k), m.output(room));
            let args = GluRouted { wg, wu, xq, xd, xs, logits, y, ids, weights, rows, units };
            let mut set = shape.to_vec();
            set.extend([&routing[2..], &[("SCALE", 1.5f32.to_bits())]].concat());
            launch(Some(format), &mut m, &args, &set, grid);
            let got = (words(&m, ids), words(&m, weights), words(&m, y));
            assert_eq!(got, want, "{format}, {experts} experts, wave {wave}, quant {quant}");
        }
    }
}

#[test]
fn matrices_of_one_launch_are_each_multiplied_as_by_a_launch_of_its_own() {
    let rng = &mut Rng(14);
    for wave in [1u32, 8, 32, 64] {
        for (format, rows, per_wave, split, repeat) in [
            (Format::Q4_K, [70, 9, 33], 1, 1, 1),
            (Format::IQ2_S, [40, 40, 3], 2, 1, 2),
            (Format::Q6_K, [64, 1, 0], 1, 2, 1),
        ] {
            let (threads, cols) = (128, 2 * format.block_len().max(64));
            let split = if threads / wave >= split { split } else { 1 };
            let members = rows.iter().filter(|r| **r > 0).count();
            let ws: Vec<Matrix> = rows.iter().map(|r| Matrix::new(format, 1, (*r).max(1), cols, rng)).collect();
            let acts = Acts::of(&rng.floats(cols), cols);
            let mut m = Memory::new();
            let [xq, xd, xs] = acts.bind(&mut m);
            let (live, at) = (read_u32(&mut m, &[1]), [0, 1, 2].map(|i| ws[i].bind(&mut m)));
            let (units, span) = (ws[0].units(), threads / wave / split * per_wave * repeat);
            let shape =
                [("WAVE", wave), ("THREADS", threads), ("ROWS", per_wave), ("SPLIT", split), ("REPEAT", repeat)];
            let mut want = Vec::new();
            for i in 0..members {
                let (y, rows) = (m.output(4 * rows[i]), rows[i] as u32);
                let (w, bias, ids) = (at[i], NONE, NONE);
                let args = Matvec { w, xq, xd, xs, bias, y, live, ids, rows, units, div: 1, bias_stride: 0 };
                launch(Some(format), &mut m, &args, &shape, [rows.div_ceil(span), 1, 1]);
                want.push(words(&m, y));
            }
            let mut planes: Vec<u8> = acts.codes.iter().map(|c| *c as u8).collect();
            let begin = |planes: &mut Vec<u8>| {
                planes.resize(planes.len().next_multiple_of(64), 0);
                planes.len() as u32 / 16
            };
            let d = begin(&mut planes);
            planes.extend(acts.d.iter().flat_map(|d| d.to_le_bytes()));
            let s = begin(&mut planes);
            planes.extend(acts.sums.iter().flat_map(|s| s.to_le_bytes()));
            let ys = [0, 1, 2].map(|i| if i < members { m.output(4 * rows[i]) } else { NONE });
            let x = m.read(&planes);
            let args = MatvecGroup { w0: at[0], w1: at[1], w2: at[2], x, y0: ys[0], y1: ys[1], y2: ys[2] };
            let rows = rows.map(|r| r as u32);
            let own = [("ROWS0", rows[0]), ("ROWS1", rows[1]), ("ROWS2", rows[2]), ("XD", d), ("XS", s)];
            let set = [&shape[..], &own, &[("MEMBERS", members as u32), ("COUNT", units)]].concat();
            let groups = rows.iter().map(|r| r.div_ceil(span)).sum();
            launch(Some(format), &mut m, &args, &set, [groups, 1, 1]);
            let got: Vec<Vec<u32>> = ys[..members].iter().map(|y| words(&m, *y)).collect();
            assert_eq!(got, want, "{format}, wave {wave}");
        }
    }
}
