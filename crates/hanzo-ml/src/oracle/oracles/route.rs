//! Cases of routing.

use super::{Builder, Context, Sink};
use crate::plan::{DType, Dim, Op, RouteSpec, RouterScore, ValueId};

/// The experts that logits choose, and their weights.
pub(super) fn chosen(b: &mut Builder, logits: ValueId, spec: &RouteSpec) -> (ValueId, ValueId) {
    let scores = b.like(logits, "scores");
    let ids = b.plan.typed_value("ids", Dim::Tokens, spec.top_k, DType::I32);
    let raw = b.plan.value("raw", Dim::Tokens, spec.top_k);
    let weights = b.plan.value("weights", Dim::Tokens, spec.top_k);
    b.plan.push(Op::RouteScores { logits, spec: spec.clone(), out: scores });
    b.plan.push(Op::RouteTopK { scores, spec: spec.clone(), ids, weights: raw });
    b.plan.push(Op::RouteNormalise { weights: raw, spec: spec.clone(), out: weights });
    (ids, weights)
}

pub(super) fn route(context: &Context<'_>, sink: Sink<'_>) {
    let rng = &mut context.rng("route");
    let base = RouteSpec {
        n_expert: 8,
        top_k: 2,
        score: RouterScore::Softmax,
        bias: None,
        groups: None,
        normalise: true,
        scale: 1.0,
    };
    let mut kinds: Vec<(&str, RouteSpec, bool)> = Vec::new();
    for score in [RouterScore::Softmax, RouterScore::Sigmoid, RouterScore::SoftmaxSelected] {
        let spec = RouteSpec { score, ..base.clone() };
        kinds.push(("usual", spec.clone(), false));
        kinds.push(("one", RouteSpec { top_k: 1, normalise: false, ..spec.clone() }, false));
        kinds.push(("all", RouteSpec { n_expert: 5, top_k: 5, scale: 2.5, ..spec.clone() }, false));
        kinds.push(("many", RouteSpec { n_expert: 128, top_k: 8, ..spec.clone() }, false));
        kinds.push(("biased", RouteSpec { n_expert: 33, top_k: 4, ..spec.clone() }, true));
        kinds.push(("groups", RouteSpec { n_expert: 32, top_k: 4, groups: Some((8, 3)), ..spec.clone() }, false));
        kinds.push((
            "biased groups",
            RouteSpec { n_expert: 32, top_k: 6, groups: Some((4, 2)), scale: 2.5, ..spec },
            true,
        ));
    }
    for (name, mut spec, biased) in kinds {
        for tokens in [1, 33] {
            for ties in [false, true] {
                let n = spec.n_expert;
                let mut b = Builder::new(n);
                // Ties: logits of four sizes only, so that most rows have equals at the edge. No two different pairs of
                // them have the same sum of sigmoids or exponentials, which rounding would decide.
                let logits: Vec<f32> = match ties {
                    true => (0..tokens * n).map(|_| rng.below(4) as f32 * 0.75 - 1.0).collect(),
                    false => rng.floats(tokens * n, 2.0),
                };
                let logits = b.input("logits", Dim::Tokens, n, logits);
                spec.bias = biased.then(|| {
                    let bias: Vec<f32> = (0..n).map(|_| if ties { 0.25 } else { rng.gauss() as f32 * 0.3 }).collect();
                    b.vector("bias", &bias)
                });
                let (ids, weights) = chosen(&mut b, logits, &spec);
                b.plan.outputs = vec![ids, weights];
                sink(b.case("moe_route", "-", tokens, format!("{:?}, {name}, ties: {ties}", spec.score)));
            }
        }
    }
}
