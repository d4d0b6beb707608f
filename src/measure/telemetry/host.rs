//! What this process and its threads take of the host.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::memory::{MemoryGroups, available_bytes, resident_bytes, swapped_bytes};
use super::usage::usage;
use crate::measure::figures::MachineSample;

/// Time between two readings of values that change slowly.
const SLOW_INTERVAL: Duration = Duration::from_secs(1);

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
        sample.host_memory_bytes = resident_bytes();
        sample.host_available_bytes = available_bytes;
        sample.host_swapped_bytes = swapped_bytes;
        sample.disk_read_bytes = disk_read_bytes();
        sample.major_page_faults = usage().and_then(|usage| usage.major_page_faults);
    }
}

/// Bytes that this process read from disks because the page cache did not have them.
fn disk_read_bytes() -> Option<u64> {
    let io = std::fs::read_to_string("/proc/self/io").ok()?;
    io.lines().find_map(|line| line.strip_prefix("read_bytes:"))?.trim().parse().ok()
}

/// Processor time of this process since it started.
pub(super) fn processor_time() -> Option<Duration> {
    usage()?.processor_time
}

/// Share of the processors' time that other programs take for a moment, in which this one sleeps; `None` where the system
/// does not count it. Programs that give way to others (`nice`) do not count.
#[must_use]
pub fn share_of_others(moment: Duration) -> Option<f64> {
    let ticks = || busy_ticks(&std::fs::read_to_string("/proc/stat").ok()?);
    let [busy, all] = ticks()?;
    std::thread::sleep(moment);
    let [busy, all] = ticks().map(|[busy_now, now]| [busy_now.saturating_sub(busy), now.saturating_sub(all)])?;
    #[expect(clippy::cast_precision_loss, reason = "ticks of a moment")]
    let share = busy as f64 / all as f64;
    (all > 0).then_some(share)
}

/// Ticks in which the processors computed for somebody, and all ticks, from `/proc/stat`.
fn busy_ticks(stat: &str) -> Option<[u64; 2]> {
    let first = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<u64> = first.split_ascii_whitespace().filter_map(|ticks| ticks.parse().ok()).collect();
    // What guests took is in the first two, too.
    let [user, nice, system, idle, io_wait, interrupts, soft_interrupts, stolen] = *ticks.first_chunk()?;
    let busy = user + system + interrupts + soft_interrupts + stolen;
    Some([busy, busy + nice + idle + io_wait])
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
    // Nanoseconds on a processor and in the run queue. The former are only as new as the last tick of the system's clock.
    let schedstat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let queued = schedstat.split_ascii_whitespace().nth(1).and_then(|nanoseconds| nanoseconds.parse().ok());
    ThreadTime { cpu: thread_processor_time(), queued: queued.map(Duration::from_nanos) }
}

#[cfg(unix)]
pub(super) fn thread_processor_time() -> Option<Duration> {
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
pub(super) fn thread_processor_time() -> Option<Duration> {
    None
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

    #[test]
    fn what_processors_do_for_others_is_told_from_what_they_wait_for() {
        let stat = "cpu  100 20 30 4000 500 6 7 8 90 10\ncpu0 1 2 3 4 5 6 7 8 9 10\n";
        assert_eq!(busy_ticks(stat), Some([151, 4671]));
        assert_eq!([busy_ticks(""), busy_ticks("cpu 1 2 3")], [None; 2]);
        if cfg!(target_os = "linux") {
            let share = share_of_others(Duration::from_millis(50)).unwrap();
            assert!((0.0..=1.0).contains(&share), "{share}");
        }
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
