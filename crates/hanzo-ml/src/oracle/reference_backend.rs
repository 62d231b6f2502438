//! A backend that runs the interpreter and rounds every value to f32: the slowest correct one.
//!
//! It exists so that the gate's own machinery can be tested (it must pass every oracle and catch every planted fault),
//! and as a second implementation to compare a real one with.

use super::array::Array;
use super::interp::{After, Interpreter};
use super::pages::Memory;
use super::weights::Weights;
use crate::backend::{Backend, Cache, CompileOptions, Executable, OpTime, WeightSource};
use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::levers::rewrite;
use crate::plan::{DType, Dim, Plan, Sizes, ValueId};
use std::any::Any;
use std::sync::Arc;

const NAME: &str = "reference";

/// The interpreter as a backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReferenceBackend;

impl crate::backend::Weights for Weights {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn extra_bytes(&self) -> usize {
        0
    }
}

impl Backend for ReferenceBackend {
    fn name(&self) -> &str {
        NAME
    }

    fn load(&self, plan: &Plan, source: &dyn WeightSource) -> Result<Arc<dyn crate::backend::Weights>> {
        Ok(Arc::new(Weights::load(plan, source)?))
    }

    fn alloc(&self, plan: &Plan, pages: &[usize], slots: &[usize]) -> Result<Box<dyn Cache>> {
        Ok(Box::new(ReferenceCache {
            memory: Memory::new(plan, pages, slots),
            pages: pages.to_vec(),
            slots: slots.to_vec(),
        }))
    }

    fn compile(
        &self,
        plan: &Plan,
        options: &CompileOptions,
        weights: &Arc<dyn crate::backend::Weights>,
    ) -> Result<Box<dyn Executable>> {
        let plan = rewrite(plan, options.levers);
        plan.check()?;
        let rows = |v: &crate::plan::Value| vec![0.0; v.rows.eval(&options.bucket) * v.cols];
        let values = plan.values.iter().map(rows).collect();
        Ok(Box::new(ReferenceExecutable { plan, options: *options, weights: weights.clone(), values }))
    }
}

struct ReferenceCache {
    memory: Memory,
    pages: Vec<usize>,
    slots: Vec<usize>,
}

impl ReferenceCache {
    fn state(&mut self, state: usize, slot: u32) -> Result<Vec<std::ops::Range<usize>>> {
        let n = self.slots.get(state).copied().unwrap_or(0);
        if slot as usize >= n {
            return Err(Error::Batch(format!("state slot {slot} of kind {state} does not exist")));
        }
        let elements = self.memory.elements[state];
        let layers = self.memory.states[state].len() / (n * elements).max(1);
        Ok((0..layers).map(|l| (l * n + slot as usize) * elements).map(|at| at..at + elements).collect())
    }

    fn page(&self, group: usize, page: u32) -> Result<&Vec<u8>> {
        let pages = self.memory.groups.get(group).and_then(|g| g.pages.get(page as usize));
        pages.ok_or_else(|| Error::Batch(format!("page {page} of group {group} does not exist")))
    }
}

impl Cache for ReferenceCache {
    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn pages(&self) -> &[usize] {
        &self.pages
    }

    fn slots(&self) -> &[usize] {
        &self.slots
    }

    fn copy_page(&mut self, group: usize, from: u32, to: u32) -> Result<()> {
        let bytes = self.page(group, from)?.clone();
        self.write_page(group, to, &bytes)
    }

    fn copy_slot(&mut self, state: usize, from: u32, to: u32) -> Result<()> {
        for (from, to) in self.state(state, from)?.into_iter().zip(self.state(state, to)?) {
            self.memory.states[state].copy_within(from, to.start);
        }
        Ok(())
    }

    fn clear_slot(&mut self, state: usize, slot: u32) -> Result<()> {
        for range in self.state(state, slot)? {
            self.memory.states[state][range].fill(super::num::Num::ZERO);
        }
        Ok(())
    }

    fn read_page(&self, group: usize, page: u32) -> Result<Vec<u8>> {
        self.page(group, page).cloned()
    }

    fn write_page(&mut self, group: usize, page: u32, bytes: &[u8]) -> Result<()> {
        let have = self.page(group, page)?.len();
        if bytes.len() != have {
            return Err(Error::Batch(format!("{} bytes for a page of {have}", bytes.len())));
        }
        self.memory.groups[group].pages[page as usize].copy_from_slice(bytes);
        Ok(())
    }

    fn bytes(&self) -> usize {
        let pages: usize = self.memory.groups.iter().flat_map(|g| &g.pages).map(Vec::len).sum();
        pages + self.memory.states.iter().map(|s| s.len() * 4).sum::<usize>()
    }
}

struct ReferenceExecutable {
    plan: Plan,
    options: CompileOptions,
    weights: Arc<dyn crate::backend::Weights>,
    values: Vec<Vec<f32>>,
}

impl ReferenceExecutable {
    fn fits(&self, s: &Sizes) -> Result<()> {
        let b = &self.options.bucket;
        if s.n_tokens > b.n_tokens || s.n_seqs > b.n_seqs {
            return Err(Error::Batch(format!("{s:?} does not fit the bucket {b:?}")));
        }
        Ok(())
    }
}

impl Executable for ReferenceExecutable {
    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn barriers(&self) -> usize {
        0
    }

    fn arena_bytes(&self) -> usize {
        self.values.iter().map(|v| v.len() * 4).sum()
    }

    fn value_mut(&mut self, v: ValueId) -> Result<&mut [f32]> {
        Ok(&mut self.values[v.0 as usize])
    }

    fn value(&self, v: ValueId) -> Result<&[f32]> {
        Ok(&self.values[v.0 as usize])
    }

    fn run(&mut self, batch: &Batch<'_>, cache: &mut dyn Cache, sink: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
        let sizes = batch.sizes();
        self.fits(&sizes)?;
        let foreign = |what: &str| Error::Unsupported { backend: NAME, what: format!("{what} of another backend") };
        let weights = self.weights.as_any().downcast_ref::<Weights>().ok_or_else(|| foreign("weights"))?;
        let cache = cache.as_any_mut().downcast_mut::<ReferenceCache>().ok_or_else(|| foreign("a cache"))?;
        let mut interp = Interpreter::new(&self.plan, weights, self.options.precision);
        interp.after = After::Round;
        let input = |v: &ValueId| {
            let value = self.plan.val(*v);
            let rows = &self.values[v.0 as usize][..value.rows.eval(&sizes) * value.cols];
            let plain: Vec<f32> = match value.dtype {
                DType::I32 => rows.iter().map(|x| x.to_bits() as i32 as f32).collect(),
                _ => rows.to_vec(),
            };
            (*v, Array::from_f32(value.cols, &plain))
        };
        let inputs: Vec<_> = self.plan.inputs.iter().map(input).collect();
        interp.run(batch, &inputs, &mut cache.memory);
        for v in &self.plan.outputs {
            let mut rows = interp.value(*v).to_f32();
            if self.plan.val(*v).dtype == DType::I32 {
                rows.iter_mut().for_each(|x| *x = f32::from_bits(*x as i32 as u32));
            }
            if self.plan.val(*v).rows == Dim::Out && self.plan.outputs.last() == Some(v) {
                let (cols, chunk) = (self.plan.val(*v).cols, self.options.bucket.n_out.max(1));
                for (i, rows) in rows.chunks(chunk * cols).enumerate() {
                    sink(i * chunk, rows);
                }
            }
            self.values[v.0 as usize] = rows;
        }
        Ok(())
    }

    fn profile(&self) -> Vec<OpTime> {
        Vec::new()
    }

    fn set_profile(&mut self, _on: bool) {}
}
