//! Lowering of ops on rows: embedding, norms, gated units, functions of single elements, moves.
//!
//! A row (a run of `group` columns, for norms) is a workgroup's or a few workgroups' work; rows beyond those of the step
//! are masked unless the bucket has one row only. A quantization that follows a norm or a gated unit (see [`super::fuse`])
//! is written by the same launch. No contraction may enter here.

use super::Lowering;
use crate::error::Result;
use crate::gpu::launch::{Features, Ptr};
use crate::plan::{Activation, GluKind, Op, ValueId, WeightId};
use hanzo_kernels::args::{CopyRows, Elementwise, Embed, Glu, LayerNorm, RmsNorm};

/// The number of an activation in kernels (`activate_`).
pub(super) fn activation(kind: Activation) -> u32 {
    match kind {
        Activation::Silu => 0,
        Activation::GeluTanh => 1,
        Activation::GeluErf => 2,
        Activation::Relu2 => 3,
        Activation::Sigmoid => 4,
        Activation::Softplus => 5,
    }
}

/// The most threads of a workgroup: 1024, what the device allows, and 32 waves, which every device takes.
fn most_threads(features: &Features) -> u32 {
    let waves = if features.wave > 1 { 32 * features.wave } else { 1024 };
    features.max_threads.min(waves).min(1024)
}

/// Threads of a workgroup: a power of two of at least `wanted`, whole waves, at most what the device and `most` allow.
pub(super) fn threads(features: &Features, wanted: usize, most: u32) -> u32 {
    let wanted = u32::try_from(wanted).unwrap_or(most).min(most).next_power_of_two();
    wanted.min(most_threads(features)).max(features.wave).max(32)
}

/// Threads of a workgroup that norms one of `runs` runs of `group` columns. Few runs: more threads for a shorter way through one, and
/// for one run, which the mat-vec before may norm (`matvec_norm`), few workgroups to count. Many: fewer waves to wait for.
pub(super) fn norm_threads(features: &Features, group: usize, runs: usize) -> u32 {
    let items = if group.is_multiple_of(4) { group / 4 } else { group };
    let each = match runs {
        0..=1 => 1,
        2..=8 => 2,
        _ => 4,
    };
    threads(features, items.div_ceil(each), 1024)
}

/// Columns of a row that a norm can quantize as it writes them: four f32x4 a thread.
pub(super) fn quantized_columns(features: &Features) -> usize {
    16 * most_threads(features) as usize
}

/// Where a launch writes a value: its floats, its quantized planes, or both.
pub(super) struct Written {
    /// 0: floats; 1: planes; 2: both.
    pub quant: u32,
    /// The floats.
    pub y: Ptr,
    /// The planes.
    pub planes: [Ptr; 3],
}

impl Lowering<'_> {
    /// Where a launch with this value among its results writes it.
    pub(super) fn written(&self, out: ValueId) -> Written {
        let quantized = self.followers().find_map(|op| match op {
            Op::Quantize { x, out: q } if *x == out => Some(*q),
            _ => None,
        });
        let Some(q) = quantized else {
            return Written { quant: 0, y: self.value(out), planes: [Ptr::NONE; 3] };
        };
        let reads = |op: &&Op| op.reads().contains(&out) && !matches!(op, Op::Quantize { out, .. } if *out == q);
        let floats = self.plan.ops.iter().any(|op| reads(&op)) || self.plan.outputs.contains(&out);
        let planes = self.q8(q);
        let (quant, y) = if floats { (2, self.value(out)) } else { (1, Ptr::NONE) };
        Written { quant, y, planes: [planes.q, planes.d, planes.s] }
    }

    /// 1 if rows of a value must be masked.
    pub(super) fn mask(&self, v: ValueId) -> u32 {
        u32::from(self.max_rows(v) > 1)
    }

    /// The grid of an element-wise kernel over rows of `cols` columns, `each` a thread, and its threads.
    fn rows_of(&self, v: ValueId, cols: usize, each: usize) -> (u32, [u32; 3]) {
        let items = cols.div_ceil(each);
        let threads = threads(self.features, items, 128);
        (threads, [items.div_ceil(threads as usize) as u32, self.max_rows(v) as u32, 1])
    }
}

/// Adds the op's launches; false if the op is not one of this file's.
pub(super) fn lower(cx: &mut Lowering<'_>, op: &Op) -> Result<bool> {
    match op {
        Op::Embed { table, scale, out } => embed(cx, *table, *scale, *out)?,
        Op::RmsNorm { x, weight, eps, group, out } => {
            rms_norm(cx, Normed { a: *x, b: None, weight: *weight, eps: *eps, group: *group, out: *out })?;
        }
        Op::AddRmsNorm { a, b, weight, eps, sum, out } => {
            let group = cx.cols(*a);
            rms_norm(cx, Normed { a: *a, b: Some((*b, *sum)), weight: *weight, eps: *eps, group, out: *out })?;
        }
        Op::LayerNorm { x, weight, bias, eps, out } => {
            let cols = cx.cols(*x);
            let args = LayerNorm {
                x: cx.value(*x),
                weight: cx.vector(*weight),
                bias: cx.optional_vector(*bias),
                live: cx.live(*x),
                y: cx.value(*out),
                cols: cols as u32,
                eps: *eps,
            };
            let threads = threads(cx.features, cols.div_ceil(4), 1024);
            let set = [("THREADS", threads), ("BIASED", bias.is_some().into()), ("MASK", cx.mask(*x))];
            cx.launch(None, &args, &set, [1, cx.max_rows(*x) as u32, 1])?;
        }
        Op::Act { x, kind, out } => elementwise(cx, activation(*kind), *x, None, 0.0, *out)?,
        Op::Scale { x, s, out } => elementwise(cx, 16, *x, None, *s, *out)?,
        Op::Softcap { x, cap, out } => elementwise(cx, 17, *x, None, *cap, *out)?,
        Op::Add { a, b, out } => elementwise(cx, 18, *a, Some(*b), 0.0, *out)?,
        Op::Mul { a, b, out } => {
            let kind = if cx.cols(*b) == cx.cols(*a) { 19 } else { 20 };
            elementwise(cx, kind, *a, Some(*b), 0.0, *out)?;
        }
        Op::Glu { gate, up, kind, out } => glu(cx, *gate, *up, *kind, *out)?,
        Op::Columns { x, first, out } => copy(cx, *x, None, *first, false, *out)?,
        Op::Concat { a, b, out } => copy(cx, *a, Some(*b), 0, false, *out)?,
        Op::Copy { x, out } => copy(cx, *x, None, 0, false, *out)?,
        Op::GatherRows { x, out } => copy(cx, *x, None, 0, true, *out)?,
        _ => return Ok(false),
    }
    Ok(true)
}

fn embed(cx: &mut Lowering<'_>, table: WeightId, scale: f32, out: ValueId) -> Result<()> {
    let cols = cx.cols(out);
    let given = Ptr { buffer: crate::gpu::Buffer::Rows, offset: 0, len: cx.value(out).len };
    let args = Embed {
        w: cx.weight(table)?,
        live: cx.live(out),
        tokens: cx.step.tokens(),
        flag: cx.step.rows_flag(),
        given,
        y: cx.value(out),
        cols: cols as u32,
        units: cols.div_ceil(32) as u32,
        scale,
    };
    let (threads, groups) = cx.rows_of(out, cols, 4);
    let set = [("THREADS", threads), ("SCALED", (scale != 1.0).into()), ("MASK", cx.mask(out))];
    cx.launch(Some(cx.plan.wt(table).format), &args, &set, groups)
}

/// What is normed: a value, or a sum that is kept too.
struct Normed {
    a: ValueId,
    b: Option<(ValueId, ValueId)>,
    weight: Option<WeightId>,
    eps: f32,
    group: usize,
    out: ValueId,
}

fn rms_norm(cx: &mut Lowering<'_>, n: Normed) -> Result<()> {
    let (rows, runs) = (cx.max_rows(n.a), cx.cols(n.a) / n.group);
    let vec = n.group.is_multiple_of(4);
    // A token's sums may not depend on who is with it: as for many.
    let together = if cx.options.deterministic { usize::MAX } else { rows * runs };
    let threads = norm_threads(cx.features, n.group, together);
    let w = cx.written(n.out);
    let args = RmsNorm {
        a: cx.value(n.a),
        b: n.b.map_or(Ptr::NONE, |b| cx.value(b.0)),
        weight: cx.optional_vector(n.weight),
        live: cx.live(n.a),
        sum: n.b.map_or(Ptr::NONE, |b| cx.value(b.1)),
        y: w.y,
        yq: w.planes[0],
        yd: w.planes[1],
        ys: w.planes[2],
        group: n.group as u32,
        runs: runs as u32,
        inverse: 1.0 / n.group as f32,
        eps: n.eps,
    };
    let set = [
        ("THREADS", threads),
        ("ADD", n.b.is_some().into()),
        ("WEIGHTED", n.weight.is_some().into()),
        ("VEC", vec.into()),
        ("QUANT", w.quant),
        ("MASK", cx.mask(n.a)),
    ];
    cx.launch(None, &args, &set, [runs as u32, rows as u32, 1])
}

fn elementwise(cx: &mut Lowering<'_>, kind: u32, a: ValueId, b: Option<ValueId>, s: f32, out: ValueId) -> Result<()> {
    let cols = cx.cols(a);
    let vec = cols.is_multiple_of(4);
    let args = Elementwise {
        a: cx.value(a),
        b: b.map_or(Ptr::NONE, |b| cx.value(b)),
        live: cx.live(a),
        y: cx.value(out),
        cols: cols as u32,
        s,
    };
    let (threads, groups) = cx.rows_of(a, cols, if vec { 4 } else { 1 });
    let set = [("THREADS", threads), ("KIND", kind), ("VEC", vec.into()), ("MASK", cx.mask(a))];
    cx.launch(None, &args, &set, groups)
}

fn glu(cx: &mut Lowering<'_>, gate: ValueId, up: ValueId, kind: GluKind, out: ValueId) -> Result<()> {
    let cols = cx.cols(gate);
    let vec = cols.is_multiple_of(4);
    let (kind, alpha, limit) = match kind {
        GluKind::Plain(a) => (activation(a), 0.0, 0.0),
        GluKind::SwigluClamped { alpha, limit } => (6, alpha, limit),
    };
    let w = cx.written(out);
    let args = Glu {
        gate: cx.value(gate),
        up: cx.value(up),
        live: cx.live(gate),
        y: w.y,
        yq: w.planes[0],
        yd: w.planes[1],
        ys: w.planes[2],
        cols: cols as u32,
        alpha,
        limit,
    };
    let (threads, groups) = cx.rows_of(gate, cols, if vec { 4 } else { 1 });
    let set = [("THREADS", threads), ("KIND", kind), ("VEC", vec.into()), ("QUANT", w.quant), ("MASK", cx.mask(gate))];
    cx.launch(None, &args, &set, groups)
}

/// Columns from `first` of `a` (as many as `out` has, less those of `b`), then `b`; or the rows of `a` that the step asks for.
fn copy(cx: &mut Lowering<'_>, a: ValueId, b: Option<ValueId>, first: usize, gather: bool, out: ValueId) -> Result<()> {
    let (stride, cols, cols_b) = (cx.cols(a), cx.cols(out), b.map_or(0, |b| cx.cols(b)));
    let vec = [stride, first, cols, cols_b].iter().all(|n| n.is_multiple_of(4));
    let args = CopyRows {
        a: cx.value(a),
        b: b.map_or(Ptr::NONE, |b| cx.value(b)),
        live: cx.live(out),
        out_rows: if gather { cx.step.out_rows() } else { Ptr::NONE },
        y: cx.value(out),
        cols_a: (cols - cols_b) as u32,
        cols_b: cols_b as u32,
        stride: stride as u32,
        first: first as u32,
    };
    let (threads, groups) = cx.rows_of(out, cols, if vec { 4 } else { 1 });
    let set = [
        ("THREADS", threads),
        ("JOIN", b.is_some().into()),
        ("GATHER", gather.into()),
        ("VEC", vec.into()),
        ("MASK", cx.mask(out)),
    ];
    cx.launch(None, &args, &set, groups)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::CompileOptions;
    use crate::gpu::lower::fixtures::{options, scalar, with};
    use crate::gpu::{Buffer, Launch, Program};
    use crate::levers::LeverSet;
    use crate::plan::{DType, Dim, Member, Plan};
    use hanzo_gguf::Format;

    /// x -> norm -> linear of a block format, for `tokens` tokens; `kept`: the normed rows are an output too.
    fn normed(tokens: usize, kept: bool, levers: LeverSet) -> Program {
        let mut p = Plan::new(64);
        let x = p.input("x", Dim::Tokens, 64, DType::F32);
        let weight = Some(p.weight("norm", Format::F32, 1, 1, 64));
        let w = p.weight("w", Format::Q4_0, 1, 48, 64);
        let (h, y) = (p.value("h", Dim::Tokens, 64), p.value("y", Dim::Tokens, 48));
        p.push(Op::RmsNorm { x, weight, eps: 1e-6, group: 64, out: h });
        p.push(Op::Linear { x: h, member: Member { w, bias: None, out: y } });
        p.outputs = if kept { vec![h, y] } else { vec![y] };
        let options = options(levers, tokens);
        crate::gpu::lower::program(&p, &options, &scalar(), &|_| None).expect("it lowers")
    }

    fn constant(launch: &Launch, name: &str) -> u32 {
        let at = hanzo_kernels::constants(launch.kernel.op).iter().position(|c| c.0 == name);
        launch.constants[at.expect("a constant")]
    }

    /// The arena bytes that a launch writes.
    fn written(launch: &Launch) -> u64 {
        let arena = |t: &&crate::gpu::Touch| t.write && t.buffer == Buffer::Arena;
        launch.touches.iter().filter(arena).map(|t| t.range.end - t.range.start).sum()
    }

    #[test]
    fn deterministic_norms_sum_a_row_alike_whatever_comes_with_it() {
        let threads = |tokens| {
            let mut p = Plan::new(4096);
            let x = p.input("x", Dim::Tokens, 4096, DType::F32);
            let h = p.value("h", Dim::Tokens, 4096);
            p.push(Op::RmsNorm { x, weight: None, eps: 1e-6, group: 4096, out: h });
            p.outputs = vec![h];
            let options = CompileOptions { deterministic: true, ..options(LeverSet::all(), tokens) };
            let program = crate::gpu::lower::program(&p, &options, &scalar(), &|_| None).expect("it lowers");
            constant(&program.launches[0], "THREADS")
        };
        assert_eq!([1, 3, 40].map(threads), [threads(512); 3]);
    }

    #[test]
    fn a_norm_that_only_int8_contractions_read_writes_its_planes_and_nothing_else() {
        let program = normed(3, false, LeverSet::all());
        let norm = &program.launches[0];
        assert_eq!((norm.kernel.op, constant(norm, "QUANT")), ("rms_norm", 1));
        assert!(program.launches.iter().all(|l| l.kernel.op != "quantize"));
        // Codes, scales and sums of three rows.
        assert_eq!(written(norm), 3 * (64 + 2 * 4 * 2));
    }

    #[test]
    fn a_norm_that_others_read_too_writes_both() {
        let program = normed(3, true, LeverSet::all());
        let norm = &program.launches[0];
        assert_eq!(constant(norm, "QUANT"), 2);
        assert_eq!(written(norm), 3 * (4 * 64 + 64 + 2 * 4 * 2));
    }

    #[test]
    fn without_the_lever_a_quantization_is_a_launch_of_its_own() {
        let off = with(LeverSet::all(), "norm_quantize", false);
        let program = normed(3, false, off);
        let norm = &program.launches[0];
        assert_eq!((constant(norm, "QUANT"), written(norm)), (0, 3 * 4 * 64));
        assert_eq!(program.launches[1].kernel.op, "quantize");
        assert!(program.barriers[1], "it reads what the norm writes");
    }

    #[test]
    fn rows_are_masked_unless_the_bucket_has_one() {
        for tokens in [1, 2] {
            let program = normed(tokens, false, with(LeverSet::default(), "norm_in_matvec", false));
            assert_eq!(constant(&program.launches[0], "MASK"), u32::from(tokens > 1));
        }
    }

    #[test]
    fn workgroups_are_whole_waves_and_no_more_than_32_of_them() {
        for wave in [1, 8, 32, 64, 128] {
            for wanted in [1, 33, 500, 100_000] {
                let n = threads(&Features { wave, ..scalar() }, wanted, 1024);
                assert!(n.is_power_of_two() && n.is_multiple_of(wave) && n <= 1024 && (wave == 1 || n / wave <= 32));
            }
        }
    }
}
