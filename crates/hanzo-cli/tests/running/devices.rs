//! `--device`, `-ngl`, `-ot`, `--n-cpu-moe`, and `gate --replay`. A second CPU stands for a second device.

use serde_json::{Value, json};

use crate::tiny::{Kind, Tiny};

const HOST: [&str; 2] = ["--isa", "portable"];
const SECOND: [&str; 4] = ["--isa", "portable", "--device", "cpu:portable"];

#[test]
fn a_model_on_two_devices_says_what_it_says_on_one() {
    let tiny = Tiny::new("split", Kind::Random);
    let ask = |flags: &[&str]| tiny.ok("run", &[&["tell me more", "--greedy", "-n", "24"], flags].concat());
    let want = ask(&HOST);
    for extra in [&[][..], &["-ngl", "0"], &["-ngl", "1"], &["-ngl", "2"], &["-ngl", "99"], &["-ngl", "-1"]] {
        assert_eq!(ask(&[&SECOND, extra].concat()), want, "{extra:?}");
    }
    assert_eq!(ask(&[&SECOND[..], &["-ot", "ffn_(up|down)=cpu", "-ot", "token_embd=cpu:portable"]].concat()), want);
}

#[test]
fn bench_says_where_everything_is() {
    let tiny = Tiny::new("placement", Kind::Random);
    let flags = ["-p", "8", "-n", "2", "-r", "1", "--force", "-ngl", "2"];
    let rows: Value =
        serde_json::from_str(&tiny.ok("bench", &[&SECOND[..], &flags, &["-o", "json"]].concat())).unwrap();
    let row = &rows[0];
    assert_eq!(row["backends"], "CPU+CPU:PORTABLE");
    let devices = &row["devices"]["model.gguf"];
    assert_eq!((&devices[0]["layers"], &devices[0]["output"]), (&json!([0]), &json!(false)));
    assert_eq!((&devices[1]["layers"], &devices[1]["output"]), (&json!([1]), &json!(true)));
    assert_eq!((&devices[0]["cache_layers"], &devices[1]["cache_layers"]), (&json!(1), &json!(1)));
    assert!(devices[1]["tensors"].as_array().unwrap().iter().any(|t| t["name"] == "blk.1.attn_q.weight"));
    let md = tiny.ok("bench", &[&SECOND[..], &flags].concat());
    for part in ["  cpu: layers 0;", "  cpu:portable: layers 1, output;", "on CPU:PORTABLE"] {
        assert!(md.contains(part), "{part}: {md}");
    }
    let whole = tiny.ok("bench", &[&SECOND[..], &flags[..7]].concat());
    assert!(whole.contains("  cpu:portable: layers 0-1, output;") && !whole.contains("  cpu: "), "{whole}");
}

#[test]
fn what_cannot_be_placed_as_asked_is_an_error_that_says_why() {
    let tiny = Tiny::new("misplaced", Kind::Random);
    for (flags, part) in [
        (&["--device", "tpu:0"][..], "cpu:portable"),
        (&["--device", "cpu,cpu:portable"], "the CPU takes what"),
        (&["--device", "cpu", "-ngl", "3"], "the CPU takes what"),
        (&["--device", "cpu:portable,cpu:portable"], "twice"),
        (&["-ot", "ffn=tpu:0"], "this run has cpu"),
        (&["-ot", "ffn"], "REGEX=DEVICE"),
    ] {
        let said = tiny.fails(2, "run", &[&["x", "-n", "1"], flags].concat());
        assert!(said.contains(part), "{flags:?}: {said}");
    }
    for (flags, part) in [(&["-ot", "no_such_tensor=cpu"][..], "no_such_tensor"), (&["--n-cpu-moe", "1"], "no experts")]
    {
        let said = tiny.fails(1, "run", &[&["x", "-n", "1"], &SECOND[..], flags].concat());
        assert!(said.contains(part), "{flags:?}: {said}");
    }
}

#[test]
fn the_gate_replays_on_a_device_and_catches_stale_data() {
    let tiny = Tiny::new("replay", Kind::Random);
    let gate = |args: &[&str]| {
        let mut hanzo = std::process::Command::new(env!("CARGO_BIN_EXE_hanzo"));
        hanzo.arg("gate").args(args).current_dir(&tiny.0).output().unwrap()
    };
    let out = gate(&["--replay", "--device", "cpu:portable", "-t", "1", "--json"]);
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert!(out.status.success() && report["passed"] == true, "{report}");
    let rows = report["rows"].as_array().unwrap();
    assert!(rows.len() == 2 && rows.iter().all(|r| r["oracle"] == "replay" && r["error"] == 0.0), "{report}");
    let faults = report["faults"].as_array().unwrap();
    assert!(faults.len() == 4 && faults.iter().all(|f| f["fate"] == "caught"), "{report}");
    let unknown = gate(&["--device", "tpu:0"]);
    assert!(unknown.status.code() == Some(2) && String::from_utf8_lossy(&unknown.stderr).contains("cpu:portable"));
}
