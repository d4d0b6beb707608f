//! The allocator of the command: a limit to the memory that a piece of work takes, and small pieces of memory fast.
//!
//! What a file of somebody else's makes a library allocate cannot always be told beforehand: the engine of chat templates
//! counts steps, and each of forty can double a text. An allocation that fails ends the process in Rust, and where memory
//! is handed out before it is there, as on Linux, the system ends it, or another one. So the allocator counts, and ends the
//! process with a message while there is still memory to live with.
//!
//! Tokenising spends nearly half of its time in glibc's allocator, on pieces of some bytes; with mimalloc it takes 0.7 of the
//! time. Large pieces, those of tensors, are left to the system: what a step takes is reckoned with it in mind.

#![expect(unsafe_code, reason = "an allocator is made so")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use mimalloc::MiMalloc;

/// Pieces of up to this size are mimalloc's, in bytes.
const SMALL: usize = 1024;
/// Exit code of a process that was ended: an input is at fault.
const EXIT_CODE: i32 = 2;

thread_local! {
    /// What this thread may take; `None` where nothing is counted.
    static LEFT: Cell<Option<Left>> = const { Cell::new(None) };
    /// The row that this thread is at: its file, and its number from 0.
    static ROW: RefCell<Option<(PathBuf, usize)>> = const { RefCell::new(None) };
}

/// What a piece of work may still take.
#[derive(Clone, Copy)]
struct Left {
    /// Bytes.
    bytes: isize,
    /// The same before it began.
    at_first: isize,
    /// What to say where they do not do.
    message: &'static str,
}

static BEFORE_THE_END: OnceLock<fn()> = OnceLock::new();

/// An allocator that ends the process where work takes more than [`within`] allows. By their size, pieces of memory are
/// mimalloc's or the system's.
#[derive(Debug)]
pub struct Budgeted;

/// Does `work`, which may have `bytes` bytes more at a time than there are now, on this thread. One that takes more ends
/// the process with exit code 2, after `message`, a line or more, is written to standard error, with the row that the
/// thread is [at](on_row). Only in a process whose allocator is [`Budgeted`].
///
/// An allocator must not unwind, so this is the last resort: work that looks at what it has [taken] can end in time.
pub fn within<T>(bytes: usize, message: &'static str, work: impl FnOnce() -> T) -> T {
    let bytes = isize::try_from(bytes).unwrap_or(isize::MAX);
    counting(Some(Left { bytes, at_first: bytes, message }), work)
}

/// Does `work` without counting what it takes, which has another bound.
pub fn uncounted<T>(work: impl FnOnce() -> T) -> T {
    counting(None, work)
}

fn counting<T>(left: Option<Left>, work: impl FnOnce() -> T) -> T {
    /// Puts back what was, also after a panic.
    struct Restore(Option<Left>);
    impl Drop for Restore {
        fn drop(&mut self) {
            LEFT.set(self.0);
        }
    }
    let _restore = Restore(LEFT.replace(left));
    work()
}

/// Bytes that the work [within] a limit has taken and not given back; `None` where nothing is counted.
#[must_use]
pub fn taken() -> Option<usize> {
    LEFT.get().map(|left| usize::try_from(left.at_first - left.bytes).unwrap_or(0))
}

/// Does `work` for row `index`, from 0, of a file, which is named should this thread take too much.
pub fn on_row<T>(file: &Path, index: usize, work: impl FnOnce() -> T) -> T {
    /// Forgets the row, also after a panic.
    struct Forget;
    impl Drop for Forget {
        fn drop(&mut self) {
            ROW.set(None);
        }
    }
    ROW.set(Some((file.to_owned(), index)));
    let _forget = Forget;
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
        if let Some(left) = cell.get() {
            let bytes = left.bytes.saturating_sub(bytes);
            if bytes < 0 {
                // What is said is made of pieces of memory too.
                cell.set(None);
                end(left.message);
            }
            cell.set(Some(Left { bytes, ..left }));
        }
    });
}

#[cold]
fn end(message: &str) -> ! {
    let row = |row: &(PathBuf, usize)| format!("{}:row {}: ", row.0.display(), row.1 + 1);
    let row = ROW.try_with(|cell| cell.try_borrow().ok()?.as_ref().map(row)).ok().flatten().unwrap_or_default();
    let message = format!("error: {row}{message}\n");
    if let Some(act) = BEFORE_THE_END.get() {
        act();
    }
    #[cfg(unix)]
    // SAFETY: system calls on memory that stays; nobody is told where standard error is closed. No destructor runs.
    unsafe {
        libc::write(libc::STDERR_FILENO, message.as_ptr().cast(), message.len());
        libc::_exit(EXIT_CODE)
    }
    #[cfg(not(unix))]
    {
        use std::io::Write as _;
        drop(std::io::stderr().write_all(message.as_bytes()));
        std::process::exit(EXIT_CODE)
    }
}

/// Sizes are at most `isize::MAX`.
fn signed(bytes: usize) -> isize {
    bytes.cast_signed()
}

/// Whose a piece of memory of this layout is.
fn is_small(layout: Layout) -> bool {
    layout.size() <= SMALL
}

// SAFETY: every request is handed on as it is, to the one of two allocators that its layout names: a piece goes back to the
// allocator that it came from, since it comes back with its layout.
unsafe impl GlobalAlloc for Budgeted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(signed(layout.size()));
        // SAFETY: the caller's promise.
        unsafe { if is_small(layout) { MiMalloc.alloc(layout) } else { System.alloc(layout) } }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(signed(layout.size()));
        // SAFETY: the caller's promise.
        unsafe { if is_small(layout) { MiMalloc.alloc_zeroed(layout) } else { System.alloc_zeroed(layout) } }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promises that the size, rounded up to the alignment, is one that there can be.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        if is_small(layout) == is_small(new) {
            count(signed(size) - signed(layout.size()));
            // SAFETY: the caller's promise.
            return unsafe {
                if is_small(layout) {
                    MiMalloc.realloc(pointer, layout, size)
                } else {
                    System.realloc(pointer, layout, size)
                }
            };
        }
        // SAFETY: the caller's promise. The new piece is another one and as long as what is copied; where there is none,
        // the old one stays.
        unsafe {
            let moved = self.alloc(new);
            if !moved.is_null() {
                std::ptr::copy_nonoverlapping(pointer, moved, layout.size().min(size));
                self.dealloc(pointer, layout);
            }
            moved
        }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-signed(layout.size()));
        // SAFETY: the caller's promise.
        unsafe { if is_small(layout) { MiMalloc.dealloc(pointer, layout) } else { System.dealloc(pointer, layout) } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_and_given_back_is_counted_within_the_work_alone() {
        let left = || LEFT.get().map(|left| left.bytes);
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
        let taken_within = within(10_000, "", || {
            // SAFETY: as above.
            unsafe {
                let piece = allocator.alloc(layout);
                let seen = (taken(), uncounted(|| (taken(), allocator.dealloc(piece, layout))).0, taken());
                on_row(Path::new("a.jsonl"), 3, || ROW.with_borrow(Clone::clone)).unwrap();
                seen
            }
        });
        assert_eq!(taken_within, (Some(1000), None, Some(1000)));
        assert_eq!(ROW.take(), None);
        assert_eq!(left(), None);
        // SAFETY: as above. Between the two allocators a piece keeps what is in it, and its alignment.
        unsafe {
            for align in [1, 8, 64, 256] {
                let sizes = [100, SMALL, SMALL + 1, 5000, SMALL + 1, SMALL, 10];
                let mut layout = Layout::from_size_align(sizes[0], align).unwrap();
                let mut piece = allocator.alloc(layout);
                piece.write_bytes(7, 10);
                for size in sizes {
                    piece = allocator.realloc(piece, layout, size);
                    layout = Layout::from_size_align(size, align).unwrap();
                    assert!(piece.addr().is_multiple_of(align), "{size} at {align}");
                    assert_eq!(std::slice::from_raw_parts(piece, 10), [7; 10]);
                    piece.add(size - 1).write(7);
                }
                allocator.dealloc(piece, layout);
                let zeroed = allocator.alloc_zeroed(layout);
                assert_eq!(std::slice::from_raw_parts(zeroed, 10), [0; 10]);
                allocator.dealloc(zeroed, layout);
            }
        }
        let _ = std::panic::catch_unwind(|| within(10, "", || panic!("of the work")));
        assert_eq!(left(), None);
    }
}
