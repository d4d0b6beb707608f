//! The optimizer over all that is trained: its rules, each in a file of its own, and their states.

mod adafactor;
mod adamw;
mod adamw_8bit;
mod ema;
mod lion;
mod muon;
mod schedule_free;
mod sgd;
mod states;

use std::collections::BTreeMap;

use burn::tensor::Tensor;

use super::grads::GradSums;
use crate::config::{OptimizerConfig, OptimizerName};
use crate::lora::{AdapterSet, Matrices, TensorId};
use crate::ops::kernels::Place;
use crate::ops::profile::{self, Cost};
use crate::save::checkpoint::{HostTensor, HostValues};
use crate::schema::Choice;
use crate::util::faults;

pub use schedule_free::StepWeights;
use states::numbers;
pub use states::{State, StateForm};

/// Name in a checkpoint of the values that training continues from, where the adapter in it is an average.
const TRAINED: &str = "trained";

impl OptimizerConfig {
    /// What the rule remembers of a parameter of this shape.
    #[must_use]
    pub fn states(&self, shape: [usize; 2]) -> Vec<StateForm> {
        let mut states = match self.name {
            OptimizerName::Adamw => adamw::states(shape),
            OptimizerName::Adamw8bit => adamw_8bit::states(shape),
            OptimizerName::Lion => lion::states(shape),
            OptimizerName::Adafactor => adafactor::states(shape),
            OptimizerName::Sgd => sgd::states(self, shape),
            OptimizerName::ScheduleFreeAdamw => schedule_free::states(shape),
            OptimizerName::Muon => muon::states(shape),
        };
        states.extend(self.ema_decay.map(|_| ema::state(shape)));
        states
    }

    /// Bytes of the states of a parameter of this shape.
    #[must_use]
    pub fn state_bytes(&self, shape: [usize; 2]) -> usize {
        self.states(shape).iter().map(StateForm::num_bytes).sum()
    }

    /// Whether not the trained parameters are evaluated and written, but an average.
    #[must_use]
    pub fn averages(&self) -> bool {
        self.ema_decay.is_some() || self.name == OptimizerName::ScheduleFreeAdamw
    }
}

/// A parameter with the states of its rule.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// The parameter.
    pub values: Tensor<2>,
    /// Its states, in the order of [`OptimizerConfig::states`].
    pub states: Vec<State>,
}

/// What the updates of some parameters in a step have in common.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// Learning rate.
    pub learning_rate: f64,
    /// Number of this update, from 1.
    pub number: u64,
    /// Factor of the gradients.
    pub grad_scale: f64,
    /// Share of this step in a schedule-free average.
    pub share: f64,
    /// Matrices that are one parameter, row below row: of experts.
    pub num_stacked: usize,
}

/// Updates all that is trained by the rule of the recipe.
#[derive(Clone, Debug)]
pub struct Optimizer {
    config: OptimizerConfig,
    /// Ratio of B's learning rate to A's.
    loraplus_lr_ratio: f64,
    num_updates: u64,
    step_weights: StepWeights,
    /// Of each tensor, in the order of [`OptimizerConfig::states`].
    states: BTreeMap<TensorId, Vec<State>>,
    place: Place,
}

/// The moments do not belong to these adapters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptimizerStateError {
    /// A tensor is missing.
    #[error("optimizer state: `{0}` is missing")]
    Missing(String),
    /// A tensor has another type or shape.
    #[error("optimizer state: `{name}`, of shape {found:?}, belongs to another adapter or optimizer")]
    Form {
        /// Name of the tensor.
        name: String,
        /// Shape in the state.
        found: Vec<usize>,
    },
}

impl Optimizer {
    /// An optimizer before its first update.
    #[must_use]
    pub fn new(config: OptimizerConfig, loraplus_lr_ratio: Option<f64>, adapters: &AdapterSet) -> Self {
        let start = |like: &Tensor<2>| config.states(like.dims()).iter().map(|form| form.start(like)).collect();
        let states = adapters.tensors().map(|(id, like)| (id, start(like))).collect();
        let loraplus_lr_ratio = loraplus_lr_ratio.unwrap_or(1.0);
        let (num_updates, step_weights) = (0, StepWeights::default());
        Self { config, loraplus_lr_ratio, num_updates, step_weights, states, place: adapters.place() }
    }

    /// Number of updates done.
    #[must_use]
    pub fn num_updates(&self) -> u64 {
        self.num_updates
    }

    /// The weights of the steps so far in a schedule-free average.
    #[must_use]
    pub fn step_weights(&self) -> Option<StepWeights> {
        (self.config.name == OptimizerName::ScheduleFreeAdamw).then_some(self.step_weights)
    }

    /// Where it runs.
    #[must_use]
    pub fn place(&self) -> Place {
        self.place
    }

    /// Whether it takes a factor of the device: what it does on the host does not depend on whether there is an update.
    #[must_use]
    pub fn can_queue(&self) -> bool {
        matches!(self.config.name, OptimizerName::Adamw | OptimizerName::Adamw8bit) && self.config.ema_decay.is_none()
    }

    /// [`update`](Self::update) with a factor of [`Updates::grad_factor`](crate::ops::kernels::Updates::grad_factor), if it
    /// [can](Self::can_queue) take it. Where that turns out to be none, call [`take_back`](Self::take_back).
    pub fn queue(&mut self, adapters: &mut AdapterSet, grads: &GradSums, learning_rate: f64, factor: &Tensor<1>) {
        self.update_by(adapters, grads, learning_rate, f64::NAN, Some(factor));
    }

    /// The last update that was queued was none.
    pub fn take_back(&mut self) {
        self.num_updates -= 1;
    }

    /// Updates every tensor that has a gradient with `grad_scale` times it. As in torch, the others and their states stay.
    pub fn update(&mut self, adapters: &mut AdapterSet, grads: &GradSums, learning_rate: f64, grad_scale: f64) {
        self.update_by(adapters, grads, learning_rate, grad_scale, None);
    }

    fn update_by(
        &mut self,
        adapters: &mut AdapterSet,
        grads: &GradSums,
        learning_rate: f64,
        grad_scale: f64,
        factor: Option<&Tensor<1>>,
    ) {
        self.num_updates += 1;
        let share = self.step_weights.add(learning_rate);
        let stacked: Vec<usize> = adapters.tensors().map(|(id, _)| adapters.num_stacked(id)).collect();
        let (mut groups, mut bytes) = (BTreeMap::<_, Vec<_>>::new(), 0.0);
        for ((id, values), num_stacked) in adapters.tensors_mut().zip(stacked) {
            let Some((grad, states)) = grads.get(id).and_then(|grad| Some((grad, self.states.remove(&id)?))) else {
                continue;
            };
            bytes += self.update_bytes(values);
            // Tensors are moved through the update: a second owner would force a copy.
            let values = std::mem::replace(values, grad.clone());
            let group = groups.entry((is_of_b(id), num_stacked)).or_default();
            group.push((id, (Parameter { values, states }, grad)));
        }
        let step = || {
            let of_group = |((is_of_b, num_stacked), group): ((bool, usize), Vec<_>)| {
                let (ids, parameters): (Vec<TensorId>, Vec<_>) = group.into_iter().unzip();
                let learning_rate = if is_of_b { learning_rate * self.loraplus_lr_ratio } else { learning_rate };
                let update = Update { learning_rate, number: self.num_updates, grad_scale, share, num_stacked };
                ids.into_iter().zip(self.of_all(parameters, update, factor))
            };
            groups.into_iter().flat_map(of_group).collect::<BTreeMap<_, _>>()
        };
        let mut updated = profile::measure(self.config.name.word(), || Cost { bytes, ..Cost::default() }, step);
        for (id, place) in adapters.tensors_mut() {
            if let Some(Parameter { values, states }) = updated.remove(&id) {
                *place = values;
                self.states.insert(id, states);
            }
        }
    }

    /// Bytes that are read and written for a parameter: itself and its states twice, its gradient once.
    fn update_bytes(&self, parameter: &Tensor<2>) -> f64 {
        3.0 * profile::bytes(parameter) + 2.0 * profile::count(self.config.state_bytes(parameter.dims()))
    }

    /// The rule's update of parameters.
    fn of_all(
        &self,
        mut parameters: Vec<(Parameter, &Tensor<2>)>,
        update: Update,
        factor: Option<&Tensor<1>>,
    ) -> Vec<Parameter> {
        let config = &self.config;
        let averages = config.ema_decay.map(|decay| {
            let averages = parameters.iter_mut().filter_map(|(parameter, _)| parameter.states.pop());
            (decay, averages.collect::<Vec<_>>())
        });
        let mut updated = match config.name {
            OptimizerName::Adamw => adamw::update(self.place, config, parameters, update, factor),
            OptimizerName::Adamw8bit => adamw_8bit::update(self.place, config, parameters, update, factor),
            OptimizerName::Lion => each(lion::update, config, parameters, update),
            OptimizerName::Adafactor => each(adafactor::update, config, parameters, update),
            OptimizerName::Sgd => each(sgd::update, config, parameters, update),
            OptimizerName::ScheduleFreeAdamw => each(schedule_free::update, config, parameters, update),
            OptimizerName::Muon => each(muon::update, config, parameters, update),
        };
        if let Some((decay, averages)) = averages {
            for (parameter, average) in updated.iter_mut().zip(averages) {
                parameter.states.push(ema::next(decay, average, &parameter.values, update.number));
            }
        }
        updated
    }

    /// The averages of the adapters, where the rule or the recipe makes some.
    #[must_use]
    pub fn averaged(&self, adapters: &AdapterSet) -> AdapterSet {
        let mut averaged = adapters.clone();
        for (id, values) in averaged.tensors_mut() {
            if let Some(states) = self.states.get(&id) {
                *values = self.average(values, states);
            }
        }
        averaged
    }

    /// The average of a parameter.
    fn average(&self, values: &Tensor<2>, states: &[State]) -> Tensor<2> {
        match (self.config.ema_decay, states.last()) {
            (Some(_), Some(State::Numbers(average))) => average.clone(),
            _ => schedule_free::average(&self.config, values, states),
        }
    }

    /// The states as named host tensors, for a checkpoint; where an average is written, also the trained parameters.
    #[must_use]
    pub fn state(&self, adapters: &AdapterSet) -> Vec<HostTensor> {
        let mut tensors = Vec::new();
        for (id, values) in adapters.tensors() {
            let Some(states) = self.states.get(&id) else { continue };
            let (parameter, forms) = (adapters.name(id), self.config.states(values.dims()));
            let save = |(form, state): (&StateForm, &State)| form.save(state, format!("{parameter}.{}", form.name));
            tensors.extend(forms.iter().zip(states).map(save));
            if self.config.averages() {
                let (name, shape) = (format!("{parameter}.{TRAINED}"), values.dims().to_vec());
                let values = HostValues::F32(faults::read(values.clone(), &name));
                tensors.push(HostTensor { name, shape, values });
            }
        }
        tensors
    }

    /// Restores the states of a checkpoint with these adapters; returns the adapters that training continues from.
    ///
    /// # Errors
    /// A tensor that is missing or has another form.
    pub fn restore(
        &mut self,
        mut adapters: AdapterSet,
        tensors: &[HostTensor],
        (num_updates, step_weights): (u64, Option<StepWeights>),
    ) -> Result<AdapterSet, OptimizerStateError> {
        let by_name: std::collections::HashMap<_, _> = tensors.iter().map(|t| (t.name.as_str(), t)).collect();
        let find = |form: &StateForm, name: String, like: &Tensor<2>| {
            let Some(tensor) = by_name.get(name.as_str()) else { return Err(OptimizerStateError::Missing(name)) };
            let found = || tensor.shape.clone();
            form.restore(tensor, &like.device()).ok_or_else(|| OptimizerStateError::Form { name, found: found() })
        };
        let names: Vec<_> = adapters.tensors().map(|(id, _)| adapters.name(id)).collect();
        let mut restored = BTreeMap::new();
        for ((id, values), parameter) in adapters.tensors_mut().zip(names) {
            let forms = self.config.states(values.dims());
            let state = |form: &StateForm| find(form, format!("{parameter}.{}", form.name), values);
            restored.insert(id, forms.iter().map(state).collect::<Result<Vec<_>, _>>()?);
            if self.config.averages() {
                let form = StateForm::zeros(TRAINED, values.dims());
                [*values] = numbers(vec![find(&form, format!("{parameter}.{TRAINED}"), values)?]);
            }
        }
        self.states = restored;
        (self.num_updates, self.step_weights) = (num_updates, step_weights.unwrap_or_default());
        Ok(adapters)
    }
}

/// Whether it is trained with B's learning rate: of adapters all but A, and the vectors among the others, as in PEFT.
fn is_of_b(id: TensorId) -> bool {
    match id {
        TensorId::Adapter(.., matrix) => matrix != Matrices::NAMES.a,
        TensorId::Full(full) => full.is_norm(),
    }
}

type Rule = fn(&OptimizerConfig, Parameter, &Tensor<2>, Update) -> Parameter;

/// A rule's update of parameters, one after the other.
fn each(
    rule: Rule,
    config: &OptimizerConfig,
    parameters: Vec<(Parameter, &Tensor<2>)>,
    update: Update,
) -> Vec<Parameter> {
    parameters.into_iter().map(|(parameter, grad)| rule(config, parameter, grad, update)).collect()
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::config::{InitLoraWeights, LoraConfig};
    use crate::model::weights::fixture::tiny_config;

    #[test]
    fn an_adapter_without_a_gradient_stays_and_no_other_gets_its_neighbours() {
        let (config, device) = (tiny_config(), Device::flex());
        let selection = LoraConfig::default().select(&config).unwrap();
        let mut adapters = AdapterSet::new(&config, &selection, InitLoraWeights::Kaiming, 0.0, 1, &device);
        let before = adapters.clone();
        let mut optimizer = Optimizer::new(OptimizerConfig::default(), None, &adapters);
        let mut grads = GradSums::default();
        for (site, value) in [(1, 1.0), (4, -1.0)] {
            for (id, like) in
                adapters.tensors().filter(|(id, _)| matches!(id, TensorId::Adapter(1, of, _) if *of == site))
            {
                grads.add(id, like.zeros_like() + value, 1.0);
            }
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

    #[test]
    fn muon_makes_the_matrix_of_each_expert_orthogonal_by_itself() {
        let text = r#"{"model_type": "qwen3_moe", "vocab_size": 9, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 3,
            "num_experts_per_tok": 2, "moe_intermediate_size": 8}"#;
        let (config, device) = (crate::spec::ModelConfig::from_json(text).unwrap(), Device::flex());
        let lora = LoraConfig { expert_rank: Some(2), ..LoraConfig::default() };
        let selection = lora.select(&config).unwrap();
        let adapters = AdapterSet::new(&config, &selection, InitLoraWeights::Kaiming, 0.0, 1, &device);
        let muon = OptimizerConfig { name: OptimizerName::Muon, ..OptimizerConfig::default() };
        let updated = |expert: Option<usize>| -> Vec<Vec<f32>> {
            let mut adapters = adapters.clone();
            if let Some(expert) = expert {
                adapters.blocks[0].retain(|_, adapter| adapter.num_experts.is_some());
                adapters.blocks[0].values_mut().for_each(|adapter| *adapter = adapter.of_expert(expert));
            }
            let mut grads = GradSums::default();
            // Powers, so that the directions of experts differ.
            adapters.tensors().for_each(|(id, like)| grads.add(id, like.clone() + like.clone().powi_scalar(2), 1.0));
            Optimizer::new(muon.clone(), None, &adapters).update(&mut adapters, &grads, 0.5, 1.0);
            let adapted = adapters.iter().filter(|adapter| expert.is_some() || adapter.num_experts.is_some());
            adapted.map(|adapter| adapter.matrices.a.to_data().try_to_vec().unwrap()).collect()
        };
        let together = updated(None);
        let apart = [0, 1, 2].map(|expert| updated(Some(expert)));
        assert_eq!(together.len(), 3);
        for (site, values) in together.iter().enumerate() {
            let expected = apart.iter().flat_map(|of_expert| &of_expert[site]);
            assert!(values.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-5), "{site}");
        }
    }
}
