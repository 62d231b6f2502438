//! Device and host-visible memory: blocks, and buffers cut from them. Knows nothing of what is kept in them.
//!
//! One `VkBuffer` covers a block whole; a [`Buffer`] is a range of it with its device address. Blocks start at 16 MiB and
//! double up to 256 MiB; a buffer larger than half of that gets a block to itself. The driver's budget is asked before
//! each block, so that running out is an error that says what did not fit, not a device that pages to the host.

use super::device::Device;
use super::error::{failed, mib, unsupported};
use super::instance::Instance;
use super::physical::DeviceInfo;
use crate::error::{Error, Result};
use ash::vk;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// Alignment of every buffer, in memory and as an address.
const ALIGN: u64 = 256;
const FIRST_BLOCK: u64 = 16 << 20;
const LAST_BLOCK: u64 = 256 << 20;

/// What memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Read and written by the device alone.
    Device,
    /// Written by the host, read by the device: device-local if the host can write there.
    Step,
    /// Written by the host in long runs, copied from.
    Upload,
    /// Written by the device, read by the host.
    Readback,
}

/// A memory type chosen for a use.
#[derive(Clone, Copy)]
struct Type {
    index: u32,
    heap: u32,
    mapped: bool,
    coherent: bool,
    local: bool,
}

struct Block {
    id: u64,
    of: Use,
    memory: vk::DeviceMemory,
    buffer: vk::Buffer,
    bytes: u64,
    address: u64,
    ptr: Option<Pointer>,
    /// Free ranges, ascending, not touching.
    free: Vec<Range<u64>>,
}

#[derive(Clone, Copy)]
struct Pointer(NonNull<u8>);
// SAFETY: mapped device memory; access goes through `Buffer`, which follows Rust's borrowing.
unsafe impl Send for Pointer {}
// SAFETY: as above.
unsafe impl Sync for Pointer {}

/// A device's memory.
pub(super) struct Heaps {
    types: [Type; 4],
    heap_bytes: Vec<u64>,
    budget: bool,
    priority: bool,
    /// The most bytes of one allocation and one buffer.
    limit: u64,
    blocks: Mutex<(u64, Vec<Block>)>,
}

impl Heaps {
    pub fn new(
        instance: &Instance,
        physical: vk::PhysicalDevice,
        raw: &ash::Device,
        info: &DeviceInfo,
        plain: bool,
    ) -> Result<Heaps> {
        // SAFETY: plain query.
        let props = unsafe { instance.raw().get_physical_device_memory_properties(physical) };
        let mut p11 = vk::PhysicalDeviceVulkan11Properties::default();
        let mut p13 = vk::PhysicalDeviceVulkan13Properties::default();
        let mut all = vk::PhysicalDeviceProperties2::default().push_next(&mut p11).push_next(&mut p13);
        // SAFETY: the chain outlives the call.
        unsafe { instance.raw().get_physical_device_properties2(physical, &mut all) };
        let allowed = allowed_types(raw, info)?;
        use vk::MemoryPropertyFlags as M;
        let find = |need: M, avoid: M| -> Option<Type> {
            let types = props.memory_types_as_slice().iter().enumerate();
            let fits = types.filter(|(i, t)| {
                allowed >> i & 1 == 1 && t.property_flags.contains(need) && !t.property_flags.intersects(avoid)
            });
            let (index, t) =
                fits.max_by_key(|(i, t)| (props.memory_heaps[t.heap_index as usize].size, std::cmp::Reverse(*i)))?;
            Some(Type {
                index: index as u32,
                heap: t.heap_index,
                mapped: t.property_flags.contains(M::HOST_VISIBLE),
                coherent: t.property_flags.contains(M::HOST_COHERENT),
                local: t.property_flags.contains(M::DEVICE_LOCAL),
            })
        };
        let host = M::HOST_VISIBLE | M::HOST_COHERENT;
        // AMD's device-coherent memory bypasses caches: never wanted.
        let odd = M::LAZILY_ALLOCATED | M::PROTECTED | M::DEVICE_COHERENT_AMD;
        let missing = || unsupported("the device has no memory type for buffers".into());
        let device =
            find(M::DEVICE_LOCAL, odd | M::HOST_VISIBLE).or_else(|| find(M::DEVICE_LOCAL, odd)).ok_or_else(missing)?;
        let upload = find(host, odd | M::DEVICE_LOCAL | M::HOST_CACHED)
            .or_else(|| find(host, odd | M::DEVICE_LOCAL))
            .or_else(|| find(host, odd))
            .ok_or_else(missing)?;
        let step = find(host | M::DEVICE_LOCAL, odd).filter(|_| !plain).unwrap_or(Type { local: false, ..upload });
        let readback = find(host | M::HOST_CACHED, odd | M::DEVICE_LOCAL)
            .or_else(|| find(host | M::HOST_CACHED, odd))
            .or_else(|| find(M::HOST_VISIBLE | M::HOST_CACHED, odd))
            .unwrap_or(upload);
        Ok(Heaps {
            types: [device, step, upload, readback],
            heap_bytes: props.memory_heaps_as_slice().iter().map(|h| h.size).collect(),
            budget: info.optional.memory_budget,
            priority: info.optional.memory_priority,
            limit: p11.max_memory_allocation_size.min(match p13.max_buffer_size {
                0 => u64::MAX,
                n => n,
            }),
            blocks: Mutex::new((0, Vec::new())),
        })
    }

    fn of(&self, of: Use) -> Type {
        self.types[of as usize]
    }

    /// Can the device read what the host writes for a step without a copy?
    pub fn step_is_local(&self) -> bool {
        self.of(Use::Step).local
    }

    /// Frees every block; called once, with no buffer left.
    pub fn destroy(&self, raw: &ash::Device) {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        for b in blocks.1.drain(..) {
            // SAFETY: no buffer of the block is left and the device is idle.
            unsafe { b.destroy(raw) };
        }
    }
}

/// Memory types that a buffer of this backend may use.
fn allowed_types(raw: &ash::Device, info: &DeviceInfo) -> Result<u32> {
    let families = [info.families.compute, info.families.transfer.unwrap_or(info.families.compute)];
    // SAFETY: the buffer is only asked about.
    unsafe {
        let b = raw.create_buffer(&buffer_info(1 << 16, &families), None).map_err(failed("create a buffer"))?;
        let bits = raw.get_buffer_memory_requirements(b).memory_type_bits;
        raw.destroy_buffer(b, None);
        Ok(bits)
    }
}

fn buffer_info(bytes: u64, families: &[u32; 2]) -> vk::BufferCreateInfo<'_> {
    use vk::BufferUsageFlags as U;
    let info = vk::BufferCreateInfo::default()
        .size(bytes)
        .usage(U::STORAGE_BUFFER | U::TRANSFER_SRC | U::TRANSFER_DST | U::SHADER_DEVICE_ADDRESS);
    if families[0] == families[1] {
        return info;
    }
    info.sharing_mode(vk::SharingMode::CONCURRENT).queue_family_indices(families)
}

impl Block {
    /// Cuts `bytes` out of a free range.
    fn cut(&mut self, bytes: u64) -> Option<u64> {
        let i = self.free.iter().position(|r| r.end - r.start >= bytes)?;
        let at = self.free[i].start;
        self.free[i].start += bytes;
        if self.free[i].is_empty() {
            self.free.remove(i);
        }
        Some(at)
    }

    /// Gives a range back.
    fn join(&mut self, r: Range<u64>) {
        let i = self.free.partition_point(|f| f.start < r.start);
        self.free.insert(i, r);
        if i + 1 < self.free.len() && self.free[i].end == self.free[i + 1].start {
            self.free[i].end = self.free.remove(i + 1).end;
        }
        if i > 0 && self.free[i - 1].end == self.free[i].start {
            self.free[i - 1].end = self.free.remove(i).end;
        }
    }

    /// # Safety
    /// Nothing on the device may use the block any more.
    unsafe fn destroy(&self, raw: &ash::Device) {
        // SAFETY: by contract.
        unsafe {
            raw.destroy_buffer(self.buffer, None);
            raw.free_memory(self.memory, None);
        }
    }
}

impl Device {
    /// Bytes of `heap` that may still be had, and its size.
    fn room(&self, heap: u32) -> (Option<u64>, u64) {
        let size = self.heaps.heap_bytes[heap as usize];
        if !self.heaps.budget {
            return (None, size);
        }
        let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
        let mut memory = vk::PhysicalDeviceMemoryProperties2::default().push_next(&mut budget);
        // SAFETY: the chain outlives the call.
        unsafe { self.instance.raw().get_physical_device_memory_properties2(self.physical, &mut memory) };
        let h = heap as usize;
        (Some(budget.heap_budget[h].saturating_sub(budget.heap_usage[h])), size)
    }

    /// Bytes of device-local memory that may still be had, if the driver tells.
    pub fn available(&self) -> Option<u64> {
        self.room(self.heaps.of(Use::Device).heap).0
    }

    fn no_room(&self, of: Use, bytes: u64, what: &str) -> Error {
        let (room, size) = self.room(self.heaps.of(of).heap);
        let info = self.info();
        let free = room.map_or(String::new(), |r| format!("{} of its ", mib(r)));
        let free = if free.is_empty() {
            format!("it has {} in all", mib(size))
        } else {
            format!("{free}{} are free", mib(size))
        };
        Error::Memory(format!(
            "{what} needs {} on vulkan:{} ({}), but {free}; place fewer layers on it (-ngl) or use a smaller context (-c)",
            mib(bytes),
            info.index,
            info.name
        ))
    }

    fn new_block(&self, of: Use, bytes: u64, what: &str) -> Result<Block> {
        let t = self.heaps.of(of);
        if bytes > self.heaps.limit {
            return Err(unsupported(format!(
                "{what} needs one buffer of {}; this device's largest is {}; keep it on the CPU (-ot) or use a smaller --ubatch",
                mib(bytes),
                mib(self.heaps.limit)
            )));
        }
        if self.room(t.heap).0.is_some_and(|room| room < bytes) {
            return Err(self.no_room(of, bytes, what));
        }
        let raw = &self.raw;
        let families = self.shared_families();
        // SAFETY: a plain create; the handle is destroyed with its block or below.
        let buffer = unsafe { raw.create_buffer(&buffer_info(bytes, &families), None) }
            .map_err(|r| self.error(r, "create a buffer"))?;
        // SAFETY: a live handle.
        let need = unsafe { raw.get_buffer_memory_requirements(buffer) };
        let mut flags = vk::MemoryAllocateFlagsInfo::default().flags(vk::MemoryAllocateFlags::DEVICE_ADDRESS);
        let mut dedicated = vk::MemoryDedicatedAllocateInfo::default().buffer(buffer);
        let mut priority = vk::MemoryPriorityAllocateInfoEXT::default().priority(1.0);
        let mut info = vk::MemoryAllocateInfo::default()
            .allocation_size(need.size)
            .memory_type_index(t.index)
            .push_next(&mut flags)
            .push_next(&mut dedicated);
        if self.heaps.priority {
            info = info.push_next(&mut priority);
        }
        // SAFETY: the chain outlives the call.
        let memory = match unsafe { raw.allocate_memory(&info, None) } {
            Ok(m) => m,
            Err(r) => {
                // SAFETY: never bound.
                unsafe { raw.destroy_buffer(buffer, None) };
                return Err(match r {
                    vk::Result::ERROR_OUT_OF_DEVICE_MEMORY | vk::Result::ERROR_OUT_OF_HOST_MEMORY => {
                        self.no_room(of, bytes, what)
                    }
                    r => self.error(r, "allocate memory"),
                });
            }
        };
        let mut block = Block {
            id: 0,
            of,
            memory,
            buffer,
            bytes,
            address: 0,
            ptr: None,
            free: std::iter::once(0..bytes).collect(),
        };
        // SAFETY: fresh handles; mapping covers the allocation.
        let bound = unsafe {
            raw.bind_buffer_memory(buffer, memory, 0).and_then(|()| match t.mapped && of != Use::Device {
                true => raw.map_memory(memory, 0, vk::WHOLE_SIZE, vk::MemoryMapFlags::empty()),
                false => Ok(std::ptr::null_mut()),
            })
        };
        match bound {
            Ok(p) => block.ptr = NonNull::new(p.cast()).map(Pointer),
            Err(r) => {
                // SAFETY: nothing uses it yet.
                unsafe { block.destroy(raw) };
                return Err(self.error(r, "map memory"));
            }
        }
        // SAFETY: created with the usage and bound with the flag that this needs.
        block.address =
            unsafe { raw.get_buffer_device_address(&vk::BufferDeviceAddressInfo::default().buffer(buffer)) };
        Ok(block)
    }
}

/// A range of device or host-visible memory; its bytes are not initialised.
pub(super) struct Buffer {
    device: Arc<Device>,
    of: Use,
    block: u64,
    handle: vk::Buffer,
    memory: vk::DeviceMemory,
    offset: u64,
    bytes: u64,
    address: u64,
    ptr: Option<Pointer>,
}

impl Buffer {
    /// Allocates; `what` names it in errors.
    pub fn new(device: &Arc<Device>, of: Use, bytes: u64, what: &str) -> Result<Buffer> {
        let room = bytes.max(4).checked_next_multiple_of(ALIGN).ok_or_else(|| {
            Error::Memory(format!("{what} needs more bytes than an address space has; use a smaller context"))
        })?;
        let mut all = device.heaps.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let (ids, blocks) = &mut *all;
        let fit = blocks.iter_mut().enumerate().filter(|(_, b)| b.of == of).find_map(|(i, b)| Some((i, b.cut(room)?)));
        let (i, offset) = match fit {
            Some(x) => x,
            None => {
                let largest = blocks.iter().filter(|b| b.of == of && b.bytes <= LAST_BLOCK).map(|b| b.bytes).max();
                let size = match room {
                    r if r > LAST_BLOCK / 2 => r,
                    r => largest.map_or(FIRST_BLOCK, |l| l * 2).clamp(r, LAST_BLOCK),
                };
                // A block that does not fit any more may leave room for the buffer alone.
                let mut block = match device.new_block(of, size, what) {
                    Err(Error::Memory(_)) if size > room => device.new_block(of, room, what)?,
                    b => b?,
                };
                *ids += 1;
                block.id = *ids;
                let at = block.cut(room).unwrap_or(0);
                blocks.push(block);
                (blocks.len() - 1, at)
            }
        };
        let b = &blocks[i];
        // SAFETY: `offset` lies within the mapping.
        let ptr = b.ptr.map(|p| Pointer(unsafe { p.0.add(offset as usize) }));
        let (block, handle, memory, address) = (b.id, b.buffer, b.memory, b.address + offset);
        Ok(Buffer { device: Arc::clone(device), of, block, handle, memory, offset, bytes, address, ptr })
    }

    /// Bytes asked for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Its device address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The `VkBuffer` it is a range of.
    pub fn handle(&self) -> vk::Buffer {
        self.handle
    }

    /// Where it starts in [`Buffer::handle`].
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Its bytes, to write; `None` for memory of the device alone. Reading may be slow (write-combined memory).
    pub fn mapped_mut(&mut self) -> Option<&mut [u8]> {
        // SAFETY: mapped for the block's lifetime; the device does not touch it while the host holds it (callers wait).
        self.ptr.map(|p| unsafe { std::slice::from_raw_parts_mut(p.0.as_ptr(), self.bytes as usize) })
    }

    /// Its bytes, to read, after [`Buffer::refresh`].
    pub fn mapped(&self) -> Option<&[u8]> {
        // SAFETY: as `mapped_mut`.
        self.ptr.map(|p| unsafe { std::slice::from_raw_parts(p.0.as_ptr(), self.bytes as usize) })
    }

    /// As words, to write; empty for memory of the device alone.
    pub fn words_mut(&mut self) -> &mut [u32] {
        let Some(m) = self.mapped_mut() else { return &mut [] };
        // SAFETY: any bits are a word; the prefix is empty, since buffers are 256-byte aligned in page-aligned mappings.
        unsafe { m.align_to_mut().1 }
    }

    /// As floats, to write.
    pub fn floats_mut(&mut self) -> &mut [f32] {
        let Some(m) = self.mapped_mut() else { return &mut [] };
        // SAFETY: any bits are a float; as `words_mut`.
        unsafe { m.align_to_mut().1 }
    }

    /// As floats, to read after [`Buffer::refresh`].
    pub fn floats(&self) -> &[f32] {
        let Some(m) = self.mapped() else { return &[] };
        // SAFETY: any bits are a float; as `words_mut`.
        unsafe { m.align_to().1 }
    }

    /// Makes what the device wrote visible to the host (nothing to do where memory is coherent).
    pub fn refresh(&self) -> Result<()> {
        if self.device.heaps.of(self.of).coherent {
            return Ok(());
        }
        // Whole blocks: ranges must be multiples of a device-dependent atom.
        let range = [vk::MappedMemoryRange::default().memory(self.memory).size(vk::WHOLE_SIZE)];
        // SAFETY: mapped memory.
        unsafe { self.device.raw.invalidate_mapped_memory_ranges(&range) }
            .map_err(|r| self.device.error(r, "read results"))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut all = self.device.heaps.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let blocks = &mut all.1;
        let Some(i) = blocks.iter().position(|b| b.id == self.block) else { return };
        let room = self.bytes.max(4).next_multiple_of(ALIGN);
        blocks[i].join(self.offset..self.offset + room);
        let empty = |b: &Block| b.free.first().is_some_and(|f| *f == (0..b.bytes));
        // One empty block a use is kept for the next buffer.
        let spare = blocks.iter().any(|b| b.id != self.block && b.of == self.of && empty(b));
        if empty(&blocks[i]) && (spare || blocks[i].bytes > FIRST_BLOCK) {
            let b = blocks.swap_remove(i);
            // SAFETY: nothing of it is left; whoever used it waited for the device before dropping it.
            unsafe { b.destroy(&self.device.raw) };
        }
    }
}
