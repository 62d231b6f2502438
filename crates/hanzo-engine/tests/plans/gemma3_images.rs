//! gemma3 with images: the ordinary gemma3 Plan takes embedding rows instead of token ids, and the tokens of an image
//! see each other whole. Nothing of it is in the Plan: it comes with the batch.

use super::*;
use hanzo_engine::arch;
use hanzo_ml::batch::{Batch, GroupTables, Input, Pooling};
use hanzo_ml::cache::PAGE;

const LAYERS: usize = 6;
const EMBD: usize = 64;
const D: usize = 32;
const IMAGE: usize = 256;

fn table() -> Table {
    let mut t = Table::new();
    t.add("token_embd.weight", &[EMBD, 512]);
    t.add("output_norm.weight", &[EMBD]);
    for l in 0..LAYERS {
        let mut add = |name: &str, dims: &[usize]| t.add(format!("blk.{l}.{name}"), dims);
        for norm in ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"] {
            add(&format!("{norm}.weight"), &[EMBD]);
        }
        add("attn_q_norm.weight", &[D]);
        add("attn_k_norm.weight", &[D]);
        add("attn_q.weight", &[EMBD, 4 * D]);
        add("attn_k.weight", &[EMBD, D]);
        add("attn_v.weight", &[EMBD, D]);
        add("attn_output.weight", &[4 * D, EMBD]);
        add("ffn_gate.weight", &[EMBD, 96]);
        add("ffn_up.weight", &[EMBD, 96]);
        add("ffn_down.weight", &[96, EMBD]);
    }
    t
}

#[test]
fn gemma3_takes_image_rows_and_non_causal_spans_without_another_plan() {
    let m = metadata(
        "gemma3",
        &[
            ("block_count", LAYERS),
            ("embedding_length", EMBD),
            ("feed_forward_length", 96),
            ("attention.head_count", 4),
            ("attention.head_count_kv", 1),
            ("attention.key_length", D),
            ("attention.value_length", D),
            ("attention.sliding_window", 512),
        ],
    );
    let built = arch::build(&m, &table(), &OPTIONS).expect("builds");
    gate(&built);
    // Ten tokens were there; an image follows as one span, and its last row goes through the head.
    let start = 10u32;
    let positions: Vec<u32> = (start..start + IMAGE as u32).collect();
    let rows = vec![0.0f32; IMAGE * EMBD];
    let pages: Vec<u32> = (1..=(start as usize + IMAGE).div_ceil(PAGE) as u32).collect();
    let offsets = [0, pages.len() as u32];
    let tables = [GroupTables { pages: &pages, offsets: &offsets, first: &[0] }; 2];
    let span = |end: usize| std::ops::Range { start: 0, end: end as u32 };
    let (whole, beyond) = ([span(IMAGE)], [span(IMAGE + 1)]);
    let batch = Batch {
        input: Input::Embeddings(&rows),
        positions: &positions,
        rope_positions: &[],
        seq_offsets: &[0, IMAGE as u32],
        groups: &tables,
        state_slots: &[],
        spans: &whole,
        adapters: &[],
        out_rows: &[IMAGE as u32 - 1],
        pooling: Pooling::None,
    };
    batch.check(&built.plan, 512, &[16, 16], &[]).expect("a batch of embedding rows");
    let batch = Batch { spans: &beyond, ..batch };
    assert!(batch.check(&built.plan, 512, &[16, 16], &[]).is_err(), "a span beyond the step is refused");
}
