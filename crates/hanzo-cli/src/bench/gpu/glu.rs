//! Gate and up projections with what combines them and the quantization behind it, in one kernel.

use std::collections::BTreeSet;

use hanzo_kernels::Key;
use hanzo_ml::gpu::lower::variants;
use hanzo_ml::vulkan::raw::Memory;

use super::contraction::Contraction;
use super::subject::{Arg, Check, Choice, Constants, Machine, Subject};
use super::weights::{Matrix, Resident};
use crate::failure::Failure;

/// A contraction as the gate, and an up projection of the same shape.
pub struct Glu<'a> {
    gate: &'a Contraction,
    up: Resident,
    /// The int8 planes of the result, or its floats.
    y: Memory,
}

const KERNEL: &str = "glu_matvec";

impl<'a> Glu<'a> {
    /// Puts the other matrix on the device.
    pub fn new(gpu: &Machine, gate: &'a Contraction) -> anyhow::Result<Glu<'a>> {
        let (m, case) = (&gate.weights.matrix, &gate.case);
        if case.rows % 32 != 0 || !case.format.is_block() {
            return Err(Failure::usage("a gated unit takes a block format and rows of whole 32s").into());
        }
        let up = Matrix::seeded(m.format, m.rows, m.cols, 1000)?;
        let n = case.slots() * case.rows;
        Ok(Glu { up: Resident::new(gpu, up, gate.weights.copies())?, gate, y: gpu.zeros(4 * n + 256)? })
    }

    /// Where the planes of codes, scales and sums begin.
    fn planes(&self) -> [usize; 2] {
        let codes = (self.gate.case.slots() * self.gate.case.rows).next_multiple_of(64);
        [0, codes]
    }
}

impl Subject for Glu<'_> {
    fn kernel(&self) -> Key {
        Key { op: KERNEL, format: Some(self.gate.case.format) }
    }

    fn fixed(&self) -> Vec<(&'static str, u32)> {
        let (case, features) = (&self.gate.case, &self.gate.features);
        let tokens = if case.experts.is_some() { 1 } else { case.tokens.next_power_of_two().min(4) as u32 };
        let (experts, one) = (case.experts.is_some(), case.tokens == 1 && case.experts.is_none());
        let shape = variants::glu_shape(case.format, case.rows, tokens, experts, one, features);
        let (threads, rows) = (shape.threads, shape.rows);
        let most = if features.wave >= 32 { 1 } else { 4 / rows.min(4) };
        let units = variants::units_in_flight(case.cols / 32, features.wave).min(most);
        vec![
            ("THREADS", threads),
            ("ROWS", rows),
            ("TOKENS", tokens),
            ("UNITS", units),
            ("REPEAT", shape.repeat),
            ("QUANT", 1),
            ("MOE", u32::from(case.experts.is_some())),
            ("LIVE", self.gate.known_rows()),
        ]
    }

    fn grid(&self, c: &Constants) -> Result<[u32; 3], String> {
        let [threads, wave, rows, tokens, repeat] = ["THREADS", "WAVE", "ROWS", "TOKENS", "REPEAT"].map(|n| c.get(n));
        let span = threads / wave.max(1) * rows * repeat;
        if rows * tokens == 0 || rows * tokens > 8 || threads % wave != 0 || span == 0 {
            return Err("ROWS * TOKENS is at most 8, THREADS whole waves".into());
        }
        if c.get("QUANT") != 0 && span % 32 != 0 {
            return Err("with QUANT, THREADS / WAVE * ROWS * REPEAT is a multiple of 32".into());
        }
        Ok([(self.gate.case.rows as u32).div_ceil(span), (self.gate.case.slots() as u32).div_ceil(tokens), 1])
    }

    fn copies(&self) -> usize {
        self.gate.sets() * self.up.copies()
    }

    fn arguments(&self, c: &Constants, copy: usize) -> anyhow::Result<Vec<(&'static str, Arg)>> {
        let mut all = self.gate.with(KERNEL).arguments(c, copy)?;
        let at = copy / self.gate.sets();
        all.retain(|(name, _)| !["wu", "y"].contains(name));
        all.extend([("wg", self.gate.weights.weight(at)), ("wu", self.up.weight(at)), ("y", (&self.y).into())]);
        all.push(("capacity", Arg::U32(self.gate.case.slots() as u32)));
        Ok(all)
    }

    fn bytes(&self) -> u64 {
        2 * self.gate.weight_bytes()
    }

    fn working_set(&self) -> u64 {
        2 * self.up.copies() as u64 * self.up.layout.bytes
    }

    fn operations(&self) -> f64 {
        2.0 * self.gate.with(KERNEL).operations()
    }

    fn output(&self) -> Option<&Memory> {
        Some(&self.y)
    }

    fn check(&self, gpu: &Machine, c: &Constants) -> anyhow::Result<Check> {
        let (it, case) = (self.gate, &self.gate.case);
        let bytes = gpu.read(&self.y)?;
        let float = |at: usize| f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let quantized = c.get("QUANT") != 0;
        let mut check = Check::default();
        let slots: BTreeSet<usize> = [0, case.slots() / 2, case.slots() - 1].into();
        let groups: BTreeSet<usize> = [0, case.rows / 64, case.rows / 32 - 1].into();
        for (slot, group) in slots.into_iter().flat_map(|s| groups.iter().map(move |g| (s, *g))) {
            let expert = it.ids.first().map_or(0, |ids| ids[slot] as usize);
            let x = it.row_of_x(slot);
            let dot = |m: &Matrix, row: usize| -> f64 {
                let w = m.row(expert * case.rows + row);
                w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum()
            };
            let value = |row: usize| {
                let (gate, up) = (dot(&it.weights.matrix, row), dot(&self.up.matrix, row));
                gate / (1.0 + (-gate).exp()) * up
            };
            let should: Vec<f64> = (32 * group..32 * group + 32).map(value).collect();
            let top = should.iter().fold(0f64, |m, v| m.max(v.abs()));
            for (i, should) in should.iter().enumerate() {
                let at = slot * case.rows + 32 * group + i;
                let (is, part) = if quantized {
                    let [codes, d] = self.planes();
                    (f32::from(bytes[codes + at] as i8) * float(d + at / 32 * 4), 0.51 / 127.0)
                } else {
                    (float(4 * at), 2f64.powi(-14))
                };
                check.add(f64::from(is), *should, part * top);
            }
        }
        Ok(check)
    }

    fn axes(&self) -> Vec<Vec<Choice>> {
        let wave = self.gate.features.wave;
        let shape = |(threads, rows): (u32, u32)| {
            let repeat = 32u32.div_ceil(threads.max(wave) / wave * rows);
            vec![("THREADS", threads.max(wave)), ("ROWS", rows), ("REPEAT", repeat)]
        };
        let shapes = [64, 128, 256, 512, 1024].into_iter().flat_map(|t| [1, 2, 4].map(|r| (t, r)));
        vec![shapes.map(shape).collect(), [1, 2, 4].map(|n| vec![("UNITS", n)]).to_vec()]
    }
}
