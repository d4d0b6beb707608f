//! A limit to the memory that a piece of work takes.
//!
//! What a file of somebody else's makes a library allocate cannot always be told beforehand: the engine of chat templates
//! counts steps, and each of forty can double a text. An allocation that fails ends the process in Rust, and where memory
//! is handed out before it is there, as on Linux, the system ends it, or another one. So the allocator counts, and ends the
//! process with a message while there is still memory to live with.

#![expect(unsafe_code, reason = "an allocator is made so")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::OnceLock;

/// Exit code of a process that was ended: an input is at fault.
const EXIT_CODE: i32 = 2;

thread_local! {
    /// Bytes that this thread may still take, and what to say then; `None` where nothing is counted.
    static LEFT: Cell<Option<(isize, &'static str)>> = const { Cell::new(None) };
}

static BEFORE_THE_END: OnceLock<fn()> = OnceLock::new();

/// The system's allocator, which ends the process where work takes more than [`within`] allows.
#[derive(Debug)]
pub struct Budgeted;

/// Does `work`, which may have `bytes` bytes more at a time than there are now, on this thread. One that takes more ends
/// the process with exit code 2, after `message`, a line or more, is written to standard error. Only in a process whose
/// allocator is [`Budgeted`].
pub fn within<T>(bytes: usize, message: &'static str, work: impl FnOnce() -> T) -> T {
    /// Puts back what was, also after a panic.
    struct Restore(Option<(isize, &'static str)>);
    impl Drop for Restore {
        fn drop(&mut self) {
            LEFT.set(self.0);
        }
    }
    let _restore = Restore(LEFT.replace(Some((isize::try_from(bytes).unwrap_or(isize::MAX), message))));
    work()
}

/// What is to be done before a process is ended: system calls alone, as in a signal handler. The first caller's counts.
pub fn before_the_end(act: fn()) {
    // Who comes later would do the same.
    let _ = BEFORE_THE_END.set(act);
}

/// Counts `bytes` more, or less where they are negative.
fn count(bytes: isize) {
    // While a thread ends, its variables may be gone.
    let _ = LEFT.try_with(|cell| {
        if let Some((left, message)) = cell.get() {
            let left = left.saturating_sub(bytes);
            if left < 0 {
                end(message);
            }
            cell.set(Some((left, message)));
        }
    });
}

#[cold]
fn end(message: &str) -> ! {
    if let Some(act) = BEFORE_THE_END.get() {
        act();
    }
    #[cfg(unix)]
    // SAFETY: system calls on memory that stays; nobody is told where standard error is closed. Nothing is allocated, and
    // no destructor runs.
    unsafe {
        libc::write(libc::STDERR_FILENO, message.as_ptr().cast(), message.len());
        libc::_exit(EXIT_CODE)
    }
    #[cfg(not(unix))]
    std::process::exit(EXIT_CODE)
}

/// Sizes are at most `isize::MAX`.
fn signed(bytes: usize) -> isize {
    bytes.cast_signed()
}

// SAFETY: every request is handed on to the system's allocator as it is; only sizes are counted.
unsafe impl GlobalAlloc for Budgeted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(signed(layout.size()));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(signed(layout.size()));
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(signed(size) - signed(layout.size()));
        // SAFETY: the caller's promise.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-signed(layout.size()));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_and_given_back_is_counted_within_the_work_alone() {
        let left = || LEFT.get().map(|(bytes, _)| bytes);
        let allocator = Budgeted;
        let layout = Layout::from_size_align(1000, 8).unwrap();
        let sizes = within(10_000, "", || {
            // SAFETY: each pointer is used with its layout, and not after it is given back.
            unsafe {
                let first = allocator.alloc(layout);
                let after_first = left();
                let second = allocator.alloc_zeroed(layout);
                let second = allocator.realloc(second, layout, 3000);
                let after_second = left();
                allocator.dealloc(second, Layout::from_size_align_unchecked(3000, 8));
                allocator.dealloc(first, layout);
                let inner = within(50, "", left);
                [after_first, after_second, inner, left()]
            }
        });
        assert_eq!(sizes, [Some(9000), Some(6000), Some(50), Some(10_000)]);
        assert_eq!(left(), None);
        let _ = std::panic::catch_unwind(|| within(10, "", || panic!("of the work")));
        assert_eq!(left(), None);
    }
}
