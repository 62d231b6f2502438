//! Which kernel each device gets, seen without the device: whole launches, and what is left when features are masked.

use super::fixtures::options;
use super::program;
use super::variants::{Ask, Input, Load, Task, constant, pick};
use crate::gpu::features::{Features, Mask, MatrixUnit, MatrixUnits};
use crate::gpu::{Buffer, Launch, Program, Ptr};
use crate::levers::LeverSet;
use crate::plan::{DType, Dim, Member, Op, Plan, WeightId};
use hanzo_gguf::Format;
use hanzo_kernels::{Target, kernels};

const ROWS: usize = 200;
const COLS: usize = 256;

/// A linear of `tokens` rows, by experts if there are any.
fn lowered(features: &Features, format: Format, tokens: usize, experts: usize) -> Program {
    let mut p = Plan::new(COLS);
    let x = p.input("x", Dim::Tokens, COLS, DType::F32);
    let w = p.weight("w", format, experts.max(1), ROWS, COLS);
    if experts > 0 {
        let ids = p.input("ids", Dim::Tokens, 2, DType::I32);
        let y = p.value("y", Dim::Slots(2), ROWS);
        p.push(Op::MoeLinear { x, ids, member: Member { w, bias: None, out: y } });
        p.outputs = vec![y];
    } else {
        let y = p.value("y", Dim::Tokens, ROWS);
        p.push(Op::Linear { x, member: Member { w, bias: None, out: y } });
        p.outputs = vec![y];
    }
    program(&p, &options(LeverSet::default(), tokens), features, &|_| None).expect("it lowers")
}

fn gemm(p: &Program) -> &Launch {
    p.launches.iter().find(|l| l.kernel.op.starts_with("gemm")).expect("a GEMM")
}

fn constants(l: &Launch, names: &[&str]) -> Vec<u32> {
    let all = hanzo_kernels::constants(l.kernel.op);
    let value = |name: &&str| l.constants[all.iter().position(|c| c.0 == **name).expect("a constant")];
    names.iter().map(value).collect()
}

/// What the argument at a byte offset points to.
fn pointer(l: &Launch, at: usize) -> Option<Ptr> {
    l.relocations.iter().find(|r| r.0 == at).map(|r| r.1)
}

/// Byte offset of a kernel's argument.
fn offset(l: &Launch, name: &str) -> usize {
    let op = hanzo_kernels::op(l.kernel.op).expect("an op");
    op.layout().1[op.args.iter().position(|a| a.name == name).expect("an argument")]
}

fn word(l: &Launch, name: &str) -> u32 {
    let at = offset(l, name);
    u32::from_le_bytes(l.args[at..at + 4].try_into().expect("four bytes"))
}

#[test]
fn a_cuda_devices_program_multiplies_on_its_tensor_cores() {
    let p = lowered(&Features::cuda(80), Format::Q4_K, 100, 0);
    let l = gemm(&p);
    assert_eq!((l.kernel.op, l.kernel.format), ("gemm_mma", Some(Format::Q4_K)));
    // 200 rows in tiles of 128, 100 tokens in tiles of 64.
    assert_eq!(l.groups, [2, 2, 1]);
    let names = ["THREADS", "WAVE", "HALF_HW", "BM", "BN", "WM", "MI", "NI", "TERMS", "BIAS", "MOE"];
    assert_eq!(constants(l, &names), [256, 32, 1, 64, 128, 2, 2, 2, 1, 0, 0]);
    assert_eq!(["rows", "units", "div"].map(|n| word(l, n)), [ROWS as u32, 8, 1]);
    assert_eq!(pointer(l, offset(l, "w")).map(|p| p.buffer), Some(Buffer::Weight(WeightId(0))));
    let quantize = p.launches.iter().find(|l| l.kernel.op == "quantize").expect("activations are quantized");
    for name in ["xq", "xd", "xs"] {
        assert_eq!(pointer(l, offset(l, name)), pointer(quantize, offset(quantize, name)), "{name}");
    }
    // Few tokens: four waves, 32 rows of x.
    let few = lowered(&Features::cuda(80), Format::Q4_K, 20, 0);
    assert_eq!((constants(gemm(&few), &["THREADS", "BM"]), gemm(&few).groups), (vec![128, 32], [2, 1, 1]));
    // Experts: 200 slots of 8, 25 each, and a spare tile an expert.
    let moe = lowered(&Features::cuda(80), Format::Q4_K, 100, 8);
    assert_eq!((gemm(&moe).kernel.op, gemm(&moe).groups), ("gemm_mma", [2, 200 / 32 + 1 + 8, 1]));
    assert!(moe.launches.iter().any(|l| l.kernel.op == "moe_sort" && constants(l, &["TILE"]) == [32]));
}

#[test]
fn a_hopper_devices_program_multiplies_halves() {
    let p = lowered(&Features::cuda(90), Format::Q4_K, 300, 0);
    let l = gemm(&p);
    assert_eq!((l.kernel.op, l.kernel.format), ("gemm_mma_f16", Some(Format::Q4_K)));
    // 300 tokens in tiles of 128, 200 rows in tiles of 128: tiles of x are the fast axis.
    assert_eq!(l.groups, [3, 2, 1]);
    let names = ["THREADS", "WAVE", "BM", "BN", "WM", "MI", "NI", "STAGES", "BFLOAT", "BIAS", "MOE"];
    assert_eq!(constants(l, &names), [256, 32, 128, 128, 2, 4, 2, 3, 0, 0, 0]);
    // What it reads was made from the quantized rows.
    let halves = p.launches.iter().find(|l| l.kernel.op == "q8_to_half").expect("rows become halves");
    for name in ["xh", "xscale"] {
        assert_eq!(pointer(l, offset(l, name)), pointer(halves, offset(halves, name)), "{name}");
    }
    // Float weights, from float rows.
    let p = lowered(&Features::cuda(90), Format::BF16, 40, 0);
    assert_eq!((gemm(&p).kernel.op, gemm(&p).groups), ("gemm_mma_f16", [1, 2, 1]));
    assert!(p.launches.iter().any(|l| l.kernel.op == "rows_to_half"));
    // Experts: 600 slots of 8, 75 each, and a spare tile an expert.
    let moe = lowered(&Features::cuda(90), Format::Q4_K, 300, 8);
    assert_eq!((gemm(&moe).kernel.op, gemm(&moe).groups), ("gemm_mma_f16", [600 / 128 + 1 + 8, 2, 1]));
    assert!(moe.launches.iter().any(|l| l.kernel.op == "moe_sort" && constants(l, &["TILE"]) == [128]));
}

#[test]
fn every_backends_own_tile_is_launched_for_its_device() {
    for (features, kernel, target) in [
        (Features::cuda(89), "gemm_mma", Target::Cuda),
        (Features::cuda(90), "gemm_mma_f16", Target::Cuda),
        (Features::hip("gfx1100"), "gemm_wmma", Target::Hip),
        (Features::hip("gfx942"), "gemm_mfma", Target::Hip),
        (Features::metal(), "gemm_simd", Target::Msl),
        (
            Features { matrix: MatrixUnits::NONE.with(MatrixUnit::Coop), ..Features::cuda(80) },
            "gemm_coop",
            Target::Glsl,
        ),
    ] {
        for experts in [0, 4] {
            let p = lowered(&features, Format::Q6_K, 300, experts);
            assert_eq!(gemm(&p).kernel.op, kernel);
            // Whatever a program runs has text for its backend.
            for l in &p.launches {
                assert!(kernels(target).any(|k| k == l.kernel), "{} for {}", l.kernel, target.name());
            }
        }
        assert_ne!(gemm(&lowered(&features, Format::F32, 300, 0)).kernel.op, "gemm_coop");
    }
}

#[test]
fn matrices_of_a_workgroup_are_a_lever_and_fall_back_to_those_of_a_wave() {
    let both = MatrixUnits::NONE.with(MatrixUnit::Coop).with(MatrixUnit::Coop2);
    let f = Features { matrix: both, shared_bytes: 48 << 10, ..Features::cuda(90) };
    assert_eq!(gemm(&lowered(&f, Format::Q4_K, 300, 0)).kernel.op, "gemm_coop2");
    let ask = |task, format, tokens, experts: Option<(usize, usize)>| {
        let load = Load { tokens, experts };
        let ask = Ask {
            task,
            input: Input::Int8,
            load,
            rows: 4096,
            format: Some(format),
            halves: true,
            deterministic: false,
        };
        let v = pick(&ask, &f).expect("a kernel");
        (v.kernel, constant(v, "DOUBLE"))
    };
    assert_eq!(ask(Task::Linear, Format::Q4_K, 512, None), ("gemm_coop2", 1));
    // 8 KiB of codebook beside the tiles are too much.
    assert_eq!(ask(Task::Linear, Format::IQ1_S, 512, None).0, "gemm_coop");
    assert_eq!(ask(Task::Moe, Format::Q4_K, 512, Some((8, 8))), ("gemm_coop2", 1));
    assert_eq!(ask(Task::Linear, Format::Q4_K, 64, None).0, "gemm_coop");
    // Experts that get few rows each.
    assert_eq!(ask(Task::Moe, Format::Q4_K, 512, Some((8, 128))).0, "gemm_coop");
    let less = f.within(LeverSet::NONE);
    assert!(less.matrix.has(MatrixUnit::Coop) && !less.matrix.has(MatrixUnit::Coop2));
}

#[test]
fn each_masked_feature_chooses_the_next_row() {
    let chosen = |features: &Features, mask: &str, input, tokens| {
        let features = Mask::parse(mask).expect("a mask").apply(features.clone());
        let format = Some(if input == Input::Int8 { Format::Q4_K } else { Format::F16 });
        let load = Load { tokens, experts: None };
        let ask = Ask { task: Task::Linear, input, load, rows: 4096, format, halves: true, deterministic: false };
        let v = pick(&ask, &features).expect("a kernel");
        (v.kernel, constant(v, "BM"))
    };
    let vulkan = Features { matrix: MatrixUnits::NONE.with(MatrixUnit::Coop), ..Features::cuda(90) };
    for (features, input, steps) in [
        (
            &vulkan,
            Input::Int8,
            &[
                ("", "gemm_coop", 128),
                ("coop", "gemm_dot", 64),
                ("shared=32768", "gemm_dot", 64),
                ("matrix,threads=128", "gemm_dot", 32),
                ("matrix,threads=64", "gemm_dot", 16),
                ("matrix,shared=10240", "gemm_dot", 32),
                ("matrix,threads=32", "matvec", 1),
                ("matrix,dot", "gemm_codes", 64),
                ("matrix,dot,shared=16384", "gemm_codes", 16),
                ("matrix,dot,threads=64", "gemm_codes", 16),
                ("matrix,dot,shared=4096", "matvec", 1),
            ][..],
        ),
        (
            &vulkan,
            Input::Float,
            &[
                ("", "gemm_coop", 128),
                ("coop", "gemm_f32", 64),
                ("coop,threads=64", "gemm_f32", 16),
                ("coop,shared=4096", "gemm_f32", 16),
                ("coop,threads=32", "matvec_f32", 1),
            ][..],
        ),
        (
            &Features::cuda(80),
            Input::Int8,
            &[
                ("", "gemm_mma", 64),
                ("mma-int8", "gemm_mma_f16", 128),
                ("mma-int8,mma-f16", "gemm_dot", 64),
                ("threads=128", "gemm_dot", 32),
            ][..],
        ),
        (
            &Features::cuda(90),
            Input::Int8,
            &[
                ("", "gemm_mma_f16", 128),
                ("mma-f16-first", "gemm_mma", 64),
                ("mma-f16", "gemm_mma", 64),
                ("shared=49152", "gemm_mma", 64),
                ("mma-f16-first,mma-int8", "gemm_mma_f16", 128),
                ("mma-f16,mma-int8", "gemm_dot", 64),
                ("matrix,dot", "gemm_codes", 64),
            ][..],
        ),
        // Rows of floats stay floats where no unit takes halves.
        (
            &Features::cuda(80),
            Input::Float,
            &[("", "gemm_mma_f16", 128), ("mma-int8", "gemm_mma_f16", 128), ("mma-f16", "gemm_f32", 64)][..],
        ),
        (&Features::hip("gfx1100"), Input::Int8, &[("", "gemm_wmma", 64), ("wmma", "gemm_dot", 64)][..]),
        (&Features::hip("gfx942"), Input::Int8, &[("", "gemm_mfma", 64), ("mfma", "gemm_dot", 64)][..]),
        (&Features::metal(), Input::Int8, &[("", "gemm_simd", 32), ("simdgroup", "gemm_codes", 64)][..]),
    ] {
        for (mask, kernel, high) in steps {
            let (got, bm) = chosen(features, mask, input, 512);
            assert_eq!((got, if got.starts_with("gemm") { bm } else { 1 }), (*kernel, *high), "{mask:?} {input:?}");
        }
    }
    // A unit of the wrong wave is none.
    assert_eq!(chosen(&Features { wave: 64, ..vulkan.clone() }, "", Input::Int8, 512).0, "gemm_dot");
    assert_eq!(chosen(&vulkan, "", Input::Int8, 16).0, "gemm_dot");
}

#[test]
fn a_kernel_is_reached_where_a_row_chooses_it_and_its_memory_is_there() {
    let reaches = |kernel, format, features: &Features| super::variants::reaches(kernel, format, features);
    let cuda = Features::cuda(90);
    assert!(reaches("gemm_mma_f16", Format::Q4_K, &cuda) && reaches("gemm_mma_f16", Format::IQ1_M, &cuda));
    assert!(!reaches("gemm_mma_f16", Format::F32, &cuda), "F32 is not rounded to halves");
    assert!(!reaches("gemm_coop", Format::Q4_K, &cuda), "no such unit");
    let small = Features { shared_bytes: 8192, ..cuda };
    assert!(!reaches("gemm_mma_f16", Format::Q4_K, &small), "no room");
}
