//! Options that do not go with a model are refused by name; what is only worth knowing is a warning.

use crate::fake::FakeBackend;
use crate::tiny;
use hanzo_engine::Error;
use hanzo_engine::context::{Context, Control, Rows};
use hanzo_engine::model::{DEFAULT_CONTEXT, Model, ModelOptions};
use hanzo_gguf::{Format, Gguf};
use hanzo_ml::backend::{Backend, Cache, CompileOptions, Executable, WeightSource, Weights};
use hanzo_ml::cpu::{CpuBackend, CpuOptions};
use hanzo_ml::levers::LeverSet;
use hanzo_ml::plan::Plan;
use hanzo_ml::plan::schedule::Schedule;
use std::sync::Arc;

fn load(gguf: Gguf, options: ModelOptions) -> Result<Model, Error> {
    Model::from_gguf(gguf, Arc::new(FakeBackend), options)
}

fn refusal(gguf: Gguf, options: ModelOptions) -> String {
    match load(gguf, options) {
        Ok(_) => panic!("it was accepted"),
        Err(e) => e.to_string(),
    }
}

#[test]
fn a_cache_format_that_heads_do_not_fit_is_refused_with_the_remedy() {
    let model = || tiny::model_with_heads("llama", 1, 1, 24);
    let e = refusal(model(), ModelOptions { type_v: Format::Q8_0, ..ModelOptions::default() });
    assert_eq!(e, "option -ctv: heads of 24 elements are not whole Q8_0 blocks of 32; use f16");
    let e = refusal(model(), ModelOptions { type_k: Format::Q4_K, ..ModelOptions::default() });
    assert!(e.starts_with("option -ctk: Q4_K is no cache format; there are F16, F32"), "{e}");
    assert!(load(model(), ModelOptions::default()).is_ok());
}

#[test]
fn sizes_of_zero_are_refused_by_name() {
    let model = || tiny::model("llama", 1, 1);
    let zero = |o| refusal(model(), o);
    assert!(zero(ModelOptions { n_ctx: Some(0), ..ModelOptions::default() }).contains("--ctx-size"));
    assert!(zero(ModelOptions { n_ubatch: 0, ..ModelOptions::default() }).contains("--ubatch"));
    assert!(zero(ModelOptions { n_seqs: 0, ..ModelOptions::default() }).contains("--parallel"));
}

#[test]
fn a_context_beyond_training_is_a_warning_and_the_default_is_not_beyond_it() {
    let model = load(tiny::model("llama", 1, 1), ModelOptions::default()).expect("loads");
    assert_eq!(model.n_ctx(), 1024.min(DEFAULT_CONTEXT));
    assert!(model.warnings().is_empty());
    let options = ModelOptions { n_ctx: Some(2000), ..ModelOptions::default() };
    let model = load(tiny::model("llama", 1, 1), options).expect("loads");
    assert!(model.warnings()[0].contains("2000") && model.warnings()[0].contains("1024"), "{:?}", model.warnings());
}

#[test]
fn a_prompt_longer_than_the_context_is_refused_before_anything_runs() {
    let options = ModelOptions { n_ctx: Some(40), n_ubatch: 8, ..ModelOptions::default() };
    let model = load(tiny::model("llama", 1, 1), options).expect("loads");
    let mut c = Context::new(&Arc::new(model)).expect("compiles");
    let mut seq = c.sequence().expect("a sequence");
    let e = c.eval(&mut seq, &[5; 41], Rows::Last, &mut Control::default(), &mut |_, _| ()).unwrap_err();
    assert!(matches!(e, Error::ContextFull { len: 0, more: 41, n_ctx: 40 }), "{e}");
    assert!(seq.is_empty());
    let e = c.eval(&mut seq, &[9999], Rows::Last, &mut Control::default(), &mut |_, _| ()).unwrap_err();
    assert!(e.to_string().contains("9999"), "{e}");
}

#[test]
fn barriers_a_step_equal_the_depth_of_the_plan_and_levers_lower_them() {
    let barriers = |levers| {
        let backend = CpuBackend::new(CpuOptions { threads: 2, ..CpuOptions::default() }).expect("a CPU");
        let options = ModelOptions { levers, ..ModelOptions::default() };
        let model = Model::from_gguf(tiny::model("qwen3", 4, 1), Arc::new(backend), options).expect("loads");
        let mut c = Context::new(&Arc::new(model)).expect("compiles");
        let of = |(sizes, e): (_, &mut Box<dyn hanzo_ml::backend::Executable>)| {
            // One at the end of each level, the last one's being the step's end.
            assert_eq!(e.barriers(), Schedule::new(e.plan(), &sizes).levels.len());
            e.barriers()
        };
        c.executables().map(of).collect::<Vec<_>>()
    };
    let (plain, fused) = (barriers(LeverSet::NONE), barriers(LeverSet::all()));
    assert!(fused.iter().zip(&plain).all(|(f, p)| f + 8 <= *p), "{fused:?} against {plain:?}");
}

/// The fake, with wishes of its own about buckets.
struct Wishing(&'static [usize]);

impl Backend for Wishing {
    fn name(&self) -> &str {
        "wishing"
    }

    fn buckets(&self, _n_ubatch: usize) -> Vec<usize> {
        self.0.to_vec()
    }

    fn load(&self, plan: &Plan, source: &dyn WeightSource) -> hanzo_ml::error::Result<Arc<dyn Weights>> {
        FakeBackend.load(plan, source)
    }

    fn alloc(&self, plan: &Plan, pages: &[usize], slots: &[usize]) -> hanzo_ml::error::Result<Box<dyn Cache>> {
        FakeBackend.alloc(plan, pages, slots)
    }

    fn compile(
        &self,
        plan: &Plan,
        options: &CompileOptions,
        weights: &Arc<dyn Weights>,
    ) -> hanzo_ml::error::Result<Box<dyn Executable>> {
        FakeBackend.compile(plan, options, weights)
    }
}

#[test]
fn buckets_are_those_that_the_backend_wants_and_the_largest_takes_a_whole_ubatch() {
    let buckets = |wanted| {
        let options = ModelOptions { n_ubatch: 64, n_seqs: 2, ..ModelOptions::default() };
        let model = Model::from_gguf(tiny::model("llama", 1, 1), Arc::new(Wishing(wanted)), options).expect("loads");
        let mut c = Context::new(&Arc::new(model)).expect("compiles");
        c.executables().map(|(s, _)| [s.n_tokens, s.n_seqs, s.n_out]).collect::<Vec<_>>()
    };
    assert_eq!(buckets(&[1, 8, 32]), [[1, 1, 1], [8, 2, 8], [32, 2, 8], [64, 2, 8]]);
    assert_eq!(buckets(&[512, 64, 8, 8, 0]), [[8, 2, 8], [64, 2, 8]]);
    assert_eq!(buckets(&[]), [[64, 2, 8]]);
}
