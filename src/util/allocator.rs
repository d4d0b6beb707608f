//! The allocator of the command: small pieces of memory from mimalloc, large ones from the system.
//!
//! Tokenising with glibc's allocator spends nearly half of its time there, on small pieces; with mimalloc it takes 0.7
//! of the time. Large pieces, those of tensors, stay with the system: the memory plan of a step assumes so.

#![expect(unsafe_code, reason = "an allocator is made so")]

use std::alloc::{GlobalAlloc, Layout, System};

use mimalloc::MiMalloc;

/// Largest piece that mimalloc serves, in bytes.
const SMALL: usize = 1024;

/// Pieces from this size on go back to the system as soon as they are freed: the most that glibc allows.
#[cfg(target_env = "gnu")]
const MAPPED: i32 = 32 << 20;

/// The same while rows are read.
#[cfg(target_env = "gnu")]
const MAPPED_WHILE_READING: i32 = 128 << 10;

/// Pieces from this size on lie in [`HUGE_PAGE`]s, but for their ends: a product of a few milliseconds otherwise waits for the
/// addresses of hundreds of small pages, longest in a virtual machine. Smaller ones would take memory that no plan counts.
#[cfg(target_os = "linux")]
const LARGE: usize = 4 << 20;

#[cfg(target_os = "linux")]
const HUGE_PAGE: usize = 2 << 20;

unsafe extern "C" {
    /// Gives back what the calling thread has freed (mimalloc.h).
    fn mi_collect(force: bool);
}

/// Makes glibc keep freed tensors for the next ones: a step that gets its memory anew from the system takes an eighth longer
/// (TinyLlama 1.1B, 1 x 512 tokens), and the next step needs as much again.
pub fn keep_freed_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the calls set two limits of the allocator, and nothing else.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
    }
}

/// Makes glibc give freed memory back to the system, until [`keep_freed_memory`]: tokenising takes a multiple of what stays of
/// it, in the memory of its threads, where no tensor would find it.
pub fn give_back_freed_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: as above.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_WHILE_READING);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 1 << 20);
    }
}

/// Gives back what this thread has freed of small pieces, and all threads of large ones.
pub fn give_back_now() {
    // SAFETY: both calls only look for memory that is not in use.
    unsafe {
        mi_collect(true);
        #[cfg(target_env = "gnu")]
        libc::malloc_trim(0);
    }
}

/// Sends each request to mimalloc or to the system, by its size.
#[derive(Debug)]
pub struct BySize;

fn is_small(layout: Layout) -> bool {
    layout.size() <= SMALL
}

/// Asks for huge pages inside a large piece. A refusal changes nothing.
fn in_huge_pages(piece: *mut u8, layout: Layout) -> *mut u8 {
    #[cfg(target_os = "linux")]
    if layout.size() >= LARGE && !piece.is_null() {
        let skipped = piece.align_offset(HUGE_PAGE);
        let whole = layout.size().saturating_sub(skipped) / HUGE_PAGE * HUGE_PAGE;
        // SAFETY: whole pages inside the piece, whose content advice does not change.
        unsafe { libc::madvise(piece.wrapping_add(skipped).cast(), whole, libc::MADV_HUGEPAGE) };
    }
    piece
}

// SAFETY: every request is passed on unchanged to one of the two allocators, chosen by its layout. A piece comes back
// with the same layout, so it goes back to the allocator that it came from.
unsafe impl GlobalAlloc for BySize {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { if is_small(layout) { MiMalloc.alloc(layout) } else { in_huge_pages(System.alloc(layout), layout) } }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe {
            if is_small(layout) {
                MiMalloc.alloc_zeroed(layout)
            } else {
                in_huge_pages(System.alloc_zeroed(layout), layout)
            }
        }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promises that the size, rounded up to the alignment, does not overflow an `isize`.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        if is_small(layout) == is_small(new) {
            // SAFETY: the caller's promise.
            return unsafe {
                if is_small(layout) {
                    MiMalloc.realloc(pointer, layout, size)
                } else {
                    in_huge_pages(System.realloc(pointer, layout, size), new)
                }
            };
        }
        // SAFETY: the caller's promise. The new piece does not overlap the old one and is as long as what is copied; if
        // there is no new piece, the old one stays.
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
        // SAFETY: the caller's promise.
        unsafe { if is_small(layout) { MiMalloc.dealloc(pointer, layout) } else { System.dealloc(pointer, layout) } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_keeps_its_content_and_alignment_between_the_two_allocators() {
        let allocator = BySize;
        // SAFETY: each pointer is used with its layout, and not after it is given back.
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
    }
}
