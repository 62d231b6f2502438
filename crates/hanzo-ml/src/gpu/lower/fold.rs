//! One-token contractions whose workgroups quantize their row themselves (lever `quantize_in_matvec`), or add, norm and quantize it
//! (lever `norm_in_matvec`). The quantization, or the norm, leads; the contractions that read it follow ([`super::fuse`]).
//!
//! No quantization in two terms and no experts may enter here.

use super::linear::kind;
use super::variants::{Ask, Input, Load, Task, Variant, constant, threads, units_in_flight};
use super::{Lowering, levered};
use crate::backend::CompileOptions;
use crate::error::Result;
use crate::gpu::launch::{Features, Ptr};
use crate::plan::{DType, Dim, GluKind, Member, Op, Plan, ValueId, WeightId};
use hanzo_kernels::args::{MatvecRaw, Weight};

/// Constants of a launch that follow from the row's length and the device.
struct Shape {
    threads: u32,
    /// Rows of each matrix that a wave makes.
    per_wave: u32,
    lanes: u32,
    units: u32,
}

impl Shape {
    /// None where a row is too long for a workgroup, or (`whole`) one cannot make whole groups of 32 rows.
    fn of(v: &Variant, cols: usize, whole: bool, features: &Features) -> Option<Shape> {
        let threads = threads(v.constants, features);
        let waves = threads / features.wave;
        let lanes = if features.wave >= 8 { 8 } else { 1 };
        let quads = (cols / 32 * lanes).div_ceil(threads as usize) * (8 / lanes);
        let asked = constant(v, "ROWS");
        let per_wave = if whole { asked.max(32 / waves.min(32)) } else { asked };
        let fits = quads <= 16 && per_wave <= 8 && (!whole || (waves * per_wave).is_multiple_of(32));
        // Codes, scales and sums; partial sums; a codebook has 16 KB at most.
        let bytes = cols + 128 + cols / 4 + 4 * (waves * (2 + 2 * per_wave)) as usize;
        let room = bytes + (16 << 10) <= features.shared_bytes as usize;
        let matrices = if v.task == Task::Glu { 2 } else { 1 };
        // What is asked for before the row is made stays in registers meanwhile, of which 1024 threads have 64 each.
        let most = if threads > 512 { 1 } else { 4 / (per_wave * matrices).min(4) };
        let units = units_in_flight(cols / 32, features.wave).min(most);
        (fits && room).then_some(Shape { threads, per_wave, lanes: lanes as u32, units })
    }
}

fn variant(options: &CompileOptions, features: &Features, task: Task, rows: usize) -> Option<&'static Variant> {
    let (load, deterministic) = (Load { tokens: 1, experts: None }, options.deterministic);
    let ask = Ask { task, input: Input::Raw, load, rows, format: None, halves: false, deterministic };
    levered::pick(&ask, options.levers, features).filter(|_| options.bucket.n_tokens == 1)
}

/// Can a contraction of quantized rows take the row as f32?
pub(super) fn fits(plan: &Plan, options: &CompileOptions, features: &Features, op: &Op) -> bool {
    let (Op::Linear { x, .. } | Op::LinearGroup { x, .. }) = op else { return false };
    let v = plan.val(*x);
    let member = |m: &Member| {
        let w = plan.wt(m.w);
        let v = variant(options, features, Task::Linear, w.rows);
        w.format.is_block() && v.is_some_and(|v| Shape::of(v, w.cols, false, features).is_some())
    };
    v.dtype == DType::Q8 && v.rows == Dim::Tokens && op.members().iter().all(member)
}

/// Can the glu of this pair's outputs run in its launch too?
pub(super) fn glu_fits(plan: &Plan, options: &CompileOptions, features: &Features, pair: &Op) -> bool {
    let [a, b] = pair.members() else { return false };
    let [w, u] = [a, b].map(|m| plan.wt(m.w));
    let same = (w.format, w.rows, w.cols) == (u.format, u.rows, u.cols) && a.bias.is_none() && b.bias.is_none();
    let v = variant(options, features, Task::Glu, w.rows);
    same && v.is_some_and(|v| Shape::of(v, w.cols, true, features).is_some())
}

/// What a launch reads.
#[derive(Clone, Copy)]
struct Row {
    x: ValueId,
    other: Option<ValueId>,
    gain: Option<WeightId>,
    /// None: the row is not normed.
    eps: Option<f32>,
    /// Where the sum goes: one launch writes it.
    sum: Option<ValueId>,
}

/// Gate's glu: its kind, its value, and the planes it is quantized to.
type Combined = (GluKind, ValueId, Option<ValueId>);

/// Adds the launches of an op that leads contractions; false if it leads none.
pub(super) fn lower(cx: &mut Lowering<'_>, op: &Op) -> Result<bool> {
    let mut row = match op {
        Op::Quantize { x, .. } => Row { x: *x, other: None, gain: None, eps: None, sum: None },
        Op::RmsNorm { x, weight, eps, .. } => Row { x: *x, other: None, gain: *weight, eps: Some(*eps), sum: None },
        Op::AddRmsNorm { a, b, weight, eps, sum, .. } => {
            Row { x: *a, other: Some(*b), gain: *weight, eps: Some(*eps), sum: Some(*sum) }
        }
        _ => return Ok(false),
    };
    let parts: Vec<Op> = cx.followers().cloned().collect();
    let readers = parts.iter().filter(|p| matches!(p, Op::Linear { .. } | Op::LinearGroup { .. }));
    let mut found = false;
    for reader in readers {
        found = true;
        let members = reader.members();
        let made = |v: ValueId| members.iter().find(|m| m.out == v);
        let glu = parts.iter().find_map(|p| match p {
            Op::Glu { gate, up, kind, out } => Some((*made(*gate)?, *made(*up)?, *kind, *out)),
            _ => None,
        });
        if let Some((gate, up, kind, out)) = glu {
            let planes = parts.iter().find_map(|p| match p {
                Op::Quantize { x, out: q } if *x == out => Some(*q),
                _ => None,
            });
            launch(cx, row, &gate, Some((&up, (kind, out, planes))))?;
            row.sum = None;
            continue;
        }
        for m in members {
            launch(cx, row, m, None)?;
            row.sum = None;
        }
    }
    Ok(found)
}

fn launch(cx: &mut Lowering<'_>, row: Row, m: &Member, second: Option<(&Member, Combined)>) -> Result<()> {
    let w = cx.plan.wt(m.w);
    let (format, rows, cols) = (w.format, w.rows, w.cols);
    let (task, glu) = (if second.is_some() { Task::Glu } else { Task::Linear }, second.map(|s| s.1));
    let v = variant(cx.options, cx.features, task, rows);
    let shape = v.and_then(|v| Shape::of(v, cols, glu.is_some(), cx.features));
    let Some(s) = shape else {
        let what = format!("a row of {cols} columns was left to matvec_raw, which cannot hold it");
        return Err(crate::error::Error::Unsupported { backend: "gpu", what });
    };
    let planes = glu.and_then(|g| g.2);
    let (number, alpha, limit) = glu.map_or((0, 0.0, 0.0), |g| kind(g.0));
    let y = match (glu, planes) {
        (_, Some(q)) => Ptr { len: Lowering::planes_bytes(1, rows), ..cx.q8(q).q },
        (Some((_, out, _)), None) => cx.value(out),
        (None, None) => cx.value(m.out),
    };
    let norm = if row.eps.is_none() { 0 } else { 1 + u32::from(row.other.is_some()) };
    let set = [
        ("THREADS", s.threads),
        ("ROWS", s.per_wave),
        ("UNITS", s.units),
        ("COLS", cols as u32),
        ("LANES", s.lanes),
        ("NORM", norm),
        ("WEIGHTED", row.gain.is_some().into()),
        ("KEEP", row.sum.is_some().into()),
        ("BIAS", m.bias.is_some().into()),
        ("GLU", glu.is_some().into()),
        ("KIND", number),
        ("ALPHA", alpha.to_bits()),
        ("LIMIT", limit.to_bits()),
        ("QUANT", planes.is_some().into()),
    ];
    let args = MatvecRaw {
        w: cx.weight(m.w)?,
        wu: match second {
            Some((up, _)) => cx.weight(up.w)?,
            None => Weight { base: Ptr::NONE, planes: [0; 3], table: Ptr::NONE },
        },
        x: cx.value(row.x),
        other: row.other.map_or(Ptr::NONE, |v| cx.value(v)),
        gain: cx.optional_vector(row.gain),
        bias: cx.optional_vector(m.bias),
        sum: row.sum.map_or(Ptr::NONE, |v| cx.value(v)),
        y,
        rows: rows as u32,
        inverse: 1.0 / cols as f32,
        eps: row.eps.unwrap_or(0.0),
    };
    let span = s.threads / cx.features.wave * s.per_wave;
    cx.launch(Some(format), &args, &set, [(rows as u32).div_ceil(span), 1, 1])
}

#[cfg(test)]
mod tests {
    use crate::gpu::Program;
    use crate::gpu::lower::fixtures::{options, scalar, with};
    use crate::levers::LeverSet;
    use crate::levers::tests::layer_plan_of;

    /// A step of two layers of rows of `cols` with these of the levers that say where norms run.
    fn program_of(cols: usize, tokens: usize, levers: &[&str]) -> Program {
        let plain = with(with(LeverSet::default(), "matvec_norm", false), "norm_in_matvec", false);
        let levers = levers.iter().fold(plain, |s, id| with(s, id, true));
        let plan = layer_plan_of(false, cols);
        crate::gpu::lower::program(&plan, &options(levers, tokens), &scalar(), &|_| None).expect("it lowers")
    }

    fn program(tokens: usize, levers: &[&str]) -> Program {
        program_of(64, tokens, levers)
    }

    fn count(p: &Program, op: &str) -> usize {
        p.launches.iter().filter(|l| l.kernel.op == op).count()
    }

    #[test]
    fn norms_before_contractions_go_into_them_and_take_their_stages_along() {
        let (plain, normed) = (program(1, &[]), program(1, &["norm_in_matvec"]));
        // Two layers: q, k, v in one stage, gate and up in another. The head's norm stays.
        assert_eq!((count(&plain, "rms_norm"), count(&normed, "rms_norm")), (5, 1));
        assert_eq!((count(&normed, "matvec_raw"), count(&normed, "glu_matvec")), (2 * (3 + 1), 0));
        let barriers = |p: &Program| p.barriers.iter().filter(|b| **b).count();
        assert_eq!(barriers(&normed) + 4, barriers(&plain));
    }

    #[test]
    fn a_quantization_goes_into_its_readers_whatever_made_the_row() {
        let p = program(1, &["quantize_in_matvec"]);
        assert_eq!((count(&p, "matvec"), count(&p, "quantize")), (1, 1), "the head's are left");
        assert_eq!((count(&p, "matvec_raw"), count(&p, "rms_norm")), (2 * (3 + 1 + 1 + 1), 5));
    }

    #[test]
    fn matrices_that_norm_what_they_make_keep_their_quantized_input() {
        // The first layer's norm comes before any matrix: it is a launch of its own. What the last layer makes is the head's, so that
        // its last matrix is one of those that quantize.
        let wide = |levers: &[&str]| program_of(2048, 1, levers);
        let both = wide(&["matvec_norm", "norm_in_matvec", "quantize_in_matvec"]);
        assert_eq!((count(&both, "matvec_norm"), count(&both, "rms_norm")), (3, 2), "the head's norm is apart");
        assert_eq!(count(&both, "matvec_raw"), 2 * (3 + 1) + 1);
        assert_eq!(count(&wide(&["matvec_norm", "norm_in_matvec"]), "matvec_raw"), 0);
        assert_eq!(count(&wide(&["norm_in_matvec"]), "matvec_raw"), 2 * (3 + 1));
    }

    #[test]
    fn narrow_rows_are_normed_by_who_reads_them() {
        let both = program(1, &["matvec_norm", "norm_in_matvec"]);
        assert_eq!((count(&both, "matvec_norm"), count(&both, "rms_norm")), (0, 1), "the head's norm is apart");
        assert_eq!(count(&both, "matvec_raw"), 2 * (3 + 1));
    }

    #[test]
    fn steps_of_more_tokens_do_not_fold() {
        for lever in ["quantize_in_matvec", "norm_in_matvec"] {
            assert_eq!(count(&program(2, &[lever]), "matvec_raw"), 0);
        }
    }
}
