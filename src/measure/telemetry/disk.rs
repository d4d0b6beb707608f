//! Free space on disks, and how fast they read.

use std::path::Path;

/// Bytes that this user may still write to the disk of a folder.
#[cfg(unix)]
#[must_use]
pub fn free_disk_bytes(folder: &Path) -> Option<u64> {
    let path = std::ffi::CString::new(folder.as_os_str().as_encoded_bytes()).ok()?;
    let mut disk = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: the path ends in 0, and `disk` outlives the call, which fills it where it returns 0.
    let disk = unsafe {
        if libc::statvfs(path.as_ptr(), disk.as_mut_ptr()) != 0 {
            return None;
        }
        disk.assume_init()
    };
    #[allow(clippy::unnecessary_cast, reason = "the types differ between systems")]
    Some(disk.f_bavail as u64 * disk.f_frsize as u64)
}

/// Bytes that this user may still write to the disk of a folder.
#[cfg(not(unix))]
#[must_use]
pub fn free_disk_bytes(_folder: &Path) -> Option<u64> {
    None
}

/// Bytes of one read, and the least of a file that says something about its disk.
#[cfg(target_os = "linux")]
const READ_BYTES: usize = 8 << 20;

/// Bytes per second at which the disk of a file gives parts of it, past the page cache, within half a second. `None` where
/// the file is small, or its file system always uses the page cache.
#[cfg(target_os = "linux")]
#[must_use]
pub fn disk_read_bytes_per_second(file: &Path) -> Option<f64> {
    use crate::util::stats::as_f64;
    use std::os::unix::fs::{FileExt, OpenOptionsExt};
    use std::time::{Duration, Instant};

    let file = std::fs::File::options().read(true).custom_flags(libc::O_DIRECT).open(file).ok()?;
    // Past the page cache, memory and positions are multiples of a block.
    let mut memory = vec![0; READ_BYTES + (1 << 12)];
    let aligned = memory.as_ptr().align_offset(1 << 12);
    let buffer = memory.get_mut(aligned..aligned + READ_BYTES)?;
    let (start, mut total) = (Instant::now(), Duration::ZERO);
    let (num_parts, mut num_read) = (file.metadata().ok()?.len() / READ_BYTES as u64, 0_usize);
    // Spread over the file.
    for part in (0..num_parts).step_by(usize::try_from(num_parts / 32).ok()?.max(1)) {
        file.read_exact_at(buffer, part * READ_BYTES as u64).ok()?;
        (num_read, total) = (num_read + 1, start.elapsed());
        if total > Duration::from_millis(500) {
            break;
        }
    }
    (num_read > 0).then(|| as_f64(num_read * READ_BYTES) / total.as_secs_f64())
}

/// Not measured on this system.
#[cfg(not(target_os = "linux"))]
#[must_use]
pub fn disk_read_bytes_per_second(_file: &Path) -> Option<f64> {
    None
}
