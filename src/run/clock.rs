//! When this process started.

use std::time::{Duration, Instant};

/// The start of this process, as exactly as the system tells (a hundredth of a second on Linux); elsewhere, now.
#[must_use]
pub fn process_start() -> Instant {
    let now = Instant::now();
    now.checked_sub(process_age().unwrap_or_default()).unwrap_or(now)
}

/// Time since the process was started, loading of the program included.
#[cfg(target_os = "linux")]
fn process_age() -> Option<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let mut since_boot = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call fills the structure, which outlives it; sysconf reads a constant of the system.
    let (outcome, ticks_per_second) =
        unsafe { (libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut since_boot), libc::sysconf(libc::_SC_CLK_TCK)) };
    if outcome != 0 {
        return None;
    }
    let now = Duration::new(u64::try_from(since_boot.tv_sec).ok()?, u32::try_from(since_boot.tv_nsec).ok()?);
    let started = start_time(&stat, u64::try_from(ticks_per_second).ok()?)?;
    now.checked_sub(started)
}

#[cfg(not(target_os = "linux"))]
fn process_age() -> Option<Duration> {
    None
}

/// Field 22 of `/proc/self/stat`, in ticks since the system started. The program's name before it may hold spaces and
/// parentheses.
#[cfg(target_os = "linux")]
fn start_time(stat: &str, ticks_per_second: u64) -> Option<Duration> {
    let (_, fields) = stat.rsplit_once(')')?;
    let ticks: u64 = fields.split_ascii_whitespace().nth(19)?.parse().ok()?;
    Some(Duration::from_millis((ticks * 1000).checked_div(ticks_per_second)?))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_start_is_read_behind_a_name_with_parentheses() {
        let stat = "12 (a (b) c) S 1 12 12 0 -1 4194304 1 0 0 0 5 6 0 0 20 0 1 0 250 99 1";
        assert_eq!(start_time(stat, 100), Some(Duration::from_millis(2500)));
    }

    #[test]
    fn the_process_has_started_before_this_test_and_not_long_ago() {
        let age = process_age().unwrap();
        assert!(age < Duration::from_hours(1), "{age:?}");
        assert!(process_start() <= Instant::now());
    }
}
