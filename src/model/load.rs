//! From weight files to a model on its device.

use burn::tensor::{DType, Device};
use rayon::prelude::*;

use super::block::Block;
use super::config::LlamaConfig;
use super::llama::Llama;
use super::weights::{Weights, WeightsError};
use crate::device::Dtype;
use crate::lora::targets::Projection;
use crate::ops::host;
use crate::ops::linear::Weight;

/// Loads a model: `storage` is the type of its linear layers and embeddings, `compute` that of the arithmetic. The
/// weights of the norms are kept in `f32`: they are small, and every stored type fits into it.
///
/// In `bf16`, where the kernels of [`crate::ops::cpu`] run, only the operands of the products with frozen weights are
/// rounded: activations and sums are in `f32`.
///
/// # Errors
/// Lists every tensor that is missing, unexpected, misshapen or of a type that cannot be read.
pub fn load(
    config: &LlamaConfig,
    weights: &Weights,
    storage: Dtype,
    compute: Dtype,
    device: &Device,
) -> Result<Llama, WeightsError> {
    weights.check(config)?;
    let LlamaConfig { vocab_size, hidden_size, .. } = *config;
    let has_kernels = host::has_kernels(device, DType::F32);
    let rounds = has_kernels && compute == Dtype::Bf16;
    let block = |layer| load_block(config, weights, layer, storage, rounds, device);
    // On the host several tensors are converted at a time; a GPU takes them one by one.
    let blocks: Result<Vec<Block>, WeightsError> = if has_kernels {
        (0..config.num_hidden_layers).into_par_iter().map(block).collect()
    } else {
        (0..config.num_hidden_layers).map(block).collect()
    };
    let embed_tokens = weights.load("model.embed_tokens.weight", [vocab_size, hidden_size], storage, device)?;
    let lm_head = if config.tie_word_embeddings {
        embed_tokens.clone()
    } else {
        weights.load("lm_head.weight", [vocab_size, hidden_size], storage, device)?
    };
    Ok(Llama::new(
        config.clone(),
        if rounds { DType::F32 } else { DType::from(compute) },
        embed_tokens,
        blocks?,
        weights.load("model.norm.weight", [hidden_size], Dtype::F32, device)?,
        Weight { values: lm_head, rounds },
    ))
}

fn load_block(
    config: &LlamaConfig,
    weights: &Weights,
    layer: usize,
    storage: Dtype,
    rounds: bool,
    device: &Device,
) -> Result<Block, WeightsError> {
    let norm = |name: &str| {
        weights.load(&format!("model.layers.{layer}.{name}.weight"), [config.hidden_size], Dtype::F32, device)
    };
    let linears = config.block_linears();
    let mut projections = Vec::with_capacity(linears.len());
    for projection in Projection::ALL {
        let shape = linears.iter().find(|(name, _)| *name == projection.name()).map_or([0, 0], |(_, shape)| *shape);
        let name = format!("{}.weight", projection.module_name(layer));
        projections.push(Weight { values: weights.load(&name, shape, storage, device)?, rounds });
    }
    let Ok(projections) = projections.try_into() else { unreachable!("one tensor for each projection") };
    Ok(Block {
        input_layernorm: norm("input_layernorm")?,
        post_attention_layernorm: norm("post_attention_layernorm")?,
        projections,
    })
}
