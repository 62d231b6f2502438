//! `hanzo devices`: what this machine offers: processor, features, caches, memory, GPUs; and which kernels GPUs run.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::Path;

use hanzo_ml::cpu::isa::IsaLevel;
use hanzo_ml::devices::vulkan_devices;
use hanzo_ml::gpu::lower::levered::LEVERED;
use hanzo_ml::gpu::lower::variants::{self, Input, Variant};
use hanzo_ml::vulkan::DeviceInfo;
use serde::Serialize;

use crate::cli::Context;
use crate::output::{self, Align, Table, human_bytes};

/// Where Linux describes the caches of the first processor.
const FIRST_CACHES: &str = "/sys/devices/system/cpu/cpu0/cache";

/// The command's grammar.
#[derive(clap::Args)]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Print the kernels that GPUs contract with instead: which serves which task and number of tokens
    #[arg(long)]
    kernels: bool,
}

/// A processor, as the CPU backend sees it.
#[derive(Debug, Serialize)]
struct Cpu {
    /// Model name, if the system tells.
    model: Option<String>,
    /// The architecture of this build.
    arch: &'static str,
    /// The kernels in force: the best that the processor supports, or what `HANZO_ISA` names.
    kernels: &'static str,
    /// All kernels that the processor supports.
    kernels_supported: Vec<&'static str>,
    /// Threads this process may use (affinity and container limits applied).
    threads: usize,
    /// Physical cores of the machine.
    cores: Option<usize>,
    /// Sockets of the machine.
    sockets: Option<usize>,
    /// Features that kernels are chosen by.
    features: Vec<&'static str>,
    /// Caches seen from the first processor.
    caches: Vec<Cache>,
}

#[derive(Debug, Serialize, PartialEq, Eq)]
struct Cache {
    /// 1, 2, 3.
    level: u32,
    /// `Data`, `Instruction` or `Unified`.
    kind: String,
    bytes: u64,
    /// Processors that share one such cache, as the kernel lists them (`0-7`).
    shared_by: String,
}

#[derive(Debug, Serialize, PartialEq, Eq)]
struct Memory {
    total_bytes: u64,
    available_bytes: u64,
}

/// A GPU, as the Vulkan backend sees it.
#[derive(Debug, Serialize)]
struct Gpu {
    /// As in `--device`.
    device: String,
    name: String,
    kind: &'static str,
    driver: String,
    vulkan: String,
    memory_bytes: u64,
    available_bytes: Option<u64>,
    /// Subgroup size.
    wave: u32,
    shared_bytes: u32,
    features: Vec<String>,
    /// What keeps it from being used.
    missing: Vec<&'static str>,
}

#[derive(Debug, Serialize)]
struct Devices {
    cpu: Cpu,
    memory: Option<Memory>,
    vulkan: Vec<Gpu>,
    /// Why there is no Vulkan.
    vulkan_error: Option<String>,
}

/// A row of the table of kernels.
#[derive(Debug, Serialize)]
struct Kernel {
    task: &'static str,
    input: &'static str,
    /// More tokens of a step than these.
    over: usize,
    /// The most tokens (slots an expert, for experts); none: any number.
    tokens: Option<usize>,
    /// The fewest rows of the matrix.
    rows: usize,
    /// What a device must have: fast int8 dot products, or a matrix unit by name.
    needs: &'static str,
    /// Levers of which one must be on; none: always.
    levers: &'static [&'static str],
    kernel: &'static str,
    constants: Vec<String>,
}

/// Prints what is there.
pub fn run(args: Args, _context: &Context) -> anyhow::Result<()> {
    let isa = crate::model::environment()?.isa;
    if args.kernels {
        return kernels(args.json);
    }
    let memory = fs::read_to_string("/proc/meminfo").ok().and_then(|t| memory(&t));
    let (vulkan, vulkan_error) = match vulkan_devices() {
        Ok(all) => (all.into_iter().map(gpu).collect(), None),
        Err(e) => (Vec::new(), Some(e.to_string())),
    };
    let devices = Devices { cpu: cpu(isa), memory, vulkan, vulkan_error };
    if args.json {
        return output::print_json(&devices);
    }
    let mut out = output::stdout();
    let Devices { cpu, memory, vulkan, vulkan_error } = devices;
    writeln!(out, "cpu       {} ({})", cpu.model.as_deref().unwrap_or("unknown model"), cpu.arch)?;
    let counted = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let mut threads = vec![counted(cpu.threads, "thread")];
    threads.extend(cpu.cores.map(|n| counted(n, "core")));
    threads.extend(cpu.sockets.map(|n| counted(n, "socket")));
    writeln!(out, "threads   {}", threads.join(", "))?;
    writeln!(out, "kernels   {} (of {})", cpu.kernels, cpu.kernels_supported.join(", "))?;
    writeln!(out, "features  {}", cpu.features.join(" "))?;
    for cache in &cpu.caches {
        let name = format!("L{}{}", cache.level, if cache.kind == "Unified" { "" } else { &cache.kind[..1] });
        writeln!(out, "{name:<9} {} (processors {})", human_bytes(cache.bytes), cache.shared_by)?;
    }
    if let Some(memory) = memory {
        let (total, free) = (human_bytes(memory.total_bytes), human_bytes(memory.available_bytes));
        writeln!(out, "memory    {total}, {free} available")?;
    }
    for g in vulkan {
        let free = g.available_bytes.map_or(String::new(), |b| format!(", {} available", human_bytes(b)));
        writeln!(out, "{:<9} {} ({}, {}, Vulkan {})", g.device, g.name, g.kind, g.driver, g.vulkan)?;
        let (memory, shared) = (human_bytes(g.memory_bytes), human_bytes(g.shared_bytes.into()));
        writeln!(out, "          {memory}{free}; wave {}, {shared} shared", g.wave)?;
        writeln!(out, "          {}", g.features.join(" "))?;
        if !g.missing.is_empty() {
            writeln!(out, "          cannot be used: it lacks {}", g.missing.join(", "))?;
        }
    }
    if let Some(why) = vulkan_error {
        writeln!(out, "vulkan    none: {why}")?;
    }
    Ok(out.finish()?)
}

fn gpu(d: DeviceInfo) -> Gpu {
    let flags = [
        ("int-dot", d.int_dot),
        ("f16", d.f16),
        ("f16-subnormals", d.subnormal_halves),
        ("rebar", d.rebar),
        ("copy-queue", d.transfer_queue),
    ];
    let mut features: Vec<String> = flags.iter().filter(|f| f.1).map(|f| f.0.to_string()).collect();
    features.extend(d.matrices.iter().map(|m| format!("{:?}-{:?}:{}x{}x{}", m.input, m.result, m.m, m.n, m.k)));
    if let Some(w) = &d.workgroup_matrices {
        features.push(format!("workgroup matrices up to {}, {} bytes kept", w.max_dimension, w.reserved_shared));
        features.extend(w.shapes.iter().map(|(m, n, k, threads)| format!("F16-F32:{m}x{n}x{k} of {threads}")));
    }
    let (major, minor, patch) = d.api;
    Gpu {
        device: format!("vulkan:{}", d.index),
        name: d.name,
        kind: d.kind.name(),
        driver: d.driver,
        vulkan: format!("{major}.{minor}.{patch}"),
        memory_bytes: d.memory,
        available_bytes: d.available,
        wave: d.wave,
        shared_bytes: d.shared_bytes,
        features,
        missing: d.missing,
    }
}

/// The table of kernel variants, in the order of choice.
fn kernels(json: bool) -> anyhow::Result<()> {
    let kernel = |v: &Variant, levers: &'static [&'static str]| Kernel {
        task: v.task.name(),
        input: match v.input {
            Input::Int8 => "int8",
            Input::Float => "float",
            Input::Half => "half",
            Input::Raw => "float, quantized by the kernel",
        },
        over: v.over,
        tokens: (v.tokens != usize::MAX).then_some(v.tokens),
        rows: v.rows,
        needs: v.needs.name(),
        levers,
        kernel: v.kernel,
        constants: v.constants.iter().map(|(name, value)| format!("{name}={value}")).collect(),
    };
    let levered = LEVERED.iter().map(|l| kernel(&l.variant, l.levers));
    let all: Vec<Kernel> = levered.chain(variants::all().map(|v| kernel(v, &[]))).collect();
    if json {
        return output::print_json(&all);
    }
    let mut table = Table::new(&[
        ("task", Align::Left),
        ("input", Align::Left),
        ("tokens", Align::Right),
        ("rows", Align::Right),
        ("needs", Align::Left),
        ("kernel", Align::Left),
        ("constants", Align::Left),
    ]);
    for k in all {
        let tokens = match (k.over, k.tokens) {
            (0, None) => "any".into(),
            (0, Some(n)) => format!("<= {n}"),
            (over, None) => format!("> {over}"),
            (over, Some(n)) => format!("> {over}, <= {n}"),
        };
        let rows = if k.rows == 0 { "any".into() } else { format!(">= {}", k.rows) };
        table.row(vec![
            k.task.into(),
            k.input.into(),
            tokens,
            rows,
            [&[k.needs][..], k.levers].concat().join(" ").trim().into(),
            k.kernel.into(),
            k.constants.join(" "),
        ]);
    }
    let mut out = output::stdout();
    table.write(&mut out)?;
    Ok(out.finish()?)
}

fn cpu(isa: IsaLevel) -> Cpu {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let (cores, sockets) = topology(&info);
    Cpu {
        model: model_name(&info),
        arch: std::env::consts::ARCH,
        kernels: isa.name(),
        kernels_supported: IsaLevel::available().map(IsaLevel::name).collect(),
        threads: std::thread::available_parallelism().map_or(1, |n| n.get()),
        cores,
        sockets,
        features: features(),
        caches: caches(Path::new(FIRST_CACHES)),
    }
}

macro_rules! detected {
    ($detect:ident: $($name:tt),* $(,)?) => { [$(($name, std::arch::$detect!($name))),*] };
}

/// The features that kernels may be chosen by, of those this processor and system have.
fn features() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    let all = detected!(is_x86_feature_detected:
        "sse4.1", "avx", "avx2", "fma", "f16c", "bmi2", "avxvnni",
        "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi", "avx512vnni", "avx512bf16", "avx512fp16",
    );
    #[cfg(target_arch = "aarch64")]
    let all = detected!(is_aarch64_feature_detected: "neon", "fp16", "dotprod", "i8mm", "bf16", "sve", "sve2");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let all: [(&'static str, bool); 0] = [];
    all.into_iter().filter(|(_, has)| *has).map(|(name, _)| name).collect()
}

fn fields(info: &str) -> impl Iterator<Item = (&str, &str)> {
    info.lines().filter_map(|line| line.split_once(':')).map(|(key, value)| (key.trim(), value.trim()))
}

fn model_name(info: &str) -> Option<String> {
    fields(info).find(|(key, value)| *key == "model name" && !value.is_empty()).map(|(_, value)| value.to_string())
}

/// Cores and sockets, from the ids of each processor; `None` where the kernel gives none.
fn topology(info: &str) -> (Option<usize>, Option<usize>) {
    let mut socket = "";
    let mut cores = BTreeSet::new();
    let mut sockets = BTreeSet::new();
    for (key, value) in fields(info) {
        match key {
            "physical id" => {
                socket = value;
                sockets.insert(value);
            }
            "core id" => {
                cores.insert((socket, value));
            }
            _ => {}
        }
    }
    let count = |n: usize| (n > 0).then_some(n);
    (count(cores.len()), count(sockets.len()))
}

/// Bytes of the last-level cache that the first processor sees.
pub fn last_level_cache() -> Option<u64> {
    let caches = caches(Path::new(FIRST_CACHES));
    caches.iter().filter(|c| c.kind != "Instruction").max_by_key(|c| c.level).map(|c| c.bytes)
}

/// Bytes of memory that can be used without swapping.
pub fn available_memory() -> Option<u64> {
    memory(&fs::read_to_string("/proc/meminfo").ok()?).map(|m| m.available_bytes)
}

fn caches(folder: &Path) -> Vec<Cache> {
    let read = |index: usize, name: &str| {
        let text = fs::read_to_string(folder.join(format!("index{index}")).join(name)).ok()?;
        Some(text.trim().to_string())
    };
    let one = |index| {
        Some(Cache {
            level: read(index, "level")?.parse().ok()?,
            kind: read(index, "type").filter(|k| !k.is_empty())?,
            bytes: cache_bytes(&read(index, "size")?)?,
            shared_by: read(index, "shared_cpu_list")?,
        })
    };
    (0..16).map_while(one).collect()
}

/// `48K`, `32M`, `1024`.
fn cache_bytes(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor = match &text[digits.len()..] {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(factor)
}

/// From `/proc/meminfo`, whose values are in KiB.
fn memory(text: &str) -> Option<Memory> {
    let value = |name: &str| {
        let (_, value) = fields(text).find(|(key, _)| *key == name)?;
        value.trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    Some(Memory { total_bytes: value("MemTotal")?, available_bytes: value("MemAvailable")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hyperthreads_of_two_sockets_count_as_cores_once() {
        let processor = |socket, core| format!("model name : X 1\nphysical id : {socket}\ncore id\t\t: {core}\n\n");
        let info: String = [(0, 0), (0, 1), (0, 0), (0, 1), (1, 0), (1, 1)].map(|(s, c)| processor(s, c)).concat();
        assert_eq!(topology(&info), (Some(4), Some(2)));
        assert_eq!(model_name(&info).as_deref(), Some("X 1"));
        assert_eq!(topology("processor : 0\n"), (None, None));
    }

    #[test]
    fn sizes_are_read_as_the_kernel_writes_them() {
        assert_eq!(cache_bytes("48K"), Some(48 << 10));
        assert_eq!(cache_bytes("32M"), Some(32 << 20));
        assert_eq!(cache_bytes("x"), None);
        let text = "MemTotal:       100 kB\nMemFree: 1 kB\nMemAvailable:    60 kB\n";
        assert_eq!(memory(text), Some(Memory { total_bytes: 102_400, available_bytes: 61_440 }));
    }
}
