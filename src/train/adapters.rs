//! The adapters of a training step: what is trained, what is applied, and what is evaluated and written.

use std::cell::OnceCell;

use burn::tensor::Tensor;

use crate::lora::{AdapterSet, Matrices};

/// Adapters in training.
#[derive(Debug)]
pub(super) struct Trained {
    adapters: AdapterSet,
    /// What takes the part of the base out of it that they started as.
    taken: Option<AdapterSet>,
    /// The adapters with what they started as, made when they are asked for.
    applied: OnceCell<AdapterSet>,
    /// Their average with the same.
    averaged: OnceCell<AdapterSet>,
}

impl Trained {
    pub(super) fn new(adapters: AdapterSet, taken: Option<AdapterSet>) -> Self {
        Self { adapters, taken, applied: OnceCell::new(), averaged: OnceCell::new() }
    }

    /// The trained matrices.
    pub(super) fn adapters(&self) -> &AdapterSet {
        &self.adapters
    }

    /// The same, to be changed.
    pub(super) fn change(&mut self) -> &mut AdapterSet {
        (self.applied, self.averaged) = (OnceCell::new(), OnceCell::new());
        &mut self.adapters
    }

    /// What a layer's input goes through in training.
    pub(super) fn applied(&self) -> &AdapterSet {
        match &self.taken {
            Some(taken) => self.applied.get_or_init(|| joined(&self.adapters, taken)),
            None => &self.adapters,
        }
    }

    /// What is evaluated and written where that is an average.
    pub(super) fn averaged(&self, average: impl FnOnce(&AdapterSet) -> AdapterSet) -> &AdapterSet {
        self.averaged.get_or_init(|| {
            let average = average(&self.adapters);
            self.taken.as_ref().map_or(average.clone(), |taken| joined(&average, taken))
        })
    }

    /// The trained matrices of those that were written.
    pub(super) fn of_written(&mut self, written: AdapterSet) -> AdapterSet {
        let Some(taken) = &mut self.taken else { return written };
        let mut trained = self.adapters.clone();
        for ((trained, taken), all) in trained.iter_mut().zip(taken.iter_mut()).zip(written.iter()) {
            let Matrices { a, b, .. } = &all.matrices;
            let ([r, _], [both, _]) = (trained.matrices.a.dims(), a.dims());
            let part = |start, length| [a.clone().narrow(0, start, length), b.clone().narrow(1, start, length)];
            [trained.matrices.a, trained.matrices.b] = part(0, r);
            [taken.matrices.a, taken.matrices.b] = part(r, both - r);
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
