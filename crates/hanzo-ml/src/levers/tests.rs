//! The rewrites on a small transformer Plan: they fire, stay well-formed, and shorten the dependency depth.

use super::*;
use crate::cache::CacheGroup;
use crate::plan::schedule::Schedule;
use crate::plan::*;
use hanzo_gguf::Format;

/// One layer of attention (with q/k norms) and either a dense or an expert feed-forward, ending in a head.
pub(crate) fn layer_plan(moe: bool) -> Plan {
    layer_plan_of(moe, 64)
}

/// The same with rows of `d` columns.
pub(crate) fn layer_plan_of(moe: bool, d: usize) -> Plan {
    let (heads, kv, hd, ff) = (4, 2, 32, 96);
    let mut p = Plan::new(d);
    p.groups.push(CacheGroup {
        name: "all".into(),
        layers: 2,
        n_kv: kv,
        d_k: hd,
        d_v: hd,
        type_k: Format::F16,
        type_v: Format::F16,
        window: None,
    });
    let table = p.weight("token_embd.weight", Format::Q8_0, 1, 128, d);
    let mut x = p.value("x", Dim::Tokens, d);
    p.push(Op::Embed { table, scale: 1.0, out: x });
    for il in 0..2u32 {
        let cache = CacheSlot { group: CacheGroupId(0), layer: il };
        let rope = RopeSpec {
            convention: RopeConvention::Neox,
            n_dims: hd,
            base: 1e4,
            scale: 1.0,
            yarn: None,
            factors: None,
            sections: None,
            magnitude: 1.0,
        };
        let norm = |p: &mut Plan, x: ValueId, name: &str, group: usize| {
            let weight = Some(p.weight(&format!("blk.{il}.{name}"), Format::F32, 1, 1, group));
            let (rows, cols) = (p.val(x).rows, p.val(x).cols);
            let out = p.value(format!("{il}.{name}"), rows, cols);
            p.push(Op::RmsNorm { x, weight, eps: 1e-6, group, out });
            out
        };
        let linear = |p: &mut Plan, x: ValueId, name: &str, rows: usize, f: Format| {
            let cols = p.val(x).cols;
            let w = p.weight(&format!("blk.{il}.{name}"), f, 1, rows, cols);
            let out = p.value(format!("{il}.{name}"), p.val(x).rows, rows);
            p.push(Op::Linear { x, member: Member { w, bias: None, out } });
            out
        };
        let h = norm(&mut p, x, "attn_norm", d);
        let q = linear(&mut p, h, "q", heads * hd, Format::Q4_0);
        let k = linear(&mut p, h, "k", kv * hd, Format::Q4_0);
        let v = linear(&mut p, h, "v", kv * hd, Format::Q8_0);
        let q = norm(&mut p, q, "q_norm", hd);
        let k = norm(&mut p, k, "k_norm", hd);
        let rot = |p: &mut Plan, x: ValueId, name: &str| {
            let out = p.value(format!("{il}.{name}"), Dim::Tokens, p.val(x).cols);
            p.push(Op::Rope { x, head_dim: hd, rope: rope.clone(), out });
            out
        };
        let (q, k) = (rot(&mut p, q, "q_rot"), rot(&mut p, k, "k_rot"));
        p.push(Op::KvStore { k, store: Store { v: Some(v), cache } });
        let o = p.value("o", Dim::Tokens, heads * hd);
        let spec = AttentionSpec {
            n_head: heads,
            n_kv: kv,
            d_k: hd,
            d_v: hd,
            scale: 1.0,
            window: None,
            softcap: None,
            sinks: None,
            gate: None,
            mask: Mask::Causal,
            cache,
        };
        p.push(Op::Attention { q, spec, out: o });
        let a = linear(&mut p, o, "attn_output", d, Format::Q4_0);
        let x1 = p.value("x1", Dim::Tokens, d);
        p.push(Op::Add { a: x, b: a, out: x1 });
        let h = norm(&mut p, x1, "ffn_norm", d);
        let f = if moe {
            let spec = RouteSpec {
                n_expert: 8,
                top_k: 2,
                score: RouterScore::Softmax,
                bias: None,
                groups: None,
                normalise: true,
                scale: 1.0,
            };
            let logits = linear(&mut p, h, "router", 8, Format::F32);
            let scores = p.value("scores", Dim::Tokens, 8);
            p.push(Op::RouteScores { logits, spec: spec.clone(), out: scores });
            let ids = p.typed_value("ids", Dim::Tokens, 2, DType::I32);
            let raw = p.value("raw", Dim::Tokens, 2);
            p.push(Op::RouteTopK { scores, spec: spec.clone(), ids, weights: raw });
            let weights = p.value("weights", Dim::Tokens, 2);
            p.push(Op::RouteNormalise { weights: raw, spec, out: weights });
            let expert = |p: &mut Plan, x: ValueId, name: &str, rows: usize| {
                let w = p.weight(&format!("blk.{il}.{name}"), Format::Q4_0, 8, rows, p.val(x).cols);
                let out = p.value(name, Dim::Slots(2), rows);
                p.push(Op::MoeLinear { x, ids, member: Member { w, bias: None, out } });
                out
            };
            let (gate, up) = (expert(&mut p, h, "gate_exps", ff), expert(&mut p, h, "up_exps", ff));
            let g = p.value("glu", Dim::Slots(2), ff);
            p.push(Op::Glu { gate, up, kind: GluKind::Plain(Activation::Silu), out: g });
            let down = expert(&mut p, g, "down_exps", d);
            let out = p.value("moe", Dim::Tokens, d);
            p.push(Op::MoeCombine { x: down, weights, out });
            out
        } else {
            let gate = linear(&mut p, h, "gate", ff, Format::Q4_0);
            let up = linear(&mut p, h, "up", ff, Format::Q4_0);
            let g = p.value("glu", Dim::Tokens, ff);
            p.push(Op::Glu { gate, up, kind: GluKind::Plain(Activation::Silu), out: g });
            linear(&mut p, g, "down", d, Format::Q4_0)
        };
        let x2 = p.value("x2", Dim::Tokens, d);
        p.push(Op::Add { a: x1, b: f, out: x2 });
        x = x2;
    }
    p.head = Some(p.ops.len());
    let last = p.value("last", Dim::Out, d);
    p.push(Op::GatherRows { x, out: last });
    let w = p.weight("output_norm.weight", Format::F32, 1, 1, d);
    let h = p.value("normed", Dim::Out, d);
    p.push(Op::RmsNorm { x: last, weight: Some(w), eps: 1e-6, group: d, out: h });
    let logits = p.value("logits", Dim::Out, 128);
    p.push(Op::Linear { x: h, member: Member { w: table, bias: None, out: logits } });
    p.outputs.push(logits);
    p
}

fn kinds(p: &Plan) -> Vec<&'static str> {
    p.ops.iter().map(|o| o.kind()).collect()
}

#[test]
fn every_gate_set_rewrites_into_a_plan_that_checks_and_schedules() {
    for moe in [false, true] {
        let plain = layer_plan(moe);
        plain.check().expect("plain plan");
        for (name, set) in LeverSet::gate_sets(8) {
            let p = rewrite(&plain, set);
            p.check().unwrap_or_else(|e| panic!("{name}: {e}\n{p}"));
            let s = Schedule::new(&p, &Sizes { n_tokens: 7, n_seqs: 2, n_out: 3 });
            s.verify(&p).unwrap_or_else(|e| panic!("{name}: {e}\n{p}"));
        }
    }
}

#[test]
fn all_levers_leave_only_fused_ops() {
    let dense = rewrite(&layer_plan(false), LeverSet::all());
    let layer =
        ["linear_group", "qk_norm_rope", "attention", "linear", "add_rms_norm", "linear_group", "glu", "linear"];
    let mut want = vec!["embed", "rms_norm"];
    want.extend(layer);
    want.push("add_rms_norm");
    want.extend(layer);
    want.extend(["add", "gather_rows", "rms_norm", "linear"]);
    assert_eq!(kinds(&dense), want);
    let moe = rewrite(&layer_plan(true), LeverSet::all());
    assert!(kinds(&moe).contains(&"moe_route") && kinds(&moe).contains(&"moe_linear_group"));
    assert!(!kinds(&moe).iter().any(|k| k.starts_with("route_")));
}

#[test]
fn fusions_shorten_the_dependency_depth() {
    let depth = |p: &Plan| Schedule::new(p, &Sizes { n_tokens: 1, n_seqs: 1, n_out: 1 }).barriers();
    let plain = layer_plan(false);
    let fused = rewrite(&plain, LeverSet::all());
    // A plain layer: norm, q/k/v, norms, ropes, store, attention, out, add, norm, gate/up, glu, down, add.
    assert_eq!(depth(&plain), 2 * 13 + 1 + 3 - 1);
    // A fused one: q/k/v, norm + rope + store, attention, out, add + norm, gate/up, glu, down, (next layer's) add + norm.
    assert_eq!(depth(&fused), 2 + 2 * 9 + 3 - 1);
}

#[test]
fn deleting_any_one_barrier_fails_the_checker() {
    for moe in [false, true] {
        for set in [LeverSet::NONE, LeverSet::all()] {
            let p = rewrite(&layer_plan(moe), set);
            let s = Schedule::new(&p, &Sizes { n_tokens: 5, n_seqs: 1, n_out: 1 });
            for b in 0..s.barriers() {
                assert!(s.without_barrier(b).verify(&p).is_err(), "barrier {b} is not needed\n{p}");
            }
        }
    }
}

#[test]
fn a_value_moved_onto_a_live_one_fails_the_checker() {
    let p = layer_plan(false);
    let s = Schedule::new(&p, &Sizes { n_tokens: 5, n_seqs: 1, n_out: 1 });
    let producer = p.producers();
    for op in &p.ops {
        let reads = op.reads();
        if reads.len() == 2 && reads[0] != reads[1] {
            // Whichever of the two is written later clobbers the other.
            assert!(s.with_alias(reads[0], reads[1]).verify(&p).is_err(), "{:?} {:?}", op.kind(), producer.len());
        }
    }
}

#[test]
fn memory_is_reused_between_layers() {
    let p = layer_plan(false);
    let s = Schedule::new(&p, &Sizes { n_tokens: 64, n_seqs: 1, n_out: 1 });
    let total: usize = s.ranges.iter().map(|r| r.len()).sum();
    assert!(s.arena_bytes * 3 < total, "{} of {total}", s.arena_bytes);
}

#[test]
fn ids_are_unique_and_every_lever_names_an_oracle() {
    for (i, l) in LEVERS.iter().enumerate() {
        assert_eq!(find(l.id), Ok(i));
        assert!(!l.oracle.is_empty() && !l.reason.is_empty() && !l.regimes.is_empty());
    }
    assert!(find("no_such_lever").is_err());
}

#[test]
fn a_comparison_on_a_device_switches_its_own_variants_only() {
    for backend in ["cpu", "vulkan:1", "cpu+vulkan:0", "reference"] {
        let (none, all) = (LeverSet::NONE.within(backend), LeverSet::all().within(backend));
        for (i, lever) in LEVERS.iter().enumerate() {
            let rewrite = matches!(lever.kind, LeverKind::Rewrite(_));
            let own = rewrite || lever.backends.iter().any(|b| backend.contains(b));
            let want = if own { (false, true) } else { (lever.default_on, lever.default_on) };
            assert_eq!((none.has(i), all.has(i)), want, "{} on {backend}", lever.id);
        }
    }
}
