//! The GPU path (plain tensor calls, burn's fusion, `CubeCL`'s kernels) against the kernels of the CPU, on the first NVIDIA
//! GPU or its stand-in (`tests/cuda_stand_in`): `cargo test --release --features cuda --test cubecl -- --ignored`. By itself, so that
//! a build for GPUs need not build all other tests. `lora-train doctor --kernels` compares our own kernels one by one.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "small numbers of tests"
)]

use std::path::Path;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use lora_train::config::{
    GradientCheckpointing, InitLoraWeights, LoraConfig, OptimizerConfig, OptimizerName, TrainConfig,
};
use lora_train::data::batch::{Batch, Document, Target};
use lora_train::device::Dtype;
use lora_train::lora::AdapterSet;
use lora_train::model::load;
use lora_train::model::weights::{WeightFiles, Weights};
use lora_train::ops::attention::{AttentionInputs, Heads, attention, attention_backward};
use lora_train::ops::host;
use lora_train::ops::layout::{Layout, RotaryTable};
use lora_train::ops::place::place_of;
use lora_train::spec::ModelConfig;
use lora_train::train::offload::HostParking;
use lora_train::train::step::TrainStep;
use serde_json::{Value, json};

#[path = "it/common/families.rs"]
#[expect(dead_code, reason = "what other tests need of it")]
mod families;

use families::{write_family, write_model};

/// Tensor cores round the factors of products in `f32` to TF32, 2^-11.
const TF32: f32 = 1e-3;

fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919 + seed * 104_729) % 1013) as f32 / 506.5 - 1.0).collect()
}

fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.clone().cast(DType::F32).into_data().try_to_vec().unwrap()
}

/// Norm of the difference over the norm of `expected`.
fn relative_error(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>().sqrt();
    let difference = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    difference / norm(&mut expected.iter().copied()).max(f32::MIN_POSITIVE)
}

const HEADS: Heads = Heads {
    num_heads: 4,
    num_kv_heads: 2,
    head_dim: 32,
    scale: 0.176_776_695_296_636_9,
    window: None,
    chunk: None,
    soft_cap: None,
};

/// Output and the three gradients of an attention of two rows, the second of which has two documents.
fn attend(device: &Device, dtype: DType, heads: Heads) -> [Vec<f32>; 4] {
    const TOKENS: usize = 2 * 70;
    let table = Arc::from([RotaryTable::new(vec![1.0; 70 * 16], vec![0.0; 70 * 16], 16)]);
    let positions = (0..70).chain(0..30).chain(0..40).collect();
    let place = place_of(device, dtype);
    let layout = Layout::new(2, vec![(0, 70), (70, 30), (100, 40)], positions, table);
    let tensor = |num_heads: usize, seed: usize| {
        let shape = [TOKENS, num_heads * heads.head_dim];
        let data = host::tensor::<2>(numbers(shape[0] * shape[1], seed), shape, device);
        // Equal rounding on both devices.
        data.cast(DType::BF16).cast(dtype)
    };
    let (q, d_o) = (tensor(heads.num_heads, 1), tensor(heads.num_heads, 2));
    let (k, v) = (tensor(heads.num_kv_heads, 3), tensor(heads.num_kv_heads, 4));
    let inputs = AttentionInputs { qkv: [&q, &k, &v], layout: &layout, heads };
    let attended = attention(place, inputs);
    let [dq, dk, dv] = attention_backward(place, &d_o, &attended, inputs);
    [&attended.o, &dq, &dk, &dv].map(values)
}

#[test]
#[ignore = "needs an NVIDIA GPU or its stand-in"]
fn attention_of_packed_documents_and_grouped_heads_equals_the_cpus_kernels() {
    // bf16 rounds scores and weights to 2^-9. Kernels compute heads of 80 and 192 with zeros behind.
    for (dtype, head_dim, window, tolerance) in [
        (DType::F32, 32, None, TF32),
        (DType::F32, 32, Some(20), TF32),
        (DType::BF16, 32, None, 2e-2),
        (DType::BF16, 80, Some(20), 2e-2),
        (DType::BF16, 192, None, 2e-2),
    ] {
        let scale = (32.0 / head_dim as f64).sqrt() * HEADS.scale;
        let heads = Heads { head_dim, scale, window, ..HEADS };
        let (found, expected) = (attend(&Device::cuda(0), dtype, heads), attend(&Device::flex(), DType::F32, heads));
        for ((found, expected), name) in found.iter().zip(&expected).zip(["o", "dq", "dk", "dv"]) {
            let error = relative_error(found, expected);
            assert!(error < tolerance, "{name} in {dtype:?}, heads of {head_dim}, window {window:?}: {error}");
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU or its stand-in"]
fn products_keep_their_sums_in_f32() {
    // In bf16 a sum of terms of 2^-8 stops growing at 1, in f16 at 8.
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let small = Tensor::<2>::full([32, 4096], 1.0 / 256.0, (&Device::cuda(0), dtype));
        let sums = values(&small.matmul(Tensor::<2>::ones([4096, 32], (&Device::cuda(0), dtype))));
        assert!(sums.iter().all(|sum| *sum == 16.0), "{dtype:?}: {}", sums[0]);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU or its stand-in"]
fn a_tensor_that_leaves_for_host_memory_is_not_what_later_operations_make_of_it() {
    let device = Device::cuda(0);
    let parking = HostParking::new(device.clone());
    let parked: Vec<_> = (0..8_u8)
        .map(|k| {
            let tensor = Tensor::<2>::full([256, 256], f32::from(k), (&device, DType::F32));
            let parked = parking.park(tensor.clone());
            // Nothing else uses the tensor, so the sum could take its memory before the copy was made.
            let sum = tensor + 100.0;
            device.sync().unwrap();
            drop(sum);
            parked
        })
        .collect();
    for (k, parked) in (0..8_u8).zip(parked) {
        let back = values(&parked.tensor());
        assert!(back.iter().all(|value| *value == f32::from(k)), "{k}: {}", back[0]);
    }
}

/// Rows of 37 and 11 tokens; the first has two documents.
fn batch() -> Batch {
    let input_ids: Vec<u32> = (0..48).map(|i| (i * i * 7 + i * 3) % 250 + 3).collect();
    let documents = [(0, 20), (20, 17), (37, 11)].map(|(start, len)| Document { start, len }).to_vec();
    let target = |position: usize| Target { position, token: input_ids[position + 1] };
    let is_last = |position: usize| [19, 36, 47].contains(&position);
    let targets = (0..48).filter(|position| !is_last(*position)).map(target).collect();
    Batch { row_lengths: vec![37, 11], input_ids, documents, targets, ..Batch::default() }
}

#[test]
#[ignore = "needs an NVIDIA GPU or its stand-in"]
fn an_update_that_is_queued_before_the_loss_is_known_is_the_one_that_the_host_asks_for() {
    let (device, folder) = (&Device::cuda(0), tempfile::tempdir().unwrap());
    write_family("qwen2", folder.path());
    let config = ModelConfig::from_file(&folder.path().join("config.json")).unwrap();
    let weights = Weights::Files(WeightFiles::open(folder.path()).unwrap());
    let selection = LoraConfig { r: 64, ..LoraConfig::default() }.select(&config).unwrap();
    let weights_of = |step: &TrainStep| {
        let all = step.adapters().iter().flat_map(|adapter| [&adapter.matrices.a, &adapter.matrices.b]);
        all.map(values).collect::<Vec<_>>()
    };
    // In f16 the first steps overflow: their losses are finite, their gradients are not.
    let cases = [(Dtype::F32, 1.0, 0.0), (Dtype::F32, 1.0, 1e-2), (Dtype::F32, 1.0, 1e6), (Dtype::F16, 600.0, 1.0)];
    for name in [OptimizerName::Adamw, OptimizerName::Adamw8bit] {
        for (dtype, scale, max_grad_norm) in cases {
            let model = load::load(&config, &weights, dtype, dtype, device).unwrap();
            let [mut queued, mut asked] = [0; 2].map(|_| {
                let init = InitLoraWeights::Gaussian;
                let mut adapters = AdapterSet::new(&model.config, &selection, init, 0.0, 2, device);
                for adapter in adapters.iter_mut() {
                    adapter.scale *= scale;
                    adapter.matrices.b = adapter.matrices.b.clone() + 1e-2;
                }
                let train = TrainConfig { max_grad_norm, ..TrainConfig::default() };
                let optimizer = OptimizerConfig { name, ..OptimizerConfig::default() };
                TrainStep::new(model.clone(), adapters, &train, &optimizer, None, 0)
            });
            let (mut num_updates, mut num_skipped) = (0, 0);
            while num_updates < 3 && num_skipped < 20 {
                for step in [&mut queued, &mut asked] {
                    step.forward_backward(&batch());
                }
                let figures = [queued.reduce(Some(1e-3)), asked.reduce(None)];
                assert_eq!(queued.counters().num_updates, num_updates + 1, "it is queued");
                assert_eq!(asked.counters().num_updates, num_updates, "it is not");
                let [queued, asked] = [queued.apply(figures[0], 1e-3), asked.apply(figures[1], 1e-3)];
                assert_eq!(format!("{queued:?}"), format!("{asked:?}"), "{name:?}, {dtype:?}, {max_grad_norm}");
                num_updates += u64::from(asked.skipped.is_none());
                num_skipped += u64::from(asked.skipped.is_some());
            }
            assert_eq!((num_updates, num_skipped > 0), (3, dtype == Dtype::F16), "{num_skipped} skipped, {dtype:?}");
            assert_eq!(weights_of(&queued), weights_of(&asked), "{name:?}, {dtype:?}, {max_grad_norm}");
            assert_eq!(queued.state(), asked.state(), "{name:?}, {dtype:?}, {max_grad_norm}");
        }
    }
}

/// Loss and gradient norm of two steps of the model in `folder`, with weights in the first of two types and products in the second,
/// and the gradients of the first; experts have adapters where these have a rank.
fn train(
    folder: &Path,
    expert_rank: Option<usize>,
    [dtype, compute]: [Dtype; 2],
    device: &Device,
    gradient_checkpointing: GradientCheckpointing,
) -> (Vec<f32>, Vec<f32>) {
    let config = ModelConfig::from_file(&folder.join("config.json")).unwrap();
    let weights = Weights::Files(WeightFiles::open(folder).unwrap());
    let model = load::load(&config, &weights, dtype, compute, device).unwrap();
    let selection = LoraConfig { r: 4, expert_rank, ..LoraConfig::default() }.select(&config).unwrap();
    let adapters = AdapterSet::new(&model.config, &selection, InitLoraWeights::Gaussian, 0.0, 2, device);
    let train = TrainConfig { gradient_checkpointing, ..TrainConfig::default() };
    let mut step = TrainStep::new(model, adapters, &train, &OptimizerConfig::default(), None, 0);
    let (mut figures, mut grads) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        step.forward_backward(&batch());
        if grads.is_empty() {
            grads = step.grads().iter().flat_map(|(_, grad)| values(grad)).collect();
        }
        let outcome = step.update(1e-3);
        figures.extend([outcome.loss as f32, outcome.grad_norm as f32]);
    }
    (figures, grads)
}

#[test]
#[ignore = "needs an NVIDIA GPU or its stand-in"]
fn rows_of_odd_lengths_give_the_losses_and_gradients_of_the_cpus_kernels_whatever_the_backward_keeps() {
    use GradientCheckpointing::{Blocks, Off, Offload, On};
    let families = [
        ("qwen2", &[On, Off, Blocks(1), Offload][..]),
        ("qwen3_5", &[Blocks(1)]),
        ("qwen2_moe", &[Blocks(1)]),
        ("gpt_oss", &[Blocks(1)]),
    ];
    for (family, ways) in families {
        let folder = tempfile::tempdir().unwrap();
        write_family(family, folder.path());
        let (figures, grads) = train(folder.path(), None, [Dtype::F32; 2], &Device::flex(), GradientCheckpointing::On);
        for way in ways {
            let (found, found_grads) = train(folder.path(), None, [Dtype::F32; 2], &Device::cuda(0), *way);
            let error = relative_error(&found_grads, &grads);
            assert!(error < 5.0 * TF32, "{family}, {way:?}: gradients differ by {error}");
            for (found, expected) in found.iter().zip(&figures) {
                let difference = (found - expected).abs();
                assert!(difference < 5.0 * TF32 * expected, "{family}, {way:?}: {found} against {expected}");
            }
        }
    }
}

/// A published configuration with other numbers.
fn changed(name: &str, changes: &Value) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("configs/{name}.json"));
    let mut json: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let small = json!({"hidden_size": 64, "vocab_size": 264, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "bos_token_id": 1, "eos_token_id": 2});
    let has_text_config = json["text_config"].is_object();
    let section = if has_text_config { &mut json["text_config"] } else { &mut json };
    for (key, value) in small.as_object().into_iter().chain(changes.as_object()).flatten() {
        section[key] = value.clone();
    }
    json.to_string()
}

/// Shapes of which `configs` has none: routers with sigmoids, adapters on experts, latents, state spaces, chunks, residual streams and
/// a gate of attention.
fn made() -> [(&'static str, Value, Option<usize>); 7] {
    let experts = json!({"n_routed_experts": 3, "num_experts_per_tok": 3, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "moe_intermediate_size": 48, "routed_scaling_factor": 1.7});
    let with = |base: &Value, more: Value| {
        let mut all = base.clone();
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all
    };
    [
        (
            "glm4_moe",
            with(&experts, json!({"architectures": ["Glm4MoeForCausalLM"], "head_dim": 64, "use_qk_norm": true})),
            None,
        ),
        (
            "qwen3_moe",
            json!({"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 64, "num_experts": 3, "num_experts_per_tok": 3,
                "moe_intermediate_size": 48, "norm_topk_prob": true}),
            Some(3),
        ),
        (
            "deepseek_v3",
            with(
                &experts,
                json!({"architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 2, "q_lora_rank": 24,
                "kv_lora_rank": 40, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 48}),
            ),
            None,
        ),
        (
            "granitemoehybrid",
            json!({"architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["mamba", "attention"],
                "attention_multiplier": 0.1, "num_local_experts": 0, "shared_intermediate_size": 96,
                "position_embedding_type": null, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2,
                "mamba_d_conv": 4, "mamba_expand": 2}),
            None,
        ),
        (
            "llama4_text",
            json!({"architectures": ["Llama4ForCausalLM"], "head_dim": 64, "num_local_experts": 3, "num_experts_per_tok": 3,
                "intermediate_size": 48, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2,
                "no_rope_layers": [0, 1], "attention_chunk_size": 9, "floor_scale": 4}),
            None,
        ),
        (
            "gemma3n_text",
            json!({"architectures": ["Gemma3nForCausalLM"], "head_dim": 64, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
                "altup_num_inputs": 3, "hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 264, "laurel_rank": 12,
                "activation_sparsity_pattern": [0.9, 0.0, 0.6, 0.0], "sliding_window": 9, "tie_word_embeddings": true,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}),
            None,
        ),
        (
            "muse_glimmer_text",
            json!({"architectures": ["MuseGlimmerTextModel"], "head_dim": 64, "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention"]}),
            None,
        ),
    ]
}

/// Tokens pass all experts: rounding may choose others. Heads of the delta rule are as wide as published ones.
#[test]
#[ignore = "needs an NVIDIA GPU or its stand-in"]
fn in_bf16_every_family_has_the_gradients_of_the_cpu() {
    use GradientCheckpointing::{Off, On};
    let models = [
        (
            "qwen3-30b-a3b",
            json!({"num_hidden_layers": 1, "num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 48}),
            Off,
        ),
        (
            "qwen3.5-0.8b",
            json!({"num_hidden_layers": 2, "full_attention_interval": 2, "intermediate_size": 96, "linear_num_key_heads": 1,
                "linear_num_value_heads": 2, "linear_value_head_dim": 64}),
            On,
        ),
        (
            "qwen3.5-35b-a3b",
            json!({"num_hidden_layers": 2, "full_attention_interval": 2, "linear_num_key_heads": 1, "linear_num_value_heads": 1,
                "linear_value_head_dim": 32, "num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
                "shared_expert_intermediate_size": 40}),
            On,
        ),
        // Biases, and gates that no kernel computes.
        (
            "gpt-oss-20b",
            json!({"num_hidden_layers": 1, "layer_types": ["full_attention"], "intermediate_size": 48, "num_local_experts": 3,
                "num_experts_per_tok": 3, "quantization_config": null}),
            Off,
        ),
    ];
    let experts = json!({"num_hidden_layers": 1, "num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 40, "num_local_experts": 3, "intermediate_size": 48});
    let mut next = experts.clone();
    next.as_object_mut().unwrap().extend(models[1].1.as_object().unwrap().clone());
    let layers = |num_layers: usize| json!({"num_hidden_layers": num_layers, "intermediate_size": 96});
    let gemma4 = json!({"num_hidden_layers": 4, "intermediate_size": 96, "num_kv_shared_layers": 2, "global_head_dim": 128,
        "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 264, "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]});
    let others = [
        ("qwen2.5-0.5b", layers(1)),
        ("qwen1.5-moe-a2.7b", experts.clone()),
        ("mixtral-8x7b", experts),
        ("qwen3-next-80b-a3b", next),
        ("gemma-2-2b", layers(2)),
        ("gemma-3-1b", layers(6)),
        ("gemma-4-e2b", gemma4),
        ("smollm3-3b", layers(4)),
        ("olmo-2-7b", layers(1)),
        ("granite-3.3-2b", layers(1)),
        ("mistral-nemo-12b", layers(1)),
        ("ministral-3-3b", layers(1)),
        ("phi-3-mini-4k", layers(1)),
        ("glm-4-9b", layers(1)),
        ("glm-4-9b-0414", layers(1)),
        ("nemotron-mini-4b", layers(1)),
        // Two convolutions, and an attention.
        ("lfm2-1.2b", json!({"num_hidden_layers": 3, "block_ff_dim": 96, "block_multiple_of": 16})),
    ];
    let others = others.into_iter().map(|(name, changes)| (name, changes, On));
    let published = models.clone().into_iter().chain(others);
    let published = published.map(|(name, changes, way)| (name, changed(name, &changes), None, way));
    let made = made().map(|(name, shape, expert_rank)| {
        let mut config = json!({"model_type": name, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "vocab_size": 264, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
            "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 2});
        config.as_object_mut().unwrap().extend(shape.as_object().unwrap().clone());
        (name, config.to_string(), expert_rank, Off)
    });
    for (name, config, expert_rank, way) in published.chain(made) {
        let folder = tempfile::tempdir().unwrap();
        write_model(&config, folder.path());
        let (figures, grads) = train(folder.path(), expert_rank, [Dtype::Bf16, Dtype::F32], &Device::flex(), way);
        let (found, found_grads) = train(folder.path(), expert_rank, [Dtype::Bf16; 2], &Device::cuda(0), way);
        let error = relative_error(&found_grads, &grads);
        println!("{name}: gradients differ by {error:.1e}, the loss by {:.1e}", (found[0] / figures[0] - 1.0).abs());
        // Its delta rule hands what is rounded from token to token, and its experts multiply that.
        let tolerance = if name == "qwen3-next-80b-a3b" { 0.1 } else { 0.05 };
        assert!(error < tolerance, "{name}: gradients differ by {error}");
        assert!((found[0] - figures[0]).abs() < 1e-3 * figures[0], "{name}: {} against {}", found[0], figures[0]);
    }
}
