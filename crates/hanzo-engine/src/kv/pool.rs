//! A pool of numbered things (pages, state slots) that several sequences may share: a free list and reference counts.

/// Ids `first..n`, each free or held by a number of owners.
#[derive(Clone, Debug)]
pub struct Pool {
    refs: Vec<u32>,
    free: Vec<u32>,
}

impl Pool {
    /// A pool of ids below `n`; those below `first` are never given out.
    pub fn new(first: usize, n: usize) -> Pool {
        // The lowest id is on top: fresh pools fill memory from its start.
        Pool { refs: vec![0; n], free: (first as u32..n as u32).rev().collect() }
    }

    /// Takes a free id; its owner count is one.
    pub fn take(&mut self) -> Option<u32> {
        let id = self.free.pop()?;
        self.refs[id as usize] = 1;
        Some(id)
    }

    /// Adds an owner.
    pub fn share(&mut self, id: u32) {
        self.refs[id as usize] += 1;
    }

    /// Removes an owner; without owners the id is free again.
    pub fn release(&mut self, id: u32) {
        let refs = &mut self.refs[id as usize];
        debug_assert!(*refs > 0, "id {id} has no owner");
        *refs = refs.saturating_sub(1);
        if *refs == 0 {
            self.free.push(id);
        }
    }

    /// Has it more than one owner?
    pub fn is_shared(&self, id: u32) -> bool {
        self.refs[id as usize] > 1
    }

    /// Free ids.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// All ids that can be given out are free.
    pub fn is_unused(&self) -> bool {
        self.refs.iter().all(|r| *r == 0)
    }
}
