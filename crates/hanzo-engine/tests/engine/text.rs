//! Generation: the right tokens in any chunking, the right end, and prefixes that are not evaluated twice.

use crate::fake::{continuation, model, windows};
use crate::tiny;
use hanzo_engine::Error;
use hanzo_engine::chat::ReasoningSplitter;
use hanzo_engine::context::{Context, Control, Rows};
use hanzo_engine::generate::{GenerateOptions, Outcome, Piece, StopReason, generate};
use hanzo_engine::model::ModelOptions;
use hanzo_engine::sample::SamplerParams;
use std::sync::atomic::{AtomicBool, Ordering};

fn context(arch: &str, n_ubatch: usize, n_ctx: usize) -> Context {
    Context::new(&model(arch, ModelOptions { n_ubatch, n_ctx: Some(n_ctx), ..ModelOptions::default() }))
        .expect("compiles")
}

fn options(max_tokens: Option<usize>) -> GenerateOptions {
    GenerateOptions { max_tokens, sampler: SamplerParams::greedy(), ..GenerateOptions::default() }
}

fn run(context: &mut Context, prompt: &[u32], options: &GenerateOptions) -> (String, Outcome) {
    let mut seq = context.sequence().expect("a sequence");
    let mut text = String::new();
    let mut piece = |p: Piece<'_>| match p {
        Piece::Answer(t) | Piece::Reasoning(t) => text.push_str(t),
    };
    let outcome = generate(context, &mut seq, prompt, options, &mut Control::default(), &mut piece).expect("generates");
    (text, outcome)
}

fn text(tokens: &[u32]) -> String {
    let byte = |t: &u32| (*t >= tiny::BYTES).then(|| char::from((*t - tiny::BYTES) as u8));
    tokens.iter().filter_map(byte).collect()
}

#[test]
fn text_is_the_same_for_every_ubatch_and_with_windows() {
    for arch in ["llama", "gemma3", "phi3"] {
        for seed in 1..4 {
            let prompt = tiny::ids(150, seed);
            for n_ubatch in [1, 7, 64, 512] {
                let mut context = context(arch, n_ubatch, 400);
                let want = continuation(&prompt, &windows(context.model()), 120);
                let (got, outcome) = run(&mut context, &prompt, &options(Some(120)));
                assert_eq!(got, text(&want), "{arch}, ubatch {n_ubatch}");
                assert_eq!(outcome.timings.generated, want.len());
                let ended = want.last() == Some(&tiny::EOS);
                assert_eq!(outcome.stop, if ended { StopReason::Eog } else { StopReason::Length });
                assert!(context.kv().is_unused(), "dropping the sequence frees its pages");
            }
        }
    }
}

#[test]
fn each_reason_to_stop_is_told_apart() {
    let prompt = tiny::ids(20, 11);
    let long = continuation(&prompt, &[None], 60);
    assert!(long.len() > 12, "this seed goes on for a while");
    let mut c = context("llama", 64, 25);
    assert_eq!(run(&mut c, &prompt, &options(None)).1.stop, StopReason::ContextFull);
    let mut c = context("llama", 64, 200);
    assert_eq!(run(&mut c, &prompt, &options(Some(3))).1.stop, StopReason::Length);
    assert_eq!(run(&mut c, &prompt, &options(Some(0))).1.timings.generated, 0);

    let all = text(&long);
    let stop = all[5..8].to_string();
    let stops = vec!["never there".to_string(), stop.clone()];
    let (got, outcome) = run(&mut c, &prompt, &GenerateOptions { stops, ..options(Some(60)) });
    assert_eq!(
        (got.as_str(), outcome.stop),
        (&all[..all.find(&stop).expect("it is there")], StopReason::StopString(1))
    );

    // What a stop string held back comes out when something else ends the text.
    let stops = vec![format!("{}\u{1}", &all[..4])];
    assert_eq!(run(&mut c, &prompt, &GenerateOptions { stops, ..options(Some(4)) }).0, all[..4]);
}

#[test]
fn a_raised_flag_ends_a_prompt_between_chunks_and_a_text_between_tokens() {
    let prompt = tiny::ids(100, 3);
    let cancel = AtomicBool::new(false);
    let mut c = context("llama", 10, 400);
    let mut seq = c.sequence().expect("a sequence");
    let mut progress = |done: usize, all: usize| {
        assert_eq!(all, 100);
        cancel.store(done >= 30, Ordering::Relaxed);
    };
    let mut control = Control { cancel: Some(&cancel), progress: Some(&mut progress) };
    let e = c.eval(&mut seq, &prompt, Rows::Last, &mut control, &mut |_, _| panic!("no row")).unwrap_err();
    assert!(matches!(e, Error::Cancelled));
    assert_eq!(seq.len(), 30, "what was evaluated stays");

    cancel.store(false, Ordering::Relaxed);
    let mut pieces = 0;
    let mut control = Control { cancel: Some(&cancel), progress: None };
    let outcome = generate(&mut c, &mut seq, &prompt, &options(None), &mut control, &mut |_| {
        pieces += 1;
        cancel.store(pieces == 2, Ordering::Relaxed);
    })
    .expect("generates");
    assert_eq!(
        (outcome.stop, outcome.timings.cached_tokens, outcome.timings.prompt_tokens),
        (StopReason::Cancelled, 30, 70)
    );
}

#[test]
fn a_conversation_evaluates_only_what_is_new() {
    for arch in ["llama", "gemma3"] {
        let mut c = context(arch, 64, 400);
        let windows = windows(c.model());
        let mut seq = c.sequence().expect("a sequence");
        let mut tokens = tiny::ids(90, 21);
        for turn in 0..3 {
            let want = continuation(&tokens, &windows, 10);
            let mut got = String::new();
            let mut piece = |p: Piece<'_>| {
                if let Piece::Answer(t) = p {
                    got.push_str(t);
                }
            };
            let o = generate(&mut c, &mut seq, &tokens, &options(Some(10)), &mut Control::default(), &mut piece)
                .expect("generates");
            assert_eq!(got, text(&want), "{arch}, turn {turn}");
            assert_eq!(o.timings.cached_tokens > 80, turn > 0, "{arch}, turn {turn}");
            tokens.extend(want.iter().filter(|t| **t != tiny::EOS));
            tokens.extend(tiny::ids(5, 30 + turn));
        }
        // Another start: what differs is cut off, or all of it where the window is gone.
        tokens[40] ^= 1;
        let want = continuation(&tokens, &windows, 10);
        let mut got = String::new();
        let mut piece = |p: Piece<'_>| {
            if let Piece::Answer(t) = p {
                got.push_str(t);
            }
        };
        generate(&mut c, &mut seq, &tokens, &options(Some(10)), &mut Control::default(), &mut piece)
            .expect("generates");
        assert_eq!(got, text(&want), "{arch}");
    }
}

#[test]
fn reasoning_comes_apart_from_the_answer() {
    let prompt = tiny::ids(20, 11);
    let all = text(&continuation(&prompt, &[None], 12));
    // The reply starts inside the tags; two of its characters close them.
    let close = &all[4..6];
    let reasoning = Some(ReasoningSplitter::with_tags("ask<t>", "<t>", close));
    let mut c = context("llama", 64, 200);
    let mut seq = c.sequence().expect("a sequence");
    let (mut thought, mut said) = (String::new(), String::new());
    let o = GenerateOptions { reasoning, ..options(Some(12)) };
    generate(&mut c, &mut seq, &prompt, &o, &mut Control::default(), &mut |p| match p {
        Piece::Reasoning(t) => thought.push_str(t),
        Piece::Answer(t) => said.push_str(t),
    })
    .expect("generates");
    let at = all.find(close).expect("it is there");
    assert_eq!(thought.trim(), all[..at].trim());
    assert_eq!(said.trim(), all[at + 2..].trim());
}
