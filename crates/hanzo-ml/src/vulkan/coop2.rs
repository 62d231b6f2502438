//! NV_cooperative_matrix2, which `ash` 0.38 does not know: its structs and its one query, declared after the public registry, and what a device
//! reports of matrices of a whole workgroup. Only that extension may enter here.

use super::instance::Instance;
use ash::vk;
use std::ffi::{CStr, c_void};

/// The extension's name.
pub(super) const NAME: &CStr = c"VK_NV_cooperative_matrix2";

/// VkPhysicalDeviceCooperativeMatrix2FeaturesNV.
#[repr(C)]
pub(super) struct Features {
    s_type: vk::StructureType,
    p_next: *mut c_void,
    pub workgroup_scope: vk::Bool32,
    pub flexible_dimensions: vk::Bool32,
    pub reductions: vk::Bool32,
    pub conversions: vk::Bool32,
    pub per_element_operations: vk::Bool32,
    pub tensor_addressing: vk::Bool32,
    pub block_loads: vk::Bool32,
}

// SAFETY: the registry lets the struct extend both chains; it begins with sType and pNext.
unsafe impl vk::ExtendsPhysicalDeviceFeatures2 for Features {}
// SAFETY: as above.
unsafe impl vk::ExtendsDeviceCreateInfo for Features {}

impl Features {
    /// Nothing asked for, or all that kernels use.
    pub fn new(used: bool) -> Features {
        let used = vk::Bool32::from(used);
        Features {
            s_type: vk::StructureType::from_raw(1_000_593_000),
            p_next: std::ptr::null_mut(),
            workgroup_scope: used,
            flexible_dimensions: used,
            reductions: vk::FALSE,
            conversions: vk::FALSE,
            per_element_operations: used,
            tensor_addressing: used,
            block_loads: vk::FALSE,
        }
    }

    /// Is all there that kernels use?
    pub fn enough(&self) -> bool {
        let used =
            [self.workgroup_scope, self.flexible_dimensions, self.per_element_operations, self.tensor_addressing];
        used.iter().all(|f| *f == vk::TRUE)
    }
}

/// VkPhysicalDeviceCooperativeMatrix2PropertiesNV.
#[repr(C)]
struct Properties {
    s_type: vk::StructureType,
    p_next: *mut c_void,
    max_workgroup: u32,
    max_dimension: u32,
    reserved_shared: u32,
}

// SAFETY: the registry lets the struct extend the chain; it begins with sType and pNext.
unsafe impl vk::ExtendsPhysicalDeviceProperties2 for Properties {}

/// VkCooperativeMatrixFlexibleDimensionsPropertiesNV.
#[repr(C)]
#[derive(Clone, Copy)]
struct Flexible {
    s_type: vk::StructureType,
    p_next: *mut c_void,
    m: u32,
    n: u32,
    k: u32,
    a: vk::ComponentTypeKHR,
    b: vk::ComponentTypeKHR,
    c: vk::ComponentTypeKHR,
    result: vk::ComponentTypeKHR,
    saturating: vk::Bool32,
    scope: vk::ScopeKHR,
    workgroup: u32,
}

type Query = unsafe extern "system" fn(vk::PhysicalDevice, *mut u32, *mut Flexible) -> vk::Result;

/// What a device says of matrices of a workgroup, f16 summed in f32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkgroupMatrices {
    /// The most threads of such a workgroup.
    pub max_threads: u32,
    /// The most rows or columns of a matrix.
    pub max_dimension: u32,
    /// Bytes of workgroup memory that the driver keeps for itself.
    pub reserved_shared: u32,
    /// What m, n and k must be multiples of, and the threads of the workgroup that does it.
    pub shapes: Vec<(u32, u32, u32, u32)>,
}

impl WorkgroupMatrices {
    /// Can a workgroup of `threads` multiply `m x k` by `k x n`, the driver keeping at most `reserved` bytes?
    pub fn takes(&self, (m, n, k): (u32, u32, u32), threads: u32, reserved: u32) -> bool {
        let whole = |s: &&(u32, u32, u32, u32)| {
            [(m, s.0), (n, s.1), (k, s.2)].iter().all(|(size, unit)| *unit > 0 && size.is_multiple_of(*unit))
        };
        let fits = threads <= self.max_threads && m.max(n).max(k) <= self.max_dimension;
        fits && self.reserved_shared <= reserved && self.shapes.iter().filter(whole).any(|s| s.3 == threads)
    }
}

/// Asks a device that has the extension and its features.
pub(super) fn query(instance: &Instance, p: vk::PhysicalDevice) -> Option<WorkgroupMatrices> {
    let mut own = Properties {
        s_type: vk::StructureType::from_raw(1_000_593_002),
        p_next: std::ptr::null_mut(),
        max_workgroup: 0,
        max_dimension: 0,
        reserved_shared: 0,
    };
    let mut all = vk::PhysicalDeviceProperties2::default().push_next(&mut own);
    // SAFETY: the chain outlives the call, and the device has the extension.
    unsafe { instance.raw().get_physical_device_properties2(p, &mut all) };
    let name = c"vkGetPhysicalDeviceCooperativeMatrixFlexibleDimensionsPropertiesNV";
    // SAFETY: a live instance and a name that ends in zero.
    let found = unsafe { instance.entry.get_instance_proc_addr(instance.raw().handle(), name.as_ptr()) }?;
    // SAFETY: the registry gives the function of this name this type.
    let get: Query = unsafe { std::mem::transmute(found) };
    let mut count = 0;
    // SAFETY: asks for the count alone.
    if unsafe { get(p, &mut count, std::ptr::null_mut()) } != vk::Result::SUCCESS {
        return None;
    }
    let none = Flexible {
        s_type: vk::StructureType::from_raw(1_000_593_001),
        p_next: std::ptr::null_mut(),
        m: 0,
        n: 0,
        k: 0,
        a: vk::ComponentTypeKHR::FLOAT16,
        b: vk::ComponentTypeKHR::FLOAT16,
        c: vk::ComponentTypeKHR::FLOAT16,
        result: vk::ComponentTypeKHR::FLOAT16,
        saturating: vk::FALSE,
        scope: vk::ScopeKHR::SUBGROUP,
        workgroup: 0,
    };
    let mut shapes = vec![none; count as usize];
    // SAFETY: the array has `count` elements.
    let r = unsafe { get(p, &mut count, shapes.as_mut_ptr()) };
    if r != vk::Result::SUCCESS && r != vk::Result::INCOMPLETE {
        return None;
    }
    shapes.truncate(count as usize);
    let (half, float) = (vk::ComponentTypeKHR::FLOAT16, vk::ComponentTypeKHR::FLOAT32);
    let wanted = |s: &&Flexible| {
        s.scope == vk::ScopeKHR::WORKGROUP
            && (s.a, s.b, s.c, s.result, s.saturating) == (half, half, float, float, vk::FALSE)
    };
    let shapes = shapes.iter().filter(wanted).map(|s| (s.m, s.n, s.k, s.workgroup)).collect();
    let Properties { max_workgroup: max_threads, max_dimension, reserved_shared, .. } = own;
    Some(WorkgroupMatrices { max_threads, max_dimension, reserved_shared, shapes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_structs_lie_as_the_registry_says() {
        assert_eq!((size_of::<Features>(), size_of::<Properties>(), size_of::<Flexible>()), (48, 32, 56));
        assert_eq!(
            (std::mem::offset_of!(Flexible, scope), std::mem::offset_of!(Properties, reserved_shared)),
            (48, 24)
        );
    }

    #[test]
    fn a_tile_needs_whole_granules_its_threads_and_room() {
        let w = WorkgroupMatrices {
            max_threads: 256,
            max_dimension: 128,
            reserved_shared: 4096,
            shapes: vec![(32, 32, 16, 128), (64, 32, 16, 256)],
        };
        let takes = |m, n, k, threads, reserved| w.takes((m, n, k), threads, reserved);
        assert!(takes(128, 128, 64, 256, 8192) && takes(32, 64, 64, 128, 4096));
        assert!(!takes(32, 128, 64, 256, 8192) && !takes(128, 128, 64, 512, 8192));
        assert!(!takes(256, 128, 64, 256, 8192) && !takes(128, 128, 64, 256, 2048) && !takes(128, 128, 24, 256, 8192));
    }
}
