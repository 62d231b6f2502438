//! Prints a kernel's whole text for a target: constants, prelude, math, format, entry and body.

use super::{ArgKind, Class, FormatFile, OpFile, Shared, key};
use std::fmt::Write;

/// The language a kernel is printed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// Vulkan's GLSL 4.60.
    Glsl,
    /// CUDA C++, for NVRTC.
    Cuda,
    /// HIP, for hipRTC or clang.
    Hip,
    /// Metal.
    Msl,
    /// C++, to run a kernel on the CPU under checks.
    Host,
}

impl Target {
    /// Every target.
    pub const ALL: [Target; 5] = [Target::Glsl, Target::Cuda, Target::Hip, Target::Msl, Target::Host];

    /// The target's name: the folder of its own kernels below `ops/`.
    pub fn name(self) -> &'static str {
        match self {
            Target::Glsl => "vulkan",
            Target::Cuda => "cuda",
            Target::Hip => "hip",
            Target::Msl => "msl",
            Target::Host => "host",
        }
    }
}

/// The function name a target knows the kernel by (`main` for Vulkan).
fn entry_name(op: &OpFile, format: Option<&FormatFile>) -> String {
    key(op, format).replace('.', "_")
}

/// The text of `op` with `format` for a target. `prelude` is the target's prelude, `common` are the functions that every
/// backend shares: `math.kc` and, for block formats, `block.kc`; `table_words` are the u32 words of the format's codebook.
pub fn print(
    target: Target,
    op: &OpFile,
    format: Option<&FormatFile>,
    prelude: &str,
    common: [&str; 2],
    table_words: u32,
) -> String {
    let [math, block] = common;
    let grid = op.grid && table_words > 0;
    let mut out = String::new();
    let entry = match target {
        Target::Glsl => {
            out.push_str("#version 460\n");
            // Matrices of a workgroup: kernels that use them say so by what they call.
            if op.body.contains("coopMatPerElementNV") {
                out.push_str("#extension GL_NV_cooperative_matrix2 : require\n");
            }
            glsl(&mut out, op, format, prelude, grid, table_words)
        }
        _ => {
            defines(&mut out, op, format, grid, table_words);
            out.push_str(prelude);
            c_entry(target, op, format)
        }
    };
    out.push_str("\n// math\n");
    out.push_str(math);
    if let Some(f) = format {
        let _ = writeln!(out, "\n// format {}", f.name);
        out.push_str(&f.body);
        if f.class == Class::Block {
            out.push_str(block);
        }
    }
    let _ = writeln!(out, "\n// op {}", op.name);
    out.push_str(&op.body.replacen("KERNEL {", &entry, 1));
    out
}

fn weights(op: &OpFile) -> impl Iterator<Item = &str> {
    op.args.iter().filter(|a| a.kind == ArgKind::Weight).map(|a| a.name.as_str())
}

fn defines(out: &mut String, op: &OpFile, format: Option<&FormatFile>, grid: bool, table_words: u32) {
    let _ = writeln!(out, "#define HZ_NAME \"{}\"", key(op, format));
    let standard = [("WAVE".to_string(), 32)];
    for (name, value) in op.constants.iter().chain(&standard) {
        let _ = writeln!(out, "#ifndef {name}\n#define {name} {value}u\n#endif");
    }
    if let Some(f) = format {
        let _ = writeln!(out, "#define UNIT_GROUP {}u\n#define UNIT_MIN {}u", f.group, u32::from(f.min));
    }
    let _ = writeln!(out, "#define HZ_TABLE_WORDS {table_words}u\n#define HZ_GRID {}", u32::from(grid));
    match weights(op).next() {
        Some(w) if grid => writeln!(out, "#define GRID_LOAD HZ_GRID_LOAD({w})"),
        _ => writeln!(out, "#define GRID_LOAD BARRIER"),
    }
    .unwrap_or_default();
}

/// Prints what stands before the math, and gives the entry.
fn glsl(
    out: &mut String,
    op: &OpFile,
    format: Option<&FormatFile>,
    prelude: &str,
    grid: bool,
    table_words: u32,
) -> String {
    out.push_str(prelude);
    let _ = writeln!(out, "layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;");
    for (id, (name, value)) in constants(op).enumerate() {
        let _ = writeln!(out, "layout(constant_id = {id}) const uint {name} = {value}u;");
    }
    if let Some(f) = format {
        let _ = writeln!(out, "const uint UNIT_GROUP = {}u;\nconst uint UNIT_MIN = {}u;", f.group, u32::from(f.min));
    }
    // Wave words and half conversions depend on the constants above.
    out.push_str("HZ_AFTER_CONSTANTS\n");
    for s in &op.shared {
        let _ = writeln!(out, "shared {} {}[{}];", s.ty, s.name, s.size);
    }
    match weights(op).next() {
        Some(w) if grid => {
            let _ = writeln!(out, "shared uint hz_grid[{table_words}];\n#define GRID(w_, i_) hz_grid[i_]");
            let _ = writeln!(
                out,
                "#define GRID_LOAD for (uint g_ = THREAD; g_ < {table_words}u; g_ += THREADS) hz_grid[g_] = LD1({w}.tab, g_); BARRIER"
            );
        }
        _ => out.push_str("#define GRID(w_, i_) LD1((w_).tab, i_)\n#define GRID_LOAD BARRIER\n"),
    }
    out.push_str("layout(push_constant, scalar) uniform HzArgs {\n");
    for a in &op.args {
        let n = &a.name;
        let _ = match a.kind {
            ArgKind::Weight => {
                writeln!(
                    out,
                    "  uint64_t {n}_base; uint {n}_o1; uint {n}_o2; uint {n}_o3; uint {n}_zero; uint64_t {n}_table;"
                )
            }
            ArgKind::Ro | ArgKind::Wo | ArgKind::Rw => writeln!(out, "  uint64_t {n};"),
            ArgKind::U32 => writeln!(out, "  uint {n};"),
            ArgKind::F32 => writeln!(out, "  float {n};"),
        };
    }
    out.push_str("} hz_a;\n");
    let mut entry = String::from("void main() {\n");
    for a in &op.args {
        let n = &a.name;
        let _ = match a.kind {
            ArgKind::Weight => writeln!(
                entry,
                "  const Wt {n} = Wt(hz_a.{n}_base, ADV(hz_a.{n}_base, hz_a.{n}_o1), ADV(hz_a.{n}_base, hz_a.{n}_o2), ADV(hz_a.{n}_base, hz_a.{n}_o3), hz_a.{n}_table);"
            ),
            ArgKind::Ro | ArgKind::Wo | ArgKind::Rw => writeln!(entry, "  const uint64_t {n} = hz_a.{n};"),
            ArgKind::U32 => writeln!(entry, "  const uint {n} = hz_a.{n};"),
            ArgKind::F32 => writeln!(entry, "  const float {n} = hz_a.{n};"),
        };
    }
    entry
}

/// Every specialization constant in the order of its id: THREADS, WAVE, HALF_HW, then the op's own.
pub fn constants(op: &OpFile) -> impl Iterator<Item = (String, u32)> + '_ {
    let threads = op.constants.first().cloned();
    let standard = [("WAVE".to_string(), 32), ("HALF_HW".to_string(), 0)];
    threads.into_iter().chain(standard).chain(op.constants.iter().skip(1).cloned())
}

fn c_entry(target: Target, op: &OpFile, format: Option<&FormatFile>) -> String {
    let name = entry_name(op, format);
    let (_, offsets) = op.layout();
    let mut e = String::new();
    let parameter = |kind: ArgKind, n: &str| match kind {
        ArgKind::Weight => {
            format!("HZ_RO {n}_base, u32 {n}_o1, u32 {n}_o2, u32 {n}_o3, u32 {n}_zero, HZ_RO {n}_table")
        }
        ArgKind::Ro => format!("HZ_RO {n}"),
        ArgKind::Wo | ArgKind::Rw => format!("HZ_RW {n}"),
        ArgKind::U32 => format!("u32 {n}"),
        ArgKind::F32 => format!("f32 {n}"),
    };
    let parameters: Vec<String> = op.args.iter().map(|a| parameter(a.kind, &a.name)).collect();
    // Memory that a launch asks for is one run; arrays start at multiples of 16 bytes.
    let asked = target == Target::Cuda && op.asks;
    let bytes = |s: &Shared| format!(" + (({}) * sizeof({}) + 15) / 16", s.size, s.ty);
    if asked {
        let all: String = op.shared.iter().map(bytes).collect();
        let _ = writeln!(e, "extern \"C\" __constant__ u32 hz_asked_bytes = (0{all}) * 16;");
    }
    match target {
        Target::Msl => {
            let fields: String = parameters.iter().flat_map(|p| p.split(", ")).map(|p| format!("  {p};\n")).collect();
            let _ = writeln!(e, "struct hz_args {{\n{fields}}};");
            let _ = writeln!(e, "[[kernel, max_total_threads_per_threadgroup(THREADS)]] void {name}(");
            let _ = writeln!(e, "    constant hz_args& hz_a [[buffer(0)]], HZ_INDICES) {{\n  HZ_GRID_MEMORY");
        }
        Target::Host => {
            let _ = writeln!(e, "static void hz_kernel() {{");
        }
        _ => {
            let _ = writeln!(e, "extern \"C\" __global__ void HZ_BOUNDS(THREADS) {name}(");
            let _ = writeln!(e, "    {}) {{", parameters.join(",\n    "));
        }
    }
    for (a, at) in op.args.iter().zip(&offsets) {
        let n = &a.name;
        let _ = match (target, a.kind) {
            (Target::Msl, ArgKind::Weight) => writeln!(
                e,
                "  const Wt {n} = hz_wt(hz_a.{n}_base, hz_a.{n}_o1, hz_a.{n}_o2, hz_a.{n}_o3, hz_a.{n}_table HZ_GRID_ARG);"
            ),
            (Target::Msl, ArgKind::Ro) => writeln!(e, "  HZ_RO {n} = hz_a.{n};"),
            (Target::Msl, ArgKind::Wo | ArgKind::Rw) => writeln!(e, "  HZ_RW {n} = hz_a.{n};"),
            (Target::Msl, ArgKind::U32) => writeln!(e, "  const u32 {n} = hz_a.{n};"),
            (Target::Msl, ArgKind::F32) => writeln!(e, "  const f32 {n} = hz_a.{n};"),
            (Target::Host, ArgKind::Weight) => writeln!(e, "  const Wt {n} = hz::weight(\"{n}\", {at});"),
            (Target::Host, ArgKind::Ro) => writeln!(e, "  const RO {n} = hz::ro(\"{n}\", {at});"),
            (Target::Host, ArgKind::Wo) => writeln!(e, "  const RW {n} = hz::wo(\"{n}\", {at});"),
            (Target::Host, ArgKind::Rw) => writeln!(e, "  const RW {n} = hz::rw(\"{n}\", {at});"),
            (Target::Host, ArgKind::U32) => writeln!(e, "  const u32 {n} = hz::arg<u32>({at});"),
            (Target::Host, ArgKind::F32) => writeln!(e, "  const f32 {n} = hz::arg<f32>({at});"),
            (_, ArgKind::Weight) => {
                writeln!(e, "  const Wt {n} = hz_wt({n}_base, {n}_o1, {n}_o2, {n}_o3, {n}_table);")
            }
            _ => Ok(()),
        };
    }
    let mut start = String::from("hz_asked");
    if asked {
        e.push_str("  extern __shared__ u32x4 hz_asked[];\n");
    }
    for s in &op.shared {
        let (ty, n, size) = (&s.ty, &s.name, &s.size);
        let _ = match target {
            Target::Cuda if asked => writeln!(e, "  {ty}* const {n} = ({ty}*)({start});"),
            Target::Msl => writeln!(e, "  threadgroup {ty} {n}[{size}];"),
            Target::Host => writeln!(e, "  static hz::Shared<{ty}, ({size})> {n}(\"{n}\");"),
            _ => writeln!(e, "  __shared__ {ty} {n}[{size}];"),
        };
        start.push_str(&bytes(s));
    }
    e
}
