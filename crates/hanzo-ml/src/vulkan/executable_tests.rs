//! Weights, caches and executables on device 0, with launches made by hand: no op's kernel is needed.

use super::executable::VulkanExecutable;
use super::raw::Gpu;
use super::tests::{assert_clean, gpu};
use super::weights::VulkanWeights;
use super::*;
use crate::backend::{Backend, Cache, CompileOptions, Executable, Precision, Weights};
use crate::batch::{Batch, GroupTables, Input, Pooling};
use crate::cache::{CacheGroup, StateSpec};
use crate::gpu::{Buffer, Features, Launch, Program, Ptr, StepLayout};
use crate::levers::LeverSet;
use crate::oracle::case::{RunOptions, Tensors, run_backend};
use crate::oracle::oracles::linear_case;
use crate::oracle::random::{Draw, Rng, weights as random_weights};
use crate::plan::schedule::Schedule;
use crate::plan::{Dim, Op, Plan, Sizes, ValueId};
use hanzo_gguf::Format;
use hanzo_kernels::args::{self, Args};
use std::sync::Arc;

const COLS: usize = 64;
const BUCKET: Sizes = Sizes { n_tokens: 8, n_seqs: 1, n_out: 2 };

fn options() -> CompileOptions {
    CompileOptions {
        levers: LeverSet::NONE,
        bucket: BUCKET,
        precision: Precision::Exact,
        deterministic: false,
        n_ctx: 64,
        eager: None,
    }
}

/// A second device, where a driver was found.
fn backend(_driver: &Gpu, plain: bool) -> VulkanBackend {
    let options = VulkanOptions { validate: true, plain, ..Default::default() };
    VulkanBackend::open(0, &options).expect("a backend")
}

/// A step of `n` tokens whose last `outs` rows go through the head.
fn step<T>(n: usize, outs: &[u32], f: impl FnOnce(&Batch<'_>) -> T) -> T {
    let (tokens, positions): (Vec<u32>, Vec<u32>) = (vec![0; n], (0..n as u32).collect());
    f(&Batch {
        input: Input::Tokens(&tokens),
        positions: &positions,
        rope_positions: &[],
        seq_offsets: &[0, n as u32],
        groups: &[GroupTables { pages: &[1], offsets: &[0, 1], first: &[0] }],
        state_slots: &[0],
        spans: &[],
        adapters: &[],
        out_rows: outs,
        pooling: Pooling::None,
    })
}

/// `x` (input) -> `h` (output, body), and `y` (output, head).
fn plan() -> (Plan, ValueId, ValueId, ValueId) {
    let mut p = Plan::new(COLS);
    let x = p.input("x", Dim::Tokens, COLS, crate::plan::DType::F32);
    let h = p.value("h", Dim::Tokens, COLS);
    let y = p.value("y", Dim::Out, COLS);
    p.push(Op::Scale { x, s: 1.0, out: h });
    p.push(Op::GatherRows { x: h, out: y });
    p.head = Some(1);
    p.outputs = vec![h, y];
    p.groups.push(CacheGroup {
        name: "kv".into(),
        layers: 2,
        n_kv: 1,
        d_k: 32,
        d_v: 64,
        type_k: Format::F16,
        type_v: Format::F32,
        window: None,
    });
    p.states.push(StateSpec { name: "s".into(), layers: 2, elements: 16 });
    p.check().expect("a plan");
    (p, x, h, y)
}

/// A copy of `words` words, as one row.
fn copy(op: usize, features: &Features, from: Ptr, to: Ptr, words: usize) -> Launch {
    let (n, none) = (words as u32, Ptr::NONE);
    let a = args::CopyRows {
        a: from,
        b: none,
        live: none,
        out_rows: none,
        y: to,
        cols_a: n,
        cols_b: 0,
        stride: n,
        first: 0,
    };
    let groups = [n.div_ceil(128), 1, 1];
    Launch::new(op, None, features, &a, &[("VEC", 0), ("MASK", 0)], groups).expect("a launch")
}

/// The body copies `x` to `h` and marks the keys of layer 1; the head puts its output rows' numbers into `y`.
fn program(features: &Features) -> (Program, ValueId, ValueId, ValueId) {
    let (plan, x, h, y) = plan();
    let schedule = Schedule::new(&plan, &BUCKET);
    let step = StepLayout::new(&plan, BUCKET, 64, &|_| None).expect("a layout");
    let at = |v: ValueId, words: usize| Ptr {
        buffer: Buffer::Arena,
        offset: schedule.ranges[v.0 as usize].start as u64,
        len: 4 * words as u64,
    };
    let mark = args::Fill { y: Ptr { buffer: Buffer::Keys(0, 1), offset: 4, len: Ptr::WHOLE }, value: 77, count: 1 };
    let launches = vec![
        copy(0, features, at(x, 8 * COLS), at(h, 8 * COLS), 8 * COLS),
        Launch::new(0, None, features, &mark, &[], [1, 1, 1]).expect("a launch"),
        copy(1, features, step.out_rows(), at(y, 2), 2),
    ];
    let arena_bytes = schedule.arena_bytes as u64;
    let p = Program { plan, arena_bytes, launches, barriers: vec![false, false, true], head: 2, step, schedule };
    (p, x, h, y)
}

fn executable(b: &VulkanBackend) -> (VulkanExecutable, Box<dyn Cache>, [ValueId; 3]) {
    let (program, x, h, y) = program(b.features());
    let weights = b.load(&program.plan, &Tensors::default()).expect("no weights");
    let cache = b.alloc(&program.plan, &[3], &[2]).expect("a cache");
    let e = VulkanExecutable::new(b.device(), &weights, program, &options()).expect("an executable");
    (e, cache, [x, h, y])
}

#[test]
fn a_step_runs_the_body_once_and_the_head_a_chunk() {
    for plain in [false, true] {
        let Some(gpu) = gpu(VulkanOptions::default()) else { return };
        let b = backend(&gpu, plain);
        let (mut e, mut cache, [x, h, _]) = executable(&b);
        for round in 0..3 {
            for (i, v) in e.value_mut(x).expect("input").iter_mut().enumerate() {
                *v = (i + round) as f32;
            }
            let mut seen = Vec::new();
            let outs = [0, 2, 3, 6, 7];
            step(8, &outs, |batch| {
                e.run(batch, &mut *cache, &mut |first, rows| {
                    let words: Vec<u32> = rows[..2.min(rows.len())].iter().map(|v| v.to_bits()).collect();
                    seen.push((first, rows.len() / COLS, words));
                })
            })
            .expect("a step");
            let one = |first, words: &[u32]| (first, words.len(), words.to_vec());
            let last = (4, 1, vec![7, 3]);
            assert_eq!(seen[..2], [one(0, &[0, 2]), one(2, &[3, 6])]);
            // The second word of the last chunk is what the chunk before left there.
            assert_eq!((seen[2].0, seen[2].1, seen[2].2[0]), (last.0, last.1, last.2[0]));
            assert!(e.value(h).expect("output").iter().enumerate().all(|(i, v)| *v == (i + round) as f32));
            let r = e.report().expect("a report");
            assert_eq!((r.dispatches, r.submissions), (5, 3));
            assert!(r.wait > 0.0 && r.gpu.is_none() && r.kernels.is_empty());
        }
        let page = cache.read_page(0, 0).expect("a page");
        // Layers' keys (2 KiB) and values (8 KiB): the mark is in the second word of layer 1's keys.
        let at = 32 * (2 * 32 + 4 * 64) + 4;
        assert_eq!(page[at..at + 4], 77u32.to_le_bytes());
        assert_eq!(page.iter().filter(|b| **b != 0).count(), 1);
        drop((e, cache));
        assert_eq!(b.device().take_messages(), Vec::<String>::new());
    }
}

#[test]
fn a_step_without_output_rows_ends_before_the_head_and_one_submission_decodes() {
    let Some(gpu) = gpu(VulkanOptions::default()) else { return };
    let b = backend(&gpu, false);
    let (mut e, mut cache, [_, _, y]) = executable(&b);
    step(3, &[], |batch| e.run(batch, &mut *cache, &mut |_, _| panic!("no rows"))).expect("a step");
    assert_eq!(e.report().map(|r| (r.dispatches, r.submissions)), Some((2, 1)));
    step(1, &[0], |batch| e.run(batch, &mut *cache, &mut |_, _| {})).expect("a step");
    assert_eq!(e.report().map(|r| (r.dispatches, r.submissions)), Some((3, 1)));
    assert_eq!(e.value(y).expect("output").len(), COLS);
    assert!(e.value(ValueId(99)).is_err() && e.value_mut(y).is_err());
    drop((e, cache));
    assert_eq!(b.device().take_messages(), Vec::<String>::new());
}

#[test]
fn poison_shows_where_nothing_was_written() {
    let Some(gpu) = gpu(VulkanOptions::default()) else { return };
    let b = backend(&gpu, false);
    let (mut e, mut cache, [x, h, y]) = executable(&b);
    e.value_mut(x).expect("input").fill(1.0);
    for on in [false, true, false] {
        e.set_poison(on);
        step(8, &[5], |batch| e.run(batch, &mut *cache, &mut |_, _| {})).expect("a step");
        // The head wrote two words of `y`; the rest is poison, or what the memory held.
        let rest = &e.value(y).expect("output")[2..];
        assert!(!on || rest.iter().all(|v| v.is_nan()));
        assert!(e.value(h).expect("output").iter().all(|v| *v == 1.0));
    }
    drop((e, cache));
    assert_eq!(b.device().take_messages(), Vec::<String>::new());
}

#[test]
fn profiling_times_every_launch_and_can_be_turned_off() {
    let Some(gpu) = gpu(VulkanOptions::default()) else { return };
    let b = backend(&gpu, false);
    let (mut e, mut cache, _) = executable(&b);
    assert!(e.profile().is_empty());
    e.set_profile(true);
    step(8, &[1, 2, 3], |batch| e.run(batch, &mut *cache, &mut |_, _| {})).expect("a step");
    let r = e.report().expect("a report");
    let kernels: Vec<&str> = r.kernels.iter().map(|k| k.kernel.as_str()).collect();
    assert_eq!(kernels, ["copy_rows", "fill", "copy_rows"]);
    assert!(r.gpu.is_some_and(|g| g > 0.0) && r.kernels.iter().all(|k| k.seconds >= 0.0));
    let ops: Vec<usize> = e.profile().iter().map(|t| t.op).collect();
    assert_eq!(ops, [0, 1]);
    e.set_profile(false);
    step(8, &[1], |batch| e.run(batch, &mut *cache, &mut |_, _| {})).expect("a step");
    assert!(e.report().is_some_and(|r| r.gpu.is_none()) && e.profile().is_empty());
    drop((e, cache));
    assert_eq!(b.device().take_messages(), Vec::<String>::new());
}

#[test]
fn a_second_cache_is_another_memory() {
    let Some(gpu) = gpu(VulkanOptions::default()) else { return };
    let b = backend(&gpu, false);
    let (mut e, mut first, _) = executable(&b);
    let mut second = b.alloc(e.plan(), &[3], &[2]).expect("a cache");
    step(1, &[0], |batch| e.run(batch, &mut *first, &mut |_, _| {})).expect("a step");
    assert!(first.read_page(0, 0).expect("a page").contains(&77));
    assert!(!second.read_page(0, 0).expect("a page").contains(&77));
    step(1, &[0], |batch| e.run(batch, &mut *second, &mut |_, _| {})).expect("a step");
    assert!(second.read_page(0, 0).expect("a page").contains(&77));
    let other = backend(&gpu, false);
    let mut foreign = other.alloc(e.plan(), &[3], &[2]).expect("a cache");
    let e = step(1, &[0], |batch| e.run(batch, &mut *foreign, &mut |_, _| {})).expect_err("another device's cache");
    assert!(e.to_string().contains("another backend"), "{e}");
}

#[test]
fn pages_and_slots_are_copied_cleared_read_and_written() {
    let Some(gpu) = gpu(VulkanOptions::default()) else { return };
    let b = backend(&gpu, false);
    let (plan, ..) = plan();
    let mut cache = b.alloc(&plan, &[3], &[2]).expect("a cache");
    let bytes = plan.groups[0].page_bytes();
    assert_eq!(cache.bytes(), 3 * bytes + 2 * 2 * 64);
    let page: Vec<u8> = (0..bytes).map(|i| (i % 251) as u8).collect();
    cache.write_page(0, 1, &page).expect("write");
    cache.copy_page(0, 1, 2).expect("copy");
    cache.copy_page(0, 1, 1).expect("nothing");
    assert_eq!(cache.read_page(0, 2).expect("read"), page);
    assert!(cache.read_page(0, 0).expect("read").iter().all(|b| *b == 0));
    cache.copy_slot(0, 0, 1).expect("copy");
    cache.clear_slot(0, 1).expect("clear");
    for e in [
        cache.copy_page(0, 0, 3).err(),
        cache.read_page(1, 0).err(),
        cache.write_page(0, 0, &page[1..]).err(),
        cache.clear_slot(0, 2).err(),
        b.alloc(&plan, &[3], &[]).err(),
    ] {
        assert!(e.is_some());
    }
    drop(cache);
    assert_eq!(b.device().take_messages(), Vec::<String>::new());
}

/// Weights of every format, read back through `unpack`, are the bytes that were loaded.
#[test]
fn every_format_streams_into_its_device_layout_and_back() {
    for staged in [false, true] {
        let Some(gpu) = gpu(VulkanOptions { staged, ..Default::default() }) else { return };
        formats_round_trip(&gpu);
        assert_clean(&gpu);
    }
}

fn formats_round_trip(gpu: &Gpu) {
    let device = gpu.device();
    for (format, _) in hanzo_kernels::formats() {
        // A row range of three experts in many chunks, float rows that end within a unit, and one vector.
        let cols = if format.is_block() { 2 * format.block_len() } else { 70 };
        let (experts, tensor_rows, first, rows) = (3, 60, 7, 50);
        let mut p = Plan::new(cols);
        let mut w = crate::plan::Weight {
            tensor: "w".into(),
            format,
            experts,
            rows,
            cols,
            first_row: first,
            tensor_rows,
            device: Default::default(),
        };
        let matrix = p.add_weight(w.clone());
        (w.tensor, w.experts, w.rows, w.first_row, w.tensor_rows) = ("v".into(), 1, 1, 0, 1);
        let vector = p.add_weight(w);
        let ids = p.input("ids", Dim::Tokens, 1, crate::plan::DType::I32);
        let x = p.input("x", Dim::Tokens, cols, crate::plan::DType::F32);
        let (a, y) = (p.value("a", Dim::Tokens, cols), p.value("y", Dim::Slots(1), rows));
        p.push(Op::RmsNorm { x, weight: Some(vector), eps: 1e-6, group: cols, out: a });
        let member = crate::plan::Member { w: matrix, bias: None, out: y };
        p.push(Op::MoeLinear { x: a, ids, member });
        let mut rng = Rng::named(1, format.name());
        let bytes = random_weights(format, experts * tensor_rows, cols, Draw::Usual, &mut rng);
        let row_bytes = format.row_bytes(cols).expect("whole blocks");
        let vector_bytes = bytes[..row_bytes].to_vec();
        let mut source = Tensors::default();
        source.put("w", bytes.clone());
        source.put("v", vector_bytes.clone());
        let weights = VulkanWeights::load(device, &p, &source).expect("weights");
        weights.ready().expect("an upload");
        let (done, total) = weights.progress();
        assert!(done > 0 && weights.extra_bytes() as u64 == total);

        let mut floats = vec![0.0; cols];
        hanzo_gguf::formats::to_float(format, &vector_bytes, &mut floats);
        let want: Vec<u8> = floats.iter().flat_map(|x| x.to_le_bytes()).collect();
        let v = weights.buffer(vector.0 as usize).expect("the vector");
        let whole = 0..v.bytes();
        assert_eq!(device.download(v, std::slice::from_ref(&whole)).expect("read"), want, "{format}: vector");

        let layout = hanzo_kernels::layout(format, experts * rows, cols).expect("a layout");
        let out = gpu.zeros(experts * rows * row_bytes + 4).expect("memory");
        let block = if format.is_block() { format.block_bytes() } else { 32 * format.block_bytes() };
        let unpack = args::Unpack {
            w: args::Weight {
                base: weights.address(matrix).expect("the matrix"),
                planes: layout.planes(),
                table: weights.tables(),
            },
            dst: out.address(),
            block_bytes: block as u32,
            row_blocks: layout.row_blocks as u32,
            row_bytes: row_bytes as u32,
            first_block: 0,
            bytes: (experts * rows * row_bytes) as u32,
            stride: 256,
        };
        let mut places = Vec::new();
        let mut args = unpack.encode(&mut |at, p| places.push((at, p)));
        places.iter().for_each(|(at, p)| args[*at..at + 8].copy_from_slice(&u64::to_le_bytes(*p)));
        let key = hanzo_kernels::Key { op: "unpack", format: Some(format) };
        let code = hanzo_kernels::spirv(key).expect("a kernel");
        let kernel =
            gpu.kernel("unpack", code, &super::backend::constants("unpack", device.info())).expect("a pipeline");
        gpu.launch(kernel, &args, [1, 1, 1]).expect("a launch");
        let want: Vec<u8> = (0..experts)
            .flat_map(|e| bytes[(e * tensor_rows + first) * row_bytes..][..rows * row_bytes].iter().copied())
            .collect();
        assert_eq!(gpu.read(&out).expect("read")[..want.len()], want, "{format}: matrix");
    }
}

#[test]
fn a_weight_of_the_wrong_size_is_an_error_that_names_it() {
    let Some(gpu) = gpu(VulkanOptions::default()) else { return };
    let mut p = Plan::new(32);
    let w = p.weight("blk.0.w", Format::Q8_0, 1, 4, 32);
    let x = p.input("x", Dim::Tokens, 32, crate::plan::DType::F32);
    let out = p.value("y", Dim::Tokens, 4);
    p.push(Op::Linear { x, member: crate::plan::Member { w, bias: None, out } });
    let mut source = Tensors::default();
    source.put("blk.0.w", vec![0; 4 * 34 - 1]);
    let e = VulkanWeights::load(gpu.device(), &p, &source).err().expect("a short weight").to_string();
    assert!(e.contains("blk.0.w") && e.contains("135"), "{e}");
    let b: Arc<dyn Weights> = Arc::new(VulkanWeights::load(gpu.device(), &Plan::new(32), &source).expect("nothing"));
    let other = backend(&gpu, false);
    assert!(other.compile(&Plan::new(32), &options(), &b).is_err());
}

#[test]
fn what_was_prepared_is_not_compiled_again_and_equal_programs_have_equal_numbers() {
    let Some(gpu) = gpu(VulkanOptions::default()) else { return };
    let b = backend(&gpu, false);
    let mut rng = Rng::named(1, "prepare");
    let bytes = random_weights(Format::Q4_0, 33, 96, Draw::Usual, &mut rng);
    let case = linear_case("linear", Format::Q4_0, (33, 96, 5), bytes, (1.0, false), &mut rng);
    let run = |levers, deterministic| RunOptions { levers, deterministic };
    let options = [run(LeverSet::NONE, false), run(LeverSet::default(), false), run(LeverSet::NONE, true)];
    let programs = b.prepare(&options.map(|o| case.wanted(o)));
    // One linear is the same under every lever; pinned, it takes another kernel.
    assert!(programs[0].is_some() && programs[0] == programs[1] && programs[1] != programs[2], "{programs:?}");
    let before = b.compiled().expect("it compiles");
    assert!(before.made > 0 && before.busy > 0.0);
    for o in options {
        run_backend(&case, &b, o, &mut |_, _, _| Ok(())).expect("a run");
    }
    let after = b.compiled().expect("it compiles");
    assert_eq!(after.made, before.made);
    assert!(after.reused > before.reused);
    assert_eq!(b.device().take_messages(), Vec::<String>::new());
}
