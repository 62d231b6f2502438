//! Row ops against f64, run on the CPU under the host prelude's checks: odd sizes, waves of 1, 8, 32 and 64 lanes.
#![cfg(unix)]

#[path = "rows/norms.rs"]
mod norms;
#[path = "rows/recurrent.rs"]
mod recurrent;
#[path = "rows/route.rs"]
mod route;
#[path = "rows/single.rs"]
mod single;

use hanzo_kernels::args::Args;
use hanzo_kernels::host::{HostKernel, Memory};
use hanzo_kernels::{Key, Target};

/// u: half the distance of 1 to the next f32.
const U: f64 = 1.0 / (1u64 << 24) as f64;
const WAVES: [u32; 4] = [1, 8, 32, 64];

/// Numbers of a linear congruential generator, about normal.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        let mut sum = 0.0;
        for _ in 0..4 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            sum += (self.0 >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
        }
        sum
    }

    fn floats(&mut self, n: usize, size: f32) -> Vec<f32> {
        (0..n).map(|_| self.next() * size).collect()
    }
}

/// Buffers and launches.
#[derive(Default)]
struct Device(Memory);

impl Device {
    fn words(&mut self, x: &[u32]) -> u64 {
        self.0.read(&x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    fn floats(&mut self, x: &[f32]) -> u64 {
        self.words(&x.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
    }

    fn state(&mut self, x: &[f32]) -> u64 {
        self.0.write(&x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    /// Room for `n` words, all NaN.
    fn out(&mut self, n: usize) -> u64 {
        self.0.output(4 * n)
    }

    fn run<A: Args<u64>>(&mut self, args: &A, set: &[(&str, u32)], groups: [u32; 3]) {
        let text = hanzo_kernels::text(Key { op: A::OP, format: None }, Target::Host).unwrap();
        let mut pointers = Vec::new();
        let mut bytes = args.encode(&mut |at, p| pointers.push((at, p)));
        pointers.iter().for_each(|(at, p)| bytes[*at..at + 8].copy_from_slice(&p.to_le_bytes()));
        HostKernel::compile(&text, set).unwrap().run(&mut self.0, &bytes, groups).unwrap();
    }
}

/// Each element within its bound of what it should be.
#[track_caller]
fn close(what: &str, got: &[f32], want: &[f64], bound: impl Fn(usize) -> f64) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let off = (f64::from(*g) - w).abs();
        assert!(off <= bound(i), "{what}: element {i} is {g}, want {w}: off {off:e} > {:e}", bound(i));
    }
}

/// The int8 rule, in f32 as IEEE has it: codes, d, sums of a row.
fn quantized(x: &[f32]) -> (Vec<i8>, Vec<f32>, Vec<[i16; 2]>) {
    let (mut codes, mut d, mut sums) = (Vec::new(), Vec::new(), Vec::new());
    for x in x.chunks(32) {
        let top = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let inverse = 127.0 / top;
        let usable = inverse.is_finite() && x.iter().all(|x| x.is_finite());
        let c: Vec<i8> = x.iter().map(|x| if usable { (x * inverse).round_ties_even() as i8 } else { 0 }).collect();
        d.push(if x.iter().any(|x| !x.is_finite()) {
            f32::NAN
        } else if usable {
            top / 127.0
        } else {
            0.0
        });
        sums.push([0, 16].map(|from| c[from..from + 16].iter().map(|c| i16::from(*c)).sum()));
        codes.extend(c);
    }
    (codes, d, sums)
}

/// The planes at these addresses are those of the rows of `x`.
#[track_caller]
fn planes_are(device: &Device, [q, d, s]: [u64; 3], x: &[f32]) {
    let (codes, scales, sums) = quantized(x);
    assert_eq!(device.0.bytes(q)[..codes.len()], codes.iter().map(|c| *c as u8).collect::<Vec<_>>());
    for (got, want) in device.0.f32s(d).iter().zip(&scales) {
        assert!(got == want || got.is_nan() && want.is_nan(), "d {got:e}, want {want:e}");
    }
    for (got, want) in device.0.u32s(s).iter().zip(&sums) {
        assert_eq!([*got as i16, (got >> 16) as i16], *want);
    }
}
