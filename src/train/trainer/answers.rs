//! The answers that the loop trains on, where the model writes them.

use super::{Trainer, TrainerError};
use crate::data::batch::Batch;
use crate::data::loader::Loader;
use crate::measure::figures::ObjectiveFigures;
use crate::measure::metrics::Sample;
use crate::train::backprop::Inputs;
use crate::train::laps::Part;
use crate::train::rollouts::{Answered, Draw, Round};
use crate::train::step_work::StepWork;

impl Trainer<'_> {
    /// Answers for the next step: those that an earlier one has trained on, or new ones. `None` where the run was asked to
    /// stop.
    pub(super) fn round(&mut self, loader: &mut Loader, work: &mut StepWork) -> Result<Option<Round>, TrainerError> {
        if self.state.round.is_some() {
            return Ok(self.state.round.clone());
        }
        let per_step = self.train.gradient_accumulation_steps;
        let (size, num_iterations) = self.rollouts.as_ref().map_or((0, 0), |rollouts| rollouts.size(per_step));
        let num_steps = (size / per_step * num_iterations) as u64;
        let mut answered = Vec::new();
        for index in 1..=size {
            let Some(loaded) = self.next_micro_batch(loader)? else { return Ok(None) };
            work.read(&loaded);
            let Some(batch) = self.answered(&loaded.batch, index, num_steps)? else { return Ok(None) };
            answered.push(batch);
            if loaded.last_of_epoch {
                break;
            }
        }
        Ok(Some(Round::new(&answered, per_step, num_iterations)))
    }

    /// Answers those of a step's prompts that are this rank's, and copies them to the device.
    pub(super) fn answered_share(
        &mut self,
        prompts: &[Batch],
        work: &mut StepWork,
    ) -> Result<Vec<Inputs>, TrainerError> {
        let (rank, num_ranks) = self.step.rank();
        let (mut own, mut rewards) = (Vec::new(), ObjectiveFigures::default());
        for (index, prompts) in prompts.iter().enumerate().skip(rank).step_by(num_ranks) {
            let Some((batch, figures)) = self.answered(prompts, index + 1, 1)? else { break };
            work.compute(&batch, &self.recorder.flops);
            rewards += figures;
            own.push(batch);
        }
        self.step.say_rewards(rewards);
        Ok(self.step.lay_out_own(&own, prompts.len()))
    }

    /// The prompts of a micro-batch with answers to them, for this step and those after it, `num_steps` in all. `None` where
    /// the run was asked to stop.
    fn answered(
        &mut self,
        prompts: &Batch,
        index: usize,
        num_steps: u64,
    ) -> Result<Option<(Batch, ObjectiveFigures)>, TrainerError> {
        let Some(rollouts) = &mut self.rollouts else { return Ok(None) };
        let number = self.state.step * self.train.gradient_accumulation_steps as u64 + index as u64;
        let (stop, sinks) = (self.stop, &self.sinks);
        // Several ranks learn of a stop after the step.
        let is_alone = !self.step.is_shared();
        let is_stopped = || is_alone && (stop.requested() || sinks.stop_requested());
        let answered = rollouts.answer(&self.step, self.data, prompts, Draw::Training(number), &is_stopped);
        self.recorder.part(Part::Rollout);
        let Some(Answered { batch, figures, sample }) = answered? else { return Ok(None) };
        let done = self.state.step;
        let is_shown = done == 0 || (done + num_steps) / self.sample_steps > done / self.sample_steps;
        if let Some(sample) = sample.filter(|_| index == 1 && is_shown) {
            self.sinks.sample(0, &Sample { step: done + 1, ..sample });
        }
        Ok(Some((batch, figures)))
    }
}
