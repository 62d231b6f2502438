//! Steps of one token and one output row: the head's gather takes the only row there is, so a residual add that only the
//! gather reads makes that row itself, in the head. Rewrites then find the add beside the head's norm (`add_rms_norm`).
//! Nothing that holds for more rows may enter here.

use crate::backend::CompileOptions;
use crate::plan::{Op, Plan, Sizes};

/// The Plan without its gather, if the bucket has one row and lever `add_rms_norm` is on.
pub(super) fn without_gather(plan: &Plan, options: &CompileOptions) -> Option<Plan> {
    let one = options.bucket == Sizes { n_tokens: 1, n_seqs: 1, n_out: 1 };
    let head = plan.head.filter(|_| one && options.levers.on("add_rms_norm"))?;
    let Some(Op::GatherRows { x, out }) = plan.ops.get(head) else { return None };
    let add = plan.producers()[x.0 as usize]?;
    let Op::Add { a, b, .. } = plan.ops[add] else { return None };
    if plan.consumers()[x.0 as usize] != [head] || plan.outputs.contains(x) {
        return None;
    }
    let mut p = plan.clone();
    p.ops[head] = Op::Add { a, b, out: *out };
    p.ops.remove(add);
    p.head = Some(head - 1);
    Some(p)
}

#[cfg(test)]
mod tests {
    use crate::gpu::Program;
    use crate::gpu::lower::fixtures::{options, scalar, with};
    use crate::levers::LeverSet;
    use crate::plan::{DType, Dim, Member, Op, Plan};
    use hanzo_gguf::Format;

    /// The end of a model: a residual add, the head's gather, norm and matrix. `kept`: the sum is an output too.
    fn kernels(tokens: usize, kept: bool, levers: LeverSet) -> (Vec<&'static str>, usize) {
        let mut p = Plan::new(64);
        let (a, b) = (p.input("a", Dim::Tokens, 64, DType::F32), p.input("b", Dim::Tokens, 64, DType::F32));
        let weight = Some(p.weight("norm", Format::F32, 1, 1, 64));
        let w = p.weight("w", Format::Q4_0, 1, 48, 64);
        let (sum, last) = (p.value("sum", Dim::Tokens, 64), p.value("last", Dim::Out, 64));
        let (h, y) = (p.value("h", Dim::Out, 64), p.value("y", Dim::Out, 48));
        p.push(Op::Add { a, b, out: sum });
        p.head = Some(1);
        p.push(Op::GatherRows { x: sum, out: last });
        p.push(Op::RmsNorm { x: last, weight, eps: 1e-6, group: 64, out: h });
        p.push(Op::Linear { x: h, member: Member { w, bias: None, out: y } });
        p.outputs = if kept { vec![sum, y] } else { vec![y] };
        let options = options(levers, tokens);
        let p: Program = crate::gpu::lower::program(&p, &options, &scalar(), &|_| None).expect("it lowers");
        (p.launches.iter().map(|l| l.kernel.op).collect(), p.head)
    }

    #[test]
    fn a_step_of_one_row_adds_and_norms_in_one_launch_of_the_head() {
        assert_eq!(kernels(1, false, LeverSet::all()), (vec!["rms_norm", "quantize", "matvec"], 0));
    }

    #[test]
    fn more_rows_outputs_and_the_plain_plan_keep_the_gather() {
        let off = with(LeverSet::all(), "add_rms_norm", false);
        for (tokens, kept, levers) in [(2, false, LeverSet::all()), (1, true, LeverSet::all()), (1, false, off)] {
            assert_eq!(kernels(tokens, kept, levers).0[..2], ["elementwise", "copy_rows"]);
        }
    }
}
