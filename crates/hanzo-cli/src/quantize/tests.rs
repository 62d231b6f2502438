//! Small models through the whole conversion.

use std::path::PathBuf;

use hanzo_gguf::{Format::*, formats};

use super::*;
use crate::failure::report;
use crate::progress::{Progress, Unit};

/// Deterministic values, roughly normal.
fn values(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 - 0.5
    };
    (0..n).map(|_| (0..6).map(|_| next()).sum::<f32>() * 0.1).collect()
}

fn packed(format: Format, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; format.row_bytes(values.len()).unwrap()];
    formats::from_float(format, values, None, &mut bytes).unwrap();
    bytes
}

type Tensor = (&'static str, &'static [u64], Format);

const TENSORS: &[Tensor] = &[
    ("token_embd.weight", &[512, 600], F16),
    ("output.weight", &[512, 600], F32),
    ("output_norm.weight", &[512], F32),
    ("blk.0.attn_norm.weight", &[512], BF16),
    ("blk.0.attn_v.weight", &[512, 64], F16),
    ("blk.0.attn_q.weight", &[512, 512], BF16),
    ("blk.0.ffn_gate_inp.weight", &[512, 3], F32),
    ("blk.0.ffn_down_exps.weight", &[256, 512, 3], F16),
    ("blk.0.odd.weight", &[96, 4], F32),
    ("positions", &[4], I32),
];

fn model(tensors: &[Tensor]) -> Gguf {
    let mut writer = GgufWriter::new(Vec::new());
    let metadata = writer.metadata_mut();
    metadata.set("general.architecture", "test");
    metadata.set("test.block_count", 1_u32);
    metadata.set("test.expert_count", 0_u32);
    metadata.set("general.file_type", 1_u32);
    for (name, dims, format) in tensors {
        writer.declare(name, dims, *format).unwrap();
    }
    let mut data = writer.begin().unwrap();
    for (i, (name, dims, format)) in tensors.iter().enumerate() {
        let n = dims.iter().product::<u64>() as usize;
        let bytes = if *format == I32 { vec![7; 4 * n] } else { packed(*format, &values(n, i as u32 + 1)) };
        data.tensor(name, &bytes).unwrap();
    }
    Gguf::from_bytes(data.finish().unwrap()).unwrap()
}

fn options(mix: &str) -> Options {
    Options {
        mix: mix::find(mix).unwrap(),
        pure: false,
        exceptions: Vec::new(),
        imatrix: None,
        allow_requantize: false,
        threads: 3,
        measure: true,
    }
}

struct Out(PathBuf);

impl Out {
    fn new(name: &str) -> Out {
        Out(std::env::temp_dir().join(format!("hanzo-quantize-test-{}-{name}.gguf", std::process::id())))
    }
}

impl Drop for Out {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn quantize(gguf: &Gguf, options: &Options, out: &Out) -> Vec<Step> {
    let progress = Progress::new("", Unit::Bytes, None, false);
    run(gguf, plan(gguf, options).unwrap(), options, &out.0, &progress, &AtomicBool::new(false)).unwrap()
}

fn floats(gguf: &Gguf, name: &str) -> Vec<f32> {
    let tensor = gguf.need_tensor(name).unwrap();
    let mut values = vec![0.0; tensor.elements() as usize];
    formats::to_float(tensor.format, gguf.data(tensor), &mut values);
    values
}

#[test]
fn a_mix_lands_with_each_tensor_in_its_format_and_the_errors_measured() {
    let gguf = model(TENSORS);
    let out = Out::new("mix");
    let steps = quantize(&gguf, &options("Q4_K_S"), &out);
    let copy = Gguf::open(&out.0).unwrap();
    let expected = [Q4_K, Q6_K, F32, F32, Q5_K, Q4_K, F32, Q4_K, Q5_0, I32];
    assert_eq!(copy.tensors().iter().map(|t| t.format).collect::<Vec<_>>(), expected);
    assert_eq!(copy.metadata().u32("general.file_type").unwrap(), 14);
    assert_eq!(copy.metadata().str("general.architecture").unwrap(), "test");
    for (step, tensor) in steps.iter().zip(copy.tensors()) {
        assert_eq!((&step.tensor, step.bytes), (&tensor.name, tensor.size()));
        if step.from == step.to {
            assert_eq!(copy.data(tensor), gguf.data(gguf.tensor(&tensor.name).unwrap()));
            continue;
        }
        let sums = Sums::of(&floats(&gguf, &step.tensor), &floats(&copy, &step.tensor));
        let (measured, again) = (step.error.unwrap(), sums.error());
        assert!((measured.relative_rmse - again.relative_rmse).abs() < 1e-12, "{}", step.tensor);
        let bound = if step.to == F32 { 0.0 } else { 0.1 };
        assert!(measured.relative_rmse <= bound, "{}: {measured:?}", step.tensor);
    }
}

#[test]
fn the_result_does_not_depend_on_the_number_of_threads() {
    let gguf = model(TENSORS);
    let (one, many) = (Out::new("one"), Out::new("many"));
    quantize(&gguf, &Options { threads: 1, ..options("Q5_K_M") }, &one);
    quantize(&gguf, &Options { threads: 7, ..options("Q5_K_M") }, &many);
    assert!(std::fs::read(&one.0).unwrap() == std::fs::read(&many.0).unwrap());
}

#[test]
fn exceptions_win_over_the_mix_in_their_order() {
    let gguf = model(TENSORS);
    let exception = |pattern: &str, format| (Regex::new(pattern).unwrap(), format);
    let mut options = options("Q8_0");
    options.exceptions = vec![exception("attn_q", Q4_0), exception("attn_", Q6_K), exception("positions", Q8_0)];
    let steps = plan(&gguf, &options).unwrap();
    let to = |name: &str| steps.iter().find(|s| s.tensor == name).unwrap().to;
    assert_eq!((to("blk.0.attn_q.weight"), to("blk.0.attn_v.weight")), (Q4_0, Q6_K));
    assert_eq!((to("output.weight"), to("positions")), (Q8_0, I32));
    options.exceptions = vec![exception("odd", Q4_K)];
    assert!(report(&plan(&gguf, &options).unwrap_err()).contains("rows of 96"));
}

#[test]
fn quantized_sources_need_leave_and_unchanged_tensors_do_not() {
    let gguf = model(&[("blk.0.attn_q.weight", &[256, 8], Q8_0), ("output.weight", &[256, 8], Q6_K)]);
    let error = report(&plan(&gguf, &options("Q4_K_M")).unwrap_err());
    assert!(error.contains("`blk.0.attn_q.weight` is Q8_0 already") && error.contains("--allow-requantize"), "{error}");
    let steps = plan(&gguf, &Options { allow_requantize: true, ..options("Q4_K_M") }).unwrap();
    assert_eq!((steps[0].to, steps[1].to), (Q4_K, Q6_K));
    let gguf = model(&[("blk.0.attn_q.weight", &[256, 8], Q8_0)]);
    assert_eq!(plan(&gguf, &options("Q8_0")).unwrap()[0].to, Q8_0);
}

#[test]
fn importance_is_used_per_expert_and_must_fit_the_model() {
    let gguf = model(&[("blk.0.ffn_down_exps.weight", &[256, 4, 2], F32)]);
    let imatrix = |columns: Vec<f32>| {
        let mut writer = GgufWriter::new(Vec::new());
        let name = "blk.0.ffn_down_exps.weight";
        writer.declare(&format!("{name}.in_sum2"), &[columns.len() as u64 / 2, 2], F32).unwrap();
        writer.declare(&format!("{name}.counts"), &[1, 2], F32).unwrap();
        let mut data = writer.begin().unwrap();
        data.append(&packed(F32, &columns)).unwrap();
        data.append(&packed(F32, &[1.0, 0.0])).unwrap();
        let path = Out::new("imatrix");
        std::fs::write(&path.0, data.finish().unwrap()).unwrap();
        Some(Imatrix::open(&path.0).unwrap())
    };
    // Only the first 16 columns of the first expert matter.
    let columns: Vec<f32> = (0..512).map(|i| if i < 16 { 1000.0 } else { 1e-3 }).collect();
    let (plain, weighted) = (Out::new("plain"), Out::new("weighted"));
    quantize(&gguf, &options("Q2_K"), &plain);
    let steps = quantize(&gguf, &Options { imatrix: imatrix(columns), ..options("Q2_K") }, &weighted);
    assert!(steps[0].weighted);
    let (plain, weighted) = (Gguf::open(&plain.0).unwrap(), Gguf::open(&weighted.0).unwrap());
    let name = "blk.0.ffn_down_exps.weight";
    let (truth, plain, weighted) = (floats(&gguf, name), floats(&plain, name), floats(&weighted, name));
    let error =
        |copy: &[f32]| (0..4).map(|r| Sums::of(&truth[r * 256..][..16], &copy[r * 256..][..16]).errors).sum::<f64>();
    assert!(error(&weighted) < error(&plain), "{} {}", error(&weighted), error(&plain));
    // The second expert saw no token: as without importance.
    assert_eq!(weighted[1024..], plain[1024..]);
    let misfit = plan(&gguf, &Options { imatrix: imatrix(vec![1.0; 256]), ..options("Q2_K") });
    assert!(report(&misfit.unwrap_err()).contains("made for another model"));
}

#[test]
fn a_value_that_is_no_number_names_tensor_and_rows_and_nothing_lands() {
    let mut writer = GgufWriter::new(Vec::new());
    writer.metadata_mut().set("general.architecture", "test");
    writer.declare("blk.0.attn_q.weight", &[256, 2], F32).unwrap();
    let mut bytes = vec![0; 2048];
    bytes[1024..1028].copy_from_slice(&f32::NAN.to_le_bytes());
    let mut data = writer.begin().unwrap();
    data.append(&bytes).unwrap();
    let gguf = Gguf::from_bytes(data.finish().unwrap()).unwrap();
    let out = Out::new("nan");
    let options = options("Q4_0");
    let progress = Progress::new("", Unit::Bytes, None, false);
    let error = report(
        &run(&gguf, plan(&gguf, &options).unwrap(), &options, &out.0, &progress, &AtomicBool::new(false)).unwrap_err(),
    );
    assert!(error.contains("tensor `blk.0.attn_q.weight`") && error.contains("NaN"), "{error}");
    assert!(!out.0.exists());
}

#[test]
fn a_conversion_that_is_interrupted_leaves_nothing() {
    let (gguf, options) = (model(TENSORS), options("Q4_K_M"));
    let folder = std::env::temp_dir().join(format!("hanzo-quantize-test-{}-interrupted", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let progress = Progress::new("", Unit::Bytes, None, false);
    let (steps, out) = (plan(&gguf, &options).unwrap(), folder.join("out.gguf"));
    let error = run(&gguf, steps, &options, &out, &progress, &AtomicBool::new(true)).unwrap_err();
    assert!(crate::failure::is_interrupted(&error), "{error:?}");
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    std::fs::remove_dir_all(folder).unwrap();
}
