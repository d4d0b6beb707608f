//! Ranks that an MPI launcher started.
//!
//! No call blocks: sums are asked about until they are complete or a deadline is over. Cut links and dead ranks would
//! otherwise hang the others for ever, and so would a panic that unwinds into `MPI_Finalize`. A sum moves on only while it is asked
//! about: those that go on beside the backward have a thread that asks.

#[expect(unsafe_code, reason = "MPI is a C library")]
mod abi;
mod beside;
#[cfg(feature = "cuda-llvm")]
mod nccl;

use std::io::Write as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use burn::tensor::Tensor;

use super::launcher::{Family, HYDRA, Launched};
use super::{FIRST_REPORTS, Ranks, RanksError};
use crate::device::num_cpu_threads;
use crate::ops::host as tensors;
use crate::util::faults;
use abi::{Library, Number, Request};
use beside::SumsUnderWay;

/// Before the first step, weights are read and rows tokenised.
const LONG_WAIT: Duration = Duration::from_mins(30);
/// Seconds instead of [`LONG_WAIT`].
const LONG_WAIT_SECONDS: &str = "LORA_TRAIN_LONG_WAIT_SECONDS";
/// The shortest deadline.
const SHORT_WAIT: Duration = Duration::from_mins(1);
/// The deadline is so many of the longest step.
const STEPS_WAIT: u32 = 10;
/// A rank other than 0 waits longer, so that one alone reports.
const AFTER_THE_FIRST: Duration = Duration::from_secs(2);
/// Longest pause between two questions whether a sum is complete, which also move it on.
const PAUSE: Duration = Duration::from_millis(1);
/// A pause is this part of the time waited so far: it makes no sum much longer.
const PAUSES: u32 = 20;
/// Before that, there is no pause.
const BUSY: Duration = Duration::from_millis(1);
/// Absent ranks that a message names.
const NAMED: usize = 4;
/// MPICH's launcher drops messages that it has not read when a rank ends all.
const TO_BE_READ: Duration = Duration::from_millis(200);
/// `MPI_Abort` waits for what may not answer any more.
const ABORT_LIMIT: Duration = Duration::from_secs(3);

/// Open MPI's choice for a non-blocking sum leaves a third of a link unused; a ring uses all of it, and adds in the same order
/// every time.
const RING: &str = "OMPI_MCA_coll_libnbc_iallreduce_algorithm";
/// NCCL may not leave sums to switches (NVLS), which add in another order every time.
const NCCL_ALGORITHMS: (&str, &str) = ("NCCL_ALGO", "Ring,Tree");
/// Threads of the kernels.
const THREADS: &str = "RAYON_NUM_THREADS";

static STARTED: OnceLock<Started> = OnceLock::new();

/// The library in use, and the name of this rank.
struct Started {
    library: Library,
    name: String,
    rank: usize,
    /// All ranks end in the same way.
    is_agreed: AtomicBool,
}

/// The ranks of an MPI launcher.
pub struct Mpi {
    library: &'static Library,
    rank: usize,
    size: usize,
    /// Longest time from one sum to the next.
    longest: Duration,
    /// End of the last sum.
    last: Option<Instant>,
    waits_long: bool,
    long_wait: Duration,
    waited: Duration,
    /// Sums that go on while this rank computes; absent where its library takes calls of one thread only.
    beside: Option<&'static SumsUnderWay>,
    /// Where rank 0 hears that each of the others has come to a sum, to name those that have not.
    arrivals: Vec<f64>,
    hosts: Vec<String>,
}

impl std::fmt::Debug for Mpi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {} by {}", self.rank, self.size, self.library.name)
    }
}

impl Mpi {
    /// Opens the launcher's library and connects to the other ranks.
    ///
    /// # Errors
    /// No library, another library than the launcher's, or one that does not start.
    pub fn start(launched: &Launched) -> Result<Self, RanksError> {
        system::end_with_parent();
        let named = std::env::var("LORA_TRAIN_MPI").ok().filter(|name| !name.is_empty());
        let long_wait = match std::env::var(LONG_WAIT_SECONDS).ok().map(|seconds| (seconds.parse(), seconds)) {
            None => LONG_WAIT,
            Some((Ok(seconds), _)) => Duration::from_secs(seconds),
            Some((Err(_), text)) => {
                return Err(RanksError::Launcher(format!("{LONG_WAIT_SECONDS}={text}: expected a number of seconds")));
            }
        };
        let library = Library::open(launched, named.as_deref())?;
        if launched.family == Family::OpenMpi {
            system::set_default(RING, "1");
        }
        system::set_default(NCCL_ALGORITHMS.0, NCCL_ALGORITHMS.1);
        // Without binding, every rank of a node would take all of its processors.
        let threads = num_cpu_threads();
        if threads * launched.local_size > num_processors() {
            system::set_default(THREADS, &(threads / launched.local_size).max(1).to_string());
        }
        let Launched { launcher, size: started, .. } = *launched;
        let version = library.version();
        if launcher == HYDRA && version.starts_with("Open MPI") {
            // Its processes would each make the same folders, and stop where another is first.
            return Err(RanksError::OtherSize { launcher, started, library: version, seen: 1 });
        }
        let (rank, size, takes_threads) = library.start()?;
        if size != started {
            // The library connected nobody: there is nobody to wait for.
            library.finish();
            return Err(RanksError::OtherSize { launcher, started, library: version, seen: size });
        }
        let name = format!("rank {rank} of {size} on {}", system::host());
        let Started { library, .. } =
            STARTED.get_or_init(|| Started { library, name, rank, is_agreed: AtomicBool::new(false) });
        Ok(Self {
            library,
            rank,
            size,
            longest: Duration::ZERO,
            last: None,
            waits_long: true,
            long_wait,
            waited: Duration::ZERO,
            beside: takes_threads.then(|| SumsUnderWay::start(library)),
            arrivals: vec![0.0; size],
            hosts: Vec::new(),
        })
    }

    /// Name and version of the library.
    #[must_use]
    pub fn version(&self) -> String {
        self.library.version()
    }

    /// How long a sum may take that begins now.
    fn limit(&self) -> Duration {
        let wait = if self.waits_long { self.long_wait } else { SHORT_WAIT.max(STEPS_WAIT * self.longest) };
        if self.rank == 0 { wait } else { wait + AFTER_THE_FIRST }
    }

    /// [`limit`](Self::limit) of the sum that the ranks reach far apart, if they do.
    fn deadline(&mut self) -> Duration {
        let limit = self.limit();
        self.waits_long = false;
        limit
    }

    /// Sends word to rank 0 that this rank has come to a sum; there, one request for each of the others.
    fn announce(&mut self) -> Result<Vec<(usize, Request)>, RanksError> {
        let library = self.library;
        let numbers = self.arrivals.iter_mut().enumerate();
        if self.rank == 0 {
            let receive = |(rank, number)| Ok((rank, system::begin_message(library, number, Some(rank))?));
            numbers.skip(1).map(receive).collect()
        } else {
            let send = |(rank, number)| Ok((rank, system::begin_message(library, number, None)?));
            numbers.skip(self.rank).take(1).map(send).collect()
        }
    }

    /// Sums these and those that were begun before.
    fn sum_with(&mut self, begun: Vec<Request>, gradients: &mut [f32], figures: &mut [f64]) {
        if let Some(last) = self.last.filter(|_| !self.waits_long) {
            self.longest = self.longest.max(last.elapsed());
        }
        let numbers = [
            (gradients.as_mut_ptr().cast(), gradients.len(), Number::F32),
            (figures.as_mut_ptr().cast(), figures.len(), Number::F64),
        ];
        let numbers = numbers.into_iter().filter(|(_, count, _)| *count > 0);
        let library = self.library;
        let sums = numbers.map(|(numbers, count, of)| system::begin_sum(library, numbers, count, of));
        let sums = begun.into_iter().map(Ok).chain(sums).map(|sum| Ok((0, sum?)));
        let done = sums.collect::<Result<Vec<_>, _>>().and_then(|sums| {
            let others = self.announce()?;
            self.wait(sums, others)
        });
        if let Err(error) = done {
            end(&error.to_string());
        }
        self.last = Some(Instant::now());
    }

    /// Waits until all sums are complete, and all arrivals known.
    fn wait(&mut self, mut sums: Vec<(usize, Request)>, mut others: Vec<(usize, Request)>) -> Result<(), RanksError> {
        let (start, deadline) = (Instant::now(), self.deadline());
        loop {
            sums = self.open(sums)?;
            others = self.open(others)?;
            let waited = start.elapsed();
            if sums.is_empty() && others.is_empty() {
                self.waited += waited;
                return Ok(());
            }
            if waited > deadline {
                end(&self.silence(waited, &others));
            }
            pause(waited);
        }
    }

    /// Those that are not complete.
    fn open(&self, requests: Vec<(usize, Request)>) -> Result<Vec<(usize, Request)>, RanksError> {
        let mut open = Vec::new();
        for (rank, mut request) in requests {
            if !self.library.is_done(&mut request)? {
                open.push((rank, request));
            }
        }
        Ok(open)
    }

    /// What to report after waiting in vain; `absent`: the ranks that have not come, where this is rank 0.
    fn silence(&self, waited: Duration, absent: &[(usize, Request)]) -> String {
        let seconds = waited.as_secs();
        let name = |(rank, _): &(usize, Request)| match self.hosts.get(*rank) {
            Some(host) => format!("rank {rank} on {host}"),
            None => format!("rank {rank}"),
        };
        let names = absent.iter().take(NAMED).map(name).collect::<Vec<_>>().join(", ");
        match absent.len() {
            _ if self.rank > 0 => format!("no answer from another rank for {seconds} s"),
            0 => format!("no sum for {seconds} s, though all ranks have come to it: the network between them fails"),
            1..=NAMED => format!("no answer from {names} for {seconds} s: it hangs, or the network to it is cut"),
            more => format!("no answer from {names} and {} more for {seconds} s", more - NAMED),
        }
    }
}

impl Ranks for Mpi {
    fn size(&self) -> usize {
        self.size
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn sum(&mut self, gradients: &mut [f32], figures: &mut [f64]) {
        self.sum_with(Vec::new(), gradients, figures);
    }

    fn sum_beside(&self, is_host: bool) -> bool {
        #[cfg(feature = "cuda-llvm")]
        if nccl::connected().is_some() {
            return true;
        }
        is_host && self.beside.is_some()
    }

    fn begin(&self, gradients: Tensor<1>) {
        #[cfg(feature = "cuda-llvm")]
        if let Some(connected) = nccl::connected() {
            return connected.begin(gradients, self.limit());
        }
        if let Some(beside) = self.beside {
            beside.begin(faults::read(gradients, "a gradient"));
        }
    }

    fn sum_all(&mut self, gradients: Tensor<1>, figures: &mut [f64]) -> Vec<Tensor<1>> {
        #[cfg(feature = "cuda-llvm")]
        if let Some(connected) = nccl::connected() {
            return self.sum_by(connected, gradients, figures);
        }
        let device = gradients.device();
        let mut rest = faults::read(gradients, "a gradient");
        let begun = self.beside.map(SumsUnderWay::take).unwrap_or_default();
        self.sum_with(begun.iter().map(|begun| begun.sum).collect(), &mut rest, figures);
        let all = begun.into_iter().map(|begun| begun.numbers).chain([rest]);
        all.map(|sums| (sums.len(), sums)).map(|(count, sums)| tensors::tensor(sums, [count], &device)).collect()
    }

    #[cfg(feature = "cuda-llvm")]
    fn connect_gpus(&mut self, ordinal: u32) -> Result<String, String> {
        self.connect(ordinal)
    }

    fn name_hosts(&mut self, hosts: &[String]) {
        hosts.clone_into(&mut self.hosts);
    }

    fn wait_long(&mut self) {
        self.waits_long = true;
    }

    fn end_together(&mut self) {
        if let Some(started) = STARTED.get() {
            started.is_agreed.store(true, Ordering::Relaxed);
        }
    }

    fn take_seconds(&mut self) -> f64 {
        std::mem::take(&mut self.waited).as_secs_f64()
    }
}

/// Between two questions whether something is complete.
fn pause(waited: Duration) {
    if waited < BUSY {
        std::thread::yield_now();
    } else {
        std::thread::sleep((waited / PAUSES).min(PAUSE));
    }
}

/// Processors of this machine, whichever of them this process may use.
fn num_processors() -> usize {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let count = text.lines().filter(|line| line.starts_with("processor")).count();
    if count > 0 { count } else { usize::MAX }
}

/// The name of this rank with its host, where there are several, once it may report an error. What all find wrong, the first
/// alone reports: it ends the others meanwhile.
#[must_use]
pub fn reporter() -> Option<&'static str> {
    let Started { name, rank, is_agreed, .. } = STARTED.get()?;
    if *rank > 0 && !is_agreed.load(Ordering::Relaxed) {
        std::thread::sleep(FIRST_REPORTS);
    }
    Some(name)
}

/// The MPI libraries that can be opened here.
#[must_use]
pub fn mpi_libraries() -> Vec<&'static str> {
    let all = [Family::OpenMpi, Family::Mpich].into_iter().flat_map(abi::names);
    all.copied().filter(|name| abi::load(name).is_ok()).collect()
}

/// Name of this node.
#[must_use]
pub fn host() -> String {
    system::host()
}

/// Leaves the ranks at the end of the process. Where they end together it waits for the others, else it ends them.
pub fn leave(code: u8) {
    let Some(Started { library, is_agreed, .. }) = STARTED.get() else { return };
    if code == 0 || is_agreed.load(Ordering::Relaxed) {
        std::thread::spawn(move || {
            std::thread::sleep(LONG_WAIT);
            system::exit_now(code);
        });
        library.finish();
    } else {
        abort(library, code);
    }
}

/// Ends all ranks from within a sum.
fn end(message: &str) -> ! {
    let Some(Started { library, name, .. }) = STARTED.get() else { std::process::exit(1) };
    // One write, since lines of several ranks may mix.
    drop(std::io::stderr().write_all(format!("error: {name}: {message}\n").as_bytes()));
    abort(library, 1)
}

fn abort(library: &'static Library, code: u8) -> ! {
    std::thread::spawn(move || {
        std::thread::sleep(ABORT_LIMIT);
        system::exit_now(code);
    });
    #[cfg(feature = "cuda-llvm")]
    nccl::abort();
    std::thread::sleep(TO_BE_READ);
    library.abort(code);
    system::exit_now(code)
}

#[expect(unsafe_code, reason = "system calls")]
mod system {
    use std::ffi::{c_int, c_void};

    use super::{Library, Number, RanksError, Request};

    /// Begins a sum that the caller waits for before it uses the numbers again.
    pub(super) fn begin_sum(
        library: &Library,
        numbers: *mut c_void,
        count: usize,
        of: Number,
    ) -> Result<Request, RanksError> {
        // SAFETY: `Mpi::sum_with` has borrowed the numbers mutably, or `SumsUnderWay` holds them, until the sum is complete; where that fails,
        // the process ends.
        unsafe { library.begin_sum(numbers, count, of) }
    }

    /// Begins a message that the caller waits for before it uses the number again.
    pub(super) fn begin_message(
        library: &Library,
        number: &mut f64,
        from: Option<usize>,
    ) -> Result<Request, RanksError> {
        // SAFETY: the number is a field of `Mpi`, which waits for the message in the same call.
        unsafe { library.begin_message(number, from) }
    }

    /// The process ends when the launcher on its node does, and does not hold a GPU alone.
    pub(super) fn end_with_parent() {
        #[cfg(target_os = "linux")]
        // SAFETY: changes a setting of this process.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL)
        };
    }

    /// Sets a variable of the environment that has no value yet.
    pub(super) fn set_default(name: &str, value: &str) {
        if std::env::var_os(name).is_none() {
            // SAFETY: ranks are connected before any other thread is started.
            unsafe { std::env::set_var(name, value) };
        }
    }

    /// Name of this node.
    pub(super) fn host() -> String {
        let mut name = [0_u8; 256];
        // SAFETY: the buffer outlives the call, and keeps a null byte at its end.
        unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(0);
        String::from_utf8_lossy(&name[..end]).into_owned()
    }

    /// Ends the process without any clean-up, which could wait for other ranks.
    pub(super) fn exit_now(code: u8) -> ! {
        // SAFETY: does not return.
        unsafe { libc::_exit(c_int::from(code)) }
    }
}
