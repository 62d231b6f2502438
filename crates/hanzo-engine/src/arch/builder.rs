//! The builder an architecture is written with: typed hyper-parameters, weights by name, and one method an op.
//!
//! A tensor that is missing or misshapen does not stop the build: it is noted, stood in for, and reported with all the
//! others by [`Builder::finish`]. Nothing here knows a particular architecture.

use super::Built;
use crate::error::{Error, Result};
use hanzo_gguf::{Format, Gguf, Metadata, Value};
use hanzo_ml::cache::CacheGroup;
use hanzo_ml::plan::{
    Activation, AttentionSpec, CacheGroupId, CacheSlot, DType, DeviceId, Dim, GluKind, Mask, Member, Op, Plan,
    RopeSpec, RouteSpec, RouterScore, Store, ValueId, Weight, WeightId,
};
use std::collections::BTreeSet;

/// The largest size a hyper-parameter may claim: products of two stay far from overflow, and no model comes near.
const MAX_SIZE: u32 = 1 << 24;

/// A tensor's entry in a model file's directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorShape {
    /// Its format.
    pub format: Format,
    /// Its dimensions, the contiguous one first.
    pub dims: Vec<u64>,
}

/// A directory of tensors: a model file, or a table in a test.
pub trait Tensors {
    /// The tensor of this name.
    fn find(&self, name: &str) -> Option<TensorShape>;
    /// Every name, in the file's order.
    fn names(&self) -> Vec<String>;
}

impl Tensors for Gguf {
    fn find(&self, name: &str) -> Option<TensorShape> {
        self.tensor(name).map(|t| TensorShape { format: t.format, dims: t.dims.clone() })
    }

    fn names(&self) -> Vec<String> {
        self.tensors().iter().map(|t| t.name.clone()).collect()
    }
}

/// What a Plan depends on besides the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanOptions {
    /// The longest context of a sequence, in tokens: longrope picks its frequencies by it.
    pub n_ctx: usize,
    /// Format of cached keys.
    pub type_k: Format,
    /// Format of cached values.
    pub type_v: Format,
}

/// The sizes that every architecture has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    /// Layers (`block_count`).
    pub n_layer: usize,
    /// Columns of the residual stream (`embedding_length`).
    pub n_embd: usize,
    /// Query heads (`attention.head_count`).
    pub n_head: usize,
    /// Key/value heads (`attention.head_count_kv`, default `n_head`).
    pub n_kv: usize,
    /// Elements of a query or key head (`attention.key_length`, default `n_embd / n_head`).
    pub d_k: usize,
    /// Elements of a value head (`attention.value_length`, default `n_embd / n_head`).
    pub d_v: usize,
    /// Columns of a dense feed-forward (`feed_forward_length`).
    pub n_ff: usize,
    /// Token ids (rows of `token_embd.weight`).
    pub n_vocab: usize,
    /// Context length in training (`context_length`), if the file says.
    pub n_ctx_train: Option<usize>,
}

/// A mixture of experts: sizes and routing.
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// How logits become experts and weights.
    pub route: RouteSpec,
    /// Columns of one expert's feed-forward.
    pub n_ff: usize,
    /// How gate and up combine.
    pub glu: GluKind,
}

/// Builds one Plan. See the module's text.
pub struct Builder<'a> {
    arch: &'a str,
    metadata: &'a Metadata,
    tensors: &'a dyn Tensors,
    options: PlanOptions,
    plan: Plan,
    hyper: Option<Hyper>,
    eps: f32,
    prefix: String,
    used: BTreeSet<String>,
    missing: Vec<String>,
    wrong: Vec<String>,
}

impl<'a> Builder<'a> {
    /// An empty Plan for architecture `arch` over a file's metadata and tensors.
    pub fn new(arch: &'a str, metadata: &'a Metadata, tensors: &'a dyn Tensors, options: PlanOptions) -> Self {
        Builder {
            arch,
            metadata,
            tensors,
            options,
            plan: Plan::new(0),
            hyper: None,
            eps: 0.0,
            prefix: String::new(),
            used: BTreeSet::new(),
            missing: Vec::new(),
            wrong: Vec::new(),
        }
    }

    // Hyper-parameters. Keys come without the architecture's prefix.

    /// The full metadata key.
    pub fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    /// An error about a key.
    pub fn bad_key<T>(&self, key: &str, what: impl Into<String>) -> Result<T> {
        Err(Error::Key { key: self.key(key), what: what.into() })
    }

    /// A size: a whole number from 1 to 2^24.
    pub fn size(&self, key: &str) -> Result<usize> {
        let v = self.metadata.u32(&self.key(key))?;
        self.check_size(key, v)
    }

    /// A size that may be absent.
    pub fn opt_size(&self, key: &str) -> Result<Option<usize>> {
        self.metadata.opt_u32(&self.key(key))?.map(|v| self.check_size(key, v)).transpose()
    }

    fn check_size(&self, key: &str, v: u32) -> Result<usize> {
        if (1..=MAX_SIZE).contains(&v) {
            return Ok(v as usize);
        }
        self.bad_key(key, format!("{v} is not a size from 1 to {MAX_SIZE}"))
    }

    /// A whole number that may be absent or zero.
    pub fn opt_u32(&self, key: &str) -> Result<Option<u32>> {
        Ok(self.metadata.opt_u32(&self.key(key))?)
    }

    /// A finite number that may be absent.
    pub fn opt_f32(&self, key: &str) -> Result<Option<f32>> {
        match self.metadata.opt_f32(&self.key(key))? {
            Some(v) if !v.is_finite() => self.bad_key(key, format!("{v} is not finite")),
            v => Ok(v),
        }
    }

    /// A flag that may be absent.
    pub fn opt_bool(&self, key: &str) -> Result<Option<bool>> {
        Ok(self.metadata.opt_bool(&self.key(key))?)
    }

    /// A string that may be absent.
    pub fn opt_str(&self, key: &str) -> Result<Option<&'a str>> {
        let metadata: &'a Metadata = self.metadata;
        Ok(metadata.opt_str(&self.key(key))?)
    }

    /// What the Plan is built for.
    pub fn options(&self) -> PlanOptions {
        self.options
    }

    /// Reads the sizes that every architecture has, and the epsilon of its RMS norms.
    pub fn hyper(&mut self) -> Result<Hyper> {
        let (n_embd, n_head) = (self.size("embedding_length")?, self.size("attention.head_count")?);
        let n_kv = self.opt_size("attention.head_count_kv")?.unwrap_or(n_head);
        if n_head % n_kv != 0 {
            return self.bad_key("attention.head_count_kv", format!("{n_kv} does not divide {n_head} query heads"));
        }
        let head = |key: &str| match self.opt_size(key)? {
            Some(d) => Ok(d),
            None if n_embd % n_head == 0 => Ok(n_embd / n_head),
            None => self.bad_key(key, format!("is missing, and {n_embd} columns are not {n_head} whole heads")),
        };
        let n_layer = self.size("block_count")?;
        let n_tensors = self.tensors.names().len();
        if n_layer > n_tensors {
            return self.bad_key("block_count", format!("{n_layer} layers, but the file has {n_tensors} tensors"));
        }
        let h = Hyper {
            n_layer,
            n_embd,
            n_head,
            n_kv,
            d_k: head("attention.key_length")?,
            d_v: head("attention.value_length")?,
            n_ff: match self.opt_size("expert_feed_forward_length")? {
                // A model all of whose layers are routed may leave the dense length out.
                Some(n) => self.opt_size("feed_forward_length")?.unwrap_or(n),
                None => self.size("feed_forward_length")?,
            },
            n_vocab: match self.tensors.find("token_embd.weight").as_ref().map(|t| &t.dims[..]) {
                Some([_, n]) => usize::try_from(*n).unwrap_or(usize::MAX),
                _ => 1, // noted as missing or misshapen by `embed`
            },
            n_ctx_train: self.opt_size("context_length")?,
        };
        self.eps = self.opt_f32("attention.layer_norm_rms_epsilon")?.unwrap_or(1e-5);
        if !(self.eps >= 0.0 && self.eps.is_finite()) {
            return self.bad_key(
                "attention.layer_norm_rms_epsilon",
                format!("is {}, expected a small positive number: the file is damaged", self.eps),
            );
        }
        self.plan.n_embd = n_embd;
        self.hyper = Some(h);
        Ok(h)
    }

    /// Which layers are the global ones of a sliding-window model: every `n`-th, `n` from `key` or `default`. The key may
    /// also hold one bool a layer, true for a layer with a window.
    pub fn layers_every(&self, key: &str, default: usize, n_layer: usize) -> Result<Vec<bool>> {
        let full = self.key(key);
        if matches!(self.metadata.get(&full), Some(Value::Array(_))) {
            return match self.metadata.bools(&full)? {
                windowed if windowed.len() == n_layer => Ok(windowed.iter().map(|w| !w).collect()),
                windowed => self.bad_key(key, format!("{} entries for {n_layer} layers", windowed.len())),
            };
        }
        let n = self.opt_size(key)?.unwrap_or(default);
        Ok((1..=n_layer).map(|i| i % n == 0).collect())
    }

    /// Experts chosen by a softmax over all of them, their weights normalised; `None` where `expert_count` is 0 or absent.
    pub fn softmax_experts(&self, n_ff: usize, glu: GluKind) -> Result<Option<Experts>> {
        if matches!(self.opt_u32("expert_count")?, None | Some(0)) {
            return Ok(None);
        }
        let (n_expert, top_k) = (self.size("expert_count")?, self.size("expert_used_count")?);
        if top_k > n_expert {
            return self.bad_key("expert_used_count", format!("{top_k} of {n_expert} experts"));
        }
        // The same weights as a softmax over all, divided by the selected ones' sum, without the exponentials of the others.
        let score = RouterScore::SoftmaxSelected;
        let route = RouteSpec { n_expert, top_k, score, bias: None, groups: None, normalise: false, scale: 1.0 };
        Ok(Some(Experts { route, n_ff, glu }))
    }

    // Weights.

    /// Enters layer `il`: from here on names mean `blk.{il}.NAME`.
    pub fn enter_layer(&mut self, il: usize) {
        self.prefix = format!("blk.{il}.");
    }

    /// Runs `f` with names that belong to no layer.
    pub fn enter_globals<T>(&mut self, f: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let prefix = std::mem::take(&mut self.prefix);
        let out = f(self);
        self.prefix = prefix;
        out
    }

    /// The full name of a tensor.
    pub fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Is there a tensor of this name (in the current layer)?
    pub fn has(&self, name: &str) -> bool {
        self.tensors.find(&self.name(name)).is_some()
    }

    /// Counts a tensor as used though no op reads it.
    pub fn ignore(&mut self, name: &str) {
        self.used.insert(self.name(name));
    }

    /// Adds a row range of a tensor `[experts, tensor_rows, cols]`, noting what does not fit.
    fn add_weight(
        &mut self,
        name: &str,
        [experts, tensor_rows, cols]: [usize; 3],
        (first_row, rows): (usize, usize),
    ) -> WeightId {
        let tensor = self.name(name);
        self.used.insert(tensor.clone());
        let mut format = Format::F32;
        match self.tensors.find(&tensor) {
            None if self.missing.contains(&tensor) => {}
            None => self.missing.push(tensor.clone()),
            Some(t) => {
                format = t.format;
                // Flat row ranges may run over a tensor's outer dimensions.
                let outer = t.dims.iter().skip(1).try_fold(1u64, |a, d| a.checked_mul(*d));
                let fits = t.dims.first() == Some(&(cols as u64)) && outer == Some((experts * tensor_rows) as u64);
                let expert_dim = experts == 1 || tensor_rows == 1 || t.dims.get(2) == Some(&(experts as u64));
                let want: Vec<u64> = [cols, tensor_rows, experts].map(|d| d as u64).to_vec();
                if !(fits && expert_dim) {
                    self.wrong.push(format!("{tensor} is {:?}, expected {want:?}", t.dims));
                } else if !format.is_weight() {
                    self.wrong.push(format!("{tensor} is {format}, which no op reads"));
                } else if first_row + rows > tensor_rows {
                    self.wrong.push(format!("{tensor} has no rows {first_row}..{}", first_row + rows));
                }
            }
        }
        let device = DeviceId::default();
        self.plan.add_weight(Weight { tensor, format, experts, rows, cols, first_row, tensor_rows, device })
    }

    /// A matrix `[rows, cols]` named `NAME.weight`.
    pub fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> WeightId {
        self.add_weight(&format!("{name}.weight"), [1, rows, cols], (0, rows))
    }

    /// A vector of floats under its full name, `.weight` or `.bias` included.
    pub fn vector(&mut self, name: &str, len: usize) -> WeightId {
        let w = self.add_weight(name, [1, 1, len], (0, 1));
        let (tensor, format) = (self.name(name), self.plan.wt(w).format);
        if format.is_block() {
            self.wrong.push(format!("{tensor} is {format}, expected floats"));
        }
        w
    }

    /// `NAME.bias` if the file has one: `[len]`, or `[experts, len]`.
    fn opt_bias(&mut self, name: &str, experts: usize, len: usize) -> Option<WeightId> {
        let name = format!("{name}.bias");
        match (self.has(&name), experts) {
            (false, _) => None,
            (true, 1) => Some(self.vector(&name, len)),
            (true, _) => Some(self.add_weight(&name, [1, experts, len], (0, experts))),
        }
    }

    // Caches.

    /// A page group of `layers` layers of the model's usual heads.
    pub fn cache_group(&mut self, name: &str, layers: usize, h: &Hyper, window: Option<u32>) -> CacheGroupId {
        self.page_group(name, layers, [h.n_kv, h.d_k, h.d_v], window)
    }

    /// A page group of `layers` layers with heads `[n_kv, d_k, d_v]`.
    pub fn page_group(&mut self, name: &str, layers: usize, heads: [usize; 3], window: Option<u32>) -> CacheGroupId {
        let [n_kv, d_k, d_v] = heads;
        let (type_k, type_v) = (self.options.type_k, self.options.type_v);
        self.plan.groups.push(CacheGroup { name: name.into(), layers, n_kv, d_k, d_v, type_k, type_v, window });
        CacheGroupId(self.plan.groups.len() as u16 - 1)
    }

    // Ops. Each returns its output.

    /// The Plan so far, for ops that have no method here.
    pub fn plan(&mut self) -> &mut Plan {
        &mut self.plan
    }

    /// Columns of a value.
    pub fn cols(&self, v: ValueId) -> usize {
        self.plan.val(v).cols
    }

    /// A value with the rows of `x`.
    pub fn like(&mut self, x: ValueId, name: &str, cols: usize) -> ValueId {
        let name = self.name(name);
        let rows = self.plan.val(x).rows;
        self.plan.value(name, rows, cols)
    }

    /// The value of `x`, renamed: for element-wise ops on it.
    fn derived(&mut self, x: ValueId, suffix: &str) -> ValueId {
        let v = self.plan.val(x).clone();
        self.plan.value(format!("{}.{suffix}", v.name), v.rows, v.cols)
    }

    /// `scale * token_embd[token]`.
    pub fn embed(&mut self, scale: f32) -> ValueId {
        let (n_embd, n_vocab) = (self.plan.n_embd, self.hyper.map_or(1, |h| h.n_vocab));
        let table = self.matrix("token_embd", n_vocab, n_embd);
        let out = self.plan.value("embd", Dim::Tokens, n_embd);
        self.plan.push(Op::Embed { table, scale, out });
        out
    }

    /// RMS norm over whole rows, weighted by `NAME.weight`.
    pub fn rms_norm(&mut self, x: ValueId, name: &str) -> ValueId {
        self.rms_norm_heads(x, name, self.cols(x))
    }

    /// RMS norm over each head of `d` columns, weighted by `NAME.weight` `[d]`.
    pub fn rms_norm_heads(&mut self, x: ValueId, name: &str, d: usize) -> ValueId {
        let weight = Some(self.vector(&format!("{name}.weight"), d));
        let out = self.like(x, name, self.cols(x));
        self.plan.push(Op::RmsNorm { x, weight, eps: self.eps, group: d, out });
        out
    }

    /// `x NAME.weight^T`, plus `NAME.bias` if the file has one. `rows` is the output's columns.
    pub fn linear(&mut self, x: ValueId, name: &str, rows: usize) -> ValueId {
        let w = self.matrix(name, rows, self.cols(x));
        let bias = self.opt_bias(name, 1, rows);
        self.push_linear(x, name, w, bias)
    }

    /// `linear` whose bias must be there.
    pub fn linear_with_bias(&mut self, x: ValueId, name: &str, rows: usize) -> ValueId {
        let w = self.matrix(name, rows, self.cols(x));
        let bias = Some(self.vector(&format!("{name}.bias"), rows));
        self.push_linear(x, name, w, bias)
    }

    /// `x` times rows `first..first + rows` of the fused tensor `NAME.weight` of `tensor_rows` rows.
    pub fn linear_rows(&mut self, x: ValueId, name: &str, tensor_rows: usize, first: usize, rows: usize) -> ValueId {
        let w = self.add_weight(&format!("{name}.weight"), [1, tensor_rows, self.cols(x)], (first, rows));
        if self.has(&format!("{name}.bias")) {
            let bias = self.name(&format!("{name}.bias"));
            self.wrong.push(format!("{bias}: a bias on a fused tensor is not supported"));
        }
        self.push_linear(x, name, w, None)
    }

    fn push_linear(&mut self, x: ValueId, name: &str, w: WeightId, bias: Option<WeightId>) -> ValueId {
        let out = self.like(x, name, self.plan.wt(w).rows);
        self.plan.push(Op::Linear { x, member: Member { w, bias, out } });
        out
    }

    /// Rotates each head of `d` columns by its token's position.
    pub fn rope(&mut self, x: ValueId, d: usize, rope: &RopeSpec) -> ValueId {
        let out = self.derived(x, "rope");
        self.plan.push(Op::Rope { x, head_dim: d, rope: rope.clone(), out });
        out
    }

    /// What attention is unless an architecture says otherwise: causal over layer `layer` of `group`, scores times
    /// `1 / sqrt(d_k)`, the group's window.
    pub fn attention_spec(&self, h: &Hyper, group: CacheGroupId, layer: usize) -> AttentionSpec {
        AttentionSpec {
            n_head: h.n_head,
            n_kv: h.n_kv,
            d_k: h.d_k,
            d_v: h.d_v,
            scale: 1.0 / (h.d_k as f32).sqrt(),
            window: self.plan.groups[group.0 as usize].window,
            softcap: None,
            sinks: None,
            gate: None,
            mask: Mask::Causal,
            cache: CacheSlot { group, layer: layer as u32 },
        }
    }

    /// Stores `k` and `v` in the cache and attends with `q` over all of it.
    pub fn attention(&mut self, q: ValueId, k: ValueId, v: ValueId, spec: AttentionSpec) -> ValueId {
        self.attend(q, k, Some(v), spec)
    }

    /// Attention whose values are the first `d_v` elements of the key rows (MLA).
    pub fn latent_attention(&mut self, q: ValueId, k: ValueId, spec: AttentionSpec) -> ValueId {
        self.attend(q, k, None, spec)
    }

    fn attend(&mut self, q: ValueId, k: ValueId, v: Option<ValueId>, spec: AttentionSpec) -> ValueId {
        self.plan.push(Op::KvStore { k, store: Store { v, cache: spec.cache } });
        let out = self.like(q, "attention", spec.n_head * spec.d_v);
        self.plan.push(Op::Attention { q, spec, out });
        out
    }

    /// `a + b`.
    pub fn add(&mut self, a: ValueId, b: ValueId) -> ValueId {
        let out = self.like(a, "sum", self.cols(a));
        self.plan.push(Op::Add { a, b, out });
        out
    }

    /// `act(gate) * up`.
    pub fn glu(&mut self, gate: ValueId, up: ValueId, act: Activation) -> ValueId {
        let out = self.like(gate, "glu", self.cols(gate));
        self.plan.push(Op::Glu { gate, up, kind: GluKind::Plain(act), out });
        out
    }

    /// `cap * tanh(x / cap)`, or `x` if there is no cap.
    pub fn softcap(&mut self, x: ValueId, cap: Option<f32>) -> ValueId {
        let Some(cap) = cap else { return x };
        let out = self.derived(x, "softcap");
        self.plan.push(Op::Softcap { x, cap, out });
        out
    }

    /// A gated feed-forward of routed experts: `ffn_gate_inp` routes, `ffn_{gate,up,down}_exps` compute.
    pub fn experts(&mut self, x: ValueId, e: &Experts) -> ValueId {
        let (n, k) = (e.route.n_expert, e.route.top_k);
        let logits = self.linear(x, "ffn_gate_inp", n);
        let spec = e.route.clone();
        let scores = self.derived(logits, "scores");
        self.plan.push(Op::RouteScores { logits, spec: spec.clone(), out: scores });
        let name = self.name("expert_ids");
        let ids = self.plan.typed_value(name, Dim::Tokens, k, DType::I32);
        let raw = self.like(logits, "expert_scores", k);
        self.plan.push(Op::RouteTopK { scores, spec: spec.clone(), ids, weights: raw });
        let weights = self.like(logits, "expert_weights", k);
        self.plan.push(Op::RouteNormalise { weights: raw, spec, out: weights });
        let gate = self.expert_linear(x, ids, "ffn_gate_exps", n, e.n_ff);
        let up = self.expert_linear(x, ids, "ffn_up_exps", n, e.n_ff);
        let glu = self.like(gate, "glu", e.n_ff);
        self.plan.push(Op::Glu { gate, up, kind: e.glu, out: glu });
        let down = self.expert_linear(glu, ids, "ffn_down_exps", n, self.cols(x));
        let out = self.like(x, "experts", self.cols(x));
        self.plan.push(Op::MoeCombine { x: down, weights, out });
        out
    }

    fn expert_linear(&mut self, x: ValueId, ids: ValueId, name: &str, n: usize, rows: usize) -> ValueId {
        let w = self.add_weight(&format!("{name}.weight"), [n, rows, self.cols(x)], (0, rows));
        let bias = self.opt_bias(name, n, rows);
        let (slots, name) = (Dim::Slots(self.cols(ids)), self.name(name));
        let out = self.plan.value(name, slots, rows);
        self.plan.push(Op::MoeLinear { x, ids, member: Member { w, bias, out } });
        out
    }

    /// Enters the output head: only the rows of `x` that the batch asks for go on.
    pub fn enter_head(&mut self, x: ValueId) -> ValueId {
        self.prefix.clear();
        self.plan.head = Some(self.plan.ops.len());
        let out = self.plan.value("last", Dim::Out, self.cols(x));
        self.plan.push(Op::GatherRows { x, out });
        out
    }

    /// Logits `[n_out, n_vocab]` by `output.weight`, or by the embedding table where the model ties them.
    pub fn lm_head(&mut self, x: ValueId) -> ValueId {
        let name = if self.has("output.weight") { "output" } else { "token_embd" };
        self.linear(x, name, self.hyper.map_or(1, |h| h.n_vocab))
    }

    /// Declares what the Plan delivers.
    pub fn output(&mut self, v: ValueId) {
        self.plan.outputs.push(v);
    }

    /// The Plan, checked; or one error that lists every missing and every misshapen tensor.
    pub fn finish(self) -> Result<Built> {
        if !(self.missing.is_empty() && self.wrong.is_empty()) {
            return Err(Error::Tensors { arch: self.arch.to_string(), missing: self.missing, wrong: self.wrong });
        }
        self.plan.check()?;
        let mut unused = self.tensors.names();
        unused.retain(|n| !self.used.contains(n));
        let hyper = match self.hyper {
            Some(h) => h,
            None => return self.bad_key("block_count", "was not read"),
        };
        Ok(Built { arch: self.arch.to_string(), plan: self.plan, hyper, unused })
    }
}
