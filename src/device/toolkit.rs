//! The parts of the CUDA toolkit with which kernels are compiled on the machine that runs them.
//!
//! `CubeCL` compiles a kernel when it is first used and, where a part is missing, panics on a thread of its own. So the
//! parts are looked for before, where people have them; [`name_toolkit`] tells `CubeCL`, which looks in few places.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::cuda_gpu::{OLDEST_CUDA, dotted};
#[cfg(unix)]
use super::pip;
use super::{CudaGpu, DeviceError};
#[cfg(unix)]
use crate::util::files;

/// What compiles kernels for NVIDIA GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KernelCompiler {
    /// NVIDIA's compiler for CUDA C++, a library that is loaded at run time.
    Nvrtc,
    /// LLVM, linked with this binary.
    Llvm,
}

impl KernelCompiler {
    /// The compiler of this binary, or of a build with `--features cuda` if this one has no CUDA.
    pub const OF_BUILD: Self =
        if cfg!(all(feature = "cuda-llvm", not(feature = "cuda"))) { Self::Llvm } else { Self::Nvrtc };

    /// Where distributions have a toolkit, and `CubeCL` looks for one: folders, and what in them shows that it is one.
    fn places(self) -> &'static [(&'static str, &'static str)] {
        const LIBDEVICE: &str = "nvvm/libdevice";
        match self {
            Self::Nvrtc => &[("/usr/local/cuda", ""), ("/opt/cuda", ""), ("/usr", "bin/nvcc")],
            Self::Llvm => &[
                ("/usr/local/cuda", LIBDEVICE),
                ("/opt/cuda", LIBDEVICE),
                ("/usr/lib/cuda", LIBDEVICE),
                ("/usr", LIBDEVICE),
            ],
        }
    }

    /// The files of the toolkit that are needed, below one of the folders: of each of pip's packages one for each part
    /// of CUDA that kernels use.
    fn needs(self) -> (&'static [&'static str], &'static [ToolkitFile]) {
        const fn file(file: &'static str, package: &'static str) -> ToolkitFile {
            ToolkitFile { file, package }
        }
        match self {
            Self::Nvrtc => (
                &["include", "include/cccl"],
                const {
                    &[
                        file("cuda_fp16.h", "nvidia-cuda-runtime"),
                        file("cuda_bf16.h", "nvidia-cuda-runtime"),
                        file("mma.h", "nvidia-cuda-runtime"),
                        file("cooperative_groups.h", "nvidia-cuda-runtime"),
                        file("crt/mma.h", "nvidia-cuda-crt"),
                        file("cuda/barrier", "nvidia-cuda-cccl"),
                        file("nv/target", "nvidia-cuda-cccl"),
                    ]
                },
            ),
            // Kernels with an exponential or a logarithm are linked with it.
            Self::Llvm => (&["nvvm/libdevice"], const { &[file("libdevice.10.bc", "nvidia-nvvm")] }),
        }
    }
}

/// A file of the CUDA toolkit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ToolkitFile {
    /// Its name in a folder of headers or of libdevice.
    pub file: &'static str,
    /// The package on `PyPI` that has it.
    pub package: &'static str,
}

/// The CUDA toolkit, or the part of it that is installed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Toolkit {
    /// Its folder.
    pub path: PathBuf,
    /// The version of CUDA whose headers it has, major and minor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<(u32, u32)>,
    /// What [`KernelCompiler::OF_BUILD`] needs and the folder lacks.
    pub missing: Vec<ToolkitFile>,
}

/// NVRTC as a run loads it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NvrtcLibrary {
    /// Path of the library; absent if the loader does not report it.
    pub path: Option<PathBuf>,
    /// Its version, major and minor.
    pub version: (u32, u32),
    /// The compute capabilities for which it compiles: 90 for 9.0.
    pub architectures: Vec<u32>,
}

/// cuBLASLt as a run loads it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CublasLibrary {
    /// Path of the library; absent if the loader does not report it.
    pub path: Option<PathBuf>,
    /// The version of CUDA that it is of, major and minor.
    pub version: (u32, u32),
}

/// Names the library of NCCL, or is `none`: gradients go through MPI then.
pub const NCCL_VARIABLE: &str = "LORA_TRAIN_NCCL";

/// NCCL as a run loads it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NcclLibrary {
    /// Path of the library; absent if the loader does not report it.
    pub path: Option<PathBuf>,
    /// Its version: `2.27.3`.
    pub version: String,
    /// The loader's handle, which is never closed.
    #[serde(skip)]
    pub(super) handle: usize,
}

/// Looks for the toolkit where a run on a GPU looks; `None` if there is none. It is the folder that `CUDA_PATH` names; or the
/// first that lacks nothing and fits the driver, or else the first that lacks nothing, or the first, of pip's packages beside
/// this program, of those of distributions, of the `nvcc` on the `PATH`, and of pip's packages in other environments of Python.
#[must_use]
pub fn find_toolkit() -> Option<Toolkit> {
    let compiler = KernelCompiler::OF_BUILD;
    if let Some(path) = std::env::var_os("CUDA_PATH").filter(|path| !path.is_empty()) {
        return Some(toolkit(compiler, path.into()));
    }
    let places = compiler.places().iter().filter(|(root, proof)| Path::new(root).join(proof).exists());
    let nvcc = on_path("nvcc").and_then(|nvcc| nvcc.canonicalize().ok());
    let of_nvcc = nvcc.as_deref().and_then(|nvcc| nvcc.parent()?.parent());
    let own = own_packages().into_iter().flat_map(|packages| of_pip(&packages));
    let all = own.chain(places.map(|(root, _)| PathBuf::from(root))).chain(of_nvcc.map(Path::to_owned));
    let all = all.chain(python_packages().into_iter().flat_map(|packages| of_pip(&packages)));
    best(all.map(|path| toolkit(compiler, path)).collect(), newest_cuda())
}

/// The toolkits of pip's packages in a folder: from 13.0 on it is one; those before are joined by a build that compiles with NVRTC.
fn of_pip(packages: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    #[cfg(unix)]
    let before = files::cache_folder().filter(|_| cfg!(feature = "cuda"));
    #[cfg(unix)]
    let before = before.and_then(|cache| pip::joined(packages, &cache));
    #[cfg(not(unix))]
    let before = None;
    Some(packages.join("cu13")).filter(|cuda| cuda.is_dir()).into_iter().chain(before)
}

impl Toolkit {
    /// Whether it lacks nothing and is for a driver whose newest CUDA this is, as far as its version is known.
    pub(super) fn fits(&self, newest: Option<(u32, u32)>) -> bool {
        let is_new = |version| version >= OLDEST_CUDA && newest.is_none_or(|newest| version <= newest);
        self.missing.is_empty() && self.version.is_none_or(is_new)
    }
}

pub(super) fn newest_cuda() -> Option<(u32, u32)> {
    super::driver_library().ok().map(|driver| driver.cuda_version)
}

fn best(mut found: Vec<Toolkit>, newest: Option<(u32, u32)>) -> Option<Toolkit> {
    let fits = found.iter().position(|toolkit| toolkit.fits(newest));
    let index = fits.or_else(|| found.iter().position(|toolkit| toolkit.missing.is_empty())).unwrap_or(0);
    (!found.is_empty()).then(|| found.swap_remove(index))
}

/// The toolkit in a folder, or what of it is there.
fn toolkit(compiler: KernelCompiler, path: PathBuf) -> Toolkit {
    let (folders, files) = compiler.needs();
    let has = |needed: &ToolkitFile| folders.iter().any(|folder| path.join(folder).join(needed.file).is_file());
    let missing = files.iter().filter(|needed| !has(needed)).copied().collect();
    let version = header_version(&path.join("include/cuda_runtime_api.h"));
    Toolkit { path, version, missing }
}

/// The version of CUDA that a header is of.
fn header_version(header: &Path) -> Option<(u32, u32)> {
    let lines = BufReader::new(File::open(header).ok()?).lines().map_while(Result::ok);
    let number =
        lines.take(1000).find_map(|line| line.strip_prefix("#define CUDART_VERSION")?.trim().parse::<u32>().ok())?;
    Some((number / 1000, number % 1000 / 10))
}

/// The first program of this name on the `PATH`.
fn on_path(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?).map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// NVIDIA's packages in the environment of Python in which this program is installed, as `pip install lora-train[cuda]` does.
fn own_packages() -> Vec<PathBuf> {
    std::env::current_exe().map(|program| packages_beside(&program)).unwrap_or_default()
}

fn packages_beside(program: &Path) -> Vec<PathBuf> {
    program.parent().and_then(Path::parent).into_iter().flat_map(packages_of).collect()
}

/// Where pip puts NVIDIA's packages, beside `PyTorch` for one: in the program's own environment, the active ones, and that
/// of `python3`.
pub(super) fn python_packages() -> Vec<PathBuf> {
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let python = on_path("python3").and_then(|python| Some(python.parent()?.parent()?.to_owned()));
    own_packages().into_iter().chain(active.chain(python).flat_map(|root| packages_of(&root))).collect()
}

fn packages_of(environment: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let root = glob::Pattern::escape(&environment.to_string_lossy());
    let found = glob::glob(&format!("{root}/lib/python3*/*-packages/nvidia")).into_iter();
    found.flatten().flatten()
}

/// Names the toolkit that is found to `CubeCL`, which looks in the places of distributions only.
///
/// # Safety
/// No other thread may read or write the environment meanwhile.
#[cfg(feature = "cuda-llvm")]
#[expect(unsafe_code, reason = "CubeCL reads the environment")]
pub unsafe fn name_toolkit() {
    if let Some(toolkit) = find_toolkit() {
        // SAFETY: by the caller's promise.
        unsafe { std::env::set_var("CUDA_PATH", toolkit.path) };
    }
}

/// What compiles kernels, and its version: `nvrtc-13.0`; `None` where `CubeCL` keeps versions apart itself.
#[cfg(feature = "kernel-cache")]
pub(super) fn compiler() -> Option<String> {
    let nvrtc = (KernelCompiler::OF_BUILD == KernelCompiler::Nvrtc).then(super::nvrtc_library)?;
    nvrtc.ok().map(|nvrtc| format!("nvrtc-{}", dotted(nvrtc.version)))
}

/// Checks that kernels can be compiled for a GPU.
///
/// # Errors
/// If a part of the toolkit is missing or does not fit the driver or the GPU; the error says what to install.
pub(super) fn require(gpu: &CudaGpu) -> Result<(), DeviceError> {
    let compiler = KernelCompiler::OF_BUILD;
    let nvrtc = (compiler == KernelCompiler::Nvrtc).then(super::nvrtc_library).transpose();
    check(compiler, gpu, nvrtc, find_toolkit().as_ref())
}

/// How a toolkit for a driver of CUDA `newest` is installed, also with these packages of pip.
fn installation(newest: (u32, u32), packages: Option<&str>) -> String {
    let [oldest, newest] = [OLDEST_CUDA, newest].map(dotted);
    let toolkit = format!("install NVIDIA's CUDA toolkit, {oldest} to {newest}");
    match packages {
        Some(packages) => format!(
            "{toolkit}, or {packages} by pip (scripts/requirements-cuda.txt), and set CUDA_PATH to its folder (pip's is \
             site-packages/nvidia/cu13)"
        ),
        None => {
            format!(
                "`pip install \"lora-train[cuda12]\"` brings what fits; or {toolkit} and set CUDA_PATH to its folder"
            )
        }
    }
}

/// `nvrtc`: the library, or why it cannot be loaded; `None` if kernels do not go through it.
fn check(
    compiler: KernelCompiler,
    gpu: &CudaGpu,
    nvrtc: Result<Option<NvrtcLibrary>, String>,
    toolkit: Option<&Toolkit>,
) -> Result<(), DeviceError> {
    let newest = gpu.driver_cuda_version;
    let lacking = |problem: String, packages: &str| {
        // pip's toolkits before 13.0 are spread over several folders, of which CUDA_PATH could name one only: those of the extra are
        // joined.
        let pip = (newest >= (13, 0) || compiler == KernelCompiler::Llvm).then_some(packages);
        Err(DeviceError::Incomplete { problem, remedy: installation(newest, pip) })
    };
    match nvrtc {
        Err(reason) => return lacking(format!("{reason}; it compiles the kernels"), "nvidia-cuda-nvrtc"),
        Ok(Some(NvrtcLibrary { path, version, architectures })) => {
            let path = path.map(|path| format!(" ({})", path.display())).unwrap_or_default();
            let name = format!("libnvrtc of CUDA {}{path}", dotted(version));
            let (major, minor) = gpu.compute_capability;
            if version < OLDEST_CUDA {
                return lacking(format!("{name} is too old"), "nvidia-cuda-nvrtc");
            }
            // Each version of CUDA has a PTX of its own, which older drivers refuse.
            if version > newest {
                let problem = format!("the driver, for CUDA {}, does not load what {name} compiles", dotted(newest));
                return lacking(problem, "nvidia-cuda-nvrtc");
            }
            if !architectures.contains(&(10 * major + minor)) {
                let other =
                    if architectures.iter().all(|known| *known > 10 * major + minor) { "older" } else { "newer" };
                let problem = format!("{name} does not compile for sm_{major}{minor}");
                let remedy = format!("take the libnvrtc and the headers of an {other} CUDA toolkit");
                return Err(DeviceError::Incomplete { problem, remedy });
            }
        }
        Ok(None) => {}
    }
    let Some(Toolkit { path, missing, .. }) = toolkit else {
        let places: Vec<_> = compiler.places().iter().map(|(root, _)| *root).collect();
        let problem = format!(
            "CUDA_PATH is not set, and there is no CUDA toolkit in {}, beside an nvcc on the PATH or in an environment of \
             Python",
            places.join(", ")
        );
        return lacking(problem, "all parts");
    };
    if missing.is_empty() {
        return Ok(());
    }
    let mut packages: Vec<_> = missing.iter().map(|missing| missing.package).collect();
    packages.dedup();
    let files: Vec<_> = missing.iter().map(|missing| missing.file).collect();
    let folders: Vec<_> = compiler.needs().0.iter().map(|folder| path.join(folder).display().to_string()).collect();
    let problem = format!("{} of the CUDA toolkit, for the kernels: not in {}", files.join(", "), folders.join(", "));
    lacking(problem, &packages.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda_gpu::tests::h200;

    fn nvrtc(version: (u32, u32)) -> NvrtcLibrary {
        NvrtcLibrary { path: Some("/cu/libnvrtc.so.13".into()), version, architectures: vec![75, 80, 90] }
    }

    fn refusal(gpu: &CudaGpu, nvrtc: Result<Option<NvrtcLibrary>, String>, toolkit: Option<&Toolkit>) -> String {
        check(KernelCompiler::Nvrtc, gpu, nvrtc, toolkit).unwrap_err().to_string()
    }

    #[test]
    fn a_toolkit_is_complete_with_the_headers_in_the_folders_that_kernels_include_from() {
        let root = tempfile::tempdir().unwrap();
        let found = || toolkit(KernelCompiler::Nvrtc, root.path().to_owned());
        let error = refusal(&h200(), Ok(Some(nvrtc((13, 0)))), Some(&found()));
        assert!(error.contains(&format!("{}/include/cccl", root.path().display())), "{error}");
        assert!(error.contains("nvidia-cuda-runtime, nvidia-cuda-crt, nvidia-cuda-cccl by pip"), "{error}");
        for ToolkitFile { file, package } in KernelCompiler::Nvrtc.needs().1 {
            assert!(!found().missing.is_empty(), "before {file}");
            let below = if *package == "nvidia-cuda-cccl" { "include/cccl" } else { "include" };
            let path = root.path().join(below).join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        assert_eq!(check(KernelCompiler::Nvrtc, &h200(), Ok(Some(nvrtc((13, 0)))), Some(&found())), Ok(()));
    }

    #[test]
    fn llvm_needs_libdevice_alone() {
        let root = tempfile::tempdir().unwrap();
        let check = || {
            let toolkit = toolkit(KernelCompiler::Llvm, root.path().to_owned());
            check(KernelCompiler::Llvm, &h200(), Ok(None), Some(&toolkit))
        };
        let error = check().unwrap_err().to_string();
        assert!(error.contains("libdevice.10.bc of the CUDA toolkit") && error.contains("nvidia-nvvm"), "{error}");
        std::fs::create_dir_all(root.path().join("nvvm/libdevice")).unwrap();
        std::fs::write(root.path().join("nvvm/libdevice/libdevice.10.bc"), "BC").unwrap();
        assert_eq!(check(), Ok(()));
    }

    #[test]
    fn a_toolkit_that_fits_the_driver_is_taken_before_another_and_that_before_one_that_lacks_a_part() {
        let missing = KernelCompiler::Nvrtc.needs().1[..1].to_vec();
        let toolkit =
            |path: &str, version, missing: &Vec<_>| Toolkit { path: path.into(), version, missing: missing.clone() };
        let [lacking, second] = ["a", "b"].map(|path| toolkit(path, None, &missing));
        let none = Vec::new();
        let [old, fitting, newer] =
            [("c", (12, 4)), ("d", (12, 8)), ("e", (13, 0))].map(|(path, version)| toolkit(path, Some(version), &none));
        let best = |found: &[&Toolkit]| best(found.iter().copied().cloned().collect(), Some((12, 9)));
        assert_eq!(best(&[&lacking, &second, &old, &newer, &fitting]), Some(fitting));
        assert_eq!(best(&[&lacking, &newer, &old]), Some(newer));
        assert_eq!(best(&[&lacking, &second]), Some(lacking));
        assert_eq!(best(&[]), None);
    }

    #[test]
    fn packages_of_nvidia_are_found_in_an_environment_of_python() {
        let root = tempfile::tempdir().unwrap();
        let nvidia = root.path().join("lib/python3.12/site-packages/nvidia");
        std::fs::create_dir_all(&nvidia).unwrap();
        assert_eq!(packages_of(root.path()).collect::<Vec<_>>(), [&*nvidia]);
        assert_eq!(packages_beside(&root.path().join("bin/lora-train")), [nvidia]);
    }

    #[test]
    fn an_nvrtc_that_does_not_fit_the_driver_or_the_gpu_is_refused_with_what_fits() {
        let error = refusal(&h200(), Err("libnvrtc cannot be loaded".into()), None);
        assert!(error.starts_with("device `cuda`: libnvrtc cannot be loaded") && error.contains("nvidia-cuda-nvrtc"));
        let error = refusal(&h200(), Ok(Some(nvrtc((13, 1)))), None);
        assert!(error.contains("the driver, for CUDA 13.0, does not load"), "{error}");
        assert!(error.contains("12.8 to 13.0, or nvidia-cuda-nvrtc by pip"), "{error}");
        // What pip has is too new for this driver.
        let older = CudaGpu { driver_cuda_version: (12, 9), ..h200() };
        let error = refusal(&older, Ok(Some(nvrtc((13, 0)))), None);
        assert!(error.contains("lora-train[cuda12]") && error.contains("12.8 to 12.9 and set CUDA_PATH"), "{error}");
        let error = refusal(&h200(), Ok(Some(nvrtc((12, 4)))), None);
        assert!(error.contains("libnvrtc of CUDA 12.4 (/cu/libnvrtc.so.13) is too old"), "{error}");
        for (compute_capability, other) in [((7, 0), "older"), ((12, 0), "newer")] {
            let error = refusal(&CudaGpu { compute_capability, ..h200() }, Ok(Some(nvrtc((13, 0)))), None);
            assert!(error.contains("does not compile for sm_") && error.contains(other), "{error}");
        }
        assert!(
            refusal(&h200(), Ok(Some(nvrtc((13, 0)))), None)
                .contains("no CUDA toolkit in /usr/local/cuda, /opt/cuda, /usr")
        );
    }
}
