//! The two things that are timed of a model, defined once for `bench` and `ab`.
//!
//! * **pp**: a prompt of n tokens, evaluated in chunks; the last row of logits is delivered to the host.
//! * **tg**: n times: one token is embedded, runs through every layer, and its full row of logits is delivered to the host.
//!
//! Each run starts from an empty sequence with `depth` tokens evaluated before the clock starts. Nothing is reused.

use std::time::Instant;

use hanzo_engine::context::{Context as Engine, Control, Rows};

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Test {
    /// A prompt of this many tokens.
    Prompt(usize),
    /// This many single tokens.
    Generate(usize),
}

impl Test {
    /// Tokens timed.
    pub fn tokens(self) -> usize {
        match self {
            Test::Prompt(n) | Test::Generate(n) => n,
        }
    }

    /// `pp512`, `tg128 @ d4096`.
    pub fn name(self, depth: usize) -> String {
        let at = if depth > 0 { format!(" @ d{depth}") } else { String::new() };
        match self {
            Test::Prompt(n) => format!("pp{n}{at}"),
            Test::Generate(n) => format!("tg{n}{at}"),
        }
    }
}

/// Token ids that any vocabulary has, without a pattern (xorshift32, Marsaglia 2003): a mixture's router sees variety.
pub fn tokens(n: usize, n_vocab: usize) -> Vec<u32> {
    let mut x = 0x2545_f491_u32;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        x % n_vocab.max(1) as u32
    };
    (0..n).map(|_| next()).collect()
}

/// Called after every step with the step's tokens and seconds.
pub type AfterStep<'a> = &'a mut dyn FnMut(&mut Engine, usize, f64);

/// Runs the test once; returns its seconds. `after` is called between steps, outside the clock.
pub fn run(engine: &mut Engine, test: Test, depth: usize, after: AfterStep<'_>) -> hanzo_engine::Result<f64> {
    let n_vocab = engine.model().n_vocab();
    let ids = tokens(depth + test.tokens(), n_vocab);
    let (before, timed) = ids.split_at(depth);
    let mut seq = engine.sequence()?;
    engine.eval(&mut seq, before, Rows::None, &mut Control::default(), &mut |_, _| ())?;
    let mut row = vec![0f32; n_vocab];
    let chunk = match test {
        Test::Prompt(_) => engine.max_tokens(),
        Test::Generate(_) => 1,
    };
    let mut seconds = 0.0;
    let mut left = timed.len();
    for step in timed.chunks(chunk.max(1)) {
        left -= step.len();
        let rows = if left == 0 || chunk == 1 { Rows::Last } else { Rows::None };
        let started = Instant::now();
        engine.eval(&mut seq, step, rows, &mut Control::default(), &mut |_, logits| row.copy_from_slice(logits))?;
        let took = started.elapsed().as_secs_f64();
        seconds += took;
        after(engine, step.len(), took);
    }
    std::hint::black_box(&row);
    Ok(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_named_as_the_field_names_them() {
        assert_eq!(Test::Prompt(512).name(0), "pp512");
        assert_eq!(Test::Generate(128).name(4096), "tg128 @ d4096");
    }

    #[test]
    fn tokens_fit_the_vocabulary_and_vary() {
        let ids = tokens(1000, 50);
        assert!(ids.iter().all(|id| *id < 50));
        assert_eq!(ids.iter().collect::<std::collections::BTreeSet<_>>().len(), 50);
    }
}
