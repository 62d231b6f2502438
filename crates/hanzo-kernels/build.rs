//! Reads `prelude/`, `formats/` and `ops/`, compiles every Vulkan kernel to SPIR-V with glslang, and writes into OUT_DIR:
//! `sources.rs` (the files as text), `args.rs` (one struct of arguments an op) and `spirv.bin` (all modules, deflated).
//!
//! A module is compiled again only if its text changed: results are kept in OUT_DIR by a hash of the text, each with the time that its compilation
//! took on a CPU. All of them together have a budget; what is over it is a warning, since machines differ. `compile-time.txt` has the list.

#[path = "src/assemble/mod.rs"]
#[allow(dead_code, unused_imports)]
mod assemble;
#[path = "src/tables.rs"]
#[allow(dead_code, unused_imports)]
mod tables;

use assemble::{ArgKind, FormatFile, OpFile, Target};
use std::error::Error;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Seconds on a CPU that compiling every kernel from nothing may take.
const BUDGET: f64 = 60.0;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

fn main() {
    if let Err(e) = run() {
        // A build script's only way to say what is wrong.
        eprintln!("{e}");
        std::process::exit(1);
    }
}

/// Files of a folder with the extension `kc`, sorted.
fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    println!("cargo::rerun-if-changed={}", dir.display());
    let mut all: Vec<PathBuf> = match std::fs::read_dir(dir) {
        Ok(entries) => entries.map(|e| e.map(|e| e.path())).collect::<std::io::Result<_>>()?,
        Err(_) => Vec::new(),
    };
    all.retain(|p| p.extension().is_some_and(|e| e == "kc"));
    all.sort();
    all.iter().for_each(|p| println!("cargo::rerun-if-changed={}", p.display()));
    Ok(all)
}

fn name(path: &Path) -> String {
    path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
}

fn run() -> Result<()> {
    let root = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?);
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    let synthetic = std::env::var_os("CARGO_FEATURE_SYNTHETIC_FORMAT").is_some();
    println!("cargo::rerun-if-changed=src/assemble");
    println!("cargo::rerun-if-changed=src/tables.rs");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=prelude");

    let mut sources = String::new();
    let mut prelude = |constant: &str, files: &[&str]| -> Result<String> {
        let texts = files.iter().map(|f| std::fs::read_to_string(root.join("prelude").join(f)).unwrap_or_default());
        let text: String = texts.collect();
        writeln!(sources, "/// `prelude/`: {}.\npub const {constant}: &str = {text:?};", files.join(", "))?;
        Ok(text)
    };
    let vulkan = prelude("PRELUDE_VULKAN", &["vulkan.h"])?;
    // What kernels share: functions of numbers, and the rows of the key/value cache.
    let common = [prelude("MATH", &["math.kc", "cache.kc"])?, prelude("BLOCK", &["block.kc"])?];
    for (constant, file) in [("CUDA", "cuda.h"), ("HIP", "hip.h"), ("MSL", "msl.h"), ("HOST", "host.h")] {
        prelude(&format!("PRELUDE_{constant}"), &[file])?;
    }

    let part = |path: &PathBuf| -> Result<(String, String)> {
        Ok((name(path).trim_end_matches(".kc").to_string(), std::fs::read_to_string(path)?))
    };
    let parts = files(&root.join("ops/parts"))?.iter().map(part).collect::<Result<Vec<_>>>()?;
    let mut ops = Vec::new();
    writeln!(sources, "/// Files of `ops/`: folder, name, text.\npub const OPS: &[(Option<&str>, &str, &str)] = &[")?;
    for backend in [None, Some("vulkan"), Some("cuda"), Some("hip"), Some("msl")] {
        for path in files(&backend.map_or(root.join("ops"), |b| root.join("ops").join(b)))? {
            let text = assemble::expand(&name(&path), &std::fs::read_to_string(&path)?, &parts)?;
            writeln!(sources, "    ({backend:?}, {:?}, {text:?}),", name(&path))?;
            ops.push(OpFile::parse(&name(&path), &text, backend)?);
        }
    }
    writeln!(sources, "];\n/// Files of `formats/`: name, text.\npub const FORMATS: &[(&str, &str)] = &[")?;
    let mut formats = Vec::new();
    for path in files(&root.join("formats"))? {
        if name(&path) == "x26.kc" && !synthetic {
            continue;
        }
        let text = std::fs::read_to_string(&path)?;
        writeln!(sources, "    ({:?}, {text:?}),", name(&path))?;
        formats.push(FormatFile::parse(&name(&path), &text)?);
    }
    sources.push_str("];\n");
    std::fs::write(out.join("sources.rs"), sources)?;
    std::fs::write(out.join("args.rs"), args(&ops)?)?;
    std::fs::write(out.join("spirv.bin"), modules(&ops, &formats, &vulkan, &common, &out)?)?;
    Ok(())
}

/// `matvec_f32` as `MatvecF32`.
fn camel(name: &str) -> String {
    name.split('_')
        .map(|w| {
            w.chars().enumerate().map(|(i, c)| if i == 0 { c.to_ascii_uppercase() } else { c }).collect::<String>()
        })
        .collect()
}

/// A comment as documentation: brackets are shapes, not links.
fn markdown(comment: &str) -> String {
    comment.replace('[', "\\[").replace(']', "\\]").replace('<', "\\<")
}

/// The Rust structs of arguments.
fn args(ops: &[OpFile]) -> Result<String> {
    let mut s = String::new();
    let mut seen: Vec<&str> = Vec::new();
    for op in ops {
        if seen.contains(&op.name.as_str()) {
            return Err(format!("two ops are called {}", op.name).into());
        }
        seen.push(&op.name);
        let (bytes, offsets) = op.layout();
        writeln!(s, "/// Arguments of `{}`: {}", op.name, markdown(&op.doc))?;
        writeln!(s, "#[derive(Clone, Copy, Debug, PartialEq)]\npub struct {}<P> {{", camel(&op.name))?;
        for a in &op.args {
            let ty = match a.kind {
                ArgKind::Weight => "Weight<P>",
                ArgKind::Ro | ArgKind::Wo | ArgKind::Rw => "P",
                ArgKind::U32 => "u32",
                ArgKind::F32 => "f32",
            };
            let doc = markdown(if a.doc.is_empty() { &a.name } else { &a.doc });
            writeln!(s, "    /// {doc}\n    pub {}: {ty},", a.name)?;
        }
        writeln!(s, "}}\nimpl<P: Copy> Args<P> for {}<P> {{", camel(&op.name))?;
        writeln!(s, "    const OP: &'static str = {:?};\n    const BYTES: usize = {bytes};", op.name)?;
        writeln!(s, "    fn fields(&self, f: &mut dyn FnMut(usize, Field<P>)) {{")?;
        for (a, at) in op.args.iter().zip(offsets) {
            let kind = match a.kind {
                ArgKind::Weight => "Weight",
                ArgKind::Ro => "Read",
                ArgKind::Wo | ArgKind::Rw => "Write",
                ArgKind::U32 => "U32",
                ArgKind::F32 => "F32",
            };
            writeln!(s, "        f({at}, Field::{kind}(self.{}));", a.name)?;
        }
        writeln!(s, "    }}\n}}")?;
    }
    Ok(s)
}

/// FNV-1a, 64 bits (Fowler, Noll, Vo): names a cached module.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

/// Every module, deflated: for each its key's length, key, words, then the words.
fn modules(ops: &[OpFile], formats: &[FormatFile], prelude: &str, common: &[String; 2], out: &Path) -> Result<Vec<u8>> {
    let mut jobs = Vec::new();
    for op in ops.iter().filter(|o| o.backend.as_deref().is_none_or(|b| b == Target::Glsl.name())) {
        let with: Vec<Option<&FormatFile>> = match op.formats {
            assemble::Formats::None => vec![None],
            _ => formats.iter().filter(|f| op.takes(f)).map(Some).collect(),
        };
        for f in with {
            let words = f.and_then(|f| f.table.as_deref()).map_or(0, |t| tables::codebook(t).len() as u32);
            let text = assemble::print(Target::Glsl, op, f, prelude, [&common[0], &common[1]], words);
            jobs.push((assemble::key(op, f), text));
        }
    }
    let cache = out.join("spirv");
    std::fs::create_dir_all(&cache)?;
    let results: Vec<Mutex<Option<Result<Module>>>> = jobs.iter().map(|_| Mutex::new(None)).collect();
    let next = AtomicUsize::new(0);
    let workers = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some((key, text)) = jobs.get(i) else { break };
                    let result = cached(&cache, key, text);
                    *results[i].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
                }
            });
        }
    });
    let mut raw = Vec::new();
    let mut failed = String::new();
    let mut times: Vec<(f64, &str)> = Vec::new();
    for ((key, _), result) in jobs.iter().zip(results) {
        match result.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(Ok(Module { words, seconds })) => {
                times.push((seconds, key));
                raw.extend((key.len() as u32).to_le_bytes());
                raw.extend((words.len() as u32).to_le_bytes());
                raw.extend(key.as_bytes());
                raw.extend(words.iter().flat_map(|w| w.to_le_bytes()));
            }
            Some(Err(e)) => failed.push_str(&format!("kernel {key}: {e}\n")),
            None => failed.push_str(&format!("kernel {key}: not compiled\n")),
        }
    }
    if !failed.is_empty() {
        return Err(failed.into());
    }
    times.sort_by(|a, b| b.0.total_cmp(&a.0));
    let total: f64 = times.iter().map(|t| t.0).sum();
    let mut report = format!("{total:.1} s on a CPU for {} kernels, of a budget of {BUDGET} s\n", times.len());
    times.iter().for_each(|(seconds, key)| report.push_str(&format!("{seconds:8.4} {key}\n")));
    if total > BUDGET {
        println!(
            "cargo::warning=compiling the kernels takes {}",
            report.lines().take(4).collect::<Vec<_>>().join("; ")
        );
    }
    std::fs::write(out.join("compile-time.txt"), report)?;
    let mut z = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::default());
    z.write_all(&raw)?;
    Ok(z.finish()?)
}

/// A compiled kernel, and the seconds that it took on a CPU when it was compiled.
struct Module {
    words: Vec<u32>,
    seconds: f64,
}

fn cached(cache: &Path, key: &str, text: &str) -> Result<Module> {
    let path = cache.join(format!("{key}-{:016x}.spv", hash(text)));
    let time = path.with_extension("seconds");
    let seconds = std::fs::read_to_string(&time).ok().and_then(|s| s.parse().ok());
    if let (Some(seconds), Ok(bytes)) = (seconds, std::fs::read(&path)) {
        let words = bytes.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect();
        return Ok(Module { words, seconds });
    }
    // Left beside the result, so that an error's line number can be looked up.
    std::fs::write(cache.join(format!("{key}.glsl")), text)?;
    let clock = Clock::start();
    let words = compile(text)?;
    let seconds = clock.seconds();
    std::fs::write(path, words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>())?;
    std::fs::write(time, seconds.to_string())?;
    Ok(Module { words, seconds })
}

/// The time that this thread spends on a CPU, where the system tells (Linux); else the time that passes.
struct Clock(Instant, Option<f64>);

impl Clock {
    fn start() -> Clock {
        Clock(Instant::now(), Clock::on_cpu())
    }

    /// Seconds on a CPU since the thread began.
    fn on_cpu() -> Option<f64> {
        let nanoseconds = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        Some(nanoseconds.split(' ').next()?.parse::<f64>().ok()? / 1e9)
    }

    fn seconds(&self) -> f64 {
        let on_cpu = self.1.and_then(|start| Some(Clock::on_cpu()? - start));
        on_cpu.unwrap_or_else(|| self.0.elapsed().as_secs_f64())
    }
}

fn compile(text: &str) -> Result<Vec<u32>> {
    use glslang::{Compiler, CompilerOptions, ShaderInput, ShaderSource, ShaderStage, SourceLanguage, SpirvVersion};
    let compiler = Compiler::acquire().ok_or("glslang does not start")?;
    let options = CompilerOptions {
        source_language: SourceLanguage::GLSL,
        target: glslang::Target::Vulkan {
            version: glslang::VulkanVersion::Vulkan1_3,
            spirv_version: SpirvVersion::SPIRV1_6,
        },
        ..CompilerOptions::default()
    };
    let source = ShaderSource::from(text);
    let input = ShaderInput::new(&source, ShaderStage::Compute, &options, None, None)?;
    Ok(compiler.create_shader(input)?.compile()?)
}
