//! Lowering of ops with a carried state. A workgroup owns what it changes of a sequence's state: columns of a convolution,
//! columns of a head of the gated delta rule. Sequences that the step does not have are empty and touch nothing.

use super::Lowering;
use super::rows::{activation, threads};
use crate::error::Result;
use crate::gpu::launch::Ptr;
use crate::plan::Op;
use hanzo_kernels::args::{GatedDelta, ShortConv};

/// Rows of a state's column that a thread holds.
const ROWS: usize = 32;

/// Adds the op's launches; false if the op is not one of this file's.
pub(super) fn lower(cx: &mut Lowering<'_>, op: &Op) -> Result<bool> {
    match op {
        Op::ShortConv { x, weight, bias, kernel, activation: act, state, layer, out } => {
            let cols = cx.cols(*x);
            let args = ShortConv {
                x: cx.value(*x),
                weight: cx.vector(*weight),
                bias: cx.optional_vector(*bias),
                slots: cx.step.state_slots(state.0 as usize),
                offsets: cx.step.seq_offsets(),
                // One tap looks back at nothing.
                state: if *kernel > 1 { cx.state(*state, *layer) } else { Ptr::NONE },
                y: cx.value(*out),
                cols: cols as u32,
                weight_stride: *kernel as u32,
                slot_stride: ((kernel - 1) * cols) as u32,
            };
            let bucket = &cx.options.bucket;
            let n_seqs = bucket.n_seqs.max(1);
            let columns = threads(cx.features, cols, 64);
            // Where a sequence may have many tokens, rows of threads share them out.
            let lanes = (bucket.n_tokens / n_seqs).next_power_of_two().min((256 / columns).max(1) as usize) as u32;
            let set = [
                ("THREADS", (columns * lanes).min(cx.features.max_threads).max(columns)),
                ("COLS", columns),
                ("TAPS", *kernel as u32),
                ("ACT", act.map_or(16, activation)),
                ("BIASED", bias.is_some().into()),
            ];
            cx.launch(None, &args, &set, [cols.div_ceil(columns as usize) as u32, n_seqs as u32, 1])?;
        }
        Op::GatedDelta { q, k, v, decay, beta, n_head, n_key_head, d_k, d_v, eps, state, layer, out } => {
            let args = GatedDelta {
                q: cx.value(*q),
                k: cx.value(*k),
                v: cx.value(*v),
                decay: cx.value(*decay),
                beta: cx.value(*beta),
                slots: cx.step.state_slots(state.0 as usize),
                offsets: cx.step.seq_offsets(),
                state: cx.state(*state, *layer),
                y: cx.value(*out),
                heads: *n_head as u32,
                shared_by: (n_head / n_key_head) as u32,
                d_k: *d_k as u32,
                d_v: *d_v as u32,
                slot_stride: (n_head * d_k * d_v) as u32,
                eps: *eps,
            };
            let split = d_k.div_ceil(ROWS).next_power_of_two();
            let threads = threads(cx.features, split.max(64), 1024);
            let columns = threads as usize / split;
            let groups = [d_v.div_ceil(columns) as u32, *n_head as u32, cx.options.bucket.n_seqs.max(1) as u32];
            cx.launch(None, &args, &[("THREADS", threads), ("SPLIT", split as u32)], groups)?;
        }
        _ => return Ok(false),
    }
    Ok(true)
}
