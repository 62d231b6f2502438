//! What a device can do, as far as lowering cares: reported by a backend, or masked to be a lesser device's.
//!
//! Kernels are chosen by these values alone, so that what a device would run can be seen without it. No device handle may
//! enter here.

use crate::levers::LeverSet;

/// Instructions that multiply matrices, as the kernels that use them tell them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MatrixUnit {
    /// Vulkan's KHR cooperative matrix of a subgroup of 32: 16x16x16, f16 summed in f32.
    Coop,
    /// NV_cooperative_matrix2: matrices of a whole workgroup of 256, f16 summed in f32.
    Coop2,
    /// CUDA's `mma` of signed bytes (sm_80 and later).
    MmaInt8,
    /// CUDA's `mma` of halves (sm_80 and later).
    MmaHalf,
    /// The same, where it does at least as well as that of bytes, whose sums have scales to apply: data-center GPUs since Hopper. Nothing without
    /// [`MatrixUnit::MmaHalf`].
    HalfFirst,
    /// RDNA 3's `wmma` of signed bytes, in waves of 32.
    Wmma,
    /// CDNA 3's `mfma` of signed bytes, in waves of 64.
    Mfma,
    /// Metal's simdgroup matrices of halves.
    Simdgroup,
}

impl MatrixUnit {
    /// Every one, with its name in listings and in [`Mask`]s.
    pub const ALL: [(MatrixUnit, &'static str); 8] = [
        (MatrixUnit::Coop, "coop"),
        (MatrixUnit::Coop2, "coop2"),
        (MatrixUnit::MmaInt8, "mma-int8"),
        (MatrixUnit::MmaHalf, "mma-f16"),
        (MatrixUnit::HalfFirst, "mma-f16-first"),
        (MatrixUnit::Wmma, "wmma"),
        (MatrixUnit::Mfma, "mfma"),
        (MatrixUnit::Simdgroup, "simdgroup"),
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        MatrixUnit::ALL.iter().find(|u| u.0 == self).map_or("", |u| u.1)
    }

    /// The wave its kernels are written for.
    pub fn wave(self) -> u32 {
        if self == MatrixUnit::Mfma { 64 } else { 32 }
    }

    /// Does it read halves, and so need rows scaled into their range?
    fn halves(self) -> bool {
        !matches!(self, MatrixUnit::MmaInt8 | MatrixUnit::Wmma | MatrixUnit::Mfma)
    }
}

/// A set of [`MatrixUnit`]s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MatrixUnits(u8);

impl MatrixUnits {
    /// None.
    pub const NONE: MatrixUnits = MatrixUnits(0);
    /// All of them: a mask.
    pub const EVERY: MatrixUnits = MatrixUnits(u8::MAX);

    /// With one more.
    #[must_use]
    pub const fn with(self, unit: MatrixUnit) -> MatrixUnits {
        MatrixUnits(self.0 | 1 << unit as u8)
    }

    /// Without those of another set.
    #[must_use]
    pub const fn without(self, others: MatrixUnits) -> MatrixUnits {
        MatrixUnits(self.0 & !others.0)
    }

    /// Is it in the set?
    pub const fn has(self, unit: MatrixUnit) -> bool {
        self.0 >> unit as u8 & 1 == 1
    }

    /// Does any of them read halves?
    pub fn read_halves(self) -> bool {
        MatrixUnit::ALL.iter().any(|(u, _)| self.has(*u) && u.halves())
    }

    /// Their names.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        MatrixUnit::ALL.into_iter().filter(move |(u, _)| self.has(*u)).map(|(_, name)| name)
    }
}

/// What a device can do, as far as lowering cares.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Features {
    /// Threads of a wave (subgroup); whole waves only. 1: no wave operations.
    pub wave: u32,
    /// Half conversions in hardware keep subnormals.
    pub half_hw: bool,
    /// Four-way int8 dot products are accelerated. Without, tiles sum codes as floats.
    pub int_dot: bool,
    /// What multiplies matrices.
    pub matrix: MatrixUnits,
    /// Workgroup memory, bytes.
    pub shared_bytes: u32,
    /// The most threads of a workgroup.
    pub max_threads: u32,
    /// Bytes of weights to read ahead beside a stage of attention (lever `weight_prefetch`); 0: the cache is too small for it.
    pub prefetch_bytes: u64,
}

impl Features {
    /// A CUDA device of compute capability `sm / 10`, as NVIDIA documents it. Text for it is made for sm_80 and later.
    pub fn cuda(sm: u32) -> Features {
        let mma = MatrixUnits::NONE.with(MatrixUnit::MmaInt8).with(MatrixUnit::MmaHalf);
        let matrix = match sm {
            0..=79 => MatrixUnits::NONE,
            90..=109 => mma.with(MatrixUnit::HalfFirst),
            _ => mma,
        };
        // What a launch may ask for; without asking it gets 48 KiB, which no kernel exceeds but those that say `asks`.
        let shared_bytes = match sm {
            0..=79 => 48 << 10,
            80 | 87 => 163 << 10,
            90..=119 => 227 << 10,
            _ => 99 << 10,
        };
        Features { int_dot: sm >= 61, shared_bytes, ..Features::of(32, matrix) }
    }

    /// An AMD device by its architecture's name, as clang takes it: `gfx1100`, `gfx942`.
    pub fn hip(architecture: &str) -> Features {
        let gcn = architecture.starts_with("gfx9");
        let matrix = match architecture {
            a if a.starts_with("gfx11") => MatrixUnits::NONE.with(MatrixUnit::Wmma),
            "gfx940" | "gfx941" | "gfx942" => MatrixUnits::NONE.with(MatrixUnit::Mfma),
            _ => MatrixUnits::NONE,
        };
        Features { shared_bytes: 64 << 10, ..Features::of(if gcn { 64 } else { 32 }, matrix) }
    }

    /// An Apple GPU of family 7 and later (M1 and later).
    pub fn metal() -> Features {
        let matrix = MatrixUnits::NONE.with(MatrixUnit::Simdgroup);
        Features { int_dot: false, ..Features::of(32, matrix) }
    }

    /// A device with these matrix units and otherwise what every current one has.
    fn of(wave: u32, matrix: MatrixUnits) -> Features {
        let (half_hw, int_dot) = (true, true);
        Features { wave, half_hw, int_dot, matrix, shared_bytes: 32 << 10, max_threads: 1024, prefetch_bytes: 0 }
    }

    /// Without what needs a lever that is off.
    #[must_use]
    pub fn within(&self, levers: LeverSet) -> Features {
        let off = if levers.on("coop2") { MatrixUnits::NONE } else { MatrixUnits::NONE.with(MatrixUnit::Coop2) };
        Features { matrix: self.matrix.without(off), ..self.clone() }
    }

    /// Unit roundoff of what matrix units read (see [`crate::backend::Backend::staging`]); 0 where none reads halves.
    pub fn staging(&self) -> f64 {
        if self.matrix.read_halves() { 2f64.powi(-11) } else { 0.0 }
    }
}

/// What is to be taken from a device, so that it runs a lesser one's kernels: a test's and a user's switch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mask {
    /// These matrix units.
    pub matrix: MatrixUnits,
    /// Int8 dot products.
    pub int_dot: bool,
    /// Half conversions in hardware.
    pub half_hw: bool,
    /// Workgroup memory beyond this many bytes.
    pub shared_bytes: Option<u32>,
    /// Threads of a workgroup beyond this many.
    pub max_threads: Option<u32>,
}

impl Mask {
    /// What [`Mask::parse`] takes, for people.
    pub const WORDS: &'static str = "matrix (all matrix units) or the name of one (coop, coop2), dot, f16, shared=BYTES, threads=N, joined by commas";

    /// Reads `matrix,dot,threads=64`; none if a word is not known.
    pub fn parse(text: &str) -> Option<Mask> {
        let mut mask = Mask::default();
        for word in text.split(',').filter(|w| !w.is_empty()) {
            match word.split_once('=') {
                Some(("shared", n)) => mask.shared_bytes = Some(n.parse().ok()?),
                Some(("threads", n)) => mask.max_threads = Some(n.parse().ok()?),
                Some(_) => return None,
                None if word == "matrix" => mask.matrix = MatrixUnits::EVERY,
                None if word == "dot" => mask.int_dot = true,
                None if word == "f16" => mask.half_hw = true,
                None => mask.matrix = mask.matrix.with(MatrixUnit::ALL.iter().find(|u| u.1 == word)?.0),
            }
        }
        Some(mask)
    }

    /// What is left of a device.
    pub fn apply(&self, f: Features) -> Features {
        Features {
            wave: f.wave,
            half_hw: f.half_hw && !self.half_hw,
            int_dot: f.int_dot && !self.int_dot,
            matrix: f.matrix.without(self.matrix),
            shared_bytes: f.shared_bytes.min(self.shared_bytes.unwrap_or(u32::MAX)),
            // A wave at least.
            max_threads: f.max_threads.min(self.max_threads.unwrap_or(u32::MAX)).max(f.wave),
            prefetch_bytes: f.prefetch_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_takes_what_it_names_and_nothing_else() {
        let all = Features { matrix: MatrixUnits::EVERY, ..Features::cuda(90) };
        let mask = |text: &str| Mask::parse(text).map(|m| m.apply(all.clone()));
        assert_eq!(mask(""), Some(all.clone()));
        let coop = mask("coop").expect("a mask");
        assert!(!coop.matrix.has(MatrixUnit::Coop) && coop.matrix.has(MatrixUnit::Coop2));
        let lesser = mask("matrix,dot,f16,shared=16384,threads=64").expect("a mask");
        let want = Features {
            half_hw: false,
            int_dot: false,
            shared_bytes: 16384,
            max_threads: 64,
            ..Features::of(32, MatrixUnits::NONE)
        };
        assert_eq!(lesser, want);
        assert_eq!(mask("threads=1").map(|f| f.max_threads), Some(32));
        for wrong in ["cop", "shared", "shared=x", "dots=1", "matrix dot"] {
            assert_eq!(Mask::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn architectures_report_their_matrix_units() {
        let names = |f: Features| f.matrix.names().collect::<Vec<_>>();
        assert_eq!(names(Features::cuda(75)), [""; 0]);
        assert_eq!(names(Features::cuda(80)), ["mma-int8", "mma-f16"]);
        assert_eq!(names(Features::cuda(90)), ["mma-int8", "mma-f16", "mma-f16-first"]);
        assert_eq!(names(Features::cuda(120)), ["mma-int8", "mma-f16"]);
        assert_eq!((names(Features::hip("gfx1100")), names(Features::hip("gfx942"))), (vec!["wmma"], vec!["mfma"]));
        assert_eq!((Features::hip("gfx942").wave, Features::hip("gfx1030").wave), (64, 32));
        assert_eq!(names(Features::metal()), ["simdgroup"]);
        assert_eq!((Features::metal().staging() > 0.0, Features::hip("gfx1100").staging()), (true, 0.0));
    }
}
