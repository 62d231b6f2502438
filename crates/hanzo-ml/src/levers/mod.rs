//! Levers: named rewrites of the Plan and named kernel variants, each with the reason it should help and the oracle that
//! proves it harmless.
//!
//! The registry [`LEVERS`] is the only list: `hanzo levers`, A/B runs, the gate and the docs are generated from it. A
//! [`LeverSet`] is a value passed to compilation, never a global. All levers off is the plain Plan, the meaning.

mod attention;
mod linear;
mod norm;
mod route;

use crate::error::{Error, Result};
use crate::plan::Plan;

/// What binds when a lever should surface, that is, make the end-to-end rate go up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Regime {
    /// Weight bytes over memory bandwidth.
    BandwidthDecode,
    /// Multiply-adds over the arithmetic peak.
    ComputePrefill,
    /// Per-op cost outside the op: launches on a GPU, barriers between threads on a CPU.
    LaunchDecode,
    /// The summed time of small ops.
    BusyDecode,
}

impl Regime {
    /// The regime's name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Regime::BandwidthDecode => "bandwidth-roofline decode",
            Regime::ComputePrefill => "compute-bound prefill",
            Regime::LaunchDecode => "launch-bound decode",
            Regime::BusyDecode => "busy-bound decode",
        }
    }
}

/// What a lever does.
#[derive(Clone, Copy)]
pub enum LeverKind {
    /// Rewrites a Plan into an equivalent one.
    Rewrite(fn(&mut Plan)),
    /// Selects a kernel or execution variant inside a backend.
    Variant,
}

/// One lever.
#[derive(Clone, Copy)]
pub struct Lever {
    /// Name in the registry, the environment (`HANZO_<ID>`) and reports.
    pub id: &'static str,
    /// Which resource it removes work from, in one line.
    pub reason: &'static str,
    /// Where it should surface.
    pub regimes: &'static [Regime],
    /// Backends that implement it.
    pub backends: &'static [&'static str],
    /// The oracle that gates it.
    pub oracle: &'static str,
    /// On unless told otherwise.
    pub default_on: bool,
    /// Changes how weights lie in memory, so that both arms of an A/B must load.
    pub changes_layout: bool,
    /// What it does.
    pub kind: LeverKind,
}

/// Every lever, rewrites in the order they are applied.
pub const LEVERS: &[Lever] = &[
    Lever {
        id: "add_rms_norm",
        reason: "residual add and norm in one pass: one barrier and one read of the residual less",
        regimes: &[Regime::LaunchDecode, Regime::BusyDecode],
        backends: &["cpu"],
        oracle: "add_rmsnorm_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Rewrite(norm::add_rms_norm),
    },
    Lever {
        id: "qk_norm_rope",
        reason: "q and k head norms and rotation in one pass: up to two barriers and the intermediate rows less",
        regimes: &[Regime::LaunchDecode, Regime::BusyDecode],
        backends: &["cpu", "vulkan"],
        oracle: "qk_rms_norm_rope_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Rewrite(attention::qk_norm_rope),
    },
    Lever {
        id: "kv_store",
        reason: "keys and values go to the cache from the op that makes them: one barrier and one pass over k less",
        regimes: &[Regime::LaunchDecode, Regime::BusyDecode],
        backends: &["cpu", "vulkan"],
        oracle: "qk_rms_norm_rope_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Rewrite(attention::kv_store),
    },
    Lever {
        id: "qkv",
        reason: "q, k and v projections share one activation quantization",
        regimes: &[Regime::BusyDecode],
        backends: &["cpu"],
        oracle: "linear_group_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Rewrite(linear::qkv),
    },
    Lever {
        id: "linear_pair",
        reason: "gate and up projections share one activation quantization",
        regimes: &[Regime::BusyDecode],
        backends: &["cpu"],
        oracle: "linear_group_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Rewrite(linear::linear_pair),
    },
    Lever {
        id: "moe_route",
        reason: "scores, selection and normalisation in one pass over the logits: two barriers less a layer",
        regimes: &[Regime::LaunchDecode, Regime::BusyDecode],
        backends: &["cpu"],
        oracle: "moe_route_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Rewrite(route::moe_route),
    },
    Lever {
        id: "moe_linear_pair",
        reason: "an expert's gate and up share one activation quantization and one gather",
        regimes: &[Regime::BusyDecode],
        backends: &["cpu"],
        oracle: "moe_linear_pair_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Rewrite(linear::moe_linear_pair),
    },
    Lever {
        id: "glu_matvec",
        reason: "gate, up and their glu in one kernel at few tokens: two launches and a barrier less a layer",
        regimes: &[Regime::LaunchDecode, Regime::BusyDecode],
        backends: &["vulkan"],
        oracle: "feed_forward_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Variant,
    },
    Lever {
        id: "moe_down",
        reason: "the experts' last matrix sums a token's slots itself at few tokens: one launch and one barrier less a layer",
        regimes: &[Regime::LaunchDecode, Regime::BusyDecode],
        backends: &["vulkan"],
        oracle: "feed_forward_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Variant,
    },
    Lever {
        id: "quantize_fold",
        reason: "at up to four tokens each thread quantizes the activations it needs: one barrier less a contraction",
        regimes: &[Regime::LaunchDecode],
        backends: &["cpu"],
        oracle: "qmatvec_unified_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Variant,
    },
    Lever {
        id: "bf16_activations",
        reason: "activations of BF16 weights are rounded to bf16, whose products come in pairs: twice the multiply-adds an instruction (CPUs with AVX512_BF16; not with --exact, not in the output head)",
        regimes: &[Regime::ComputePrefill],
        backends: &["cpu"],
        oracle: "bf16_activations_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Variant,
    },
    Lever {
        id: "coop2",
        reason: "tiles of x and w are matrices of a whole workgroup, which the driver cuts into waves: fewer reads of workgroup memory a product",
        regimes: &[Regime::ComputePrefill],
        backends: &["vulkan"],
        oracle: "qgemm_unified_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Variant,
    },
    Lever {
        id: "attention_quantize",
        reason: "attention quantizes its rows for the output projection: one launch (on a GPU its last one does it) or barrier less a layer",
        regimes: &[Regime::LaunchDecode, Regime::ComputePrefill],
        backends: &["cpu", "vulkan"],
        oracle: "plan_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Variant,
    },
    Lever {
        id: "attention_one_pass",
        reason: "the last workgroup of a split attention sums the splits up: one launch and one barrier less a layer",
        regimes: &[Regime::LaunchDecode],
        backends: &["vulkan"],
        oracle: "attention_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Variant,
    },
    Lever {
        id: "attention_prologue",
        reason: "attention of one token norms, turns and stores its own rows: one launch and one barrier less a layer",
        regimes: &[Regime::LaunchDecode],
        backends: &["vulkan"],
        oracle: "attention_prologue_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Variant,
    },
    Lever {
        id: "weight_prefetch",
        reason: "in one-token steps the next matrices' first rows are read into the cache beside stages that leave the memory idle",
        regimes: &[Regime::LaunchDecode],
        backends: &["vulkan"],
        oracle: "plan_numeric",
        default_on: false,
        changes_layout: false,
        kind: LeverKind::Variant,
    },
    Lever {
        id: "matvec_split",
        reason: "two or four waves share a row of a matrix that runs alone and has fewer rows than a device has waves: the longest wave binds there",
        regimes: &[Regime::LaunchDecode],
        backends: &["vulkan"],
        oracle: "qmatvec_unified_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Variant,
    },
    Lever {
        id: "norm_in_matvec",
        reason: "in one-token steps each workgroup of a mat-vec adds, norms and quantizes the row itself: two launches and two barriers less a layer, and that work in every workgroup",
        regimes: &[Regime::LaunchDecode],
        backends: &["vulkan"],
        oracle: "normed_linear_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Variant,
    },
    Lever {
        id: "quantize_in_matvec",
        reason: "a dead end: in one-token steps each workgroup of a mat-vec quantizes the row itself; what makes the row has that for free",
        regimes: &[Regime::LaunchDecode],
        backends: &["vulkan"],
        oracle: "qmatvec_unified_numeric",
        default_on: false,
        changes_layout: false,
        kind: LeverKind::Variant,
    },
    Lever {
        id: "matvec_group",
        reason: "in one-token steps matrices of one format over one x share a launch: q, k and v take one or two instead of three",
        regimes: &[Regime::LaunchDecode],
        backends: &["vulkan"],
        oracle: "linear_group_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Variant,
    },
    Lever {
        id: "gemm_weight_stage",
        reason: "a dead end: prefill's integer GEMM stages only w, a thread reads its row of x itself; x comes again for every 16 rows of w",
        regimes: &[Regime::ComputePrefill],
        backends: &["vulkan"],
        oracle: "qgemm_unified_numeric",
        default_on: false,
        changes_layout: false,
        kind: LeverKind::Variant,
    },
    Lever {
        id: "gemm_coop_naive",
        reason: "a dead end: a wave of cooperative matrices decodes w for 16 rows of x and 16 of w and shares nothing",
        regimes: &[Regime::ComputePrefill],
        backends: &["vulkan"],
        oracle: "qgemm_unified_numeric",
        default_on: false,
        changes_layout: false,
        kind: LeverKind::Variant,
    },
    Lever {
        id: "moe_tile_32",
        reason: "a dead end: experts' tiles have 32 rows whatever the tokens, so that w is decoded up to four times as often",
        regimes: &[Regime::ComputePrefill],
        backends: &["vulkan"],
        oracle: "moe_qmmq_numeric",
        default_on: false,
        changes_layout: false,
        kind: LeverKind::Variant,
    },
    Lever {
        id: "norm_quantize",
        reason: "a norm writes its row quantized for the contractions that read it: one launch or barrier and one pass less",
        regimes: &[Regime::LaunchDecode, Regime::ComputePrefill],
        backends: &["cpu", "vulkan"],
        oracle: "plan_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Variant,
    },
    Lever {
        id: "matvec_norm",
        reason: "the last workgroup of a one-token mat-vec adds, norms and quantizes what it made: one launch and one barrier less",
        regimes: &[Regime::LaunchDecode],
        backends: &["vulkan"],
        oracle: "matvec_norm_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Variant,
    },
    Lever {
        id: "router_select",
        reason: "the last workgroup of a one-token router selects the experts: one launch and one barrier less a layer",
        regimes: &[Regime::LaunchDecode],
        backends: &["vulkan"],
        oracle: "router_select_numeric",
        default_on: false,
        changes_layout: false,
        kind: LeverKind::Variant,
    },
    Lever {
        id: "glu_routed",
        reason: "in one-token steps each workgroup of the experts' gate and up selects its expert itself: one launch and one barrier less a layer",
        regimes: &[Regime::LaunchDecode],
        backends: &["vulkan"],
        oracle: "glu_routed_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Variant,
    },
    Lever {
        id: "glu_quantize",
        reason: "a gated unit writes its row quantized for the contraction that reads it: one launch or barrier and one pass less",
        regimes: &[Regime::LaunchDecode, Regime::ComputePrefill],
        backends: &["cpu", "vulkan"],
        oracle: "plan_numeric",
        default_on: true,
        changes_layout: false,
        kind: LeverKind::Variant,
    },
];

/// The index of a lever in the registry.
pub fn find(id: &str) -> Result<usize> {
    LEVERS.iter().position(|l| l.id.eq_ignore_ascii_case(id)).ok_or_else(|| Error::Setting {
        name: id.to_string(),
        what: format!("no such lever; there are {}", LEVERS.iter().map(|l| l.id).collect::<Vec<_>>().join(", ")),
    })
}

/// Which levers are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LeverSet(u64);

impl Default for LeverSet {
    /// Every lever at its default.
    fn default() -> Self {
        let mut s = LeverSet(0);
        for (i, l) in LEVERS.iter().enumerate() {
            s = s.set(i, l.default_on);
        }
        s
    }
}

impl LeverSet {
    /// The plain Plan.
    pub const NONE: LeverSet = LeverSet(0);

    /// Every lever on, dead ends included.
    pub fn all() -> LeverSet {
        LeverSet((1 << LEVERS.len()) - 1)
    }

    /// With lever `i` switched.
    #[must_use]
    pub fn set(self, i: usize, on: bool) -> LeverSet {
        if on { LeverSet(self.0 | 1 << i) } else { LeverSet(self.0 & !(1 << i)) }
    }

    /// Is lever `i` on?
    pub fn has(self, i: usize) -> bool {
        self.0 >> i & 1 == 1
    }

    /// The variants of other devices at their defaults: a comparison on `backend` (`cpu`, `vulkan:0`, or several joined by
    /// `+`) switches its own only. Rewrites are everybody's, as the op set is.
    #[must_use]
    pub fn within(self, backend: &str) -> LeverSet {
        let has = |name: &&str| backend.split('+').any(|b| b.split(':').next() == Some(*name));
        let own = |l: &Lever| matches!(l.kind, LeverKind::Rewrite(_)) || l.backends.iter().any(has);
        LEVERS.iter().enumerate().fold(self, |s, (i, l)| if own(l) { s } else { s.set(i, l.default_on) })
    }

    /// Is the lever of this id on? An unknown id is off.
    pub fn on(self, id: &str) -> bool {
        LEVERS.iter().position(|l| l.id == id).is_some_and(|i| self.has(i))
    }

    /// The sets the gate runs: none, all, the default, each off in turn, each that is off by default on beside the default,
    /// and `pairs` pseudo-random pairs alone.
    pub fn gate_sets(pairs: usize) -> Vec<(String, LeverSet)> {
        let mut sets = vec![("none".to_string(), LeverSet::NONE), ("all".to_string(), LeverSet::all())];
        if LeverSet::default() != LeverSet::all() {
            sets.push(("default".to_string(), LeverSet::default()));
        }
        for (i, l) in LEVERS.iter().enumerate() {
            sets.push((format!("all but {}", l.id), LeverSet::all().set(i, false)));
            let default = LeverSet::default();
            // What is off by default may stand in the way of what is on: the same beside the default.
            match l.default_on {
                false => sets.push((format!("default and {}", l.id), default.set(i, true))),
                true if default != LeverSet::all() => {
                    sets.push((format!("default but {}", l.id), default.set(i, false)));
                }
                true => {}
            }
        }
        let pairs = sets.len() + pairs;
        let mut x = 0x9e37_79b9u32;
        let mut next = || {
            // xorshift32 (Marsaglia 2003): any fixed spread of pairs will do.
            x ^= x << 13;
            x ^= x >> 17;
            x ^= x << 5;
            x as usize % LEVERS.len()
        };
        while sets.len() < pairs && LEVERS.len() > 1 {
            let (a, b) = (next(), next());
            if a != b {
                let s = LeverSet::NONE.set(a, true).set(b, true);
                sets.push((format!("only {} and {}", LEVERS[a].id, LEVERS[b].id), s));
            }
        }
        sets
    }
}

/// Applies every rewrite that is on, in the registry's order.
pub fn rewrite(plan: &Plan, levers: LeverSet) -> Plan {
    let mut p = plan.clone();
    for (i, l) in LEVERS.iter().enumerate() {
        if let (true, LeverKind::Rewrite(f)) = (levers.has(i), l.kind) {
            f(&mut p);
        }
    }
    p
}

/// Removes the ops of the given indices and puts `new` at index `at` of the old list.
fn replace(plan: &mut Plan, remove: &[usize], at: usize, new: crate::plan::Op) {
    let head_shift = plan.head.map(|h| h - remove.iter().filter(|i| **i < h).count() + (at < h) as usize);
    let old = std::mem::take(&mut plan.ops);
    let mut new = Some(new);
    for (i, op) in old.into_iter().enumerate() {
        if i == at {
            plan.ops.extend(new.take());
        }
        if !remove.contains(&i) {
            plan.ops.push(op);
        }
    }
    plan.head = head_shift;
}

#[cfg(test)]
pub(crate) mod tests;
