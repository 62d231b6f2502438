//! Lowering of matrices of one format over one quantized row as one launch (lever `matvec_group`). Launches of one level wait for
//! nothing, but a device takes about a microsecond for each (H200, docs/log.md).

use super::linear::Source;
use super::matvec_norm::one_token;
use super::variants::{self, Ask, Input, Load, Task, constant};
use super::{Lowering, Q8};
use crate::error::Result;
use crate::gpu::launch::Ptr;
use crate::plan::{Dim, Member, ValueId};
use hanzo_kernels::args::MatvecGroup;

/// The most matrices of a launch.
const MOST: usize = 3;

/// Adds the launches of those members that share one with others; gives the members that are left.
pub(super) fn lower(cx: &mut Lowering<'_>, x: ValueId, members: &[Member]) -> Result<Vec<Member>> {
    let mut left = members.to_vec();
    let Source::Int8(q) = Source::of(cx, x) else { return Ok(left) };
    if !cx.options.levers.on("matvec_group") || !one_token(cx.options) || cx.plan.val(x).rows != Dim::Tokens {
        return Ok(left);
    }
    for first in members {
        let format = cx.plan.wt(first.w).format;
        let like = |m: &Member| m.bias.is_none() && cx.plan.wt(m.w).format == format;
        let same: Vec<Member> = left.iter().filter(|m| like(m)).take(MOST).copied().collect();
        if same.len() > 1 && together(cx, q, &same)? {
            left.retain(|m| !same.iter().any(|s| s.out == m.out));
        }
    }
    Ok(left)
}

/// The launch of two or three; false, and no launch, if a device has another kernel for them.
fn together(cx: &mut Lowering<'_>, q: Q8, members: &[Member]) -> Result<bool> {
    let [w, ..] = members.iter().map(|m| cx.plan.wt(m.w)).collect::<Vec<_>>()[..] else { return Ok(false) };
    let (format, units) = (w.format, (w.cols / 32) as u32);
    let each = [0, 1, 2].map(|i| members.get(i).map_or(0, |m| cx.plan.wt(m.w).rows as u32));
    let load = Load { tokens: 1, experts: None };
    let rows = each.iter().sum::<u32>() as usize;
    let ask = Ask {
        task: Task::Linear,
        input: Input::Int8,
        load,
        rows,
        format: Some(format),
        halves: false,
        deterministic: false,
    };
    let Some(v) = variants::pick(&ask, cx.features).filter(|v| v.kernel == "matvec") else { return Ok(false) };
    let threads = variants::threads(v.constants, cx.features);
    let (wave, split) = (cx.features.wave, constant(v, "SPLIT"));
    let mut in_flight = variants::units_in_flight(units as usize, wave * split);
    if cx.options.levers.on("matvec_split") {
        let shape = variants::waves_of_long_rows(format, (rows, units as usize), false, threads, wave);
        in_flight = shape.map_or(in_flight, |s| s.1);
    }
    let words = |p: Ptr| ((p.offset - q.q.offset) / 16) as u32;
    let get = |i: usize| members.get(i).unwrap_or(&members[0]);
    let [w0, w1, w2] = [cx.weight(get(0).w)?, cx.weight(get(1).w)?, cx.weight(get(2).w)?];
    let [y0, y1, y2] = [0, 1, 2].map(|i| members.get(i).map_or(Ptr::NONE, |m| cx.value(m.out)));
    let x = Ptr { len: q.s.offset + q.s.len - q.q.offset, ..q.q };
    let args = MatvecGroup { w0, w1, w2, x, y0, y1, y2 };
    let set = [
        ("THREADS", threads),
        ("ROWS", constant(v, "ROWS")),
        ("UNITS", in_flight),
        ("SPLIT", split),
        ("REPEAT", constant(v, "REPEAT")),
        ("MEMBERS", members.len() as u32),
        ("ROWS0", each[0]),
        ("ROWS1", each[1]),
        ("ROWS2", each[2]),
        ("XD", words(q.d)),
        ("XS", words(q.s)),
        ("COUNT", units),
    ];
    let span = threads / wave / split * constant(v, "ROWS") * constant(v, "REPEAT");
    cx.launch(Some(format), &args, &set, [each.iter().map(|r| r.div_ceil(span)).sum(), 1, 1])?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{options, scalar, with};
    use crate::gpu::Program;
    use crate::levers::LeverSet;
    use crate::plan::{DType, Dim, Member, Op, Plan};
    use hanzo_gguf::Format;

    /// q, k and v of these formats over `tokens` rows, q with a bias if `biased`.
    fn program(formats: [Format; 3], tokens: usize, biased: bool, on: bool) -> Program {
        let mut p = Plan::new(256);
        let x = p.input("x", Dim::Tokens, 256, DType::F32);
        let members = formats.iter().enumerate().map(|(i, format)| {
            let w = p.weight(&format!("w{i}"), *format, 1, 64, 256);
            let bias = (biased && i == 0).then(|| p.weight("bias", Format::F32, 1, 1, 64));
            Member { w, bias, out: p.value(format!("y{i}"), Dim::Tokens, 64) }
        });
        let members: Vec<Member> = members.collect();
        p.outputs = members.iter().map(|m| m.out).collect();
        p.push(Op::LinearGroup { x, members });
        let options = options(with(LeverSet::default(), "matvec_group", on), tokens);
        crate::gpu::lower::program(&p, &options, &scalar(), &|_| None).expect("it lowers")
    }

    fn kernels(p: &Program) -> Vec<&str> {
        p.launches.iter().map(|l| l.kernel.op).filter(|op| op.starts_with("matvec")).collect()
    }

    #[test]
    fn matrices_of_one_format_share_a_launch_and_others_have_their_own() {
        use Format::{Q4_K, Q6_K};
        assert_eq!(kernels(&program([Q4_K; 3], 1, false, true)), ["matvec_group"]);
        assert_eq!(kernels(&program([Q4_K, Q6_K, Q4_K], 1, false, true)), ["matvec_group", "matvec"]);
        assert_eq!(kernels(&program([Q4_K; 3], 1, true, true)), ["matvec_group", "matvec"]);
        assert_eq!(kernels(&program([Q4_K; 3], 1, false, false)), ["matvec"; 3]);
        assert_eq!(kernels(&program([Q4_K; 3], 2, false, true)), ["matvec"; 3]);
    }
}
