//! Shape, dtype and order checks: a Plan that passes can be compiled without asking again.

use super::{DType, DeviceId, Dim, Member, Op, Plan, RouteSpec, ValueId, WeightId};
use crate::error::{Error, Result};
use crate::plan::op::{Access, CacheSlot};

struct Checker<'a> {
    plan: &'a Plan,
    index: usize,
    op: &'static str,
}

impl Checker<'_> {
    fn fail<T>(&self, what: String) -> Result<T> {
        Err(Error::Plan { index: self.index, op: self.op, what })
    }

    fn ensure(&self, ok: bool, what: impl FnOnce() -> String) -> Result<()> {
        if ok { Ok(()) } else { self.fail(what()) }
    }

    fn name(&self, v: ValueId) -> &str {
        &self.plan.val(v).name
    }

    fn cols(&self, v: ValueId) -> usize {
        self.plan.val(v).cols
    }

    fn rows(&self, v: ValueId) -> Dim {
        self.plan.val(v).rows
    }

    /// `v` has exactly these rows, columns and type.
    fn value(&self, v: ValueId, rows: Dim, cols: usize, dtype: DType) -> Result<()> {
        let x = self.plan.val(v);
        self.ensure(x.rows == rows && x.cols == cols && x.dtype == dtype, || {
            format!("{} is {:?} [{:?}, {}], expected {dtype:?} [{rows:?}, {cols}]", x.name, x.dtype, x.rows, x.cols)
        })
    }

    fn f32(&self, v: ValueId, rows: Dim, cols: usize) -> Result<()> {
        self.value(v, rows, cols, DType::F32)
    }

    fn same(&self, a: ValueId, b: ValueId) -> Result<()> {
        self.f32(b, self.rows(a), self.cols(a))
    }

    fn vector(&self, w: WeightId, len: usize) -> Result<()> {
        let x = self.plan.wt(w);
        self.ensure(x.rows == 1 && x.cols == len && x.experts == 1, || {
            format!("weight {} is [{}, {}, {}], expected a vector of {len}", x.tensor, x.experts, x.rows, x.cols)
        })
    }

    fn opt_vector(&self, w: &Option<WeightId>, len: usize) -> Result<()> {
        w.map_or(Ok(()), |w| self.vector(w, len))
    }

    fn member(&self, x: ValueId, rows: Dim, m: &Member, experts: usize) -> Result<()> {
        let w = self.plan.wt(m.w);
        self.ensure(w.cols == self.cols(x), || {
            format!("{} has {} columns but {} has {}", w.tensor, w.cols, self.name(x), self.cols(x))
        })?;
        self.ensure(w.format.is_weight(), || format!("{} is {}, which no contraction reads", w.tensor, w.format))?;
        self.ensure(w.format.row_bytes(w.cols).is_some(), || {
            format!("{}: rows of {} are not whole {} blocks", w.tensor, w.cols, w.format)
        })?;
        self.ensure(experts == 0 && w.experts == 1 || w.experts == experts, || {
            format!("{} has {} experts, expected {experts}", w.tensor, w.experts)
        })?;
        if let Some(b) = m.bias {
            let b = self.plan.wt(b);
            let ok = if experts == 0 { b.experts * b.rows == 1 } else { b.experts * b.rows == experts };
            self.ensure(ok && b.cols == w.rows, || format!("bias {} does not fit {}", b.tensor, w.tensor))?;
        }
        self.f32(m.out, rows, w.rows)
    }

    fn slot(&self, c: CacheSlot, n_kv: usize, d_k: usize, d_v: Option<usize>) -> Result<()> {
        let Some(g) = self.plan.groups.get(c.group.0 as usize) else {
            return self.fail(format!("page group {} does not exist", c.group.0));
        };
        let fits = (c.layer as usize) < g.layers && g.n_kv == n_kv && g.d_k == d_k && d_v.is_none_or(|d| g.d_v == d);
        self.ensure(fits, || {
            format!("page group {} does not hold {n_kv} heads of {d_k} at layer {}", g.name, c.layer)
        })?;
        self.ensure(g.k_row_bytes().is_some() && g.v_row_bytes().is_some(), || {
            format!(
                "page group {}: heads of {}/{} are not whole {}/{} blocks",
                g.name, g.d_k, g.d_v, g.type_k, g.type_v
            )
        })
    }

    fn route(&self, spec: &RouteSpec) -> Result<()> {
        self.ensure(spec.top_k >= 1 && spec.top_k <= spec.n_expert, || {
            format!("top {} of {} experts", spec.top_k, spec.n_expert)
        })?;
        if let Some((n, kept)) = spec.groups {
            let size = spec.n_expert.checked_div(n).unwrap_or(0);
            self.ensure(
                n > 0 && spec.n_expert % n == 0 && kept >= 1 && kept <= n && kept * size >= spec.top_k,
                || format!("{kept} of {n} expert groups cannot hold {} of {} experts", spec.top_k, spec.n_expert),
            )?;
        }
        self.opt_vector(&spec.bias, spec.n_expert)
    }

    fn moe(&self, x: ValueId, ids: ValueId, members: &[Member]) -> Result<()> {
        let k = self.cols(ids);
        self.value(ids, Dim::Tokens, k, DType::I32)?;
        let rows = self.rows(x);
        self.ensure(rows == Dim::Tokens || rows == Dim::Slots(k), || {
            format!("{} has rows {rows:?}, expected one a token or one a slot", self.name(x))
        })?;
        for m in members {
            let experts = self.plan.wt(m.w).experts;
            self.member(x, Dim::Slots(k), m, experts)?;
        }
        Ok(())
    }

    /// An op touches one device's memory; only copies and reductions reach across.
    fn device(&self, op: &Op) -> Result<()> {
        if matches!(op, Op::Copy { .. } | Op::AllReduce { .. }) {
            return Ok(());
        }
        let mut first: Option<(DeviceId, &str)> = None;
        let mut result = Ok(());
        op.accesses(&mut |a| {
            let (device, name) = match a {
                Access::Read(v) | Access::Write(v) => (self.plan.val(v).device, self.name(v)),
                Access::Weight(w) => (self.plan.wt(w).device, self.plan.wt(w).tensor.as_str()),
                _ => return,
            };
            let (want, other) = *first.get_or_insert((device, name));
            if want != device && result.is_ok() {
                result = self.fail(format!("{other} is on device {} but {name} on device {}", want.0, device.0));
            }
        });
        result
    }

    fn op(&self, op: &Op) -> Result<()> {
        match op {
            Op::Embed { table, out, .. } => {
                let t = self.plan.wt(*table);
                self.ensure(t.cols == self.plan.n_embd, || format!("{} rows are not n_embd long", t.tensor))?;
                self.f32(*out, Dim::Tokens, self.plan.n_embd)
            }
            Op::RmsNorm { x, weight, group, out, .. } => {
                let c = self.cols(*x);
                self.ensure(*group > 0 && c % group == 0, || format!("{c} columns in groups of {group}"))?;
                self.opt_vector(weight, *group)?;
                self.same(*x, *out)
            }
            Op::LayerNorm { x, weight, bias, out, .. } => {
                self.vector(*weight, self.cols(*x))?;
                self.opt_vector(bias, self.cols(*x))?;
                self.same(*x, *out)
            }
            Op::Linear { x, member } => self.member(*x, self.rows(*x), member, 0),
            Op::LinearGroup { x, members } => members.iter().try_for_each(|m| self.member(*x, self.rows(*x), m, 0)),
            Op::Quantize { x, out } => {
                self.ensure(self.cols(*x) % 32 == 0, || format!("{} columns are not whole 32s", self.cols(*x)))?;
                self.value(*out, self.rows(*x), self.cols(*x), DType::Q8)
            }
            Op::Rope { x, head_dim, rope, out } => {
                let c = self.cols(*x);
                self.ensure(
                    *head_dim > 0 && c % head_dim == 0 && rope.n_dims <= *head_dim && rope.n_dims % 2 == 0,
                    || format!("{c} columns, heads of {head_dim}, {} rotating", rope.n_dims),
                )?;
                self.opt_vector(&rope.factors, rope.n_dims / 2)?;
                self.same(*x, *out)
            }
            Op::KvStore { k, store } => self.store(*k, store, None),
            Op::QkNormRope { q, k, q_norm, k_norm, head_dim, rope, q_out, k_out, store, .. } => {
                self.ensure(*head_dim > 0 && rope.n_dims <= *head_dim && rope.n_dims % 2 == 0, || {
                    format!("heads of {head_dim}, {} rotating", rope.n_dims)
                })?;
                for (x, norm) in [(q, q_norm), (k, k_norm)] {
                    self.ensure(self.cols(*x) % head_dim == 0, || format!("{} is not whole heads", self.name(*x)))?;
                    self.opt_vector(norm, *head_dim)?;
                }
                self.opt_vector(&rope.factors, rope.n_dims / 2)?;
                self.same(*q, *q_out)?;
                match (k_out, store) {
                    (Some(k_out), None) => self.same(*k, *k_out),
                    (None, Some(s)) => self.store(*k, s, Some(*head_dim)),
                    _ => self.fail("keys go either to a value or to the cache".into()),
                }
            }
            Op::Attention { q, spec, out } => {
                let rows = self.rows(*q);
                self.ensure(spec.n_kv > 0 && spec.n_head % spec.n_kv == 0, || {
                    format!("{} query heads over {} key heads", spec.n_head, spec.n_kv)
                })?;
                self.f32(*q, rows, spec.n_head * spec.d_k)?;
                self.f32(*out, rows, spec.n_head * spec.d_v)?;
                if let Some(s) = spec.sinks {
                    self.vector(s, spec.n_head)?;
                }
                if let Some(g) = spec.gate {
                    self.f32(g, rows, spec.n_head * spec.d_v)?;
                }
                let g = self.plan.groups.get(spec.cache.group.0 as usize);
                let latent = g.is_some_and(|g| g.d_v == 0);
                self.ensure(!latent || spec.d_v <= spec.d_k, || "latent values are longer than the keys".into())?;
                self.slot(spec.cache, spec.n_kv, spec.d_k, (!latent).then_some(spec.d_v))
            }
            Op::Act { x, out, .. } | Op::Scale { x, out, .. } | Op::Softcap { x, out, .. } => self.same(*x, *out),
            Op::Copy { x, out } => self.value(*out, self.rows(*x), self.cols(*x), self.plan.val(*x).dtype),
            Op::Glu { gate: a, up: b, out, .. } | Op::Add { a, b, out } => {
                self.same(*a, *b)?;
                self.same(*a, *out)
            }
            Op::Mul { a, b, out } => {
                let c = if self.cols(*b) == 1 { 1 } else { self.cols(*a) };
                self.f32(*b, self.rows(*a), c)?;
                self.same(*a, *out)
            }
            Op::AddRmsNorm { a, b, weight, sum, out, .. } => {
                self.opt_vector(weight, self.cols(*a))?;
                self.same(*a, *b)?;
                self.same(*a, *sum)?;
                self.same(*a, *out)
            }
            Op::RouteScores { logits, spec, out } => {
                self.route(spec)?;
                self.f32(*logits, Dim::Tokens, spec.n_expert)?;
                self.same(*logits, *out)
            }
            Op::RouteTopK { scores: x, spec, ids, weights } | Op::MoeRoute { logits: x, spec, ids, weights } => {
                self.route(spec)?;
                self.f32(*x, Dim::Tokens, spec.n_expert)?;
                self.value(*ids, Dim::Tokens, spec.top_k, DType::I32)?;
                self.f32(*weights, Dim::Tokens, spec.top_k)
            }
            Op::RouteNormalise { weights, spec, out } => {
                self.route(spec)?;
                self.f32(*weights, Dim::Tokens, spec.top_k)?;
                self.same(*weights, *out)
            }
            Op::MoeLinear { x, ids, member } => self.moe(*x, *ids, std::slice::from_ref(member)),
            Op::MoeLinearGroup { x, ids, members } => self.moe(*x, *ids, members),
            Op::MoeCombine { x, weights, out } => {
                let k = self.cols(*weights);
                self.f32(*weights, Dim::Tokens, k)?;
                self.f32(*x, Dim::Slots(k), self.cols(*x))?;
                self.f32(*out, Dim::Tokens, self.cols(*x))
            }
            Op::GatherRows { x, out } => {
                self.ensure(self.rows(*x) == Dim::Tokens, || format!("{} has no token rows", self.name(*x)))?;
                self.f32(*out, Dim::Out, self.cols(*x))
            }
            Op::ShortConv { x, weight, bias, kernel, state, layer, out, .. } => {
                let (c, w) = (self.cols(*x), self.plan.wt(*weight));
                self.ensure(*kernel >= 1 && w.rows == c && w.cols == *kernel, || {
                    format!("{} is [{}, {}], expected [{c}, {kernel}]", w.tensor, w.rows, w.cols)
                })?;
                self.opt_vector(bias, c)?;
                self.state(*state, *layer, (kernel - 1) * c)?;
                self.f32(*x, Dim::Tokens, c)?;
                self.same(*x, *out)
            }
            Op::GatedDelta { q, k, v, decay, beta, n_head, n_key_head, d_k, d_v, state, layer, out, .. } => {
                self.ensure(*n_key_head > 0 && n_head % n_key_head == 0, || {
                    format!("{n_head} heads over {n_key_head} key heads")
                })?;
                self.f32(*q, Dim::Tokens, n_key_head * d_k)?;
                self.f32(*k, Dim::Tokens, n_key_head * d_k)?;
                self.f32(*v, Dim::Tokens, n_head * d_v)?;
                self.f32(*decay, Dim::Tokens, *n_head)?;
                self.f32(*beta, Dim::Tokens, *n_head)?;
                self.state(*state, *layer, n_head * d_k * d_v)?;
                self.f32(*out, Dim::Tokens, n_head * d_v)
            }
            Op::Columns { x, first, out } => {
                let c = self.cols(*out);
                self.ensure(first + c <= self.cols(*x), || {
                    format!("columns {first}..{} of {} in {}", first + c, self.cols(*x), self.name(*x))
                })?;
                self.f32(*out, self.rows(*x), c)
            }
            Op::Concat { a, b, out } => {
                self.f32(*b, self.rows(*a), self.cols(*b))?;
                self.f32(*out, self.rows(*a), self.cols(*a) + self.cols(*b))
            }
            Op::AllReduce { xs, out } => xs.iter().try_for_each(|x| self.same(*x, *out)),
        }
    }

    fn store(&self, k: ValueId, s: &super::Store, head_dim: Option<usize>) -> Result<()> {
        let Some(g) = self.plan.groups.get(s.cache.group.0 as usize) else {
            return self.fail(format!("page group {} does not exist", s.cache.group.0));
        };
        self.f32(k, Dim::Tokens, g.n_kv * g.d_k)?;
        if let Some(d) = head_dim {
            self.ensure(d == g.d_k, || format!("heads of {d} into rows of {}", g.d_k))?;
        }
        match s.v {
            Some(v) => self.f32(v, Dim::Tokens, g.n_kv * g.d_v)?,
            None => self.ensure(g.d_v == 0, || format!("page group {} expects values", g.name))?,
        }
        self.slot(s.cache, g.n_kv, g.d_k, Some(g.d_v))
    }

    fn state(&self, id: super::StateId, layer: u32, elements: usize) -> Result<()> {
        match self.plan.states.get(id.0 as usize) {
            Some(s) => self.ensure(s.elements == elements && (layer as usize) < s.layers, || {
                format!("state {} holds {} elements over {} layers, expected {elements}", s.name, s.elements, s.layers)
            }),
            None => self.fail(format!("state {} does not exist", id.0)),
        }
    }
}

impl Plan {
    /// Checks every shape, dtype, index and the order of the ops.
    pub fn check(&self) -> Result<()> {
        let mut written = vec![false; self.values.len()];
        for v in &self.inputs {
            written[v.0 as usize] = true;
        }
        for (index, op) in self.ops.iter().enumerate() {
            let c = Checker { plan: self, index, op: op.kind() };
            let mut order = Ok(());
            op.accesses(&mut |a| {
                if order.is_err() {
                    return;
                }
                order = match a {
                    Access::Read(v) | Access::Write(v) if v.0 as usize >= self.values.len() => {
                        c.fail(format!("value {} does not exist", v.0))
                    }
                    Access::Weight(w) if w.0 as usize >= self.weights.len() => {
                        c.fail(format!("weight {} does not exist", w.0))
                    }
                    Access::Read(v) if !written[v.0 as usize] => {
                        c.fail(format!("{} is read before it is written", self.val(v).name))
                    }
                    Access::Write(v) if std::mem::replace(&mut written[v.0 as usize], true) => {
                        c.fail(format!("{} is written twice", self.val(v).name))
                    }
                    _ => Ok(()),
                };
            });
            order?;
            c.op(op)?;
            c.device(op)?;
            let in_head = self.head.is_some_and(|h| index >= h);
            for v in op.writes() {
                c.ensure((self.val(v).rows == Dim::Out) == in_head, || {
                    format!("{} has rows {:?} on the wrong side of the head", self.val(v).name, self.val(v).rows)
                })?;
            }
        }
        match self.outputs.iter().find(|v| !written[v.0 as usize]) {
            Some(v) => Err(Error::Plan {
                index: self.ops.len(),
                op: "output",
                what: format!("{} is never written", self.val(*v).name),
            }),
            None => Ok(()),
        }
    }
}
