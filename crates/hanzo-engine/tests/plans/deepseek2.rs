//! deepseek2 (V3): multi-head latent attention with absorbed projections, a dense first layer, then routed experts with
//! sigmoid scores, a selection bias and expert groups, plus a shared expert.
//!
//! The cache holds one row a token, `[latent | rotated]`: one key head whose first `LATENT` elements are also the value.
//! The up-projection of keys is absorbed into the query (`q_nope W_k` per head) and that of values into the output, each
//! head a row range of one tensor. Without a reshape between `[T, heads * d]` and `[T * heads, d]` that takes a few ops a
//! head; an op for a per-head linear would be a fusion of these, not a new meaning.

use super::*;
use hanzo_engine::Result;
use hanzo_engine::arch::Experts;
use hanzo_ml::plan::{Activation, AttentionSpec, CacheSlot, GluKind, Mask, RopeConvention, RouteSpec, RouterScore};

const LAYERS: usize = 3;
const DENSE: usize = 1;
const EMBD: usize = 256;
const HEADS: usize = 4;
const Q_LORA: usize = 192;
const LATENT: usize = 512;
const ROPE: usize = 64;
const NOPE: usize = 128;
const D_V: usize = 128;
const FF: usize = 320;
const EXPERT_FF: usize = 96;
const EXPERTS: usize = 16;
const USED: usize = 4;

fn table() -> Table {
    let mut t = Table::new();
    t.add("token_embd.weight", &[EMBD, 512]);
    t.add("output_norm.weight", &[EMBD]);
    t.add("output.weight", &[EMBD, 512]);
    for l in 0..LAYERS {
        let mut add = |name: &str, dims: &[usize]| t.add(format!("blk.{l}.{name}"), dims);
        add("attn_norm.weight", &[EMBD]);
        add("attn_q_a.weight", &[EMBD, Q_LORA]);
        add("attn_q_a_norm.weight", &[Q_LORA]);
        add("attn_q_b.weight", &[Q_LORA, HEADS * (NOPE + ROPE)]);
        add("attn_kv_a_mqa.weight", &[EMBD, LATENT + ROPE]);
        add("attn_kv_a_norm.weight", &[LATENT]);
        add("attn_k_b.weight", &[NOPE, LATENT, HEADS]);
        add("attn_v_b.weight", &[LATENT, D_V, HEADS]);
        add("attn_output.weight", &[HEADS * D_V, EMBD]);
        add("ffn_norm.weight", &[EMBD]);
        if l < DENSE {
            add("ffn_gate.weight", &[EMBD, FF]);
            add("ffn_up.weight", &[EMBD, FF]);
            add("ffn_down.weight", &[FF, EMBD]);
        } else {
            add("ffn_gate_inp.weight", &[EMBD, EXPERTS]);
            add("exp_probs_b.bias", &[EXPERTS]);
            add("ffn_gate_exps.weight", &[EMBD, EXPERT_FF, EXPERTS]);
            add("ffn_up_exps.weight", &[EMBD, EXPERT_FF, EXPERTS]);
            add("ffn_down_exps.weight", &[EXPERT_FF, EMBD, EXPERTS]);
            add("ffn_gate_shexp.weight", &[EMBD, EXPERT_FF]);
            add("ffn_up_shexp.weight", &[EMBD, EXPERT_FF]);
            add("ffn_down_shexp.weight", &[EXPERT_FF, EMBD]);
        }
    }
    t
}

/// A dense SwiGLU whose tensors end in `suffix`.
fn swiglu(b: &mut Builder<'_>, x: ValueId, suffix: &str, n_ff: usize) -> ValueId {
    let gate = b.linear(x, &format!("ffn_gate{suffix}"), n_ff);
    let up = b.linear(x, &format!("ffn_up{suffix}"), n_ff);
    let f = b.glu(gate, up, Activation::Silu);
    let n_embd = b.cols(x);
    b.linear(f, &format!("ffn_down{suffix}"), n_embd)
}

fn build(b: &mut Builder<'_>) -> Result<()> {
    let h = b.hyper()?;
    let q_lora = b.size("attention.q_lora_rank")?;
    let latent = b.size("attention.kv_lora_rank")?;
    let rope = b.rope_spec(RopeConvention::Interleaved, ROPE)?;
    let (pe, nope, d_v) =
        (rope.n_dims, b.size("attention.key_length_mla")? - rope.n_dims, b.size("attention.value_length_mla")?);
    // The temperature that YaRN training used enters the scores twice.
    let mscale = 0.1 * b.opt_f32("rope.scaling.yarn_log_multiplier")?.unwrap_or(0.0) * (1.0 / rope.scale).ln() + 1.0;
    let scale = mscale * mscale / ((nope + pe) as f32).sqrt();
    let n_dense = b.size("leading_dense_block_count")?;
    let (n_expert, top_k) = (b.size("expert_count")?, b.size("expert_used_count")?);
    let groups = Some((b.size("expert_group_count")?, b.size("expert_group_used_count")?));
    let expert_ff = b.size("expert_feed_forward_length")?;
    let weight_scale = b.opt_f32("expert_weights_scale")?.unwrap_or(1.0);
    // One key head a token, no values of their own.
    let kv = b.page_group("latent", h.n_layer, [1, latent + pe, 0], None);

    let mut x = b.embed(1.0);
    for layer in 0..h.n_layer {
        b.enter_layer(layer);

        // queries: low rank, then per head [nope | pe]
        let n = b.rms_norm(x, "attn_norm");
        let qa = b.linear(n, "attn_q_a", q_lora);
        let qa = b.rms_norm(qa, "attn_q_a_norm");
        let rows = h.n_head * (nope + pe);
        let mut heads = Vec::new();
        for head in 0..h.n_head {
            let first = head * (nope + pe);
            let q = b.linear_rows(qa, "attn_q_b", rows, first, nope);
            let q = b.linear_rows(q, "attn_k_b", h.n_head * latent, head * latent, latent);
            let r = b.linear_rows(qa, "attn_q_b", rows, first + nope, pe);
            let r = b.rope(r, pe, &rope);
            heads.push(concat(b, q, r));
        }
        let q = concat_all(b, &heads);

        // keys: the normed latent and one rotated head that all queries share
        let kva = b.linear(n, "attn_kv_a_mqa", latent + pe);
        let c = columns(b, kva, "kv_latent", 0, latent);
        let c = b.rms_norm(c, "attn_kv_a_norm");
        let r = columns(b, kva, "k_pe", latent, pe);
        let r = b.rope(r, pe, &rope);
        let k = concat(b, c, r);

        // attention over the latent rows, then each head's value projection
        let spec = AttentionSpec {
            n_head: h.n_head,
            n_kv: 1,
            d_k: latent + pe,
            d_v: latent,
            scale,
            window: None,
            softcap: None,
            sinks: None,
            gate: None,
            mask: Mask::Causal,
            cache: CacheSlot { group: kv, layer: layer as u32 },
        };
        let a = b.latent_attention(q, k, spec);
        let mut heads = Vec::new();
        for head in 0..h.n_head {
            let c = columns(b, a, "attention_head", head * latent, latent);
            heads.push(b.linear_rows(c, "attn_v_b", h.n_head * d_v, head * d_v, d_v));
        }
        let a = concat_all(b, &heads);
        let a = b.linear(a, "attn_output", h.n_embd);
        x = b.add(x, a);

        // feed-forward: dense at first, then routed plus shared experts
        let n = b.rms_norm(x, "ffn_norm");
        let f = if layer < n_dense {
            swiglu(b, n, "", h.n_ff)
        } else {
            let bias = Some(b.vector("exp_probs_b.bias", n_expert));
            let score = RouterScore::Sigmoid;
            let route = RouteSpec { n_expert, top_k, score, bias, groups, normalise: true, scale: weight_scale };
            let experts = Experts { route, n_ff: expert_ff, glu: GluKind::Plain(Activation::Silu) };
            let routed = b.experts(n, &experts);
            let shared = swiglu(b, n, "_shexp", expert_ff);
            b.add(routed, shared)
        };
        x = b.add(x, f);
    }

    let x = b.enter_head(x);
    let x = b.rms_norm(x, "output_norm");
    let logits = b.lm_head(x);
    b.output(logits);
    Ok(())
}

#[test]
fn deepseek2_is_expressible_and_every_lever_set_keeps_it_whole() {
    let mut m = metadata(
        "deepseek2",
        &[
            ("block_count", LAYERS),
            ("leading_dense_block_count", DENSE),
            ("embedding_length", EMBD),
            ("feed_forward_length", FF),
            ("attention.head_count", HEADS),
            ("attention.head_count_kv", 1),
            ("attention.q_lora_rank", Q_LORA),
            ("attention.kv_lora_rank", LATENT),
            ("attention.key_length", LATENT + ROPE),
            ("attention.value_length", LATENT),
            ("attention.key_length_mla", NOPE + ROPE),
            ("attention.value_length_mla", D_V),
            ("rope.dimension_count", ROPE),
            ("context_length", 163_840),
            ("expert_count", EXPERTS),
            ("expert_used_count", USED),
            ("expert_group_count", 4),
            ("expert_group_used_count", 2),
            ("expert_feed_forward_length", EXPERT_FF),
            ("rope.scaling.original_context_length", 4096),
        ],
    );
    m.set("deepseek2.rope.scaling.type", "yarn");
    m.set("deepseek2.rope.scaling.factor", 40.0f32);
    m.set("deepseek2.rope.scaling.yarn_log_multiplier", 1.0f32);
    m.set("deepseek2.expert_weights_scale", 2.5f32);
    let t = table();
    let mut b = Builder::new("deepseek2", &m, &t, OPTIONS);
    build(&mut b).expect("builds");
    let built = b.finish().expect("checks");
    gate(&built);
    // The whole cache of a token and layer: one row of latent and rotated elements.
    let g = &built.plan.groups[0];
    assert_eq!(g.page_bytes(), LAYERS * 32 * (LATENT + ROPE) * 2);
    let fused = levers::rewrite(&built.plan, LeverSet::all());
    assert_eq!(count(&fused, "moe_route"), LAYERS - DENSE);
    assert_eq!(count(&fused, "attention"), LAYERS);
}
