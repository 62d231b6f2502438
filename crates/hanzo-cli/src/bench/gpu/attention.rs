//! Attention over an f16 cache: a few tokens by splits of the keys, many by tiles of rows.

use hanzo_gguf::Format;
use hanzo_kernels::Key;
use hanzo_kernels::cache::{Order, from_rows, values_order};
use hanzo_ml::vulkan::raw::Memory;

use super::subject::{Arg, Check, Choice, Constants, Machine, Subject, launch};
use super::weights::Noise;
use crate::failure::Failure;

/// Rows of a page.
const PAGE: usize = 32;
/// Different pages of one head.
const POOL: usize = 16;
/// Tokens up to which keys are cut into splits.
const FEW: usize = 16;
/// Workgroups that fill a device.
const FULL: usize = 512;

/// Arrays of a step buffer of so many tokens, in words from its start, the pages last.
fn arrays(tokens: usize) -> [(&'static str, usize); 6] {
    let n = tokens.next_multiple_of(4);
    [
        ("LIVE_AT", 0),
        ("ENDS", 4),
        ("POSITIONS", 4 + n),
        ("TABLES", 4 + 2 * n),
        ("FIRSTS", 4 + 3 * n),
        ("PAGES", 4 + 4 * n),
    ]
}

fn step(case: &Case, end: &dyn Fn(usize) -> u32, page: &dyn Fn(usize) -> u32) -> Vec<u32> {
    let [_, ends, positions, .., pages] = arrays(case.tokens).map(|a| a.1);
    let mut words = vec![0; pages];
    words[0] = case.tokens as u32;
    for t in 0..case.tokens {
        (words[ends + t], words[positions + t]) = (end(t), end(t) - 1);
    }
    words.extend((0..case.pages()).map(page));
    words
}

/// What attends to what: the last `tokens` of `keys` positions, causally.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    pub tokens: usize,
    pub keys: usize,
    /// Columns of a head's rows.
    pub d: usize,
    /// Key/value heads.
    pub n_kv: usize,
    /// Query heads of each.
    pub group: usize,
}

impl Case {
    fn heads(&self) -> usize {
        self.n_kv * self.group
    }

    fn pages(&self) -> usize {
        self.keys.div_ceil(PAGE)
    }

    /// One past the last key that a token sees.
    fn end(&self, token: usize) -> usize {
        self.keys - self.tokens + token + 1
    }

    /// Which of the pool a head's page is.
    fn pooled(&self, page: usize, head: usize) -> usize {
        (page * 7 + head * 3 + page / POOL) % POOL
    }
}

/// A case on the device.
pub struct Attention {
    case: Case,
    q: Vec<f32>,
    /// Rows of the pool's pages: keys, then values.
    pool: [Vec<f32>; 2],
    caches: Vec<[Memory; 2]>,
    step: Vec<(&'static str, Memory)>,
    part: Memory,
    y: Memory,
    threads: u32,
}

impl Attention {
    /// Puts a case on the device, its cache as often as `working_set` needs.
    pub fn new(gpu: &Machine, case: Case, working_set: u64) -> anyhow::Result<Attention> {
        let Case { tokens, keys, d, n_kv, group } = case;
        if tokens > keys || d % 32 != 0 || d > 256 || group > 8 || n_kv * group == 0 {
            let what = "--op attention takes a shape of KEYSxHEADSIZE, at most as many tokens as keys, heads of whole 32s up \
                        to 256, and at most 8 query heads of a key/value head (--const NKV=8,GROUP=4)";
            return Err(Failure::usage(what).into());
        }
        let mut noise = Noise(17);
        let half = |x: f32| (x * 256.0).round() / 256.0;
        let pool = [0, 1].map(|_| (0..POOL * PAGE * d).map(|_| half(noise.normal())).collect::<Vec<f32>>());
        let q: Vec<f32> = (0..tokens * case.heads() * d).map(|_| noise.normal()).collect();
        let floats = |x: &[f32]| gpu.upload(&x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
        let words = |x: Vec<u32>| gpu.upload(&x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
        // Pages lie in the opposite order; the first of the memory is nobody's.
        let place = |page: usize| case.pages() - page;
        let slots = case.pages() + 1;
        let cache = |which: usize| {
            let order = if which == 0 { Order::Keys } else { values_order(d) };
            let bytes: Vec<u8> = pool[which].iter().flat_map(|x| f16(*x).to_le_bytes()).collect();
            let pages = from_rows(Format::F16, d, order, &bytes);
            let size = 2 * PAGE * d;
            let mut all = vec![0u8; slots * n_kv * size];
            for (page, head) in (0..case.pages()).flat_map(|p| (0..n_kv).map(move |h| (p, h))) {
                let to = (place(page) * n_kv + head) * size;
                all[to..to + size].copy_from_slice(&pages[case.pooled(page, head) * size..][..size]);
            }
            all
        };
        let bytes = [cache(0), cache(1)];
        let copies = working_set.div_ceil(2 * bytes[0].len() as u64).clamp(1, 256);
        let caches =
            (0..copies).map(|_| Ok([gpu.upload(&bytes[0])?, gpu.upload(&bytes[1])?])).collect::<anyhow::Result<_>>()?;
        let step = vec![
            ("q", floats(&q)?),
            ("live", words(vec![tokens as u32])?),
            ("ends", words((0..tokens).map(|t| case.end(t) as u32).collect())?),
            ("positions", words((0..tokens).map(|t| case.end(t) as u32 - 1).collect())?),
            ("tables", words(vec![0; tokens])?),
            ("firsts", words(vec![0; tokens])?),
            ("pages", words((0..case.pages()).map(|p| place(p) as u32).collect())?),
            // The same for attn_decode, which reads them from one step buffer.
            ("step", words(step(&case, &|t| case.end(t) as u32, &|p| place(p) as u32))?),
            ("nothing", gpu.zeros(256)?),
            // As many splits as a sweep may try.
            ("top", gpu.zeros(8 * tokens * case.heads() * splits_at_most(&case))?),
        ];
        let sums = if tokens <= FEW { tokens * case.heads() * splits_at_most(&case) * d } else { 1 };
        Ok(Attention {
            part: gpu.zeros(4 * sums)?,
            y: gpu.zeros(4 * tokens * case.heads() * d)?,
            threads: gpu.features.max_threads.min(256),
            case,
            q,
            pool,
            caches,
            step,
        })
    }

    fn few(&self) -> bool {
        self.case.tokens <= FEW
    }

    /// The row of a key (0) or a value (1).
    fn row(&self, which: usize, key: usize, head: usize) -> &[f32] {
        let row = self.case.pooled(key / PAGE, head) * PAGE + key % PAGE;
        &self.pool[which][row * self.case.d..][..self.case.d]
    }

    fn scale(&self) -> f32 {
        1.0 / (self.case.d as f32).sqrt()
    }

    fn scalars(&self) -> [(&'static str, Arg); 3] {
        [("window", Arg::U32(0)), ("scale", Arg::F32(self.scale())), ("cap", Arg::F32(1.0))]
    }

    fn memory(&self, name: &str) -> Arg {
        self.step.iter().find(|s| s.0 == name).map_or(Arg::Pointer(0), |s| Arg::from(&s.1))
    }
}

/// A normal half that is exact.
fn f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let exponent = (bits >> 23 & 0xff) as i32 - 127 + 15;
    if exponent <= 0 { 0 } else { (bits >> 16 & 0x8000 | (exponent as u32) << 10 | bits >> 13 & 0x3ff) as u16 }
}

fn splits_at_most(case: &Case) -> usize {
    case.keys.div_ceil(PAGE).clamp(1, 256)
}

impl Subject for Attention {
    fn kernel(&self) -> Key {
        Key { op: if self.few() { "attn_decode" } else { "attn_prefill" }, format: None }
    }

    fn fixed(&self) -> Vec<(&'static str, u32)> {
        let Case { tokens, keys, d, n_kv, group } = self.case;
        let wide = d.div_ceil(64) * 16;
        let (at_once, rows) = if d > 128 { (32, 32) } else { (64, 64) };
        let values_in_key_order = values_order(d) == Order::Keys;
        let mut all = vec![("DK", d), ("DV", d), ("VD", d), ("NKV", n_kv), ("GROUP", group), ("KT", 1), ("VT", 1)];
        all.extend([("VKEY", values_in_key_order.into()), ("LIVE", usize::from(tokens == 1))]);
        if self.few() {
            let splits = keys.div_ceil(at_once).clamp(1, (FULL / (tokens * n_kv)).clamp(1, 128));
            let red = if group > 1 && d <= 128 { 2 } else { 1 };
            all.extend([("KEYS", at_once), ("SPLITS", splits), ("HEADS", group), ("RED", red)]);
            all.push(("THREADS", self.threads as usize));
            all.extend(arrays(tokens));
            all.push(("SCALE", self.scale().to_bits() as usize));
        } else {
            all.extend([("ROWS", rows), ("WIDE", wide), ("KEYS", if wide > 32 { 8 } else { 512 / wide })]);
        }
        all.into_iter().map(|(name, value)| (name, value as u32)).collect()
    }

    fn grid(&self, c: &Constants) -> Result<[u32; 3], String> {
        let Case { tokens, n_kv, group, .. } = self.case;
        if (c.get("NKV"), c.get("GROUP")) != (n_kv as u32, group as u32) {
            return Err("NKV and GROUP are the case's".into());
        }
        if !self.few() {
            return Ok([((tokens * group) as u32).div_ceil(c.get("ROWS").max(1)), n_kv as u32, 1]);
        }
        let (splits, heads, keys) = (c.get("SPLITS"), c.get("HEADS"), c.get("KEYS"));
        if splits == 0 || splits as usize > splits_at_most(&self.case) || heads == 0 || heads > 8 {
            return Err(format!("SPLITS is at most {}, HEADS 8", splits_at_most(&self.case)));
        }
        if keys == 0 || keys % 32 != 0 || !c.get("THREADS").is_multiple_of(keys) {
            return Err("KEYS is a multiple of 32 that divides THREADS".into());
        }
        Ok([n_kv as u32 * (group as u32).div_ceil(heads), splits, tokens as u32])
    }

    fn copies(&self) -> usize {
        self.caches.len()
    }

    fn arguments(&self, c: &Constants, copy: usize) -> anyhow::Result<Vec<(&'static str, Arg)>> {
        let mut all = self.scalars().to_vec();
        all.extend(self.step.iter().map(|(name, m)| (*name, Arg::from(m))));
        let nothing = self.memory("nothing");
        all.extend([("k", (&self.caches[copy][0]).into()), ("v", (&self.caches[copy][1]).into())]);
        all.extend([("part", (&self.part).into()), ("y", (&self.y).into()), ("sinks", nothing), ("gate", nothing)]);
        all.extend(["xq", "k_new", "v_new", "q_norm", "k_norm", "kc", "vc"].map(|name| (name, nothing)));
        all.push(("tiles", Arg::U32(self.grid(c).unwrap_or_default()[0])));
        Ok(all)
    }

    fn bytes(&self) -> u64 {
        (4 * self.case.keys * self.case.n_kv * self.case.d) as u64
    }

    fn working_set(&self) -> u64 {
        self.bytes() * self.caches.len() as u64
    }

    fn operations(&self) -> f64 {
        let seen: usize = (0..self.case.tokens).map(|t| self.case.end(t)).sum();
        4.0 * (seen * self.case.heads() * self.case.d) as f64
    }

    fn output(&self) -> Option<&Memory> {
        Some(if self.few() { &self.part } else { &self.y })
    }

    fn check(&self, gpu: &Machine, c: &Constants) -> anyhow::Result<Check> {
        let Case { tokens, d, group, .. } = self.case;
        let heads = self.case.heads();
        if self.few() {
            // The splits are summed up by the kernel that follows.
            let mut args = self.arguments(c, 0)?;
            args.extend(["xd", "xs"].map(|name| (name, self.memory("nothing"))));
            let set = [
                ("KEYS", c.get("KEYS")),
                ("SPLITS", c.get("SPLITS")),
                ("DV", d as u32),
                ("HEADS", heads as u32),
                ("THREADS", self.threads),
            ];
            let key = Key { op: "attn_combine", format: None };
            launch(gpu, key, &set, &args, |_| [heads as u32, tokens as u32, 1])?;
        }
        let y = gpu.read(&self.y)?;
        let mut check = Check::default();
        for (token, head) in [(0, 0), (tokens / 2, heads / 2), (tokens - 1, heads - 1)] {
            let q = &self.q[(token * heads + head) * d..][..d];
            let dot = |key: usize| {
                let k = self.row(0, key, head / group);
                q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() * f64::from(self.scale())
            };
            let scores: Vec<f64> = (0..self.case.end(token)).map(dot).collect();
            let top = scores.iter().fold(f64::NEG_INFINITY, |m, s| m.max(*s));
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
            let total: f64 = weights.iter().sum();
            for column in [0, d / 2, d - 1] {
                let value = |key: usize| f64::from(self.row(1, key, head / group)[column]);
                let should: f64 = weights.iter().enumerate().map(|(key, w)| w / total * value(key)).sum();
                let at = 4 * ((token * heads + head) * d + column);
                let is = f32::from_le_bytes([y[at], y[at + 1], y[at + 2], y[at + 3]]);
                check.add(f64::from(is), should, 2f64.powi(-14));
            }
        }
        Ok(check)
    }

    fn axes(&self) -> Vec<Vec<Choice>> {
        if !self.few() {
            return Vec::new();
        }
        let axis =
            |name: &'static str, values: &[u32]| values.iter().map(|v| vec![(name, *v)]).collect::<Vec<Choice>>();
        vec![axis("SPLITS", &[8, 16, 32, 64, 128]), axis("KEYS", &[32, 64, 128]), axis("RED", &[1, 2])]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_exact_where_they_are_normal() {
        assert_eq!([0.0, 1.0, -2.5, 0.00390625].map(f16), [0, 0x3c00, 0xc100, 0x1c00]);
    }

    #[test]
    fn the_last_token_sees_every_key() {
        let case = Case { tokens: 3, keys: 70, d: 64, n_kv: 2, group: 4 };
        assert_eq!((case.end(0), case.end(2), case.pages(), case.heads()), (68, 70, 3, 8));
    }
}
