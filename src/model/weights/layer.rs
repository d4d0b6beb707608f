//! The weights of a layer that are no linear layers, in `f32`.

use burn::tensor::{Device, Tensor};

use super::Weights;
use crate::device::Dtype;
use crate::schema::Problem;
use crate::spec::{ModelConfig, in_layer};

/// Loads them to a device by their names in the layer.
#[derive(Clone, Copy)]
pub(in crate::model) struct LayerWeights<'a> {
    pub(in crate::model) config: &'a ModelConfig,
    pub(in crate::model) weights: &'a Weights,
    pub(in crate::model) layer: usize,
    pub(in crate::model) device: &'a Device,
}

impl LayerWeights<'_> {
    pub(in crate::model) fn load<const D: usize>(&self, part: &str, shape: [usize; D]) -> Result<Tensor<D>, Problem> {
        self.weights.load(&in_layer(self.layer, part), shape, Dtype::F32, self.device)
    }

    pub(in crate::model) fn vector(&self, part: &str, width: usize) -> Result<Tensor<1>, Problem> {
        self.load(part, [width])
    }

    /// A number that a file has as a tensor of this shape.
    pub(in crate::model) fn number(&self, part: &str, shape: &[usize]) -> Result<f32, Problem> {
        self.weights.scalar(&in_layer(self.layer, part), shape)
    }

    /// What a router adds to the probabilities of the experts for the choice.
    pub(in crate::model) fn router_bias(&self, part: &str, num_experts: usize) -> Result<Tensor<1>, Problem> {
        let is_row = part.contains("moe_statics");
        if is_row {
            Ok(self.load(part, [1, num_experts])?.reshape([num_experts]))
        } else {
            self.load(part, [num_experts])
        }
    }

    /// The weight of a norm, as it computes with it.
    pub(in crate::model) fn norm(&self, part: &str, width: usize) -> Result<Tensor<1>, Problem> {
        let weight = self.load(&format!("{part}.weight"), [width])?;
        Ok(self.config.norm_weight(weight))
    }

    /// The weights of norms by head from their tensors, one behind the other.
    pub(in crate::model) fn norms_by_head(&self, tensors: &[(String, Vec<usize>)]) -> Result<Tensor<1>, Problem> {
        let load = |(name, shape): &(String, Vec<usize>)| match shape[..] {
            [heads, width] => Ok(self.load(name, [heads, width])?.reshape([heads * width])),
            _ => self.load(name, [shape[0]]),
        };
        Ok(Tensor::cat(tensors.iter().map(load).collect::<Result<_, _>>()?, 0))
    }

    /// The weight of a short convolution, `[kernel_size, channels]`.
    pub(in crate::model) fn conv(&self, part: &str, channels: usize, kernel_size: usize) -> Result<Tensor<2>, Problem> {
        let by_channel: Tensor<2> = self.load(part, [channels, 1, kernel_size])?.reshape([channels, kernel_size]);
        // A row for each shift, whose numbers lie beside each other.
        Ok(Tensor::cat(by_channel.transpose().split(1, 0), 0))
    }
}

impl ModelConfig {
    /// The weight of a norm from that in its file.
    pub(in crate::model) fn norm_weight(&self, stored: Tensor<1>) -> Tensor<1> {
        if self.has_norms_less_one { stored + 1.0 } else { stored }
    }
}
