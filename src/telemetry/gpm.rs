//! What a GPU's own performance counters say: Hopper and newer.

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
    /// The same of the pipelines of single and half precision outside of them, the busier of the two.
    pub(super) float_activity_percent: Option<f64>,
    pub(super) pcie_received_bytes_per_second: Option<f64>,
    pub(super) pcie_sent_bytes_per_second: Option<f64>,
}

/// The counters of a GPU and their last reading.
pub(super) struct Gpm<'nvml> {
    nvml: &'nvml Nvml,
    last: RefCell<Option<GpmSample<'nvml>>>,
    /// It has not been refused: some machines keep the counters to root.
    is_allowed: Cell<bool>,
}

impl<'nvml> Gpm<'nvml> {
    /// `None` where the GPU or its driver has no such counters.
    pub(super) fn open(nvml: &'nvml Nvml, device: &Device<'nvml>) -> Option<Self> {
        let is_supported = device.gpm_support().is_ok_and(|is_supported| is_supported);
        is_supported.then(|| Self { nvml, last: RefCell::new(None), is_allowed: Cell::new(true) })
    }

    /// Whether the counters may be read.
    pub(super) fn is_allowed(&self) -> bool {
        self.is_allowed.get()
    }

    /// Figures since the last reading; none at the first.
    pub(super) fn read(&self, device: &Device<'nvml>) -> GpmFigures {
        const BYTES_PER_MIB: f64 = 1_048_576.0;
        if !self.is_allowed() {
            return GpmFigures::default();
        }
        let now = match device.gpm_sample() {
            Ok(now) => now,
            Err(error) => {
                use NvmlError::{FailedToLoadSymbol, NoPermission, NotSupported};
                self.is_allowed.set(!matches!(error, NotSupported | NoPermission | FailedToLoadSymbol(_)));
                return GpmFigures::default();
            }
        };
        let mut last = self.last.borrow_mut();
        let figures = last.as_ref().map(|before| {
            use GpmMetricId::{AnyTensorUtil, DramBwUtil, Fp16Util, Fp32Util, PcieRxPerSec, PcieTxPerSec, SmUtil};
            let ids = [SmUtil, DramBwUtil, PcieRxPerSec, PcieTxPerSec, AnyTensorUtil, Fp32Util, Fp16Util];
            let results = gpm_metrics_get(self.nvml, before, &now, &ids).unwrap_or_default();
            let value = |index: usize| {
                let result = results.get(index)?.as_ref().ok()?;
                result.value.is_finite().then_some(result.value)
            };
            GpmFigures {
                sm_activity_percent: value(0),
                memory_bandwidth_percent: value(1),
                tensor_activity_percent: value(4),
                float_activity_percent: value(5).into_iter().chain(value(6)).reduce(f64::max),
                pcie_received_bytes_per_second: value(2).map(|mib| mib * BYTES_PER_MIB),
                pcie_sent_bytes_per_second: value(3).map(|mib| mib * BYTES_PER_MIB),
            }
        });
        *last = Some(now);
        figures.unwrap_or_default()
    }
}
