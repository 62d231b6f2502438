//! A Vulkan step allocates nothing. One test in a binary of its own: the counter counts all of Rust's allocations (the
//! driver's are its own).
//!
//! Needs a Vulkan driver and fails without one, unless `HANZO_NO_GPU_TESTS=1` says that there is none on purpose.

use hanzo_ml::backend::{Backend, CompileOptions, Executable, Precision};
use hanzo_ml::batch::{Batch, Input, Pooling};
use hanzo_ml::gpu::{Buffer, Launch, Program, Ptr, StepLayout};
use hanzo_ml::levers::LeverSet;
use hanzo_ml::oracle::case::Tensors;
use hanzo_ml::plan::schedule::Schedule;
use hanzo_ml::plan::{DType, Dim, Op, Plan, Sizes};
use hanzo_ml::vulkan::{VulkanBackend, VulkanOptions};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    /// This thread's allocations: lavapipe's threads are C, but the test harness has some of its own.
    static ALLOCATIONS: AtomicUsize = const { AtomicUsize::new(0) };
}

struct Counting;

fn count() {
    let _ = ALLOCATIONS.try_with(|n| n.fetch_add(1, Ordering::Relaxed));
}

// SAFETY: every call goes to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(ptr, layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const COLS: usize = 64;

/// `x` -> `y` by one copying kernel, in the head.
fn program(wave: &VulkanBackend, bucket: Sizes) -> Program {
    let mut plan = Plan::new(COLS);
    let x = plan.input("x", Dim::Tokens, COLS, DType::F32);
    let y = plan.value("y", Dim::Out, COLS);
    plan.push(Op::GatherRows { x, out: y });
    plan.head = Some(0);
    plan.outputs = vec![y];
    let schedule = Schedule::new(&plan, &bucket);
    let step = StepLayout::new(&plan, bucket, 64, &|_| None).expect("a layout");
    let at = |i: usize| Ptr { buffer: Buffer::Arena, offset: schedule.ranges[i].start as u64, len: 4 * COLS as u64 };
    let (n, none) = (COLS as u32, Ptr::NONE);
    let copy = hanzo_kernels::args::CopyRows {
        a: at(0),
        b: none,
        live: none,
        out_rows: none,
        y: at(1),
        cols_a: n,
        cols_b: 0,
        stride: n,
        first: 0,
    };
    let set = [("VEC", 0), ("MASK", 0)];
    let launch = Launch::new(0, None, wave.features(), &copy, &set, [1, 1, 1]).expect("a launch");
    let arena_bytes = schedule.arena_bytes as u64;
    Program { plan, schedule, arena_bytes, launches: vec![launch], barriers: vec![false], head: 0, step }
}

#[test]
fn a_hundred_steps_allocate_nothing() {
    if std::env::var("HANZO_NO_GPU_TESTS").is_ok_and(|v| v == "1") {
        return;
    }
    let backend = VulkanBackend::open(0, &VulkanOptions::default()).expect("a Vulkan driver (or HANZO_NO_GPU_TESTS=1)");
    let options = CompileOptions {
        levers: LeverSet::NONE,
        bucket: Sizes { n_tokens: 4, n_seqs: 1, n_out: 2 },
        precision: Precision::Exact,
        deterministic: false,
        n_ctx: 64,
        eager: None,
    };
    let program = program(&backend, options.bucket);
    let x = program.plan.inputs[0];
    let weights = backend.load(&program.plan, &Tensors::default()).expect("no weights");
    let mut cache = backend.alloc(&program.plan, &[], &[]).expect("no cache");
    let mut e = backend.executable(program, &options, &weights).expect("an executable");
    let mut sum = 0.0;
    let mut before = 0;
    // Steps of two sizes, each recorded when it is first seen.
    for i in 0..104usize {
        if i == 4 {
            before = ALLOCATIONS.with(|n| n.load(Ordering::Relaxed));
        }
        e.value_mut(x).expect("input").fill(i as f32);
        let n = 1 + i % 2;
        let batch = Batch {
            input: Input::Tokens(&[1, 2][..n]),
            positions: &[0, 1][..n],
            rope_positions: &[],
            seq_offsets: &[0, n as u32],
            groups: &[],
            state_slots: &[],
            spans: &[],
            adapters: &[],
            out_rows: &[0, 1][..n],
            pooling: Pooling::None,
        };
        e.run(&batch, &mut *cache, &mut |_, rows| sum += rows[0]).expect("a step");
    }
    assert_eq!(ALLOCATIONS.with(|n| n.load(Ordering::Relaxed)) - before, 0);
    assert_eq!(sum, (103 * 104 / 2) as f32);
}
