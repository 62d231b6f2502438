//! The caches of a split Plan: each device owns the rows of its own layers, all under the same page and slot numbers.

use super::cut::Part;
use crate::backend::Cache;
use crate::error::{Error, Result};
use crate::plan::Plan;
use std::any::Any;

/// Caches of several devices as one.
pub(super) struct SplitCache {
    /// One a part.
    pub(super) parts: Vec<Box<dyn Cache>>,
    /// By group, then by layer: the part that has it; none if no op touches it.
    groups: Vec<Vec<Option<usize>>>,
    /// By group: bytes of one layer's page.
    layer_bytes: Vec<usize>,
    /// By part: its page groups and states, in the whole Plan's numbers.
    own: Vec<(Vec<u16>, Vec<u16>)>,
    pages: Vec<usize>,
    slots: Vec<usize>,
}

impl SplitCache {
    /// Joins the parts' caches.
    pub(super) fn new(
        plan: &Plan,
        parts: &[Part],
        caches: Vec<Box<dyn Cache>>,
        pages: &[usize],
        slots: &[usize],
    ) -> SplitCache {
        let mut groups: Vec<Vec<Option<usize>>> = plan.groups.iter().map(|g| vec![None; g.layers]).collect();
        for (i, p) in parts.iter().enumerate() {
            for (g, layers) in &p.groups {
                layers.iter().for_each(|l| groups[*g as usize][*l as usize] = Some(i));
            }
        }
        let ids = |list: &[(u16, Vec<u32>)]| list.iter().map(|(id, _)| *id).collect();
        let own = parts.iter().map(|p| (ids(&p.groups), ids(&p.states))).collect();
        let layer_bytes = plan.groups.iter().map(|g| g.page_bytes() / g.layers.max(1)).collect();
        SplitCache { parts: caches, groups, layer_bytes, own, pages: pages.to_vec(), slots: slots.to_vec() }
    }

    /// The parts that have some of a group, with its number there.
    fn holders(&self, group: usize) -> Vec<(usize, usize)> {
        let at = |(p, own): (usize, &(Vec<u16>, Vec<u16>))| {
            own.0.iter().position(|g| usize::from(*g) == group).map(|g| (p, g))
        };
        self.own.iter().enumerate().filter_map(at).collect()
    }

    fn each_state(&mut self, state: usize, f: &mut dyn FnMut(&mut dyn Cache, usize) -> Result<()>) -> Result<()> {
        for (part, own) in self.parts.iter_mut().zip(&self.own) {
            if let Some(s) = own.1.iter().position(|s| usize::from(*s) == state) {
                f(part.as_mut(), s)?;
            }
        }
        Ok(())
    }

    fn check_page(&self, group: usize, page: u32) -> Result<()> {
        match self.pages.get(group) {
            Some(n) if (page as usize) < *n => Ok(()),
            _ => Err(Error::Batch(format!("page {page} of group {group} does not exist"))),
        }
    }

    fn check_slot(&self, state: usize, slot: u32) -> Result<()> {
        match self.slots.get(state) {
            Some(n) if (slot as usize) < *n => Ok(()),
            _ => Err(Error::Batch(format!("slot {slot} of state {state} does not exist"))),
        }
    }
}

impl Cache for SplitCache {
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
        self.check_page(group, from)?;
        self.check_page(group, to)?;
        for (part, g) in self.holders(group) {
            self.parts[part].copy_page(g, from, to)?;
        }
        Ok(())
    }

    fn copy_slot(&mut self, state: usize, from: u32, to: u32) -> Result<()> {
        self.check_slot(state, from)?;
        self.check_slot(state, to)?;
        self.each_state(state, &mut |cache, s| cache.copy_slot(s, from, to))
    }

    fn clear_slot(&mut self, state: usize, slot: u32) -> Result<()> {
        self.check_slot(state, slot)?;
        self.each_state(state, &mut |cache, s| cache.clear_slot(s, slot))
    }

    fn read_page(&self, group: usize, page: u32) -> Result<Vec<u8>> {
        self.check_page(group, page)?;
        let mut from: Vec<Vec<u8>> = vec![Vec::new(); self.parts.len()];
        for (part, g) in self.holders(group) {
            from[part] = self.parts[part].read_page(g, page)?;
        }
        let size = self.layer_bytes[group];
        let mut rest: Vec<&[u8]> = from.iter().map(Vec::as_slice).collect();
        let mut out = Vec::new();
        for part in &self.groups[group] {
            match part.and_then(|p| rest[p].split_at_checked(size).map(|(layer, tail)| (p, layer, tail))) {
                Some((p, layer, tail)) => {
                    out.extend_from_slice(layer);
                    rest[p] = tail;
                }
                None => out.resize(out.len() + size, 0),
            }
        }
        Ok(out)
    }

    fn write_page(&mut self, group: usize, page: u32, bytes: &[u8]) -> Result<()> {
        self.check_page(group, page)?;
        let (layers, size) = (&self.groups[group], self.layer_bytes[group]);
        if bytes.len() != layers.len() * size {
            return Err(Error::Batch(format!("{} bytes for a page of {}", bytes.len(), layers.len() * size)));
        }
        let mut to: Vec<Vec<u8>> = vec![Vec::new(); self.parts.len()];
        for (part, layer) in layers.iter().zip(bytes.chunks_exact(size.max(1))) {
            if let Some(p) = part {
                to[*p].extend_from_slice(layer);
            }
        }
        for (part, g) in self.holders(group) {
            self.parts[part].write_page(g, page, &to[part])?;
        }
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.parts.iter().map(|c| c.bytes()).sum()
    }
}
