//! Several backends as one: loads, allocates and compiles each part of a placed Plan where it belongs.

use super::cache::SplitCache;
use super::cut::{Cut, cut};
use super::executable::SplitExecutable;
use super::place::place;
use crate::backend::{Backend, Cache, CompileOptions, Executable, Rounds, WeightSource, Weights};
use crate::error::{Error, Result};
use crate::levers::LeverSet;
use crate::plan::{DeviceId, Plan};
use std::any::Any;
use std::sync::Arc;

/// Says on which device each op of a Plan runs. It must give the same answer each time.
pub type Policy = dyn Fn(&Plan) -> Result<Vec<DeviceId>> + Send + Sync;

/// Several backends; device `i` is the `i`-th.
pub struct SplitBackend {
    name: String,
    backends: Vec<Arc<dyn Backend>>,
    policy: Box<Policy>,
}

/// Weights of several backends.
enum SplitWeights {
    /// All of them on one device.
    Whole(Arc<dyn Weights>),
    /// One a part.
    Parts(Vec<Arc<dyn Weights>>),
}

impl Weights for SplitWeights {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn extra_bytes(&self) -> usize {
        match self {
            SplitWeights::Whole(w) => w.extra_bytes(),
            SplitWeights::Parts(parts) => parts.iter().map(|w| w.extra_bytes()).sum(),
        }
    }
}

/// Where a Plan goes.
enum Layout {
    /// All of it to one backend, which then does everything itself.
    Whole(usize),
    Parts(Box<Cut>),
}

impl SplitBackend {
    /// Joins backends, of which `policy` chooses.
    pub fn new(backends: Vec<Arc<dyn Backend>>, policy: Box<Policy>) -> SplitBackend {
        let name = backends.iter().map(|b| b.name()).collect::<Vec<_>>().join("+");
        SplitBackend { name, backends, policy }
    }

    /// The Plan with every op on its device, and the copies between them.
    pub fn placed(&self, plan: &Plan) -> Result<Plan> {
        let devices = (self.policy)(plan)?;
        if let Some(d) = devices.iter().find(|d| usize::from(d.0) >= self.backends.len()) {
            return Err(self.error(format!("device {} does not exist; there are {}", d.0, self.backends.len())));
        }
        place(plan, &devices)
    }

    /// The backends' names, by device.
    pub fn devices(&self) -> Vec<&str> {
        self.backends.iter().map(|b| b.name()).collect()
    }

    fn error(&self, what: String) -> Error {
        Error::Unsupported { backend: "split", what: format!("{} ({})", what, self.name) }
    }

    fn layout(&self, plan: &Plan) -> Result<Layout> {
        let cut = cut(self.placed(plan)?)?;
        Ok(match &cut.parts[..] {
            [] => Layout::Whole(0),
            [one] => Layout::Whole(one.device.0.into()),
            _ => Layout::Parts(Box::new(cut)),
        })
    }

    fn backend(&self, d: DeviceId) -> &dyn Backend {
        self.backends[usize::from(d.0)].as_ref()
    }
}

impl Backend for SplitBackend {
    fn name(&self) -> &str {
        &self.name
    }

    fn flushes(&self) -> bool {
        self.backends.iter().any(|b| b.flushes())
    }

    fn staging(&self, tokens: usize) -> f64 {
        self.backends.iter().map(|b| b.staging(tokens)).fold(0.0, f64::max)
    }

    fn rounds_to_bf16(&self, levers: LeverSet) -> Rounds {
        let mut all = self.backends.iter().map(|b| b.rounds_to_bf16(levers));
        let first = all.next().unwrap_or_default();
        if all.all(|other| other == first) { first } else { Rounds::Somewhere }
    }

    fn buckets(&self, n_ubatch: usize) -> Vec<usize> {
        // The most particular one's: a host that gets more of them is none the worse.
        let all = self.backends.iter().map(|b| b.buckets(n_ubatch));
        all.max_by_key(Vec::len).unwrap_or_else(|| vec![n_ubatch])
    }

    fn load(&self, plan: &Plan, source: &dyn WeightSource) -> Result<Arc<dyn Weights>> {
        Ok(Arc::new(match self.layout(plan)? {
            Layout::Whole(d) => SplitWeights::Whole(self.backends[d].load(plan, source)?),
            Layout::Parts(cut) => {
                let load = |p: &super::cut::Part| self.backend(p.device).load(&p.plan, source);
                SplitWeights::Parts(cut.parts.iter().map(load).collect::<Result<_>>()?)
            }
        }))
    }

    fn alloc(&self, plan: &Plan, pages: &[usize], slots: &[usize]) -> Result<Box<dyn Cache>> {
        let cut = match self.layout(plan)? {
            Layout::Whole(d) => return self.backends[d].alloc(plan, pages, slots),
            Layout::Parts(cut) => cut,
        };
        let own = |ids: &[(u16, Vec<u32>)], of: &[usize]| -> Result<Vec<usize>> {
            let get = |id: u16| of.get(usize::from(id)).copied();
            let missing =
                || Error::Batch("a cache needs a number of pages for each group and of slots for each state".into());
            ids.iter().map(|(id, _)| get(*id).ok_or_else(missing)).collect()
        };
        let mut caches = Vec::new();
        for p in &cut.parts {
            let (pages, slots) = (own(&p.groups, pages)?, own(&p.states, slots)?);
            caches.push(self.backend(p.device).alloc(&p.plan, &pages, &slots)?);
        }
        Ok(Box::new(SplitCache::new(&cut.plan, &cut.parts, caches, pages, slots)))
    }

    fn compile(
        &self,
        plan: &Plan,
        options: &CompileOptions,
        weights: &Arc<dyn Weights>,
    ) -> Result<Box<dyn Executable>> {
        let foreign = || self.error("these weights were loaded by another backend".into());
        let weights = weights.as_any().downcast_ref::<SplitWeights>().ok_or_else(foreign)?;
        match (self.layout(plan)?, weights) {
            (Layout::Whole(d), SplitWeights::Whole(w)) => self.backends[d].compile(plan, options, w),
            (Layout::Parts(cut), SplitWeights::Parts(parts)) if parts.len() == cut.parts.len() => {
                let compile = |s: &super::cut::Segment| {
                    let device = cut.parts[s.part].device;
                    self.backend(device).compile(&s.plan, options, &parts[s.part])
                };
                let executables = cut.segments.iter().map(compile).collect::<Result<_>>()?;
                Ok(Box::new(SplitExecutable::new(*cut, executables, options.bucket)?))
            }
            _ => Err(self.error("these weights were loaded for another Plan".into())),
        }
    }
}
