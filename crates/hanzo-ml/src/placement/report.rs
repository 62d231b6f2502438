//! What is where: a placed Plan summed up by device. Only counting happens here.

use super::assign::{layer_of, weight_bytes};
use crate::plan::{Access, DeviceId, Op, Plan};
use std::collections::BTreeSet;

/// One tensor of the model file and where it is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// The layer, if its name says so.
    pub layer: Option<usize>,
    /// Bytes that the Plan reads of it.
    pub bytes: usize,
}

/// What a device has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// The device's name.
    pub device: String,
    /// Layers all of whose tensors are here.
    pub layers: Vec<usize>,
    /// Layers some of whose tensors are here.
    pub parts_of: Vec<usize>,
    /// Is the matrix that makes the logits here?
    pub output: bool,
    /// Everything here.
    pub tensors: Vec<Tensor>,
    /// Layers whose caches or states are here.
    pub caches: usize,
    /// Ops that run here.
    pub ops: usize,
    /// Values that come here from another device, each step.
    pub copies: usize,
}

impl Share {
    /// Bytes of its weights.
    pub fn bytes(&self) -> usize {
        self.tensors.iter().map(|t| t.bytes).sum()
    }
}

/// The shares of a placed Plan, one a device, those without ops included.
pub fn shares(plan: &Plan, devices: &[&str]) -> Vec<Share> {
    let mut tensors: Vec<BTreeSet<Tensor>> = vec![BTreeSet::new(); devices.len()];
    for w in &plan.weights {
        // Rows of a fused tensor are weights of their own: they add up.
        let at = &mut tensors[usize::from(w.device.0).min(devices.len() - 1)];
        let bytes = weight_bytes(w);
        let old = at.iter().find(|t| t.name == w.tensor).cloned();
        let before = old.as_ref().map_or(0, |t| t.bytes);
        old.map(|t| at.remove(&t));
        at.insert(Tensor { name: w.tensor.clone(), layer: layer_of(&w.tensor), bytes: before + bytes });
    }
    let layers_on = |d: usize| -> BTreeSet<usize> { tensors[d].iter().filter_map(|t| t.layer).collect() };
    let share = |(d, name): (usize, &&str)| {
        let here = layers_on(d);
        let elsewhere: BTreeSet<usize> = (0..devices.len()).filter(|o| *o != d).flat_map(layers_on).collect();
        let (parts_of, layers) = here.into_iter().partition(|l| elsewhere.contains(l));
        let device = DeviceId(d as u16);
        let mut caches = BTreeSet::new();
        let (mut ops, mut copies, mut output) = (0, 0, false);
        for op in &plan.ops {
            if let Op::Copy { x, out } = op
                && plan.val(*x).device != plan.val(*out).device
            {
                copies += usize::from(plan.val(*out).device == device);
                continue;
            }
            let mut own = false;
            let mut memory = Vec::new();
            op.accesses(&mut |a| match a {
                Access::Read(v) | Access::Write(v) => own |= plan.val(v).device == device,
                Access::CacheRead(c) | Access::CacheWrite(c) => memory.push((false, c.group.0, c.layer)),
                Access::State(s, l) => memory.push((true, s.0, l)),
                Access::Weight(_) => {}
            });
            if own {
                ops += 1;
                caches.extend(memory);
                output |= plan.outputs.last().is_some_and(|v| op.writes().contains(v)) && !op.members().is_empty();
            }
        }
        let tensors = tensors[d].iter().cloned().collect();
        Share { device: name.to_string(), layers, parts_of, output, tensors, caches: caches.len(), ops, copies }
    };
    devices.iter().enumerate().map(share).collect()
}
