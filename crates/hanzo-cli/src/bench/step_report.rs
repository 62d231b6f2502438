//! What the last step cost on a device: submissions, barriers, what the host did, and the kernels by time.

use std::collections::BTreeMap;
use std::io::{self, Write};

use hanzo_ml::backend::StepReport;
use hanzo_ml::plan::Plan;
use serde_json::{Value, json};

use crate::output::{Align, Table};

/// Kernels of a step summed by kernel and op kind: launches, seconds.
fn by_kernel(report: &StepReport, plan: &Plan) -> Vec<((String, String), (usize, f64))> {
    let mut sums: BTreeMap<(String, String), (usize, f64)> = BTreeMap::new();
    for k in &report.kernels {
        let op = plan.ops.get(k.op).map_or("?", |op| op.kind());
        let sum = sums.entry((k.kernel.clone(), op.to_string())).or_default();
        *sum = (sum.0 + 1, sum.1 + k.seconds);
    }
    let mut all: Vec<_> = sums.into_iter().collect();
    all.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
    all
}

/// A line on the step and a table of its kernels, the dearest first.
pub fn write(name: &str, report: &StepReport, plan: &Plan, out: &mut impl Write) -> io::Result<()> {
    let ms = |s: f64| format!("{:.3} ms", 1e3 * s);
    writeln!(
        out,
        "\nlast step of {name}: {} dispatches, {} barriers, {} submissions; record {}, submit {}, wait {}, GPU {}",
        report.dispatches,
        report.barriers,
        report.submissions,
        ms(report.record),
        ms(report.submit),
        ms(report.wait),
        report.gpu.map_or("not timed".into(), ms)
    )?;
    if report.kernels.is_empty() {
        return Ok(());
    }
    let columns = [
        ("kernel", Align::Left),
        ("op", Align::Left),
        ("launches", Align::Right),
        ("ms", Align::Right),
        ("us each", Align::Right),
        ("% of GPU", Align::Right),
    ];
    let mut table = Table::new(&columns);
    let whole = report.gpu.unwrap_or_else(|| report.kernels.iter().map(|k| k.seconds).sum()).max(1e-12);
    for ((kernel, op), (n, seconds)) in by_kernel(report, plan) {
        table.row(vec![
            kernel,
            op,
            n.to_string(),
            format!("{:.4}", 1e3 * seconds),
            format!("{:.2}", 1e6 * seconds / n as f64),
            format!("{:.1}", 100.0 * seconds / whole),
        ]);
    }
    table.write(out)
}

/// For programs.
pub fn as_json(report: &StepReport, plan: &Plan) -> Value {
    let kernel = |((kernel, op), (launches, seconds)): ((String, String), (usize, f64))| json!({"kernel": kernel, "op": op, "launches": launches, "seconds": seconds});
    json!({
        "dispatches": report.dispatches,
        "barriers": report.barriers,
        "submissions": report.submissions,
        "record_s": report.record,
        "submit_s": report.submit,
        "wait_s": report.wait,
        "gpu_s": report.gpu,
        "kernels": by_kernel(report, plan).into_iter().map(kernel).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use hanzo_ml::backend::KernelTime;
    use hanzo_ml::plan::{Dim, Op};

    #[test]
    fn launches_of_a_kernel_add_up_and_the_dearest_comes_first() {
        let mut plan = Plan::new(4);
        let (x, out) = (plan.value("x", Dim::Tokens, 4), plan.value("out", Dim::Tokens, 4));
        plan.push(Op::Copy { x, out });
        let time = |kernel: &str, seconds| KernelTime { op: 0, kernel: kernel.into(), groups: [1; 3], seconds };
        let kernels = vec![time("a", 1e-3), time("b", 4e-3), time("a", 1e-3)];
        let report = StepReport { dispatches: 3, barriers: 2, gpu: Some(8e-3), kernels, ..StepReport::default() };
        let mut text = Vec::new();
        write("tg1", &report, &plan, &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        let (a, b) = (text.find("\na ").unwrap(), text.find("\nb ").unwrap());
        assert!(b < a && text.contains("50.0") && text.contains("3 dispatches, 2 barriers"), "{text}");
        assert_eq!(as_json(&report, &plan)["kernels"][1]["launches"], 2);
    }
}
