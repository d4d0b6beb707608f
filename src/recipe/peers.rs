//! Keys of other trainers: axolotl, TRL and transformers, PEFT, Unsloth, torchtune, litgpt, mlx-lm, LLaMA-Factory. Their
//! names for our keys, and those that have no key here.

use super::Recipe;
use crate::schema::{self, Keys, Peer};

/// Other trainers' names: those in the rows of our keys, and those without a key here. If a name appears twice, the
/// entry of the section in which it was written applies.
#[must_use]
pub fn peers() -> Vec<Peer> {
    let none = |(lost, nothing, note): &(&'static [&'static str], &'static [&'static str], &'static str)| {
        [*lost, *nothing].map(|names| Peer { names, section: String::new(), key: None, note: Some(note) })
    };
    schema::peers(Recipe::ROWS, "").into_iter().chain(NO_KEY.iter().flat_map(none)).collect()
}

/// Whether another trainer's key asks for nothing that a recipe here would have to say.
pub(crate) fn asks_for_nothing(name: &str) -> bool {
    NOTHING.iter().chain(NO_KEY.iter().map(|(_, nothing, _)| nothing)).any(|names| names.contains(&name))
}

/// Keys of other trainers that have no key here: those whose effect is lost, those that ask for nothing, and what to do
/// instead.
const NO_KEY: &[(&[&str], &[&str], &str)] = &[
    (
        &["unfrozen_parameters"],
        &[],
        "only adapters are trained here, and what `lora.modules_to_save` and `lora.trainable_token_indices` name",
    ),
    (&["bias", "lora_bias"], &[], "biases stay frozen here, PEFT's bias = \"none\""),
    (&[], &["task_type"], "there is one task here: causal language modelling; leave it out"),
    (
        &["adapter", "finetuning_type", "use_peft", "train_type", "fine_tune_type"],
        &[],
        "LoRA is what this trainer does",
    ),
    (&["rlhf_type"], &[], "`name` in [objective] says what is trained"),
    (&[], &["do_train", "do_eval"], "leave it out: a run trains, and evaluates on the rows of [[data.eval]]"),
    (&["dataset_dir", "data_dir"], &[], "`path` in [[data.train]] names a file with its folder"),
    (
        &["overwrite"],
        &["overwrite_output_dir", "overwrite_cache"],
        "a run is never overwritten unasked: `--overwrite` on the command line deletes it",
    ),
    (&["fan_in_fan_out", "lora_fan_in_fan_out"], &[], "Llama's linear layers need none; leave it out"),
    (
        &["added_tokens", "tokens", "special_tokens", "eos_token", "bos_token", "unk_token", "eot_tokens"],
        &["pad_token"],
        "special tokens are the tokenizer's own: change them in the model's folder",
    ),
    (
        &["train_on_eos", "train_on_eot"],
        &[],
        "an answer carries loss with the token that ends it; there is no other choice",
    ),
    (
        &["loss_watchdog_threshold", "loss_watchdog_patience"],
        &[],
        "[watchdog] stops a run whose loss stays 2 nats above its start; `patience` says after how many steps",
    ),
    (&["do_predict"], &[], "`lora-train generate RUN --prompts FILE` writes answers after a run"),
    (
        &["dataset_exact_deduplication", "dedup", "streaming", "buffer_size", "tokenized_path"],
        &[],
        "rows are read from their file, each as it is: take out there what should not be trained on",
    ),
    (
        &["interleave_probs", "mix_strategy", "interleave_strategy"],
        &[],
        "`weight`, in [[data.train]], says how often the rows of a file are visited in an epoch",
    ),
    (&["tokenizer", "tokenizer_config"], &["tokenizer_type"], "the tokenizer is the one in the model's folder"),
    (
        &["per_device_eval_batch_size", "eval_batch_size", "batch_size_val"],
        &[],
        "an evaluation uses `micro_batch_size`, in [train]",
    ),
    (
        &["load_best_model_at_end", "greater_is_better"],
        &[],
        "adapter/ is the last adapter, adapter-best/ the best by `metric_for_best`, in [eval]",
    ),
    (
        &["auto_resume_from_checkpoints", "resume"],
        &["resume_from_checkpoint"],
        "continue a run with --resume on the command line",
    ),
    (
        &["save_only_model", "save_adapter_weights_only"],
        &[],
        "checkpoints hold the optimizer's state too, so that a run can go on; adapter/ is the adapter alone",
    ),
    (&[], &["save_safetensors"], "adapters are safetensors always"),
    (&["excess_length_strategy"], &[], "rows longer than `max_length` are cut, and counted, not dropped"),
    (&["create_new_adapter"], &[], "training goes on in the adapter that `start_from` names; none is added to it"),
    (&["quantization_method"], &[], "`model.quantization` has bitsandbytes' nf4, fp4 and int8, and fp8"),
    (
        &[
            "wandb", "wandb_project", "use_wandb", "wandb_run_id", "wandb_name", "run_name", "wandb_entity",
            "wandb_watch", "wandb_log_model", "use_swanlab", "swanlab_project", "use_comet", "trackio_project_name",
        ],
        &[],
        "figures go to metrics.jsonl, TensorBoard and MLflow; `lora-train help telemetry` has the way to W&B",
    ),
    (&["use_mlflow"], &[], "`mlflow_tracking_uri`, in [logging], names a server"),
    (&["logging_dir", "log_dir", "tensorboard_dir"], &[], "figures are written below `output_dir`"),
    (
        &[
            "deepspeed", "fsdp", "fsdp_config", "tensor_parallel_size", "local_rank", "gpus", "num_gpus", "n_gpu",
            "num_processes", "nproc_per_node",
        ],
        &["ddp_timeout"],
        "each GPU holds the whole model: `mpirun -n N lora-train RECIPE`; `lora-train help cluster`",
    ),
    (
        &[],
        &[
            "use_flash_attention_2", "flash_attention", "attn_implementation", "sdp_attention", "xformers_attention",
            "flash_attn",
        ],
        "attention needs no setting",
    ),
    (
        &[],
        &["use_liger_kernel", "unsloth", "use_unsloth", "compile", "torch_compile"],
        "kernels need no setting; leave it out",
    ),
    (&[], &["trust_remote_code"], "no code is taken from a model; leave it out"),
    (&["hf_use_auth_token", "hub_token", "hf_token", "use_auth_token"], &[], "the Hub's token is read from HF_TOKEN"),
    (
        &["push_to_hub", "hub_model_id", "push_to_hub_model_id", "hub_strategy"],
        &[],
        "`lora-train push RUN OWNER/NAME` puts the adapter of a run on the Hub",
    ),
    (&[], &["plot_loss"], "every run writes report.html; leave it out"),
    (&["verbose", "debug", "disable_tqdm"], &["log_level"], "every step is in metrics.jsonl; --quiet shows less"),
    (&[], &["group_by_length"], "rows are visited in an order drawn from the seed; leave it out"),
    (
        &["pissa_init", "pissa_iter", "loftq_config", "loftq"],
        &[],
        "adapters start as `init_lora_weights`, in [lora], says",
    ),
    (
        &[
            "processor_type", "image_min_pixels", "image_size", "image_resize_algorithm", "freeze_vision_tower",
            "freeze_multi_modal_projector", "freeze_vit", "freeze_aligner", "finetune_vision_layers",
            "train_mm_proj_only", "vision_tower",
        ],
        &[],
        "images are resized as the model's own files say, and its vision tower stays as it is; leave it out",
    ),
];

/// Keys of other trainers that ask for nothing, and of which there is nothing to say: they do not change what is trained,
/// have one value here, or are read together with another key.
const NOTHING: &[&[&str]] = &[
    &["model_type", "is_llama_derived_model", "is_mistral_derived_model", "is_qwen_derived_model"],
    &["auto_mapping", "base_model_class", "inference_mode", "peft_version", "peft_type", "checkpoint_files"],
    &["fast_inference", "max_lora_rank", "gpu_memory_utilization", "peft", "padding", "merge_adapter"],
    &["test_batches", "eval_sample_packing", "final_validation", "max_new_tokens", "save_first_step"],
    &["recipe_checkpoint", "should_load_recipe_state", "download_dir", "resume_download", "keep_last_n_checkpoints"],
    &["metric_logger", "logging_first_step", "log_peak_memory_stats", "profiler", "project_name"],
    &["dataset_prepared_path", "dataset_num_proc", "preprocessing_num_workers", "dataset_processes"],
    &["num_workers", "dataloader_num_workers", "dataloader_pin_memory", "seed_worker", "pad_to_sequence_len"],
    &[
        "num_nodes", "fp32", "gradient_checkpointing_kwargs", "strict", "use_cpu", "remove_unused_columns",
        "average_tokens_across_devices",
    ],
    &[
        "tie_embeddings", "loraplus_lr_embedding", "ignore_index", "enable_activation_offloading",
        "skip_prepare_dataset",
    ],
    &["lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "enable_liger_kernel", "liger_fused_linear_cross_entropy"],
    &[
        "liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_layer_norm", "cut_cross_entropy",
        "low_cpu_mem_usage",
    ],
    &["ray_num_workers", "ddp", "ddp_find_unused_parameters", "lora_task_type"],
    &["clear_cache_threshold", "optimizer_in_bwd", "tokenizer_use_fast", "tokenizer_legacy", "padding_free"],
];
