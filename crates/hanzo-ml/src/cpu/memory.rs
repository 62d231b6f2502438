//! Bytes: aligned buffers, cache memory and bound weights of the CPU backend.

use super::huge::{Copied, HugePages};
use super::pool::Pool;
use crate::backend::{Cache, WeightSource, Weights};
use crate::cache::PAGE;
use crate::error::{Error, Result};
use crate::plan::{Access, Op, Plan};
use hanzo_gguf::TensorBytes;
use memmap2::MmapMut;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::ptr::NonNull;

/// Zero bytes aligned to a cache line. Large ones are mappings of their own, which the system makes lazily: a page that is never
/// touched costs nothing; where it can, it is asked for huge pages, so that a long cache is read with few translations.
pub struct Buffer {
    memory: Memory,
    len: usize,
}

/// Where a buffer's bytes are.
enum Memory {
    None,
    Heap(NonNull<u8>),
    Mapped(NonNull<u8>, #[expect(dead_code, reason = "keeps the mapping")] MmapMut),
}

// SAFETY: plain memory; access is coordinated by the executor's schedule.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    const ALIGN: usize = 64;
    /// Bytes from which a buffer is a mapping.
    const LARGE: usize = 1 << 20;
    /// Bytes of a huge page, from which it asks for them.
    const HUGE: usize = 2 << 20;

    /// `len` zero bytes.
    pub fn new(len: usize) -> Result<Buffer> {
        Buffer::of(len, len >= Self::HUGE)
    }

    /// `len` zero bytes in `parts` parts, of which one may be used from its beginning and not to its end: huge pages that
    /// several share would be taken, and zeroed, for what is never used.
    fn in_parts(len: usize, parts: usize) -> Result<Buffer> {
        Buffer::of(len, len / parts.max(1) >= Self::HUGE)
    }

    fn of(len: usize, #[cfg_attr(not(target_os = "linux"), expect(unused))] huge: bool) -> Result<Buffer> {
        let none = || Error::Memory(format!("{:.1} MiB for activations or caches", len as f64 / (1 << 20) as f64));
        let memory = match len {
            0 => Memory::None,
            Self::LARGE.. => {
                let mut map = MmapMut::map_anon(len).map_err(|_| none())?;
                #[cfg(target_os = "linux")]
                if huge {
                    // A wish: without it, pages are small and results the same.
                    let _ = map.advise(memmap2::Advice::HugePage);
                }
                Memory::Mapped(NonNull::new(map.as_mut_ptr()).ok_or_else(none)?, map)
            }
            _ => {
                let layout = Layout::from_size_align(len, Self::ALIGN)
                    .map_err(|_| Error::Memory(format!("{len} bytes is more than an address space holds")))?;
                // SAFETY: the layout has a non-zero size.
                Memory::Heap(NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(none)?)
            }
        };
        Ok(Buffer { memory, len })
    }

    /// Its first byte.
    pub fn ptr(&self) -> *mut u8 {
        match &self.memory {
            Memory::None => NonNull::dangling().as_ptr(),
            Memory::Heap(p) | Memory::Mapped(p, _) => p.as_ptr(),
        }
    }

    /// Its length.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a buffer of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is `len` initialised bytes.
        unsafe { std::slice::from_raw_parts(self.ptr(), self.len) }
    }

    /// Its bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as `bytes`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Memory::Heap(p) = self.memory {
            // SAFETY: allocated in `new` with this very layout.
            unsafe { dealloc(p.as_ptr(), Layout::from_size_align_unchecked(self.len, Self::ALIGN)) };
        }
    }
}

/// Weights: matrices as handles into the model file's mapping, or copied to huge pages (see [`super::HugePages`]), vectors decoded
/// to f32.
pub struct CpuWeights {
    bound: Vec<Bound>,
    copied: Option<Copied>,
    extra: usize,
}

struct Bound {
    /// Keeps the mapping.
    bytes: TensorBytes,
    /// Offset of the weight's first row.
    offset: usize,
    /// Its tensor among those copied.
    copy: Option<usize>,
    /// The decoded floats of a weight that some op reads as a vector.
    floats: Vec<f32>,
}

impl CpuWeights {
    /// Binds every weight of a Plan. Matrices of contractions and token tables stay in their format; everything else
    /// (norms, biases, rope factors, sinks, short convolutions) is small, and decoded once.
    pub fn bind(plan: &Plan, source: &dyn WeightSource, huge: HugePages, pool: &Pool) -> Result<CpuWeights> {
        let mut vector = vec![false; plan.weights.len()];
        let mut matrices = vec![false; plan.weights.len()];
        for op in &plan.ops {
            op.accesses(&mut |a| {
                if let Access::Weight(w) = a {
                    let table = matches!(op, Op::Embed { table, .. } if *table == w);
                    let matrix = op.members().iter().any(|m| m.w == w);
                    vector[w.0 as usize] |= !table && !matrix;
                    matrices[w.0 as usize] |= matrix;
                }
            });
        }
        let mut extra = 0;
        let mut bound = Vec::with_capacity(plan.weights.len());
        for (w, vector) in plan.weights.iter().zip(vector) {
            let bytes = source.tensor(w)?;
            let wrong = |what: String| Error::Weight { name: w.tensor.clone(), what };
            let Some(row) = w.format.row_bytes(w.cols) else {
                return Err(wrong(format!("rows of {} are not whole {} blocks", w.cols, w.format)));
            };
            let need = w.experts.checked_mul(w.tensor_rows).and_then(|n| n.checked_mul(row));
            if need != Some(bytes.len()) || w.first_row + w.rows > w.tensor_rows {
                return Err(wrong(format!(
                    "has {} bytes, expected {} x {} rows of {row}",
                    bytes.len(),
                    w.experts,
                    w.tensor_rows
                )));
            }
            let offset = w.first_row * row;
            let mut floats = Vec::new();
            if vector {
                if w.experts > 1 && w.rows != w.tensor_rows {
                    return Err(wrong("a row range of an expert vector".into()));
                }
                floats = vec![0.0; w.experts * w.rows * w.cols];
                hanzo_gguf::formats::to_float(w.format, &bytes[offset..offset + w.experts * w.rows * row], &mut floats);
                extra += floats.len() * 4;
            } else if !w.format.is_block() && bytes.as_ptr() as usize % w.format.block_bytes() != 0 {
                return Err(wrong("its data is not aligned; rewrite the file with general.alignment 32".into()));
            }
            bound.push(Bound { bytes, offset, copy: None, floats });
        }
        // What contractions read, each tensor once: several weights may be rows of one.
        let mut tensors: Vec<usize> = Vec::new();
        for i in (0..bound.len()).filter(|i| matrices[*i]) {
            let same = |a: &TensorBytes, b: &TensorBytes| a.as_ptr() == b.as_ptr() && a.len() == b.len();
            let at = tensors.iter().position(|t| same(&bound[*t].bytes, &bound[i].bytes));
            bound[i].copy = Some(at.unwrap_or(tensors.len()));
            if at.is_none() {
                tensors.push(i);
            }
        }
        let all: Vec<&TensorBytes> = tensors.iter().map(|i| &bound[*i].bytes).collect();
        let copied = Copied::of(&all, huge, pool);
        Ok(CpuWeights { bound, copied, extra })
    }

    /// First byte of weight `i` (its first row of its first expert).
    pub(super) fn ptr(&self, i: usize) -> *const u8 {
        let Bound { bytes, offset, copy, .. } = &self.bound[i];
        match (&self.copied, copy) {
            (Some(copied), Some(at)) => copied.ptr(*at).wrapping_add(*offset),
            _ => bytes[*offset..].as_ptr(),
        }
    }

    /// The floats of vector weight `i`.
    pub(super) fn vector(&self, i: usize) -> Vector {
        Vector::new(&self.bound[i].floats)
    }
}

/// Where a vector weight's floats are. Executables keep the weights alive and nothing writes them.
#[derive(Clone, Copy)]
pub(super) struct Vector {
    ptr: *const f32,
    len: usize,
}

// SAFETY: read-only floats that live as long as the weights, which every executable holds.
unsafe impl Send for Vector {}
// SAFETY: as above.
unsafe impl Sync for Vector {}

impl Vector {
    fn new(x: &[f32]) -> Vector {
        Vector { ptr: x.as_ptr(), len: x.len() }
    }

    /// The floats.
    pub(super) fn get(&self) -> &[f32] {
        // SAFETY: see the type.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }

    /// Its first float.
    pub(super) fn ptr(&self) -> *const f32 {
        self.ptr
    }
}

impl Weights for CpuWeights {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn extra_bytes(&self) -> usize {
        self.extra
    }
}

/// One page group's memory.
pub struct GroupMemory {
    /// Bytes of one page of one layer's keys.
    pub k_page: usize,
    /// Bytes of one page of one layer's values.
    pub v_page: usize,
    /// Pages.
    pub pages: usize,
    layers: usize,
    k: Buffer,
    v: Buffer,
}

impl GroupMemory {
    /// A layer's keys, `[page][n_kv][PAGE][d_k]`.
    pub fn k(&self, layer: usize) -> *mut u8 {
        debug_assert!(layer < self.layers);
        // SAFETY: the buffer holds `layers * pages` pages.
        unsafe { self.k.ptr().add(layer * self.pages * self.k_page) }
    }

    /// A layer's values, `[page][n_kv][PAGE][d_v]`.
    pub fn v(&self, layer: usize) -> *mut u8 {
        debug_assert!(layer < self.layers);
        // SAFETY: as above.
        unsafe { self.v.ptr().add(layer * self.pages * self.v_page) }
    }

    /// The byte ranges of a page, layer by layer: `(offset in k, offset in v)`.
    fn page_offsets(&self, page: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        (0..self.layers).map(move |l| {
            let at = l * self.pages + page;
            (at * self.k_page, at * self.v_page)
        })
    }
}

/// One kind of state: `[slot][layer][elements]` f32.
pub struct StateMemory {
    elements: usize,
    layers: usize,
    data: Buffer,
}

impl StateMemory {
    /// A layer's state of a slot.
    pub fn ptr(&self, slot: usize, layer: usize) -> *mut f32 {
        // SAFETY: the buffer holds `slots * layers` arrays.
        unsafe { (self.data.ptr() as *mut f32).add((slot * self.layers + layer) * self.elements) }
    }

    fn range(&self, slot: usize) -> std::ops::Range<usize> {
        let n = self.layers * self.elements * 4;
        slot * n..(slot + 1) * n
    }
}

/// Caches and states in memory.
pub struct CpuCache {
    /// Page groups.
    pub groups: Vec<GroupMemory>,
    /// States.
    pub states: Vec<StateMemory>,
    pages: Vec<usize>,
    slots: Vec<usize>,
}

impl CpuCache {
    /// Allocates `pages[g]` pages a group and `slots[s]` slots a state.
    pub fn new(plan: &Plan, pages: &[usize], slots: &[usize]) -> Result<CpuCache> {
        if pages.len() != plan.groups.len() || slots.len() != plan.states.len() {
            return Err(Error::Batch(format!(
                "{} page counts and {} slot counts for {} page groups and {} states",
                pages.len(),
                slots.len(),
                plan.groups.len(),
                plan.states.len()
            )));
        }
        let too_big = || Error::Memory("the cache is larger than an address space; use a shorter context".into());
        let mut groups = Vec::new();
        for (g, n) in plan.groups.iter().zip(pages) {
            let page = |row: Option<usize>, f: hanzo_gguf::Format, d: usize| {
                row.map(|r| g.n_kv * PAGE * r).ok_or_else(|| Error::Unsupported {
                    backend: "cpu",
                    what: format!("a {f} cache needs heads of whole {} blocks; these have {d}", f.block_len()),
                })
            };
            let k_page = page(g.k_row_bytes(), g.type_k, g.d_k)?;
            let v_page = page(g.v_row_bytes(), g.type_v, g.d_v)?;
            let total = |page: usize| page.checked_mul(*n).and_then(|b| b.checked_mul(g.layers)).ok_or_else(too_big);
            groups.push(GroupMemory {
                k_page,
                v_page,
                pages: *n,
                layers: g.layers,
                k: Buffer::in_parts(total(k_page)?, g.layers)?,
                v: Buffer::in_parts(total(v_page)?, g.layers)?,
            });
        }
        let mut states = Vec::new();
        for (s, n) in plan.states.iter().zip(slots) {
            let bytes = (s.layers * s.elements * 4).checked_mul(*n).ok_or_else(too_big)?;
            states.push(StateMemory { elements: s.elements, layers: s.layers, data: Buffer::new(bytes)? });
        }
        Ok(CpuCache { groups, states, pages: pages.to_vec(), slots: slots.to_vec() })
    }

    fn check_page(&self, group: usize, page: u32) -> Result<()> {
        if self.pages.get(group).is_some_and(|n| (page as usize) < *n) {
            return Ok(());
        }
        Err(Error::Batch(format!("page {page} of group {group} does not exist")))
    }

    fn check_slot(&self, state: usize, slot: u32) -> Result<()> {
        if self.slots.get(state).is_some_and(|n| (slot as usize) < *n) {
            return Ok(());
        }
        Err(Error::Batch(format!("slot {slot} of state {state} does not exist")))
    }
}

impl Cache for CpuCache {
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
        let g = &mut self.groups[group];
        for l in 0..g.layers {
            let (a, b) = (l * g.pages + from as usize, l * g.pages + to as usize);
            g.k.bytes_mut().copy_within(a * g.k_page..(a + 1) * g.k_page, b * g.k_page);
            g.v.bytes_mut().copy_within(a * g.v_page..(a + 1) * g.v_page, b * g.v_page);
        }
        Ok(())
    }

    fn copy_slot(&mut self, state: usize, from: u32, to: u32) -> Result<()> {
        self.check_slot(state, from)?;
        self.check_slot(state, to)?;
        let s = &mut self.states[state];
        let (a, b) = (s.range(from as usize), s.range(to as usize));
        s.data.bytes_mut().copy_within(a, b.start);
        Ok(())
    }

    fn clear_slot(&mut self, state: usize, slot: u32) -> Result<()> {
        self.check_slot(state, slot)?;
        let s = &mut self.states[state];
        let r = s.range(slot as usize);
        s.data.bytes_mut()[r].fill(0);
        Ok(())
    }

    fn read_page(&self, group: usize, page: u32) -> Result<Vec<u8>> {
        self.check_page(group, page)?;
        let g = &self.groups[group];
        let mut out = Vec::with_capacity(g.layers * (g.k_page + g.v_page));
        for (k, v) in g.page_offsets(page as usize) {
            out.extend_from_slice(&g.k.bytes()[k..k + g.k_page]);
            out.extend_from_slice(&g.v.bytes()[v..v + g.v_page]);
        }
        Ok(out)
    }

    fn write_page(&mut self, group: usize, page: u32, bytes: &[u8]) -> Result<()> {
        self.check_page(group, page)?;
        let g = &mut self.groups[group];
        let (kp, vp) = (g.k_page, g.v_page);
        if bytes.len() != g.layers * (kp + vp) {
            return Err(Error::Batch(format!("{} bytes for a page of {}", bytes.len(), g.layers * (kp + vp))));
        }
        let offsets: Vec<_> = g.page_offsets(page as usize).collect();
        for ((k, v), src) in offsets.into_iter().zip(bytes.chunks_exact((kp + vp).max(1))) {
            g.k.bytes_mut()[k..k + kp].copy_from_slice(&src[..kp]);
            g.v.bytes_mut()[v..v + vp].copy_from_slice(&src[kp..]);
        }
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.groups.iter().map(|g| g.k.len() + g.v.len()).sum::<usize>()
            + self.states.iter().map(|s| s.data.len()).sum::<usize>()
    }
}
