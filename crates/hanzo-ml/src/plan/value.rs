//! Values, weights and symbolic sizes: what ops read and write. No op and no rewrite may enter here.

use hanzo_gguf::Format;

/// The sizes a step binds: every symbolic dimension is a function of these three.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Sizes {
    /// Tokens in the step, over all sequences.
    pub n_tokens: usize,
    /// Sequences in the step.
    pub n_seqs: usize,
    /// Rows that go through the output head.
    pub n_out: usize,
}

/// A symbolic number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dim {
    /// Known when the Plan is built.
    Fixed(usize),
    /// One row a token.
    Tokens,
    /// One row a sequence.
    Seqs,
    /// One row an output row.
    Out,
    /// `k` rows a token: the routed slots of a mixture of experts, token-major.
    Slots(usize),
}

impl Dim {
    /// The number of rows for the given sizes.
    pub fn eval(self, s: &Sizes) -> usize {
        match self {
            Dim::Fixed(n) => n,
            Dim::Tokens => s.n_tokens,
            Dim::Seqs => s.n_seqs,
            Dim::Out => s.n_out,
            Dim::Slots(k) => s.n_tokens * k,
        }
    }
}

/// How a value's elements are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit floats.
    F32,
    /// 32-bit signed integers (expert ids).
    I32,
    /// Quantized activations: an int8 plane, one f32 scale per 32, two exact i16 sums per 32, and their f32 products.
    Q8,
}

impl DType {
    /// Bytes of one row of `cols` elements.
    pub fn row_bytes(self, cols: usize) -> usize {
        match self {
            DType::F32 | DType::I32 => cols * 4,
            DType::Q8 => cols + cols / 8 * 3 + cols / 4,
        }
    }

    /// Bytes of `rows` rows, planes aligned.
    pub fn bytes(self, rows: usize, cols: usize) -> usize {
        let planes = if self == DType::Q8 { 5 * super::schedule::ALIGN } else { 0 };
        rows * self.row_bytes(cols) + planes
    }
}

/// A device that values and weights live on; 0 is the host CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(pub u16);

/// Index of a value in its Plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

/// Index of a weight in its Plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightId(pub u32);

/// A value: `[rows, cols]`, written by exactly one op (or bound as an input), read by any number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    /// What it is, for people: `blk.3.q`.
    pub name: String,
    /// Symbolic rows.
    pub rows: Dim,
    /// Columns.
    pub cols: usize,
    /// Element type.
    pub dtype: DType,
    /// Where it lives.
    pub device: DeviceId,
}

/// A weight: `[experts, rows, cols]` of a format, a row range of a tensor in the model file.
///
/// `cols` is the contraction length (GGUF's `dims[0]`). A fused tensor such as `attn_qkv` becomes several weights with
/// different `first_row`, so that no op needs to know about fused storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weight {
    /// The tensor's name in the model file.
    pub tensor: String,
    /// Its format.
    pub format: Format,
    /// Experts (1 for a plain matrix or vector).
    pub experts: usize,
    /// Rows of this weight (per expert).
    pub rows: usize,
    /// Columns: the contraction length; a vector is one row.
    pub cols: usize,
    /// First row within the tensor (per expert).
    pub first_row: usize,
    /// Rows of the whole tensor (per expert).
    pub tensor_rows: usize,
    /// Where it lives.
    pub device: DeviceId,
}

impl Weight {
    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.format.row_bytes(self.cols).unwrap_or(0)
    }

    /// Bytes of one expert's rows.
    pub fn expert_bytes(&self) -> usize {
        self.row_bytes() * self.rows
    }
}
