//! Gradients between GPUs by NCCL. MPI has brought the ranks together before, and its deadlines hold here too.

use std::sync::OnceLock;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::super::Ranks as _;
use super::{Mpi, end, host, pause};
use crate::device::{NCCL_VARIABLE, nccl_library};
use crate::ops::cuda::Nccl;

static NCCL: OnceLock<&Nccl> = OnceLock::new();

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
        let nccl = nccl.map(|nccl| &*Box::leak(Box::new(nccl)));
        let connected = nccl.clone().and_then(|nccl| self.wait_for("connect", Instant::now(), || nccl.is_ready()));
        self.wait_long();
        if self.agree(connected.is_err()) {
            nccl.into_iter().for_each(give_up);
            return Err(connected.err().unwrap_or_else(|| "NCCL does not connect another rank".to_owned()));
        }
        if let Ok(nccl) = nccl {
            NCCL.get_or_init(|| nccl);
        }
        Ok(format!("NCCL {version}"))
    }

    /// The sums of gradients over all ranks, whose GPUs are connected; `figures` are summed through MPI.
    pub(super) fn sum_by(&mut self, nccl: &'static Nccl, gradients: Tensor<1>, figures: &mut [f64]) -> Tensor<1> {
        // First: who waits for a rank that does not come says so, and no GPU waits for it.
        self.sum(&mut [], figures);
        let start = Instant::now();
        let (sums, mut sum) = nccl.sum(gradients);
        if let Err(reason) = self.wait_for("sum the gradients", start, || sum.is_done()) {
            end(&format!("{reason}; {NCCL_VARIABLE}=none takes MPI instead"));
        }
        self.last = Some(Instant::now());
        sums
    }

    /// Waits as long as a sum may take, and says why it is not done.
    fn wait_for(
        &mut self,
        what: &str,
        start: Instant,
        mut is_done: impl FnMut() -> Result<bool, String>,
    ) -> Result<(), String> {
        let deadline = self.deadline();
        let reason = loop {
            let waited = start.elapsed();
            match is_done() {
                Ok(true) => {
                    self.waited += waited;
                    return Ok(());
                }
                Ok(false) if waited <= deadline => pause(waited),
                Ok(false) => break format!("it does not {what} for {} s", waited.as_secs()),
                Err(reason) => break reason,
            }
        };
        Err(format!("NCCL, between the GPUs: {reason}\n  hint: NCCL_DEBUG=WARN says more"))
    }
}

/// What sums gradients, where the GPUs of all ranks are connected.
pub(super) fn connected() -> Option<&'static Nccl> {
    NCCL.get().copied()
}

/// Gives up what NCCL has under way, within the second that it gets.
pub(super) fn abort() {
    connected().into_iter().for_each(give_up);
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
