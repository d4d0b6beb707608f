//! The adapters of a training step: what is trained and updated, what is applied, and what is evaluated and written.

use std::cell::OnceCell;

use burn::tensor::Tensor;

use super::optimizer::Optimizer;
use crate::config::OptimizerConfig;
use crate::lora::{AdapterSet, Matrices};
use crate::util::faults;
use crate::util::stats::digest;

/// Adapters in training, and what updates them.
#[derive(Debug)]
pub(super) struct Trained {
    adapters: AdapterSet,
    /// What takes the part of the base out of it that they started as.
    negated_start: Option<AdapterSet>,
    pub(super) optimizer: Optimizer,
    /// Whether the average that it makes is evaluated and written.
    averages: bool,
    /// The adapters with what they started as, made when they are asked for.
    applied: OnceCell<AdapterSet>,
    /// Their average with the same.
    averaged: OnceCell<AdapterSet>,
}

impl Trained {
    pub(super) fn new(adapters: AdapterSet, config: &OptimizerConfig, loraplus_lr_ratio: Option<f64>) -> Self {
        let (averages, optimizer) = (config.averages(), Optimizer::new(config.clone(), loraplus_lr_ratio, &adapters));
        Self { adapters, negated_start: None, optimizer, averages, applied: OnceCell::new(), averaged: OnceCell::new() }
    }

    /// The same where `negated_start` takes a part out of the base, as which the adapters started.
    pub(super) fn with_negated_start(self, negated_start: Option<AdapterSet>) -> Self {
        Self { negated_start, ..self }
    }

    /// The trained matrices.
    pub(super) fn adapters(&self) -> &AdapterSet {
        &self.adapters
    }

    /// The adapters and what updates them, to be changed.
    pub(super) fn change(&mut self) -> (&mut Optimizer, &mut AdapterSet) {
        (self.applied, self.averaged) = (OnceCell::new(), OnceCell::new());
        (&mut self.optimizer, &mut self.adapters)
    }

    /// What a layer's input goes through in training.
    pub(super) fn applied(&self) -> &AdapterSet {
        match &self.negated_start {
            Some(negated_start) => self.applied.get_or_init(|| joined(&self.adapters, negated_start)),
            None => &self.adapters,
        }
    }

    /// What is evaluated and written.
    pub(super) fn evaluated(&self) -> &AdapterSet {
        if !self.averages {
            return self.applied();
        }
        self.averaged.get_or_init(|| {
            let average = self.optimizer.averaged(&self.adapters);
            self.negated_start.as_ref().map_or(average.clone(), |negated_start| joined(&average, negated_start))
        })
    }

    /// Puts others in their place, also in that of their average; the optimizer's states stay those of the former.
    pub(super) fn replace(&mut self, adapters: AdapterSet) {
        *self.change().1 = adapters;
        (self.negated_start, self.averages) = (None, false);
    }

    /// Digest of B of the first and the last adapter, and of what else is small and trained in full. Reads the device.
    pub(super) fn digest(&self) -> u64 {
        let mut all = self.adapters.iter().map(|adapter| &adapter.matrices.b);
        let (first, last) = (all.next(), all.last());
        let full = self.adapters.full.iter().filter(|(full, _)| !full.is_module()).map(|(_, values)| values);
        let numbers = first.into_iter().chain(last).chain(full).flat_map(|b| faults::read(b.clone(), "an adapter"));
        digest(numbers.map(f32::to_bits))
    }

    /// The trained matrices of those that were written.
    pub(super) fn of_written(&mut self, written: AdapterSet) -> AdapterSet {
        let Some(negated_start) = &mut self.negated_start else { return written };
        let mut trained = self.adapters.clone();
        for ((trained, negated_start), all) in trained.iter_mut().zip(negated_start.iter_mut()).zip(written.iter()) {
            let Matrices { a, b, .. } = &all.matrices;
            let ([r, _], [both, _]) = (trained.matrices.a.dims(), a.dims());
            let part = |start, length| [a.clone().narrow(0, start, length), b.clone().narrow(1, start, length)];
            [trained.matrices.a, trained.matrices.b] = part(0, r);
            [negated_start.matrices.a, negated_start.matrices.b] = part(r, both - r);
            trained.matrices.magnitude.clone_from(&all.matrices.magnitude);
        }
        trained.full = written.full;
        trained
    }
}

/// Adapters of the sum of both ranks, which add up what both add.
fn joined(adapters: &AdapterSet, others: &AdapterSet) -> AdapterSet {
    let mut joined = adapters.clone();
    for (adapter, other) in joined.iter_mut().zip(others.iter()) {
        let cat = |a: &Tensor<2>, b: &Tensor<2>, dim| Tensor::cat(vec![a.clone(), b.clone()], dim);
        adapter.matrices.a = cat(&adapter.matrices.a, &other.matrices.a, 0);
        adapter.matrices.b = cat(&adapter.matrices.b, &other.matrices.b, 1);
    }
    joined
}
