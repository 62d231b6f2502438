//! The gate on the interpreter itself and on the CPU at every instruction set it has: all oracles pass, all faults are
//! caught.

use super::gate::{self, GateOptions, GateReport};
use super::mutate::Fate;
use super::oracles::{ORACLES, weight_formats};
use super::reference_backend::ReferenceBackend;
use crate::backend::Backend;
use crate::cpu::isa::IsaLevel;
use crate::cpu::{CpuBackend, CpuOptions};
use crate::levers::{LEVERS, LeverSet};
use std::path::Path;

fn run(backend: &dyn Backend, options: &GateOptions) -> GateReport {
    let report = gate::run(backend, options, &mut |_| {}).expect("files can be read");
    assert!(report.passed(), "\n{report}");
    report
}

/// One report for every instruction set that this CPU has, all of them passed.
fn run_cpus(options: &GateOptions) -> Vec<GateReport> {
    let isas: Vec<IsaLevel> = IsaLevel::available().collect();
    // The best one on two threads; one thread for the others, as spinning threads are slow where tests run side by side.
    let threads = |isa: IsaLevel| if isa == IsaLevel::detect() { 2 } else { 1 };
    let open = |isa: &IsaLevel| {
        CpuBackend::new(CpuOptions { threads: threads(*isa), isa: *isa, ..CpuOptions::default() })
            .expect("an available one")
    };
    let cpus: Vec<CpuBackend> = isas.iter().map(open).collect();
    let backends: Vec<&dyn Backend> = cpus.iter().map(|c| c as &dyn Backend).collect();
    let reports = gate::run_all(&backends, options, &mut |_| {}).expect("files can be read");
    for (isa, report) in isas.iter().zip(&reports) {
        assert!(report.passed(), "{isa}\n{report}");
    }
    reports
}

#[test]
fn the_reference_backend_passes_every_oracle() {
    let lever_sets = vec![("none".to_string(), LeverSet::NONE), ("all".to_string(), LeverSet::all())];
    let report = run(&ReferenceBackend, &GateOptions { lever_sets, ..GateOptions::default() });
    assert!(report.rows.iter().all(|r| r.found.cases > 0 && r.passed()));
}

#[test]
fn every_fault_planted_in_the_reference_backend_is_caught() {
    let report = run(&ReferenceBackend, &GateOptions { mutate: true, ..GateOptions::default() });
    assert!(report.faults.len() > 1000 && report.faults.iter().all(|f| f.fate == Fate::Caught));
}

#[test]
fn the_cpu_passes_every_oracle_under_every_lever_set_on_every_instruction_set() {
    for report in run_cpus(&GateOptions::default()) {
        assert_eq!(report.unsupported().count(), 0, "\n{report}");
        // Every format of the table, the synthetic one included where it is built in.
        for format in weight_formats() {
            let rows = report.rows.iter().filter(|r| r.format == format.name()).count();
            assert!(rows >= 6, "{format} has {rows} rows");
        }
    }
}

#[test]
fn every_fault_planted_in_the_cpu_is_caught_on_every_instruction_set() {
    for report in run_cpus(&GateOptions { mutate: true, ..GateOptions::default() }) {
        assert!(report.faults.iter().all(|f| f.fate == Fate::Caught), "\n{report}");
    }
}

#[test]
fn the_golden_blocks_decode_bit_for_bit() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../hanzo-gguf/tests/data/golden");
    let options = GateOptions { golden: Some(dir), filter: Some("to_float".into()), ..GateOptions::default() };
    assert_eq!(run(&ReferenceBackend, &options).golden.as_deref(), Some("nbad=0 over 25 formats"));
}

#[test]
fn a_missing_golden_directory_is_named() {
    let options = GateOptions { golden: Some("no/such/directory".into()), ..GateOptions::default() };
    let error = gate::run(&ReferenceBackend, &options, &mut |_| {}).expect_err("nothing is there").to_string();
    assert!(error.contains("no/such/directory"), "{error}");
}

#[test]
fn every_lever_names_an_oracle_that_exists() {
    for lever in LEVERS {
        assert!(ORACLES.iter().any(|o| o.name == lever.oracle), "{}: {}", lever.id, lever.oracle);
    }
}

#[test]
fn a_filter_that_nothing_has_is_known_before_anything_runs() {
    let with = |filter: &str| GateOptions { filter: Some(filter.into()), ..GateOptions::default() };
    for filter in ["", "ROPE_num", "iq2_XXS", "chunks", "linear", "f16"] {
        assert!(with(filter).wants_anything(), "{filter}");
    }
    assert!(GateOptions::default().wants_anything() && !with("zzzz").wants_anything());
}

#[test]
fn a_filter_selects_by_oracle_op_or_format() {
    let options = GateOptions { filter: Some("iq2_XXS".into()), ..GateOptions::default() };
    let report = run(&ReferenceBackend, &options);
    assert!(report.rows.len() > 5 && report.rows.iter().all(|r| r.format == "IQ2_XXS"));
}
