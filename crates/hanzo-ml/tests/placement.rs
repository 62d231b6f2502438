//! Two CPU backends stand for two devices: every oracle must pass on them together, bit for bit as on one alone.

use hanzo_ml::backend::Backend;
use hanzo_ml::cpu::isa::IsaLevel;
use hanzo_ml::cpu::{CpuBackend, CpuOptions};
use hanzo_ml::levers::LeverSet;
use hanzo_ml::oracle::case::{Case, RunOptions, run_backend};
use hanzo_ml::oracle::gate::{self, GateOptions};
use hanzo_ml::oracle::oracles::{Context, ORACLES};
use hanzo_ml::oracle::random::Rng;
use hanzo_ml::placement::cut::cut;
use hanzo_ml::placement::place::place;
use hanzo_ml::placement::report::{Share, shares};
use hanzo_ml::placement::{Placement, Policy, SplitBackend, assign};
use hanzo_ml::plan::schedule::Schedule;
use hanzo_ml::plan::{Access, DeviceId, IdMut, Op, Plan, Sizes};
use std::collections::BTreeSet;
use std::sync::Arc;

const SEED: u64 = 1;

fn cpu(isa: IsaLevel) -> Arc<dyn Backend> {
    Arc::new(
        CpuBackend::new(CpuOptions { threads: 1, isa, ..CpuOptions::default() }).expect("an available instruction set"),
    )
}

/// A way to spread ops over two devices.
#[derive(Clone, Copy, Debug)]
enum Spread {
    /// Every other op.
    Ops,
    /// Every other layer.
    Layers,
    /// Each op by a coin.
    Random(u64),
    /// Expert matrices on the second device.
    Experts,
    /// The output head on the second device.
    Head,
    /// Everything on the second device.
    Second,
}

const SPREADS: [Spread; 7] =
    [Spread::Ops, Spread::Layers, Spread::Random(1), Spread::Random(2), Spread::Experts, Spread::Head, Spread::Second];

impl Spread {
    fn policy(self) -> Box<Policy> {
        Box::new(move |plan: &Plan| {
            let mut rng = Rng::new(if let Spread::Random(seed) = self { seed } else { 0 });
            let mut layer = 0;
            let second = |(i, op): (usize, &Op)| {
                op.accesses(&mut |a| {
                    if let Access::Weight(w) = a {
                        layer = assign::layer_of(&plan.wt(w).tensor).unwrap_or(layer);
                    }
                });
                match self {
                    Spread::Ops => i % 2 == 1,
                    Spread::Layers => layer % 2 == 1,
                    Spread::Random(_) => rng.below(2) == 1,
                    Spread::Experts => matches!(op, Op::MoeLinear { .. }),
                    Spread::Head => plan.head.is_some_and(|h| i >= h),
                    Spread::Second => true,
                }
            };
            Ok(plan.ops.iter().enumerate().map(second).map(|b| DeviceId(b.into())).collect())
        })
    }

    fn over(self, a: IsaLevel, b: IsaLevel) -> SplitBackend {
        SplitBackend::new(vec![cpu(a), cpu(b)], self.policy())
    }
}

fn each_case(mut f: impl FnMut(&str, Case)) {
    for oracle in ORACLES {
        (oracle.cases)(&Context { seed: SEED, real: &[] }, &mut |case| f(oracle.name, case));
    }
}

/// Everything a case gives and remembers, as bits: by step, outputs and pages.
type Bits = Vec<(Vec<Vec<u32>>, Vec<Vec<u8>>)>;

fn bits(case: &Case, backend: &dyn Backend, levers: LeverSet) -> Bits {
    let mut all = Vec::new();
    let options = RunOptions { levers, deterministic: false };
    run_backend(case, backend, options, &mut |_, outputs, memory| {
        let outputs = outputs.iter().map(|o| o.iter().map(|x| x.to_bits()).collect()).collect();
        all.push((outputs, memory.groups.iter().flat_map(|g| g.pages.clone()).collect()));
        Ok(())
    })
    .unwrap_or_else(|e| panic!("{} {}: {e}", case.op, case.about));
    all
}

/// The first difference.
fn difference(want: &Bits, got: &Bits) -> Option<String> {
    for (step, (w, g)) in want.iter().zip(got).enumerate() {
        if let Some(o) = (0..w.0.len()).find(|o| w.0[*o] != g.0[*o]) {
            let i = (0..w.0[o].len()).find(|i| w.0[o][*i] != g.0[o][*i]).unwrap_or(0);
            let (w, g) = (f32::from_bits(w.0[o][i]), f32::from_bits(g.0[o][i]));
            return Some(format!("step {step}, output {o}, element {i}: {g} for {w}"));
        }
        if let Some(p) = (0..w.1.len()).find(|p| w.1[*p] != g.1[*p]) {
            return Some(format!("step {step}: page {p}"));
        }
    }
    None
}

#[test]
fn every_case_split_over_two_devices_gives_the_bits_of_one() {
    let isa = IsaLevel::detect();
    let one = cpu(isa);
    let split: Vec<_> = SPREADS.iter().map(|s| (s, s.over(isa, isa))).collect();
    let (mut n, mut parted) = (0, 0);
    each_case(|oracle, case| {
        // Contractions of a single op are the same over all formats: a few are enough.
        n += 1;
        if case.plan.ops.len() < 2 && n % 17 != 0 {
            return;
        }
        for levers in [LeverSet::NONE, LeverSet::default()] {
            let want = bits(&case, one.as_ref(), levers);
            for (spread, backend) in &split {
                let difference = difference(&want, &bits(&case, backend, levers));
                assert_eq!(difference, None, "{oracle} {}: {spread:?}, {levers:?}", case.about);
                parted += 1;
            }
        }
    });
    assert!(parted > 1000, "{parted}");
}

#[test]
fn the_gate_passes_on_two_instruction_sets_at_once() {
    let other = IsaLevel::available().next().expect("portable");
    let split = SPREADS.map(|s| s.over(IsaLevel::detect(), other));
    let backends: Vec<&dyn Backend> = split.iter().map(|s| s as &dyn Backend).collect();
    let lever_sets = vec![("none".to_string(), LeverSet::NONE), ("default".to_string(), LeverSet::default())];
    for filter in ["plan_numeric", "moe_linear_pair_numeric", "attention_numeric"] {
        let options =
            GateOptions { filter: Some(filter.into()), lever_sets: lever_sets.clone(), ..GateOptions::default() };
        let reports = gate::run_all(&backends, &options, &mut |_| {}).expect("no files");
        for (spread, report) in SPREADS.iter().zip(&reports) {
            assert!(report.passed() && report.unsupported().count() == 0, "{spread:?}\n{report}");
        }
    }
}

#[test]
fn every_id_that_an_op_touches_can_be_renumbered() {
    each_case(|_, case| {
        for op in hanzo_ml::levers::rewrite(&case.plan, LeverSet::all()).ops.iter().chain(&case.plan.ops) {
            let (mut touched, mut ids) = (BTreeSet::new(), BTreeSet::new());
            op.accesses(&mut |a| {
                touched.insert(match a {
                    Access::Read(v) | Access::Write(v) => (0, v.0, 0),
                    Access::Weight(w) => (1, w.0, 0),
                    Access::CacheRead(c) | Access::CacheWrite(c) => (2, c.group.0.into(), c.layer),
                    Access::State(s, layer) => (3, s.0.into(), layer),
                });
            });
            let mut copy = op.clone();
            copy.ids_mut(&mut |id| {
                ids.insert(match id {
                    IdMut::Value(v) => (0, v.0, 0),
                    IdMut::Weight(w) => (1, w.0, 0),
                    IdMut::Cache(c) => (2, c.group.0.into(), c.layer),
                    IdMut::State(s, layer) => (3, s.0.into(), *layer),
                });
            });
            let bias = matches!(op, Op::RouteScores { .. } | Op::RouteNormalise { .. });
            assert!(if bias { ids.is_superset(&touched) } else { ids == touched }, "{op:?}");
            assert_eq!(&copy, op);
        }
    });
}

#[test]
fn a_placed_plan_holds_together_and_copies_each_value_once() {
    each_case(|_, case| {
        for spread in SPREADS {
            let devices = spread.policy()(&case.plan).expect("a spread");
            let placed = place(&case.plan, &devices).expect("a placed Plan");
            let mut copies = BTreeSet::new();
            for op in &placed.ops {
                if let Op::Copy { x, out } = op
                    && placed.val(*x).device != placed.val(*out).device
                {
                    assert!(copies.insert((*x, placed.val(*out).device)), "{} is copied twice", placed.val(*x).name);
                }
            }
            let sizes = Sizes { n_tokens: 3, n_seqs: 1, n_out: 2 };
            assert_eq!(Schedule::new(&placed, &sizes).verify(&placed), Ok(()));
            let cut = cut(placed).expect("parts");
            let ops = |plans: &mut dyn Iterator<Item = &Plan>| plans.map(|p| p.ops.len()).sum::<usize>();
            assert_eq!(ops(&mut cut.parts.iter().map(|p| &p.plan)), case.plan.ops.len());
            assert_eq!(ops(&mut cut.segments.iter().map(|s| &s.plan)), case.plan.ops.len());
        }
    });
}

#[test]
fn ops_on_two_devices_are_refused_by_the_check() {
    each_case(|_, case| {
        let Some(i) = case.plan.ops.iter().position(|op| !op.members().is_empty()) else { return };
        let mut plan = case.plan.clone();
        plan.weights[plan.ops[i].members()[0].w.0 as usize].device = DeviceId(1);
        let error = plan.check().expect_err("two devices").to_string();
        assert!(error.contains("is on device 0 but") && error.contains("on device 1"), "{error}");
    });
}

/// The small transformer of the oracles, with experts or without.
fn transformer(moe: bool) -> Case {
    let mut found = None;
    each_case(|oracle, case| {
        if oracle == "plan_numeric" && (case.format == "experts") == moe && found.is_none() {
            found = Some(case);
        }
    });
    found.expect("a transformer")
}

#[test]
fn a_cache_that_is_split_reads_writes_and_copies_whole_pages() {
    let case = transformer(false);
    let isa = IsaLevel::detect();
    let split = Spread::Layers.over(isa, isa);
    let mut cache = split.alloc(&case.plan, &[4], &[]).expect("a cache");
    let size = case.plan.groups[0].page_bytes();
    let page: Vec<u8> = (0..size).map(|i| (i % 251) as u8).collect();
    cache.write_page(0, 2, &page).expect("a page");
    cache.copy_page(0, 2, 3).expect("two pages");
    assert_eq!((cache.read_page(0, 3), cache.read_page(0, 1)), (Ok(page), Ok(vec![0; size])));
    assert_eq!((cache.pages(), cache.bytes()), (&[4][..], 4 * size));
    for bad in [cache.write_page(0, 1, &[0; 7]), cache.write_page(0, 4, &[0; 7]), cache.copy_page(1, 0, 1)] {
        assert!(bad.is_err());
    }
}

#[test]
fn the_joined_plan_of_a_split_executable_holds_together() {
    for moe in [false, true] {
        let case = transformer(moe);
        for spread in SPREADS {
            let backend = spread.over(IsaLevel::detect(), IsaLevel::detect());
            let weights = backend.load(&case.plan, &case.tensors).expect("weights");
            for n_tokens in [1, 40] {
                let bucket = Sizes { n_tokens, n_seqs: 1, n_out: 4.min(n_tokens) };
                let options = hanzo_ml::backend::CompileOptions {
                    levers: LeverSet::default(),
                    bucket,
                    precision: Default::default(),
                    deterministic: false,
                    n_ctx: 64,
                    eager: None,
                };
                let exe = backend.compile(&case.plan, &options, &weights).expect("an executable");
                let joined = exe.plan();
                joined.check().unwrap_or_else(|e| panic!("{spread:?}: {e}\n{joined}"));
                assert!(exe.barriers() > 1 && exe.arena_bytes() > 0);
            }
        }
    }
}

/// A model of `layers` layers over these devices.
fn placement(devices: &[&str]) -> Placement {
    Placement::new(devices.iter().map(|d| d.to_string()).collect())
}

fn where_is(p: &Placement, case: &Case) -> Vec<Share> {
    let devices = p.assign(&case.plan).expect("a placement");
    let names: Vec<&str> = p.devices.iter().map(String::as_str).collect();
    shares(&place(&case.plan, &devices).expect("a placed Plan"), &names)
}

#[test]
fn layers_are_counted_from_the_end_the_output_being_the_last() {
    let case = transformer(false);
    // Two layers and the output.
    let want: [(&[usize], &[usize], [bool; 2]); 4] = [
        (&[0, 1], &[], [true, false]),
        (&[0, 1], &[], [false, true]),
        (&[0], &[1], [false, true]),
        (&[], &[0, 1], [false, true]),
    ];
    for (n, (host, device, output)) in want.iter().enumerate() {
        let mut p = placement(&["cpu", "gpu"]);
        p.device_layers = Some(n);
        let s = where_is(&p, &case);
        assert_eq!((&s[0].layers[..], &s[1].layers[..], [s[0].output, s[1].output]), (*host, *device, *output), "{n}");
        assert_eq!((s[0].caches, s[1].caches), (host.len(), device.len()));
        assert!(s.iter().all(|s| s.parts_of.is_empty()));
    }
    let all = where_is(&placement(&["cpu", "gpu"]), &case);
    assert_eq!((all[0].ops, all[1].copies, &all[1].layers[..]), (0, 0, &[0, 1][..]));
    let alone = where_is(&placement(&["cpu"]), &case);
    assert_eq!((alone[0].ops, alone[0].output), (case.plan.ops.len(), true));
    let three = where_is(&placement(&["cpu", "a", "b"]), &case);
    assert_eq!((three[0].ops, &three[1].layers[..], &three[2].layers[..]), (0, &[0][..], &[1][..]));
}

#[test]
fn experts_of_the_first_layers_stay_on_the_host() {
    let case = transformer(true);
    let mut p = placement(&["cpu", "gpu"]);
    p.host_moe = 1;
    let s = where_is(&p, &case);
    let names: Vec<&str> = s[0].tensors.iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["down", "gate", "up"].map(|n| format!("blk.0.ffn_{n}_exps.weight")));
    assert_eq!((&s[0].parts_of[..], &s[1].parts_of[..], s[0].caches, s[1].caches), (&[0][..], &[0][..], 0, 2));
    // Activations, ids and weights of the chosen experts go, their sum comes back.
    assert_eq!((s[0].copies, s[1].copies), (3, 1));
    let error = p.assign(&transformer(false).plan).expect_err("no experts").to_string();
    assert!(error.contains("--n-cpu-moe") && error.contains("no experts"), "{error}");
}

#[test]
fn tensors_go_where_the_first_expression_says_or_an_error_says_why_not() {
    let case = transformer(true);
    let mut p = placement(&["cpu", "gpu"]);
    p.push_override(r"blk\.1\.ffn_.*_exps=cpu").expect("an expression");
    p.push_override(r"blk\..*_exps=gpu").expect("an expression");
    let s = where_is(&p, &case);
    assert!(s[0].tensors.iter().all(|t| t.layer == Some(1) && t.name.contains("exps")) && s[0].tensors.len() == 3);
    // A whole layer takes its cache along.
    let mut p = placement(&["cpu", "gpu"]);
    p.push_override(r"^blk\.0\.=cpu").expect("an expression");
    let s = where_is(&p, &case);
    assert_eq!((&s[0].layers[..], s[0].caches, s[1].caches), (&[0][..], 1, 1));
    for (bad, why) in [("x", "REGEX=DEVICE"), ("x=tpu", "cpu, gpu"), ("(=cpu", "unclosed")] {
        let error = p.push_override(bad).expect_err(bad).to_string();
        assert!(error.contains("-ot") && error.contains(why), "{error}");
    }
    p.push_override("no_such_tensor=cpu").expect("an expression");
    let error = p.assign(&case.plan).expect_err("no such tensor").to_string();
    assert!(error.contains("no_such_tensor"), "{error}");
}

#[test]
fn a_tensor_that_cannot_be_where_it_was_sent_is_an_error() {
    // A bias is read where its matrix is.
    let mut found = None;
    each_case(|_, case| {
        let biased = case.plan.ops.iter().any(|op| op.members().iter().any(|m| m.bias.is_some()));
        if biased && found.is_none() {
            found = Some(case);
        }
    });
    let case = found.expect("a bias");
    let mut p = placement(&["cpu", "gpu"]);
    p.push_override("bias=cpu").expect("an expression");
    let error = p.assign(&case.plan).expect_err("the matrix is elsewhere").to_string();
    assert!(error.contains("was sent to cpu") && error.contains("send that there too"), "{error}");
}

#[test]
fn replay_gives_what_eager_gives_on_one_device_and_on_two_and_shows_stale_data() {
    let isa = IsaLevel::detect();
    let (one, layers, experts) = (cpu(isa), Spread::Layers.over(isa, isa), Spread::Experts.over(isa, isa));
    let backends: [&dyn Backend; 3] = [one.as_ref(), &layers, &experts];
    let options = GateOptions { replay: true, ..GateOptions::default() };
    for report in gate::run_all(&backends, &options, &mut |_| {}).expect("no files") {
        assert!(report.passed() && report.rows.len() == 2 && report.faults.len() == 4, "\n{report}");
        for row in &report.rows {
            assert!(row.found.cases > 340 * 64 && row.found.error == 0.0, "\n{report}");
        }
    }
}
