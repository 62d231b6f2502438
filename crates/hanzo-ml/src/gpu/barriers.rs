//! Barriers between launches: one pure function of what launches touch, and a checker that replays the list.

use super::launch::{Launch, Touch};

fn conflict(a: &Touch, b: &Touch) -> bool {
    a.buffer == b.buffer && (a.write || b.write) && a.range.start < b.range.end && b.range.start < a.range.end
}

/// Where barriers must stand: `true` at `i` puts one before launch `i`. A barrier orders everything before it with
/// everything behind it, so one stands exactly where a launch conflicts with one since the last barrier. The head, which
/// runs again and again over one body, begins with one.
pub fn barriers(launches: &[Launch], head: usize) -> Vec<bool> {
    let mut out = Vec::with_capacity(launches.len());
    let mut first = 0;
    for (i, launch) in launches.iter().enumerate() {
        let since = launches[first..i].iter().flat_map(|l| &l.touches);
        let barrier = i > 0 && (i == head || since.into_iter().any(|t| launch.touches.iter().any(|u| conflict(t, u))));
        if barrier {
            first = i;
        }
        out.push(barrier);
    }
    out
}

/// Replays a list of barriers: every pair of launches that conflicts must have a barrier between them.
///
/// # Errors
/// Names the first pair that races.
pub fn verify(launches: &[Launch], barriers: &[bool], head: usize) -> Result<(), String> {
    // Barriers passed when each launch starts.
    let mut epoch = 0usize;
    let mut epochs = Vec::with_capacity(launches.len());
    for (i, _) in launches.iter().enumerate() {
        epoch += usize::from(barriers.get(i).copied().unwrap_or(false));
        epochs.push(epoch);
    }
    for (j, later) in launches.iter().enumerate() {
        for (i, earlier) in launches[..j].iter().enumerate().rev() {
            if epochs[i] != epochs[j] {
                break;
            }
            let pair = earlier.touches.iter().flat_map(|a| later.touches.iter().map(move |b| (a, b)));
            if let Some((a, b)) = pair.into_iter().find(|(a, b)| conflict(a, b)) {
                return Err(format!(
                    "launch {j} ({}) races with launch {i} ({}) on {:?} {:?} and {:?}",
                    later.kernel, earlier.kernel, a.buffer, a.range, b.range
                ));
            }
        }
    }
    // The head's first launch follows the body once and the head's own last launch after that.
    match barriers.get(head) {
        Some(false) if head > 0 => Err("no barrier where the output head begins".into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::launch::Buffer;
    use hanzo_kernels::Key;

    fn launch(touches: &[(u64, u64, bool)]) -> Launch {
        Launch {
            op: 0,
            kernel: Key { op: "fill", format: None },
            constants: Vec::new(),
            args: Vec::new(),
            relocations: Vec::new(),
            groups: [1; 3],
            touches: (touches.iter())
                .map(|(a, b, write)| Touch { buffer: Buffer::Arena, range: *a..*b, write: *write })
                .collect(),
        }
    }

    #[test]
    fn independent_launches_share_an_epoch_and_conflicts_are_apart() {
        let list = [
            launch(&[(0, 64, true)]),
            launch(&[(64, 128, true)]),
            launch(&[(0, 64, false), (128, 256, true)]),
            launch(&[(64, 128, false), (256, 512, true)]),
            launch(&[(0, 64, true)]),
        ];
        let b = barriers(&list, list.len());
        assert_eq!(b, [false, false, true, false, true]);
        assert_eq!(verify(&list, &b, list.len()), Ok(()));
    }

    #[test]
    fn deleting_any_one_barrier_fails() {
        let list: Vec<Launch> =
            (0..6).map(|i| launch(&[(64 * i, 64 * i + 64, false), (64 * i + 64, 64 * i + 128, true)])).collect();
        let b = barriers(&list, 4);
        for i in (0..b.len()).filter(|i| b[*i]) {
            let mut fewer = b.clone();
            fewer[i] = false;
            assert!(verify(&list, &fewer, 4).is_err(), "barrier {i} is not missed");
        }
    }
}
