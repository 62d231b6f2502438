//! The gate's teeth: faults planted in what a backend gets, while the reference keeps the truth. Each must be noticed.
//!
//! A fault in a weight is made without asking the format ([`super::probe`]). If it happens to change nothing that an
//! exact computation would show (a dropped block of zeros, two equal scales), another place is drawn.

use super::case::{Case, Measured, Reference, Rounding, RunOptions, Tensors};
use super::gate::{Event, GateOptions, Part, Progress};
use super::oracles::{Context, ORACLES, Routing, group_case, head_case, linear_case, moe_case, weight_formats};
use super::probe::{Layout, Role};
use super::random::{Draw, Rng, weights};
use crate::backend::{Backend, Precision, WeightSource};
use crate::error::Result;
use crate::levers::LeverSet;
use crate::plan::Op;
use hanzo_gguf::{Format, formats};

/// What became of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The gate noticed it.
    Caught,
    /// It went unseen, or could not be planted.
    Survived,
    /// The backend has no kernel for the op it was planted in.
    NoKernel,
}

/// A fault and its fate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planted {
    /// The fault.
    pub fault: String,
    /// The op it was planted in.
    pub op: String,
    /// The format.
    pub format: String,
    /// What became of it.
    pub fate: Fate,
    /// How it was noticed, or why it was not.
    pub how: String,
}

/// Faults of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WeightFault {
    DroppedBlock,
    SwappedNibbles,
    NeighboursScale,
    FlippedSign,
    TailRow,
    TailBlock,
    ZeroedMinimum,
}

impl WeightFault {
    const ALL: [WeightFault; 7] = [
        WeightFault::DroppedBlock,
        WeightFault::SwappedNibbles,
        WeightFault::NeighboursScale,
        WeightFault::FlippedSign,
        WeightFault::TailRow,
        WeightFault::TailBlock,
        WeightFault::ZeroedMinimum,
    ];

    fn name(self) -> &'static str {
        match self {
            WeightFault::DroppedBlock => "dropped block",
            WeightFault::SwappedNibbles => "swapped nibbles",
            WeightFault::NeighboursScale => "neighbour's scale",
            WeightFault::FlippedSign => "flipped sign",
            WeightFault::TailRow => "tail row off by one",
            WeightFault::TailBlock => "tail block off by one",
            WeightFault::ZeroedMinimum => "zeroed minimum",
        }
    }

    /// Does a format have what the fault breaks?
    fn applies(self, format: Format) -> bool {
        match self {
            WeightFault::NeighboursScale => format.is_block(),
            WeightFault::ZeroedMinimum => format.is_block() && Layout::of(format).has_minimum(),
            _ => true,
        }
    }
}

/// Bytes that play the part of a block: a real one, or 32 plain numbers.
fn block_bytes(format: Format) -> usize {
    if format.is_block() { format.block_bytes() } else { 32 * format.block_bytes() }
}

fn decode(format: Format, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; bytes.len() / format.block_bytes() * format.block_len()];
    formats::to_float(format, bytes, &mut out);
    out
}

/// Plants a fault in rows of `row` bytes each, somewhere; false if there is no such place.
fn plant(fault: WeightFault, format: Format, bytes: &mut [u8], row: usize, rng: &mut Rng) -> bool {
    let size = block_bytes(format);
    let (rows, blocks) = (bytes.len() / row, row / size);
    if blocks < 2 || rows < 2 {
        return false;
    }
    let (r, b) = (rng.below(rows), rng.below(blocks));
    let at = r * row + b * size;
    match fault {
        WeightFault::DroppedBlock => bytes[at..at + size].fill(0),
        WeightFault::SwappedNibbles => {
            let codes: Vec<usize> =
                if format.is_block() { Layout::of(format).codes().collect() } else { (0..size).collect() };
            let byte = &mut bytes[at + codes[rng.below(codes.len())]];
            *byte = byte.rotate_left(4);
        }
        WeightFault::NeighboursScale => {
            let first = r * row + (b.min(blocks - 2)) * size;
            for bit in Layout::of(format).bits(Role::Scale) {
                let (i, j, mask) = (first + bit / 8, first + size + bit / 8, 1u8 << (bit % 8));
                let differ = (bytes[i] ^ bytes[j]) & mask;
                bytes[i] ^= differ;
                bytes[j] ^= differ;
            }
        }
        WeightFault::FlippedSign => return flip_sign(format, &mut bytes[at..at + size], rng),
        WeightFault::TailRow => {
            let last = (rows - 1) * row;
            bytes.copy_within(last - row..last, last);
        }
        WeightFault::TailBlock => {
            let last = r * row + (blocks - 1) * size;
            bytes.copy_within(last - size..last, last);
        }
        WeightFault::ZeroedMinimum => {
            for bit in Layout::of(format).bits(Role::Minimum) {
                bytes[at + bit / 8] &= !(1 << (bit % 8));
            }
        }
    }
    true
}

/// Flips a bit that negates what it changes; in a format (or block) that has none, the scale's bit that changes most:
/// the sign of the block's scale, or the nearest thing to it.
fn flip_sign(format: Format, block: &mut [u8], rng: &mut Rng) -> bool {
    let before = decode(format, block);
    let bits: Vec<usize> =
        if format.is_block() { Layout::of(format).bits(Role::Code).collect() } else { (0..block.len() * 8).collect() };
    let mut flip = |bit: usize| {
        block[bit / 8] ^= 1 << (bit % 8);
        decode(format, block)
    };
    let start = rng.below(bits.len());
    for i in 0..bits.len() {
        let bit = bits[(start + i) % bits.len()];
        let after = flip(bit);
        let changed = || before.iter().zip(&after).filter(|(b, a)| b.to_bits() != a.to_bits());
        if changed().count() > 0 && changed().all(|(b, a)| *a == -*b && *b != 0.0) {
            return true;
        }
        flip(bit);
    }
    let mut best = (0.0, None);
    for bit in Layout::of(format).bits(Role::Scale) {
        let after = flip(bit);
        flip(bit);
        let moved: f64 = before.iter().zip(&after).map(|(b, a)| f64::from((b - a).abs())).sum();
        if moved.is_finite() && after.iter().all(|x| x.abs() < 1e4) && moved > best.0 {
            best = (moved, Some(bit));
        }
    }
    match best.1 {
        Some(bit) => {
            flip(bit);
            true
        }
        None => false,
    }
}

/// Places tried for a fault before it counts as invisible.
const DRAWS: usize = 40;

/// Shapes in which weight faults are planted: every contraction, for one row of activations and for several.
fn shapes(format: Format, rng: &mut Rng) -> Vec<(&'static str, Case)> {
    let cols = 2 * format.block_len().max(32);
    let mut linear = |tokens: usize| {
        let bytes = weights(format, 7, cols, Draw::Usual, rng);
        linear_case("linear", format, (7, cols, tokens), bytes, (1.0, false), rng)
    };
    let (matvec, gemm) = (linear(1), linear(9));
    vec![
        ("matvec", matvec),
        ("gemm", gemm),
        ("output head", head_case(format, (7, cols), rng)),
        ("linear_group matvec", group_case(&[format, format, format], (7, cols, 1), false, rng)),
        ("linear_group gemm", group_case(&[format, format], (7, cols, 9), true, rng)),
        // All tokens to the same two experts, so that a fault in one of them is met.
        ("moe matvec", moe_case(&[format], (7, cols, 1), Routing::Same, false, rng)),
        ("moe gemm", moe_case(&[format], (7, cols, 9), Routing::Same, true, rng)),
        ("moe_linear_group matvec", moe_case(&[format, format], (7, cols, 1), Routing::Same, false, rng)),
        ("moe_linear_group gemm", moe_case(&[format, format], (7, cols, 9), Routing::Same, false, rng)),
    ]
}

/// Faults run with everything on and pinned nowhere: the path that users run.
const OPTIONS: fn() -> RunOptions = || RunOptions { levers: LeverSet::default(), deterministic: false };

/// A copy of the case whose first matrix has the fault.
fn with_weight_fault(case: &Case, fault: WeightFault, format: Format, rng: &mut Rng) -> Option<Case> {
    let w = case.plan.weights.iter().find(|w| w.cols > 1 && w.rows > 1 && w.format == format)?;
    let mut bytes = case.tensors.tensor(w).ok()?.to_vec();
    // Of experts, the last one: routing sends every token there.
    let start = (w.experts - 1) * w.expert_bytes();
    let placed = plant(fault, format, &mut bytes[start..], w.row_bytes(), rng);
    let mut given = case.clone();
    given.tensors = Tensors(case.tensors.0.clone());
    given.tensors.put(&w.tensor.clone(), bytes);
    placed.then_some(given)
}

/// The truth itself must pass, or seeing a fault means nothing.
fn fails_without(truth: &Reference<'_>, case: &Case, backend: &dyn Backend) -> Option<String> {
    let clean = truth.check(case, backend, OPTIONS()).all();
    (clean.nbad > 0 || clean.failure.is_some()).then(|| format!("fails without a fault: {clean:?}"))
}

/// What a backend makes of a fault: `given` is the case with it, `truth` the case's own meaning.
fn fate(truth: &Reference<'_>, given: &Case, backend: &dyn Backend) -> (Fate, String) {
    match truth.check(given, backend, OPTIONS()).all() {
        Measured { unsupported: Some(op), .. } => (Fate::NoKernel, op),
        Measured { failure: Some(e), .. } => (Fate::Survived, e),
        m => {
            let fate = if m.nbad > 0 { Fate::Caught } else { Fate::Survived };
            (fate, format!("{} of {} beyond the bound, worst {:.1e} x", m.nbad, m.cases, m.ratio))
        }
    }
}

/// A case in which faults are planted, with what it means, and why a backend fails it without one.
struct Ground<'c> {
    case: &'c Case,
    truth: Result<Reference<'c>>,
    rounding: Rounding,
    failing: Vec<Option<String>>,
}

impl<'c> Ground<'c> {
    fn new(case: &'c Case, backends: &[&dyn Backend]) -> Ground<'c> {
        let rounding = Rounding::of(backends.iter().copied(), case);
        let truth = Reference::with_rounding(case, rounding);
        let failing = |b: &&dyn Backend| truth.as_ref().ok().and_then(|truth| fails_without(truth, case, *b));
        let failing = backends.iter().map(failing).collect();
        Ground { case, truth, rounding, failing }
    }

    /// What each backend makes of the case with a fault.
    fn fates(&self, given: &Case, backends: &[&dyn Backend]) -> Vec<(Fate, String)> {
        let one = |(backend, failing): (&&dyn Backend, &Option<String>)| match (&self.truth, failing) {
            (Err(e), _) => (Fate::Survived, e.to_string()),
            (_, Some(why)) => (Fate::Survived, why.clone()),
            (Ok(truth), None) => fate(truth, given, *backend),
        };
        backends.iter().zip(&self.failing).map(one).collect()
    }

    /// Plants one fault until it is visible, and looks whether the gate sees it in each backend.
    fn try_weight_fault(
        &self,
        fault: WeightFault,
        format: Format,
        backends: &[&dyn Backend],
        rng: &mut Rng,
    ) -> Vec<(Fate, String)> {
        let all = |how: String| vec![(Fate::Survived, how); backends.len()];
        let truth = match &self.truth {
            Ok(t) => t,
            Err(e) => return all(e.to_string()),
        };
        for _ in 0..DRAWS {
            let Some(given) = with_weight_fault(self.case, fault, format, rng) else { continue };
            let Ok(corrupted) = Reference::with_rounding(&given, self.rounding) else { continue };
            let distance = truth.distance(&corrupted);
            if distance.is_nan() || distance <= 2.0 {
                continue;
            }
            return self.fates(&given, backends);
        }
        all(format!("{DRAWS} draws, none of which changes an exact result by twice the bound"))
    }
}

/// Faults of a step or a Plan rather than of a weight.
struct StepFault {
    name: &'static str,
    oracle: &'static str,
    /// Changes a copy of the case; false if the case has no such thing.
    plant: fn(&mut Case) -> bool,
}

/// Faults that fused and stateful ops are prone to.
const STEP_FAULTS: &[StepFault] = &[
    StepFault {
        name: "frozen position",
        oracle: "qk_rms_norm_rope_numeric",
        // The second step rotates by the first step's positions: what a captured graph does that baked them in.
        plant: |case| {
            let Some(first) = case.steps[0].positions.first().copied() else { return false };
            let Some(step) = case.steps.get_mut(1) else { return false };
            step.rope_positions = (0..step.positions.len() as u32).map(|t| first + t).collect();
            true
        },
    },
    StepFault {
        name: "stale page table",
        oracle: "attention_numeric",
        // A later step finds a page of its history replaced by one that holds nothing of it.
        plant: |case| {
            let unused = (1..case.pages.first().copied().unwrap_or(0) as u32)
                .find(|p| case.steps.iter().all(|s| !s.tables[0].pages.contains(p)));
            let Some(page) = unused else { return false };
            let Some(step) = case.steps.iter_mut().skip(1).find(|s| s.tables[0].pages.len() > 1) else { return false };
            step.tables[0].pages[0] = page;
            true
        },
    },
    StepFault {
        name: "stale page of the store",
        oracle: "attention_numeric",
        // The page that this step writes is that of another.
        plant: |case| {
            let unused = (1..case.pages.first().copied().unwrap_or(0) as u32)
                .find(|p| case.steps.iter().all(|s| !s.tables[0].pages.contains(p)));
            let (Some(page), Some(step)) = (unused, case.steps.last_mut()) else { return false };
            match step.tables[0].pages.last_mut() {
                Some(p) => *p = page,
                None => return false,
            }
            true
        },
    },
    StepFault {
        name: "wrong expert",
        oracle: "moe_qmmq_numeric",
        plant: |case| {
            // The first token's first slot goes to the expert before its own, or the one after expert 0.
            let id = case.steps[0].inputs.first_mut().and_then(|(_, ids)| ids.first_mut());
            id.map(|id| *id = if *id == 0.0 { 1.0 } else { *id - 1.0 }).is_some()
        },
    },
    StepFault {
        name: "missing softcap",
        oracle: "attention_numeric",
        plant: |case| change_attention(case, |s| s.softcap.take().is_some()),
    },
    StepFault {
        name: "window off by one",
        oracle: "attention_numeric",
        plant: |case| {
            let plain = case.steps.iter().all(|s| s.tables[0].first.iter().all(|f| *f == 0));
            plain && change_attention(case, |s| s.window.as_mut().map(|w| *w += 1).is_some())
        },
    },
    StepFault {
        name: "missing sinks",
        oracle: "attention_numeric",
        plant: |case| change_attention(case, |s| s.sinks.take().is_some()),
    },
    StepFault {
        name: "last query sees one key less",
        oracle: "attention_numeric",
        plant: |case| {
            let Some(step) = case.steps.last_mut() else { return false };
            let shifted = step.positions.iter().map(|p| p.checked_sub(1)).collect::<Option<Vec<u32>>>();
            shifted.map(|p| step.positions = p).is_some()
        },
    },
    StepFault {
        name: "norm without its weight",
        oracle: "add_rmsnorm_numeric",
        plant: |case| {
            let norm = case.plan.ops.iter_mut().find_map(|op| match op {
                Op::RmsNorm { weight, .. } => weight.take(),
                _ => None,
            });
            norm.is_some()
        },
    },
    StepFault { name: "lost state", oracle: "short_conv_numeric", plant: |case| change_slots(case) },
    StepFault { name: "lost state", oracle: "gated_delta_numeric", plant: |case| change_slots(case) },
    StepFault {
        name: "wrong output row",
        oracle: "gather_numeric",
        plant: |case| {
            let step = &mut case.steps[0];
            match step.out_rows.first_mut() {
                Some(r) if *r > 0 => *r -= 1,
                _ => return false,
            }
            true
        },
    },
    StepFault {
        name: "weights not normalised",
        oracle: "moe_route_numeric",
        plant: |case| {
            let mut changed = false;
            for op in &mut case.plan.ops {
                if let Op::RouteScores { spec, .. } | Op::RouteTopK { spec, .. } | Op::RouteNormalise { spec, .. } = op
                {
                    changed |= std::mem::replace(&mut spec.normalise, false)
                        && spec.top_k < spec.n_expert
                        && spec.score != crate::plan::RouterScore::SoftmaxSelected;
                }
            }
            changed
        },
    },
    StepFault {
        name: "one rotation too few",
        oracle: "rope_numeric",
        plant: |case| {
            let n_dims = case.plan.ops.iter_mut().find_map(|op| match op {
                Op::Rope { rope, .. } if rope.n_dims > 2 && rope.factors.is_none() => Some(&mut rope.n_dims),
                _ => None,
            });
            n_dims.map(|n| *n -= 2).is_some() && case.steps[0].positions[0] > 0
        },
    },
];

fn change_attention(case: &mut Case, f: impl FnOnce(&mut crate::plan::AttentionSpec) -> bool) -> bool {
    let spec = case.plan.ops.iter_mut().find_map(|op| match op {
        Op::Attention { spec, .. } => Some(spec),
        _ => None,
    });
    spec.is_some_and(f)
}

/// A later step gets a fresh slot instead of the one with its state.
fn change_slots(case: &mut Case) -> bool {
    let Some(step) = case.steps.get_mut(1) else { return false };
    step.state_slots[0] = 0;
    // A kernel of one tap has no state to lose.
    case.plan.states.iter().all(|s| s.elements > 0)
}

/// Plants a step fault in the first case of its oracle that has what it breaks.
fn try_step_fault(fault: &StepFault, backends: &[&dyn Backend], seed: u64) -> Vec<Planted> {
    let context = Context { seed, real: &[] };
    let mut planted = Vec::new();
    let cases = ORACLES.iter().filter(|o| o.name == fault.oracle).map(|o| o.cases);
    for cases in cases {
        cases(&context, &mut |case| {
            let mut given = case.clone();
            if !planted.is_empty() || !(fault.plant)(&mut given) {
                return;
            }
            let fates = Ground::new(&case, backends).fates(&given, backends);
            planted.extend(fates.into_iter().map(|(fate, how)| {
                let how = format!("{how} in `{}`", case.about);
                Planted { fault: fault.name.into(), op: case.op.into(), format: case.format.clone(), fate, how }
            }));
        });
    }
    if planted.is_empty() {
        let (fault, op, how) = (fault.name.into(), fault.oracle.into(), "no case has what it breaks".into());
        planted = vec![Planted { fault, op, format: "-".into(), fate: Fate::Survived, how }; backends.len()];
    }
    planted
}

/// The cases of a format, and what draws faults in them.
struct Field {
    format: Format,
    rng: Rng,
    shapes: Vec<(&'static str, Case)>,
}

/// Plants every fault in every contraction and format, and those of steps; one list a backend.
pub fn run(backends: &[&dyn Backend], options: &GateOptions, progress: Progress<'_>) -> Vec<Vec<Planted>> {
    let mut out = vec![Vec::new(); backends.len()];
    let mut fields: Vec<Field> = Vec::new();
    for format in weight_formats() {
        let mut rng = Rng::named(options.seed, &format!("mutate {format}"));
        let mut shapes = shapes(format, &mut rng);
        shapes.retain(|(op, _)| options.wants(&[op, format.name()]));
        shapes.iter_mut().for_each(|(_, case)| case.precision = Precision::Int8);
        fields.push(Field { format, rng, shapes });
    }
    for backend in backends {
        let cases = fields.iter().flat_map(|f| &f.shapes);
        backend.prepare(&cases.map(|(_, case)| case.wanted(OPTIONS())).collect::<Vec<_>>());
    }
    for Field { format, rng, shapes } in &mut fields {
        let faults: Vec<WeightFault> = WeightFault::ALL.into_iter().filter(|f| f.applies(*format)).collect();
        if shapes.is_empty() {
            continue;
        }
        let name = format!("faults in {format}");
        let part = Part::begin(&name, shapes.len() * faults.len(), progress);
        for (op, case) in shapes.iter() {
            let ground = Ground::new(case, backends);
            for fault in &faults {
                let fates = ground.try_weight_fault(*fault, *format, backends, rng);
                for (out, (fate, how)) in out.iter_mut().zip(fates) {
                    let fault = fault.name().to_string();
                    out.push(Planted { fault, op: (*op).into(), format: format.to_string(), fate, how });
                }
                progress(Event::Case);
            }
        }
        part.end(shapes.len() * faults.len() * backends.len(), 0, progress);
    }
    let faults: Vec<&StepFault> = STEP_FAULTS.iter().filter(|f| options.wants(&[f.name, f.oracle])).collect();
    let part = Part::begin("faults in steps", faults.len(), progress);
    for fault in &faults {
        out.iter_mut().zip(try_step_fault(fault, backends, options.seed)).for_each(|(out, p)| out.push(p));
        progress(Event::Case);
    }
    part.end(faults.len() * backends.len(), 0, progress);
    out
}

/// A line a format: faults caught of planted, by op; then survivors one by one.
pub(super) fn table(f: &mut std::fmt::Formatter<'_>, faults: &[Planted]) -> std::fmt::Result {
    let mut keys: Vec<(&str, &str)> = Vec::new();
    for p in faults {
        if !keys.contains(&(&p.fault, &p.format)) {
            keys.push((&p.fault, &p.format));
        }
    }
    writeln!(f, "{:<30} {:<14} {:>8} {:>8}", "fault", "format", "planted", "caught")?;
    for (fault, format) in keys {
        let these = || faults.iter().filter(|p| (p.fault.as_str(), p.format.as_str()) == (fault, format));
        let caught = these().filter(|p| p.fate == Fate::Caught).count();
        writeln!(f, "{fault:<30} {format:<14} {:>8} {caught:>8}", these().count())?;
    }
    for p in faults.iter().filter(|p| p.fate == Fate::NoKernel) {
        writeln!(f, "no kernel for {} ({})", p.op, p.fault)?;
    }
    for p in faults.iter().filter(|p| p.fate == Fate::Survived) {
        writeln!(f, "SURVIVED {} in {} of {}: {}", p.fault, p.op, p.format, p.how)?;
    }
    Ok(())
}
