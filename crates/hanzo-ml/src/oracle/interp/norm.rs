//! Norms.

use super::super::array::Array;
use super::super::num::Num;

/// `x / sqrt(mean(x^2) + eps) * weight` over each run of `group` columns.
pub(super) fn rms_norm(x: &Array, weight: Option<&[Num]>, eps: f32, group: usize) -> Array {
    Array::map_rows(x, x.cols, |_, row| row.chunks(group).flat_map(|g| rms_norm_group(g, weight, eps)).collect())
}

fn rms_norm_group(x: &[Num], weight: Option<&[Num]>, eps: f32) -> Vec<Num> {
    let mean = Num::sum(x.iter().map(|x| *x * *x)) / Num::exact(x.len() as f64);
    let root = (mean + Num::from(eps)).sqrt();
    let scale = Num::ONE / root;
    x.iter().enumerate().map(|(i, x)| *x * scale * weight.map_or(Num::ONE, |w| w[i])).collect()
}

/// `(x - mean) / sqrt(var + eps) * weight + bias` over a row.
pub(super) fn layer_norm(x: &Array, weight: &[Num], bias: Option<&[Num]>, eps: f32) -> Array {
    Array::map_rows(x, x.cols, |_, row| {
        let n = Num::exact(row.len() as f64);
        let mean = Num::sum(row.iter().copied()) / n;
        let centred: Vec<Num> = row.iter().map(|x| *x - mean).collect();
        let var = Num::sum(centred.iter().map(|c| *c * *c)) / n;
        let scale = Num::ONE / (var + Num::from(eps)).sqrt();
        let scaled = centred.iter().enumerate().map(|(i, c)| *c * scale * weight[i]);
        scaled.enumerate().map(|(i, y)| bias.map_or(y, |b| y + b[i])).collect()
    })
}
