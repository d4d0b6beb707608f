//! The device that computes: opened by its name, with the types and the speed that it has.
//!
//! Everything else takes a [`burn::tensor::Device`] and runs on any backend. A backend is a Cargo feature and an arm in
//! this file.

mod cpu;
#[cfg(feature = "cuda-llvm")]
#[expect(unsafe_code, reason = "the driver is a C library")]
mod cuda_driver;
mod cuda_gpu;
#[cfg(all(unix, feature = "cuda-llvm"))]
#[expect(unsafe_code, reason = "libraries of CUDA are C libraries")]
mod cuda_library;
mod dtype;
mod error;
#[cfg(feature = "kernel-cache")]
mod kernel_cache;
mod kind;
mod name;
#[cfg(feature = "cuda-llvm")]
#[expect(unsafe_code, reason = "NVRTC is a C library")]
mod nvrtc;
mod peak;
#[cfg(unix)]
mod pip;
mod toolkit;

use std::sync::OnceLock;

use burn::tensor::{Device, Tensor};

use crate::util::files;
use crate::util::panics::guarded;

#[cfg(all(test, target_arch = "x86_64"))]
pub(crate) use cpu::processor_has_tiles;
pub use cpu::{
    cpu_features, cpu_model_name, has_avx512, has_bf16_pairs, has_bf16_products, has_bf16_tiles, num_cpu_threads,
};
pub use cuda_gpu::{CudaGpu, DriverLibrary};
#[cfg(all(unix, feature = "cuda-llvm"))]
pub use cuda_library::{take_newer_driver, take_own_libraries};
pub use dtype::Dtype;
pub use error::DeviceError;
pub use kind::DeviceKind;
pub use name::DeviceName;
pub use peak::Multiply;
#[cfg(feature = "cuda-llvm")]
pub use toolkit::name_toolkit;
pub use toolkit::{
    CublasLibrary, KernelCompiler, NCCL_VARIABLE, NcclLibrary, NvrtcLibrary, Toolkit, ToolkitFile, find_toolkit,
};

/// Allows a software device. For drivers without `VK_KHR_workgroup_memory_explicit_layout`, as Mesa 22.3, `CubeCL` 0.11.3
/// makes invalid shaders, which crash the process unless something mends them (`tests/vulkan_layer`).
const SOFTWARE_VARIABLE: &str = "LORA_TRAIN_SOFTWARE_VULKAN";

/// A device that was seen to work.
#[derive(Debug)]
pub struct OpenDevice {
    /// The handle on which tensors are made. Not tracked by autodiff.
    pub device: Device,
    /// Which backend computes.
    pub kind: DeviceKind,
    /// For people: `cpu (AMD EPYC 9654, 2 threads, AVX-512, bf16)`, `cuda:0 (NVIDIA H200, 139.8 GiB, sm_90)`.
    pub label: String,
    /// Whether the processor plays the GPU: right in its numbers, and slower than the CPU backend.
    pub is_software: bool,
    /// Why this device: `asked for`, or what `auto` found.
    pub reason: String,
    /// The GPU as the CUDA driver knows it; only for [`DeviceKind::Cuda`].
    pub cuda: Option<CudaGpu>,
    gemm_peak_flops: [OnceLock<Option<f64>>; 3],
}

/// Bytes that the backend's own pools hold on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInUse {
    /// Live tensors.
    pub allocated_bytes: u64,
    /// Live tensors, padding and what is kept for reuse.
    pub reserved_bytes: u64,
}

/// Opens a device by its recipe name.
///
/// `vulkan` takes the first card or, where there is none and the environment allows it, a driver's software device; `auto`
/// takes no software device.
///
/// The drivers are asked before burn: without a driver or a GPU burn panics, partly on threads of its own. A GPU
/// computes one small sum here, so that a GPU that does not work fails now.
///
/// # Errors
/// If the name is unknown, the backend is not compiled in, or there is no driver, no such GPU or no working GPU.
pub fn open(name: &str) -> Result<OpenDevice, DeviceError> {
    open_after(name, &|_| ())
}

/// [`open`], with what is done about an NVIDIA GPU before this process opens it: it may admit one process only.
pub(crate) fn open_after(name: &str, before: &dyn Fn(&CudaGpu)) -> Result<OpenDevice, DeviceError> {
    match name.parse()? {
        DeviceName::Auto => open_auto(before),
        DeviceName::Cpu => Ok(open_cpu("asked for".into())),
        DeviceName::Cuda(ordinal) => open_gpu(DeviceKind::Cuda, ordinal, true, before),
        DeviceName::Vulkan => open_gpu(DeviceKind::Vulkan, 0, true, before),
        DeviceName::Metal => open_gpu(DeviceKind::Metal, 0, true, before),
        DeviceName::Rocm => open_gpu(DeviceKind::Rocm, 0, true, before),
    }
}

fn open_auto(before: &dyn Fn(&CudaGpu)) -> Result<OpenDevice, DeviceError> {
    let mut refusals = Vec::new();
    let kinds = DeviceKind::ALL.into_iter().filter(|kind| kind.is_gpu() && kind.is_compiled_in());
    // CUDA may number an old GPU first.
    let num = |kind| if kind == DeviceKind::Cuda { num_cuda_gpus().max(1) } else { 1 };
    for (kind, ordinal) in kinds.flat_map(|kind| (0..num(kind)).map(move |ordinal| (kind, ordinal))) {
        match open_gpu(kind, ordinal, false, before) {
            Ok(device) => return Ok(device),
            // A GPU that is present but does not work is an error: nobody wants days on the CPU instead.
            Err(
                error @ (DeviceError::CannotCompute { .. }
                | DeviceError::Incomplete { .. }
                | DeviceError::BrokenCudaDriver { .. }),
            ) => return Err(error),
            Err(error) => refusals.push(error.short()),
        }
    }
    let reason = if refusals.is_empty() {
        "auto: no GPU backend is compiled in".into()
    } else {
        format!("auto: {}", refusals.join("; "))
    };
    Ok(open_cpu(reason))
}

fn open_cpu(reason: String) -> OpenDevice {
    OpenDevice {
        device: Device::flex(),
        kind: DeviceKind::Cpu,
        label: cpu::label(),
        is_software: false,
        reason,
        cuda: None,
        gemm_peak_flops: Default::default(),
    }
}

/// `is_asked_for`: by its name, not found by `auto`.
fn open_gpu(
    kind: DeviceKind,
    ordinal: u32,
    is_asked_for: bool,
    before: &dyn Fn(&CudaGpu),
) -> Result<OpenDevice, DeviceError> {
    if !kind.is_compiled_in() {
        return Err(DeviceError::NotCompiledIn { kind });
    }
    #[cfg(feature = "cuda-llvm")]
    let cuda = (kind == DeviceKind::Cuda).then(|| cuda_driver::probe(ordinal)).transpose()?;
    #[cfg(not(feature = "cuda-llvm"))]
    let cuda: Option<CudaGpu> = None;
    if let Some(gpu) = &cuda {
        gpu.require_recent()?;
        toolkit::require(gpu)?;
        before(gpu);
    }
    #[cfg(feature = "kernel-cache")]
    kernel_cache::keep_between_runs(cuda.as_ref().and_then(|_| toolkit::compiler()));
    let Listed { device, name, is_software } = guarded(|| gpu_handle(kind, ordinal))
        .map_err(|panic| DeviceError::cannot_compute(kind, panic))?
        .filter(|listed| is_asked_for || !listed.is_software)
        .ok_or(DeviceError::NoGpu { kind })?;
    if is_software && std::env::var_os(SOFTWARE_VARIABLE).is_none_or(|set| set.is_empty()) {
        return Err(DeviceError::OnlySoftware { kind, name });
    }
    try_out(kind, &device)?;
    let label = match &cuda {
        Some(gpu) => gpu.label(),
        None => format!("{} ({name}{})", kind.name(), if is_software { ", software" } else { "" }),
    };
    let reason = if is_asked_for { "asked for" } else { "auto: the first GPU that works" }.into();
    Ok(OpenDevice { device, kind, label, is_software, reason, cuda, gemm_peak_flops: Default::default() })
}

/// Loads the CUDA driver's library and asks its version, which needs no GPU.
///
/// # Errors
/// If it cannot be loaded: why, in one line.
pub fn driver_library() -> Result<DriverLibrary, String> {
    #[cfg(feature = "cuda-llvm")]
    return cuda_driver::driver_library();
    #[cfg(not(feature = "cuda-llvm"))]
    Err("this binary is built without CUDA".into())
}

/// How many NVIDIA GPUs this binary can train on here.
#[must_use]
pub fn num_cuda_gpus() -> u32 {
    #[cfg(feature = "cuda-llvm")]
    return cuda_driver::num_gpus().unwrap_or(0);
    #[cfg(not(feature = "cuda-llvm"))]
    0
}

/// UUIDs of the NVIDIA GPUs that this process sees, without a prefix; `None` if it cannot ask their driver.
pub(crate) fn cuda_uuids() -> Option<Vec<String>> {
    #[cfg(feature = "cuda-llvm")]
    return (0..cuda_driver::num_gpus().ok()?).map(|ordinal| Some(cuda_driver::probe(ordinal).ok()?.uuid)).collect();
    #[cfg(not(feature = "cuda-llvm"))]
    None
}

/// Memory of a GPU that nobody uses, by its driver: with this process' context on it, which the GPU is opened for. `None` if the
/// driver does not say.
pub(crate) fn free_cuda_memory_bytes(ordinal: u32) -> Option<u64> {
    #[cfg(feature = "cuda-llvm")]
    return cuda_driver::free_memory_bytes(ordinal).ok();
    #[cfg(not(feature = "cuda-llvm"))]
    {
        let _ = ordinal;
        None
    }
}

/// Loads NVRTC, which needs no GPU.
///
/// # Errors
/// If it cannot be loaded: why, in one line.
pub fn nvrtc_library() -> Result<NvrtcLibrary, String> {
    #[cfg(feature = "cuda-llvm")]
    return nvrtc::library();
    #[cfg(not(feature = "cuda-llvm"))]
    Err("this binary is built without CUDA".into())
}

/// Loads cuBLASLt and asks the version of CUDA that it is of, which needs no GPU.
///
/// # Errors
/// If it cannot be loaded: why, in one line.
pub fn cublas_library() -> Result<CublasLibrary, String> {
    #[cfg(feature = "cuda-llvm")]
    return cuda_library::cublas();
    #[cfg(not(feature = "cuda-llvm"))]
    Err("this binary is built without CUDA".into())
}

/// Loads NCCL and asks its version, which needs no GPU.
///
/// # Errors
/// If it cannot be loaded, or [`NCCL_VARIABLE`] says not to: why, in one line.
pub fn nccl_library() -> Result<NcclLibrary, String> {
    #[cfg(feature = "cuda-llvm")]
    return cuda_library::nccl();
    #[cfg(not(feature = "cuda-llvm"))]
    Err("this binary is built without CUDA".into())
}

/// A GPU that a driver lists.
struct Listed<D = Device> {
    device: D,
    /// The name that its driver gives it.
    name: String,
    is_software: bool,
}

/// A GPU; `None` if the driver lists none.
fn gpu_handle(kind: DeviceKind, ordinal: u32) -> Option<Listed> {
    match kind {
        #[cfg(feature = "cuda-llvm")]
        DeviceKind::Cuda => {
            Some(Listed { device: Device::cuda(ordinal as usize), name: String::new(), is_software: false })
        }
        #[cfg(feature = "vulkan")]
        DeviceKind::Vulkan => card(burn::tensor::DeviceType::Vulkan),
        #[cfg(feature = "metal")]
        DeviceKind::Metal => card(burn::tensor::DeviceType::Metal),
        #[cfg(feature = "rocm")]
        DeviceKind::Rocm => card(burn::tensor::DeviceType::Rocm),
        _ => {
            let _ = ordinal;
            None
        }
    }
}

#[cfg(any(feature = "vulkan", feature = "metal", feature = "rocm"))]
fn card(device_type: burn::tensor::DeviceType) -> Option<Listed> {
    first_card(Device::enumerate(device_type).into_vec().into_iter().filter_map(|device| {
        let identity = device.identity()?;
        Some(Listed { device, name: identity.name, is_software: identity.physical.is_none() })
    }))
}

/// The first real card of those that a driver lists, else its first software device. What comes after the card is not
/// opened.
#[cfg(any(test, feature = "vulkan", feature = "metal", feature = "rocm"))]
fn first_card<D>(listed: impl Iterator<Item = Listed<D>>) -> Option<Listed<D>> {
    let mut software = None;
    for listed in listed {
        if !listed.is_software {
            return Some(listed);
        }
        software.get_or_insert(listed);
    }
    software
}

/// Computes one small sum, which starts the backend and compiles a kernel.
fn try_out(kind: DeviceKind, device: &Device) -> Result<(), DeviceError> {
    let sum = guarded(|| {
        let ones = Tensor::<1>::ones([8], device);
        (ones.clone() + ones).sum().try_into_data().map(|data| data.iter::<f32>().next())
    });
    match sum {
        Ok(Ok(Some(value))) if (value - 16.0).abs() < 1e-6 => Ok(()),
        Ok(Ok(value)) => Err(DeviceError::cannot_compute(kind, format!("8 x (1 + 1) came out as {value:?}"))),
        Ok(Err(error)) => Err(DeviceError::cannot_compute(kind, error.to_string())),
        Err(panic) => Err(DeviceError::cannot_compute(kind, panic)),
    }
}

impl OpenDevice {
    /// Whether it is a GPU.
    #[must_use]
    pub fn is_gpu(&self) -> bool {
        self.kind.is_gpu()
    }

    /// Checks that tensors of a type can be stored and computed with.
    ///
    /// # Errors
    /// If they cannot; the error lists the types that can.
    pub fn require_dtype(&self, dtype: Dtype) -> Result<(), DeviceError> {
        if self.supports(dtype) {
            return Ok(());
        }
        let supported = Dtype::ALL.into_iter().filter(|&other| self.supports(other)).collect();
        Err(DeviceError::UnsupportedDtype { dtype, device: self.label.clone(), supported })
    }

    /// Whether tensors of a type can be stored and computed with.
    #[must_use]
    pub fn supports(&self, dtype: Dtype) -> bool {
        // Older GPUs have no instructions for bf16, and CubeCL does not tell.
        let is_old = self.cuda.as_ref().is_some_and(|gpu| !gpu.has_bf16());
        !(is_old && dtype == Dtype::Bf16) && self.device.supports_dtype(burn::tensor::DType::from(dtype))
    }

    /// The type of two bytes that it multiplies: `bf16`, or on a GPU without that, `f16`.
    #[must_use]
    pub fn two_byte_dtype(&self) -> Option<Dtype> {
        let of_gpu = self.is_gpu().then_some(Dtype::F16);
        [Dtype::Bf16].into_iter().chain(of_gpu).find(|dtype| self.supports(*dtype))
    }

    /// Waits until all work handed over is done. Returns at once on the CPU, which computes within the call.
    pub fn wait(&self) {
        if self.is_gpu() {
            // Failed work fails again where its result is read, and that call can report the error.
            drop(self.device.sync());
        }
    }

    /// What the backend's pools hold, counting the work handed over so far; `None` if the backend does not report it
    /// (the CPU is not asked).
    #[must_use]
    pub fn memory_in_use(&self) -> Option<MemoryInUse> {
        let usage = if self.is_gpu() { self.device.memory_pool_usage() } else { None }?;
        Some(MemoryInUse { allocated_bytes: usage.bytes_in_use, reserved_bytes: usage.bytes_reserved })
    }

    /// Whether `f32` matrix products of this device may be computed in TF32, which rounds factors to 11 significant bits:
    /// `CubeCL`'s tensor-core kernels take `f32` so where a GPU has that format, and which kernel computes a product is
    /// the choice of the tuner, made for each shape. So this is known from the GPU's kind, not from a measurement.
    #[must_use]
    pub fn f32_products_are_tf32(&self) -> bool {
        self.cuda.as_ref().is_some_and(|gpu| gpu.compute_capability >= (8, 0))
    }

    /// Relative error of one `f32` product, `[256, 256]` by `[256, 256]`, of numbers that `f32` holds and sums exactly: 0,
    /// or 2^-12 if it was computed in TF32. Says nothing about other shapes. `None` if the product fails.
    #[must_use]
    pub fn f32_product_error(&self, multiply: Multiply) -> Option<f64> {
        guarded(|| peak::product_error(&self.device, Dtype::F32, multiply)).ok().flatten()
    }

    /// The fastest matrix product measured on this device, in floating-point operations per second: the denominator of
    /// MFU, on a GPU of products by `multiply`. A CPU is measured in each process, in about 0.1 seconds; a GPU, where the
    /// backend may also tune its kernels, once. The fastest of all measurements of this build is kept on disk, so that
    /// MFU means the same in two runs. `None` if nothing could be measured.
    ///
    /// On the CPU this is the `f32` product for every `dtype`, since the backend computes in `f32`.
    #[must_use]
    pub fn gemm_peak_flops(&self, dtype: Dtype, multiply: Multiply) -> Option<f64> {
        let dtype = if self.is_gpu() { dtype } else { Dtype::F32 };
        *self.gemm_peak_flops[dtype as usize].get_or_init(|| {
            let kept = files::cache_folder().filter(|_| self.is_gpu());
            let kept = kept.and_then(|folder| peak::kept(&folder, &self.label, dtype));
            kept.or_else(|| self.measure_gemm_peak_flops(dtype, multiply))
        })
    }

    /// [`OpenDevice::gemm_peak_flops`], measured anew: the fastest of this and earlier measurements. `None` also for a
    /// software device.
    #[must_use]
    pub fn measure_gemm_peak_flops(&self, dtype: Dtype, multiply: Multiply) -> Option<f64> {
        // Large products would take it minutes, and say nothing.
        if self.is_software {
            return None;
        }
        if !self.is_gpu() {
            return peak::cpu_gemm_flops().map(|flops| self.fastest(dtype, flops));
        }
        let total = self.cuda.as_ref().map(|gpu| gpu.memory_bytes);
        let used = self.memory_in_use().map(|used| used.reserved_bytes);
        let has_room = total.zip(used).is_none_or(|(total, used)| used + (2 << 30) < total);
        let flops = peak::gpu_gemm_flops(&self.device, dtype, has_room, multiply)?;
        // A GPU that runs full is measured with small products: nothing to compare later runs with.
        Some(if has_room { self.fastest(dtype, flops) } else { flops })
    }

    /// The faster of this measurement and the kept one; keeps the faster.
    #[must_use]
    pub fn fastest(&self, dtype: Dtype, flops: f64) -> f64 {
        let Some(folder) = files::cache_folder() else { return flops };
        match peak::kept(&folder, &self.label, dtype) {
            Some(kept) if kept >= flops => kept,
            _ => {
                // Without the file the next run measures.
                drop(peak::keep(&folder, &self.label, dtype, flops));
                flops
            }
        }
    }

    /// Bytes read and written per second by adding a number to a large tensor; `None` if the measurement fails.
    #[must_use]
    pub fn copy_bytes_per_second(&self) -> Option<f64> {
        guarded(|| peak::copy_bytes_per_second(&self.device)).ok().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_opens_computes_in_every_dtype_and_says_what_it_is() {
        let open = open("cpu").unwrap();
        assert_eq!(open.kind, DeviceKind::Cpu);
        assert!(open.label.starts_with("cpu (") && open.label.contains("thread"), "{}", open.label);
        assert!(open.cuda.is_none() && open.memory_in_use().is_none());
        for dtype in Dtype::ALL {
            open.require_dtype(dtype).unwrap();
        }
        assert_eq!(open.two_byte_dtype(), Some(Dtype::Bf16));
        try_out(DeviceKind::Cpu, &open.device).unwrap();
    }

    #[test]
    fn a_backend_that_is_not_compiled_in_says_how_to_build_it() {
        for kind in [DeviceKind::Cuda, DeviceKind::Vulkan, DeviceKind::Metal, DeviceKind::Rocm] {
            if kind.is_compiled_in() {
                continue;
            }
            let error = open(kind.name()).unwrap_err().to_string();
            assert!(error.contains(&format!("--features {}", kind.name())), "{error}");
        }
    }

    #[test]
    fn a_card_is_taken_before_a_software_device_wherever_it_is_listed() {
        let first = |listed: &[(u32, bool)]| {
            let listed =
                listed.iter().map(|&(device, is_software)| Listed { device, name: String::new(), is_software });
            first_card(listed).map(|listed| (listed.device, listed.is_software))
        };
        assert_eq!(first(&[(0, true), (1, false), (2, false)]), Some((1, false)));
        assert_eq!(first(&[(0, true), (1, true)]), Some((0, true)));
        assert_eq!(first(&[]), None);
    }

    #[test]
    fn auto_always_finds_a_device_and_gives_its_reason() {
        let open = open("auto").unwrap();
        assert!(open.reason.starts_with("auto: "), "{}", open.reason);
    }
}
