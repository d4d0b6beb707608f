//! Memory, processor time and disk reads of this process.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::memory::{MemoryGroups, available_bytes, swapped_bytes};
use crate::figures::MachineSample;

/// Time between two readings of values that change slowly.
const SLOW_INTERVAL: Duration = Duration::from_secs(1);

/// Reads the host.
#[derive(Debug)]
pub(super) struct Host {
    groups: MemoryGroups,
    /// When available and swapped memory were last read, and their values.
    slow: Option<(Instant, [Option<u64>; 2])>,
}

impl Host {
    pub(super) fn new() -> Self {
        Self { groups: MemoryGroups::of_this_process(), slow: None }
    }

    /// Adds the current figures of the host. Disk reads and page faults count from the start of the process.
    pub(super) fn read(&mut self, sample: &mut MachineSample) {
        let [available_bytes, swapped_bytes] = match self.slow {
            Some((at, known)) if at.elapsed() < SLOW_INTERVAL => known,
            _ => self.slow.insert((Instant::now(), [available_bytes(&self.groups), swapped_bytes()])).1,
        };
        sample.host_memory_bytes = host_memory_bytes();
        sample.host_available_bytes = available_bytes;
        sample.host_swapped_bytes = swapped_bytes;
        sample.disk_read_bytes = disk_read_bytes();
        sample.major_page_faults = major_page_faults();
    }
}

/// Bytes that this process read from disks because the page cache did not have them.
fn disk_read_bytes() -> Option<u64> {
    read_bytes_from_io(&std::fs::read_to_string("/proc/self/io").ok()?)
}

/// `read_bytes` of `/proc/self/io`.
fn read_bytes_from_io(io: &str) -> Option<u64> {
    io.lines().find_map(|line| line.strip_prefix("read_bytes:"))?.trim().parse().ok()
}

#[cfg(unix)]
fn major_page_faults() -> Option<u64> {
    u64::try_from(rusage()?.ru_majflt).ok()
}

#[cfg(not(unix))]
fn major_page_faults() -> Option<u64> {
    None
}

/// Memory of this process that is in RAM now.
#[must_use]
pub fn host_memory_bytes() -> Option<u64> {
    #[cfg(target_os = "linux")]
    return resident_from_statm(&std::fs::read_to_string("/proc/self/statm").ok()?, page_bytes()?);
    #[cfg(not(target_os = "linux"))]
    return resident_from_sysinfo();
}

/// The most memory of this process that has been in RAM since it started.
#[must_use]
pub fn peak_host_memory_bytes() -> Option<u64> {
    #[cfg(target_os = "linux")]
    return peak_from_status(&std::fs::read_to_string("/proc/self/status").ok()?);
    #[cfg(not(target_os = "linux"))]
    return peak_from_rusage();
}

/// Memory of this machine, or the limit of this process's control groups if that is lower.
#[must_use]
pub fn total_host_memory_bytes() -> Option<u64> {
    let mut system = sysinfo::System::new();
    system.refresh_memory();
    let limit = MemoryGroups::of_this_process().limit_bytes().unwrap_or(u64::MAX);
    Some(system.total_memory().min(limit)).filter(|bytes| *bytes > 0)
}

/// Memory that this process can still take: what is free on this machine or in its control group, the page cache
/// counted as free. A limit of address space (`ulimit -v`) lowers it.
#[must_use]
pub fn available_host_memory_bytes() -> Option<u64> {
    Some(available_bytes(&MemoryGroups::of_this_process())?.min(free_address_space_bytes())).filter(|bytes| *bytes > 0)
}

/// What `ulimit -v` leaves; everything if there is no limit.
#[cfg(target_os = "linux")]
fn free_address_space_bytes() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` outlives the call, which fills it or leaves it.
    let asked = unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) };
    if asked != 0 || limit.rlim_cur == libc::RLIM_INFINITY {
        return u64::MAX;
    }
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_ascii_whitespace().next().and_then(|pages| pages.parse::<u64>().ok());
    limit.rlim_cur.saturating_sub(pages.zip(page_bytes()).map_or(0, |(pages, bytes)| pages * bytes))
}

/// Bytes that this user may still write to the disk of a folder.
#[cfg(unix)]
#[must_use]
pub fn free_disk_bytes(folder: &std::path::Path) -> Option<u64> {
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
pub fn free_disk_bytes(_folder: &std::path::Path) -> Option<u64> {
    None
}

#[cfg(not(target_os = "linux"))]
fn free_address_space_bytes() -> u64 {
    u64::MAX
}

/// Second field of `/proc/self/statm`, in pages.
#[cfg(target_os = "linux")]
fn resident_from_statm(statm: &str, page_bytes: u64) -> Option<u64> {
    Some(statm.split_ascii_whitespace().nth(1)?.parse::<u64>().ok()? * page_bytes)
}

/// `VmHWM` of `/proc/self/status`, in kB that mean 1024 bytes.
#[cfg(target_os = "linux")]
fn peak_from_status(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

#[cfg(target_os = "linux")]
fn page_bytes() -> Option<u64> {
    static PAGE_BYTES: OnceLock<Option<u64>> = OnceLock::new();
    // SAFETY: sysconf reads a constant of the system.
    *PAGE_BYTES.get_or_init(|| u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok())
}

#[cfg(any(test, not(target_os = "linux")))]
fn resident_from_sysinfo() -> Option<u64> {
    use sysinfo::{ProcessRefreshKind, ProcessesToUpdate, System};
    let pid = sysinfo::get_current_pid().ok()?;
    let mut system = System::new();
    let memory = ProcessRefreshKind::nothing().with_memory();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[pid]), true, memory);
    Some(system.process(pid)?.memory())
}

#[cfg(unix)]
fn rusage() -> Option<libc::rusage> {
    let mut usage = std::mem::MaybeUninit::uninit();
    // SAFETY: `usage` outlives the call, which fills it where it returns 0.
    unsafe {
        match libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) {
            0 => Some(usage.assume_init()),
            _ => None,
        }
    }
}

#[cfg(all(unix, not(target_os = "linux")))]
fn peak_from_rusage() -> Option<u64> {
    // Bytes on Apple's systems, kilobytes elsewhere.
    let unit = if cfg!(target_vendor = "apple") { 1 } else { 1024 };
    Some(u64::try_from(rusage()?.ru_maxrss).ok()? * unit)
}

#[cfg(not(unix))]
fn peak_from_rusage() -> Option<u64> {
    None
}

/// Processor time of all threads of this process since it started, in the kernel and out of it.
#[cfg(unix)]
pub(super) fn processor_time() -> Option<Duration> {
    let usage = rusage()?;
    let duration = |time: libc::timeval| {
        let seconds = Duration::from_secs(u64::try_from(time.tv_sec).ok()?);
        Some(seconds + Duration::from_micros(u64::try_from(time.tv_usec).ok()?))
    };
    Some(duration(usage.ru_utime)? + duration(usage.ru_stime)?)
}

#[cfg(not(unix))]
pub(super) fn processor_time() -> Option<Duration> {
    None
}

/// Time of one thread since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadTime {
    /// On a processor.
    pub cpu: Option<Duration>,
    /// Ready to run, with no processor free.
    pub queued: Option<Duration>,
}

/// Time of the calling thread; absent if the system does not count it.
#[must_use]
pub fn thread_time() -> ThreadTime {
    ThreadTime { cpu: thread_processor_time(), queued: thread_queued_time() }
}

#[cfg(unix)]
fn thread_processor_time() -> Option<Duration> {
    let mut time = std::mem::MaybeUninit::<libc::timespec>::uninit();
    // SAFETY: `time` outlives the call, which fills it where it returns 0.
    let time = unsafe {
        match libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, time.as_mut_ptr()) {
            0 => time.assume_init(),
            _ => return None,
        }
    };
    Some(Duration::new(u64::try_from(time.tv_sec).ok()?, u32::try_from(time.tv_nsec).ok()?))
}

#[cfg(not(unix))]
fn thread_processor_time() -> Option<Duration> {
    None
}

fn thread_queued_time() -> Option<Duration> {
    // The processor time in it is only as new as the last tick of the system's clock, so only the queued time is read.
    queued_from_schedstat(&std::fs::read_to_string("/proc/thread-self/schedstat").ok()?)
}

/// `/proc/thread-self/schedstat`: nanoseconds on a processor and in the run queue, and a count of time slices.
fn queued_from_schedstat(schedstat: &str) -> Option<Duration> {
    Some(Duration::from_nanos(schedstat.split_ascii_whitespace().nth(1)?.parse().ok()?))
}

/// Threads that this process may run at the same time.
pub(super) fn num_threads() -> f64 {
    static NUM_THREADS: OnceLock<f64> = OnceLock::new();
    *NUM_THREADS.get_or_init(|| {
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        f64::from(u32::try_from(threads).unwrap_or(u32::MAX))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn proc_files_are_read_in_their_units() {
        assert_eq!(resident_from_statm("5000 1234 300 1 0 900 0\n", 4096), Some(1234 * 4096));
        assert_eq!(resident_from_statm("", 4096), None);
        let status = "Name:\tx\nVmPeak:\t  999 kB\nVmHWM:\t   2048 kB\nVmRSS:\t 1024 kB\n";
        assert_eq!(peak_from_status(status), Some(2048 * 1024));
        assert_eq!(peak_from_status("Name:\tx\n"), None);
        assert_eq!(read_bytes_from_io("rchar: 6976\nsyscr: 10\nread_bytes: 4096\nwrite_bytes: 0\n"), Some(4096));
        assert_eq!(queued_from_schedstat("1200 34 5\n"), Some(Duration::from_nanos(34)));
        assert_eq!(queued_from_schedstat(""), None);
    }

    #[test]
    fn memory_that_is_touched_is_seen_and_stays_in_the_peak() {
        // Other tests of this process allocate and free meanwhile, so only the block itself is certain to be there.
        let block = std::hint::black_box(vec![1_u8; 64 << 20]);
        assert!(host_memory_bytes().unwrap() >= 64 << 20);
        assert!(peak_host_memory_bytes().unwrap() >= 64 << 20);
        drop(block);
        // Two sources read one after the other agree, except for what the other tests did in between.
        let agree = (0..2000).any(|_| {
            let (ours, other) = (host_memory_bytes().unwrap(), resident_from_sysinfo().unwrap());
            ours.abs_diff(other) < 8 << 20
        });
        assert!(agree);
    }

    #[test]
    fn processor_time_grows_with_work() {
        let before = processor_time().unwrap();
        let mut x = 0_u64;
        while processor_time().unwrap() < before + Duration::from_millis(20) {
            x = std::hint::black_box(x + 1);
        }
        assert!(x > 0);
    }
}
