//! The CUDA toolkit as pip has it before 13.0: a folder for each package, which links make into one.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

/// The packages with what is needed of a toolkit: NVRTC, the headers of which kernels include some, and cuBLASLt.
const PARTS: [&str; 5] = ["cuda_nvrtc", "cuda_runtime", "cuda_nvcc", "cuda_cccl", "cublas"];

/// The folder below `cache` that has by links what such packages in `packages` have; made where it is not there. `None` if there are
/// no such packages, or it cannot be made.
pub(super) fn joined(packages: &Path, cache: &Path) -> Option<PathBuf> {
    let mut links: Vec<(PathBuf, PathBuf)> = PARTS
        .into_iter()
        .flat_map(|part| ["include", "lib"].map(|folder| (folder, packages.join(part).join(folder))))
        .flat_map(|(folder, of_part)| {
            let entries = std::fs::read_dir(of_part).into_iter().flatten().flatten();
            entries.map(move |entry| (Path::new(folder).join(entry.file_name()), entry.path()))
        })
        .collect();
    links.sort();
    if !links.iter().any(|(name, _)| name.ends_with("cuda_runtime_api.h")) {
        return None;
    }
    // Another version of a package may have other files.
    let digest = format!("{:x}", Sha256::digest(format!("{links:?}")));
    let folder = cache.join("cuda").join(format!("pip-{}", &digest[..16]));
    if folder.is_dir() {
        return Some(folder);
    }
    std::fs::create_dir_all(cache.join("cuda")).ok()?;
    let unfinished = tempfile::tempdir_in(cache.join("cuda")).ok()?;
    for (name, target) in &links {
        let link = unfinished.path().join(name);
        std::fs::create_dir_all(link.parent()?).ok()?;
        // Each package has an `__init__.py`.
        drop(symlink(target, link));
    }
    // Another process may have been faster.
    drop(std::fs::rename(unfinished.path(), &folder));
    folder.is_dir().then_some(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_of_pip_become_one_folder() {
        let root = tempfile::tempdir().unwrap();
        let (packages, cache) = (root.path().join("nvidia"), root.path().join("cache"));
        let write = |file: &str| {
            let path = packages.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, file).unwrap();
        };
        for file in ["cuda_nvrtc/lib/libnvrtc.so.12", "cuda_nvcc/include/crt/mma.h", "cuda_cccl/include/nv/target"] {
            write(file);
        }
        assert_eq!(joined(&packages, &cache), None, "without the runtime's headers");
        for file in ["cuda_runtime_api.h", "__init__.py"] {
            write(&format!("cuda_runtime/include/{file}"));
        }
        write("cuda_cccl/include/__init__.py");
        let folder = joined(&packages, &cache).unwrap();
        for (file, of) in [
            ("lib/libnvrtc.so.12", "cuda_nvrtc/lib/libnvrtc.so.12"),
            ("include/crt/mma.h", "cuda_nvcc/include/crt/mma.h"),
            ("include/nv/target", "cuda_cccl/include/nv/target"),
            ("include/cuda_runtime_api.h", "cuda_runtime/include/cuda_runtime_api.h"),
        ] {
            assert_eq!(std::fs::read_to_string(folder.join(file)).unwrap(), of);
        }
        assert_eq!(joined(&packages, &cache), Some(folder.clone()));
        write("cuda_runtime/include/cuda_fp16.h");
        assert_ne!(joined(&packages, &cache), Some(folder));
        assert_eq!(std::fs::read_dir(cache.join("cuda")).unwrap().count(), 2, "nothing unfinished is left");
    }
}
