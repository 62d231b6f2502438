//! Kernels that read memory for the sake of reading it.

use super::{Device, Rng};
use hanzo_kernels::args::{Fill, Prefetch, ReadRoof};

/// Exactly the words that are counted.
pub fn fill(gpu: &mut impl Device) {
    let y = gpu.out(1001);
    gpu.launch(None, &Fill { y, value: 42, count: 999 }, &[], [4, 1, 1]);
    let want: Vec<u32> = (0..1001).map(|i| if i < 999 { 42 } else { !0 }).collect();
    assert_eq!(gpu.words_at(y), want);
}

pub fn read_roof(gpu: &mut impl Device) {
    let rng = &mut Rng(1);
    // 16-byte words: less than a workgroup takes, odd, and several workgroups with an end in the middle of one.
    for (n, units, loops) in [(256usize, 4usize, 1usize), (1003, 4, 2), (9999, 16, 1), (5000, 1, 3)] {
        let data: Vec<u32> = (0..4 * n).map(|_| rng.bits() as u32).collect();
        let (threads, x) = (256, gpu.words(&data));
        let groups = n.div_ceil(threads * units * loops);
        let y = gpu.out(groups * threads);
        let args = ReadRoof { x, y, words: n as u32 };
        let set = [("UNITS", units as u32), ("LOOPS", loops as u32)];
        gpu.launch(None, &args, &set, [groups as u32, 1, 1]);
        let took = |group: usize, thread: usize| -> u32 {
            let steps = (0..loops).flat_map(|i| (0..units).map(move |k| ((group * loops + i) * units + k) * threads));
            let at = steps.map(|at| at + thread).filter(|at| *at < n);
            at.flat_map(|at| &data[4 * at..4 * at + 4]).fold(0, |s, w| s ^ w)
        };
        let want: Vec<u32> =
            (0..groups).flat_map(|g| (0..threads).map(move |t| (g, t))).map(|(g, t)| took(g, t)).collect();
        assert_eq!(gpu.words_at(y), want, "{n} words, {units} at once, {loops} times");
    }
}

pub fn prefetch(gpu: &mut impl Device) {
    let sectors = [5usize, 0, 700, 1, 0, 1024, 33, 2100];
    let rng = &mut Rng(1);
    let data = sectors.map(|n| (0..8 * n).map(|_| rng.bits() as u32).collect::<Vec<u32>>());
    let memory = data.each_ref().map(|d| gpu.words(d));
    let (threads, loads) = (64, 8);
    let span = threads * loads;
    let groups: usize = sectors.iter().map(|n| n.div_ceil(span)).sum();
    for (want, written) in [(1, false), (0, true)] {
        let sink = gpu.out(groups * threads);
        let p = memory;
        let n = sectors.map(|n| n as u32);
        let args = Prefetch {
            p0: p[0],
            p1: p[1],
            p2: p[2],
            p3: p[3],
            p4: p[4],
            p5: p[5],
            p6: p[6],
            p7: p[7],
            sink,
            n0: n[0],
            n1: n[1],
            n2: n[2],
            n3: n[3],
            n4: n[4],
            n5: n[5],
            n6: n[6],
            n7: n[7],
            mask: 0,
            want,
        };
        let set = [("THREADS", threads as u32), ("LOADS", loads as u32)];
        gpu.launch(None, &args, &set, [groups as u32, 1, 1]);
        let mut sums = Vec::new();
        for (n, d) in sectors.iter().zip(&data) {
            for at in (0..n.div_ceil(span)).flat_map(|g| (0..threads).map(move |t| g * span + t)) {
                sums.push((0..loads).fold(0, |s, k| s ^ d[8 * (at + k * threads).min(n - 1)]));
            }
        }
        let want = if written { sums } else { vec![u32::MAX; groups * threads] };
        assert_eq!(gpu.words_at(sink), want);
    }
}
