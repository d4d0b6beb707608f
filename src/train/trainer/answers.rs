//! The answers that the loop trains on, where the model writes them.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Trainer, TrainerError};
use crate::data::batch::Batch;
use crate::data::loader::Loader;
use crate::measure::figures::Rollout;
use crate::measure::metrics::Sample;
use crate::train::laps::StepPart;
use crate::train::ranks::Ranks;
use crate::train::rollouts::{
    Answered, AnsweredRound, Answers, Draw, JudgeState, Rollouts, Round, StepAnswers, scale_advantages,
};
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
        let Some((mut answered, mut rollouts)) = self.agree_on(own)? else { return Ok(None) };
        if self.step.is_shared() {
            answered = of_all_ranks(self.step.ranks(), &answered);
            rollouts = of_all_ranks(self.step.ranks(), &rollouts);
            self.recorder.part(StepPart::Rollout);
        }
        scale_advantages(&mut answered, &mut rollouts);
        let most = self.rollouts.as_ref().map_or(0, Rollouts::max_recorded);
        self.sinks.rollouts(&numbered(rollouts, self.state.step + 1, most));
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
    ) -> Result<Option<OwnAnswers>, TrainerError> {
        let (rank, num_ranks) = self.step.rank();
        let before = self.state.step * self.step.config().gradient_accumulation_steps as u64;
        let (mut indices, mut prompts) = (Vec::new(), Vec::new());
        for index in 0..size {
            let Some(loaded) = self.next_micro_batch(loader)? else { return Ok(None) };
            work.read(&loaded);
            if index % num_ranks == rank {
                indices.push(index);
                prompts.push((Draw::Training(before + index as u64 + 1), loaded.batch));
            }
            if loaded.last_of_epoch {
                break;
            }
        }
        let Some(answered) = self.answered(&prompts)? else { return Ok(None) };
        let AnsweredRound { answers, metrics, judge_seconds, environment_seconds, trouble } = answered;
        (work.reward_metrics, work.reward_seconds) = (metrics, Some(judge_seconds));
        work.environment_seconds = environment_seconds;
        if let Some(trouble) = trouble {
            self.sinks.warn(&format!("step {}: {trouble}", self.state.step + 1));
        }
        let (mut own, mut recorded) = (Vec::new(), Vec::new());
        for (index, Answered { batch, figures, rewards, left_out, of_round, sample, rollouts }) in
            indices.into_iter().zip(answers)
        {
            let done = self.state.step;
            let is_due = self.rollouts.as_ref().is_some_and(|rollouts| rollouts.is_sample_due(done, num_steps));
            if let Some(sample) = sample.filter(|_| index == 0 && is_due) {
                self.sinks.sample(0, &Sample { step: done + 1, ..sample });
            }
            own.push((index, Answers(batch, figures.numbers(), rewards, left_out, of_round)));
            recorded.push((index, rollouts));
        }
        Ok(Some((own, recorded)))
    }

    /// The micro-batches of a step of these answers.
    pub(super) fn take_up(&mut self, round: Round, work: &mut StepWork) -> Vec<Batch> {
        let StepAnswers { batches, figures, rewards, left_out } = round.next_step();
        batches.iter().for_each(|batch| work.compute(batch, &self.recorder.flops));
        let reuses = self.rollouts.as_ref().is_some_and(Rollouts::reuses_answers);
        let targets: Vec<usize> = left_out.iter().map(|answer| answer.targets).collect();
        self.step.say_rewards(figures, &targets, reuses);
        work.tokens += left_out.iter().map(|answer| answer.tokens as u64).sum::<u64>();
        (work.round, work.rewards) = (Some(round), rewards);
        batches
    }

    /// Answers to the prompts of micro-batches. `None` where the run was asked to stop.
    fn answered(&mut self, prompts: &[(Draw, Batch)]) -> Result<Option<AnsweredRound>, TrainerError> {
        let state = self.judge_state();
        let Some(rollouts) = &mut self.rollouts else { return Ok(None) };
        rollouts.set_state(state);
        let (stop, sinks) = (self.stop, &self.sinks);
        let is_stopped = || stop.requested() || sinks.stop_requested();
        let answered = rollouts.answer(&self.step, self.data, prompts, &is_stopped);
        self.recorder.part(StepPart::Rollout);
        Ok(answered?)
    }

    /// How far training is, for functions that judge answers.
    pub(super) fn judge_state(&self) -> JudgeState {
        let (global_step, max_steps) = (self.state.step, self.schedule.total_steps());
        JudgeState { global_step, max_steps, epoch: self.state.epochs() }
    }
}

/// Something of micro-batches, with their numbers.
type Numbered<T> = Vec<(usize, T)>;

/// The answers that a rank has written, and what is recorded of them.
type OwnAnswers = (Numbered<Answers>, Numbered<Vec<Rollout>>);

/// What all ranks have, in the order of their numbers.
#[expect(clippy::expect_used, reason = "every rank reads what another one writes")]
fn of_all_ranks<T: Serialize + DeserializeOwned>(ranks: &mut dyn Ranks, own: &Numbered<T>) -> Numbered<T> {
    let own = serde_json::to_vec(own).expect("answers are JSON");
    let read = |bytes: Vec<u8>| serde_json::from_slice::<Vec<_>>(&bytes).expect("answers are JSON");
    let mut all: Numbered<T> = ranks.gather_bytes(&own).into_iter().flat_map(read).collect();
    all.sort_by_key(|(index, _)| *index);
    all
}

/// The first of a round's answers as they are recorded, with the step that they were written for and the number of their prompt.
fn numbered(of_batches: Numbered<Vec<Rollout>>, step: u64, most: usize) -> Vec<Rollout> {
    let mut num_before = 0;
    let of_round = |(_, rollouts): (usize, Vec<Rollout>)| {
        let before = num_before;
        num_before += rollouts.last().map_or(0, |last| last.group + 1);
        let place = move |rollout: Rollout| Rollout { step, group: before + rollout.group + 1, ..rollout };
        rollouts.into_iter().map(place).collect::<Vec<_>>()
    };
    of_batches.into_iter().flat_map(of_round).take(most).collect()
}
