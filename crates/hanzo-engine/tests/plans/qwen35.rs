//! qwen35 (hybrid): three gated-delta layers to one of full attention with an output gate; partial multi-axis rope.
//!
//! A gated-delta layer projects `[q | k | v]` through a short convolution, keeps a `[d_k, d_v]` state a head, and gates its
//! normed output. Its log decay is `a softplus(alpha + dt)`, `a` per head: a one-tap `ShortConv` multiplies by `a`.

use super::*;
use hanzo_engine::Result;
use hanzo_ml::cache::StateSpec;
use hanzo_ml::plan::{Activation, AttentionSpec, RopeConvention, RopeSpec, StateId};

const LAYERS: usize = 8;
const EVERY: usize = 4;
const EMBD: usize = 128;
const HEADS: usize = 4;
const KV: usize = 2;
const D: usize = 128;
const ROPE: usize = 64;
const KEY_HEADS: usize = 2;
const VALUE_HEADS: usize = 4;
const STATE: usize = 32;
const KERNEL: usize = 4;
const FF: usize = 192;
const CONV: usize = 2 * KEY_HEADS * STATE + VALUE_HEADS * STATE;

fn table() -> Table {
    let mut t = Table::new();
    t.add("token_embd.weight", &[EMBD, 512]);
    t.add("output_norm.weight", &[EMBD]);
    for l in 0..LAYERS {
        let mut add = |name: &str, format: Format, dims: &[usize]| t.add_as(format!("blk.{l}.{name}"), format, dims);
        let (f32, q8) = (Format::F32, Format::Q8_0);
        add("attn_norm.weight", f32, &[EMBD]);
        add("post_attention_norm.weight", f32, &[EMBD]);
        if (l + 1) % EVERY == 0 {
            add("attn_q.weight", q8, &[EMBD, HEADS * 2 * D]);
            add("attn_k.weight", q8, &[EMBD, KV * D]);
            add("attn_v.weight", q8, &[EMBD, KV * D]);
            add("attn_q_norm.weight", f32, &[D]);
            add("attn_k_norm.weight", f32, &[D]);
            add("attn_output.weight", q8, &[HEADS * D, EMBD]);
        } else {
            add("attn_qkv.weight", q8, &[EMBD, CONV]);
            add("attn_gate.weight", q8, &[EMBD, VALUE_HEADS * STATE]);
            add("ssm_conv1d.weight", f32, &[KERNEL, CONV]);
            add("ssm_alpha.weight", q8, &[EMBD, VALUE_HEADS]);
            add("ssm_alpha.bias", f32, &[VALUE_HEADS]);
            add("ssm_beta.weight", q8, &[EMBD, VALUE_HEADS]);
            add("ssm_a.weight", f32, &[1, VALUE_HEADS]);
            add("ssm_norm.weight", f32, &[STATE]);
            add("ssm_out.weight", q8, &[VALUE_HEADS * STATE, EMBD]);
        }
        add("ffn_gate.weight", q8, &[EMBD, FF]);
        add("ffn_up.weight", q8, &[EMBD, FF]);
        add("ffn_down.weight", q8, &[FF, EMBD]);
    }
    t
}

fn act(b: &mut Builder<'_>, x: ValueId, kind: Activation) -> ValueId {
    let cols = b.cols(x);
    let out = b.like(x, "act", cols);
    b.plan().push(Op::Act { x, kind, out });
    out
}

/// Full attention: q and its gate alternate head by head in one tensor; the output is gated by a sigmoid.
fn full_attention(
    b: &mut Builder<'_>,
    n: ValueId,
    rope: &RopeSpec,
    spec: impl Fn(ValueId) -> AttentionSpec,
) -> ValueId {
    let rows = HEADS * 2 * D;
    let head = |b: &mut Builder<'_>, first: usize| b.linear_rows(n, "attn_q", rows, first, D);
    let q: Vec<_> = (0..HEADS).map(|h| head(b, h * 2 * D)).collect();
    let gate: Vec<_> = (0..HEADS).map(|h| head(b, h * 2 * D + D)).collect();
    let (q, gate) = (concat_all(b, &q), concat_all(b, &gate));
    let k = b.linear(n, "attn_k", KV * D);
    let v = b.linear(n, "attn_v", KV * D);
    let q = b.rms_norm_heads(q, "attn_q_norm", D);
    let k = b.rms_norm_heads(k, "attn_k_norm", D);
    let q = b.rope(q, D, rope);
    let k = b.rope(k, D, rope);
    let a = b.attention(q, k, v, spec(gate));
    b.linear(a, "attn_output", EMBD)
}

/// The states of the gated-delta layers.
struct States {
    conv: StateId,
    delta: StateId,
    tap: StateId,
}

fn gated_delta(b: &mut Builder<'_>, n: ValueId, states: &States, layer: u32) -> ValueId {
    // q, k, v through a short causal convolution
    let qkv = b.linear(n, "attn_qkv", CONV);
    let weight = b.matrix("ssm_conv1d", CONV, KERNEL);
    let mixed = b.like(qkv, "conv", CONV);
    let activation = Some(Activation::Silu);
    b.plan().push(Op::ShortConv {
        x: qkv,
        weight,
        bias: None,
        kernel: KERNEL,
        activation,
        state: states.conv,
        layer,
        out: mixed,
    });
    let q = columns(b, mixed, "q", 0, KEY_HEADS * STATE);
    let k = columns(b, mixed, "k", KEY_HEADS * STATE, KEY_HEADS * STATE);
    let v = columns(b, mixed, "v", 2 * KEY_HEADS * STATE, VALUE_HEADS * STATE);

    // decay and write strength, one a head
    let alpha = b.linear_with_bias(n, "ssm_alpha", VALUE_HEADS);
    let alpha = act(b, alpha, Activation::Softplus);
    let decay = b.like(alpha, "decay", VALUE_HEADS);
    let weight = b.matrix("ssm_a", VALUE_HEADS, 1);
    b.plan().push(Op::ShortConv {
        x: alpha,
        weight,
        bias: None,
        kernel: 1,
        activation: None,
        state: states.tap,
        layer,
        out: decay,
    });
    let beta = b.linear(n, "ssm_beta", VALUE_HEADS);
    let beta = act(b, beta, Activation::Sigmoid);

    // the delta rule, then a gated norm head by head
    let out = b.like(v, "delta", VALUE_HEADS * STATE);
    b.plan().push(Op::GatedDelta {
        q,
        k,
        v,
        decay,
        beta,
        n_head: VALUE_HEADS,
        n_key_head: KEY_HEADS,
        d_k: STATE,
        d_v: STATE,
        eps: 1e-6,
        state: states.delta,
        layer,
        out,
    });
    let o = b.rms_norm_heads(out, "ssm_norm", STATE);
    let z = b.linear(n, "attn_gate", VALUE_HEADS * STATE);
    let o = b.glu(z, o, Activation::Silu);
    b.linear(o, "ssm_out", EMBD)
}

fn build(b: &mut Builder<'_>) -> Result<()> {
    let h = b.hyper()?;
    let sections = Some([11, 11, 10, 0]);
    let rope = RopeSpec { sections, ..b.rope_spec(RopeConvention::Neox, h.d_k)? };
    let n_full = h.n_layer / EVERY;
    let n_delta = h.n_layer - n_full;
    let kv = b.cache_group("full", n_full, &h, None);
    b.plan().n_pos_axes = 3;
    let state = |b: &mut Builder<'_>, name: &str, elements: usize| {
        b.plan().states.push(StateSpec { name: name.into(), layers: n_delta, elements });
        StateId(b.plan().states.len() as u16 - 1)
    };
    let states = States {
        conv: state(b, "conv", (KERNEL - 1) * CONV),
        delta: state(b, "delta", VALUE_HEADS * STATE * STATE),
        tap: state(b, "tap", 0),
    };

    let mut x = b.embed(1.0);
    let (mut full, mut delta) = (0, 0);
    for layer in 0..h.n_layer {
        b.enter_layer(layer);
        let n = b.rms_norm(x, "attn_norm");
        let a = if (layer + 1) % EVERY == 0 {
            let spec = b.attention_spec(&h, kv, full);
            full += 1;
            full_attention(b, n, &rope, |gate| AttentionSpec { gate: Some(gate), ..spec.clone() })
        } else {
            delta += 1;
            gated_delta(b, n, &states, delta - 1)
        };
        x = b.add(x, a);

        let n = b.rms_norm(x, "post_attention_norm");
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

#[test]
fn qwen35_fits_the_op_set_and_every_lever_set_keeps_it_whole() {
    let m = metadata(
        "qwen35",
        &[
            ("block_count", LAYERS),
            ("embedding_length", EMBD),
            ("feed_forward_length", FF),
            ("attention.head_count", HEADS),
            ("attention.head_count_kv", KV),
            ("attention.key_length", D),
            ("attention.value_length", D),
            ("rope.dimension_count", ROPE),
        ],
    );
    let t = table();
    let mut b = Builder::new("qwen35", &m, &t, OPTIONS);
    build(&mut b).expect("builds");
    let built = b.finish().expect("checks");
    gate(&built);
    assert_eq!(count(&built.plan, "gated_delta"), LAYERS - LAYERS / EVERY);
    assert_eq!(count(&built.plan, "attention"), LAYERS / EVERY);
    let fused = levers::rewrite(&built.plan, LeverSet::all());
    assert_eq!(count(&fused, "qk_norm_rope"), LAYERS / EVERY);
}
