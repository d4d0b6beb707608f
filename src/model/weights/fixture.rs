//! Small random models on disk, for tests.

use std::collections::BTreeMap;
use std::path::Path;

use rand::{Rng, SeedableRng};
use safetensors::tensor::TensorView;

use super::convert;
use crate::device::Dtype;
use crate::spec::{ModelConfig, SublayerKind};

/// Shape and values of each tensor.
pub(crate) type FixtureTensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

pub(crate) const TINY_CONFIG_JSON: &str = include_str!("../../../configs/tiny.json");

pub(crate) fn tiny_config() -> ModelConfig {
    ModelConfig::from_json(TINY_CONFIG_JSON).unwrap()
}

/// The config with this sliding window in every layer.
pub(crate) fn windowed(mut config: ModelConfig, window: Option<usize>) -> ModelConfig {
    for sublayer in config.blocks.iter_mut().flat_map(|block| &mut block.sublayers) {
        if let SublayerKind::Attention(attention) = &mut sublayer.kind {
            attention.heads.window = window;
        }
    }
    config
}

/// The tiny model with other counts in its config.
pub(crate) fn tiny_with(counts: &[(&str, usize)]) -> ModelConfig {
    let mut json: serde_json::Value = serde_json::from_str(TINY_CONFIG_JSON).unwrap();
    for (key, count) in counts {
        json[*key] = (*count).into();
    }
    ModelConfig::from_json(&json.to_string()).unwrap()
}

/// Tensors of a model, uniform in ±0.1, rounded to bf16.
pub(crate) fn random_tensors(config: &ModelConfig) -> FixtureTensors {
    let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(7);
    let mut draw = |shape: Vec<usize>| {
        let numbers: Vec<f32> = (0..shape.iter().product()).map(|_| random.random_range(-0.1..0.1)).collect();
        let numbers = convert::to_f32(&convert::from_f32(&numbers, Dtype::Bf16).unwrap(), Dtype::Bf16);
        (shape, numbers)
    };
    config.expected_tensors().into_iter().map(|(name, shape)| (name, draw(shape))).collect()
}

/// Writes tensors to a safetensors file.
pub(crate) fn write_tensors(path: &Path, tensors: &FixtureTensors, dtype: Dtype) {
    let stored = convert::stored_dtype(dtype);
    let bytes: Vec<Vec<u8>> = tensors.values().map(|(_, numbers)| convert::from_f32(numbers, dtype).unwrap()).collect();
    let views = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, (shape, _)), bytes)| (name.as_str(), TensorView::new(stored, shape.clone(), bytes).unwrap()));
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    safetensors::serialize_to_file(views, Some(metadata), path).unwrap();
}

/// Writes a model folder with `num_shards` files, and returns the stored values.
pub(crate) fn write_model(
    folder: &Path,
    config: &ModelConfig,
    num_shards: usize,
    dtype: Dtype,
) -> BTreeMap<String, Vec<f32>> {
    let tensors = random_tensors(config);
    std::fs::write(folder.join("config.json"), TINY_CONFIG_JSON).unwrap();
    if num_shards == 1 {
        write_tensors(&folder.join("model.safetensors"), &tensors, dtype);
    } else {
        let mut weight_map = BTreeMap::new();
        for shard in 0..num_shards {
            let name = format!("model-{:05}-of-{num_shards:05}.safetensors", shard + 1);
            let part: FixtureTensors = tensors
                .iter()
                .enumerate()
                .filter(|(index, _)| index * num_shards / tensors.len() == shard)
                .map(|(_, (name, tensor))| (name.clone(), tensor.clone()))
                .collect();
            write_tensors(&folder.join(&name), &part, dtype);
            weight_map.extend(part.into_keys().map(|tensor| (tensor, name.clone())));
        }
        let index = serde_json::json!({
            "metadata": {"total_size": config.num_parameters() * dtype.num_bytes()},
            "weight_map": weight_map,
        });
        std::fs::write(folder.join("model.safetensors.index.json"), serde_json::to_string_pretty(&index).unwrap())
            .unwrap();
    }
    tensors.into_iter().map(|(name, (_, numbers))| (name, numbers)).collect()
}
