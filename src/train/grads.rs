//! Sums of gradients over the micro-batches of a step.

use burn::tensor::{DType, Device, Tensor};

use crate::faults;
use crate::model::block::BlockGrads;
use crate::ops::low_rank::LowRank;
use crate::ops::place::Place;
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
            let Some(grad) = grad else { continue };
            let grad = grad.map(|grad| if (factor - 1.0).abs() < f64::EPSILON { grad } else { grad * factor });
            *sum = Some(match sum.take() {
                None => grad,
                Some(sum) => sum.zip(grad).map(|(sum, grad)| sum + grad),
            });
        }
    }

    /// Sum of the squares of all gradients, `[1]`, on the device; there is at least one.
    #[must_use]
    pub fn sum_of_squares(&self, place: Place) -> Tensor<1> {
        match place {
            // Sums of sums: fusion makes one kernel of many additions, or of a `cat`, with as many inputs.
            Place::Plain(_) => {
                let sum = |grad: &Tensor<2>| grad.clone().square().sum();
                let blocks = self.blocks.iter().filter_map(|block| {
                    let grads = block.iter().flatten().flat_map(|grad| grad.as_ref().into_array());
                    grads.map(sum).reduce(|sum, squares| sum + squares)
                });
                let Some(sum) = blocks.reduce(|sum, squares| sum + squares) else {
                    unreachable!("there is a gradient")
                };
                sum
            }
            Place::Cpu => {
                let grads = self.iter().flat_map(|grad| grad.as_ref().into_array());
                #[expect(clippy::cast_possible_truncation, reason = "summed in f64, read as f32")]
                let sum = grads.map(|grad| cpu::sum_of_squares(&host::view(grad))).sum::<f64>() as f32;
                host::tensor(vec![sum], [1], &Device::flex())
            }
        }
    }

    /// Every gradient, in the order of [`AdapterSet::iter`](crate::lora::AdapterSet::iter).
    pub fn iter(&self) -> impl Iterator<Item = &LowRank<Tensor<2>>> {
        self.blocks.iter().flatten().flatten()
    }

    /// Whether no gradient was added yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
}

/// Several tensors of one dimension, read from the device in one transfer as `f32`. `what` names them to people.
///
/// # Panics
///
/// As [`faults::read`].
#[must_use]
pub fn read(tensors: Vec<Tensor<1>>, what: &str) -> Vec<f32> {
    let tensors: Vec<_> = tensors.into_iter().map(|tensor| tensor.cast(DType::F32)).collect();
    if tensors.is_empty() {
        return Vec::new();
    }
    faults::read(Tensor::cat(tensors, 0), what)
}
