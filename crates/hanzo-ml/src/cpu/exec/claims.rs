//! Who runs which item of a level.
//!
//! A level's items are parted among the workers, each part a range of its own that its worker takes from the front; whoever has done
//! his takes from the others' in turn. A part's counter has cache lines of its own, which stay with its worker until another comes for
//! help: one counter for all would travel from core to core with every item. Items that follow one another, whose weights do
//! too, mostly run on one core, so that what is asked for beyond an item's end is what the core needs next.
//!
//! There are two sets of counters, for levels of even and odd number: while one is in use each worker rewinds its own of the other. What
//! an item does is not known here.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A counter alone in its pair of cache lines (they are fetched in pairs).
#[repr(align(128))]
#[derive(Default)]
struct Counter(AtomicUsize);

/// The counters of a pool's workers.
pub(super) struct Claims([Box<[Counter]>; 2]);

/// Worker `worker`'s share of `total` items when nobody helps.
pub(super) fn part(total: usize, worker: usize, workers: usize) -> Range<usize> {
    total * worker / workers..total * (worker + 1) / workers
}

impl Claims {
    /// Counters of `workers` workers, none of them used.
    pub(super) fn new(workers: usize) -> Claims {
        let set = || (0..workers).map(|_| Counter::default()).collect();
        Claims([set(), set()])
    }

    /// Forgets all claims: level 0 follows.
    pub(super) fn rewind(&mut self) {
        self.0.iter_mut().flatten().for_each(|c| *c.0.get_mut() = 0);
    }

    /// Items that `worker` runs in level `level` of `total` items: all workers' together are each item once.
    ///
    /// Every worker calls this for every level in turn, and no worker for the next before all have come to the end of this one.
    pub(super) fn items(&self, level: usize, worker: usize, total: usize) -> impl Iterator<Item = usize> {
        let (set, other) = (&self.0[level % 2], &self.0[1 - level % 2]);
        // All have left the level before; the barrier before the next one makes the zero visible.
        other[worker].0.store(0, Ordering::Relaxed);
        let workers = set.len();
        let mut helped = 0;
        std::iter::from_fn(move || {
            while helped < workers {
                let of = (worker + helped) % workers;
                let (part, next) = (part(total, of, workers), &set[of].0);
                // A part that is done is only looked at: its line stays where it is.
                if helped == 0 || next.load(Ordering::Relaxed) < part.len() {
                    let item = next.fetch_add(1, Ordering::Relaxed);
                    if item < part.len() {
                        return Some(part.start + item);
                    }
                }
                helped += 1;
            }
            None
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::pool::{Barrier, Pool};
    use std::sync::atomic::AtomicU32;

    #[test]
    fn every_item_of_every_level_runs_once_whoever_is_late() {
        for workers in [1, 2, 3, 7] {
            let pool = Pool::new(workers).expect("threads");
            let mut claims = Claims::new(workers);
            let totals = [1, 0, 2, 3, 5, 24, 7, 100, 1, 1];
            let runs: Vec<Vec<AtomicU32>> = totals.map(|n| (0..n).map(|_| AtomicU32::new(0)).collect()).into();
            for step in 1..=20u32 {
                claims.rewind();
                pool.run(&|worker: usize, barrier: &Barrier| {
                    for (level, runs) in runs.iter().enumerate() {
                        for item in claims.items(level, worker, runs.len()) {
                            runs[item].fetch_add(1, Ordering::Relaxed);
                            if (item + level + step as usize) % 5 == worker {
                                std::thread::yield_now();
                            }
                        }
                        barrier.wait();
                    }
                });
                assert!(runs.iter().flatten().all(|n| n.load(Ordering::Relaxed) == step), "{workers} workers");
            }
        }
    }

    #[test]
    fn a_worker_takes_its_own_part_first_then_the_others() {
        let claims = Claims::new(3);
        let mut second = claims.items(0, 1, 10);
        assert_eq!((second.next(), second.next()), (Some(3), Some(4)));
        assert_eq!(claims.items(0, 2, 10).collect::<Vec<_>>(), [6, 7, 8, 9, 0, 1, 2, 5]);
        assert_eq!(second.next(), None);
        assert_eq!(claims.items(0, 0, 10).next(), None);
    }
}
