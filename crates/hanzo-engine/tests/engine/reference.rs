//! The six architectures once more, in f64 and without a Plan: one token after the other, every key kept, written from the
//! models' own descriptions. It shares no code with the engine beyond reading the file.

use hanzo_gguf::Gguf;

struct Model<'a> {
    gguf: &'a Gguf,
    arch: &'a str,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

fn softmax(x: &mut [f64]) {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    x.iter_mut().for_each(|v| *v = (*v - max).exp());
    let sum: f64 = x.iter().sum();
    x.iter_mut().for_each(|v| *v /= sum);
}

impl Model<'_> {
    fn key(&self, key: &str) -> Option<f64> {
        self.gguf.metadata().get(&format!("{}.{key}", self.arch)).and_then(|v| v.as_f64())
    }

    fn size(&self, key: &str) -> usize {
        self.key(key).expect(key) as usize
    }

    fn weight(&self, name: &str) -> Option<Vec<f64>> {
        let bytes = self.gguf.data(self.gguf.tensor(name)?);
        Some(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]) as f64).collect())
    }

    fn need(&self, name: &str) -> Vec<f64> {
        self.weight(name).expect(name)
    }

    /// `w x + b` over rows of the tensor.
    fn linear(&self, x: &[f64], name: &str) -> Vec<f64> {
        let w = self.need(&format!("{name}.weight"));
        let mut y: Vec<f64> = w.chunks_exact(x.len()).map(|row| dot(row, x)).collect();
        if let Some(b) = self.weight(&format!("{name}.bias")) {
            y.iter_mut().zip(b).for_each(|(y, b)| *y += b);
        }
        y
    }

    /// RMS norm over each run of the weight's length.
    fn norm(&self, x: &[f64], name: &str) -> Vec<f64> {
        let w = self.need(&format!("{name}.weight"));
        let eps = self.key("attention.layer_norm_rms_epsilon").expect("eps") as f32 as f64;
        let run = |x: &[f64]| {
            let r = 1.0 / (dot(x, x) / x.len() as f64 + eps).sqrt();
            x.iter().zip(&w).map(move |(x, w)| x * r * w).collect::<Vec<f64>>()
        };
        x.chunks_exact(w.len()).flat_map(run).collect()
    }

    /// Angle of each pair for one position, and what the rotated pair is multiplied by.
    fn angles(&self, position: usize, local: bool, n_ctx: usize) -> (Vec<f64>, f64) {
        let n =
            self.key("rope.dimension_count").unwrap_or_else(|| self.key("attention.key_length").expect("d")) as usize;
        let base = if local { 1e4 } else { self.key("rope.freq_base").unwrap_or(1e4) };
        let original = self.key("rope.scaling.original_context_length");
        let longest = self.key("context_length").expect("context");
        let (mut divisors, mut magnitude) = (vec![1.0; n / 2], 1.0);
        if let Some(f) = self.weight("rope_freqs.weight") {
            divisors = f;
        }
        if self.arch == "phi3" {
            let o = original.expect("original context");
            let kind = if n_ctx as f64 > o { "long" } else { "short" };
            divisors = self.need(&format!("rope_factors_{kind}.weight"));
            magnitude = (1.0 + (longest / o).ln() / o.ln()).sqrt();
        }
        let factor = if local { 1.0 } else { self.key("rope.scaling.factor").unwrap_or(1.0) };
        let yarn = self.gguf.metadata().opt_str(&format!("{}.rope.scaling.type", self.arch)).expect("a string")
            == Some("yarn");
        let pair = |(i, divisor): (usize, &f64)| {
            let plain = position as f64 * base.powf(-2.0 * i as f64 / n as f64) / divisor;
            if !yarn {
                return plain / factor;
            }
            // The pair that turns r times over the original context; between 32 and 1 turns both mix.
            let at = |r: f64| {
                let turns = original.expect("original context") / (r * 2.0 * std::f64::consts::PI);
                n as f64 * turns.ln() / (2.0 * base.ln())
            };
            let (low, high) = (at(32.0).floor().max(0.0), at(1.0).ceil().min(n as f64 - 1.0));
            let ramp = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
            plain / factor * ramp + plain * (1.0 - ramp)
        };
        let angles = divisors.iter().enumerate().map(pair).collect();
        (angles, if yarn { magnitude * (1.0 + 0.1 * factor.ln()) } else { magnitude })
    }

    fn rotate(&self, x: &mut [f64], d: usize, (angles, magnitude): &(Vec<f64>, f64)) {
        let half = angles.len();
        for head in x.chunks_exact_mut(d) {
            for (i, angle) in angles.iter().enumerate() {
                let (a, b) = if self.arch == "llama" { (2 * i, 2 * i + 1) } else { (i, i + half) };
                let (sin, cos) = angle.sin_cos();
                let (p, q) = (head[a], head[b]);
                head[a] = (p * cos - q * sin) * magnitude;
                head[b] = (p * sin + q * cos) * magnitude;
            }
        }
    }

    fn feed_forward(&self, x: &[f64], layer: &str) -> Vec<f64> {
        let name = |n: &str| format!("{layer}{n}");
        if self.arch == "qwen3moe" {
            let mut p = self.linear(x, &name("ffn_gate_inp"));
            softmax(&mut p);
            let mut order: Vec<usize> = (0..p.len()).collect();
            order.sort_by(|a, b| p[*b].total_cmp(&p[*a]));
            order.truncate(self.size("expert_used_count"));
            let total: f64 = order.iter().map(|e| p[*e]).sum();
            let expert = |x: &[f64], tensor: &str, e: usize, rows: usize| {
                let w = self.need(&name(&format!("{tensor}.weight")));
                let w = &w[e * rows * x.len()..(e + 1) * rows * x.len()];
                w.chunks_exact(x.len()).map(|row| dot(row, x)).collect::<Vec<f64>>()
            };
            let mut out = vec![0.0; x.len()];
            for e in order {
                let n = self.size("expert_feed_forward_length");
                let (g, u) = (expert(x, "ffn_gate_exps", e, n), expert(x, "ffn_up_exps", e, n));
                let f: Vec<f64> = g.iter().zip(u).map(|(g, u)| silu(*g) * u).collect();
                let f = expert(&f, "ffn_down_exps", e, x.len());
                out.iter_mut().zip(f).for_each(|(o, f)| *o += p[e] / total * f);
            }
            return out;
        }
        let (gate, up) = if self.arch == "phi3" {
            let mut both = self.linear(x, &name("ffn_up"));
            let up = both.split_off(both.len() / 2);
            (both, up)
        } else {
            (self.linear(x, &name("ffn_gate")), self.linear(x, &name("ffn_up")))
        };
        let act = if self.arch == "gemma3" { gelu } else { silu };
        let f: Vec<f64> = gate.iter().zip(up).map(|(g, u)| act(*g) * u).collect();
        self.linear(&f, &name("ffn_down"))
    }
}

/// Logits `[ids, vocabulary]` of a model whose tensors are all F32, for a context of `n_ctx`.
pub fn logits(gguf: &Gguf, ids: &[u32], n_ctx: usize) -> Vec<f64> {
    let arch = gguf.metadata().str("general.architecture").expect("an architecture");
    let m = Model { gguf, arch };
    let (n_embd, heads, kv) =
        (m.size("embedding_length"), m.size("attention.head_count"), m.size("attention.head_count_kv"));
    let (d, layers) = (m.size("attention.key_length"), m.size("block_count"));
    let gemma = arch == "gemma3";
    let table = m.need("token_embd.weight");
    let scale = if gemma { (n_embd as f64).sqrt() } else { 1.0 };
    let mut x: Vec<Vec<f64>> =
        ids.iter().map(|t| table[*t as usize * n_embd..][..n_embd].iter().map(|v| v * scale).collect()).collect();
    for l in 0..layers {
        let name = |n: &str| format!("blk.{l}.{n}");
        let local = gemma && (l + 1) % m.size("attention.sliding_window_pattern") != 0;
        let window = if local || arch == "phi3" { m.size("attention.sliding_window") } else { usize::MAX };
        let (mut keys, mut values): (Vec<Vec<f64>>, Vec<Vec<f64>>) = (Vec::new(), Vec::new());
        for (p, x) in x.iter_mut().enumerate() {
            let h = m.norm(x, &name("attn_norm"));
            let (mut q, mut k, v) = if arch == "phi3" {
                let mut q = m.linear(&h, &name("attn_qkv"));
                let mut k = q.split_off(heads * d);
                let v = k.split_off(kv * d);
                (q, k, v)
            } else {
                (m.linear(&h, &name("attn_q")), m.linear(&h, &name("attn_k")), m.linear(&h, &name("attn_v")))
            };
            if m.weight(&name("attn_q_norm.weight")).is_some() {
                q = m.norm(&q, &name("attn_q_norm"));
                k = m.norm(&k, &name("attn_k_norm"));
            }
            let angles = m.angles(p, local, n_ctx);
            m.rotate(&mut q, d, &angles);
            m.rotate(&mut k, d, &angles);
            keys.push(k);
            values.push(v);
            let mut a = vec![0.0; heads * d];
            for head in 0..heads {
                let from = (p + 1).saturating_sub(window);
                let g = head / (heads / kv) * d;
                let q = &q[head * d..][..d];
                let mut s: Vec<f64> = (from..=p).map(|j| dot(q, &keys[j][g..g + d]) / (d as f64).sqrt()).collect();
                softmax(&mut s);
                for (j, s) in (from..=p).zip(s) {
                    a[head * d..][..d].iter_mut().zip(&values[j][g..g + d]).for_each(|(a, v)| *a += s * v);
                }
            }
            let mut a = m.linear(&a, &name("attn_output"));
            if gemma {
                a = m.norm(&a, &name("post_attention_norm"));
            }
            x.iter_mut().zip(a).for_each(|(x, a)| *x += a);
            let h = m.norm(x, &name("ffn_norm"));
            let mut f = m.feed_forward(&h, &name(""));
            if gemma {
                f = m.norm(&f, &name("post_ffw_norm"));
            }
            x.iter_mut().zip(f).for_each(|(x, f)| *x += f);
        }
    }
    let head = if gguf.tensor("output.weight").is_some() { "output" } else { "token_embd" };
    x.iter().flat_map(|x| m.linear(&m.norm(x, "output_norm"), head)).collect()
}
