//! The rewrite that puts a Plan on devices: every value and weight gets its device, and a value that is read on another
//! one is copied there once. Where an op should run is an input here, not a decision.

use crate::error::{Error, Result};
use crate::plan::{Access, DeviceId, Dim, IdMut, Op, Plan, ValueId, WeightId};
use std::collections::HashMap;

/// Ops that share a layer's cache or state run where the first of them does: its memory is in one place.
pub fn settle(plan: &Plan, devices: &mut [DeviceId]) {
    let mut home = HashMap::new();
    for (op, device) in plan.ops.iter().zip(devices) {
        op.accesses(&mut |a| {
            let memory = match a {
                Access::CacheRead(c) | Access::CacheWrite(c) => (0, c.group.0, c.layer),
                Access::State(s, layer) => (1, s.0, layer),
                _ => return,
            };
            *device = *home.entry(memory).or_insert(*device);
        });
    }
}

/// Puts op `i` on `devices[i]` (after [`settle`]). Values live where they are made, inputs on device 0; a weight that ops
/// of several devices read becomes one weight each.
///
/// # Errors
/// If the Plan does not hold together, before or after.
pub fn place(plan: &Plan, devices: &[DeviceId]) -> Result<Plan> {
    plan.check()?;
    if devices.len() != plan.ops.len() {
        let what = format!("{} devices for {} ops", devices.len(), plan.ops.len());
        return Err(Error::Plan { index: 0, op: "place", what });
    }
    let mut devices = devices.to_vec();
    settle(plan, &mut devices);
    let mut placer = Placer {
        out: Plan { ops: Vec::with_capacity(plan.ops.len()), weights: Vec::new(), ..plan.clone() },
        copies: HashMap::new(),
        weights: HashMap::new(),
    };
    for v in &mut placer.out.values {
        v.device = DeviceId::default();
    }
    for (op, device) in plan.ops.iter().zip(&devices) {
        for v in op.writes() {
            placer.out.values[v.0 as usize].device = *device;
        }
    }
    for (i, (op, device)) in plan.ops.iter().zip(&devices).enumerate() {
        if plan.head == Some(i) {
            // What the head reads of the body crosses once, not once a chunk.
            for (op, device) in plan.ops[i..].iter().zip(&devices[i..]) {
                let body = |v: &ValueId| plan.val(*v).rows != Dim::Out;
                op.reads().into_iter().filter(body).for_each(|v| _ = placer.at(v, *device));
            }
            placer.out.head = Some(placer.out.ops.len());
        }
        op.reads().into_iter().for_each(|v| _ = placer.at(v, *device));
        let mut op = op.clone();
        placer.renumber(&mut op, *device, plan);
        placer.out.ops.push(op);
    }
    placer.out.check()?;
    Ok(placer.out)
}

struct Placer {
    out: Plan,
    copies: HashMap<(ValueId, DeviceId), ValueId>,
    weights: HashMap<(WeightId, DeviceId), WeightId>,
}

impl Placer {
    /// The value on a device: itself, or its copy there, made now if there is none.
    fn at(&mut self, v: ValueId, device: DeviceId) -> ValueId {
        let value = self.out.val(v).clone();
        if value.device == device {
            return v;
        }
        if let Some(copy) = self.copies.get(&(v, device)) {
            return *copy;
        }
        let name = format!("{}@{}", value.name, device.0);
        let copy = self.out.typed_value(name, value.rows, value.cols, value.dtype);
        self.out.values[copy.0 as usize].device = device;
        self.out.ops.push(Op::Copy { x: v, out: copy });
        self.copies.insert((v, device), copy);
        copy
    }

    /// Points an op at what its device has.
    fn renumber(&mut self, op: &mut Op, device: DeviceId, plan: &Plan) {
        op.ids_mut(&mut |id| match id {
            IdMut::Value(v) => *v = self.copies.get(&(*v, device)).copied().unwrap_or(*v),
            IdMut::Weight(w) => {
                let weights = &mut self.out.weights;
                *w = *self.weights.entry((*w, device)).or_insert_with(|| {
                    weights.push(crate::plan::Weight { device, ..plan.wt(*w).clone() });
                    WeightId(weights.len() as u32 - 1)
                });
            }
            IdMut::Cache(_) | IdMut::State(..) => {}
        });
    }
}
