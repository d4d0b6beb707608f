//! Libraries of the CUDA toolkit that are not on the loader's path.

use std::ffi::{CStr, CString, OsStr, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest as _, Sha256};

use super::cuda_gpu::OLDEST_CUDA;
use super::{CublasLibrary, NCCL_VARIABLE, NcclLibrary, cuda_driver, toolkit};
use crate::util::files;
use crate::util::panics::guarded;

/// The first driver of that CUDA, by the first number of its version.
const OLDEST_DRIVER: u32 = 570;

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

/// Loads what has such names from the first of the toolkit's folders and pip's from which any can be. cudarc asks the loader for
/// `libnvrtc.so.13` and its like, and NVRTC for `libnvrtc-builtins.so.13.0`: libraries with these names that are loaded already
/// are then taken.
pub(super) fn load(names: &[&str]) {
    found(names).any(|paths| {
        let handles = paths.iter().filter_map(|path| CString::new(path.as_os_str().as_bytes()).ok()).map(|path| {
            // SAFETY: `path` ends in a null byte, and loading NVIDIA's library runs its initialisers only.
            unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY) }
        });
        // All of them.
        handles.filter(|handle| !handle.is_null()).count() > 0
    });
}

/// The files with such names in each of the toolkit's folders and pip's that has any.
fn found(names: &[&str]) -> impl Iterator<Item = Vec<PathBuf>> {
    let toolkit = super::find_toolkit()
        .into_iter()
        .flat_map(|toolkit| ["lib64", "lib", "targets/*/lib"].map(|folder| (toolkit.path.clone(), folder)));
    // A toolkit may be a compiler alone; pip spreads those before 13 over a folder for each package.
    let pip = toolkit::python_packages().into_iter();
    let pip = pip.flat_map(|packages| ["cu*/lib", "nccl/lib"].map(|folder| (packages.clone(), folder)));
    let files = toolkit.chain(pip).map(|(root, folder)| {
        let root = glob::Pattern::escape(&root.to_string_lossy());
        let of_name = |name: &&str| glob::glob(&format!("{root}/{folder}/{name}")).into_iter().flatten().flatten();
        names.iter().flat_map(of_name).collect::<Vec<_>>()
    });
    files.filter(|paths| !paths.is_empty())
}

/// Starts this program anew with the driver's library of NVIDIA's cuda-compat, where packages put it, if the machine's driver is too
/// old.
pub fn take_newer_driver() {
    if toolkit::newest_cuda().is_some_and(|newest| newest < OLDEST_CUDA)
        && let Some(compat) = newest_compat(compat_folders())
    {
        start_anew("LORA_TRAIN_DRIVER", &compat);
    }
}

/// Where packages put cuda-compat: NVIDIA's for distributions, which containers have too, and that of conda-forge.
fn compat_folders() -> impl Iterator<Item = PathBuf> {
    let conda = std::env::var_os("CONDA_PREFIX").map(|root| PathBuf::from(root).join("cuda-compat"));
    let folders = ["/usr/local/cuda*/compat", "/usr/local/cuda*/compat/lib.real"];
    folders.into_iter().filter_map(|folder| glob::glob(folder).ok()).flatten().flatten().chain(conda)
}

/// The folder with the newest driver's library that is new enough, by the number in `libcuda.so.580.65.06`.
fn newest_compat(folders: impl Iterator<Item = PathBuf>) -> Option<PathBuf> {
    let driver = |folder: &PathBuf| {
        let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let names = files.filter_map(|file| file.file_name().into_string().ok());
        names.filter_map(|name| name.strip_prefix("libcuda.so.")?.split('.').next()?.parse::<u32>().ok()).max()
    };
    let found = folders.filter(|folder| folder.join("libcuda.so.1").exists());
    let found =
        found.filter_map(|folder| Some((driver(&folder)?, folder))).filter(|(driver, _)| *driver >= OLDEST_DRIVER);
    found.max().map(|(_, folder)| folder)
}

const SEARCHED: &str = "LD_LIBRARY_PATH";

/// The folders that the loader looks in first. An empty one would be the current folder.
fn searched() -> Vec<PathBuf> {
    let searched = std::env::var_os(SEARCHED).unwrap_or_default();
    std::env::split_paths(&searched).filter(|folder| !folder.as_os_str().is_empty()).collect()
}

/// Starts this program anew with a folder before those that the loader looks in, once, as `variable` says to the next: the loader
/// ignores such folders for programs with privileges. Returns only if that was done, or failed: what is loaded then, a check says.
fn start_anew(variable: &str, folder: &Path) {
    if std::env::var_os(variable).is_some_and(|by| folder == by) {
        return;
    }
    let folders = std::env::join_paths(std::iter::once(folder.to_owned()).chain(searched())).unwrap_or_default();
    let (Ok(program), mut arguments) = (std::env::current_exe(), std::env::args_os()) else { return };
    let name = arguments.next().unwrap_or_default();
    drop(Command::new(program).arg0(name).args(arguments).env(SEARCHED, folders).env(variable, folder).exec());
}

/// Starts this program anew where the loader would take NVRTC or cuBLASLt from elsewhere than from the toolkit that is found, if
/// that fits the driver: cudarc asks for `libnvrtc.so`, which the development files of another toolkit have, before
/// `libnvrtc.so.13`.
pub fn take_own_libraries() {
    const CACHE: &str = "/etc/ld.so.cache";

    if !super::find_toolkit().is_some_and(|toolkit| toolkit.fits(toolkit::newest_cuda())) {
        return;
    }
    let own = |name: &'static str| Some((name, found(&[&format!("{name}*")]).next()?.swap_remove(0)));
    let own: Vec<_> = ["libnvrtc.so", "libcublasLt.so"].into_iter().filter_map(own).collect();
    let searched = searched();
    let loader_cache = std::fs::read(CACHE).unwrap_or_default();
    // The cache has paths that end in null bytes.
    let of_cache = |name: &str| {
        let mut paths = loader_cache.split(|byte| *byte == 0).map(|path| Path::new(OsStr::from_bytes(path)));
        paths.find(|path| path.is_absolute() && path.file_name() == Some(name.as_ref())).map(Path::to_owned)
    };
    let is_other = |(name, own): &(&str, PathBuf)| {
        let first = searched.iter().map(|folder| folder.join(name)).find(|path| path.exists());
        first.or_else(|| of_cache(name)).is_some_and(|other| other.canonicalize().ok() != own.canonicalize().ok())
    };
    let Some(cache) = files::cache_folder().filter(|_| own.iter().any(is_other)) else { return };
    let digest = format!("{:x}", Sha256::digest(format!("{own:?}")));
    let links = cache.join("cuda").join(&digest[..16]);
    if std::fs::create_dir_all(&links).is_err() {
        return;
    }
    for (name, own) in &own {
        // Other processes may make them too.
        drop(std::os::unix::fs::symlink(own, links.join(name)));
    }
    start_anew("LORA_TRAIN_LIBRARIES", &links);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_cuda_compat_that_is_new_enough_is_taken() {
        let root = tempfile::tempdir().unwrap();
        let folder = |name: &str, files: &[&str]| {
            let folder = root.path().join(name);
            std::fs::create_dir(&folder).unwrap();
            files.iter().for_each(|file| std::fs::write(folder.join(file), "").unwrap());
            folder
        };
        let [old, new, newer] = [("a", "550.54.15"), ("b", "570.86.10"), ("c", "580.65.06")]
            .map(|(name, version)| folder(name, &["libcuda.so.1", &format!("libcuda.so.{version}")]));
        let without = folder("d", &["libcuda.so.590.44.01"]);
        let newest = |folders: &[&PathBuf]| newest_compat(folders.iter().copied().cloned());
        assert_eq!(newest(&[&old, &newer, &new, &without]), Some(newer));
        assert_eq!(newest(&[&old, &new]), Some(new));
        assert_eq!(newest(&[&old, &without, &root.path().join("e")]), None);
    }
}
