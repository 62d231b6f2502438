//! The op set. Each op is a plain record of what it reads, writes and computes; how it runs is a backend's matter.
//!
//! Ops say what they touch through [`Op::accesses`]; scheduling, memory planning, barriers, dead-code removal and the
//! cost model are all functions of that one list.

use super::value::{ValueId, WeightId};

/// A page group: layers whose caches share a row layout, format, window and block table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CacheGroupId(pub u16);

/// A kind of recurrent state; a sequence owns one slot of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StateId(pub u16);

/// One layer's rows in a page group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheSlot {
    /// The page group.
    pub group: CacheGroupId,
    /// The layer's index within the group.
    pub layer: u32,
}

/// Element-wise activation functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x * sigmoid(x)`
    Silu,
    /// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`
    GeluTanh,
    /// `0.5 x (1 + erf(x / sqrt 2))`
    GeluErf,
    /// `max(x, 0)^2`
    Relu2,
    /// `1 / (1 + exp(-x))`
    Sigmoid,
    /// `ln(1 + exp(x))`
    Softplus,
}

/// How a gate and an up projection combine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GluKind {
    /// `act(gate) * up`
    Plain(Activation),
    /// gpt-oss: `(up + 1) * gate * sigmoid(alpha * gate)`, gate clamped above and up on both sides by `limit`.
    SwigluClamped {
        /// Slope inside the sigmoid.
        alpha: f32,
        /// Clamp limit.
        limit: f32,
    },
}

/// Which pairs a rotation acts on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeConvention {
    /// Pairs `(i, i + n_dims / 2)`.
    Neox,
    /// Pairs `(2i, 2i + 1)`.
    Interleaved,
}

/// YaRN context extension (Peng et al. 2023, arXiv 2309.00071).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Context length the model was trained for.
    pub original_context: u32,
    /// Weight of the extrapolated angles; 0 turns YaRN off.
    pub ext_factor: f32,
    /// Multiplies the rotated values.
    pub attn_factor: f32,
    /// Rotations above which a dimension is not interpolated.
    pub beta_fast: f32,
    /// Rotations below which a dimension is fully interpolated.
    pub beta_slow: f32,
}

/// A rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// Which pairs rotate.
    pub convention: RopeConvention,
    /// Leading dimensions of a head that rotate; the rest pass through.
    pub n_dims: usize,
    /// Base of the geometric frequencies.
    pub base: f32,
    /// Position scale: 1 / factor for linear scaling, 1 for none.
    pub scale: f32,
    /// YaRN, if any.
    pub yarn: Option<Yarn>,
    /// Per-pair frequency divisors `[n_dims / 2]` (`rope_freqs`), if any.
    pub factors: Option<WeightId>,
    /// Pairs per position axis (multimodal rope), if any.
    pub sections: Option<[u32; 4]>,
    /// Multiplies the rotated values on top of YaRN's own factor.
    pub magnitude: f32,
}

/// Which keys a query may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mask {
    /// Positions up to its own; inside the batch's non-causal spans, the whole span.
    Causal,
    /// Every key of its sequence.
    Full,
}

/// Attention over a paged cache. All sizes in elements.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Query heads.
    pub n_head: usize,
    /// Key/value heads; divides `n_head`.
    pub n_kv: usize,
    /// Size of a query or key head.
    pub d_k: usize,
    /// Size of a value head.
    pub d_v: usize,
    /// Multiplies the scores.
    pub scale: f32,
    /// Sliding window: a query at `p` sees keys in `(p - window, p]`.
    pub window: Option<u32>,
    /// `cap * tanh(score / cap)` before the mask.
    pub softcap: Option<f32>,
    /// One extra logit a head that takes probability and gives nothing, `[n_head]`.
    pub sinks: Option<WeightId>,
    /// Output gate: the output is multiplied by `sigmoid(gate)`, `[n_tokens, n_head * d_v]`.
    pub gate: Option<ValueId>,
    /// Which keys are visible.
    pub mask: Mask,
    /// Where the keys and values are. For latent attention (MLA) values are the first `d_v` elements of the key rows.
    pub cache: CacheSlot,
}

/// How router logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RouterScore {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
    /// Softmax over the selected logits only (selection is on the raw logits).
    SoftmaxSelected,
}

/// The routing of a mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct RouteSpec {
    /// Experts.
    pub n_expert: usize,
    /// Experts a token uses.
    pub top_k: usize,
    /// Scores from logits.
    pub score: RouterScore,
    /// Added to the scores for selection only, `[n_expert]`.
    pub bias: Option<WeightId>,
    /// `(groups, kept)`: experts compete only within the kept groups, ranked by the sum of their two best scores.
    pub groups: Option<(usize, usize)>,
    /// Divide the selected weights by their sum.
    pub normalise: bool,
    /// Multiplies the weights at the end.
    pub scale: f32,
}

/// One matrix of a group that shares its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// The matrix `[out cols, in cols]` (per expert).
    pub w: WeightId,
    /// Added to the output, `[out cols]` (per expert).
    pub bias: Option<WeightId>,
    /// The output.
    pub out: ValueId,
}

/// A store of keys and values into a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Store {
    /// Values `[n_tokens, n_kv * d_v]`; none when the values are part of the key rows (MLA).
    pub v: Option<ValueId>,
    /// Where to.
    pub cache: CacheSlot,
}

/// An operation. Shapes are `[rows, cols]`; `T` is n_tokens.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the fields are described in each variant's text
pub enum Op {
    /// `out[t] = scale * table[token[t]]`, or the batch's embedding row when it carries rows.
    Embed { table: WeightId, scale: f32, out: ValueId },
    /// `out = x / sqrt(mean(x^2) + eps) * weight`, over each run of `group` columns.
    RmsNorm { x: ValueId, weight: Option<WeightId>, eps: f32, group: usize, out: ValueId },
    /// `out = (x - mean) / sqrt(var + eps) * weight + bias` over a row.
    LayerNorm { x: ValueId, weight: WeightId, bias: Option<WeightId>, eps: f32, out: ValueId },
    /// `out = x w^T + bias`.
    Linear { x: ValueId, member: Member },
    /// Several `Linear` over one `x`, its activations quantized once.
    LinearGroup { x: ValueId, members: Vec<Member> },
    /// Quantize activations into the shared int8 layout.
    Quantize { x: ValueId, out: ValueId },
    /// Rotate each head of `head_dim` columns by its token's position.
    Rope { x: ValueId, head_dim: usize, rope: RopeSpec, out: ValueId },
    /// Write keys (and values) of this step's tokens into the cache.
    KvStore { k: ValueId, store: Store },
    /// Norm each q and k head, rotate, and (with `store`) write k and v into the cache instead of `k_out`.
    QkNormRope {
        q: ValueId,
        k: ValueId,
        q_norm: Option<WeightId>,
        k_norm: Option<WeightId>,
        eps: f32,
        head_dim: usize,
        rope: RopeSpec,
        q_out: ValueId,
        k_out: Option<ValueId>,
        store: Option<Store>,
    },
    /// `out = softmax(mask(softcap(scale q k^T))) v`, keys and values from the cache.
    Attention { q: ValueId, spec: AttentionSpec, out: ValueId },
    /// `out = act(x)`.
    Act { x: ValueId, kind: Activation, out: ValueId },
    /// `out = glu(gate, up)`.
    Glu { gate: ValueId, up: ValueId, kind: GluKind, out: ValueId },
    /// `out = a + b`.
    Add { a: ValueId, b: ValueId, out: ValueId },
    /// `out = a * b`; a one-column `b` is broadcast over the columns.
    Mul { a: ValueId, b: ValueId, out: ValueId },
    /// `out = s * x`.
    Scale { x: ValueId, s: f32, out: ValueId },
    /// `out = cap * tanh(x / cap)`.
    Softcap { x: ValueId, cap: f32, out: ValueId },
    /// `sum = a + b; out = rms_norm(sum) * weight`.
    AddRmsNorm { a: ValueId, b: ValueId, weight: Option<WeightId>, eps: f32, sum: ValueId, out: ValueId },
    /// Router scores `[T, n_expert]` from logits.
    RouteScores { logits: ValueId, spec: RouteSpec, out: ValueId },
    /// The `top_k` experts of each row, best first, the lowest id first among equals: ids and their raw scores `[T, k]`.
    RouteTopK { scores: ValueId, spec: RouteSpec, ids: ValueId, weights: ValueId },
    /// Normalise and scale the selected weights.
    RouteNormalise { weights: ValueId, spec: RouteSpec, out: ValueId },
    /// Scores, selection and normalisation as one op.
    MoeRoute { logits: ValueId, spec: RouteSpec, ids: ValueId, weights: ValueId },
    /// `out[slot] = x[token or slot] w[ids[slot]]^T + bias[ids[slot]]`; `x` has one row a token or one a slot.
    MoeLinear { x: ValueId, ids: ValueId, member: Member },
    /// Several `MoeLinear` over one `x`.
    MoeLinearGroup { x: ValueId, ids: ValueId, members: Vec<Member> },
    /// `out[t] = sum over slots of weights[t, slot] * x[t, slot]`, in slot order.
    MoeCombine { x: ValueId, weights: ValueId, out: ValueId },
    /// The rows of `x` that the batch asks for.
    GatherRows { x: ValueId, out: ValueId },
    /// Causal depthwise convolution of `kernel` taps over each sequence, with carried state `[kernel - 1, cols]`.
    ShortConv {
        x: ValueId,
        weight: WeightId,
        bias: Option<WeightId>,
        kernel: usize,
        activation: Option<Activation>,
        state: StateId,
        layer: u32,
        out: ValueId,
    },
    /// Gated delta rule (Yang et al. 2024, arXiv 2412.06464): `S = exp(g) S; S += k (beta (v - k^T S)); out = S^T q`.
    /// `q`, `k` are L2-normalised per head by the op; state `[n_head, d_k, d_v]`.
    GatedDelta {
        q: ValueId,
        k: ValueId,
        v: ValueId,
        decay: ValueId,
        beta: ValueId,
        n_head: usize,
        n_key_head: usize,
        d_k: usize,
        d_v: usize,
        eps: f32,
        state: StateId,
        layer: u32,
        out: ValueId,
    },
    /// Columns `first..first + cols(out)` of `x`.
    Columns { x: ValueId, first: usize, out: ValueId },
    /// `a` and `b` side by side.
    Concat { a: ValueId, b: ValueId, out: ValueId },
    /// Move a value to another device.
    Copy { x: ValueId, out: ValueId },
    /// Sum of equal values held by several devices.
    AllReduce { xs: Vec<ValueId>, out: ValueId },
}

/// One thing an op touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Reads a value.
    Read(ValueId),
    /// Writes a value.
    Write(ValueId),
    /// Reads a weight.
    Weight(WeightId),
    /// Reads a layer's cached rows.
    CacheRead(CacheSlot),
    /// Writes a layer's cached rows.
    CacheWrite(CacheSlot),
    /// Reads and writes a layer's recurrent state.
    State(StateId, u32),
}

impl Op {
    /// The op's kind, in the field's terms.
    pub fn kind(&self) -> &'static str {
        match self {
            Op::Embed { .. } => "embed",
            Op::RmsNorm { .. } => "rms_norm",
            Op::LayerNorm { .. } => "layer_norm",
            Op::Linear { .. } => "linear",
            Op::LinearGroup { .. } => "linear_group",
            Op::Quantize { .. } => "quantize",
            Op::Rope { .. } => "rope",
            Op::KvStore { .. } => "kv_store",
            Op::QkNormRope { .. } => "qk_norm_rope",
            Op::Attention { .. } => "attention",
            Op::Act { .. } => "act",
            Op::Glu { .. } => "glu",
            Op::Add { .. } => "add",
            Op::Mul { .. } => "mul",
            Op::Scale { .. } => "scale",
            Op::Softcap { .. } => "softcap",
            Op::AddRmsNorm { .. } => "add_rms_norm",
            Op::RouteScores { .. } => "route_scores",
            Op::RouteTopK { .. } => "route_top_k",
            Op::RouteNormalise { .. } => "route_normalise",
            Op::MoeRoute { .. } => "moe_route",
            Op::MoeLinear { .. } => "moe_linear",
            Op::MoeLinearGroup { .. } => "moe_linear_group",
            Op::MoeCombine { .. } => "moe_combine",
            Op::GatherRows { .. } => "gather_rows",
            Op::ShortConv { .. } => "short_conv",
            Op::GatedDelta { .. } => "gated_delta",
            Op::Columns { .. } => "columns",
            Op::Concat { .. } => "concat",
            Op::Copy { .. } => "copy",
            Op::AllReduce { .. } => "all_reduce",
        }
    }

    /// Calls `f` with everything the op touches: reads first, then writes.
    pub fn accesses(&self, f: &mut dyn FnMut(Access)) {
        use Access::*;
        let weight = |w: &Option<WeightId>, f: &mut dyn FnMut(Access)| {
            if let Some(w) = w {
                f(Weight(*w));
            }
        };
        let member = |m: &Member, f: &mut dyn FnMut(Access)| {
            f(Weight(m.w));
            if let Some(b) = m.bias {
                f(Weight(b));
            }
            f(Write(m.out));
        };
        match self {
            Op::Embed { table, out, .. } => {
                f(Weight(*table));
                f(Write(*out));
            }
            Op::RmsNorm { x, weight: w, out, .. } => {
                f(Read(*x));
                weight(w, f);
                f(Write(*out));
            }
            Op::LayerNorm { x, weight: w, bias, out, .. } => {
                f(Read(*x));
                f(Weight(*w));
                weight(bias, f);
                f(Write(*out));
            }
            Op::Linear { x, member: m } => {
                f(Read(*x));
                member(m, f);
            }
            Op::LinearGroup { x, members } => {
                f(Read(*x));
                members.iter().for_each(|m| member(m, f));
            }
            Op::Rope { x, rope, out, .. } => {
                f(Read(*x));
                weight(&rope.factors, f);
                f(Write(*out));
            }
            Op::KvStore { k, store } => {
                f(Read(*k));
                if let Some(v) = store.v {
                    f(Read(v));
                }
                f(CacheWrite(store.cache));
            }
            Op::QkNormRope { q, k, q_norm, k_norm, rope, q_out, k_out, store, .. } => {
                f(Read(*q));
                f(Read(*k));
                if let Some(v) = store.and_then(|s| s.v) {
                    f(Read(v));
                }
                weight(q_norm, f);
                weight(k_norm, f);
                weight(&rope.factors, f);
                f(Write(*q_out));
                if let Some(k) = k_out {
                    f(Write(*k));
                }
                if let Some(s) = store {
                    f(CacheWrite(s.cache));
                }
            }
            Op::Attention { q, spec, out } => {
                f(Read(*q));
                if let Some(g) = spec.gate {
                    f(Read(g));
                }
                weight(&spec.sinks, f);
                f(CacheRead(spec.cache));
                f(Write(*out));
            }
            Op::Quantize { x, out }
            | Op::Act { x, out, .. }
            | Op::Scale { x, out, .. }
            | Op::Softcap { x, out, .. }
            | Op::GatherRows { x, out }
            | Op::Columns { x, out, .. }
            | Op::Copy { x, out } => {
                f(Read(*x));
                f(Write(*out));
            }
            Op::Glu { gate: a, up: b, out, .. }
            | Op::Add { a, b, out }
            | Op::Mul { a, b, out }
            | Op::Concat { a, b, out } => {
                f(Read(*a));
                f(Read(*b));
                f(Write(*out));
            }
            Op::AddRmsNorm { a, b, weight: w, sum, out, .. } => {
                f(Read(*a));
                f(Read(*b));
                weight(w, f);
                f(Write(*sum));
                f(Write(*out));
            }
            Op::RouteScores { logits, out, .. } => {
                f(Read(*logits));
                f(Write(*out));
            }
            Op::RouteTopK { scores, spec, ids, weights } => {
                f(Read(*scores));
                weight(&spec.bias, f);
                f(Write(*ids));
                f(Write(*weights));
            }
            Op::RouteNormalise { weights, out, .. } => {
                f(Read(*weights));
                f(Write(*out));
            }
            Op::MoeRoute { logits, spec, ids, weights } => {
                f(Read(*logits));
                weight(&spec.bias, f);
                f(Write(*ids));
                f(Write(*weights));
            }
            Op::MoeLinear { x, ids, member: m } => {
                f(Read(*x));
                f(Read(*ids));
                member(m, f);
            }
            Op::MoeLinearGroup { x, ids, members } => {
                f(Read(*x));
                f(Read(*ids));
                members.iter().for_each(|m| member(m, f));
            }
            Op::MoeCombine { x, weights, out } => {
                f(Read(*x));
                f(Read(*weights));
                f(Write(*out));
            }
            Op::ShortConv { x, weight: w, bias, state, layer, out, .. } => {
                f(Read(*x));
                f(Weight(*w));
                weight(bias, f);
                f(State(*state, *layer));
                f(Write(*out));
            }
            Op::GatedDelta { q, k, v, decay, beta, state, layer, out, .. } => {
                for x in [q, k, v, decay, beta] {
                    f(Read(*x));
                }
                f(State(*state, *layer));
                f(Write(*out));
            }
            Op::AllReduce { xs, out } => {
                xs.iter().for_each(|x| f(Read(*x)));
                f(Write(*out));
            }
        }
    }

    /// The values the op reads.
    pub fn reads(&self) -> Vec<ValueId> {
        let mut v = Vec::new();
        self.accesses(&mut |a| {
            if let Access::Read(x) = a {
                v.push(x);
            }
        });
        v
    }

    /// The values the op writes.
    pub fn writes(&self) -> Vec<ValueId> {
        let mut v = Vec::new();
        self.accesses(&mut |a| {
            if let Access::Write(x) = a {
                v.push(x);
            }
        });
        v
    }

    /// The matrices of a contraction, in order; empty for any other op.
    pub fn members(&self) -> &[Member] {
        match self {
            Op::Linear { member, .. } | Op::MoeLinear { member, .. } => std::slice::from_ref(member),
            Op::LinearGroup { members, .. } | Op::MoeLinearGroup { members, .. } => members,
            _ => &[],
        }
    }
}
