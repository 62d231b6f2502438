//! Reading weights ahead (lever `weight_prefetch`): in a step of one token, stages such as norms and attention leave the
//! memory idle. Beside them a launch reads the next matrices' first rows, so that they come from the device's cache.
//!
//! A pass over launches that are there: it looks at what stands between two barriers and at the weights behind. What it
//! adds touches weights alone, which nobody writes, so that barriers stay as they are. It stands behind the stage's own
//! launches: those come first to the device's units. No kernel's arguments but its own are known here.

use super::is_matrix;
use crate::backend::CompileOptions;
use crate::gpu::barriers::barriers;
use crate::gpu::launch::{Buffer, Features, Launch, Ptr};
use crate::plan::{Plan, Sizes, WeightId};
use hanzo_kernels::args::Prefetch;
use std::collections::HashSet;
use std::ops::Range;

/// Runs of a launch: what the kernel takes.
const RUNS: usize = 8;
/// Bytes of a sector: what memory hands out.
const SECTOR: u64 = 32;
/// A stage that reads more weights than this is busy with them.
const LIGHT: u64 = 2 << 20;
/// What may pass through the cache between a read ahead and its use. Devices that prefetch keep at least 40 MB.
const RESIDENT: u64 = 32 << 20;
/// Less than this is not worth a launch.
const LEAST: u64 = 4 << 10;

/// Sixths of [`Features::prefetch_bytes`] that fit beside a kernel: about the microseconds that its stage takes on a device
/// that launches such a stage in two.
fn sixths(op: &str) -> u64 {
    match op {
        "attn_decode" => 6,
        "moe_route" | "router_select" => 4,
        _ => 3,
    }
}

/// What a launch reads of weights.
#[derive(Default)]
struct Reads {
    /// Whole matrices of as many rows each: the planes' offsets and bytes of a row, and the bytes in all.
    matrices: Vec<Matrix>,
    rows: u64,
    /// Bytes of a row over all matrices.
    row: u64,
    /// Rows that are read ahead already.
    done: u64,
    /// Vectors, which are read whole.
    vectors: Vec<Ptr>,
    /// All bytes that it reads, those nobody can know beforehand (experts' matrices) included.
    bytes: u64,
}

struct Matrix {
    whole: Ptr,
    /// Offset of each plane, and its bytes of a row.
    planes: Vec<(u64, u64)>,
}

impl Reads {
    fn of(plan: &Plan, matrices: &HashSet<WeightId>, options: &CompileOptions, launch: &Launch) -> Reads {
        let mut r = Reads::default();
        for (_, p) in &launch.relocations {
            let Buffer::Weight(w) = p.buffer else { continue };
            if !matrices.contains(&w) {
                r.vectors.push(*p);
                r.bytes += p.len;
                continue;
            }
            let x = plan.wt(w);
            let layout = hanzo_kernels::layout(x.format, x.experts * x.rows, x.cols);
            let (Some(layout), Some(file)) = (layout, hanzo_kernels::format_file(x.format)) else { continue };
            // Which rows of an embedding and which experts, nobody knows yet.
            if launch.kernel.op == "embed" || x.experts > 1 {
                r.bytes += plan.cost(launch.op, &options.bucket, options.n_ctx).weight_bytes as u64;
                continue;
            }
            if r.matrices.is_empty() {
                r.rows = x.rows as u64;
            } else if r.rows != x.rows as u64 {
                continue;
            }
            let plane = |(offset, bytes): (&u64, &u32)| (*offset, layout.row_blocks * u64::from(*bytes));
            let planes: Vec<_> = layout.offsets.iter().zip(&file.planes).map(plane).collect();
            r.row += planes.iter().map(|p| p.1).sum::<u64>();
            r.bytes += layout.bytes;
            r.matrices.push(Matrix { whole: Ptr { offset: 0, len: layout.bytes, ..*p }, planes });
        }
        r
    }

    /// Runs of the next rows that fit in `bytes`, and those of the vectors if these are not read ahead yet; none if they are
    /// more than `runs`.
    fn take(&mut self, bytes: u64, runs: usize) -> Vec<Ptr> {
        let mut out: Vec<Ptr> = Vec::new();
        if self.vectors.len() <= runs {
            out.append(&mut self.vectors);
        }
        let rows = (bytes / self.row.max(1)).min(self.rows - self.done);
        let next = self.done + rows;
        let mut parts = Vec::new();
        for m in &self.matrices {
            if (self.done, next) == (0, self.rows) {
                parts.push(m.whole);
                continue;
            }
            for (offset, row) in &m.planes {
                parts.push(m.whole.part(offset + self.done * row, rows * row));
            }
        }
        if rows > 0 && out.len() + parts.len() <= runs {
            self.done = next;
            out.append(&mut parts);
        }
        out
    }
}

/// Puts the launches in that read ahead. Gives all launches and the first of the head.
pub(super) fn add(
    plan: &Plan,
    options: &CompileOptions,
    features: &Features,
    launches: Vec<Launch>,
    head: usize,
) -> Result<(Vec<Launch>, usize), String> {
    let one = options.bucket == Sizes { n_tokens: 1, n_seqs: 1, n_out: 1 };
    if !one || !options.levers.on("weight_prefetch") || features.prefetch_bytes == 0 {
        return Ok((launches, head));
    }
    let ids = (0..plan.weights.len() as u32).map(WeightId);
    let matrices: HashSet<WeightId> = ids.filter(|w| is_matrix(plan, *w)).collect();
    let stages = stages(&barriers(&launches, head));
    let mut reads: Vec<Vec<Reads>> = (stages.iter())
        .map(|s| launches[s.clone()].iter().map(|l| Reads::of(plan, &matrices, options, l)).collect())
        .collect();
    let heavy: Vec<u64> = reads.iter().map(|s| s.iter().map(|r| r.bytes).sum()).collect();

    let mut all = Vec::with_capacity(launches.len() + stages.len());
    let (mut moved, mut launches) = (head, launches.into_iter());
    for (i, stage) in stages.iter().enumerate() {
        if stage.start == head {
            moved = all.len();
        }
        let own: Vec<Launch> = launches.by_ref().take(stage.len()).collect();
        let beside = own.iter().map(|l| sixths(l.kernel.op)).max().unwrap_or(0);
        let op = own.first().map_or(0, |l| l.op);
        all.extend(own);
        if heavy[i] <= LIGHT {
            let runs = ahead(&mut reads[i + 1..], &heavy[i + 1..], features.prefetch_bytes * beside / 6);
            if runs.iter().map(|p| p.len).sum::<u64>() >= LEAST {
                all.push(launch(op, features, &runs)?);
            }
        }
    }
    if head == stages.last().map_or(0, |s| s.end) {
        moved = all.len();
    }
    debug_assert_eq!(barriers(&all, moved).iter().filter(|b| **b).count() + 1, stages.len().max(1));
    Ok((all, moved))
}

/// The launches between two barriers, one range each.
fn stages(barriers: &[bool]) -> Vec<Range<usize>> {
    let starts: Vec<usize> = (0..barriers.len()).filter(|i| *i == 0 || barriers[*i]).collect();
    let ends = starts.iter().skip(1).copied().chain([barriers.len()]);
    starts.iter().copied().zip(ends).map(|(a, b)| a..b).collect()
}

/// What to read ahead of the stages behind, in their order: at most `bytes`, and not past what the cache keeps.
fn ahead(behind: &mut [Vec<Reads>], heavy: &[u64], bytes: u64) -> Vec<Ptr> {
    let (mut runs, mut left, mut passed) = (Vec::new(), bytes, 0);
    for (stage, heavy) in behind.iter_mut().zip(heavy) {
        let before = passed;
        passed += heavy;
        for r in stage.iter_mut() {
            let kept = RESIDENT.saturating_sub(before + r.done * r.row);
            for p in r.take(left.min(kept), RUNS - runs.len()) {
                left = left.saturating_sub(p.len);
                runs.push(p);
            }
        }
        if runs.len() == RUNS || left < LEAST || passed >= RESIDENT {
            break;
        }
    }
    runs
}

fn launch(op: usize, features: &Features, runs: &[Ptr]) -> Result<Launch, String> {
    // Whole sectors, the first and the last of which may be others' too.
    let sectors = |i: usize| {
        let Some(p) = runs.get(i) else { return (Ptr::NONE, 0) };
        let (from, to) = (p.offset / SECTOR * SECTOR, p.offset + p.len);
        (Ptr { offset: from, len: to - from, ..*p }, (to - from).div_ceil(SECTOR) as u32)
    };
    let [(p0, n0), (p1, n1), (p2, n2), (p3, n3), (p4, n4), (p5, n5), (p6, n6), (p7, n7)] =
        [0, 1, 2, 3, 4, 5, 6, 7].map(sectors);
    let (sink, mask, want) = (Ptr::NONE, 0, 1);
    let args = Prefetch { p0, p1, p2, p3, p4, p5, p6, p7, sink, n0, n1, n2, n3, n4, n5, n6, n7, mask, want };
    let constants = hanzo_kernels::constants("prefetch");
    let get = |name| constants.iter().find(|c| c.0 == name).map_or(1, |c| c.1);
    let threads = get("THREADS").min(super::variants::most_threads(features)).max(features.wave);
    let span = threads * get("LOADS");
    let groups = [n0, n1, n2, n3, n4, n5, n6, n7].iter().map(|n| n.div_ceil(span)).sum();
    Launch::new(op, None, features, &args, &[("THREADS", threads)], [groups, 1, 1])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Program;
    use crate::gpu::lower::fixtures::{options, scalar, with};
    use crate::levers::LeverSet;
    use crate::plan::{DType, Dim, Member, Op};
    use hanzo_gguf::Format;

    const COLS: usize = 512;

    /// Three times a norm and a matrix of `format`, the last pair being the head's.
    fn program(format: Format, tokens: usize, prefetch_bytes: u64, on: bool) -> Program {
        let mut p = Plan::new(COLS);
        let mut x = p.input("x", Dim::Tokens, COLS, DType::F32);
        for i in 0..3 {
            if i == 2 {
                let rows = p.value("rows", Dim::Out, COLS);
                p.head = Some(p.ops.len());
                p.push(Op::GatherRows { x, out: rows });
                x = rows;
            }
            let weight = Some(p.weight(&format!("norm{i}"), Format::F32, 1, 1, COLS));
            let w = p.weight(&format!("w{i}"), format, 1, COLS, COLS);
            let dim = p.val(x).rows;
            let (h, y) = (p.value(format!("h{i}"), dim, COLS), p.value(format!("y{i}"), dim, COLS));
            p.push(Op::RmsNorm { x, weight, eps: 1e-6, group: COLS, out: h });
            p.push(Op::Linear { x: h, member: Member { w, bias: None, out: y } });
            x = y;
        }
        p.outputs = vec![x];
        let options = options(with(LeverSet::all(), "weight_prefetch", on), tokens);
        let features = Features { prefetch_bytes, ..scalar() };
        crate::gpu::lower::program(&p, &options, &features, &|_| None).expect("it lowers")
    }

    /// Runs of a launch that reads ahead: what the kernel's arguments say.
    fn runs(l: &Launch) -> Vec<Ptr> {
        l.relocations.iter().map(|r| r.1).filter(|p| *p != Ptr::NONE).collect()
    }

    #[test]
    fn reading_ahead_adds_launches_and_no_barrier() {
        for format in [Format::Q4_K, Format::Q6_K, Format::Q8_0, Format::F16] {
            let (on, off) = (program(format, 1, 1 << 20, true), program(format, 1, 1 << 20, false));
            let count = |p: &Program| p.barriers.iter().filter(|b| **b).count();
            assert_eq!(count(&on), count(&off));
            let own: Vec<&Launch> = on.launches.iter().filter(|l| l.kernel.op != "prefetch").collect();
            assert_eq!(own, off.launches.iter().collect::<Vec<_>>(), "the others are as they were");
            assert!(on.launches.len() > off.launches.len());
            assert_eq!(on.launches[on.head], off.launches[off.head]);
        }
    }

    #[test]
    fn a_matrix_is_read_ahead_once_beside_the_stage_before() {
        let p = program(Format::Q4_K, 1, 1 << 20, true);
        let mut seen = Vec::new();
        let mut ahead: HashSet<Buffer> = HashSet::new();
        for (i, l) in p.launches.iter().enumerate() {
            if l.kernel.op == "prefetch" {
                assert!(i > 0 && !p.barriers[i], "it stands behind its stage's own launches");
                ahead.extend(runs(l).iter().map(|r| r.buffer));
                seen.extend(runs(l));
            } else if l.kernel.op == "matvec" {
                let Some((_, w)) = l.relocations.iter().find(|r| matches!(r.1.buffer, Buffer::Weight(_))) else {
                    panic!("a mat-vec reads a matrix")
                };
                assert!(ahead.contains(&w.buffer), "launch {i} finds nothing in the cache");
            }
        }
        let unique: HashSet<Ptr> = seen.iter().copied().collect();
        assert_eq!(unique.len(), seen.len());
    }

    #[test]
    fn a_share_of_a_matrix_is_the_first_rows_of_each_plane() {
        // Half of 96 KiB beside a norm: a third of a matrix of 144 KiB.
        let p = program(Format::Q4_K, 1, 96 << 10, true);
        let first = p.launches.iter().find(|l| l.kernel.op == "prefetch").expect("a launch");
        let layout = hanzo_kernels::layout(Format::Q4_K, COLS, COLS).expect("a layout");
        let rows = (48 << 10) / 288;
        let of: Vec<(u64, u64)> = runs(first).iter().filter(|r| r.len > 2048).map(|r| (r.offset, r.len)).collect();
        assert_eq!(of, [(0, rows * 256), (layout.offsets[1], rows * 32)]);
    }

    #[test]
    fn only_steps_of_one_token_on_devices_with_room_read_ahead() {
        for (tokens, bytes) in [(2, 1 << 20), (1, 0)] {
            let (on, off) = (program(Format::Q4_K, tokens, bytes, true), program(Format::Q4_K, tokens, bytes, false));
            assert_eq!(on.launches, off.launches);
        }
    }
}
