//! Every family in every stored form at every place with every adapter, from a configuration alone: loss and gradients
//! of a step, held against plain tensor calls on the decoded weights in `f32`. `cargo test matrix -- --nocapture` prints
//! the table; a cell without a number is a combination that is refused, and `REFUSED` lists those.

use std::path::Path;

use burn::tensor::{DType, Device, Tensor};
use lora_train::config::{FileType, GradientCheckpointing, InitLoraWeights, LoraConfig, Residency, TrainConfig};
use lora_train::data::batch::Batch;
use lora_train::device::Dtype;
use lora_train::lora::AdapterSet;
use lora_train::model::weights::{Quantisation, Weights};
use lora_train::model::{Model, Storage, load};
use lora_train::ops::linear::Matrix;
use lora_train::ops::quantised::Coding;
use lora_train::save::export::{GgufOptions, adapter_weights, merge_gguf, write_adapter};
use lora_train::spec::ModelConfig;
use serde_json::{Value, json};

use crate::common::families::write_model;
use crate::engine::{answers, grads, in_rows, indexed, packed, relative_error, step, with_b};

/// What a family changes in the configuration of the others.
fn families() -> [(&'static str, Value); 19] {
    let llama = "LlamaForCausalLM";
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192});
    [
        ("llama", json!({"model_type": "llama", "architectures": [llama]})),
        (
            "llama, tied, scaled rope",
            json!({"model_type": "llama", "architectures": [llama],
            "tie_word_embeddings": true, "rope_theta": 500_000.0, "rope_scaling": llama3}),
        ),
        (
            "llama, biases",
            json!({"model_type": "llama", "architectures": [llama], "attention_bias": true,
            "mlp_bias": true}),
        ),
        (
            "mistral, window",
            json!({"model_type": "mistral", "architectures": ["MistralForCausalLM"],
            "sliding_window": 9}),
        ),
        (
            "qwen2, later windows",
            json!({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": true, "sliding_window": 9, "max_window_layers": 1}),
        ),
        (
            "ministral3",
            json!({"model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"], "head_dim": 24,
            "rope_scaling": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4, "beta_fast": 4.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}}),
        ),
        ("qwen3", json!({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 24})),
        (
            "qwen3.5",
            json!({"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "head_dim": 32,
            "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 32, "linear_value_head_dim": 32}),
        ),
        (
            "gemma2",
            json!({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "head_dim": 24,
            "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0,
            "sliding_window": 9, "tie_word_embeddings": true}),
        ),
        (
            "gemma3",
            json!({"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "head_dim": 24,
            "query_pre_attn_scalar": 24, "sliding_window": 9, "num_hidden_layers": 6, "tie_word_embeddings": true}),
        ),
        (
            "gemma4, all it can have",
            json!({"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "head_dim": 16,
            "global_head_dim": 24, "sliding_window": 9, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"], "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 1344, "final_logit_softcapping": 4.0, "use_double_wide_mlp": true,
            "attention_k_eq_v": true, "num_global_key_value_heads": 1, "enable_moe_block": true, "num_experts": 3,
            "top_k_experts": 3, "moe_intermediate_size": 64, "tie_word_embeddings": true, "rope_theta": null}),
        ),
        ("smollm3", json!({"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4})),
        (
            "lfm2",
            json!({
                "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv", "full_attention"],
                "block_auto_adjust_ff_dim": false, "norm_eps": 1e-5,
            }),
        ),
        (
            "nemotron",
            json!({
                "model_type": "nemotron", "architectures": ["NemotronForCausalLM"], "hidden_act": "relu2", "norm_eps": 1e-5,
                "partial_rotary_factor": 0.5,
            }),
        ),
        ("llama, gelu", json!({"model_type": "llama", "architectures": [llama], "hidden_act": "gelu"})),
        ("olmo2", json!({"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]})),
        (
            "granite",
            json!({"model_type": "granite", "architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 2.0}),
        ),
        ("phi3", json!({"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75})),
        ("glm4", json!({"model_type": "glm4", "architectures": ["Glm4ForCausalLM"], "head_dim": 24})),
    ]
}

/// Families with experts, latents or state spaces. Every token passes all experts: rounding may choose others.
fn mixtures() -> [(&'static str, Value); 9] {
    [
        (
            "qwen3_moe",
            json!({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 3,
            "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": true}),
        ),
        (
            "qwen2_moe, shared expert",
            json!({"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 2,
            "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}),
        ),
        ("mixtral", json!({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 2})),
        (
            "gpt_oss",
            json!({"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_local_experts": 3,
            "num_experts_per_tok": 3, "attention_bias": true, "sliding_window": 9, "head_dim": 24,
            "rope_scaling": {"rope_type": "default"}}),
        ),
        (
            "glm4_moe, sigmoids",
            json!({"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "head_dim": 24, "n_routed_experts": 3,
            "num_experts_per_tok": 3, "moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "n_group": 1, "topk_group": 1, "partial_rotary_factor": 0.5, "use_qk_norm": true}),
        ),
        (
            "deepseek_v3, latents",
            json!({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4,
            "n_routed_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}),
        ),
        (
            "granitemoehybrid, mamba",
            json!({"model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"],
            "layer_types": ["mamba", "attention"], "attention_multiplier": 0.2, "num_local_experts": 3, "num_experts_per_tok": 3,
            "intermediate_size": 64, "shared_intermediate_size": 128, "position_embedding_type": null,
            "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_d_conv": 4, "mamba_expand": 2}),
        ),
        (
            "nemotron_h",
            json!({"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "head_dim": 24,
            "layers_block_type": ["mamba", "moe", "attention", "mlp"], "mlp_hidden_act": "relu2", "mamba_num_heads": 8,
            "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4, "n_routed_experts": 3,
            "num_experts_per_tok": 3, "n_shared_experts": 1, "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 96, "n_group": 1, "topk_group": 1, "layer_norm_epsilon": 1e-5}),
        ),
        (
            "llama4, chunks",
            json!({"model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "head_dim": 16, "num_local_experts": 3,
            "num_experts_per_tok": 3, "intermediate_size": 64, "intermediate_size_mlp": 128, "interleave_moe_layer_step": 2,
            "no_rope_layers": [0, 1], "attention_chunk_size": 9, "floor_scale": 4}),
        ),
    ]
}

fn config(changes: &Value) -> String {
    let mut config = json!({"vocab_size": 1344, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": false, "bos_token_id": 1,
        "eos_token_id": 2, "torch_dtype": "float32"});
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    config.to_string()
}

/// How the base is held. `Blocks` are those of GGUF's `q8_0`.
#[derive(Clone, Copy)]
enum Form {
    Held(Dtype, Option<(Coding, bool)>, Residency),
    Blocks,
}

const FORMS: [(&str, Form); 10] = [
    ("f32", Form::Held(Dtype::F32, None, Residency::Memory)),
    ("bf16", Form::Held(Dtype::Bf16, None, Residency::Memory)),
    ("f16", Form::Held(Dtype::F16, None, Residency::Memory)),
    ("nf4", Form::Held(Dtype::F32, Some((Coding::Nf4, false)), Residency::Memory)),
    ("nf4, nested", Form::Held(Dtype::F32, Some((Coding::Nf4, true)), Residency::Memory)),
    ("fp4", Form::Held(Dtype::F32, Some((Coding::Fp4, false)), Residency::Memory)),
    ("int8", Form::Held(Dtype::F32, Some((Coding::Int8, false)), Residency::Memory)),
    ("fp8", Form::Held(Dtype::F32, Some((Coding::Fp8, false)), Residency::Memory)),
    ("mapped", Form::Held(Dtype::F32, None, Residency::Mapped)),
    ("q8_0", Form::Blocks),
];

/// Kernels of the CPU and plain tensor calls, each with the type of its arithmetic and what that rounds.
const PLACES: [(&str, bool, Dtype, f64); 5] = [
    ("kernels", true, Dtype::F32, 2e-5),
    ("kernels, bf16", true, Dtype::Bf16, 3e-2),
    ("plain", false, Dtype::F32, 2e-5),
    ("plain, bf16", false, Dtype::Bf16, 5e-2),
    ("plain, f16", false, Dtype::F16, 1e-2),
];

/// Kinds of adapters, and modules beside them. Those of Gemma 4 are refused but for some norms.
fn kinds(family: &str) -> [(&'static str, LoraConfig); 4] {
    let lora = LoraConfig { r: 4, ..LoraConfig::default() };
    let modules: &[&str] = match family {
        "lfm2" => &["embed_tokens", "lm_head", "_norm"],
        "nemotron" => &["embed_tokens", "lm_head"],
        "nemotron_h" => &["lm_head"],
        _ if family.starts_with("deepseek") => &["embed_tokens", "lm_head", "input_layernorm", "model.norm"],
        _ if family.starts_with("gemma4") => &["model.norm"],
        _ => &["embed_tokens", "lm_head", "layernorm", "model.norm"],
    };
    let modules_to_save = Some(modules.iter().map(ToString::to_string).collect());
    [
        ("lora", lora.clone()),
        ("dora", LoraConfig { use_dora: true, ..lora.clone() }),
        ("modules", LoraConfig { modules_to_save, ..lora.clone() }),
        ("experts", LoraConfig { expert_rank: Some(3), ..lora }),
    ]
}

/// The cells without a number: family and form. GGUF shares keys and values of the last two layers that make them, in one order, has
/// one activation for each family, no feed-forward layers among mixtures, and chunks of 8192 tokens.
const REFUSED: [(&str, &str); 4] =
    [("gemma4, all it can have", "q8_0"), ("llama, gelu", "q8_0"), ("nemotron_h", "q8_0"), ("llama4, chunks", "q8_0")];

fn load(folder: &Path, form: Form, compute: Dtype, device: &Device) -> Option<Model> {
    let (model, storage) = match form {
        Form::Held(dtype, coding, residency) => {
            let quantisation = coding.map(|(coding, nested)| Quantisation { coding, nested });
            (folder.to_owned(), Storage { dtype, quantisation, residency })
        }
        Form::Blocks => (folder.join("model.gguf"), Dtype::F32.into()),
    };
    let config = ModelConfig::from_model(&model).ok()?;
    let weights = Weights::open(&model, &config).unwrap();
    load::load(&config, &weights, storage, compute, device).ok()
}

fn fresh(config: &ModelConfig, lora: &LoraConfig, device: &Device) -> AdapterSet {
    AdapterSet::new(config, &lora.select(config).unwrap(), InitLoraWeights::Kaiming, 0.0, 2, device)
}

/// The model as a file in blocks, where GGUF has a place for all of its tensors.
fn write_blocks(folder: &Path) {
    let lora = &LoraConfig::default();
    let config = ModelConfig::from_model(folder).unwrap();
    let adapter = folder.join("adapter");
    let unchanged = adapter_weights(&fresh(&config, lora, &Device::flex()));
    write_adapter(&adapter, &unchanged, lora, "base").unwrap();
    let out = folder.join("model.gguf");
    drop(merge_gguf(
        folder,
        &adapter,
        &out,
        GgufOptions { dtype: Some(FileType::Q8), ..GgufOptions::default() },
        &|_, _| (),
    ));
}

/// The same numbers in `f32`.
fn decoded(mut model: Model) -> Model {
    let dense = |matrix: &Matrix| Matrix::Dense(matrix.dense().into_owned().cast(DType::F32));
    for weight in model.blocks.iter_mut().flat_map(|block| &mut block.linears) {
        weight.values = dense(&weight.values);
    }
    model.lm_head.values = dense(&model.lm_head.values);
    model.embed_tokens = model.embed_tokens.cast(DType::F32);
    model
}

/// Loss and gradients.
fn compute(model: &Model, lora: &LoraConfig, batch: &Batch, checkpointing: GradientCheckpointing) -> (f64, Vec<f32>) {
    let train = TrainConfig { gradient_checkpointing: checkpointing, ..TrainConfig::default() };
    let mut adapters = with_b(fresh(&model.config, lora, &model.device()));
    model.start_magnitudes(&mut adapters);
    model.start_modules(&mut adapters, lora.select(&model.config).unwrap().full.into_keys());
    let mut step = step(model, adapters, &train);
    step.forward_backward(batch);
    let grads = grads(&step);
    (step.update(0.0).loss, grads)
}

#[test]
fn every_cell_gives_the_loss_and_gradients_of_plain_operations_on_the_decoded_weights() {
    use GradientCheckpointing::{Off, On};
    let kernels = Device::flex();
    // A device with autodiff uses no kernels.
    let plain = Device::flex().autodiff();
    let batches = [in_rows(&indexed()), packed(&indexed()), answers()];
    let (mut refused, mut wrong, mut cells) = (Vec::new(), Vec::new(), 0);
    for (family, changes) in families().into_iter().chain(mixtures()) {
        for (kind, lora) in kinds(family) {
            let folder = tempfile::tempdir().unwrap();
            write_model(&config(&changes), folder.path());
            write_blocks(folder.path());
            let blocks = ModelConfig::from_model(folder.path()).unwrap().blocks;
            let has_experts = blocks.iter().any(|block| block.mixture().is_some());
            let is_tried = |form: &&(&str, Form)| match kind {
                // Modules are in f32, whatever the form of the base.
                "modules" => form.0 == "f32",
                "experts" => has_experts && ["f32", "nf4", "mapped", "q8_0"].contains(&form.0),
                _ => true,
            };
            for &(form_name, form) in FORMS.iter().filter(is_tried) {
                let Some(base) = load(folder.path(), form, Dtype::F32, &plain) else {
                    eprintln!("{family:>25} {kind:>7} {form_name:>12}  refused");
                    refused.push((family, form_name));
                    continue;
                };
                let base = decoded(base);
                let expected = batches.each_ref().map(|batch| compute(&base, &lora, batch, Off));
                let mut line = format!("{family:>25} {kind:>7} {form_name:>12} ");
                for (place_index, (place, has_kernels, dtype, tolerance)) in PLACES.into_iter().enumerate() {
                    let device = if has_kernels { &kernels } else { &plain };
                    let model = load(folder.path(), form, dtype, device).unwrap();
                    // A delta rule hands what is rounded from token to token.
                    let is_handed_on = family == "qwen3.5" && dtype == Dtype::Bf16;
                    let tolerance = if is_handed_on { 2.0 * tolerance } else { tolerance };
                    let mut worst = 0.0_f64;
                    // Plain calls, which are slow, take one of these in turn.
                    let cases = [(0, Off), (0, On), (1, Off), (2, Off)];
                    let turn = (cells + place_index) % cases.len();
                    for &(batch, checkpointing) in if has_kernels { &cases[..] } else { &cases[turn..=turn] } {
                        let (found_loss, found) = compute(&model, &lora, &batches[batch], checkpointing);
                        let (loss, expected) = &expected[batch];
                        let error = relative_error(&found, expected);
                        worst = worst.max(error).max(((found_loss - loss) / loss).abs());
                    }
                    line += &format!(" {place} {worst:.1e}");
                    if worst.is_nan() || worst > tolerance {
                        wrong.push(format!("{family}, {kind}, {form_name}, {place}: {worst}"));
                    }
                }
                eprintln!("{line}");
                cells += 1;
                // What was recorded for a backward of burn's, and is not used, goes with the next of its backwards.
                drop(Tensor::<1>::ones([1], &plain).require_grad().backward());
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    refused.dedup();
    assert_eq!(refused, REFUSED);
}
