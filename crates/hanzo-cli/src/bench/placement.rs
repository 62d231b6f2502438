//! Where each group of tensors lies, and in which formats.

use std::collections::BTreeMap;

use hanzo_gguf::Format;
use hanzo_ml::plan::{DeviceId, Plan};
use serde_json::{Value, json};

use crate::output::human_bytes;

/// Tensors of one role on one device.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    pub role: &'static str,
    pub device: String,
    /// Bytes by format.
    pub bytes: BTreeMap<Format, u64>,
}

/// The weights of a Plan, grouped by role and device; `names` are the devices'.
pub fn of(plan: &Plan, names: &[String]) -> Vec<Group> {
    const ROLES: [&str; 6] = ["embedding", "attention", "feed-forward", "experts", "norms and others", "output head"];
    let mut groups: BTreeMap<(usize, DeviceId), BTreeMap<Format, u64>> = BTreeMap::new();
    for weight in &plan.weights {
        let bytes = (weight.experts * weight.expert_bytes()) as u64;
        *groups.entry((role(&weight.tensor), weight.device)).or_default().entry(weight.format).or_default() += bytes;
    }
    let name = |device: DeviceId| names.get(usize::from(device.0)).map_or("?".into(), |n| n.to_uppercase());
    groups.into_iter().map(|((r, d), bytes)| Group { role: ROLES[r], device: name(d), bytes }).collect()
}

/// The role's place in the list of [`of`].
fn role(tensor: &str) -> usize {
    let in_layer = tensor.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).map(|(_, name)| name);
    match (in_layer, tensor) {
        (Some(name), _) if name.contains("norm") => 4,
        (Some(name), _) if name.contains("_exps") => 3,
        (Some(name), _) if name.starts_with("ffn_") => 2,
        (Some(name), _) if name.starts_with("attn_") => 1,
        (None, name) if name.starts_with("token_embd") => 0,
        (None, "output.weight" | "output.bias") => 5,
        _ => 4,
    }
}

/// `embedding 27.0 MiB Q8_0 on CPU`.
pub fn line(group: &Group) -> String {
    let formats: Vec<String> = group.bytes.iter().map(|(f, b)| format!("{} {}", human_bytes(*b), f.name())).collect();
    format!("{} {} on {}", group.role, formats.join(" + "), group.device)
}

/// For programs.
pub fn as_json(groups: &[Group]) -> Value {
    let bytes =
        |g: &Group| g.bytes.iter().map(|(f, b)| (f.name().to_string(), json!(b))).collect::<serde_json::Map<_, _>>();
    groups.iter().map(|g| json!({"role": g.role, "device": g.device, "bytes": bytes(g)})).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_fall_into_roles_by_name_and_bytes_add_up() {
        let mut plan = Plan::new(32);
        plan.weight("token_embd.weight", Format::Q8_0, 1, 10, 32);
        plan.weight("blk.0.attn_q.weight", Format::Q4_0, 1, 32, 32);
        plan.weight("blk.1.attn_q.weight", Format::Q8_0, 1, 32, 32);
        plan.weight("blk.0.attn_q_norm.weight", Format::F32, 1, 1, 32);
        plan.weight("blk.0.ffn_up_exps.weight", Format::Q4_0, 4, 32, 32);
        plan.weight("output.weight", Format::Q8_0, 1, 10, 32);
        let groups = of(&plan, &["cpu".into()]);
        let roles: Vec<&str> = groups.iter().map(|g| g.role).collect();
        assert_eq!(roles, ["embedding", "attention", "experts", "norms and others", "output head"]);
        assert_eq!(groups[1].bytes, BTreeMap::from([(Format::Q4_0, 32 * 18), (Format::Q8_0, 32 * 34)]));
        assert_eq!(groups[2].bytes[&Format::Q4_0], 4 * 32 * 18);
        assert_eq!(line(&groups[0]), "embedding 340 B Q8_0 on CPU");
    }
}
