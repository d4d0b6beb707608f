//! Random weights, for benchmarks and for `plan` without a model.

use std::path::Path;

use super::source::{Drawn, Numbers, Source};
use crate::schema::Problem;
use crate::spec::delta_net::GATED_NORM;
use crate::spec::{BLOCK_SCALE, EXPERT_SCALES, ModelConfig, ROUTER_SCALE};

/// Fresh weights as transformers draws them: normal with `initializer_range`, norms 1, biases 0; blocks are scaled by 1; in linear
/// attention, 1 for `dt_bias`, and `A_log` the logarithm of a number from 0.01 to 16.
#[derive(Clone, Copy, Debug)]
pub struct RandomWeights {
    initializer_range: f64,
    /// Weight of the norms, and of the last.
    norm: f32,
    last_norm: f32,
    seed: u64,
}

impl RandomWeights {
    /// Weights for `config`; the same seed gives the same tensors on the same kind of device.
    #[must_use]
    pub fn new(config: &ModelConfig, seed: u64) -> Self {
        let norm = if config.has_norms_less_one { 0.0 } else { 1.0 };
        let last_norm = if config.family().is_muse() { 1.0 } else { norm };
        Self { initializer_range: config.initializer_range, norm, last_norm, seed }
    }
}

impl Source for RandomWeights {
    fn check(&self, _: &ModelConfig) -> Result<(), Problem> {
        Ok(())
    }

    fn digest(&self) -> Option<[u8; 32]> {
        None
    }

    /// The values depend on the seed and the name, not on the order of calls.
    fn numbers(&self, name: &str, _: &[usize]) -> Result<(Numbers<'_>, &Path), Problem> {
        let (drawn, seed) = (self.of(name), self.seed ^ fnv1a(name));
        let fill = move |first, to: &mut [f32]| match drawn {
            Some(Drawn::Constant(value)) => to.fill(value),
            Some(Drawn::Normal { seed, deviation }) => draw(seed, first, deviation, to),
            None => draw_logarithms(seed, first, to),
        };
        Ok((Numbers::Decoded(Box::new(fill)), Path::new("config.json")))
    }

    fn drawn(&self, name: &str) -> Option<Drawn> {
        self.of(name)
    }
}

impl RandomWeights {
    /// `None` for [`draw_logarithms`].
    fn of(&self, name: &str) -> Option<Drawn> {
        Some(match name.rsplit_once("layers.").and_then(|(_, in_layer)| Some(in_layer.split_once('.')?.1)) {
            Some(part) if part.ends_with(".A_log") => return None,
            Some(GATED_NORM | BLOCK_SCALE | ROUTER_SCALE | EXPERT_SCALES) => Drawn::Constant(1.0),
            Some(part) if part.ends_with(".dt_bias") || part.ends_with(".D") => Drawn::Constant(1.0),
            _ if name == "model.norm.weight" => Drawn::Constant(self.last_norm),
            // Gemma 4 has norms called `post_feedforward_layernorm_1`.
            _ if name.ends_with("norm.weight")
                || name.contains("layernorm_")
                || name.contains("layernorm.norms.")
                || name.contains(".post_norm")
                || name.ends_with("norm_f.weight") =>
            {
                Drawn::Constant(self.norm)
            }
            _ if name.ends_with(".bias") => Drawn::Constant(0.0),
            _ => Drawn::Normal { seed: self.seed ^ fnv1a(name), deviation: self.initializer_range },
        })
    }
}

/// Logarithms of numbers uniform in 0.01 to 16.
fn draw_logarithms(seed: u64, first: usize, block: &mut [f32]) {
    for (position, value) in (first as u64..).zip(block) {
        let bits = splitmix64(seed.wrapping_add(position.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]
        let share = (bits >> 40) as f32 / (1_u32 << 24) as f32;
        *value = (0.01 + share * 15.99).ln();
    }
}

/// Numbers with mean 0 and the given deviation, starting at position `first` of a stream. Each is a sum of four uniform
/// numbers: close to normal, and cheap enough for models of any size.
fn draw(seed: u64, first: usize, deviation: f64, block: &mut [f32]) {
    // A 16-bit integer has a variance of (2^32 - 1) / 12; the sum of four has four times that.
    #[allow(clippy::cast_possible_truncation)]
    let scale = (deviation / (4.0 * 4_294_967_295.0 / 12.0_f64).sqrt()) as f32;
    for (position, value) in (first as u64..).zip(block) {
        let bits = splitmix64(seed.wrapping_add(position.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        let sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
        #[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_precision_loss)]
        let centred = (sum as i32 - 2 * 0xffff) as f32;
        *value = centred * scale;
    }
}

/// The output function of `SplitMix64` (Steele et al., 2014).
fn splitmix64(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The 64-bit FNV-1a hash, which never changes between builds.
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::device::Dtype;
    use crate::model::weights::Weights;

    #[test]
    fn draws_have_the_configs_deviation_and_follow_seed_and_name() {
        let json = include_str!("../../../configs/tiny.json");
        let config = ModelConfig::from_json(json).unwrap();
        let device = Device::flex();
        let draw = |seed: u64, name: &str| -> Vec<f32> {
            let weights = Weights::Random(RandomWeights::new(&config, seed));
            let tensor = weights.load(name, [256, 64], Dtype::F32, &device).unwrap();
            tensor.into_data().try_to_vec().unwrap()
        };
        let name = "model.embed_tokens.weight";
        let values = draw(1, name);
        #[allow(clippy::cast_precision_loss)]
        let count = values.len() as f32;
        let mean = values.iter().sum::<f32>() / count;
        let deviation = (values.iter().map(|value| (value - mean).powi(2)).sum::<f32>() / count).sqrt();
        // 16384 draws: the standard error is 0.00016 of the mean and 0.00011 of the deviation.
        assert!(mean.abs() < 1e-3 && (deviation - 0.02).abs() < 1e-3, "mean {mean}, deviation {deviation}");
        assert_eq!(values, draw(1, name));
        assert_ne!(values, draw(2, name));
        assert_ne!(values, draw(1, "lm_head.weight"));
        assert!(draw(1, "model.norm.weight").iter().all(|value| value.to_bits() == 1f32.to_bits()));
    }

    #[test]
    fn linear_attention_decays_at_the_rates_of_transformers() {
        let json = include_str!("../../../configs/qwen3.5-0.8b.json");
        let config = ModelConfig::from_json(json).unwrap();
        let weights = Weights::Random(RandomWeights::new(&config, 1));
        let draw = |part: &str| -> Vec<f32> {
            let name = format!("model.layers.0.linear_attn.{part}");
            weights.load(&name, [16], Dtype::F32, &Device::flex()).unwrap().into_data().try_to_vec().unwrap()
        };
        let rates: Vec<f32> = draw("A_log").into_iter().map(f32::exp).collect();
        assert!(rates.iter().all(|rate| (0.0099..16.001).contains(rate)), "{rates:?}");
        assert!(rates.iter().any(|rate| *rate < 4.0) && rates.iter().any(|rate| *rate > 12.0), "{rates:?}");
        // Norms of the model itself are stored less 1, that of linear attention is not.
        assert_eq!((draw("dt_bias"), draw("norm.weight")), (vec![1.0; 16], vec![1.0; 16]));
    }
}
