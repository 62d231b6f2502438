//! The interpreter's own memory: pages of keys and values as the bytes they are stored in, and recurrent states.
//!
//! A page group is laid out as the contract of [`crate::backend::Cache::read_page`] says: for each page, layer by layer,
//! keys `[n_kv][PAGE][d_k]` then values `[n_kv][PAGE][d_v]`. Rows pass through the cache's format exactly as stored.

use crate::cache::{CacheGroup, PAGE};
use crate::plan::Plan;
use half::{bf16, f16};
use hanzo_gguf::{Format, formats};

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The key rows.
    Keys,
    /// The value rows.
    Values,
}

/// One page group's bytes.
#[derive(Clone, Debug)]
pub struct PageStore {
    group: CacheGroup,
    /// One entry a page, [`CacheGroup::page_bytes`] each.
    pub pages: Vec<Vec<u8>>,
}

impl PageStore {
    /// `pages` zeroed pages.
    pub fn new(group: &CacheGroup, pages: usize) -> PageStore {
        PageStore { group: group.clone(), pages: vec![vec![0; group.page_bytes()]; pages] }
    }

    /// The group it belongs to.
    pub fn group(&self) -> &CacheGroup {
        &self.group
    }

    fn format(&self, part: Part) -> (Format, usize) {
        match part {
            Part::Keys => (self.group.type_k, self.group.d_k),
            Part::Values => (self.group.type_v, self.group.d_v),
        }
    }

    /// Byte range within a page of one head's row.
    fn range(&self, layer: usize, part: Part, head: usize, at: usize) -> std::ops::Range<usize> {
        let (k, v) = (self.group.k_row_bytes().unwrap_or(0), self.group.v_row_bytes().unwrap_or(0));
        let rows = self.group.n_kv * PAGE;
        let (base, bytes) = match part {
            Part::Keys => (layer * rows * (k + v), k),
            Part::Values => (layer * rows * (k + v) + rows * k, v),
        };
        let start = base + (head * PAGE + at) * bytes;
        start..start + bytes
    }

    /// A row's bytes; `slot` is `page * PAGE + offset`.
    pub fn row(&self, layer: usize, part: Part, head: usize, slot: usize) -> &[u8] {
        &self.pages[slot / PAGE][self.range(layer, part, head, slot % PAGE)]
    }

    /// Puts a row's bytes.
    pub fn set_row(&mut self, layer: usize, part: Part, head: usize, slot: usize, bytes: &[u8]) {
        let range = self.range(layer, part, head, slot % PAGE);
        self.pages[slot / PAGE][range].copy_from_slice(bytes);
    }

    /// A row's values.
    pub fn read(&self, layer: usize, part: Part, head: usize, slot: usize) -> Vec<f64> {
        let (format, d) = self.format(part);
        decode(format, self.row(layer, part, head, slot), d)
    }

    /// Stores a row in the cache's format.
    pub fn write(&mut self, layer: usize, part: Part, head: usize, slot: usize, row: &[f64]) {
        let bytes = encode(self.format(part).0, row);
        self.set_row(layer, part, head, slot, &bytes);
    }
}

/// What a Plan remembers between steps.
#[derive(Clone, Debug)]
pub struct Memory {
    /// One a page group.
    pub groups: Vec<PageStore>,
    /// One a state kind: `[layers][slots][elements]`, with a bound each.
    pub states: Vec<Vec<super::num::Num>>,
    /// Slots of each state kind.
    pub slots: Vec<usize>,
    /// Elements of each state kind.
    pub elements: Vec<usize>,
}

impl Memory {
    /// Zeroed memory.
    pub fn new(plan: &Plan, pages: &[usize], slots: &[usize]) -> Memory {
        Memory {
            groups: plan.groups.iter().zip(pages).map(|(g, n)| PageStore::new(g, *n)).collect(),
            states: (plan.states.iter().zip(slots))
                .map(|(s, n)| vec![super::num::Num::ZERO; s.layers * n * s.elements])
                .collect(),
            slots: slots.to_vec(),
            elements: plan.states.iter().map(|s| s.elements).collect(),
        }
    }
}

/// The values of a stored row.
pub fn decode(format: Format, bytes: &[u8], d: usize) -> Vec<f64> {
    let mut out = vec![0.0; d];
    formats::to_float(format, bytes, &mut out);
    out.into_iter().map(f64::from).collect()
}

/// A row as the cache stores it: F16 and BF16 round the f32 value to nearest even, Q8_0 and Q4_0 take their scale from
/// the block's largest magnitude.
pub fn encode(format: Format, row: &[f64]) -> Vec<u8> {
    let rounded = row.iter().map(|x| *x as f32);
    match format {
        Format::F32 => rounded.flat_map(|x| x.to_le_bytes()).collect(),
        Format::F16 => rounded.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
        Format::BF16 => rounded.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
        _ => row.chunks(format.block_len()).flat_map(|block| encode_block(format, block)).collect(),
    }
}

/// Q8_0: `d = max |x| / 127`. Q4_0: `d = extreme / -8`, so that the extreme itself is exact.
fn encode_block(format: Format, block: &[f64]) -> Vec<u8> {
    let extreme = block.iter().fold(0.0f64, |m, x| if x.abs() > m.abs() { *x } else { m });
    let d = if format == Format::Q8_0 { extreme.abs() / 127.0 } else { extreme / -8.0 };
    let code = |x: f64| if d == 0.0 { 0.0 } else { x / d };
    let mut out = f16::from_f64(d).to_le_bytes().to_vec();
    if format == Format::Q8_0 {
        out.extend(block.iter().map(|x| code(*x).round_ties_even().clamp(-127.0, 127.0) as i8 as u8));
    } else {
        let nibble = |x: f64| (code(x).round_ties_even() + 8.0).clamp(0.0, 15.0) as u8;
        out.extend((0..16).map(|j| nibble(block[j]) | nibble(block[j + 16]) << 4));
    }
    out
}

/// What storing `x` in a block whose largest magnitude is `peak` may change it by.
///
/// F16 and BF16: half a unit in the last place (and half the smallest subnormal). Q8_0: half a step of `peak / 127`, and
/// the scale's own rounding to a half, 2^-11 of the value. Q4_0: a whole step of `peak / 8` (the end opposite to the
/// extreme is clipped), and 2^-11.
pub fn storage_bound(format: Format, x: f64, peak: f64) -> f64 {
    const HALF_ULP_F16: f64 = 1.0 / 2048.0;
    match format {
        Format::F32 => super::num::U * x.abs(),
        Format::F16 => (x.abs() * HALF_ULP_F16).max(f16::MIN_POSITIVE_SUBNORMAL.to_f64() / 2.0),
        Format::BF16 => x.abs() / 256.0,
        // 1.01 covers the roundings of x / d itself.
        Format::Q8_0 => 1.01 * peak / 254.0 + peak * HALF_ULP_F16 + 127.0 * f16::MIN_POSITIVE_SUBNORMAL.to_f64(),
        _ => 1.01 * peak / 8.0 + peak * HALF_ULP_F16 + 8.0 * f16::MIN_POSITIVE_SUBNORMAL.to_f64(),
    }
}
