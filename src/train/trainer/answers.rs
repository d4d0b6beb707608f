//! The answers that the loop trains on, where the model writes them.

use super::{Trainer, TrainerError};
use crate::data::batch::Batch;
use crate::data::loader::Loader;
use crate::measure::metrics::Sample;
use crate::train::laps::StepPart;
use crate::train::ranks::Ranks;
use crate::train::rollouts::{Answered, Answers, Draw, Round};
use crate::train::step_work::StepWork;

impl Trainer<'_> {
    /// Answers for the next step: those that an earlier one has trained on, or new ones, of which every rank writes a part. `None`
    /// where the run was asked to stop.
    pub(super) fn round(&mut self, loader: &mut Loader, work: &mut StepWork) -> Result<Option<Round>, TrainerError> {
        if self.state.round.is_some() {
            return Ok(self.state.round.clone());
        }
        let per_step = self.step.config().gradient_accumulation_steps;
        let (size, num_iterations) = self.rollouts.as_ref().map_or((0, 0), |rollouts| rollouts.size(per_step));
        let own = self.own_answers(loader, work, size, (size / per_step * num_iterations) as u64);
        let Some(mut answered) = self.agree_on(own)? else { return Ok(None) };
        if self.step.is_shared() {
            answered = of_all_ranks(self.step.ranks(), &answered);
            self.recorder.part(StepPart::Rollout);
        }
        Ok(Some(Round::new(answered, per_step, num_iterations)))
    }

    /// Reads `size` micro-batches of prompts, or what is left of the epoch, and answers every so many of them, which come with
    /// their numbers. `None` where the run was asked to stop.
    fn own_answers(
        &mut self,
        loader: &mut Loader,
        work: &mut StepWork,
        size: usize,
        num_steps: u64,
    ) -> Result<Option<Vec<(usize, Answers)>>, TrainerError> {
        let (rank, num_ranks) = self.step.rank();
        let mut own = Vec::new();
        for index in 0..size {
            let Some(loaded) = self.next_micro_batch(loader)? else { return Ok(None) };
            work.read(&loaded);
            if index % num_ranks == rank {
                let Some(answers) = self.answered(&loaded.batch, index, num_steps)? else { return Ok(None) };
                own.push((index, answers));
            }
            if loaded.last_of_epoch {
                break;
            }
        }
        Ok(Some(own))
    }

    /// The micro-batches of a step of these answers.
    pub(super) fn take_up(&mut self, round: Round, work: &mut StepWork) -> Vec<Batch> {
        let (batches, rewards) = round.next_step();
        batches.iter().for_each(|batch| work.compute(batch, &self.recorder.flops));
        self.step.say_rewards(rewards);
        work.round = Some(round);
        batches
    }

    /// The prompts of a micro-batch with answers to them, for this step and those after it, `num_steps` in all. `None` where
    /// the run was asked to stop.
    fn answered(&mut self, prompts: &Batch, index: usize, num_steps: u64) -> Result<Option<Answers>, TrainerError> {
        let Some(rollouts) = &mut self.rollouts else { return Ok(None) };
        let number = self.state.step * self.step.config().gradient_accumulation_steps as u64 + index as u64 + 1;
        let (stop, sinks) = (self.stop, &self.sinks);
        let is_stopped = || stop.requested() || sinks.stop_requested();
        let answered = rollouts.answer(&self.step, self.data, prompts, Draw::Training(number), &is_stopped);
        self.recorder.part(StepPart::Rollout);
        let Some(Answered { batch, figures, sample }) = answered? else { return Ok(None) };
        let done = self.state.step;
        if let Some(sample) = sample.filter(|_| index == 0 && rollouts.is_sample_due(done, num_steps)) {
            self.sinks.sample(0, &Sample { step: done + 1, ..sample });
        }
        Ok(Some((batch, figures.numbers())))
    }
}

/// The answers of all ranks, in the order of their numbers.
#[expect(clippy::expect_used, reason = "every rank reads what another one writes")]
fn of_all_ranks(ranks: &mut dyn Ranks, own: &[(usize, Answers)]) -> Vec<(usize, Answers)> {
    let own = serde_json::to_vec(own).expect("answers are JSON");
    let read = |bytes: Vec<u8>| serde_json::from_slice::<Vec<_>>(&bytes).expect("answers are JSON");
    let mut all: Vec<(usize, Answers)> = ranks.gather_bytes(&own).into_iter().flat_map(read).collect();
    all.sort_by_key(|(index, _)| *index);
    all
}
