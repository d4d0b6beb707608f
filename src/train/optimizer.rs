//! The optimizer over all adapters: its rules, each in a file of its own, and their states.

mod adamw;

use std::collections::BTreeMap;

use burn::tensor::{DType, Tensor, TensorData};

use super::grads::GradSums;
use crate::config::{OptimizerConfig, OptimizerName};
use crate::lora::{Adapter, AdapterSet, Matrices};
use crate::ops::kernels::Place;
use crate::ops::profile::{self, Cost};
use crate::save::checkpoint::HostTensor;
use crate::schema::Choice;
use crate::spec::SiteId;
use crate::util::faults;

impl OptimizerName {
    /// The name in a recipe.
    fn word(self) -> &'static str {
        Self::NAMES.iter().find(|(_, name)| *name == self).map_or("", |(word, _)| word)
    }

    /// Names in a checkpoint of what the rule remembers of every parameter.
    #[must_use]
    pub fn states(self) -> &'static [&'static str] {
        match self {
            Self::Adamw => &adamw::STATES,
        }
    }
}

/// A parameter with the states of its rule, all of its shape and in `f32`.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// The parameter.
    pub values: Tensor<2>,
    /// Its states, in the order of [`OptimizerName::states`].
    pub states: Vec<Tensor<2>>,
}

/// What every parameter's update of a step has in common.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// Learning rate.
    pub learning_rate: f64,
    /// Number of this update, from 1.
    pub number: u64,
    /// Factor of the gradients.
    pub grad_scale: f64,
}

/// Updates all adapters by the rule of the recipe.
#[derive(Clone, Debug)]
pub struct Optimizer {
    config: OptimizerConfig,
    /// Ratio of B's learning rate to A's.
    loraplus_lr_ratio: f64,
    num_updates: u64,
    /// By layer and site; of each matrix in the order of [`OptimizerName::states`].
    states: BTreeMap<(usize, SiteId), Matrices<Vec<Tensor<2>>>>,
    place: Place,
}

/// The moments do not belong to these adapters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptimizerStateError {
    /// A tensor is missing.
    #[error("optimizer state: `{0}` is missing")]
    Missing(String),
    /// A tensor has another shape.
    #[error("optimizer state: `{name}` has shape {found:?}, expected {expected:?}")]
    Shape {
        /// Name of the tensor.
        name: String,
        /// Shape in the state.
        found: Vec<usize>,
        /// Shape of the adapter.
        expected: Vec<usize>,
    },
}

impl Optimizer {
    /// An optimizer before its first update.
    #[must_use]
    pub fn new(config: OptimizerConfig, loraplus_lr_ratio: Option<f64>, adapters: &AdapterSet) -> Self {
        let zeros = |like: &Tensor<2>| config.name.states().iter().map(|_| like.zeros_like()).collect();
        let states = adapters.by_site().map(|(site, adapter)| (site, adapter.matrices.as_ref().map(zeros))).collect();
        let loraplus_lr_ratio = loraplus_lr_ratio.unwrap_or(1.0);
        Self { config, loraplus_lr_ratio, num_updates: 0, states, place: adapters.place() }
    }

    /// Number of updates done.
    #[must_use]
    pub fn num_updates(&self) -> u64 {
        self.num_updates
    }

    /// Where it runs.
    #[must_use]
    pub fn place(&self) -> Place {
        self.place
    }

    /// Updates every adapter that has a gradient with `grad_scale` times it. As in torch, the others and their states stay.
    pub fn update(&mut self, adapters: &mut AdapterSet, grads: &GradSums, learning_rate: f64, grad_scale: f64) {
        // Those of A and those of the others, which may be faster.
        const GROUPS: Matrices<usize> = Matrices { a: 0, b: 1, magnitude: Some(1) };
        self.num_updates += 1;
        let (mut groups, mut waiting, mut bytes) = ([Vec::new(), Vec::new()], Vec::new(), 0.0);
        for (layer, block) in adapters.blocks.iter_mut().enumerate() {
            // Tensors are moved through the update: a second owner would force a copy.
            for (site, Adapter { module, kind, matrices, scale }) in std::mem::take(block) {
                let Some((grad, states)) =
                    grads.get(layer, site).and_then(|grad| Some((grad, self.states.remove(&(layer, site))?)))
                else {
                    block.insert(site, Adapter { module, kind, matrices, scale });
                    continue;
                };
                bytes += matrices.as_ref().map(profile::bytes).values().sum::<f64>();
                let all = matrices.zip(states).zip(grad.as_ref()).zip(GROUPS);
                let group_of = all.map(|(((values, states), grad), group)| {
                    groups[group].push((Parameter { values, states }, grad));
                    group
                });
                waiting.push((layer, site, module, kind, group_of, scale));
            }
        }
        let bytes = bytes * (3.0 + 2.0 * profile::count(self.config.name.states().len()));
        let step = || {
            let rates = [learning_rate, learning_rate * self.loraplus_lr_ratio];
            let mut group = groups.into_iter().zip(rates).map(|(parameters, learning_rate)| {
                let update = Update { learning_rate, number: self.num_updates, grad_scale };
                self.of_all(parameters, update).into_iter()
            });
            [group.next(), group.next()].map(Option::unwrap_or_default)
        };
        let mut updated = profile::measure(self.config.name.word(), || Cost { bytes, ..Cost::default() }, step);
        for (layer, site, module, kind, group_of, scale) in waiting {
            let next = |group: usize| match updated[group].next() {
                Some(Parameter { values, states }) => (values, states),
                None => unreachable!("as many as went in"),
            };
            let (matrices, states) = group_of.map(next).unzip();
            self.states.insert((layer, site), states);
            adapters.blocks[layer].insert(site, Adapter { module, kind, matrices, scale });
        }
    }

    /// The rule's update of parameters.
    fn of_all(&self, parameters: Vec<(Parameter, &Tensor<2>)>, update: Update) -> Vec<Parameter> {
        match self.config.name {
            OptimizerName::Adamw => adamw::update(self.place, &self.config, parameters, update),
        }
    }

    /// The states as named host tensors, for a checkpoint.
    #[must_use]
    pub fn state(&self, adapters: &AdapterSet) -> Vec<HostTensor> {
        let mut tensors = Vec::new();
        for (site, adapter) in adapters.by_site() {
            let Some(states) = self.states.get(&site) else { continue };
            for (matrix, states) in states.as_ref().named() {
                for (state, tensor) in self.config.name.states().iter().zip(states) {
                    let name = format!("{}.{matrix}.{state}", adapter.module);
                    let values = faults::read(tensor.clone(), &name);
                    tensors.push(HostTensor { name, shape: tensor.dims().to_vec(), values });
                }
            }
        }
        tensors
    }

    /// Restores the states of a checkpoint.
    ///
    /// # Errors
    /// A tensor that is missing or has another shape.
    pub fn restore(
        &mut self,
        adapters: &AdapterSet,
        tensors: &[HostTensor],
        num_updates: u64,
    ) -> Result<(), OptimizerStateError> {
        let by_name: std::collections::HashMap<_, _> = tensors.iter().map(|t| (t.name.as_str(), t)).collect();
        let find = |name: String, like: &Tensor<2>| {
            let Some(tensor) = by_name.get(name.as_str()) else { return Err(OptimizerStateError::Missing(name)) };
            let expected = like.dims().to_vec();
            if tensor.shape != expected {
                return Err(OptimizerStateError::Shape { name, found: tensor.shape.clone(), expected });
            }
            let data = TensorData::new(tensor.values.clone(), like.dims());
            Ok(Tensor::<2>::from_data(data, (&like.device(), DType::F32)))
        };
        let names = self.config.name.states();
        let mut restored = BTreeMap::new();
        for (site, Adapter { module, matrices, .. }) in adapters.by_site() {
            let of_matrix = |(matrix, like): (&str, &Tensor<2>)| {
                names.iter().map(|state| find(format!("{module}.{matrix}.{state}"), like)).collect()
            };
            restored.insert(site, Matrices::NAMES.zip(matrices.as_ref()).try_map(of_matrix)?);
        }
        self.states = restored;
        self.num_updates = num_updates;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::config::{InitLoraWeights, LoraConfig};
    use crate::model::weights::fixture::tiny_config;
    use crate::spec::PerSite;

    #[test]
    fn an_adapter_without_a_gradient_stays_and_no_other_gets_its_neighbours() {
        let (config, device) = (tiny_config(), Device::flex());
        let selection = LoraConfig::default().select(&config).unwrap();
        let mut adapters = AdapterSet::new(&config, &selection, InitLoraWeights::Kaiming, 0.0, 1, &device);
        let before = adapters.clone();
        let mut optimizer = Optimizer::new(OptimizerConfig::default(), None, &adapters);
        let mut grads = GradSums::default();
        let grad = |like: &Tensor<2>, value: f64| like.zeros_like() + value;
        for (site, value) in [(1, 1.0), (4, -1.0)] {
            let grad = adapters.blocks[1][&site].matrices.as_ref().map(|like| grad(like, value));
            grads.add(1, PerSite::from([(site, grad)]), 1.0);
        }
        optimizer.update(&mut adapters, &grads, 1e-2, 1.0);
        for ((place, before), (_, after)) in before.by_site().zip(adapters.by_site()) {
            let [before, after]: [Vec<f32>; 2] =
                [before, after].map(|adapter| adapter.matrices.b.to_data().try_to_vec().unwrap());
            let expected = match place {
                (1, 1) => -1e-2,
                (1, 4) => 1e-2,
                _ => 0.0,
            };
            let is_moved = |(before, after): (&f32, &f32)| (after - before - expected).abs() < 1e-6;
            assert!(before.iter().zip(&after).all(is_moved), "{place:?}");
        }
        let names: Vec<String> = optimizer.state(&adapters).into_iter().map(|tensor| tensor.name).collect();
        assert_eq!((names.len(), &*names[1]), (14 * 2 * 2, "model.layers.0.self_attn.q_proj.lora_A.exp_avg_sq"));
    }
}
