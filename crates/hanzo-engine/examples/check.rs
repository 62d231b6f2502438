//! temp
use hanzo_engine::arch::*;
use hanzo_gguf::*;
use hanzo_ml::backend::*;
use hanzo_ml::batch::*;
use hanzo_ml::cpu::*;
use hanzo_ml::levers::LeverSet;
use hanzo_ml::plan::*;
use std::time::Instant;
struct Src(Gguf);
impl WeightSource for Src {
    fn tensor(&self, w: &Weight) -> Result<TensorBytes, hanzo_ml::Error> {
        let t = self.0.tensor(&w.tensor).unwrap();
        Ok(self.0.bytes(t))
    }
}
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let exact = a[3] == "exact";
    let ub: usize = a[4].parse().unwrap();
    let g = Gguf::open(&a[1]).unwrap();
    let f = if exact { Format::F32 } else { Format::F16 };
    let b = build(g.metadata(), &g, &PlanOptions { n_ctx: 4096, type_k: f, type_v: f }).unwrap();
    let src = Src(g);
    let isa = std::env::var("ISA").ok().and_then(|v| isa::IsaLevel::from_name(&v)).unwrap_or(isa::IsaLevel::detect());
    let be = CpuBackend::new(CpuOptions { threads: 2, isa }).unwrap();
    let w = be.load(&b.plan, &src).unwrap();
    let set = match std::env::var("LEV").as_deref() {
        Ok("none") => LeverSet::NONE,
        _ => LeverSet::default(),
    };
    let mk = |n: usize| {
        be.compile(
            &b.plan,
            &CompileOptions {
                levers: set,
                bucket: Sizes { n_tokens: n, n_seqs: 1, n_out: 8 },
                precision: if exact { Precision::Exact } else { Precision::Int8 },
                deterministic: false,
            },
            &w,
        )
        .unwrap()
    };
    let mut exe = mk(ub);
    let pages = 200usize;
    let mut cache = be.alloc(&b.plan, &vec![pages; b.plan.groups.len()], &[]).unwrap();
    let table: Vec<u32> = (1..pages as u32).collect();
    let offs = [0u32, table.len() as u32];
    let gt: Vec<GroupTables> =
        b.plan.groups.iter().map(|_| GroupTables { pages: &table, offsets: &offs, first: &[0] }).collect();
    if a[2] == "bench" {
        for (n, dec) in [(512usize, false), (64, true)] {
            let mut exe = if dec { mk(1) } else { mk(512) };
            exe.set_profile(std::env::var("PROF").is_ok());
            for rep in 0..3 {
                let t0 = Instant::now();
                let ids: Vec<u32> = (0..n as u32).collect();
                let pos: Vec<u32> = (0..n as u32).collect();
                let step = if dec { 1 } else { n };
                for c in (0..n).step_by(step) {
                    let so = [0, step as u32];
                    let batch = Batch {
                        input: Input::Tokens(&ids[c..c + step]),
                        positions: &pos[c..c + step],
                        rope_positions: &[],
                        seq_offsets: &so,
                        groups: &gt,
                        state_slots: &[],
                        spans: &[],
                        adapters: &[],
                        out_rows: &[step as u32 - 1],
                        pooling: Pooling::None,
                    };
                    exe.run(&batch, cache.as_mut(), &mut |_, _| {}).unwrap();
                }
                let s = t0.elapsed().as_secs_f64();
                println!("{} rep {rep}: {:.1} t/s", if dec { "tg" } else { "pp512" }, n as f64 / s);
            }
            if std::env::var("PROF").is_ok() {
                let mut m = std::collections::BTreeMap::<String, f64>::new();
                let mut tot = 0.0;
                for p in exe.profile() {
                    let k = p.name.split(' ').map(|s| s.rsplit('.').next().unwrap()).collect::<Vec<_>>().join(" ");
                    *m.entry(k).or_default() += p.seconds;
                    tot += p.seconds;
                }
                for (k, v) in m {
                    println!("  {:8.3} ms {:5.1}% {k}", v * 1e3, v / tot * 100.0);
                }
                println!("  total {:.3} ms barriers {}", tot * 1e3, exe.barriers());
            }
        }
        return;
    }
    let j: serde_json::Value = serde_json::from_slice(&std::fs::read(&a[2]).unwrap()).unwrap();
    let (mut maxd, mut sum, mut n, mut top1, mut rows, mut bad) = (0f64, 0f64, 0usize, 0usize, 0usize, 0usize);
    for case in j["cases"].as_array().unwrap() {
        let ids: Vec<u32> = case["ids"].as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as u32).collect();
        let tops = case["top"].as_array().unwrap();
        for c in (0..ids.len()).step_by(ub) {
            let m = ub.min(ids.len() - c);
            let pos: Vec<u32> = (c as u32..(c + m) as u32).collect();
            let out: Vec<u32> = (0..m as u32).collect();
            let so = [0, m as u32];
            let batch = Batch {
                input: Input::Tokens(&ids[c..c + m]),
                positions: &pos,
                rope_positions: &[],
                seq_offsets: &so,
                groups: &gt,
                state_slots: &[],
                spans: &[],
                adapters: &[],
                out_rows: &out,
                pooling: Pooling::None,
            };
            exe.run(&batch, cache.as_mut(), &mut |first, l| {
                let v = b.hyper.n_vocab;
                for (r, l) in l.chunks(v).enumerate() {
                    let mx = l.iter().cloned().fold(f32::MIN, f32::max) as f64;
                    let z = l.iter().map(|x| (*x as f64 - mx).exp()).sum::<f64>().ln() + mx;
                    let t = tops[c + first + r].as_array().unwrap();
                    let best = l.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
                    let g = |i: usize| (t[i][0].as_u64().unwrap() as usize, t[i][1].as_f64().unwrap());
                    rows += 1;
                    top1 += (best == g(0).0) as usize;
                    if best != g(0).0 && g(0).1 - g(1).1 > 0.5 {
                        bad += 1;
                    }
                    for i in 0..t.len() {
                        let (id, lp) = g(i);
                        if lp > -12.0 {
                            let d = (l[id] as f64 - z - lp).abs();
                            maxd = maxd.max(d);
                            sum += d;
                            n += 1;
                        }
                    }
                }
            })
            .unwrap();
        }
    }
    println!("max {maxd:.2e} mean {:.2e} top1 {top1}/{rows} bad {bad}", sum / n as f64);
}
