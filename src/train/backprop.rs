//! Block-wise backpropagation: the graph of the whole model never exists.
//!
//! The forward runs the blocks in order and keeps either what each block's backward needs or only the block's input.
//! The loss and the gradient of the last hidden states are computed in chunks of target tokens. The backward runs the
//! blocks in reverse order, and adds the adapters' gradients to the sums block by block.

use burn::tensor::{Int, Tensor};

use super::grads::GradSums;
use super::loss::{Targets, loss_and_grad};
use super::offload::{HostParking, Parked};
use crate::data::batch::Batch;
use crate::lora::AdapterSet;
use crate::model::Model;
use crate::model::block::{Activations, BlockContext};
use crate::ops::cross_entropy::LossChunk;
use crate::ops::dropout::{Dropout, mix};
use crate::ops::layout::Layout;
use crate::ops::profile::{self, Cost};

/// How a micro-batch is run.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// Whether a block's forward keeps all that its backward needs, or only its input.
    pub keeps_activations: bool,
    /// Holds the blocks' inputs until their backward, where they are kept in host memory.
    pub parking: Option<&'a HostParking>,
    /// Seed of this micro-batch's dropout masks.
    pub dropout_seed: u64,
    /// Scale of the gradients inside the backward, against underflow in `f16`; it is removed before they are summed.
    pub grad_scale: f64,
    /// Number of target tokens whose logits exist at a time.
    pub loss_chunk: LossChunk,
}

/// A micro-batch on the device.
#[derive(Debug)]
pub struct Inputs {
    layout: Layout,
    input_ids: Tensor<1, Int>,
    targets: Targets,
}

impl Inputs {
    /// Copies a micro-batch to the model's device; `None` where it has no target tokens.
    #[must_use]
    pub fn new(model: &Model, batch: &Batch) -> Option<Self> {
        if batch.targets.is_empty() {
            return None;
        }
        let batch = &*model.arranged(batch);
        Some(Self {
            layout: model.layout(batch),
            input_ids: model.token_ids(&batch.input_ids),
            targets: Targets::new(model, batch),
        })
    }

    /// Tokens that carry loss.
    #[must_use]
    pub fn num_targets(&self) -> usize {
        self.targets.num_tokens()
    }
}

/// A micro-batch between its forward and its backward.
pub struct Forward {
    layout: Layout,
    /// Kept tensors of each block, starting at the first block with an adapter.
    kept: Vec<Kept>,
    /// The loss of every target token in nats, `[targets]`, `f32`, still on the device.
    losses: Tensor<1>,
    /// Gradient of the last block's output.
    dx: Tensor<2>,
}

impl Forward {
    /// Tokens that carry loss.
    #[must_use]
    pub fn num_targets(&self) -> usize {
        self.losses.dims()[0]
    }
}

/// The kept tensors from which a block's backward starts.
enum Kept {
    Input(Tensor<2>),
    InputOnHost(Parked),
    Activations(Box<Activations>),
}

/// Forward of one micro-batch, with its loss and the gradient of the loss.
#[must_use]
pub fn forward(model: &Model, adapters: &AdapterSet, inputs: Inputs, options: Options<'_>) -> Forward {
    let Inputs { layout, input_ids, targets } = inputs;
    let first = first_adapted(model, adapters);
    let mut x = model.embed_ids(input_ids);
    let mut kept = Vec::with_capacity(model.blocks.len());
    for (layer, block) in model.walk(0..model.blocks.len()) {
        let context = context(model, adapters, &layout, options, layer);
        let input = x.clone();
        let activations = block.activations(x, &context);
        x = block.output(&activations, &context);
        if layer >= first {
            kept.push(match options.parking {
                _ if options.keeps_activations => Kept::Activations(Box::new(activations)),
                // The last block's backward comes next, so its input stays on the device.
                Some(parking) if layer + 1 < model.blocks.len() => Kept::InputOnHost(parking.park(input)),
                _ => Kept::Input(input),
            });
        }
    }
    let (losses, dx) = loss_and_grad(model, x, targets, options.grad_scale, options.loss_chunk);
    Forward { layout, kept, losses, dx }
}

/// Backward of a micro-batch, with the options of its forward; adds the gradients of the summed losses to `sums`.
///
/// Returns the loss of every target token in nats, `[targets]`, `f32`, still on the device.
#[must_use]
pub fn backward(
    model: &Model,
    adapters: &AdapterSet,
    forward: Forward,
    options: Options<'_>,
    sums: &mut GradSums,
) -> Tensor<1> {
    let Forward { layout, mut kept, losses, mut dx } = forward;
    let first = first_adapted(model, adapters);
    for (layer, block) in model.walk((first..model.blocks.len()).rev()) {
        let context = context(model, adapters, &layout, options, layer);
        let Some(this) = kept.pop() else { break };
        // The next block's input is fetched while this block computes.
        if let (Some(parking), Some(Kept::InputOnHost(next))) = (options.parking, kept.last_mut()) {
            parking.fetch(next);
        }
        let activations = match this {
            Kept::Input(input) => block.activations(input, &context),
            Kept::InputOnHost(input) => block.activations(input.tensor(), &context),
            Kept::Activations(activations) => *activations,
        };
        let (input_grad, grads) = block.backward(dx, activations, &context, layer > first);
        profile::measure("gradient_sums", Cost::default, || sums.add(layer, grads, 1.0 / options.grad_scale));
        let Some(input_grad) = input_grad else { break };
        dx = input_grad;
    }
    losses
}

/// The first block with an adapter. Blocks below it need no backward, and nothing is kept for them.
fn first_adapted(model: &Model, adapters: &AdapterSet) -> usize {
    let first = adapters.blocks.iter().position(|block| block.iter().any(Option::is_some));
    first.unwrap_or(model.blocks.len())
}

/// The context of a block; its forward and the recomputation use the same one.
fn context<'a>(
    model: &'a Model,
    adapters: &'a AdapterSet,
    layout: &'a Layout,
    options: Options<'_>,
    layer: usize,
) -> BlockContext<'a> {
    let dropout = (adapters.dropout > 0.0)
        .then(|| Dropout { probability: adapters.dropout, seed: mix(options.dropout_seed ^ mix(layer as u64 + 1)) });
    BlockContext::new(&model.config, layer, layout, &adapters.blocks[layer], dropout)
}
