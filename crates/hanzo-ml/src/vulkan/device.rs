//! A logical device: features, queues with a timeline each, submission, waiting, and what is known when it is lost.
//! Memory is in `memory`, pipelines in `pipelines`, recording in `commands`.

use super::commands::OneShots;
use super::coop2;
use super::error::{NAME, device as broken, failed};
use super::instance::Instance;
use super::memory::Heaps;
use super::physical::{DeviceInfo, DeviceKind, pick};
use super::pipelines::Pipelines;
use crate::error::{Error, Result};
use crate::gpu::Mask;
use ash::{ext, khr, vk};
use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The most command buffers of one submission.
pub(super) const MAX_COMMANDS: usize = 8;

/// A wait for a step does not sleep for less.
const SHORTEST_SLEEP: Duration = Duration::from_micros(300);
/// Nor counts on a step of more.
const LONGEST_SLEEP: Duration = Duration::from_millis(50);

/// A queue and the semaphore that counts its submissions.
pub(super) struct Queue {
    raw: vk::Queue,
    pub family: u32,
    pub timeline: vk::Semaphore,
    /// Value of the last submission; its lock orders submissions.
    last: Mutex<u64>,
}

/// A queue of a family that was asked for with one.
fn queue(raw: &ash::Device, family: u32) -> Result<Queue> {
    // SAFETY: by contract.
    let queue = unsafe { raw.get_device_queue(family, 0) };
    let mut kind = vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
    let make = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
    // SAFETY: the chain outlives the call.
    let timeline = unsafe { raw.create_semaphore(&make, None) }.map_err(failed("create a semaphore"))?;
    Ok(Queue { raw: queue, family, timeline, last: Mutex::new(0) })
}

/// A thing made on the way to another, and how it is taken down unless the other comes about.
struct Undo<T, F: Fn(&T)>(T, F);

impl<T, F: Fn(&T)> Undo<T, F> {
    fn keep(self) -> T {
        let this = ManuallyDrop::new(self);
        // SAFETY: `this` is not dropped and not used again, so that its first field has one owner. The second is a closure
        // of references, which need no dropping.
        unsafe { std::ptr::read(&this.0) }
    }
}

impl<T, F: Fn(&T)> Drop for Undo<T, F> {
    fn drop(&mut self) {
        (self.1)(&self.0);
    }
}

impl<T, F: Fn(&T)> std::ops::Deref for Undo<T, F> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// How a device is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VulkanOptions {
    /// Loads the validation layer. What it says fails the call that it is about, or the next; see also
    /// [`Device::take_messages`].
    pub validate: bool,
    /// Use (or do not use) the packed int8 dot product whatever the device says of its speed.
    pub int_dot: Option<bool>,
    /// Bytes of weights to read ahead beside attention, whatever is known of the device's cache.
    pub prefetch_bytes: Option<u64>,
    /// Prefer a queue that can also draw to one that only computes.
    pub graphics_queue: bool,
    /// Folder for the pipeline cache; `None`: none is kept.
    pub pipeline_cache: Option<PathBuf>,
    /// Copy uploads to device memory before they are permuted, as a device with a copy queue does: a test's switch.
    pub staged: bool,
    /// What lowering is not to use of the device.
    pub mask: Mask,
    /// Use no copy queue, no host-visible device memory and no cooperative matrices, as if the device had none: a test's
    /// switch for the paths of lesser devices.
    pub plain: bool,
}

/// An open device. Everything made on it holds it.
pub struct Device {
    pub(super) raw: ash::Device,
    pub(super) physical: vk::PhysicalDevice,
    pub(super) heaps: Heaps,
    pub(super) pipelines: Pipelines,
    pub(super) one_shots: OneShots,
    info: DeviceInfo,
    compute: Queue,
    transfer: Option<Queue>,
    /// Do uploads go through device memory?
    staged: bool,
    /// Is the validation layer loaded?
    validate: bool,
    fault: Option<ext::device_fault::Device>,
    lost: OnceLock<String>,
    pub(super) instance: Arc<Instance>,
}

impl Device {
    /// Opens device `index`, as in `vulkan:0`.
    ///
    /// # Errors
    /// If there is no loader, no such device, or it lacks something; the message names what and the remedy.
    pub fn open(index: usize, options: &VulkanOptions) -> Result<Arc<Device>> {
        Device::open_on(Instance::new(options.validate)?, index, options, &mut |_| Ok(()))
    }

    /// As [`Device::open`], on an instance. `made` is told of each thing that was made, and may fail: a test's way to see
    /// that whatever was made before is taken down.
    pub(super) fn open_on(
        instance: Arc<Instance>,
        index: usize,
        options: &VulkanOptions,
        made: &mut dyn FnMut(&'static str) -> Result<()>,
    ) -> Result<Arc<Device>> {
        let (physical, mut info) = pick(&instance, index)?;
        if options.graphics_queue
            && let Some(family) = info.families.graphics
        {
            info.families.compute = family;
        }
        if options.plain {
            info.families.transfer = None;
            info.transfer_queue = false;
            info.rebar = false;
            info.optional.cooperative_matrix = false;
            info.matrices.clear();
            info.workgroup_matrices = None;
        }
        if let Some(on) = options.int_dot {
            info.int_dot = on;
        }
        if let Some(bytes) = options.prefetch_bytes {
            info.prefetch_bytes = bytes;
        }
        info.mask = options.mask;
        // SAFETY (of each undoing): the device has had no work yet, and nothing else knows what is destroyed.
        let raw = Undo(create(&instance, physical, &info)?, |d: &ash::Device| unsafe { d.destroy_device(None) });
        made("the device")?;
        let unmake = |q: &Queue| unsafe { raw.destroy_semaphore(q.timeline, None) };
        let compute = Undo(queue(&raw, info.families.compute)?, unmake);
        made("the compute queue")?;
        let transfer = info.families.transfer.map(|f| Ok::<_, Error>(Undo(queue(&raw, f)?, unmake))).transpose()?;
        made("the copy queue")?;
        let fault = info.optional.device_fault.then(|| ext::device_fault::Device::new(instance.raw(), &raw));
        let heaps = Heaps::new(&instance, physical, &raw, &info, options.plain)?;
        let heaps = Undo(heaps, |h: &Heaps| h.destroy(&raw));
        made("memory")?;
        let pipelines = Pipelines::new(&raw, &info, options.pipeline_cache.as_deref())?;
        let pipelines = Undo(pipelines, |p: &Pipelines| p.destroy(&raw));
        made("the pipeline cache")?;
        let one_shots = OneShots::new(&raw, compute.family)?;
        let one_shots = Undo(one_shots, |o: &OneShots| o.destroy(&raw));
        made("command buffers")?;
        let (heaps, pipelines, one_shots) = (heaps.keep(), pipelines.keep(), one_shots.keep());
        let (compute, transfer) = (compute.keep(), transfer.map(Undo::keep));
        let raw = raw.keep();
        Ok(Arc::new(Device {
            physical,
            heaps,
            pipelines,
            one_shots,
            info,
            compute,
            staged: transfer.is_some() || options.staged,
            validate: options.validate,
            transfer,
            fault,
            lost: OnceLock::new(),
            raw,
            instance,
        }))
    }

    /// What it is.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// What the validation layer has said so far, taken out; empty without it.
    pub fn take_messages(&self) -> Vec<String> {
        self.instance.take_messages()
    }

    /// Fails with what the validation layer has said, if it is loaded and has said anything.
    pub(super) fn validated(&self) -> Result<()> {
        if !self.validate {
            return Ok(());
        }
        match self.take_messages() {
            m if m.is_empty() => Ok(()),
            m => Err(broken(format!("the validation layer objects {} times, first: {}", m.len(), m[0]))),
        }
    }

    pub(super) fn compute(&self) -> &Queue {
        &self.compute
    }

    /// The copy queue, or the compute queue if there is none.
    pub(super) fn transfer(&self) -> &Queue {
        self.transfer.as_ref().unwrap_or(&self.compute)
    }

    /// Do uploads go through device memory, by the copy queue, before they are permuted?
    pub(super) fn staged(&self) -> bool {
        self.staged
    }

    /// Families that share buffers: empty if one queue does everything.
    pub(super) fn shared_families(&self) -> [u32; 2] {
        [self.compute.family, self.transfer().family]
    }

    /// Submits command buffers as one batch, after `wait` if given, and gives the value the queue's timeline will reach.
    pub(super) fn submit(
        &self,
        queue: &Queue,
        commands: &[vk::CommandBuffer],
        wait: Option<(vk::Semaphore, u64)>,
    ) -> Result<u64> {
        self.alive()?;
        debug_assert!(commands.len() <= MAX_COMMANDS);
        let mut infos = [vk::CommandBufferSubmitInfo::default(); MAX_COMMANDS];
        for (info, c) in infos.iter_mut().zip(commands) {
            info.command_buffer = *c;
        }
        let mut last = queue.last.lock().unwrap_or_else(PoisonError::into_inner);
        let all = vk::PipelineStageFlags2::ALL_COMMANDS;
        let signal = [vk::SemaphoreSubmitInfo::default().semaphore(queue.timeline).value(*last + 1).stage_mask(all)];
        let (semaphore, value) = wait.unwrap_or_default();
        let waits = [vk::SemaphoreSubmitInfo::default().semaphore(semaphore).value(value).stage_mask(all)];
        let submit = vk::SubmitInfo2::default()
            .wait_semaphore_infos(&waits[..wait.is_some() as usize])
            .command_buffer_infos(&infos[..commands.len()])
            .signal_semaphore_infos(&signal);
        // SAFETY: handles are live, the lock is the queue's external synchronisation, the arrays outlive the call.
        unsafe { self.raw.queue_submit2(queue.raw, &[submit], vk::Fence::null()) }
            .map_err(|r| self.error(r, "submit work"))?;
        *last += 1;
        Ok(*last)
    }

    /// Waits until the queue's timeline reaches `value`.
    pub(super) fn wait(&self, queue: &Queue, value: u64) -> Result<()> {
        self.alive()?;
        let (semaphores, values) = ([queue.timeline], [value]);
        let info = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        // SAFETY: live handles.
        unsafe { self.raw.wait_semaphores(&info, u64::MAX) }.map_err(|r| self.error(r, "finish its work"))
    }

    /// Waits for all that was submitted on the compute queue.
    pub(super) fn settle(&self) -> Result<()> {
        let last = *self.compute.last.lock().unwrap_or_else(PoisonError::into_inner);
        self.wait(&self.compute, last)
    }

    /// Waits like [`Device::wait`], for a step's end: sleeps most of the time that the last one took (`expected`), then
    /// polls, so that waking up costs no scheduler's delay; a step that takes far longer is slept through. On a CPU device
    /// it only sleeps: the cores have work to do.
    pub(super) fn wait_step(&self, value: u64, expected: &mut Duration) -> Result<()> {
        self.alive()?;
        let queue = &self.compute;
        if self.info.kind == DeviceKind::Cpu {
            return self.wait(queue, value);
        }
        let start = Instant::now();
        let (semaphores, values) = ([queue.timeline], [value]);
        let info = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        let sleep = *expected * 3 / 4;
        if sleep > SHORTEST_SLEEP {
            // SAFETY: live handles.
            match unsafe { self.raw.wait_semaphores(&info, sleep.as_nanos() as u64) } {
                Ok(()) | Err(vk::Result::TIMEOUT) => {}
                Err(r) => return Err(self.error(r, "finish its work")),
            }
        }
        let limit = *expected * 2 + SHORTEST_SLEEP;
        loop {
            // SAFETY: a live handle.
            let now = unsafe { self.raw.get_semaphore_counter_value(queue.timeline) };
            if now.map_err(|r| self.error(r, "finish its work"))? >= value {
                break;
            }
            if start.elapsed() > limit {
                self.wait(queue, value)?;
                break;
            }
            std::hint::spin_loop();
        }
        *expected = start.elapsed().min(LONGEST_SLEEP);
        Ok(())
    }

    /// Fails if the device was lost.
    fn alive(&self) -> Result<()> {
        match self.lost.get() {
            None => Ok(()),
            Some(what) => Err(broken(what.clone())),
        }
    }

    /// A driver result as an error; a lost device is remembered, with what `VK_EXT_device_fault` says of it.
    pub(super) fn error(&self, r: vk::Result, what: &str) -> Error {
        if r != vk::Result::ERROR_DEVICE_LOST {
            return failed(what)(r);
        }
        let what = self.lost.get_or_init(|| {
            let report = self.fault.as_ref().map_or("the driver gives no report".into(), fault_report);
            format!(
                "{NAME}:{} ({}) was lost while it had to {what}: {report}. Start again; if it happens again, run with \
                 HANZO_VK_VALIDATE=1 and a smaller --ubatch",
                self.info.index, self.info.name
            )
        });
        broken(what.clone())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: everything made on the device holds an `Arc` of it and is gone; queues are idle after the wait (or the
        // device is lost, and may be destroyed as well).
        unsafe {
            let _ = self.raw.device_wait_idle();
            self.pipelines.destroy(&self.raw);
            self.one_shots.destroy(&self.raw);
            self.heaps.destroy(&self.raw);
            self.raw.destroy_semaphore(self.compute.timeline, None);
            if let Some(t) = &self.transfer {
                self.raw.destroy_semaphore(t.timeline, None);
            }
            self.raw.destroy_device(None);
        }
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.info)
    }
}

fn create(instance: &Instance, physical: vk::PhysicalDevice, info: &DeviceInfo) -> Result<ash::Device> {
    let o = info.optional;
    let names = [
        (o.memory_budget, ext::memory_budget::NAME),
        (o.device_fault, ext::device_fault::NAME),
        (o.cooperative_matrix, khr::cooperative_matrix::NAME),
        (info.workgroup_matrices.is_some(), coop2::NAME),
        (o.memory_priority, ext::memory_priority::NAME),
        (o.portability_subset, khr::portability_subset::NAME),
    ];
    let names: Vec<_> = names.iter().filter(|n| n.0).map(|n| n.1.as_ptr()).collect();
    let core = vk::PhysicalDeviceFeatures::default().shader_int64(true).shader_int16(o.int16);
    let mut f11 = vk::PhysicalDeviceVulkan11Features::default().storage_buffer16_bit_access(o.storage16);
    let mut f12 = vk::PhysicalDeviceVulkan12Features::default()
        .buffer_device_address(true)
        .timeline_semaphore(true)
        .scalar_block_layout(true)
        .vulkan_memory_model(o.memory_model)
        .vulkan_memory_model_device_scope(o.memory_model)
        .storage_buffer8_bit_access(o.storage8)
        .shader_float16(o.float16)
        .shader_int8(o.int8);
    let mut f13 = vk::PhysicalDeviceVulkan13Features::default()
        .synchronization2(true)
        .subgroup_size_control(true)
        .compute_full_subgroups(true)
        .shader_integer_dot_product(true)
        .maintenance4(o.maintenance4);
    let mut fault = vk::PhysicalDeviceFaultFeaturesEXT::default().device_fault(true);
    let mut matrix = vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default().cooperative_matrix(true);
    let mut wide = coop2::Features::new(true);
    let mut priority = vk::PhysicalDeviceMemoryPriorityFeaturesEXT::default().memory_priority(true);
    let families = [Some(info.families.compute), info.families.transfer];
    let queues: Vec<_> = families
        .iter()
        .flatten()
        .map(|f| vk::DeviceQueueCreateInfo::default().queue_family_index(*f).queue_priorities(&[1.0]))
        .collect();
    let mut make = vk::DeviceCreateInfo::default()
        .queue_create_infos(&queues)
        .enabled_extension_names(&names)
        .enabled_features(&core)
        .push_next(&mut f11)
        .push_next(&mut f12)
        .push_next(&mut f13);
    if o.device_fault {
        make = make.push_next(&mut fault);
    }
    if o.cooperative_matrix {
        make = make.push_next(&mut matrix);
    }
    if info.workgroup_matrices.is_some() {
        make = make.push_next(&mut wide);
    }
    if o.memory_priority {
        make = make.push_next(&mut priority);
    }
    // SAFETY: features and extensions were reported by this device; every pointer outlives the call.
    unsafe { instance.raw().create_device(physical, &make, None) }.map_err(failed("open the device"))
}

/// What the driver knows of a lost device.
fn fault_report(api: &ext::device_fault::Device) -> String {
    let get = api.fp().get_device_fault_info_ext;
    let mut counts = vk::DeviceFaultCountsEXT::default();
    // SAFETY: asks for counts alone.
    let r = unsafe { get(api.device(), &mut counts, std::ptr::null_mut()) };
    if r != vk::Result::SUCCESS {
        return format!("its fault report could not be had ({r})");
    }
    counts.vendor_binary_size = 0;
    let mut addresses = vec![vk::DeviceFaultAddressInfoEXT::default(); counts.address_info_count as usize];
    let mut vendor = vec![vk::DeviceFaultVendorInfoEXT::default(); counts.vendor_info_count as usize];
    let mut info = vk::DeviceFaultInfoEXT {
        p_address_infos: addresses.as_mut_ptr(),
        p_vendor_infos: vendor.as_mut_ptr(),
        ..Default::default()
    };
    // SAFETY: the arrays have the lengths that `counts` says.
    let r = unsafe { get(api.device(), &mut counts, &mut info) };
    if r != vk::Result::SUCCESS && r != vk::Result::INCOMPLETE {
        return format!("its fault report could not be had ({r})");
    }
    let words = |chars: &[std::ffi::c_char]| {
        let bytes: Vec<u8> = chars.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let mut report = words(&info.description);
    for a in &addresses[..counts.address_info_count as usize] {
        let kind = a.address_type.as_raw();
        report += &format!("; address {:#x} (kind {kind}, +-{:#x})", a.reported_address, a.address_precision);
    }
    for v in &vendor[..counts.vendor_info_count as usize] {
        report += &format!("; {} (code {:#x}, {:#x})", words(&v.description), v.vendor_fault_code, v.vendor_fault_data);
    }
    report
}
