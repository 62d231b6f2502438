//! Qwen 3 (dense): q and k are normed head by head before a NeoX rope; no biases.

use super::Builder;
use crate::error::Result;
use hanzo_ml::plan::{Activation, RopeConvention};

pub(super) fn build(b: &mut Builder<'_>) -> Result<()> {
    let h = b.hyper()?;
    let rope = b.rope_spec(RopeConvention::Neox, h.d_k)?;
    let kv = b.cache_group("kv", h.n_layer, &h, None);

    let mut x = b.embed(1.0);
    for layer in 0..h.n_layer {
        b.enter_layer(layer);

        // attention
        let n = b.rms_norm(x, "attn_norm");
        let q = b.linear(n, "attn_q", h.n_head * h.d_k);
        let k = b.linear(n, "attn_k", h.n_kv * h.d_k);
        let v = b.linear(n, "attn_v", h.n_kv * h.d_v);
        let q = b.rms_norm_heads(q, "attn_q_norm", h.d_k);
        let k = b.rms_norm_heads(k, "attn_k_norm", h.d_k);
        let q = b.rope(q, h.d_k, &rope);
        let k = b.rope(k, h.d_k, &rope);
        let spec = b.attention_spec(&h, kv, layer);
        let a = b.attention(q, k, v, spec);
        let a = b.linear(a, "attn_output", h.n_embd);
        x = b.add(x, a);

        // feed-forward
        let n = b.rms_norm(x, "ffn_norm");
        let gate = b.linear(n, "ffn_gate", h.n_ff);
        let up = b.linear(n, "ffn_up", h.n_ff);
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
