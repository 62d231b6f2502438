//! Progress on stderr: a bar on a terminal, a plain line now and then elsewhere, nothing for what is quick.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::{human_bytes, stderr_line};

/// Work that ends within this time shows nothing.
const PATIENCE: Duration = Duration::from_secs(1);
/// Time between two plain lines.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes, shown in binary units.
    Bytes,
    /// Steps: tensors, tokens, cases.
    Steps,
}

/// The progress of one piece of work. All methods take `&self`, so that threads can share it.
pub struct Progress {
    label: String,
    unit: Unit,
    total: Option<u64>,
    done: AtomicU64,
    started: Instant,
    shown: Mutex<Shown>,
}

enum Shown {
    Nothing,
    /// A terminal's bar, hidden until patience has run out.
    Bar {
        bar: ProgressBar,
        visible: bool,
    },
    /// Plain lines, the last one at this time and amount.
    Lines(Option<(Instant, u64)>),
}

impl Progress {
    /// Starts the clock. `total` is `None` while unknown; `visible` is false under `-q`.
    pub fn new(label: impl Into<String>, unit: Unit, total: Option<u64>, visible: bool) -> Progress {
        let shown = if !visible {
            Shown::Nothing
        } else if console_is_terminal() {
            let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::hidden());
            Shown::Bar { bar, visible: false }
        } else {
            Shown::Lines(None)
        };
        let label = label.into();
        Progress { label, unit, total, done: AtomicU64::new(0), started: Instant::now(), shown: Mutex::new(shown) }
    }

    /// Sets how much is done.
    pub fn set(&self, done: u64) {
        self.done.store(done, Ordering::Relaxed);
        self.show(done);
    }

    /// Adds to what is done.
    pub fn add(&self, more: u64) {
        let done = self.done.fetch_add(more, Ordering::Relaxed).saturating_add(more);
        self.show(done);
    }

    /// Removes the bar, so that something else can be printed or shown.
    pub fn finish(&self) {
        let Ok(mut shown) = self.shown.lock() else { return };
        match std::mem::replace(&mut *shown, Shown::Nothing) {
            Shown::Bar { bar, .. } => bar.finish_and_clear(),
            Shown::Lines(Some((_, last))) => {
                let done = self.done.load(Ordering::Relaxed);
                if done != last {
                    self.line(done);
                }
            }
            Shown::Lines(None) | Shown::Nothing => {}
        }
    }

    fn show(&self, done: u64) {
        let elapsed = self.started.elapsed();
        if elapsed < PATIENCE {
            return;
        }
        // Another thread is showing: its picture is recent enough.
        let Ok(mut shown) = self.shown.try_lock() else { return };
        match &mut *shown {
            Shown::Nothing => {}
            Shown::Bar { bar, visible } => {
                if !*visible {
                    *visible = true;
                    bar.set_style(self.style());
                    bar.set_message(self.label.clone());
                    bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(10));
                }
                bar.set_position(done);
            }
            Shown::Lines(last) => {
                if last.is_none_or(|(at, _)| at.elapsed() >= LINE_EVERY) {
                    *last = Some((Instant::now(), done));
                    self.line(done);
                }
            }
        }
    }

    fn style(&self) -> ProgressStyle {
        let template = template(self.unit, self.total.is_some());
        // The test below parses every template, so the fallback is never taken.
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> ")
    }

    fn line(&self, done: u64) {
        let amount = |n| if self.unit == Unit::Bytes { human_bytes(n) } else { n.to_string() };
        match self.total.filter(|t| *t > 0) {
            Some(total) => {
                let percent = (done.min(total) as f64 * 100.0 / total as f64).floor();
                stderr_line(format_args!("{}: {} of {} ({percent}%)", self.label, amount(done), amount(total)));
            }
            None => stderr_line(format_args!("{}: {}", self.label, amount(done))),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}

fn template(unit: Unit, total_known: bool) -> &'static str {
    match (unit, total_known) {
        (Unit::Bytes, true) => "{msg} [{bar:30}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}",
        (Unit::Bytes, false) => "{msg} {spinner} {binary_bytes} {binary_bytes_per_sec}",
        (Unit::Steps, true) => "{msg} [{bar:30}] {pos}/{len} {eta}",
        (Unit::Steps, false) => "{msg} {spinner} {pos}",
    }
}

fn console_is_terminal() -> bool {
    std::io::IsTerminal::is_terminal(&std::io::stderr())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_template_parses() {
        for unit in [Unit::Bytes, Unit::Steps] {
            for total_known in [false, true] {
                assert!(ProgressStyle::with_template(template(unit, total_known)).is_ok());
            }
        }
    }
}
