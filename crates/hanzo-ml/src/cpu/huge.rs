//! Weights on huge pages: what a Plan's contractions read is copied once into memory of large pages, and the file's own pages are
//! given back as it goes. Which weights those are, and what they mean, may not be known here.
//!
//! A mapped file has pages of 4 KiB, and a decode step reads all of them: translations, on a virtual machine twice as deep,
//! then cost more than the prefetcher hides. The copy takes 0.1 to 0.5 s a gigabyte of two threads; the page cache keeps the file
//! for the next load, and may be taken by the system at any time.

use super::memory::Buffer;
use super::pool::Pool;
use hanzo_gguf::TensorBytes;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Whether weights are copied to huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// Where the system has them, and weights are no more than 8 GiB and half the memory that is available.
    #[default]
    Auto,
    /// Whatever their size, as long as there is memory.
    On,
    /// Never: weights stay in the file's mapping.
    Off,
}

/// The most bytes that are copied unasked: more would delay the first token by seconds.
pub const MOST: u64 = 8 << 30;
/// The fewest: less stays in a cache, or is read in no time.
const FEWEST: u64 = 16 << 20;
/// Bytes that a worker copies at a time.
const PIECE: usize = 4 << 20;
/// Tensors begin at multiples of this.
const ALIGN: usize = 64;

impl HugePages {
    /// Is it worth copying so many bytes?
    fn wants(self, bytes: u64) -> bool {
        match self {
            HugePages::Off => false,
            HugePages::On => bytes > 0 && available().is_none_or(|a| bytes <= a),
            HugePages::Auto => {
                (FEWEST..=MOST).contains(&bytes) && given() && available().is_some_and(|a| bytes <= a / 2)
            }
        }
    }
}

/// Does the system give huge pages to those who ask?
fn given() -> bool {
    let text = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    text.contains("[always]") || text.contains("[madvise]")
}

/// Bytes of memory that can be had without swapping.
fn available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Tensors, copied.
pub(super) struct Copied {
    memory: Buffer,
    /// Where each begins.
    places: Vec<usize>,
}

impl Copied {
    /// Copies the tensors on all workers, or does not if `how` says so or there is no memory.
    pub(super) fn of(tensors: &[&TensorBytes], how: HugePages, pool: &Pool) -> Option<Copied> {
        let mut places = Vec::with_capacity(tensors.len());
        let mut bytes = 0usize;
        for t in tensors {
            places.push(bytes);
            bytes = bytes.checked_add(t.len())?.checked_next_multiple_of(ALIGN)?;
        }
        if !how.wants(bytes as u64) {
            return None;
        }
        let memory = Buffer::new(bytes).ok()?;
        let pieces = |i: usize| (0..tensors[i].len()).step_by(PIECE).map(move |from| (i, from));
        let pieces: Vec<(usize, usize)> = (0..tensors.len()).flat_map(pieces).collect();
        let next = AtomicUsize::new(0);
        let to = Address(memory.ptr());
        pool.run(&|_, _| {
            while let Some(&(i, from)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                let range = from..(from + PIECE).min(tensors[i].len());
                let piece = &tensors[i][range.clone()];
                // SAFETY: tensors have places of their own in the memory, pieces are disjoint, and each is claimed once.
                unsafe { to.get().add(places[i] + from).copy_from_nonoverlapping(piece.as_ptr(), piece.len()) };
                tensors[i].release(range);
            }
        });
        Some(Copied { memory, places })
    }

    /// The first byte of tensor `i`.
    pub(super) fn ptr(&self, i: usize) -> *const u8 {
        self.memory.bytes()[self.places[i]..].as_ptr()
    }
}

/// An address that workers share.
struct Address(*mut u8);

// SAFETY: a plain address; whoever writes there answers for it.
unsafe impl Sync for Address {}

impl Address {
    fn get(&self) -> *mut u8 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_the_tensors_bit_for_bit_each_at_its_place() {
        let pool = Pool::new(2).expect("threads");
        let make = |n: usize| TensorBytes::from((0..n).map(|i| (i * 31 % 251) as u8).collect::<Vec<_>>());
        let tensors = [make(3), make(PIECE + 5), make(64)];
        let all: Vec<&TensorBytes> = tensors.iter().collect();
        let copied = Copied::of(&all, HugePages::On, &pool).expect("a copy");
        for (i, t) in tensors.iter().enumerate() {
            // SAFETY: the copy holds the tensor's bytes from there on.
            assert!(unsafe { std::slice::from_raw_parts(copied.ptr(i), t.len()) } == &t[..]);
            assert!(copied.ptr(i).addr().is_multiple_of(ALIGN));
        }
        assert!(Copied::of(&all, HugePages::Off, &pool).is_none());
        assert!(Copied::of(&[], HugePages::On, &pool).is_none());
    }

    #[test]
    fn unasked_only_what_fits_is_copied() {
        assert!(!HugePages::Auto.wants(FEWEST - 1) && !HugePages::Auto.wants(MOST + 1));
        assert!(HugePages::On.wants(1) && !HugePages::On.wants(0) && !HugePages::Off.wants(1 << 30));
    }
}
