//! What can go wrong when a device is opened.

use super::{DeviceKind, Dtype};
use crate::util::faults;

/// A device cannot be used. The text says what to do instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The name is unknown.
    #[error("unknown device `{name}`, expected `auto`, `cpu`, `cuda`, `cuda:N`, `vulkan`, `metal` or `rocm`{hint}")]
    UnknownName {
        /// The name as it was given.
        name: String,
        /// Empty, or a new line with a suggestion.
        hint: String,
    },
    /// The binary was built without this backend.
    #[error("device `{0}` is not compiled into this binary\n  hint: {1}", kind.name(), build_hint(*kind))]
    NotCompiledIn {
        /// The backend.
        kind: DeviceKind,
    },
    /// The CUDA driver cannot be loaded or does not start.
    #[error("device `cuda`: {reason}\n  hint: {hint}")]
    NoCudaDriver {
        /// What the driver or the loader said.
        reason: String,
        /// What to check.
        hint: &'static str,
    },
    /// There is a GPU, and its CUDA driver does not start.
    #[error(
        "device `cuda`: {reason}\n  hint: `nvidia-smi` must work (after an update of the driver, start the machine anew); or use \
         `--device cpu`"
    )]
    BrokenCudaDriver {
        /// What the driver said.
        reason: String,
    },
    /// The driver or the CUDA toolkit is too old, does not fit, or lacks a part.
    #[error("device `cuda`: {problem}\n  hint: {remedy}; or use `--device cpu`")]
    Incomplete {
        /// What does not fit or is missing, and where it was looked for.
        problem: String,
        /// What to install.
        remedy: String,
    },
    /// The GPU is older than those that kernels are made for.
    #[error("device `cuda:{ordinal}`: {gpu}\n  hint: use another GPU or `--device cpu`")]
    OldGpu {
        /// Its number among the GPUs that this process sees.
        ordinal: u32,
        /// Its name, what it has and what is needed.
        gpu: String,
    },
    /// CUDA has fewer GPUs than the name asks for.
    #[error("device `cuda:{ordinal}`: CUDA sees {num_gpus} GPU(s){visible}\n  hint: {hint}")]
    NoSuchCudaGpu {
        /// The number after `cuda:`.
        ordinal: u32,
        /// How many GPUs CUDA sees.
        num_gpus: u32,
        /// Empty, or what `CUDA_VISIBLE_DEVICES` is set to.
        visible: String,
        /// What to ask for instead.
        hint: String,
    },
    /// The backend lists no GPU.
    #[error("device `{}`: its driver lists no GPU\n  hint: install the GPU's driver{}, or use `--device cpu`", kind.name(), driver_hint(*kind))]
    NoGpu {
        /// The backend.
        kind: DeviceKind,
    },
    /// The driver has no GPU, and plays one on the processor.
    #[error("device `{}`: there is only {name}, a software device, in which kernels may crash\n  hint: use `--device cpu`, which is faster; for tests, LORA_TRAIN_SOFTWARE_VULKAN=1 allows it (scripts/check_vulkan.py)", kind.name())]
    OnlySoftware {
        /// The backend.
        kind: DeviceKind,
        /// What the driver calls the device.
        name: String,
    },
    /// The GPU is present, but its first small computation failed.
    #[error("device `{}` does not compute: {reason}\n  hint: see that nothing else fills the GPU, update its driver, or use `--device cpu`", kind.name())]
    CannotCompute {
        /// The backend.
        kind: DeviceKind,
        /// What the backend said.
        reason: String,
    },
    /// The device has no arithmetic in this type.
    #[error("{device} does not compute in `{dtype}`\n  hint: use {}", list(supported))]
    UnsupportedDtype {
        /// The type that was asked for.
        dtype: Dtype,
        /// Label of the device.
        device: String,
        /// The types that work.
        supported: Vec<Dtype>,
    },
}

impl DeviceError {
    pub(super) fn unknown_name(name: &str) -> Self {
        let lower = name.to_lowercase();
        let near = ["auto", "cpu", "cuda", "vulkan", "metal", "rocm"]
            .into_iter()
            .map(|known| (strsim::damerau_levenshtein(known, &lower), known))
            .min()
            .filter(|&(distance, _)| distance <= 2);
        let hint = match near {
            Some((_, known)) => format!("\n  hint: did you mean `{known}`?"),
            None => String::new(),
        };
        Self::UnknownName { name: name.into(), hint }
    }

    pub(super) fn cannot_compute(kind: DeviceKind, reason: String) -> Self {
        // A fault of the backend's own threads says more than the error that it led to.
        Self::CannotCompute { kind, reason: faults::take().unwrap_or(reason) }
    }

    /// The first line, for a list of reasons.
    pub(super) fn short(&self) -> String {
        self.to_string().lines().next().unwrap_or_default().to_owned()
    }
}

fn build_hint(kind: DeviceKind) -> String {
    let prepare = match kind {
        DeviceKind::Cuda => " (`scripts/setup_cuda_build.sh` prepares the machine that builds it)",
        _ => "",
    };
    format!("build it with `cargo build --release --features {}`{prepare}, or use `--device cpu`", kind.name())
}

fn driver_hint(kind: DeviceKind) -> &'static str {
    match kind {
        DeviceKind::Vulkan => {
            " for Vulkan and its loader (Debian, Ubuntu: mesa-vulkan-drivers or NVIDIA's, and libvulkan1)"
        }
        _ => "",
    }
}

fn list(dtypes: &[Dtype]) -> String {
    let names: Vec<_> = dtypes.iter().map(|dtype| format!("`{dtype}`")).collect();
    names.join(" or ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unsupported_dtype_names_those_that_work() {
        let error = DeviceError::UnsupportedDtype {
            dtype: Dtype::Bf16,
            device: "vulkan (Some GPU)".into(),
            supported: vec![Dtype::F32, Dtype::F16],
        };
        assert_eq!(error.to_string(), "vulkan (Some GPU) does not compute in `bf16`\n  hint: use `f32` or `f16`");
        assert_eq!(error.short(), "vulkan (Some GPU) does not compute in `bf16`");
    }
}
