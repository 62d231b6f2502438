//! Cases of rotary embeddings.

use super::{Builder, Context, Sink};
use crate::oracle::case::Case;
use crate::plan::{Dim, Op, RopeConvention, RopeSpec, Yarn};

/// A plain rotation of `n_dims` columns.
pub(super) fn plain(convention: RopeConvention, n_dims: usize) -> RopeSpec {
    RopeSpec { convention, n_dims, base: 1e4, scale: 1.0, yarn: None, factors: None, sections: None, magnitude: 1.0 }
}

pub(super) const CONVENTIONS: [RopeConvention; 2] = [RopeConvention::Neox, RopeConvention::Interleaved];

pub(super) fn rope(context: &Context<'_>, sink: Sink<'_>) {
    const YARN: Yarn =
        Yarn { original_context: 4096, ext_factor: 1.0, attn_factor: 1.0, beta_fast: 32.0, beta_slow: 1.0 };
    for convention in CONVENTIONS {
        let rng = &mut context.rng(&format!("rope {convention:?}"));
        let spec = |n_dims: usize| plain(convention, n_dims);
        let kinds: Vec<(&str, usize, RopeSpec)> = vec![
            ("plain", 64, spec(64)),
            ("base 1e6", 128, RopeSpec { base: 1e6, ..spec(128) }),
            ("partial", 64, spec(24)),
            ("odd number of pairs", 10, spec(6)),
            ("nothing rotates", 16, spec(0)),
            ("linear", 32, RopeSpec { scale: 0.125, ..spec(32) }),
            ("yarn", 64, RopeSpec { scale: 0.25, yarn: Some(YARN), ..spec(64) }),
            ("yarn, half", 64, RopeSpec { scale: 0.5, yarn: Some(Yarn { ext_factor: 0.5, ..YARN }), ..spec(32) }),
            ("yarn, off", 64, RopeSpec { yarn: Some(Yarn { ext_factor: 0.0, attn_factor: 1.3, ..YARN }), ..spec(64) }),
            ("magnitude", 32, RopeSpec { magnitude: 0.8, ..spec(32) }),
            ("factors", 64, spec(64)),
            ("sections", 64, RopeSpec { sections: Some([8, 12, 12, 0]), ..spec(64) }),
            ("sections that repeat", 64, RopeSpec { sections: Some([3, 2, 1, 2]), ..spec(64) }),
        ];
        for (name, head_dim, mut spec) in kinds {
            for (first, tokens) in [(0, 5), (4090, 33), (131_040, 3), (1 << 20, 1)] {
                let cols = 3 * head_dim;
                let mut b = Builder::new(cols);
                let x = b.input("x", Dim::Tokens, cols, rng.floats(tokens * cols, 1.0));
                if name == "factors" {
                    let factors: Vec<f32> = (0..spec.n_dims / 2).map(|i| 1.0 + i as f32 / 5.0).collect();
                    spec.factors = Some(b.vector("rope_freqs", &factors));
                }
                let out = b.like(x, "out");
                b.plan.push(Op::Rope { x, head_dim, rope: spec.clone(), out });
                b.plan.outputs.push(out);
                if spec.sections.is_some() {
                    b.plan.n_pos_axes = 4;
                }
                let mut case: Case = b.case("rope", "-", tokens, format!("{name}, from position {first}"));
                let step = &mut case.steps[0];
                step.positions = (first..first + tokens as u32).collect();
                if spec.sections.is_some() {
                    // Time stands still, height and width move, as within an image.
                    let axis = |f: &dyn Fn(u32) -> u32| (0..tokens as u32).map(f).collect::<Vec<u32>>();
                    step.rope_positions =
                        [axis(&|_| first), axis(&|t| first + t / 4), axis(&|t| first + t % 4), axis(&|t| t)].concat();
                }
                sink(case);
            }
        }
    }
}
