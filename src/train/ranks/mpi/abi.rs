//! The functions of an MPI library, opened at run time: a machine without MPI runs the same program.
//!
//! Two binary interfaces cover what clusters have. In Open MPI's, handles are addresses of objects that the library exports; in
//! MPICH's they are numbers, which travel like addresses on x86-64 and ARM.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::{null_mut, without_provenance_mut};

use super::super::RanksError;
use super::super::launcher::{Family, Launched};

/// A communicator, data type, operation, or address of a constant.
type Handle = *mut c_void;

type InitThread = unsafe extern "C" fn(*mut c_int, *mut c_void, c_int, *mut c_int) -> c_int;
type CommNumber = unsafe extern "C" fn(Handle, *mut c_int) -> c_int;
type Iallreduce = unsafe extern "C" fn(*const c_void, *mut c_void, c_int, Handle, Handle, Handle, *mut c_void) -> c_int;
type Send = unsafe extern "C" fn(*const c_void, c_int, Handle, c_int, c_int, Handle, *mut c_void) -> c_int;
type Receive = unsafe extern "C" fn(*mut c_void, c_int, Handle, c_int, c_int, Handle, *mut c_void) -> c_int;
type Test = unsafe extern "C" fn(*mut c_void, *mut c_int, *mut c_void) -> c_int;
type Abort = unsafe extern "C" fn(Handle, c_int) -> c_int;
type Finalize = unsafe extern "C" fn() -> c_int;
type GetLibraryVersion = unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int;

/// `MPI_THREAD_SERIALIZED`: any thread makes calls, one at a time.
const SERIALIZED: c_int = 2;

/// A sum in progress. Holds the handle of either family: an address, or a number of four bytes.
pub(super) type Request = [usize; 2];

/// An opened library.
pub(super) struct Library {
    /// Its file, for people.
    pub(super) name: String,
    world: Handle,
    float: Handle,
    double: Handle,
    sum: Handle,
    in_place: Handle,
    status_ignore: Handle,
    init_thread: InitThread,
    comm_rank: CommNumber,
    comm_size: CommNumber,
    iallreduce: Iallreduce,
    isend: Send,
    irecv: Receive,
    test: Test,
    abort: Abort,
    finalize: Finalize,
    get_library_version: GetLibraryVersion,
}

// SAFETY: addresses of functions and constants of a library that is never closed. Functions are called by one thread at a time,
// except `abort`, which ends the process.
unsafe impl std::marker::Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// Numbers that are summed.
#[derive(Clone, Copy)]
pub(super) enum Number {
    F32,
    F64,
}

impl Library {
    /// Opens the launcher's library; `named` is what the user names instead.
    pub(super) fn open(launched: &Launched, named: Option<&str>) -> Result<Self, RanksError> {
        let hint = match launched.family {
            Family::OpenMpi => {
                "install Open MPI's library (Debian and Ubuntu: libopenmpi3), or name it by LORA_TRAIN_MPI=PATH"
            }
            Family::Mpich => {
                "install MPICH's library (Debian and Ubuntu: libmpich12), or name it by LORA_TRAIN_MPI=PATH"
            }
        };
        let mut reasons = Vec::new();
        for name in named.map_or_else(|| names(launched.family).to_vec(), |named| vec![named]) {
            match load(name) {
                Ok(library) => return Self::of(name.to_owned(), library),
                Err(reason) => reasons.push(reason),
            }
        }
        let Launched { launcher, size, .. } = *launched;
        Err(RanksError::NoLibrary { launcher, size, reason: reasons.join("; "), hint })
    }

    fn of(name: String, library: *mut c_void) -> Result<Self, RanksError> {
        let symbol = |symbol: &'static CStr| {
            // SAFETY: `library` is open, and the name ends in a null byte.
            let address = unsafe { libc::dlsym(library, symbol.as_ptr()) };
            let no_symbol = || RanksError::NoSymbol { library: name.clone(), symbol: symbol.to_str().unwrap_or("") };
            if address.is_null() { Err(no_symbol()) } else { Ok(address) }
        };
        let number = without_provenance_mut;
        let [world, float, double, sum, in_place, status_ignore] = match symbol(c"ompi_mpi_comm_world") {
            Ok(world) => [
                world,
                symbol(c"ompi_mpi_float")?,
                symbol(c"ompi_mpi_double")?,
                symbol(c"ompi_mpi_op_sum")?,
                number(1),
                null_mut(),
            ],
            Err(_) => [0x4400_0000, 0x4c00_040a, 0x4c00_080b, 0x5800_0003, usize::MAX, 1].map(number),
        };
        // SAFETY: these are the C declarations of the MPI standard, which every MPI library has.
        unsafe {
            Ok(Self {
                world,
                float,
                double,
                sum,
                in_place,
                status_ignore,
                init_thread: std::mem::transmute::<Handle, InitThread>(symbol(c"MPI_Init_thread")?),
                comm_rank: std::mem::transmute::<Handle, CommNumber>(symbol(c"MPI_Comm_rank")?),
                comm_size: std::mem::transmute::<Handle, CommNumber>(symbol(c"MPI_Comm_size")?),
                iallreduce: std::mem::transmute::<Handle, Iallreduce>(symbol(c"MPI_Iallreduce")?),
                isend: std::mem::transmute::<Handle, Send>(symbol(c"MPI_Isend")?),
                irecv: std::mem::transmute::<Handle, Receive>(symbol(c"MPI_Irecv")?),
                test: std::mem::transmute::<Handle, Test>(symbol(c"MPI_Test")?),
                abort: std::mem::transmute::<Handle, Abort>(symbol(c"MPI_Abort")?),
                finalize: std::mem::transmute::<Handle, Finalize>(symbol(c"MPI_Finalize")?),
                get_library_version: std::mem::transmute::<Handle, GetLibraryVersion>(symbol(
                    c"MPI_Get_library_version",
                )?),
                name,
            })
        }
    }

    /// Connects to the other ranks; returns the number of this one, how many there are, and whether several threads may make calls,
    /// one at a time.
    pub(super) fn start(&self) -> Result<(usize, usize, bool), RanksError> {
        let (mut level, mut rank, mut size) = (0, 0, 0);
        // SAFETY: called once, with addresses that outlive the calls; null stands for arguments that are not passed on.
        let codes = unsafe {
            let started = (self.init_thread)(null_mut(), null_mut(), SERIALIZED, &raw mut level);
            if started != 0 {
                return Err(RanksError::Call("MPI_Init_thread", started));
            }
            [(self.comm_rank)(self.world, &raw mut rank), (self.comm_size)(self.world, &raw mut size)]
        };
        if let Some(code) = codes.into_iter().find(|code| *code != 0) {
            return Err(RanksError::Call("MPI_Comm_size", code));
        }
        Ok((usize::try_from(rank).unwrap_or(0), usize::try_from(size).unwrap_or(1), level >= SERIALIZED))
    }

    /// Name and version, on one line.
    pub(super) fn version(&self) -> String {
        // MPI_MAX_LIBRARY_VERSION_STRING of the libraries is at most 8192.
        let (mut text, mut length) = (vec![0_u8; 8193], 0);
        // SAFETY: the buffer is as long as the longest text, and keeps a null byte at its end.
        unsafe { (self.get_library_version)(text.as_mut_ptr().cast(), &raw mut length) };
        let text = CStr::from_bytes_until_nul(&text).map(CStr::to_string_lossy).unwrap_or_default();
        // Open MPI's has a comma after the version, MPICH's a line for each fact.
        let line = text.split([',', '\n']).next().unwrap_or_default().replace("Version:", "");
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// Begins to sum `count` numbers over all ranks, in place.
    ///
    /// # Safety
    /// `numbers` points to `count` numbers that nothing else touches until [`is_done`](Self::is_done).
    pub(super) unsafe fn begin_sum(
        &self,
        numbers: *mut c_void,
        count: usize,
        of: Number,
    ) -> Result<Request, RanksError> {
        let of = match of {
            Number::F32 => self.float,
            Number::F64 => self.double,
        };
        let count = c_int::try_from(count).map_err(|_| RanksError::Launcher("more than 2^31 gradients".into()))?;
        let mut request = Request::default();
        // SAFETY: as the caller promises.
        let code = unsafe {
            let at = (&raw mut request).cast();
            (self.iallreduce)(self.in_place, numbers, count, of, self.sum, self.world, at)
        };
        if code == 0 { Ok(request) } else { Err(RanksError::Call("MPI_Iallreduce", code)) }
    }

    /// Begins to send a number to rank 0, or to receive one from another rank.
    ///
    /// # Safety
    /// `number` points to a number that nothing else touches until [`is_done`](Self::is_done).
    pub(super) unsafe fn begin_message(&self, number: *mut f64, from: Option<usize>) -> Result<Request, RanksError> {
        let mut request = Request::default();
        let (number, at) = (number.cast::<c_void>(), (&raw mut request).cast());
        // SAFETY: as the caller promises.
        let code = unsafe {
            match from.map(|rank| c_int::try_from(rank).unwrap_or(c_int::MAX)) {
                None => (self.isend)(number, 1, self.double, 0, 0, self.world, at),
                Some(rank) => (self.irecv)(number, 1, self.double, rank, 0, self.world, at),
            }
        };
        if code == 0 { Ok(request) } else { Err(RanksError::Call("MPI_Isend", code)) }
    }

    /// Whether a sum or a message is complete; moves all of them on.
    pub(super) fn is_done(&self, request: &mut Request) -> Result<bool, RanksError> {
        let mut flag = 0;
        // SAFETY: the request is one of this library's, or was complete and is the library's null request since.
        let code = unsafe { (self.test)((&raw mut *request).cast(), &raw mut flag, self.status_ignore) };
        if code == 0 { Ok(flag != 0) } else { Err(RanksError::Call("MPI_Test", code)) }
    }

    /// Ends all ranks, at most some seconds later; may not return.
    pub(super) fn abort(&self, code: u8) {
        // SAFETY: the library was started.
        unsafe { (self.abort)(self.world, c_int::from(code)) };
    }

    /// Ends the connection, which all ranks do.
    pub(super) fn finish(&self) {
        // SAFETY: the library was started, and no sum is in progress.
        unsafe { (self.finalize)() };
    }
}

/// Files of a family's libraries, without those that only development packages have.
pub(super) fn names(family: Family) -> &'static [&'static str] {
    match family {
        Family::OpenMpi => &["libmpi.so.40"],
        Family::Mpich => &["libmpi.so.12", "libmpich.so.12"],
    }
}

/// Opens a shared library, or says why not.
pub(super) fn load(name: &str) -> Result<*mut c_void, String> {
    let name = CString::new(name).map_err(|_| "a null byte in its name".to_owned())?;
    // SAFETY: the name ends in a null byte. The library's initialisers make no calls into this program. Open MPI's plug-ins
    // look for its symbols among the global ones.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if !library.is_null() {
        return Ok(library);
    }
    // SAFETY: after a failure it points to a text, which lives until the next call on this thread.
    let reason = unsafe { libc::dlerror() };
    if reason.is_null() {
        return Err("it cannot be loaded".to_owned());
    }
    // SAFETY: as above.
    Err(unsafe { CStr::from_ptr(reason) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launched(family: Family) -> Launched {
        Launched { launcher: "mpirun", family, rank: 0, size: 2, local_rank: 0, local_size: 2 }
    }

    #[test]
    fn a_library_that_is_not_there_or_is_another_is_refused_with_its_name() {
        for family in [Family::OpenMpi, Family::Mpich] {
            let error = Library::open(&launched(family), Some("libnone.so.9")).err().unwrap().to_string();
            assert!(error.contains("started 2 ranks") && error.contains("libnone.so.9"), "{error}");
            let error = Library::open(&launched(family), Some("libm.so.6")).err().unwrap().to_string();
            assert!(error.starts_with("libm.so.6: no MPI_Init_thread"), "{error}");
        }
    }
}
