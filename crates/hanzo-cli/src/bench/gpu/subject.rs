//! What can be measured: a kernel, its arguments by name, its grid and what its result must be.

use anyhow::{Context as _, bail};
use hanzo_kernels::assemble::{ArgKind, OpFile};
use hanzo_kernels::{Key, spirv};
use hanzo_ml::gpu::Features;
use hanzo_ml::vulkan::raw::{Gpu, Memory};
use hanzo_ml::vulkan::{VulkanBackend, VulkanOptions};

use crate::failure::Failure;

/// A device and what kernels are chosen by on it.
pub struct Machine {
    gpu: Gpu,
    pub features: Features,
}

impl Machine {
    /// Opens device `index`.
    pub fn open(index: usize, options: &VulkanOptions) -> anyhow::Result<Machine> {
        let backend = VulkanBackend::open(index, options)?;
        Ok(Machine { gpu: Gpu::on(backend.device()), features: backend.features().clone() })
    }
}

impl std::ops::Deref for Machine {
    type Target = Gpu;

    fn deref(&self) -> &Gpu {
        &self.gpu
    }
}

/// The value of a kernel's argument.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    Weight { base: u64, planes: [u32; 3], table: u64 },
    Pointer(u64),
    U32(u32),
    F32(f32),
}

impl From<&Memory> for Arg {
    fn from(m: &Memory) -> Arg {
        Arg::Pointer(m.address())
    }
}

/// Tuning constants by name, in the order of their ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Constants(pub Vec<(String, u32)>);

impl Constants {
    /// A kernel's defaults with what the device says, then `fixed`, then `set`. A name that a kernel does not have is dropped
    /// from `fixed` (cases serve several kernels) and refused from `set`.
    pub fn of(kernel: Key, gpu: &Machine, fixed: &[(&str, u32)], set: &[(String, u32)]) -> anyhow::Result<Constants> {
        let Features { wave, half_hw, max_threads, .. } = gpu.features;
        let mut all = hanzo_kernels::constants(kernel.op);
        if let Some(c) = all.iter_mut().find(|c| c.0 == "THREADS") {
            c.1 = c.1.clamp(wave, max_threads.max(wave));
        }
        let standard = [("WAVE", wave), ("HALF_HW", u32::from(half_hw))];
        for (name, value) in fixed.iter().chain(&standard) {
            if let Some(c) = all.iter_mut().find(|c| c.0 == *name) {
                c.1 = *value;
            }
        }
        for (name, value) in set {
            let names: Vec<String> = all.iter().map(|c| c.0.clone()).collect();
            let c = all.iter_mut().find(|c| c.0 == *name).ok_or_else(|| {
                Failure::usage(format!("kernel {} has no constant {name}; it has {}", kernel.op, names.join(", ")))
            })?;
            c.1 = *value;
        }
        // A driver may run what takes more than it grants, and a figure from it would be nobody's.
        let values: Vec<(&str, u32)> = all.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        if let Some(bytes) = hanzo_kernels::shared_bytes(kernel, &values)
            && bytes > u64::from(gpu.features.shared_bytes)
        {
            return Err(Failure::usage(format!(
                "kernel {kernel} would take {bytes} bytes of workgroup memory; the device grants {}: choose smaller constants",
                gpu.features.shared_bytes
            ))
            .into());
        }
        Ok(Constants(all))
    }

    /// A constant; 1 if there is none of that name.
    pub fn get(&self, name: &str) -> u32 {
        self.0.iter().find(|c| c.0 == name).map_or(1, |c| c.1)
    }

    /// The values in the order of their ids.
    pub fn values(&self) -> Vec<u32> {
        self.0.iter().map(|c| c.1).collect()
    }

    /// Those that matter for tuning, as `NAME=1,OTHER=2`.
    pub fn tuning(&self) -> String {
        const FIXED: [&str; 8] = ["WAVE", "HALF_HW", "LIVE", "MASK", "BIAS", "MOE", "WHOLE", "TERMS"];
        let own = self.0.iter().filter(|c| !FIXED.contains(&c.0.as_str()));
        own.map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(",")
    }
}

/// How far a result is from its meaning in f64.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Check {
    /// Results looked at.
    pub samples: usize,
    /// The largest error, as a part of what rounding may add.
    pub worst: f64,
}

impl Check {
    /// Notes one result.
    pub fn add(&mut self, is: f64, should: f64, tolerance: f64) {
        let part = (is - should).abs() / tolerance.max(f64::MIN_POSITIVE);
        self.samples += 1;
        self.worst = if part.is_nan() { f64::INFINITY } else { self.worst.max(part) };
    }

    /// Is every result within the tolerance?
    pub fn holds(&self) -> bool {
        self.worst <= 1.0
    }
}

/// One choice for each of a few constants.
pub type Choice = Vec<(&'static str, u32)>;

/// Something to measure.
pub trait Subject {
    /// The kernel.
    fn kernel(&self) -> Key;
    /// Constants that the case sets, if the kernel has them.
    fn fixed(&self) -> Vec<(&'static str, u32)>;
    /// The grid under some constants, or why they do not go together.
    fn grid(&self, c: &Constants) -> Result<[u32; 3], String>;
    /// How many launches there are until arguments repeat.
    fn copies(&self) -> usize;
    /// The arguments of launch `i % copies`.
    fn arguments(&self, c: &Constants, copy: usize) -> anyhow::Result<Vec<(&'static str, Arg)>>;
    /// Bytes that a launch has to move.
    fn bytes(&self) -> u64;
    /// Bytes that launches visit before any of them again.
    fn working_set(&self) -> u64;
    /// Multiplications and additions of a launch.
    fn operations(&self) -> f64;
    /// What the kernel writes: poisoned before it is checked.
    fn output(&self) -> Option<&Memory>;
    /// Compares what launch 0 wrote with its meaning.
    fn check(&self, gpu: &Machine, c: &Constants) -> anyhow::Result<Check>;
    /// Constants worth trying, each axis on its own.
    fn axes(&self) -> Vec<Vec<Choice>>;
}

/// A kernel's code, or an error that says that there is none.
pub fn code(key: Key) -> anyhow::Result<&'static [u32]> {
    spirv(key).ok_or_else(|| Failure::usage(format!("there is no Vulkan kernel {key}")).into())
}

/// The argument struct of an op as bytes; every argument must be among `args`.
pub fn encode(op: &OpFile, args: &[(&'static str, Arg)]) -> anyhow::Result<Vec<u8>> {
    let (bytes, offsets) = op.layout();
    let mut out = vec![0; bytes];
    for (a, at) in op.args.iter().zip(offsets) {
        let value = args.iter().find(|(name, _)| *name == a.name).map(|(_, v)| *v);
        let value = value.with_context(|| format!("kernel {} wants an argument `{}`", op.name, a.name))?;
        let mut put = |at: usize, b: &[u8]| out[at..at + b.len()].copy_from_slice(b);
        match (a.kind, value) {
            (ArgKind::Weight, Arg::Weight { base, planes, table }) => {
                put(at, &base.to_le_bytes());
                planes.iter().enumerate().for_each(|(i, p)| put(at + 8 + 4 * i, &p.to_le_bytes()));
                put(at + 24, &table.to_le_bytes());
            }
            (ArgKind::Ro | ArgKind::Wo | ArgKind::Rw, Arg::Pointer(p)) => put(at, &p.to_le_bytes()),
            (ArgKind::U32, Arg::U32(x)) => put(at, &x.to_le_bytes()),
            (ArgKind::F32, Arg::F32(x)) => put(at, &x.to_le_bytes()),
            (kind, _) => bail!("kernel {} wants another kind of `{}`: {kind:?}", op.name, a.name),
        }
    }
    Ok(out)
}

/// Launches a kernel once with its default constants and those in `set`.
pub fn launch(
    gpu: &Machine,
    key: Key,
    set: &[(&str, u32)],
    args: &[(&'static str, Arg)],
    groups: impl Fn(&Constants) -> [u32; 3],
) -> anyhow::Result<()> {
    let constants = Constants::of(key, gpu, set, &[])?;
    let op = hanzo_kernels::op(key.op).with_context(|| format!("there is no op {}", key.op))?;
    let kernel = gpu.kernel(&key.to_string(), code(key)?, &constants.values())?;
    Ok(gpu.launch(kernel, &encode(op, args)?, groups(&constants))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_lie_where_the_header_says_and_none_may_be_missing() {
        let op = hanzo_kernels::op("fill").unwrap();
        let args =
            [("count", Arg::U32(3)), ("y", Arg::Pointer(0x1234)), ("value", Arg::U32(7)), ("more", Arg::F32(1.0))];
        let bytes = encode(op, &args).unwrap();
        assert_eq!(bytes, [&0x1234u64.to_le_bytes()[..], &7u32.to_le_bytes(), &3u32.to_le_bytes()].concat());
        assert!(encode(op, &args[1..]).unwrap_err().to_string().contains("`count`"));
        assert!(encode(op, &[("y", Arg::U32(1)), args[0], args[2]]).is_err());
    }

    #[test]
    fn a_result_that_is_no_number_fails_its_check() {
        let mut check = Check::default();
        check.add(1.0, 1.5, 1.0);
        assert!(check.holds() && check.worst == 0.5);
        check.add(f64::NAN, 1.0, 1.0);
        assert!(!check.holds() && check.samples == 2);
    }
}
