//! How much of the processor others took while we measured: `/proc/stat` of the processors we may use, less our own time.
//!
//! A benchmark on a contended machine is a wrong one; [`LIMIT`] says what is tolerated. Where the system does not tell
//! (no Linux), nothing is known and nothing is claimed.

use std::time::Instant;

/// The most foreign use, or steal, of a measurement that counts.
pub const LIMIT: f64 = 0.05;

/// Times since boot, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Times {
    /// Any process, on the processors we may use.
    busy: f64,
    /// Taken by the host of a virtual machine.
    steal: f64,
    /// Processors counted.
    processors: usize,
}

/// A moment to measure from.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    at: Instant,
    times: Option<Times>,
    own: f64,
}

/// What others took, as shares of the processors we may use.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Contention {
    /// Other processes.
    pub foreign: f64,
    /// The host.
    pub steal: f64,
}

impl Contention {
    /// Too much to believe the measurement?
    pub fn is_too_much(&self) -> bool {
        self.foreign > LIMIT || self.steal > LIMIT
    }

    /// The worse of two, share by share.
    pub fn worst(self, other: Contention) -> Contention {
        Contention { foreign: self.foreign.max(other.foreign), steal: self.steal.max(other.steal) }
    }
}

impl std::fmt::Display for Contention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "foreign CPU use {:.1}%, steal {:.1}%", 100.0 * self.foreign, 100.0 * self.steal)
    }
}

/// Now.
pub fn now() -> Moment {
    let text = std::fs::read_to_string("/proc/stat").ok();
    let times = text.and_then(|t| times(&t, &processors(), ticks_per_second()));
    Moment { at: Instant::now(), times, own: own_seconds() }
}

impl Moment {
    /// What others took since; `None` where the system does not tell.
    ///
    /// The kernel counts in ticks (10 ms): over less than about half a second this is too coarse to judge by.
    pub fn contention(&self) -> Option<Contention> {
        let end = now();
        let (from, to) = (self.times?, end.times?);
        let capacity = (end.at - self.at).as_secs_f64().max(1e-9) * to.processors as f64;
        let foreign = (to.busy - from.busy) - (end.own - self.own);
        let share = |seconds: f64| (seconds / capacity).clamp(0.0, 1.0);
        Some(Contention { foreign: share(foreign), steal: share(to.steal - from.steal) })
    }

    /// Seconds since.
    pub fn seconds(&self) -> f64 {
        self.at.elapsed().as_secs_f64()
    }
}

/// The sums over the processors of the list, from the text of `/proc/stat`.
fn times(text: &str, processors: &[usize], ticks_per_second: f64) -> Option<Times> {
    let mut sum = Times { busy: 0.0, steal: 0.0, processors: 0 };
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let number = words.next().and_then(|w| w.strip_prefix("cpu")).and_then(|n| n.parse::<usize>().ok());
        if !number.is_some_and(|n| processors.is_empty() || processors.contains(&n)) {
            continue;
        }
        // user nice system idle iowait irq softirq steal (guest times are part of user and nice)
        let ticks: Vec<f64> = words.map_while(|w| w.parse().ok()).collect();
        let tick = |i: usize| ticks.get(i).copied().unwrap_or(0.0);
        sum.busy += tick(0) + tick(1) + tick(2) + tick(5) + tick(6);
        sum.steal += tick(7);
        sum.processors += 1;
    }
    let seconds = |ticks: f64| ticks / ticks_per_second;
    (sum.processors > 0).then(|| Times { busy: seconds(sum.busy), steal: seconds(sum.steal), ..sum })
}

/// Load averages over 1, 5 and 15 minutes.
pub fn load_average() -> Option<[f64; 3]> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    let numbers: Vec<f64> = text.split_whitespace().map_while(|w| w.parse().ok()).take(3).collect();
    numbers.try_into().ok()
}

/// CPU time of this process, all threads, user and system.
#[cfg(unix)]
fn own_seconds() -> f64 {
    // SAFETY: an all-zero rusage is a valid one, and getrusage only fills it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 * 1e-6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

#[cfg(not(unix))]
fn own_seconds() -> f64 {
    0.0
}

/// The processors that this process may use; empty for all.
#[cfg(target_os = "linux")]
fn processors() -> Vec<usize> {
    // SAFETY: an all-zero set is a valid one; the call fills at most its size; CPU_ISSET reads within it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) != 0 {
            return Vec::new();
        }
        (0..libc::CPU_SETSIZE as usize).filter(|i| libc::CPU_ISSET(*i, &set)).collect()
    }
}

#[cfg(not(target_os = "linux"))]
fn processors() -> Vec<usize> {
    Vec::new()
}

#[cfg(unix)]
fn ticks_per_second() -> f64 {
    // SAFETY: sysconf reads a constant.
    match unsafe { libc::sysconf(libc::_SC_CLK_TCK) } {
        ticks if ticks > 0 => ticks as f64,
        _ => 100.0,
    }
}

#[cfg(not(unix))]
fn ticks_per_second() -> f64 {
    100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str =
        "cpu  100 0 100 0 0 0 0 0 0 0\ncpu0 100 10 50 900 5 1 2 30 40 0\ncpu1 200 0 0 0 0 0 0 0 0 0\nintr 1 2\n";

    #[test]
    fn busy_time_is_all_but_idle_waiting_and_guests_of_our_processors() {
        assert_eq!(times(STAT, &[0], 100.0), Some(Times { busy: 1.63, steal: 0.3, processors: 1 }));
        assert_eq!(times(STAT, &[], 100.0).map(|t| (t.processors, t.busy)), Some((2, 3.63)));
        assert_eq!(times(STAT, &[7], 100.0), None);
        assert_eq!(times("", &[], 100.0), None);
    }

    #[test]
    fn only_more_than_the_limit_is_too_much() {
        let c = |foreign, steal| Contention { foreign, steal };
        assert!(!c(0.05, 0.0).is_too_much() && c(0.06, 0.0).is_too_much() && c(0.0, 0.06).is_too_much());
        assert_eq!(c(0.1, 0.0).worst(c(0.0, 0.2)), c(0.1, 0.2));
    }
}
