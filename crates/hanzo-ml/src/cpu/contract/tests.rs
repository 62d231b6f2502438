//! Every kernel of every format on every instruction set against f64 on the same quantized activations.
//!
//! The bound is derived, not tuned. With u = 2^-24: a group's integer dot product is exact and below 2^24; the product
//! `s * d`, the product of minimum and `d * sum`, their roundings, and one accumulation per group and lane each cost u
//! times the magnitudes they meet; lanes are summed in at most four steps, the minima taken off in two; `to_float` itself
//! rounds `s * code - m` once or twice. So |error| <= (groups + 12) u A with A the sum over elements of
//! d |a| (|s code| + |m|). Underflow of `s * d` loses up to 2^-150 times an integer dot product (below 2^19) per group.

use hanzo_gguf::formats::to_float;

use super::*;
use crate::cpu::formats::tests::{Rng, ScaleKind, normal_form, random_rows};
use crate::cpu::formats::{self, CpuFormat, Shape, for_each_cpu_format};

const TOKENS: [usize; 8] = [1, 2, 3, 4, 5, 12, 13, 31];
const ROWS: [usize; 5] = [1, 3, 16, 17, 33];
const MAX_TOKENS: usize = 31;
const MAX_ROWS: usize = 33;

fn activations(rng: &mut Rng, n: usize) -> Vec<f32> {
    // Groups of very different size, some elements zero.
    (0..n).map(|i| if i % 37 == 5 { 0.0 } else { rng.normal() * [1.0, 0.01, 30.0][i / 32 % 3] }).collect()
}

fn quantized(isa: IsaLevel, buf: &mut ActBuf, x: &[f32], tokens: usize, k: usize) -> Acts {
    let acts = buf.planes(tokens, k);
    for t in 0..tokens {
        // SAFETY: the level is available; the planes are `buf`'s; `x` has `tokens` rows.
        unsafe { quantizer(isa)(&acts, t, 0..k / 32, x[t * k..].as_ptr()) };
    }
    acts
}

/// Runs a kernel on `rows` and `tokens`, the output pre-filled with NaN: `[tokens][MAX_ROWS]`.
fn contract(
    kernel: Kernel,
    w: Weights,
    rows: Range<usize>,
    input: Input,
    tokens: Tokens<'_>,
    scratch: &mut Scratch,
) -> Vec<f32> {
    let mut out = vec![f32::NAN; MAX_TOKENS * MAX_ROWS];
    let mut job =
        Job { w, rows, input, tokens, out: out.as_mut_ptr(), out_stride: MAX_ROWS, bias: None, packed: false, scratch };
    // SAFETY: levels are available, `w` and the input have the rows, `out` is large enough for all of them.
    unsafe { kernel(&mut job) };
    out
}

fn kernels(format: Format, acts: ActKind) -> Vec<(IsaLevel, Contraction, Kernel)> {
    let mut all = Vec::new();
    for isa in IsaLevel::available() {
        for op in [Contraction::MatVec, Contraction::Gemm] {
            match kernel(op, format, acts, isa) {
                Some(kernel) => all.push((isa, op, kernel)),
                None => assert_eq!(acts, ActKind::Bf16, "every weight format has kernels"),
            }
        }
    }
    all
}

fn int8_contractions_stay_within_the_bound<F: CpuFormat>() {
    let format = F::FORMAT;
    let unit = format.block_len();
    let mut rng = Rng(1000 + u64::from(format.id()));
    let (mut buf, mut scratch) = (ActBuf::new(), Scratch::new());
    let ks: &[usize] = if unit == 256 { &[256, 512, 768] } else { &[unit, 3 * unit, 256, 1280 + unit] };
    for (case, &k) in ks.iter().enumerate() {
        let kind = [ScaleKind::Normal, ScaleKind::Subnormal, ScaleKind::Normal, ScaleKind::Zero][case];
        let row_bytes = format.row_bytes(k).unwrap();
        let data = random_rows(format, &mut rng, MAX_ROWS * row_bytes, kind);
        let x = activations(&mut rng, MAX_TOKENS * k);
        let acts = quantized(IsaLevel::Portable, &mut buf, &x, MAX_TOKENS, k);
        // SAFETY: just quantized.
        let (codes, d) = unsafe {
            (
                std::slice::from_raw_parts(acts.codes, MAX_TOKENS * k),
                std::slice::from_raw_parts(acts.d, MAX_TOKENS * k / 32),
            )
        };
        // The reference and its bound.
        let mut expected = vec![(0f64, 0f64); MAX_TOKENS * MAX_ROWS];
        for row in 0..MAX_ROWS {
            let packed = &data[row * row_bytes..][..row_bytes];
            let mut exact = vec![0f32; k];
            to_float(format, packed, &mut exact);
            let normal: Vec<_> = packed.chunks_exact(F::BYTES).flat_map(normal_form::<F>).collect();
            for t in 0..MAX_TOKENS {
                let (mut sum, mut magnitude) = (0f64, 0f64);
                for i in 0..k {
                    let a = f64::from(codes[t * k + i]) * f64::from(d[(t * k + i) / 32]);
                    let (code, s, m) = normal[i];
                    sum += f64::from(exact[i]) * a;
                    magnitude += a.abs() * (f64::from(s).abs() * f64::from(code).abs() + f64::from(m).abs());
                }
                let groups = (k / F::GROUP) as f64;
                let bound =
                    (groups + 12.0) * 2f64.powi(-24) * magnitude + groups * (32.0 * 128.0 * 128.0) * 2f64.powi(-149);
                expected[t * MAX_ROWS + row] = (sum, bound);
            }
        }
        let w = Weights { format, data: data.as_ptr(), row_bytes, k };
        for (isa, op, kernel) in kernels(format, ActKind::Int8) {
            let whole = contract(
                kernel,
                w,
                0..MAX_ROWS,
                Input::Int8(acts),
                Tokens::Dense { first: 0, count: MAX_TOKENS },
                &mut scratch,
            );
            for (i, (&value, &(sum, bound))) in whole.iter().zip(&expected).enumerate() {
                let error = (f64::from(value) - sum).abs();
                assert!(
                    error <= bound,
                    "{format} {op:?} {isa} k {k} {kind:?} token {} row {}: {value} is not {sum}: {error:e} > {bound:e}",
                    i / MAX_ROWS,
                    i % MAX_ROWS
                );
            }
            // Any number of rows and tokens gives the same bits.
            for count in TOKENS {
                for rows in ROWS {
                    let range = MAX_ROWS - rows..MAX_ROWS;
                    let part = contract(
                        kernel,
                        w,
                        range.clone(),
                        Input::Int8(acts),
                        Tokens::Dense { first: 0, count },
                        &mut scratch,
                    );
                    for (i, (value, whole)) in part.iter().zip(&whole).enumerate() {
                        let written = i / MAX_ROWS < count && range.contains(&(i % MAX_ROWS));
                        let expected = if written { whole.to_bits() } else { f32::NAN.to_bits() };
                        assert_eq!(
                            value.to_bits(),
                            expected,
                            "{format} {op:?} {isa} k {k} tokens {count} rows {rows} at {i}"
                        );
                    }
                }
            }
        }
    }
}

macro_rules! all_formats {
    ($( $(#[$attr:meta])* $module:ident :: $format:ident, )*) => {
        /// One test per format: the claim is its module's name.
        mod int8_contractions_stay_within_the_bound_and_ignore_batching {
            $(
                $(#[$attr])*
                #[test]
                fn $module() {
                    super::int8_contractions_stay_within_the_bound::<super::formats::$module::$format>();
                }
            )*
        }
    };
}
for_each_cpu_format!(all_formats);

/// Rows of plain floats or blocks.
fn float_rows(format: Format, k: usize, rng: &mut Rng) -> Vec<u8> {
    let n = MAX_ROWS * k;
    match format {
        Format::F32 => (0..n).flat_map(|_| rng.normal().to_le_bytes()).collect(),
        Format::F16 => {
            let bits =
                |rng: &mut Rng| half::f16::from_f32(rng.normal() * 2f32.powi(-(rng.next() as i32 & 15))).to_bits();
            (0..n).flat_map(|_| bits(rng).to_le_bytes()).collect()
        }
        Format::BF16 => (0..n).flat_map(|_| half::bf16::from_f32(rng.normal()).to_bits().to_le_bytes()).collect(),
        _ => random_rows(format, rng, MAX_ROWS * format.row_bytes(k).unwrap(), ScaleKind::Normal),
    }
}

/// A kernel of f32 rows against f64 on what it makes of them, and bit for bit whatever is beside a row or a token.
fn floats_stay_within_the_bound(format: Format, acts: ActKind, k: usize, seen: fn(f32) -> f32) {
    let (mut rng, mut scratch) = (Rng(5), Scratch::new());
    let data = float_rows(format, k, &mut rng);
    let row_bytes = format.row_bytes(k).unwrap();
    let mut exact = vec![0f32; MAX_ROWS * k];
    to_float(format, &data, &mut exact);
    let stride = k + 3;
    let x = activations(&mut rng, MAX_TOKENS * stride);
    let w = Weights { format, data: data.as_ptr(), row_bytes, k };
    for (isa, op, kernel) in kernels(format, acts) {
        let input = Input::F32 { data: x.as_ptr(), stride };
        let tokens = Tokens::Dense { first: 0, count: MAX_TOKENS };
        let whole = contract(kernel, w, 0..MAX_ROWS, input, tokens, &mut scratch);
        for t in 0..MAX_TOKENS {
            for row in 0..MAX_ROWS {
                let pairs = x[t * stride..][..k].iter().zip(&exact[row * k..][..k]);
                let products = pairs.map(|(&a, &w)| f64::from(seen(a)) * f64::from(w));
                let (sum, magnitude) = products.fold((0.0, 0.0), |(s, m), p| (s + p, m + p.abs()));
                // At most k / 8 products a lane, two roundings each, then the lanes, the slices and the rest.
                let bound = (k as f64 / 4.0 + 24.0) * 2f64.powi(-24) * magnitude;
                let value = f64::from(whole[t * MAX_ROWS + row]);
                assert!(
                    (value - sum).abs() <= bound,
                    "{format} {acts:?} {op:?} {isa} k {k}: {value} is not {sum} within {bound:e}"
                );
            }
        }
        for count in TOKENS {
            let part = contract(kernel, w, 2..7, input, Tokens::Dense { first: 0, count }, &mut scratch);
            for t in 0..count {
                let at = t * MAX_ROWS + 2..t * MAX_ROWS + 7;
                assert_eq!(part[at.clone()], whole[at], "{format} {acts:?} {op:?} {isa} k {k} {count}");
            }
        }
    }
}

#[test]
fn f32_contractions_of_every_format_stay_within_the_bound_and_ignore_batching() {
    for &format in Format::ALL.iter().filter(|format| format.is_weight()) {
        // Plain floats take any k. Several slices: all of them end with a rest, and begin where a row does.
        let ks = if format.is_block() { vec![2 * format.block_len()] } else { vec![5, 77, 1024, 2 * 1024 + 77] };
        for k in ks {
            floats_stay_within_the_bound(format, ActKind::F32, k, |x| x);
        }
    }
    floats_stay_within_the_bound(Format::Q8_0, ActKind::F32, 1024 + 96, |x| x);
}

#[test]
fn contractions_of_rounded_activations_stay_within_the_bound_and_ignore_batching() {
    for k in [1, 31, 32, 77, 1024, 2 * 1024 + 77] {
        floats_stay_within_the_bound(Format::BF16, ActKind::Bf16, k, |x| half::bf16::from_f32(x).to_f32());
    }
}

#[test]
fn rounded_tokens_beyond_one_batch_give_the_same_bits() {
    // 8 MiB hold 15 rows, so that 31 take three batches.
    let k = 270_000;
    let mut rng = Rng(8);
    let data = float_rows(Format::BF16, 2 * k / MAX_ROWS + 1, &mut rng);
    let x = activations(&mut rng, MAX_TOKENS * k);
    let w = Weights { format: Format::BF16, data: data.as_ptr(), row_bytes: 2 * k, k };
    let mut scratch = Scratch::new();
    for (isa, op, kernel) in kernels(Format::BF16, ActKind::Bf16) {
        let input = Input::F32 { data: x.as_ptr(), stride: k };
        let whole = contract(kernel, w, 0..2, input, Tokens::Dense { first: 0, count: MAX_TOKENS }, &mut scratch);
        for first in [0, 14, 15, 30] {
            let one = contract(kernel, w, 0..2, input, Tokens::Dense { first, count: 1 }, &mut scratch);
            let at = first * MAX_ROWS..first * MAX_ROWS + 2;
            assert_eq!(one[at.clone()], whole[at], "{isa} {op:?} {first}");
        }
    }
}

#[test]
fn activations_are_rounded_to_the_nearest_bf16_ties_to_even_and_subnormal_ones_to_zero() {
    let mut rng = Rng(6);
    let k = 1024 + 50;
    let bits = |rng: &mut Rng| (rng.next() as u32) << [0, 8, 15][rng.next() as usize % 3];
    let mut x: Vec<f32> =
        std::iter::repeat_with(|| f32::from_bits(bits(&mut rng))).filter(|x| x.is_finite()).take(k).collect();
    x[..4].copy_from_slice(&[1e-40, -1e-39, f32::MIN_POSITIVE, f32::MAX]);
    let one = half::bf16::ONE.to_bits().to_le_bytes();
    for isa in IsaLevel::available().filter(|isa| rounds_to_bf16(*isa)) {
        let kernel = kernel(Contraction::Gemm, Format::BF16, ActKind::Bf16, isa).unwrap();
        // Each element alone.
        for (i, &x) in x.iter().enumerate() {
            let w = Weights { format: Format::BF16, data: one.as_ptr(), row_bytes: 2, k: 1 };
            let input = Input::F32 { data: &x, stride: 1 };
            let got = contract(kernel, w, 0..1, input, Tokens::Dense { first: 0, count: 1 }, &mut Scratch::new())[0];
            let want = if x.is_subnormal() { 0.0 } else { half::bf16::from_f32(x).to_f32() };
            assert_eq!(got, want, "{isa} {i}: {x:e}");
        }
    }
}

#[test]
fn pairs_gather_inputs_and_scatter_outputs() {
    let (format, k) = (Format::Q4_K, 512);
    let mut rng = Rng(9);
    let row_bytes = format.row_bytes(k).unwrap();
    let data = random_rows(format, &mut rng, MAX_ROWS * row_bytes, ScaleKind::Normal);
    let x = activations(&mut rng, MAX_TOKENS * k);
    let (mut buf, mut scratch) = (ActBuf::new(), Scratch::new());
    let acts = quantized(IsaLevel::detect(), &mut buf, &x, MAX_TOKENS, k);
    let w = Weights { format, data: data.as_ptr(), row_bytes, k };
    let pairs = [(7u32, 30u32), (7, 2), (0, 5), (30, 0), (12, 17), (3, 3), (9, 11)];
    for (acts_kind, input) in
        [(ActKind::Int8, Input::Int8(acts)), (ActKind::F32, Input::F32 { data: x.as_ptr(), stride: k })]
    {
        for (isa, op, kernel) in kernels(format, acts_kind) {
            let all = Tokens::Dense { first: 0, count: MAX_TOKENS };
            let whole = contract(kernel, w, 0..MAX_ROWS, input, all, &mut scratch);
            for n in 0..=pairs.len() {
                let listed = contract(kernel, w, 0..MAX_ROWS, input, Tokens::Pairs(&pairs[..n]), &mut scratch);
                for out_row in 0..MAX_TOKENS as u32 {
                    let got = &listed[out_row as usize * MAX_ROWS..][..MAX_ROWS];
                    match pairs[..n].iter().find(|pair| pair.1 == out_row) {
                        Some(pair) => assert_eq!(got, &whole[pair.0 as usize * MAX_ROWS..][..MAX_ROWS], "{isa} {op:?}"),
                        None => assert!(got.iter().all(|v| v.is_nan()), "{isa} {op:?}: row {out_row} was written"),
                    }
                }
            }
        }
    }
}

#[test]
fn what_a_call_packed_serves_the_next_one_with_other_rows() {
    for format in [Format::Q4_K, Format::Q6_K, Format::Q2_K, Format::Q8_0, Format::MXFP4, Format::TQ1_0, Format::BF16] {
        // Several slices of k in a GEMM.
        let k = 2048 + 256;
        let mut rng = Rng(10);
        let row_bytes = format.row_bytes(k).unwrap();
        let data = float_rows(format, k, &mut rng);
        let (mut buf, mut scratch) = (ActBuf::new(), Scratch::new());
        let x = activations(&mut rng, MAX_TOKENS * k);
        let acts = quantized(IsaLevel::detect(), &mut buf, &x, MAX_TOKENS, k);
        let w = Weights { format, data: data.as_ptr(), row_bytes, k };
        let (kind, input) = match format {
            Format::BF16 => (ActKind::Bf16, Input::F32 { data: x.as_ptr(), stride: k }),
            _ => (ActKind::Int8, Input::Int8(acts)),
        };
        for (isa, op, kernel) in kernels(format, kind) {
            for count in [1, 2, 4, 5, MAX_TOKENS] {
                let tokens = Tokens::Dense { first: 0, count };
                let whole = contract(kernel, w, 0..MAX_ROWS, input, tokens, &mut scratch);
                let mut out = vec![f32::NAN; MAX_TOKENS * MAX_ROWS];
                for (rows, packed) in [(20..MAX_ROWS, false), (0..7, true), (7..20, true)] {
                    let out = out.as_mut_ptr();
                    let scratch = &mut scratch;
                    let mut job =
                        Job { w, rows, input, tokens, out, out_stride: MAX_ROWS, bias: None, packed, scratch };
                    // SAFETY: as in `contract`; the scratch is as the call before left it.
                    unsafe { kernel(&mut job) };
                }
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&out), bits(&whole), "{format} {isa} {op:?} {count} tokens");
            }
        }
    }
}

#[test]
fn bias_is_added_once_to_each_row() {
    let (format, k) = (Format::Q8_0, 2048 + 32);
    let mut rng = Rng(11);
    let row_bytes = format.row_bytes(k).unwrap();
    let data = random_rows(format, &mut rng, MAX_ROWS * row_bytes, ScaleKind::Normal);
    let x = activations(&mut rng, 7 * k);
    let bias: Vec<f32> = (0..MAX_ROWS).map(|_| rng.normal()).collect();
    let (mut buf, mut scratch) = (ActBuf::new(), Scratch::new());
    let acts = quantized(IsaLevel::detect(), &mut buf, &x, 7, k);
    let w = Weights { format, data: data.as_ptr(), row_bytes, k };
    let tokens = Tokens::Dense { first: 0, count: 7 };
    for (acts_kind, input) in
        [(ActKind::Int8, Input::Int8(acts)), (ActKind::F32, Input::F32 { data: x.as_ptr(), stride: k })]
    {
        for (isa, op, kernel) in kernels(format, acts_kind) {
            let plain = contract(kernel, w, 0..MAX_ROWS, input, tokens, &mut scratch);
            let mut out = vec![0f32; 7 * MAX_ROWS];
            let mut job = Job {
                packed: false,
                w,
                rows: 0..MAX_ROWS,
                input,
                tokens,
                out: out.as_mut_ptr(),
                out_stride: MAX_ROWS,
                bias: Some(bias.as_ptr()),
                scratch: &mut scratch,
            };
            // SAFETY: available levels; every pointer covers its rows.
            unsafe { kernel(&mut job) };
            for (i, &value) in out.iter().enumerate() {
                assert_eq!(value, plain[i] + bias[i % MAX_ROWS], "{isa} {op:?}");
            }
        }
    }
}

#[test]
fn quantization_is_bit_equal_on_every_instruction_set_and_rounds_ties_to_even() {
    let mut rng = Rng(3);
    let k = 32 * 40;
    let mut x: Vec<f32> = (0..k).map(|_| rng.normal() * 2f32.powi((rng.next() % 40) as i32 - 20)).collect();
    x[..32].fill(0.0);
    x[32..64].fill(1e-40);
    x[40] = -3e-38;
    x[70] = f32::NAN;
    x[100] = f32::NEG_INFINITY;
    // amax 127: the inverse is 1, so halves are ties.
    for (i, v) in x[128..160].iter_mut().enumerate() {
        *v = i as f32 - 15.5;
    }
    x[128] = -127.0;
    x[192..224].fill(f32::MAX);
    let mut reference: Option<(Vec<i8>, Vec<u32>, Vec<i16>)> = None;
    for isa in IsaLevel::available() {
        let mut buf = ActBuf::new();
        let acts = quantized(isa, &mut buf, &x, 1, k);
        // SAFETY: one row of k elements, just quantized.
        let (codes, d, sums, dsums, dsums16) = unsafe {
            (
                std::slice::from_raw_parts(acts.codes, k),
                std::slice::from_raw_parts(acts.d, k / 32),
                std::slice::from_raw_parts(acts.sums, k / 16),
                std::slice::from_raw_parts(acts.dsums, k / 32),
                std::slice::from_raw_parts(acts.dsums16, k / 16),
            )
        };
        for group in 0..k / 32 {
            let x = &x[32 * group..][..32];
            let codes = &codes[32 * group..][..32];
            let amax = x.iter().fold(0f32, |m, v| if v.is_nan() { f32::INFINITY } else { m.max(v.abs()) });
            if !amax.is_finite() {
                assert!(d[group].is_nan() && codes.iter().all(|&c| c == 0));
                continue;
            }
            let inverse = 127.0 / amax;
            let (step, inverse) = if inverse.is_finite() { (amax / 127.0, inverse) } else { (0.0, 0.0) };
            assert_eq!(d[group], step);
            for (code, x) in codes.iter().zip(x) {
                assert_eq!(f32::from(*code), (x * inverse).round_ties_even().clamp(-127.0, 127.0));
            }
            for half in 0..2 {
                let sum: i16 = codes[16 * half..][..16].iter().map(|&c| i16::from(c)).sum();
                assert_eq!(sums[2 * group + half], sum);
                assert_eq!(dsums16[2 * group + half], step * f32::from(sum));
            }
            assert_eq!(dsums[group], step * f32::from(sums[2 * group] + sums[2 * group + 1]));
        }
        let all = (codes.to_vec(), d.iter().map(|d| d.to_bits()).collect(), sums.to_vec());
        let first = reference.get_or_insert_with(|| all.clone());
        assert_eq!(*first, all, "{isa}");
    }
}

#[test]
fn scratch_is_reserved_ahead_of_the_first_call() {
    for isa in IsaLevel::available() {
        for op in [Contraction::MatVec, Contraction::Gemm] {
            for acts in [ActKind::Int8, ActKind::F32, ActKind::Bf16] {
                let (k, tokens) = (1536, 13);
                let format = if acts == ActKind::Bf16 { Format::BF16 } else { Format::Q6_K };
                let Some(kernel) = kernel(op, format, acts, isa) else {
                    assert!(acts == ActKind::Bf16 && !rounds_to_bf16(isa));
                    continue;
                };
                let row_bytes = format.row_bytes(k).unwrap();
                let data = vec![1u8; 5 * row_bytes];
                let x = vec![0.5f32; tokens * k];
                let mut buf = ActBuf::new();
                let input = match acts {
                    ActKind::Int8 => Input::Int8(quantized(isa, &mut buf, &x, tokens, k)),
                    ActKind::F32 | ActKind::Bf16 => Input::F32 { data: x.as_ptr(), stride: k },
                };
                let mut scratch = Scratch::new();
                scratch.reserve(scratch_bytes(op, format, acts, isa, k, tokens));
                let before = scratch.capacity();
                let w = Weights { format, data: data.as_ptr(), row_bytes, k };
                contract(kernel, w, 0..5, input, Tokens::Dense { first: 0, count: tokens }, &mut scratch);
                assert_eq!(scratch.capacity(), before, "{isa} {op:?} {acts:?}");
            }
        }
    }
}

#[test]
fn only_weight_formats_have_kernels() {
    for &format in Format::ALL {
        for op in [Contraction::MatVec, Contraction::Gemm] {
            assert_eq!(kernel(op, format, ActKind::Int8, IsaLevel::Portable).is_some(), format.is_block(), "{format}");
            assert_eq!(kernel(op, format, ActKind::F32, IsaLevel::Portable).is_some(), format.is_weight(), "{format}");
        }
    }
}
