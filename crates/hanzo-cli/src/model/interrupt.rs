//! Ctrl-C: raises a flag that generations look at. What it means in the end is the command's decision.

use std::sync::atomic::{AtomicBool, Ordering};

/// Raised by Ctrl-C; lowered by [`lower`].
static RAISED: AtomicBool = AtomicBool::new(false);

/// What a second Ctrl-C does while the first one is still being obeyed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Impatience {
    /// Ends the program at once.
    Ends,
    /// Nothing: the program has its own way out.
    Waits,
}

/// From now on Ctrl-C raises the flag, which is returned. Until this call it ends the program.
pub fn catch(impatience: Impatience) -> anyhow::Result<&'static AtomicBool> {
    ctrlc::set_handler(move || {
        if RAISED.swap(true, Ordering::SeqCst) && impatience == Impatience::Ends {
            std::process::exit(i32::from(crate::failure::INTERRUPTED));
        }
    })?;
    Ok(&RAISED)
}

/// Lowers the flag: the interruption has been dealt with.
pub fn lower() {
    RAISED.store(false, Ordering::SeqCst);
}
