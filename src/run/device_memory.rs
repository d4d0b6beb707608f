//! The memory that a step needs, compared with the device's, and the message for when it runs out.

use std::any::Any;
use std::cell::OnceCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::inputs;
use crate::config::GradientCheckpointing;
use crate::device::{DeviceKind, OpenDevice, free_cuda_memory_bytes};
use crate::lora::targets::Selection;
use crate::measure::telemetry::gpus::{self, Gpus};
use crate::measure::telemetry::{NVML_LIBRARY_VARIABLE, available_host_memory_bytes, total_host_memory_bytes};
use crate::ops::place::place_on;
use crate::recipe::Recipe;
use crate::spec::ModelConfig;
use crate::train::budget::fit::{self, Decision, Memories};
use crate::train::budget::images::ImageMemory;
use crate::train::budget::memory::{GPU_CONTEXT_BYTES, MemoryPlan};
use crate::train::budget::workload::Workload;
use crate::util::failure::Failure;
use crate::util::faults::{Fault, panic_text};

/// Memory and power of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Resources {
    /// Total memory of the device.
    pub(crate) memory_bytes: Option<u64>,
    /// Memory that this process can have: what is free, and what it uses already.
    pub(crate) free_memory_bytes: Option<u64>,
    /// The highest power that it may draw; only of a GPU that NVML knows.
    pub(crate) power_limit_watts: Option<f64>,
}

impl Resources {
    /// Resources of an open device that has computed nothing yet.
    pub(crate) fn of(device: &OpenDevice) -> Self {
        if device.kind == DeviceKind::Cpu {
            let (memory_bytes, free_memory_bytes) = (total_host_memory_bytes(), available_host_memory_bytes());
            return Self { memory_bytes, free_memory_bytes, power_limit_watts: None };
        }
        let Some(cuda) = &device.cuda else { return Self::default() };
        let library = std::env::var_os(NVML_LIBRARY_VARIABLE);
        let listed = gpus::list(library.as_deref()).unwrap_or_default();
        Self::of_listed(&listed, &cuda.uuid, cuda.memory_bytes, || {
            if cuda.is_integrated { available_host_memory_bytes() } else { free_cuda_memory_bytes(cuda.ordinal) }
        })
    }

    /// Resources of the GPU, or of its slice, with this UUID. CUDA gives the UUID without a prefix. `free_bytes` are asked for where
    /// NVML does not list it, or not its memory: there is no NVML in some containers, and the memory may be the host's.
    fn of_listed(listed: &Gpus, uuid: &str, memory_bytes: u64, free_bytes: impl FnOnce() -> Option<u64>) -> Self {
        let is_it =
            |listed: Option<&String>| listed.and_then(|listed| listed.split_once('-')).is_some_and(|it| it.1 == uuid);
        let gpu = listed.gpus.iter().find(|gpu| is_it(gpu.uuid.as_ref()));
        let slice = listed.gpus.iter().flat_map(|gpu| &gpu.mig_slices).find(|slice| is_it(slice.uuid.as_ref()));
        // This process already has its context on the GPU, and the plan includes that context.
        let free = |bytes: u64| (bytes + GPU_CONTEXT_BYTES as u64).min(memory_bytes);
        let listed_bytes = gpu.map_or_else(|| slice?.free_memory_bytes, |gpu| gpu.free_memory_bytes);
        Self {
            memory_bytes: Some(memory_bytes),
            free_memory_bytes: listed_bytes.or_else(free_bytes).map(free),
            power_limit_watts: gpu.and_then(|gpu| gpu.power_limit_watts),
        }
    }

    /// Memory that a step has to fit into: the free memory, or all where the free memory is not known.
    pub(crate) fn usable_bytes(&self) -> Option<u64> {
        self.free_memory_bytes.or(self.memory_bytes)
    }
}

/// Planned memory of a step, and the memory that there is for it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StepMemory {
    /// The memory of a step, part by part.
    pub(crate) plan: MemoryPlan,
    /// Why the memory may be too small; absent where it should be enough.
    pub(crate) warning: Option<String>,
    /// Message for the case that memory runs out.
    pub(crate) advice: String,
    /// What became of `train.gradient_checkpointing` = "auto"; absent where the recipe says more.
    pub(crate) checkpointing: Option<Decision>,
    room: Room,
}

/// Memory that a step may take; absent where it is not known.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Room {
    device_bytes: Option<f64>,
    host_bytes: Option<f64>,
    kind: DeviceKind,
    /// Of the device, for messages.
    label: String,
}

impl Room {
    /// That of an open device that has computed nothing yet.
    pub(crate) fn of(device: &OpenDevice) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "bytes of a memory")]
        let [device_bytes, host_bytes] = [Resources::of(device).usable_bytes(), available_host_memory_bytes()]
            .map(|bytes| bytes.map(|bytes| bytes as f64));
        let label = if device.is_gpu() { device.label.clone() } else { "this process".to_owned() };
        Self { device_bytes, host_bytes, kind: device.kind, label }
    }
}

impl StepMemory {
    /// Estimates the memory of a recipe's step. Nothing is loaded. `kept` is what an earlier start of the run had for
    /// `train.gradient_checkpointing` = "auto".
    pub(crate) fn estimate(
        recipe: &Recipe,
        (config, selection): (&ModelConfig, &Selection),
        images: &ImageMemory,
        room: Room,
        kept: Option<GradientCheckpointing>,
    ) -> Self {
        let mut workload = inputs::workload(recipe, config, selection, images, place_on(room.kind));
        let Room { device_bytes, host_bytes, ref label, .. } = room;
        let checkpointing = (workload.gradient_checkpointing == GradientCheckpointing::Auto)
            .then(|| kept.map_or_else(|| Decision::new(&workload, device_bytes), Decision::kept));
        if let Some(Decision { choice, .. }) = &checkpointing {
            workload.gradient_checkpointing = *choice;
        }
        let shortage = |device_bytes| fit::shortage(&workload, Memories { device_bytes, host_bytes }, label);
        Self {
            plan: workload.plan(),
            warning: device_bytes.and_then(shortage),
            advice: fit::advice(&workload, device_bytes, host_bytes, label),
            checkpointing,
            room,
        }
    }

    /// The memory that there was before anything was loaded.
    pub(crate) fn room(&self) -> Room {
        self.room.clone()
    }

    /// Whether the memory suffices for the steps of another recipe, as far as it is known.
    ///
    /// # Errors
    /// The peak in bytes that does not fit, on the device or on the host.
    pub(crate) fn fits(&self, workload: &Workload<'_>) -> Result<(), usize> {
        let device = Some(workload.plan().peak_bytes).zip(self.room.device_bytes);
        // Host memory next to a GPU, where what is kept of blocks may be offloaded.
        let host = workload.host_plan().map(|plan| plan.peak_bytes).zip(self.room.host_bytes);
        let too_large = device.into_iter().chain(host).find(|(peak, bytes)| !fit::is_room(*peak, *bytes));
        too_large.map_or(Ok(()), |(peak, _)| Err(peak))
    }
}

/// Runs `work`. If the device's memory runs out, which burn's backends report by a panic, the panic becomes a failure
/// with the advice that is set by then.
///
/// # Errors
/// Those of `work`, and an out-of-memory failure.
pub(super) fn with_advice<T>(
    advice: &OnceCell<String>,
    work: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| match (advice.get(), Fault::of_panic(&*panic)) {
        (Some(advice), Some(fault)) if fault.is_out_of_memory() => Err(Failure::running(advice.as_str())),
        _ => resume_unwind(panic),
    })
}

/// Why training ended by a panic: the advice if memory ran out, else the device's fault or the panic's own message.
pub(super) fn panic_reason(panic: &(dyn Any + Send), advice: &str) -> String {
    match (Fault::of_panic(panic), panic_text(panic)) {
        (Some(fault), _) if fault.is_out_of_memory() => advice.to_owned(),
        (Some(fault), _) => fault.to_string(),
        (None, "") => "a panic".to_owned(),
        (None, text) => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::telemetry::gpus::{GpuInfo, MigSlice};

    #[test]
    fn a_gpu_has_what_nobody_else_uses_and_the_power_that_its_limit_allows() {
        let gpu = |uuid: &str, free| GpuInfo {
            uuid: Some(uuid.into()),
            memory_bytes: Some(80 << 30),
            free_memory_bytes: Some(free),
            power_limit_watts: Some(350.0),
            ..GpuInfo::default()
        };
        let listed = Gpus { gpus: vec![gpu("GPU-0a", 1 << 30), gpu("GPU-0b", 60 << 30)], ..Gpus::default() };
        let found = Resources::of_listed(&listed, "0b", 80 << 30, || None);
        let free_memory_bytes = Some((60 << 30) + (500 << 20));
        let expected = Resources { memory_bytes: Some(80 << 30), free_memory_bytes, power_limit_watts: Some(350.0) };
        assert_eq!((found, found.usable_bytes()), (expected, free_memory_bytes));
        // No process uses the GPU: adding the context must not exceed its memory.
        let idle = Gpus { gpus: vec![gpu("GPU-0a", 80 << 30)], ..Gpus::default() };
        assert_eq!(Resources::of_listed(&idle, "0a", 80 << 30, || None).usable_bytes(), Some(80 << 30));
        let unknown = |free| Resources::of_listed(&listed, "0c", 10 << 30, || free);
        assert_eq!((unknown(None).free_memory_bytes, unknown(None).usable_bytes()), (None, Some(10 << 30)));
        assert_eq!(unknown(Some(1 << 30)).usable_bytes(), Some((1 << 30) + (500 << 20)));
        // The power limit is that of the whole card.
        let mig_slices =
            vec![MigSlice { uuid: Some("MIG-0c".into()), free_memory_bytes: Some(4 << 30), ..MigSlice::default() }];
        let sliced = Gpus { gpus: vec![GpuInfo { mig_slices, ..gpu("GPU-0a", 1 << 30) }], ..Gpus::default() };
        let slice = Resources::of_listed(&sliced, "0c", 10 << 30, || None);
        assert_eq!((slice.usable_bytes(), slice.power_limit_watts), (Some((4 << 30) + (500 << 20)), None));
    }

    fn outcome(text: &'static str) -> Result<(), Failure> {
        let advice = OnceCell::from("take less".to_owned());
        with_advice(&advice, || panic!("{text}"))
    }

    #[test]
    fn a_panic_about_memory_becomes_the_advice() {
        for text in [
            "An out-of-memory error happened during launch\nCaused by:\n  x",
            "called `Result::unwrap()` on an `Err` value: OutOfMemory { size: 5 }",
            "DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")",
            "An IO error happened\nCaused by:\n  out of device memory allocating 4194304 bytes",
        ] {
            assert_eq!(outcome(text).unwrap_err().messages(), ["take less"]);
        }
    }

    #[test]
    fn another_panic_stays_one() {
        let panic = catch_unwind(|| outcome("index out of bounds")).unwrap_err();
        assert_eq!(panic.downcast_ref::<String>().unwrap(), "index out of bounds");
        assert_eq!(panic_reason(&*panic, "take less"), "index out of bounds");
        assert_eq!(panic_reason(&"CUDA out of memory", "take less"), "take less");
        assert_eq!(panic_reason(&5, "take less"), "a panic");
        let fault = panic_reason(&"DriverError(CUDA_ERROR_LAUNCH_FAILED, \"x\")", "take less");
        assert!(fault.starts_with("the GPU stopped: CUDA_ERROR_LAUNCH_FAILED, x\n"), "{fault}");
    }
}
