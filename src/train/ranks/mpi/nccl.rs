//! Gradients between GPUs by NCCL. MPI has brought the ranks together before, and its deadlines hold here too.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::super::Ranks as _;
use super::{Mpi, end, host, pause};
use crate::device::{NCCL_VARIABLE, nccl_library};
use crate::ops::cuda::{Nccl, WrittenNumbers};

static CONNECTED: OnceLock<Connected> = OnceLock::new();

/// Sums under way between the GPUs of all ranks, and a thread that makes all calls for them, one after the other: what does not block
/// has to be asked about until it is done.
pub(super) struct Connected {
    nccl: &'static Nccl,
    begun: Mutex<Vec<Tensor<1>>>,
    /// What the thread sums next, and how long that may take.
    next: Mutex<Sender<(Receiver<WrittenNumbers>, Duration)>>,
    /// One for each sum that is there.
    done: Mutex<Receiver<()>>,
}

/// What a rank has to sum gradients with.
#[derive(Serialize, Deserialize)]
struct Offer {
    version: String,
    /// Its machine, and the place of its GPU there.
    gpu: (String, String),
    /// Of the first rank, by which the others find it.
    id: Vec<u8>,
}

impl Mpi {
    /// Connects the GPUs of all ranks, of which this has that number, and returns the name of what does; or says why they cannot be:
    /// the same on all ranks.
    pub(super) fn connect(&mut self, ordinal: u32) -> Result<String, String> {
        // What came before was no step.
        self.wait_long();
        let library = nccl_library();
        let own = library.as_ref().map_err(Clone::clone).and_then(|library| {
            let machine = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_else(|_| host());
            let id = if self.rank == 0 { Nccl::id(library)? } else { Vec::new() };
            Ok(Offer { version: library.version.clone(), gpu: (machine, Nccl::bus_id(ordinal)?), id })
        });
        let all = self.gather_bytes(&serde_json::to_vec(&own).unwrap_or_default());
        let offers =
            all.iter().map(|offer| serde_json::from_slice(offer).unwrap_or_else(|error| Err(error.to_string())));
        let Offer { version, id, .. } = agreed(offers.collect())?;
        let nccl = library.and_then(|library| Nccl::start(&library, &id, ordinal, self.rank, self.size));
        // It lives as long as the process: NCCL's threads may use it.
        let nccl = nccl.map(|nccl| &*Box::leak(nccl));
        let connected = nccl.clone().and_then(|nccl| wait_for("connect", self.deadline(), || nccl.is_ready()));
        self.wait_long();
        if self.agree(connected.is_err()) {
            nccl.into_iter().for_each(give_up);
            return Err(connected.err().unwrap_or_else(|| "NCCL does not connect another rank".to_owned()));
        }
        if let Ok(nccl) = nccl {
            CONNECTED.get_or_init(|| Connected::start(nccl));
        }
        Ok(format!("NCCL {version}"))
    }

    /// The sums of gradients over all ranks, after those that were begun before; `figures` are summed through MPI.
    pub(super) fn sum_by(
        &mut self,
        connected: &Connected,
        gradients: Tensor<1>,
        figures: &mut [f64],
    ) -> Vec<Tensor<1>> {
        // First: who waits for a rank that does not come names it.
        self.sum(&mut [], figures);
        let start = Instant::now();
        connected.begin(gradients, self.limit());
        let sums = connected.take();
        self.waited += start.elapsed();
        self.last = Some(Instant::now());
        sums
    }
}

impl Connected {
    fn start(nccl: &'static Nccl) -> Self {
        let ((next, queue), (is_done, done)) = (channel(), channel());
        std::thread::spawn(move || sum(nccl, &queue, &is_done));
        Self { nccl, begun: Mutex::default(), next: Mutex::new(next), done: Mutex::new(done) }
    }

    /// Begins to sum these, in the order of calls, which is the same on all ranks; `limit`: how long another rank may take.
    pub(super) fn begin(&self, numbers: Tensor<1>, limit: Duration) {
        let (sums, written) = WrittenNumbers::queue(numbers);
        lock(&self.begun).push(sums);
        // The last sum's wait, which can name the rank that does not come, ends before this one. The thread has ended where a GPU failed.
        let _ = lock(&self.next).send((written, 2 * limit));
    }

    /// The sums of all that were begun, once they are there, or a GPU has failed: who reads them hears of that.
    fn take(&self) -> Vec<Tensor<1>> {
        let (sums, done) = (std::mem::take(&mut *lock(&self.begun)), lock(&self.done));
        let _ = sums.iter().try_for_each(|_| done.recv());
        sums
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sums what comes; to the end of the process, or until a GPU fails.
fn sum(nccl: &'static Nccl, queue: &Receiver<(Receiver<WrittenNumbers>, Duration)>, is_done: &Sender<()>) {
    for (written, limit) in queue {
        let Ok(written) = written.recv() else { return };
        let done = match nccl.sum(written) {
            Ok(Some(mut sum)) => wait_for("sum the gradients", limit, || sum.is_done()),
            Ok(None) => return,
            Err(reason) => Err(failed(&reason)),
        };
        if let Err(reason) = done {
            end(&format!("{reason}; {NCCL_VARIABLE}=none takes MPI instead"));
        }
        // Nobody waits where the process ends.
        let _ = is_done.send(());
    }
}

/// Waits for what NCCL does, and says why it is not done.
fn wait_for(what: &str, limit: Duration, mut is_done: impl FnMut() -> Result<bool, String>) -> Result<(), String> {
    let start = Instant::now();
    loop {
        let waited = start.elapsed();
        match is_done() {
            Ok(true) => return Ok(()),
            Ok(false) if waited <= limit => pause(waited),
            Ok(false) => return Err(failed(&format!("it does not {what} for {} s", waited.as_secs()))),
            Err(reason) => return Err(failed(&reason)),
        }
    }
}

fn failed(reason: &str) -> String {
    format!("NCCL, between the GPUs: {reason}\n  hint: NCCL_DEBUG=WARN says more")
}

/// What sums gradients, where the GPUs of all ranks are connected.
pub(super) fn connected() -> Option<&'static Connected> {
    CONNECTED.get()
}

/// Gives up what NCCL has under way, within the second that it gets.
pub(super) fn abort() {
    connected().into_iter().for_each(|connected| give_up(connected.nccl));
}

fn give_up(nccl: &'static Nccl) {
    let (done, is_done) = channel();
    std::thread::spawn(move || {
        nccl.abort();
        done.send(())
    });
    let _ = is_done.recv_timeout(Duration::from_secs(1));
}

/// What the first rank offers, where all can do it; else the first reason against it.
fn agreed(offers: Vec<Result<Offer, String>>) -> Result<Offer, String> {
    let mut all: Vec<Offer> = Vec::new();
    for (rank, offer) in offers.into_iter().enumerate() {
        let offer = offer.map_err(|reason| format!("{reason} (rank {rank})"))?;
        if let Some(first) = all.first().filter(|first| first.version != offer.version) {
            return Err(format!("rank 0 has NCCL {}, and rank {rank} has {}", first.version, offer.version));
        }
        if let Some(other) = all.iter().position(|other| other.gpu == offer.gpu) {
            return Err(format!("ranks {other} and {rank} have the same GPU, which NCCL does not take"));
        }
        all.push(offer);
    }
    Ok(all.swap_remove(0))
}
