//! What the machine does meanwhile, sampled on a thread of its own.
//!
//! NVML is never asked from the training loop: its calls wait for the driver, and polling it there has slowed
//! trainers down. A sampler thread asks at a fixed interval, and [`Telemetry::window`] only takes what has been
//! gathered since the last call.

mod host;
mod nvml;
mod window;

use std::ffi::{OsStr, OsString};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use host::{ThreadTime, host_memory_bytes, peak_host_memory_bytes, thread_time, total_host_memory_bytes};
use nvml::GpuReading;
use window::Window;

/// Names an NVML library to load instead of the system's. Where it is set, the first GPU of that library is
/// sampled even when training runs on the CPU, which is how the path from NVML to the files is tested.
pub const NVML_LIBRARY_VARIABLE: &str = "LORA_TRAIN_NVML";

/// How long the start of NVML is waited for. Without the persistence daemon the first call wakes the driver.
const NVML_START_TIMEOUT: Duration = Duration::from_secs(15);

/// By what NVML finds a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NvmlSelector {
    /// NVML's own number of the GPU, which neither `CUDA_VISIBLE_DEVICES` nor `CUDA_DEVICE_ORDER` changes.
    Index(u32),
    /// `GPU-...`, `MIG-...`, or the UUID without a prefix, as the CUDA driver gives it.
    Uuid(String),
}

/// Figures of the machine over a stretch of time. What cannot be measured is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MachineSample {
    /// Memory of this process that is in RAM, latest sample.
    pub host_memory_bytes: Option<u64>,
    /// Share of all processor threads that this process used, in percent.
    pub cpu_utilization_percent: Option<f64>,
    /// Share of time in which the GPU ran a kernel, mean, in percent.
    pub gpu_utilization_percent: Option<f64>,
    /// The same, highest sample.
    pub gpu_utilization_max_percent: Option<f64>,
    /// Memory of the GPU that is in use, by whatever process, highest sample.
    pub gpu_memory_used_bytes: Option<u64>,
    /// Power that the GPU draws, mean.
    pub gpu_power_watts: Option<f64>,
    /// Energy that the GPU has used since [`Telemetry::start`].
    pub energy_joules: Option<f64>,
    /// Temperature of the GPU, highest sample.
    pub gpu_temperature_celsius: Option<f64>,
}

/// The sampler thread and what it has gathered. Dropping it ends the thread.
#[derive(Debug)]
pub struct Telemetry {
    gathered: Arc<Mutex<Gathered>>,
    notice: Option<String>,
    processor_time: Mutex<ProcessorTime>,
    /// Dropped to end the thread.
    stop: Option<Sender<()>>,
    sampler: Option<JoinHandle<()>>,
}

/// What the sampler thread hands over.
#[derive(Debug, Default)]
struct Gathered {
    window: Window,
    host_memory_bytes: Option<u64>,
    energy_joules: Option<f64>,
    peak_gpu_memory_bytes: Option<u64>,
}

/// Processor time at the start of the current window.
#[derive(Debug)]
struct ProcessorTime {
    at: Instant,
    used: Option<Duration>,
    percent: Option<f64>,
}

impl Telemetry {
    /// Starts to sample every `sample_ms` milliseconds (at least 10), the host always and a GPU where one is given.
    ///
    /// It does not fail: where NVML is not there, the GPU's figures are absent and [`Self::notice`] says why.
    #[must_use]
    pub fn start(sample_ms: u64, gpu: Option<NvmlSelector>) -> Self {
        Self::start_with_library(sample_ms, gpu, std::env::var_os(NVML_LIBRARY_VARIABLE))
    }

    /// The same with an NVML library of one's own.
    #[must_use]
    pub fn start_with_library(sample_ms: u64, gpu: Option<NvmlSelector>, library: Option<OsString>) -> Self {
        let gpu = gpu.or_else(|| library.as_ref().map(|_| NvmlSelector::Index(0)));
        let gathered = Arc::new(Mutex::new(Gathered::default()));
        let interval = Duration::from_millis(sample_ms.max(10));
        let (stop, stopped) = mpsc::channel();
        let (nvml_started, nvml_start) = mpsc::channel();
        let shared = Arc::clone(&gathered);
        let without_gpu = gpu.is_none();
        let sampler = std::thread::Builder::new().name("telemetry".into()).spawn(move || {
            let Some(selector) = gpu else {
                return sample(&shared, interval, &stopped, GpuReading::default);
            };
            let outcome = nvml::with_gpu(library.as_deref().map(OsStr::new), &selector, |gpu| {
                // The receiver may have stopped waiting; sampling goes on all the same.
                let _ = nvml_started.send(Ok(gpu.notice()));
                sample(&shared, interval, &stopped, || gpu.read());
            });
            if let Err(reason) = outcome {
                let _ = nvml_started.send(Err(reason));
                sample(&shared, interval, &stopped, GpuReading::default);
            }
        });
        let notice = if without_gpu {
            Some("no GPU figures: this run does not use an NVIDIA GPU".to_owned())
        } else {
            match nvml_start.recv_timeout(NVML_START_TIMEOUT) {
                Ok(Ok(notice)) => notice,
                Ok(Err(reason)) => Some(format!("no GPU figures: {reason}")),
                Err(_) => Some("no GPU figures yet: NVML has not started within 15 seconds".to_owned()),
            }
        };
        let notice = match &sampler {
            Ok(_) => notice,
            Err(error) => Some(format!("no figures of the machine: the sampler thread does not start ({error})")),
        };
        let processor_time = ProcessorTime { at: Instant::now(), used: host::processor_time(), percent: None };
        Self { gathered, notice, processor_time: Mutex::new(processor_time), stop: Some(stop), sampler: sampler.ok() }
    }

    /// One line that says which figures are absent and why; `None` where all are there.
    #[must_use]
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// Figures over the time since the previous call, or since the start. Where no sample fell into that time, the
    /// latest one stands in.
    #[must_use]
    pub fn window(&self) -> MachineSample {
        let cpu_utilization_percent = self.processor_time_percent();
        let mut gathered = lock(&self.gathered);
        MachineSample {
            host_memory_bytes: gathered.host_memory_bytes,
            cpu_utilization_percent,
            energy_joules: gathered.energy_joules,
            ..gathered.window.take()
        }
    }

    /// Energy that the GPU has used since the start.
    #[must_use]
    pub fn energy_joules(&self) -> Option<f64> {
        lock(&self.gathered).energy_joules
    }

    /// The most memory of the GPU that any sample saw in use.
    #[must_use]
    pub fn peak_gpu_memory_bytes(&self) -> Option<u64> {
        lock(&self.gathered).peak_gpu_memory_bytes
    }

    /// Share of all threads that this process used since the previous call. Asking costs a microsecond, and only
    /// both ends of the window give its exact figure, so this one is read by the caller's thread.
    fn processor_time_percent(&self) -> Option<f64> {
        let mut last = lock(&self.processor_time);
        let (now, used) = (Instant::now(), host::processor_time());
        let elapsed = now.duration_since(last.at).as_secs_f64();
        // Shorter than the kernel's accounting can tell: the last figure stands, and the window stays open.
        if elapsed < 0.001 {
            return last.percent;
        }
        let percent = used.zip(last.used).map(|(used, before)| {
            let share = used.saturating_sub(before).as_secs_f64() / (elapsed * host::num_threads());
            (100.0 * share).min(100.0)
        });
        *last = ProcessorTime { at: now, used, percent };
        percent
    }
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(sampler) = self.sampler.take() {
            // A panic of the sampler has been printed; it must not end training.
            let _ = sampler.join();
        }
    }
}

/// Samples until the other end of `stopped` is dropped.
fn sample(
    gathered: &Mutex<Gathered>,
    interval: Duration,
    stopped: &mpsc::Receiver<()>,
    mut read_gpu: impl FnMut() -> GpuReading,
) {
    let mut energy = nvml::EnergyMeter::default();
    let mut next = Instant::now();
    loop {
        // Asked before the lock is taken: the training loop never waits for the driver.
        let gpu = read_gpu();
        let host_memory_bytes = host::host_memory_bytes();
        let energy_joules = energy.add(&gpu, Instant::now());
        {
            let mut gathered = lock(gathered);
            gathered.window.add(&gpu);
            gathered.host_memory_bytes = host_memory_bytes.or(gathered.host_memory_bytes);
            gathered.energy_joules = energy_joules.or(gathered.energy_joules);
            gathered.peak_gpu_memory_bytes = gathered.peak_gpu_memory_bytes.max(gpu.memory_used_bytes);
        }
        // A fixed beat, without catching up after a pause.
        next = (next + interval).max(Instant::now());
        match stopped.recv_timeout(next.duration_since(Instant::now())) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// A panic while the lock was held leaves figures that are whole, since each is one assignment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_gpu_the_host_is_sampled_and_one_line_says_why_the_rest_is_absent() {
        let telemetry = Telemetry::start_with_library(10, None, None);
        let started = Instant::now();
        let mut spin = 0_u64;
        while started.elapsed() < Duration::from_millis(120) {
            spin = std::hint::black_box(spin.wrapping_add(1));
        }
        let sample = telemetry.window();
        assert!(sample.host_memory_bytes.unwrap() > 1 << 20, "{sample:?}");
        let cpu = sample.cpu_utilization_percent.unwrap();
        assert!(cpu > 0.0 && cpu <= 100.0, "{sample:?}");
        let only_host = MachineSample {
            host_memory_bytes: sample.host_memory_bytes,
            cpu_utilization_percent: sample.cpu_utilization_percent,
            ..MachineSample::default()
        };
        assert_eq!(sample, only_host);
        assert_eq!(telemetry.notice().unwrap().lines().count(), 1);
        assert_eq!((telemetry.energy_joules(), telemetry.peak_gpu_memory_bytes()), (None, None));
    }

    #[test]
    fn a_missing_nvml_is_a_notice_not_an_error() {
        let library = Some("libnvidia-ml-that-is-nowhere.so.1".into());
        let telemetry = Telemetry::start_with_library(10, Some(NvmlSelector::Index(0)), library);
        let notice = telemetry.notice().unwrap();
        assert!(notice.starts_with("no GPU figures: NVML cannot be loaded"), "{notice}");
        assert_eq!(notice.lines().count(), 1);
        assert_eq!(telemetry.window().gpu_utilization_percent, None);
    }

    #[test]
    fn dropping_ends_the_thread_at_once() {
        let telemetry = Telemetry::start_with_library(60_000, None, None);
        let started = Instant::now();
        drop(telemetry);
        assert!(started.elapsed() < Duration::from_secs(5));
    }
}
