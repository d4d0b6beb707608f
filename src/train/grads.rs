//! Sums of gradients over the micro-batches of a step.

use std::collections::BTreeMap;

use burn::tensor::{DType, Tensor};

use super::ranks::Ranks;
use crate::lora::AdapterSet;
use crate::model::context::BlockGrads;
use crate::ops::host;
use crate::ops::kernels::Place;
use crate::ops::low_rank::LowRank;
use crate::spec::SiteId;
use crate::util::faults;

/// Gradients of adapters, summed over tokens and micro-batches, in `f32`.
#[derive(Clone, Debug, Default)]
pub struct GradSums {
    /// By layer and site.
    sums: BTreeMap<(usize, SiteId), LowRank<Tensor<2>>>,
}

impl GradSums {
    /// Adds `factor` times the gradients of one block.
    pub fn add(&mut self, layer: usize, grads: BlockGrads, factor: f64) {
        for (site, grad) in grads {
            let grad = grad.map(|grad| if (factor - 1.0).abs() < f64::EPSILON { grad } else { grad * factor });
            let grad = match self.sums.remove(&(layer, site)) {
                None => grad,
                Some(sum) => sum.zip(grad).map(|(sum, grad)| sum + grad),
            };
            self.sums.insert((layer, site), grad);
        }
    }

    /// The gradient of an adapter; absent where nothing reached it.
    #[must_use]
    pub fn get(&self, layer: usize, site: SiteId) -> Option<&LowRank<Tensor<2>>> {
        self.sums.get(&(layer, site))
    }

    /// Sums over all ranks; `figures` are summed with them. What no rank has is zero then.
    pub fn reduce(&mut self, adapters: &AdapterSet, ranks: &mut dyn Ranks, figures: &mut [f64]) {
        let mut flat = Vec::new();
        for (site, adapter) in adapters.by_site() {
            match self.sums.get(&site) {
                Some(grad) => {
                    flat.extend(grad.as_ref().values().flat_map(|grad| faults::read(grad.clone(), "a gradient")));
                }
                None => flat.resize(flat.len() + adapter.num_parameters(), 0.0),
            }
        }
        ranks.sum(&mut flat, figures);
        let mut rest = &flat[..];
        let mut summed = |like: &Tensor<2>| {
            let values;
            (values, rest) = rest.split_at(like.shape().num_elements());
            host::tensor(values.to_vec(), like.dims(), &like.device())
        };
        self.sums =
            adapters.by_site().map(|(site, adapter)| (site, adapter.matrices.as_ref().map(&mut summed))).collect();
    }

    /// Sum of the squares of all gradients, `[1]`, on the device; there is at least one.
    #[must_use]
    pub fn sum_of_squares(&self, place: Place) -> Tensor<1> {
        let mut blocks = BTreeMap::<usize, Vec<&Tensor<2>>>::new();
        for ((layer, _), grad) in &self.sums {
            blocks.entry(*layer).or_default().extend(grad.as_ref().values());
        }
        place.sum_of_squares(&blocks.into_values().collect::<Vec<_>>())
    }

    /// Every gradient, in the order of [`AdapterSet::iter`](crate::lora::AdapterSet::iter).
    pub fn iter(&self) -> impl Iterator<Item = &LowRank<Tensor<2>>> {
        self.sums.values()
    }

    /// Whether no gradient was added yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sums.is_empty()
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
