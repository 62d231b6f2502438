//! Rotary positions from metadata: convention, partial dimensions, linear scaling, YaRN, per-pair factors, longrope.

use super::Builder;
use crate::error::Result;
use hanzo_ml::plan::{RopeConvention, RopeSpec, WeightId, Yarn};

impl Builder<'_> {
    /// The rotation of heads of `d` columns, as `rope.*` describes it.
    ///
    /// * `rope.dimension_count`: leading columns that rotate (default: all `d`); `rope.freq_base` (default 10000).
    /// * `rope.scaling.type`: `none`, `linear` (the default when there is a `factor`), `yarn` (Peng et al. 2023, arXiv
    ///   2309.00071; weights from `rope.scaling.yarn_*`), `longrope` (Ding et al. 2024, arXiv 2402.13753).
    /// * `rope_freqs.weight`: per-pair divisors of the frequencies (Llama 3).
    /// * `rope_factors_{long,short}.weight`: the same for longrope, the long ones if the context is longer than
    ///   `rope.scaling.original_context_length`.
    pub fn rope_spec(&mut self, convention: RopeConvention, d: usize) -> Result<RopeSpec> {
        let n_dims = self.opt_size("rope.dimension_count")?.unwrap_or(d);
        if n_dims > d || n_dims % 2 != 0 {
            return self.bad_key("rope.dimension_count", format!("{n_dims} is not an even part of a head of {d}"));
        }
        let base = self.opt_f32("rope.freq_base")?.unwrap_or(10_000.0);
        if base <= 1.0 {
            return self.bad_key("rope.freq_base", format!("{base} is not above 1"));
        }
        let mut rope = RopeSpec {
            convention,
            n_dims,
            base,
            scale: 1.0,
            yarn: None,
            factors: None,
            sections: None,
            magnitude: 1.0,
        };
        // `scale_linear` is the older spelling of a linear factor; 0 means none in both.
        let factor = match self.opt_f32("rope.scaling.factor")? {
            None | Some(0.0) => self.opt_f32("rope.scale_linear")?.filter(|f| *f != 0.0).unwrap_or(1.0),
            Some(f) => f,
        };
        if factor <= 0.0 {
            return self.bad_key("rope.scaling.factor", format!("{factor} is not positive"));
        }
        match self.opt_str("rope.scaling.type")?.unwrap_or("linear") {
            "none" => {}
            "linear" => rope.scale = 1.0 / factor,
            "yarn" => {
                rope.scale = 1.0 / factor;
                rope.yarn = Some(Yarn {
                    original_context: self.original_context()?,
                    ext_factor: self.opt_f32("rope.scaling.yarn_ext_factor")?.unwrap_or(1.0),
                    attn_factor: self.opt_f32("rope.scaling.yarn_attn_factor")?.unwrap_or(1.0),
                    beta_fast: self.opt_f32("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                    beta_slow: self.opt_f32("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                });
            }
            // The factors are in the tensors below.
            "longrope" => {}
            other => {
                let what = format!("{other:?} is not one of none, linear, yarn, longrope");
                return self.bad_key("rope.scaling.type", what);
            }
        }
        if let Some(m) = self.opt_f32("rope.scaling.attn_factor")? {
            rope.magnitude = m;
        }
        self.enter_globals(|b| {
            if b.has("rope_freqs.weight") {
                rope.factors = Some(b.vector("rope_freqs.weight", n_dims / 2));
            }
            if b.has("rope_factors_long.weight") || b.has("rope_factors_short.weight") {
                rope.factors = Some(b.longrope_factors(n_dims / 2)?);
                if b.opt_f32("rope.scaling.attn_factor")?.is_none() {
                    rope.magnitude = b.longrope_magnitude()?;
                }
            }
            Ok(rope)
        })
    }

    fn original_context(&self) -> Result<u32> {
        match self.opt_size("rope.scaling.original_context_length")? {
            Some(n) => Ok(n as u32),
            None => Ok(self.size("context_length")? as u32),
        }
    }

    fn longrope_factors(&mut self, pairs: usize) -> Result<WeightId> {
        let long = self.options().n_ctx > self.original_context()? as usize;
        let (name, other) = match long {
            true => ("rope_factors_long.weight", "rope_factors_short.weight"),
            false => ("rope_factors_short.weight", "rope_factors_long.weight"),
        };
        self.ignore(other);
        Ok(self.vector(name, pairs))
    }

    /// `sqrt(1 + ln(longest / original) / ln(original))`, 1 if the context was not extended (arXiv 2402.13753, section 3).
    fn longrope_magnitude(&self) -> Result<f32> {
        let (longest, original) = (self.size("context_length")? as f32, self.original_context()? as f32);
        Ok(if longest <= original { 1.0 } else { (1.0 + (longest / original).ln() / original.ln()).sqrt() })
    }
}
