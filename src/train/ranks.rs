//! Processes that train together: what they sum and agree on.

pub mod launcher;
#[cfg(unix)]
mod mpi;
pub mod same;
pub mod share;
pub mod sums;

use std::fmt::Debug;
use std::time::Duration;

use burn::tensor::Tensor;

use crate::measure::metrics::StepMetrics;
use crate::ops::host;
use crate::util::faults;
use crate::util::stats::{as_f64, as_u64};
use sums::Summed;

#[cfg(unix)]
pub use mpi::{Mpi, host, leave, mpi_libraries, reporter};

/// How long the first rank has for reporting what all find.
pub const FIRST_REPORTS: Duration = Duration::from_secs(1);

/// The ranks of a run, as one of them sees them. Every call is made by all ranks, in the same order.
pub trait Ranks: Debug + Send {
    /// Number of ranks.
    fn size(&self) -> usize;

    /// Number of this one, from 0; rank 0 writes the run's files.
    fn rank(&self) -> usize;

    /// Replaces gradients and figures by their sums over all ranks: the same numbers on all of them.
    fn sum(&mut self, gradients: &mut [f32], figures: &mut [f64]);

    /// Whether sums of gradients, in host memory or on GPUs, go on while the caller computes. The same on all ranks.
    fn sum_beside(&self, _is_host: bool) -> bool {
        false
    }

    /// Begins to sum gradients `[n]` over all ranks, where [`sum_beside`](Self::sum_beside) says so.
    ///
    /// # Panics
    /// As [`faults::read`].
    fn begin(&self, _: Tensor<1>) {}

    /// Gradients `[n]` on a device, and figures, summed over all ranks; before them, the sums of what was [begun](Self::begin), in that
    /// order.
    ///
    /// # Panics
    /// As [`faults::read`].
    fn sum_all(&mut self, gradients: Tensor<1>, figures: &mut [f64]) -> Vec<Tensor<1>> {
        let (shape, device) = (gradients.dims(), gradients.device());
        let mut numbers = faults::read(gradients, "a gradient");
        self.sum(&mut numbers, figures);
        vec![host::tensor(numbers, shape, &device)]
    }

    /// Sums gradients from GPU to GPU from now on, of which this rank's has that number; returns the name of what does it.
    ///
    /// # Errors
    /// Why they go through host memory instead: the same on all ranks.
    fn connect_gpus(&mut self, _: u32) -> Result<String, String> {
        Err("this binary is built without CUDA".to_owned())
    }

    /// The host of every rank, for messages.
    fn name_hosts(&mut self, _: &[String]) {}

    /// The ranks may reach the next sum far apart: one writes a checkpoint meanwhile, or reads weights.
    fn wait_long(&mut self) {}

    /// From now on the process ends as those of all ranks do, also where it fails.
    fn end_together(&mut self) {}

    /// Seconds in which this rank waited in sums since the last call.
    fn take_seconds(&mut self) -> f64 {
        0.0
    }

    /// Whether any rank says so.
    fn agree(&mut self, says_so: bool) -> bool {
        if self.size() == 1 {
            return says_so;
        }
        let mut number = [f64::from(u8::from(says_so))];
        self.sum(&mut [], &mut number);
        number[0] > 0.0
    }

    /// The figures of every rank, as many from each.
    fn gather(&mut self, figures: &[f64]) -> Vec<Vec<f64>> {
        let mut all = vec![0.0; self.size() * figures.len()];
        let start = self.rank() * figures.len();
        all[start..start + figures.len()].copy_from_slice(figures);
        self.sum(&mut [], &mut all);
        all.chunks(figures.len().max(1)).map(<[f64]>::to_vec).collect()
    }

    /// The bytes of every rank, as many as each has.
    fn gather_bytes(&mut self, own: &[u8]) -> Vec<Vec<u8>> {
        let number = |figure: f64| u32::try_from(as_u64(figure)).unwrap_or(u32::MAX);
        let lengths: Vec<usize> = self.gather(&[as_f64(own.len())]).iter().map(|of| number(of[0]) as usize).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let mut padded = own.to_vec();
        padded.resize(longest.next_multiple_of(4), 0);
        let word = |bytes: &[u8]| f64::from(bytes.iter().fold(0, |word: u32, byte| word << 8 | u32::from(*byte)));
        let all = self.gather(&padded.chunks(4).map(word).collect::<Vec<_>>());
        let bytes = |words: Vec<f64>| words.into_iter().flat_map(move |word| number(word).to_be_bytes());
        all.into_iter().zip(lengths).map(|(words, length)| bytes(words).take(length).collect()).collect()
    }
}

/// What a rank reports of its part of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankFigures {
    /// Seconds until it had its gradients.
    pub busy_seconds: f64,
    /// Seconds in which it waited for data.
    pub data_wait_seconds: f64,
    /// Tokens of its share.
    pub tokens: f64,
}

impl Summed for RankFigures {
    fn pack(&self) -> Vec<f64> {
        let Self { busy_seconds, data_wait_seconds, tokens } = *self;
        vec![busy_seconds, data_wait_seconds, tokens]
    }

    fn unpack(numbers: &mut dyn Iterator<Item = f64>) -> Self {
        let mut next = || numbers.next().unwrap_or_default();
        Self { busy_seconds: next(), data_wait_seconds: next(), tokens: next() }
    }
}

impl RankFigures {
    /// [`Ranks::sum_all`], which also brings these figures of all ranks to each.
    pub fn sum(
        ranks: &mut dyn Ranks,
        gradients: Tensor<1>,
        figures: &mut [f64],
        own: Self,
    ) -> (Vec<Tensor<1>>, Vec<Self>) {
        let own = own.pack();
        let mut all = figures.to_vec();
        // Each in its own place among those of all.
        all.resize(figures.len() + own.len() * ranks.size(), 0.0);
        all[figures.len() + own.len() * ranks.rank()..][..own.len()].copy_from_slice(&own);
        let gradients = ranks.sum_all(gradients, &mut all);
        let (sums, of_ranks) = all.split_at(figures.len());
        figures.copy_from_slice(sums);
        let of_rank = |numbers: &[f64]| Self::unpack(&mut numbers.iter().copied());
        (gradients, of_ranks.chunks_exact(own.len()).map(of_rank).collect())
    }
}

impl StepMetrics {
    /// Sets what the ranks reported of a step, of which the first waited `waited_seconds` until the sums were there.
    pub(super) fn set_ranks(&mut self, of_ranks: &[RankFigures], waited_seconds: f64) {
        let Some(first) = of_ranks.first() else { return };
        let seconds: Vec<f64> = of_ranks.iter().map(|rank| rank.busy_seconds).collect();
        let slowest = seconds.iter().copied().fold(first.busy_seconds, f64::max);
        let wait_seconds = (slowest - first.busy_seconds).min(waited_seconds);
        self.ranks = Some(of_ranks.len() as u64);
        self.rank_wait_seconds = Some(wait_seconds);
        self.exchange_seconds = Some(waited_seconds - wait_seconds);
        self.rank_seconds = Some(seconds);
        self.rank_data_wait_seconds = Some(of_ranks.iter().map(|rank| rank.data_wait_seconds).collect());
        self.rank_tokens = Some(of_ranks.iter().map(|rank| rank.tokens).collect());
    }
}

/// The only rank.
#[derive(Clone, Copy, Debug)]
pub struct Alone;

impl Ranks for Alone {
    fn size(&self) -> usize {
        1
    }

    fn rank(&self) -> usize {
        0
    }

    fn sum(&mut self, _: &mut [f32], _: &mut [f64]) {}
}

/// Why the ranks of a run cannot be connected.
#[derive(Debug, thiserror::Error)]
pub enum RanksError {
    /// The launcher cannot be used, or contradicts itself.
    #[error("{0}")]
    Launcher(String),
    /// No library for the launcher.
    #[error(
        "{launcher} started {size} ranks, and there is no MPI library to connect them\n  because: {reason}\n  hint: {hint}"
    )]
    NoLibrary {
        /// What started the process.
        launcher: &'static str,
        /// Number of ranks that it started.
        size: usize,
        /// What the loader said.
        reason: String,
        /// What to install.
        hint: &'static str,
    },
    /// The library lacks a function.
    #[error("{library}: no {symbol}\n  hint: LORA_TRAIN_MPI=PATH names another MPI library")]
    NoSymbol {
        /// File name of the library.
        library: String,
        /// The function.
        symbol: &'static str,
    },
    /// The library was not started by this launcher.
    #[error(
        "{launcher} started {started} ranks, and {library} sees {seen}: they do not belong together\n  hint: start with the \
         mpirun of that library (with SLURM: `srun --mpi=pmix` for Open MPI, `srun --mpi=pmi2` for MPICH), or name the \
         launcher's own library by LORA_TRAIN_MPI=PATH"
    )]
    OtherSize {
        /// What started the process.
        launcher: &'static str,
        /// Number of ranks that it started.
        started: usize,
        /// Name of the library that was opened.
        library: String,
        /// Number of ranks that the library knows.
        seen: usize,
    },
    /// A rank could not start.
    #[error("{0} failed with code {1}")]
    Call(&'static str, i32),
}
