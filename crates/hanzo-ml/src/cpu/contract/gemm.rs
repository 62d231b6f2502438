//! GEMM with int8 activations: tiles of `NR` weight rows unpacked once into the dot product's own order, then used by all
//! tokens of the job.
//!
//! `out[token][row] = sum over groups of d * (s * sum(code * a) - m * sum(a))`. For a slice of k that keeps the packed
//! activations in L2: pack the activations of all tokens; for each tile of rows, unpack codes, scales and minima to L1;
//! for each block of `M` tokens, keep `M` integer and `M` float accumulators, one row a lane. A group of 32 costs 8 steps
//! (four products a lane each, or 4 of eight), one conversion, and per token, by the elements that share a scale:
//! 32: one multiply (an addition of exponents where scales are powers of two) and one fused multiply-add; 16: one multiply and two fused multiply-adds (the halves' sums times
//! their scales, then the activation's step); a block of 256, where group factors are multiplied into the codes
//! ([`CpuFormat::PRODUCT`]): one fused multiply-add, and one a block. Minima cost one more a group.
//!
//! The float accumulators pass from one slice of k to the next through the output, exactly. The order of the sum is that
//! of the groups, whatever the number of tokens, rows or slices: results are bit-equal for any batching. Oracle:
//! `qmatvec_unified_numeric`, as for mat-vec.

mod columns;
mod micro;

pub(super) use columns::Columns;
pub(super) use micro::micro;

use super::acts::ActRow;
use super::{Input, Job};
use crate::cpu::formats::{Ahead, CpuFormat, Scales, Shape};
use crate::cpu::isa::Isa;

/// Tokens of a short block.
pub(super) const SHORT: usize = 4;
/// Packed activation bytes of one slice of k: about half of a small L2.
const SLICE_BYTES: usize = 384 << 10;
/// Largest slice of k times vectors of rows: the weight tile stays in L1.
const SLICE_MAX: usize = 1536;
/// Packed activations of all slices that are kept between calls, at most: more would be too much for many threads.
const KEPT_BYTES: usize = 8 << 20;
/// Slices are whole blocks of every format.
const SLICE_UNIT: usize = 256;

/// How a format's codes lie in the tiles of an instruction set.
pub(super) trait Form<I: Isa>: Shape {
    /// Codes are products with their groups' factors.
    const PRODUCTS: bool = I::PACKED_OFFSET && Self::PRODUCT.is_some();
    /// Elements that share a scale: 16, 32 or a block.
    const SPAN: usize = if Self::PRODUCTS { Self::LEN } else { Self::GROUP };
    /// A tile's scales are exponents of powers of two.
    const POWERS: bool = I::POWERS && Self::POWER;
    /// What is to be taken off a tile's codes through the activations' sums.
    const TAKEN: u8 = match (Self::PRODUCTS, Self::PRODUCT) {
        _ if !I::PACKED_OFFSET => 0,
        (true, Some(offset)) => offset,
        _ if Self::SIGNED => 128,
        _ => Self::OFFSET,
    };
}

impl<I: Isa, F: CpuFormat> Form<I> for F {}

/// A tile of weights: `VECTORS` panels of `NR` rows by a slice of k.
pub(super) struct Tile<I: Isa> {
    /// `[VECTORS][slice / STEP][NR][STEP]`.
    codes: *mut I::Packed,
    /// `[VECTORS][slice / 16][NR]`, spans first.
    scales: *mut f32,
    /// The same, groups first.
    minima: *mut f32,
    /// Elements of a full slice: a panel's stride.
    slice: usize,
}

impl<I: Isa> Tile<I> {
    /// Panel `v`.
    #[inline(always)]
    fn panel(&self, v: usize) -> Tile<I> {
        let (codes, groups) = (v * self.slice * I::NR, v * self.slice / 16 * I::NR);
        Tile {
            codes: self.codes.wrapping_add(codes),
            scales: self.scales.wrapping_add(groups),
            minima: self.minima.wrapping_add(groups),
            slice: self.slice,
        }
    }
}

/// Weight rows of a tile.
const fn tile_rows<I: Isa>() -> usize {
    I::VECTORS * I::NR
}

/// A block of `m` tokens by a slice of k.
struct Block<I: Isa> {
    /// `[k / STEP][m][STEP]`.
    codes: *mut I::Packed,
    /// `[k / 32][m]`.
    d: *mut f32,
    /// `[groups][m]`: d times the sum of codes.
    dsums: *mut f32,
    /// What integer sums start from, `[k / 16 or k / 32][m]`: minus the codes' offset times the sum of activations.
    starts: *mut i32,
}

/// Tokens of a block, at most, on any instruction set.
const MOST_TOKENS: usize = 8;
/// Rows of a panel, at most.
const MOST_ROWS: usize = 16;

/// What a microkernel reads and writes: a tile, a block, and their `m` outputs of `VECTORS` times `NR`.
pub(super) struct Operands<I: Isa> {
    tile: Tile<I>,
    block: Block<I>,
    /// Elements of the slice of k.
    k: usize,
    /// Each token's output, or where what nobody reads may go.
    out: [*mut f32; MOST_TOKENS],
    /// Outputs are written, not added to.
    first: bool,
    /// `[m][VECTORS][NR]` running sums of the tiles that have no registers for them.
    running: *mut f32,
}

impl<I: Isa> Operands<I> {
    /// The sums of `M` tokens and `V` vectors of rows up to this slice of k.
    #[inline(always)]
    unsafe fn load<const M: usize, const V: usize>(&self) -> [[I::W; V]; M] {
        let mut acc = [[unsafe { I::w_zero() }; V]; M];
        if !self.first {
            for t in 0..M {
                for v in 0..V {
                    acc[t][v] = unsafe { I::w_load(self.out[t].add(v * I::NR)) };
                }
            }
        }
        acc
    }

    /// The sums including this slice.
    #[inline(always)]
    unsafe fn store<const M: usize, const V: usize>(&self, acc: &[[I::W; V]; M]) {
        for t in 0..M {
            for v in 0..V {
                unsafe { I::w_store(self.out[t].add(v * I::NR), acc[t][v]) };
            }
        }
    }
}

/// A microkernel: adds the product of a tile and a block to the accumulators.
pub(super) type Micro<I> = unsafe fn(&Operands<I>);

/// The microkernels of a format: full blocks of `MR` tokens, short ones of [`SHORT`].
pub(super) struct Micros<I: Isa> {
    pub full: Micro<I>,
    pub short: Micro<I>,
}

/// Where everything lies in scratch.
struct Plan {
    /// Elements of a full slice of k.
    slice: usize,
    /// Tokens in full blocks, then tokens (padded) in short ones.
    full: usize,
    padded: usize,
    /// Bytes of packed activations per padded token, and of a slice of all.
    per_token: usize,
    slice_bytes: usize,
    /// All slices have a place of their own.
    kept: bool,
    /// Byte offsets of: tile codes, scales, minima, unpacked codes, outputs of tiles that are not whole, running sums; and
    /// the total.
    tile: usize,
    scales: usize,
    minima: usize,
    unpacked: usize,
    edge: usize,
    running: usize,
    bytes: usize,
}

impl Plan {
    fn new<I: Isa>(k: usize, tokens: usize) -> Plan {
        let code = size_of::<I::Packed>();
        let tail = tokens % I::MR;
        // A tail is a full block with padding where short ones would be as many tokens.
        let full = tokens - tail + if tail.next_multiple_of(SHORT) >= I::MR { I::MR } else { 0 };
        let padded = full + tokens.saturating_sub(full).next_multiple_of(SHORT);
        let fitting = SLICE_BYTES / (padded.max(1) * code) / SLICE_UNIT * SLICE_UNIT;
        let most = (SLICE_MAX / I::VECTORS / SLICE_UNIT * SLICE_UNIT).clamp(SLICE_UNIT, 1024);
        let slice = fitting.clamp(SLICE_UNIT, most).min(k);
        // Per 32 elements: codes, d, starts of two groups, and d times sums of two groups.
        let per_token = slice * code + slice / 32 * (4 + 8 + 8);
        let align = |bytes: usize| bytes.next_multiple_of(64);
        let slice_bytes = align(padded * per_token);
        let slices = k.div_ceil(slice.max(1));
        let kept = slices * slice_bytes <= KEPT_BYTES;
        let tile = if kept { slices * slice_bytes } else { slice_bytes };
        let rows = tile_rows::<I>();
        let scales = tile + align(slice * rows * code);
        let minima = scales + align(slice / 16 * rows * 4);
        let unpacked = minima + align(slice / 16 * rows * 4);
        let edge = unpacked + align(SLICE_UNIT * I::NR);
        let sums = align(I::MR.max(SHORT) * rows * 4);
        let (running, bytes) = (edge + sums, edge + 2 * sums);
        Plan { slice, full, padded, per_token, slice_bytes, kept, tile, scales, minima, unpacked, edge, running, bytes }
    }

    /// The block that starts at (padded) token `first`, and its number of tokens.
    unsafe fn block<I: Isa>(&self, memory: *mut u8, first: usize) -> (Block<I>, usize) {
        let m = if first < self.full { I::MR } else { SHORT };
        unsafe {
            let codes = memory.add(first * self.per_token);
            let d = codes.add(m * self.slice * size_of::<I::Packed>());
            let starts = d.add(m * self.slice / 32 * 4);
            let dsums = starts.add(m * self.slice / 32 * 8);
            (Block { codes: codes.cast(), d: d.cast(), dsums: dsums.cast(), starts: starts.cast() }, m)
        }
    }
}

/// Bytes of scratch for rows of `k` elements and `tokens` tokens.
pub(super) fn scratch_bytes<I: Isa>(k: usize, tokens: usize) -> usize {
    Plan::new::<I>(k, tokens).bytes
}

/// The body of the GEMM kernel of a format.
#[inline(always)]
pub(super) unsafe fn run<I: Columns, F: CpuFormat>(job: &mut Job<'_>, micros: &Micros<I>) {
    // The one microkernel that reads exponents, and the one way of unpacking that writes them.
    const { assert!(!<F as Form<I>>::POWERS || (F::GROUP == 32 && !F::HAS_MIN && <F as Form<I>>::TAKEN != 0)) };
    const { assert!(!F::POWER || (F::STRETCHES.is_empty() && F::PRODUCT.is_none())) };
    let tokens = job.tokens.len();
    if tokens == 0 || job.rows.is_empty() {
        return;
    }
    let plan = Plan::new::<I>(job.w.k, tokens);
    let packed = job.packed && plan.kept && job.scratch.capacity() >= plan.bytes;
    let memory = job.scratch.reserve(plan.bytes);
    let mut from = 0;
    while from < job.w.k {
        let k = plan.slice.min(job.w.k - from);
        // SAFETY: all memory below lies in the plan's bytes, the rows and tokens are the job's.
        unsafe {
            let acts = memory.add(if plan.kept { from / plan.slice * plan.slice_bytes } else { 0 });
            if !packed {
                pack_activations::<I, F>(job, &plan, acts, from, k);
            }
            let mut row = job.rows.start;
            while row < job.rows.end {
                let tile = Tile::<I> {
                    codes: memory.add(plan.tile).cast(),
                    scales: memory.add(plan.scales).cast(),
                    minima: memory.add(plan.minima).cast(),
                    slice: plan.slice,
                };
                for v in 0..I::VECTORS {
                    unpack_tile::<I, F>(job, row + v * I::NR, from, k, &tile.panel(v), memory.add(plan.unpacked));
                }
                let operands = Operands {
                    tile,
                    block: plan.block::<I>(acts, 0).0,
                    k,
                    out: [memory.add(plan.edge).cast(); MOST_TOKENS],
                    first: from == 0,
                    running: memory.add(plan.running).cast(),
                };
                contract_tile::<I>(job, micros, &plan, acts, (row, from), operands);
                row += tile_rows::<I>();
            }
        }
        from += k;
    }
}

/// Packs elements `from..from + k` of all tokens.
#[inline(always)]
unsafe fn pack_activations<I: Isa, F: CpuFormat>(job: &Job<'_>, plan: &Plan, memory: *mut u8, from: usize, k: usize) {
    let Input::Int8(acts) = job.input else {
        debug_assert!(false, "an int8 kernel was given f32 activations");
        return;
    };
    let last = job.tokens.len() - 1;
    let mut first = 0;
    while first < plan.padded {
        // SAFETY: the block lies in the plan's bytes, the tokens and the slice are the job's.
        unsafe {
            let (block, m) = plan.block::<I>(memory, first);
            for four in (0..m).step_by(4) {
                // Padding tokens repeat the last one: finite work, never written.
                let mut rows = [acts.row(0); 4];
                for t in 0..4 {
                    rows[t] = acts.row(job.tokens.rows((first + four + t).min(last)).0).from(from);
                }
                const { assert!(I::MR == SHORT || I::MR == MOST_TOKENS) };
                match m {
                    SHORT => pack_four::<I, F, SHORT>(&rows, &block, four, k),
                    _ => pack_four::<I, F, MOST_TOKENS>(&rows, &block, four, k),
                }
            }
            first += m;
        }
    }
}

/// Packs `k` elements of four tokens, numbers `four..four + 4` of a block of `M`.
#[inline(always)]
unsafe fn pack_four<I: Isa, F: CpuFormat, const M: usize>(rows: &[ActRow; 4], block: &Block<I>, four: usize, k: usize) {
    let taken = i32::from(<F as Form<I>>::TAKEN);
    for group in 0..k / 32 {
        unsafe {
            let mut codes = [rows[0].codes; 4];
            for t in 0..4 {
                codes[t] = rows[t].codes.add(32 * group);
            }
            I::pack_acts(codes, block.codes.add(group * 32 * M + four * I::STEP), I::STEP * M);
            let at = group * M + four;
            write4(block.d.add(at), |t| *rows[t].d.add(group));
            if taken != 0 {
                let sum = |t: usize, half: usize| -taken * i32::from(*rows[t].sums.add(2 * group + half));
                if <F as Form<I>>::SPAN == 16 {
                    write4(block.starts.add(at + group * M), |t| sum(t, 0));
                    write4(block.starts.add(at + group * M + M), |t| sum(t, 1));
                } else {
                    write4(block.starts.add(at), |t| sum(t, 0) + sum(t, 1));
                }
            }
            if F::HAS_MIN && F::GROUP == 32 {
                write4(block.dsums.add(at), |t| *rows[t].dsums.add(group));
            } else if F::HAS_MIN {
                write4(block.dsums.add(at + group * M), |t| *rows[t].dsums16.add(2 * group));
                write4(block.dsums.add(at + group * M + M), |t| *rows[t].dsums16.add(2 * group + 1));
            }
        }
    }
}

/// Writes a value for each of four tokens.
#[inline(always)]
unsafe fn write4<T: Copy>(to: *mut T, of: impl Fn(usize) -> T) {
    unsafe { to.cast::<[T; 4]>().write([of(0), of(1), of(2), of(3)]) }
}

/// Unpacks elements `from..from + k` of the `NR` rows at `row` (beyond the last, the last again), and asks for those of the
/// panel that comes next.
#[inline(always)]
unsafe fn unpack_tile<I: Columns, F: CpuFormat>(
    job: &Job<'_>,
    row: usize,
    from: usize,
    k: usize,
    tile: &Tile<I>,
    unpacked: *mut u8,
) {
    for b in 0..k / F::LEN {
        let block = |r: usize| job.row(row + r).wrapping_add((from / F::LEN + b) * F::BYTES);
        let mut rows = [job.w.data; MOST_ROWS];
        for r in 0..I::NR {
            rows[r] = block(r);
            for line in (0..F::BYTES).step_by(64) {
                unsafe { I::prefetch(block(r + I::NR).wrapping_add(line)) };
            }
        }
        unsafe {
            if F::STRETCHES.is_empty() || !I::unpack::<F>(&rows, b, tile) {
                unpack_rows::<I, F>(&rows, b, tile, unpacked);
            }
        }
    }
}

/// Unpacks block `b` of a panel row by row; the rows' blocks are at `rows`.
#[inline(always)]
unsafe fn unpack_rows<I: Isa, F: CpuFormat>(
    rows: &[*const u8; MOST_ROWS],
    b: usize,
    tile: &Tile<I>,
    unpacked: *mut u8,
) {
    let groups = F::CHUNKS * F::HALVES;
    let mut ahead = Ahead::new();
    for r in 0..I::NR {
        unsafe {
            let block = rows[r];
            let (mut s, mut m) = (Scales::NONE, Scales::NONE);
            let mut factors = [1; 16];
            if F::HAS_MIN || !(<F as Form<I>>::PRODUCTS || <F as Form<I>>::POWERS) {
                F::scales::<I>(block, &mut s, &mut m);
            }
            if <F as Form<I>>::PRODUCTS {
                (s.0[0], factors) = F::factors::<I>(block);
                tile.scales.add(b * I::NR + r).write(s.0[0]);
            }
            for g in 0..groups {
                if !<F as Form<I>>::PRODUCTS {
                    let scale = if <F as Form<I>>::POWERS { F::power(block) as f32 } else { s.0[g] };
                    tile.scales.add((b * groups + g) * I::NR + r).write(scale);
                }
                if F::HAS_MIN {
                    tile.minima.add((b * groups + g) * I::NR + r).write(m.0[g]);
                }
            }
            F::look_ahead::<I>(block, &mut ahead);
            for_each_chunk!(F::CHUNKS, chunk, {
                let codes = unpacked.add((chunk * I::NR + r) * 32);
                I::store(codes, F::codes::<I>(block, chunk, &ahead));
                if <F as Form<I>>::PRODUCTS {
                    multiply(codes, &factors[chunk * F::HALVES..], F::GROUP, F::OFFSET, <F as Form<I>>::TAKEN);
                }
            });
        }
    }
    for chunk in 0..F::CHUNKS {
        unsafe {
            let to = tile.codes.add((b * F::CHUNKS + chunk) * 32 * I::NR);
            I::pack_weights(unpacked.add(chunk * 32 * I::NR), F::SIGNED, F::OFFSET, to);
        }
    }
}

/// Makes of 32 codes their products with the factors of their groups, `taken` added: bytes, whatever wraps on the way.
#[inline(always)]
unsafe fn multiply(codes: *mut u8, factors: &[i8], group: usize, offset: u8, taken: u8) {
    for g in 0..32 / group {
        let factor = factors[g] as u8;
        let add = taken.wrapping_sub(offset.wrapping_mul(factor));
        for i in 0..group {
            unsafe {
                let code = codes.add(g * group + i);
                *code = (*code).wrapping_mul(factor).wrapping_add(add);
            }
        }
    }
}

/// Adds a tile's products with every block of tokens to the output.
#[inline(always)]
unsafe fn contract_tile<I: Isa>(
    job: &Job<'_>,
    micros: &Micros<I>,
    plan: &Plan,
    acts: *mut u8,
    (row, from): (usize, usize),
    mut operands: Operands<I>,
) {
    let tokens = job.tokens.len();
    let rows = tile_rows::<I>().min(job.rows.end - row);
    let whole = rows == tile_rows::<I>();
    let last = from + operands.k == job.w.k;
    let edge = operands.out[0];
    let mut first = 0;
    while first < plan.padded {
        unsafe {
            let (block, m) = plan.block::<I>(acts, first);
            operands.block = block;
            let written = m.min(tokens - first);
            let out = |t: usize| job.out.add(job.tokens.rows(first + t).1 * job.out_stride + row);
            for t in 0..m {
                let apart = edge.add(t * tile_rows::<I>());
                operands.out[t] = if whole && t < written { out(t) } else { apart };
                if from == 0 {
                } else if t >= written {
                    apart.write_bytes(0, tile_rows::<I>());
                } else if !whole {
                    copy::<I>(out(t), apart, rows);
                }
            }
            // Outputs lie rows of a matrix apart, often a multiple of 4 KiB, and seldom in a near cache: without this, more stores
            // wait for their lines than a core can remember.
            for t in written..(written + m).min(tokens - first) {
                for v in 0..I::VECTORS {
                    I::prefetch(out(t).wrapping_add(v * I::NR).cast());
                }
            }
            if m == I::MR {
                (micros.full)(&operands)
            } else {
                (micros.short)(&operands)
            }
            for t in 0..written {
                if !whole {
                    copy::<I>(operands.out[t], out(t), rows);
                }
                if let (true, Some(bias)) = (last, job.bias) {
                    for r in 0..rows {
                        *out(t).add(r) += *bias.add(row + r);
                    }
                }
            }
            first += m;
        }
    }
}

/// Copies `rows` floats, at most a tile's: whole vectors, and what is left at the end of a matrix.
#[inline(always)]
unsafe fn copy<I: Isa>(from: *const f32, to: *mut f32, rows: usize) {
    for v in 0..I::VECTORS {
        let at = v * I::NR;
        unsafe {
            if at + I::NR <= rows {
                I::w_store(to.add(at), I::w_load(from.add(at)));
            } else if at < rows {
                to.add(at).copy_from_nonoverlapping(from.add(at), rows - at);
            }
        }
    }
}
