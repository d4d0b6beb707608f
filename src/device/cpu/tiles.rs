//! AMX: tiles of up to 16 rows of 64 bytes, which one instruction multiplies in 16 cycles.

use std::arch::x86_64::{__cpuid_count, _xgetbv};

/// Whether the processor multiplies tiles of bfloat16 and the kernel lets this process do so.
pub(super) fn are_usable() -> bool {
    has_them() && are_saved() && are_permitted()
}

/// Leaf 7: AMX-BF16 and AMX-TILE.
fn has_them() -> bool {
    const BOTH: u32 = 1 << 22 | 1 << 24;
    std::arch::is_x86_feature_detected!("xsave") && __cpuid_count(7, 0).edx & BOTH == BOTH
}

/// Whether the system keeps the tiles of a thread that it interrupts.
#[expect(unsafe_code, reason = "reads which registers the system saves")]
fn are_saved() -> bool {
    #[target_feature(enable = "xsave")]
    fn saved() -> u64 {
        // SAFETY: register 0 exists wherever there is `xsave`.
        unsafe { _xgetbv(0) }
    }
    const TILES: u64 = 1 << 17 | 1 << 18;
    // SAFETY: `has_them` has found `xsave`.
    unsafe { saved() & TILES == TILES }
}

/// Linux wants to be asked, once in a process, before a thread may write a tile.
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "a system call")]
fn are_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: this call reads no memory of ours.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn are_permitted() -> bool {
    false
}
