//! Where each op of a model should run, from what the user asked for. Nothing is rewritten here.
//!
//! Layers are counted as llama.cpp does: the output (its norm and matrix) is one more layer behind the last, and `-ngl N`
//! puts the last `N` of them on the devices given, the rest on the host. An op runs where its largest weight is; an op
//! without weights where its largest input is; attention, its cache and recurrent states where their layer's attention
//! weights are.

use crate::error::{Error, Result};
use crate::plan::{Access, DeviceId, Dim, Op, Plan, ValueId, Weight, WeightId};
use regex::Regex;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The host's device.
pub const HOST: DeviceId = DeviceId(0);

/// Tensors of a name go to a device (`-ot REGEX=DEVICE`).
#[derive(Clone, Debug)]
pub struct Override {
    pattern: Regex,
    device: DeviceId,
}

/// What was asked for.
#[derive(Clone, Debug, Default)]
pub struct Placement {
    /// Names of the devices, the host first.
    pub devices: Vec<String>,
    /// Layers from the end that go to the devices behind the host, the output being one; all if not said (`-ngl`).
    pub device_layers: Option<usize>,
    /// Layers from the start whose experts stay on the host (`--n-cpu-moe`).
    pub host_moe: usize,
    /// The first one that matches a tensor's name decides (`-ot`).
    pub overrides: Vec<Override>,
}

fn setting<T>(name: &str, what: String) -> Result<T> {
    Err(Error::Setting { name: name.into(), what })
}

/// `N` of `blk.N.`.
pub fn layer_of(tensor: &str) -> Option<usize> {
    tensor.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

/// Bytes of a weight, all experts together.
pub fn weight_bytes(w: &Weight) -> usize {
    w.experts * w.expert_bytes()
}

impl Placement {
    /// Everything on the devices behind the host, if there are any.
    pub fn new(devices: Vec<String>) -> Placement {
        Placement { devices, ..Placement::default() }
    }

    /// Adds `REGEX=DEVICE`.
    ///
    /// # Errors
    /// If it is not of that form, the expression is malformed, or there is no such device.
    pub fn push_override(&mut self, text: &str) -> Result<()> {
        let Some((pattern, device)) = text.rsplit_once('=') else {
            return setting("-ot", format!("is `{text}`; expected REGEX=DEVICE"));
        };
        let Some(d) = self.devices.iter().position(|n| n.eq_ignore_ascii_case(device)) else {
            return setting("-ot", format!("names `{device}`; this run has {}", self.devices.join(", ")));
        };
        match Regex::new(pattern) {
            Ok(pattern) => self.overrides.push(Override { pattern, device: DeviceId(d as u16) }),
            Err(e) => return setting("-ot", format!("`{pattern}`: {e}")),
        }
        Ok(())
    }

    /// The device of each op.
    ///
    /// # Errors
    /// If something that was asked for cannot be done: an expression that no tensor matches, experts of a model without
    /// any, a tensor that must be where its op runs.
    pub fn assign(&self, plan: &Plan) -> Result<Vec<DeviceId>> {
        let layers = self.layers(plan);
        let mut a = Assignment {
            placement: self,
            plan,
            layers,
            value_layer: vec![None; plan.values.len()],
            value_device: vec![None; plan.values.len()],
            memory: HashMap::new(),
        };
        let mut devices = Vec::with_capacity(plan.ops.len());
        for i in 0..plan.ops.len() {
            let (device, layer) = a.op(i);
            for v in plan.ops[i].writes() {
                a.value_device[v.0 as usize] = Some(device);
                a.value_layer[v.0 as usize] = layer;
            }
            devices.push(device);
        }
        self.check(plan, &devices)?;
        Ok(devices)
    }

    /// The device of each layer, the output last.
    fn layers(&self, plan: &Plan) -> Vec<DeviceId> {
        let n = plan.weights.iter().filter_map(|w| layer_of(&w.tensor)).map(|l| l + 1).max().unwrap_or(0);
        let behind = self.devices.len().saturating_sub(1);
        let first = if behind == 0 { n + 1 } else { (n + 1).saturating_sub(self.device_layers.unwrap_or(n + 1)) };
        let mut bytes = vec![0usize; n + 1];
        for w in &plan.weights {
            let layer = layer_of(&w.tensor).unwrap_or(n);
            if !self.stays(w) {
                bytes[layer] += weight_bytes(w);
            }
        }
        // Consecutive layers to each device, as equal in bytes as whole layers allow: by each layer's middle.
        let total = bytes[first.min(n + 1)..].iter().sum::<usize>().max(1);
        let mut before = 0;
        (0..=n)
            .map(|l| {
                if l < first {
                    return HOST;
                }
                let middle = before + bytes[l] / 2;
                before += bytes[l];
                DeviceId(1 + (middle as u128 * behind as u128 / total as u128).min(behind as u128 - 1) as u16)
            })
            .collect()
    }

    /// Experts that `--n-cpu-moe` keeps on the host.
    fn stays(&self, w: &Weight) -> bool {
        w.experts > 1 && layer_of(&w.tensor).is_some_and(|l| l < self.host_moe)
    }

    /// The device that was asked for by a tensor's name.
    fn wanted(&self, w: &Weight) -> Option<DeviceId> {
        let named = self.overrides.iter().find(|o| o.pattern.is_match(&w.tensor)).map(|o| o.device);
        named.or(self.stays(w).then_some(HOST))
    }

    fn check(&self, plan: &Plan, devices: &[DeviceId]) -> Result<()> {
        for o in &self.overrides {
            if !plan.weights.iter().any(|w| o.pattern.is_match(&w.tensor)) {
                return setting("-ot", format!("no tensor of this model matches `{}`", o.pattern));
            }
        }
        if self.host_moe > 0 && !plan.weights.iter().any(|w| w.experts > 1) {
            return setting("--n-cpu-moe", "this model has no experts".into());
        }
        let name = |d: DeviceId| self.devices.get(usize::from(d.0)).map_or("?", String::as_str);
        for (op, device) in plan.ops.iter().zip(devices) {
            let mut wrong = None;
            op.accesses(&mut |a| {
                if let Access::Weight(w) = a
                    && let Some(d) = self.wanted(plan.wt(w)).filter(|d| d != device)
                {
                    wrong = Some((plan.wt(w), d));
                }
            });
            if let Some((w, d)) = wrong {
                let with = largest(plan, op).map_or("its cache", |l| plan.wt(l).tensor.as_str());
                let what = format!(
                    "{} was sent to {}, but {} reads it on {}, where {with} is; send that there too",
                    w.tensor,
                    name(d),
                    op.kind(),
                    name(*device)
                );
                return setting("-ot", what);
            }
        }
        Ok(())
    }
}

/// The weight of an op with the most bytes.
fn largest(plan: &Plan, op: &Op) -> Option<WeightId> {
    let mut best: Option<WeightId> = None;
    op.accesses(&mut |a| {
        if let Access::Weight(w) = a
            && best.is_none_or(|b| weight_bytes(plan.wt(w)) > weight_bytes(plan.wt(b)))
        {
            best = Some(w);
        }
    });
    best
}

/// What tells caches and states of layers apart.
type Memory = (bool, u16, u32);

fn memory_of(op: &Op) -> Option<Memory> {
    let mut found = None;
    op.accesses(&mut |a| match a {
        Access::CacheRead(c) | Access::CacheWrite(c) => found = Some((false, c.group.0, c.layer)),
        Access::State(s, layer) => found = Some((true, s.0, layer)),
        _ => {}
    });
    found
}

struct Assignment<'a> {
    placement: &'a Placement,
    plan: &'a Plan,
    layers: Vec<DeviceId>,
    value_layer: Vec<Option<usize>>,
    value_device: Vec<Option<DeviceId>>,
    memory: HashMap<Memory, DeviceId>,
}

impl Assignment<'_> {
    /// The device and layer of op `i`, those before it being known.
    fn op(&mut self, i: usize) -> (DeviceId, Option<usize>) {
        let plan = self.plan;
        let op = &plan.ops[i];
        let mut layer = None;
        op.accesses(&mut |a| {
            let l = match a {
                Access::Weight(w) => layer_of(&plan.wt(w).tensor),
                Access::Read(v) => self.value_layer[v.0 as usize],
                _ => None,
            };
            layer = layer.max(l);
        });
        let in_head = plan.head.is_some_and(|h| i >= h);
        let base = match layer {
            _ if in_head => self.layers.last(),
            Some(l) => self.layers.get(l),
            None => self.layers.first(),
        };
        let base = base.copied().unwrap_or(HOST);
        if let Some(memory) = memory_of(op) {
            let home = match self.memory.get(&memory) {
                Some(d) => *d,
                None => self.home(memory).unwrap_or(base),
            };
            self.memory.insert(memory, home);
            return (home, layer);
        }
        if let Some(w) = largest(plan, op) {
            return (self.placement.wanted(plan.wt(w)).unwrap_or(base), layer);
        }
        (self.largest_input(op, base).unwrap_or(base), layer)
    }

    /// Where most bytes are that an op without weights reads; the layer's device among equals.
    fn largest_input(&self, op: &Op, base: DeviceId) -> Option<DeviceId> {
        let mut by_device: BTreeMap<DeviceId, usize> = BTreeMap::new();
        for v in op.reads() {
            let x = self.plan.val(v);
            let rows = if let Dim::Slots(k) = x.rows { k } else { 1 };
            // An input of the whole Plan comes from the host, whatever reads it.
            if let Some(d) = self.value_device[v.0 as usize] {
                let most = by_device.entry(d).or_default();
                *most = (*most).max(rows * x.cols);
            }
        }
        by_device.into_iter().max_by_key(|(d, n)| (*n, *d == base)).map(|(d, _)| d)
    }

    /// Where most of the matrices are that feed the ops of a cache or state.
    fn home(&self, memory: Memory) -> Option<DeviceId> {
        let producers = self.plan.producers();
        let mut next: Vec<ValueId> = Vec::new();
        let users = self.plan.ops.iter().filter(|op| memory_of(op) == Some(memory));
        users.for_each(|op| next.extend(op.reads()));
        let mut seen: BTreeSet<usize> = BTreeSet::new();
        let mut bytes: BTreeMap<DeviceId, usize> = BTreeMap::new();
        while let Some(v) = next.pop() {
            let Some(i) = producers[v.0 as usize].filter(|i| seen.insert(*i)) else { continue };
            let op = &self.plan.ops[i];
            if op.members().is_empty() {
                // Not through another layer's memory, nor past the residual stream.
                if memory_of(op).is_none() && !matches!(op, Op::Embed { .. }) {
                    next.extend(op.reads());
                }
                continue;
            }
            for m in op.members() {
                let w = self.plan.wt(m.w);
                let layer = layer_of(&w.tensor).and_then(|l| self.layers.get(l)).copied();
                if let Some(d) = self.placement.wanted(w).or(layer) {
                    *bytes.entry(d).or_default() += weight_bytes(w);
                }
            }
        }
        bytes.into_iter().max_by_key(|(_, n)| *n).map(|(d, _)| d)
    }
}
