//! Libraries of the CUDA toolkit that are not on the loader's path.

use std::ffi::{CStr, CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::{CublasLibrary, NCCL_VARIABLE, NcclLibrary, cuda_driver, toolkit};
use crate::util::panics::guarded;

/// Loads cuBLASLt and asks its version, which needs no GPU.
///
/// # Errors
/// If it cannot be loaded: why, in one line.
pub(super) fn cublas() -> Result<CublasLibrary, String> {
    load(&["libcublasLt.so*"]);
    // SAFETY: loading NVIDIA's library runs its initialisers only.
    if !unsafe { cudarc::cublaslt::sys::is_culib_present() } {
        return Err("libcublasLt cannot be loaded".into());
    }
    // SAFETY: it takes nothing.
    let version = guarded(|| unsafe { cudarc::cublaslt::sys::cublasLtGetVersion() })?;
    // 130_102 is 13.1.2; before 12 it was 11_1103.
    let version = u32::try_from(version).unwrap_or(0);
    Ok(CublasLibrary {
        path: cuda_driver::loaded_from("/libcublasLt.so"),
        version: (version / 10_000, version % 10_000 / 100),
    })
}

/// Loads NCCL and asks its version, which needs no GPU.
///
/// # Errors
/// If it cannot be loaded, or [`NCCL_VARIABLE`] says not to: why, in one line.
pub(super) fn nccl() -> Result<NcclLibrary, String> {
    const NAME: &str = "libnccl.so.2";

    let named = std::env::var(NCCL_VARIABLE).ok().filter(|named| !named.is_empty());
    let name = match named.as_deref() {
        Some("none") => return Err(format!("{NCCL_VARIABLE} is `none`")),
        Some(named) => named,
        None => {
            load(&[NAME]);
            NAME
        }
    };
    let failed = || match &named {
        Some(_) => format!("{name} cannot be loaded"),
        None => format!("{name} cannot be loaded; pip's nvidia-nccl-cu13 has it, and NVIDIA's libnccl2"),
    };
    let file = CString::new(name).map_err(|_| failed())?;
    // SAFETY: the name ends in a null byte, and loading NVIDIA's library runs its initialisers only.
    let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW) };
    if handle.is_null() {
        return Err(failed());
    }
    let path = cuda_driver::loaded_from("/libnccl.so");
    let mut library = NcclLibrary { path, version: String::new(), handle: handle as usize };
    let mut version = 0;
    // SAFETY: the declaration is that of `nccl.h`, and `version` outlives the call.
    unsafe {
        let get_version = library.symbol(c"ncclGetVersion")?;
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int) -> c_int>(get_version)(&raw mut version);
    }
    library.version = format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100);
    Ok(library)
}

impl NcclLibrary {
    /// The address of a function.
    ///
    /// # Errors
    /// If the library has none of that name.
    pub fn symbol(&self, name: &CStr) -> Result<*mut c_void, String> {
        // SAFETY: the library is open, and the name ends in a null byte.
        let address = unsafe { libc::dlsym(self.handle as *mut c_void, name.as_ptr()) };
        let missing = || format!("NCCL {} has no {}", self.version, name.to_string_lossy());
        if address.is_null() { Err(missing()) } else { Ok(address) }
    }
}

/// Loads what has such names from the first of the toolkit's folders and pip's that has any. cudarc asks the loader for `libnvrtc.so.13` and
/// its like, and NVRTC for `libnvrtc-builtins.so.13.0`: libraries with these names that are loaded already are then taken.
pub(super) fn load(names: &[&str]) {
    let toolkit = super::find_toolkit()
        .into_iter()
        .flat_map(|toolkit| ["lib64", "lib", "targets/*/lib"].map(|folder| (toolkit.path.clone(), folder)));
    // A toolkit may be a compiler alone; pip spreads those before 13 over a folder for each package.
    let pip = toolkit::python_packages().into_iter();
    let pip = pip.flat_map(|packages| ["cu*/lib", "nccl/lib"].map(|folder| (packages.clone(), folder)));
    toolkit.chain(pip).any(|(root, folder)| load_from(&root, folder, names));
}

/// Whether any was there.
fn load_from(root: &Path, folder: &str, names: &[&str]) -> bool {
    let root = glob::Pattern::escape(&root.to_string_lossy());
    let mut is_there = false;
    for name in names {
        for path in glob::glob(&format!("{root}/{folder}/{name}")).into_iter().flatten().flatten() {
            let Ok(path) = CString::new(path.as_os_str().as_bytes()) else { continue };
            // SAFETY: `path` ends in a null byte, and loading NVIDIA's library runs its initialisers only.
            is_there |= !unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY) }.is_null();
        }
    }
    is_there
}
