//! Loads the weight files into a model on its device.

use std::sync::Arc;

use burn::tensor::{DType, Device};
use rayon::prelude::*;

use super::block::Block;
use super::host::HostBlocks;
use super::pager::Pager;
use super::weights::Weights;
use super::{Model, Storage};
use crate::config::Residency;
use crate::device::Dtype;
use crate::ops::linear::{Matrix, Weight};
use crate::ops::place::Place;
use crate::schema::Problem;
use crate::spec::{Linear, ModelConfig};

/// Loads a model. `storage` says how its linear layers and embeddings are held, `compute` is the type of the arithmetic.
/// Weights of norms and biases are kept in `f32`: they are small, and `f32` holds every stored type exactly.
///
/// In `bf16`, where the kernels of [`crate::ops::cpu`] run, only the operands of products with frozen weights are
/// rounded: activations and sums stay in `f32`.
///
/// # Errors
/// Lists every tensor that is missing, unexpected, misshapen or of a type that cannot be read.
pub fn load(
    config: &ModelConfig,
    weights: &Weights,
    storage: impl Into<Storage>,
    compute: Dtype,
    device: &Device,
) -> Result<Model, Problem> {
    weights.check(config)?;
    let mut storage = storage.into();
    if storage.residency == Residency::Host && Place::of(device, DType::F32) == Place::Cpu {
        storage.residency = Residency::Memory;
    }
    let weights = &*weights.in_form(config, storage, &|_, _| ())?;
    // The memory pools of a GPU make their pages as large as the largest tensor so far, which leaves a part of them unused,
    // and move what lies in them. Weights stay: each gets memory of exactly its size.
    device.memory_persistent_allocations((), |()| load_all(config, weights, storage, compute, device))
}

fn load_all(
    config: &ModelConfig,
    weights: &Weights,
    storage: Storage,
    compute: Dtype,
    device: &Device,
) -> Result<Model, Problem> {
    let ModelConfig { vocab_size, hidden_size, .. } = *config;
    let on_cpu = Place::of(device, DType::F32) == Place::Cpu;
    let rounds = on_cpu && compute == Dtype::Bf16;
    // The largest come first: while a tensor is loaded, it takes memory twice.
    let shape = [vocab_size, hidden_size];
    let embed_tokens = weights.table("model.embed_tokens.weight", shape, storage, device)?;
    let lm_head = if config.tie_word_embeddings {
        Matrix::Dense(embed_tokens.clone())
    } else {
        weights.matrix("lm_head.weight", shape, storage, config, device)?
    };
    let host = (storage.residency == Residency::Host).then(|| Arc::new(HostBlocks::new(device)));
    let block = |layer| {
        let block = load_block(config, weights, layer, storage, rounds, device)?;
        Ok(if let Some(host) = &host { host.parked(&block) } else { block })
    };
    // On the host, several tensors are converted in parallel; on a GPU, they are loaded one by one.
    let blocks: Result<Vec<Block>, Problem> = if on_cpu {
        (0..config.num_hidden_layers).into_par_iter().map(block).collect()
    } else {
        (0..config.num_hidden_layers).map(block).collect()
    };
    let model = Model::new(
        config.clone(),
        if rounds { DType::F32 } else { DType::from(compute) },
        embed_tokens,
        blocks?,
        weights.load("model.norm.weight", [hidden_size], Dtype::F32, device)?,
        Weight { values: lm_head, bias: None, rounds },
    );
    let is_mapped = storage.residency == Residency::Mapped;
    Ok(Model { pager: is_mapped.then(|| Arc::new(Pager::new(config, weights))), host, ..model })
}

fn load_block(
    config: &ModelConfig,
    weights: &Weights,
    layer: usize,
    storage: Storage,
    rounds: bool,
    device: &Device,
) -> Result<Block, Problem> {
    let name = |part: &str| format!("model.layers.{layer}.{part}");
    let norm = |part: &str, width| weights.load(&name(&format!("{part}.weight")), [width], Dtype::F32, device);
    let matrices = if storage.residency == Residency::Host { &Device::flex() } else { device };
    let mut linears = Vec::with_capacity(Linear::ALL.len());
    for linear in Linear::ALL {
        let (name, shape) = (linear.module_name(layer), config.linear(linear));
        let values = weights.matrix(&format!("{name}.weight"), shape, storage, config, matrices)?;
        let bias = config.biases[linear as usize]
            .then(|| weights.load(&format!("{name}.bias"), [shape[0]], Dtype::F32, device))
            .transpose()?;
        linears.push(Weight { values, bias, rounds });
    }
    let Ok(linears) = linears.try_into() else { unreachable!("one weight for each linear layer") };
    let qk_norms = if config.qk_norm {
        Some([norm("self_attn.q_norm", config.head_dim)?, norm("self_attn.k_norm", config.head_dim)?])
    } else {
        None
    };
    Ok(Block {
        input_layernorm: norm("input_layernorm", config.hidden_size)?,
        post_attention_layernorm: norm("post_attention_layernorm", config.hidden_size)?,
        qk_norms,
        linears,
    })
}
