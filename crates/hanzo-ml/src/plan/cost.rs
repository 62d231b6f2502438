//! The cost model: bytes an op must move and floating-point operations it must do, for given sizes.
//!
//! These are lower bounds from the op's meaning, not what an implementation spends; diagnosis divides them by a device's
//! measured roofs. Attention's cost depends on the cached keys a token sees, passed as `n_kv`.

use super::{DType, Op, Plan, Sizes, ValueId};
use crate::plan::op::Access;

/// What an op costs at least.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Weight bytes read once.
    pub weight_bytes: f64,
    /// Activation and cache bytes read and written.
    pub value_bytes: f64,
    /// Floating-point (or equal integer) operations; a multiply-add is two.
    pub flops: f64,
}

impl std::ops::Add for Cost {
    type Output = Cost;
    fn add(self, o: Cost) -> Cost {
        Cost {
            weight_bytes: self.weight_bytes + o.weight_bytes,
            value_bytes: self.value_bytes + o.value_bytes,
            flops: self.flops + o.flops,
        }
    }
}

impl Plan {
    /// The cost of op `index`, each token seeing `n_kv` cached keys.
    pub fn cost(&self, index: usize, sizes: &Sizes, n_kv: usize) -> Cost {
        let op = &self.ops[index];
        let elements = |v: ValueId| (self.val(v).rows.eval(sizes) * self.val(v).cols) as f64;
        let mut c = Cost::default();
        op.accesses(&mut |a| match a {
            Access::Read(v) | Access::Write(v) => {
                let x = self.val(v);
                c.value_bytes += (x.rows.eval(sizes) * x.dtype.row_bytes(x.cols)) as f64;
                if x.dtype == DType::F32 && matches!(a, Access::Write(_)) {
                    c.flops += elements(v);
                }
            }
            Access::Weight(w) => {
                let w = self.wt(w);
                c.weight_bytes += (w.experts * w.expert_bytes()) as f64;
            }
            _ => {}
        });
        match op {
            Op::Embed { table, .. } => {
                c.weight_bytes = (sizes.n_tokens * self.wt(*table).row_bytes()) as f64;
            }
            Op::Linear { x, .. } | Op::LinearGroup { x, .. } => {
                let rows = self.val(*x).rows.eval(sizes) as f64;
                c.flops =
                    op.members().iter().map(|m| 2.0 * rows * (self.wt(m.w).rows * self.wt(m.w).cols) as f64).sum();
            }
            Op::MoeLinear { ids, .. } | Op::MoeLinearGroup { ids, .. } => {
                let slots = elements(*ids);
                c.flops = 0.0;
                c.weight_bytes = 0.0;
                for m in op.members() {
                    let w = self.wt(m.w);
                    c.flops += 2.0 * slots * (w.rows * w.cols) as f64;
                    c.weight_bytes += expected_experts(w.experts as f64, slots) * w.expert_bytes() as f64;
                }
            }
            Op::Attention { spec, .. } => {
                let seen = spec.window.map_or(n_kv, |w| n_kv.min(w as usize)) as f64;
                let tokens = sizes.n_tokens as f64;
                c.flops = 2.0 * tokens * seen * (spec.n_head * (spec.d_k + spec.d_v)) as f64;
                let g = &self.groups[spec.cache.group.0 as usize];
                let row = g.k_row_bytes().unwrap_or(0) + g.v_row_bytes().unwrap_or(0);
                c.value_bytes += sizes.n_seqs as f64 * seen * (spec.n_kv * row) as f64;
            }
            Op::KvStore { store, .. } | Op::QkNormRope { store: Some(store), .. } => {
                let g = &self.groups[store.cache.group.0 as usize];
                let row = g.k_row_bytes().unwrap_or(0) + g.v_row_bytes().unwrap_or(0);
                c.value_bytes += (sizes.n_tokens * g.n_kv * row) as f64;
            }
            Op::RmsNorm { x, .. } | Op::AddRmsNorm { a: x, .. } | Op::Rope { x, .. } => c.flops = 4.0 * elements(*x),
            Op::GatedDelta { n_head, d_k, d_v, .. } => {
                c.flops = 6.0 * (sizes.n_tokens * n_head * d_k * d_v) as f64;
                c.value_bytes += (8 * sizes.n_seqs * n_head * d_k * d_v) as f64;
            }
            Op::ShortConv { x, kernel, .. } => c.flops = 2.0 * *kernel as f64 * elements(*x),
            _ => {}
        }
        c
    }

    /// The cost of the whole Plan.
    pub fn total_cost(&self, sizes: &Sizes, n_kv: usize) -> Cost {
        (0..self.ops.len()).map(|i| self.cost(i, sizes, n_kv)).fold(Cost::default(), |a, b| a + b)
    }
}

/// Expected number of distinct experts that `slots` uniform picks touch.
fn expected_experts(experts: f64, slots: f64) -> f64 {
    experts * (1.0 - (1.0 - 1.0 / experts).powf(slots))
}
