//! Routing of a mixture of experts.

use super::super::array::Array;
use super::super::num::Num;
use crate::plan::{RouteSpec, RouterScore};

/// Softmax of a row.
fn softmax(x: &[Num]) -> Vec<Num> {
    let top = x.iter().fold(f64::NEG_INFINITY, |m, x| m.max(x.v));
    let e: Vec<Num> = x.iter().map(|x| (*x - Num::exact(top)).exp()).collect();
    let total = Num::sum(e.iter().copied());
    e.into_iter().map(|e| e / total).collect()
}

/// Scores of all experts.
pub(super) fn scores(logits: &Array, spec: &RouteSpec) -> Array {
    match spec.score {
        RouterScore::Softmax => Array::map_rows(logits, logits.cols, |_, row| softmax(row)),
        RouterScore::Sigmoid => logits.map(Num::sigmoid),
        RouterScore::SoftmaxSelected => logits.clone(),
    }
}

/// Indices of the `n` largest, best first, the lowest index first among equals.
fn largest(x: &[f64], n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..x.len()).collect();
    // A stable sort keeps equals in index order.
    order.sort_by(|a, b| x[*b].total_cmp(&x[*a]));
    order.truncate(n);
    order
}

/// The experts of each row and their raw scores. Selection is on score plus bias, within the kept groups.
pub(super) fn top_k(scores: &Array, bias: Option<&[Num]>, spec: &RouteSpec) -> (Array, Array) {
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for r in 0..scores.rows() {
        let row = scores.row(r);
        let mut choice: Vec<f64> =
            row.iter().enumerate().map(|(i, s)| bias.map_or(s.v, |b| f64::from((s.v + b[i].v) as f32))).collect();
        if let Some((n_groups, kept)) = spec.groups {
            let size = spec.n_expert / n_groups;
            let strength = |g: &[f64]| largest(g, 2).into_iter().map(|i| g[i]).sum::<f64>();
            let groups: Vec<f64> = choice.chunks(size).map(strength).collect();
            let kept = largest(&groups, kept);
            for (i, c) in choice.iter_mut().enumerate() {
                if !kept.contains(&(i / size)) {
                    *c = f64::NEG_INFINITY;
                }
            }
        }
        for i in largest(&choice, spec.top_k) {
            ids.push(Num::exact(i as f64));
            weights.push(row[i]);
        }
    }
    (Array { cols: spec.top_k, data: ids }, Array { cols: spec.top_k, data: weights })
}

/// The weights of the selected experts: softmax over them if the scores were raw, divided by their sum, scaled.
pub(super) fn normalise(raw: &Array, spec: &RouteSpec) -> Array {
    Array::map_rows(raw, raw.cols, |_, row| {
        let mut w = if spec.score == RouterScore::SoftmaxSelected { softmax(row) } else { row.to_vec() };
        if spec.normalise {
            let total = Num::sum(w.iter().copied());
            w.iter_mut().for_each(|w| *w = *w / total);
        }
        w.into_iter().map(|w| w * Num::from(spec.scale)).collect()
    })
}

/// `out[t] = sum over slots of weights[t, slot] * x[t, slot]`.
pub(super) fn combine(x: &Array, weights: &Array) -> Array {
    let k = weights.cols;
    Array::map_rows(weights, x.cols, |t, w| {
        (0..x.cols).map(|c| Num::sum(w.iter().enumerate().map(|(s, w)| *w * x.row(t * k + s)[c]))).collect()
    })
}
