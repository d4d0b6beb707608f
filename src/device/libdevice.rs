//! The one file of the CUDA toolkit that a GPU machine needs besides the driver: CUDA's mathematical functions, which
//! kernels that take an exponential or a logarithm are linked with when they are compiled there.

use std::path::{Path, PathBuf};

use super::DeviceError;

/// Where it lies in a toolkit.
const FILE: &str = "nvvm/libdevice/libdevice.10.bc";

/// Where `CubeCL` looks for a toolkit, unless `CUDA_PATH` is set.
const ROOTS: [&str; 4] = ["/usr/local/cuda", "/opt/cuda", "/usr/lib/cuda", "/usr"];

/// Holds that the file is there. A build with NVRTC does not need it.
///
/// # Errors
///
/// Where it is not, and how to get it.
pub(super) fn require() -> Result<(), DeviceError> {
    if cfg!(feature = "cuda-nvrtc") { Ok(()) } else { require_below(std::env::var_os("CUDA_PATH").map(PathBuf::from)) }
}

fn require_below(cuda_path: Option<PathBuf>) -> Result<(), DeviceError> {
    let is_there = match &cuda_path {
        Some(root) => root.join(FILE).is_file(),
        None => ROOTS.iter().any(|root| Path::new(root).join(FILE).is_file()),
    };
    let places = match cuda_path {
        Some(root) => format!("CUDA_PATH ({})", root.display()),
        None => ROOTS.join(", "),
    };
    if is_there { Ok(()) } else { Err(DeviceError::NoLibdevice { places }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_toolkit_without_libdevice_is_refused_with_the_place_and_the_remedy() {
        let root = tempfile::tempdir().unwrap();
        let error = require_below(Some(root.path().to_owned())).unwrap_err().to_string();
        assert!(error.contains(FILE) && error.contains(&root.path().display().to_string()), "{error}");
        assert!(error.contains("nvidia-cuda-nvcc"), "{error}");
        let file = root.path().join(FILE);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, b"BC").unwrap();
        assert_eq!(require_below(Some(root.path().to_owned())), Ok(()));
    }
}
