//! Matrices times rows of activations: mat-vecs and GEMMs, dense and by experts.

use hanzo_gguf::Format;
use hanzo_kernels::Key;
use hanzo_ml::gpu::Features;
use hanzo_ml::gpu::lower::variants::{self, Input, Load, Task, Variant};
use hanzo_ml::vulkan::raw::Memory;

use super::subject::{Arg, Check, Choice, Constants, Machine, Subject, launch};
use super::weights::{Matrix, Noise, Resident};

/// What is contracted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    pub format: Format,
    /// Rows of the matrix, of each expert.
    pub rows: usize,
    pub cols: usize,
    pub tokens: usize,
    /// `(experts, slots of a token)`.
    pub experts: Option<(usize, usize)>,
}

impl Case {
    /// Rows of the result.
    pub fn slots(&self) -> usize {
        self.tokens * self.experts.map_or(1, |e| e.1)
    }

    /// Slots that share a row of activations: a token's, but each its own where a matrix is taller than wide (down projections).
    fn div(&self) -> usize {
        self.experts.filter(|_| self.rows <= self.cols).map_or(1, |e| e.1)
    }

    /// What the engine would run on a device.
    fn variant(&self, features: &Features) -> Option<&'static Variant> {
        let input = if self.format.is_block() { Input::Int8 } else { Input::Float };
        let experts = self.experts.map(|(n, k)| (k, n));
        let task = if experts.is_some() { Task::Moe } else { Task::Linear };
        variants::choose(task, input, Load { tokens: self.tokens, experts }, self.rows, false, features)
    }

    /// Expert of each slot, of launch `i`: a token's are distinct, and launches of few tokens go through all experts.
    fn ids(&self, i: usize) -> Vec<u32> {
        let Some((n, k)) = self.experts else { return Vec::new() };
        if self.tokens == 1 {
            return (0..k).map(|s| ((i * k + s) % n) as u32).collect();
        }
        let mut noise = Noise(i as u64 + 7);
        let token = |_| {
            let mut all: Vec<u32> = (0..n as u32).collect();
            (0..k).for_each(|s| all.swap(s, s + noise.next() as usize % (n - s)));
            all.truncate(k);
            all
        };
        (0..self.tokens).flat_map(token).collect()
    }
}

/// The activations of a case on the device, and what they mean.
struct Activations {
    /// The floats; behind Q8, the values of the codes.
    floats: Vec<f32>,
    quantized: Vec<f32>,
    x: Memory,
    xq: Memory,
    xd: Memory,
    xs: Memory,
    /// Halves and their powers of two.
    half: Option<(Memory, Memory)>,
}

/// A case ready to run, whichever kernel does it.
pub struct Contraction {
    pub case: Case,
    pub(super) weights: Resident,
    acts: Activations,
    y: Memory,
    live: Memory,
    /// The ids of each set, and the same on the device.
    pub(super) ids: Vec<Vec<u32>>,
    id_memory: Vec<Memory>,
    /// For each height of a tile and set of ids: slots by expert, and tiles.
    tiles: Vec<(u32, Vec<(Memory, Memory)>)>,
    nothing: Memory,
    pub(super) features: Features,
}

/// Heights of tiles that kernels may have.
const HEIGHTS: [u32; 4] = [16, 32, 64, 128];

impl Contraction {
    /// Puts a case on the device, its weights as often as `working_set` needs.
    pub fn new(gpu: &Machine, case: Case, working_set: u64) -> anyhow::Result<Contraction> {
        let n_experts = case.experts.map_or(1, |e| e.0);
        let matrix = Matrix::new(case.format, case.rows * n_experts, case.cols)?;
        let bytes = (matrix.row_bytes() * matrix.rows) as u64;
        let weights = Resident::new(gpu, matrix, working_set.div_ceil(bytes).clamp(1, 1024) as usize)?;
        let rows_of_x = case.slots() / case.div();
        let acts = activations(gpu, rows_of_x, case.cols)?;
        let sets = match case.experts {
            None => 0,
            Some((n, k)) if case.tokens == 1 => n.div_ceil(k),
            Some(_) => 4,
        };
        let words = |words: &[u32]| gpu.upload(&words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>());
        let ids: Vec<Vec<u32>> = (0..sets).map(|i| case.ids(i)).collect();
        let id_memory = ids.iter().map(|ids| words(ids)).collect::<Result<_, _>>()?;
        let mut tiles = Vec::new();
        for height in HEIGHTS {
            let sorted = ids.iter().map(|ids| {
                let (order, tiles) = sort(ids, n_experts, height);
                Ok((words(&order)?, words(&tiles)?))
            });
            tiles.push((height, sorted.collect::<anyhow::Result<_>>()?));
        }
        Ok(Contraction {
            y: gpu.zeros(4 * case.slots() * case.rows)?,
            live: words(&[case.slots() as u32])?,
            nothing: gpu.zeros(256)?,
            features: gpu.features.clone(),
            case,
            weights,
            acts,
            ids,
            id_memory,
            tiles,
        })
    }

    /// Makes what matrix units read.
    pub fn prepare_halves(&mut self, gpu: &Machine) -> anyhow::Result<()> {
        if self.acts.half.is_some() {
            return Ok(());
        }
        self.weights.make_scales(gpu)?;
        let rows = self.case.slots() / self.case.div();
        let (xh, xscale) = (gpu.zeros(2 * rows * self.case.cols)?, gpu.zeros(4 * rows)?);
        let live = gpu.upload(&(rows as u32).to_le_bytes())?;
        let args = [
            ("xq", Arg::from(&self.acts.xq)),
            ("xd", (&self.acts.xd).into()),
            ("xh", (&xh).into()),
            ("xscale", (&xscale).into()),
            ("live", (&live).into()),
            ("units", Arg::U32((self.case.cols / 32) as u32)),
        ];
        launch(gpu, Key { op: "q8_to_half", format: None }, &[], &args, |_| [rows as u32, 1, 1])?;
        self.acts.half = Some((xh, xscale));
        Ok(())
    }

    /// Bytes of the matrix that launch `i` reads.
    pub(super) fn weight_bytes(&self) -> u64 {
        let expert = (self.case.rows * self.weights.matrix.row_bytes()) as u64;
        let distinct = |ids: &Vec<u32>| ids.iter().collect::<std::collections::BTreeSet<_>>().len() as u64;
        expert * self.ids.first().map_or(1, distinct)
    }

    /// Sets of experts that launches go through.
    pub(super) fn sets(&self) -> usize {
        self.ids.len().max(1)
    }

    /// Rows of y where a step is one token, which the engine then compiles in; 0: not known.
    pub(super) fn known_rows(&self) -> u32 {
        if self.case.tokens == 1 { self.case.slots() as u32 } else { 0 }
    }

    /// The values of the codes that a slot reads.
    pub(super) fn row_of_x(&self, slot: usize) -> &[f32] {
        &self.acts.quantized[slot / self.case.div() * self.case.cols..][..self.case.cols]
    }

    /// A kernel of this case.
    pub fn with<'a>(&'a self, kernel: &'static str) -> WithKernel<'a> {
        WithKernel { c: self, kernel }
    }
}

/// The kernels that can do a case on a device, the one that the engine would take first.
pub fn kernels(case: &Case, few: bool, matrices: bool) -> Vec<&'static str> {
    let (vector, gemm) = match case.format.is_block() {
        true => ("matvec", "gemm_dot"),
        false => ("matvec_f32", "gemm_f32"),
    };
    match (few, matrices) {
        (true, _) => vec![vector],
        (false, true) => vec!["gemm_coop", gemm],
        (false, false) => vec![gemm],
    }
}

/// A case with the kernel that does it.
pub struct WithKernel<'a> {
    c: &'a Contraction,
    kernel: &'static str,
}

impl WithKernel<'_> {
    fn is_gemm(&self) -> bool {
        self.kernel.starts_with("gemm")
    }

    fn reads_floats(&self) -> bool {
        self.kernel.ends_with("_f32")
    }

    /// Sets of arguments: experts first, then copies.
    fn set(&self, copy: usize) -> (usize, usize) {
        (copy % self.c.sets(), copy / self.c.sets())
    }
}

impl Subject for WithKernel<'_> {
    fn kernel(&self) -> Key {
        Key { op: self.kernel, format: Some(self.c.case.format) }
    }

    fn fixed(&self) -> Vec<(&'static str, u32)> {
        let (case, features) = (&self.c.case, &self.c.features);
        let variant = case.variant(features).filter(|v| v.kernel == self.kernel);
        let mut all = variant.map_or(Vec::new(), |v| v.constants.to_vec());
        all.extend([("BIAS", 0), ("MOE", u32::from(case.experts.is_some())), ("WHOLE", 1), ("TERMS", 1)]);
        all.push(("LIVE", self.c.known_rows()));
        if self.kernel == "matvec_raw" {
            let lanes = if features.wave >= 8 { 8 } else { 1 };
            all.extend([("THREADS", variants::threads(&[("THREADS", 512)], features)), ("COLS", case.cols as u32)]);
            all.extend([("LANES", lanes), ("UNITS", 1), ("NORM", 0), ("GLU", 0)]);
            return all;
        }
        if self.kernel == "matvec_f32" {
            let tokens = all.iter().find(|c| c.0 == "TOKENS").map_or(1, |c| c.1 as usize);
            let loads = case.rows * case.slots().div_ceil(tokens);
            if let Some(waves) = variants::waves_of_few_rows(loads, case.cols / 32, features) {
                all.extend([("SPLIT", waves), ("THREADS", waves * features.wave)]);
            }
        }
        if !self.is_gemm() {
            let split = all.iter().find(|c| c.0 == "SPLIT").map_or(1, |c| c.1);
            let units = variants::units_in_flight(case.cols / 32, features.wave * split);
            let threads = variants::threads(&all, features);
            all.extend([("THREADS", threads), ("UNITS", units)]);
            if self.kernel == "matvec" && case.tokens == 1 && case.experts.is_none() {
                let shape = (case.rows, case.cols / 32);
                let shared = variants::waves_of_long_rows(case.format, shape, true, threads, features.wave);
                all.extend(shared.into_iter().flat_map(|(split, units)| [("SPLIT", split), ("UNITS", units)]));
            }
        }
        all
    }

    fn grid(&self, c: &Constants) -> Result<[u32; 3], String> {
        let case = &self.c.case;
        let (rows, slots) = (case.rows as u32, case.slots() as u32);
        let [threads, wave] = ["THREADS", "WAVE"].map(|n| c.get(n));
        if threads == 0 || threads % wave != 0 {
            return Err(format!("THREADS is no multiple of the wave, {wave}"));
        }
        if !self.is_gemm() {
            let [split, rows_of, repeat, tokens] = ["SPLIT", "ROWS", "REPEAT", "TOKENS"].map(|n| c.get(n));
            if split == 0 || (threads / wave) % split != 0 || rows_of * tokens == 0 || rows_of * tokens > 16 {
                return Err("SPLIT must divide the waves, ROWS * TOKENS is at most 16".into());
            }
            if self.kernel == "matvec_raw" && (slots > 1 || case.experts.is_some()) {
                return Err("matvec_raw is for one token and one matrix".into());
            }
            let span = (threads / wave / split * rows_of * repeat).max(1);
            return Ok([rows.div_ceil(span), slots.div_ceil(tokens), 1]);
        }
        let (bm, bn) = (c.get("BM"), if self.kernel == "gemm_coop" { 128 } else { c.get("BN") });
        let halves = self.kernel.starts_with("gemm_coop");
        if !HEIGHTS.contains(&bm) || bn == 0 {
            return Err(format!("BM is one of {HEIGHTS:?}"));
        }
        if self.kernel == "gemm_coop" {
            // A wave has at least 16 rows of x.
            if !(threads == 256 || threads == 512) || bm < 32 || 8 * bm < threads {
                return Err("THREADS is 256 or 512 and BM at least 32 and THREADS / 8".into());
            }
        } else if self.kernel == "gemm_coop_naive" {
            if bm != 16 || threads % 32 != 0 || 2 * bn != threads {
                return Err("BM is 16, THREADS whole waves of 32, BN half as many".into());
            }
        } else if self.kernel == "gemm_weight_stage" {
            if bm != threads || bn > 16 || bn * c.get("BU") > 4 * threads {
                return Err("BM = THREADS, BN is at most 16, BN * BU at most 4 THREADS".into());
            }
        } else if self.kernel == "gemm_coop2" {
            // Each thread brings in up to four units of w and eight runs of x.
            let fits = threads.is_power_of_two() && bn * 2 <= 4 * threads && bm <= threads && bm.is_multiple_of(16);
            let [stage, double] = ["STAGE", "DOUBLE"].map(|n| c.get(n));
            if !fits || !(bn == 64 || bn == 128) || stage > 1 || !(1..=2).contains(&double) {
                return Err("BN is 64 or 128, BM and BN / 2 at most THREADS, STAGE 0 or 1, DOUBLE 1 or 2".into());
            }
        } else {
            let [tm, tn, bu] = ["TM", "TN", "BU"].map(|n| c.get(n));
            let fits = tm * tn > 0 && tm * tn <= 16 && threads == (bm / tm) * (bn / tn);
            if !fits || (bm + bn) * bu > 4 * threads {
                return Err("THREADS = BM / TM * BN / TN, TM * TN <= 16, (BM + BN) * BU <= 4 THREADS".into());
            }
        }
        let more = case.experts.map_or(0, |e| e.0 as u32);
        let (across, tiles) = (rows.div_ceil(bn), slots.div_ceil(bm) + more);
        Ok(if halves { [tiles, across, 1] } else { [across, tiles, 1] })
    }

    fn copies(&self) -> usize {
        self.c.weights.copies() * self.c.sets()
    }

    fn arguments(&self, c: &Constants, copy: usize) -> anyhow::Result<Vec<(&'static str, Arg)>> {
        let (set, copy) = self.set(copy);
        let it = self.c;
        let nothing = Arg::from(&it.nothing);
        let pointer = |m: Option<&Memory>| m.map_or(nothing, Arg::from);
        let tiles = it.tiles.iter().find(|t| t.0 == c.get("BM")).and_then(|t| t.1.get(set));
        let half = it.acts.half.as_ref();
        Ok(vec![
            ("w", it.weights.weight(copy)),
            ("wu", it.weights.weight(copy)),
            ("other", nothing),
            ("gain", nothing),
            ("sum", nothing),
            ("inverse", Arg::F32(0.0)),
            ("eps", Arg::F32(0.0)),
            ("x", (&it.acts.x).into()),
            ("xq", (&it.acts.xq).into()),
            ("xd", (&it.acts.xd).into()),
            ("xs", (&it.acts.xs).into()),
            ("xh", pointer(half.map(|h| &h.0))),
            ("xscale", pointer(half.map(|h| &h.1))),
            ("wscale", pointer(it.weights.scales())),
            ("bias", nothing),
            ("y", (&it.y).into()),
            ("live", (&it.live).into()),
            ("ids", pointer(it.id_memory.get(set))),
            ("order", pointer(tiles.map(|t| &t.0))),
            ("tiles", pointer(tiles.map(|t| &t.1))),
            ("rows", Arg::U32(it.case.rows as u32)),
            ("units", Arg::U32((it.case.cols / 32) as u32)),
            ("cols", Arg::U32(it.case.cols as u32)),
            ("div", Arg::U32(it.case.div() as u32)),
            ("bias_stride", Arg::U32(it.case.rows as u32)),
        ])
    }

    fn bytes(&self) -> u64 {
        self.c.weight_bytes()
    }

    fn working_set(&self) -> u64 {
        self.c.weights.copies() as u64 * self.c.weights.layout.bytes
    }

    fn operations(&self) -> f64 {
        2.0 * (self.c.case.slots() * self.c.case.rows) as f64 * self.c.case.cols as f64
    }

    fn output(&self) -> Option<&Memory> {
        Some(&self.c.y)
    }

    fn check(&self, gpu: &Machine, _: &Constants) -> anyhow::Result<Check> {
        let it = self.c;
        let Case { rows, cols, .. } = it.case;
        let y = gpu.read(&it.y)?;
        let x = if self.reads_floats() { &it.acts.floats } else { &it.acts.quantized };
        // Accumulation in f32; inputs as halves for matrix units.
        let part = if self.kernel.starts_with("gemm_coop") { 2f64.powi(-10) } else { 2f64.powi(-18) };
        let mut check = Check::default();
        let slots = it.case.slots();
        let some = |n: usize, of: usize| (0..n).map(move |i| i * (of - 1) / (n - 1).max(1));
        for row in some(17, rows) {
            for slot in some(5, slots) {
                let expert = it.ids.first().map_or(0, |ids| ids[slot] as usize);
                let w = it.weights.matrix.row(expert * rows + row);
                let x = &x[slot / it.case.div() * cols..][..cols];
                let products = || w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
                let largest = w.iter().fold(0f64, |m, w| m.max(f64::from(w.abs())));
                let tolerance = part * largest * x.iter().map(|x| f64::from(x.abs())).sum::<f64>();
                let at = 4 * (slot * rows + row);
                let is = f32::from_le_bytes([y[at], y[at + 1], y[at + 2], y[at + 3]]);
                check.add(f64::from(is), products().sum(), tolerance);
            }
        }
        Ok(check)
    }

    fn axes(&self) -> Vec<Vec<Choice>> {
        let axis =
            |name: &'static str, values: &[u32]| values.iter().map(|v| vec![(name, *v)]).collect::<Vec<Choice>>();
        let tile = |(threads, bm, bn, tm, tn): (u32, u32, u32, u32, u32)| {
            vec![("THREADS", threads), ("BM", bm), ("BN", bn), ("TM", tm), ("TN", tn)]
        };
        let tiles = [
            (64, 16, 32, 2, 4),
            (64, 32, 32, 4, 4),
            (128, 32, 64, 4, 4),
            (128, 64, 32, 4, 4),
            (256, 64, 64, 4, 4),
            (256, 32, 128, 4, 4),
            (512, 64, 128, 4, 4),
            (512, 128, 64, 4, 4),
        ];
        match self.kernel {
            "gemm_coop" => vec![axis("BM", &[32, 64, 128]), axis("THREADS", &[256, 512])],
            "gemm_coop2" => {
                let memory = |(stage, double): (u32, u32)| vec![("STAGE", stage), ("DOUBLE", double)];
                let memories = [(0, 2), (0, 1), (1, 1)].map(memory).to_vec();
                vec![memories, axis("BM", &[64, 128]), axis("BN", &[64, 128]), axis("THREADS", &[128, 256, 512])]
            }
            "gemm_coop_naive" => vec![[64, 128, 256].map(|n| vec![("THREADS", n), ("BN", n / 2)]).to_vec()],
            "gemm_weight_stage" => vec![axis("BU", &[1, 2, 4, 8])],
            "gemm_f32" => vec![tiles.map(tile).to_vec()],
            k if k.starts_with("gemm") => vec![tiles.map(tile).to_vec(), axis("BU", &[1, 2, 4])],
            _ => {
                let mut all =
                    vec![axis("ROWS", &[1, 2, 4]), axis("UNITS", &[1, 2, 4]), axis("THREADS", &[64, 128, 256, 512])];
                if self.kernel == "matvec" {
                    all.push(axis("SPLIT", &[1, 2, 4]));
                }
                let table = hanzo_kernels::format_file(self.c.case.format).is_some_and(|f| f.table.is_some());
                if table {
                    all.push(axis("REPEAT", &[1, 2, 4]));
                }
                if self.c.case.tokens > 1 && self.c.case.experts.is_none() {
                    all.push(axis("TOKENS", &[1, 2, 4, 8]));
                }
                all
            }
        }
    }
}

/// Rows of activations, as floats and quantized by the int8 rule.
fn activations(gpu: &Machine, rows: usize, cols: usize) -> anyhow::Result<Activations> {
    let mut noise = Noise(99);
    let floats: Vec<f32> = (0..rows * cols).map(|_| noise.normal()).collect();
    let (mut quantized, mut codes) = (Vec::with_capacity(floats.len()), Vec::with_capacity(floats.len()));
    let (mut scales, mut sums) = (Vec::new(), Vec::new());
    for group in floats.as_chunks::<32>().0 {
        let top = group.iter().fold(0f32, |m, x| m.max(x.abs()));
        let (d, inverse) = if top > 0.0 { (top / 127.0, 127.0 / top) } else { (0.0, 0.0) };
        let mut half = [0i16; 2];
        for (i, x) in group.iter().enumerate() {
            let code = (x * inverse).round_ties_even() as i8;
            half[i / 16] += i16::from(code);
            codes.push(code as u8);
            quantized.push(f32::from(code) * d);
        }
        scales.extend(d.to_le_bytes());
        sums.extend(half.iter().flat_map(|s| s.to_le_bytes()));
    }
    let bytes: Vec<u8> = floats.iter().flat_map(|x| x.to_le_bytes()).collect();
    Ok(Activations {
        x: gpu.upload(&bytes)?,
        xq: gpu.upload(&codes)?,
        xd: gpu.upload(&scales)?,
        xs: gpu.upload(&sums)?,
        floats,
        quantized,
        half: None,
    })
}

/// Slots by expert, and the tiles that cover them: how many, then expert, first slot and count of each.
fn sort(ids: &[u32], experts: usize, height: u32) -> (Vec<u32>, Vec<u32>) {
    let mut order: Vec<u32> = (0..ids.len() as u32).collect();
    order.sort_by_key(|s| ids[*s as usize]);
    let mut tiles = vec![0];
    let mut first = 0u32;
    for expert in 0..experts as u32 {
        let end = first + ids.iter().filter(|e| **e == expert).count() as u32;
        while first < end {
            let count = (end - first).min(height);
            tiles.extend([expert, first, count]);
            tiles[0] += 1;
            first += count;
        }
    }
    // The grid covers the most tiles there can be; the kernel reads only what is there.
    tiles.resize(1 + 3 * (ids.len() / height as usize + experts + 1), 0);
    (order, tiles)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tokens_experts_are_distinct_and_single_tokens_go_through_all_of_them() {
        let case = Case { format: Format::Q4_0, rows: 32, cols: 64, tokens: 1, experts: Some((12, 4)) };
        let mut seen: Vec<u32> = (0..3).flat_map(|i| case.ids(i)).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..12).collect::<Vec<u32>>());
        let many = Case { tokens: 20, ..case };
        for token in many.ids(0).chunks(4) {
            let distinct: std::collections::BTreeSet<_> = token.iter().collect();
            assert!(distinct.len() == 4 && token.iter().all(|e| *e < 12), "{token:?}");
        }
        assert_eq!((case.div(), Case { rows: 128, ..case }.div()), (4, 1));
    }

    #[test]
    fn tiles_cover_every_slot_once_with_one_expert_each() {
        let ids = [2, 0, 2, 2, 0, 5, 2, 2];
        let (order, tiles) = sort(&ids, 6, 2);
        assert_eq!(order, [1, 4, 0, 2, 3, 6, 7, 5]);
        assert_eq!(tiles[..16], [5, 0, 0, 2, 2, 2, 2, 2, 4, 2, 2, 6, 1, 5, 7, 1]);
    }
}
