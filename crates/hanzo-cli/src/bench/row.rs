//! One line of results: what was measured, on what, and how sure that is.

use hanzo_engine::model::Model;
use hanzo_gguf::Format;
use hanzo_ml::plan::{Op, Sizes};
use serde_json::{Value, json};

use crate::measure::contention::Contention;
use crate::measure::stats;
use crate::measure::steps::Test;

/// What a file holds, in llama-bench's terms.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelFacts {
    /// Architecture, parameters, and the format that holds most of the bytes.
    pub name: String,
    /// The file.
    pub file: String,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Elements of all tensors.
    pub parameters: u64,
}

impl ModelFacts {
    /// Of a loaded model.
    pub fn of(model: &Model) -> ModelFacts {
        let gguf = model.gguf();
        let mut by_format: Vec<(Format, u64)> = Vec::new();
        for tensor in gguf.tensors() {
            match by_format.iter_mut().find(|(f, _)| *f == tensor.format) {
                Some((_, bytes)) => *bytes += tensor.size(),
                None => by_format.push((tensor.format, tensor.size())),
            }
        }
        let parameters = gguf.tensors().iter().map(|t| t.elements()).sum();
        let main = by_format.iter().max_by_key(|(_, bytes)| *bytes).map_or("?", |(f, _)| f.name());
        ModelFacts {
            name: format!("{} {} {main}", model.built().arch, human_count(parameters)),
            file: gguf.file().display().to_string(),
            bytes: by_format.iter().map(|(_, bytes)| bytes).sum(),
            parameters,
        }
    }
}

/// `135M`, `1.5B`.
fn human_count(n: u64) -> String {
    let n = n as f64;
    match n {
        n if n >= 9.95e9 => format!("{:.0}B", n / 1e9),
        n if n >= 9.995e8 => format!("{:.1}B", n / 1e9),
        n if n >= 1e6 => format!("{:.0}M", n / 1e6),
        n => format!("{:.0}K", n / 1e3),
    }
}

/// How it was run.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    pub backend: String,
    pub isa: String,
    pub threads: usize,
    pub ubatch: usize,
    pub type_k: Format,
    pub type_v: Format,
}

/// Bytes that a decode step must read, from the Plan's cost model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenBytes {
    /// Weights.
    pub weights: f64,
    /// Cached keys and values.
    pub cache: f64,
}

impl TokenBytes {
    /// Of one token that sees `n_kv` cached ones.
    pub fn of(model: &Model, n_kv: usize) -> TokenBytes {
        let plan = model.plan();
        let one = Sizes { n_tokens: 1, n_seqs: 1, n_out: 1 };
        let mut bytes = TokenBytes::default();
        for (i, op) in plan.ops.iter().enumerate() {
            bytes.weights += plan.cost(i, &one, n_kv).weight_bytes;
            if let Op::Attention { spec, .. } = op {
                let group = &plan.groups[spec.cache.group.0 as usize];
                let row = group.k_row_bytes().unwrap_or(0) + group.v_row_bytes().unwrap_or(0);
                let seen = spec.window.map_or(n_kv, |w| n_kv.min(w as usize));
                bytes.cache += (seen * spec.n_kv * row) as f64;
            }
        }
        bytes
    }

    /// Together.
    pub fn total(&self) -> f64 {
        self.weights + self.cache
    }
}

/// One test's results.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    pub model: ModelFacts,
    pub setup: Setup,
    pub test: Test,
    pub depth: usize,
    /// Tokens a second of each repetition.
    pub samples: Vec<f64>,
    /// For decode.
    pub token_bytes: Option<TokenBytes>,
    /// Load averages over one minute, before and after.
    pub load: [Option<f64>; 2],
    /// The worst over the repetitions; `None` where the system does not tell.
    pub contention: Option<Contention>,
}

impl Row {
    /// Measured while others took more of the processor than is tolerated.
    pub fn is_contended(&self) -> bool {
        self.contention.is_some_and(|c| c.is_too_much())
    }

    /// Mean speed in tokens a second.
    pub fn speed(&self) -> f64 {
        stats::mean(&self.samples)
    }

    /// Speed at which the bytes of each token were read.
    pub fn gigabytes_per_second(&self) -> Option<f64> {
        self.token_bytes.map(|b| b.total() * self.speed() / 1e9)
    }

    /// Every field by name, for programs. Names are llama-bench's where it has them.
    pub fn fields(&self) -> Vec<(&'static str, Value)> {
        let (n_prompt, n_gen) = match self.test {
            Test::Prompt(n) => (n, 0),
            Test::Generate(n) => (0, n),
        };
        let nanoseconds: Vec<f64> = self.samples.iter().map(|s| 1e9 * self.test.tokens() as f64 / s).collect();
        let (min, max) = stats::range(&self.samples);
        let (m, s) = (&self.model, &self.setup);
        vec![
            ("model_type", json!(m.name)),
            ("model_filename", json!(m.file)),
            ("model_size", json!(m.bytes)),
            ("model_n_params", json!(m.parameters)),
            ("backends", json!(s.backend)),
            ("isa", json!(s.isa)),
            ("n_threads", json!(s.threads)),
            ("n_ubatch", json!(s.ubatch)),
            ("type_k", json!(s.type_k.name().to_lowercase())),
            ("type_v", json!(s.type_v.name().to_lowercase())),
            ("n_prompt", json!(n_prompt)),
            ("n_gen", json!(n_gen)),
            ("n_depth", json!(self.depth)),
            ("avg_ns", json!(stats::mean(&nanoseconds).round())),
            ("stddev_ns", json!(stats::std_dev(&nanoseconds).round())),
            ("avg_ts", json!(self.speed())),
            ("stddev_ts", json!(stats::std_dev(&self.samples))),
            ("median_ts", json!(stats::median(&self.samples))),
            ("min_ts", json!(min)),
            ("max_ts", json!(max)),
            ("samples_ts", json!(self.samples)),
            ("weight_bytes_per_token", json!(self.token_bytes.map(|b| b.weights))),
            ("cache_bytes_per_token", json!(self.token_bytes.map(|b| b.cache))),
            ("gb_per_s", json!(self.gigabytes_per_second())),
            ("load_before", json!(self.load[0])),
            ("load_after", json!(self.load[1])),
            ("foreign_cpu", json!(self.contention.map(|c| c.foreign))),
            ("steal", json!(self.contention.map(|c| c.steal))),
            ("contended", json!(self.is_contended())),
        ]
    }
}

#[cfg(test)]
pub(super) fn example() -> Row {
    Row {
        model: ModelFacts {
            name: "llama 135M Q4_1".into(),
            file: "a,b.gguf".into(),
            bytes: 98 << 20,
            parameters: 134_515_008,
        },
        setup: Setup {
            backend: "CPU".into(),
            isa: "avx2".into(),
            threads: 2,
            ubatch: 512,
            type_k: Format::F16,
            type_v: Format::F16,
        },
        test: Test::Generate(128),
        depth: 0,
        samples: vec![99.0, 100.0, 101.0],
        token_bytes: Some(TokenBytes { weights: 9e7, cache: 1e7 }),
        load: [Some(0.5), None],
        contention: Some(Contention { foreign: 0.2, steal: 0.0 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_read_as_people_say_them() {
        let cases = [(134_515_008, "135M"), (1_543_714_304, "1.5B"), (999_900_000, "1.0B"), (70_600_000_000, "71B")];
        for (n, text) in cases {
            assert_eq!(human_count(n), text);
        }
    }

    #[test]
    fn bandwidth_is_bytes_of_a_token_times_tokens_a_second() {
        let row = example();
        assert!((row.gigabytes_per_second().unwrap() - 10.0).abs() < 1e-9);
        assert!(row.is_contended());
        let field = |name: &str| row.fields().into_iter().find(|(n, _)| *n == name).unwrap().1;
        assert_eq!((field("n_gen"), field("n_prompt"), field("avg_ts")), (json!(128), json!(0), json!(100.0)));
        assert_eq!(field("contended"), json!(true));
    }
}
