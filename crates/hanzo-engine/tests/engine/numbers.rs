//! Every architecture, run on the CPU in f32 after every rewrite, agrees with the f64 interpreter of its plain Plan, in any
//! chunking, over several pages and windows.

use crate::tiny;
use hanzo_engine::arch::ARCHITECTURES;
use hanzo_engine::context::{Context, Control, Rows};
use hanzo_engine::model::{Model, ModelOptions};
use hanzo_ml::backend::Backend;
use hanzo_ml::cpu::{CpuBackend, CpuOptions};
use hanzo_ml::levers::LeverSet;
use hanzo_ml::oracle::reference_backend::ReferenceBackend;
use std::sync::Arc;

const TOKENS: usize = 130;
const LAYERS: usize = 3;

fn logits(arch: &str, backend: Arc<dyn Backend>, options: ModelOptions, ids: &[u32]) -> Vec<f32> {
    let model = Model::from_gguf(tiny::model(arch, LAYERS, 7), backend, options).expect("loads");
    assert!(model.warnings().is_empty(), "{:?}", model.warnings());
    let mut context = Context::new(&Arc::new(model)).expect("compiles");
    let mut seq = context.sequence().expect("a sequence");
    let mut out = Vec::new();
    let mut rows = 0;
    context
        .eval(&mut seq, ids, Rows::From(0), &mut Control::default(), &mut |i, row| {
            assert_eq!(i, rows, "rows come in order");
            rows += 1;
            out.extend_from_slice(row);
        })
        .expect("evaluates");
    assert_eq!(out.len(), ids.len() * tiny::VOCAB);
    out
}

fn cpu() -> Arc<dyn Backend> {
    Arc::new(CpuBackend::new(CpuOptions { threads: 2, ..CpuOptions::default() }).expect("a CPU"))
}

fn exact(n_ubatch: usize, levers: LeverSet) -> ModelOptions {
    ModelOptions { n_ubatch, levers, n_ctx: Some(512), ..ModelOptions::default() }.exact()
}

#[test]
fn every_architecture_agrees_with_the_interpreter_in_any_chunking() {
    let ids = tiny::ids(TOKENS, 3);
    for arch in ARCHITECTURES {
        let want = logits(arch.name, Arc::new(ReferenceBackend), exact(TOKENS, LeverSet::NONE), &ids);
        let scale = want.iter().fold(0f32, |a, x| a.max(x.abs()));
        for (n_ubatch, levers) in [
            (1, LeverSet::all()),
            (7, LeverSet::all()),
            (64, LeverSet::all()),
            (512, LeverSet::all()),
            (64, LeverSet::NONE),
        ] {
            let got = logits(arch.name, cpu(), exact(n_ubatch, levers), &ids);
            let worst = want.iter().zip(&got).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            assert!(worst < 2e-5 * scale, "{} at ubatch {n_ubatch}: {worst} of {scale}", arch.name);
        }
    }
}

#[test]
fn deterministic_logits_are_bit_equal_in_any_chunking() {
    let ids = tiny::ids(TOKENS, 5);
    for arch in ARCHITECTURES {
        let run = |n_ubatch| {
            let options = ModelOptions { deterministic: true, n_ubatch, n_ctx: Some(512), ..ModelOptions::default() };
            logits(arch.name, cpu(), options, &ids)
        };
        let want = run(512);
        for n_ubatch in [1, 7, 64] {
            assert!(run(n_ubatch) == want, "{} at ubatch {n_ubatch}", arch.name);
        }
    }
}
