//! Gemma 3 (text): scaled embeddings, norms before and after each block, GeGLU, q/k norms, and five layers of
//! sliding-window attention for each global one, each kind with its own rope and its own cache group.

use super::Builder;
use crate::error::Result;
use hanzo_ml::plan::{Activation, AttentionSpec, RopeConvention, RopeSpec};

/// Layers of the 27b model, the only one that does not scale scores by its head size.
const LAYERS_27B: usize = 62;

pub(super) fn build(b: &mut Builder<'_>) -> Result<()> {
    let h = b.hyper()?;
    let window = b.size("attention.sliding_window")? as u32;
    let global = b.layers_every("attention.sliding_window_pattern", 6, h.n_layer)?;
    let n_global = global.iter().filter(|g| **g).count();
    // Linear scaling, where a model has it, is for the global layers alone.
    let rope = b.rope_spec(RopeConvention::Neox, h.d_k)?;
    let base = b.opt_f32("rope.freq_base_swa")?.unwrap_or(10_000.0);
    let local_rope = RopeSpec { base, scale: 1.0, yarn: None, ..rope.clone() };
    // query_pre_attn_scalar: the head size, but n_embd / n_head for 27b.
    let scalar = if h.n_layer == LAYERS_27B { h.n_embd as f32 / h.n_head as f32 } else { h.d_k as f32 };
    let scale = b.opt_f32("attention.scale")?.unwrap_or(1.0 / scalar.sqrt());
    let softcap = b.opt_f32("attn_logit_softcapping")?;
    let final_softcap = b.opt_f32("final_logit_softcapping")?;
    let local_kv = b.cache_group("window", h.n_layer - n_global, &h, Some(window));
    let global_kv = b.cache_group("global", n_global, &h, None);
    let mut next = [0; 2];

    let mut x = b.embed((h.n_embd as f32).sqrt());
    for (layer, is_global) in global.into_iter().enumerate() {
        b.enter_layer(layer);
        let (kv, rope) = if is_global { (global_kv, &rope) } else { (local_kv, &local_rope) };
        let index = &mut next[is_global as usize];

        // attention
        let n = b.rms_norm(x, "attn_norm");
        let q = b.linear(n, "attn_q", h.n_head * h.d_k);
        let k = b.linear(n, "attn_k", h.n_kv * h.d_k);
        let v = b.linear(n, "attn_v", h.n_kv * h.d_v);
        let q = b.rms_norm_heads(q, "attn_q_norm", h.d_k);
        let k = b.rms_norm_heads(k, "attn_k_norm", h.d_k);
        let q = b.rope(q, h.d_k, rope);
        let k = b.rope(k, h.d_k, rope);
        let spec = AttentionSpec { scale, softcap, ..b.attention_spec(&h, kv, *index) };
        let a = b.attention(q, k, v, spec);
        let a = b.linear(a, "attn_output", h.n_embd);
        let a = b.rms_norm(a, "post_attention_norm");
        x = b.add(x, a);
        *index += 1;

        // feed-forward
        let n = b.rms_norm(x, "ffn_norm");
        let gate = b.linear(n, "ffn_gate", h.n_ff);
        let up = b.linear(n, "ffn_up", h.n_ff);
        let f = b.glu(gate, up, Activation::GeluTanh);
        let f = b.linear(f, "ffn_down", h.n_embd);
        let f = b.rms_norm(f, "post_ffw_norm");
        x = b.add(x, f);
    }

    let x = b.enter_head(x);
    let x = b.rms_norm(x, "output_norm");
    let logits = b.lm_head(x);
    let logits = b.softcap(logits, final_softcap);
    b.output(logits);
    Ok(())
}
