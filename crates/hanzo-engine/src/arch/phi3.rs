//! Phi 3, 3.5 and 4: a llama whose q, k, v are one tensor and gate, up another, read here as row ranges; NeoX rope on a
//! part of the head, stretched by longrope; a sliding window where the model has one.

use super::Builder;
use crate::error::Result;
use hanzo_ml::plan::{Activation, RopeConvention};

pub(super) fn build(b: &mut Builder<'_>) -> Result<()> {
    let h = b.hyper()?;
    let rope = b.rope_spec(RopeConvention::Neox, h.d_k)?;
    // A window as long as the context (or zero) is none.
    let window = b.opt_u32("attention.sliding_window")?;
    let window = window.filter(|w| *w > 0 && h.n_ctx_train.is_none_or(|n| (*w as usize) < n));
    let kv = b.cache_group("kv", h.n_layer, &h, window);
    let (n_q, n_k, n_v) = (h.n_head * h.d_k, h.n_kv * h.d_k, h.n_kv * h.d_v);
    let n_qkv = n_q + n_k + n_v;

    let mut x = b.embed(1.0);
    for layer in 0..h.n_layer {
        b.enter_layer(layer);

        // attention
        let n = b.rms_norm(x, "attn_norm");
        let q = b.linear_rows(n, "attn_qkv", n_qkv, 0, n_q);
        let k = b.linear_rows(n, "attn_qkv", n_qkv, n_q, n_k);
        let v = b.linear_rows(n, "attn_qkv", n_qkv, n_q + n_k, n_v);
        let q = b.rope(q, h.d_k, &rope);
        let k = b.rope(k, h.d_k, &rope);
        let spec = b.attention_spec(&h, kv, layer);
        let a = b.attention(q, k, v, spec);
        let a = b.linear(a, "attn_output", h.n_embd);
        x = b.add(x, a);

        // feed-forward
        let n = b.rms_norm(x, "ffn_norm");
        let gate = b.linear_rows(n, "ffn_up", 2 * h.n_ff, 0, h.n_ff);
        let up = b.linear_rows(n, "ffn_up", 2 * h.n_ff, h.n_ff, h.n_ff);
        let f = b.glu(gate, up, Activation::Silu);
        let f = b.linear(f, "ffn_down", h.n_embd);
        x = b.add(x, f);
    }

    let x = b.enter_head(x);
    let x = b.rms_norm(x, "output_norm");
    let logits = b.lm_head(x);
    b.output(logits);
    Ok(())
}
