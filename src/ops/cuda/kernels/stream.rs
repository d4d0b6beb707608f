//! Launches of kernels in CUDA C++ on burn's own stream, from the thread on which burn launches its own.
//!
//! The stream gives their order among burn's kernels, and burn's pools the memory. A launch that fails marks what it would have written as
//! failed, as a launch of burn's does, and the read of it returns the error.

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CString, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use burn::backend::fusion::custom::StreamId;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl_common::device_handle::DeviceHandle;
use cubecl_cuda::CudaRuntime;
use cubecl_environment::backtrace::BackTrace;
use cubecl_runtime::id::KernelId;
use cubecl_runtime::runtime::Runtime;
use cubecl_runtime::server::{LaunchError, ServerError};
use cubecl_server::server::Server as _;
use cubecl_server::stream::{ExecuteScope, WriteScoped as _};
use cudarc::driver::sys::{
    CUcontext, CUdevice_attribute, CUdeviceptr, CUfunction, CUfunction_attribute, CUmodule, CUresult, CUstream,
    CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion,
    CUtensorMapSwizzle, cuTensorMapEncodeTiled,
};
use cudarc::driver::{DriverError, result};

use super::matrix;
use crate::ops::cuda::ptx;

type CudaServer = <CudaRuntime as Runtime>::Server;

/// A launch of a kernel, put together argument by argument.
pub(super) struct Launch {
    /// The file of the kernel.
    module: &'static str,
    function: String,
    grid: [usize; 3],
    threads: usize,
    shared_bytes: usize,
    arguments: Vec<Argument>,
    reads: Vec<CubeTensor>,
    writes: Vec<CubeTensor>,
    /// An integer that its argument cannot hold: then it is not launched, and fails.
    beyond_int: Option<usize>,
}

/// An argument of a kernel.
enum Argument {
    /// By value, in words.
    Words(Vec<ArgumentWord>),
    /// A tensor map.
    Map(TileMap),
}

/// How copies of tiles find a matrix of `bf16`.
#[derive(Clone, Copy)]
struct TileMap {
    /// The tensor of this number.
    read: usize,
    /// Its rows and columns, and the columns of it from one row to the next.
    rows: usize,
    columns: usize,
    stride: usize,
    /// Columns of a tile: its rows are what its swizzle spans.
    tile_columns: u32,
}

/// A word, or a part of one.
#[derive(Clone, Copy)]
enum ArgumentWord {
    /// Where the tensor of this number starts.
    Read(usize),
    Write(usize),
    Value(u64),
    /// Two numbers that kernels count with, and leave at zero.
    Counters,
}

/// What a table is made of, which is an argument by value.
#[derive(Clone, Copy)]
pub(super) enum Operand<'a> {
    Read(&'a CubeTensor),
    Change(&'a CubeTensor),
    Value(usize),
    /// 64 bits.
    Word(u64),
}

impl Launch {
    pub(super) fn new(module: &'static str, function: impl Into<String>, grid: [usize; 3], threads: usize) -> Self {
        let (arguments, reads, writes) = Default::default();
        let function = function.into();
        Self { module, function, grid, threads, shared_bytes: 0, arguments, reads, writes, beyond_int: None }
    }

    /// Dynamic shared memory.
    pub(super) fn shared(self, shared_bytes: usize) -> Self {
        Self { shared_bytes, ..self }
    }

    pub(super) fn read(mut self, x: &CubeTensor) -> Self {
        let word = self.word(Operand::Read(x));
        self.with([word].into())
    }

    /// A tensor map of a matrix of `bf16`, for tiles of 64 rows and `tile_columns`: 64, or 32.
    pub(super) fn map(mut self, x: &CubeTensor, tile_columns: u32) -> Self {
        let ([rows, columns], stride) = (matrix::dims(x), matrix::stride(x));
        self.reads.push(x.clone());
        let read = self.reads.len() - 1;
        self.arguments.push(Argument::Map(TileMap { read, rows, columns, stride, tile_columns }));
        self
    }

    pub(super) fn write(mut self, x: &CubeTensor) -> Self {
        self.writes.push(x.clone());
        let index = self.writes.len() - 1;
        self.with([ArgumentWord::Write(index)].into())
    }

    /// A tensor that is read and written.
    pub(super) fn change(mut self, x: &CubeTensor) -> Self {
        let word = self.word(Operand::Change(x));
        self.with([word].into())
    }

    pub(super) fn counters(self) -> Self {
        self.with([ArgumentWord::Counters].into())
    }

    /// A table of `capacity` words: its end is not read.
    pub(super) fn table<'a>(mut self, entries: impl IntoIterator<Item = Operand<'a>>, capacity: usize) -> Self {
        let mut words: Vec<_> = entries.into_iter().map(|entry| self.word(entry)).collect();
        words.resize(capacity, ArgumentWord::Value(0));
        self.with(words)
    }

    pub(super) fn ints(self, values: impl IntoIterator<Item = usize>) -> Self {
        values.into_iter().fold(self, |mut launch, value| {
            let int = i32::try_from(value);
            launch.beyond_int = launch.beyond_int.or(int.is_err().then_some(value));
            launch.bits(int.unwrap_or_default().cast_unsigned())
        })
    }

    pub(super) fn bits(self, value: u32) -> Self {
        self.long(value.into())
    }

    /// 64 bits; 0 is no tensor.
    pub(super) fn long(self, value: u64) -> Self {
        self.with([ArgumentWord::Value(value)].into())
    }

    #[expect(clippy::cast_possible_truncation, reason = "computed in f32")]
    pub(super) fn float(self, value: f64) -> Self {
        self.bits((value as f32).to_bits())
    }

    fn with(mut self, words: Vec<ArgumentWord>) -> Self {
        self.arguments.push(Argument::Words(words));
        self
    }

    fn word(&mut self, entry: Operand<'_>) -> ArgumentWord {
        let value = match entry {
            Operand::Value(value) => return ArgumentWord::Value(value as u64),
            Operand::Word(word) => return ArgumentWord::Value(word),
            Operand::Read(x) | Operand::Change(x) => x.clone(),
        };
        if let Operand::Change(x) = entry {
            self.writes.push(x.clone());
        }
        self.reads.push(value);
        ArgumentWord::Read(self.reads.len() - 1)
    }

    /// Puts it into burn's stream.
    pub(super) fn launch(self) {
        if self.grid.contains(&0) {
            return;
        }
        let (reads, writes) = (self.reads, self.writes);
        let is_f16 = reads.iter().chain(&writes).any(|x| x.dtype == DType::F16);
        let num_reads = reads.len();
        submit(&reads, &writes, move |loaded, pointers, stream| {
            if let Some(value) = self.beyond_int {
                let text = format!(
                    "{} counts to 2^31 - 1, and has {value}: take fewer tokens in a micro-batch",
                    self.function
                );
                return Err(Failure(text));
            }
            let function = loaded.function(self.module, is_f16, &self.function, self.shared_bytes)?;
            let counters = loaded.counters(stream)?;
            let [x, y, z] = self.grid;
            let grid = (u32(x)?, u32(y)?, u32(z)?);
            // Little-endian: a part of a word comes first in it.
            let word = |word: &ArgumentWord| match *word {
                ArgumentWord::Read(index) => pointers[index],
                ArgumentWord::Write(index) => pointers[num_reads + index],
                ArgumentWord::Value(value) => value,
                ArgumentWord::Counters => counters,
            };
            let argument = |argument: &Argument| match argument {
                Argument::Words(words) => Ok(words.iter().map(word).collect()),
                Argument::Map(map) => map.encoded(pointers[map.read]),
            };
            let words: Result<Vec<Vec<u64>>, DriverError> = self.arguments.iter().map(argument).collect();
            let mut words = words?;
            let mut arguments: Vec<*mut c_void> = words.iter_mut().map(|words| words.as_mut_ptr().cast()).collect();
            let (threads, shared) = ((u32(self.threads)?, 1, 1), u32(self.shared_bytes)?);
            // SAFETY: the arguments are those of the kernel. The tensors' memory is theirs while the launch is in the stream: burn
            // frees and moves memory in the order of its streams.
            unsafe { result::launch_kernel(function, grid, threads, shared, stream, &mut arguments) }?;
            Ok(())
        });
    }
}

impl TileMap {
    /// The map of a matrix that starts at `pointer`, in words.
    fn encoded(self, pointer: u64) -> Result<Vec<u64>, DriverError> {
        let mut map = CUtensorMap { opaque: [0; 16] };
        let swizzle = match self.tile_columns {
            64 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            _ => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        };
        let sizes = [self.columns as u64, self.rows as u64];
        let (strides, tile, steps) = ([(2 * self.stride) as u64], [self.tile_columns, 64], [1, 1]);
        // SAFETY: the map and the sizes outlive the call, which reads no memory of the device.
        let code = unsafe {
            cuTensorMapEncodeTiled(
                &raw mut map,
                CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                2,
                pointer as *mut c_void,
                sizes.as_ptr(),
                strides.as_ptr(),
                tile.as_ptr(),
                steps.as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        code.result()?;
        Ok(map.opaque.into())
    }
}

/// A GPU's compute capability; zeros if the driver does not say.
pub(super) fn capability(device: u16) -> [i32; 2] {
    use CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };

    let number = |attribute| {
        let number = result::device::get(i32::from(device)).and_then(|device| {
            // SAFETY: `device` comes from cuDeviceGet.
            unsafe { result::device::get_attribute(device, attribute) }
        });
        number.unwrap_or(0)
    };
    [MAJOR, MINOR].map(number)
}

/// The first number of a GPU's compute capability.
pub(super) fn major(device: u16) -> i32 {
    capability(device)[0]
}

/// Tiles in shared memory that kernels copy and read at a time: `TILES_IN_FLIGHT` of the GPU of `x`.
pub(super) fn tiles_in_flight(x: &CubeTensor) -> usize {
    if major(x.client.service_id().device.index_id) < 8 { 1 } else { 2 }
}

/// Whether a GPU has compute capability 9.0: kernels for it run on no other.
pub(super) fn is_hopper(device: u16) -> bool {
    major(device) == 9
}

/// Calls `work` on the thread on which burn launches, with where the tensors start, inputs then outputs, and burn's stream.
pub(super) fn submit(
    inputs: &[CubeTensor],
    outputs: &[CubeTensor],
    mut work: impl FnMut(&mut Loaded, &[u64], CUstream) -> Result<(), Failure> + Send + 'static,
) {
    let bindings = |tensors: &[CubeTensor]| tensors.iter().map(|x| x.handle.clone().binding()).collect::<Vec<_>>();
    let (reads, writes) = (bindings(inputs), bindings(outputs));
    let (device, stream) = (inputs[0].client.service_id().device, StreamId::current());
    DeviceHandle::<CudaServer>::new(device).submit(move |server| {
        let scope = ExecuteScope::launching(server, KernelId::new::<Launch>(), stream, reads.iter(), writes.clone());
        let mut attempt = |server: &mut CudaServer| {
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
            Ok::<_, ServerError>(LOADED.with_borrow_mut(of_device))
        };
        let outcome = scope.execute(|server| {
            let mut done = attempt(server)?;
            // The first use of a kernel takes memory of the device, and burn's pools keep what they no longer need.
            if done.as_ref().is_err_and(Failure::is_of_memory) && server.memory_cleanup(stream).is_ok() {
                done = attempt(server)?;
            }
            // As burn says that a launch of its own failed.
            done.map_err(|Failure(reason)| LaunchError::Unknown { reason, backtrace: BackTrace::capture() }.into())
        });
        // The scope has marked the outputs of work that failed.
        drop(outcome);
    });
}

/// Bytes of live tensors, the most that were noted; 0 is none.
static NOTED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Notes how much memory live tensors have when burn's queue comes to what follows: called where a step may have the most.
pub(super) fn note_memory(like: &CubeTensor) {
    DeviceHandle::<CudaServer>::new(like.client.service_id().device).submit(|server| {
        let reports = server.stream_ids().into_iter().filter_map(|stream| server.memory_report(stream));
        NOTED_BYTES.fetch_max(reports.map(|report| report.usage().bytes_in_use).sum(), Ordering::Relaxed);
    });
}

/// The most bytes of live tensors that launches noted since the last call; `None` if none did.
#[must_use]
pub fn take_noted_bytes() -> Option<u64> {
    Some(NOTED_BYTES.swap(0, Ordering::Relaxed)).filter(|bytes| *bytes > 0)
}

/// Why a launch failed, in the library's words.
#[derive(Debug)]
pub(super) struct Failure(pub(super) String);

impl Failure {
    fn is_of_memory(&self) -> bool {
        ["CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED"].iter().any(|name| self.0.contains(name))
    }
}

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Self {
        Self(format!("{error:?}"))
    }
}

/// A device's context, and what is loaded into it: to the end of the process.
pub(super) struct Loaded {
    pub(super) context: CUcontext,
    is_turing: bool,
    /// By file, and whether they are for `f16`.
    modules: HashMap<(&'static str, bool), CUmodule>,
    /// With the dynamic shared memory that each may use; those for `f16` are the second.
    functions: [HashMap<String, (CUfunction, usize)>; 2],
    /// By stream: launches in one do not run at a time.
    counters: HashMap<usize, CUdeviceptr>,
}

thread_local! {
    /// By device. Each has one thread that launches.
    static LOADED: RefCell<HashMap<u16, Loaded>> = RefCell::default();
}

impl Loaded {
    fn on(device: u16) -> Result<Self, DriverError> {
        let is_turing = major(device) < 8;
        let device = result::device::get(i32::from(device))?;
        // SAFETY: `device` comes from cuDeviceGet. burn holds the primary context as well.
        let context = unsafe { result::primary_ctx::retain(device) }?;
        let (modules, functions, counters) = Default::default();
        Ok(Self { context, is_turing, modules, functions, counters })
    }

    fn counters(&mut self, stream: CUstream) -> Result<CUdeviceptr, DriverError> {
        const BYTES: usize = 2 * size_of::<u32>();

        Ok(match self.counters.entry(stream as usize) {
            Entry::Occupied(entry) => *entry.get(),
            // SAFETY: the context is current, and nothing uses the memory yet.
            Entry::Vacant(entry) => *entry.insert(unsafe {
                let counters = result::malloc_sync(BYTES)?;
                result::memset_d8_async(counters, 0, BYTES, stream)?;
                counters
            }),
        })
    }

    /// A kernel for numbers of 16 bits of this type, which may use `shared_bytes` of dynamic shared memory.
    pub(super) fn function(
        &mut self,
        module: &'static str,
        is_f16: bool,
        name: &str,
        shared_bytes: usize,
    ) -> Result<CUfunction, DriverError> {
        let of_type = usize::from(is_f16);
        if let Some(&(function, allowed)) = self.functions[of_type].get(name)
            && shared_bytes <= allowed
        {
            return Ok(function);
        }
        let handle = match self.modules.entry((module, is_f16)) {
            Entry::Occupied(entry) => *entry.get(),
            Entry::Vacant(entry) => {
                let ptx =
                    ptx::text(module, is_f16, self.is_turing).ok_or(DriverError(CUresult::CUDA_ERROR_NOT_FOUND))?;
                // SAFETY: the text ends with a zero and outlives the call; the context is current.
                *entry.insert(unsafe { result::module::load_data(ptx.as_ptr().cast()) }?)
            }
        };
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let text = CString::new(name).map_err(|_| DriverError(CUresult::CUDA_ERROR_INVALID_VALUE))?;
        // SAFETY: the module is loaded, and never unloaded.
        let function = unsafe {
            let function = result::module::get_function(handle, text)?;
            result::function::set_function_attribute(function, attribute, u32(shared_bytes)?.cast_signed())?;
            function
        };
        self.functions[of_type].insert(name.to_owned(), (function, shared_bytes));
        Ok(function)
    }
}

/// A size as the driver takes it.
fn u32(size: usize) -> Result<u32, DriverError> {
    u32::try_from(size).map_err(|_| DriverError(CUresult::CUDA_ERROR_INVALID_VALUE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_integer_that_its_argument_cannot_hold_fails_the_launch() {
        let launch = |value| Launch::new("twice", "twice", [1; 3], 32).ints([1, value, 2]);
        assert_eq!(launch((1 << 31) - 1).beyond_int, None);
        assert_eq!(launch(1 << 31).beyond_int, Some(1 << 31));
    }
}
