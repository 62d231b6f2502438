//! A decode step allocates nothing, page boundaries included. One test in a binary of its own: the counter counts all.

#[path = "engine/tiny.rs"]
#[allow(dead_code)]
mod tiny;

use hanzo_engine::context::{Context, Control, Rows};
use hanzo_engine::model::{Model, ModelOptions};
use hanzo_ml::cpu::{CpuBackend, CpuOptions};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call goes to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(ptr, layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_hundred_decode_steps_allocate_nothing() {
    for arch in ["gemma3", "qwen3moe"] {
        let backend = Arc::new(CpuBackend::new(CpuOptions { threads: 2, ..CpuOptions::default() }).expect("a CPU"));
        let options = ModelOptions { n_ctx: Some(512), ..ModelOptions::default() };
        let model = Model::from_gguf(tiny::model(arch, 3, 7), backend, options).expect("loads");
        let mut context = Context::new(&Arc::new(model)).expect("compiles");
        let mut seq = context.sequence().expect("a sequence");
        let mut control = Control::default();
        let mut sum = 0.0;
        let mut sink = |_: usize, row: &[f32]| sum += row[0];
        context.eval(&mut seq, &tiny::ids(45, 1), Rows::Last, &mut control, &mut sink).expect("a prompt");
        context.eval(&mut seq, &[5], Rows::Last, &mut control, &mut sink).expect("a first step");
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for token in 0..100 {
            context.eval(&mut seq, &[token], Rows::Last, &mut control, &mut sink).expect("a step");
        }
        assert_eq!(ALLOCATIONS.load(Ordering::Relaxed) - before, 0, "{arch}");
        assert!(seq.len() > 4 * 32 && sum.is_finite());
    }
}
