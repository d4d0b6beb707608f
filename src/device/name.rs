//! Devices by name, and the backends behind them.

use super::DeviceError;

/// A device as `device.name` and `--device` name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceName {
    /// The fastest kind that is compiled in and present.
    Auto,
    /// The processor.
    Cpu,
    /// An NVIDIA GPU, counted as CUDA counts them (after `CUDA_VISIBLE_DEVICES`).
    Cuda(u32),
    /// A GPU with a Vulkan driver.
    Vulkan,
    /// An Apple GPU.
    Metal,
    /// An AMD GPU.
    Rocm,
}

impl std::str::FromStr for DeviceName {
    type Err = DeviceError;

    /// Reads a device name.
    ///
    /// # Errors
    /// If the name is not one of `auto`, `cpu`, `cuda`, `cuda:N`, `vulkan`, `metal`, `rocm`. Only [`open`](super::open) finds out
    /// whether that device exists.
    fn from_str(name: &str) -> Result<Self, DeviceError> {
        match name {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            "vulkan" => Ok(Self::Vulkan),
            "metal" => Ok(Self::Metal),
            "rocm" => Ok(Self::Rocm),
            _ => name
                .strip_prefix("cuda:")
                .and_then(|ordinal| ordinal.parse().ok())
                .map(Self::Cuda)
                .ok_or_else(|| DeviceError::unknown_name(name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_are_read_and_near_misses_get_a_suggestion() {
        assert_eq!("cuda:3".parse::<DeviceName>().unwrap(), DeviceName::Cuda(3));
        assert_eq!("cuda".parse::<DeviceName>().unwrap(), DeviceName::Cuda(0));
        assert_eq!("auto".parse::<DeviceName>().unwrap(), DeviceName::Auto);
        let error = "cdua".parse::<DeviceName>().unwrap_err().to_string();
        assert!(error.contains("did you mean `cuda`?"), "{error}");
        for wrong in ["cuda:", "cuda:-1", "cuda:x", "CPU", "gpu", ""] {
            let error = wrong.parse::<DeviceName>().unwrap_err().to_string();
            assert!(error.contains("`auto`, `cpu`, `cuda`, `cuda:N`"), "{wrong}: {error}");
        }
    }
}
