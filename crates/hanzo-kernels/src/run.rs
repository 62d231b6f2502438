//! Runs of a weight's blocks: how they move between GGUF bytes and the device layout, as arguments and grids of the ops
//! `pack` and `unpack`. Which buffers they lie in and when they move is the backend's matter and does not enter.

use crate::args::{Pack, Unpack, Weight};
use crate::{Layout, format_file, layout, op};
use hanzo_gguf::Format;

/// Runs begin at multiples of this many blocks, so that no two runs share a word of a plane.
const RUN: u64 = 16;

/// The most workgroups of a launch that every device takes.
const MAX_GROUPS: u64 = 65535;

/// Successive blocks of one weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    format: Format,
    layout: Layout,
    row_bytes: u32,
    first: u32,
    blocks: u32,
}

impl Run {
    /// All blocks of a weight of `rows` rows (over all experts) of `cols` columns; none for what has no [`layout`], has no
    /// element, or is larger than kernels can count (2^32 blocks, rows of 4 GiB).
    pub fn whole(format: Format, rows: usize, cols: usize) -> Option<Run> {
        let layout = layout(format, rows, cols)?;
        let row_bytes = u32::try_from(format.row_bytes(cols)?).ok()?;
        let blocks = u32::try_from(layout.blocks).ok().filter(|&n| n > 0)?;
        Some(Run { format, layout, row_bytes, first: 0, blocks })
    }

    /// The run as runs of at most `bytes` GGUF bytes each, but never less than 16 blocks; each can be packed on its own.
    pub fn split(self, bytes: u64) -> impl Iterator<Item = Run> {
        let most = bytes.min(u64::from(u32::MAX) / 2) / self.block_bytes() / RUN * RUN;
        let step = most.max(RUN);
        let end = u64::from(self.first) + u64::from(self.blocks);
        (u64::from(self.first)..end).step_by(step as usize).map(move |first| Run {
            first: first as u32,
            blocks: (end - first).min(step) as u32,
            ..self
        })
    }

    /// Where the weight's planes lie.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The run's first block, counted from the weight's.
    pub fn first_block(&self) -> u32 {
        self.first
    }

    /// The number of its blocks.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Where its GGUF bytes begin and end in the weight's.
    pub fn bytes(&self) -> std::ops::Range<u64> {
        let first = u64::from(self.first);
        self.offset(first)..self.offset(first + u64::from(self.blocks))
    }

    /// Arguments and grid of `pack` for a run of at most 4 GiB that starts at a multiple of 16 blocks: `src` are its GGUF bytes,
    /// at a multiple of 16 bytes and padded to whole words; `dst` is the whole weight on the device.
    pub fn pack<P>(&self, src: P, dst: P) -> (Pack<P>, [u32; 3]) {
        let planes = format_file(self.format).map_or(&[][..], |f| &f.planes[..]);
        let [p1, p2, p3] = self.layout.planes();
        let part = |p: usize| planes.get(p).copied().unwrap_or(0);
        let words = planes.iter().map(|&b| (u64::from(b) * u64::from(self.blocks)).div_ceil(4)).max().unwrap_or(0);
        let (groups, stride) = grid("pack", words);
        let args = Pack {
            src,
            dst,
            p1,
            p2,
            p3,
            b0: part(0),
            b1: part(1),
            b2: part(2),
            b3: part(3),
            block_bytes: self.block_bytes() as u32,
            row_blocks: self.layout.row_blocks as u32,
            row_bytes: self.row_bytes,
            first_block: self.first,
            blocks: self.blocks,
            stride,
        };
        (args, [groups, planes.len() as u32, 1])
    }

    /// Arguments and grid of `unpack` for a run of at most 4 GiB: `dst` gets its GGUF bytes, padded with zeros to whole words.
    pub fn unpack<P>(&self, w: Weight<P>, dst: P) -> (Unpack<P>, [u32; 3]) {
        let range = self.bytes();
        let bytes = range.end - range.start;
        let (groups, stride) = grid("unpack", bytes.div_ceil(4));
        let args = Unpack {
            w,
            dst,
            block_bytes: self.block_bytes() as u32,
            row_blocks: self.layout.row_blocks as u32,
            row_bytes: self.row_bytes,
            first_block: self.first,
            bytes: bytes as u32,
            stride,
        };
        (args, [groups, 1, 1])
    }

    /// GGUF bytes of a block of the device layout; a float block counts 32 elements.
    fn block_bytes(&self) -> u64 {
        format_file(self.format).map_or(1, |f| u64::from(f.block_bytes))
    }

    /// Where a block begins in the GGUF bytes: the last of a float row may be cut short.
    fn offset(&self, block: u64) -> u64 {
        let (row, in_row) = (block / self.layout.row_blocks, block % self.layout.row_blocks);
        row * u64::from(self.row_bytes) + in_row * self.block_bytes()
    }
}

/// Workgroups of an op for so many words, a thread a word while the grid suffices, and the threads of the launch.
fn grid(name: &str, words: u64) -> (u32, u32) {
    let threads = op(name).and_then(|o| o.constants.first()).map_or(1, |c| c.1);
    let groups = words.div_ceil(u64::from(threads)).clamp(1, MAX_GROUPS) as u32;
    (groups, groups * threads)
}
