//! Contractions on the CPU: mat-vec and GEMM of packed weights `[rows, k]` with activations `[tokens, k]`, and their
//! indexed (MoE) twins, as raw kernels that know nothing of threads, Plans or tensors.
//!
//! A kernel is looked up once per op by [`kernel`] and called with a [`Job`]: a range of weight rows, a list of tokens, an
//! output. The executor splits rows over threads; each call touches only its own rows of the output. Which instruction
//! set and which format is settled by the lookup: nothing inside asks again.
//!
//! The twins of mixture-of-experts layers differ by gather and scatter only: [`Tokens::Pairs`] names each token's input
//! and output row, and the caller points [`Weights::data`] at the expert.
//!
//! Numerics. Int8 contractions read activations quantized by [`Acts`]; a group's integer dot product is exact, and the
//! rest is f32: at most one product and two fused multiply-adds per group, whose order is the kernel's. F32 contractions multiply exact f32 weights.
//! The order of the sum over k of one (row, token) depends on the kernel alone, never on the rows or tokens beside it.
#![allow(
    clippy::needless_range_loop,
    reason = "index loops of constant length over several arrays unroll; iterators hide it"
)]

/// Expands `$body` for each chunk of a block with `$chunk` a constant: unrolled whatever the optimizer thinks of it.
macro_rules! for_each_chunk {
    ($count:expr, $chunk:ident, $body:block) => {
        for_each_chunk!(@ $count, $chunk, $body, 0 1 2 3 4 5 6 7);
    };
    (@ $count:expr, $chunk:ident, $body:block, $($i:literal)*) => {
        $( if $i < $count { let $chunk: usize = $i; $body } )*
    };
}

mod acts;
mod entries;
mod float;
mod gemm;
mod matvec;
#[cfg(target_arch = "x86_64")]
mod rounded;
mod scratch;

use std::ops::Range;

use hanzo_gguf::Format;

pub use acts::{ActBuf, Acts, QuantizeRow, quantizer};
pub use scratch::Scratch;

#[cfg(target_arch = "x86_64")]
pub(super) use matvec::dots;

use super::isa::IsaLevel;

/// How a contraction walks its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Contraction {
    /// Weights once from memory, straight into registers; for one to about four tokens.
    MatVec,
    /// Tiles of weights unpacked once and used for all tokens; for any number of tokens, good from about five.
    Gemm,
}

/// What the activations of a contraction are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActKind {
    /// Quantized to int8 with one scale per 32.
    Int8,
    /// Plain f32: the exact path, and the usual one of plain float weights.
    F32,
    /// f32 in memory, which the kernel rounds to bf16: for BF16 weights on instruction sets that multiply these
    /// ([`rounds_to_bf16`]).
    Bf16,
}

/// A weight matrix `[rows, k]` in packed blocks.
#[derive(Clone, Copy, Debug)]
pub struct Weights {
    /// How its bits become floats.
    pub format: Format,
    /// The first byte of row 0 (of the expert, for a MoE layer).
    pub data: *const u8,
    /// Bytes from one row to the next.
    pub row_bytes: usize,
    /// Elements of a row: whole blocks, and a multiple of 32 for int8 activations.
    pub k: usize,
}

/// The activations of a job.
#[derive(Clone, Copy, Debug)]
pub enum Input {
    /// Quantized rows.
    Int8(Acts),
    /// Float rows, `stride` elements apart.
    F32 {
        /// The first element of row 0.
        data: *const f32,
        /// Elements from one row to the next, at least k.
        stride: usize,
    },
}

/// Which activation rows a job reads and which output rows it writes.
#[derive(Clone, Copy, Debug)]
pub enum Tokens<'a> {
    /// Rows `first..first + count`, each to the output row of the same number.
    Dense {
        /// The first row.
        first: usize,
        /// Number of rows.
        count: usize,
    },
    /// (input row, output row) of each token; output rows are distinct.
    Pairs(&'a [(u32, u32)]),
}

impl Tokens<'_> {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        match self {
            Tokens::Dense { count, .. } => *count,
            Tokens::Pairs(pairs) => pairs.len(),
        }
    }

    /// True without tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Some of these.
    ///
    /// # Panics
    /// If a list is shorter.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "no kernel there works in batches of tokens"))]
    fn part(&self, range: Range<usize>) -> Self {
        match *self {
            Tokens::Dense { first, .. } => Tokens::Dense { first: first + range.start, count: range.len() },
            Tokens::Pairs(pairs) => Tokens::Pairs(&pairs[range]),
        }
    }

    /// Input and output row of token `i`.
    ///
    /// # Panics
    /// If a list has no entry `i`.
    #[inline]
    pub fn rows(&self, i: usize) -> (usize, usize) {
        match self {
            Tokens::Dense { first, .. } => (first + i, first + i),
            Tokens::Pairs(pairs) => (pairs[i].0 as usize, pairs[i].1 as usize),
        }
    }
}

/// One call of a kernel: `out[token][row] = sum over k of w[row][k] * input[token][k] (+ bias[row])` for its rows.
#[derive(Debug)]
pub struct Job<'a> {
    /// The weights.
    pub w: Weights,
    /// The weight rows to contract.
    pub rows: Range<usize>,
    /// The activations, of the kind that the kernel was looked up for.
    pub input: Input,
    /// The activation rows to contract.
    pub tokens: Tokens<'a>,
    /// Element 0 of output row 0; row `t` starts `t * out_stride` further, and weight row `r` is its element `r`.
    pub out: *mut f32,
    /// Elements from one output row to the next.
    pub out_stride: usize,
    /// One addend per weight row.
    pub bias: Option<*const f32>,
    /// The scratch was last used by this very kernel with these tokens of this input: what it made of them is still there.
    pub packed: bool,
    /// Working memory of the calling thread; grows on first use, see [`scratch_bytes`].
    pub scratch: &'a mut Scratch,
}

/// A contraction for one format, kind of activations and instruction set.
///
/// # Safety
/// The CPU supports the instruction set of the lookup; weights, input, output and bias are valid for what [`Job`] says of
/// them; no other thread writes the output rows' elements `rows` or the weights and activations meanwhile.
pub type Kernel = unsafe fn(&mut Job<'_>);

/// Has this instruction set a kernel of BF16 weights for activations rounded to bf16?
pub fn rounds_to_bf16(isa: IsaLevel) -> bool {
    kernel(Contraction::Gemm, Format::BF16, ActKind::Bf16, isa).is_some()
}

/// The kernel of a key, or `None` if `format` is no weight format, the plain floats are asked for int8 activations, others
/// than BF16 for bf16 ones, or the instruction set is not one of this target's.
pub fn kernel(op: Contraction, format: Format, acts: ActKind, isa: IsaLevel) -> Option<Kernel> {
    match isa {
        IsaLevel::Portable => entries::portable::kernel(op, format, acts),
        #[cfg(target_arch = "x86_64")]
        IsaLevel::Avx2 => entries::avx2::kernel(op, format, acts),
        #[cfg(target_arch = "x86_64")]
        IsaLevel::Avx512 => entries::avx512::kernel(op, format, acts),
        #[cfg(target_arch = "x86_64")]
        IsaLevel::Avx512Vbmi | IsaLevel::Avx512Bf16 => match (op, acts) {
            (Contraction::MatVec, ActKind::Int8) => super::wide::kernel(format),
            (_, ActKind::Bf16) if isa == IsaLevel::Avx512Bf16 => entries::rounded(format),
            _ => None,
        }
        .or_else(|| entries::avx512::kernel(op, format, acts)),
        #[cfg(target_arch = "aarch64")]
        IsaLevel::Neon => entries::neon::kernel(op, format, acts),
        #[cfg(target_arch = "aarch64")]
        IsaLevel::I8mm => entries::i8mm::kernel(op, format, acts),
        // Another architecture's.
        _ => None,
    }
}

/// Bytes of scratch that the kernel of a key needs for rows of `k` elements and `tokens` tokens: reserve them before the
/// first step, and no call allocates.
pub fn scratch_bytes(op: Contraction, format: Format, acts: ActKind, isa: IsaLevel, k: usize, tokens: usize) -> usize {
    match (acts, op) {
        (ActKind::F32, _) => float::scratch_bytes(format, k),
        #[cfg(target_arch = "x86_64")]
        (ActKind::Bf16, _) => rounded::scratch_bytes(k, tokens),
        #[cfg(not(target_arch = "x86_64"))]
        (ActKind::Bf16, _) => 0,
        #[cfg(target_arch = "x86_64")]
        (ActKind::Int8, Contraction::MatVec) if matches!(isa, IsaLevel::Avx512Vbmi | IsaLevel::Avx512Bf16) => {
            super::wide::scratch_bytes(format, k)
        }
        (ActKind::Int8, Contraction::MatVec) => 0,
        (ActKind::Int8, Contraction::Gemm) => match isa {
            IsaLevel::Portable => gemm::scratch_bytes::<super::isa::Portable>(k, tokens),
            #[cfg(target_arch = "x86_64")]
            IsaLevel::Avx2 => gemm::scratch_bytes::<super::isa::Avx2>(k, tokens),
            #[cfg(target_arch = "x86_64")]
            IsaLevel::Avx512 | IsaLevel::Avx512Vbmi | IsaLevel::Avx512Bf16 => {
                gemm::scratch_bytes::<super::isa::Avx512>(k, tokens)
            }
            #[cfg(target_arch = "aarch64")]
            IsaLevel::Neon => gemm::scratch_bytes::<super::isa::Neon>(k, tokens),
            #[cfg(target_arch = "aarch64")]
            IsaLevel::I8mm => gemm::scratch_bytes::<super::isa::I8mm>(k, tokens),
            _ => 0,
        },
    }
}

impl Job<'_> {
    /// The first byte of weight row `row`; beyond the last row of the job, of the last row.
    #[inline(always)]
    pub(super) fn row(&self, row: usize) -> *const u8 {
        self.w.data.wrapping_add(row.min(self.rows.end - 1) * self.w.row_bytes)
    }

    /// Writes one result.
    ///
    /// # Safety
    /// As for [`Kernel`]; `row` is one of the job's.
    #[inline(always)]
    pub(super) unsafe fn write(&self, out_row: usize, row: usize, value: f32) {
        unsafe {
            let bias = self.bias.map_or(0.0, |bias| *bias.add(row));
            self.out.add(out_row * self.out_stride + row).write(value + bias);
        }
    }
}

#[cfg(test)]
mod tests;
