//! Sums of gradients over the micro-batches of a step.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::tensor::{DType, Tensor};

use super::ranks::{RankFigures, Ranks};
use crate::lora::{AdapterSet, TensorId};
use crate::ops::kernels::Place;
use crate::util::faults;

/// Numbers of a bucket of gradients at least: fewer would leave a link idle between the ranks' messages.
const LEAST_BUCKET: usize = 1 << 18;
/// Buckets of a step at most: what the first blocks leave to the end is about as small a part of all.
const MOST_BUCKETS: usize = 16;

/// Numbers of a bucket at least, where there are so many gradients.
#[must_use]
pub fn bucket_numbers(of_all: usize) -> usize {
    LEAST_BUCKET.max(of_all / MOST_BUCKETS)
}

/// Gradients of what is trained, summed over tokens and micro-batches, in `f32`.
#[derive(Clone, Debug, Default)]
pub struct GradSums {
    sums: BTreeMap<TensorId, Tensor<2>>,
    /// Buckets that are summed over the ranks, the last blocks first: the first block of each, and whether there were gradients here,
    /// by tensor.
    begun: Vec<(usize, Vec<f64>)>,
}

/// Where the gradients of a step go that several ranks share.
#[derive(Clone, Copy)]
pub struct Exchange<'a> {
    /// The ranks.
    pub ranks: &'a dyn Ranks,
    /// What is trained.
    pub adapters: &'a AdapterSet,
    /// Where its gradients are.
    pub place: Place,
}

impl GradSums {
    /// Adds `factor` times a gradient.
    pub fn add(&mut self, id: TensorId, grad: Tensor<2>, factor: f64) {
        let grad = times(grad, factor);
        let sum = match self.sums.remove(&id) {
            None => grad,
            Some(sum) => sum + grad,
        };
        self.sums.insert(id, sum);
    }

    /// The gradient of a tensor; absent where nothing reached it.
    #[must_use]
    pub fn get(&self, id: TensorId) -> Option<&Tensor<2>> {
        self.sums.get(&id)
    }

    /// Keeps what belongs to the first rows of A, and columns of B, as many as these adapters have: what follows them in
    /// what was applied is not trained.
    pub fn keep_like(&mut self, adapters: &AdapterSet) {
        for (id, like) in adapters.tensors() {
            if let Some(grad) = self.sums.remove(&id) {
                self.sums.insert(id, keep_first(grad, like));
            }
        }
    }

    /// Begins to sum over all ranks what the last backward of a step has left in the blocks from `layer` on, where that is a
    /// bucket, and where sums go on beside the backward.
    pub fn begin(&mut self, layer: usize, exchange: Exchange<'_>) {
        let Exchange { ranks, adapters, place } = exchange;
        let blocks = layer..self.first_begun(adapters);
        let numbers = |blocks: Range<usize>| -> usize {
            let of_adapters = of_bucket(adapters, blocks).filter(|(id, _)| id.block().is_some());
            of_adapters.map(|(_, like)| like.shape().num_elements()).sum()
        };
        if numbers(blocks.clone()) < bucket_numbers(numbers(0..adapters.blocks.len()))
            || !ranks.sum_beside(place.is_host())
        {
            return;
        }
        let (grads, have_it) = self.take(blocks, adapters);
        ranks.begin(place.flatten(grads));
        self.begun.push((layer, have_it));
    }

    /// The blocks from this one on are in buckets that have been begun.
    fn first_begun(&self, adapters: &AdapterSet) -> usize {
        self.begun.last().map_or(adapters.blocks.len(), |(layer, _)| *layer)
    }

    /// Takes the gradients of a bucket, zeros where there are none, and says of each tensor whether there are: 1, or 0.
    fn take(&mut self, blocks: Range<usize>, adapters: &AdapterSet) -> (Vec<Tensor<2>>, Vec<f64>) {
        let grads = of_bucket(adapters, blocks).map(|(id, like)| match self.sums.remove(&id) {
            Some(grad) => (keep_first(grad, like), 1.0),
            None => (like.zeros_like(), 0.0),
        });
        grads.unzip()
    }

    /// Sums over all ranks; `figures` are summed with them. What no rank has stays absent. `own` is asked once the gradients are
    /// there, and returned for every rank.
    pub fn reduce(
        &mut self,
        adapters: &AdapterSet,
        place: Place,
        ranks: &mut dyn Ranks,
        figures: &mut [f64],
        own: impl FnOnce() -> RankFigures,
    ) -> Vec<RankFigures> {
        // All ranks make the same buckets, whatever their backward has come to.
        for layer in (adapters.first_trained() + 1..self.first_begun(adapters)).rev() {
            self.begin(layer, Exchange { ranks, adapters, place });
        }
        let (flat, have_it) = self.take(0..self.first_begun(adapters), adapters);
        let mut buckets = std::mem::take(&mut self.begun);
        buckets.push((0, have_it));
        let mut numbers = figures.to_vec();
        buckets.iter().for_each(|(_, have_it)| numbers.extend(have_it));
        let (flat, of_ranks) = RankFigures::sum(ranks, place.flatten(flat), &mut numbers, own());
        let (summed, have_it) = numbers.split_at(figures.len());
        figures.copy_from_slice(summed);
        let (mut have_it, mut end) = (have_it.iter(), adapters.blocks.len());
        for ((layer, _), flat) in buckets.into_iter().zip(flat) {
            let mut start = 0;
            for ((id, like), have_it) in of_bucket(adapters, layer..end).zip(&mut have_it) {
                let count = like.shape().num_elements();
                if *have_it > 0.0 {
                    self.sums.insert(id, flat.clone().narrow(0, start, count).reshape(like.dims()));
                }
                start += count;
            }
            end = layer;
        }
        of_ranks
    }

    /// Sum of the squares of all gradients, `[1]`, on the device; there is at least one.
    #[must_use]
    pub fn sum_of_squares(&self, place: Place) -> Tensor<1> {
        let all: Vec<_> = self.sums.iter().collect();
        let blocks = all.chunk_by(|(a, _), (b, _)| a.block().is_some() && a.block() == b.block());
        let blocks = blocks.map(|grads| grads.iter().map(|(_, grad)| *grad).collect());
        place.sum_of_squares(&blocks.collect::<Vec<_>>())
    }

    /// Every gradient, in the order of [`AdapterSet::tensors`].
    pub fn iter(&self) -> impl Iterator<Item = (TensorId, &Tensor<2>)> {
        self.sums.iter().map(|(id, grad)| (*id, grad))
    }

    /// Whether no gradient was added yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sums.is_empty()
    }
}

/// The tensors of a bucket: of the adapters of these blocks, and in the one that begins with the first block, those that are
/// trained in full.
fn of_bucket(adapters: &AdapterSet, blocks: Range<usize>) -> impl Iterator<Item = (TensorId, &Tensor<2>)> {
    adapters.tensors().filter(move |(id, _)| id.block().map_or(blocks.start == 0, |block| blocks.contains(&block)))
}

/// The first rows and columns.
fn keep_first(grad: Tensor<2>, like: &Tensor<2>) -> Tensor<2> {
    let keep = |grad: Tensor<2>, (dim, length)| {
        if grad.dims()[dim] > length { grad.narrow(dim, 0, length) } else { grad }
    };
    like.dims().into_iter().enumerate().fold(grad, keep)
}

fn times(grad: Tensor<2>, factor: f64) -> Tensor<2> {
    if (factor - 1.0).abs() < f64::EPSILON { grad } else { grad * factor }
}

/// Several tensors of one dimension as one in `f32`; `None` without any.
#[must_use]
pub fn joined(tensors: Vec<Tensor<1>>) -> Option<Tensor<1>> {
    let tensors: Vec<_> = tensors.into_iter().map(|tensor| tensor.cast(DType::F32)).collect();
    (!tensors.is_empty()).then(|| Tensor::cat(tensors, 0))
}

/// Several tensors of one dimension, read from the device in one transfer as `f32`. `what` names them to people.
///
/// # Panics
/// As [`faults::read`].
#[must_use]
pub fn read(tensors: Vec<Tensor<1>>, what: &str) -> Vec<f32> {
    joined(tensors).map_or_else(Vec::new, |numbers| faults::read(numbers, what))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use burn::tensor::{Device, Distribution};

    use super::*;
    use crate::config::{InitLoraWeights, LoraConfig};
    use crate::device::DeviceKind;
    use crate::model::weights::fixture::{tiny_config, tiny_with};
    use crate::ops::place::place_on;

    /// This rank, and one that has the same.
    #[derive(Debug, Default)]
    struct Twice {
        sums_beside: bool,
        begun: RefCell<Vec<Tensor<1>>>,
    }

    impl Ranks for Twice {
        fn size(&self) -> usize {
            2
        }

        fn rank(&self) -> usize {
            0
        }

        fn sum(&mut self, gradients: &mut [f32], figures: &mut [f64]) {
            gradients.iter_mut().for_each(|gradient| *gradient *= 2.0);
            figures.iter_mut().for_each(|figure| *figure *= 2.0);
        }

        fn agree(&mut self, says_so: bool) -> bool {
            says_so
        }

        fn sum_beside(&self, _: bool) -> bool {
            self.sums_beside
        }

        fn begin(&self, gradients: Tensor<1>) {
            self.begun.borrow_mut().push(gradients * 2.0);
        }

        fn sum_all(&mut self, gradients: Tensor<1>, figures: &mut [f64]) -> Vec<Tensor<1>> {
            self.sum(&mut [], figures);
            self.begin(gradients);
            self.begun.take()
        }
    }

    #[test]
    fn a_gradient_that_no_rank_has_stays_absent() {
        let config = tiny_config();
        let selection = LoraConfig::default().select(&config).unwrap();
        let adapters = AdapterSet::new(&config, &selection, InitLoraWeights::Kaiming, 0.0, 1, &Device::flex());
        let mut sums = GradSums::default();
        let (id, like) = adapters.tensors().nth(17).unwrap();
        sums.add(id, like.zeros_like() + 3.0, 1.0);
        let mut figures = [5.0];
        let own = || RankFigures { busy_seconds: 1.0, data_wait_seconds: 2.0, tokens: 3.0 };
        let of_ranks = sums.reduce(&adapters, place_on(DeviceKind::Cpu), &mut Twice::default(), &mut figures, own);
        assert_eq!((of_ranks.len(), of_ranks[0].tokens), (2, 6.0));
        let summed = sums.get(id).unwrap().to_data().try_to_vec::<f32>().unwrap();
        assert!(summed.iter().all(|gradient| *gradient == 6.0));
        assert_eq!((sums.iter().count(), figures), (1, [10.0]));
    }

    #[test]
    fn buckets_that_begin_beside_the_backward_are_the_sums_at_its_end() {
        let config = tiny_with(&[("num_hidden_layers", 5)]);
        let lora = LoraConfig { r: 128, ..LoraConfig::default() };
        let selection = lora.select(&config).unwrap();
        let adapters = AdapterSet::new(&config, &selection, InitLoraWeights::Kaiming, 0.0, 1, &Device::flex());
        let place = place_on(DeviceKind::Cpu);
        let is_without = |id| matches!(id, TensorId::Adapter(3, 1, _));
        let reduced = |sums_beside: bool, has_rows: bool, layers_begun: Range<usize>| {
            let (mut sums, mut ranks) = (GradSums::default(), Twice { sums_beside, ..Twice::default() });
            for (id, like) in adapters.tensors().filter(|(id, _)| has_rows && !is_without(*id)) {
                sums.add(id, like.random_like(Distribution::Default), 1.0);
            }
            let own = sums.clone();
            for layer in layers_begun.rev() {
                sums.begin(layer, Exchange { ranks: &ranks, adapters: &adapters, place });
            }
            let begun = ranks.begun.borrow().len();
            let mut figures = [1.0];
            sums.reduce(&adapters, place, &mut ranks, &mut figures, RankFigures::default);
            for (id, _) in adapters.tensors() {
                let numbers = |sums: &GradSums, factor: f64| Some((sums.get(id)?.clone() * factor).to_data());
                assert_eq!(numbers(&sums, 1.0), numbers(&own, 2.0), "{id:?}");
            }
            assert_eq!(figures, [2.0]);
            begun
        };
        assert_eq!((reduced(false, true, 1..5), reduced(true, true, 1..5)), (0, 2));
        // A rank that has come to none, and one without rows, make the same ones at the end.
        assert_eq!((reduced(true, true, 3..5), reduced(true, false, 5..5)), (1, 0));
    }
}
