//! Kernel-C is closed: `formats/` and `ops/` use the words of KERNEL-C.md and nothing of a backend, and every backend has every word.
use hanzo_kernels::{Target, kernels, text};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The files of a folder with their bodies, comments blanked out (lines kept).
fn bodies(folder: &str) -> Vec<(String, String)> {
    let mut all: Vec<PathBuf> = std::fs::read_dir(root().join(folder)).unwrap().map(|e| e.unwrap().path()).collect();
    all.retain(|p| p.extension().is_some_and(|e| e == "kc"));
    all.sort();
    (all.iter())
        .map(|p| {
            let text = read(p);
            let body = text.split_once("\n---\n").map_or(text.as_str(), |(_, body)| body);
            (format!("{folder}/{}", p.file_name().unwrap().to_string_lossy()), without_comments(body))
        })
        .collect()
}

/// The bodies of `ops/`, parts in their places. Backends' own kernels may call more.
fn op_bodies() -> Vec<(String, String)> {
    let common = hanzo_kernels::ops().iter().filter(|o| o.backend.is_none());
    common.map(|o| (format!("ops/{}.kc", o.name), without_comments(&o.body))).collect()
}

fn without_comments(text: &str) -> String {
    text.lines().map(|l| l.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// The names in code, each with whether a parenthesis follows and whether a dot precedes. Numbers are none.
fn names(code: &str) -> Vec<(&str, bool, bool)> {
    let mut found = Vec::new();
    let bytes = code.as_bytes();
    let word = |c: u8| c.is_ascii_alphanumeric() || c == b'_';
    let mut i = 0;
    while i < bytes.len() {
        if !word(bytes[i]) {
            i += 1;
            continue;
        }
        let from = i;
        // A number may hold a dot or a signed exponent: 1.5e-3f.
        let number = bytes[i].is_ascii_digit();
        while i < bytes.len()
            && (word(bytes[i])
                || (number && (bytes[i] == b'.' || (matches!(bytes[i], b'-' | b'+') && bytes[i - 1] == b'e'))))
        {
            i += 1;
        }
        if !number {
            found.push((&code[from..i], code[i..].trim_start().starts_with('('), from > 0 && bytes[from - 1] == b'.'));
        }
    }
    found
}

/// The words of the table in KERNEL-C.md: what its first column has in backticks, without the arguments.
fn words() -> BTreeSet<String> {
    let contract = read(&root().join("KERNEL-C.md"));
    let table = contract.split_once("\n## Words").unwrap().1.split_once("\n## ").unwrap().0;
    let mut words = BTreeSet::new();
    let mut add = |quoted: &str| {
        for part in quoted.split('`').skip(1).step_by(2) {
            let outside = part
                .split('(')
                .enumerate()
                .map(|(i, s)| if i == 0 { s } else { s.split_once(')').map_or("", |(_, after)| after) });
            words.extend(outside.flat_map(str::split_whitespace).map(str::to_string));
        }
    };
    for line in table.lines() {
        match line.strip_prefix("| `") {
            Some(row) => add(&format!("`{}", row.split(" | ").next().unwrap_or_default())),
            None if !line.starts_with('|') => add(line),
            None => {}
        }
    }
    words.extend(["mk2", "mk4", "mkf4", "WAVE", "UNIT_GROUP", "UNIT_MIN", "Wt", "Unit", "Floats"].map(str::to_string));
    // A layout, not a word.
    words.remove("Q8");
    words.retain(|w| w.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_') && !w.is_empty());
    words
}

/// Functions that a kernel-C text defines.
fn functions(code: &str) -> BTreeSet<String> {
    let mut rest = code;
    let mut found = BTreeSet::new();
    while let Some(at) = rest.find("FN ") {
        rest = &rest[at + 3..];
        if let Some(name) = rest.split('(').next().and_then(|s| s.split_whitespace().nth(1)) {
            found.insert(name.to_string());
        }
    }
    found
}

fn preludes() -> Vec<(String, String)> {
    let mut all = bodies("prelude");
    all.retain(|(_, text)| text.contains("FN "));
    all
}

#[test]
fn the_words_of_the_contract_are_found() {
    let words = words();
    for word in [
        "u32x4",
        "LDF4",
        "STF4",
        "ATOMIC_ADD",
        "GROUP_Z",
        "wave_sum_i",
        "wave_xor",
        "as_i32",
        "floor_",
        "GRID_LOAD",
        "div_rn",
        "log1p_",
        "dot16",
        "sum_hi",
    ] {
        assert!(words.contains(word), "{word} is not in {words:?}");
    }
    assert!(!words.contains("p") && !words.contains("byte"));
}

#[test]
fn kernels_call_nothing_but_words_and_their_own_functions() {
    let words = words();
    let shared: BTreeSet<String> = preludes().iter().flat_map(|(_, t)| functions(t)).collect();
    // What a format defines, an op may call.
    let of_formats = ["unit", "floats", "pack_byte", "unpack_byte"].map(str::to_string);
    let statements = ["for", "if", "while", "return", "else"].map(str::to_string);
    for (file, code) in bodies("formats").iter().chain(&op_bodies()) {
        let own = functions(code);
        for (name, called, _) in names(code) {
            if !called {
                continue;
            }
            let known = words.contains(name)
                || [&shared, &own].iter().any(|s| s.contains(name))
                || of_formats.iter().chain(&statements).any(|s| s == name);
            assert!(known, "{file} calls {name}, which is no word of KERNEL-C.md");
        }
    }
}

#[test]
fn kernels_use_no_preprocessor_and_no_other_languages_words() {
    // Keywords and types of the backends that are no part of the common subset, and their words that a name may not take.
    let foreign = "int uint float double char short long unsigned signed void auto static inline const_cast template typename class namespace using \
        switch case goto do sizeof uvec2 uvec4 ivec4 vec2 vec4 float4 uint4 int4 uint2 half half2 uint64_t size_t device threadgroup thread constant kernel sample input output filter texture buffer \
        shared uniform layout in out inout precise restrict readonly writeonly coherent volatile __shared__ __global__ __device__ __restrict__ \
        threadIdx blockIdx blockDim gl_LocalInvocationIndex barrier subgroupAdd simd_sum __syncthreads __shfl_xor_sync fma sqrt exp tanh min max abs pow sin cos log rsqrt floor \
        discard true_type common partition active asm enum typedef union this packed superp noinline extern external interface fixed lowp mediump highp precision hvec2 dvec2 sampler2D cast vertex fragment compute ray_data object_data mesh visible";
    let foreign: BTreeSet<&str> = foreign.split_whitespace().collect();
    for (file, code) in bodies("formats").iter().chain(&op_bodies()) {
        assert!(!code.contains('#'), "{file} uses the preprocessor");
        for (name, _, member) in names(code) {
            assert!(member || !foreign.contains(name), "{file} uses {name}");
            assert!(
                !name.starts_with("hz_") && !name.starts_with("Hz") && !name.starts_with("HZ_"),
                "{file} uses {name}, which belongs to the preludes"
            );
            for backend in ["cuda", "vulkan", "glsl", "metal", "hip_", "nvidia", "amd"] {
                assert!(!name.to_ascii_lowercase().contains(backend), "{file} names a backend: {name}");
            }
        }
    }
}

#[test]
fn every_word_is_in_the_text_of_every_target() {
    for target in Target::ALL {
        let key = kernels(target).find(|k| k.format.is_some()).expect("a kernel with a format");
        let text = text(key, target).expect("its text");
        let defined: BTreeSet<&str> = names(&text).iter().map(|(n, _, _)| *n).collect();
        for word in words().iter().filter(|w| *w != "KERNEL") {
            assert!(defined.contains(word.as_str()), "{word} is missing for {}", target.name());
        }
    }
}

#[test]
fn indices_of_threads_stay_in_kernel_bodies() {
    // Metal has them as parameters of the entry only.
    for (file, code) in bodies("formats").iter().chain(&op_bodies()) {
        let helpers = code.split("KERNEL {").next().unwrap_or_default();
        for (name, _, _) in names(helpers) {
            let index = matches!(name, "THREAD" | "LANE" | "WAVE_ID" | "GROUP_X" | "GROUP_Y" | "GROUP_Z" | "GRID_LOAD");
            assert!(!index, "{file} uses {name} outside of KERNEL: pass it to the function");
        }
    }
}

#[test]
fn constants_have_names_of_two_letters_or_more() {
    // They are macros on most backends, whose headers use single letters.
    for op in hanzo_kernels::ops() {
        for (name, _) in hanzo_kernels::constants(&op.name) {
            assert!(name.len() >= 2, "{}: the constant {name}", op.name);
        }
    }
}
