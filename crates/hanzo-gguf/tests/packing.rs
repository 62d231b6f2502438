//! `from_float`: how good the packed weights are, and what it does with unusual input.

use hanzo_gguf::Format::{self, *};
use hanzo_gguf::formats::{self, FormatError};
use std::path::PathBuf;

/// Relative RMSE of llama.cpp's `llama-quantize --pure` (commit of 2026-11, no importance matrix): on a million Gaussian
/// weights, and on the real ones of `weights/smollm2-embedding.q8_0`.
const PEER: &[(Format, f64, f64)] = &[
    (Q4_0, 0.08600, 0.09964),
    (Q4_1, 0.07826, 0.08435),
    (Q5_0, 0.04270, 0.04930),
    (Q5_1, 0.03785, 0.04070),
    (Q8_0, 0.00535, 0.0),
    (Q2_K, 0.29670, 0.31232),
    (Q3_K, 0.15098, 0.16647),
    (Q4_K, 0.07137, 0.07746),
    (Q5_K, 0.03613, 0.03929),
    (Q6_K, 0.01778, 0.02002),
    (IQ4_NL, 0.07618, 0.08373),
    (IQ4_XS, 0.07678, 0.08457),
    (TQ1_0, 0.80812, 0.86686),
    (TQ2_0, 0.80812, 0.86686),
    (MXFP4, 0.11407, 0.12246),
];

/// Ids from here on belong to formats made up for tests, which nobody else can be compared with.
const SYNTHETIC: u32 = 0xF000;

/// Numbers in [0, 1) from a 64-bit linear congruential generator.
fn uniform(seed: u64) -> impl FnMut() -> f64 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / (1u64 << 24) as f64
    }
}

/// Gaussian weights with a standard deviation of 0.02 (Box and Muller).
fn gaussian(n: usize) -> Vec<f32> {
    let mut uniform = uniform(7);
    (0..n)
        .map(|_| {
            let radius = (-2.0 * (1.0 - uniform()).ln()).sqrt();
            (0.02 * radius * (std::f64::consts::TAU * uniform()).cos()) as f32
        })
        .collect()
}

fn real() -> Vec<f32> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/weights/smollm2-embedding.q8_0");
    let packed = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut weights = vec![0.0; packed.len() / 34 * 32];
    formats::to_float(Q8_0, &packed, &mut weights);
    weights
}

fn pack(format: Format, src: &[f32], importance: Option<&[f32]>) -> Vec<u8> {
    let mut packed = vec![0xa5; format.row_bytes(src.len()).expect("whole blocks")];
    formats::from_float(format, src, importance, &mut packed).unwrap_or_else(|e| panic!("{format}: {e}"));
    packed
}

fn there_and_back(format: Format, src: &[f32]) -> Vec<f32> {
    let mut back = vec![f32::NAN; src.len()];
    formats::to_float(format, &pack(format, src, None), &mut back);
    back
}

#[test]
fn no_format_loses_more_than_llama_cpp_on_gaussian_and_on_real_weights() {
    for (name, weights) in [("gaussian", gaussian(1 << 16)), ("real", real())] {
        for &(format, on_gaussian, on_real) in PEER {
            let peer = if name == "gaussian" { on_gaussian } else { on_real };
            let report = formats::round_trip(format, &weights, None).expect("finite weights");
            assert!(report.relative_rmse <= peer, "{name}: {report}, llama.cpp {:.3}%", 100.0 * peer);
        }
    }
}

#[test]
fn every_format_but_the_unscaled_floats_is_in_the_comparison() {
    let compared: Vec<Format> = PEER.iter().map(|row| row.0).collect();
    for format in formats::writable().filter(|f| f.is_block() && f.id() < SYNTHETIC) {
        assert!(compared.contains(&format), "{format}");
    }
}

#[test]
fn importance_lowers_the_error_that_it_weighs() {
    let mut uniform = uniform(3);
    let importance: Vec<f32> = (0..1024).map(|_| (6.0 * uniform()).exp() as f32).collect();
    for weights in [gaussian(1 << 16), real()] {
        for &(format, ..) in PEER {
            let with = formats::round_trip(format, &weights, Some(&importance)).expect("finite weights");
            let mut back = vec![0.0; weights.len()];
            formats::to_float(format, &pack(format, &weights, None), &mut back);
            let (mut error, mut square) = (0f64, 0f64);
            for (i, (&x, &y)) in weights.iter().zip(&back).enumerate() {
                let w = f64::from(importance[i % 1024]);
                error += w * f64::from(x - y).powi(2);
                square += w * f64::from(x).powi(2);
            }
            let without = (error / square).sqrt();
            let better = with.weighted_relative_rmse < 0.995 * without || without == 0.0;
            assert!(better, "{format}: {} with importance, {without} without", with.weighted_relative_rmse);
        }
    }
}

#[test]
fn even_importance_changes_nothing() {
    let weights = gaussian(4096);
    for format in formats::writable() {
        assert_eq!(pack(format, &weights, Some(&[3.0; 512])), pack(format, &weights, None), "{format}");
        assert_eq!(pack(format, &weights, Some(&[0.0; 512])), pack(format, &weights, None), "{format}");
    }
}

#[test]
fn rows_are_packed_alike_together_and_one_by_one() {
    let weights = gaussian(8 * 512);
    let importance: Vec<f32> = (0..512).map(|i| 1.0 + (i % 17) as f32).collect();
    for format in formats::writable() {
        let together = pack(format, &weights, Some(&importance));
        let one_by_one: Vec<u8> =
            weights.chunks_exact(512).flat_map(|row| pack(format, row, Some(&importance))).collect();
        assert!(together == one_by_one, "{format}");
    }
}

#[test]
fn weights_that_were_unpacked_are_packed_with_hardly_any_new_loss() {
    for format in formats::writable() {
        let weights = gaussian(1 << 14);
        let first = formats::round_trip(format, &weights, None).expect("finite weights").relative_rmse;
        let once = there_and_back(format, &weights);
        let again = formats::round_trip(format, &once, None).expect("finite weights").relative_rmse;
        assert!(again <= 0.1 * first, "{format}: {first}, then {again}");
    }
}

#[test]
fn zeros_come_back_as_zeros() {
    for format in formats::writable() {
        assert!(there_and_back(format, &[0.0; 512]).iter().all(|&v| v == 0.0), "{format}");
        assert!(there_and_back(format, &[-0.0; 512]).iter().all(|&v| v == 0.0), "{format}");
    }
}

#[test]
fn a_block_of_one_value_comes_back_as_that_value() {
    for format in formats::writable() {
        for value in [1.0f32, -1.0, 0.037, -250.0] {
            // Half floats hold 11 bits and BF16 8; a scale that is a power of two costs up to a sixth.
            let power_of_two = format == MXFP4 || format.id() >= SYNTHETIC;
            let bound = if power_of_two { 1.0 / 6.0 } else { 4e-3 };
            for back in there_and_back(format, &[value; 256]) {
                assert!((back - value).abs() <= bound * value.abs(), "{format}: {value} came back as {back}");
            }
        }
    }
}

#[test]
fn ternary_weights_come_back_exactly() {
    let mut uniform = uniform(11);
    let weights: Vec<f32> = (0..1024).map(|_| [-0.03125, 0.0, 0.03125][(uniform() * 3.0) as usize]).collect();
    for format in [TQ1_0, TQ2_0] {
        assert_eq!(there_and_back(format, &weights), weights, "{format}");
    }
}

#[test]
fn weights_of_any_magnitude_come_back_finite_and_no_larger() {
    let shape = gaussian(512);
    let largest = shape.iter().fold(0f32, |m, v| m.max(v.abs()));
    for format in formats::writable() {
        for exponent in [-149, -140, -126, -100, -60, -24, 0, 10, 20, 60, 100, 127] {
            let scale = 2f64.powi(exponent) / f64::from(largest);
            let weights: Vec<f32> = shape.iter().map(|&v| (f64::from(v) * scale) as f32).collect();
            let most = 2f64.powi(exponent);
            for back in there_and_back(format, &weights) {
                let fits = f64::from(back.abs()) <= 1.5 * most;
                assert!(back.is_finite() && fits, "{format} at 2^{exponent}: {back:e}");
            }
        }
        let extremes = [f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1e-45, 0.0, -1e-45, 1.0, -1.0];
        let weights: Vec<f32> = extremes.iter().copied().cycle().take(512).collect();
        assert!(there_and_back(format, &weights).iter().all(|v| v.is_finite()), "{format}");
    }
}

#[test]
fn small_weights_keep_what_the_half_float_scale_can_resolve() {
    // Weights of 1e-3: scales of about 1e-5 to 1e-6 are subnormal half floats.
    let weights: Vec<f32> = gaussian(1 << 14).iter().map(|v| v / 20.0).collect();
    for &(format, peer, _) in PEER.iter().filter(|row| row.1 > 0.01) {
        let report = formats::round_trip(format, &weights, None).expect("finite weights");
        assert!(report.relative_rmse <= 1.05 * peer, "{report}");
    }
}

#[test]
fn half_floats_round_to_the_nearest_and_clamp() {
    let cases = [
        (1.0f32, 1.0f32),
        (2049.0, 2048.0),
        (2051.0, 2052.0),
        (1e30, 65504.0),
        (-1e30, -65504.0),
        (3e-8, 5.9604645e-8),
    ];
    for (given, want) in cases {
        assert_eq!(there_and_back(F16, &[given]), [want]);
    }
    assert_eq!(there_and_back(BF16, &[f32::MAX]), [3.389_531_4e38]);
    assert_eq!(there_and_back(BF16, &[1.0 + 1.0 / 256.0]), [1.0]);
    assert_eq!(there_and_back(F32, &[1e-45, f32::MAX]), [1e-45, f32::MAX]);
}

#[test]
fn a_value_that_is_not_finite_is_an_error_that_names_its_element() {
    for format in formats::writable() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut weights = vec![0.5; 1024];
            weights[700] = value;
            let mut packed = vec![7; format.row_bytes(1024).expect("whole blocks")];
            let error = formats::from_float(format, &weights, None, &mut packed).expect_err("not finite");
            assert!(matches!(error, FormatError::NotFinite { element: 700, .. }), "{format}: {error}");
            assert!(error.to_string().contains("element 700"), "{error}");
            assert!(packed.iter().all(|&b| b == 7), "{format}: the destination is untouched");
        }
    }
}

#[test]
fn a_format_that_is_only_read_is_refused_by_name_with_the_ones_that_can_be_written() {
    for format in [IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, NVFP4, Q1_0, Q2_0, F64, I8, I16, I32, I64] {
        let mut packed = vec![0; format.row_bytes(256).expect("whole blocks")];
        let error = formats::from_float(format, &[0.0; 256], None, &mut packed).expect_err("only read");
        assert_eq!(error, FormatError::NotWritable { format });
        let text = error.to_string();
        assert!(text.starts_with(format.name()) && text.contains("Q4_K, Q5_K, Q6_K"), "{text}");
    }
}

#[test]
fn sizes_and_importance_that_do_not_fit_are_errors() {
    let mut packed = [0; 144];
    let from_float = |n: usize, importance: Option<&[f32]>, packed: &mut [u8]| {
        formats::from_float(Q4_K, &vec![1.0; n], importance, packed).expect_err("does not fit")
    };
    assert!(matches!(from_float(255, None, &mut packed), FormatError::Size { elements: 255, .. }));
    assert!(matches!(from_float(512, None, &mut packed), FormatError::Size { bytes: 144, .. }));
    assert!(matches!(
        from_float(256, Some(&[1.0; 128]), &mut packed),
        FormatError::ImportanceSize { columns: 128, .. }
    ));
    assert!(matches!(from_float(256, Some(&[1.0; 512]), &mut packed), FormatError::ImportanceSize { .. }));
    assert!(matches!(from_float(256, Some(&[]), &mut packed), FormatError::ImportanceSize { columns: 0, .. }));
    let mut importance = [1.0; 256];
    importance[9] = -1.0;
    let error = from_float(256, Some(&importance), &mut packed);
    assert_eq!(error, FormatError::Importance { column: 9, value: -1.0 });
}

#[test]
fn the_report_measures_what_it_says() {
    let weights = [1.0f32, 2049.0, -2049.0, 0.0];
    let report = formats::round_trip(F16, &weights, None).expect("finite weights");
    assert_eq!((report.format, report.elements, report.max_error), (F16, 4, 1.0));
    assert!((report.rmse - 0.5f64.sqrt()).abs() < 1e-12);
    assert!((report.relative_rmse - (2.0 / (1.0 + 2.0 * 2049.0f64.powi(2))).sqrt()).abs() < 1e-12);
    assert_eq!(formats::round_trip(F32, &weights, None).expect("finite weights").rmse, 0.0);
}
