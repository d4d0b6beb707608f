//! What the loop does with other ranks: its share of a step, and agreements on what each of them has.

use super::{Trainer, TrainerError};
use crate::data::batch::Batch;
use crate::data::error::DataError;
use crate::data::loader::Loader;
use crate::train::laps::StepPart;
use crate::train::ranks::sums::{RankFlags, Summed};
use crate::train::step_work::StepWork;

impl Trainer<'_> {
    /// Forward and backward of this rank's share of a step's micro-batches, all of which every rank has. A stop request ends
    /// the run after the step, in which all ranks learn of it, or, with `false`, while answers are written.
    pub(super) fn compute_share(&mut self, loader: &mut Loader, work: &mut StepWork) -> Result<bool, TrainerError> {
        let mut error = None;
        let batches = if self.rollouts.is_some() {
            let Some(round) = self.round(loader, work)? else { return Ok(false) };
            self.step.start();
            self.step.ranks().take_seconds();
            self.take_up(round, work)
        } else {
            self.step.start();
            self.step.ranks().take_seconds();
            let (batches, failed) = self.read_all(loader, work);
            error = failed;
            batches
        };
        self.recorder.part(StepPart::DataWait);
        self.step.set_flags(RankFlags { stop: self.stop_requested(), failed: error.is_some() });
        let mut inputs = if error.is_none() { self.step.lay_out_share(batches) } else { Vec::new() };
        self.recorder.part(StepPart::HostToDevice);
        let together = if self.step.config().layered_accumulation { inputs.len().max(1) } else { 1 };
        while !inputs.is_empty() {
            let rest = inputs.split_off(together.min(inputs.len()));
            self.forward_backward(std::mem::replace(&mut inputs, rest), inputs.is_empty());
        }
        error.map_or(Ok(true), |error| self.fail_together(error.into()).map(|()| true))
    }

    /// All micro-batches of a step, or those before one that cannot be read.
    fn read_all(&mut self, loader: &mut Loader, work: &mut StepWork) -> (Vec<Batch>, Option<DataError>) {
        let mut batches = Vec::new();
        while batches.len() < self.step.config().gradient_accumulation_steps {
            let loaded = match loader.next_batch() {
                Ok(loaded) => loaded,
                Err(failed) => return (batches, Some(failed)),
            };
            work.add(&loaded, &self.recorder.flops, false);
            let is_last = loaded.last_of_epoch;
            batches.push(loaded.batch);
            if is_last {
                break;
            }
        }
        (batches, None)
    }

    /// Ends the run on all ranks with this error of one of them.
    fn fail_together(&mut self, error: TrainerError) -> Result<(), TrainerError> {
        let _ = self.step.reduce(None);
        self.step.discard();
        self.step.ranks().end_together();
        Err(error)
    }

    /// A result that every rank has: `None` where one of them was asked to stop, an error where one of them failed.
    pub(super) fn agree_on<T>(&mut self, own: Result<Option<T>, TrainerError>) -> Result<Option<T>, TrainerError> {
        if !self.step.is_shared() {
            return own;
        }
        let flags = RankFlags { stop: matches!(own, Ok(None)), failed: own.is_err() };
        self.step.ranks().wait_long();
        let of_ranks = flags.over(self.step.ranks());
        if of_ranks.failed {
            self.step.ranks().end_together();
            return own.and(Err(TrainerError::OtherRank));
        }
        own.map(|own| own.filter(|_| !of_ranks.stop))
    }
}
