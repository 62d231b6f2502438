//! A Vulkan device as a [`Backend`].

use super::cache::VulkanCache;
use super::coop2::WorkgroupMatrices;
use super::device::{Device, VulkanOptions};
use super::error::{NAME, unsupported};
use super::executable::VulkanExecutable;
use super::physical::{Component, DeviceInfo, DeviceKind};
use super::upload;
use super::weights::{self, VulkanWeights};
use crate::backend::{Backend, Cache, CompileOptions, Compiled, Executable, Wanted, WeightSource, Weights};
use crate::error::Result;
use crate::gpu::lower::variants::{COOP2_RESERVED, FEW_FOR_TILES};
use crate::gpu::{self, Features, MatrixUnit, MatrixUnits, Program};
use crate::plan::{Plan, WeightId};
use hanzo_kernels::Key;
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

/// Subgroup size to ask for where there is a choice.
const WAVE: u32 = 32;

/// A Vulkan device that runs Plans.
pub struct VulkanBackend {
    device: Arc<Device>,
    features: Features,
    name: String,
}

impl VulkanBackend {
    /// Opens device `index`, as in `--device vulkan:0`.
    ///
    /// # Errors
    /// If there is no loader, no such device, or it lacks something; the message names what and the remedy.
    pub fn open(index: usize, options: &VulkanOptions) -> Result<VulkanBackend> {
        let device = Device::open(index, options)?;
        let features = features(device.info());
        Ok(VulkanBackend { device, features, name: format!("{NAME}:{index}") })
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// What kernels are chosen by.
    pub fn features(&self) -> &Features {
        &self.features
    }

    /// Makes a program that is already lowered executable: [`Backend::compile`]'s second half.
    ///
    /// # Errors
    /// If a kernel is missing or does not compile, or memory is out.
    pub fn executable(
        &self,
        program: Program,
        options: &CompileOptions,
        weights: &Arc<dyn Weights>,
    ) -> Result<VulkanExecutable> {
        self.bound(weights)?;
        VulkanExecutable::new(&self.device, weights, program, options)
    }

    fn bound<'w>(&self, weights: &'w Arc<dyn Weights>) -> Result<&'w VulkanWeights> {
        let bound = weights.as_any().downcast_ref::<VulkanWeights>();
        bound
            .filter(|w| Arc::ptr_eq(w.device(), &self.device))
            .ok_or_else(|| unsupported("these weights were loaded by another backend".into()))
    }

    /// The same device with other features, such as some masked: how tests run the kernels of lesser devices. See also
    /// [`VulkanOptions::mask`].
    pub fn with_features(mut self, features: Features) -> VulkanBackend {
        self.features = features;
        self
    }
}

/// What lowering wants to know of a device.
pub(super) fn features(info: &DeviceInfo) -> Features {
    let (min, max) = info.wave_range;
    let choice = info.kind != DeviceKind::Cpu && min <= WAVE && WAVE <= max;
    let half_tile = (info.matrices.iter())
        .any(|s| (s.m, s.n, s.k) == (16, 16, 16) && s.input == Component::F16 && s.result == Component::F32);
    // What `gemm_coop2` multiplies in a step, at its largest.
    let wide = |w: &WorkgroupMatrices| w.takes((128, 128, 64), 256, COOP2_RESERVED);
    let mut matrix = MatrixUnits::NONE;
    if half_tile {
        matrix = matrix.with(MatrixUnit::Coop);
    }
    if info.optional.cooperative_matrix && info.workgroup_matrices.as_ref().is_some_and(wide) {
        matrix = matrix.with(MatrixUnit::Coop2);
    }
    info.mask.apply(Features {
        wave: if choice { WAVE } else { info.wave },
        half_hw: info.subnormal_halves,
        int_dot: info.int_dot,
        matrix,
        shared_bytes: info.shared_bytes,
        max_threads: info.max_threads,
        prefetch_bytes: info.prefetch_bytes,
    })
}

/// An op's specialization constants at their defaults, on a device.
pub(super) fn constants(op: &str, info: &DeviceInfo) -> Vec<u32> {
    let features = features(info);
    let value = |(name, default): (String, u32)| match name.as_str() {
        "WAVE" => features.wave,
        "HALF_HW" => u32::from(features.half_hw),
        _ => default,
    };
    hanzo_kernels::constants(op).into_iter().map(value).collect()
}

impl Backend for VulkanBackend {
    fn name(&self) -> &str {
        &self.name
    }

    fn flushes(&self) -> bool {
        // Drivers may, unless a kernel asks for the contrary; llvmpipe does not.
        self.device.info().kind != DeviceKind::Cpu
    }

    fn staging(&self, tokens: usize) -> f64 {
        if tokens > FEW_FOR_TILES { self.features.staging() } else { 0.0 }
    }

    fn buckets(&self, n_ubatch: usize) -> Vec<usize> {
        // One token, a few, and what the tiles of contractions are cut for.
        [1, 8, 32, 128].into_iter().filter(|n| *n < n_ubatch).chain([n_ubatch]).collect()
    }

    fn load(&self, plan: &Plan, source: &dyn WeightSource) -> Result<Arc<dyn Weights>> {
        Ok(Arc::new(VulkanWeights::load(&self.device, plan, source)?))
    }

    fn alloc(&self, plan: &Plan, pages: &[usize], slots: &[usize]) -> Result<Box<dyn Cache>> {
        Ok(Box::new(VulkanCache::new(&self.device, plan, pages, slots)?))
    }

    fn prepare(&self, wanted: &[Wanted<'_>]) -> Vec<Option<u64>> {
        let mut kernels: HashSet<(Key, Vec<u32>)> = HashSet::new();
        let mut formats = HashSet::new();
        let mut programs = Vec::new();
        for w in wanted {
            let vector = |id: WeightId| weights::vector(w.plan, id, w.source);
            let program = gpu::lower::program(w.plan, &w.options, &self.features, &vector);
            programs.push(program.as_ref().ok().map(Program::fingerprint));
            for l in program.iter().flat_map(|p| &p.launches) {
                kernels.insert((l.kernel, l.constants.clone()));
            }
            for (i, weight) in w.plan.weights.iter().enumerate() {
                if gpu::lower::is_matrix(w.plan, WeightId(i as u32)) && formats.insert(weight.format) {
                    kernels.extend(upload::wanted(weight.format, self.device.info()));
                }
            }
        }
        let kernels: Vec<(Key, &[u32])> = kernels.iter().map(|(key, constants)| (*key, constants.as_slice())).collect();
        // What does not compile is an error of the Plan that needs it.
        let _ = self.device.kernels(&kernels);
        programs
    }

    fn compiled(&self) -> Option<Compiled> {
        Some(self.device.pipelines.compiled())
    }

    fn launched(&self) -> BTreeSet<String> {
        self.device.pipelines.launched()
    }

    fn reaches(&self, kernel: Key) -> bool {
        let rows = |format| gpu::lower::variants::reaches(kernel.op, format, &self.features);
        !hanzo_kernels::needs_matrix_units(kernel) || kernel.format.is_some_and(rows)
    }

    fn compile(
        &self,
        plan: &Plan,
        options: &CompileOptions,
        weights: &Arc<dyn Weights>,
    ) -> Result<Box<dyn Executable>> {
        let bound = self.bound(weights)?;
        let program = gpu::lower::program(plan, options, &self.features, &|w| bound.vector(w))?;
        Ok(Box::new(self.executable(program, options, weights)?))
    }
}
