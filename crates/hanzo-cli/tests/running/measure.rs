//! `hanzo bench`, `ab`, `logits` and `perplexity`.

use serde_json::{Value, json};

use crate::tiny::{Kind, N_VOCAB, Tiny};

#[test]
fn bench_prints_a_row_a_test_in_every_format() {
    let tiny = Tiny::new("bench", Kind::Random);
    let flags = ["-p", "16", "-n", "4", "-r", "2", "-d", "0,8", "--force", "-ctk", "q8_0", "-ub", "8", "-ngl", "0"];
    let rows: Vec<Value> = serde_json::from_str(&tiny.ok("bench", &[&flags[..], &["-o", "json"]].concat())).unwrap();
    let tests: Vec<_> = rows.iter().map(|r| (&r["n_prompt"], &r["n_gen"], &r["n_depth"])).collect();
    let n = [json!(0), json!(4), json!(8), json!(16)];
    assert_eq!(tests, [(&n[3], &n[0], &n[0]), (&n[0], &n[1], &n[0]), (&n[3], &n[0], &n[2]), (&n[0], &n[1], &n[2])]);
    for row in &rows {
        assert_eq!(
            (row["samples_ts"].as_array().unwrap().len(), &row["type_k"], &row["n_ubatch"]),
            (2, &json!("q8_0"), &json!(8))
        );
        assert_eq!((&row["n_threads"], &row["backends"]), (&json!(1), &json!("CPU")));
        assert!(row["avg_ts"].as_f64().unwrap() > 0.0 && row["placement"]["model.gguf"].as_array().unwrap().len() == 4);
    }
    let md = tiny.ok("bench", &[&flags[..], &["--profile"]].concat());
    for part in ["| model", "tg4 @ d8", "±", "load average", "placement of model.gguf", "unattributed", "ffn_down"] {
        assert!(md.contains(part), "{part}: {md}");
    }
    let csv = tiny.ok("bench", &["-p", "0", "-n", "2", "-r", "1", "--force", "-o", "csv"]);
    assert_eq!(csv.lines().count(), 2);
}

#[test]
fn bench_measures_a_kernel_alone() {
    let tiny = Tiny::new("kernel", Kind::Random);
    let kernel =
        |args: &[&str]| tiny.bare(&[&["bench", "-t", "1", "--force", "-r", "1"], args].concat()).output().unwrap();
    let flags = ["--op", "gemm", "--format", "q4_0,f16", "--shape", "64x64", "--tokens", "8", "-o", "json"];
    let rows: Vec<Value> = serde_json::from_slice(&kernel(&flags).stdout).unwrap();
    assert_eq!((rows.len(), &rows[0]["format"], &rows[1]["n_tokens"]), (2, &json!("Q4_0"), &json!(8)));
    let flags = ["--op", "matvec", "--format", "q8_0", "--shape", "64x64", "--device", "cpu:portable", "-o", "json"];
    let rows: Vec<Value> = serde_json::from_slice(&kernel(&flags).stdout).unwrap();
    assert_eq!((rows.len(), &rows[0]["isa"]), (1, &json!("portable")));
    for wrong in [
        &["--op", "gemm", "--format", "q4_k", "--shape", "64x64"][..],
        &["--op", "gemm"],
        &["--op", "copy", "-ctk", "f16"],
        &["--op", "copy", "-m", "model.gguf"],
        &["--op", "copy", "--device", "cpu", "--sweep"],
    ] {
        assert_eq!(kernel(wrong).status.code(), Some(2), "{wrong:?}");
    }
    tiny.fails(2, "bench", &["-p", "0", "-n", "0", "--force"]);
    tiny.fails(2, "bench", &["-o", "xml"]);
}

#[test]
fn ab_compares_speed_and_outputs_and_knows_when_there_is_nothing_to_compare() {
    let tiny = Tiny::new("ab", Kind::Random);
    let flags = ["--blocks", "2", "-p", "8", "-n", "2"];
    let report = tiny.json("ab", &[&["qkv", "--predict", "1.01"], &flags[..]].concat());
    assert_eq!((&report["lever"], &report["changes_nothing"]), (&json!("qkv"), &json!(false)));
    let tests = report["tests"].as_array().unwrap();
    assert_eq!((tests.len(), tests[0]["ratios"].as_array().unwrap().len()), (2, 2));
    assert_eq!((&tests[0]["test"], &tests[0]["predicted"]), (&json!("tg2"), &json!(1.01)));
    let outputs = &report["outputs"];
    assert!(outputs["rows"] == 96 && outputs["max_delta_logit"].as_f64().unwrap() < 1e-2, "{outputs}");
    let text = tiny.ok("ab", &[&["qkv"], &flags[..]].concat());
    assert!(text.contains("95% interval") && text.contains("max |Δ logit|"), "{text}");
    let nothing = tiny.ok("ab", &["moe_route"]);
    assert!(nothing.contains("there is nothing to measure"), "{nothing}");
    let said = tiny.fails(2, "ab", &["nosuch"]);
    assert!(said.contains("linear_pair"), "{said}");
    tiny.fails(2, "ab", &[]);
}

/// A reference file of a text, from what `logits` prints.
fn reference(tiny: &Tiny, text: &str) -> Value {
    let printed = tiny.json("logits", &[text, "--every", "--exact", "-k", "258"]);
    let ids: Vec<u64> = printed["ids"].as_array().unwrap().iter().map(|i| i.as_u64().unwrap()).collect();
    let rows: Vec<Vec<(u64, f64)>> = printed["positions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| {
            let top = p["top"].as_array().unwrap();
            top.iter().map(|t| (t["id"].as_u64().unwrap(), t["log_prob"].as_f64().unwrap())).collect()
        })
        .collect();
    let next = |i: usize| -rows[i].iter().find(|(id, _)| *id == ids[i + 1]).unwrap().1;
    let nll: Vec<f64> = (0..ids.len() - 1).map(next).collect();
    let top: Vec<&[(u64, f64)]> = rows.iter().map(|r| &r[..10]).collect();
    json!({"cases": [{"ids": ids, "top": top, "nll": nll}]})
}

#[test]
fn logits_agree_with_themselves_and_a_limit_is_an_exit_code() {
    let tiny = Tiny::new("logits", Kind::Random);
    let reference = reference(&tiny, "some text to predict");
    tiny.write("reference.json", &reference.to_string());
    let exact = tiny.json("logits", &["--check", "reference.json", "--exact", "--max-delta", "1e-4", "-ub", "7"]);
    assert_eq!((&exact["positions"], &exact["top1_agree"], &exact["sure_misses"]), (&json!(20), &json!(20), &json!(0)));
    assert!((exact["mean_nll"].as_f64().unwrap() - exact["reference_nll"].as_f64().unwrap()).abs() < 1e-5);
    let said = tiny.fails(1, "logits", &["--check", "reference.json", "--mean-delta", "1e-9"]);
    assert!(said.contains("too far from those of `reference.json`"), "{said}");
    tiny.write("reference.json", r#"{"cases": [{"ids": [9999], "top": [], "nll": []}]}"#);
    assert!(tiny.fails(1, "logits", &["--check", "reference.json"]).contains("token 9999"));
    tiny.write("reference.json", "[]");
    assert!(tiny.fails(1, "logits", &["--check", "reference.json"]).contains("it must be JSON with `cases`"));
    tiny.fails(2, "logits", &["--max-delta", "1"]);
    let (top, _) = tiny.piped("logits", &["-k", "3"], "abc");
    assert_eq!(top.lines().count(), 3);
}

#[test]
fn a_model_whose_logits_are_not_numbers_is_a_failure_that_names_the_token() {
    let tiny = Tiny::new("nan", Kind::Broken);
    tiny.write("text", &"The quick brown fox. ".repeat(10));
    tiny.write("reference.json", r#"{"cases": [{"ids": [70, 71, 72], "top": [[], [], []], "nll": [1, 1]}]}"#);
    let runs: [(&str, &[&str], &str); 4] = [
        ("logits", &["abc"], "token 2"),
        ("logits", &["abc", "--every", "--json"], "token 0"),
        ("logits", &["--check", "reference.json"], "token 0"),
        ("perplexity", &["-f", "text", "-c", "64"], "token 32"),
    ];
    for (command, args, token) in runs {
        let out = tiny.run(command, args);
        let said = String::from_utf8(out.stderr).unwrap();
        assert_eq!((out.status.code(), out.stdout.len()), (Some(1), 0), "{args:?}: {said}");
        assert!(said.contains(token) && said.contains("258 NaN") && said.contains("--exact"), "{args:?}: {said}");
    }
}

#[test]
fn perplexity_of_a_uniform_model_is_its_vocabulary() {
    let tiny = Tiny::new("uniform", Kind::Uniform);
    tiny.write("text", &"The quick brown fox. ".repeat(10));
    let json = tiny.json("perplexity", &["-f", "text", "-c", "64"]);
    assert!((json["perplexity"].as_f64().unwrap() - N_VOCAB as f64).abs() < 1e-2, "{json}");
    assert_eq!((&json["chunks"], &json["tokens"]), (&json!(3), &json!(3 * 31)));
    let one = tiny.json("perplexity", &["-f", "text", "-c", "64", "--chunks", "1"]);
    assert_eq!(one["tokens"], 31);
}

#[test]
fn perplexity_is_what_the_log_probabilities_say_and_a_base_is_compared_with() {
    let tiny = Tiny::new("base", Kind::Random);
    let text = "All happy families are alike; ev";
    tiny.write("text", text);
    let json = tiny.json("perplexity", &["-f", "text", "-c", "32", "--exact", "--save-base", "base.bin"]);
    let nll = &reference(&tiny, text)["cases"][0]["nll"];
    let counted: Vec<f64> = nll.as_array().unwrap()[16..31].iter().map(|n| n.as_f64().unwrap()).collect();
    let mean = counted.iter().sum::<f64>() / counted.len() as f64;
    assert!((json["mean_nll"].as_f64().unwrap() - mean).abs() < 1e-4, "{json} {mean}");
    let same = &tiny.json("perplexity", &["--base", "base.bin", "--exact"])["base"];
    assert!(same["mean_kl"].as_f64().unwrap() < 1e-6 && same["top1_agreement"] == 1.0, "{same}");
    let int8 = &tiny.json("perplexity", &["--base", "base.bin"])["base"];
    assert!(int8["mean_kl"].as_f64().unwrap() > same["mean_kl"].as_f64().unwrap(), "{int8}");
    assert_eq!(int8["positions"], 15);
    let text = tiny.ok("perplexity", &["--base", "base.bin"]);
    assert!(text.contains("KL divergence") && text.contains("±"), "{text}");
    assert!(tiny.fails(1, "perplexity", &["--base", "text"]).contains("no base of log-probabilities"));
    assert!(tiny.fails(1, "perplexity", &["-f", "text", "-c", "64"]).contains("less than one chunk"));
    assert!(tiny.fails(1, "perplexity", &["-f", "missing"]).contains("missing"));
    tiny.fails(2, "perplexity", &[]);
    tiny.fails(2, "perplexity", &["-f", "text", "-c", "3"]);
}
