//! What a look at the machine gives.

use std::collections::BTreeMap;

/// Figures of the machine over a stretch of time. What cannot be measured is absent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MachineSample {
    /// Memory of this process that is in RAM, latest sample.
    pub host_memory_bytes: Option<u64>,
    /// Memory that the machine, or this process's control group, has left, lowest sample.
    pub host_available_bytes: Option<u64>,
    /// Memory of this process that has been swapped out, latest sample.
    pub host_swapped_bytes: Option<u64>,
    /// Share of all processor threads that this process used, in percent.
    pub cpu_utilization_percent: Option<f64>,
    /// Bytes that this process read from disks.
    pub disk_read_bytes: Option<u64>,
    /// Page faults of this process that waited for a disk.
    pub major_page_faults: Option<u64>,
    /// Share of time in which the GPU ran a kernel, mean, in percent.
    pub gpu_utilization_percent: Option<f64>,
    /// The same, highest sample.
    pub gpu_utilization_max_percent: Option<f64>,
    /// Share of the GPU's multiprocessors that had work, mean, in percent.
    pub gpu_sm_activity_percent: Option<f64>,
    /// Share of the bandwidth of the GPU's memory that was used, where the driver counts it; elsewhere share of time in
    /// which it was read or written. Mean, in percent.
    pub gpu_memory_activity_percent: Option<f64>,
    /// Share of the time in which the GPU's tensor cores were at work, mean, in percent.
    pub gpu_tensor_activity_percent: Option<f64>,
    /// Share of the time in which the GPU's pipelines of single or half precision outside of the tensor cores were at work,
    /// the busier of the two, mean, in percent.
    pub gpu_float_activity_percent: Option<f64>,
    /// Memory of the GPU that is in use, by whatever process, highest sample.
    pub gpu_memory_used_bytes: Option<u64>,
    /// Power that the GPU draws, mean.
    pub gpu_power_watts: Option<f64>,
    /// Energy of the GPU since [`Telemetry::start`](super::Telemetry::start).
    pub energy_joules: Option<f64>,
    /// Energy of the processor's packages since [`Telemetry::start`](super::Telemetry::start), where no GPU is sampled.
    pub cpu_energy_joules: Option<f64>,
    /// Temperature of the GPU, highest sample.
    pub gpu_temperature_celsius: Option<f64>,
    /// Clock of the GPU's multiprocessors, mean.
    pub gpu_sm_clock_mhz: Option<f64>,
    /// Clock of the GPU's memory, mean.
    pub gpu_memory_clock_mhz: Option<f64>,
    /// What kept the GPU's clocks down, by name, with the share of the samples in which it did, from 0 to 1; absent where
    /// nothing did.
    pub gpu_throttle_shares: Option<BTreeMap<&'static str, f64>>,
    /// What the GPU received over PCI Express, mean.
    pub gpu_pcie_received_bytes_per_second: Option<f64>,
    /// What the GPU sent over PCI Express, mean.
    pub gpu_pcie_sent_bytes_per_second: Option<f64>,
    /// Memory of the GPU that other processes hold, highest sample.
    pub gpu_other_processes_memory_bytes: Option<u64>,
}
