//! Memory aligned to cache lines that grows when asked and is reused: nothing else.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

/// Bytes aligned to 64, owned.
///
/// Growing zeroes the memory and forgets what it held.
#[derive(Debug)]
pub struct Scratch {
    data: *mut u8,
    bytes: usize,
}

// SAFETY: the memory is owned and has no interior sharing.
unsafe impl Send for Scratch {}
// SAFETY: a shared reference gives no access to the memory.
unsafe impl Sync for Scratch {}

const ALIGN: usize = 64;

impl Scratch {
    /// No memory yet.
    pub const fn new() -> Scratch {
        Scratch { data: std::ptr::null_mut(), bytes: 0 }
    }

    /// Bytes held.
    pub fn capacity(&self) -> usize {
        self.bytes
    }

    /// Makes at least `bytes` available and returns their start.
    pub fn reserve(&mut self, bytes: usize) -> *mut u8 {
        if bytes > self.bytes {
            let bytes = bytes.next_multiple_of(ALIGN);
            let layout = layout(bytes);
            self.release();
            // SAFETY: the layout is not empty, since bytes > self.bytes >= 0.
            self.data = unsafe { alloc_zeroed(layout) };
            if self.data.is_null() {
                handle_alloc_error(layout);
            }
            self.bytes = bytes;
        }
        self.data
    }

    fn release(&mut self) {
        if self.bytes > 0 {
            // SAFETY: allocated by `reserve` with this layout, and not used after.
            unsafe { dealloc(self.data, layout(self.bytes)) };
            self.data = std::ptr::null_mut();
            self.bytes = 0;
        }
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, ALIGN).expect("a scratch size below isize::MAX")
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.release();
    }
}
