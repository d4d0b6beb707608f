//! One training step: computes gradients from micro-batches and updates the adapters. No input or output.

mod outcome;
mod pools;
mod shared;

use std::ops::Range;

use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::adapters::Trained;
use super::backprop::{self, Forward, Inputs, Options};
use super::grads::{GradSums, joined, read};
use super::loss::{LossContext, LossScale, LossSum, MicroBatchLoss};
use super::objective::{CrossEntropy, LossRows, Objective, OfReference};
use super::optimizer::{OptimizerStateError, StepWeights};
use super::ranks::{Alone, Ranks};
use super::references::{References, digests};
use super::rounding::Rounding;
use crate::config::{GradientCheckpointing, OptimizerConfig, TrainConfig};
use crate::data::batch::{Answer, Batch};
use crate::lora::AdapterSet;
use crate::lora::kind::AdapterKind;
use crate::measure::figures::ObjectiveFigures;
use crate::model::Model;
use crate::ops::profile::{self, Cost};
use crate::save::checkpoint::HostTensor;
use crate::save::export::Shipped;
use crate::schema::Problem;
use crate::util::faults;

use outcome::has_equal_rewards;
pub use outcome::{SkipReason, StepOutcome};
use pools::Pools;
use shared::Shared;

/// Model, adapters and optimizer, and the step in progress.
#[derive(Debug)]
pub struct TrainStep {
    model: Model,
    trained: Trained,
    train: TrainConfig,
    objective: Box<dyn Objective>,
    /// The adapters before training.
    reference: AdapterSet,
    /// What is known of the model with these.
    references: References,
    seed: u64,
    loss_scale: Option<LossScale>,
    /// Number of micro-batches so far, in all steps; seeds the dropout masks.
    num_micro_batches: u64,
    accumulated: Accumulated,
    shared: Shared,
    pools: Pools,
    /// The first micro-batch of the next step, where it is laid out.
    ahead: Option<Inputs>,
    /// What the adapted weights are rounded from, where the model is as a file will have it.
    rounding: Option<Rounding>,
}

/// What the micro-batches of the step in progress have left.
#[derive(Debug, Default)]
struct Accumulated {
    grads: GradSums,
    losses: Vec<MicroBatchLoss>,
    /// What is reported of the answers, where the model has written them, with those that are left out.
    rewards: LossSum,
    /// Whether the update with the gradients was queued before the host knew their norm.
    is_queued: bool,
}

/// State of a [`TrainStep`] for a checkpoint, without the adapters.
#[derive(Clone, Debug, PartialEq)]
pub struct StepState {
    /// Moments of the optimizer, and what is known of the reference.
    pub moments: Vec<HostTensor>,
    /// Counters and scales.
    pub counters: StepCounters,
}

/// Counters and scales of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepCounters {
    /// Number of updates by the optimizer, without skipped steps.
    pub num_updates: u64,
    /// Weights of the steps in the average of a schedule-free optimizer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_weights: Option<StepWeights>,
    /// Number of micro-batches so far, in all steps.
    pub num_micro_batches: u64,
    /// Loss scale; absent unless the precision is `f16`.
    pub loss_scale: Option<LossScale>,
}

impl TrainStep {
    /// A step without micro-batches. `seed` determines the dropout masks.
    #[must_use]
    pub fn new(
        model: Model,
        adapters: AdapterSet,
        train: &TrainConfig,
        optimizer: &OptimizerConfig,
        loraplus_lr_ratio: Option<f64>,
        seed: u64,
    ) -> Self {
        Self {
            trained: Trained::new(adapters, optimizer, loraplus_lr_ratio),
            train: train.clone(),
            objective: Box::new(CrossEntropy),
            reference: AdapterSet::none(model.blocks.len()),
            references: References::default(),
            seed,
            loss_scale: (model.compute == DType::F16).then(LossScale::default),
            num_micro_batches: 0,
            accumulated: Accumulated::default(),
            shared: Shared::new(Box::new(Alone)),
            pools: Pools::default(),
            ahead: None,
            rounding: None,
            model,
        }
    }

    /// The same where `negated_start` takes a part out of the base, as which the adapters started.
    #[must_use]
    pub fn with_negated_start(self, negated_start: Option<AdapterSet>) -> Self {
        Self { trained: self.trained.with_negated_start(negated_start), ..self }
    }

    /// The same with another objective than the cross-entropy.
    #[must_use]
    pub fn with_objective(self, objective: Box<dyn Objective>) -> Self {
        Self { objective, ..self }
    }

    /// The same where `reference` are the adapters before training; without, the reference is the base alone.
    #[must_use]
    pub fn with_reference(self, reference: AdapterSet) -> Self {
        Self { reference, ..self }
    }

    /// Reports the rewards of the answers of the step in progress, which all ranks know, and counts those that it leaves out, as they
    /// have no gradient: of each, so many tokens would carry loss. `reuses`: they may have become likelier since they were written.
    pub fn say_rewards(&mut self, rewards: ObjectiveFigures, left_out: &[usize], reuses: bool) {
        self.accumulated.rewards = LossSum::default();
        if self.rank().0 != 0 {
            return;
        }
        let mut figures = rewards;
        let ends = left_out.iter().scan(0, |end, length| {
            *end += length;
            Some(*end - length..*end)
        });
        let targets: Vec<Range<usize>> = ends.collect();
        let num_tokens = targets.last().map_or(0, |last| last.end);
        // As likely as when they were written, and no better than others.
        let (answers, zeros) = (vec![Answer::default(); targets.len()], vec![0.0; num_tokens]);
        let rows = LossRows { targets: &targets, answers: &answers, log_probabilities: &zeros, ..LossRows::default() };
        let rows = LossRows { written: if reuses { &zeros } else { &[] }, ..rows };
        let mut count = 0.0;
        if !targets.is_empty() {
            let weighed = self.objective.weigh(&rows);
            count = weighed.count;
            figures += weighed.figures;
        }
        self.accumulated.rewards = LossSum { sum: 0.0, count, target_tokens: num_tokens as u64, figures };
    }

    /// Whether the objective compares with the model before training.
    #[must_use]
    pub fn needs_reference(&self) -> bool {
        self.objective.needs().reference.is_some()
    }

    /// What is known of the reference, where no more of it is needed. Several ranks keep nothing: which rows each of them
    /// has seen is in no checkpoint.
    fn references(&self) -> Option<&References> {
        let is_kept = self.objective.needs().reference == Some(OfReference::Documents) && !self.is_shared();
        is_kept.then_some(&self.references)
    }

    /// Whether the next forward of a micro-batch needs none of the reference beside it.
    #[must_use]
    pub fn knows_reference(&self, batch: &Batch) -> bool {
        self.references().is_some_and(|references| references.of(&digests(batch)).is_some())
    }

    /// The same as one of several ranks.
    #[must_use]
    pub fn with_ranks(self, ranks: Box<dyn Ranks>) -> Self {
        Self { shared: Shared::new(ranks), ..self }
    }

    /// Section `[train]` of the recipe.
    #[must_use]
    pub fn config(&self) -> &TrainConfig {
        &self.train
    }

    /// The frozen model.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The adapters that are evaluated and written: those in training, or their average.
    #[must_use]
    pub fn adapters(&self) -> &AdapterSet {
        self.trained.evaluated()
    }

    /// The adapters in training.
    #[must_use]
    pub fn trained_adapters(&self) -> &AdapterSet {
        self.trained.applied()
    }

    /// The type of the file that the model is as, and the adapter as which it began to be.
    #[must_use]
    pub fn shipped(&self) -> Option<&Shipped> {
        self.rounding.as_ref().map(|rounding| &rounding.shipped)
    }

    /// Releases the blocks of the model, which is to be replaced.
    pub(super) fn leave_model(&mut self) {
        self.model.blocks.clear();
    }

    /// Goes on with the model as a file will have it. What is laid out for the former is laid out for this one, too.
    pub(super) fn ship(&mut self, model: Model, rounding: Rounding) {
        (self.model, self.rounding) = (model, Some(rounding));
        self.trained.change().1.iter_mut().for_each(|adapter| adapter.kind = AdapterKind::Rounded);
    }

    /// Takes the model that is not rounded, which is loaded when the other has made room, with the adapters beside it.
    ///
    /// # Errors
    /// Those of `load`.
    pub fn take_unrounded<E>(&mut self, load: impl FnOnce() -> Result<Model, E>) -> Result<(), E> {
        self.leave_model();
        (self.model, self.rounding) = (load()?, None);
        self.trained.change().1.iter_mut().for_each(|adapter| adapter.kind = AdapterKind::Lora);
        Ok(())
    }

    /// Puts what the last update changed into the adapted weights of a model that is as a file will have it.
    ///
    /// # Errors
    /// A weight that has no place in the file's type; files of the base that are gone.
    pub(super) fn round(&mut self) -> Result<(), Problem> {
        let Some(rounding) = &self.rounding else { return Ok(()) };
        profile::measure("rounding", Cost::default, || rounding.round(&mut self.model, self.trained.adapters()))
    }

    /// Digest of B of the first and the last adapter, and of what else is small and trained in full: every update changes them. Reads
    /// the device.
    #[must_use]
    pub fn adapters_digest(&self) -> u64 {
        self.trained.digest()
    }

    /// Forward and backward of one micro-batch, added to the step in progress. Reads nothing from the device.
    pub fn forward_backward(&mut self, batch: &Batch) {
        self.accumulate(std::slice::from_ref(batch));
    }

    /// Forward and backward of micro-batches, as the recipe orders them, added to the step in progress. Reads nothing
    /// from the device.
    pub fn accumulate(&mut self, batches: &[Batch]) {
        for batches in batches.chunks(if self.train.layered_accumulation { batches.len().max(1) } else { 1 }) {
            let inputs: Vec<_> = batches.iter().filter_map(|batch| self.lay_out(batch)).collect();
            if !inputs.is_empty() {
                let forward = self.forward(inputs);
                self.backward(forward);
            }
        }
    }

    /// Copies a micro-batch to the device; `None` where it has no target tokens. Call [`forward`](Self::forward) and
    /// [`backward`](Self::backward) next.
    #[must_use]
    pub fn lay_out(&self, batch: &Batch) -> Option<Inputs> {
        let tokens = batch.num_tokens() + batch.num_padding_tokens();
        self.pools.make_first_page(&self.model, self.train.loss_chunk(), tokens);
        Inputs::new(&self.model, batch, self.is_noisy())
    }

    /// The same ahead of the step that [`lay_out_next`](Self::lay_out_next) will ask for it.
    pub(super) fn lay_out_ahead(&mut self, batch: Option<&Batch>) {
        self.ahead = batch.and_then(|batch| self.lay_out(batch));
    }

    /// The same, if it was not laid out ahead.
    pub(super) fn lay_out_next(&mut self, batch: &Batch) -> Option<Inputs> {
        self.ahead.take().or_else(|| self.lay_out(batch))
    }

    /// Whether what a token gets depends on its place among those of the micro-batch.
    fn is_noisy(&self) -> bool {
        self.trained.adapters().dropout > 0.0 || self.train.neftune_noise_alpha.is_some()
    }

    /// Forward of micro-batches, block by block, with their losses.
    #[must_use]
    pub fn forward(&self, inputs: Vec<Inputs>) -> Forward {
        backprop::forward(inputs, self.options())
    }

    /// Backward of the micro-batches of the last forward, added to the step in progress.
    pub fn backward(&mut self, forward: Forward) {
        let mut grads = std::mem::take(&mut self.accumulated.grads);
        let exchange = self.shared.exchange(forward.num_micro_batches(), &self.trained);
        let losses = backprop::backward(forward, self.options(), &mut grads, exchange);
        self.shared.count(losses.len());
        self.accumulated.grads = grads;
        self.num_micro_batches += losses.len() as u64;
        self.accumulated.losses.extend(losses);
    }

    /// Options for the next micro-batches.
    fn options(&self) -> Options<'_> {
        let TrainConfig { gradient_checkpointing: checkpointing, neftune_noise_alpha, .. } = self.train;
        Options {
            num_recomputed: checkpointing.num_recomputed(self.model.blocks.len()),
            keeps_attention: checkpointing.keeps_attention(),
            parking: (checkpointing == GradientCheckpointing::Offload).then(|| self.pools.parking(&self.model)),
            seed: self.seed,
            first_number: self.num_micro_batches,
            loss_scale: self.loss_scale.map(|loss_scale| loss_scale.scale()),
            loss: self.loss(self.trained.applied()),
            neftune_noise_alpha,
        }
    }

    /// What losses with these adapters are computed with.
    fn loss<'a>(&'a self, adapters: &'a AdapterSet) -> LossContext<'a> {
        LossContext {
            model: &self.model,
            adapters,
            reference: &self.reference,
            references: self.references(),
            objective: &*self.objective,
            chunk: self.train.loss_chunk(),
        }
    }

    /// Discards the micro-batches of the step in progress and does not count them.
    pub fn discard(&mut self) {
        self.num_micro_batches -= self.accumulated.losses.len() as u64;
        self.clear();
    }

    fn clear(&mut self) {
        self.accumulated = Accumulated::default();
        self.shared.clear();
    }

    /// Ends the step: averages over its target tokens, clips by the global norm, updates. Reads the device once.
    pub fn update(&mut self, learning_rate: f64) -> StepOutcome {
        let figures = self.reduce(Some(learning_rate));
        self.apply(figures, learning_rate)
    }

    /// Sums the step in progress over all ranks, and returns its loss and gradient norm. This is the only point of a step
    /// that waits for the device: after it, all forwards and backwards are finished. With the learning rate of the update, that
    /// is queued before, where the device can decide by itself whether to make it, so it does not wait for the host in turn; then
    /// only [`apply`](Self::apply) may follow.
    #[must_use]
    pub fn reduce(&mut self, learning_rate: Option<f64>) -> StepOutcome {
        let Accumulated { losses, rewards, .. } = &mut self.accumulated;
        let (losses, mut total) = (std::mem::take(losses), *rewards);
        let num_own = losses.len() as u64;
        let mut numbers = Vec::new();
        for MicroBatchLoss { losses, count, target_tokens, figures, .. } in losses {
            total += LossSum { sum: 0.0, count, target_tokens, figures };
            numbers.push(losses);
        }
        if self.is_shared() {
            total.sum = sum(&read(std::mem::take(&mut numbers), "the loss"));
            total = self.sum_over_ranks(&total, num_own);
        } else {
            self.accumulated.grads.keep_like(self.trained.adapters());
        }
        if total.target_tokens == 0 {
            return StepOutcome::new(&total, 0.0);
        }
        let grads = &self.accumulated.grads;
        let has_grads = !grads.is_empty();
        if has_grads {
            let squares = || grads.sum_of_squares(self.trained.optimizer.place());
            numbers.push(profile::measure("grad_norm", Cost::default, squares));
        }
        let numbers = joined(numbers);
        // Of equal rewards there may be no update, which the numbers do not tell.
        let has_update = has_grads && !has_equal_rewards(&total.figures);
        if let (Some(learning_rate), Some(numbers), true) = (learning_rate, &numbers, has_update) {
            self.queue_update(numbers, learning_rate, total.count);
        }
        let mut numbers = numbers.map_or_else(Vec::new, |numbers| faults::read(numbers, "the loss"));
        let squares = if has_grads { numbers.pop().map_or(f64::NAN, f64::from) } else { 0.0 };
        if !self.is_shared() {
            total.sum = sum(&numbers);
        }
        StepOutcome::new(&total, squares)
    }

    /// Queues the update, where the device can tell from `numbers` whether the gradients are to be used, and how.
    fn queue_update(&mut self, numbers: &Tensor<1>, learning_rate: f64, count: f64) {
        let optimizer = &self.trained.optimizer;
        if self.is_shared() || !optimizer.can_queue() {
            return;
        }
        if let Some(factor) = optimizer.place().grad_factor(numbers, self.train.max_grad_norm, count) {
            let grads = std::mem::take(&mut self.accumulated.grads);
            let (optimizer, adapters) = self.trained.change();
            optimizer.queue(adapters, &grads, learning_rate, &factor);
            self.accumulated.is_queued = true;
            self.flush();
        }
    }

    /// A GPU begins with what is queued. What is wrong with a device is said where it is read.
    fn flush(&self) {
        drop(self.model.device().flush());
    }

    /// Updates with the gradients that `figures` (from [`reduce`](Self::reduce)) describe, and ends the step. Does not wait:
    /// a GPU may still be updating when this returns.
    pub fn apply(&mut self, figures: StepOutcome, learning_rate: f64) -> StepOutcome {
        let Accumulated { grads, is_queued, .. } = std::mem::take(&mut self.accumulated);
        self.clear();
        if is_queued {
            if figures.skipped.is_some() {
                self.trained.optimizer.take_back();
            }
        } else if figures.skipped.is_none() && !grads.is_empty() {
            // As in torch.nn.utils.clip_grad_norm_.
            let clip = match self.train.max_grad_norm {
                max if max > 0.0 => (max / (figures.grad_norm + 1e-6)).min(1.0),
                _ => 1.0,
            };
            let (optimizer, adapters) = self.trained.change();
            optimizer.update(adapters, &grads, learning_rate, clip / figures.count);
            // While the next step is prepared.
            self.flush();
        }
        if figures.target_tokens > 0 {
            let was_finite =
                !matches!(figures.skipped, Some(SkipReason::NonFiniteLoss | SkipReason::NonFiniteGradient));
            self.loss_scale = self.loss_scale.map(|loss_scale| loss_scale.after(was_finite));
        }
        figures
    }

    /// The gradient sums of the step in progress.
    #[must_use]
    pub fn grads(&self) -> &GradSums {
        &self.accumulated.grads
    }

    /// What the objective makes of a micro-batch without dropout and without gradients.
    #[must_use]
    pub fn eval_loss(&self, batch: &Batch) -> LossSum {
        self.loss(self.adapters()).eval_loss(batch)
    }

    /// Log-probability of every target token of a micro-batch in nats, as the objective sees it, by the adapters in training
    /// without dropout.
    #[must_use]
    pub fn log_probabilities(&self, batch: &Batch) -> Vec<f32> {
        self.loss(self.trained_adapters()).log_probabilities(batch)
    }

    /// Logarithm of the probability of a text's target tokens.
    #[must_use]
    pub fn log_likelihood(&self, text: &Batch) -> f64 {
        let of_tokens = LossContext { objective: &CrossEntropy, ..self.loss(self.adapters()) }.log_probabilities(text);
        of_tokens.iter().map(|&log_probability| f64::from(log_probability)).sum()
    }

    /// Number of target tokens of a micro-batch that are the most likely ones.
    #[must_use]
    pub fn num_right_tokens(&self, batch: &Batch) -> usize {
        self.loss(self.adapters()).num_right_tokens(batch)
    }

    /// State for a checkpoint, without the adapters.
    #[must_use]
    pub fn state(&self) -> StepState {
        let mut moments = self.trained.optimizer.state(self.trained.adapters());
        moments.extend(self.references.state());
        StepState { moments, counters: self.counters() }
    }

    /// The part of [`state`](Self::state) that is in host memory.
    #[must_use]
    pub fn counters(&self) -> StepCounters {
        let optimizer = &self.trained.optimizer;
        StepCounters {
            num_updates: optimizer.num_updates(),
            step_weights: optimizer.step_weights(),
            num_micro_batches: self.num_micro_batches,
            loss_scale: self.loss_scale,
        }
    }

    /// Replaces the adapters, also their average, by others of the same shape; the optimizer's states stay those of the former.
    pub fn replace_adapters(&mut self, adapters: AdapterSet) {
        self.trained.replace(adapters);
    }

    /// Continues from a checkpoint's adapters and state.
    ///
    /// # Errors
    /// Moments that do not belong to these adapters.
    pub fn restore(&mut self, adapters: AdapterSet, state: &StepState) -> Result<(), OptimizerStateError> {
        let StepCounters { num_updates, step_weights, .. } = state.counters;
        let mut moments = state.moments.clone();
        self.references = References::restored(&mut moments);
        let adapters = self.trained.of_written(adapters);
        let (optimizer, trained) = self.trained.change();
        *trained = optimizer.restore(adapters, &moments, (num_updates, step_weights))?;
        self.num_micro_batches = state.counters.num_micro_batches;
        // A run that switches to f16 from another precision starts with a new scale.
        self.loss_scale = self.loss_scale.map(|fresh| state.counters.loss_scale.unwrap_or(fresh));
        self.clear();
        Ok(())
    }
}

fn sum(numbers: &[f32]) -> f64 {
    numbers.iter().map(|&number| f64::from(number)).sum()
}
