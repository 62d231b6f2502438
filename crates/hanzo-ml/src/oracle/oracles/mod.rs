//! The named oracles: each makes cases for one op or fusion. They know inputs, never how a backend works.
//!
//! An oracle's Plan is the plain one; the lever sets that rewrite it differently are all run ([`super::gate`]). Adding an
//! op adds one entry to [`ORACLES`] and the function that makes its cases.

mod attention;
mod contraction;
mod elementwise;
mod last;
mod moe;
mod norm;
mod plan;
mod recurrent;
mod rope;
mod route;

pub use attention::{Layout, Sequences};
pub use contraction::{group_case, head_case, linear_case};
pub use moe::{Routing, moe_case};
pub use plan::{chunking_differences, chunkings, transformer};

use super::case::Case;
use super::random::Rng;
use crate::error::{Error, Result};
use crate::plan::{DType, Dim, Plan, ValueId, WeightId};
use hanzo_gguf::{Format, Gguf};
use std::path::Path;

/// A matrix of a real model.
#[derive(Clone, Debug)]
pub struct RealMatrix {
    /// The tensor's name.
    pub name: String,
    /// Its format.
    pub format: Format,
    /// Rows kept.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Bytes of the rows.
    pub bytes: Vec<u8>,
}

/// Rows of a real matrix that are tested.
const REAL_ROWS: usize = 33;

/// The first rows of one matrix of each (format, columns) in a model file.
pub fn real_matrices(path: &Path) -> Result<Vec<RealMatrix>> {
    let model = |e: &dyn std::fmt::Display| Error::Weight { name: path.display().to_string(), what: e.to_string() };
    let gguf = Gguf::open(path).map_err(|e| model(&e))?;
    let mut out: Vec<RealMatrix> = Vec::new();
    for t in gguf.tensors() {
        let (Some(&cols), Some(&rows)) = (t.dims.first(), t.dims.get(1)) else { continue };
        let (cols, rows) = (cols as usize, (rows as usize).min(REAL_ROWS));
        if !t.format.is_weight() || out.iter().any(|m| m.format == t.format && m.cols == cols) {
            continue;
        }
        let Some(bytes) = t.format.row_bytes(cols).and_then(|b| gguf.data(t).get(..b * rows)) else { continue };
        out.push(RealMatrix { name: t.name.clone(), format: t.format, rows, cols, bytes: bytes.to_vec() });
    }
    Ok(out)
}

/// What cases are made from.
#[derive(Clone, Debug)]
pub struct Context<'a> {
    /// Seeds every random choice.
    pub seed: u64,
    /// Matrices of a real model, tested besides the random ones.
    pub real: &'a [RealMatrix],
}

impl Context<'_> {
    fn rng(&self, name: &str) -> Rng {
        Rng::named(self.seed, name)
    }
}

/// Takes cases one at a time.
pub type Sink<'a> = &'a mut dyn FnMut(Case);

/// A named oracle.
#[derive(Clone, Copy)]
pub struct Oracle {
    /// Name, as levers and documents cite it.
    pub name: &'static str,
    /// What it holds a backend to.
    pub about: &'static str,
    /// Makes its cases.
    pub cases: fn(&Context<'_>, Sink<'_>),
}

/// Every oracle that compares a backend with the interpreter.
pub const ORACLES: &[Oracle] = &[
    Oracle {
        name: "quantize_numeric",
        about: "the int8 activation rule, bit for bit, seen through an identity matrix",
        cases: contraction::quantize,
    },
    Oracle { name: "qmatvec_unified_numeric", about: "x w^T + bias for one row of x", cases: contraction::matvec },
    Oracle { name: "qgemm_unified_numeric", about: "x w^T + bias for several rows of x", cases: contraction::gemm },
    Oracle {
        name: "bf16_activations_numeric",
        about: "BF16 weights: activations rounded to bf16 where the backend does so, seen through an identity and over long rows",
        cases: contraction::bf16_activations,
    },
    Oracle {
        name: "linear_group_numeric",
        about: "linears that share x, with mixed formats, as q/k/v and as gate/up",
        cases: contraction::group,
    },
    Oracle {
        name: "feed_forward_numeric",
        about: "gate, up, glu and down, dense and by experts, where only the end is seen",
        cases: contraction::feed_forward,
    },
    Oracle {
        name: "normed_linear_numeric",
        about: "add, norm and the linears that read it: q/k/v, gate and up with glu and down, for one token and for several",
        cases: contraction::normed_linear,
    },
    Oracle { name: "moe_qmatvec_numeric", about: "expert linears for one token", cases: moe::matvec },
    Oracle { name: "moe_qmmq_numeric", about: "expert linears for several tokens", cases: moe::gemm },
    Oracle { name: "moe_linear_pair_numeric", about: "expert linears that share x and routing", cases: moe::pair },
    Oracle { name: "embed_numeric", about: "rows of a table, scaled, or embedding rows", cases: contraction::embed },
    Oracle { name: "rms_norm_numeric", about: "rms norm of rows and of heads", cases: norm::rms },
    Oracle { name: "add_rmsnorm_numeric", about: "residual add, then rms norm", cases: norm::add_rms },
    Oracle { name: "layer_norm_numeric", about: "layer norm", cases: norm::layer },
    Oracle { name: "rope_numeric", about: "rotary embeddings of every kind", cases: rope::rope },
    Oracle {
        name: "qk_rms_norm_rope_numeric",
        about: "head norms, rotation and store, then attention",
        cases: attention::qk_norm_rope,
    },
    Oracle { name: "attention_numeric", about: "attention over the paged cache", cases: attention::attention },
    Oracle {
        name: "attention_prologue_numeric",
        about: "head norms, rotation, store and attention of one token, where only the end is seen",
        cases: attention::prologue,
    },
    Oracle { name: "glu_numeric", about: "gated linear units", cases: elementwise::glu },
    Oracle { name: "elementwise_numeric", about: "functions of single elements", cases: elementwise::elementwise },
    Oracle { name: "columns_concat_numeric", about: "moves: columns, concat, copy", cases: elementwise::moves },
    Oracle { name: "gather_numeric", about: "output rows, in chunks", cases: elementwise::gather },
    Oracle { name: "moe_route_numeric", about: "routing: ids exactly, weights within bounds", cases: route::route },
    Oracle {
        name: "matvec_norm_numeric",
        about: "a matrix, the residual sum and its norm, one behind the other, dense and by experts",
        cases: last::norm,
    },
    Oracle {
        name: "glu_routed_numeric",
        about: "routing, gate, up, glu and down, where only the end is seen",
        cases: contraction::routed,
    },
    Oracle { name: "router_select_numeric", about: "a router and its selection: ids exactly", cases: last::select },
    Oracle { name: "moe_combine_numeric", about: "weighted sum of the experts' outputs", cases: moe::combine },
    Oracle { name: "short_conv_numeric", about: "causal convolution with carried state", cases: recurrent::short_conv },
    Oracle { name: "gated_delta_numeric", about: "gated delta rule with carried state", cases: recurrent::gated_delta },
    Oracle { name: "plan_numeric", about: "whole small transformers against f64", cases: plan::plan },
];

/// Formats that contractions read.
pub fn weight_formats() -> impl Iterator<Item = Format> {
    Format::ALL.iter().copied().filter(|f| f.is_weight())
}

/// A Plan being written down.
pub(super) struct Builder {
    pub plan: Plan,
    pub inputs: Vec<(ValueId, Vec<f32>)>,
    pub tensors: super::case::Tensors,
}

impl Builder {
    pub fn new(n_embd: usize) -> Builder {
        Builder { plan: Plan::new(n_embd), inputs: Vec::new(), tensors: Default::default() }
    }

    /// An input with its values.
    pub fn input(&mut self, name: &str, rows: Dim, cols: usize, data: Vec<f32>) -> ValueId {
        let v = self.plan.input(name, rows, cols, DType::F32);
        self.inputs.push((v, data));
        v
    }

    /// An input of ids.
    pub fn ids(&mut self, name: &str, cols: usize, data: Vec<f32>) -> ValueId {
        let v = self.plan.input(name, Dim::Tokens, cols, DType::I32);
        self.inputs.push((v, data));
        v
    }

    /// A value of the same shape as another.
    pub fn like(&mut self, x: ValueId, name: &str) -> ValueId {
        let (rows, cols) = (self.plan.val(x).rows, self.plan.val(x).cols);
        self.plan.value(name, rows, cols)
    }

    /// A weight with its bytes.
    pub fn weight(
        &mut self,
        name: &str,
        format: Format,
        (experts, rows, cols): (usize, usize, usize),
        b: Vec<u8>,
    ) -> WeightId {
        self.tensors.put(name, b);
        self.plan.weight(name, format, experts, rows, cols)
    }

    /// An f32 vector.
    pub fn vector(&mut self, name: &str, data: &[f32]) -> WeightId {
        self.matrix(name, 1, data)
    }

    /// An f32 matrix (`rows` of equal length).
    pub fn matrix(&mut self, name: &str, rows: usize, data: &[f32]) -> WeightId {
        let bytes = data.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.weight(name, Format::F32, (1, rows, data.len() / rows), bytes)
    }

    /// The case of one step without memory.
    pub fn case(self, op: &'static str, format: impl ToString, n_tokens: usize, about: String) -> Case {
        let step = super::case::Step { inputs: self.inputs, ..super::case::Step::plain(n_tokens) };
        let mut case = Case::new(op, format, self.plan, step);
        case.tensors = self.tensors;
        case.about = about;
        case
    }
}
