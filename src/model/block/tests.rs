//! The backward of every kind of block against burn's autodiff.

use burn::tensor::{DType, Device};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::config::LoraConfig;
use crate::device::{Dtype, has_bf16_products};
use crate::lora::BlockAdapters;
use crate::lora::Matrices;
use crate::lora::start::normal;
use crate::lora::{Adapter, AdapterSet};
use crate::model::context::BlockInputs;
use crate::model::load::load_block;
use crate::model::weights::Weights;
use crate::model::weights::fixture::{FixtureTensors, windowed, write_tensors};
use crate::ops::dropout::Dropout;
use crate::ops::layout::Layout;
use crate::ops::place::place_of;
use crate::spec::{self, ModelConfig};

/// Grouped queries, heads narrower than the hidden size, an odd number of tokens. The block has every option of any
/// family: biases everywhere, and head norms.
fn config() -> ModelConfig {
    let mut config = ModelConfig::from_json(
        r#"{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "hidden_size": 40,
        "intermediate_size": 56, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": true, "hidden_act": "silu"}"#,
    )
    .unwrap();
    config.blocks[0].sites.iter_mut().for_each(|site| site.has_bias = true);
    config
}

/// With norms before and after each sublayer, or only after it.
fn normed_after(is_normed_before: bool) -> ModelConfig {
    let mut config = config();
    for sublayer in &mut config.blocks[0].sublayers {
        sublayer.norm_after = sublayer.norm_before;
        sublayer.norm_before = sublayer.norm_before.filter(|_| is_normed_before);
    }
    config
}

/// With a cap of scores and GELU.
fn capped() -> ModelConfig {
    let mut config = config();
    for sublayer in &mut config.blocks[0].sublayers {
        match &mut sublayer.kind {
            spec::SublayerKind::Attention(attention) => attention.heads.soft_cap = Some(0.7),
            spec::SublayerKind::Gated(gated) => gated.activation = spec::Activation::GeluTanh,
            _ => {}
        }
    }
    config
}

/// With norms of all heads together, and a factor of what is added to the residual stream.
fn normed_as_whole() -> ModelConfig {
    let mut config = config();
    for sublayer in &mut config.blocks[0].sublayers {
        sublayer.output_scale = Some(0.4);
        if let spec::SublayerKind::Attention(attention) = &mut sublayer.kind {
            attention.query_key_norms = Some(spec::QueryKeyNorms::Whole);
        }
    }
    config
}

/// With a mixture of experts.
fn with_experts(normalised: bool, shared: bool) -> ModelConfig {
    let kind = if shared { "qwen2_moe" } else { "qwen3_moe" };
    let text = format!(
        r#"{{"model_type": "{kind}", "vocab_size": 64, "hidden_size": 40, "intermediate_size": 56,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 24, "norm_topk_prob": {normalised}}}"#
    );
    ModelConfig::from_json(&text).unwrap()
}

/// With sinks, biases everywhere, and experts with clamped gates.
fn with_sinks() -> ModelConfig {
    ModelConfig::from_json(
        r#"{"model_type": "gpt_oss", "vocab_size": 64, "hidden_size": 40, "intermediate_size": 20,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "num_local_experts": 5, "num_experts_per_tok": 2, "attention_bias": true, "sliding_window": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}"#,
    )
    .unwrap()
}

/// A layer of Qwen3.5 of this type: value heads share key heads, and a part of each head turns.
fn hybrid(layer_type: &str) -> ModelConfig {
    let json = r#"{"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 64, "hidden_size": 40,
        "intermediate_size": 56, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
        "linear_value_head_dim": 8, "layer_types": ["TYPE"]}"#;
    ModelConfig::from_json(&json.replace("TYPE", layer_type)).unwrap()
}

/// A layer of Qwen3-Next with linear attention.
fn by_key_head() -> ModelConfig {
    let json = r#"{"model_type": "qwen3_next", "vocab_size": 64, "hidden_size": 40, "intermediate_size": 56,
        "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 8, "mlp_only_layers": [0]}"#;
    ModelConfig::from_json(json).unwrap()
}

/// A layer whose keys and values, and queries where they have a `rank`, come from latents; values are narrower than keys.
fn with_latents(rank: Option<usize>) -> ModelConfig {
    let rank = rank.map_or("null".to_owned(), |rank| rank.to_string());
    let json = r#"{"model_type": "youtu", "vocab_size": 64, "hidden_size": 40, "intermediate_size": 56,
        "num_hidden_layers": 1, "num_attention_heads": 3, "q_lora_rank": RANK, "kv_lora_rank": 20, "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6, "v_head_dim": 12}"#;
    ModelConfig::from_json(&json.replace("RANK", &rank)).unwrap()
}

/// A layer of Granite 4 with a state space of two groups, and strengths of which some are at their bounds.
fn with_states() -> ModelConfig {
    let json = r#"{"model_type": "granitemoehybrid", "vocab_size": 64, "hidden_size": 40, "shared_intermediate_size": 56,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_local_experts": 0, "layer_types": ["mamba"],
        "mamba_n_heads": 8, "mamba_d_head": 10, "mamba_d_state": 6, "mamba_n_groups": 2, "time_step_limit": [0.7, 2.5],
        "mamba_proj_bias": true, "residual_multiplier": 0.6}"#;
    ModelConfig::from_json(json).unwrap()
}

/// A layer with a state space, attention beside it, and factors of both.
fn with_mixers_beside() -> ModelConfig {
    let json = r#"{"model_type": "falcon_h1", "vocab_size": 64, "hidden_size": 40, "intermediate_size": 56,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_d_ssm": 80, "mamba_n_heads": 8,
        "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_rms_norm": true, "mamba_norm_before_gate": false,
        "mlp_multipliers": [0.7, 0.8], "ssm_multipliers": [0.7, 1.6, 0.8, 0.9, 0.5], "key_multiplier": 0.6,
        "attention_in_multiplier": 0.9, "attention_out_multiplier": 0.5, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6}"#;
    ModelConfig::from_json(json).unwrap()
}

/// A layer whose attention and feed-forward layer, without a gate, are beside each other; heads are normed when they have turned.
fn beside() -> ModelConfig {
    let json = r#"{"model_type": "starcoder2", "vocab_size": 64, "hidden_size": 40, "intermediate_size": 56,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}"#;
    let mut config = ModelConfig::from_json(json).unwrap();
    for sublayer in &mut config.blocks[0].sublayers {
        match &mut sublayer.kind {
            spec::SublayerKind::Attention(attention) => attention.query_key_norms = Some(spec::QueryKeyNorms::Turned),
            _ => sublayer.is_beside = true,
        }
    }
    config
}

/// One of four layers of Gemma 4: both of the first share their keys and values, which the others use; values may be keys where
/// there is no window, and the feed-forward layer may have experts beside it.
fn gemma4(layer: usize, values_are_keys: bool, has_experts: bool) -> ModelConfig {
    let json = format!(
        r#"{{"model_type": "gemma4_text", "vocab_size": 64, "hidden_size": 40, "intermediate_size": 56,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "global_head_dim": 24, "hidden_size_per_layer_input": 12, "num_kv_shared_layers": 2, "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "enable_moe_block": {has_experts}, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 20,
            "attention_k_eq_v": {values_are_keys}, "use_double_wide_mlp": true}}"#
    );
    let mut config = ModelConfig::from_json(&json).unwrap();
    config.blocks = vec![config.blocks.swap_remove(layer)];
    config
}

/// A layer of Muse Glimmer, with a gate of its attention and another number in norms of outputs; the second has no rotary embedding.
fn muse(layer: usize) -> ModelConfig {
    let json = r#"{"model_type": "muse_glimmer_text", "vocab_size": 64, "hidden_size": 40, "intermediate_size": 56,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 3,
        "post_norm_eps": 0.2, "layer_types": ["sliding_attention", "full_attention"]}"#;
    let mut config = ModelConfig::from_json(json).unwrap();
    config.blocks = vec![config.blocks.swap_remove(layer)];
    config
}

/// One of four layers of Gemma 3n, with three residual streams: all have low ranks beside attention, and half of them cut gates; the
/// last two use keys and values of the others.
fn gemma3n(layer: usize) -> ModelConfig {
    let json = r#"{"model_type": "gemma3n_text", "vocab_size": 64, "hidden_size": 40, "intermediate_size": [56, 48, 56, 48],
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "altup_num_inputs": 3,
        "altup_coef_clip": 0.25, "hidden_size_per_layer_input": 12, "num_kv_shared_layers": 2, "sliding_window": 3,
        "laurel_rank": 6, "activation_sparsity_pattern": [0.7, 0.0, 0.4, 0.0],
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}"#;
    let mut config = ModelConfig::from_json(json).unwrap();
    config.blocks = vec![config.blocks.swap_remove(layer)];
    config
}

/// What a layer of Gemma 4 is given besides the residual stream.
#[derive(Clone)]
struct Given {
    layer_input: Tensor<2>,
    key_values: Option<KeyValues>,
    key_value_grads: Option<KeyValues>,
}

impl Given {
    fn new(config: &ModelConfig, device: &Device) -> Self {
        let rng = &mut ChaCha8Rng::seed_from_u64(6);
        let layer_input = random([22, config.layer_inputs.map_or(1, |inputs| inputs.width)], 1.0, rng, device);
        let attention = config.blocks[0].attention();
        let width = attention.map_or(1, |attention| attention.heads.key_value_width());
        let mut pair = || [0, 1].map(|_| masked(random([22, width], 1.0, rng, device)));
        let key_values = attention.and_then(spec::Attention::key_value_layer).map(|_| pair());
        let is_shared = |it: &&spec::Attention| it.has_value_norm && it.key_value_layer().is_none();
        let key_value_grads = attention.filter(is_shared).map(|_| pair());
        Self { layer_input, key_values, key_value_grads }
    }

    fn inputs(&self) -> BlockInputs<'_> {
        BlockInputs {
            layer_input: Some(&self.layer_input),
            key_values: self.key_values.as_ref(),
            key_value_grads: self.key_value_grads.as_ref(),
        }
    }
}

/// Normal numbers that depend only on the seed: all tests of a process share burn's generator.
fn random<const D: usize>(shape: [usize; D], scale: f32, rng: &mut ChaCha8Rng, device: &Device) -> Tensor<D> {
    let values = (0..shape.iter().product()).map(|_| scale * normal(rng)).collect();
    crate::ops::host::tensor(values, shape, device)
}

fn fixture(
    config: &ModelConfig,
    use_dora: bool,
    device: &Device,
    rounds: bool,
) -> (Block, AdapterSet, Tensor<2>, Tensor<2>) {
    let rng = &mut ChaCha8Rng::seed_from_u64(5);
    let draw = |(name, shape): (String, Vec<usize>)| {
        let is_matrix = shape.len() == 2 || name.ends_with(".bias");
        let (mean, scale) = if is_matrix { (0.0, 0.2) } else { (1.0, 0.3) };
        let numbers = (0..shape.iter().product()).map(|_| mean + scale * normal(rng)).collect();
        (name, (shape, numbers))
    };
    let tensors: FixtureTensors = config.expected_tensors().into_iter().map(draw).collect();
    let folder = tempfile::tempdir().unwrap();
    write_tensors(&folder.path().join("model.safetensors"), &tensors, Dtype::F32);
    let weights = Weights::open(folder.path(), config).unwrap();
    let config = &ModelConfig { has_norms_less_one: false, ..config.clone() };
    let block = load_block(config, &weights, 0, Dtype::F32.into(), rounds, device).unwrap();
    let selection = LoraConfig { r: 3, lora_alpha: 5.0, use_dora, ..LoraConfig::default() }.select(config).unwrap();
    let init = crate::config::InitLoraWeights::Kaiming;
    let mut adapters = AdapterSet::new(config, &selection, init, 0.0, 3, device);
    for adapter in adapters.iter_mut() {
        adapter.matrices.b = random(adapter.matrices.b.dims(), 0.2, rng, device);
        let magnitude = adapter.matrices.magnitude.take();
        adapter.matrices.magnitude = magnitude.map(|ones| random(ones.dims(), 0.3, rng, device) + ones);
    }
    let width = config.streams_width();
    (block, adapters, random([22, width], 1.0, rng, device), random([22, width], 1.0, rng, device))
}

/// Two rows of 11 tokens: the first holds two documents, the second holds one document and two tokens of padding.
fn layout(config: &ModelConfig) -> Layout {
    let documents = vec![(0, 4), (4, 7), (11, 9)];
    let positions = [0..4, 0..7, 0..9, 0..2].into_iter().flatten().collect();
    Layout::new(2, documents, positions, config.rotary_tables(16, &[]))
}

fn values(tensor: &Tensor<2>) -> Vec<f32> {
    tensor.clone().inner_if_tracked().into_data().try_to_vec().unwrap()
}

trait InnerIfTracked {
    fn inner_if_tracked(self) -> Self;
}
impl InnerIfTracked for Tensor<2> {
    fn inner_if_tracked(self) -> Self {
        if self.is_autodiff() { self.inner() } else { self }
    }
}

fn relative_error(found: &Tensor<2>, expected: &Tensor<2>) -> f32 {
    let (found, expected) = (values(found), values(expected));
    let norm = expected.iter().map(|v| v * v).sum::<f32>().sqrt();
    let error = found.iter().zip(&expected).map(|(f, e)| (f - e) * (f - e)).sum::<f32>().sqrt();
    error / norm
}

/// Output, input gradient and adapter gradients from burn's autodiff of the plain forward.
fn by_autodiff(config: &ModelConfig, use_dora: bool, dropout: Option<Dropout>) -> Vec<Tensor<2>> {
    let device = Device::flex().autodiff();
    let (block, adapters, x, dy) = fixture(config, use_dora, &device, false);
    let x = x.require_grad();
    let leaf = |(site, adapter): (usize, Adapter)| {
        (site, Adapter { matrices: adapter.matrices.map(Tensor::require_grad), ..adapter })
    };
    let tracked: BlockAdapters = adapters.blocks[0].clone().into_iter().map(leaf).collect();
    let (place, layout) = (place_of(&device, DType::F32), layout(config));
    let mut given = Given::new(config, &device);
    given.key_values = given.key_values.map(|pair| pair.map(Tensor::require_grad));
    let context =
        BlockContext { inputs: given.inputs(), ..BlockContext::new(place, config, &layout, &tracked, dropout) };
    let activations = block.activations(x.clone(), &context);
    let y = block.output(&activations, &context);
    // Padding carries no gradient in training.
    let mut loss = (y.clone() * masked(dy)).sum();
    let shared = activations.key_values();
    for (shared, grad) in shared.into_iter().flatten().zip(given.key_value_grads.iter().flatten()) {
        loss = loss + (shared * grad.clone()).sum();
    }
    let grads = loss.backward();
    let mut all = vec![masked(y), x.grad(&grads).unwrap()];
    all.extend(given.key_values.iter().flatten().map(|used| used.grad(&grads).unwrap()));
    for adapter in tracked.values() {
        all.extend(adapter.matrices.as_ref().map(|matrix| matrix.grad(&grads).unwrap()).values());
    }
    all
}

/// Zeroes the two tokens of padding.
fn masked(x: Tensor<2>) -> Tensor<2> {
    let (zeros, width) = (x.clone().narrow(0, 0, 2).zeros_like(), x.dims()[1]);
    x.slice_assign([20..22, 0..width], zeros)
}

fn by_hand(
    config: &ModelConfig,
    use_dora: bool,
    device: &Device,
    rounds: bool,
    dropout: Option<Dropout>,
) -> Vec<Tensor<2>> {
    let (block, adapters, x, dy) = fixture(config, use_dora, device, rounds);
    let (place, layout) = (place_of(device, DType::F32), layout(config));
    let given = Given::new(config, device);
    let context = BlockContext {
        inputs: given.inputs(),
        ..BlockContext::new(place, config, &layout, &adapters.blocks[0], dropout)
    };
    let activations = block.activations(x, &context);
    let y = block.output(&activations, &context);
    let grads = block.backward(masked(dy), activations, &context, true);
    let mut all = vec![masked(y), grads.dx.unwrap()];
    all.extend(grads.key_values.into_iter().flatten());
    all.extend(grads.adapters.into_values().flat_map(Matrices::values));
    all
}

fn compare(device: &Device, config: &ModelConfig, dropout: Option<Dropout>) {
    // Decays of a gated delta rule are differences of sums in `f32`: by the numbers drawn it was off by up to 6.4e-5, all else by 1.2e-5.
    let bound = if config.blocks.iter().any(|block| block.delta_net().is_some() || block.state_space().is_some()) {
        1e-4
    } else {
        2e-5
    };
    for use_dora in [false, true] {
        let expected = by_autodiff(config, use_dora, dropout);
        let found = by_hand(config, use_dora, device, false, dropout);
        // Output, input, and the matrices of four layers at least.
        assert!(found.len() >= 10 && found.len() == expected.len());
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let error = relative_error(found, expected);
            assert!(error < bound, "{}, tensor {index}: error {error}", config.model_type);
        }
    }
}

fn compare_all(device: &Device) {
    compare(device, &config(), None);
    compare(device, &windowed(config(), Some(3)), None);
    compare(device, &config(), Some(Dropout { probability: 0.3, seed: 9, first_row: 0 }));
    compare(device, &normed_after(true), None);
    compare(device, &normed_after(false), None);
    compare(device, &capped(), None);
    compare(device, &normed_as_whole(), None);
    for (normalised, shared) in [(true, false), (false, false), (false, true), (true, true)] {
        compare(device, &with_experts(normalised, shared), None);
    }
    compare(device, &with_sinks(), None);
    compare(device, &with_experts(true, true), Some(Dropout { probability: 0.3, seed: 9, first_row: 0 }));
    for layer in 0..4 {
        compare(device, &gemma4(layer, false, false), None);
        compare(device, &gemma3n(layer), None);
    }
    compare(device, &muse(0), None);
    compare(device, &muse(1), Some(Dropout { probability: 0.3, seed: 9, first_row: 0 }));
    compare(device, &gemma3n(0), Some(Dropout { probability: 0.3, seed: 9, first_row: 0 }));
    compare(device, &gemma4(1, true, false), None);
    compare(device, &gemma4(0, true, true), None);
    compare(device, &gemma4(2, false, false), Some(Dropout { probability: 0.3, seed: 9, first_row: 0 }));
    compare(device, &hybrid("full_attention"), None);
    compare(device, &by_key_head(), None);
    compare(device, &with_states(), None);
    compare(device, &with_states(), Some(Dropout { probability: 0.3, seed: 9, first_row: 0 }));
    compare(device, &with_mixers_beside(), None);
    compare(device, &beside(), None);
    compare(device, &beside(), Some(Dropout { probability: 0.3, seed: 9, first_row: 0 }));
    compare(device, &with_latents(None), None);
    compare(device, &with_latents(Some(24)), None);
    compare(device, &with_latents(Some(24)), Some(Dropout { probability: 0.3, seed: 9, first_row: 0 }));
    compare(device, &hybrid("linear_attention"), None);
    compare(device, &hybrid("linear_attention"), Some(Dropout { probability: 0.3, seed: 9, first_row: 0 }));
}

#[test]
fn the_plain_backward_is_the_derivative_of_the_plain_forward() {
    compare_all(&Device::flex().autodiff());
}

#[test]
fn the_kernels_backward_is_the_derivative_of_the_plain_forward() {
    compare_all(&Device::flex());
}

#[test]
fn products_that_round_to_bf16_give_the_plain_products_of_rounded_operands() {
    let by_hand = |device: Device, rounds| by_hand(&config(), false, &device, rounds, None);
    let found = by_hand(Device::flex(), true);
    let plain = by_hand(Device::flex().autodiff(), true);
    let exact = by_hand(Device::flex(), false);
    for (index, found) in found.iter().enumerate() {
        // Where sums in another order straddle a tie, a number rounds in the other direction: one bit of 2^-9.
        let (error, rounding) = (relative_error(found, &plain[index]), relative_error(found, &exact[index]));
        if has_bf16_products() {
            assert!(error < 1e-3, "tensor {index}: {error} from the plain products");
            assert!((1e-4..2e-2).contains(&rounding), "tensor {index}: {rounding} from f32");
        } else {
            assert!(rounding == 0.0, "tensor {index}: {rounding} from f32 without products of pairs");
        }
    }
}
