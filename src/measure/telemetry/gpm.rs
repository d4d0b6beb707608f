//! A GPU's own performance counters: Hopper and newer.

use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::gpm_metrics_get;
use nvml_wrapper::{Device, GpmSample, Nvml};

use crate::measure::figures::MachineSample;

/// Failures in a row after which the counters are given up and the older figures are used.
const MAX_FAILURES: u32 = 3;
const BYTES_PER_MIB: f64 = 1_048_576.0;

/// The counters of a GPU or of a slice of one, and their last reading.
pub(super) struct Gpm<'nvml> {
    nvml: &'nvml Nvml,
    /// The card of a slice: its counters are kept by GPU instance.
    card: Option<Device<'nvml>>,
    /// The GPU instance of the slice, known once a process has run on it.
    instance: Option<u32>,
    last: Option<GpmSample<'nvml>>,
    num_failures: u32,
}

impl<'nvml> Gpm<'nvml> {
    /// `None` if the GPU or its driver has no such counters.
    pub(super) fn open(nvml: &'nvml Nvml, device: &Device<'nvml>, is_slice: bool) -> Option<Self> {
        let card = if is_slice { Some(device.mig_parent_device().ok()?) } else { None };
        let is_supported = card.as_ref().unwrap_or(device).gpm_support().unwrap_or(false);
        is_supported.then_some(Self { nvml, card, instance: None, last: None, num_failures: 0 })
    }

    /// Remembers the GPU instance of a process that runs on the slice.
    pub(super) fn runs_on(&mut self, instance_of_process: Option<u32>) {
        self.instance = instance_of_process.or(self.instance);
    }

    /// Sets the figures since the last reading; none at the first. Returns whether the counters may be read and have not
    /// failed too often in a row.
    pub(super) fn read(&mut self, device: &Device<'nvml>, sample: &mut MachineSample) -> bool {
        match self.read_since_last(device, sample) {
            Ok(true) => self.num_failures = 0,
            Ok(false) => {}
            // Some machines let only root read the counters.
            Err(NvmlError::NotSupported | NvmlError::NoPermission | NvmlError::FailedToLoadSymbol(_)) => return false,
            Err(_) => self.num_failures += 1,
        }
        self.num_failures < MAX_FAILURES
    }

    /// Whether there were figures.
    fn read_since_last(&mut self, device: &Device<'nvml>, sample: &mut MachineSample) -> Result<bool, NvmlError> {
        use GpmMetricId::{AnyTensorUtil, DramBwUtil, Fp16Util, Fp32Util, PcieRxPerSec, PcieTxPerSec, SmUtil};
        let now = match (&self.card, self.instance) {
            (None, _) => device.gpm_sample()?,
            (Some(card), Some(instance)) => card.gpm_mig_sample(instance)?,
            // No process has run on the slice yet, so there is nothing to count.
            (Some(_), None) => return Ok(false),
        };
        let before = self.last.replace(now);
        let (Some(before), Some(now)) = (&before, &self.last) else { return Ok(false) };
        let ids = [SmUtil, DramBwUtil, AnyTensorUtil, Fp32Util, Fp16Util, PcieRxPerSec, PcieTxPerSec];
        let results = gpm_metrics_get(self.nvml, before, now, &ids)?;
        let value = |index: usize| {
            let result = results.get(index)?.as_ref().ok()?;
            result.value.is_finite().then_some(result.value)
        };
        sample.gpu_sm_activity_percent = value(0);
        sample.gpu_memory_activity_percent = value(1);
        sample.gpu_tensor_activity_percent = value(2);
        sample.gpu_float_activity_percent = value(3).into_iter().chain(value(4)).reduce(f64::max);
        sample.gpu_pcie_received_bytes_per_second = value(5).map(|mib| mib * BYTES_PER_MIB);
        sample.gpu_pcie_sent_bytes_per_second = value(6).map(|mib| mib * BYTES_PER_MIB);
        Ok(true)
    }
}
