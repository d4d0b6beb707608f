//! The CUDA driver, asked before burn is.
//!
//! burn panics where there is no driver or no such GPU, so the driver is loaded and asked here first. It also
//! gives the GPU's UUID, by which NVML finds the same GPU whatever `CUDA_VISIBLE_DEVICES` and
//! `CUDA_DEVICE_ORDER` say, MIG slices included.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;

use serde::Serialize;

use super::DeviceError;

/// A GPU as the CUDA driver knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CudaGpu {
    /// Its number among the GPUs that this process sees, from 0.
    pub ordinal: u32,
    /// Its name: `NVIDIA H200`.
    pub name: String,
    /// Its UUID without a prefix: `5a2b1c34-....`. NVML knows it as `GPU-...`, or as `MIG-...` for a slice of a GPU.
    pub uuid: String,
    /// Its memory.
    pub memory_bytes: u64,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Newest CUDA that the driver supports, major and minor.
    pub driver_cuda_version: (u32, u32),
}

impl CudaGpu {
    /// One line: `cuda:0 (NVIDIA H200, 139.8 GiB, sm_90, driver for CUDA 12.8)`.
    pub(super) fn label(&self) -> String {
        let Self {
            ordinal,
            name,
            compute_capability: (major, minor),
            driver_cuda_version: (cuda_major, cuda_minor),
            ..
        } = self;
        #[allow(clippy::cast_precision_loss, reason = "shown with one decimal")]
        let gib = self.memory_bytes as f64 / f64::from(1 << 30);
        format!("cuda:{ordinal} ({name}, {gib:.1} GiB, sm_{major}{minor}, driver for CUDA {cuda_major}.{cuda_minor})")
    }
}

/// The driver's library, as this machine has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DriverLibrary {
    /// The file; absent where the loader does not tell it.
    pub path: Option<PathBuf>,
    /// Newest CUDA that it supports, major and minor.
    pub cuda_version: (u32, u32),
}

const LIBRARY: &str = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };

/// Loads the driver's library and asks its version, which needs no GPU.
///
/// # Errors
///
/// Why it cannot be loaded, in one line.
pub fn driver_library() -> Result<DriverLibrary, String> {
    let driver = Driver::load(LIBRARY)?;
    Ok(DriverLibrary { path: path_of(driver.init as *const c_void), cuda_version: driver.cuda_version()? })
}

/// Finds a GPU by its number.
///
/// # Errors
///
/// Where the driver is missing or does not start, or where it sees no such GPU.
pub(super) fn probe(ordinal: u32) -> Result<CudaGpu, DeviceError> {
    probe_library(LIBRARY, ordinal)
}

const NO_DRIVER_HINT: &str =
    "install NVIDIA's driver (`nvidia-smi` must work; in a container, start it with GPU access), or use `--device cpu`";

fn probe_library(library: &str, ordinal: u32) -> Result<CudaGpu, DeviceError> {
    let driver = Driver::load(library).map_err(|reason| DeviceError::NoCudaDriver { reason, hint: NO_DRIVER_HINT })?;
    let no_driver = |reason| DeviceError::NoCudaDriver { reason, hint: NO_DRIVER_HINT };
    driver.init().map_err(no_driver)?;
    let num_gpus = driver.num_gpus().map_err(no_driver)?;
    if ordinal >= num_gpus {
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let visible = visible.map(|value| format!(" (CUDA_VISIBLE_DEVICES is `{value}`)")).unwrap_or_default();
        let hint = match num_gpus {
            0 => "use `--device cpu`".into(),
            1 => "use `cuda:0`".into(),
            n => format!("use `cuda:0` to `cuda:{}`", n - 1),
        };
        return Err(DeviceError::NoSuchCudaGpu { ordinal, num_gpus, visible, hint });
    }
    driver.describe(ordinal).map_err(no_driver)
}

type CuResult = c_int;

/// The few functions of libcuda that are needed, and the library that they live in.
struct Driver {
    init: unsafe extern "C" fn(c_uint) -> CuResult,
    get_error_name: unsafe extern "C" fn(CuResult, *mut *const c_char) -> CuResult,
    get_driver_version: unsafe extern "C" fn(*mut c_int) -> CuResult,
    device_get_count: unsafe extern "C" fn(*mut c_int) -> CuResult,
    device_get: unsafe extern "C" fn(*mut c_int, c_int) -> CuResult,
    device_get_name: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> CuResult,
    device_get_uuid: unsafe extern "C" fn(*mut [u8; 16], c_int) -> CuResult,
    device_total_mem: unsafe extern "C" fn(*mut usize, c_int) -> CuResult,
    device_get_attribute: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> CuResult,
}

const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
const COMPUTE_CAPABILITY_MINOR: c_int = 76;

impl Driver {
    fn load(library: &str) -> Result<Self, String> {
        let library = Library::open(library)?;
        // SAFETY: the names and signatures are those of cuda.h (driver API, stable since CUDA 11.4; the suffixed
        // names are what the header maps the plain ones to). A library is never closed, so they stay valid.
        unsafe {
            Ok(Self {
                init: library.function(c"cuInit")?,
                get_error_name: library.function(c"cuGetErrorName")?,
                get_driver_version: library.function(c"cuDriverGetVersion")?,
                device_get_count: library.function(c"cuDeviceGetCount")?,
                device_get: library.function(c"cuDeviceGet")?,
                device_get_name: library.function(c"cuDeviceGetName")?,
                // Only version 2 tells the slices of a MIG GPU apart.
                device_get_uuid: library
                    .function(c"cuDeviceGetUuid_v2")
                    .or_else(|_| library.function(c"cuDeviceGetUuid"))?,
                device_total_mem: library.function(c"cuDeviceTotalMem_v2")?,
                device_get_attribute: library.function(c"cuDeviceGetAttribute")?,
            })
        }
    }

    fn check(&self, call: &str, result: CuResult) -> Result<(), String> {
        if result == 0 {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: `name` outlives the call; the driver leaves it null or points it at a constant string.
        let name = unsafe {
            (self.get_error_name)(result, &raw mut name);
            if name.is_null() { "unknown error".into() } else { CStr::from_ptr(name).to_string_lossy() }
        };
        Err(format!("the CUDA driver does not start: {call} gives {name} ({result})"))
    }

    fn init(&self) -> Result<(), String> {
        // SAFETY: cuInit takes flags that must be 0.
        self.check("cuInit", unsafe { (self.init)(0) })
    }

    fn num_gpus(&self) -> Result<u32, String> {
        let mut count = 0;
        // SAFETY: `count` outlives the call.
        self.check("cuDeviceGetCount", unsafe { (self.device_get_count)(&raw mut count) })?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Newest CUDA that the driver supports, major and minor.
    fn cuda_version(&self) -> Result<(u32, u32), String> {
        let mut version = 0;
        // SAFETY: `version` outlives the call.
        self.check("cuDriverGetVersion", unsafe { (self.get_driver_version)(&raw mut version) })?;
        let version = u32::try_from(version).unwrap_or(0);
        Ok((version / 1000, version % 1000 / 10))
    }

    fn attribute(&self, attribute: c_int, device: c_int) -> Result<u32, String> {
        let mut value = 0;
        // SAFETY: `value` outlives the call; `device` comes from cuDeviceGet.
        let result = unsafe { (self.device_get_attribute)(&raw mut value, attribute, device) };
        self.check("cuDeviceGetAttribute", result)?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    fn describe(&self, ordinal: u32) -> Result<CudaGpu, String> {
        let mut device = 0;
        let mut name: [c_char; 256] = [0; 256];
        let mut uuid = [0_u8; 16];
        let mut memory_bytes = 0_usize;
        // SAFETY: every output outlives its call, `name` is given with its length, and `device` is set by the
        // first call before it is used.
        unsafe {
            self.check("cuDeviceGet", (self.device_get)(&raw mut device, ordinal.cast_signed()))?;
            self.check("cuDeviceGetName", (self.device_get_name)(name.as_mut_ptr(), 256, device))?;
            self.check("cuDeviceGetUuid", (self.device_get_uuid)(&raw mut uuid, device))?;
            self.check("cuDeviceTotalMem", (self.device_total_mem)(&raw mut memory_bytes, device))?;
        }
        name[255] = 0;
        // SAFETY: the array ends in 0, as set above.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        Ok(CudaGpu {
            ordinal,
            name,
            uuid: format_uuid(uuid),
            memory_bytes: memory_bytes as u64,
            compute_capability: (
                self.attribute(COMPUTE_CAPABILITY_MAJOR, device)?,
                self.attribute(COMPUTE_CAPABILITY_MINOR, device)?,
            ),
            driver_cuda_version: self.cuda_version()?,
        })
    }
}

/// `8-4-4-4-12` hexadecimal digits, as NVML and nvidia-smi write it.
fn format_uuid(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

/// A library that stays loaded to the end of the process, as burn loads it again.
struct Library(*mut c_void);

#[cfg(unix)]
impl Library {
    fn open(path: &str) -> Result<Self, String> {
        let name = CString::new(path).map_err(|error| error.to_string())?;
        // SAFETY: a NUL-terminated path; loading NVIDIA's driver library runs its initialisers only.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(format!("no CUDA driver on this machine ({path} cannot be loaded: {})", last_error()));
        }
        Ok(Self(handle))
    }

    /// Looks a function up.
    ///
    /// # Safety
    ///
    /// `F` must be the function pointer type that the library documents for this name.
    unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F, String> {
        // SAFETY: the handle is open and the name is NUL-terminated.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if address.is_null() {
            return Err(format!("the CUDA driver is too old: it lacks {}", name.to_string_lossy()));
        }
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: by the caller's promise `F` is a function pointer, of the size of a pointer as asserted.
        Ok(unsafe { std::mem::transmute_copy(&address) })
    }
}

/// The file that a function was loaded from.
#[cfg(unix)]
fn path_of(function: *const c_void) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt as _;

    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr fills `info` where it gives anything but 0; the name lives as long as the library, which is not closed.
    let name = unsafe {
        (libc::dladdr(function, info.as_mut_ptr()) != 0)
            .then(|| info.assume_init().dli_fname)
            .filter(|name| !name.is_null())
            .map(|name| CStr::from_ptr(name))
    };
    name.map(|name| PathBuf::from(std::ffi::OsStr::from_bytes(name.to_bytes())))
}

#[cfg(not(unix))]
fn path_of(_: *const c_void) -> Option<PathBuf> {
    None
}

#[cfg(unix)]
fn last_error() -> String {
    // SAFETY: dlerror gives null or a NUL-terminated string that is valid until the next call of this thread.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() { "unknown error".into() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    }
}

#[cfg(not(unix))]
impl Library {
    fn open(path: &str) -> Result<Self, String> {
        let _ = CString::new(path);
        Err(format!("{path}: CUDA is supported on Linux only"))
    }

    unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F, String> {
        let _ = self.0;
        Err(name.to_string_lossy().into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_driver_gets_an_error_not_a_panic() {
        let error = probe_library("libcuda-that-is-nowhere.so.1", 0).unwrap_err().to_string();
        assert!(error.contains("no CUDA driver on this machine"), "{error}");
        assert!(error.contains("hint: install NVIDIA's driver"), "{error}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_library_that_is_no_driver_is_refused() {
        let error = probe_library("libc.so.6", 0).unwrap_err().to_string();
        assert!(error.contains("lacks cuInit"), "{error}");
    }

    /// Compiles the stand-in. The build of this project needs a C compiler too, so `cc` is there where this runs.
    fn stand_in(folder: &std::path::Path, define: &str) -> String {
        let library = folder.join(format!("libcuda-{define}.so"));
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/cuda_stand_in.c");
        let mut cc = std::process::Command::new("cc");
        cc.args(["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", &format!("-D{define}"), "-o"]);
        assert!(cc.arg(&library).arg(source).status().expect("a C compiler named cc").success());
        library.to_str().unwrap().to_owned()
    }

    #[test]
    fn the_driver_says_what_each_gpu_is() {
        let folder = tempfile::tempdir().unwrap();
        let library = stand_in(folder.path(), "TWO_GPUS");
        let expected = CudaGpu {
            ordinal: 1,
            name: "NVIDIA Stand-in B".into(),
            uuid: "f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff".into(),
            memory_bytes: 24 << 30,
            compute_capability: (8, 6),
            driver_cuda_version: (12, 8),
        };
        assert_eq!(probe_library(&library, 1).unwrap(), expected);
        assert_eq!(probe_library(&library, 0).unwrap().compute_capability, (9, 0));
        let error = probe_library(&library, 2).unwrap_err().to_string();
        assert!(error.starts_with("device `cuda:2`: CUDA sees 2 GPU(s)"), "{error}");
        assert!(error.ends_with("hint: use `cuda:0` to `cuda:1`"), "{error}");
    }

    #[test]
    fn a_driver_that_does_not_start_or_sees_no_gpu_is_an_error_with_its_reason() {
        let folder = tempfile::tempdir().unwrap();
        let error = probe_library(&stand_in(folder.path(), "INIT_FAILS"), 0).unwrap_err().to_string();
        assert!(error.contains("cuInit gives CUDA_ERROR_UNKNOWN (999)"), "{error}");
        let error = probe_library(&stand_in(folder.path(), "NO_GPUS"), 0).unwrap_err().to_string();
        assert!(error.contains("CUDA sees 0 GPU(s)") && error.contains("--device cpu"), "{error}");
    }

    #[test]
    fn uuids_are_written_as_nvml_writes_them() {
        let bytes = std::array::from_fn(|i| u8::try_from(i * 16 + i).unwrap());
        assert_eq!(format_uuid(bytes), "00112233-4455-6677-8899-aabbccddeeff");
    }

    #[test]
    fn a_gpu_is_described_in_one_line() {
        let gpu = CudaGpu {
            ordinal: 1,
            name: "NVIDIA H200".into(),
            uuid: String::new(),
            memory_bytes: 150_000_000_000,
            compute_capability: (9, 0),
            driver_cuda_version: (12, 8),
        };
        assert_eq!(gpu.label(), "cuda:1 (NVIDIA H200, 139.7 GiB, sm_90, driver for CUDA 12.8)");
    }
}
