//! Loads the weight files into a model on its device.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use rayon::prelude::*;

use super::block::{Block, Sublayer};
use super::embed::LayerInputWeights;
use super::host::HostBlocks;
use super::pager::Pager;
use super::streams::{StreamProjections, Streams};
use super::weights::{LayerWeights, Weights};
use super::{Model, Storage};
use crate::config::Residency;
use crate::device::Dtype;
use crate::ops::linear::{Matrix, Weight};
use crate::ops::norm::Norm;
use crate::ops::place::place_of;
use crate::ops::quantised::Coding;
use crate::schema::Problem;
use crate::spec::{
    self, BLOCK_SCALE, HEAD_BIAS, LAYER_INPUT_NORM, LAYER_INPUT_PROJECTION, LAYER_INPUT_TABLE, ModelConfig, NormKind,
    Role, SiteId, SublayerKind, in_layer,
};
use crate::util::faults;

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
    if storage.residency == Residency::Host && place_of(device, DType::F32).is_host() {
        storage.residency = Residency::Memory;
    }
    let weights = &*weights.in_form(config, storage, &|_, _| ())?;
    // The memory pools of a GPU make their pages as large as the largest tensor so far, which leaves a part of them unused,
    // and move what lies in them. Weights stay: each gets memory of exactly its size.
    let model = device.memory_persistent_allocations((), |()| load_all(config, weights, storage, compute, device));
    // What weights took before they were stacked.
    device.memory_cleanup();
    model
}

fn load_all(
    config: &ModelConfig,
    weights: &Weights,
    storage: Storage,
    compute: Dtype,
    device: &Device,
) -> Result<Model, Problem> {
    let ModelConfig { vocab_size, hidden_size, .. } = *config;
    let place = place_of(device, DType::F32);
    let activations = place.activation_dtype(compute);
    let rounds = activations != compute;
    // The largest come first: while a tensor is loaded, it takes memory twice.
    let shape = [vocab_size, hidden_size];
    let embed_tokens = weights.table("model.embed_tokens.weight", shape, storage, device)?;
    let lm_head = if config.tie_word_embeddings {
        Matrix::Dense(embed_tokens.clone())
    } else {
        weights.matrix("lm_head.weight", shape, storage, config, device)?
    };
    let head_bias = config.family().has_head_bias;
    let head_bias = head_bias.then(|| weights.load(HEAD_BIAS, [vocab_size], Dtype::F32, device)).transpose()?;
    let host = (storage.residency == Residency::Host).then(|| Arc::new(HostBlocks::new(device)));
    let block = |layer| {
        let block = load_block(config, weights, layer, storage, rounds, device)?;
        Ok(if let Some(host) = &host { host.parked(&block) } else { block })
    };
    // On the host, several tensors are converted in parallel; on a GPU, they are loaded one by one.
    let blocks: Result<Vec<Block>, Problem> = if place.is_host() {
        (0..config.num_layers()).into_par_iter().map(block).collect()
    } else {
        (0..config.num_layers()).map(block).collect()
    };
    let model = Model::new(
        config.clone(),
        DType::from(activations),
        embed_tokens,
        blocks?,
        // What divides the logits may as well divide what they are made of.
        over(load_last_norm(config, weights, device)?, config.logit_divisor),
        Weight { values: lm_head, bias: head_bias, rounds },
    );
    let layer_inputs = load_layer_inputs(config, weights, storage, rounds, device)?;
    let streams = load_stream_projections(config, weights, storage, rounds, device)?;
    let is_mapped = storage.residency == Residency::Mapped;
    Ok(Model { layer_inputs, streams, pager: is_mapped.then(|| Arc::new(Pager::new(config, weights))), host, ..model })
}

/// What makes the layers' own embeddings of the tokens.
fn load_layer_inputs(
    config: &ModelConfig,
    weights: &Weights,
    storage: Storage,
    rounds: bool,
    device: &Device,
) -> Result<Option<LayerInputWeights>, Problem> {
    let Some(spec::LayerInputs { vocab_size, width }) = config.layer_inputs else { return Ok(None) };
    let all = config.num_layers() * width;
    let values = weights.matrix(LAYER_INPUT_PROJECTION, [all, config.hidden_size], storage, config, device)?;
    Ok(Some(LayerInputWeights {
        table: weights.table(LAYER_INPUT_TABLE, [vocab_size, all], storage, device)?,
        projection: Weight { values, bias: None, rounds },
        norm: config.norm_weight(weights.load(&format!("{LAYER_INPUT_NORM}.weight"), [width], Dtype::F32, device)?),
    }))
}

/// What makes several residual streams of one, and one of them.
fn load_stream_projections(
    config: &ModelConfig,
    weights: &Weights,
    storage: Storage,
    rounds: bool,
    device: &Device,
) -> Result<Option<StreamProjections>, Problem> {
    let load = |name: String| -> Result<Weight, Problem> {
        let values = weights.matrix(&name, [config.hidden_size; 2], storage, config, device)?;
        Ok(Weight { values, bias: None, rounds })
    };
    let load_all = |names: Vec<String>| names.into_iter().map(load).collect::<Result<Vec<_>, _>>();
    let [first, last] = config.stream_projections();
    let projections = StreamProjections { first: load_all(first)?, last: load_all(last)? };
    Ok(config.streams().map(|_| projections))
}

/// A norm of the residual stream.
fn load_norm(config: &ModelConfig, weights: &Weights, name: &str, device: &Device) -> Result<Norm, Problem> {
    let width = config.hidden_size;
    let bias = match config.norm_kind {
        NormKind::Rms => None,
        NormKind::Layer => Some(weights.load(&format!("{name}.bias"), [width], Dtype::F32, device)?),
        NormKind::LayerWithoutBias => Some(Tensor::zeros([width], (device, DType::F32))),
    };
    let weight = weights.load(&format!("{name}.weight"), [width], Dtype::F32, device)?;
    Ok(Norm { weight: config.norm_weight(weight), bias })
}

/// The norm before the head.
fn load_last_norm(config: &ModelConfig, weights: &Weights, device: &Device) -> Result<Norm, Problem> {
    let Norm { weight, bias } = load_norm(config, weights, config.last_norm, device)?;
    Ok(Norm { weight: if config.family().is_muse() { weight - 1.0 } else { weight }, bias })
}

/// A norm whose results are divided by a number.
pub(super) fn over(norm: Norm, divisor: f64) -> Norm {
    Norm { weight: norm.weight / divisor, bias: norm.bias.map(|bias| bias / divisor) }
}

pub(super) fn load_block(
    config: &ModelConfig,
    weights: &Weights,
    layer: usize,
    storage: Storage,
    rounds: bool,
    device: &Device,
) -> Result<Block, Problem> {
    let matrices = if storage.residency == Residency::Host { &Device::flex() } else { device };
    let spec = &config.blocks[layer];
    let linear = |site: &spec::Site| {
        let (name, shape) = (in_layer(layer, &site.name), site.shape);
        let mut values = weights.matrix(&format!("{name}.weight"), shape, storage, config, matrices)?;
        // What a GPU multiplies with eight bits it rounds to them, and other experts would be chosen.
        if let (Role::Router, Matrix::Quantised(matrix)) = (site.role, &values)
            && matrix.coding == Coding::Fp8
        {
            values = Matrix::Dense(matrix.decoded(storage.dtype.into()));
        }
        let bias =
            site.has_bias.then(|| weights.load(&format!("{name}.bias"), [shape[0]], Dtype::F32, device)).transpose()?;
        Ok(Weight { values, bias, rounds })
    };
    let around = |name: Option<&'static str>| {
        name.map(|name| load_norm(config, weights, &in_layer(layer, name), device)).transpose()
    };
    let sublayer = |spec: &spec::Sublayer| {
        let [norm_before, norm_after] = [around(spec.norm_before)?, around(spec.norm_after)?];
        let inner = spec.load(LayerWeights { config, weights, layer, device })?;
        let spec::Sublayer { input_scale, output_scale, is_beside, .. } = *spec;
        let (is_laurel, trained_norms) = (matches!(spec.kind, SublayerKind::Laurel(_)), [None; 2]);
        let eps_after = config.post_norm_eps.unwrap_or(config.rms_norm_eps);
        Ok(Sublayer {
            norm_before,
            norm_after,
            eps_after,
            input_scale,
            output_scale,
            is_beside,
            is_laurel,
            inner,
            trained_norms,
        })
    };
    let mut linears = spec.sites.iter().map(linear).collect::<Result<Vec<_>, Problem>>()?;
    if storage.residency == Residency::Memory && place_of(device, DType::F32).stacks_weights() {
        let groups = spec.sublayers.iter().flat_map(|sublayer| sublayer.kind.input_sites());
        groups.for_each(|sites| stack(&mut linears, sites));
    }
    let scale = spec.has_scale.then(|| {
        let scale = weights.load::<1>(&in_layer(layer, BLOCK_SCALE), [1], Dtype::F32, &Device::flex())?;
        Ok::<_, Problem>(faults::read(scale, "a weight of the base").into_iter().map(f64::from).sum())
    });
    let sublayers = spec.sublayers.iter().map(sublayer).collect::<Result<_, Problem>>()?;
    let streams = spec.streams.map(|spec| Streams::load(spec, LayerWeights { config, weights, layer, device }));
    Ok(Block { linears, sublayers, scale: scale.transpose()?, streams: streams.transpose()? })
}

/// Lays the weights of `sites` one below the other in memory.
fn stack(linears: &mut [Weight], sites: &[SiteId]) {
    let dense = |site: &SiteId| match &linears[*site].values {
        Matrix::Dense(values) => Some(values.clone()),
        _ => None,
    };
    let Some(parts) = sites.iter().map(dense).collect::<Option<Vec<_>>>() else { return };
    let (all, mut first_row) = (Tensor::cat(parts, 0), 0);
    for site in sites {
        let num_rows = linears[*site].dims()[0];
        linears[*site].values = Matrix::Dense(all.clone().narrow(0, first_row, num_rows));
        first_row += num_rows;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::weights::{Quantisation, RandomWeights};

    #[test]
    fn in_fp8_all_linear_layers_are_codes_but_routers() {
        let json = r#"{"model_type": "qwen2_moe", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 16,
            "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}"#;
        let config = ModelConfig::from_json(json).unwrap();
        let quantisation = Some(Quantisation { coding: Coding::Fp8, nested: false });
        let storage = Storage { quantisation, ..Storage::from(Dtype::F32) };
        let weights = Weights::Random(RandomWeights::new(&config, 1));
        let block = load_block(&config, &weights, 0, storage, false, &Device::flex()).unwrap();
        for (site, Weight { values, .. }) in config.blocks[0].sites.iter().zip(block.linears) {
            assert_eq!(matches!(values, Matrix::Quantised(_)), site.role != Role::Router, "{}", site.name);
        }
    }
}
