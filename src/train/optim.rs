//! `AdamW` over all adapters.

use burn::tensor::{DType, Tensor, TensorData};

use super::config::OptimizerConfig;
use super::grads::GradSums;
use crate::checkpoint::HostTensor;
use crate::lora::{Adapter, AdapterSet};
use crate::ops::adamw::{State, Update, adamw};
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
    /// Moments of A and B, in the order of [`AdapterSet::iter`].
    moments: Vec<[Moments; 2]>,
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
        let moments = adapters.iter().map(|(_, _, a)| [Moments::zeros(&a.lora_a), Moments::zeros(&a.lora_b)]);
        let moments = moments.collect();
        Self { config, loraplus_lr_ratio: loraplus_lr_ratio.unwrap_or(1.0), num_updates: 0, moments }
    }

    /// Number of updates done.
    #[must_use]
    pub fn num_updates(&self) -> u64 {
        self.num_updates
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
        let (update_a, update_b) = (update(learning_rate), update(learning_rate * self.loraplus_lr_ratio));
        let mut moments = std::mem::take(&mut self.moments).into_iter();
        let mut grads = grads.iter();
        // Tensors are moved through the update: a second owner would force a copy.
        adapters.blocks = std::mem::take(&mut adapters.blocks)
            .into_iter()
            .map(|block| {
                block.map(|adapter| {
                    let Adapter { lora_a, lora_b, scale } = adapter?;
                    let (Some([of_a, of_b]), Some(grad)) = (moments.next(), grads.next()) else {
                        unreachable!("every adapter has moments and a gradient");
                    };
                    let bytes = 7.0 * (profile::bytes(&lora_a) + profile::bytes(&lora_b));
                    let both = || {
                        let a = adamw(State { parameter: lora_a, m: of_a.m, v: of_a.v }, &grad.a, &update_a);
                        (a, adamw(State { parameter: lora_b, m: of_b.m, v: of_b.v }, &grad.b, &update_b))
                    };
                    let (a, b) = profile::measure("adamw", || Cost { bytes, ..Cost::default() }, both);
                    self.moments.push([Moments { m: a.m, v: a.v }, Moments { m: b.m, v: b.v }]);
                    Some(Adapter { lora_a: a.parameter, lora_b: b.parameter, scale })
                })
            })
            .collect();
    }

    /// The moments as named host tensors, for a checkpoint.
    #[must_use]
    pub fn state(&self, adapters: &AdapterSet) -> Vec<HostTensor> {
        let mut tensors = Vec::new();
        for ((layer, projection, _), moments) in adapters.iter().zip(&self.moments) {
            let module = projection.module_name(layer);
            for (matrix, Moments { m, v }) in ["lora_A", "lora_B"].into_iter().zip(moments) {
                for (moment, tensor) in [("exp_avg", m), ("exp_avg_sq", v)] {
                    tensors.push(HostTensor {
                        name: format!("{module}.{matrix}.{moment}"),
                        shape: tensor.dims().to_vec(),
                        values: tensor.to_data().try_to_vec().unwrap_or_default(),
                    });
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
            let moments = |matrix: &str, like: &Tensor<2>| {
                let m = find(format!("{module}.{matrix}.exp_avg"), like)?;
                Ok(Moments { m, v: find(format!("{module}.{matrix}.exp_avg_sq"), like)? })
            };
            restored.push([moments("lora_A", &adapter.lora_a)?, moments("lora_B", &adapter.lora_b)?]);
        }
        self.moments = restored;
        self.num_updates = num_updates;
        Ok(())
    }
}
