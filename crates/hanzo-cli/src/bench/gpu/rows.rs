//! Ops on rows: the norm that stands before every contraction.

use hanzo_kernels::Key;
use hanzo_ml::vulkan::raw::Memory;

use super::subject::{Arg, Check, Choice, Constants, Machine, Subject};
use super::weights::Noise;
use crate::failure::Failure;

/// `rms_norm` of rows that are a sum of two; with QUANT=1 it writes int8 planes.
pub struct Norm {
    tokens: usize,
    runs: usize,
    group: usize,
    floats: [Vec<f32>; 3],
    memory: [Memory; 3],
    live: Memory,
    sum: Memory,
    y: Memory,
    planes: [Memory; 3],
}

const EPS: f32 = 1e-6;

impl Norm {
    /// `tokens` rows of `runs` runs of `group` columns, each run normed on its own.
    pub fn new(gpu: &Machine, tokens: usize, runs: usize, group: usize) -> anyhow::Result<Norm> {
        if group % 32 != 0 {
            return Err(Failure::usage("--op norm: columns must be a multiple of 32").into());
        }
        let n = tokens * runs * group;
        let mut noise = Noise(5);
        let floats = [n, n, group].map(|n| (0..n).map(|_| noise.normal()).collect::<Vec<f32>>());
        let up = |x: &Vec<f32>| gpu.upload(&x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
        Ok(Norm {
            memory: [up(&floats[0])?, up(&floats[1])?, up(&floats[2])?],
            live: gpu.upload(&(tokens as u32).to_le_bytes())?,
            sum: gpu.zeros(4 * n)?,
            y: gpu.zeros(4 * n)?,
            planes: [gpu.zeros(n)?, gpu.zeros(n / 8)?, gpu.zeros(n / 8)?],
            tokens,
            runs,
            group,
            floats,
        })
    }
}

impl Subject for Norm {
    fn kernel(&self) -> Key {
        Key { op: "rms_norm", format: None }
    }

    fn fixed(&self) -> Vec<(&'static str, u32)> {
        vec![("ADD", 1), ("WEIGHTED", 1), ("VEC", 1), ("MASK", u32::from(self.tokens > 1))]
    }

    fn grid(&self, c: &Constants) -> Result<[u32; 3], String> {
        if c.get("QUANT") != 0 && self.group as u32 > 16 * c.get("THREADS") {
            return Err("with QUANT a run has at most 16 columns a thread".into());
        }
        Ok([self.runs as u32, self.tokens as u32, 1])
    }

    fn copies(&self) -> usize {
        1
    }

    fn arguments(&self, _: &Constants, _: usize) -> anyhow::Result<Vec<(&'static str, Arg)>> {
        Ok(vec![
            ("a", (&self.memory[0]).into()),
            ("b", (&self.memory[1]).into()),
            ("weight", (&self.memory[2]).into()),
            ("live", (&self.live).into()),
            ("sum", (&self.sum).into()),
            ("y", (&self.y).into()),
            ("yq", (&self.planes[0]).into()),
            ("yd", (&self.planes[1]).into()),
            ("ys", (&self.planes[2]).into()),
            ("group", Arg::U32(self.group as u32)),
            ("runs", Arg::U32(self.runs as u32)),
            ("inverse", Arg::F32(1.0 / self.group as f32)),
            ("eps", Arg::F32(EPS)),
        ])
    }

    fn bytes(&self) -> u64 {
        4 * (4 * self.floats[0].len() + self.group) as u64
    }

    fn working_set(&self) -> u64 {
        self.bytes()
    }

    fn operations(&self) -> f64 {
        5.0 * self.floats[0].len() as f64
    }

    fn output(&self) -> Option<&Memory> {
        Some(&self.y)
    }

    fn check(&self, gpu: &Machine, c: &Constants) -> anyhow::Result<Check> {
        let quantized = c.get("QUANT") == 1;
        let floats = |m: &Memory| -> anyhow::Result<Vec<f32>> {
            Ok(gpu.read(m)?.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
        };
        let y = if quantized {
            let (codes, d) = (gpu.read(&self.planes[0])?, floats(&self.planes[1])?);
            codes.iter().enumerate().map(|(i, q)| f32::from(*q as i8) * d[i / 32]).collect()
        } else {
            floats(&self.y)?
        };
        let mut check = Check::default();
        let all = self.tokens * self.runs;
        for run in [0, all / 2, all - 1] {
            let at = run * self.group;
            let x: Vec<f64> = (at..at + self.group).map(|i| f64::from(self.floats[0][i] + self.floats[1][i])).collect();
            let mean = x.iter().map(|x| x * x).sum::<f64>() / self.group as f64;
            let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
            let should: Vec<f64> = x.iter().zip(&self.floats[2]).map(|(x, w)| x * factor * f64::from(*w)).collect();
            for (i, group) in should.chunks(32).enumerate() {
                let top = group.iter().fold(0f64, |m, x| m.max(x.abs()));
                for (j, value) in group.iter().enumerate() {
                    // Rounding to int8, or that of f32 arithmetic.
                    let part = if quantized { 0.501 / 127.0 } else { 2f64.powi(-20) };
                    check.add(f64::from(y[at + 32 * i + j]), *value, part * top);
                }
            }
        }
        Ok(check)
    }

    fn axes(&self) -> Vec<Vec<Choice>> {
        vec![[32, 64, 128, 256, 512, 1024].map(|n| vec![("THREADS", n)]).to_vec()]
    }
}
