//! How bits become floats and back: one file per block format, and the dispatch over [`Format`].
//!
//! Each format's file documents its block, byte by byte, and implements [`BlockFormat`] once. The modules, the dispatch
//! and the loops over blocks come from the table in `format.rs`: a function here is chosen once per call and its loop is
//! monomorphised for the format, so that no element or block asks which format it is. Formats know nothing of tensors,
//! files or backends.
//!
//! [`to_float`] is exact: it gives the same bits as the reference decoders of the formats do. [`from_float`] packs with a search
//! for scales (`fit.rs` for one group, `superblock.rs` where groups share a scale); [`round_trip`] says what it cost.

mod fit;
mod lanes;
pub mod plain;
mod round_trip;
mod superblock;
pub mod tables;

pub use round_trip::{RoundTrip, round_trip};

use crate::format::{Format, for_each_format};

/// One packed format: `LEN` elements in `BYTES` bytes.
///
/// The two numbers must be those of the format's row in the table; the compiler checks it.
pub trait BlockFormat<const LEN: usize, const BYTES: usize> {
    /// How a block is written, for the formats that can be.
    const FROM_FLOAT: Option<Encode<LEN, BYTES>> = None;

    /// The exact values of one block.
    fn to_float(block: &[u8; BYTES], out: &mut [f32; LEN]);
}

/// Packs one block of finite values; the second argument is the importance of each, if given.
pub type Encode<const LEN: usize, const BYTES: usize> = fn(&[f32; LEN], Option<&[f32; LEN]>, &mut [u8; BYTES]);

/// What the dispatch knows about a format.
struct Codec {
    to_float: fn(&[u8], &mut [f32]),
    from_float: Option<EncodeRows>,
}

/// Packs whole rows of finite values, with the importance of the columns if given.
type EncodeRows = fn(&[f32], Option<&[f32]>, &mut [u8]);

impl Codec {
    const fn of<F: BlockFormat<LEN, BYTES>, const LEN: usize, const BYTES: usize>() -> Codec {
        Codec {
            to_float: decode_blocks::<F, LEN, BYTES>,
            from_float: if F::FROM_FLOAT.is_some() { Some(encode_rows::<F, LEN, BYTES>) } else { None },
        }
    }
}

fn decode_blocks<F: BlockFormat<LEN, BYTES>, const LEN: usize, const BYTES: usize>(src: &[u8], dst: &mut [f32]) {
    let (blocks, _) = src.as_chunks::<BYTES>();
    let (values, _) = dst.as_chunks_mut::<LEN>();
    for (block, out) in blocks.iter().zip(values) {
        F::to_float(block, out);
    }
}

fn encode_rows<F: BlockFormat<LEN, BYTES>, const LEN: usize, const BYTES: usize>(
    src: &[f32],
    importance: Option<&[f32]>,
    dst: &mut [u8],
) {
    let Some(encode) = F::FROM_FLOAT else { return };
    let (values, _) = src.as_chunks::<LEN>();
    let (blocks, _) = dst.as_chunks_mut::<BYTES>();
    match importance {
        None => values.iter().zip(blocks).for_each(|(values, block)| encode(values, None, block)),
        Some(importance) => {
            // A row has as many blocks as the importance; it starts over with each row.
            let columns = importance.as_chunks::<LEN>().0.iter().cycle();
            values.iter().zip(columns).zip(blocks).for_each(|((values, w), block)| encode(values, Some(w), block));
        }
    }
}

macro_rules! define_codecs {
    (
        plain { $( $plain:ident, $plain_id:literal, $plain_bytes:literal, $plain_name:literal; )* }
        blocks { $(
            $( #[$attr:meta] )*
            $block:ident, $id:literal, $len:literal, $bytes:literal, $name:literal, $module:ident;
        )* }
    ) => {
        $( $( #[$attr] )* pub mod $module; )*

        const fn codec(format: Format) -> Codec {
            match format {
                $( Format::$plain => Codec::of::<plain::$plain, 1, $plain_bytes>(), )*
                $( $( #[$attr] )* Format::$block => Codec::of::<$module::$block, $len, $bytes>(), )*
            }
        }
    };
}

for_each_format!(define_codecs);

/// The exact values of packed `src`, written to `dst`.
///
/// `src` holds whole blocks: `src.len() == format.row_bytes(dst.len())`. Any bytes are valid; a scale that is infinite
/// or NaN gives what IEEE arithmetic gives.
///
/// # Panics
/// If the two lengths do not fit each other.
pub fn to_float(format: Format, src: &[u8], dst: &mut [f32]) {
    assert_eq!(
        Some(src.len()),
        format.row_bytes(dst.len()),
        "to_float: bytes of {} elements of {format} (whole blocks of {} elements)",
        dst.len(),
        format.block_len()
    );
    (codec(format).to_float)(src, dst);
}

/// Why values could not be packed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum FormatError {
    /// The format is only read.
    #[error("{format} cannot be written; formats that can: {}", names(writable()))]
    NotWritable {
        /// The format asked for.
        format: Format,
    },
    /// A value is NaN or infinite, which no block format can hold.
    #[error("element {element} is {value}: only finite values can be packed as {format}")]
    NotFinite {
        /// The format asked for.
        format: Format,
        /// Index of the first such element in the source.
        element: usize,
        /// Its value.
        value: f32,
    },
    /// The source is not a whole number of blocks, or the destination has another size than the packed source.
    #[error(
        "{elements} elements into {bytes} bytes: {format} packs {} elements in {} bytes",
        format.block_len(),
        format.block_bytes()
    )]
    Size {
        /// The format asked for.
        format: Format,
        /// Elements of the source.
        elements: usize,
        /// Bytes of the destination.
        bytes: usize,
    },
    /// The importance does not fit the rows: it needs one entry per column, whole blocks of them, and whole rows.
    #[error(
        "importance of {columns} columns for {elements} elements of {format}: needs whole rows, and whole blocks of {} columns",
        format.block_len()
    )]
    ImportanceSize {
        /// The format asked for.
        format: Format,
        /// Entries of the importance.
        columns: usize,
        /// Elements of the source.
        elements: usize,
    },
    /// An importance is negative, NaN or infinite.
    #[error("importance of column {column} is {value}: needs a finite number of at least 0")]
    Importance {
        /// The column.
        column: usize,
        /// Its importance.
        value: f32,
    },
}

/// The formats that [`from_float`] can write.
pub fn writable() -> impl Iterator<Item = Format> {
    Format::ALL.iter().copied().filter(|&format| codec(format).from_float.is_some())
}

fn names(formats: impl Iterator<Item = Format>) -> String {
    formats.map(Format::name).collect::<Vec<_>>().join(", ")
}

/// Packs `src` into `dst`, choosing scales so that the squared error is small.
///
/// `src` is whole rows of finite values and `dst` has exactly the packed size. `importance` has one entry per column (so its
/// length is the row's) and weighs the squared errors; without it all weigh the same. A scale that a half float cannot hold is
/// clamped to the largest finite one (values far above 65504 lose their size, never become infinite); one that
/// rounds to zero gives a block of zeros. The result depends on nothing but the arguments.
///
/// # Errors
/// [`FormatError`]; `dst` is then unchanged.
pub fn from_float(format: Format, src: &[f32], importance: Option<&[f32]>, dst: &mut [u8]) -> Result<(), FormatError> {
    let encode = codec(format).from_float.ok_or(FormatError::NotWritable { format })?;
    if format.row_bytes(src.len()) != Some(dst.len()) {
        return Err(FormatError::Size { format, elements: src.len(), bytes: dst.len() });
    }
    if let Some(importance) = importance {
        check_importance(format, src.len(), importance)?;
    }
    if let Some(element) = src.iter().position(|v| !v.is_finite()) {
        return Err(FormatError::NotFinite { format, element, value: src[element] });
    }
    encode(src, importance, dst);
    Ok(())
}

fn check_importance(format: Format, elements: usize, importance: &[f32]) -> Result<(), FormatError> {
    let columns = importance.len();
    let whole = columns > 0 && columns.is_multiple_of(format.block_len()) && elements.is_multiple_of(columns);
    if !whole && elements > 0 {
        return Err(FormatError::ImportanceSize { format, columns, elements });
    }
    match importance.iter().position(|w| !w.is_finite() || *w < 0.0) {
        Some(column) => Err(FormatError::Importance { column, value: importance[column] }),
        None => Ok(()),
    }
}

/// The little-endian half float at byte `at`, as an `f32` (exact, subnormals included).
#[inline]
fn f16_at(block: &[u8], at: usize) -> f32 {
    f16_value(u16_at(block, at))
}

/// The value of a half float (exact, subnormals included).
///
/// Exponent and mantissa move to their places in an f32, whose exponent has 112 more below it: one multiplication, exact,
/// also for subnormals, makes up for it. No branch and no feature test, so that a loop over it becomes vectors.
#[inline]
fn f16_value(bits: u16) -> f32 {
    const REBIAS: f32 = f32::from_bits((127 + 112) << 23);
    let bits = u32::from(bits);
    let magnitude = (bits & 0x7fff) << 13;
    let value = (f32::from_bits(magnitude) * REBIAS).to_bits();
    // Exponent 31 is infinity or NaN, and stays that.
    let special = if magnitude >= 31 << 23 { 0x7f80_0000 } else { 0 };
    f32::from_bits(value | special | (bits & 0x8000) << 16)
}

/// The little-endian 16-bit word at byte `at`.
#[inline]
fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// The little-endian 32-bit word at byte `at`.
#[inline]
fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// `value` with its sign flipped if the lowest bit of `bit` is set.
#[inline]
fn flip_sign(value: f32, bit: u32) -> f32 {
    f32::from_bits(value.to_bits() ^ (bit << 31))
}

/// A codebook row of magnitudes with its signs (bit `j` for entry `j`), times `scale`.
#[inline]
fn signed_row<const N: usize>(row: [u8; N], signs: u8, scale: f32) -> [f32; N] {
    std::array::from_fn(|j| flip_sign(scale * f32::from(row[j]), u32::from(signs) >> j & 1))
}
