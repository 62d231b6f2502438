//! Every architecture and rope variant, run on the CPU in f32 after every rewrite, agrees with a forward pass in f64 that
//! knows no Plan, in any chunking, over more than three pages and two windows; and so does the interpreter.

use crate::{reference, tiny};
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
const N_CTX: usize = 512;

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
    ModelOptions { n_ubatch, levers, n_ctx: Some(N_CTX), ..ModelOptions::default() }.exact()
}

/// The largest difference, as a part of the largest logit.
fn worst(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let scale = want.iter().fold(0f64, |a, x| a.max(x.abs()));
    got.iter().zip(want).map(|(g, w)| (*g as f64 - w).abs()).fold(0.0, f64::max) / scale
}

#[test]
fn every_architecture_agrees_with_an_independent_forward_pass_in_any_chunking() {
    let ids = tiny::ids(TOKENS, 3);
    for arch in ARCHITECTURES {
        let want = reference::logits(&tiny::model(arch.name, LAYERS, 7), &ids, N_CTX);
        let sets = [1, 7, 64, 512].map(|n| (n, LeverSet::all()));
        for (n_ubatch, levers) in sets.into_iter().chain([(64, LeverSet::NONE)]) {
            let worst = worst(&logits(arch.name, cpu(), exact(n_ubatch, levers), &ids), &want);
            assert!(worst < 2e-5, "{} at ubatch {n_ubatch}: {worst:e}", arch.name);
        }
    }
}

#[test]
fn the_interpreter_of_a_plan_agrees_with_an_independent_forward_pass() {
    let ids = tiny::ids(TOKENS, 4);
    for arch in ARCHITECTURES {
        let want = reference::logits(&tiny::model(arch.name, LAYERS, 7), &ids, N_CTX);
        let got = logits(arch.name, Arc::new(ReferenceBackend), exact(TOKENS, LeverSet::NONE), &ids);
        let worst = worst(&got, &want);
        assert!(worst < 1e-5, "{}: {worst:e}", arch.name);
    }
}

#[test]
fn deterministic_logits_are_bit_equal_in_any_chunking() {
    let ids = tiny::ids(TOKENS, 5);
    for arch in ARCHITECTURES {
        let run = |n_ubatch| {
            let options = ModelOptions { deterministic: true, n_ubatch, n_ctx: Some(N_CTX), ..ModelOptions::default() };
            logits(arch.name, cpu(), options, &ids)
        };
        let want = run(512);
        for n_ubatch in [1, 7, 64] {
            assert!(run(n_ubatch) == want, "{} at ubatch {n_ubatch}", arch.name);
        }
    }
}
