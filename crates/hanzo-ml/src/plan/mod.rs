//! The Plan: a forward pass as a flat list of ops over typed values.
//!
//! Invariants: a value is written by one op at most (or is an input); an op reads only values written before it; caches
//! and states are ordered by the list; shapes are symbolic in [`Sizes`]. [`Plan::check`] enforces them. Rewrites live in
//! [`crate::levers`]; no backend, file or text concern may enter here.

mod check;
mod cost;
mod ids;
pub mod op;
pub mod schedule;
pub mod value;

pub use cost::Cost;
pub use ids::IdMut;
pub use op::{
    Access, Activation, AttentionSpec, CacheGroupId, CacheSlot, GluKind, Mask, Member, Op, RopeConvention, RopeSpec,
    RouteSpec, RouterScore, StateId, Store, Yarn,
};
pub use value::{DType, DeviceId, Dim, Sizes, Value, ValueId, Weight, WeightId};

use crate::cache::{CacheGroup, StateSpec};
use hanzo_gguf::Format;

/// A forward pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// The ops, in an order in which they may run.
    pub ops: Vec<Op>,
    /// What they read and write.
    pub values: Vec<Value>,
    /// The weights they read.
    pub weights: Vec<Weight>,
    /// Page groups of the key/value cache.
    pub groups: Vec<CacheGroup>,
    /// Kinds of recurrent state.
    pub states: Vec<StateSpec>,
    /// Values that the caller sets before a step (none in a model: tokens come with the batch).
    pub inputs: Vec<ValueId>,
    /// Values that outlive the step; the last one is what a step delivers (logits).
    pub outputs: Vec<ValueId>,
    /// Index of the first op of the output head: from there on every row is an output row, and a backend may run the
    /// rest of the list in chunks of output rows.
    pub head: Option<usize>,
    /// Columns of an embedding row and of the residual stream.
    pub n_embd: usize,
    /// Position axes a token carries (1, or up to 4 for multimodal rope).
    pub n_pos_axes: usize,
}

impl Plan {
    /// An empty Plan.
    pub fn new(n_embd: usize) -> Plan {
        Plan { n_embd, n_pos_axes: 1, ..Plan::default() }
    }

    /// Adds an f32 value.
    pub fn value(&mut self, name: impl Into<String>, rows: Dim, cols: usize) -> ValueId {
        self.typed_value(name, rows, cols, DType::F32)
    }

    /// Adds a value of a given type on the default device.
    pub fn typed_value(&mut self, name: impl Into<String>, rows: Dim, cols: usize, dtype: DType) -> ValueId {
        self.values.push(Value { name: name.into(), rows, cols, dtype, device: DeviceId::default() });
        ValueId(self.values.len() as u32 - 1)
    }

    /// Adds an input: a value that the caller sets.
    pub fn input(&mut self, name: impl Into<String>, rows: Dim, cols: usize, dtype: DType) -> ValueId {
        let id = self.typed_value(name, rows, cols, dtype);
        self.inputs.push(id);
        id
    }

    /// Adds a whole tensor as a weight `[experts, rows, cols]`, or finds it if it was added before.
    pub fn weight(&mut self, tensor: &str, format: Format, experts: usize, rows: usize, cols: usize) -> WeightId {
        self.add_weight(Weight {
            tensor: tensor.to_string(),
            format,
            experts,
            rows,
            cols,
            first_row: 0,
            tensor_rows: rows,
            device: DeviceId::default(),
        })
    }

    /// Adds a weight, or finds an equal one.
    pub fn add_weight(&mut self, weight: Weight) -> WeightId {
        if let Some(i) = self.weights.iter().position(|w| *w == weight) {
            return WeightId(i as u32);
        }
        self.weights.push(weight);
        WeightId(self.weights.len() as u32 - 1)
    }

    /// Appends the contraction of `members` over `x`, by experts if there are `ids`; none for no members.
    pub(crate) fn contraction(&mut self, x: ValueId, ids: Option<ValueId>, members: Vec<Member>) {
        let op = match (&members[..], ids) {
            ([], _) => return,
            ([m], None) => Op::Linear { x, member: *m },
            (_, None) => Op::LinearGroup { x, members },
            ([m], Some(ids)) => Op::MoeLinear { x, ids, member: *m },
            (_, Some(ids)) => Op::MoeLinearGroup { x, ids, members },
        };
        self.push(op);
    }

    /// Appends an op.
    pub fn push(&mut self, op: Op) {
        self.ops.push(op);
    }

    /// A value's record.
    pub fn val(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    /// A weight's record.
    pub fn wt(&self, id: WeightId) -> &Weight {
        &self.weights[id.0 as usize]
    }

    /// For each value, the index of the op that writes it.
    pub fn producers(&self) -> Vec<Option<usize>> {
        let mut p = vec![None; self.values.len()];
        for (i, op) in self.ops.iter().enumerate() {
            for v in op.writes() {
                p[v.0 as usize] = Some(i);
            }
        }
        p
    }

    /// For each value, the indices of the ops that read it.
    pub fn consumers(&self) -> Vec<Vec<usize>> {
        let mut c = vec![Vec::new(); self.values.len()];
        for (i, op) in self.ops.iter().enumerate() {
            for v in op.reads() {
                if c[v.0 as usize].last() != Some(&i) {
                    c[v.0 as usize].push(i);
                }
            }
        }
        c
    }

    /// Every format that a contraction of this Plan reads, sorted.
    pub fn formats(&self) -> Vec<Format> {
        let mut f: Vec<Format> = self.ops.iter().flat_map(|o| o.members()).map(|m| self.wt(m.w).format).collect();
        f.sort();
        f.dedup();
        f
    }
}

impl std::fmt::Display for Plan {
    /// One line an op: outputs, kind, inputs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, op) in self.ops.iter().enumerate() {
            let names =
                |ids: Vec<ValueId>| ids.iter().map(|v| self.val(*v).name.as_str()).collect::<Vec<_>>().join(", ");
            writeln!(f, "{i:4}  {} = {}({})", names(op.writes()), op.kind(), names(op.reads()))?;
        }
        Ok(())
    }
}
