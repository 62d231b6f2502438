//! The limits that kernels are measured against: how fast a device reads and writes, and what a launch costs.

use anyhow::Context as _;
use hanzo_kernels::Key;
use hanzo_ml::vulkan::raw::{Dispatch, Memory};

use super::lab::Lab;
use super::subject::{Arg, Check, Choice, Constants, Machine, Subject, code, encode, launch};

/// Reading a run of memory.
pub struct ReadRoof {
    x: Memory,
    y: Memory,
    bytes: u64,
}

/// Words that the memory is filled with.
const PATTERN: u32 = 0x0101_0203;
/// The most workgroups in a row that every device takes.
const MAX_GROUPS: u64 = 65535;

fn key(op: &'static str) -> Key {
    Key { op, format: None }
}

impl ReadRoof {
    /// A run of about so many bytes.
    pub fn new(gpu: &Machine, bytes: u64) -> anyhow::Result<ReadRoof> {
        let bytes = bytes.clamp(1 << 20, 32 << 30).next_multiple_of(1 << 16);
        let x = gpu.filled(bytes as usize, PATTERN)?;
        // One word differs, so that a read that is left out shows.
        let last =
            [("y", Arg::Pointer(x.address() + bytes - 4)), ("value", Arg::U32(0x8000_0000)), ("count", Arg::U32(1))];
        launch(gpu, key("fill"), &[], &last, |_| [1, 1, 1])?;
        Ok(ReadRoof { x, y: gpu.zeros(4 * (bytes / 16) as usize)?, bytes })
    }

    /// The same memory, less of it: what a cache may hold.
    pub fn shrink(&mut self, bytes: u64) {
        self.bytes = bytes.min(self.x.bytes()).next_multiple_of(1 << 12);
    }

    /// Ways to read that are worth trying.
    pub fn ways(&self) -> Vec<Vec<(String, u32)>> {
        let all = [(256, 1, 1), (256, 4, 1), (256, 8, 1), (256, 4, 8), (512, 8, 4), (1024, 4, 1), (128, 4, 1)];
        let named = |(threads, units, loops)| {
            let set = [("THREADS", threads), ("UNITS", units), ("LOOPS", loops)];
            set.map(|(name, value): (&str, u32)| (name.to_string(), value)).to_vec()
        };
        all.into_iter().filter(|w| self.groups(u64::from(w.0 * w.1 * w.2)) <= MAX_GROUPS).map(named).collect()
    }

    fn groups(&self, words: u64) -> u64 {
        (self.bytes / 16).div_ceil(words.max(1))
    }
}

impl Subject for ReadRoof {
    fn kernel(&self) -> Key {
        key("read_roof")
    }

    fn fixed(&self) -> Vec<(&'static str, u32)> {
        Vec::new()
    }

    fn grid(&self, c: &Constants) -> Result<[u32; 3], String> {
        let words = ["THREADS", "UNITS", "LOOPS"].map(|n| u64::from(c.get(n)));
        let groups = self.groups(words.iter().product());
        if groups > MAX_GROUPS || words[1] > 16 {
            return Err(format!("{groups} workgroups of {} words a thread", words[1]));
        }
        Ok([groups as u32, 1, 1])
    }

    fn copies(&self) -> usize {
        1
    }

    fn arguments(&self, _: &Constants, _: usize) -> anyhow::Result<Vec<(&'static str, Arg)>> {
        Ok(vec![("x", (&self.x).into()), ("y", (&self.y).into()), ("words", Arg::U32((self.bytes / 16) as u32))])
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn working_set(&self) -> u64 {
        self.bytes
    }

    fn operations(&self) -> f64 {
        0.0
    }

    fn output(&self) -> Option<&Memory> {
        Some(&self.y)
    }

    fn check(&self, gpu: &Machine, c: &Constants) -> anyhow::Result<Check> {
        let threads = self.grid(c).unwrap_or_default()[0] as usize * c.get("THREADS") as usize;
        let bytes = gpu.read(&self.y)?;
        let words = bytes.as_chunks::<4>().0.iter().take(threads);
        let sum = words.fold(0, |sum, w| sum ^ u32::from_le_bytes(*w));
        // An even number of equal words is nothing; the last word of the whole memory differs.
        let should = if self.bytes == self.x.bytes() { PATTERN ^ 0x8000_0000 } else { 0 };
        Ok(Check { samples: threads, worst: if sum == should { 0.0 } else { f64::INFINITY } })
    }

    fn axes(&self) -> Vec<Vec<Choice>> {
        vec![self.ways().iter().map(|_| Vec::new()).collect()]
    }
}

/// Filling a run of memory with a word.
pub struct Fill {
    y: Memory,
}

impl Fill {
    /// A run of about so many bytes.
    pub fn new(gpu: &Machine, bytes: u64) -> anyhow::Result<Fill> {
        let most = MAX_GROUPS * 1024;
        let words = (bytes / 4).clamp(1 << 18, most * u64::from(gpu.device().info().max_threads) / 1024);
        Ok(Fill { y: gpu.zeros(4 * words as usize)? })
    }
}

impl Subject for Fill {
    fn kernel(&self) -> Key {
        key("fill")
    }

    fn fixed(&self) -> Vec<(&'static str, u32)> {
        vec![("THREADS", 1024)]
    }

    fn grid(&self, c: &Constants) -> Result<[u32; 3], String> {
        let groups = (self.y.bytes() / 4).div_ceil(u64::from(c.get("THREADS").max(1)));
        if groups > MAX_GROUPS { Err(format!("{groups} workgroups")) } else { Ok([groups as u32, 1, 1]) }
    }

    fn copies(&self) -> usize {
        1
    }

    fn arguments(&self, _: &Constants, _: usize) -> anyhow::Result<Vec<(&'static str, Arg)>> {
        let words = (self.y.bytes() / 4) as u32;
        Ok(vec![("y", (&self.y).into()), ("value", Arg::U32(PATTERN)), ("count", Arg::U32(words))])
    }

    fn bytes(&self) -> u64 {
        self.y.bytes()
    }

    fn working_set(&self) -> u64 {
        self.y.bytes()
    }

    fn operations(&self) -> f64 {
        0.0
    }

    fn output(&self) -> Option<&Memory> {
        Some(&self.y)
    }

    fn check(&self, gpu: &Machine, _: &Constants) -> anyhow::Result<Check> {
        let bytes = gpu.read(&self.y)?;
        let right = bytes.as_chunks::<4>().0.iter().all(|w| *w == PATTERN.to_le_bytes());
        Ok(Check { samples: bytes.len() / 4, worst: if right { 0.0 } else { f64::INFINITY } })
    }

    fn axes(&self) -> Vec<Vec<Choice>> {
        vec![[256, 512, 1024].map(|n| vec![("THREADS", n)]).to_vec()]
    }
}

/// What a launch that does nothing costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Empty {
    /// Its workgroups.
    pub groups: u32,
    /// Do launches take turns between two pipelines?
    pub alternating: bool,
    /// Seconds a launch, each after a barrier.
    pub dependent: f64,
    /// Seconds a launch, without barriers.
    pub independent: f64,
}

/// Measures launches that do nothing, of a few sizes.
pub fn empty(lab: &Lab) -> anyhow::Result<Vec<Empty>> {
    let gpu = &lab.gpu;
    let y = gpu.zeros(256)?;
    let op = hanzo_kernels::op("fill").context("there is no op fill")?;
    let args = encode(op, &[("y", (&y).into()), ("value", Arg::U32(0)), ("count", Arg::U32(0))])?;
    let kernel = |threads: u32| -> anyhow::Result<_> {
        let set = [("THREADS".to_string(), threads.max(gpu.features.wave))];
        let constants = Constants::of(key("fill"), gpu, &[], &set)?;
        Ok(gpu.kernel("fill", code(key("fill"))?, &constants.values())?)
    };
    let two = [kernel(256)?, kernel(128)?];
    let launches = lab.effort.launches;
    let mut out = Vec::new();
    for (groups, alternating) in [(1, false), (1, true), (128, false), (1024, false), (8192, false)] {
        let list: Vec<Dispatch<'_>> = (0..launches)
            .map(|i| Dispatch { kernel: two[if alternating { i % 2 } else { 0 }], args: &args, groups: [groups, 1, 1] })
            .collect();
        let [dependent, independent] = lab
            .times(&[gpu.record(&list, true)?, gpu.record(&list, false)?], launches)?
            .map(|s| crate::measure::stats::median(&s));
        out.push(Empty { groups, alternating, dependent, independent });
    }
    Ok(out)
}
