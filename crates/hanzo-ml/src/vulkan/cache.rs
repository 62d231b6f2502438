//! Page groups and states on a device. Which page is whose is the engine's business.
//!
//! Within one head's page the bytes of the rows are in the order that kernels want ([`hanzo_kernels::cache`]); pages that
//! are read or written as bytes are in rows.

use super::device::Device;
use super::error::{NAME, unsupported};
use super::memory::{Buffer, Use};
use crate::backend::Cache;
use crate::cache::PAGE;
use crate::error::{Error, Result};
use crate::plan::Plan;
use hanzo_gguf::Format;
use hanzo_kernels::cache::{Order, from_rows, to_rows, values_order};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One layer of a page group.
struct Layer {
    k: Buffer,
    v: Option<Buffer>,
}

struct Group {
    /// Bytes of one page of one layer's keys, and of its values.
    k_page: u64,
    v_page: u64,
    k_rows: Rows,
    v_rows: Rows,
    layers: Vec<Layer>,
}

/// What the rows of a page are.
#[derive(Clone, Copy)]
struct Rows {
    format: Format,
    d: usize,
    order: Order,
}

struct State {
    /// Bytes of one slot of one layer.
    slot: u64,
    layers: Vec<Buffer>,
}

/// Caches and states on a Vulkan device. Memory starts as zeros.
pub struct VulkanCache {
    device: Arc<Device>,
    /// Tells caches apart: addresses are recorded into command buffers.
    id: u64,
    groups: Vec<Group>,
    states: Vec<State>,
    pages: Vec<usize>,
    slots: Vec<usize>,
    bytes: u64,
}

impl VulkanCache {
    /// Takes memory for `pages[g]` pages a group and `slots[s]` slots a state.
    pub(super) fn new(device: &Arc<Device>, plan: &Plan, pages: &[usize], slots: &[usize]) -> Result<VulkanCache> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        if pages.len() != plan.groups.len() || slots.len() != plan.states.len() {
            return Err(Error::Batch(format!(
                "{} page counts and {} slot counts for {} page groups and {} states",
                pages.len(),
                slots.len(),
                plan.groups.len(),
                plan.states.len()
            )));
        }
        let mut c = VulkanCache {
            device: Arc::clone(device),
            id: IDS.fetch_add(1, Ordering::Relaxed),
            groups: Vec::new(),
            states: Vec::new(),
            pages: pages.to_vec(),
            slots: slots.to_vec(),
            bytes: 0,
        };
        let too_big = || Error::Memory("the cache is larger than an address space; use a smaller context (-c)".into());
        for (g, n) in plan.groups.iter().zip(pages) {
            let page = |row: Option<usize>, f: Format, d: usize| {
                row.map(|r| (g.n_kv * PAGE * r) as u64).ok_or_else(|| {
                    let len = f.block_len();
                    unsupported(format!("a {f} cache needs heads of whole {len} blocks; these have {d}"))
                })
            };
            let k_page = page(g.k_row_bytes(), g.type_k, g.d_k)?;
            let v_page = page(g.v_row_bytes(), g.type_v, g.d_v)?;
            let mut take = |page: u64, what: &str| -> Result<Buffer> {
                let bytes = page.checked_mul(*n as u64).ok_or_else(too_big)?;
                c.bytes += bytes;
                Buffer::new(device, Use::Device, bytes, &format!("the cache of {what} ({n} pages of {PAGE} tokens)"))
            };
            let mut layers = Vec::new();
            for _ in 0..g.layers {
                let k = take(k_page, "keys")?;
                let v = if v_page > 0 { Some(take(v_page, "values")?) } else { None };
                layers.push(Layer { k, v });
            }
            let k_rows = Rows { format: g.type_k, d: g.d_k, order: Order::Keys };
            let v_rows = Rows { format: g.type_v, d: g.d_v, order: values_order(g.d_v) };
            c.groups.push(Group { k_page, v_page, k_rows, v_rows, layers });
        }
        for (s, n) in plan.states.iter().zip(slots) {
            let slot = 4 * s.elements as u64;
            let bytes = slot.checked_mul(*n as u64).ok_or_else(too_big)?;
            let what = format!("state {} ({n} slots)", s.name);
            let layers = (0..s.layers).map(|_| Buffer::new(device, Use::Device, bytes, &what));
            c.states.push(State { slot, layers: layers.collect::<Result<_>>()? });
            c.bytes += bytes * s.layers as u64;
        }
        // What masked keys leave behind must be numbers: zero times infinity would show.
        device.once_and_wait(|r| {
            let layers = c.groups.iter().flat_map(|g| &g.layers).flat_map(|l| std::iter::once(&l.k).chain(&l.v));
            for b in layers.chain(c.states.iter().flat_map(|s| &s.layers)) {
                r.fill(b, 0..b.bytes(), 0);
            }
        })?;
        Ok(c)
    }

    /// A number that no other cache of this process has.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// The device it is on.
    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Address of a layer's keys.
    pub(super) fn keys(&self, group: u16, layer: u32) -> Option<u64> {
        Some(self.groups.get(group as usize)?.layers.get(layer as usize)?.k.address())
    }

    /// Address of a layer's values.
    pub(super) fn values(&self, group: u16, layer: u32) -> Option<u64> {
        self.groups.get(group as usize)?.layers.get(layer as usize)?.v.as_ref().map(Buffer::address)
    }

    /// Address of a layer's states.
    pub(super) fn state(&self, state: u16, layer: u32) -> Option<u64> {
        self.states.get(state as usize)?.layers.get(layer as usize).map(Buffer::address)
    }

    fn check_page(&self, group: usize, page: u32) -> Result<&Group> {
        if self.pages.get(group).is_some_and(|n| (page as usize) < *n) {
            return Ok(&self.groups[group]);
        }
        Err(Error::Batch(format!("page {page} of group {group} does not exist")))
    }

    fn check_slot(&self, state: usize, slot: u32) -> Result<&State> {
        if self.slots.get(state).is_some_and(|n| (slot as usize) < *n) {
            return Ok(&self.states[state]);
        }
        Err(Error::Batch(format!("slot {slot} of state {state} does not exist")))
    }
}

/// Item `i` of items of `bytes` bytes.
fn item(i: u32, bytes: u64) -> Range<u64> {
    i as u64 * bytes..(i as u64 + 1) * bytes
}

impl Group {
    /// A page's parts: keys, then values, layer by layer.
    fn parts(&self, page: u32) -> impl Iterator<Item = (&Buffer, Range<u64>)> {
        self.layers.iter().flat_map(move |l| {
            let v = l.v.as_ref().map(|v| (v, item(page, self.v_page)));
            std::iter::once((&l.k, item(page, self.k_page))).chain(v)
        })
    }

    /// A page's bytes with each part put through `f`.
    fn map(&self, bytes: &[u8], f: fn(Format, usize, Order, &[u8]) -> Vec<u8>) -> Vec<u8> {
        let mut out = Vec::with_capacity(bytes.len());
        for layer in bytes.chunks((self.k_page + self.v_page).max(1) as usize) {
            let (k, v) = layer.split_at(self.k_page as usize);
            for (part, rows) in [(k, self.k_rows), (v, self.v_rows)].into_iter().filter(|(part, _)| !part.is_empty()) {
                out.extend(f(rows.format, rows.d, rows.order, part));
            }
        }
        out
    }

    fn bytes(&self) -> u64 {
        (self.k_page + self.v_page) * self.layers.len() as u64
    }
}

impl Cache for VulkanCache {
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
        let g = self.check_page(group, to)?;
        if from == to {
            return Ok(());
        }
        self.device.once(|r| {
            for ((b, from), (_, to)) in g.parts(from).zip(g.parts(to)) {
                r.copy(b, from.start, b, to.start, from.end - from.start);
            }
        })?;
        Ok(())
    }

    fn copy_slot(&mut self, state: usize, from: u32, to: u32) -> Result<()> {
        self.check_slot(state, from)?;
        let s = self.check_slot(state, to)?;
        if from == to {
            return Ok(());
        }
        self.device.once(|r| {
            let (from, to) = (item(from, s.slot), item(to, s.slot));
            s.layers.iter().for_each(|b| r.copy(b, from.start, b, to.start, s.slot));
        })?;
        Ok(())
    }

    fn clear_slot(&mut self, state: usize, slot: u32) -> Result<()> {
        let s = self.check_slot(state, slot)?;
        self.device.once(|r| s.layers.iter().for_each(|b| r.fill(b, item(slot, s.slot), 0)))?;
        Ok(())
    }

    fn read_page(&self, group: usize, page: u32) -> Result<Vec<u8>> {
        let g = self.check_page(group, page)?;
        let host = Buffer::new(&self.device, Use::Readback, g.bytes(), "a page")?;
        self.device.once_and_wait(|r| {
            let mut at = 0;
            for (b, range) in g.parts(page) {
                r.copy(b, range.start, &host, at, range.end - range.start);
                at += range.end - range.start;
            }
        })?;
        host.refresh()?;
        Ok(host.mapped().map(|m| g.map(m, to_rows)).unwrap_or_default())
    }

    fn write_page(&mut self, group: usize, page: u32, bytes: &[u8]) -> Result<()> {
        let g = self.check_page(group, page)?;
        if bytes.len() as u64 != g.bytes() {
            return Err(Error::Batch(format!("{} bytes for a page of {}", bytes.len(), g.bytes())));
        }
        let mut host = Buffer::new(&self.device, Use::Upload, g.bytes(), "a page")?;
        if let Some(m) = host.mapped_mut() {
            m.copy_from_slice(&g.map(bytes, from_rows));
        }
        self.device.once_and_wait(|r| {
            let mut at = 0;
            for (b, range) in g.parts(page) {
                r.copy(&host, at, b, range.start, range.end - range.start);
                at += range.end - range.start;
            }
        })
    }

    fn bytes(&self) -> usize {
        self.bytes as usize
    }
}

impl Drop for VulkanCache {
    fn drop(&mut self) {
        // Page copies do not wait.
        let _ = self.device.settle();
    }
}

impl std::fmt::Debug for VulkanCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{NAME} cache {}: {} bytes", self.id, self.bytes)
    }
}
