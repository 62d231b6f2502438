//! Which format each tensor gets. A mix is a row of a table: a base format, and the roles that deserve better.
//!
//! Why any role does: errors in the head reach every logit; the value projection and the feed-forward's way down write
//! straight into the residual stream and are a small share of the bytes; so they get the next better format, in the
//! layers where it shows most (the outer ones, and every third between). The names and the general idea are the
//! field's, so that `Q4_K_M` here is about as large and as good as a `Q4_K_M` from elsewhere.

use hanzo_gguf::Format::{self, *};

/// What a tensor does in a model, from its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The output projection; the token embedding too, if the model ties the two.
    Head,
    /// The token embedding of a model with an output projection of its own.
    Embedding,
    /// Keys; shared by many query heads.
    AttnK,
    /// Values; shared by many query heads.
    AttnV,
    /// Queries, keys and values in one matrix.
    AttnQkv,
    /// From attention back into the residual stream.
    AttnOutput,
    /// From the feed-forward network back into the residual stream (of every expert, in a mixture).
    FfnDown,
    /// The experts' ways in.
    ExpertIn,
    /// Any other matrix.
    Other,
    /// What stays as exact as it is: norms, biases, routers, convolutions, anything with one dimension.
    Exact,
}

/// The layers a rule holds for, of `n` layers counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layers {
    /// All of them, and tensors that belong to none.
    All,
    /// The first so many.
    First(u32),
    /// The first eighth.
    FirstEighth,
    /// The first and the last eighth, and every third layer between.
    Spread,
}

impl Layers {
    fn holds(self, layer: Option<u32>, n: u32) -> bool {
        let Some(layer) = layer else { return self == Layers::All };
        match self {
            Layers::All => true,
            Layers::First(count) => layer < count,
            Layers::FirstEighth => layer < n / 8,
            Layers::Spread => layer < n / 8 || layer >= n * 7 / 8 || (layer - n / 8) % 3 == 2,
        }
    }
}

/// "Tensors of this role get this format, in these layers."
pub type Rule = (Role, Layers, Format);

/// A named choice of formats.
#[derive(Debug)]
pub struct Mix {
    /// The name, as `hanzo quantize` takes it.
    pub name: &'static str,
    /// The `general.file_type` that other programs know it by.
    pub file_type: u32,
    /// The format of what no rule names.
    pub base: Format,
    /// The first rule that fits wins.
    pub rules: &'static [Rule],
}

use Layers::{All, First, FirstEighth, Spread};
use Role::{AttnK, AttnOutput, AttnQkv, AttnV, Embedding, ExpertIn, FfnDown, Head};

const fn mix(name: &'static str, file_type: u32, base: Format, rules: &'static [Rule]) -> Mix {
    Mix { name, file_type, base, rules }
}

/// All mixes.
pub const MIXES: &[Mix] = &[
    mix("F32", 0, F32, &[]),
    mix("F16", 1, F16, &[]),
    mix("BF16", 32, BF16, &[]),
    mix("Q8_0", 7, Q8_0, &[]),
    mix("Q6_K", 18, Q6_K, &[]),
    mix("Q5_K_M", 17, Q5_K, &[(Head, All, Q6_K), (AttnV, Spread, Q6_K), (FfnDown, Spread, Q6_K), (AttnQkv, All, Q6_K)]),
    mix("Q5_K_S", 16, Q5_K, &[(Head, All, Q6_K)]),
    mix("Q4_K_M", 15, Q4_K, &[(Head, All, Q6_K), (AttnV, Spread, Q6_K), (FfnDown, Spread, Q6_K), (AttnQkv, All, Q5_K)]),
    mix("Q4_K_S", 14, Q4_K, &[(Head, All, Q6_K), (AttnV, First(4), Q5_K), (FfnDown, FirstEighth, Q5_K)]),
    mix(
        "Q3_K_L",
        13,
        Q3_K,
        &[(Head, All, Q6_K), (AttnV, All, Q5_K), (FfnDown, All, Q5_K), (AttnOutput, All, Q5_K), (AttnQkv, All, Q5_K)],
    ),
    mix(
        "Q3_K_M",
        12,
        Q3_K,
        &[
            (Head, All, Q6_K),
            (AttnV, First(2), Q5_K),
            (AttnV, All, Q4_K),
            (FfnDown, First(1), Q5_K),
            (FfnDown, Spread, Q4_K),
            (AttnOutput, All, Q4_K),
            (AttnQkv, All, Q4_K),
        ],
    ),
    mix("Q3_K_S", 11, Q3_K, &[(Head, All, Q6_K)]),
    mix(
        "Q2_K",
        10,
        Q2_K,
        &[(Head, All, Q6_K), (AttnV, All, Q4_K), (FfnDown, All, Q3_K), (AttnOutput, All, Q3_K), (AttnQkv, All, Q3_K)],
    ),
    mix("Q2_K_S", 21, Q2_K, &[(Head, All, Q6_K), (AttnV, All, Q4_K), (FfnDown, FirstEighth, Q4_K)]),
    mix("Q5_1", 9, Q5_1, &[(Head, All, Q6_K)]),
    mix("Q5_0", 8, Q5_0, &[(Head, All, Q6_K)]),
    mix("Q4_1", 3, Q4_1, &[(Head, All, Q6_K)]),
    mix("Q4_0", 2, Q4_0, &[(Head, All, Q6_K)]),
    mix("IQ4_NL", 25, IQ4_NL, &[(Head, All, Q6_K), (AttnV, All, Q5_K), (FfnDown, FirstEighth, Q5_K)]),
    mix("IQ4_XS", 30, IQ4_XS, &[(Head, All, Q6_K), (AttnV, All, Q5_K), (FfnDown, FirstEighth, Q5_K)]),
    // Ternary weights are exact in these; what was not trained ternary must not be forced into them.
    mix("TQ1_0", 36, TQ1_0, &[(Head, All, Q6_K), (Embedding, All, Q4_K)]),
    mix("TQ2_0", 37, TQ2_0, &[(Head, All, Q6_K), (Embedding, All, Q4_K)]),
    // The experts only, as models trained in this format have it.
    mix("MXFP4_MOE", 38, Q8_0, &[(FfnDown, All, MXFP4), (ExpertIn, All, MXFP4)]),
    mix("MXFP4", 38, MXFP4, &[(Head, All, Q8_0), (Embedding, All, Q8_0)]),
];

/// Names that the field uses for another one's default.
const ALIASES: &[(&str, &str)] = &[("Q5_K", "Q5_K_M"), ("Q4_K", "Q4_K_M"), ("Q3_K", "Q3_K_M")];

/// The mix of a name, in any case.
pub fn find(name: &str) -> Option<&'static Mix> {
    let name = ALIASES.iter().find(|(alias, _)| alias.eq_ignore_ascii_case(name)).map_or(name, |(_, n)| n);
    MIXES.iter().find(|m| m.name.eq_ignore_ascii_case(name))
}

/// What a mix needs to know of a model.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    /// Layers.
    pub layers: u32,
    /// Whether it has experts.
    pub experts: bool,
    /// Whether the token embedding is the output projection too.
    pub tied: bool,
}

/// The layer of `blk.N.name`, and the name without it.
fn layer(name: &str) -> (Option<u32>, &str) {
    let parsed = name.strip_prefix("blk.").and_then(|rest| {
        let (layer, rest) = rest.split_once('.')?;
        Some((layer.parse().ok()?, rest))
    });
    parsed.map_or((None, name), |(layer, rest)| (Some(layer), rest))
}

/// The role of a tensor of that name and number of dimensions (those of length 1 at the end not counted).
pub fn role(name: &str, dims: usize, model: &Model) -> Role {
    let (_, name) = layer(name);
    let Some(name) = name.strip_suffix(".weight").filter(|_| dims >= 2) else { return Role::Exact };
    // The router decides discretely, convolutions and position tables are tiny.
    let exact = ["_norm", "ffn_gate_inp", "conv", "position_embd", "token_types", "rope_freqs", "_rel_b"];
    if exact.iter().any(|part| name.contains(part)) {
        return Role::Exact;
    }
    match name {
        "output" => Head,
        "token_embd" if model.tied => Head,
        "token_embd" => Embedding,
        "attn_k" => AttnK,
        "attn_v" | "attn_v_b" | "attn_kv_b" => AttnV,
        "attn_qkv" => AttnQkv,
        "attn_output" => AttnOutput,
        "ffn_down" | "ffn_down_exps" | "ffn_down_shexp" => FfnDown,
        "ffn_gate_exps" | "ffn_up_exps" | "ffn_gate_up_exps" => ExpertIn,
        _ => Role::Other,
    }
}

impl Mix {
    /// The format of the tensor, before its row length is looked at; `None` for what stays exact. With `pure`, the
    /// base format whatever the role.
    pub fn format(&self, name: &str, dims: usize, model: &Model, pure: bool) -> Option<Format> {
        let role = role(name, dims, model);
        if role == Role::Exact {
            return None;
        }
        if pure {
            return Some(self.base);
        }
        // A mixture's bytes are in its experts: good attention costs next to nothing there.
        if model.experts && matches!(role, AttnK | AttnV) && self.base.is_block() {
            return Some(Q8_0);
        }
        if model.experts && role == AttnOutput && matches!(self.base, Q2_K | Q3_K | Q4_K | IQ4_NL | IQ4_XS) {
            return Some(Q5_K);
        }
        let experts_only = self.name == "MXFP4_MOE" && !name.contains("_exps");
        let (layer, _) = layer(name);
        let rule = self.rules.iter().find(|(r, l, _)| *r == role && l.holds(layer, model.layers) && !experts_only);
        Some(rule.map_or(self.base, |(_, _, format)| *format))
    }
}

/// `format`, or for rows that are no whole number of its blocks the nearest format of shorter blocks that is no worse.
pub fn fitting(format: Format, row: u64) -> Format {
    let fits = |f: Format| row.is_multiple_of(f.block_len() as u64);
    if fits(format) {
        return format;
    }
    let shorter = match format {
        Q6_K => Q8_0,
        Q5_K => Q5_1,
        Q4_K => Q5_0,
        _ if format.block_len() > 32 => IQ4_NL,
        _ => F16,
    };
    if fits(shorter) { shorter } else { F16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DENSE: Model = Model { layers: 32, experts: false, tied: false };

    fn format(mix: &str, name: &str, model: &Model) -> Option<Format> {
        find(mix).unwrap().format(name, if name.contains("norm") { 1 } else { 2 }, model, false)
    }

    #[test]
    fn q4_k_m_gives_half_of_the_values_and_downs_more_bits() {
        let six = |name: &str| {
            let layers =
                (0..32_u32).filter(|l| format("Q4_K_M", &format!("blk.{l}.{name}.weight"), &DENSE) == Some(Q6_K));
            layers.collect::<Vec<_>>()
        };
        let expected = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31];
        assert_eq!(six("attn_v"), expected);
        assert_eq!(six("ffn_down"), expected);
        assert!(six("attn_q").is_empty());
        assert_eq!(format("Q4_K_M", "output.weight", &DENSE), Some(Q6_K));
        assert_eq!(format("Q4_K_M", "token_embd.weight", &DENSE), Some(Q4_K));
        assert_eq!(format("Q4_K_M", "token_embd.weight", &Model { tied: true, ..DENSE }), Some(Q6_K));
    }

    #[test]
    fn norms_biases_and_routers_stay_exact() {
        let names = ["blk.0.attn_norm.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate_inp.weight", "rope_freqs.weight"];
        for name in names {
            assert_eq!(format("Q4_0", name, &DENSE), None, "{name}");
        }
        assert_eq!(find("Q4_0").unwrap().format("x.weight", 1, &DENSE, true), None);
    }

    #[test]
    fn experts_keep_attention_and_mxfp4_moe_touches_only_experts() {
        let moe = Model { experts: true, ..DENSE };
        assert_eq!(format("Q4_K_M", "blk.9.attn_k.weight", &moe), Some(Q8_0));
        assert_eq!(format("Q2_K", "blk.9.attn_output.weight", &moe), Some(Q5_K));
        assert_eq!(format("MXFP4_MOE", "blk.9.ffn_up_exps.weight", &moe), Some(MXFP4));
        assert_eq!(format("MXFP4_MOE", "blk.9.ffn_down.weight", &moe), Some(Q8_0));
        assert_eq!(format("MXFP4_MOE", "blk.9.attn_q.weight", &moe), Some(Q8_0));
    }

    #[test]
    fn pure_means_one_format_for_every_matrix() {
        let mix = find("q4_k").unwrap();
        assert_eq!(mix.name, "Q4_K_M");
        for name in ["output.weight", "token_embd.weight", "blk.0.attn_v.weight"] {
            assert_eq!(mix.format(name, 2, &DENSE, true), Some(Q4_K));
        }
    }

    #[test]
    fn rows_of_other_lengths_fall_back_to_shorter_blocks() {
        assert_eq!(fitting(Q4_K, 512), Q4_K);
        assert_eq!(fitting(Q4_K, 576), Q5_0);
        assert_eq!(fitting(Q5_K, 576), Q5_1);
        assert_eq!(fitting(Q6_K, 576), Q8_0);
        assert_eq!(fitting(Q2_K, 576), IQ4_NL);
        assert_eq!(fitting(TQ2_0, 576), IQ4_NL);
        assert_eq!(fitting(Q6_K, 33), F16);
        assert_eq!(fitting(Q4_0, 33), F16);
        assert_eq!(fitting(F32, 33), F32);
    }

    #[test]
    fn every_mix_has_its_own_name_and_only_formats_that_can_be_written() {
        let writable: Vec<Format> = hanzo_gguf::formats::writable().collect();
        for (i, mix) in MIXES.iter().enumerate() {
            assert!(MIXES[..i].iter().all(|m| m.name != mix.name));
            assert!(std::iter::once(mix.base).chain(mix.rules.iter().map(|r| r.2)).all(|f| writable.contains(&f)));
        }
    }
}
