//! A step that several ranks share.

use std::borrow::Cow;
use std::time::Instant;

use super::TrainStep;
use crate::data::batch::Batch;
use crate::train::adapters::Trained;
use crate::train::backprop::{Inputs, MaskOrigin};
use crate::train::grads::Exchange;
use crate::train::loss::LossSum;
use crate::train::ranks::share::{RowShare, shares};
use crate::train::ranks::sums::{RankFlags, StepSums, Summed};
use crate::train::ranks::{RankFigures, Ranks};
use crate::util::stats::as_f64;

/// The ranks that share the steps, and what is theirs of the step in progress.
#[derive(Debug)]
pub(super) struct Shared {
    ranks: Box<dyn Ranks>,
    flags: RankFlags,
    /// Micro-batches of the step that are not this rank's.
    num_of_others: u64,
    /// Of this rank's, those that have had no backward, where several ranks share the step.
    num_left: Option<usize>,
    /// Start of the step.
    start: Instant,
    own: RankFigures,
    of_ranks: Vec<RankFigures>,
}

impl Shared {
    pub(super) fn new(ranks: Box<dyn Ranks>) -> Self {
        Self {
            ranks,
            flags: RankFlags::default(),
            num_of_others: 0,
            num_left: None,
            start: Instant::now(),
            own: RankFigures::default(),
            of_ranks: Vec::new(),
        }
    }

    /// Where the gradients go of a backward of so many micro-batches, if it is this rank's last of the step.
    pub(super) fn exchange<'a>(&'a self, num_micro_batches: usize, trained: &'a Trained) -> Option<Exchange<'a>> {
        let (adapters, place) = (trained.adapters(), trained.optimizer.place());
        (self.num_left == Some(num_micro_batches)).then_some(Exchange { ranks: &*self.ranks, adapters, place })
    }

    /// Counts micro-batches that have had their backward.
    pub(super) fn count(&mut self, num_micro_batches: usize) {
        self.num_left = self.num_left.map(|left| left - num_micro_batches);
    }

    /// Forgets the step in progress.
    pub(super) fn clear(&mut self) {
        (self.num_of_others, self.num_left) = (0, None);
    }
}

impl TrainStep {
    /// Copies to the device what this rank takes of a step's micro-batches, which are the same on all ranks.
    #[must_use]
    pub fn lay_out_share(&mut self, mut batches: Vec<Batch>) -> Vec<Inputs> {
        batches.retain(|batch| !batch.targets.is_empty());
        let (rank, num_ranks) = self.rank();
        let own = shares(&batches, num_ranks).swap_remove(rank);
        let lay_out = |part: &RowShare| {
            let whole = &batches[part.micro_batch];
            // With the noise that its tokens have where one rank takes it whole.
            let is_padded = self.is_noisy() && self.model.place().pads_rows();
            let placed = if is_padded { Cow::Owned(whole.padded()) } else { Cow::Borrowed(whole) };
            let origin = MaskOrigin {
                number: self.num_micro_batches + part.micro_batch as u64,
                first_token: placed.row_lengths[..part.rows.start].iter().sum(),
                longest_row: whole.row_lengths.iter().copied().max().unwrap_or(0),
                num_targets: whole.targets.len(),
            };
            Some(self.lay_out(&placed.part(part.rows.clone()))?.with_origin(origin))
        };
        let inputs: Vec<_> = own.iter().filter_map(lay_out).collect();
        self.shared.num_left = Some(inputs.len());
        self.shared.num_of_others = (batches.len() as u64).saturating_sub(inputs.len() as u64);
        let rows = own.iter().flat_map(|part| &batches[part.micro_batch].row_lengths[part.rows.clone()]);
        self.shared.own.tokens = as_f64(rows.sum::<usize>());
        inputs
    }

    /// The ranks of the run.
    pub fn ranks(&mut self) -> &mut dyn Ranks {
        &mut *self.shared.ranks
    }

    /// Whether there are other ranks.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.shared.ranks.size() > 1
    }

    /// Number of this rank and of all.
    #[must_use]
    pub fn rank(&self) -> (usize, usize) {
        (self.shared.ranks.rank(), self.shared.ranks.size())
    }

    /// Sums the gradients and the loss of the step in progress over all ranks, and what each says. `num_own` of its micro-batches are
    /// this rank's.
    pub(super) fn sum_over_ranks(&mut self, loss: &LossSum, num_own: u64) -> LossSum {
        let Shared { ranks, flags, num_of_others, start, own, of_ranks, .. } = &mut self.shared;
        let mut numbers = StepSums { flags: *flags, loss: *loss }.pack();
        let own = || RankFigures { busy_seconds: start.elapsed().as_secs_f64(), ..*own };
        let (adapters, place) = (self.trained.adapters(), self.trained.optimizer.place());
        *of_ranks = self.accumulated.grads.reduce(adapters, place, &mut **ranks, &mut numbers, own);
        let sums = StepSums::unpack(&mut numbers.into_iter());
        *flags = sums.flags;
        // A step that is dropped is made again.
        let others = std::mem::take(num_of_others);
        if flags.failed {
            self.num_micro_batches -= num_own;
        } else {
            self.num_micro_batches += others;
        }
        sums.loss
    }

    /// Begins a step that several ranks share.
    pub fn start(&mut self) {
        (self.shared.start, self.shared.own) = (Instant::now(), RankFigures::default());
    }

    /// What this rank tells the others in the next [`reduce`](Self::reduce), also that all it did since the start of the step
    /// was to wait for data.
    pub fn set_flags(&mut self, flags: RankFlags) {
        self.shared.flags = flags;
        self.shared.own.data_wait_seconds = self.shared.start.elapsed().as_secs_f64();
    }

    /// The figures of all ranks in the last [`reduce`](Self::reduce); none where there is one rank.
    #[must_use]
    pub fn of_ranks(&self) -> &[RankFigures] {
        &self.shared.of_ranks
    }

    /// What any rank said in the last [`reduce`](Self::reduce); nothing where there is one rank.
    #[must_use]
    pub fn flags_of_ranks(&self) -> RankFlags {
        if self.is_shared() { self.shared.flags } else { RankFlags::default() }
    }
}
