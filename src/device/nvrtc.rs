//! NVRTC, asked before burn starts: `CubeCL` panics without it.

use cudarc::nvrtc::result::NvrtcError;
use cudarc::nvrtc::sys;

use super::{NvrtcLibrary, cuda_driver};
use crate::util::panics::guarded;

/// Loads the library and asks what it is.
///
/// # Errors
/// If it cannot be loaded or does not answer: why, in one line.
pub(super) fn library() -> Result<NvrtcLibrary, String> {
    #[cfg(unix)]
    super::cuda_library::load(&["libnvrtc-builtins.so*", "libnvrtc.so*"]);
    // SAFETY: loading NVIDIA's library runs its initialisers only.
    if !unsafe { sys::is_culib_present() } {
        return Err("libnvrtc cannot be loaded".into());
    }
    let answer = guarded(version_and_architectures)?;
    let (version, architectures) = answer.map_err(|error| format!("libnvrtc does not answer: {error}"))?;
    Ok(NvrtcLibrary { path: cuda_driver::loaded_from("/libnvrtc.so"), version, architectures })
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
