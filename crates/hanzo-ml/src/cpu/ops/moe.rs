//! Mixture-of-experts routing: scores, selection, weights; the combination of expert outputs; sorting by expert.
//!
//! Selection is exact: by value, the lowest id first among equals, so that given the same logits every form and backend
//! gives the same ids. The fused [`moe_route`] runs the same three steps row by row, so its weights are bit-equal too.
//! Weight bounds: softmax as in `rows`; sigmoid 7 u; normalising adds (k + 2) u, the scale one u. FLOPs per token: about
//! 15 n_expert; bytes: 4 n_expert + 8 k. Expert matrices are not here.

use super::math::{self, Unary};
use super::rows::softmax_row;
use super::simd::{Kernel, Simd};
use super::view::{Mat, MatMut};
use crate::cpu::isa::IsaLevel;
use crate::plan::op::{RouteSpec, RouterScore};

#[derive(Clone, Copy)]
struct Sigmoid;
impl Unary for Sigmoid {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F) -> S::F {
        math::sigmoid(s, x)
    }
}

/// # Safety
/// `x` is readable and `out` writable for `n_expert` floats.
#[inline(always)]
unsafe fn scores_row<S: Simd>(s: S, spec: &RouteSpec, x: *const f32, out: *mut f32) {
    // SAFETY: the caller's.
    unsafe {
        match spec.score {
            RouterScore::Softmax => softmax_row(s, x, out, spec.n_expert),
            RouterScore::Sigmoid => math::map_row(s, Sigmoid, x, out, spec.n_expert),
            RouterScore::SoftmaxSelected => core::ptr::copy(x, out, spec.n_expert),
        }
    }
}

/// The `ids.len()` largest of `value(0..n)`, best first, the lowest id first among equals.
///
/// One pass with insertion: a value enters only where it is strictly larger. Always fills `ids` with distinct ids (for
/// `ids.len() <= n`), NaN or not.
fn select<V: PartialOrd>(n: usize, value: impl Fn(usize) -> V, ids: &mut [u32]) {
    let mut len = 0;
    for e in 0..n {
        let v = value(e);
        if len == ids.len() && !(len > 0 && v > value(ids[len - 1] as usize)) {
            continue;
        }
        let mut at = if len < ids.len() { len } else { len - 1 };
        while at > 0 && v > value(ids[at - 1] as usize) {
            ids[at] = ids[at - 1];
            at -= 1;
        }
        ids[at] = e as u32;
        len = (len + 1).min(ids.len());
    }
}

/// Groups kept at most.
const MAX_GROUPS: usize = 64;

fn top_k_row(spec: &RouteSpec, bias: Option<&[f32]>, scores: &[f32], ids: &mut [u32], weights: &mut [f32]) {
    let ranked = |e: usize| scores[e] + bias.map_or(0.0, |b| b[e]);
    match spec.groups {
        None => select(spec.n_expert, ranked, ids),
        Some((groups, kept)) => {
            let size = spec.n_expert / groups;
            // Sums in f64, so that two groups tie only where every backend has them tie.
            let mut sums = [0.0f64; MAX_GROUPS];
            for (g, sum) in sums[..groups].iter_mut().enumerate() {
                // The two best of the group (or its only one).
                let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
                for v in (g * size..(g + 1) * size).map(ranked) {
                    if v > first {
                        (first, second) = (v, first);
                    } else if v > second {
                        second = v;
                    }
                }
                *sum = f64::from(first) + if size > 1 { f64::from(second) } else { 0.0 };
            }
            let mut best = [0u32; MAX_GROUPS];
            select(groups, |g| sums[g], &mut best[..kept]);
            let mut keep = [false; MAX_GROUPS];
            best[..kept].iter().for_each(|g| keep[*g as usize] = true);
            select(spec.n_expert, |e| if keep[e / size] { ranked(e) } else { f32::NEG_INFINITY }, ids);
        }
    }
    for (w, id) in weights.iter_mut().zip(ids.iter()) {
        *w = scores[*id as usize];
    }
}

/// # Safety
/// `w` is readable and `out` writable for `top_k` floats.
#[inline(always)]
unsafe fn normalise_row<S: Simd>(s: S, spec: &RouteSpec, w: *const f32, out: *mut f32) {
    let k = spec.top_k;
    // SAFETY: indices stay below `top_k`.
    unsafe {
        if spec.score == RouterScore::SoftmaxSelected {
            softmax_row(s, w, out, k);
        } else {
            core::ptr::copy(w, out, k);
        }
        if spec.normalise {
            let sum = (0..k).fold(0.0f32, |sum, i| sum + *out.add(i));
            if sum != 0.0 {
                (0..k).for_each(|i| *out.add(i) /= sum);
            }
        }
        if spec.scale != 1.0 {
            (0..k).for_each(|i| *out.add(i) *= spec.scale);
        }
    }
}

fn check(spec: &RouteSpec, bias: Option<&[f32]>) {
    assert!(spec.top_k >= 1 && spec.top_k <= spec.n_expert, "top_k experts of n_expert");
    assert!(bias.is_none_or(|b| b.len() == spec.n_expert), "one bias an expert");
    if let Some((groups, kept)) = spec.groups {
        assert!(
            (1..=MAX_GROUPS).contains(&groups) && spec.n_expert % groups == 0,
            "equal groups, at most {MAX_GROUPS}"
        );
        assert!((1..=groups).contains(&kept) && kept * (spec.n_expert / groups) >= spec.top_k, "too few experts kept");
    }
}

struct Scores<'a>(&'a RouteSpec, Mat<'a>, MatMut<'a>);
impl Kernel for Scores<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for r in 0..self.1.rows() {
            // SAFETY: `route_scores` has checked the shapes.
            unsafe { scores_row(s, self.0, self.1.row_ptr(r), self.2.row_ptr(r)) };
        }
    }
}

/// Scores `[n_tokens, n_expert]` from logits: softmax, sigmoid, or the logits themselves where the softmax comes after
/// selection. `out` may be the rows of `logits`.
pub fn route_scores(isa: IsaLevel, spec: &RouteSpec, logits: Mat<'_>, out: MatMut<'_>) {
    assert!(logits.rows() == out.rows() && logits.cols() == spec.n_expert && out.cols() == spec.n_expert, "shapes");
    isa.run(Scores(spec, logits, out))
}

/// The `top_k` experts of each row by `score + bias`, best first: `ids` `[n_tokens * top_k]` and their scores (without
/// bias) `weights` `[n_tokens, top_k]`. With groups only experts of the `kept` groups with the largest sum of two best
/// compete (DeepSeek-V3, arXiv 2412.19437). Panics if shapes disagree.
pub fn route_top_k(spec: &RouteSpec, bias: Option<&[f32]>, scores: Mat<'_>, ids: &mut [u32], mut weights: MatMut<'_>) {
    check(spec, bias);
    let k = spec.top_k;
    assert!(scores.cols() == spec.n_expert && weights.cols() == k && weights.rows() == scores.rows(), "shapes");
    assert!(ids.len() == k * scores.rows(), "one id a slot");
    for (r, ids) in ids.chunks_mut(k).enumerate() {
        top_k_row(spec, bias, scores.row(r), ids, weights.row_mut(r));
    }
}

struct Normalise<'a>(&'a RouteSpec, Mat<'a>, MatMut<'a>);
impl Kernel for Normalise<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for r in 0..self.1.rows() {
            // SAFETY: `route_normalise` has checked the shapes.
            unsafe { normalise_row(s, self.0, self.1.row_ptr(r), self.2.row_ptr(r)) };
        }
    }
}

/// Weights `[n_tokens, top_k]` from the selected scores: softmax over them if the spec says so, division by their sum
/// (in slot order) if it normalises, its scale. `out` may be the rows of `weights`.
pub fn route_normalise(isa: IsaLevel, spec: &RouteSpec, weights: Mat<'_>, out: MatMut<'_>) {
    assert!(weights.rows() == out.rows() && weights.cols() == spec.top_k && out.cols() == spec.top_k, "shapes");
    isa.run(Normalise(spec, weights, out))
}

struct Route<'a> {
    spec: &'a RouteSpec,
    bias: Option<&'a [f32]>,
    logits: Mat<'a>,
    ids: &'a mut [u32],
    weights: MatMut<'a>,
    scratch: &'a mut [f32],
}
impl Kernel for Route<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Route { spec, bias, logits, ids, mut weights, scratch } = self;
        for (r, ids) in ids.chunks_mut(spec.top_k).enumerate() {
            // SAFETY: `moe_route` has checked the shapes; the scratch holds n_expert floats.
            unsafe {
                scores_row(s, spec, logits.row_ptr(r), scratch.as_mut_ptr());
                top_k_row(spec, bias, &scratch[..spec.n_expert], ids, weights.row_mut(r));
                normalise_row(s, spec, weights.row_ptr(r), weights.row_ptr(r));
            }
        }
    }
}

/// [`route_scores`], [`route_top_k`] and [`route_normalise`] as one op, bit-equal to them. `scratch`: `n_expert` floats.
pub fn moe_route(
    isa: IsaLevel,
    spec: &RouteSpec,
    bias: Option<&[f32]>,
    logits: Mat<'_>,
    ids: &mut [u32],
    weights: MatMut<'_>,
    scratch: &mut [f32],
) {
    check(spec, bias);
    assert!(
        logits.cols() == spec.n_expert && weights.cols() == spec.top_k && weights.rows() == logits.rows(),
        "shapes"
    );
    assert!(ids.len() == spec.top_k * logits.rows() && scratch.len() >= spec.n_expert, "ids or scratch");
    isa.run(Route { spec, bias, logits, ids, weights, scratch })
}

struct Combine<'a>(Mat<'a>, Mat<'a>, MatMut<'a>);
impl Kernel for Combine<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Combine(x, weights, out) = self;
        let (k, n) = (weights.cols(), out.cols());
        for t in 0..out.rows() {
            let (w, dst) = (weights.row_ptr(t), out.row_ptr(t));
            let mut i = 0;
            while i < n {
                let part = (n - i).min(S::LANES);
                let mut sum = s.splat(0.0);
                // SAFETY: `part` elements remain in each of the token's k rows and in the output.
                unsafe {
                    for slot in 0..k {
                        let p = x.row_ptr(t * k + slot).add(i);
                        let v = if part == S::LANES { s.load(p) } else { s.load_part(p, part) };
                        sum = s.fma(s.splat(*w.add(slot)), v, sum);
                    }
                    if part == S::LANES {
                        s.store(dst.add(i), sum)
                    } else {
                        s.store_part(dst.add(i), part, sum)
                    };
                }
                i += part;
            }
        }
    }
}

/// `out[t] = sum over slots of weights[t, slot] * x[t * k + slot]`, in slot order: `x` `[n_tokens * k, cols]`, `weights`
/// `[n_tokens, k]`, `out` `[n_tokens, cols]`. Bound: `(k + 1) u sum |w x|`.
pub fn moe_combine(isa: IsaLevel, x: Mat<'_>, weights: Mat<'_>, out: MatMut<'_>) {
    assert!(weights.rows() == out.rows() && x.cols() == out.cols(), "shapes differ");
    assert!(x.rows() == weights.rows() * weights.cols(), "one row a slot");
    isa.run(Combine(x, weights, out))
}

/// A stable counting sort of slots by expert: slots of expert e are `permutation[offsets[e]..offsets[e + 1]]`, ascending.
///
/// `offsets` `[n_expert + 1]`, `permutation` `[ids.len()]`. Panics if an id is not below `n_expert`.
pub fn sort_by_expert(ids: &[u32], offsets: &mut [u32], permutation: &mut [u32]) {
    assert!(!offsets.is_empty() && permutation.len() == ids.len(), "one place a slot");
    offsets.fill(0);
    // Counts, shifted by one; their running sum makes offsets[e] the start of e.
    for id in ids {
        offsets[*id as usize + 1] += 1;
    }
    for e in 1..offsets.len() {
        offsets[e] += offsets[e - 1];
    }
    for (slot, id) in ids.iter().enumerate() {
        let at = &mut offsets[*id as usize];
        permutation[*at as usize] = slot as u32;
        *at += 1;
    }
    // Each start has become its end, which is the next one's start.
    for e in (1..offsets.len()).rev() {
        offsets[e] = offsets[e - 1];
    }
    offsets[0] = 0;
}

#[cfg(test)]
mod tests {
    use super::super::math::tests::isas;
    use super::*;

    const U: f64 = 1.0 / 16_777_216.0;

    fn spec(n_expert: usize, top_k: usize, score: RouterScore) -> RouteSpec {
        RouteSpec { n_expert, top_k, score, bias: None, groups: None, normalise: true, scale: 1.0 }
    }

    fn run(isa: IsaLevel, spec: &RouteSpec, bias: Option<&[f32]>, logits: &[f32]) -> (Vec<u32>, Vec<f32>) {
        let (n, k) = (logits.len() / spec.n_expert, spec.top_k);
        let (mut ids, mut weights) = (vec![9999; n * k], vec![f32::NAN; n * k]);
        let mut scratch = vec![0.0; spec.n_expert];
        let m = Mat::new(logits, n, spec.n_expert);
        moe_route(isa, spec, bias, m, &mut ids, MatMut::new(&mut weights, n, k), &mut scratch);
        // The three steps agree to the bit.
        let mut scores = vec![0.0; logits.len()];
        route_scores(isa, spec, m, MatMut::new(&mut scores, n, spec.n_expert));
        let (mut ids2, mut raw, mut w2) = (vec![0; n * k], vec![0.0; n * k], vec![0.0; n * k]);
        route_top_k(spec, bias, Mat::new(&scores, n, spec.n_expert), &mut ids2, MatMut::new(&mut raw, n, k));
        route_normalise(isa, spec, Mat::new(&raw, n, k), MatMut::new(&mut w2, n, k));
        let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!((&ids, bits(&weights)), (&ids2, bits(&w2)));
        (ids, weights)
    }

    #[test]
    fn softmax_routing_matches_f64_ids_exactly_and_weights_within_the_bound() {
        let (n, e, k) = (40, 60, 8);
        let logits: Vec<f32> = (0..n * e).map(|i| (i as f32 * 0.917).sin() * 5.0).collect();
        for isa in isas() {
            for score in [RouterScore::Softmax, RouterScore::Sigmoid, RouterScore::SoftmaxSelected] {
                for normalise in [false, true] {
                    let spec = RouteSpec { normalise, scale: 2.5, ..spec(e, k, score) };
                    let (ids, weights) = run(isa, &spec, None, &logits);
                    for t in 0..n {
                        let row: Vec<f64> = logits[t * e..][..e].iter().map(|v| *v as f64).collect();
                        let mut order: Vec<usize> = (0..e).collect();
                        order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
                        assert!(order[..k].iter().zip(&ids[t * k..]).all(|(a, b)| *a == *b as usize));
                        let all: f64 = row.iter().map(|v| v.exp()).sum();
                        let mut w: Vec<f64> = order[..k]
                            .iter()
                            .map(|i| match score {
                                RouterScore::Softmax => row[*i].exp() / all,
                                RouterScore::Sigmoid => 1.0 / (1.0 + (-row[*i]).exp()),
                                RouterScore::SoftmaxSelected => row[*i].exp(),
                            })
                            .collect();
                        if normalise || score == RouterScore::SoftmaxSelected {
                            let sum: f64 = w.iter().sum();
                            w.iter_mut().for_each(|w| *w /= sum);
                        }
                        for (w, got) in w.iter().zip(&weights[t * k..]) {
                            let rel = (2.0 * 10.0 + e as f64 / 8.0 + 16.0) * 2.0 + (k + 3) as f64;
                            assert!((2.5 * w - *got as f64).abs() <= rel * U * 2.5 * w, "{isa:?} {score:?} {w} {got}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn equal_scores_go_to_the_lowest_ids_first() {
        for isa in isas() {
            let spec = spec(8, 4, RouterScore::Softmax);
            let (ids, weights) = run(isa, &spec, None, &[1.0, 2.0, 2.0, 1.0, 2.0, 0.0, 1.0, 1.0]);
            assert_eq!(ids, [1, 2, 4, 0]);
            assert!(weights[0] == weights[1] && weights[1] == weights[2]);
            assert_eq!(run(isa, &spec, None, &[0.5; 8]).0, [0, 1, 2, 3]);
        }
    }

    #[test]
    fn the_bias_selects_but_does_not_weigh_and_groups_compete_by_their_two_best() {
        // Groups of two: {0,1}, {2,3}, {4,5}, {6,7}.
        let logits = [3.0, -9.0, 1.0, 1.0, 0.9, 0.8, -1.0, -1.0];
        let bias = [0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0];
        let spec = RouteSpec { groups: Some((4, 2)), normalise: false, ..spec(8, 3, RouterScore::Sigmoid) };
        for isa in isas() {
            let (ids, weights) = run(isa, &spec, Some(&bias), &logits);
            // Sums: 0.95, 1.46, 0.71 + 0.69 + 0.5 = 1.90, 0.54: groups 2 and 1 stay; expert 0 is out.
            assert_eq!(ids, [5, 2, 3]);
            assert!((weights[0] as f64 - 1.0 / (1.0 + (-0.8f64).exp())).abs() < 1e-6);
        }
    }

    #[test]
    fn not_a_number_still_selects_distinct_experts() {
        let (ids, _) = run(IsaLevel::detect(), &spec(6, 3, RouterScore::Softmax), None, &[f32::NAN; 6]);
        assert_eq!(ids, [0, 1, 2]);
    }

    #[test]
    fn combining_adds_the_slots_in_order_within_the_bound() {
        let (n, k, cols) = (3, 4, 37);
        let x: Vec<f32> = (0..n * k * cols).map(|i| (i as f32 * 0.31).sin() * 2.0).collect();
        let w: Vec<f32> = (0..n * k).map(|i| 0.1 + (i % 5) as f32 * 0.2).collect();
        for isa in isas() {
            let mut out = vec![0.0; n * cols];
            moe_combine(isa, Mat::new(&x, n * k, cols), Mat::new(&w, n, k), MatMut::new(&mut out, n, cols));
            for t in 0..n {
                for c in 0..cols {
                    let terms = (0..k).map(|s| w[t * k + s] as f64 * x[(t * k + s) * cols + c] as f64);
                    let (sum, size) = terms.fold((0.0, 0.0), |(s, a), v| (s + v, a + v.abs()));
                    assert!((out[t * cols + c] as f64 - sum).abs() <= (k + 1) as f64 * U * size);
                }
            }
        }
    }

    #[test]
    fn sorting_by_expert_is_stable_and_copes_with_empty_experts() {
        let ids = [3, 1, 3, 0, 1, 3];
        let (mut offsets, mut permutation) = ([7; 6], [0; 6]);
        sort_by_expert(&ids, &mut offsets, &mut permutation);
        assert_eq!(offsets, [0, 1, 3, 3, 6, 6]);
        assert_eq!(permutation, [3, 1, 4, 0, 2, 5]);
        sort_by_expert(&[], &mut offsets, &mut []);
        assert_eq!(offsets, [0; 6]);
    }
}
