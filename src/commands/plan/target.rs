//! The target of a plan: a device of this machine, or a GPU that is not present.

use std::time::Duration;

use super::gpus::{self, Gpu};
use super::{MIB, PlanArgs};
use crate::config::Precision;
use crate::device::{self, CudaGpu, DeviceKind, OpenDevice, has_bf16_tiles};
use crate::measure::telemetry::{self, Telemetry, available_host_memory_bytes};
use crate::ops::peak::gemm_peak_flops;
use crate::recipe::{Purpose, Recipe, RecipeArgs};
use crate::run::device_memory::Resources;
use crate::run::inputs::nvml_selector;
use crate::schema::Problem;
use crate::train::budget::fit::Memories;
use crate::train::budget::gpu::GpuRates;
use crate::train::budget::workload::Workload;
use crate::util::failure::Failure;

/// Fraction of the measured product rate that a step reaches on the CPU: between 0.57 and 0.74 on the models of
/// `scripts/bench_vs_peft.py`.
const CPU_EFFICIENCY: f64 = 0.6;
/// Likewise where products are multiplied in tiles, beside which all else takes most of a step: between 0.16 and 0.24.
const CPU_EFFICIENCY_OF_TILES: f64 = 0.2;
/// Fraction of the rate of a GPU's largest products, as measured, that those of a step reach: on an H200, where power sets the clock.
const GPU_EFFICIENCY_OF_PRODUCTS: f64 = 0.91;
/// Fraction of the rate of copies within its memory, as measured, that kernels reach that do little else.
const GPU_EFFICIENCY_OF_COPIES: f64 = 0.91;

/// How fast a device computes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Speed {
    /// FLOPs of a step in a second, of all it does.
    Steps(f64),
    /// What a step on a GPU is made of.
    Gpu(GpuRates),
}

impl Speed {
    /// Seconds of a step that needs a share of one of full rows, which has so many FLOPs with those that are computed again.
    pub(super) fn seconds(&self, workload: &Workload<'_>, flops: f64, share: f64) -> f64 {
        match self {
            Self::Steps(rate) => share * flops / rate,
            Self::Gpu(rates) => workload.seconds_on(rates, flops, share),
        }
    }
}

/// The target of a plan.
#[derive(Debug)]
pub(super) struct PlanTarget {
    pub(super) label: String,
    /// The device's memory, or that given on the command line.
    pub(super) memory_bytes: Option<f64>,
    /// The part of it that this process can have now; `None` where unknown, or where the memory was given.
    pub(super) free_bytes: Option<f64>,
    /// Host memory that this process can have now; only for a GPU of this machine.
    pub(super) host_free_bytes: Option<f64>,
    pub(super) kind: DeviceKind,
    /// It is a device of this machine.
    pub(super) is_here: bool,
    /// `None` if nothing could be measured.
    pub(super) speed: Option<Speed>,
    /// Board power of a GPU, or the limit set on a GPU of this machine.
    pub(super) watts: Option<f64>,
    /// Share of the processors' or the GPU's time that other programs take now; `None` where unknown.
    pub(super) share_of_others: Option<f64>,
}

/// How long to look at what other programs take.
const MOMENT: Duration = Duration::from_millis(200);
/// A share of others that makes a run noticeably longer.
const MANY_OTHERS: f64 = 0.2;

impl PlanTarget {
    /// The device memory that a step must fit into.
    pub(super) fn usable_bytes(&self) -> Option<f64> {
        self.free_bytes.or(self.memory_bytes)
    }

    /// FLOPs in a second of what computes in `f32`, as a step does on the CPU.
    pub(super) fn rate_in_f32(&self, recipe: &Recipe) -> Option<f64> {
        match self.speed {
            Some(Speed::Steps(rate)) if recipe.train.precision == Precision::F32 => Some(rate),
            _ => None,
        }
    }

    /// Says that others use the device.
    pub(super) fn about_others(&self) -> Option<String> {
        let share = self.share_of_others.filter(|share| *share >= MANY_OTHERS)?;
        let what = if self.kind.is_gpu() { "GPU's time" } else { "processors' time" };
        Some(format!(
            "note: other programs take {:.0} % of the {what} now; the times above are those of a machine without them",
            100.0 * share
        ))
    }

    /// The memory that a step must fit into; `None` where the device's memory is not known.
    pub(super) fn memories(&self) -> Option<Memories> {
        self.usable_bytes().map(|device_bytes| Memories { device_bytes, host_bytes: self.host_free_bytes })
    }
}

/// The device to plan for, and the recipe without a device that is not present.
pub(super) fn open(args: &PlanArgs) -> Result<(PlanTarget, Recipe), Failure> {
    let memory_bytes = args.memory.map(|gib| gib * 1024.0 * MIB);
    if let Some(name) = args.recipe.device.as_deref().filter(|name| name.parse::<device::DeviceName>().is_err()) {
        let gpu = elsewhere(name)?;
        let recipe = RecipeArgs { device: None, ..args.recipe.clone() }.load(Purpose::Benchmark)?;
        gpu.require(recipe.dtypes()).map_err(Failure::input)?;
        return Ok((of_gpu(&gpu, recipe.train.precision, memory_bytes), recipe));
    }
    let recipe = args.recipe.load(Purpose::Benchmark)?;
    let device = device::open(&recipe.device.name).map_err(Failure::input)?;
    recipe.dtypes().try_for_each(|dtype| device.require_dtype(dtype)).map_err(Failure::input)?;
    Ok((of_device(&device, recipe.train.precision, memory_bytes), recipe))
}

/// The GPU of this name, which may be on another machine.
fn elsewhere(name: &str) -> Result<Gpu, Problem> {
    match gpus::find(name)[..] {
        [gpu] => Ok(gpu),
        [] => {
            let problem = Problem::new(format!("--device {name}: neither a device of this machine nor a known GPU"));
            Err(problem.hint(format!(
                "auto, cpu, cuda, cuda:N, or one of {}; with another, give its memory by --memory",
                gpus::names(&gpus::GPUS)
            )))
        }
        ref several => {
            let problem = Problem::new(format!("--device {name}: several GPUs have that in their name"));
            Err(problem.hint(format!("name one of {}", gpus::names(several))))
        }
    }
}

fn of_gpu(gpu: &Gpu, precision: Precision, memory_bytes: Option<f64>) -> PlanTarget {
    #[expect(clippy::cast_precision_loss, reason = "a few hundred thousand MiB")]
    let own = gpu.memory_mib as f64 * MIB;
    PlanTarget {
        label: gpu.name.to_owned(),
        memory_bytes: memory_bytes.or(Some(own)),
        free_bytes: None,
        host_free_bytes: None,
        kind: DeviceKind::Cuda,
        is_here: false,
        speed: Some(Speed::Gpu(gpu.rates(precision))),
        watts: Some(gpu.watts),
        share_of_others: None,
    }
}

fn of_device(device: &OpenDevice, precision: Precision, memory_bytes: Option<f64>) -> PlanTarget {
    let is_cpu = device.kind == DeviceKind::Cpu;
    // Before measuring the rate, which takes memory and time.
    let share_of_others = if is_cpu { telemetry::share_of_others(MOMENT) } else { share_of_gpu(device) };
    let own = Resources::of(device);
    #[expect(clippy::cast_precision_loss, reason = "bytes of a memory")]
    let [own_bytes, free_bytes, host_bytes] = [own.memory_bytes, own.free_memory_bytes, available_host_memory_bytes()]
        .map(|bytes| bytes.map(|bytes| bytes as f64));
    let products = gemm_peak_flops(device, precision.dtype());
    let speed = match is_cpu {
        true if precision == Precision::Bf16 && has_bf16_tiles() => {
            products.map(|rate| Speed::Steps(CPU_EFFICIENCY_OF_TILES * rate))
        }
        true => products.map(|rate| Speed::Steps(CPU_EFFICIENCY * rate)),
        false => {
            products.zip(device.copy_bytes_per_second()).map(|rates| Speed::Gpu(rates_of(device, precision, rates)))
        }
    };
    PlanTarget {
        label: device.label.clone(),
        free_bytes: if memory_bytes.is_some() { None } else { free_bytes },
        memory_bytes: memory_bytes.or(own_bytes),
        host_free_bytes: host_bytes.filter(|_| !is_cpu),
        kind: device.kind,
        is_here: true,
        speed,
        watts: own.power_limit_watts,
        share_of_others,
    }
}

/// What a step gets of the measured rates of a GPU's products and copies.
fn rates_of(device: &OpenDevice, precision: Precision, (products, copies): (f64, f64)) -> GpuRates {
    let splits = precision == Precision::F32 && device.f32_products_are_tf32();
    let products = if splits { products / gpus::PRODUCTS_OF_SPLIT } else { products };
    let gpu = device.cuda.as_ref();
    GpuRates {
        product_flops: GPU_EFFICIENCY_OF_PRODUCTS * products,
        memory_bytes: GPU_EFFICIENCY_OF_COPIES * copies,
        is_hopper: precision == Precision::Bf16 && gpu.is_some_and(|gpu| gpu.compute_capability.0 == 9),
        has_kernels: match precision {
            Precision::Bf16 => gpu.is_some_and(CudaGpu::has_bf16),
            Precision::F16 => gpu.is_some_and(|gpu| gpu.compute_capability >= (7, 5)),
            Precision::F32 | Precision::Tf32 => false,
        },
    }
}

/// Share of its time in which a GPU computes before this process has asked it to.
fn share_of_gpu(device: &OpenDevice) -> Option<f64> {
    let telemetry = Telemetry::start(20, nvml_selector(device));
    std::thread::sleep(MOMENT);
    Some(telemetry.window().gpu_utilization_percent? / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_says_where_others_use_the_device() {
        let [gpu] = gpus::find("H100-80GB")[..] else { panic!("one GPU") };
        let of = |kind, share_of_others| PlanTarget { kind, share_of_others, ..of_gpu(&gpu, Precision::Bf16, None) };
        let note = of(DeviceKind::Cpu, Some(0.456)).about_others().unwrap();
        assert!(note.starts_with("note: other programs take 46 % of the processors' time now"), "{note}");
        assert!(of(DeviceKind::Cuda, Some(0.9)).about_others().unwrap().contains("90 % of the GPU's time"));
        for share in [Some(0.1), None] {
            assert_eq!(of(DeviceKind::Cpu, share).about_others(), None);
        }
    }
}
