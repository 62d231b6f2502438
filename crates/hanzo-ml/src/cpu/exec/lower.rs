//! Lowering: the Plan as the CPU runs it. Levers are applied first; then contractions over block formats get their
//! activations quantized, either by an op of its own or, with `quantize_fold` and few rows, by each worker.

use crate::backend::{CompileOptions, Precision};
use crate::levers;
use crate::plan::{DType, Dim, Member, Op, Plan};

/// Rows up to which `quantize_fold` lets every worker quantize a contraction's whole input for itself: a row of 1024
/// takes about 0.1 us, a barrier about 0.5.
pub(super) const FOLD_ROWS: usize = 8;

/// Rewrites and lowers a checked Plan.
pub(super) fn lower(plan: &Plan, options: &CompileOptions) -> Plan {
    let mut p = levers::rewrite(plan, options.levers);
    if options.precision == Precision::Exact {
        return p;
    }
    let fold = options.levers.on("quantize_fold");
    let old_head = p.head;
    let mut head = None;
    for (i, op) in std::mem::take(&mut p.ops).into_iter().enumerate() {
        if old_head == Some(i) {
            head = Some(p.ops.len());
        }
        match op {
            Op::Linear { .. } | Op::LinearGroup { .. } | Op::MoeLinear { .. } | Op::MoeLinearGroup { .. } => {
                contraction(&mut p, op, options, fold);
            }
            op => p.ops.push(op),
        }
    }
    p.head = head;
    p
}

/// True if the CPU contracts this member on int8 activations.
pub(super) fn is_int8(plan: &Plan, m: &Member) -> bool {
    plan.wt(m.w).format.is_block()
}

/// The op that every op runs inside: itself, but for a quantization whose rows a norm, a gated unit or attention makes
/// for it alone.
pub(super) fn leaders(plan: &Plan, options: &CompileOptions) -> Vec<usize> {
    let (producers, consumers) = (plan.producers(), plan.consumers());
    let side = |i: usize| plan.head.is_some_and(|h| i >= h);
    let on = |lever: &str| options.levers.on(lever);
    let leader = |i: usize, op: &Op| {
        let Op::Quantize { x, .. } = op else { return None };
        let p = producers[x.0 as usize].filter(|p| side(*p) == side(i))?;
        let alone = consumers[x.0 as usize] == [i] && !plan.outputs.contains(x);
        let makes = match &plan.ops[p] {
            Op::RmsNorm { .. } | Op::AddRmsNorm { .. } => on("norm_quantize"),
            Op::Glu { .. } => on("glu_quantize"),
            // An item is some heads' columns.
            Op::Attention { spec, .. } => {
                let columns = spec.n_head / spec.n_kv * spec.d_v;
                on("attention_quantize") && columns.is_multiple_of(32)
            }
            _ => false,
        };
        // Of what a norm makes, the sum has other readers.
        let rows = !matches!(&plan.ops[p], Op::AddRmsNorm { out, .. } if out != x);
        (alone && makes && rows).then_some(p)
    };
    plan.ops.iter().enumerate().map(|(i, op)| leader(i, op).unwrap_or(i)).collect()
}

/// Splits a contraction into its int8 and its float members and gives the former their quantized input.
fn contraction(p: &mut Plan, op: Op, options: &CompileOptions, fold: bool) {
    let (x, ids) = match &op {
        Op::Linear { x, .. } | Op::LinearGroup { x, .. } => (*x, None),
        Op::MoeLinear { x, ids, .. } | Op::MoeLinearGroup { x, ids, .. } => (*x, Some(*ids)),
        _ => return p.ops.push(op),
    };
    let (int8, float): (Vec<Member>, Vec<Member>) = op.members().iter().partition(|m| is_int8(p, m));
    p.contraction(x, ids, float);
    if int8.is_empty() {
        return;
    }
    let (rows, cols) = (p.val(x).rows, p.val(x).cols);
    // The head quantizes its few rows in two terms, which no value holds: always in the worker.
    if rows == Dim::Out || fold && rows.eval(&options.bucket) <= FOLD_ROWS {
        return p.contraction(x, ids, int8);
    }
    let name = format!("{}.q8", p.val(x).name);
    let q = p.typed_value(name, rows, cols, DType::Q8);
    p.push(Op::Quantize { x, out: q });
    p.contraction(q, ids, int8);
}
