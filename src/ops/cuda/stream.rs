//! Launches of kernels in CUDA C++ on burn's own stream, from the thread on which burn launches its own.
//!
//! The stream gives their order among burn's kernels, and burn's pools the memory. A launch that fails marks what it would have written as
//! failed, as a launch of burn's does, and the read of it returns the error.

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CString, c_void};

use burn::backend::fusion::custom::StreamId;
use burn_cubecl::tensor::CubeTensor;
use cubecl_common::device_handle::DeviceHandle;
use cubecl_cuda::CudaRuntime;
use cubecl_environment::backtrace::BackTrace;
use cubecl_runtime::id::KernelId;
use cubecl_runtime::runtime::Runtime;
use cubecl_runtime::server::LaunchError;
use cubecl_server::stream::{ExecuteScope, WriteScoped as _};
use cudarc::cublaslt::result::CublasError;
use cudarc::driver::sys::{CUcontext, CUfunction, CUfunction_attribute, CUmodule, CUresult, CUstream};
use cudarc::driver::{DriverError, result};

use super::products::Products;

type CudaServer = <CudaRuntime as Runtime>::Server;

/// A file of kernels.
#[derive(Debug)]
pub(super) struct Module {
    pub(super) name: &'static str,
    pub(super) ptx: &'static str,
}

/// A launch of a kernel.
#[derive(Clone, Debug)]
pub(super) struct Launch {
    pub(super) function: String,
    pub(super) grid: [usize; 3],
    pub(super) threads: usize,
    /// Dynamic shared memory.
    pub(super) shared_bytes: usize,
    pub(super) arguments: Vec<Argument>,
}

/// An argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub(super) enum Argument {
    /// Where the tensor of this number starts: inputs, then outputs.
    Tensor(usize),
    Int(i32),
    Float(f32),
}

/// Launches a kernel that reads `inputs` and writes `outputs`.
pub(super) fn launch(module: &'static Module, launch: Launch, inputs: &[CubeTensor], outputs: &[CubeTensor]) {
    submit(inputs, outputs, move |loaded, pointers, stream| loaded.launch(module, launch, pointers, stream));
}

/// Calls `work` on the thread on which burn launches, with where the tensors start, inputs then outputs, and burn's stream.
pub(super) fn submit(
    inputs: &[CubeTensor],
    outputs: &[CubeTensor],
    work: impl FnOnce(&mut Loaded, &[u64], CUstream) -> Result<(), Failure> + Send + 'static,
) {
    let bindings = |tensors: &[CubeTensor]| tensors.iter().map(|x| x.handle.clone().binding()).collect::<Vec<_>>();
    let (reads, writes) = (bindings(inputs), bindings(outputs));
    let (device, stream) = (inputs[0].client.service_id().device, StreamId::current());
    DeviceHandle::<CudaServer>::new(device).submit(move |server| {
        let scope = ExecuteScope::launching(server, KernelId::new::<Module>(), stream, reads.iter(), writes.clone());
        let outcome = scope.execute(|server| {
            let mut streams = server.write_streams().resolve(stream, reads.iter().chain(&writes))?;
            let mut pointers = Vec::with_capacity(reads.len() + writes.len());
            for binding in reads.iter().chain(&writes) {
                streams.current().capturing.touch(binding.stream, binding.memory.descriptor().location());
                let memory = &mut streams.get(&binding.stream).memory_management_gpu;
                let memory = memory.get_resource(binding.memory.clone(), binding.offset_start, binding.offset_end)?;
                pointers.push(memory.ptr);
            }
            let stream = streams.current().sys;
            let of_device = |devices: &mut HashMap<u16, Loaded>| {
                let loaded = match devices.entry(device.index_id) {
                    Entry::Occupied(entry) => entry.into_mut(),
                    Entry::Vacant(entry) => entry.insert(Loaded::on(device.index_id)?),
                };
                // SAFETY: the context is retained.
                unsafe { result::ctx::set_current(loaded.context) }?;
                work(loaded, &pointers, stream)
            };
            // As burn says that a launch of its own failed.
            LOADED
                .with_borrow_mut(of_device)
                .map_err(|Failure(reason)| LaunchError::Unknown { reason, backtrace: BackTrace::capture() }.into())
        });
        // The scope has marked the outputs of work that failed.
        drop(outcome);
    });
}

/// Why a launch failed, in the library's words.
#[derive(Debug)]
pub(super) struct Failure(String);

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Self {
        Self(format!("{error:?}"))
    }
}

impl From<CublasError> for Failure {
    fn from(error: CublasError) -> Self {
        Self(format!("cuBLASLt: {error:?}"))
    }
}

/// A device's context, and what is loaded into it: to the end of the process.
pub(super) struct Loaded {
    context: CUcontext,
    modules: HashMap<&'static str, CUmodule>,
    functions: HashMap<String, CUfunction>,
    /// Made at the first product.
    pub(super) products: Option<Products>,
}

thread_local! {
    /// By device. Each has one thread that launches.
    static LOADED: RefCell<HashMap<u16, Loaded>> = RefCell::default();
}

impl Loaded {
    fn on(device: u16) -> Result<Self, DriverError> {
        let device = result::device::get(i32::from(device))?;
        // SAFETY: `device` comes from cuDeviceGet. burn holds the primary context as well.
        let context = unsafe { result::primary_ctx::retain(device) }?;
        Ok(Self { context, modules: HashMap::new(), functions: HashMap::new(), products: None })
    }

    /// A kernel, which may use `shared_bytes` of dynamic shared memory.
    fn function(&mut self, module: &Module, name: &str, shared_bytes: usize) -> Result<CUfunction, DriverError> {
        if let Some(function) = self.functions.get(name) {
            return Ok(*function);
        }
        let text = |text: &str| CString::new(text).map_err(|_| DriverError(CUresult::CUDA_ERROR_INVALID_VALUE));
        let handle = match self.modules.entry(module.name) {
            Entry::Occupied(entry) => *entry.get(),
            Entry::Vacant(entry) => {
                let ptx = text(module.ptx)?;
                // SAFETY: the text ends with a zero and outlives the call; the context is current.
                *entry.insert(unsafe { result::module::load_data(ptx.as_ptr().cast()) }?)
            }
        };
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the module is loaded, and never unloaded.
        let function = unsafe {
            let function = result::module::get_function(handle, text(name)?)?;
            result::function::set_function_attribute(function, attribute, u32(shared_bytes)?.cast_signed())?;
            function
        };
        self.functions.insert(name.to_owned(), function);
        Ok(function)
    }

    fn launch(
        &mut self,
        module: &Module,
        mut launch: Launch,
        pointers: &[u64],
        stream: CUstream,
    ) -> Result<(), Failure> {
        let function = self.function(module, &launch.function, launch.shared_bytes)?;
        let [x, y, z] = launch.grid;
        let arguments = launch.arguments.iter_mut().map(|argument| match argument {
            Argument::Tensor(index) => std::ptr::from_ref(&pointers[*index]).cast_mut().cast(),
            Argument::Int(value) => std::ptr::from_mut(value).cast(),
            Argument::Float(value) => std::ptr::from_mut(value).cast(),
        });
        let mut arguments: Vec<*mut c_void> = arguments.collect();
        let (grid, threads, shared) =
            ((u32(x)?, u32(y)?, u32(z)?), (u32(launch.threads)?, 1, 1), u32(launch.shared_bytes)?);
        // SAFETY: the arguments are those of the kernel. The tensors' memory is theirs while the launch is in the stream: burn
        // frees and moves memory in the order of its streams.
        unsafe { result::launch_kernel(function, grid, threads, shared, stream, &mut arguments) }?;
        Ok(())
    }
}

/// A size as the driver takes it.
fn u32(size: usize) -> Result<u32, DriverError> {
    u32::try_from(size).map_err(|_| DriverError(CUresult::CUDA_ERROR_INVALID_VALUE))
}
