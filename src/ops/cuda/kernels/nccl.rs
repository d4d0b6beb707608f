//! Sums over the GPUs of several processes by NCCL, on a stream of their own beside burn's.
//!
//! No call of it blocks: a communicator says at once that it is at work, and is asked until it is done. cudarc's bindings do not know
//! the name under which pip installs the library.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt::{self, Debug, Formatter};
use std::mem::transmute;
use std::ptr::{null, null_mut};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, PoisonError};

use burn::tensor::Tensor;
use cubecl_runtime::server::BufferBinding;
use cudarc::driver::sys::{
    CUcontext, CUevent, CUevent_flags, CUevent_wait_flags, CUresult, CUstream, cuDeviceGetPCIBusId, cuEventQuery,
};
use cudarc::driver::{DriverError, result};

use super::stream::submit;
use crate::device::NcclLibrary;
use crate::ops::custom::{Output, change};

type Comm = *mut c_void;
/// `ncclResult_t`.
type Code = c_int;
type GetUniqueId = unsafe extern "C" fn(*mut UniqueId) -> Code;
type CommInitRankConfig = unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> Code;
type CommGetAsyncError = unsafe extern "C" fn(Comm, *mut Code) -> Code;
type AllReduce = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, CUstream) -> Code;
type CommAbort = unsafe extern "C" fn(Comm) -> Code;
type GetErrorString = unsafe extern "C" fn(Code) -> *const c_char;
type GetLastError = unsafe extern "C" fn(Comm) -> *const c_char;

const SUCCESS: Code = 0;
const IN_PROGRESS: Code = 7;
const FLOAT: c_int = 7;
const SUM: c_int = 0;
const ID_BYTES: usize = 128;

#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; ID_BYTES]);

/// `ncclConfig_t` of NCCL 2.17, whose size later ones read from it.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    /// Three settings that are left to NCCL.
    clusters: [c_int; 3],
    net_name: *const c_char,
    /// Two more; of the second, older ones know nothing.
    splits: [c_int; 2],
}

/// This process among those whose GPUs sum together. It stays connected to the end of the process.
pub struct Nccl {
    comm: Comm,
    context: CUcontext,
    stream: CUstream,
    /// Recorded behind a sum.
    event: CUevent,
    all_reduce: AllReduce,
    get_async_error: CommGetAsyncError,
    abort: CommAbort,
    get_error_string: GetErrorString,
    get_last_error: GetLastError,
}

// SAFETY: a communicator, a stream and an event are of no thread. One thread at a time sums; `abort` ends the process.
unsafe impl Send for Nccl {}
// SAFETY: as above.
unsafe impl Sync for Nccl {}

impl Debug for Nccl {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL at {:?}", self.comm)
    }
}

impl Nccl {
    /// A new id, 128 bytes, by which processes find each other: the first makes it, and all start with it.
    ///
    /// # Errors
    /// What NCCL says.
    pub fn id(library: &NcclLibrary) -> Result<Vec<u8>, String> {
        let mut id = UniqueId([0; ID_BYTES]);
        // SAFETY: the declaration is that of `nccl.h`, and `id` outlives the call.
        let code = unsafe { transmute::<Comm, GetUniqueId>(library.symbol(c"ncclGetUniqueId")?)(&raw mut id) };
        if code == SUCCESS { Ok(id.0.into()) } else { Err(format!("ncclGetUniqueId failed with code {code}")) }
    }

    /// The bus and slot of a GPU on its machine, which slices of it share.
    ///
    /// # Errors
    /// What the driver says.
    pub fn bus_id(ordinal: u32) -> Result<String, String> {
        let mut text = [0_u8; 32];
        // SAFETY: the buffer outlives the call, and is as long as it says.
        let code = unsafe { cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), 32, ordinal.cast_signed()) };
        code.result().map_err(|error| format!("{error:?}"))?;
        let text = CStr::from_bytes_until_nul(&text).map(CStr::to_string_lossy);
        Ok(text.unwrap_or_default().into_owned())
    }

    /// Begins to connect process `rank` of `size`, whose GPU has this number, with the others by the [`id`](Self::id) of the first.
    ///
    /// # Errors
    /// What NCCL or the driver says.
    pub fn start(
        library: &NcclLibrary,
        id: &[u8],
        ordinal: u32,
        rank: usize,
        size: usize,
    ) -> Result<Box<Self>, String> {
        let said = |DriverError(code)| format!("{code:?}");
        let id = UniqueId(id.try_into().map_err(|_| "an id of another length".to_owned())?);
        let device = result::device::get(ordinal.cast_signed()).map_err(said)?;
        // SAFETY: `device` comes from cuDeviceGet. burn holds the primary context as well.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(said)?;
        // SAFETY: the context is retained.
        unsafe { result::ctx::set_current(context) }.map_err(said)?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(said)?;
        let event = result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(said)?;
        let number = |number: usize| c_int::try_from(number).unwrap_or(c_int::MAX);
        let mut config = Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21_700,
            blocking: 0,
            clusters: [c_int::MIN; 3],
            net_name: null(),
            splits: [c_int::MIN; 2],
        };
        // SAFETY: the declarations are those of `nccl.h`. The settings and `comm` outlive the call, which copies the former.
        unsafe {
            // NCCL 2.17 writes there once more while it connects.
            let mut nccl = Box::new(Self {
                comm: null_mut(),
                context,
                stream,
                event,
                all_reduce: transmute::<Comm, AllReduce>(library.symbol(c"ncclAllReduce")?),
                get_async_error: transmute::<Comm, CommGetAsyncError>(library.symbol(c"ncclCommGetAsyncError")?),
                abort: transmute::<Comm, CommAbort>(library.symbol(c"ncclCommAbort")?),
                get_error_string: transmute::<Comm, GetErrorString>(library.symbol(c"ncclGetErrorString")?),
                get_last_error: transmute::<Comm, GetLastError>(library.symbol(c"ncclGetLastError")?),
            });
            let init = transmute::<Comm, CommInitRankConfig>(library.symbol(c"ncclCommInitRankConfig")?);
            let code = init(&raw mut nccl.comm, number(size), id, number(rank), &raw mut config);
            nccl.is_done(code)?;
            Ok(nccl)
        }
    }

    /// Whether what was begun is done.
    ///
    /// # Errors
    /// What failed, here or on the way to another process.
    pub fn is_ready(&self) -> Result<bool, String> {
        let mut state = SUCCESS;
        // SAFETY: the communicator was begun, and `state` outlives the call.
        let code = unsafe { (self.get_async_error)(self.comm, &raw mut state) };
        Ok(self.is_done(code)? && self.is_done(state)?)
    }

    /// Begins to sum over all processes, in their place, numbers of which each has as many: the same sums in each. Nothing else may be
    /// under way. `None` where the device has failed: who reads the sums hears of that.
    ///
    /// # Errors
    /// What NCCL says.
    pub fn sum(&'static self, numbers: WrittenNumbers) -> Result<Option<Sum>, String> {
        let (at, wait) = (numbers.at as *mut c_void, CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT);
        // SAFETY: context, stream and events live.
        let waits = unsafe {
            result::ctx::set_current(self.context)
                .and_then(|()| result::stream::wait_event(self.stream, numbers.event, wait))
        };
        if waits.is_err() {
            return Ok(None);
        }
        // SAFETY: so many numbers lie there as long as `numbers` lives.
        let code = unsafe { (self.all_reduce)(at, at, numbers.count, FLOAT, SUM, self.comm, self.stream) };
        self.is_done(code)?;
        Ok(Some(Sum { nccl: self, _numbers: numbers, is_in_stream: false }))
    }

    /// Gives up what is under way, in order to end the process. It may wait.
    pub fn abort(&self) {
        // SAFETY: nothing else is asked of the communicator afterwards.
        unsafe { (self.abort)(self.comm) };
    }

    /// What a call's code says: whether it is done.
    fn is_done(&self, code: Code) -> Result<bool, String> {
        match code {
            SUCCESS => return Ok(true),
            IN_PROGRESS => return Ok(false),
            _ => {}
        }
        // SAFETY: both give texts that live as long as the library, or null.
        let texts = unsafe { [(self.get_error_string)(code), (self.get_last_error)(self.comm)] };
        // SAFETY: as above.
        let texts = texts.into_iter().filter(|text| !text.is_null()).map(|text| unsafe { CStr::from_ptr(text) });
        let texts: Vec<_> = texts.map(CStr::to_string_lossy).filter(|text| !text.trim().is_empty()).collect();
        Err(texts.join(": ").trim().replace('\n', " "))
    }
}

/// Numbers that burn's stream has come to.
#[derive(Debug)]
pub struct WrittenNumbers {
    at: u64,
    count: usize,
    /// Recorded behind what writes them.
    event: CUevent,
    /// Burn's pools neither move nor reuse memory that is bound.
    _place: BufferBinding,
}

// SAFETY: an event is of no thread.
unsafe impl Send for WrittenNumbers {}

impl WrittenNumbers {
    /// The same numbers, `[n]` in `f32`, that are summed in their place; and where they are, once burn's stream has come to them. They do
    /// not come where the device failed before: who reads them hears of that.
    ///
    /// # Panics
    /// If the tensor is not on a GPU.
    #[must_use]
    pub fn queue(numbers: Tensor<1>) -> (Tensor<1>, Receiver<Self>) {
        let (device, count) = (numbers.device(), numbers.dims()[0]);
        let (sender, written) = channel();
        let sender = Mutex::new(Some(sender));
        let [numbers] = change("nccl", Output::Changed, [numbers.into_dispatch()], [], move |[numbers], []| {
            let Some(sender) = sender.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
            let (all, place) = ([numbers.clone()], numbers.handle.clone().binding());
            submit(&all, &all, move |_, pointers, stream| {
                let event = result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
                let written = Self { at: pointers[0], count, event, _place: place.clone() };
                // SAFETY: the stream is burn's, in its context.
                unsafe { result::event::record(event, stream) }?;
                // Nobody waits where the process ends.
                drop(sender.send(written));
                Ok(())
            });
        });
        // What fails here fails again where the sums are read.
        drop(device.flush());
        (Tensor::from_dispatch(numbers), written)
    }
}

impl Drop for WrittenNumbers {
    fn drop(&mut self) {
        // SAFETY: nothing waits for the event any more. What fails here has failed before.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}

/// A sum under way.
#[derive(Debug)]
pub struct Sum {
    nccl: &'static Nccl,
    _numbers: WrittenNumbers,
    /// NCCL has put it into its stream, and the event is behind it.
    is_in_stream: bool,
}

impl Sum {
    /// Whether the sums are there, or will not come because the device failed: who reads them hears of that.
    ///
    /// # Errors
    /// What failed, here or on the way to another process.
    pub fn is_done(&mut self) -> Result<bool, String> {
        let Nccl { stream, event, .. } = *self.nccl;
        if !self.nccl.is_ready()? {
            return Ok(false);
        }
        if !self.is_in_stream {
            // SAFETY: both live as long as the process.
            if unsafe { result::event::record(event, stream) }.is_err() {
                return Ok(true);
            }
            self.is_in_stream = true;
        }
        // SAFETY: the event is never destroyed.
        Ok(unsafe { cuEventQuery(event) } != CUresult::CUDA_ERROR_NOT_READY)
    }
}
