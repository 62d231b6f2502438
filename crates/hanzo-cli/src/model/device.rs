//! Where a model runs: the flags that say so, the backend they ask for, and what ended up where.

use std::sync::Arc;

use hanzo_ml::backend::Backend;
use hanzo_ml::cpu::isa::IsaLevel;
use hanzo_ml::devices::{self, HOST, OpenOptions};
use hanzo_ml::placement::report::{Share, shares};
use hanzo_ml::placement::{Placement, SplitBackend};
use hanzo_ml::plan::Plan;
use serde_json::{Value, json};

use super::{HEADING, environment, parse_isa};
use crate::cli::Context;
use crate::failure::Failure;
use crate::output::human_bytes;

/// The flags.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct DeviceArgs {
    /// Devices that run the model: cpu, cpu:ISA, vulkan:N, ... (`hanzo devices`; default: cpu)
    #[arg(long, value_name = "NAME", value_delimiter = ',', help_heading = HEADING)]
    pub device: Vec<String>,
    /// Layers from the end that go to the devices, the output being one more; the rest stays on the CPU [also: -ngl]
    /// (default: all, if there is a --device)
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = HEADING)]
    pub n_gpu_layers: Option<i64>,
    /// Keep the experts of the first N layers on the CPU [also: -ncmoe]
    #[arg(long, value_name = "N", help_heading = HEADING)]
    pub n_cpu_moe: Option<usize>,
    /// Send the tensors whose name matches to a device; the first match decides [also: -ot]
    #[arg(long, value_name = "REGEX=DEVICE", help_heading = HEADING)]
    pub override_tensor: Vec<String>,
}

/// What the flags ask for, opened.
pub struct Chosen {
    pub backend: Arc<dyn Backend>,
    /// Threads of the CPU.
    pub threads: usize,
    /// Instruction set of the CPU.
    pub isa: IsaLevel,
    /// The devices there are for this run, as a Plan numbers them.
    names: Vec<String>,
    split: Option<Arc<SplitBackend>>,
    /// Somebody asked for a device.
    asked: bool,
}

impl DeviceArgs {
    /// Opens the devices. `isa` takes the place of the environment's.
    pub fn open(&self, threads: Option<u16>, isa: Option<IsaLevel>, context: &Context) -> anyhow::Result<Chosen> {
        let mut settings = environment()?;
        settings.isa = isa.unwrap_or(settings.isa);
        let cache = context.settings.cache.as_ref().map(|c| c.join("pipelines"));
        let options = OpenOptions { settings, threads: threads.map_or(0, usize::from), cache };
        let threads = match options.threads {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get()),
            n => n,
        };
        let behind = self.behind_the_host()?;
        let asked = !self.device.is_empty() || self.moves_anything();
        let open = |name: &str| devices::open(name, &options).map_err(|e| Failure::usage(e.to_string()));
        if !self.moves_anything() && behind.len() < 2 {
            let name = behind.first().map_or(HOST, String::as_str);
            let isa = own_isa(name, isa)?.unwrap_or(settings.isa);
            let backend = open(name)?;
            return Ok(Chosen { backend, threads, isa, names: vec![name.into()], split: None, asked });
        }
        let names: Vec<String> = std::iter::once(HOST.to_string()).chain(behind).collect();
        let mut placement = Placement::new(names.clone());
        placement.device_layers = self.n_gpu_layers.and_then(|n| usize::try_from(n).ok());
        placement.host_moe = self.n_cpu_moe.unwrap_or(0);
        for text in &self.override_tensor {
            placement.push_override(text).map_err(|e| Failure::usage(e.to_string()))?;
        }
        let backends = names.iter().map(|name| open(name)).collect::<Result<Vec<_>, _>>()?;
        let split = Arc::new(SplitBackend::new(backends, Box::new(move |plan| placement.assign(plan))));
        Ok(Chosen { backend: split.clone(), threads, isa: settings.isa, names, split: Some(split), asked })
    }

    /// Is there anything but `--device`?
    fn moves_anything(&self) -> bool {
        let layers = self.n_gpu_layers.is_some_and(|n| n != 0 || !self.device.is_empty());
        layers || self.n_cpu_moe.is_some() || !self.override_tensor.is_empty()
    }

    /// The devices that are not the host.
    fn behind_the_host(&self) -> anyhow::Result<Vec<String>> {
        let wants_layers = self.n_gpu_layers.is_some_and(|n| n != 0);
        let names: Vec<String> = self.device.iter().map(|d| d.to_ascii_lowercase()).collect();
        if let Some(i) = (1..names.len()).find(|i| names[..*i].contains(&names[*i])) {
            return Err(Failure::usage(format!("--device names `{}` twice", names[i])).into());
        }
        match &names[..] {
            [] if wants_layers => match devices::first_gpu() {
                Some(gpu) => Ok(vec![gpu]),
                None => {
                    let there: Vec<String> = devices::list().into_iter().map(|d| d.name).collect();
                    Err(Failure::usage("-ngl asks for layers on a GPU, and this system has none that can be used")
                        .remedy(format!("name a device with --device ({}), or leave -ngl out", there.join(", ")))
                        .into())
                }
            },
            [] => Ok(Vec::new()),
            [host] if host == HOST && !wants_layers => Ok(Vec::new()),
            all if all.iter().any(|d| d == HOST) => Err(Failure::usage("the CPU takes what the other devices do not")
                .remedy("name only the others with --device, and say with -ngl how many layers they get")
                .into()),
            _ => Ok(names),
        }
    }
}

/// The instruction set that a device `cpu:ISA` names; `flag` is that of `--isa`, which must not say otherwise.
pub fn own_isa(device: &str, flag: Option<IsaLevel>) -> anyhow::Result<Option<IsaLevel>> {
    let lower = device.to_ascii_lowercase();
    let Some(name) = lower.strip_prefix("cpu:") else { return Ok(None) };
    let isa = parse_isa(name).map_err(|e| Failure::usage(format!("--device {device}: {e}")))?;
    match flag.filter(|flag| *flag != isa) {
        Some(flag) => {
            Err(Failure::usage(format!("--isa {flag} and --device {device} disagree: leave one of them out")).into())
        }
        None => Ok(Some(isa)),
    }
}

/// A Plan on its devices.
#[derive(Clone, Debug)]
pub struct Placed {
    /// The Plan with a device on everything.
    pub plan: Plan,
    /// The devices by number.
    pub names: Vec<String>,
    /// What each has, the idle ones too.
    pub shares: Vec<Share>,
    /// Somebody asked for a device.
    pub asked: bool,
}

impl Chosen {
    /// Where a Plan's parts are.
    pub fn place(&self, plan: &Plan) -> anyhow::Result<Placed> {
        let plan = self.split.as_ref().map_or_else(|| Ok(plan.clone()), |s| s.placed(plan))?;
        let names: Vec<&str> = self.names.iter().map(String::as_str).collect();
        let shares = shares(&plan, &names);
        Ok(Placed { plan, names: self.names.clone(), shares, asked: self.asked })
    }
}

impl Placed {
    /// The devices that do something.
    pub fn used(&self) -> impl Iterator<Item = &Share> {
        self.shares.iter().filter(|s| s.ops > 0)
    }

    /// Their names, joined by `+`.
    pub fn devices(&self) -> String {
        self.used().map(|s| s.device.as_str()).collect::<Vec<_>>().join("+")
    }

    /// An error if a compiled Plan has a tensor elsewhere.
    pub fn check(&self, compiled: &Plan) -> anyhow::Result<()> {
        if self.used().count() < 2 {
            return Ok(());
        }
        let names: Vec<&str> = self.names.iter().map(String::as_str).collect();
        for (want, got) in self.shares.iter().zip(shares(compiled, &names)) {
            if want.tensors != got.tensors || want.caches != got.caches {
                let what = format!("{} does not have what was placed there", want.device);
                return Err(Failure::new(what).remedy("this is a bug of hanzo: please report it").into());
            }
        }
        Ok(())
    }
}

/// `1-3, 7`.
fn ranges(numbers: &[usize]) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for &n in numbers {
        match parts.last_mut() {
            Some((_, end)) if *end + 1 == n => *end = n,
            _ => parts.push((n, n)),
        }
    }
    let one = |(a, b): &(usize, usize)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    parts.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// `vulkan:0: layers 0-29, output; 270 tensors, 98.0 MiB; caches of 30 layers; 460 ops; 1 copy a step`.
pub fn line(share: &Share) -> String {
    let mut has = Vec::new();
    if !share.layers.is_empty() {
        has.push(format!("layers {}", ranges(&share.layers)));
    }
    if !share.parts_of.is_empty() {
        has.push(format!("parts of layers {}", ranges(&share.parts_of)));
    }
    if share.output {
        has.push("output".into());
    }
    if has.is_empty() {
        has.push("no layers".into());
    }
    let copies = if share.copies == 1 { "copy" } else { "copies" };
    format!(
        "{}: {}; {} tensors, {}; caches of {} layers; {} ops; {} {copies} a step",
        share.device,
        has.join(", "),
        share.tensors.len(),
        human_bytes(share.bytes() as u64),
        share.caches,
        share.ops,
        share.copies
    )
}

/// For programs.
pub fn as_json(shares: &[Share]) -> Value {
    let one = |s: &Share| {
        let tensors: Vec<Value> = s.tensors.iter().map(|t| json!({"name": t.name, "bytes": t.bytes})).collect();
        json!({
            "device": s.device, "layers": s.layers, "parts_of_layers": s.parts_of, "output": s.output,
            "bytes": s.bytes(), "cache_layers": s.caches, "ops": s.ops, "copies": s.copies, "tensors": tensors,
        })
    };
    shares.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_read_as_ranges() {
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
        assert_eq!(ranges(&[]), "");
    }

    #[test]
    fn a_device_may_name_an_instruction_set_that_the_flag_does_not_contradict() {
        let (portable, best) = (IsaLevel::Portable, IsaLevel::detect());
        assert_eq!(own_isa("CPU:Portable", None).unwrap(), Some(portable));
        assert_eq!(own_isa("cpu:portable", Some(portable)).unwrap(), Some(portable));
        assert_eq!((own_isa("cpu", Some(best)).unwrap(), own_isa("vulkan:0", Some(best)).unwrap()), (None, None));
        let mut wrong = vec![("cpu:mmx", None, "this processor has")];
        if best != portable {
            wrong.push(("cpu:portable", Some(best), "disagree: leave one of them out"));
        }
        for (device, flag, part) in wrong {
            let error = own_isa(device, flag).unwrap_err();
            assert!(error.to_string().contains(part) && crate::failure::exit_code(&error) == 2, "{error}");
        }
    }

    #[test]
    fn a_device_twice_or_the_host_among_others_is_bad_usage() {
        for (device, layers) in
            [(vec!["vulkan:0", "VULKAN:0"], None), (vec!["cpu", "vulkan:0"], None), (vec!["cpu"], Some(3))]
        {
            let device = device.into_iter().map(String::from).collect();
            let args = DeviceArgs { device, n_gpu_layers: layers, ..DeviceArgs::default() };
            let error = args.behind_the_host().expect_err("bad usage");
            assert_eq!(crate::failure::exit_code(&error), 2, "{error}");
        }
        for device in [vec![], vec!["cpu".to_string()]] {
            let args = DeviceArgs { device, n_gpu_layers: Some(0), ..DeviceArgs::default() };
            assert_eq!(args.behind_the_host().expect("the host"), Vec::<String>::new());
        }
    }
}
