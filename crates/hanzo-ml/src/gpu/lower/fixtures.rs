//! What this folder's tests lower with, so that each says only what it is about. No assertion may enter here.

use crate::backend::{CompileOptions, Precision};
use crate::gpu::features::{Features, MatrixUnits};
use crate::levers::{LeverSet, find};
use crate::plan::Sizes;

/// Int8, a bucket of `tokens` tokens of one sequence and one output row.
pub fn options(levers: LeverSet, tokens: usize) -> CompileOptions {
    CompileOptions {
        levers,
        bucket: Sizes { n_tokens: tokens, n_seqs: 1, n_out: 1 },
        precision: Precision::Int8,
        deterministic: false,
        n_ctx: 1024,
        eager: None,
    }
}

/// A set with one lever switched.
pub fn with(levers: LeverSet, lever: &str, on: bool) -> LeverSet {
    levers.set(find(lever).expect("a lever"), on)
}

/// A device of waves of 32 without matrix units.
pub fn scalar() -> Features {
    Features { matrix: MatrixUnits::NONE, shared_bytes: 48 << 10, ..Features::cuda(90) }
}
