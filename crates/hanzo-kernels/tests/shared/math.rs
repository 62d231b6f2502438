//! What the words and `math.kc` must give, whoever evaluates them: by the op `math_test`, on the host (`math.rs`) and on Vulkan devices
//! (`hanzo-ml/tests/kernels/math.rs`). No way to run a kernel may enter here.

use half::f16;

/// Function number `which` of the op `math_test` over all pairs of `x` and `z`, as bits.
pub type Evaluate<'a> = &'a dyn Fn(u32, &[u32], &[u32]) -> Vec<u32>;

/// Every 9973rd f32, and what is special.
pub fn inputs() -> Vec<u32> {
    let special = [
        0.0,
        f32::INFINITY,
        f32::NAN,
        f32::MIN_POSITIVE,
        f32::from_bits(1),
        f32::MAX,
        1.0,
        0.5,
        88.722_83,
        -103.97,
        0.97,
        0.9,
        4.0,
    ];
    (0..=u32::MAX).step_by(9973).chain(special.into_iter().flat_map(|v: f32| [v.to_bits(), (-v).to_bits()])).collect()
}

/// Error in units of the last place of an f32 of the true value's size. `flushes`: results below 2^-126 may be zero.
fn ulps(got: f32, want: f64, flushes: bool) -> f64 {
    let rounded = want as f32;
    if want.is_nan() || got.is_nan() {
        return if want.is_nan() && got.is_nan() { 0.0 } else { f64::INFINITY };
    }
    if rounded.is_infinite() || got.is_infinite() {
        return if rounded == got { 0.0 } else { f64::INFINITY };
    }
    if flushes && got == 0.0 && want.abs() < f64::from(f32::MIN_POSITIVE) {
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

/// The functions of `math.kc` are within 2 ulp of f64's.
pub fn functions(evaluate: Evaluate<'_>, flushes: bool) {
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
        for (x, y) in x.iter().zip(evaluate(which as u32, &x, &x)) {
            let (x, y) = (f32::from_bits(*x), f32::from_bits(y));
            let error = ulps(y, want(f64::from(x)), flushes);
            if error > worst.0 {
                worst = (error, x, y);
            }
        }
        let (error, x, y) = worst;
        assert!(error <= 2.0, "{name} of {x:e} is {y:e}: {error} ulp off");
    }
}

/// `div_rn` is correctly rounded.
pub fn division(evaluate: Evaluate<'_>) {
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
    quotients(evaluate, &x, &z);
}

/// As [`division`], of these numbers.
pub fn quotients(evaluate: Evaluate<'_>, x: &[u32], z: &[u32]) {
    for (i, y) in evaluate(6, x, z).into_iter().enumerate() {
        let (a, b, y) = (f32::from_bits(x[i]), f32::from_bits(z[i]), f32::from_bits(y));
        let want = a / b;
        assert!(y.to_bits() == want.to_bits() || (y.is_nan() && want.is_nan()), "{a:e} / {b:e} is {want:e}, not {y:e}");
    }
}

/// `sqrt_rn` of normal numbers is correctly rounded.
pub fn roots(evaluate: Evaluate<'_>) {
    let x: Vec<u32> = inputs().into_iter().filter(|b| (1e-35..=1e35).contains(&f32::from_bits(*b))).collect();
    for (x, y) in x.iter().zip(evaluate(7, &x, &x)) {
        let (x, y) = (f32::from_bits(*x), f32::from_bits(y));
        assert_eq!(x.sqrt(), y, "the root of {x:e}");
    }
}

/// Halves and bf16 are exact, both ways.
pub fn halves(evaluate: Evaluate<'_>) {
    let x = inputs();
    for (x, y) in x.iter().zip(evaluate(8, &x, &x)) {
        let (v, got) = (f32::from_bits(*x), f16::from_bits(y as u16));
        let want = f16::from_f32(v);
        let right = want.is_nan() && got.is_nan() || u32::from(want.to_bits()) == y;
        assert!(right, "{v:e} as a half is {:#x}, not {y:#x}", want.to_bits());
    }
    let all: Vec<u32> = (0..65536).collect();
    for (h, y) in all.iter().zip(evaluate(9, &all, &all)) {
        let (want, got) = (f16::from_bits(*h as u16).to_f32(), f32::from_bits(y));
        assert!(want.to_bits() == y || want.is_nan() && got.is_nan(), "the half {h:#x} is {want:e}, not {got:e}");
    }
    for (x, y) in x.iter().zip(evaluate(14, &x, &x)) {
        let low = x & 0xffff;
        let want = (x >> 16).wrapping_add(u32::from(low > 0x8000 || (low == 0x8000 && x & 0x1_0000 != 0)));
        let right = if f32::from_bits(*x).is_nan() { f32::from_bits(y << 16).is_nan() } else { y == want };
        assert!(right, "{x:#x} as bf16 is {y:#x}");
    }
}

/// Words of integers and bytes are exact.
pub fn integers(evaluate: Evaluate<'_>) {
    let x = inputs();
    let z: Vec<u32> = x.iter().map(|b| b.wrapping_mul(2_654_435_761)).collect();
    let byte = |w: u32, k: u32| i32::from(w.to_le_bytes()[k as usize].cast_signed());
    let [permuted, dots, bits, parts] = [10, 11, 13, 15].map(|which| evaluate(which, &x, &z));
    for i in 0..x.len() {
        let both = u64::from(z[i]) << 32 | u64::from(x[i]);
        let select = |k: u32| (both >> (8 * ((x[i] ^ z[i]) >> (4 * k) & 7)) & 255) as u32;
        assert_eq!(permuted[i], (0..4).map(|k| select(k) << (8 * k)).sum::<u32>(), "prmt of {:#x} {:#x}", x[i], z[i]);
        let dot = (0..4).map(|k| byte(x[i], k) * byte(z[i], k)).sum::<i32>() + 5;
        assert_eq!(dots[i].cast_signed(), dot, "dp4a of {:#x} {:#x}", x[i], z[i]);
        assert_eq!(bits[i], x[i].count_ones());
        let sums = [x[i] as u16, (x[i] >> 16) as u16].map(|s| i32::from(s.cast_signed()));
        assert_eq!(parts[i].cast_signed(), byte(x[i], 1) + sums[0] * 3 + sums[1] * 256, "parts of {:#x}", x[i]);
    }
}

/// `rint_` takes ties to even.
pub fn rounding(evaluate: Evaluate<'_>) {
    let x: Vec<u32> = (-2000..2000).map(|i| (i as f32 / 8.0).to_bits()).collect();
    for (x, y) in x.iter().zip(evaluate(12, &x, &x)) {
        assert_eq!(f32::from_bits(y), f32::from_bits(*x).round_ties_even());
    }
}
