//! Where the planes of a weight lie on a device.

use hanzo_gguf::Format;

/// Alignment of planes, bytes.
const PLANE_ALIGN: u64 = 16;

/// The planes of one weight `[experts, rows, cols]` in device layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Blocks of the weight. A float row counts as `ceil(cols / 32)` blocks of 32, padded with zeros.
    pub blocks: u64,
    /// Blocks of a row.
    pub row_blocks: u64,
    /// Byte offset of each plane; planes that are not there lie at 0.
    pub offsets: [u64; 4],
    /// Bytes of the planes.
    pub bytes: u64,
    /// Byte offset, behind the planes, of one f32 a row: the powers of two of op `row_scale`, for devices with matrix units.
    pub row_scales: u64,
    /// Bytes with the row scales.
    pub bytes_with_scales: u64,
}

impl Layout {
    /// Offsets of planes 1 to 3 in units of 16 bytes, as kernels take them.
    pub fn planes(&self) -> [u32; 3] {
        [1, 2, 3].map(|p| (self.offsets[p] / PLANE_ALIGN) as u32)
    }

    /// Units of 32 elements of a row of `cols` elements.
    pub fn row_units(cols: usize) -> usize {
        cols.div_ceil(32)
    }
}

/// The device layout of a weight of `rows` rows (over all experts) of `cols` columns; none for a format without a file
/// in `formats/` or a row that is not whole blocks.
pub fn layout(format: Format, rows: usize, cols: usize) -> Option<Layout> {
    let file = crate::format_file(format)?;
    let row_blocks = if format.is_block() {
        format.row_bytes(cols)? as u64 / format.block_bytes() as u64
    } else {
        Layout::row_units(cols) as u64
    };
    let blocks = row_blocks * rows as u64;
    let mut offsets = [0; 4];
    let mut at = 0u64;
    for (offset, bytes) in offsets.iter_mut().zip(&file.planes) {
        *offset = at;
        at += (blocks * u64::from(*bytes)).next_multiple_of(PLANE_ALIGN);
    }
    let bytes_with_scales = at + 4 * rows as u64;
    Some(Layout { blocks, row_blocks, offsets, bytes: at, row_scales: at, bytes_with_scales })
}
