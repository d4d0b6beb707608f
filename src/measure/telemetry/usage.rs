//! What the system counts for this process.

use std::time::Duration;

/// What this process has taken since it started, all its threads together.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Usage {
    /// In the kernel and out of it.
    pub(super) processor_time: Option<Duration>,
    pub(super) major_page_faults: Option<u64>,
    pub(super) peak_resident_bytes: Option<u64>,
}

/// What the system counts for this process.
#[cfg(unix)]
pub(super) fn usage() -> Option<Usage> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: `usage` outlives the call, which fills it where it returns 0.
    let usage = unsafe {
        match libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) {
            0 => usage.assume_init(),
            _ => return None,
        }
    };
    let duration = |time: libc::timeval| {
        let seconds = Duration::from_secs(u64::try_from(time.tv_sec).ok()?);
        Some(seconds + Duration::from_micros(u64::try_from(time.tv_usec).ok()?))
    };
    // Bytes on Apple's systems, kilobytes elsewhere.
    let unit = if cfg!(target_vendor = "apple") { 1 } else { 1024 };
    Some(Usage {
        processor_time: duration(usage.ru_utime).zip(duration(usage.ru_stime)).map(|(user, kernel)| user + kernel),
        major_page_faults: u64::try_from(usage.ru_majflt).ok(),
        peak_resident_bytes: u64::try_from(usage.ru_maxrss).ok().map(|peak| peak * unit),
    })
}

#[cfg(not(unix))]
pub(super) fn usage() -> Option<Usage> {
    None
}
