//! Devices for training, and their types.

use std::path::PathBuf;

use super::{Section, flops, print};
use crate::device::{self, DeviceKind, Dtype, KernelCompiler, OpenDevice, Toolkit};
use crate::measure::telemetry::NVML_LIBRARY_VARIABLE;
use crate::measure::telemetry::gpus::{self, GpuInfo, Gpus, MigSlice};
use crate::ops::cuda::{self, Compared, kernel_state};
use crate::ops::product::device_product;
use crate::run::kernel_check;
use crate::util::failure::Failure;
use crate::util::text;

/// The driver's view, then a trial of every compiled-in backend.
pub(super) fn look() -> Vec<Section> {
    let library = std::env::var_os(NVML_LIBRARY_VARIABLE);
    let listed = gpus::list(library.as_deref());
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let mut sections = vec![driver(&listed, visible.as_deref()), cuda_libraries()];
    for kind in DeviceKind::ALL.into_iter().filter(|kind| kind.is_compiled_in()) {
        sections.push(backend(kind));
    }
    sections
}

/// Says of a GPU, or of its slices, that most of the memory is in use.
fn memory_in_use(section: &mut Section, gpu: &GpuInfo) {
    let whole = gpu.mig_slices.is_empty().then_some((&gpu.name, gpu.memory_bytes, gpu.free_memory_bytes));
    let slices = gpu.mig_slices.iter().map(|slice| (&slice.name, slice.memory_bytes, slice.free_memory_bytes));
    for (name, all, free) in whole.into_iter().chain(slices) {
        if let Some((all, free)) = all.zip(free)
            && free < all / 2
        {
            section.problem(
                format!("{} of the {} of {name} are in use", text::bytes(all - free), text::bytes(all)),
                "`nvidia-smi` lists the processes that hold it; or take another GPU by `--device cuda:N`",
            );
        }
    }
}

/// The GPUs that NVML lists, with `CUDA_VISIBLE_DEVICES` set to `visible`.
fn driver(listed: &Result<Gpus, String>, visible: Option<&str>) -> Section {
    let mut section = Section::new("nvidia driver");
    let gpus = match listed {
        Ok(gpus) => gpus,
        Err(reason) => {
            section.figure("present", false, "no");
            let reason = reason.rsplit_once("occurred: ").map_or(reason.as_str(), |(_, reason)| reason);
            section.note(format!("no driver: {reason}"), "for an NVIDIA GPU: install its driver; a CPU needs none");
            return section;
        }
    };
    section.figure("present", true, "yes");
    if let Some(version) = &gpus.driver_version {
        section.fact("version", version.clone());
    }
    if let Some((major, minor)) = gpus.cuda_version {
        section.fact("cuda", format!("{major}.{minor}"));
    }
    let seen = visible.and_then(|_| device::cuda_uuids());
    let is_visible =
        |index, gpu: &GpuInfo| visible.is_none_or(|visible| gpu.is_visible(index, visible, seen.as_deref()));
    let values = gpus.gpus.iter().enumerate().map(|(index, gpu)| {
        let mut value = serde_json::to_value(gpu).unwrap_or_default();
        value["visible"] = is_visible(index, gpu).into();
        value
    });
    let texts = gpus.gpus.iter().enumerate().flat_map(|(index, gpu)| {
        let hidden = if is_visible(index, gpu) { "" } else { ", hidden by CUDA_VISIBLE_DEVICES" };
        let slices = gpu.mig_slices.iter().map(|slice| format!("  {}", slice_text(slice)));
        std::iter::once(gpu_text(gpu) + hidden).chain(slices).collect::<Vec<_>>()
    });
    section.figure("gpus", values.collect::<Vec<_>>(), texts.collect::<Vec<_>>().join("\n                       "));
    // GPUs that a run cannot use do not count as missing; of a divided GPU, a run uses a slice.
    let visible_gpus = gpus.gpus.iter().enumerate().filter(|(index, gpu)| is_visible(*index, gpu));
    visible_gpus.for_each(|(_, gpu)| memory_in_use(&mut section, gpu));
    if let Some(visible) = visible {
        section.fact("CUDA_VISIBLE_DEVICES", visible);
    }
    if gpus.gpus.is_empty() {
        section.problem("the driver lists no GPU", "start the container with GPU access (`--gpus all`)");
    } else if !DeviceKind::Cuda.is_compiled_in() {
        section.problem(
            "there is an NVIDIA GPU, and this binary cannot use it",
            "`pip install \"lora-train[cuda]\"`, or build with `cargo build --release --features cuda` \
             (`scripts/setup_cuda_build.sh` prepares the machine)",
        );
    }
    section
}

/// The driver's library, and what compiles kernels for NVIDIA GPUs.
fn cuda_libraries() -> Section {
    let mut section = Section::new("cuda libraries");
    if !DeviceKind::Cuda.is_compiled_in() {
        section.note(
            "this binary is built without CUDA",
            "the wheel lora-train[cuda], or cargo install --path . --features cuda",
        );
    }
    let driver = device::driver_library();
    library("libcuda", driver.clone().map(|driver| (driver.path, driver.cuda_version)), &mut section);
    match KernelCompiler::OF_BUILD {
        KernelCompiler::Nvrtc => {
            let nvrtc = device::nvrtc_library();
            library("libnvrtc", nvrtc.map(|nvrtc| (nvrtc.path, nvrtc.version)), &mut section);
        }
        KernelCompiler::Llvm => {
            if driver.is_ok_and(|driver| driver.cuda_version > (13, 0)) {
                // The LLVM that scripts/setup_cuda_build.sh takes where burn's own cannot be downloaded.
                let text = "version 22 warns for each kernel that it does not know this driver's PTX; harmless";
                section.fact("llvm", text);
            }
        }
    }
    let cublas = device::cublas_library();
    library("libcublasLt", cublas.map(|cublas| (cublas.path, cublas.version)), &mut section);
    match device::nccl_library() {
        Ok(nccl) => {
            let path = nccl.path.as_ref().map_or_else(|| "loaded".to_owned(), |path| path.display().to_string());
            let text = format!("{path}, {}: sums gradients of several GPUs", nccl.version);
            section.figure("libnccl", serde_json::json!(nccl), text);
        }
        Err(reason) => {
            section.figure("libnccl", serde_json::Value::Null, format!("no ({reason}); only several GPUs use it"));
        }
    }
    let toolkit = device::find_toolkit();
    let text =
        toolkit.as_ref().map_or("not found (CUDA_PATH names one)".into(), |Toolkit { path, missing, .. }| {
            let missing = missing.iter().map(|missing| format!(", without {} ({})", missing.file, missing.package));
            path.display().to_string() + &missing.collect::<String>()
        });
    section.figure("toolkit", serde_json::json!(toolkit), text);
    section
}

/// A library by its path and CUDA version, or why it is not there.
fn library(name: &'static str, found: Result<(Option<PathBuf>, (u32, u32)), String>, section: &mut Section) {
    match found {
        Ok((path, (major, minor))) => {
            let path = path.map(|path| path.display().to_string());
            let value = serde_json::json!({ "path": path, "cuda": format!("{major}.{minor}") });
            let path = path.unwrap_or_else(|| "loaded".to_owned());
            section.figure(name, value, format!("{path}, for CUDA {major}.{minor}"));
        }
        Err(reason) => section.figure(name, serde_json::Value::Null, format!("no ({reason})")),
    }
}

fn gpu_text(gpu: &GpuInfo) -> String {
    let mut parts = vec![gpu.name.clone()];
    parts.extend(memory_text(gpu.memory_bytes, gpu.free_memory_bytes));
    parts.extend(gpu.num_processes.map(|count| format!("{count} processes compute on it")));
    parts.extend(gpu.power_limit_watts.map(|watts| format!("{watts:.0} W at most")));
    parts.extend(gpu.temperature_celsius.map(|degrees| format!("{degrees} °C")));
    parts.extend(gpu.uuid.clone());
    parts.join(", ")
}

fn slice_text(slice: &MigSlice) -> String {
    let mut parts = vec![slice.name.clone()];
    parts.extend(memory_text(slice.memory_bytes, slice.free_memory_bytes));
    parts.extend(slice.uuid.clone());
    parts.join(", ")
}

fn memory_text(all: Option<u64>, free: Option<u64>) -> Option<String> {
    all.zip(free).map(|(all, free)| format!("{}, {} free", text::bytes(all), text::bytes(free)))
}

/// A backend, opened and measured.
fn backend(kind: DeviceKind) -> Section {
    let mut section = Section::new(format!("device {}", kind.name()));
    let device = match kernel_check::open(kind.name(), Dtype::Bf16) {
        Ok(device) => device,
        Err(error) => {
            section.figure("usable", false, "no");
            section.refusal(&error);
            return section;
        }
    };
    section.figure("usable", true, "yes");
    section.fact("name", device.label.clone());
    let dtypes: Vec<_> = Dtype::ALL.into_iter().filter(|dtype| device.supports(*dtype)).collect();
    section.figure(
        "dtypes",
        dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>(),
        dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(", "),
    );
    if device.cuda.as_ref().is_some_and(|gpu| !gpu.has_bf16()) {
        section.fact(
            "precision",
            "train with `f16`, as `init` writes: this card multiplies no bf16, and f32 eight times as slowly",
        );
    }
    if let Some(state) = kernel_state(&device.device) {
        let off = state.off.iter().map(|(name, reason)| format!("without {name}: {reason}"));
        let text = [state.used.join(", ")].into_iter().chain(off).filter(|text| !text.is_empty());
        let text = text.collect::<Vec<_>>().join("\n                       ");
        section.figure("cuda_kernels", serde_json::json!(state), text);
    }
    if device.is_gpu() {
        f32_products(&device, &mut section);
        if !device.is_software {
            rates(&device, &dtypes, &mut section);
        }
    }
    section
}

/// Compares the CUDA kernels of this program with the CPU's.
pub(super) fn compare_kernels(name: &str, as_json: bool) -> Result<(), Failure> {
    let device = device::open(name).map_err(Failure::input)?;
    #[cfg(feature = "cuda-llvm")]
    let halves = if device.supports(Dtype::Bf16) { kernel_check::asked() } else { vec![Dtype::F16] };
    #[cfg(feature = "cuda-llvm")]
    let compared: Vec<_> = halves.into_iter().flat_map(|half| cuda::self_check(&device.device, half)).collect();
    #[cfg(not(feature = "cuda-llvm"))]
    let compared: Vec<cuda::Compared> = Vec::new();
    if as_json {
        return print(&serde_json::json!(compared).to_string());
    }
    let lines = compared.iter().map(|Compared { kernel, what, error, problem }| {
        let error = error.map(|error| format!("{error:.1e}"));
        let verdict = problem.as_deref().or(error.as_deref()).unwrap_or_default();
        format!("{kernel:<10} {what:<32} {verdict}\n")
    });
    let state = kernel_state(&device.device);
    let off = state.iter().flat_map(|state| &state.off).map(|(name, reason)| format!("{name:<10} off: {reason}\n"));
    let text: String = lines.chain(off).collect();
    print(if text.is_empty() { "This device has no kernels of this program's own.\n" } else { &text })
}

/// Whether `f32` products are computed in TF32: what the GPU is known for, and what one product shows.
fn f32_products(device: &OpenDevice, section: &mut Section) {
    let is_tf32 = device.f32_products_are_tf32();
    let text = if is_tf32 { "yes, where the tuner takes a kernel for tensor cores" } else { "no" };
    section.figure("f32_products_are_tf32", is_tf32, text);
    if let Some(error) = device.f32_product_error(device_product) {
        section.figure("f32_product_error", error, format!("{error:.1e} (measured; TF32 has 2.4e-4)"));
    }
}

/// Rates of a GPU; those of the processor are listed with the machine.
fn rates(device: &OpenDevice, dtypes: &[Dtype], section: &mut Section) {
    for dtype in dtypes {
        let name = match dtype {
            Dtype::F32 => "f32_gemm_flops",
            Dtype::Bf16 => "bf16_gemm_flops",
            Dtype::F16 => "f16_gemm_flops",
        };
        if let Some(rate) = device.measure_gemm_peak_flops(*dtype, device_product) {
            section.figure(name, rate.round(), format!("{} (measured)", flops(rate)));
        }
    }
    if let Some(rate) = device.copy_bytes_per_second() {
        let text = format!("{:.0} GB/s (measured, reading and writing)", rate / 1e9);
        section.figure("memory_bandwidth_bytes_per_second", rate.round(), text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_this_binary_cannot_use_or_that_is_full_is_a_problem() {
        let gpu = GpuInfo {
            name: "NVIDIA H200".into(),
            memory_bytes: Some(140 << 30),
            free_memory_bytes: Some(20 << 30),
            ..GpuInfo::default()
        };
        let slice = |name: &str, free| MigSlice {
            name: name.into(),
            memory_bytes: Some(10 << 30),
            free_memory_bytes: Some(free),
            uuid: None,
        };
        let slices = vec![slice("empty", 9 << 30), slice("full", 1 << 30)];
        let divided = GpuInfo { mig_slices: slices, ..gpu.clone() };
        let reported = |gpus: Vec<GpuInfo>, visible: Option<&str>| {
            let section = driver(&Ok(Gpus { gpus, ..Gpus::default() }), visible);
            let reported = section.problems.into_iter().map(|trouble| trouble.problem);
            reported.filter(|problem| problem.contains("in use")).collect::<Vec<_>>()
        };
        assert_eq!(reported(vec![gpu.clone(), gpu.clone()], Some("1")).len(), 1);
        assert_eq!(reported(vec![gpu.clone()], Some("")), [""; 0]);
        assert_eq!(reported(vec![divided], None), ["9.0 GiB of the 10.0 GiB of full are in use"]);
        let section = driver(&Ok(Gpus { gpus: vec![gpu.clone(), gpu], ..Gpus::default() }), None);
        let listed = &section.facts.iter().find(|fact| fact.name == "gpus").unwrap().value;
        assert_eq!(listed[1]["free_memory_bytes"], 20_u64 << 30);
        let reported: Vec<_> = section.problems.iter().map(|trouble| trouble.problem.as_str()).collect();
        assert_eq!(reported[0], "120.0 GiB of the 140.0 GiB of NVIDIA H200 are in use");
        assert_eq!(reported.len() == 3, !DeviceKind::Cuda.is_compiled_in(), "{reported:?}");
    }

    #[test]
    fn no_driver_is_a_fact_and_no_gpu_in_a_driver_a_problem() {
        assert!(driver(&Err("not found".into()), None).problems.is_empty());
        assert_eq!(driver(&Ok(Gpus::default()), None).problems[0].problem, "the driver lists no GPU");
    }

    #[test]
    fn the_cpu_computes_in_every_type() {
        let section = backend(DeviceKind::Cpu);
        assert!(section.problems.is_empty());
        let dtypes = section.facts.iter().find(|fact| fact.name == "dtypes").unwrap();
        assert_eq!(dtypes.text, "f32, bf16, f16");
    }
}
