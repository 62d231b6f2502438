//! Pipelines: SPIR-V and constants to a `VkPipeline`, each made once a device, and the driver's cache of them on disk.
//! Knows no kernel by name.

use super::device::Device;
use super::error::{failed, unsupported};
use super::physical::DeviceInfo;
use crate::backend::Compiled;
use crate::error::Result;
use ash::vk;
use hanzo_kernels::Key;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of push constants that every Vulkan device has.
pub(super) const ARGS: usize = 128;

/// The cache goes to disk at most this share of the time: it grows with every pipeline, and is written whole.
const SAVING: u32 = 20;

/// What makes a pipeline: code and its specialization constants, `THREADS` first, then `WAVE`.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    /// For errors.
    pub name: &'a str,
    pub spirv: &'a [u32],
    pub constants: &'a [u32],
}

/// A device's pipelines.
pub(super) struct Pipelines {
    layout: vk::PipelineLayout,
    cache: vk::PipelineCache,
    file: Option<PathBuf>,
    saved: Mutex<Saved>,
    made: Mutex<HashMap<(u64, Vec<u32>), vk::Pipeline>>,
    launched: Mutex<Launched>,
    counts: Mutex<Compiled>,
}

/// Which pipelines some command buffer launches, and what they are called: kernels of one code share a pipeline.
#[derive(Default)]
struct Launched {
    names: HashMap<vk::Pipeline, BTreeSet<String>>,
    pipelines: HashSet<vk::Pipeline>,
}

/// The cache on disk.
struct Saved {
    /// Its bytes when it was last written.
    bytes: usize,
    /// It is not written again before.
    not_before: Instant,
}

impl Pipelines {
    pub fn new(raw: &ash::Device, info: &DeviceInfo, folder: Option<&Path>) -> Result<Pipelines> {
        let range =
            [vk::PushConstantRange { stage_flags: vk::ShaderStageFlags::COMPUTE, offset: 0, size: ARGS as u32 }];
        let make = vk::PipelineLayoutCreateInfo::default().push_constant_ranges(&range);
        // SAFETY: a plain create.
        let layout = unsafe { raw.create_pipeline_layout(&make, None) }.map_err(failed("create a pipeline layout"))?;
        let file = folder.map(|f| f.join(file_name(info)));
        let stored = file.as_deref().and_then(read_cache).unwrap_or_default();
        let make = vk::PipelineCacheCreateInfo::default().initial_data(&stored);
        // SAFETY: the data is what this driver wrote (checksummed), or empty; drivers ignore what they do not know.
        let cache = unsafe { raw.create_pipeline_cache(&make, None) }.map_err(|r| {
            // SAFETY: made above, and used by nothing.
            unsafe { raw.destroy_pipeline_layout(layout, None) };
            failed("create a pipeline cache")(r)
        })?;
        let saved = Mutex::new(Saved { bytes: stored.len(), not_before: Instant::now() });
        let (made, launched, counts) = Default::default();
        Ok(Pipelines { layout, cache, file, saved, made, launched, counts })
    }

    /// The one layout: 128 bytes of push constants, no descriptors.
    pub fn layout(&self) -> vk::PipelineLayout {
        self.layout
    }

    /// What was compiled so far.
    pub fn compiled(&self) -> Compiled {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes that a command buffer launches it.
    pub fn launches(&self, pipeline: vk::Pipeline) {
        self.launched.lock().unwrap_or_else(PoisonError::into_inner).pipelines.insert(pipeline);
    }

    /// Names of the kernels that were launched so far.
    pub fn launched(&self) -> BTreeSet<String> {
        let launched = self.launched.lock().unwrap_or_else(PoisonError::into_inner);
        let names = launched.pipelines.iter().filter_map(|p| launched.names.get(p));
        names.flatten().cloned().collect()
    }

    /// Writes the driver's cache to disk if it has grown; unless `now`, only if little time goes into that. A cache that
    /// cannot be written costs time later, nothing else.
    fn save(&self, raw: &ash::Device, now: bool) {
        let Some(file) = &self.file else { return };
        let mut saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner);
        let start = Instant::now();
        if !now && start < saved.not_before {
            return;
        }
        // SAFETY: a live handle.
        let Ok(data) = (unsafe { raw.get_pipeline_cache_data(self.cache) }) else { return };
        if data.len() > saved.bytes {
            saved.bytes = data.len();
            let _ = write_cache(file, &data);
        }
        saved.not_before = Instant::now() + (start.elapsed() * SAVING).max(Duration::from_millis(10));
    }

    /// Called once, with the device idle.
    pub fn destroy(&self, raw: &ash::Device) {
        self.save(raw, true);
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: by contract.
        unsafe {
            made.drain().for_each(|(_, p)| raw.destroy_pipeline(p, None));
            raw.destroy_pipeline_cache(self.cache, None);
            raw.destroy_pipeline_layout(self.layout, None);
        }
    }
}

impl Device {
    /// The pipelines of kernels with their constants, in order.
    pub(super) fn kernels(&self, wanted: &[(Key, &[u32])]) -> Result<Vec<vk::Pipeline>> {
        let names: Vec<String> = wanted.iter().map(|(key, _)| key.to_string()).collect();
        let mut sources = Vec::with_capacity(wanted.len());
        for (&(key, constants), name) in wanted.iter().zip(&names) {
            let spirv = hanzo_kernels::spirv(key).ok_or_else(|| unsupported(format!("there is no kernel {name}")))?;
            sources.push(Source { name, spirv, constants });
        }
        self.pipelines(&sources)
    }

    /// The pipelines of `sources`, in order; those that are new are made by several threads.
    pub(super) fn pipelines(&self, sources: &[Source<'_>]) -> Result<Vec<vk::Pipeline>> {
        let keys: Vec<(u64, Vec<u32>)> = sources.iter().map(|s| (hash(s.spirv), s.constants.to_vec())).collect();
        let mut wanted: Vec<usize> = Vec::new();
        {
            let made = self.pipelines.made.lock().unwrap_or_else(PoisonError::into_inner);
            let mut seen = HashSet::new();
            wanted.extend((0..keys.len()).filter(|i| !made.contains_key(&keys[*i]) && seen.insert(&keys[*i])));
        }
        let start = Instant::now();
        let (next, busy) = (AtomicUsize::new(0), AtomicU64::new(0));
        let failure = Mutex::new(None);
        let work = || {
            while let Some(&i) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
                let start = Instant::now();
                let made = self.make_pipeline(&sources[i]);
                busy.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
                match made {
                    Ok(p) => {
                        let mut made = self.pipelines.made.lock().unwrap_or_else(PoisonError::into_inner);
                        if let Some(other) = made.insert(keys[i].clone(), p) {
                            // Another thread made the same; its users keep it.
                            made.insert(keys[i].clone(), other);
                            // SAFETY: nobody has seen `p`.
                            unsafe { self.raw.destroy_pipeline(p, None) };
                        }
                    }
                    Err(e) => *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(e),
                }
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(wanted.len());
        std::thread::scope(|s| {
            (1..threads).for_each(|_| drop(s.spawn(work)));
            work();
        });
        {
            let mut counts = self.pipelines.counts.lock().unwrap_or_else(PoisonError::into_inner);
            counts.made += wanted.len();
            counts.reused += sources.len() - wanted.len();
            counts.busy += busy.into_inner() as f64 / 1e9;
            counts.seconds += if wanted.is_empty() { 0.0 } else { start.elapsed().as_secs_f64() };
        }
        if let Some(e) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(e);
        }
        if !wanted.is_empty() {
            self.pipelines.save(&self.raw, false);
        }
        self.validated()?;
        let made = self.pipelines.made.lock().unwrap_or_else(PoisonError::into_inner);
        let all: Vec<vk::Pipeline> = keys.iter().map(|k| made.get(k).copied().unwrap_or_default()).collect();
        drop(made);
        let mut launched = self.pipelines.launched.lock().unwrap_or_else(PoisonError::into_inner);
        for (pipeline, source) in all.iter().zip(sources) {
            launched.names.entry(*pipeline).or_default().insert(source.name.to_string());
        }
        drop(launched);
        Ok(all)
    }

    fn make_pipeline(&self, source: &Source<'_>) -> Result<vk::Pipeline> {
        let (info, name) = (self.info(), source.name);
        let &[threads, wave, ..] = source.constants else {
            return Err(unsupported(format!("kernel {name} does not say its THREADS and WAVE")));
        };
        let (min, max) = info.wave_range;
        if !wave.is_power_of_two() || wave < min || wave > max {
            return Err(unsupported(format!("kernel {name} wants waves of {wave}; {} has {min} to {max}", info.name)));
        }
        if threads == 0 || threads > info.max_threads || threads % wave != 0 {
            return Err(unsupported(format!(
                "kernel {name} wants {threads} threads in waves of {wave}; {} runs at most {}",
                info.name, info.max_threads
            )));
        }
        let create = vk::ShaderModuleCreateInfo::default().code(source.spirv);
        // SAFETY: SPIR-V from this project's build or test, valid by `spirv-val`.
        let module = unsafe { self.raw.create_shader_module(&create, None) }
            .map_err(|r| self.error(r, &format!("load kernel {name}")))?;
        let entries: Vec<vk::SpecializationMapEntry> = (0..source.constants.len() as u32)
            .map(|i| vk::SpecializationMapEntry { constant_id: i, offset: i * 4, size: 4 })
            .collect();
        let data: Vec<u8> = source.constants.iter().flat_map(|c| c.to_ne_bytes()).collect();
        let constants = vk::SpecializationInfo::default().map_entries(&entries).data(&data);
        let mut size = vk::PipelineShaderStageRequiredSubgroupSizeCreateInfo::default().required_subgroup_size(wave);
        let stage = vk::PipelineShaderStageCreateInfo::default()
            .flags(vk::PipelineShaderStageCreateFlags::REQUIRE_FULL_SUBGROUPS)
            .stage(vk::ShaderStageFlags::COMPUTE)
            .module(module)
            .name(c"main")
            .specialization_info(&constants)
            .push_next(&mut size);
        let create = [vk::ComputePipelineCreateInfo::default().stage(stage).layout(self.pipelines.layout)];
        // SAFETY: every pointer outlives the call; the cache is internally synchronised.
        let made = unsafe { self.raw.create_compute_pipelines(self.pipelines.cache, &create, None) };
        // SAFETY: pipelines do not need their module.
        unsafe { self.raw.destroy_shader_module(module, None) };
        made.map(|p| p[0]).map_err(|(_, r)| self.error(r, &format!("compile kernel {name}")))
    }
}

fn hash(words: &[u32]) -> u64 {
    let mut h = std::hash::DefaultHasher::new();
    words.hash(&mut h);
    h.finish()
}

/// Names the device, its driver and the driver's own cache version.
fn file_name(info: &DeviceInfo) -> String {
    let uuid: String = info.cache_uuid.iter().map(|b| format!("{b:02x}")).collect();
    format!("vulkan-{:04x}-{:04x}-{:08x}-{uuid}.bin", info.vendor_id, info.device_id, info.driver_version)
}

/// FNV-1a: a file that was cut short or damaged must not reach the driver.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ *b as u64).wrapping_mul(0x100_0000_01b3))
}

fn read_cache(file: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(file).ok()?;
    let (sum, data) = bytes.split_first_chunk::<8>()?;
    (checksum(data) == u64::from_le_bytes(*sum)).then(|| data.to_vec())
}

/// A temporary file in the same folder, then a rename: readers see the old file or the new one.
fn write_cache(file: &Path, data: &[u8]) -> std::io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    // The upload's thread and a compilation may both write.
    static TURN: AtomicU64 = AtomicU64::new(0);
    let turn = TURN.fetch_add(1, Ordering::Relaxed);
    let temporary = file.with_extension(format!("{}.{turn}.tmp", std::process::id()));
    let mut bytes = checksum(data).to_le_bytes().to_vec();
    bytes.extend_from_slice(data);
    let done = std::fs::write(&temporary, bytes).and_then(|()| std::fs::rename(&temporary, file));
    if done.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    done
}
