//! NVRTC, asked before burn starts: `CubeCL` panics without it.

use cudarc::nvrtc::result::NvrtcError;
use cudarc::nvrtc::sys;

use super::{NvrtcLibrary, cuda_driver};
use crate::util::panics::guarded;

/// Loads the library and asks what it is.
///
/// # Errors
///
/// If it cannot be loaded or does not answer: why, in one line.
pub(super) fn library() -> Result<NvrtcLibrary, String> {
    #[cfg(unix)]
    {
        let toolkit = super::find_toolkit()
            .into_iter()
            .flat_map(|toolkit| ["lib64", "lib", "targets/*/lib"].map(|folder| (toolkit.path.clone(), folder)));
        // A toolkit may be a compiler alone; pip spreads those before 13 over a folder for each package.
        let pip = super::toolkit::python_packages().into_iter().map(|packages| (packages, "cu*/lib"));
        toolkit.chain(pip).any(|(root, folder)| load_from(&root, folder));
    }
    // SAFETY: loading NVIDIA's library runs its initialisers only.
    if !unsafe { sys::is_culib_present() } {
        return Err("libnvrtc cannot be loaded".into());
    }
    let answer = guarded(version_and_architectures)?;
    let (version, architectures) = answer.map_err(|error| format!("libnvrtc does not answer: {error}"))?;
    Ok(NvrtcLibrary { path: cuda_driver::loaded_from("/libnvrtc.so"), version, architectures })
}

/// Loads NVRTC from a toolkit that is not on the loader's path. cudarc asks the loader for `libnvrtc.so.13` and its
/// like, and NVRTC for `libnvrtc-builtins.so.13.0`: libraries with these names that are loaded already are then taken.
/// Returns whether it was there.
#[cfg(unix)]
fn load_from(root: &std::path::Path, folder: &str) -> bool {
    use std::os::unix::ffi::OsStrExt;

    let root = glob::Pattern::escape(&root.to_string_lossy());
    let mut is_there = false;
    for name in ["libnvrtc-builtins.so*", "libnvrtc.so*"] {
        for path in glob::glob(&format!("{root}/{folder}/{name}")).into_iter().flatten().flatten() {
            let Ok(path) = std::ffi::CString::new(path.as_os_str().as_bytes()) else { continue };
            // SAFETY: `path` ends in a null byte, and loading NVIDIA's library runs its initialisers only.
            is_there |= !unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY) }.is_null();
        }
    }
    is_there
}

fn version_and_architectures() -> Result<((u32, u32), Vec<u32>), NvrtcError> {
    let (mut major, mut minor, mut num_architectures) = (0, 0, 0);
    // SAFETY: the three numbers outlive the calls.
    unsafe {
        sys::nvrtcVersion(&raw mut major, &raw mut minor).result()?;
        sys::nvrtcGetNumSupportedArchs(&raw mut num_architectures).result()?;
    }
    let mut architectures = vec![0; usize::try_from(num_architectures).unwrap_or(0)];
    // SAFETY: the list has room for as many as NVRTC counted.
    unsafe { sys::nvrtcGetSupportedArchs(architectures.as_mut_ptr()) }.result()?;
    let number = |number| u32::try_from(number).unwrap_or(0);
    Ok(((number(major), number(minor)), architectures.into_iter().map(number).collect()))
}
