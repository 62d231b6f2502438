//! What each bit of a block is for, found by flipping it and looking at what [`formats::to_float`] says: scales, minima
//! and codes of any format, without asking which format it is. A new format is probed like the others.
//!
//! A bit that changes elements of a whole group (16 or more, over a few random blocks) belongs to a scale or a minimum:
//! to a minimum if it shifts all elements of a group by the same amount, else to a scale. Any other bit is code.

use super::random::Rng;
use hanzo_gguf::{Format, formats};
use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};

/// What a bit is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Part of a block's or group's scale.
    Scale,
    /// Part of a minimum: an offset of a whole group.
    Minimum,
    /// Part of one or a few elements: codes, codebook indices, signs.
    Code,
}

/// The roles of a block's bits.
#[derive(Debug)]
pub struct Layout {
    /// One a bit, lowest bit of the first byte first.
    roles: Vec<Role>,
}

/// Elements in the smallest group that shares a scale, over all formats.
const GROUP: usize = 16;

/// Random blocks each bit is tried on.
const TRIES: usize = 6;

impl Layout {
    /// The layout of a block format; probed once.
    pub fn of(format: Format) -> &'static Layout {
        static KNOWN: OnceLock<Mutex<HashMap<Format, &'static Layout>>> = OnceLock::new();
        let mut known = match KNOWN.get_or_init(Mutex::default).lock() {
            Ok(guard) => guard,
            Err(poisoned) => poisoned.into_inner(),
        };
        // Leaked once a format: a few hundred bytes for the life of the process.
        known.entry(format).or_insert_with(|| Box::leak(Box::new(Layout::probe(format))))
    }

    fn probe(format: Format) -> Layout {
        let (len, bytes) = (format.block_len(), format.block_bytes());
        let mut rng = Rng::new(0x5eed ^ u64::from(format.id()));
        let blocks: Vec<Vec<u8>> = (0..TRIES).map(|_| super::random::block(format, &mut rng)).collect();
        let decode = |block: &[u8]| {
            let mut out = vec![0.0f32; len];
            formats::to_float(format, block, &mut out);
            out
        };
        let plain: Vec<Vec<f32>> = blocks.iter().map(|b| decode(b)).collect();
        let role = |bit: usize| {
            let mut touched = vec![false; len];
            let mut shifts = true;
            for (block, before) in blocks.iter().zip(&plain) {
                let mut flipped = block.clone();
                flipped[bit / 8] ^= 1 << (bit % 8);
                let after = decode(&flipped);
                for (t, (a, b)) in touched.iter_mut().zip(before.iter().zip(&after)) {
                    *t |= a.to_bits() != b.to_bits();
                }
                shifts &= (before.chunks(GROUP).zip(after.chunks(GROUP))).all(|(b, a)| is_shift(b, a));
            }
            match touched.iter().filter(|t| **t).count() {
                n if n < GROUP => Role::Code,
                _ if shifts => Role::Minimum,
                _ => Role::Scale,
            }
        };
        Layout { roles: (0..bytes * 8).map(role).collect() }
    }

    /// Bits of one role.
    pub fn bits(&self, role: Role) -> impl Iterator<Item = usize> {
        self.roles.iter().enumerate().filter(move |(_, r)| **r == role).map(|(i, _)| i)
    }

    /// Bytes that hold nothing but codes.
    pub fn codes(&self) -> impl Iterator<Item = usize> {
        self.roles.chunks(8).enumerate().filter(|(_, r)| r.iter().all(|r| *r == Role::Code)).map(|(i, _)| i)
    }

    /// Does the format have minima?
    pub fn has_minimum(&self) -> bool {
        self.roles.contains(&Role::Minimum)
    }
}

/// Did every element of the group move by the same amount (to f32 rounding of the values)?
fn is_shift(before: &[f32], after: &[f32]) -> bool {
    let moved = |i: usize| f64::from(after[i]) - f64::from(before[i]);
    let size = before.iter().chain(after).fold(0.0f64, |m, x| m.max(f64::from(x.abs())));
    !size.is_finite() || (1..before.len()).all(|i| (moved(i) - moved(0)).abs() <= 4.0 * super::num::U * size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probing_finds_the_documented_fields_of_known_formats() {
        let bytes = |f: Format, role: Role| {
            let mut b: Vec<usize> = Layout::of(f).bits(role).map(|bit| bit / 8).collect();
            b.dedup();
            b
        };
        assert_eq!(bytes(Format::Q4_0, Role::Scale), [0, 1]);
        assert_eq!(bytes(Format::Q4_1, Role::Scale), [0, 1]);
        assert_eq!(bytes(Format::Q4_1, Role::Minimum), [2, 3]);
        assert_eq!(Layout::of(Format::Q8_0).codes().collect::<Vec<_>>(), (2..34).collect::<Vec<_>>());
        assert_eq!(Layout::of(Format::Q4_K).codes().collect::<Vec<_>>(), (16..144).collect::<Vec<_>>());
        assert!(!Layout::of(Format::Q6_K).has_minimum());
    }

    #[test]
    fn every_block_format_has_scales_and_code_bytes() {
        for &f in Format::ALL.iter().filter(|f| f.is_block()) {
            let layout = Layout::of(f);
            assert!(layout.bits(Role::Scale).count() > 0, "{f}");
            assert!(layout.codes().count() > 0, "{f}");
        }
        let with_minimum: Vec<_> =
            Format::ALL.iter().filter(|f| f.is_block() && Layout::of(**f).has_minimum()).map(|f| f.name()).collect();
        assert_eq!(with_minimum, ["Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K", "IQ1_S"]);
    }
}
