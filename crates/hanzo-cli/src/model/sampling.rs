//! The sampling flags and their defaults.

use std::hash::{BuildHasher, RandomState};

use hanzo_engine::sample::{Sampler, SamplerParams};

use crate::failure::Failure;

const HEADING: &str = "Sampling options";

/// How tokens are chosen. The defaults are what small chat models answer best with (the authors of SmolLM2 advise the same
/// temperature and top-p): near the likeliest token, since a wrong turn costs a small model its thread, but not greedy,
/// which loops. Penalties are off: they punish a short answer for repeating the question's words.
#[derive(clap::Args)]
pub struct SamplingArgs {
    /// Temperature; 0 always takes the likeliest token
    #[arg(long, value_name = "T", default_value_t = 0.2, help_heading = HEADING)]
    temp: f32,
    /// Only the K likeliest tokens (0: off)
    #[arg(long, value_name = "K", default_value_t = 40, help_heading = HEADING)]
    top_k: usize,
    /// Only the fewest tokens whose probabilities reach P (1: off)
    #[arg(long, value_name = "P", default_value_t = 0.9, help_heading = HEADING)]
    top_p: f32,
    /// Only tokens of at least P times the likeliest one's probability (0: off)
    #[arg(long, value_name = "P", default_value_t = 0.05, help_heading = HEADING)]
    min_p: f32,
    /// Divide the logits of recent tokens by this (1: off)
    #[arg(long, value_name = "X", default_value_t = 1.0, help_heading = HEADING)]
    repeat_penalty: f32,
    /// Subtract from the logits of recent tokens (0: off)
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true, help_heading = HEADING)]
    presence_penalty: f32,
    /// Subtract from the logits of recent tokens for each occurrence (0: off)
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true, help_heading = HEADING)]
    frequency_penalty: f32,
    /// How many recent tokens the penalties look at
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = HEADING)]
    repeat_last_n: usize,
    /// Add BIAS to the logit of a token, e.g. `198=-inf` to forbid it; may be repeated
    #[arg(long, value_name = "ID=BIAS", value_parser = parse_bias, help_heading = HEADING)]
    logit_bias: Vec<(u32, f32)>,
    /// Where the random numbers start: the same seed gives the same text (default: another one each time)
    #[arg(long, value_name = "N", help_heading = HEADING)]
    seed: Option<u64>,
    /// Always take the likeliest token, without penalties
    #[arg(long, conflicts_with_all = ["temp", "top_k", "top_p", "min_p"], help_heading = HEADING)]
    greedy: bool,
    /// End the reply at this text, which is not shown; may be repeated
    #[arg(long, value_name = "TEXT", help_heading = HEADING)]
    pub stop: Vec<String>,
}

fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let (id, bias) = text.split_once('=').ok_or("it has no `=` between the token id and the bias")?;
    let id = id.trim().parse().map_err(|_| format!("`{id}` is no token id"))?;
    let bias: f32 = bias.trim().parse().map_err(|_| format!("`{bias}` is no number"))?;
    if bias.is_nan() { Err("the bias is not a number".into()) } else { Ok((id, bias)) }
}

impl SamplingArgs {
    /// The parameters, checked, with a seed that is known.
    pub fn params(&self) -> anyhow::Result<SamplerParams> {
        // 32 bits are plenty, and survive programs that read JSON numbers as floats.
        let seed = Some(self.seed.unwrap_or_else(|| RandomState::new().hash_one(0) >> 32));
        let logit_bias = self.logit_bias.clone();
        let params = if self.greedy {
            SamplerParams { logit_bias, seed, ..SamplerParams::greedy() }
        } else {
            SamplerParams {
                temperature: self.temp,
                top_k: self.top_k,
                top_p: self.top_p,
                min_p: self.min_p,
                repeat_penalty: self.repeat_penalty,
                presence_penalty: self.presence_penalty,
                frequency_penalty: self.frequency_penalty,
                penalty_last_n: self.repeat_last_n,
                logit_bias,
                seed,
            }
        };
        Sampler::new(params.clone()).map_err(|e| Failure::usage(e.to_string()))?;
        Ok(params)
    }
}

/// Refuses parameters that name tokens beyond the model's: known once it is loaded.
pub fn check_vocabulary(params: &SamplerParams, n_vocab: usize) -> anyhow::Result<()> {
    params.check_vocabulary(n_vocab).map_err(|e| Failure::usage(format!("--logit-bias: {e}")).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bias_may_be_infinite_but_must_be_a_number() {
        assert_eq!(parse_bias("198=-inf"), Ok((198, f32::NEG_INFINITY)));
        assert_eq!(parse_bias("7 = 1.5"), Ok((7, 1.5)));
        for bad in ["7", "x=1", "7=x", "7=nan", "-1=2"] {
            assert!(parse_bias(bad).is_err(), "{bad}");
        }
    }
}
