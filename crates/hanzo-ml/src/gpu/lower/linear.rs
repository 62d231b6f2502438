//! Lowering of linears, of groups of them and of the quantization of their input.
//!
//! Each member of a group is a launch of its own with no barrier between, unless [`super::matvec_group`] has one for several;
//! which kernel, says [`variants`]. The output head
//! quantizes its few rows in two int8 terms in scratch. A gate and an up whose only reader is a glu run as one kernel with
//! it (and with the quantization behind it) where [`super::fuse`] says so; a norm behind a matrix is [`super::matvec_norm`]'s, a
//! router's selection [`super::route`]'s. Experts share [`contract`] and [`glu`].

use super::variants::{self, Ask, Input, Load, Task, Variant, constant};
use super::{Lowering, Q8};
use crate::backend::{CompileOptions, Precision};
use crate::error::{Error, Result};
use crate::gpu::launch::{Features, Ptr};
use crate::plan::{Activation, DType, Dim, GluKind, Member, Op, Plan, RouteSpec, ValueId};
use hanzo_kernels::args::{GemmF32, GluMatvec, GluRouted, Matvec, MatvecF32, Quantize};

/// Adds the op's launches; false if the op is not one of this file's.
pub(super) fn lower(cx: &mut Lowering<'_>, op: &Op) -> Result<bool> {
    let (x, members) = match op {
        Op::Quantize { x, out } => {
            let planes = cx.q8(*out);
            quantize(cx, *x, planes, 1)?;
            return Ok(true);
        }
        Op::Linear { x, .. } | Op::LinearGroup { x, .. } => (*x, op.members()),
        _ => return Ok(false),
    };
    let follower = cx.followers().next().cloned();
    match (follower, members) {
        (None, _) => {}
        (Some(Op::AddRmsNorm { .. }), [m]) => {
            super::matvec_norm::lower(cx, x, m, None)?;
            return Ok(true);
        }
        (Some(Op::MoeRoute { .. }), [m]) => {
            super::route::select(cx, x, m)?;
            return Ok(true);
        }
        _ => {
            glu(cx, x, members, None, None)?;
            return Ok(true);
        }
    }
    let left = super::matvec_group::lower(cx, x, members)?;
    let head = cx.plan.val(x).rows == Dim::Out && cx.options.precision == Precision::Int8;
    let mut two_terms = None;
    for m in &left {
        if head && cx.plan.wt(m.w).format.is_block() && cx.plan.val(x).dtype == DType::F32 {
            let planes = match two_terms {
                Some(planes) => planes,
                None => {
                    let (rows, cols) = (2 * cx.max_rows(x), cx.cols(x));
                    let all = cx.scratch("head.q8", Lowering::planes_bytes(rows, cols));
                    let planes = Lowering::planes(all, rows, cols);
                    quantize(cx, x, planes, 2)?;
                    planes
                }
            };
            two_terms = Some(planes);
            contract(cx, Task::Head, Source::Int8(planes), x, m, None)?;
        } else {
            let source = Source::of(cx, x);
            contract(cx, Task::Linear, source, x, m, None)?;
        }
    }
    Ok(true)
}

/// The rows of `x` as int8 planes, in one term or two.
fn quantize(cx: &mut Lowering<'_>, x: ValueId, to: Q8, terms: u32) -> Result<()> {
    let (rows, units) = (cx.max_rows(x) as u32, (cx.cols(x) / 32) as u32);
    let lanes = if cx.features.wave >= 8 { 8 } else { 1 };
    let threads = variants::threads(&[("THREADS", 64)], cx.features);
    let args = Quantize { x: cx.value(x), xq: to.q, xd: to.d, xs: to.s, live: cx.live(x), units };
    let set = [("THREADS", threads), ("LANES", lanes), ("TERMS", terms)];
    cx.launch(None, &args, &set, [(units * lanes).div_ceil(threads), rows, 1])
}

/// Where activations lie.
#[derive(Clone, Copy)]
pub(super) enum Source {
    /// Quantized.
    Int8(Q8),
    /// Floats.
    Float(Ptr),
}

impl Source {
    /// A value's rows as they are.
    pub fn of(cx: &Lowering<'_>, x: ValueId) -> Source {
        match cx.plan.val(x).dtype {
            DType::Q8 => Source::Int8(cx.q8(x)),
            _ => Source::Float(cx.value(x)),
        }
    }

    fn input(self) -> Input {
        match self {
            Source::Int8(_) => Input::Int8,
            Source::Float(_) => Input::Float,
        }
    }
}

/// What experts add to a contraction.
#[derive(Clone, Copy)]
pub(super) struct Experts {
    /// The value with each slot's expert.
    pub ids: ValueId,
    /// Slots of a token.
    pub k: usize,
    /// Experts.
    pub n: usize,
    /// Slots that share a row of x.
    pub div: u32,
}

/// One matrix times the rows of `x`.
pub(super) fn contract(
    cx: &mut Lowering<'_>,
    task: Task,
    source: Source,
    x: ValueId,
    m: &Member,
    experts: Option<Experts>,
) -> Result<()> {
    let w = cx.plan.wt(m.w);
    let (format, rows, cols) = (w.format, w.rows as u32, cx.cols(x) as u32);
    let units = cols.div_ceil(32);
    let slots = cx.max_rows(m.out) as u32;
    let load =
        Load { tokens: experts.map_or(slots as usize, |e| slots as usize / e.k), experts: experts.map(|e| (e.k, e.n)) };
    let (input, deterministic) = (source.input(), cx.options.deterministic);
    let halves = super::tiles::halves_allowed(cx, format);
    let ask = Ask { task, input, load, rows: w.rows, format: Some(format), halves, deterministic };
    let levered = super::levered::pick(&ask, cx.options.levers, cx.features);
    let Some(v) = levered.or_else(|| variants::pick(&ask, cx.features)) else {
        let what = format!("no {} kernel for waves of {}", task.name(), cx.features.wave);
        return Err(Error::Unsupported { backend: "gpu", what });
    };
    let terms = if task == Task::Head { 2 } else { 1 };
    if v.input == Input::Half {
        return super::tiles::halves(cx, v, source, x, m, experts);
    }
    if let (true, Source::Int8(q)) = (v.kernel.starts_with("gemm"), source) {
        return super::tiles::integers(cx, v, q, m, experts, terms);
    }
    let (weight, bias, y, live) = (cx.weight(m.w)?, cx.optional_vector(m.bias), cx.value(m.out), cx.live(m.out));
    let (div, bias_stride) = (experts.map_or(1, |e| e.div), rows);
    let mut set = v.constants.to_vec();
    set.extend([("BIAS", u32::from(m.bias.is_some())), ("MOE", u32::from(experts.is_some()))]);
    let mut threads = variants::threads(v.constants, cx.features);
    let get = |name| constant(v, name);
    let groups = if v.kernel.starts_with("gemm") {
        let token_tiles = match experts {
            None => slots.div_ceil(get("BM")),
            Some(e) => slots.div_ceil(get("BM")) + e.n as u32,
        };
        [rows.div_ceil(get("BN")), token_tiles, 1]
    } else {
        let mut split = get("SPLIT");
        if v.kernel == "matvec_f32" && !cx.options.deterministic {
            let loads = rows.div_ceil(get("ROWS")) as usize * slots.div_ceil(get("TOKENS")) as usize;
            if let Some(waves) = variants::waves_of_few_rows(loads, units as usize, cx.features) {
                (split, threads) = (waves, waves * cx.features.wave);
            }
        }
        let mut in_flight = variants::units_in_flight(units as usize, cx.features.wave * split);
        let one = v.kernel == "matvec" && task == Task::Linear && slots == 1 && !cx.options.deterministic;
        if one && cx.options.levers.on("matvec_split") {
            let alone = cx.plan.ops[cx.op].members().len() == 1;
            let (shape, wave) = ((rows as usize, units as usize), cx.features.wave);
            (split, in_flight) =
                variants::waves_of_long_rows(format, shape, alone, threads, wave).unwrap_or((split, in_flight));
        }
        let span = threads / cx.features.wave / split * get("ROWS") * get("REPEAT");
        set.extend([("THREADS", threads), ("UNITS", in_flight), ("SPLIT", split)]);
        [rows.div_ceil(span), slots.div_ceil(get("TOKENS")), 1]
    };
    let (order, tiles) = match experts {
        Some(e) if v.kernel.starts_with("gemm") => super::moe_linear::sorted(cx, e, slots, live, get("BM"))?,
        _ => (Ptr::NONE, Ptr::NONE),
    };
    let ids = experts.map_or(Ptr::NONE, |e| cx.value(e.ids));
    let whole = ("WHOLE", u32::from(cols.is_multiple_of(32)));
    let w = weight;
    match (v.kernel, source) {
        ("matvec", Source::Int8(q)) => {
            set.push(("TERMS", terms));
            let (xq, xd, xs) = (q.q, q.d, q.s);
            let args = Matvec { w, xq, xd, xs, bias, y, live, ids, rows, units, div, bias_stride };
            cx.launch(Some(format), &args, &set, groups)
        }
        ("matvec_f32", Source::Float(x)) => {
            set.push(whole);
            let args = MatvecF32 { w, x, bias, y, live, ids, rows, units, cols, div, bias_stride };
            cx.launch(Some(format), &args, &set, groups)
        }
        ("gemm_f32", Source::Float(x)) => {
            set.push(whole);
            let args = GemmF32 { w, x, bias, y, live, tiles, order, rows, units, cols, div, bias_stride };
            cx.launch(Some(format), &args, &set, groups)
        }
        (kernel, _) => {
            let what = format!("the variant table names {kernel} for activations it does not read");
            Err(Error::Unsupported { backend: "gpu", what })
        }
    }
}

/// The number by which kernels know an activation; 6 is the clamped form.
pub(super) fn kind(glu: GluKind) -> (u32, f32, f32) {
    match glu {
        GluKind::Plain(a) => {
            let number = match a {
                Activation::Silu => 0,
                Activation::GeluTanh => 1,
                Activation::GeluErf => 2,
                Activation::Relu2 => 3,
                Activation::Sigmoid => 4,
                Activation::Softplus => 5,
            };
            (number, 0.0, 0.0)
        }
        GluKind::SwigluClamped { alpha, limit } => (6, alpha, limit),
    }
}

/// What a routing inside a glu reads and writes besides ids.
pub(super) struct Routing<'a> {
    pub logits: ValueId,
    pub spec: &'a RouteSpec,
    pub weights: ValueId,
}

/// Gate, up, the glu that reads both and, if they follow too, the quantization of the result; before all that, the routing.
pub(super) fn glu(
    cx: &mut Lowering<'_>,
    x: ValueId,
    members: &[Member],
    experts: Option<Experts>,
    routing: Option<Routing<'_>>,
) -> Result<()> {
    let (mut combined, mut planes) = (None, None);
    for op in cx.followers() {
        match op {
            Op::Glu { gate, up, kind, out } => combined = Some((*gate, *up, *kind, *out)),
            Op::Quantize { out, .. } => planes = Some(*out),
            _ => {}
        }
    }
    let member = |v: ValueId| members.iter().find(|m| m.out == v).copied();
    let fault = |what: &str| Error::Unsupported { backend: "gpu", what: what.into() };
    let (gate, up, glu, out, q) = match (combined, Source::of(cx, x)) {
        (Some((gate, up, kind, out)), Source::Int8(q)) => match (member(gate), member(up)) {
            (Some(gate), Some(up)) => (gate, up, kind, out, q),
            _ => return Err(fault("a fused glu that reads other values than its group's")),
        },
        _ => return Err(fault("a fused group without a glu over quantized activations")),
    };
    let w = cx.plan.wt(gate.w);
    let (format, rows, units) = (w.format, w.rows as u32, (w.cols / 32) as u32);
    let slots = cx.max_rows(out) as u32;
    let Some(v) = glu_variant(cx, slots as usize, w.rows, experts) else {
        return Err(fault("a fused glu for more tokens than there is a kernel for"));
    };
    let tokens = constant(v, "TOKENS");
    let (threads, per_wave, repeat) = if planes.is_some() {
        let one = slots == 1 && experts.is_none();
        let shape = variants::glu_shape(format, w.rows, tokens, experts.is_some(), one, cx.features);
        (shape.threads, shape.rows, shape.repeat)
    } else {
        (variants::threads(&[("THREADS", constant(v, "THREADS"))], cx.features), constant(v, "ROWS"), 1)
    };
    let teams = threads / cx.features.wave;
    let most = if planes.is_some() && cx.features.wave >= 32 { 1 } else { 4 / per_wave.min(4) };
    let in_flight = variants::units_in_flight(units as usize, cx.features.wave).min(most);
    let (number, alpha, limit) = kind(glu);
    let y = match planes {
        Some(v) => Ptr { len: Lowering::planes_bytes(slots as usize, rows as usize), ..cx.q8(v).q },
        None => cx.value(out),
    };
    let mut set = vec![
        ("THREADS", threads),
        ("ROWS", per_wave),
        ("UNITS", in_flight),
        ("REPEAT", repeat),
        ("KIND", number),
        ("ALPHA", alpha.to_bits()),
        ("LIMIT", limit.to_bits()),
        ("QUANT", u32::from(planes.is_some())),
    ];
    let groups = [rows.div_ceil(teams * per_wave * repeat), slots.div_ceil(tokens), 1];
    let (wg, wu, xq, xd, xs) = (cx.weight(gate.w)?, cx.weight(up.w)?, q.q, q.d, q.s);
    let ids = experts.map_or(Ptr::NONE, |e| cx.value(e.ids));
    if let Some(Routing { logits, spec, weights }) = routing {
        set.extend(super::route::constants(spec, super::route::ALL, false));
        set.push(("SCALE", spec.scale.to_bits()));
        let (logits, weights) = (cx.value(logits), cx.value(weights));
        let args = GluRouted { wg, wu, xq, xd, xs, logits, y, ids, weights, rows, units };
        return cx.launch(Some(format), &args, &set, groups);
    }
    set.extend([("TOKENS", tokens), ("MOE", u32::from(experts.is_some()))]);
    let (live, div) = (cx.live(out), experts.map_or(1, |e| e.div));
    let args = GluMatvec { wg, wu, xq, xd, xs, y, live, ids, rows, units, div, capacity: slots };
    cx.launch(Some(format), &args, &set, groups)
}

/// Can one kernel run this pair of projections and the glu that makes `out`?
pub(super) fn glu_fits(plan: &Plan, options: &CompileOptions, features: &Features, pair: &Op, out: ValueId) -> bool {
    let (x, ids) = match pair {
        Op::LinearGroup { x, .. } => (*x, None),
        Op::MoeLinearGroup { x, ids, .. } => (*x, Some(*ids)),
        _ => return false,
    };
    let [a, b] = pair.members() else { return false };
    let [w, v] = [a, b].map(|m| plan.wt(m.w));
    let same = (w.format, w.rows, w.cols) == (v.format, v.rows, v.cols) && a.bias.is_none() && b.bias.is_none();
    let slots = plan.val(out).rows.eval(&options.bucket);
    let k = ids.map_or(1, |ids| plan.val(ids).cols);
    let task = if ids.is_some() { Task::MoeGlu } else { Task::Glu };
    let load = Load { tokens: slots / k.max(1), experts: ids.map(|_| (k, w.experts)) };
    let kernel = variants::choose(task, Input::Int8, load, w.rows, options.deterministic, features);
    plan.val(x).dtype == DType::Q8 && same && kernel.is_some()
}

fn glu_variant(cx: &Lowering<'_>, slots: usize, rows: usize, experts: Option<Experts>) -> Option<&'static Variant> {
    let (task, tokens) = match experts {
        None => (Task::Glu, slots),
        Some(e) => (Task::MoeGlu, slots / e.k),
    };
    let load = Load { tokens, experts: experts.map(|e| (e.k, e.n)) };
    variants::choose(task, Input::Int8, load, rows, cx.options.deterministic, cx.features)
}
