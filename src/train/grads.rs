//! Sums of gradients over the micro-batches of a step.

use burn::tensor::{DType, Tensor};

use crate::lora::AdapterSet;
use crate::model::block::BlockGrads;
use crate::ops::linear::LowRankGrad;
use crate::ops::{cpu, host};

/// Gradients of all adapters, summed over tokens and micro-batches, in `f32`.
#[derive(Clone, Debug, Default)]
pub struct GradSums {
    /// By layer; empty before the first micro-batch.
    blocks: Vec<BlockGrads>,
}

impl GradSums {
    /// Adds `factor` times the gradients of one block.
    pub fn add(&mut self, layer: usize, grads: BlockGrads, factor: f64) {
        if self.blocks.len() <= layer {
            self.blocks.resize_with(layer + 1, BlockGrads::default);
        }
        for (sum, grad) in self.blocks[layer].iter_mut().zip(grads) {
            let Some(LowRankGrad { a, b }) = grad else { continue };
            let scaled = |grad: Tensor<2>| if (factor - 1.0).abs() < f64::EPSILON { grad } else { grad * factor };
            let (a, b) = (scaled(a), scaled(b));
            *sum = Some(match sum.take() {
                None => LowRankGrad { a, b },
                Some(sum) => LowRankGrad { a: sum.a + a, b: sum.b + b },
            });
        }
    }

    /// Sum of the squares of all gradients, `[1]`, on the device.
    #[must_use]
    pub fn sum_of_squares(&self, adapters: &AdapterSet) -> Tensor<1> {
        let device = adapters.iter().next().map_or_else(Default::default, |(_, _, adapter)| adapter.lora_a.device());
        let tensors: Vec<_> = self.iter().flat_map(|grad| [&grad.a, &grad.b]).collect();
        let views: Option<Vec<_>> = tensors.iter().map(|tensor| host::view(tensor)).collect();
        if let Some(views) = views {
            #[expect(clippy::cast_possible_truncation, reason = "summed in f64, read as f32")]
            let sum = views.iter().map(|view| cpu::sum_of_squares(view.as_slice())).sum::<f64>() as f32;
            return host::tensor(vec![sum], [1], &device);
        }
        let squares = tensors.into_iter().map(|grad| grad.clone().square().sum());
        Tensor::cat(squares.collect(), 0).sum()
    }

    /// Every gradient, in the order of [`AdapterSet::iter`].
    pub fn iter(&self) -> impl Iterator<Item = &LowRankGrad> {
        self.blocks.iter().flatten().flatten()
    }

    /// Whether no gradient was added yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
}

/// Several `f32` tensors of one dimension, read from the device in one transfer.
#[must_use]
pub fn read(tensors: Vec<Tensor<1>>) -> Vec<f32> {
    let tensors: Vec<_> = tensors.into_iter().map(|tensor| tensor.cast(DType::F32)).collect();
    if tensors.is_empty() {
        return Vec::new();
    }
    Tensor::cat(tensors, 0).into_data().try_to_vec().unwrap_or_default()
}
