//! Runs the text of a kernel for [`Target::Host`](crate::Target::Host) on the CPU, for tests: compiles it with the C++ compiler, loads it and
//! calls it with buffers, arguments and a grid. What the host prelude finds wrong comes back as an error. Nothing here knows a kernel.
use crate::{Key, Target};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Why a kernel did not run on the host, or what is wrong with it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No C++ compiler, or no place for what it makes.
    #[error("cannot run the C++ compiler `{compiler}` (set CXX to another): {source}")]
    Compiler {
        /// Its command.
        compiler: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// The text is not C++ that the compiler takes.
    #[error("the kernel does not compile:\n{0}")]
    Text(String),
    /// The compiled kernel cannot be loaded.
    #[error("cannot load the compiled kernel: {0}")]
    Load(String),
    /// The kernel did something that a GPU would not define.
    #[error("{0}")]
    Fault(String),
}

type Run = unsafe extern "C" fn(*const RawBuffer, u32, *const u8, u32, *const u32, *mut c_char, usize) -> c_int;

#[repr(C)]
struct RawBuffer {
    base: *mut u8,
    bytes: u64,
    writable: u64,
}

/// A kernel for the host, compiled for one set of constants. The same text and constants give the same library, from a cache on disk.
pub struct HostKernel {
    run: Arc<Mutex<Run>>,
    /// Noted once it has run.
    record: PathBuf,
    /// Workgroups tell each other that they are done.
    counts: bool,
}

impl HostKernel {
    /// Compiles `text` (for `Target::Host`) with constants other than its defaults, such as `("WAVE", 8)`.
    pub fn compile(text: &str, constants: &[(&str, u32)]) -> Result<HostKernel, Error> {
        static LOADED: OnceLock<Mutex<HashMap<PathBuf, Arc<Mutex<Run>>>>> = OnceLock::new();
        let mut flags: Vec<String> = FLAGS.iter().map(|s| s.to_string()).collect();
        flags.extend(constants.iter().map(|(name, value)| format!("-D{name}={value}u")));
        let mut hash = DefaultHasher::new();
        (text, &flags).hash(&mut hash);
        let counts = text.split_once("\n// op ").is_some_and(|(_, body)| body.contains("ATOMIC_ADD("));
        let wave = constants.iter().find(|c| c.0 == "WAVE").map_or(WAVE, |c| c.1);
        let record = record(text, wave);
        let library = directory().join(format!("{:016x}.so", hash.finish()));
        // Held while compiling too: tests run in threads, and two compilers at once gain nothing where cores are few.
        let mut loaded = LOADED.get_or_init(Default::default).lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(run) = loaded.get(&library) {
            return Ok(HostKernel { run: run.clone(), record, counts });
        }
        if !library.exists() {
            build(text, &flags, &library)?;
        }
        let run = Arc::new(Mutex::new(load(&library)?));
        loaded.insert(library, run.clone());
        Ok(HostKernel { run, record, counts })
    }

    /// Runs it: `args` are the bytes of the op's argument struct, whose pointers are addresses in `memory`. A kernel that counts
    /// its workgroups (ATOMIC_ADD) runs in several orders of them, which must all leave the same bytes.
    pub fn run(&self, memory: &mut Memory, args: &[u8], groups: [u32; 3]) -> Result<(), Error> {
        if !self.counts || groups.iter().product::<u32>() <= 1 {
            return self.run_in_order(memory, args, groups, 0);
        }
        let before = memory.contents();
        self.run_in_order(memory, args, groups, 0)?;
        let first = memory.contents();
        for order in [1, 2, 7] {
            memory.set(&before);
            self.run_in_order(memory, args, groups, order)?;
            let now = memory.contents();
            if let Some(b) = (0..now.len()).find(|b| now[*b] != first[*b]) {
                return Err(Error::Fault(format!("buffer {b} depends on the order of workgroups (order {order})")));
            }
        }
        Ok(())
    }

    /// As [`HostKernel::run`], once: workgroups as they are counted (order 0), backwards (1), or shuffled by any other number.
    pub fn run_in_order(&self, memory: &mut Memory, args: &[u8], groups: [u32; 3], order: u32) -> Result<(), Error> {
        let raw: Vec<RawBuffer> = memory
            .buffers
            .iter_mut()
            .map(|b| RawBuffer {
                base: b.storage.as_mut_ptr().cast(),
                bytes: b.bytes as u64,
                writable: b.writable.into(),
            })
            .collect();
        let mut message = vec![0u8; 2048];
        let grid = [groups[0], groups[1], groups[2], order];
        // A kernel's workgroup memory and fibers are statics of its library: one run at a time.
        let run = self.run.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the library is one that `build` made from the prelude, whose entry has this type; the buffers outlive the call and are ours alone.
        let rc = unsafe {
            run(
                raw.as_ptr(),
                raw.len() as u32,
                args.as_ptr(),
                args.len() as u32,
                grid.as_ptr(),
                message.as_mut_ptr().cast(),
                message.len(),
            )
        };
        if rc == 0 {
            // A record that cannot be written is one that `unrun` misses.
            let _ = std::fs::write(&self.record, []);
            return Ok(());
        }
        let end = message.iter().position(|&c| c == 0).unwrap_or(message.len());
        Err(Error::Fault(String::from_utf8_lossy(&message[..end]).into_owned()))
    }
}

/// Buffers of a launch, each with its own bounds and aligned to 16 bytes.
#[derive(Default)]
pub struct Memory {
    buffers: Vec<Allocation>,
}

struct Allocation {
    storage: Vec<u128>,
    bytes: usize,
    writable: bool,
}

impl Memory {
    /// What all writable buffers hold.
    fn contents(&self) -> Vec<Vec<u128>> {
        self.buffers.iter().filter(|b| b.writable).map(|b| b.storage.clone()).collect()
    }

    /// Puts back what [`Memory::contents`] gave.
    fn set(&mut self, contents: &[Vec<u128>]) {
        let writable = self.buffers.iter_mut().filter(|b| b.writable);
        writable.zip(contents).for_each(|(b, c)| b.storage.clone_from_slice(c));
    }

    /// No buffers.
    pub fn new() -> Memory {
        Memory::default()
    }

    /// A buffer that kernels may only read, with these bytes; returns its address.
    pub fn read(&mut self, bytes: &[u8]) -> u64 {
        self.add(bytes, false)
    }

    /// A buffer that kernels may write, with these bytes; returns its address.
    pub fn write(&mut self, bytes: &[u8]) -> u64 {
        self.add(bytes, true)
    }

    /// A buffer that kernels may write, of `bytes` bytes that are all 0xff (a NaN as f32); returns its address.
    pub fn output(&mut self, bytes: usize) -> u64 {
        self.add(&vec![0xff; bytes], true)
    }

    /// The bytes of the buffer at `address`; none if no buffer starts there.
    pub fn bytes(&self, address: u64) -> &[u8] {
        let Some(b) = self.buffers.iter().find(|b| b.storage.as_ptr() as u64 == address) else { return &[] };
        // SAFETY: the storage holds at least `bytes` initialised bytes.
        unsafe { std::slice::from_raw_parts(b.storage.as_ptr().cast(), b.bytes) }
    }

    /// The bytes of the buffer at `address`, to be changed between launches; none if no buffer starts there.
    pub fn bytes_mut(&mut self, address: u64) -> &mut [u8] {
        let Some(b) = self.buffers.iter_mut().find(|b| b.storage.as_ptr() as u64 == address) else { return &mut [] };
        // SAFETY: the storage holds at least `bytes` initialised bytes and is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(b.storage.as_mut_ptr().cast(), b.bytes) }
    }

    /// The buffer at `address` as f32.
    pub fn f32s(&self, address: u64) -> Vec<f32> {
        self.bytes(address).as_chunks::<4>().0.iter().map(|&c| f32::from_le_bytes(c)).collect()
    }

    /// The buffer at `address` as u32.
    pub fn u32s(&self, address: u64) -> Vec<u32> {
        self.bytes(address).as_chunks::<4>().0.iter().map(|&c| u32::from_le_bytes(c)).collect()
    }

    fn add(&mut self, bytes: &[u8], writable: bool) -> u64 {
        // At least one word, so that every buffer has an address of its own.
        let mut storage = vec![0u128; bytes.len().div_ceil(16).max(1)];
        // SAFETY: the storage is at least as long as `bytes`, and new.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), storage.as_mut_ptr().cast::<u8>(), bytes.len()) };
        let address = storage.as_ptr() as u64;
        self.buffers.push(Allocation { storage, bytes: bytes.len(), writable });
        address
    }
}

/// No contraction of a multiplication and an addition (`fma_` says it), wrapping integers as on GPUs, and the compiler's own checks for
/// what stays undefined. Warnings that would be errors in GLSL are errors.
const FLAGS: [&str; 20] = [
    "-std=gnu++17",
    "-O1",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-fsanitize=shift-exponent,bounds,integer-divide-by-zero,float-cast-overflow",
    "-Wall",
    "-Wno-unused",
    "-Wno-unknown-pragmas",
    "-Werror=uninitialized",
    "-Werror=shadow",
    "-Werror=double-promotion",
    "-Werror=return-type",
    "-Werror=float-conversion",
];

fn directory() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target"), PathBuf::from);
    target.join("host-kernels")
}

/// The wave of a kernel whose constants do not say another.
const WAVE: u32 = 32;

/// The file that says that a text has run without a fault at a wave. What stands before the math does not count: tests put words there.
fn record(text: &str, wave: u32) -> PathBuf {
    let mut hash = DefaultHasher::new();
    text.split_once("\n// math\n").map_or(text, |(_, own)| own).hash(&mut hash);
    directory().join(format!("{:016x}.ran{wave}", hash.finish()))
}

/// What has not run as it is now, by name and wave: every op at each of the waves, and every format in some op. (No format has a word of waves in
/// it, and no op one of a format.) Runs are noted beside the compiled kernels, by whatever process ran them. An op of one backend is for its own wave
/// alone; one without a word of waves is the same at any. Vulkan's own ops are not for the host.
pub fn unrun(waves: &[u32]) -> Vec<(String, u32)> {
    let mut missing = Vec::new();
    let mut formats = HashSet::new();
    for op in crate::ops().iter().filter(|op| op.backend.as_deref() != Some(Target::Glsl.name())) {
        let all: BTreeSet<Key> = Target::ALL.into_iter().flat_map(crate::kernels).filter(|k| k.op == op.name).collect();
        let mut ran = HashSet::new();
        for key in all {
            let Some(text) = crate::text(key, Target::Host) else { continue };
            let at: Vec<u32> = [1, 8, 32, 64].into_iter().filter(|wave| record(&text, *wave).exists()).collect();
            formats.extend(key.format.filter(|_| !at.is_empty()));
            ran.extend(at);
        }
        let words = op.body.split(|c: char| !c.is_alphanumeric() && c != '_');
        let of_waves = |w: &str| matches!(w, "WAVE" | "WAVE_ID" | "LANE") || w.starts_with("wave_");
        if op.backend.is_none() && words.into_iter().any(of_waves) {
            missing.extend(waves.iter().filter(|w| !ran.contains(w)).map(|w| (op.name.clone(), *w)));
        } else if ran.is_empty() {
            missing.push((op.name.clone(), WAVE));
        }
    }
    let left = crate::formats().filter(|f| !formats.contains(&f.0));
    missing.extend(left.map(|f| (f.0.to_string(), WAVE)));
    missing
}

fn build(text: &str, flags: &[String], library: &Path) -> Result<(), Error> {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".to_string());
    let broken = |source| Error::Compiler { compiler: compiler.clone(), source };
    std::fs::create_dir_all(directory()).map_err(broken)?;
    // Names of this process: another may be at the same kernel.
    let (source, object) = (library.with_extension("cpp"), library.with_extension(format!("{}.o", std::process::id())));
    let linked = library.with_extension(format!("{}.so", std::process::id()));
    let mut file = std::fs::File::create(&source).map_err(broken)?;
    file.write_all(text.as_bytes()).map_err(broken)?;
    let run = |args: &[&OsStr]| -> Result<(), Error> {
        let out = Command::new(&compiler).args(args).stdin(Stdio::null()).output().map_err(broken)?;
        if out.status.success() { Ok(()) } else { Err(Error::Text(String::from_utf8_lossy(&out.stderr).into_owned())) }
    };
    let mut compile: Vec<&OsStr> = flags.iter().map(OsStr::new).collect();
    compile.extend([OsStr::new("-c"), source.as_os_str(), OsStr::new("-o"), object.as_os_str()]);
    run(&compile)?;
    // Linked without the checks' own library: the prelude has the functions that they call.
    run(&[OsStr::new("-shared"), object.as_os_str(), OsStr::new("-o"), linked.as_os_str(), OsStr::new("-lm")])?;
    std::fs::rename(&linked, library).map_err(broken)?;
    std::fs::remove_file(&object).map_err(broken)
}

fn load(library: &Path) -> Result<Run, Error> {
    let path = CString::new(library.as_os_str().as_bytes()).map_err(|e| Error::Load(e.to_string()))?;
    let reason = || {
        // SAFETY: dlerror returns null or a string that lives until the next call on this thread.
        let text = unsafe { libc::dlerror() };
        // SAFETY: as above, and it is not null.
        if text.is_null() {
            "no reason given".to_string()
        } else {
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        }
    };
    // SAFETY: the library runs nothing when it is loaded but the constructors of the prelude's statics; it is never closed.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        return Err(Error::Load(reason()));
    }
    // SAFETY: the handle is open and the name ends in a zero.
    let entry = unsafe { libc::dlsym(handle, c"hz_run".as_ptr()) };
    if entry.is_null() {
        return Err(Error::Load(reason()));
    }
    // SAFETY: the prelude declares `hz_run` with this type.
    Ok(unsafe { std::mem::transmute::<*mut c_void, Run>(entry) })
}
