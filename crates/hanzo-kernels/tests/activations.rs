//! The activations and the int8 rule of `prelude/math.kc`: NaNs stay, and scales and codes are those of the contract.
#![cfg(unix)]
use hanzo_kernels::host::{HostKernel, Memory};

const PRELUDE: &str = include_str!("../prelude/host.h");
const MATH: &str = include_str!("../prelude/math.kc");

/// `y[i] = expression` with `a = x[i]` and `b = z[i]`, as bits.
fn map(expression: &str, x: &[u32], z: &[u32]) -> Vec<u32> {
    let text = format!(
        "#define HZ_NAME \"math\"\n#define THREADS 64u\n#define WAVE 32u\n{PRELUDE}\n{MATH}\nstatic void hz_kernel() {{\n\
         const RO x = hz::ro(\"x\", 0); const RO z = hz::ro(\"z\", 8); const RW y = hz::wo(\"y\", 16); const u32 n = hz::arg<u32>(24);\n\
         for (u32 i = THREAD; i < n; i += THREADS) {{ f32 a = LDF(x, i); f32 b = LDF(z, i); (void)a; (void)b; ST1(y, i, {expression}); }}\n}}\n"
    );
    let kernel = HostKernel::compile(&text, &[]).unwrap();
    let mut memory = Memory::new();
    let bytes = |v: &[u32]| v.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
    let (x, z, y) = (memory.read(&bytes(x)), memory.read(&bytes(z)), memory.output(4 * x.len()));
    let mut args: Vec<u8> = [x, z, y].into_iter().flat_map(u64::to_le_bytes).collect();
    args.extend((memory.bytes(y).len() as u32 / 4).to_le_bytes());
    kernel.run(&mut memory, &args, [1, 1, 1]).unwrap();
    memory.u32s(y)
}

#[test]
fn a_nan_stays_one_in_every_activation() {
    for kind in 0..6 {
        let got = map(&format!("as_u32(activate_({kind}u, a))"), &[0x7fc0_0000], &[0]);
        assert!(f32::from_bits(got[0]).is_nan(), "activation {kind}");
    }
}

#[test]
fn codes_round_to_even_and_are_zero_without_a_reciprocal() {
    let codes = |q: [f32; 4], inverse: f32| {
        let x: Vec<u32> = q.iter().map(|x| x.to_bits()).collect();
        map("q8_codes(mkf4(a, LDF(x, 1u), LDF(x, 2u), LDF(x, 3u)), b)", &x, &[inverse.to_bits(); 4])[0]
    };
    assert_eq!(codes([1.5, -2.5, 127.0, -127.0], 1.0), 0x817f_fe02);
    assert_eq!(codes([f32::INFINITY, f32::NAN, 1.0, 0.0], 0.0), 0);
}

#[test]
fn scales_are_those_of_the_contract_over_all_exponents() {
    // 127 / x is finite from 0x02fe0001 on.
    let special = [0, 1, 0x02fe_0000, 0x02fe_0001, 0x7f7f_ffff, 0x7f80_0000, 0x7fc0_0000];
    let tops: Vec<u32> = (0..0x7f80_0000).step_by(9973).chain(special).collect();
    let d = map("as_u32(q8_scale(as_u32(a)).d)", &tops, &tops);
    let inverse = map("as_u32(q8_scale(as_u32(a)).inverse)", &tops, &tops);
    for ((top, d), inverse) in tops.iter().zip(d).zip(inverse) {
        let top = f32::from_bits(*top);
        let (d, inverse) = (f32::from_bits(d), f32::from_bits(inverse));
        if !top.is_finite() {
            assert!(d.is_nan() && inverse == 0.0, "{top:e}");
        } else if !(127.0 / top).is_finite() {
            assert!(d == 0.0 && inverse == 0.0, "{top:e}");
        } else {
            assert!(d == top / 127.0 && inverse == 127.0 / top, "{top:e}");
        }
    }
}
