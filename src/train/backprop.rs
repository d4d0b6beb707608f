//! Block-wise backpropagation: the graph of the whole model never exists.
//!
//! The forward runs the blocks in order and keeps what each block's backward needs, or only the block's input
//! (with it, perhaps what attention gives).
//! The loss and the gradient of the last hidden states are computed in chunks of target tokens. The backward runs the
//! blocks in reverse order, and adds the adapters' gradients to the sums block by block. Several micro-batches may go
//! through a block before the next block is touched; their gradients are added in the order that they have one by one.

use burn::tensor::Tensor;

use super::grads::{Exchange, GradSums};
use super::loss::{LossContext, MicroBatchLoss, Targets};
use super::offload::{HostParking, Parked};
use crate::data::batch::Batch;
use crate::lora::{AdapterSet, FullTensor};
use crate::model::block::Activations;
use crate::model::context::BlockContext;
use crate::model::mixing::InDocuments;
use crate::model::{BetweenBlocks, Embedded, Model, Tokens};
use crate::ops::attention::Attended;
use crate::ops::dropout::{Dropout, mix};
use crate::ops::noise::Noise;
use crate::ops::profile::{self, Cost};
use crate::util::stats::as_f64;

/// How micro-batches are run.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// Of so many blocks, the first ones, the forward keeps only the input, and of the others all that their backward needs.
    pub num_recomputed: usize,
    /// Whether it keeps what their attention gives, too.
    pub keeps_attention: bool,
    /// Holds what is kept of blocks until their backward, where that is in host memory.
    pub parking: Option<&'a HostParking>,
    /// Seed of the run's dropout masks.
    pub seed: u64,
    /// Number of the first of these micro-batches, over the whole run.
    pub first_number: u64,
    /// Loss scale, in `f16`.
    pub loss_scale: Option<f64>,
    /// Model and adapters, and what is minimised.
    pub loss: LossContext<'a>,
    /// Noise on the embeddings (Jain et al., 2023): this over the root of their number in the longest row is its bound.
    pub neftune_noise_alpha: Option<f64>,
}

/// Where the rows of a micro-batch are in the run, which names their dropout masks: also those of a part of it have the
/// masks, and in `f16` the loss scale, that they have in the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskOrigin {
    /// Number of the whole micro-batch, over the whole run.
    pub number: u64,
    /// Tokens before these in the whole micro-batch.
    pub first_token: usize,
    /// Tokens of the longest row of the whole, without padding.
    pub longest_row: usize,
    /// Target tokens of the whole.
    pub num_targets: usize,
}

/// A micro-batch on the device.
#[derive(Debug)]
pub struct Inputs {
    tokens: Tokens,
    targets: Targets,
    /// Tokens of the longest row, without padding.
    longest_row: usize,
    /// Answers to other prompts, see [`Batch::mismatched`].
    mismatched: Option<Box<Batch>>,
    /// Absent for whole micro-batches that are numbered in the order of their forwards.
    origin: Option<MaskOrigin>,
}

impl Inputs {
    /// Copies a micro-batch to the model's device; `None` where it has no target tokens. `is_noisy`: every token gets masks or
    /// noise of its own, so that no two are alike.
    #[must_use]
    pub fn new(model: &Model, batch: &Batch, is_noisy: bool) -> Option<Self> {
        if batch.targets.is_empty() {
            return None;
        }
        let longest_row = batch.row_lengths.iter().copied().max().unwrap_or(0);
        let batch = &*model.arranged(batch, is_noisy);
        Some(Self {
            longest_row,
            mismatched: batch.mismatched.clone(),
            origin: None,
            tokens: model.tokens(batch),
            targets: Targets::new(model, batch),
        })
    }

    /// The same as a part of a step that several ranks share.
    #[must_use]
    pub(super) fn with_origin(self, origin: MaskOrigin) -> Self {
        Self { origin: Some(origin), ..self }
    }
}

/// Micro-batches between their forward and their backward.
pub struct Forward {
    micro_batches: Vec<MicroBatch>,
    /// Kept tensors of each block and, in a block, of each micro-batch, the first one last; from the first block with an
    /// adapter on.
    kept: Vec<BlockKept>,
    losses: Vec<MicroBatchLoss>,
    /// Gradients of the last block's output.
    dx: Vec<Tensor<2>>,
}

impl Forward {
    /// Number of micro-batches.
    #[must_use]
    pub fn num_micro_batches(&self) -> usize {
        self.micro_batches.len()
    }
}

/// What the blocks' forward and backward know of a micro-batch.
struct MicroBatch {
    tokens: Tokens,
    dropout_seed: u64,
    first_row: usize,
    /// What passes between the blocks besides the residual stream.
    between_blocks: BetweenBlocks,
    /// Scale of the gradients inside the backward, against underflow in `f16`; it is removed before they are summed.
    grad_scale: f64,
}

impl MicroBatch {
    /// With its embeddings.
    fn new(
        model: &Model,
        adapters: &AdapterSet,
        tokens: Tokens,
        origin: MaskOrigin,
        options: Options<'_>,
    ) -> (Self, Tensor<2>) {
        // The gradient of the mean loss is what fits the range of f16.
        let grad_scale = options.loss_scale.map_or(1.0, |scale| scale / as_f64(origin.num_targets));
        let (dropout_seed, first_row) = (mix(options.seed ^ mix(origin.number)), origin.first_token);
        let noise = options.neftune_noise_alpha.map(|alpha| Noise {
            bound: alpha / as_f64(origin.longest_row * model.config.hidden_size).sqrt(),
            seed: mix(dropout_seed),
            first_row,
        });
        let Embedded { x, between_blocks } = model.embed(&tokens, adapters, noise);
        (Self { tokens, dropout_seed, first_row, between_blocks, grad_scale }, x)
    }

    /// The context of a block; its forward and the recomputation use the same one.
    fn context<'a>(&'a self, model: &'a Model, adapters: &'a AdapterSet, layer: usize) -> BlockContext<'a> {
        let dropout = (adapters.dropout > 0.0).then(|| Dropout {
            probability: adapters.dropout,
            seed: mix(self.dropout_seed ^ mix(layer as u64 + 1)),
            first_row: self.first_row,
        });
        self.between_blocks.context(model.place(), &model.config, layer, &adapters.blocks[layer], dropout)
    }
}

/// The kept tensors from which a block's backward starts.
#[expect(clippy::large_enum_variant, reason = "a tensor is a handle of a few hundred bytes")]
enum BlockKept {
    Input(Held, Option<Attended>),
    Activations(Box<Activations>),
}

/// A tensor on the device or in host memory.
enum Held {
    Here(Tensor<2>),
    OnHost(Parked),
}

impl Held {
    fn new(tensor: Tensor<2>, parking: Option<&HostParking>) -> Self {
        match parking {
            Some(parking) => Self::OnHost(parking.park(tensor)),
            None => Self::Here(tensor),
        }
    }

    fn fetch(&mut self, parking: &HostParking) {
        if let Self::OnHost(parked) = self {
            parking.fetch(parked);
        }
    }

    fn tensor(self) -> Tensor<2> {
        match self {
            Self::Here(tensor) => tensor,
            Self::OnHost(parked) => parked.tensor(),
        }
    }
}

/// Forward of micro-batches, with their losses and the gradients of these.
#[must_use]
pub fn forward(inputs: Vec<Inputs>, options: Options<'_>) -> Forward {
    let LossContext { model, adapters, reference: before, references: known, objective, .. } = options.loss;
    let needs = objective.needs();
    let first = adapters.first_trained();
    let (mut micro_batches, mut xs, mut targets) = (Vec::new(), Vec::new(), Vec::new());
    let (mut references, mut divergences) = (Vec::new(), Vec::new());
    for (number, inputs) in (options.first_number..).zip(inputs) {
        let num_targets = inputs.targets.num_tokens();
        let origin = MaskOrigin { number, first_token: 0, longest_row: inputs.longest_row, num_targets };
        let origin = inputs.origin.unwrap_or(origin);
        let is_passed = needs.reference.is_some() && !inputs.targets.are_known(known);
        references.push(is_passed.then(|| model.embed(&inputs.tokens, before, None)));
        let mismatched = inputs.mismatched.filter(|_| needs.divergence);
        divergences.push(mismatched.map_or(0.0, |batch| options.loss.divergence(&batch)));
        let (micro_batch, x) = MicroBatch::new(model, adapters, inputs.tokens, origin, options);
        xs.push(x);
        micro_batches.push(micro_batch);
        targets.push(inputs.targets);
    }
    let mut kept = Vec::with_capacity(model.blocks.len() * xs.len());
    for (layer, block) in model.walk(0..model.blocks.len()) {
        for reference in references.iter_mut().flatten() {
            reference.through(model, (layer, &block), before, None);
        }
        let block = model.with_own_norms(layer, &block, adapters);
        for (index, (x, micro_batch)) in xs.iter_mut().zip(&mut micro_batches).enumerate().rev() {
            let context = micro_batch.context(model, adapters, layer);
            let keeps = options.keeps_attention && (first..options.num_recomputed).contains(&layer);
            let mut mixing =
                InDocuments { place: context.place, layout: context.layout, memory: keeps.then_some(None) };
            let activations = block.activations_with(x.clone(), &context, &mut mixing);
            let attended = mixing.memory.flatten();
            let y = micro_batch.between_blocks.added(layer, block.output(&activations, &context));
            let input = std::mem::replace(x, y);
            micro_batch.between_blocks.keep(&model.config, layer, &activations);
            if layer >= first {
                kept.push(if layer >= options.num_recomputed {
                    BlockKept::Activations(Box::new(activations))
                } else {
                    // What the backward begins with stays on the device.
                    let parking = options.parking.filter(|_| (layer + 1, index) != (model.blocks.len(), 0));
                    BlockKept::Input(Held::new(input, parking), attended)
                });
            }
        }
    }
    let compared = targets.iter().zip(references).zip(divergences).map(|((targets, reference), divergence)| {
        options.loss.compared(targets, reference.map(|embedded| model.last_hidden(embedded.x)), divergence)
    });
    let of_each = xs.into_iter().zip(&targets).zip(compared).zip(&micro_batches);
    let (losses, dx) = of_each
        .map(|(((x, targets), compared), of)| {
            let streams = model.config.streams().map(|_| x.clone());
            let (loss, dx) = options.loss.loss_and_grad(model.last_hidden(x), targets, &compared, of.grad_scale);
            (loss, model.last_hidden_backward(streams, dx))
        })
        .unzip();
    Forward { micro_batches, kept, losses, dx }
}

/// Backward of micro-batches, with the options of their forward; adds the gradients of the summed losses to `sums`, and
/// returns the losses. With an `exchange`, these are the last of the step, and what has all its gradients begins to be summed.
#[must_use]
pub fn backward(
    forward: Forward,
    options: Options<'_>,
    sums: &mut GradSums,
    exchange: Option<Exchange<'_>>,
) -> Vec<MicroBatchLoss> {
    let LossContext { model, adapters, .. } = options.loss;
    let Forward { mut micro_batches, mut kept, mut losses, mut dx } = forward;
    let of_heads: Vec<_> =
        losses.iter_mut().zip(&micro_batches).map(|(loss, of)| add_head_grads(loss, of.grad_scale, sums)).collect();
    let first = adapters.first_trained();
    let trains_embeddings = adapters.trains_embeddings();
    for (layer, block) in model.walk((first..model.blocks.len()).rev()) {
        let block = model.with_own_norms(layer, &block, adapters);
        let through_block = |(dx, micro_batch): (Tensor<2>, &mut MicroBatch)| {
            let context = micro_batch.context(model, adapters, layer);
            let this = kept.pop()?;
            // The next input is fetched while this one is computed with.
            if let (Some(parking), Some(BlockKept::Input(input, _))) = (options.parking, kept.last_mut()) {
                input.fetch(parking);
            }
            let activations = match this {
                BlockKept::Input(input, attended) => {
                    let mut mixing =
                        InDocuments { place: context.place, layout: context.layout, memory: attended.map(Some) };
                    block.activations_with(input.tensor(), &context, &mut mixing)
                }
                BlockKept::Activations(activations) => *activations,
            };
            let grads = block.backward(dx, activations, &context, layer > first || trains_embeddings);
            micro_batch.between_blocks.add_grads(&model.config, layer, grads.key_values);
            let factor = 1.0 / micro_batch.grad_scale;
            let of_adapters = grads.adapters.into_iter().flat_map(|(site, grads)| grads.tensors(layer, site));
            let of_norms =
                grads.norms.into_iter().map(|(name, grad)| (FullTensor::BlockNorm(layer, name).into(), grad));
            profile::measure("gradient_sums", Cost::default, || {
                of_adapters.chain(of_norms).for_each(|(id, grad)| sums.add(id, grad, factor));
            });
            grads.dx
        };
        dx = dx.into_iter().zip(&mut micro_batches).filter_map(through_block).collect();
        // The first block's go with what is left at the end.
        if let Some(exchange) = exchange.filter(|_| layer > first) {
            sums.begin(layer, exchange);
        }
    }
    for ((dx, micro_batch), of_head) in dx.into_iter().zip(micro_batches).zip(of_heads) {
        if let Some((full, grad)) = model.embed_backward(micro_batch.tokens, adapters, dx) {
            let grad = match of_head {
                Some(of_head) => of_head + grad,
                None => grad,
            };
            sums.add(full.into(), grad, 1.0 / micro_batch.grad_scale);
        }
    }
    losses
}

/// Adds a micro-batch's gradients of what is trained in full behind the last block, but for that of an embedding that is the head,
/// too, which is returned: with the embedding's it is one sum.
fn add_head_grads(loss: &mut MicroBatchLoss, grad_scale: f64, sums: &mut GradSums) -> Option<Tensor<2>> {
    let all = std::mem::take(&mut loss.grads).into_iter();
    let (of_head, others): (Vec<_>, Vec<_>) = all.partition(|(full, _)| full.embeds());
    for (full, grad) in others {
        let factor = if full == FullTensor::Score { 1.0 } else { grad_scale.recip() };
        sums.add(full.into(), grad, factor);
    }
    of_head.into_iter().next().map(|(_, grad)| grad)
}
