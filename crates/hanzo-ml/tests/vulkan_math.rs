//! The words and functions that kernels rely on, on a Vulkan device: division, square roots, halves and bytes exactly, the others within 2 ulp.
//! Results below 2^-126 may be zero, as math.kc says, but for what works on bits.
//!
//! Needs a Vulkan driver and fails without one, unless `HANZO_NO_GPU_TESTS=1` says that there is none on purpose.

use half::f16;
use hanzo_kernels::args::{Args, MathTest};
use hanzo_kernels::{Key, spirv};
use hanzo_ml::vulkan::VulkanOptions;
use hanzo_ml::vulkan::raw::Gpu;

fn gpu() -> Option<Gpu> {
    if std::env::var("HANZO_NO_GPU_TESTS").is_ok_and(|v| v == "1") {
        return None;
    }
    Some(Gpu::open(0, &VulkanOptions::default()).expect("a Vulkan driver (or HANZO_NO_GPU_TESTS=1)"))
}

/// Function number `which` of the op `math_test` over all pairs.
fn evaluate(gpu: &Gpu, which: u32, x: &[u32], z: &[u32]) -> Vec<u32> {
    let code = spirv(Key { op: "math_test", format: None }).expect("the kernel");
    let kernel = gpu.kernel("math_test", code, &[64, gpu.wave(), 0, which]).expect("a pipeline");
    let bytes = |v: &[u32]| v.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
    let (x_at, z_at) = (gpu.upload(&bytes(x)).expect("memory"), gpu.upload(&bytes(z)).expect("memory"));
    let y = gpu.filled(4 * x.len(), !0).expect("memory");
    let args = MathTest { x: x_at.address(), z: z_at.address(), y: y.address(), count: x.len() as u32 };
    let mut places = Vec::new();
    let mut args = args.encode(&mut |at, p: u64| places.push((at, p)));
    for (at, p) in places {
        args[at..at + 8].copy_from_slice(&p.to_le_bytes());
    }
    gpu.launch(kernel, &args, [(x.len() as u32).div_ceil(64), 1, 1]).expect("a launch");
    gpu.read(&y).expect("a download").as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

/// Every 9973rd f32, and what is special.
fn inputs() -> Vec<u32> {
    let special =
        [0.0, f32::INFINITY, f32::NAN, f32::MIN_POSITIVE, f32::MAX, 1.0, 0.5, 88.722_83, -103.97, 0.97, 0.9, 4.0];
    (0..=u32::MAX).step_by(9973).chain(special.into_iter().flat_map(|v: f32| [v.to_bits(), (-v).to_bits()])).collect()
}

fn ulps(got: f32, want: f64) -> f64 {
    let rounded = want as f32;
    if want.is_nan() || got.is_nan() {
        return if want.is_nan() && got.is_nan() { 0.0 } else { f64::INFINITY };
    }
    if rounded.is_infinite() || got.is_infinite() {
        return if rounded == got { 0.0 } else { f64::INFINITY };
    }
    if got == 0.0 && want.abs() < f64::from(f32::MIN_POSITIVE) {
        return 0.0;
    }
    let exponent = (want.abs().to_bits() >> 52) as i32 - 1023;
    (f64::from(got) - want).abs() / f64::powi(2.0, exponent.max(-126) - 23)
}

/// erf by its series, or by the continued fraction of erfc.
fn erf(x: f64) -> f64 {
    let a = x.abs();
    let y = if a < 2.5 {
        let (mut term, mut sum) = (a, a);
        for n in 1..100 {
            term *= -a * a / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * 2.0 / std::f64::consts::PI.sqrt()
    } else {
        let fraction = (1..200).rev().fold(0.0, |f, n| f64::from(n) / 2.0 / (a + f));
        1.0 - (-a * a).exp() / ((a + fraction) * std::f64::consts::PI.sqrt())
    };
    if x.is_nan() { x } else { y.copysign(x) }
}

fn sigmoid(x: f64) -> f64 {
    if x < 0.0 { x.exp() / (1.0 + x.exp()) } else { 1.0 / (1.0 + (-x).exp()) }
}

#[test]
fn functions_are_within_two_ulp_on_the_device() {
    let Some(gpu) = gpu() else { return };
    let x = inputs();
    type F = fn(f64) -> f64;
    let all: [(&str, F); 6] = [
        ("exp_", f64::exp),
        ("tanh_", f64::tanh),
        ("sigmoid_", sigmoid),
        ("erf_", erf),
        ("log_", f64::ln),
        ("log1p_", f64::ln_1p),
    ];
    for (which, (name, want)) in all.iter().enumerate() {
        let mut worst = (0.0, 0.0, 0.0);
        for (x, y) in x.iter().zip(evaluate(&gpu, which as u32, &x, &x)) {
            let (x, y) = (f32::from_bits(*x), f32::from_bits(y));
            let error = ulps(y, want(f64::from(x)));
            if error > worst.0 {
                worst = (error, x, y);
            }
        }
        let (error, x, y) = worst;
        assert!(error <= 2.0, "{name} of {x:e} is {y:e}: {error} ulp off");
    }
}

#[test]
fn division_is_correctly_rounded_on_the_device() {
    let Some(gpu) = gpu() else { return };
    let mut x = inputs();
    let mut z: Vec<u32> = x.iter().rev().copied().collect();
    // Quotients near one and near the subnormal numbers, and subnormal operands.
    for (k, b) in inputs().into_iter().enumerate() {
        let k = k as u32;
        x.push((b & 0x807f_ffff) | ((1 + k % 40) << 23));
        z.push((b.wrapping_mul(2_654_435_761) & 0x807f_ffff) | ((120 + k % 33) << 23));
        x.push(b & 0x80ff_ffff);
        z.push(b.wrapping_mul(747_796_405) & 0x8fff_ffff);
    }
    for (i, y) in evaluate(&gpu, 6, &x, &z).into_iter().enumerate() {
        let (a, b, y) = (f32::from_bits(x[i]), f32::from_bits(z[i]), f32::from_bits(y));
        let want = a / b;
        assert!(y.to_bits() == want.to_bits() || (y.is_nan() && want.is_nan()), "{a:e} / {b:e} is {want:e}, not {y:e}");
    }
}

#[test]
fn halves_are_exact_on_the_device() {
    let Some(gpu) = gpu() else { return };
    let x = inputs();
    for (x, y) in x.iter().zip(evaluate(&gpu, 8, &x, &x)) {
        let want = f16::from_f32(f32::from_bits(*x));
        let nan = want.is_nan() && f16::from_bits(y as u16).is_nan();
        assert!(
            nan || u32::from(want.to_bits()) == y,
            "{:e} as a half is {:#x}, not {y:#x}",
            f32::from_bits(*x),
            want.to_bits()
        );
    }
    let all: Vec<u32> = (0..65536).collect();
    for (h, y) in all.iter().zip(evaluate(&gpu, 9, &all, &all)) {
        let want = f16::from_bits(*h as u16).to_f32();
        assert!(
            want.to_bits() == y || want.is_nan() && f32::from_bits(y).is_nan(),
            "the half {h:#x} is {want:e}, not {:e}",
            f32::from_bits(y)
        );
    }
}

#[test]
fn square_roots_of_normal_numbers_are_correctly_rounded_on_the_device() {
    let Some(gpu) = gpu() else { return };
    let x: Vec<u32> = inputs().into_iter().filter(|b| (1e-35..=1e35).contains(&f32::from_bits(*b))).collect();
    for (x, y) in x.iter().zip(evaluate(&gpu, 7, &x, &x)) {
        let (x, y) = (f32::from_bits(*x), f32::from_bits(y));
        assert_eq!(x.sqrt(), y, "the root of {x:e}");
    }
}

#[test]
fn integer_words_are_exact_on_the_device() {
    let Some(gpu) = gpu() else { return };
    let x = inputs();
    let z: Vec<u32> = x.iter().map(|b| b.wrapping_mul(2_654_435_761)).collect();
    let byte = |w: u32, k: u32| i32::from(w.to_le_bytes()[k as usize].cast_signed());
    let permuted = evaluate(&gpu, 10, &x, &z);
    let dots = evaluate(&gpu, 11, &x, &z);
    let bits = evaluate(&gpu, 13, &x, &z);
    for i in 0..x.len() {
        let both = u64::from(z[i]) << 32 | u64::from(x[i]);
        let select = |k: u32| (both >> (8 * ((x[i] ^ z[i]) >> (4 * k) & 7)) & 255) as u32;
        assert_eq!(permuted[i], (0..4).map(|k| select(k) << (8 * k)).sum::<u32>(), "prmt of {:#x} {:#x}", x[i], z[i]);
        let dot = (0..4).map(|k| byte(x[i], k) * byte(z[i], k)).sum::<i32>() + 5;
        assert_eq!(dots[i].cast_signed(), dot, "dp4a of {:#x} {:#x}", x[i], z[i]);
        assert_eq!(bits[i], x[i].count_ones());
    }
}

#[test]
fn rounding_to_integers_takes_ties_to_even_on_the_device() {
    let Some(gpu) = gpu() else { return };
    let x: Vec<u32> = (-2000..2000).map(|i| (i as f32 / 8.0).to_bits()).collect();
    for (x, y) in x.iter().zip(evaluate(&gpu, 12, &x, &x)) {
        assert_eq!(f32::from_bits(y), f32::from_bits(*x).round_ties_even());
    }
}
