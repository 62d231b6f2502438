use super::*;

fn params(seed: u64) -> SamplerParams {
    SamplerParams { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: Some(seed), ..SamplerParams::default() }
}

fn sampler(params: SamplerParams) -> Sampler {
    Sampler::new(params).expect("parameters are valid")
}

/// The ids that 2000 draws give, and how often.
fn histogram(params: SamplerParams, logits: &[f32]) -> Vec<usize> {
    let mut sampler = sampler(params);
    let mut counts = vec![0; logits.len()];
    for _ in 0..2000 {
        counts[sampler.sample(logits).expect("some candidate") as usize] += 1;
    }
    counts
}

#[test]
fn greedy_takes_the_largest_and_the_lowest_id_of_equals() {
    let mut sampler = sampler(SamplerParams::greedy());
    assert_eq!(sampler.sample(&[1.0, 3.0, 3.0, 2.0]), Ok(1));
    assert_eq!(sampler.sample(&[f32::NAN, -0.0, 0.0]), Ok(1));
    assert_eq!(sampler.sample(&[f32::NEG_INFINITY, -1e30, f32::NAN]), Ok(1));
}

#[test]
fn a_row_without_a_candidate_is_an_error_and_not_a_token() {
    for temperature in [0.0, 1.0] {
        let mut sampler = sampler(SamplerParams { temperature, ..params(1) });
        let expected = SampleError::NoCandidate { n_vocab: 2, nan: 1 };
        assert_eq!(sampler.sample(&[f32::NAN, f32::NEG_INFINITY]), Err(expected));
        assert!(sampler.sample(&[]).is_err());
    }
}

#[test]
fn a_seed_fixes_the_sequence() {
    let logits: Vec<f32> = (0..100).map(|id| (id as f32 * 0.37).sin()).collect();
    let draw = |seed| {
        let mut sampler = sampler(params(seed));
        (0..50).map(|_| sampler.sample(&logits).expect("token")).collect::<Vec<_>>()
    };
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1), draw(2));
    let unseeded = sampler(SamplerParams { seed: None, ..params(0) });
    let seed = Some(unseeded.seed());
    assert_eq!(sampler(SamplerParams { seed, ..params(0) }).seed(), unseeded.seed());
}

#[test]
fn draws_follow_the_softmax_at_the_temperature() {
    let logits = [0.0, 2.0f32.ln(), f32::NEG_INFINITY, 4.0f32.ln(), f32::NAN];
    let counts = histogram(params(3), &logits);
    for (count, share) in counts.iter().zip([1.0 / 7.0, 2.0 / 7.0, 0.0, 4.0 / 7.0, 0.0]) {
        assert!((*count as f64 / 2000.0 - share).abs() < 0.04, "{counts:?}");
    }
    let hot = SamplerParams { temperature: 2.0, ..params(3) };
    let counts = histogram(hot, &[0.0, 4.0f32.ln()]);
    assert!((counts[1] as f64 / 2000.0 - 2.0 / 3.0).abs() < 0.04, "{counts:?}");
}

#[test]
fn truncations_keep_what_they_say() {
    // Probabilities 0.5, 0.25, 0.125, 0.125.
    let logits: Vec<f32> = [0.5f32, 0.25, 0.125, 0.125].iter().map(|p| p.ln()).collect();
    let kept = |params: SamplerParams| {
        let counts = histogram(params, &logits);
        (0..4).filter(|&id| counts[id] > 0).collect::<Vec<_>>()
    };
    assert_eq!(kept(params(1)), [0, 1, 2, 3]);
    assert_eq!(kept(SamplerParams { top_k: 3, ..params(1) }), [0, 1, 2], "the lowest id of equals");
    assert_eq!(kept(SamplerParams { top_p: 0.7, ..params(1) }), [0, 1]);
    assert_eq!(kept(SamplerParams { top_p: 1e-9, ..params(1) }), [0]);
    assert_eq!(kept(SamplerParams { min_p: 0.3, ..params(1) }), [0, 1]);
    assert_eq!(kept(SamplerParams { min_p: 1.0, ..params(1) }), [0]);
    assert_eq!(kept(SamplerParams { top_k: 2, top_p: 0.6, ..params(1) }), [0], "top-p counts what top-k left");
}

#[test]
fn top_p_over_a_wide_row_equals_a_full_sort() {
    let mut rng = Rng::new(9);
    let logits: Vec<f32> = (0..5000).map(|_| (rng.next_f64() * 8.0) as f32).collect();
    for top_p in [0.1, 0.5, 0.9, 0.999] {
        let mut kept = Vec::new();
        let greatest = greatest(&logits).expect("finite").logit;
        truncate(&SamplerParams { top_p, ..params(1) }, &logits, greatest, &mut kept);
        let mut all: Vec<_> =
            logits.iter().enumerate().map(|(id, &logit)| Candidate { logit, id: id as u32 }).collect();
        sort(&mut all);
        let weights: Vec<f64> = all.iter().map(|candidate| f64::from(candidate.logit - greatest).exp()).collect();
        let wanted = f64::from(top_p) * weights.iter().sum::<f64>();
        let mut reached = 0.0;
        let needed = weights.iter().take_while(|weight| {
            let more = reached < wanted;
            reached += **weight;
            more
        });
        // Sums in another order may differ in the last bit, so in the last token.
        let needed = needed.count();
        assert!(kept.len().abs_diff(needed) <= 1, "{} {needed}", kept.len());
        assert_eq!(kept, all[..kept.len()]);
    }
}

#[test]
fn penalties_look_at_the_window_only() {
    let greedy = SamplerParams { repeat_penalty: 2.0, penalty_last_n: 2, ..SamplerParams::greedy() };
    let mut sampler = sampler(greedy);
    let logits = [3.0, 2.0, 1.9];
    assert_eq!(sampler.sample(&logits), Ok(0));
    sampler.accept(0);
    assert_eq!(sampler.sample(&logits), Ok(1), "3 / 2 < 2");
    sampler.accept(1);
    assert_eq!(sampler.sample(&logits), Ok(2));
    sampler.accept(2);
    assert_eq!(sampler.sample(&logits), Ok(0), "token 0 has left the window");
    sampler.accept(u32::MAX);
    assert_eq!(sampler.sample(&[-1.0, -1.5, -0.9]), Ok(0), "a negative logit is multiplied: -0.9 becomes -1.8");
}

#[test]
fn frequency_counts_occurrences_and_presence_does_not() {
    let run = |frequency_penalty, presence_penalty| {
        let mut sampler = sampler(SamplerParams { frequency_penalty, presence_penalty, ..SamplerParams::greedy() });
        for token in [0, 0, 0, 1] {
            sampler.accept(token);
        }
        sampler.sample(&[1.0, 0.0, -1.5]).expect("token")
    };
    assert_eq!(run(0.0, 0.9), 0);
    assert_eq!(run(0.4, 0.0), 0, "-0.2 > -0.4");
    assert_eq!(run(0.6, 0.0), 1, "-0.8 < -0.6");
    assert_eq!(run(1.0, 1.0), 2);
}

#[test]
fn bias_forbids_forces_and_shifts() {
    let run = |logit_bias: &[(u32, f32)], temperature| {
        let logit_bias = logit_bias.to_vec();
        sampler(SamplerParams { logit_bias, temperature, ..params(1) }).sample(&[0.0, f32::NAN, 9.0])
    };
    assert_eq!(run(&[(2, f32::NEG_INFINITY)], 0.0), Ok(0));
    assert_eq!(run(&[(1, f32::INFINITY)], 1.0), Ok(1));
    assert_eq!(run(&[(0, 10.0), (77, 5.0)], 0.0), Ok(0));
    let all = [(0, f32::NEG_INFINITY), (2, f32::NEG_INFINITY)];
    assert_eq!(run(&all, 1.0), Err(SampleError::NoCandidate { n_vocab: 3, nan: 1 }));
}

#[test]
fn parameters_without_meaning_are_refused_by_name() {
    let refused = |params: SamplerParams| match Sampler::new(params) {
        Err(SampleError::Parameter { name, .. }) => name,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(SamplerParams { temperature: f32::NAN, ..params(1) }), "temperature");
    assert_eq!(refused(SamplerParams { top_p: 0.0, ..params(1) }), "top_p");
    assert_eq!(refused(SamplerParams { min_p: 1.5, ..params(1) }), "min_p");
    assert_eq!(refused(SamplerParams { repeat_penalty: 0.0, ..params(1) }), "repeat_penalty");
    assert_eq!(refused(SamplerParams { logit_bias: vec![(1, f32::NAN)], ..params(1) }), "logit_bias");
}

#[test]
fn a_bias_of_a_token_that_the_model_lacks_is_an_error_that_names_it() {
    let params = SamplerParams { logit_bias: vec![(9, 1.0), (10, 1.0)], ..params(1) };
    assert_eq!(params.check_vocabulary(11), Ok(()));
    let e = params.check_vocabulary(10).expect_err("10 is beyond").to_string();
    assert!(e.contains("token 10") && e.contains("0 to 9") && e.contains("hanzo tokenize"), "{e}");
}
