//! A sequence: the tokens a model has seen, and which pages and state slots hold what it remembers of them.

use super::{Kv, Pools, SLACK};
use crate::error::{Error, Result};
use hanzo_ml::cache::PAGE;
use std::sync::{Arc, Mutex};

/// A sequence's pages in one group.
#[derive(Debug)]
pub(super) struct Table {
    /// Index of the first page that is still there.
    pub first: usize,
    /// Ids of the pages from there on.
    pub pages: Vec<u32>,
}

/// What a sequence holds. Dropping it gives its pages and slots back.
///
/// Sequences share pages: [`Sequence::fork`] copies none, and a page is copied when one of its owners is about to write to
/// it. Recurrent states cannot be shared or cut back, so a fork copies them, and truncation is to nothing or to a fork.
#[derive(Debug)]
pub struct Sequence {
    pub(super) pools: Arc<Mutex<Pools>>,
    pub(super) tables: Vec<Table>,
    pub(super) slots: Vec<u32>,
    pub(super) tokens: Vec<u32>,
}

impl Sequence {
    /// The tokens in the cache, in order; [`super::NO_TOKEN`] where an embedding row was.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens in the cache: also the position of the next one.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Nothing in the cache?
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Page ids of a group from its first page on, and that page's index.
    pub fn pages(&self, group: usize) -> (usize, &[u32]) {
        (self.tables[group].first, &self.tables[group].pages)
    }

    /// Does it hold any page?
    pub fn holds_pages(&self) -> bool {
        self.tables.iter().any(|t| !t.pages.is_empty())
    }

    /// State slots, one a kind of state.
    pub fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// Makes room for `n` more tokens: frees pages out of the windows, takes new ones, and copies a shared page that is
    /// about to be written. All or nothing: without enough free pages nothing changes.
    pub fn reserve(&mut self, kv: &mut Kv, n: usize) -> Result<()> {
        let (len, end) = (self.len(), self.len() + n);
        if end > kv.n_ctx() {
            return Err(Error::ContextFull { len, more: n, n_ctx: kv.n_ctx() });
        }
        let pools = self.pools.clone();
        let mut pools = lock(&pools);
        for (g, table) in self.tables.iter_mut().enumerate() {
            let Some(window) = kv.window(g) else { continue };
            // The next query sees positions above len - window; the slack allows small truncations.
            let keep = (len + 1).saturating_sub(window as usize + SLACK) / PAGE;
            let gone = keep.saturating_sub(table.first).min(table.pages.len());
            for page in table.pages.drain(..gone) {
                pools.pages[g].release(page);
            }
            table.first += gone;
        }
        let writes = len / PAGE..end.div_ceil(PAGE);
        let have = |t: &Table| t.first + t.pages.len();
        for (g, table) in self.tables.iter().enumerate() {
            let copies = writes.clone().take_while(|i| *i < have(table));
            let copies = copies.filter(|i| pools.pages[g].is_shared(table.pages[i - table.first])).count();
            let needed = copies + writes.end.saturating_sub(have(table));
            let free = pools.pages[g].free();
            if needed > free {
                return Err(Error::CacheFull { group: kv.group_name(g).to_string(), needed, free });
            }
        }
        for (g, table) in self.tables.iter_mut().enumerate() {
            for i in writes.clone() {
                let (at, pool) = (i - table.first, &mut pools.pages[g]);
                match table.pages.get(at).copied() {
                    Some(page) if pool.is_shared(page) => {
                        let own = pool.take().ok_or_else(full)?;
                        if let Err(e) = kv.cache().copy_page(g, page, own) {
                            pool.release(own);
                            return Err(e.into());
                        }
                        pool.release(page);
                        table.pages[at] = own;
                    }
                    Some(_) => {}
                    None => table.pages.push(pool.take().ok_or_else(full)?),
                }
            }
        }
        Ok(())
    }

    /// Declares that the reserved room now holds these tokens.
    pub fn commit(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
    }

    /// A second sequence that continues from the same point. Pages are shared, states copied.
    pub fn fork(&self, kv: &mut Kv) -> Result<Sequence> {
        let mut new = kv.sequence()?;
        new.become_copy(self, kv)?;
        Ok(new)
    }

    /// What [`Sequence::restore`] goes back to: a fork.
    pub fn snapshot(&self, kv: &mut Kv) -> Result<Sequence> {
        self.fork(kv)
    }

    /// Goes back to a snapshot, which stays valid.
    pub fn restore(&mut self, snapshot: &Sequence, kv: &mut Kv) -> Result<()> {
        self.become_copy(snapshot, kv)
    }

    fn become_copy(&mut self, other: &Sequence, kv: &mut Kv) -> Result<()> {
        for (state, (from, to)) in other.slots.iter().zip(&self.slots).enumerate() {
            kv.cache().copy_slot(state, *from, *to)?;
        }
        let mut pools = lock(&self.pools);
        for (g, (own, other)) in self.tables.iter_mut().zip(&other.tables).enumerate() {
            other.pages.iter().for_each(|p| pools.pages[g].share(*p));
            own.pages.drain(..).for_each(|p| pools.pages[g].release(p));
            own.pages.extend_from_slice(&other.pages);
            own.first = other.first;
        }
        self.tokens.clear();
        self.tokens.extend_from_slice(&other.tokens);
        Ok(())
    }

    /// Forgets everything from position `len` on, and gives back pages that are reserved beyond it.
    ///
    /// Fails, changing nothing, if `len` is ahead of the end, if a window that a query at `len` needs was freed, or if the
    /// model has recurrent states and `len` is neither 0 nor the end (restore a snapshot instead).
    pub fn truncate(&mut self, len: usize, kv: &mut Kv) -> Result<()> {
        let refuse = |what: &str| Err(Error::Truncate { from: self.len(), to: len, what: what.to_string() });
        if len > self.len() {
            return refuse("there are not that many tokens");
        }
        if len > 0 && len < self.len() && !self.slots.is_empty() {
            return refuse("recurrent states cannot be cut back; restore a snapshot");
        }
        for (g, table) in self.tables.iter().enumerate() {
            let needed = kv.window(g).map_or(0, |w| (len + 1).saturating_sub(w as usize));
            if len > 0 && needed < table.first * PAGE {
                return refuse("the sliding window there was freed");
            }
        }
        if len == 0 {
            for (state, slot) in self.slots.iter().enumerate() {
                kv.cache().clear_slot(state, *slot)?;
            }
        }
        let mut pools = lock(&self.pools);
        for (g, table) in self.tables.iter_mut().enumerate() {
            let keep = len.div_ceil(PAGE).saturating_sub(table.first).min(table.pages.len());
            table.pages.drain(keep..).for_each(|p| pools.pages[g].release(p));
            if len == 0 {
                table.first = 0;
            }
        }
        self.tokens.truncate(len);
        Ok(())
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        let mut pools = lock(&self.pools);
        for (g, table) in self.tables.iter().enumerate() {
            table.pages.iter().for_each(|p| pools.pages[g].release(*p));
        }
        for (s, slot) in self.slots.iter().enumerate() {
            pools.slots[s].release(*slot);
        }
    }
}

/// The free pages were counted before: only a bug gets here.
fn full() -> Error {
    Error::CacheFull { group: "?".into(), needed: 1, free: 0 }
}

/// Locks the pools. They hold no half-made state, so a panic elsewhere does not poison them.
pub(super) fn lock(pools: &Mutex<Pools>) -> std::sync::MutexGuard<'_, Pools> {
    pools.lock().unwrap_or_else(|e| e.into_inner())
}
