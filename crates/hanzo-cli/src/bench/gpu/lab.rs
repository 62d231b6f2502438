//! A device under measurement: launches a subject many times in recorded chains and reads the device's clock.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context as _;
use hanzo_ml::vulkan::chain::Chain;
use hanzo_ml::vulkan::raw::{Dispatch, Kernel};
use hanzo_ml::vulkan::{DeviceInfo, DeviceKind, VulkanOptions};

use super::stream::ReadRoof;
use super::subject::{Check, Constants, Machine, Subject, code, encode};
use crate::commands::devices;
use crate::failure::Failure;
use crate::measure::stats;

/// Working set on a GPU, whose caches Vulkan does not tell: four times the largest there is today.
const GPU_WORKING_SET: u64 = 512 << 20;
/// Working set in last-level caches, where they are known.
const TIMES_CACHE: u64 = 4;
/// Runs of a short chain.
const MOST_REPETITIONS: usize = 25;

/// How to measure.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// The most launches of a chain.
    pub launches: usize,
    /// Seconds that a chain should take at most.
    pub seconds: f64,
    /// Runs of each chain.
    pub repetitions: usize,
    /// Bytes to visit before any again; the default depends on the device.
    pub working_set: Option<u64>,
}

/// What came out.
#[derive(Clone, Debug)]
pub struct Figures {
    pub constants: Constants,
    pub groups: [u32; 3],
    /// Launches of a chain.
    pub launches: usize,
    /// Seconds a launch, of each repetition, with a barrier between launches.
    pub dependent: Vec<f64>,
    /// Seconds a launch, of each repetition, without.
    pub independent: Vec<f64>,
    pub check: Check,
}

impl Figures {
    /// Seconds of a launch that waits for the one before it.
    pub fn dependent(&self) -> f64 {
        stats::median(&self.dependent)
    }

    /// Seconds of a launch among others.
    pub fn independent(&self) -> f64 {
        stats::median(&self.independent)
    }
}

/// A device under measurement.
pub struct Lab {
    pub gpu: Machine,
    pub effort: Effort,
    /// Bytes a second that the device reads at best, once it was asked for.
    roof: Option<f64>,
}

impl Lab {
    /// Opens device `index`; pipelines are kept in `cache`.
    pub fn open(index: usize, cache: Option<PathBuf>, effort: Effort) -> anyhow::Result<Lab> {
        let options = VulkanOptions { pipeline_cache: cache, ..VulkanOptions::default() };
        Ok(Lab { gpu: Machine::open(index, &options)?, effort, roof: None })
    }

    /// What the device is.
    pub fn info(&self) -> &DeviceInfo {
        self.gpu.device().info()
    }

    /// Bytes that launches should visit before any again.
    pub fn working_set(&self) -> u64 {
        let known = self.effort.working_set.or_else(|| {
            let cache = devices::last_level_cache().filter(|_| self.info().kind == DeviceKind::Cpu)?;
            Some(TIMES_CACHE * cache)
        });
        known.unwrap_or(GPU_WORKING_SET).min(self.info().available.unwrap_or(self.info().memory) / 4)
    }

    /// Bytes a second of a kernel that only reads, the best of a few ways to do it.
    pub fn roof(&mut self) -> anyhow::Result<f64> {
        if let Some(roof) = self.roof {
            return Ok(roof);
        }
        let subject = ReadRoof::new(&self.gpu, self.working_set())?;
        let mut best = 0f64;
        for choice in subject.ways() {
            let figures = self.measure(&subject, &choice)?;
            let seconds = figures.dependent().min(figures.independent());
            best = best.max(subject.bytes() as f64 / seconds);
        }
        self.roof = Some(best);
        Ok(best)
    }

    /// A kernel with constants, made if it is new.
    pub fn kernel(&self, subject: &dyn Subject, constants: &Constants) -> anyhow::Result<Kernel> {
        let key = subject.kernel();
        Ok(self.gpu.kernel(&key.to_string(), code(key)?, &constants.values())?)
    }

    /// Checks a subject's result, then times it.
    ///
    /// # Errors
    /// If the constants do not go together or the result is wrong: the speed of a wrong kernel is no figure.
    pub fn measure(&self, subject: &dyn Subject, set: &[(String, u32)]) -> anyhow::Result<Figures> {
        let key = subject.kernel();
        let constants = Constants::of(key, &self.gpu, &subject.fixed(), set)?;
        let groups = subject
            .grid(&constants)
            .map_err(|why| Failure::usage(format!("{key} with {}: {why}", constants.tuning())))?;
        let kernel = self.kernel(subject, &constants)?;
        let op = hanzo_kernels::op(key.op).with_context(|| format!("there is no op {}", key.op))?;
        let args = (0..subject.copies())
            .map(|i| encode(op, &subject.arguments(&constants, i)?))
            .collect::<anyhow::Result<Vec<_>>>()?;
        if let Some(y) = subject.output() {
            self.gpu.fill(y, 0x7fc0_0000)?;
        }
        self.gpu.launch(kernel, &args[0], groups)?;
        let check = subject.check(&self.gpu, &constants)?;
        if !check.holds() {
            let what = format!("{key} with {} computes something else", constants.tuning());
            let by = format!("the worst of {} results is {:.3} of its tolerance away", check.samples, check.worst);
            return Err(Failure::new(format!("{what}: {by}")).into());
        }
        let list = |n: usize| -> Vec<Dispatch<'_>> {
            (0..n).map(|i| Dispatch { kernel, args: &args[i % args.len()], groups }).collect()
        };
        let few = self.gpu.record(&list(args.len().min(4)), true)?;
        few.run()?;
        let each = few.run()?.seconds() / args.len().min(4) as f64;
        let fit = (self.effort.seconds / each.max(1e-9)) as usize;
        // Enough of them to come by every copy.
        let launches = fit.clamp(4, self.effort.launches.max(args.len()).max(4));
        let chains = [self.gpu.record(&list(launches), true)?, self.gpu.record(&list(launches), false)?];
        let [dependent, independent] = self.times(&chains, launches)?;
        Ok(Figures { constants, groups, launches, dependent, independent, check })
    }

    /// Seconds a launch of chains of `launches`, run in turn. Before that they run for as long as one may take, so that a
    /// device that rested is at its clocks; short chains run more often than asked for.
    pub fn times<const N: usize>(&self, chains: &[Chain; N], launches: usize) -> anyhow::Result<[Vec<f64>; N]> {
        let (start, mut warm) = (Instant::now(), 0usize);
        while warm == 0 || start.elapsed().as_secs_f64() < self.effort.seconds {
            for chain in chains {
                chain.run()?;
            }
            warm += 1;
        }
        let mut seconds = [const { Vec::new() }; N];
        for _ in 0..self.effort.repetitions.max(warm.min(MOST_REPETITIONS)) {
            for (chain, to) in chains.iter().zip(&mut seconds) {
                to.push(chain.run()?.seconds() / launches as f64);
            }
        }
        Ok(seconds)
    }
}
