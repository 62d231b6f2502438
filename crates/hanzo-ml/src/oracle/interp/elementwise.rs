//! Functions of single elements.

use super::super::array::Array;
use super::super::num::Num;
use crate::plan::{Activation, GluKind};

/// An activation function.
pub(super) fn activate(kind: Activation, x: Num) -> Num {
    let half = Num::exact(0.5);
    match kind {
        Activation::Silu => x * x.sigmoid(),
        Activation::GeluTanh => {
            let c = Num::rounded((2.0 / std::f64::consts::PI).sqrt());
            let z = c * (x + Num::rounded(0.044_715) * x * x * x);
            half * x * (Num::ONE + z.tanh())
        }
        Activation::GeluErf => half * x * (Num::ONE + (x * Num::rounded(std::f64::consts::FRAC_1_SQRT_2)).erf()),
        Activation::Relu2 => {
            let y = x.max(Num::ZERO);
            y * y
        }
        Activation::Sigmoid => x.sigmoid(),
        Activation::Softplus => x.softplus(),
    }
}

/// A gate and an up projection.
pub(super) fn glu(kind: GluKind, gate: Num, up: Num) -> Num {
    match kind {
        GluKind::Plain(act) => activate(act, gate) * up,
        GluKind::SwigluClamped { alpha, limit } => {
            let limit = Num::from(limit);
            let gate = gate.min(limit);
            let up = up.min(limit).max(-limit);
            (up + Num::ONE) * gate * (Num::from(alpha) * gate).sigmoid()
        }
    }
}

/// `cap * tanh(x / cap)`.
pub(super) fn softcap(x: Num, cap: f32) -> Num {
    let cap = Num::from(cap);
    cap * (x / cap).tanh()
}

/// `a * b`, a one-column `b` broadcast.
pub(super) fn multiply(a: &Array, b: &Array) -> Array {
    Array::map_rows(a, a.cols, |r, row| {
        let b = b.row(r);
        row.iter().enumerate().map(|(i, x)| *x * b[i.min(b.len() - 1)]).collect()
    })
}
