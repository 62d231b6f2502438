//! How bits become floats and back: one file per block format, and the dispatch over [`Format`].
//!
//! Each format's file documents its block, byte by byte, and implements [`BlockFormat`] once. The modules, the dispatch
//! and the loops over blocks come from the table in `format.rs`: a function here is chosen once per call and its loop is
//! monomorphised for the format, so that no element or block asks which format it is. Formats know nothing of tensors,
//! files or backends.
//!
//! [`to_float`] is exact: it gives the same bits as the reference decoders of the formats do.

pub mod plain;
pub mod tables;

use crate::format::{Format, for_each_format};

/// One packed format: `LEN` elements in `BYTES` bytes.
///
/// The two numbers must be those of the format's row in the table; the compiler checks it.
pub trait BlockFormat<const LEN: usize, const BYTES: usize> {
    /// The exact values of one block.
    fn to_float(block: &[u8; BYTES], out: &mut [f32; LEN]);
}

/// What the dispatch knows about a format.
struct Codec {
    to_float: fn(&[u8], &mut [f32]),
}

impl Codec {
    const fn of<F: BlockFormat<LEN, BYTES>, const LEN: usize, const BYTES: usize>() -> Codec {
        Codec { to_float: decode_blocks::<F, LEN, BYTES> }
    }
}

fn decode_blocks<F: BlockFormat<LEN, BYTES>, const LEN: usize, const BYTES: usize>(src: &[u8], dst: &mut [f32]) {
    let (blocks, _) = src.as_chunks::<BYTES>();
    let (values, _) = dst.as_chunks_mut::<LEN>();
    for (block, out) in blocks.iter().zip(values) {
        F::to_float(block, out);
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

/// The little-endian half float at byte `at`, as an `f32` (exact, subnormals included).
#[inline]
fn f16_at(block: &[u8], at: usize) -> f32 {
    half::f16::from_bits(u16_at(block, at)).to_f32()
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
