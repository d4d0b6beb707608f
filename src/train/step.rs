//! One training step: computes gradients from micro-batches and updates the adapters. No input or output.

mod shared;

use std::cell::OnceCell;
use std::time::Instant;

use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::adapters::Trained;
use super::backprop::{self, Forward, Inputs, Options};
use super::grads::{GradSums, joined, read};
use super::loss::{LossScale, LossSum, MicroBatchLoss, eval_loss, log_probabilities, num_right_tokens};
use super::objective::{CrossEntropy, Objective};
use super::offload::HostParking;
use super::optimizer::{Optimizer, OptimizerStateError, StepWeights};
use super::ranks::{Alone, RankFigures, Ranks};
use super::references::{References, digests};
use crate::config::{GradientCheckpointing, OptimizerConfig, TrainConfig};
use crate::data::batch::Batch;
use crate::lora::AdapterSet;
use crate::measure::figures::ObjectiveFigures;
use crate::model::Model;
use crate::ops::cross_entropy::LossChunk;
use crate::ops::profile::{self, Cost};
use crate::save::checkpoint::HostTensor;
use crate::util::faults;
use crate::util::stats::{as_f64, as_u64, digest};

pub use shared::Says;

/// Larger logits would take memory that a small micro-batch does not need.
const MOST_LOGITS_BYTES: usize = 256 << 20;

/// Model, adapters and optimizer, and the step in progress.
#[derive(Debug)]
pub struct TrainStep {
    model: Model,
    trained: Trained,
    /// Whether their average is evaluated and written.
    averages: bool,
    optimizer: Optimizer,
    gradient_checkpointing: GradientCheckpointing,
    layered_accumulation: bool,
    loss_chunk: LossChunk,
    neftune_noise_alpha: Option<f64>,
    first_page: OnceCell<()>,
    /// Started when the first block input is moved to host memory.
    parking: OnceCell<HostParking>,
    max_grad_norm: f64,
    seed: u64,
    loss_scale: Option<LossScale>,
    /// Number of micro-batches so far, in all steps; seeds the dropout masks.
    num_micro_batches: u64,
    sums: GradSums,
    /// Whether the update with them was queued before the host knew their norm.
    is_queued: bool,
    losses: Vec<MicroBatchLoss>,
    objective: Box<dyn Objective>,
    /// The adapters before training.
    reference: AdapterSet,
    /// What is known of the model with these.
    references: References,
    ranks: Box<dyn Ranks>,
    /// Micro-batches of the step in progress that are not this rank's.
    num_of_others: u64,
    /// Of this rank's, those that have had no backward, where several ranks share the step.
    num_left: Option<usize>,
    says: Says,
    /// What is reported of the answers of the step in progress, where the model has written them.
    rewards: ObjectiveFigures,
    /// Start of the step in progress.
    start: Instant,
    own: RankFigures,
    of_ranks: Vec<RankFigures>,
}

/// The result of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepOutcome {
    /// Mean loss of what the step counts; of target tokens in nats.
    pub loss: f64,
    /// Global norm of the gradient of the mean loss, before clipping.
    pub grad_norm: f64,
    /// What its sums were divided by.
    pub count: f64,
    /// Number of tokens that carried loss.
    pub target_tokens: u64,
    /// What else the objective reports.
    pub figures: ObjectiveFigures,
    /// Why there was no update, if it was skipped.
    pub skipped: Option<SkipReason>,
}

/// Why a step made no update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipReason {
    /// The loss was not a finite number.
    NonFiniteLoss,
    /// The gradient was not finite. In `f16` the loss scale was too high, and has been halved.
    NonFiniteGradient,
    /// No token carried loss.
    NoTargetTokens,
    /// All answers to each prompt had the same reward.
    EqualRewards,
}

impl SkipReason {
    /// The reason as text for the user.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::NonFiniteLoss => "no update, its loss is not a finite number",
            Self::NonFiniteGradient => "no update, its gradient is not finite",
            Self::NoTargetTokens => "no update, none of its tokens carries loss",
            Self::EqualRewards => {
                "no update, all answers to each of its prompts have the same reward\n  hint: other prompts, a larger \
                 `num_generations`, or a reward that some answers get in part"
            }
        }
    }
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

/// The pools of a GPU make pages as large as the largest tensor so far: were that one of a later block or the logits, the pages until
/// then would be of no use to it.
fn make_first_page(model: &Model, chunk: LossChunk, tokens: usize) {
    let (place, head) = (model.place(), model.lm_head.dims());
    let rows = chunk.most_tokens(place, head).min(LossChunk::Auto.most_tokens(place, head));
    let logits = Some(rows * head[0]).filter(|numbers| numbers * model.compute.size() <= MOST_LOGITS_BYTES);
    let widest = model.config.blocks.iter().map(|block| block.widest_activation(place.stacks_weights())).max();
    let numbers = (tokens * widest.unwrap_or_default()).max(logits.unwrap_or_default());
    if place.is_host() {
        return;
    }
    let largest = Tensor::<1>::zeros([numbers], (&model.device(), model.compute));
    // Else it is dropped before it is made. What fails here fails again where a result is read.
    drop(model.device().sync());
    drop(largest);
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
            averages: optimizer.averages(),
            optimizer: Optimizer::new(optimizer.clone(), loraplus_lr_ratio, &adapters),
            gradient_checkpointing: train.gradient_checkpointing,
            layered_accumulation: train.layered_accumulation,
            loss_chunk: train.loss_chunk(),
            neftune_noise_alpha: train.neftune_noise_alpha,
            first_page: OnceCell::new(),
            parking: OnceCell::new(),
            max_grad_norm: train.max_grad_norm,
            seed,
            loss_scale: (model.compute == DType::F16).then(LossScale::default),
            num_micro_batches: 0,
            sums: GradSums::default(),
            is_queued: false,
            losses: Vec::new(),
            objective: Box::new(CrossEntropy),
            reference: AdapterSet::none(model.blocks.len()),
            references: References::default(),
            ranks: Box::new(Alone),
            num_of_others: 0,
            num_left: None,
            says: Says::default(),
            rewards: ObjectiveFigures::default(),
            start: Instant::now(),
            own: RankFigures::default(),
            of_ranks: Vec::new(),
            model,
            trained: Trained::new(adapters, None),
        }
    }

    /// The same where `taken` takes a part out of the base, as which the adapters started.
    #[must_use]
    pub fn with_taken(mut self, taken: AdapterSet) -> Self {
        self.trained = Trained::new(self.trained.adapters().clone(), Some(taken));
        self
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

    /// Reports the rewards of the answers of the step in progress, which all ranks know.
    pub fn say_rewards(&mut self, rewards: ObjectiveFigures) {
        self.rewards = if self.ranks.rank() == 0 { rewards } else { ObjectiveFigures::default() };
    }

    /// Whether the objective compares with the model before training.
    #[must_use]
    pub fn needs_reference(&self) -> bool {
        self.objective.needs_reference()
    }

    /// What is known of the reference, where no more of it is needed. Several ranks keep nothing: which rows each of them
    /// has seen is in no checkpoint.
    fn references(&self) -> Option<&References> {
        (self.objective.keeps_reference() && !self.is_shared()).then_some(&self.references)
    }

    /// Whether the next forward of a micro-batch needs none of the reference beside it.
    #[must_use]
    pub fn knows_reference(&self, batch: &Batch) -> bool {
        self.references().is_some_and(|references| references.of(&digests(batch)).is_some())
    }

    /// The same as one of several ranks.
    #[must_use]
    pub fn with_ranks(self, ranks: Box<dyn Ranks>) -> Self {
        Self { ranks, ..self }
    }

    /// The frozen model.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The adapters that are evaluated and written: those in training, or their average.
    #[must_use]
    pub fn adapters(&self) -> &AdapterSet {
        if self.averages {
            self.trained.averaged(|adapters| self.optimizer.averaged(adapters))
        } else {
            self.trained.applied()
        }
    }

    /// The adapters in training.
    #[must_use]
    pub fn trained_adapters(&self) -> &AdapterSet {
        self.trained.applied()
    }

    /// Digest of B of the first and the last adapter, and of what else is small and trained in full: every update changes them. Reads
    /// the device.
    #[must_use]
    pub fn adapters_digest(&self) -> u64 {
        let mut all = self.trained.adapters().iter().map(|adapter| &adapter.matrices.b);
        let (first, last) = (all.next(), all.last());
        let full = self.trained.adapters().full.iter().filter(|(full, _)| !full.is_module()).map(|(_, values)| values);
        let numbers = first.into_iter().chain(last).chain(full).flat_map(|b| faults::read(b.clone(), "an adapter"));
        digest(numbers.map(f32::to_bits))
    }

    /// Forward and backward of one micro-batch, added to the step in progress. Reads nothing from the device.
    pub fn forward_backward(&mut self, batch: &Batch) {
        self.accumulate(std::slice::from_ref(batch));
    }

    /// Forward and backward of micro-batches, as the recipe orders them, added to the step in progress. Reads nothing
    /// from the device.
    pub fn accumulate(&mut self, batches: &[Batch]) {
        for batches in batches.chunks(if self.layered_accumulation { batches.len().max(1) } else { 1 }) {
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
        self.first_page.get_or_init(|| make_first_page(&self.model, self.loss_chunk, tokens));
        Inputs::new(&self.model, batch, self.is_noisy())
    }

    /// Whether what a token gets depends on its place among those of the micro-batch.
    fn is_noisy(&self) -> bool {
        self.trained.adapters().dropout > 0.0 || self.neftune_noise_alpha.is_some()
    }

    /// Forward of micro-batches, block by block, with their losses.
    #[must_use]
    pub fn forward(&self, inputs: Vec<Inputs>) -> Forward {
        backprop::forward(&self.model, self.trained.applied(), inputs, self.options())
    }

    /// Backward of the micro-batches of the last forward, added to the step in progress.
    pub fn backward(&mut self, forward: Forward) {
        let mut sums = std::mem::take(&mut self.sums);
        let exchange = (self.num_left == Some(forward.num_micro_batches())).then(|| self.exchange());
        let (adapters, options) = (self.trained.applied(), self.options());
        let losses = backprop::backward(&self.model, adapters, forward, options, &mut sums, exchange);
        self.num_left = self.num_left.map(|left| left - losses.len());
        self.sums = sums;
        self.num_micro_batches += losses.len() as u64;
        self.losses.extend(losses);
    }

    /// Options for the next micro-batches.
    fn options(&self) -> Options<'_> {
        Options {
            num_recomputed: self.gradient_checkpointing.num_recomputed(self.model.blocks.len()),
            keeps_attention: self.gradient_checkpointing.keeps_attention(),
            parking: (self.gradient_checkpointing == GradientCheckpointing::Offload)
                .then(|| self.parking.get_or_init(|| HostParking::new(self.model.device()))),
            seed: self.seed,
            first_number: self.num_micro_batches,
            loss_scale: self.loss_scale.map(|loss_scale| loss_scale.scale()),
            objective: &*self.objective,
            reference: &self.reference,
            references: self.references(),
            loss_chunk: self.loss_chunk,
            neftune_noise_alpha: self.neftune_noise_alpha,
        }
    }

    /// Discards the micro-batches of the step in progress and does not count them.
    pub fn discard(&mut self) {
        self.num_micro_batches -= self.losses.len() as u64;
        self.clear();
    }

    fn clear(&mut self) {
        (self.sums, self.is_queued) = (GradSums::default(), false);
        self.losses.clear();
        (self.num_of_others, self.num_left) = (0, None);
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
        let losses = std::mem::take(&mut self.losses);
        let num_own = losses.len() as u64;
        let mut count = losses.iter().map(|loss| loss.count).sum::<f64>();
        let mut target_tokens = losses.iter().map(|loss| loss.target_tokens).sum::<u64>();
        let mut figures = std::mem::take(&mut self.rewards);
        losses.iter().for_each(|loss| figures += loss.figures);
        let mut numbers: Vec<_> = losses.into_iter().map(|loss| loss.losses).collect();
        let mut of_ranks = None;
        if self.ranks.size() > 1 {
            let loss = read(std::mem::take(&mut numbers), "the loss").iter().map(|&loss| f64::from(loss)).sum();
            let says = [self.says.stop, self.says.failed].map(|says| f64::from(u8::from(says)));
            let mut sums = [vec![loss, count, as_f64(target_tokens), says[0], says[1]], figures.numbers()].concat();
            let (start, mut own) = (self.start, self.own);
            let own = || {
                own.busy_seconds = start.elapsed().as_secs_f64();
                own
            };
            let (adapters, place) = (self.trained.adapters(), self.optimizer.place());
            self.of_ranks = self.sums.reduce(adapters, place, &mut *self.ranks, &mut sums, own);
            (count, target_tokens) = (sums[1], as_u64(sums[2]));
            of_ranks = Some(sums[0]);
            self.says = Says { stop: sums[3] > 0.0, failed: sums[4] > 0.0 };
            figures = ObjectiveFigures::of_numbers(&sums[5..]);
            // A step that is dropped is made again.
            let others = std::mem::take(&mut self.num_of_others);
            if self.says.failed {
                self.num_micro_batches -= num_own;
            } else {
                self.num_micro_batches += others;
            }
        } else {
            self.sums.keep_like(self.trained.adapters());
        }
        if target_tokens == 0 {
            let skipped = Some(SkipReason::NoTargetTokens);
            return StepOutcome { loss: 0.0, grad_norm: 0.0, count, target_tokens, figures, skipped };
        }
        let has_grads = !self.sums.is_empty();
        if has_grads {
            let squares = || self.sums.sum_of_squares(self.optimizer.place());
            numbers.push(profile::measure("grad_norm", Cost::default, squares));
        }
        let numbers = joined(numbers);
        // Of equal rewards there may be no update, which the numbers do not tell.
        let has_update = has_grads && figures.frac_reward_zero_std.value() != Some(1.0);
        if let (Some(learning_rate), Some(numbers), true) = (learning_rate, &numbers, has_update) {
            self.queue_update(numbers, learning_rate, count);
        }
        let mut numbers = numbers.map_or_else(Vec::new, |numbers| faults::read(numbers, "the loss"));
        let squares = if has_grads { numbers.pop().map_or(f64::NAN, f64::from) } else { 0.0 };
        let loss = of_ranks.unwrap_or_else(|| numbers.iter().map(|&loss| f64::from(loss)).sum::<f64>()) / count;
        let grad_norm = squares.sqrt() / count;
        let skipped = match (loss.is_finite(), grad_norm.is_finite()) {
            (false, _) => Some(SkipReason::NonFiniteLoss),
            (_, false) => Some(SkipReason::NonFiniteGradient),
            _ if grad_norm <= 0.0 && figures.frac_reward_zero_std.value() == Some(1.0) => {
                Some(SkipReason::EqualRewards)
            }
            _ => None,
        };
        StepOutcome { loss, grad_norm, count, target_tokens, figures, skipped }
    }

    /// Queues the update, where the device can tell from `numbers` whether the gradients are to be used, and how.
    fn queue_update(&mut self, numbers: &Tensor<1>, learning_rate: f64, count: f64) {
        if self.is_shared() || !self.optimizer.can_queue() {
            return;
        }
        if let Some(factor) = self.optimizer.place().grad_factor(numbers, self.max_grad_norm, count) {
            let sums = std::mem::take(&mut self.sums);
            self.optimizer.queue(self.trained.change(), &sums, learning_rate, &factor);
            self.is_queued = true;
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
        let (sums, is_queued) = (std::mem::take(&mut self.sums), self.is_queued);
        self.clear();
        if is_queued {
            if figures.skipped.is_some() {
                self.optimizer.take_back();
            }
        } else if figures.skipped.is_none() && !sums.is_empty() {
            // As in torch.nn.utils.clip_grad_norm_.
            let clip = match self.max_grad_norm {
                max if max > 0.0 => (max / (figures.grad_norm + 1e-6)).min(1.0),
                _ => 1.0,
            };
            self.optimizer.update(self.trained.change(), &sums, learning_rate, clip / figures.count);
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
        &self.sums
    }

    /// What the objective makes of a micro-batch without dropout and without gradients.
    #[must_use]
    pub fn eval_loss(&self, batch: &Batch) -> LossSum {
        let adapters = [self.adapters(), &self.reference];
        eval_loss(&self.model, adapters, self.references(), batch, &*self.objective, self.loss_chunk)
    }

    /// Log-probability of every target token of a micro-batch in nats, as the objective sees it, by the adapters in training
    /// without dropout.
    #[must_use]
    pub fn log_probabilities(&self, batch: &Batch) -> Vec<f32> {
        let temperature = self.objective.temperature();
        log_probabilities(&self.model, self.trained_adapters(), batch, temperature, self.loss_chunk)
    }

    /// Logarithm of the probability of a text's target tokens.
    #[must_use]
    pub fn log_likelihood(&self, text: &Batch) -> f64 {
        let of_tokens = log_probabilities(&self.model, self.adapters(), text, None, self.loss_chunk);
        of_tokens.iter().map(|&log_probability| f64::from(log_probability)).sum()
    }

    /// Number of target tokens of a micro-batch that are the most likely ones.
    #[must_use]
    pub fn num_right_tokens(&self, batch: &Batch) -> usize {
        num_right_tokens(&self.model, self.adapters(), batch, self.loss_chunk)
    }

    /// State for a checkpoint, without the adapters.
    #[must_use]
    pub fn state(&self) -> StepState {
        let mut moments = self.optimizer.state(self.trained.adapters());
        moments.extend(self.references.state());
        StepState { moments, counters: self.counters() }
    }

    /// The part of [`state`](Self::state) that is in host memory.
    #[must_use]
    pub fn counters(&self) -> StepCounters {
        StepCounters {
            num_updates: self.optimizer.num_updates(),
            step_weights: self.optimizer.step_weights(),
            num_micro_batches: self.num_micro_batches,
            loss_scale: self.loss_scale,
        }
    }

    /// Replaces the adapters, also their average, by others of the same shape; the optimizer's states stay those of the former.
    pub fn replace_adapters(&mut self, adapters: AdapterSet) {
        (self.trained, self.averages) = (Trained::new(adapters, None), false);
    }

    /// Continues from a checkpoint's adapters and state.
    ///
    /// # Errors
    /// Moments that do not belong to these adapters.
    pub fn restore(&mut self, adapters: AdapterSet, state: &StepState) -> Result<(), OptimizerStateError> {
        let StepCounters { num_updates, step_weights, .. } = state.counters;
        let adapters = self.trained.of_written(adapters);
        let mut moments = state.moments.clone();
        self.references = References::restored(&mut moments);
        *self.trained.change() = self.optimizer.restore(adapters, &moments, (num_updates, step_weights))?;
        self.num_micro_batches = state.counters.num_micro_batches;
        // A run that switches to f16 from another precision starts with a new scale.
        self.loss_scale = self.loss_scale.map(|fresh| state.counters.loss_scale.unwrap_or(fresh));
        self.clear();
        Ok(())
    }
}
