//! The functions of `prelude/math.kc` on the CPU: division and conversions exactly, the others within 2 ulp, with and without a fused
//! multiply-add (Vulkan may split it).
#![cfg(unix)]
use hanzo_kernels::host::{HostKernel, Memory};

/// Runs `y[i] = f(x[i], z[i])`, an expression of `a` and `b`, over all of them.
fn evaluate(expression: &str, fused: bool, x: &[f32], z: &[f32]) -> Vec<f32> {
    let split =
        "FN f32 split_fma(f32 a, f32 b, f32 c) { volatile f32 p = a * b; return p + c; }\n#define fma_ split_fma\n";
    let text = format!(
        "#define HZ_NAME \"math\"\n#define THREADS 64u\n#define WAVE 32u\n{}\n{}\n{}\nstatic void hz_kernel() {{\n\
         const RO x = hz::ro(\"x\", 0); const RO z = hz::ro(\"z\", 8); const RW y = hz::wo(\"y\", 16); const u32 n = hz::arg<u32>(24);\n\
         for (u32 k = 0u; k < 64u; k++) {{\n u32 i = (GROUP_X * THREADS + THREAD) * 64u + k;\n\
         if (i < n) {{ f32 a = LDF(x, i); f32 b = LDF(z, i); STF(y, i, {expression}); }}\n}}\n}}\n",
        include_str!("../prelude/host.h"),
        if fused { "" } else { split },
        include_str!("../prelude/math.kc")
    );
    let kernel = HostKernel::compile(&text, &[]).unwrap();
    let mut memory = Memory::new();
    let bytes = |v: &[f32]| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let (x_at, z_at, y_at) = (memory.read(&bytes(x)), memory.read(&bytes(z)), memory.output(4 * x.len()));
    let mut args: Vec<u8> = [x_at, z_at, y_at].iter().flat_map(|a| a.to_le_bytes()).collect();
    args.extend_from_slice(&(x.len() as u32).to_le_bytes());
    kernel.run(&mut memory, &args, [x.len().div_ceil(4096) as u32, 1, 1]).unwrap();
    memory.f32s(y_at)
}

/// Every 9973rd f32, and what is special.
fn inputs() -> Vec<f32> {
    let special = [
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MIN_POSITIVE,
        f32::from_bits(1),
        f32::MAX,
        1.0,
        -1.0,
        0.5,
        88.722_83,
        -103.97,
        0.97,
        0.9,
        4.0,
    ];
    (0..=u32::MAX).step_by(9973).map(f32::from_bits).chain(special).collect()
}

/// Error in units of the last place of an f32 of the true value's size.
fn ulps(got: f32, want: f64) -> f64 {
    let rounded = want as f32;
    if want.is_nan() || got.is_nan() {
        return if want.is_nan() && got.is_nan() { 0.0 } else { f64::INFINITY };
    }
    if rounded.is_infinite() || got.is_infinite() {
        return if rounded == got { 0.0 } else { f64::INFINITY };
    }
    let exponent = i32::try_from(want.abs().to_bits() >> 52).unwrap() - 1023;
    (f64::from(got) - want).abs() / f64::powi(2.0, exponent.max(-126) - 23)
}

#[track_caller]
fn within_two_ulp(expression: &str, want: impl Fn(f64) -> f64) {
    let x = inputs();
    for fused in [true, false] {
        for (x, y) in x.iter().zip(evaluate(expression, fused, &x, &x)) {
            let error = ulps(y, want(f64::from(*x)));
            assert!(error <= 2.0, "{expression} of {x:e} is {y:e}: {error} ulp off");
        }
    }
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

#[test]
fn exp_is_within_two_ulp() {
    within_two_ulp("exp_(a)", f64::exp);
}

#[test]
fn tanh_is_within_two_ulp() {
    within_two_ulp("tanh_(a)", f64::tanh);
}

#[test]
fn sigmoid_is_within_two_ulp() {
    within_two_ulp("sigmoid_(a)", |x| if x < 0.0 { x.exp() / (1.0 + x.exp()) } else { 1.0 / (1.0 + (-x).exp()) });
}

#[test]
fn erf_is_within_two_ulp() {
    within_two_ulp("erf_(a)", erf);
}

#[test]
fn log_is_within_two_ulp() {
    within_two_ulp("log_(a)", f64::ln);
}

#[test]
fn log1p_is_within_two_ulp() {
    within_two_ulp("log1p_(a)", f64::ln_1p);
}

#[test]
fn division_is_correctly_rounded() {
    // Pairs whose quotients are everywhere: subnormal, just over one, huge; and subnormal operands.
    let mut x: Vec<f32> = inputs();
    let mut z: Vec<f32> = x.iter().rev().copied().collect();
    for (k, v) in inputs().into_iter().enumerate() {
        let b = v.to_bits();
        x.push(f32::from_bits((b & 0x807f_ffff) | ((1 + k as u32 % 40) << 23)));
        z.push(f32::from_bits((b.wrapping_mul(2_654_435_761) & 0x807f_ffff) | ((120 + k as u32 % 33) << 23)));
        x.push(f32::from_bits(b & 0x80ff_ffff));
        z.push(f32::from_bits(b.wrapping_mul(747_796_405) & 0x8fff_ffff));
    }
    for (i, y) in evaluate("div_rn(a, b)", true, &x, &z).into_iter().enumerate() {
        let want = x[i] / z[i];
        assert!(
            y.to_bits() == want.to_bits() || (y.is_nan() && want.is_nan()),
            "{:e} / {:e} is {want:e}, not {y:e}",
            x[i],
            z[i]
        );
    }
}

#[test]
fn bf16_and_bytes_are_exact() {
    let x = inputs();
    for (x, y) in x.iter().zip(evaluate("as_f32(f32_to_bf16(a))", true, &x, &x)) {
        let low = x.to_bits() & 0xffff;
        let want = (x.to_bits() >> 16) + u32::from(low > 0x8000 || (low == 0x8000 && x.to_bits() & 0x1_0000 != 0));
        assert!(x.is_nan() && y.to_bits() & 0x7fff > 0x7f80 || y.to_bits() == want, "{x:e}");
    }
    let bytes = evaluate("f32(sbyte(as_u32(a), 1u)) + f32(sum_hi(as_u32(a))) * 256.0f", true, &x, &x);
    for (x, y) in x.iter().zip(bytes) {
        let want = f32::from(x.to_bits().to_le_bytes()[1].cast_signed())
            + f32::from(((x.to_bits() >> 16) as u16).cast_signed()) * 256.0;
        assert_eq!(y, want);
    }
}
