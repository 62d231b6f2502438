//! From logits to a token: penalties, truncation, temperature, and a draw; and when to stop.
//!
//! The steps run in this order, each only if its parameter asks for it:
//! 1. **logit bias**: added to the logits of the named tokens (-inf forbids one, +inf forces it);
//! 2. **penalties**, for every token among the last `penalty_last_n`: a logit is divided by `repeat_penalty` if positive
//!    and multiplied by it if not (Keskar et al. 2019, CTRL), then loses `frequency_penalty` for each occurrence and
//!    `presence_penalty` once;
//! 3. **top-k**: the k largest remain;
//! 4. **top-p**: the fewest of the largest whose probabilities reach p remain (Holtzman et al. 2019);
//! 5. **min-p**: those whose probability is at least p times the largest remain (Nguyen et al. 2024);
//! 6. **temperature**: logits are divided by it, and one token is drawn from their softmax.
//!
//! With temperature 0 the largest logit after step 2 is taken. Equal logits count in the order of their ids everywhere,
//! so greedy ties go to the lowest id. NaN counts as -inf. A row without any candidate is an error: it means that the
//! model is broken, or that everything is forbidden.
//!
//! A [`Sampler`] does not allocate after its first token, and never sorts a vocabulary. Models, tokenizers and grammars
//! do not enter here.

mod rng;
mod select;
mod stop;

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};

pub use rng::Rng;
pub use stop::StopMatcher;

use select::{Candidate, largest, sort};

/// How to choose a token. [`SamplerParams::default`] is the usual creative setting, [`SamplerParams::greedy`] the exact one.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerParams {
    /// 0 (or less) takes the largest logit; 1 draws from the model's own distribution.
    pub temperature: f32,
    /// Only the k largest logits remain; 0 is off.
    pub top_k: usize,
    /// Only the fewest tokens whose probabilities reach this remain; 1 is off.
    pub top_p: f32,
    /// Only tokens of at least this fraction of the largest probability remain; 0 is off.
    pub min_p: f32,
    /// 1 is off, above discourages repetition.
    pub repeat_penalty: f32,
    /// 0 is off.
    pub presence_penalty: f32,
    /// 0 is off.
    pub frequency_penalty: f32,
    /// How many of the last accepted tokens the penalties look at; 0 is off.
    pub penalty_last_n: usize,
    /// Added to the logits of single tokens; ids out of range are ignored.
    pub logit_bias: Vec<(u32, f32)>,
    /// Where the random numbers start; `None` takes a new one each time, which [`Sampler::seed`] tells.
    pub seed: Option<u64>,
}

impl Default for SamplerParams {
    fn default() -> SamplerParams {
        SamplerParams {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_last_n: 64,
            logit_bias: Vec::new(),
            seed: None,
        }
    }
}

impl SamplerParams {
    /// The largest logit, always.
    pub fn greedy() -> SamplerParams {
        SamplerParams { temperature: 0.0, ..SamplerParams::default() }
    }

    fn penalizes(&self) -> bool {
        self.penalty_last_n > 0
            && (self.repeat_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0)
    }

    /// Are all tokens of the logit bias among the model's?
    ///
    /// # Errors
    /// [`SampleError::NoToken`] for the first that is not.
    pub fn check_vocabulary(&self, n_vocab: usize) -> Result<(), SampleError> {
        let beyond = self.logit_bias.iter().find(|(id, _)| *id as usize >= n_vocab);
        beyond.map_or(Ok(()), |&(id, _)| Err(SampleError::NoToken { id, n_vocab }))
    }

    fn check(&self) -> Result<(), SampleError> {
        let bad = |name, value: f32, range| Err(SampleError::Parameter { name, value, range });
        match self {
            p if !p.temperature.is_finite() => bad("temperature", p.temperature, "a finite number"),
            p if !(p.top_p > 0.0 && p.top_p <= 1.0) => bad("top_p", p.top_p, "above 0, and at most 1 (off)"),
            p if !(0.0..=1.0).contains(&p.min_p) => bad("min_p", p.min_p, "from 0 (off) to 1"),
            p if !(p.repeat_penalty > 0.0 && p.repeat_penalty.is_finite()) => {
                bad("repeat_penalty", p.repeat_penalty, "above 0; 1 is off")
            }
            p if !p.presence_penalty.is_finite() => bad("presence_penalty", p.presence_penalty, "a finite number"),
            p if !p.frequency_penalty.is_finite() => bad("frequency_penalty", p.frequency_penalty, "a finite number"),
            p => match p.logit_bias.iter().find(|(_, bias)| bias.is_nan()) {
                Some(&(_, bias)) => bad("logit_bias", bias, "a number, or an infinity"),
                None => Ok(()),
            },
        }
    }
}

/// Why no token can be chosen.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// A parameter that has no meaning.
    #[error("sampling parameter `{name}` is {value}; it must be {range}")]
    Parameter {
        /// The field of [`SamplerParams`].
        name: &'static str,
        /// Its value.
        value: f32,
        /// What it may be.
        range: &'static str,
    },
    /// A bias for a token that the model does not have.
    #[error(
        "the logit bias names token {id}, but the model has {n_vocab} tokens, 0 to {}; `hanzo tokenize` lists the ids of a text",
        n_vocab.saturating_sub(1)
    )]
    NoToken {
        /// The id.
        id: u32,
        /// The model's tokens.
        n_vocab: usize,
    },
    /// Every logit is NaN or -inf.
    #[error(
        "no token can be chosen: all {n_vocab} logits are NaN or -inf ({nan} NaN); the model's numbers or the logit bias are broken"
    )]
    NoCandidate {
        /// The length of the row.
        n_vocab: usize,
        /// How many of them are NaN.
        nan: usize,
    },
}

/// Chooses the tokens of one sequence.
///
/// ```
/// use hanzo_engine::sample::{Sampler, SamplerParams};
/// let mut sampler = Sampler::new(SamplerParams { seed: Some(1), ..SamplerParams::default() })?;
/// let token = sampler.sample(&[0.5, 3.0, -1.0])?;
/// sampler.accept(token);
/// # Ok::<(), hanzo_engine::sample::SampleError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplerParams,
    seed: u64,
    rng: Rng,
    /// The last accepted tokens, at most `penalty_last_n`.
    recent: VecDeque<u32>,
    /// The row at work, after bias and penalties.
    logits: Vec<f32>,
    candidates: Vec<Candidate>,
    /// How often each token is among `recent`; all zero between calls.
    counts: Vec<u32>,
}

impl Sampler {
    /// A sampler at the start of a sequence.
    ///
    /// # Errors
    /// [`SampleError::Parameter`] if a parameter has no meaning.
    pub fn new(params: SamplerParams) -> Result<Sampler, SampleError> {
        params.check()?;
        let seed = params.seed.unwrap_or_else(|| RandomState::new().hash_one(0));
        Ok(Sampler {
            rng: Rng::new(seed),
            seed,
            recent: VecDeque::with_capacity(if params.penalizes() { params.penalty_last_n.min(4096) } else { 0 }),
            logits: Vec::new(),
            candidates: Vec::new(),
            counts: Vec::new(),
            params,
        })
    }

    /// The parameters.
    pub fn params(&self) -> &SamplerParams {
        &self.params
    }

    /// Where the random numbers started: the same seed over the same logits gives the same tokens.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Adds a token of the sequence (of the prompt, too) to those the penalties look at.
    pub fn accept(&mut self, token: u32) {
        if !self.params.penalizes() {
            return;
        }
        if self.recent.len() == self.params.penalty_last_n {
            self.recent.pop_front();
        }
        self.recent.push_back(token);
    }

    /// Chooses a token: an index into `logits`, one row of the vocabulary's length.
    ///
    /// # Errors
    /// [`SampleError::NoCandidate`] if every logit is NaN or -inf (or the row is empty).
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SampleError> {
        let no_candidate = || SampleError::NoCandidate {
            n_vocab: logits.len(),
            nan: logits.iter().filter(|logit| logit.is_nan()).count(),
        };
        let adjusted = self.adjust(logits);
        let row = if adjusted { self.logits.as_slice() } else { logits };
        let greatest = greatest(row).ok_or_else(no_candidate)?;
        if self.params.temperature <= 0.0 || greatest.logit == f32::INFINITY {
            return Ok(greatest.id);
        }
        truncate(&self.params, row, greatest.logit, &mut self.candidates);
        Ok(self.draw(greatest.logit))
    }

    /// Steps 1 and 2, into `self.logits`; false if there is nothing to do.
    fn adjust(&mut self, logits: &[f32]) -> bool {
        let params = &self.params;
        if params.logit_bias.is_empty() && self.recent.is_empty() {
            return false;
        }
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        for &(id, bias) in &params.logit_bias {
            if let Some(logit) = self.logits.get_mut(id as usize) {
                // A forced token is forced, whatever the model says of it.
                *logit = if bias.is_infinite() { bias } else { *logit + bias };
            }
        }
        self.counts.resize(logits.len(), 0);
        for &token in &self.recent {
            if let Some(count) = self.counts.get_mut(token as usize) {
                *count = count.saturating_add(1);
            }
        }
        for &token in &self.recent {
            let Some(count) = self.counts.get_mut(token as usize) else { continue };
            let count = std::mem::take(count);
            if count > 0 {
                let logit = &mut self.logits[token as usize];
                if *logit > 0.0 {
                    *logit /= params.repeat_penalty;
                } else {
                    *logit *= params.repeat_penalty;
                }
                *logit -= count as f32 * params.frequency_penalty + params.presence_penalty;
            }
        }
        true
    }

    /// Step 6: the candidates' probabilities at the temperature, and a draw.
    fn draw(&mut self, greatest: f32) -> u32 {
        let temperature = self.params.temperature;
        let weight = |candidate: &Candidate| f64::from((candidate.logit - greatest) / temperature).exp();
        let total: f64 = self.candidates.iter().map(weight).sum();
        let mut left = self.rng.next_f64() * total;
        let mut chosen = None;
        for candidate in &self.candidates {
            let weight = weight(candidate);
            if weight > 0.0 {
                // The last candidate with any weight takes what rounding leaves over.
                chosen = Some(candidate.id);
                left -= weight;
                if left < 0.0 {
                    break;
                }
            }
        }
        chosen.unwrap_or_else(|| self.candidates.first().map_or(0, |candidate| candidate.id))
    }
}

/// The largest logit, the lowest id of equals; `None` if all are NaN or -inf.
fn greatest(logits: &[f32]) -> Option<Candidate> {
    let mut greatest = f32::NEG_INFINITY;
    for &logit in logits {
        greatest = greatest.max(logit); // ignores NaN
    }
    if greatest == f32::NEG_INFINITY {
        return None;
    }
    let id = logits.iter().position(|&logit| logit == greatest)?;
    Some(Candidate { logit: greatest, id: id as u32 })
}

/// Steps 3 to 5: fills `candidates`, largest first if there was a reason to sort them. It is never left empty.
fn truncate(params: &SamplerParams, logits: &[f32], greatest: f32, candidates: &mut Vec<Candidate>) {
    let by_count = params.top_k > 0 && params.top_k < logits.len();
    if by_count {
        largest(logits, params.top_k, candidates);
    } else {
        let all = logits.iter().enumerate();
        candidates.clear();
        candidates.extend(
            all.filter(|(_, logit)| **logit > f32::NEG_INFINITY).map(|(id, &logit)| Candidate { logit, id: id as u32 }),
        );
    }
    if params.top_p < 1.0 {
        keep_mass(params.top_p, greatest, candidates);
    }
    if params.min_p > 0.0 {
        let least = greatest + params.min_p.ln();
        candidates.retain(|candidate| candidate.logit >= least);
    }
}

/// Step 4: keeps the fewest of the largest whose share of all candidates' probability reaches `mass`.
///
/// Probability sits in few tokens, so ever larger heads are sorted until one suffices.
fn keep_mass(mass: f32, greatest: f32, candidates: &mut Vec<Candidate>) {
    let weight = |candidate: &Candidate| f64::from(candidate.logit - greatest).exp();
    let wanted = f64::from(mass) * candidates.iter().map(weight).sum::<f64>();
    let mut reached = 0.0;
    let mut sorted = 0;
    while sorted < candidates.len() {
        let head = (4 * sorted).max(64).min(candidates.len());
        let tail = &mut candidates[sorted..];
        let count = head - sorted;
        if count < tail.len() {
            tail.select_nth_unstable_by(count, Candidate::order);
        }
        sort(&mut tail[..count]);
        for at in sorted..head {
            reached += weight(&candidates[at]);
            if reached >= wanted {
                candidates.truncate(at + 1);
                return;
            }
        }
        sorted = head;
    }
}

#[cfg(test)]
mod tests;
