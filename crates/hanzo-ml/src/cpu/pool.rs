//! A persistent thread pool whose workers run one closure together, with a spin-then-park barrier inside it.
//!
//! A decode step crosses hundreds of barriers a few microseconds apart: workers spin first and sleep only when the wait
//! is long (another process has the core, or the program is idle). No work stealing, no queues, no allocation per run.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Spins before sleeping at a barrier: some hundred microseconds, longer than any level of a decode step.
const SPINS: u32 = 300_000;
/// Spins from one pause instruction to the next. Hypervisors take the core from a guest that pauses some thousand times
/// with few cycles between (AMD: 3000 times and 128 cycles), and give it back when they please.
const SPINS_A_PAUSE: u32 = 256;

/// A counter that others wait on: spin first, then sleep.
#[derive(Default)]
struct Event {
    value: AtomicU32,
    sleepers: AtomicU32,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Event {
    /// Waits until the value differs from `old`: spins at most `spins` times, then sleeps.
    fn wait(&self, old: u32, spins: u32) {
        for spin in 0..spins {
            if self.value.load(Ordering::Acquire) != old {
                return;
            }
            if spin.is_multiple_of(SPINS_A_PAUSE) {
                std::hint::spin_loop();
            }
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        // Sequentially consistent: either this thread sees the new value, or `advance` sees this sleeper.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while self.value.load(Ordering::SeqCst) == old {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Changes the value and wakes whoever waits.
    fn advance(&self) {
        self.value.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.wake.notify_all();
        }
    }
}

/// A reusable barrier for a fixed number of threads.
pub struct Barrier {
    n: usize,
    spins: u32,
    arrived: AtomicUsize,
    round: Event,
}

impl Barrier {
    fn new(n: usize) -> Barrier {
        // With more threads than cores, whoever spins keeps a core from the one it waits for.
        let cores = std::thread::available_parallelism().map_or(1, |c| c.get());
        let spins = if n > cores { 0 } else { SPINS };
        Barrier { n, spins, arrived: AtomicUsize::new(0), round: Event::default() }
    }

    /// Returns once all threads are here. What any of them wrote before is visible to all after.
    pub fn wait(&self) {
        if self.n == 1 {
            return;
        }
        let round = self.round.value.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.n {
            self.arrived.store(0, Ordering::Relaxed);
            self.round.advance();
        } else {
            self.round.wait(round, self.spins);
        }
    }
}

/// A job: a borrowed closure, its lifetime vouched for by [`Pool::run`].
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn(usize, &Barrier) + Sync));

// SAFETY: the closure is `Sync`, and `run` keeps it alive until every worker has left it.
unsafe impl Send for Job {}

struct Shared {
    barrier: Barrier,
    start: Event,
    job: Mutex<Option<Job>>,
    stop: AtomicBool,
}

/// The pool. Worker 0 is the thread that calls [`Pool::run`].
pub struct Pool {
    shared: Arc<Shared>,
    running: Mutex<()>,
    handles: Vec<JoinHandle<()>>,
    n: usize,
}

/// A panic inside a kernel would leave the others waiting forever; it is a bug, and ends the program with a message.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("hanzo: a worker thread panicked; this is a bug");
            std::process::abort();
        }
    }
}

impl Pool {
    /// A pool of `n` workers (at least one), `n - 1` of them new threads.
    pub fn new(n: usize) -> std::io::Result<Pool> {
        let n = n.max(1);
        let shared = Arc::new(Shared {
            barrier: Barrier::new(n),
            start: Event::default(),
            job: Mutex::new(None),
            stop: AtomicBool::new(false),
        });
        let mut handles = Vec::with_capacity(n - 1);
        for worker in 1..n {
            let s = Arc::clone(&shared);
            handles.push(std::thread::Builder::new().name(format!("hanzo-{worker}")).spawn(move || serve(&s, worker))?);
        }
        Ok(Pool { shared, running: Mutex::new(()), handles, n })
    }

    /// Workers.
    pub fn threads(&self) -> usize {
        self.n
    }

    /// Runs `f(worker, barrier)` on every worker at once and returns when all have returned.
    pub fn run(&self, f: &(dyn Fn(usize, &Barrier) + Sync)) {
        let _one = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let _abort = AbortOnPanic;
        if self.n > 1 {
            // SAFETY: only the lifetime is erased; the last barrier below keeps `f` borrowed until no worker uses it.
            let job = unsafe {
                std::mem::transmute::<&(dyn Fn(usize, &Barrier) + Sync), &'static (dyn Fn(usize, &Barrier) + Sync)>(f)
            };
            *self.shared.job.lock().unwrap_or_else(PoisonError::into_inner) = Some(Job(job));
            self.shared.start.advance();
        }
        f(0, &self.shared.barrier);
        self.shared.barrier.wait();
    }
}

fn serve(s: &Shared, worker: usize) {
    let mut seen = 0;
    loop {
        s.start.wait(seen, s.barrier.spins);
        seen = seen.wrapping_add(1);
        if s.stop.load(Ordering::Acquire) {
            return;
        }
        let job = *s.job.lock().unwrap_or_else(PoisonError::into_inner);
        let _abort = AbortOnPanic;
        if let Some(Job(f)) = job {
            // SAFETY: `run` waits at the barrier below until this call has returned.
            unsafe { (*f)(worker, &s.barrier) };
        }
        s.barrier.wait();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.start.advance();
        for h in self.handles.drain(..) {
            let _ = h.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_worker_runs_once_and_barriers_order_their_writes() {
        for n in [1, 2, 3, 5] {
            let pool = Pool::new(n).expect("threads");
            for round in 0..200usize {
                let sums: Vec<AtomicUsize> = (0..3).map(|_| AtomicUsize::new(0)).collect();
                pool.run(&|w, b| {
                    sums[0].fetch_add(w + 1, Ordering::Relaxed);
                    b.wait();
                    let seen = sums[0].load(Ordering::Relaxed);
                    sums[1].fetch_add(seen, Ordering::Relaxed);
                    b.wait();
                    sums[2].fetch_add(sums[1].load(Ordering::Relaxed) + round, Ordering::Relaxed);
                });
                let first = n * (n + 1) / 2;
                assert_eq!(sums[2].load(Ordering::Relaxed), n * (n * first + round));
            }
        }
    }

    #[test]
    fn workers_that_slept_wake_for_the_next_run() {
        let pool = Pool::new(2).expect("threads");
        for _ in 0..3 {
            let count = AtomicUsize::new(0);
            pool.run(&|w, _| {
                if w == 1 {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.load(Ordering::Relaxed), 2);
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    #[test]
    fn callers_on_several_threads_take_turns() {
        let pool = Pool::new(2).expect("threads");
        let count = AtomicUsize::new(0);
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    for _ in 0..50 {
                        pool.run(&|_, b| {
                            b.wait();
                            count.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(count.load(Ordering::Relaxed), 3 * 50 * 2);
    }
}
