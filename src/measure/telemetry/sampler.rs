//! The sampler thread.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::energy::PackageEnergy;
use super::host::{Host, thread_processor_time};
use super::lock;
use crate::measure::figures::{MachineSample, MachineSamples};

/// What the sampler thread hands over.
#[derive(Debug, Default)]
pub(super) struct Gathered {
    pub(super) samples: MachineSamples,
    pub(super) energy_joules: Option<f64>,
    pub(super) peak_gpu_memory_bytes: Option<u64>,
    /// Processor time of the sampler thread.
    pub(super) sampler_time: Option<Duration>,
}

pub(super) struct Sampler {
    pub(super) gathered: Arc<Mutex<Gathered>>,
    pub(super) interval: Duration,
    pub(super) ended: mpsc::Receiver<()>,
    pub(super) host: Host,
    pub(super) packages: Option<PackageEnergy>,
}

impl Sampler {
    /// Samples until the other end of `ended` is dropped.
    pub(super) fn run(mut self, mut read_gpu: impl FnMut() -> MachineSample) {
        let mut next = Instant::now();
        loop {
            // Read before the lock is taken, so that the training loop never waits for the driver.
            let mut sample = read_gpu();
            self.host.read(&mut sample);
            sample.cpu_energy_joules = self.packages.as_mut().map(PackageEnergy::read);
            let sampler_time = thread_processor_time();
            {
                let mut gathered = lock(&self.gathered);
                gathered.samples.add(&sample);
                gathered.energy_joules = sample.energy_joules.or(sample.cpu_energy_joules);
                gathered.peak_gpu_memory_bytes = gathered.peak_gpu_memory_bytes.max(sample.gpu_memory_used_bytes);
                gathered.sampler_time = sampler_time;
            }
            // A fixed interval, without catching up after a pause.
            next = (next + self.interval).max(Instant::now());
            if self.ended.recv_timeout(next.saturating_duration_since(Instant::now())) != Err(RecvTimeoutError::Timeout)
            {
                return;
            }
        }
    }
}
