//! The GPUs of this system: what they are, what they can do, what this backend misses in them. Creates nothing.

use super::coop2::{self, WorkgroupMatrices};
use super::error::{NAME, failed, mib, unsupported};
use super::instance::Instance;
use crate::error::Result;
use crate::gpu::Mask;
use ash::{ext, khr, nv, vk};
use std::ffi::CStr;
use std::sync::Arc;

/// The element type of a cooperative matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the names say it
pub enum Component {
    F16,
    F32,
    F64,
    I8,
    U8,
    I32,
    U32,
    Other(i32),
}

/// A cooperative-matrix product that a subgroup can do: `[m, k] x [k, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixShape {
    /// Rows of A.
    pub m: u32,
    /// Columns of B.
    pub n: u32,
    /// The contraction.
    pub k: u32,
    /// Elements of A and B.
    pub input: Component,
    /// Elements of the sum.
    pub result: Component,
}

/// What kind of thing a device is, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceKind {
    /// A card with its own memory.
    Discrete,
    /// Part of the CPU's package.
    Integrated,
    /// A part of another machine's GPU.
    Virtual,
    /// Something else.
    Other,
    /// The CPU itself (lavapipe).
    Cpu,
}

impl DeviceKind {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Discrete => "discrete",
            DeviceKind::Integrated => "integrated",
            DeviceKind::Virtual => "virtual",
            DeviceKind::Other => "other",
            DeviceKind::Cpu => "cpu",
        }
    }
}

/// One Vulkan device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceInfo {
    /// Its number, as in `vulkan:0`: discrete devices first, then in the loader's order.
    pub index: usize,
    /// The vendor's name for it.
    pub name: String,
    /// What it is.
    pub kind: DeviceKind,
    /// The driver and its version, in the vendor's words.
    pub driver: String,
    /// Vulkan version, `(major, minor, patch)`.
    pub api: (u32, u32, u32),
    /// Bytes of device-local memory.
    pub memory: u64,
    /// Bytes of it that may still be had now, if the driver tells (`VK_EXT_memory_budget`).
    pub available: Option<u64>,
    /// Can the host write device-local memory beyond a 256 MiB window?
    pub rebar: bool,
    /// Subgroup size that the driver would choose.
    pub wave: u32,
    /// Smallest and largest subgroup size that may be required.
    pub wave_range: (u32, u32),
    /// Workgroup memory, bytes.
    pub shared_bytes: u32,
    /// Most threads of a workgroup.
    pub max_threads: u32,
    /// Most workgroups of a launch in each direction.
    pub max_groups: [u32; 3],
    /// Is the product of four signed bytes an instruction?
    pub int_dot: bool,
    /// Bytes of weights that may be read ahead beside a stage of attention (lever `weight_prefetch`); 0 where the cache is
    /// small or unknown.
    pub prefetch_bytes: u64,
    /// Are 16-bit float arithmetic and storage there?
    pub f16: bool,
    /// Are subnormal halves kept?
    pub subnormal_halves: bool,
    /// Cooperative-matrix products of a subgroup.
    pub matrices: Vec<MatrixShape>,
    /// Matrices of a whole workgroup (NV_cooperative_matrix2), if there are any.
    pub workgroup_matrices: Option<WorkgroupMatrices>,
    /// A queue family that only copies.
    pub transfer_queue: bool,
    /// What this backend needs and does not find; empty if the device can be used.
    pub missing: Vec<&'static str>,
    /// What of it is not to be used.
    pub mask: Mask,
    pub(super) vendor_id: u32,
    pub(super) device_id: u32,
    pub(super) driver_version: u32,
    pub(super) cache_uuid: [u8; vk::UUID_SIZE],
    pub(super) timestamp_ns: f32,
    pub(super) families: Families,
    pub(super) optional: Optional,
}

/// Queue families by index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Families {
    pub compute: u32,
    /// One that computes and draws.
    pub graphics: Option<u32>,
    pub transfer: Option<u32>,
    pub timestamps: bool,
}

/// Extensions that are used if they are there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Optional {
    pub memory_budget: bool,
    pub device_fault: bool,
    pub cooperative_matrix: bool,
    pub portability_subset: bool,
    pub memory_priority: bool,
    pub maintenance4: bool,
    pub memory_model: bool,
    pub storage16: bool,
    pub storage8: bool,
    pub float16: bool,
    pub int8: bool,
    pub int16: bool,
}

/// The devices of this system, usable or not, in the order of their numbers.
pub fn devices(instance: &Arc<Instance>) -> Result<Vec<DeviceInfo>> {
    Ok(found(instance)?.into_iter().map(|(_, info)| info).collect())
}

/// Device `index`, if it can be used.
pub(super) fn pick(instance: &Arc<Instance>, index: usize) -> Result<(vk::PhysicalDevice, DeviceInfo)> {
    let mut all = found(instance)?;
    if index >= all.len() {
        let names: Vec<String> = all.iter().map(|(_, d)| format!("{NAME}:{} {}", d.index, d.name)).collect();
        let names = if names.is_empty() { "none (is a driver installed?)".into() } else { names.join(", ") };
        return Err(unsupported(format!("there is no device {NAME}:{index}; this system has: {names}")));
    }
    let (physical, info) = all.swap_remove(index);
    if !info.missing.is_empty() {
        return Err(unsupported(format!(
            "{NAME}:{index} ({}, {}) lacks {}; update its driver or use another device",
            info.name,
            info.driver,
            info.missing.join(", ")
        )));
    }
    Ok((physical, info))
}

fn found(instance: &Arc<Instance>) -> Result<Vec<(vk::PhysicalDevice, DeviceInfo)>> {
    // SAFETY: plain query on a live instance.
    let all = unsafe { instance.raw().enumerate_physical_devices() }.map_err(failed("list devices"))?;
    let mut all = all.into_iter().map(|p| Ok((p, describe(instance, p)?))).collect::<Result<Vec<_>>>()?;
    all.sort_by_key(|(_, d)| d.kind);
    all.iter_mut().enumerate().for_each(|(i, (_, d))| d.index = i);
    Ok(all)
}

fn describe(instance: &Instance, p: vk::PhysicalDevice) -> Result<DeviceInfo> {
    let raw = instance.raw();
    // SAFETY: plain query.
    let extensions =
        unsafe { raw.enumerate_device_extension_properties(p) }.map_err(failed("list device extensions"))?;
    let has = |name: &CStr| extensions.iter().any(|e| e.extension_name_as_c_str() == Ok(name));

    let mut p11 = vk::PhysicalDeviceVulkan11Properties::default();
    let mut p12 = vk::PhysicalDeviceVulkan12Properties::default();
    let mut p13 = vk::PhysicalDeviceVulkan13Properties::default();
    // SAFETY: plain query; Vulkan 1.0 devices know none of the 1.3 structs, so their version is asked first.
    let version = unsafe { raw.get_physical_device_properties(p) }.api_version;
    let modern = version >= vk::API_VERSION_1_3;
    let mut props = vk::PhysicalDeviceProperties2::default();
    if modern {
        props = props.push_next(&mut p11).push_next(&mut p12).push_next(&mut p13);
    }
    let mut units = vk::PhysicalDeviceShaderSMBuiltinsPropertiesNV::default();
    if has(nv::shader_sm_builtins::NAME) {
        props = props.push_next(&mut units);
    }
    // SAFETY: the chain outlives the call.
    unsafe { raw.get_physical_device_properties2(p, &mut props) };
    let props = props.properties;

    let coop = modern && has(khr::cooperative_matrix::NAME);
    let mut f11 = vk::PhysicalDeviceVulkan11Features::default();
    let mut f12 = vk::PhysicalDeviceVulkan12Features::default();
    let mut f13 = vk::PhysicalDeviceVulkan13Features::default();
    let mut matrix = vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default();
    let mut fault = vk::PhysicalDeviceFaultFeaturesEXT::default();
    let mut priority = vk::PhysicalDeviceMemoryPriorityFeaturesEXT::default();
    let mut wide = coop2::Features::new(false);
    let mut features = vk::PhysicalDeviceFeatures2::default();
    if modern {
        features = features.push_next(&mut f11).push_next(&mut f12).push_next(&mut f13);
    }
    if coop {
        features = features.push_next(&mut matrix);
    }
    if coop && has(coop2::NAME) {
        features = features.push_next(&mut wide);
    }
    if has(ext::device_fault::NAME) {
        features = features.push_next(&mut fault);
    }
    if has(ext::memory_priority::NAME) {
        features = features.push_next(&mut priority);
    }
    // SAFETY: the chain outlives the call.
    unsafe { raw.get_physical_device_features2(p, &mut features) };
    let core = features.features;

    let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
    let mut memory = vk::PhysicalDeviceMemoryProperties2::default();
    if has(ext::memory_budget::NAME) {
        memory = memory.push_next(&mut budget);
    }
    // SAFETY: the chain outlives the call.
    unsafe { raw.get_physical_device_memory_properties2(p, &mut memory) };
    let memory = memory.memory_properties;
    let local = |h: &usize| memory.memory_heaps[*h].flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL);
    let heap = (0..memory.memory_heap_count as usize).filter(local).max_by_key(|h| memory.memory_heaps[*h].size);
    let window = vk::MemoryPropertyFlags::DEVICE_LOCAL | vk::MemoryPropertyFlags::HOST_VISIBLE;
    let rebar = memory
        .memory_types_as_slice()
        .iter()
        .any(|t| t.property_flags.contains(window) && memory.memory_heaps[t.heap_index as usize].size > (300 << 20));

    // SAFETY: plain query.
    let queues = unsafe { raw.get_physical_device_queue_family_properties(p) };
    use vk::QueueFlags as Q;
    let compute = |without: Q| {
        queues.iter().position(|q| q.queue_flags.contains(Q::COMPUTE) && !q.queue_flags.intersects(without))
    };
    let compute = compute(Q::GRAPHICS).or_else(|| compute(Q::empty()));
    let transfer = queues
        .iter()
        .position(|q| q.queue_flags.contains(Q::TRANSFER) && !q.queue_flags.intersects(Q::GRAPHICS | Q::COMPUTE));
    let families = Families {
        compute: compute.unwrap_or(0) as u32,
        graphics: queues.iter().position(|q| q.queue_flags.contains(Q::COMPUTE | Q::GRAPHICS)).map(|q| q as u32),
        transfer: transfer.map(|t| t as u32),
        timestamps: compute.is_some_and(|c| queues[c].timestamp_valid_bits > 0),
    };

    let matrices = if coop && matrix.cooperative_matrix == vk::TRUE { shapes(instance, p)? } else { Vec::new() };
    let workgroup_matrices = if wide.enough() { coop2::query(instance, p) } else { None };
    let yes = |b: vk::Bool32| b == vk::TRUE;
    use vk::SubgroupFeatureFlags as S;
    let subgroup = S::BASIC | S::ARITHMETIC | S::SHUFFLE | S::BALLOT;
    let compute_stage = vk::ShaderStageFlags::COMPUTE;
    let needs = [
        (modern, "Vulkan 1.3"),
        (compute.is_some(), "a compute queue"),
        (yes(core.shader_int64), "shaderInt64"),
        (yes(f12.buffer_device_address), "bufferDeviceAddress"),
        (yes(f12.timeline_semaphore), "timelineSemaphore"),
        (yes(f12.scalar_block_layout), "scalarBlockLayout"),
        (yes(f13.synchronization2), "synchronization2"),
        (yes(f13.subgroup_size_control), "subgroupSizeControl"),
        (yes(f13.compute_full_subgroups), "computeFullSubgroups"),
        (yes(f13.shader_integer_dot_product), "shaderIntegerDotProduct"),
        (p11.subgroup_supported_operations.contains(subgroup), "subgroup arithmetic and shuffle"),
        (p13.required_subgroup_size_stages.contains(compute_stage), "a required subgroup size in compute"),
    ];
    let version = |v: u32| (vk::api_version_major(v), vk::api_version_minor(v), vk::api_version_patch(v));
    let driver = if modern {
        format!("{} {}", text(p12.driver_name_as_c_str()), text(p12.driver_info_as_c_str()))
    } else {
        format!("driver {:#x}", props.driver_version)
    };
    Ok(DeviceInfo {
        index: 0,
        name: text(props.device_name_as_c_str()),
        kind: match props.device_type {
            vk::PhysicalDeviceType::DISCRETE_GPU => DeviceKind::Discrete,
            vk::PhysicalDeviceType::INTEGRATED_GPU => DeviceKind::Integrated,
            vk::PhysicalDeviceType::VIRTUAL_GPU => DeviceKind::Virtual,
            vk::PhysicalDeviceType::CPU => DeviceKind::Cpu,
            _ => DeviceKind::Other,
        },
        driver: driver.trim().to_string(),
        api: version(props.api_version),
        memory: heap.map_or(0, |h| memory.memory_heaps[h].size),
        available: heap
            .filter(|_| has(ext::memory_budget::NAME))
            .map(|h| budget.heap_budget[h].saturating_sub(budget.heap_usage[h])),
        rebar,
        wave: p11.subgroup_size,
        wave_range: (p13.min_subgroup_size, p13.max_subgroup_size),
        shared_bytes: props.limits.max_compute_shared_memory_size,
        max_threads: props.limits.max_compute_work_group_invocations.min(props.limits.max_compute_work_group_size[0]),
        max_groups: props.limits.max_compute_work_group_count,
        int_dot: yes(p13.integer_dot_product4x8_bit_packed_signed_accelerated),
        prefetch_bytes: prefetch_bytes(props.device_type, units.shader_sm_count),
        f16: yes(f12.shader_float16) && yes(f11.storage_buffer16_bit_access),
        subnormal_halves: yes(p12.shader_denorm_preserve_float16),
        matrices,
        workgroup_matrices,
        transfer_queue: families.transfer.is_some(),
        missing: needs.iter().filter(|n| !n.0).map(|n| n.1).collect(),
        mask: Mask::default(),
        vendor_id: props.vendor_id,
        device_id: props.device_id,
        driver_version: props.driver_version,
        cache_uuid: props.pipeline_cache_uuid,
        timestamp_ns: props.limits.timestamp_period,
        families,
        optional: Optional {
            memory_budget: has(ext::memory_budget::NAME),
            device_fault: yes(fault.device_fault),
            cooperative_matrix: yes(matrix.cooperative_matrix) && yes(f12.vulkan_memory_model),
            portability_subset: has(khr::portability_subset::NAME),
            memory_priority: yes(priority.memory_priority),
            maintenance4: yes(f13.maintenance4),
            memory_model: yes(f12.vulkan_memory_model) && yes(f12.vulkan_memory_model_device_scope),
            storage16: yes(f11.storage_buffer16_bit_access),
            storage8: yes(f12.storage_buffer8_bit_access),
            float16: yes(f12.shader_float16),
            int8: yes(f12.shader_int8),
            int16: yes(core.shader_int16),
        },
    })
}

/// What may be read ahead. No device tells the size of its cache; NVIDIA's of 100 multiprocessors and more have at least 40 MB.
/// The CPU's share is for tests: a stage there has no time to spare.
fn prefetch_bytes(kind: vk::PhysicalDeviceType, multiprocessors: u32) -> u64 {
    match kind {
        vk::PhysicalDeviceType::CPU => 1 << 20,
        _ if multiprocessors >= 100 => 12 << 20,
        _ => 0,
    }
}

/// The cooperative-matrix products of one subgroup whose sum has the type of its addend.
fn shapes(instance: &Instance, p: vk::PhysicalDevice) -> Result<Vec<MatrixShape>> {
    let api = khr::cooperative_matrix::Instance::new(&instance.entry, instance.raw());
    // SAFETY: the extension is there.
    let all = unsafe { api.get_physical_device_cooperative_matrix_properties(p) }
        .map_err(failed("list cooperative matrices"))?;
    let component = |c: vk::ComponentTypeKHR| match c {
        vk::ComponentTypeKHR::FLOAT16 => Component::F16,
        vk::ComponentTypeKHR::FLOAT32 => Component::F32,
        vk::ComponentTypeKHR::FLOAT64 => Component::F64,
        vk::ComponentTypeKHR::SINT8 => Component::I8,
        vk::ComponentTypeKHR::UINT8 => Component::U8,
        vk::ComponentTypeKHR::SINT32 => Component::I32,
        vk::ComponentTypeKHR::UINT32 => Component::U32,
        c => Component::Other(c.as_raw()),
    };
    let plain = |s: &&vk::CooperativeMatrixPropertiesKHR<'_>| {
        s.scope == vk::ScopeKHR::SUBGROUP
            && s.a_type == s.b_type
            && s.c_type == s.result_type
            && s.saturating_accumulation == vk::FALSE
    };
    Ok(all
        .iter()
        .filter(plain)
        .map(|s| MatrixShape {
            m: s.m_size,
            n: s.n_size,
            k: s.k_size,
            input: component(s.a_type),
            result: component(s.result_type),
        })
        .collect())
}

fn text(s: std::result::Result<&CStr, std::ffi::FromBytesUntilNulError>) -> String {
    s.map_or_else(|_| "?".into(), |s| s.to_string_lossy().into_owned())
}

impl std::fmt::Display for DeviceInfo {
    /// One line for `hanzo devices`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{NAME}:{} {} ({}, {}", self.index, self.name, self.kind.name(), mib(self.memory))?;
        if let Some(a) = self.available {
            write!(f, ", {} available", mib(a))?;
        }
        let (major, minor, patch) = self.api;
        write!(f, ") {} Vulkan {major}.{minor}.{patch}, wave {}", self.driver, self.wave)?;
        let (min, max) = self.wave_range;
        if min != max {
            write!(f, " ({min} to {max})")?;
        }
        for (there, what) in [
            (self.int_dot, "int8 dot"),
            (self.f16, "f16"),
            (!self.matrices.is_empty(), "cooperative matrix"),
            (self.workgroup_matrices.is_some(), "cooperative matrix 2"),
            (self.rebar, "ReBAR"),
            (self.transfer_queue, "transfer queue"),
        ] {
            if there {
                write!(f, ", {what}")?;
            }
        }
        match self.missing.as_slice() {
            [] => Ok(()),
            m => write!(f, "; cannot be used: it lacks {}", m.join(", ")),
        }
    }
}
