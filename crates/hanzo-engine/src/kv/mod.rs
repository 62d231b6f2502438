//! Which pages and state slots belong to which sequence. The bytes are a backend's; which model or text they came from is
//! of no concern here.
//!
//! Page groups and state slots are given out from pools with reference counts, so forks share what they have in common.
//! A windowed group frees the pages that no later query can see.

mod pool;
mod sequence;
#[cfg(test)]
mod tests;

pub use pool::Pool;
pub use sequence::Sequence;

use crate::error::{Error, Result};
use hanzo_ml::backend::{Backend, Cache};
use hanzo_ml::cache::{CacheGroup, PAGE};
use hanzo_ml::plan::Plan;
use sequence::{Table, lock};
use std::sync::{Arc, Mutex};

/// Tokens by which a sequence may always be truncated: windowed groups keep this much more than their window.
pub const SLACK: usize = PAGE;

/// Stands for a position whose input was an embedding row.
pub const NO_TOKEN: u32 = u32::MAX;

/// What is free and what is shared.
#[derive(Debug)]
struct Pools {
    pages: Vec<Pool>,
    slots: Vec<Pool>,
}

/// How much a cache should hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvSize {
    /// Tokens of one sequence at most.
    pub n_ctx: usize,
    /// Sequences of that length at the same time.
    pub n_seqs: usize,
    /// Tokens written in one step.
    pub n_ubatch: usize,
}

impl KvSize {
    /// Pages of a group, the padding page included.
    fn pages(&self, group: &CacheGroup) -> usize {
        let whole = self.n_ctx.div_ceil(PAGE);
        let per_seq = match group.window {
            // Both ends of the window may cut through a page.
            Some(w) => whole.min((w as usize + SLACK + self.n_ubatch).div_ceil(PAGE) + 1),
            None => whole,
        };
        1 + self.n_seqs * per_seq
    }
}

/// The caches of a model, and who owns what in them.
pub struct Kv {
    cache: Box<dyn Cache>,
    groups: Vec<CacheGroup>,
    pools: Arc<Mutex<Pools>>,
    n_ctx: usize,
}

impl Kv {
    /// Allocates the caches of a Plan.
    pub fn new(backend: &dyn Backend, plan: &Plan, size: KvSize) -> Result<Kv> {
        let pages: Vec<usize> = plan.groups.iter().map(|g| size.pages(g)).collect();
        let slots = vec![size.n_seqs; plan.states.len()];
        let cache = backend.alloc(plan, &pages, &slots)?;
        Ok(Kv::over(cache, plan.groups.clone(), size.n_ctx))
    }

    /// Takes over an allocated cache.
    pub fn over(cache: Box<dyn Cache>, groups: Vec<CacheGroup>, n_ctx: usize) -> Kv {
        let pages = cache.pages().iter().map(|n| Pool::new(1, *n)).collect();
        let slots = cache.slots().iter().map(|n| Pool::new(0, *n)).collect();
        Kv { cache, groups, pools: Arc::new(Mutex::new(Pools { pages, slots })), n_ctx }
    }

    /// An empty sequence.
    pub fn sequence(&mut self) -> Result<Sequence> {
        let mut pools = lock(&self.pools);
        if let Some(s) = pools.slots.iter().position(|p| p.free() == 0) {
            return Err(Error::CacheFull { group: format!("state {s}"), needed: 1, free: 0 });
        }
        let slots: Vec<u32> = pools.slots.iter_mut().filter_map(Pool::take).collect();
        drop(pools);
        // Room for every page there can be: growing a sequence allocates nothing.
        let room = self.n_ctx.div_ceil(PAGE) + 1;
        let tables = self.groups.iter().map(|_| Table { first: 0, pages: Vec::with_capacity(room) }).collect();
        let tokens = Vec::with_capacity(self.n_ctx);
        let seq = Sequence { pools: self.pools.clone(), tables, slots, tokens };
        for (state, slot) in seq.slots.iter().enumerate() {
            self.cache.clear_slot(state, *slot)?;
        }
        Ok(seq)
    }

    /// The longest sequence, in tokens.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Free pages of each group.
    pub fn free_pages(&self) -> Vec<usize> {
        lock(&self.pools).pages.iter().map(Pool::free).collect()
    }

    /// Does nobody hold anything?
    pub fn is_unused(&self) -> bool {
        let pools = lock(&self.pools);
        pools.pages.iter().chain(&pools.slots).all(Pool::is_unused)
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// The backend's cache.
    pub fn cache(&mut self) -> &mut dyn Cache {
        &mut *self.cache
    }

    fn window(&self, group: usize) -> Option<u32> {
        self.groups[group].window
    }

    fn group_name(&self, group: usize) -> &str {
        &self.groups[group].name
    }
}
