//! Sums of gradients over the micro-batches of a step.

use std::collections::BTreeMap;

use burn::tensor::{DType, Tensor};

use super::ranks::{RankFigures, Ranks};
use crate::lora::{AdapterSet, Matrices, Whole};
use crate::model::context::BlockGrads;
use crate::ops::kernels::Place;
use crate::spec::SiteId;
use crate::util::faults;

/// Gradients of adapters, summed over tokens and micro-batches, in `f32`.
#[derive(Clone, Debug, Default)]
pub struct GradSums {
    /// By layer and site.
    sums: BTreeMap<(usize, SiteId), Matrices<Tensor<2>>>,
    /// Of what is trained as a whole.
    whole: BTreeMap<Whole, Tensor<2>>,
}

impl GradSums {
    /// Adds `factor` times the gradients of one block.
    pub fn add(&mut self, layer: usize, grads: BlockGrads, factor: f64) {
        for (site, grad) in grads {
            let grad = grad.map(|grad| times(grad, factor));
            let grad = match self.sums.remove(&(layer, site)) {
                None => grad,
                Some(sum) => sum.zip(grad).map(|(sum, grad)| sum + grad),
            };
            self.sums.insert((layer, site), grad);
        }
    }

    /// Adds `factor` times the gradient of something that is trained as a whole.
    pub fn add_whole(&mut self, whole: Whole, grad: Tensor<2>, factor: f64) {
        let grad = times(grad, factor);
        let sum = match self.whole.remove(&whole) {
            None => grad,
            Some(sum) => sum + grad,
        };
        self.whole.insert(whole, sum);
    }

    /// The gradient of something that is trained as a whole; absent where nothing reached it.
    #[must_use]
    pub fn whole(&self, whole: Whole) -> Option<&Tensor<2>> {
        self.whole.get(&whole)
    }

    /// The gradient of an adapter; absent where nothing reached it.
    #[must_use]
    pub fn get(&self, layer: usize, site: SiteId) -> Option<&Matrices<Tensor<2>>> {
        self.sums.get(&(layer, site))
    }

    /// Keeps what belongs to the first rows of A, and columns of B, as many as these adapters have: what follows them in
    /// what was applied is not trained.
    pub fn keep_like(&mut self, adapters: &AdapterSet) {
        for (site, adapter) in adapters.by_site() {
            let r = adapter.matrices.a.dims()[0];
            if let Some(Matrices { a, b, .. }) = self.sums.get_mut(&site).filter(|grad| grad.a.dims()[0] > r) {
                (*a, *b) = (a.clone().narrow(0, 0, r), b.clone().narrow(1, 0, r));
            }
        }
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
        let (mut flat, mut numbers) = (Vec::<Tensor<2>>::new(), figures.to_vec());
        for (site, adapter) in adapters.by_site() {
            let grad = self.sums.remove(&site);
            numbers.push(f64::from(u8::from(grad.is_some())));
            let grad = grad.unwrap_or_else(|| adapter.matrices.as_ref().map(Tensor::zeros_like));
            flat.extend(grad.as_ref().values().cloned());
        }
        for (whole, like) in adapters.whole() {
            flat.push(self.whole.remove(&whole).unwrap_or_else(|| like.zeros_like()));
        }
        let (flat, of_ranks) = RankFigures::sum(ranks, place.flatten(flat), &mut numbers, own());
        let (summed, have_it) = numbers.split_at(figures.len());
        figures.copy_from_slice(summed);
        let mut start = 0;
        let mut of_all = |like: &Tensor<2>| {
            let count = like.shape().num_elements();
            start += count;
            flat.clone().narrow(0, start - count, count).reshape(like.dims())
        };
        let sums = adapters.by_site().map(|(site, adapter)| (site, adapter.matrices.as_ref().map(&mut of_all)));
        self.sums = sums.zip(have_it).filter(|(_, have_it)| **have_it > 0.0).map(|(sum, _)| sum).collect();
        self.whole = adapters.whole().map(|(whole, like)| (whole, of_all(like))).collect();
        of_ranks
    }

    /// Sum of the squares of all gradients, `[1]`, on the device; there is at least one.
    #[must_use]
    pub fn sum_of_squares(&self, place: Place) -> Tensor<1> {
        let mut blocks = BTreeMap::<usize, Vec<&Tensor<2>>>::new();
        for ((layer, _), grad) in &self.sums {
            blocks.entry(*layer).or_default().extend(grad.as_ref().values());
        }
        let whole = self.whole.values().map(|grad| vec![grad]);
        place.sum_of_squares(&blocks.into_values().chain(whole).collect::<Vec<_>>())
    }

    /// Every gradient, in the order of [`AdapterSet::iter`](crate::lora::AdapterSet::iter).
    pub fn iter(&self) -> impl Iterator<Item = &Matrices<Tensor<2>>> {
        self.sums.values()
    }

    /// Whether no gradient was added yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sums.is_empty() && self.whole.is_empty()
    }
}

fn times(grad: Tensor<2>, factor: f64) -> Tensor<2> {
    if (factor - 1.0).abs() < f64::EPSILON { grad } else { grad * factor }
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

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::config::{InitLoraWeights, LoraConfig};
    use crate::device::DeviceKind;
    use crate::model::weights::fixture::tiny_config;
    use crate::ops::kernels::place_on;
    use crate::spec::PerSite;

    /// This rank, and one that has the same.
    #[derive(Debug)]
    struct Twice;

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
    }

    #[test]
    fn a_gradient_that_no_rank_has_stays_absent() {
        let config = tiny_config();
        let selection = LoraConfig::default().select(&config).unwrap();
        let adapters = AdapterSet::new(&config, &selection, InitLoraWeights::Kaiming, 0.0, 1, &Device::flex());
        let mut sums = GradSums::default();
        let grad = adapters.blocks[1][&2].matrices.as_ref().map(|like| like.zeros_like() + 3.0);
        sums.add(1, PerSite::from([(2, grad)]), 1.0);
        let mut figures = [5.0];
        let own = || RankFigures { busy_seconds: 1.0, data_wait_seconds: 2.0, tokens: 3.0 };
        let of_ranks = sums.reduce(&adapters, place_on(DeviceKind::Cpu), &mut Twice, &mut figures, own);
        assert_eq!((of_ranks.len(), of_ranks[0].tokens), (2, 6.0));
        let summed = sums.get(1, 2).unwrap().a.to_data().try_to_vec::<f32>().unwrap();
        assert!(summed.iter().all(|gradient| *gradient == 6.0));
        assert_eq!((sums.iter().count(), figures), (1, [10.0]));
    }
}
