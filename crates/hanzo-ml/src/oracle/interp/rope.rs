//! Rotary position embeddings.

use super::super::array::Array;
use super::super::num::Num;
use super::Interpreter;
use crate::batch::Batch;
use crate::plan::{RopeConvention, RopeSpec, Yarn};

impl Interpreter<'_> {
    /// Rotates each head of each row by its token's position.
    pub(super) fn rope(&self, x: &Array, head_dim: usize, rope: &RopeSpec, batch: &Batch<'_>) -> Array {
        let factors = rope.factors.map(|w| &self.weights.get(w).values[..]);
        Array::map_rows(x, x.cols, |t, row| {
            let turns = turns(rope, factors, batch, t);
            row.chunks(head_dim).flat_map(|head| rotate(head, rope, &turns)).collect()
        })
    }
}

/// Pair `i` of a head turns by the `i`-th (cos, sin); what does not rotate passes through.
fn rotate(head: &[Num], rope: &RopeSpec, turns: &[(Num, Num)]) -> Vec<Num> {
    let mut out = head.to_vec();
    for (i, (cos, sin)) in turns.iter().enumerate() {
        let (a, b) = match rope.convention {
            RopeConvention::Neox => (i, i + rope.n_dims / 2),
            RopeConvention::Interleaved => (2 * i, 2 * i + 1),
        };
        out[a] = Num::sum([head[a] * *cos, -(head[b] * *sin)]);
        out[b] = Num::sum([head[a] * *sin, head[b] * *cos]);
    }
    out
}

/// The cosine and sine of each pair at token `t`, times the magnitude. Backends are expected to form angles in f64, so
/// that the cosine is off by its own rounding and nothing grows with the position.
fn turns(rope: &RopeSpec, factors: Option<&[f64]>, batch: &Batch<'_>, t: usize) -> Vec<(Num, Num)> {
    let magnitude = f64::from(rope.magnitude) * rope.yarn.map_or(1.0, |y| yarn_magnitude(&y, rope.scale));
    (0..rope.n_dims / 2)
        .map(|i| {
            let position = f64::from(position(rope, batch, t, i));
            let free = position * f64::from(rope.base).powf(-2.0 * i as f64 / rope.n_dims as f64);
            let free = free / factors.map_or(1.0, |f| f[i]);
            let interpolated = free * f64::from(rope.scale);
            let kept = rope.yarn.map_or(0.0, |y| yarn_kept(&y, rope, i));
            let angle = interpolated * (1.0 - kept) + free * kept;
            // Two roundings: the cosine and its product with the magnitude.
            let num = |v: f64| Num::rounded(v * magnitude).widened(super::super::num::U * magnitude.abs());
            (num(angle.cos()), num(angle.sin()))
        })
        .collect()
}

/// The position that pair `i` turns by: with sections, pair `i mod sum` falls to the axis whose section it is in.
fn position(rope: &RopeSpec, batch: &Batch<'_>, t: usize, i: usize) -> u32 {
    if batch.rope_positions.is_empty() {
        return batch.positions[t];
    }
    let n = batch.positions.len();
    let axes = batch.rope_positions.len() / n;
    let axis = rope.sections.map_or(0, |s| {
        let place = i as u32 % s.iter().sum::<u32>().max(1);
        let ends = s.iter().scan(0, |end, len| {
            *end += len;
            Some(*end)
        });
        ends.take_while(|end| place >= *end).count()
    });
    batch.rope_positions[if axis < axes { axis } else { 0 } * n + t]
}

/// How much of pair `i`'s own frequency YaRN keeps: all of it below the pair that makes `beta_fast` rotations within the
/// original context, none above that of `beta_slow`, a ramp between (arXiv 2309.00071, section 3.2).
fn yarn_kept(yarn: &Yarn, rope: &RopeSpec, i: usize) -> f64 {
    let n = rope.n_dims as f64;
    let pair = |rotations: f32| {
        let wavelength = f64::from(yarn.original_context) / (f64::from(rotations) * 2.0 * std::f64::consts::PI);
        n * wavelength.ln() / (2.0 * f64::from(rope.base).ln())
    };
    let low = pair(yarn.beta_fast).floor().max(0.0);
    let high = pair(yarn.beta_slow).ceil().min(n - 1.0);
    let ramp = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
    f64::from(yarn.ext_factor) * (1.0 - ramp)
}

/// YaRN's factor on the rotated values: `attn_factor (1 + 0.1 ln(1 / scale))`, the logarithm only where it extrapolates.
fn yarn_magnitude(yarn: &Yarn, scale: f32) -> f64 {
    let growth = if yarn.ext_factor == 0.0 { 0.0 } else { -0.1 * f64::from(scale).ln() };
    f64::from(yarn.attn_factor) * (1.0 + growth)
}
