//! The adapters of a model: its trained weights.

use burn::tensor::{DType, Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::targets::Selection;
use crate::config::InitLoraWeights;
use crate::ops::host;
use crate::ops::low_rank::LowRank;
use crate::ops::place::Place;
use crate::spec::{Linear, ModelConfig};

/// The low-rank update of one linear layer: `scale B A`.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// A and B, in `f32`.
    pub matrices: LowRank<Tensor<2>>,
    /// Scale of the update.
    pub scale: f64,
}

/// The adapters of one block, in the order of [`Linear::ALL`].
pub type BlockAdapters = [Option<Adapter>; 7];

/// The adapters of a model.
#[derive(Clone, Debug)]
pub struct AdapterSet {
    /// By layer.
    pub blocks: Vec<BlockAdapters>,
    /// Dropout on the input of every A while training, in `[0, 1)`.
    pub dropout: f64,
}

impl AdapterSet {
    /// New adapters: A drawn from `seed`, B zero, so that the model's output is the base model's.
    ///
    /// The numbers are drawn on the host, adapter by adapter, so that a seed gives the same adapters on every device.
    #[must_use]
    pub fn new(
        config: &ModelConfig,
        selection: &Selection,
        init: InitLoraWeights,
        dropout: f64,
        seed: u64,
        device: &Device,
    ) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let blocks = selection.shapes.iter().map(|shapes| {
            std::array::from_fn(|index| {
                let shape = shapes[index]?;
                let [out_features, in_features] = config.linear(Linear::ALL[index]);
                let a = draw(init, shape.r, in_features, &mut rng);
                let a = host::tensor(a, [shape.r, in_features], device);
                let b = Tensor::zeros([out_features, shape.r], (device, DType::F32));
                Some(Adapter { matrices: LowRank { a, b }, scale: shape.scale })
            })
        });
        Self { blocks: blocks.collect(), dropout }
    }

    /// No adapters: the base model.
    #[must_use]
    pub fn none(num_layers: usize) -> Self {
        Self { blocks: (0..num_layers).map(|_| BlockAdapters::default()).collect(), dropout: 0.0 }
    }

    /// Where the optimizer runs: the matrices are in `f32`, whatever the type of the activations.
    #[must_use]
    pub fn place(&self) -> Place {
        let first = self.iter().next().map(|(_, _, adapter)| adapter.matrices.a.device());
        Place::of(&first.unwrap_or_default(), DType::F32)
    }

    /// Number of trained parameters.
    #[must_use]
    pub fn num_parameters(&self) -> usize {
        let matrices = self.iter().flat_map(|(_, _, adapter)| adapter.matrices.as_ref().into_array());
        matrices.map(|matrix| matrix.shape().num_elements()).sum()
    }

    /// Every adapter with its block and linear layer, in the order of the forward pass.
    pub fn iter(&self) -> impl Iterator<Item = (usize, Linear, &Adapter)> {
        self.blocks.iter().enumerate().flat_map(|(layer, block)| {
            let adapters = Linear::ALL.into_iter().zip(block);
            adapters.filter_map(move |(linear, adapter)| Some((layer, linear, adapter.as_ref()?)))
        })
    }

    /// Every adapter, mutable, in the order of [`iter`](Self::iter).
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Adapter> {
        self.blocks.iter_mut().flatten().flatten()
    }
}

/// `A` as PEFT draws it: uniform in ±1/sqrt(in) is `kaiming_uniform_` with `a = sqrt(5)`.
#[expect(clippy::cast_precision_loss, reason = "widths are far below 2^24")]
fn draw(init: InitLoraWeights, r: usize, in_features: usize, rng: &mut ChaCha8Rng) -> Vec<f32> {
    let count = r * in_features;
    match init {
        InitLoraWeights::Kaiming => {
            let bound = 1.0 / (in_features as f32).sqrt();
            (0..count).map(|_| rng.random_range(-bound..bound)).collect()
        }
        InitLoraWeights::Gaussian => {
            let std = 1.0 / r as f32;
            (0..count).map(|_| std * normal(rng)).collect()
        }
    }
}

/// A standard normal number (Box and Muller, 1958).
pub(crate) fn normal(rng: &mut ChaCha8Rng) -> f32 {
    let radius = (-2.0 * (1.0 - rng.random::<f32>()).ln()).sqrt();
    radius * (std::f32::consts::TAU * rng.random::<f32>()).cos()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::LoraConfig;

    fn set(init: InitLoraWeights, seed: u64) -> AdapterSet {
        let selection = LoraConfig::default().select(2).unwrap();
        AdapterSet::new(&config(), &selection, init, 0.0, seed, &Device::flex())
    }

    /// Every linear layer has 400 inputs and outputs.
    fn config() -> ModelConfig {
        ModelConfig::from_json(
            r#"{"model_type": "llama", "vocab_size": 9, "hidden_size": 400, "intermediate_size": 400,
            "num_hidden_layers": 2, "num_attention_heads": 4}"#,
        )
        .unwrap()
    }

    #[test]
    fn a_is_uniform_within_one_over_root_in_and_b_is_zero() {
        let set = set(InitLoraWeights::Kaiming, 7);
        for (_, _, adapter) in set.iter() {
            let a = adapter.matrices.a.to_data().try_to_vec::<f32>().unwrap();
            let largest = a.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
            assert!((0.049..=0.05).contains(&largest), "bound is 1/20, largest is {largest}");
            let variance = a.iter().map(|v| v * v).sum::<f32>() / 3200.0;
            assert!((variance / (0.05 * 0.05 / 3.0) - 1.0).abs() < 0.1, "variance {variance}");
            assert!(adapter.matrices.b.to_data().try_to_vec::<f32>().unwrap().iter().all(|&b| b == 0.0));
        }
        assert_eq!(set.num_parameters(), 14 * 8 * 800);
    }

    #[test]
    fn a_seed_names_the_adapters() {
        let first = |set: &AdapterSet| set.iter().next().map(|(_, _, a)| a.matrices.a.to_data()).unwrap();
        assert_eq!(first(&set(InitLoraWeights::Gaussian, 1)), first(&set(InitLoraWeights::Gaussian, 1)));
        assert_ne!(first(&set(InitLoraWeights::Gaussian, 1)), first(&set(InitLoraWeights::Gaussian, 2)));
    }
}
