//! Several sequences in one batch give each the text it would get alone, through chunked prompts and full caches.

use crate::fake::{continuation, model, windows};
use crate::tiny;
use hanzo_engine::context::{Context, Control, Part, Rows};
use hanzo_engine::model::ModelOptions;
use hanzo_engine::scheduler::Scheduler;
use std::collections::BTreeMap;

fn argmax(row: &[f32]) -> u32 {
    (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).map_or(0, |i| i as u32)
}

/// Serves all prompts at once; returns each one's new tokens, and how many steps it took.
fn serve(context: &mut Context, prompts: &[Vec<u32>], n: usize) -> (BTreeMap<u64, Vec<u32>>, usize) {
    let (max_seqs, max_tokens) = (context.model().options().n_seqs, context.max_tokens());
    let mut scheduler = Scheduler::new(max_seqs, max_tokens);
    let (mut done, mut steps, mut queued) = (BTreeMap::new(), 0, 0);
    while done.len() < prompts.len() {
        // Requests arrive while others run, as sequences become free.
        if queued < prompts.len()
            && let Ok(seq) = context.sequence()
        {
            scheduler.add(queued as u64, prompts[queued].clone(), seq);
            queued += 1;
        }
        assert!(scheduler.schedule(context.kv()).expect("schedules"), "jobs are left, but none fits");
        let mut next = BTreeMap::new();
        context
            .step(&mut scheduler.parts(), &mut |part, _, row| {
                next.insert(part, argmax(row));
            })
            .expect("steps");
        let ids: BTreeMap<u64, u32> =
            next.into_iter().filter_map(|(part, t)| scheduler.job(part).map(|job| (job.id, t))).collect();
        let mut last = BTreeMap::new();
        let finished = scheduler.finish(|job| {
            let new = job.tokens.len() - prompts[job.id as usize].len();
            let token = ids[&job.id];
            last.insert(job.id, token);
            (token != tiny::EOS && new + 1 < n).then_some(token)
        });
        for job in finished {
            let mut tokens = job.tokens[prompts[job.id as usize].len()..].to_vec();
            tokens.push(last[&job.id]);
            done.insert(job.id, tokens);
        }
        steps += 1;
        assert!(steps < 10_000, "no progress");
    }
    assert!(scheduler.is_idle());
    (done, steps)
}

#[test]
fn every_sequence_of_a_batch_gets_the_text_it_would_get_alone() {
    for (arch, n_ubatch, n_ctx) in [("llama", 16, 300), ("gemma3", 16, 300), ("llama", 512, 300), ("gemma3", 3, 300)] {
        let options = ModelOptions { n_ubatch, n_ctx: Some(n_ctx), n_seqs: 3, ..ModelOptions::default() };
        let mut context = Context::new(&model(arch, options)).expect("compiles");
        let windows = windows(context.model());
        let prompts: Vec<Vec<u32>> = (0..7).map(|i| tiny::ids(5 + 23 * i as usize, i + 1)).collect();
        let (got, steps) = serve(&mut context, &prompts, 40);
        for (i, prompt) in prompts.iter().enumerate() {
            assert_eq!(got[&(i as u64)], continuation(prompt, &windows, 40), "{arch}, ubatch {n_ubatch}, prompt {i}");
        }
        let alone: usize = got.values().map(Vec::len).sum();
        assert!(n_ubatch < 16 || steps < alone, "{steps} steps for {alone} tokens: nothing was batched");
        assert!(context.kv().is_unused());
    }
}

#[test]
fn a_full_cache_makes_the_youngest_start_over_and_nobody_lose_text() {
    let options = ModelOptions { n_ubatch: 32, n_ctx: Some(128), n_seqs: 4, ..ModelOptions::default() };
    let mut context = Context::new(&model("llama", options)).expect("compiles");
    // Something else holds pages: 16 are there, 9 are left for four jobs of up to 4 pages each.
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut seq = context.sequence().expect("a sequence");
        let n = if held.is_empty() { 128 } else { 90 };
        context.eval(&mut seq, &tiny::ids(n, 9), Rows::None, &mut Control::default(), &mut |_, _| ()).expect("room");
        held.push(seq);
    }
    let prompts: Vec<Vec<u32>> = (0..4).map(|i| tiny::ids(60, i + 40)).collect();
    let (got, _) = serve(&mut context, &prompts, 50);
    for (i, prompt) in prompts.iter().enumerate() {
        assert_eq!(got[&(i as u64)], continuation(prompt, &[None], 50), "prompt {i}");
    }
}

#[test]
fn rows_of_a_mixed_batch_are_named_by_part_and_token() {
    let options = ModelOptions { n_ubatch: 64, n_ctx: Some(128), n_seqs: 3, ..ModelOptions::default() };
    let mut context = Context::new(&model("llama", options)).expect("compiles");
    let tokens = [tiny::ids(5, 1), tiny::ids(30, 2), tiny::ids(4, 3)];
    let mut seqs: Vec<_> = (0..3).map(|_| context.sequence().expect("a sequence")).collect();
    let rows = [Rows::From(3), Rows::None, Rows::Last];
    let mut parts: Vec<Part<'_>> =
        seqs.iter_mut().zip(&tokens).zip(rows).map(|((seq, tokens), rows)| Part { seq, tokens, rows }).collect();
    let mut got = Vec::new();
    context.step(&mut parts, &mut |part, row, logits| got.push((part, row, argmax(logits)))).expect("steps");
    let want = |part: usize, row: usize| (part, row, continuation(&tokens[part][..=row], &[None], 1)[0]);
    assert_eq!(got, [want(0, 3), want(0, 4), want(2, 3)]);
}
