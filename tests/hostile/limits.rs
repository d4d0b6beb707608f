//! An allocator that ends the process when a file makes it request far more memory than the file's length, and a clock.

#![allow(unsafe_code, reason = "an allocator that counts is made so")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Largest single allocation, and largest total, while reading inputs of some kilobytes.
pub(crate) const MAX_PIECE_BYTES: usize = 192 << 20;
const MAX_BYTES: usize = 640 << 20;

static BYTES: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator with limits.
pub(crate) struct Limited;

fn take(size: usize) {
    let bytes = BYTES.fetch_add(size, Ordering::Relaxed) + size;
    if size > MAX_PIECE_BYTES || bytes > MAX_BYTES {
        // No formatting: that would allocate.
        let text: &[u8] = if size > MAX_PIECE_BYTES {
            b"an input made the process ask for more than 192 MiB at a time\n"
        } else {
            b"an input made the process take more than 640 MiB\n"
        };
        // SAFETY: the bytes live for ever, and descriptor 2 is standard error.
        unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
        std::process::abort();
    }
}

// SAFETY: every request is passed unchanged to the system's allocator; only sizes are counted.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        take(size);
        BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Processor time of this thread.
pub(crate) fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a value of that type.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
