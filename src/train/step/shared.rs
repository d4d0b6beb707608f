//! A step that several ranks share.

use std::borrow::Cow;
use std::time::Instant;

use super::TrainStep;
use crate::data::batch::Batch;
use crate::train::backprop::{Inputs, Origin};
use crate::train::grads::Exchange;
use crate::train::ranks::share::{Part, shares};
use crate::train::ranks::{RankFigures, Ranks};
use crate::util::stats::as_f64;

/// What a rank tells the others with its gradients; after that, whether any rank said so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Says {
    /// It was asked to stop.
    pub stop: bool,
    /// It has failed, and its gradients are of no use.
    pub failed: bool,
}

impl TrainStep {
    /// Copies to the device what this rank takes of a step's micro-batches, which are the same on all ranks.
    #[must_use]
    pub fn lay_out_share(&mut self, mut batches: Vec<Batch>) -> Vec<Inputs> {
        batches.retain(|batch| !batch.targets.is_empty());
        let own = shares(&batches, self.ranks.size()).swap_remove(self.ranks.rank());
        let lay_out = |part: &Part| {
            let whole = &batches[part.micro_batch];
            // With the noise that its tokens have where one rank takes it whole.
            let is_padded = self.is_noisy() && self.model.place().pads_rows();
            let placed = if is_padded { Cow::Owned(whole.padded()) } else { Cow::Borrowed(whole) };
            let origin = Origin {
                number: self.num_micro_batches + part.micro_batch as u64,
                first_token: placed.row_lengths[..part.rows.start].iter().sum(),
                longest_row: whole.row_lengths.iter().copied().max().unwrap_or(0),
                num_targets: whole.targets.len(),
            };
            Some(self.lay_out(&placed.part(part.rows.clone()))?.with_origin(origin))
        };
        let inputs: Vec<_> = own.iter().filter_map(lay_out).collect();
        self.num_left = Some(inputs.len());
        self.num_of_others = (batches.len() as u64).saturating_sub(inputs.len() as u64);
        let rows = own.iter().flat_map(|part| &batches[part.micro_batch].row_lengths[part.rows.clone()]);
        self.own.tokens = as_f64(rows.sum::<usize>());
        inputs
    }

    /// Whether any rank says so.
    pub fn agree(&mut self, says_so: bool) -> bool {
        self.ranks.agree(says_so)
    }

    /// The ranks of the run.
    pub fn ranks(&mut self) -> &mut dyn Ranks {
        &mut *self.ranks
    }

    /// Whether there are other ranks.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.ranks.size() > 1
    }

    /// Number of this rank and of all.
    #[must_use]
    pub fn rank(&self) -> (usize, usize) {
        (self.ranks.rank(), self.ranks.size())
    }

    /// Where the gradients of a step go that several ranks share.
    pub(super) fn exchange(&self) -> Exchange<'_> {
        Exchange { ranks: &*self.ranks, adapters: self.trained.adapters(), place: self.optimizer.place() }
    }

    /// Begins a step that several ranks share.
    pub fn start(&mut self) {
        (self.start, self.own) = (Instant::now(), RankFigures::default());
    }

    /// What this rank tells the others in the next [`reduce`](Self::reduce), also that all it did since the start of the step
    /// was to wait for data.
    pub fn say(&mut self, says: Says) {
        self.says = says;
        self.own.data_wait_seconds = self.start.elapsed().as_secs_f64();
    }

    /// The figures of all ranks in the last [`reduce`](Self::reduce); none where there is one rank.
    #[must_use]
    pub fn of_ranks(&self) -> &[RankFigures] {
        &self.of_ranks
    }

    /// What any rank said in the last [`reduce`](Self::reduce); nothing where there is one rank.
    #[must_use]
    pub fn said(&self) -> Says {
        if self.is_shared() { self.says } else { Says::default() }
    }
}
