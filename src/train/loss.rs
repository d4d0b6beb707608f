//! The loss of a micro-batch, from the last block's output.
//!
//! Only rows that carry loss go through the norm and the head, a chunk of them at a time.

pub mod score;

use std::ops::{AddAssign, Range};

use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor};
use serde::{Deserialize, Serialize};

use super::objective::{Objective, Rows};
use super::references::{References, digests};
use crate::config::TrainConfig;
use crate::data::batch::{Answer, Batch, Target};
use crate::lora::{AdapterSet, FullTensor};
use crate::measure::figures::ObjectiveFigures;
use crate::model::Model;
use crate::ops::cross_entropy::{
    Head, HeadGrads, LossAndGrad, LossChunk, linear_cross_entropy, linear_cross_entropy_loss,
};
use crate::ops::norm::rms_norm_weight_grad;
use crate::ops::product::matmul;
use crate::ops::profile;
use crate::util::faults;
use crate::util::stats::as_f64;
use score::{negative_scores, of_normed, vector_grad};

impl TrainConfig {
    /// Number of target tokens whose logits exist at a time.
    #[must_use]
    pub fn loss_chunk(&self) -> LossChunk {
        self.loss_chunk_tokens.map_or(LossChunk::Auto, LossChunk::Tokens)
    }
}

/// Sum of losses over what the objective counts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LossSum {
    /// Of cross-entropies in nats.
    pub sum: f64,
    /// What it is divided by; of cross-entropies the number of target tokens.
    pub count: f64,
    /// Number of target tokens.
    pub target_tokens: u64,
    /// What else the objective reports.
    pub figures: ObjectiveFigures,
}

impl LossSum {
    /// The mean loss; `None` where nothing is counted.
    #[must_use]
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0.0).then(|| self.sum / self.count)
    }

    /// `exp` of the mean loss; `None` where the loss is not a cross-entropy.
    #[must_use]
    pub fn perplexity(&self) -> Option<f64> {
        self.mean().filter(|_| self.figures == ObjectiveFigures::default()).map(f64::exp)
    }
}

impl AddAssign for LossSum {
    fn add_assign(&mut self, other: Self) {
        self.sum += other.sum;
        self.count += other.count;
        self.target_tokens += other.target_tokens;
        self.figures += other.figures;
    }
}

/// Dynamic loss scale of `f16` (Micikevicius et al., 2018), with the constants of `torch.amp.GradScaler`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    scale: f64,
    good_steps: u32,
}

impl Default for LossScale {
    /// Before the first step.
    fn default() -> Self {
        Self { scale: 65_536.0, good_steps: 0 }
    }
}

impl LossScale {
    const GROWTH_INTERVAL: u32 = 2000;

    /// The factor by which the loss is multiplied.
    #[must_use]
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// After a step whose loss and gradient were finite, or not.
    #[must_use]
    pub fn after(self, finite: bool) -> Self {
        match (finite, self.good_steps + 1) {
            (false, _) => Self { scale: (self.scale * 0.5).max(1.0), good_steps: 0 },
            (true, Self::GROWTH_INTERVAL) => Self { scale: self.scale * 2.0, good_steps: 0 },
            (true, good_steps) => Self { good_steps, ..self },
        }
    }
}

/// The target tokens of a micro-batch.
///
/// More targets fill up a multiple that the place asks for: the first row again, with token 0.
/// Their losses are cut off, and their gradients go nowhere.
#[derive(Debug)]
pub struct Targets {
    /// Rows of the last block's output that carry loss, on the device.
    rows: Tensor<1, Int>,
    /// The token that each of them is to predict.
    tokens: Vec<u32>,
    /// Number of targets without those that fill up.
    num_tokens: usize,
    /// The targets of each document.
    by_row: Vec<Range<usize>>,
    answers: Vec<Answer>,
    /// Of each document of a preference, see [`digests`].
    digests: Vec<u64>,
    /// See [`Batch::written`].
    written: Vec<f32>,
    /// Where there are such, the target of every row of the last block's output, or -1, `[tokens]`.
    of_rows: Option<Tensor<1, Int>>,
}

impl Targets {
    /// The targets of a batch that is arranged for this model.
    #[must_use]
    pub fn new(model: &Model, batch: &Batch) -> Self {
        let index = |position| i32::try_from(position).unwrap_or(i32::MAX);
        let on_device = |rows: &[i32]| Tensor::from_data(rows, (&model.device(), DType::I32));
        let mut rows: Vec<i32> = batch.targets.iter().map(|target| index(target.position)).collect();
        let mut tokens: Vec<u32> = batch.targets.iter().map(|target| target.token).collect();
        let num_tokens = tokens.len();
        let multiple = model.place().target_multiple();
        let of_rows = (multiple > 1).then(|| {
            let mut of_rows = vec![-1; batch.input_ids.len()];
            for (target, row) in batch.targets.iter().enumerate() {
                of_rows[row.position] = index(target);
            }
            let filled_up = num_tokens.next_multiple_of(multiple);
            rows.resize(filled_up, rows.first().copied().unwrap_or(0));
            tokens.resize(filled_up, 0);
            on_device(&of_rows)
        });
        let mut first = 0;
        let by_row = batch.documents.iter().map(|document| {
            let is_in = |target: &&Target| target.position < document.start + document.len;
            let start = first;
            first += batch.targets[start..].iter().take_while(is_in).count();
            start..first
        });
        let (by_row, answers, written) = (by_row.collect(), batch.answers.clone(), batch.written.clone());
        let digests = if answers.is_empty() { Vec::new() } else { digests(batch) };
        Self { by_row, answers, digests, written, rows: on_device(&rows), tokens, num_tokens, of_rows }
    }

    /// Number of target tokens.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Whether `references` have all that an objective needs of the reference.
    pub(super) fn are_known(&self, references: Option<&References>) -> bool {
        references.is_some_and(|references| references.of(&self.digests).is_some())
    }

    /// Log-probabilities by the reference of every target token and of every document: of documents that are known, only
    /// these; of others, those that `compute` finds for tokens, and where they are to be kept, of documents.
    fn of_reference(
        &self,
        references: Option<&References>,
        compute: impl FnOnce() -> Vec<f32>,
    ) -> (Vec<f32>, Vec<f64>) {
        let Some(references) = references else { return (compute(), Vec::new()) };
        if let Some(known) = references.of(&self.digests) {
            return (Vec::new(), known);
        }
        let of_tokens = compute();
        let sum = |range: &Range<usize>| of_tokens[range.clone()].iter().map(|&p| f64::from(p)).sum::<f64>();
        let of_documents: Vec<f64> = self.by_row.iter().map(sum).collect();
        references.keep(&self.digests, &of_documents);
        (of_tokens, of_documents)
    }

    /// The input of the head for each, `[targets, hidden_size]`, from the last block's output.
    fn normed(&self, model: &Model, adapters: &AdapterSet, x: &Tensor<2>) -> Tensor<2> {
        let hidden = x.clone().select(0, self.rows.clone());
        model.own_norm(adapters).forward(model.place(), &hidden, model.config.rms_norm_eps).0
    }

    /// Log-probability of each in nats, with logits divided by the temperature.
    fn log_probabilities(
        &self,
        model: &Model,
        adapters: &AdapterSet,
        normed: &Tensor<2>,
        temperature: Option<f64>,
        chunk: LossChunk,
    ) -> Vec<f32> {
        let head = model.own_head(adapters);
        let (normed, head) = at_temperature(head.head(), normed.clone(), temperature);
        let losses = linear_cross_entropy_loss(model.place(), &normed, head, &self.tokens, chunk);
        faults::read(losses.narrow(0, 0, self.num_tokens).neg(), "the log-probabilities")
    }

    /// Logarithm of the sum of the squared probabilities of all tokens at each, where `objective` needs it.
    fn log_sums_of_squares(
        &self,
        model: &Model,
        head: Head<'_>,
        normed: &Tensor<2>,
        objective: &dyn Objective,
        chunk: LossChunk,
    ) -> Vec<f32> {
        if !objective.needs_squares() {
            return Vec::new();
        }
        let size = chunk.tokens(model.place(), model.lm_head.dims(), self.num_tokens);
        let of_chunk = |start: usize| {
            let normed = normed.clone().narrow(0, start, size.min(self.num_tokens - start));
            let logits = head.logits(model.place(), &normed);
            let logits = logits.clone() - logits.max_dim(1);
            let [of_squares, of_all] = [logits.clone() * 2.0, logits].map(|logits| logits.exp().sum_dim(1).log());
            faults::read((of_squares - of_all * 2.0).squeeze_dim::<1>(1), "the squared probabilities")
        };
        (0..self.num_tokens).step_by(size).flat_map(of_chunk).collect()
    }
}

/// The loss of a micro-batch.
#[derive(Debug)]
pub struct MicroBatchLoss {
    /// Numbers whose sum is the loss, `f32`, still on the device.
    pub losses: Tensor<1>,
    /// Its part of what the step's sums are divided by.
    pub count: f64,
    /// Number of target tokens.
    pub target_tokens: u64,
    /// What else the objective reports.
    pub figures: ObjectiveFigures,
    /// Gradients of what is trained as a whole behind the last block, the embedding there as the head. That of the head that
    /// scores is that of the loss; the others are `grad_scale` times it.
    pub grads: Vec<(FullTensor, Tensor<2>)>,
}

/// What a micro-batch's losses are computed with, beside the model.
#[derive(Debug, Default)]
pub struct Compared<'a> {
    /// The output of the last block of the reference, `[tokens, hidden_size]`, where the objective needs it.
    pub reference: Option<Tensor<2>>,
    /// What is known of the reference, where the objective needs no more.
    pub references: Option<&'a References>,
    /// By how much answers to other prompts are likelier than by the reference, see [`Rows::divergence`].
    pub divergence: f64,
}

/// The loss of a micro-batch, and `grad_scale` times its gradient with respect to the last block's output `x`,
/// `[tokens, hidden_size]`. `reference` are the adapters before training.
#[must_use]
#[expect(clippy::too_many_arguments, reason = "what a loss depends on")]
pub fn loss_and_grad(
    model: &Model,
    [adapters, reference]: [&AdapterSet; 2],
    x: Tensor<2>,
    targets: &Targets,
    compared: Compared<'_>,
    objective: &dyn Objective,
    grad_scale: f64,
    chunk: LossChunk,
) -> (MicroBatchLoss, Tensor<2>) {
    let temperature = objective.temperature();
    let of_reference =
        |x| targets.log_probabilities(model, reference, &targets.normed(model, reference, &x), temperature, chunk);
    let of_reference = || compared.reference.map(of_reference).unwrap_or_default();
    let (reference, reference_answers) = targets.of_reference(compared.references, of_reference);
    let Targets { rows, tokens, num_tokens, by_row, answers, written, .. } = targets;
    let num_tokens = *num_tokens;
    let (place, shape, width) = (model.place(), x.dims(), profile::passes(&x, 2));
    let hidden = profile::measure("target_rows", || width.clone(), || x.select(0, rows.clone()));
    let norm = model.own_norm(adapters);
    let (normed, rstd) = norm.forward(place, &hidden, model.config.rms_norm_eps);
    let own_head = model.own_head(adapters);
    let head = own_head.head();
    let (scaled, scaled_head) = at_temperature(head, normed.clone(), temperature);
    let weigh = |losses: &Tensor<1>| {
        let losses = losses.clone().narrow(0, 0, num_tokens);
        let needed = objective.needs_log_probabilities();
        let log_probabilities = if needed { faults::read(losses.neg(), "the log-probabilities") } else { Vec::new() };
        objective.weigh(&Rows {
            targets: by_row,
            answers,
            log_probabilities: &log_probabilities,
            reference: &reference,
            reference_answers: &reference_answers,
            written,
            log_sums_of_squares: &targets.log_sums_of_squares(model, head, &normed, objective, chunk),
            divergence: compared.divergence,
        })
    };
    // The gradient of the whole head is a sum over the targets, whose weights are known before it.
    let trained_head = adapters.full.iter().map(|(full, _)| full).find(|full| full.is_head());
    let weighed = trained_head.map(|_| {
        let losses = || linear_cross_entropy_loss(place, &scaled, scaled_head, tokens, chunk);
        weigh(&if objective.needs_log_probabilities() {
            losses()
        } else {
            Tensor::zeros([num_tokens], &scaled.device())
        })
    });
    let inputs = weighed.as_ref().map(|weighed| {
        weighted(scaled.clone().cast(DType::F32), weighed.weights.clone().unwrap_or_else(|| vec![1.0; num_tokens]))
    });
    let scaled_head = Head { inputs: inputs.as_ref(), ..scaled_head };
    // Every token's own gradient, which its weight multiplies once it is known: the head's products run once.
    let LossAndGrad { losses, grads } = match adapters.score() {
        Some(score) => negative_scores(&normed, score, grad_scale),
        None => linear_cross_entropy(place, &scaled, scaled_head, tokens, grad_scale, chunk),
    };
    let losses = losses.narrow(0, 0, num_tokens);
    let weighed = weighed.unwrap_or_else(|| weigh(&losses));
    let weigh = |grads: Tensor<2>| match &weighed.weights {
        Some(weights) => weighted(grads, weights.clone()),
        None => grads,
    };
    let HeadGrads { dhidden, drows, dweight } = grads;
    let dhidden = weigh(dhidden);
    // What fills up goes nowhere here either.
    let of_targets = |x: Tensor<2>| x.narrow(0, 0, num_tokens).cast(DType::F32);
    let mut grads: Vec<(FullTensor, Tensor<2>)> = trained_head.zip(dweight).into_iter().collect();
    grads.extend(drows.map(|drows| {
        let drows = of_targets(weigh(drows)).transpose();
        (FullTensor::Tokens, matmul(&drows, &of_targets(scaled), place.f32_products()))
    }));
    if let (Some(_), Some(weights)) = (adapters.score(), &weighed.weights) {
        grads.push((FullTensor::Score, vector_grad(&normed, weights)));
    }
    let dhidden = match temperature {
        Some(temperature) => dhidden / temperature,
        None => dhidden,
    };
    let last_norm = FullTensor::Norm(model.config.last_norm);
    grads.extend(adapters.full.get(last_norm).map(|_| {
        let all = [&dhidden, &hidden].map(|x| x.clone().narrow(0, 0, num_tokens));
        let grad = rms_norm_weight_grad(&all[0], &all[1], &rstd.clone().narrow(0, 0, num_tokens));
        (last_norm, model.own_norm_backward(grad))
    }));
    let dhidden = norm.backward(place, &dhidden, &hidden, &rstd, hidden.zeros_like());
    let scatter = || match targets.of_rows.clone() {
        Some(of_rows) => gather_grads(dhidden, of_rows),
        None => {
            let zeros = Tensor::zeros(shape, (&dhidden.device(), dhidden.dtype()));
            zeros.select_assign(0, rows.clone(), dhidden, IndexingUpdateOp::Add)
        }
    };
    #[expect(clippy::cast_possible_truncation, reason = "read as f32")]
    let losses = match weighed.loss {
        Some(loss) => Tensor::from_data([loss as f32], (&losses.device(), DType::F32)),
        None => losses,
    };
    let (count, figures) = (weighed.count, weighed.figures);
    let loss = MicroBatchLoss { losses, count, target_tokens: num_tokens as u64, figures, grads };
    (loss, profile::measure("target_rows", || width, scatter))
}

/// The head and its input such that all logits are divided by the temperature.
fn at_temperature(head: Head<'_>, normed: Tensor<2>, temperature: Option<f64>) -> (Tensor<2>, Head<'_>) {
    match temperature {
        Some(temperature) => {
            let soft_cap = head.soft_cap.map(|cap| cap / temperature);
            (normed / temperature, Head { soft_cap, ..head })
        }
        None => (normed, head),
    }
}

/// Rows times their weights; those of targets that fill up weigh nothing.
fn weighted(rows: Tensor<2>, mut weights: Vec<f32>) -> Tensor<2> {
    weights.resize(rows.dims()[0], 0.0);
    let (dtype, device) = (rows.dtype(), rows.device());
    let weights = Tensor::<1>::from_data(weights.as_slice(), (&device, DType::F32));
    (rows.cast(DType::F32) * weights.unsqueeze_dim(1)).cast(dtype)
}

/// The gradients of all rows: that of the row's target, or zero. A scatter would take them one after the other.
fn gather_grads(dhidden: Tensor<2>, of_rows: Tensor<1, Int>) -> Tensor<2> {
    let has_none = of_rows.clone().lower_elem(0);
    let of_rows = of_rows.mask_fill(has_none.clone(), 0);
    dhidden.select(0, of_rows).mask_fill(has_none.unsqueeze_dim(1), 0.0)
}

/// The targets of a micro-batch, and the input of the head for each, `[targets, hidden_size]`; without dropout.
pub(super) fn normed_targets(model: &Model, adapters: &AdapterSet, batch: &Batch) -> (Tensor<2>, Targets) {
    let batch = &*model.arranged(batch, false);
    let targets = Targets::new(model, batch);
    (targets.normed(model, adapters, &model.hidden(batch, adapters)), targets)
}

/// Log-probability of every target token of a micro-batch in nats, without dropout; logits are divided by `temperature`.
#[must_use]
pub fn log_probabilities(
    model: &Model,
    adapters: &AdapterSet,
    batch: &Batch,
    temperature: Option<f64>,
    chunk: LossChunk,
) -> Vec<f32> {
    if batch.targets.is_empty() {
        return Vec::new();
    }
    let (normed, targets) = normed_targets(model, adapters, batch);
    targets.log_probabilities(model, adapters, &normed, temperature, chunk)
}

/// By how much the mean log-probability of a micro-batch's documents is above the reference's, in nats, without dropout.
#[must_use]
pub fn divergence(
    model: &Model,
    adapters: &AdapterSet,
    reference: &AdapterSet,
    batch: &Batch,
    chunk: LossChunk,
) -> f64 {
    let of = |adapters| log_probabilities(model, adapters, batch, None, chunk);
    let sum = |adapters| of(adapters).iter().map(|&p| f64::from(p)).sum::<f64>();
    (sum(adapters) - sum(reference)) / as_f64(batch.documents.len().max(1))
}

/// Number of target tokens of a micro-batch that the model finds the most likely ones, without dropout.
#[must_use]
pub fn num_right_tokens(model: &Model, adapters: &AdapterSet, batch: &Batch, chunk: LossChunk) -> usize {
    let (normed, Targets { tokens, num_tokens, .. }) = normed_targets(model, adapters, batch);
    let head = model.own_head(adapters);
    let head = head.head();
    let size = chunk.tokens(model.place(), model.lm_head.dims(), tokens.len());
    let num_right = |(index, targets): (usize, &[u32])| {
        let hidden = normed.clone().narrow(0, index * size, targets.len());
        let logits: Vec<f32> = faults::read(head.logits(model.place(), &hidden), "the logits of a token");
        let is_right = |(logits, token): &(&[f32], &u32)| logits.iter().all(|logit| *logit <= logits[**token as usize]);
        logits.chunks(model.config.vocab_size).zip(targets).filter(is_right).count()
    };
    tokens[..num_tokens].chunks(size).enumerate().map(num_right).sum()
}

/// Loss of a micro-batch, without dropout and without gradients; `reference` are the adapters before training, `references`
/// what is known of them.
#[must_use]
pub fn eval_loss(
    model: &Model,
    [adapters, reference]: [&AdapterSet; 2],
    references: Option<&References>,
    batch: &Batch,
    objective: &dyn Objective,
    chunk: LossChunk,
) -> LossSum {
    if batch.targets.is_empty() {
        return LossSum::default();
    }
    let (normed, targets) = normed_targets(model, adapters, batch);
    let temperature = objective.temperature();
    let of_targets = match adapters.score() {
        Some(score) => of_normed(&normed, &targets, score),
        None => targets.log_probabilities(model, adapters, &normed, temperature, chunk),
    };
    let head = model.own_head(adapters);
    let of_reference = || {
        if objective.needs_reference() {
            log_probabilities(model, reference, batch, temperature, chunk)
        } else {
            vec![]
        }
    };
    let (of_reference, reference_answers) = targets.of_reference(references, of_reference);
    let mismatched = batch.mismatched.as_ref().filter(|_| objective.needs_divergence());
    let weighed = objective.weigh(&Rows {
        targets: &targets.by_row,
        answers: &targets.answers,
        log_probabilities: &of_targets,
        reference: &of_reference,
        reference_answers: &reference_answers,
        written: &targets.written,
        log_sums_of_squares: &targets.log_sums_of_squares(model, head.head(), &normed, objective, chunk),
        divergence: mismatched.map_or(0.0, |batch| divergence(model, adapters, reference, batch, chunk)),
    });
    let cross_entropy = || -of_targets.iter().map(|&log_probability| f64::from(log_probability)).sum::<f64>();
    LossSum {
        sum: weighed.loss.unwrap_or_else(cross_entropy),
        count: weighed.count,
        target_tokens: batch.num_target_tokens() as u64,
        figures: weighed.figures,
    }
}
