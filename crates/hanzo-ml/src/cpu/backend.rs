//! The CPU as a [`Backend`].

use super::contract;
use super::exec::CpuExecutable;
use super::huge::HugePages;
use super::isa::IsaLevel;
use super::memory::{CpuCache, CpuWeights};
use super::pool::Pool;
use crate::backend::{Backend, Cache, CompileOptions, Executable, Rounds, WeightSource, Weights};
use crate::error::{Error, Result};
use crate::levers::LeverSet;
use crate::plan::Plan;
use std::sync::Arc;

/// How the CPU is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads that run ops; 0 means one a core that this process may use.
    pub threads: usize,
    /// Instructions that kernels may use.
    pub isa: IsaLevel,
    /// Whether weights are copied to huge pages.
    pub huge_pages: HugePages,
}

impl Default for CpuOptions {
    fn default() -> Self {
        CpuOptions { threads: 0, isa: IsaLevel::detect(), huge_pages: HugePages::default() }
    }
}

/// The CPU: a thread pool and an instruction set.
pub struct CpuBackend {
    pool: Arc<Pool>,
    isa: IsaLevel,
    huge_pages: HugePages,
}

impl CpuBackend {
    /// Starts the threads.
    ///
    /// # Errors
    /// If this CPU lacks the instruction set, or the system gives no threads.
    pub fn new(options: CpuOptions) -> Result<CpuBackend> {
        if !options.isa.is_available() {
            let what = format!("this CPU does not have {}; it has {}", options.isa, IsaLevel::available_names());
            return Err(Error::Unsupported { backend: "cpu", what });
        }
        let threads = match options.threads {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get()),
            n => n,
        };
        let pool = Pool::new(threads).map_err(|e| Error::Unsupported {
            backend: "cpu",
            what: format!("cannot start {threads} threads: {e}; ask for fewer"),
        })?;
        Ok(CpuBackend { pool: Arc::new(pool), isa: options.isa, huge_pages: options.huge_pages })
    }

    /// Threads that run ops.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The instruction set in force.
    pub fn isa(&self) -> IsaLevel {
        self.isa
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &str {
        "cpu"
    }

    fn rounds_to_bf16(&self, levers: LeverSet) -> Rounds {
        match levers.on("bf16_activations") && contract::rounds_to_bf16(self.isa) {
            true => Rounds::Always,
            false => Rounds::Never,
        }
    }

    fn load(&self, plan: &Plan, source: &dyn WeightSource) -> Result<Arc<dyn Weights>> {
        Ok(Arc::new(CpuWeights::bind(plan, source, self.huge_pages, &self.pool)?))
    }

    fn alloc(&self, plan: &Plan, pages: &[usize], slots: &[usize]) -> Result<Box<dyn Cache>> {
        Ok(Box::new(CpuCache::new(plan, pages, slots)?))
    }

    fn compile(
        &self,
        plan: &Plan,
        options: &CompileOptions,
        weights: &Arc<dyn Weights>,
    ) -> Result<Box<dyn Executable>> {
        Ok(Box::new(CpuExecutable::new(plan, options, weights, &self.pool, self.isa)?))
    }
}
