//! Where the time of a step goes: the executable's per-op times, summed by kind and by place in a layer.

use std::collections::BTreeMap;
use std::io::{self, Write};

use hanzo_engine::context::Context as Engine;
use hanzo_ml::backend::OpTime;
use serde_json::{Value, json};

use crate::output::{Align, Table};

/// Seconds and steps, and what they were spent on.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    wall: f64,
    steps: usize,
    by_kind: BTreeMap<String, f64>,
    by_place: BTreeMap<String, f64>,
}

/// Turns profiling on or off in every compiled bucket.
pub fn switch(engine: &mut Engine, on: bool) {
    engine.executables().for_each(|(_, executable)| executable.set_profile(on));
}

impl Profile {
    /// Adds a step of `n_tokens` tokens that took `seconds`: asks the executable that ran it.
    pub fn add_step(&mut self, engine: &mut Engine, n_tokens: usize, seconds: f64) {
        if let Some((_, executable)) = engine.executables().find(|(sizes, _)| n_tokens <= sizes.n_tokens) {
            self.add(&executable.profile(), seconds);
        }
    }

    fn add(&mut self, ops: &[OpTime], seconds: f64) {
        self.wall += seconds;
        self.steps += 1;
        for op in ops {
            let (kind, output) = op.name.split_once(' ').unwrap_or((&op.name, ""));
            *self.by_kind.entry(kind.to_string()).or_default() += op.seconds;
            *self.by_place.entry(format!("{kind} {}", without_layer(output))).or_default() += op.seconds;
        }
    }

    /// Time of the steps that no op accounts for: barriers, dispatch, the host's part.
    fn unattributed(&self) -> f64 {
        self.wall - self.by_kind.values().sum::<f64>()
    }

    /// Two tables, the dearest first.
    pub fn write(&self, name: &str, out: &mut impl Write) -> io::Result<()> {
        let per_step = 1e3 / self.steps.max(1) as f64;
        writeln!(out, "\nprofile of {name}: {} steps of {:.3} ms", self.steps, self.wall * per_step)?;
        for (heading, times) in [("op kind", &self.by_kind), ("op and output, over all layers", &self.by_place)] {
            let mut table =
                Table::new(&[(heading, Align::Left), ("ms a step", Align::Right), ("% of wall", Align::Right)]);
            let mut line = |name: &str, seconds: f64| {
                let share = 100.0 * seconds / self.wall.max(1e-12);
                table.row(vec![name.to_string(), format!("{:.4}", seconds * per_step), format!("{share:.1}")]);
            };
            let mut sorted: Vec<(&String, &f64)> = times.iter().collect();
            sorted.sort_by(|a, b| b.1.total_cmp(a.1));
            sorted.iter().for_each(|(name, seconds)| line(name, **seconds));
            line("unattributed", self.unattributed());
            table.write(out)?;
        }
        Ok(())
    }

    /// For programs; seconds in all.
    pub fn as_json(&self) -> Value {
        json!({
            "steps": self.steps,
            "wall_s": self.wall,
            "unattributed_s": self.unattributed(),
            "by_kind_s": self.by_kind,
            "by_place_s": self.by_place,
        })
    }
}

/// `blk.12.ffn_up` is `ffn_up`.
fn without_layer(name: &str) -> &str {
    let rest = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    rest.filter(|(layer, _)| layer.bytes().all(|b| b.is_ascii_digit())).map_or(name, |(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_add_up_and_the_rest_is_unattributed() {
        let op = |name: &str, seconds| OpTime { op: 0, name: name.into(), seconds };
        let mut profile = Profile::default();
        let ops = [op("linear blk.0.ffn_up", 0.25), op("linear blk.11.ffn_up", 0.25), op("linear logits", 0.125)];
        profile.add(&ops, 1.0);
        assert_eq!(profile.by_kind["linear"], 0.625);
        assert_eq!((profile.by_place["linear ffn_up"], profile.by_place["linear logits"]), (0.5, 0.125));
        assert_eq!(profile.unattributed(), 0.375);
        let mut text = Vec::new();
        profile.write("tg1", &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains("unattributed") && text.contains("37.5") && text.contains("ffn_up"), "{text}");
        assert_eq!(without_layer("blk.x.y"), "blk.x.y");
    }
}
