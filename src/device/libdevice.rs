//! The one file of the CUDA toolkit that a GPU machine needs besides the driver: CUDA's mathematical functions. Kernels
//! with an exponential or a logarithm are linked with it when they are compiled on that machine.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::DeviceError;

/// Path within a toolkit.
const FILE: &str = "nvvm/libdevice/libdevice.10.bc";

/// Where `CubeCL` looks for a toolkit, unless `CUDA_PATH` is set.
const ROOTS: [&str; 4] = ["/usr/local/cuda", "/opt/cuda", "/usr/lib/cuda", "/usr"];

/// Checks that the file exists. A build with NVRTC does not need it.
///
/// # Errors
///
/// If it is missing; the error says how to get it.
pub(super) fn require() -> Result<(), DeviceError> {
    if cfg!(feature = "cuda-nvrtc") { Ok(()) } else { require_below(std::env::var_os("CUDA_PATH").map(PathBuf::from)) }
}

fn require_below(cuda_path: Option<PathBuf>) -> Result<(), DeviceError> {
    if find_below(cuda_path.as_deref()).is_some() {
        return Ok(());
    }
    let places = match cuda_path {
        Some(root) => format!("CUDA_PATH ({})", root.display()),
        None => ROOTS.join(", "),
    };
    Err(DeviceError::NoLibdevice { places })
}

/// The libdevice file of this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Libdevice {
    /// Path of the file.
    pub path: PathBuf,
    /// Version of the toolkit that it belongs to, if the toolkit says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub toolkit_version: Option<String>,
}

/// Looks for the file in the places where a run on a GPU looks.
#[must_use]
pub fn find_libdevice() -> Option<Libdevice> {
    find_below(std::env::var_os("CUDA_PATH").map(PathBuf::from).as_deref())
}

fn find_below(cuda_path: Option<&Path>) -> Option<Libdevice> {
    let roots = cuda_path.map_or_else(|| ROOTS.map(Path::new).to_vec(), |root| vec![root]);
    let root = roots.into_iter().find(|root| root.join(FILE).is_file())?;
    let versions = fs::read(root.join("version.json")).ok();
    let versions: Option<serde_json::Value> = versions.and_then(|text| serde_json::from_slice(&text).ok());
    let toolkit_version = versions.and_then(|versions| Some(versions["cuda"]["version"].as_str()?.to_owned()));
    Some(Libdevice { path: root.join(FILE), toolkit_version })
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
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, b"BC").unwrap();
        assert_eq!(require_below(Some(root.path().to_owned())), Ok(()));
        let found = |toolkit_version| Some(Libdevice { path: file.clone(), toolkit_version });
        assert_eq!(find_below(Some(root.path())), found(None));
        fs::write(root.path().join("version.json"), r#"{"cuda": {"version": "12.8.1"}}"#).unwrap();
        assert_eq!(find_below(Some(root.path())), found(Some("12.8.1".into())));
    }
}
