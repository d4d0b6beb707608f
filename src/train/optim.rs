//! `AdamW` over all adapters.

use burn::tensor::{DType, Tensor, TensorData};

use super::grads::GradSums;
use crate::checkpoint::HostTensor;
use crate::config::OptimizerConfig;
use crate::faults;
use crate::lora::{Adapter, AdapterSet};
use crate::ops::adamw::{State, Update, adamw};
use crate::ops::low_rank::LowRank;
use crate::ops::place::Place;
use crate::ops::profile::{self, Cost};

/// First and second moment of one parameter.
#[derive(Clone, Debug)]
struct Moments {
    m: Tensor<2>,
    v: Tensor<2>,
}

impl Moments {
    fn zeros(like: &Tensor<2>) -> Self {
        Self { m: like.zeros_like(), v: like.zeros_like() }
    }
}

/// `AdamW` with its moments in `f32`.
#[derive(Clone, Debug)]
pub struct AdamW {
    config: OptimizerConfig,
    /// Ratio of B's learning rate to A's.
    loraplus_lr_ratio: f64,
    num_updates: u64,
    /// In the order of [`AdapterSet::iter`].
    moments: Vec<LowRank<Moments>>,
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

impl AdamW {
    /// An optimizer before its first update.
    #[must_use]
    pub fn new(config: OptimizerConfig, loraplus_lr_ratio: Option<f64>, adapters: &AdapterSet) -> Self {
        let moments = adapters.iter().map(|(_, _, adapter)| adapter.matrices.as_ref().map(Moments::zeros)).collect();
        let loraplus_lr_ratio = loraplus_lr_ratio.unwrap_or(1.0);
        Self { config, loraplus_lr_ratio, num_updates: 0, moments, place: adapters.place() }
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

    /// Updates every adapter with `grad_scale` times its gradient.
    pub fn update(&mut self, adapters: &mut AdapterSet, grads: &GradSums, learning_rate: f64, grad_scale: f64) {
        self.num_updates += 1;
        let update = |learning_rate: f64| Update {
            learning_rate,
            betas: self.config.betas,
            eps: self.config.eps,
            weight_decay: self.config.weight_decay,
            step: self.num_updates,
            grad_scale,
        };
        let updates = LowRank { a: update(learning_rate), b: update(learning_rate * self.loraplus_lr_ratio) };
        let mut moments = std::mem::take(&mut self.moments).into_iter();
        let mut grads = grads.iter();
        // Tensors are moved through the update: a second owner would force a copy.
        for adapter in adapters.blocks.iter_mut().flatten() {
            let Some(Adapter { matrices, scale }) = adapter.take() else { continue };
            let (Some(moments), Some(grad)) = (moments.next(), grads.next()) else {
                unreachable!("every adapter has moments and a gradient");
            };
            let bytes = 7.0 * matrices.as_ref().map(profile::bytes).into_array().iter().sum::<f64>();
            let all = matrices.zip(moments).zip(grad.as_ref()).zip(updates);
            let step = || {
                all.map(|(((parameter, Moments { m, v }), grad), update)| {
                    let State { parameter, m, v } = adamw(self.place, State { parameter, m, v }, grad, &update);
                    (parameter, Moments { m, v })
                })
            };
            let updated = profile::measure("adamw", || Cost { bytes, ..Cost::default() }, step);
            let (matrices, moments) = updated.unzip();
            self.moments.push(moments);
            *adapter = Some(Adapter { matrices, scale });
        }
    }

    /// The moments as named host tensors, for a checkpoint.
    #[must_use]
    pub fn state(&self, adapters: &AdapterSet) -> Vec<HostTensor> {
        let mut tensors = Vec::new();
        for ((layer, projection, _), moments) in adapters.iter().zip(&self.moments) {
            let module = projection.module_name(layer);
            for (matrix, Moments { m, v }) in moments.as_ref().named() {
                for (moment, tensor) in [("exp_avg", m), ("exp_avg_sq", v)] {
                    let name = format!("{module}.{matrix}.{moment}");
                    let values = faults::read(tensor.clone(), &name);
                    tensors.push(HostTensor { name, shape: tensor.dims().to_vec(), values });
                }
            }
        }
        tensors
    }

    /// Restores the moments of a checkpoint.
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
        let mut restored = Vec::with_capacity(self.moments.len());
        for (layer, projection, adapter) in adapters.iter() {
            let module = projection.module_name(layer);
            let moments = adapter.matrices.as_ref().named().map(|(matrix, like)| {
                let m = find(format!("{module}.{matrix}.exp_avg"), like)?;
                Ok(Moments { m, v: find(format!("{module}.{matrix}.exp_avg_sq"), like)? })
            });
            let [a, b] = moments;
            restored.push(LowRank { a: a?, b: b? });
        }
        self.moments = restored;
        self.num_updates = num_updates;
        Ok(())
    }
}
