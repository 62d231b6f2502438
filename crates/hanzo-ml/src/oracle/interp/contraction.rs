//! Contractions: rows of activations times rows of weights, with activations as they are or quantized to int8 first.

use super::super::array::Array;
use super::super::case::Rounding;
use super::super::num::{Num, TINY, U};
use super::super::weights::Matrix;
use super::Interpreter;
use crate::backend::{Precision, Rounds};
use crate::plan::{DType, Dim, Member, ValueId, WeightId};
use hanzo_gguf::Format;

/// Elements that share an activation scale.
pub const ACTIVATION_BLOCK: usize = 32;

/// Roundings a contraction may spend on a term besides adding it up: the scale of a superblock times that of a group,
/// times the activation's scale, times the integer sum, the same for the minimum, the weight's own rounding in f32.
const PER_TERM: f64 = 12.0;

/// The int8 rule, exact in f32. Per 32: `d = max|x| / 127`, `inv = 127 / max|x|`, `code = round_ties_even(x inv)` within
/// ±127; no finite `inv` (a zero or tiny block) gives zeros. The value that counts is `code d`.
///
/// An activation that is known only to `e` may fall to a neighbouring code: the result is then known to `e + d`.
pub fn quantize_row(x: &[Num]) -> Vec<Num> {
    x.chunks(ACTIVATION_BLOCK).flat_map(quantize_block).collect()
}

fn quantize_block(x: &[Num]) -> Vec<Num> {
    let top = x.iter().fold(0.0f32, |m, x| m.max((x.v as f32).abs()));
    let (d, inv) = (top / 127.0, 127.0 / top);
    let uncertain = x.iter().any(|x| x.e > 0.0);
    let e_top = x.iter().fold(0.0, |m: f64, x| m.max(x.e));
    x.iter()
        .map(|x| {
            let code = if inv.is_finite() { (x.v as f32 * inv).round_ties_even().clamp(-127.0, 127.0) } else { 0.0 };
            let e = if uncertain { x.e + f64::from(d) + e_top / 127.0 } else { 0.0 };
            Num { v: f64::from(code) * f64::from(d), e }
        })
        .collect()
}

/// The unit roundoff of bf16: eight bits.
const BF16_U: f64 = 1.0 / 256.0;

/// The bf16 rule, exact: the nearest bf16, ties to even; subnormal floats are zero.
///
/// An activation that is known only to `e` may be rounded the other way: both roundings count once more.
fn round_to_bf16(x: Num) -> Num {
    let f = x.v as f32;
    let v = if f.is_subnormal() { 0.0 } else { half::bf16::from_f32(f).to_f64() };
    let e = if x.e > 0.0 { x.e + 2.0 * BF16_U * (x.v.abs() + x.e) + TINY } else { 0.0 };
    Num { v, e }
}

/// The same where it may or may not happen.
fn perhaps_rounded_to_bf16(x: Num) -> Num {
    Num { v: x.v, e: x.e + BF16_U * (x.v.abs() + x.e) + TINY }
}

/// Each row quantized.
pub(super) fn quantize(x: &Array) -> Array {
    Array::map_rows(x, x.cols, |_, row| quantize_row(row))
}

/// `sum_i x_i w_i`, whatever the order and grouping of the f32 additions.
///
/// With `|s c| + |m|` for the amplitude of a weight, the bound is
/// `sum |w| e_x + (n + PER_TERM) u sum amplitude |x|`: a product passes at most n - 1 additions. An int8 kernel sums
/// groups of at least 16 exactly in integers, two sums (codes, and activations for the minimum) a group: n = k / 8.
///
/// A matrix unit (`staging` > 0) reads both factors rounded once more: `2 staging sum |w x|`. Its sums are of single products,
/// and each addition may lose a unit in the last place instead of half of one: 2 n roundings. Factors are scaled so that
/// the largest of a row is at least 2^14: what is rounded as a subnormal half is off by 2^-39 of it at most.
///
/// A device that `flushes` may read a subnormal scale as zero: all that such weights bring is lost. So it is with bf16 by bf16
/// (`bf16`; the activations are rounded already), where weights count themselves, and products and sums that are subnormal
/// are lost as well: TINY each. Its products are exact, and a pair of them may be added by truncation: 2 n roundings.
fn dot(x: &[Num], w: &[f64], amplitude: Option<&[f64]>, integers: bool, rounding: Rounding) -> Num {
    let Rounding { staging, flushes, bf16 } = rounding;
    let bf16 = bf16 != Rounds::Never;
    let terms = x.len() as f64;
    let additions = match integers {
        _ if staging > 0.0 || bf16 => 2.0 * terms,
        true => (x.len() / 8) as f64,
        false => terms,
    };
    let (mut v, mut e, mut size) = (0.0, 0.0, 0.0);
    let (mut products, mut tops) = (0.0, (0.0f64, 0.0f64));
    let mut lost = 0.0;
    // Codes have 7 bits: no smaller weight has a normal scale.
    let tiny = match (flushes, bf16) {
        (true, _) => 127.0 * f64::from(f32::MIN_POSITIVE),
        (false, true) => f64::from(f32::MIN_POSITIVE),
        (false, false) => 0.0,
    };
    if bf16 {
        lost += terms * TINY;
    }
    for (i, (x, w)) in x.iter().zip(w).enumerate() {
        v += x.v * w;
        e += x.e * w.abs();
        size += x.magnitude() * amplitude.map_or(w.abs(), |a| a[i]);
        products += x.magnitude() * w.abs();
        lost += if w.abs() < tiny { x.magnitude() * w.abs() } else { 0.0 };
        tops = (tops.0.max(x.magnitude()), tops.1.max(w.abs()));
    }
    if staging > 0.0 {
        e += (2.0 + staging) * staging * products + 2.0 * terms * tops.0 * tops.1 * (-39f64).exp2();
    }
    Num { v, e: e + lost + (additions + PER_TERM) * U * size + additions * TINY }
}

/// The int8 rule in two terms, for rows that go straight into the logits: what the first term leaves over, in f32, is
/// quantized again.
fn quantize_twice(x: &Array) -> [Array; 2] {
    let first = quantize(x);
    let rest = x.zip(&first, |x, q| {
        let left = x.v as f32 - q.v as f32;
        Num { v: f64::from(left), e: x.e + q.e }
    });
    let second = quantize(&rest);
    [first, second]
}

/// What a contraction multiplies its weights by.
struct Activations {
    /// The terms whose products are summed: one, or two in the output head.
    terms: Vec<Array>,
    /// Integers with a scale per block.
    integers: bool,
    /// Of the kernel that multiplies.
    rounding: Rounding,
}

impl Activations {
    /// Row `r` times every row of an expert's matrix, plus its bias.
    fn times(&self, r: usize, w: &Matrix, expert: usize, bias: Option<&[Num]>) -> Vec<Num> {
        let one = |row: usize| {
            let product =
                |x: &Array| dot(x.row(r), w.row(expert, row), w.amplitude(expert, row), self.integers, self.rounding);
            let y = self.terms.iter().map(product).reduce(|a, b| a + b).unwrap_or_default();
            bias.map_or(y, |b| y + b[expert * w.rows + row])
        };
        (0..w.rows).map(one).collect()
    }
}

impl Interpreter<'_> {
    /// The activations a matrix of this weight meets: as they are, or for block formats under [`Precision::Int8`]
    /// quantized; output rows in two terms.
    fn activations(&self, x: ValueId, w: WeightId) -> Activations {
        let value = self.plan.val(x);
        let format = self.weights.get(w).format;
        let block = format.is_block();
        let plain = self.value(x);
        let rounding = Rounding { bf16: Rounds::Never, ..self.rounding };
        let exact = Rounding { staging: 0.0, ..rounding };
        // The head's errors go straight into the logits: it is not rounded.
        let bf16 = match format == Format::BF16 && value.rows != Dim::Out {
            true => self.rounding.bf16,
            false => Rounds::Never,
        };
        match self.precision {
            _ if value.dtype == DType::Q8 => Activations { terms: vec![plain.clone()], integers: true, rounding },
            // Too few rows for a matrix unit.
            Precision::Int8 if block && value.rows == Dim::Out => {
                Activations { terms: quantize_twice(plain).into(), integers: true, rounding: exact }
            }
            Precision::Int8 if block => Activations { terms: vec![quantize(plain)], integers: true, rounding },
            Precision::Int8 if bf16 != Rounds::Never => {
                let round = if bf16 == Rounds::Always { round_to_bf16 } else { perhaps_rounded_to_bf16 };
                let rounding = Rounding { bf16, ..rounding };
                Activations { terms: vec![plain.map(round)], integers: false, rounding }
            }
            Precision::Int8 => Activations { terms: vec![plain.clone()], integers: false, rounding },
            Precision::Exact => Activations { terms: vec![plain.clone()], integers: false, rounding: exact },
        }
    }

    /// `x w^T + bias`.
    pub(super) fn linear(&mut self, x: ValueId, m: &Member) {
        let activations = self.activations(x, m.w);
        let w = self.weights.get(m.w);
        let bias = self.opt_vector(m.bias);
        let y = Array::map_rows(self.value(x), w.rows, |r, _| activations.times(r, w, 0, bias.as_deref()));
        self.set(m.out, y);
    }

    /// For each slot of each token, the linear of the expert it was routed to; `x` has one row a token or one a slot.
    pub(super) fn moe_linear(&mut self, x: ValueId, ids: ValueId, m: &Member) {
        let activations = self.activations(x, m.w);
        let w = self.weights.get(m.w);
        let bias = self.opt_vector(m.bias);
        let ids = self.value(ids);
        let per_token = ids.cols;
        let rows_per_token = self.value(x).rows() / ids.rows().max(1);
        let mut data = Vec::with_capacity(ids.data.len() * w.rows);
        for (slot, id) in ids.data.iter().enumerate() {
            let row = if rows_per_token == per_token { slot } else { slot / per_token };
            data.extend(activations.times(row, w, id.v as usize, bias.as_deref()));
        }
        self.set(m.out, Array { cols: self.plan.val(m.out).cols, data });
    }
}
