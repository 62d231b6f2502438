//! gpt-oss: biased projections, attention sinks, every other layer windowed, YaRN, and MXFP4 experts with biases and a
//! clamped SwiGLU, routed by a softmax over the chosen logits.

use super::*;
use hanzo_engine::Result;
use hanzo_engine::arch::Experts;
use hanzo_ml::plan::{AttentionSpec, GluKind, RopeConvention, RouteSpec, RouterScore};

const LAYERS: usize = 4;
const EMBD: usize = 288;
const HEADS: usize = 8;
const KV: usize = 2;
const D: usize = 64;
const EXPERTS: usize = 8;
const USED: usize = 4;
const FF: usize = 288;
const WINDOW: usize = 128;

fn table() -> Table {
    let mut t = Table::new();
    t.add("token_embd.weight", &[EMBD, 512]);
    t.add("output_norm.weight", &[EMBD]);
    t.add("output.weight", &[EMBD, 512]);
    for l in 0..LAYERS {
        let mut add = |name: &str, format: Format, dims: &[usize]| t.add_as(format!("blk.{l}.{name}"), format, dims);
        add("attn_norm.weight", Format::F32, &[EMBD]);
        for (name, n_in, n_out) in [
            ("attn_q", EMBD, HEADS * D),
            ("attn_k", EMBD, KV * D),
            ("attn_v", EMBD, KV * D),
            ("attn_output", HEADS * D, EMBD),
        ] {
            add(&format!("{name}.weight"), Format::Q8_0, &[n_in, n_out]);
            add(&format!("{name}.bias"), Format::F32, &[n_out]);
        }
        add("attn_sinks.weight", Format::F32, &[HEADS]);
        add("post_attention_norm.weight", Format::F32, &[EMBD]);
        add("ffn_gate_inp.weight", Format::F32, &[EMBD, EXPERTS]);
        add("ffn_gate_inp.bias", Format::F32, &[EXPERTS]);
        for (name, n_in, n_out) in [("ffn_gate_exps", EMBD, FF), ("ffn_up_exps", EMBD, FF), ("ffn_down_exps", FF, EMBD)]
        {
            add(&format!("{name}.weight"), Format::MXFP4, &[n_in, n_out, EXPERTS]);
            add(&format!("{name}.bias"), Format::F32, &[n_out, EXPERTS]);
        }
    }
    t
}

fn build(b: &mut Builder<'_>) -> Result<()> {
    let h = b.hyper()?;
    let window = b.size("attention.sliding_window")? as u32;
    let rope = b.rope_spec(RopeConvention::Neox, h.d_k)?;
    let (n_expert, top_k) = (b.size("expert_count")?, b.size("expert_used_count")?);
    let score = RouterScore::SoftmaxSelected;
    let route = RouteSpec { n_expert, top_k, score, bias: None, groups: None, normalise: false, scale: 1.0 };
    let n_ff = b.size("expert_feed_forward_length")?;
    let experts = Experts { route, n_ff, glu: GluKind::SwigluClamped { alpha: 1.702, limit: 7.0 } };
    let kv = [
        b.cache_group("window", h.n_layer.div_ceil(2), &h, Some(window)),
        b.cache_group("global", h.n_layer / 2, &h, None),
    ];

    let mut x = b.embed(1.0);
    for layer in 0..h.n_layer {
        b.enter_layer(layer);

        // attention: even layers see a window, each head may attend to nothing through its sink
        let n = b.rms_norm(x, "attn_norm");
        let q = b.linear_with_bias(n, "attn_q", h.n_head * h.d_k);
        let k = b.linear_with_bias(n, "attn_k", h.n_kv * h.d_k);
        let v = b.linear_with_bias(n, "attn_v", h.n_kv * h.d_v);
        let q = b.rope(q, h.d_k, &rope);
        let k = b.rope(k, h.d_k, &rope);
        let sinks = Some(b.vector("attn_sinks.weight", h.n_head));
        let spec = AttentionSpec { sinks, ..b.attention_spec(&h, kv[layer % 2], layer / 2) };
        let a = b.attention(q, k, v, spec);
        let a = b.linear_with_bias(a, "attn_output", h.n_embd);
        x = b.add(x, a);

        // experts
        let n = b.rms_norm(x, "post_attention_norm");
        let f = b.experts(n, &experts);
        x = b.add(x, f);
    }

    let x = b.enter_head(x);
    let x = b.rms_norm(x, "output_norm");
    let logits = b.lm_head(x);
    b.output(logits);
    Ok(())
}

#[test]
fn gpt_oss_is_expressible_and_every_lever_set_keeps_it_whole() {
    let mut m = metadata(
        "gpt-oss",
        &[
            ("block_count", LAYERS),
            ("embedding_length", EMBD),
            ("attention.head_count", HEADS),
            ("attention.head_count_kv", KV),
            ("attention.key_length", D),
            ("attention.value_length", D),
            ("attention.sliding_window", WINDOW),
            ("context_length", 131_072),
            ("expert_count", EXPERTS),
            ("expert_used_count", USED),
            ("expert_feed_forward_length", FF),
            ("rope.scaling.original_context_length", 4096),
        ],
    );
    m.set("gpt-oss.rope.scaling.type", "yarn");
    m.set("gpt-oss.rope.scaling.factor", 32.0f32);
    m.set("gpt-oss.rope.freq_base", 150_000.0f32);
    let t = table();
    let mut b = Builder::new("gpt-oss", &m, &t, OPTIONS);
    build(&mut b).expect("builds");
    let built = b.finish().expect("checks");
    gate(&built);
    let fused = levers::rewrite(&built.plan, LeverSet::all());
    assert_eq!(count(&fused, "moe_route"), LAYERS);
    assert_eq!(count(&fused, "moe_linear_group"), LAYERS);
    assert!(built.plan.formats().contains(&Format::MXFP4));
    assert_eq!(built.plan.groups.iter().map(|g| g.window).collect::<Vec<_>>(), [Some(WINDOW as u32), None]);
}
