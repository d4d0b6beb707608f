//! A GPU's own performance counters: Hopper and newer.

use std::cell::{Cell, RefCell};

use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::gpm_metrics_get;
use nvml_wrapper::{Device, GpmSample, Nvml};

/// Figures between two readings of the counters.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct GpmFigures {
    /// Share of the multiprocessors that had work, in percent.
    pub(super) sm_activity_percent: Option<f64>,
    /// Share of the memory's bandwidth that was used, in percent.
    pub(super) memory_bandwidth_percent: Option<f64>,
    /// Share of the time in which the tensor cores were at work, in percent.
    pub(super) tensor_activity_percent: Option<f64>,
    /// Percent of the time in which the busier pipeline outside the tensor cores, single or half precision, worked.
    pub(super) float_activity_percent: Option<f64>,
    pub(super) pcie_received_bytes_per_second: Option<f64>,
    pub(super) pcie_sent_bytes_per_second: Option<f64>,
}

/// The counters of a GPU or of a slice of one, and their last reading.
pub(super) struct Gpm<'nvml> {
    nvml: &'nvml Nvml,
    of: CountersOf<'nvml>,
    last: RefCell<Option<GpmSample<'nvml>>>,
    trust: Trust,
}

/// Failures in a row after which the counters are given up and the older figures are used.
const MAX_FAILURES: u32 = 3;

/// Whether the counters are still worth asking for.
#[derive(Default)]
struct Trust {
    /// Some machines let only root read the counters.
    is_refused: Cell<bool>,
    num_failures: Cell<u32>,
}

impl Trust {
    fn is_left(&self) -> bool {
        !self.is_refused.get() && self.num_failures.get() < MAX_FAILURES
    }

    /// Records how an attempt ended.
    fn after<T>(&self, outcome: Result<T, NvmlError>) -> Option<T> {
        use NvmlError::{FailedToLoadSymbol, NoPermission, NotSupported};
        if let Err(NotSupported | NoPermission | FailedToLoadSymbol(_)) = &outcome {
            self.is_refused.set(true);
        }
        if outcome.is_err() {
            self.num_failures.set(self.num_failures.get() + 1);
        }
        outcome.ok()
    }

    /// Forgets earlier failures once there are figures.
    fn renew(&self) {
        self.num_failures.set(0);
    }
}

/// Whose counters are read.
enum CountersOf<'nvml> {
    Card,
    /// One GPU instance of the card. A process that runs on the slice has the instance's number.
    Slice {
        card: Device<'nvml>,
        instance: Cell<Option<u32>>,
    },
}

impl<'nvml> Gpm<'nvml> {
    /// `None` if the GPU or its driver has no such counters.
    pub(super) fn open(nvml: &'nvml Nvml, device: &Device<'nvml>, is_slice: bool) -> Option<Self> {
        let has_counters = |card: &Device<'nvml>| card.gpm_support().is_ok_and(|is_supported| is_supported);
        let of = if is_slice {
            let card = device.mig_parent_device().ok().filter(has_counters)?;
            CountersOf::Slice { card, instance: Cell::new(None) }
        } else {
            has_counters(device).then_some(CountersOf::Card)?
        };
        Some(Self { nvml, of, last: RefCell::new(None), trust: Trust::default() })
    }

    /// Remembers the GPU instance of a process that runs on the slice.
    pub(super) fn runs_on(&self, instance_of_process: Option<u32>) {
        if let CountersOf::Slice { instance, .. } = &self.of
            && instance_of_process.is_some()
        {
            instance.set(instance_of_process);
        }
    }

    /// Whether the counters may be read and have not failed too often in a row.
    pub(super) fn is_allowed(&self) -> bool {
        self.trust.is_left()
    }

    /// Figures since the last reading; empty at the first.
    pub(super) fn read(&self, device: &Device<'nvml>) -> GpmFigures {
        const BYTES_PER_MIB: f64 = 1_048_576.0;
        if !self.is_allowed() {
            return GpmFigures::default();
        }
        let sample = match &self.of {
            CountersOf::Card => device.gpm_sample(),
            CountersOf::Slice { card, instance } => match instance.get() {
                Some(instance) => card.gpm_mig_sample(instance),
                // No process has run on it yet, so there is nothing to count.
                None => return GpmFigures::default(),
            },
        };
        let Some(now) = self.trust.after(sample) else { return GpmFigures::default() };
        let mut last = self.last.borrow_mut();
        let figures = last.as_ref().and_then(|before| {
            use GpmMetricId::{AnyTensorUtil, DramBwUtil, Fp16Util, Fp32Util, PcieRxPerSec, PcieTxPerSec, SmUtil};
            let ids = [SmUtil, DramBwUtil, PcieRxPerSec, PcieTxPerSec, AnyTensorUtil, Fp32Util, Fp16Util];
            let results = self.trust.after(gpm_metrics_get(self.nvml, before, &now, &ids))?;
            self.trust.renew();
            let value = |index: usize| {
                let result = results.get(index)?.as_ref().ok()?;
                result.value.is_finite().then_some(result.value)
            };
            Some(GpmFigures {
                sm_activity_percent: value(0),
                memory_bandwidth_percent: value(1),
                tensor_activity_percent: value(4),
                float_activity_percent: value(5).into_iter().chain(value(6)).reduce(f64::max),
                pcie_received_bytes_per_second: value(2).map(|mib| mib * BYTES_PER_MIB),
                pcie_sent_bytes_per_second: value(3).map(|mib| mib * BYTES_PER_MIB),
            })
        });
        *last = Some(now);
        figures.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_given_up_when_refused_or_after_three_failures_in_a_row() {
        for error in [NvmlError::NotSupported, NvmlError::NoPermission] {
            let trust = Trust::default();
            assert_eq!((trust.after::<()>(Err(error)), trust.is_left()), (None, false));
        }
        let trust = Trust::default();
        let fail = || trust.after::<()>(Err(NvmlError::Unknown));
        for _ in 0..3 {
            // A sample alone is not a figure yet.
            assert_eq!((fail(), trust.after(Ok(1)), fail(), trust.is_left()), (None, Some(1), None, true));
            trust.renew();
        }
        assert_eq!((fail(), fail(), trust.is_left()), (None, None, true));
        assert_eq!((fail(), trust.is_left()), (None, false));
    }
}
