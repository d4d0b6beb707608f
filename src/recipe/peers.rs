//! Other trainers' names for our keys: axolotl, TRL and transformers, PEFT, Unsloth, torchtune, mlx-lm,
//! LLaMA-Factory.

use crate::schema::Peer;

const fn peer(section: &'static str, key: &'static str, names: &'static [&'static str]) -> Peer {
    Peer { names, section, key: Some(key), note: None }
}

const fn peer_with_note(
    section: &'static str,
    key: &'static str,
    names: &'static [&'static str],
    note: &'static str,
) -> Peer {
    Peer { names, section, key: Some(key), note: Some(note) }
}

/// A key for which there is none here.
const fn none(names: &'static [&'static str], note: &'static str) -> Peer {
    Peer { names, section: "", key: None, note: Some(note) }
}

/// Other trainers' names for our keys, in lower case and with underscores. Where a name stands twice, the entry of
/// the section in which it was written applies.
pub const PEERS: &[Peer] = &[
    // The top.
    peer("", "output_dir", &["output", "out_dir", "output_path", "adapter_path", "save_dir", "checkpoint_dir"]),
    peer("", "seed", &["random_seed", "manual_seed", "random_state", "data_seed"]),
    // Sections.
    peer("", "model", &["base", "base_model_config", "model_args", "model_config"]),
    peer("", "lora", &["peft", "adapter", "adapters", "lora_parameters", "lora_config", "peft_config", "lora_args"]),
    peer("", "data", &["dataset_config", "data_args", "data_config"]),
    peer("", "train", &["training", "trainer", "training_args", "training_arguments", "train_args"]),
    peer("", "optimizer", &["optim", "optimizer_args", "optimiser"]),
    peer("", "scheduler", &["lr_schedule", "schedule", "scheduler_args"]),
    peer("", "eval", &["evaluation", "validation", "eval_args"]),
    peer("", "checkpoint", &["checkpointer", "checkpointing", "checkpoints", "saving"]),
    peer("", "logging", &["log", "logger", "metric_logger", "report"]),
    // [model]
    peer(
        "model",
        "path",
        &[
            "base_model",
            "model_name_or_path",
            "model_name",
            "model_id",
            "model_path",
            "base_model_name_or_path",
            "pretrained_model_name_or_path",
            "hf_model_id",
            "repo_id",
            "tokenizer_name_or_path",
        ],
    ),
    peer("model", "path", &["name", "id", "repo", "name_or_path"]),
    peer("model", "revision", &["model_revision", "revision_of_model", "base_model_revision", "branch", "commit"]),
    peer("model", "dtype", &["torch_dtype", "model_dtype", "weights_dtype", "base_dtype"]),
    peer_with_note(
        "model",
        "quantization",
        &["load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "quantize", "qlora", "quantization_bit"],
        "only \"none\" is available yet",
    ),
    peer("model", "quantization", &["quantisation", "quant"]),
    // [lora]
    peer("lora", "r", &["lora_r", "rank", "lora_rank", "lora_dim", "adapter_rank"]),
    peer("lora", "lora_alpha", &["alpha", "lora_alphas"]),
    peer_with_note(
        "lora",
        "lora_alpha",
        &["scale", "lora_scale", "scaling"],
        "the scale is lora_alpha / r: multiply yours by r",
    ),
    peer("lora", "lora_dropout", &["dropout", "lora_drop", "adapter_dropout"]),
    peer(
        "lora",
        "target_modules",
        &[
            "lora_target_modules",
            "lora_target",
            "lora_targets",
            "targets",
            "lora_modules",
            "lora_attn_modules",
            "keys",
            "lora_layers_keys",
        ],
    ),
    peer_with_note(
        "lora",
        "target_modules",
        &["lora_target_linear", "apply_lora_to_mlp", "lora_mlp", "lora_query", "lora_key", "lora_value"],
        "\"all-linear\", or a list such as [\"q_proj\", \"v_proj\"]",
    ),
    peer("lora", "use_rslora", &["rslora", "peft_use_rslora", "lora_use_rslora", "use_rs_lora"]),
    peer("lora", "use_dora", &["dora", "peft_use_dora", "lora_use_dora"]),
    peer("lora", "init_lora_weights", &["lora_init", "init_weights", "peft_init_lora_weights"]),
    peer(
        "lora",
        "layers_to_transform",
        &["lora_layers_to_transform", "peft_layers_to_transform", "lora_layers", "num_layers"],
    ),
    peer("lora", "rank_pattern", &["lora_rank_pattern", "ranks"]),
    peer("lora", "alpha_pattern", &["lora_alpha_pattern", "alphas"]),
    peer("lora", "loraplus_lr_ratio", &["lora_plus_lr_ratio", "loraplus_ratio", "loraplus", "lora_plus"]),
    none(&["modules_to_save", "lora_modules_to_save", "additional_target"], "only adapters are trained here"),
    none(&["bias", "lora_bias"], "biases stay frozen here, PEFT's bias = \"none\""),
    none(&["task_type"], "there is one task here: causal language modelling; leave it out"),
    none(&["adapter", "finetuning_type", "use_peft", "train_type", "fine_tune_type"], "LoRA is what this trainer does"),
    none(&["fan_in_fan_out"], "Llama's linear layers need none; leave it out"),
    // [data]
    peer("data", "train", &["datasets", "dataset", "train_file", "train_files", "train_data", "dataset_path"]),
    peer("data", "train", &["data_path", "dataset_name", "data_files", "train_dataset", "training_data"]),
    peer(
        "data",
        "eval",
        &[
            "test_datasets",
            "eval_dataset",
            "eval_data",
            "eval_file",
            "validation_file",
            "val_data",
            "valid",
            "validation",
            "test",
            "val_dataset",
        ],
    ),
    peer("data", "eval_split", &["val_set_size", "val_size", "test_size", "validation_split", "val_split_fraction"]),
    peer(
        "data",
        "max_length",
        &[
            "sequence_len",
            "sequence_length",
            "max_seq_length",
            "max_seq_len",
            "seq_len",
            "seq_length",
            "cutoff_len",
            "model_max_length",
            "context_length",
            "block_size",
            "max_len",
            "max_tokens",
            "max_source_length",
        ],
    ),
    peer("data", "packing", &["sample_packing", "packed", "pack", "pad_to_sequence_len", "neat_packing"]),
    peer("data", "train_on_inputs", &["train_on_input", "train_on_prompt", "train_on_source", "train_on_prompts"]),
    peer_with_note(
        "data",
        "train_on_inputs",
        &["mask_prompt", "mask_inputs", "completion_only_loss", "assistant_only_loss", "train_on_responses_only"],
        "it means the opposite: train_on_inputs = false, the default, keeps loss to the answers",
    ),
    peer("data", "shuffle", &["shuffle_dataset", "shuffle_data", "shuffle_merged_datasets", "shuffle_buffer_size"]),
    peer(
        "data",
        "num_workers",
        &["dataloader_num_workers", "dataset_num_proc", "num_proc", "dataset_processes", "preprocessing_num_workers"],
    ),
    peer("data", "prefetch_batches", &["dataloader_prefetch_factor", "prefetch_factor", "prefetch"]),
    peer("data", "chat_template", &["template", "chat_template_path", "chat_template_jinja", "prompt_template"]),
    none(&["special_tokens", "added_tokens", "pad_token", "eos_token"], "special tokens are the tokenizer's own"),
    none(&["tokenizer", "tokenizer_config", "tokenizer_type"], "the tokenizer is the one in the model's folder"),
    // [[data.train]] and [[data.eval]]
    peer("data.train", "path", SOURCE_PATH),
    peer("data.eval", "path", SOURCE_PATH),
    peer("data.train", "format", SOURCE_FORMAT),
    peer("data.eval", "format", SOURCE_FORMAT),
    peer_with_note("data.train", "columns", SOURCE_COLUMNS, COLUMNS_NOTE),
    peer_with_note("data.eval", "columns", SOURCE_COLUMNS, COLUMNS_NOTE),
    peer("data.train", "weight", SOURCE_WEIGHT),
    peer("data.eval", "weight", SOURCE_WEIGHT),
    // Short names that several sections could have: each section's own meaning.
    peer("eval", "eval_steps", SHORT_INTERVAL),
    peer("checkpoint", "save_steps", SHORT_INTERVAL),
    peer("logging", "logging_steps", SHORT_INTERVAL),
    peer("scheduler", "warmup_steps", &["steps"]),
    peer("eval", "max_batches", &["batches", "max_steps"]),
    // [train]
    peer(
        "train",
        "micro_batch_size",
        &[
            "batch_size",
            "per_device_train_batch_size",
            "micro_batch",
            "train_batch_size",
            "per_device_batch_size",
            "mbs",
            "device_batch_size",
        ],
    ),
    peer_with_note(
        "train",
        "gradient_accumulation_steps",
        &["global_batch_size", "effective_batch_size"],
        "rows in a step are micro_batch_size x gradient_accumulation_steps",
    ),
    peer(
        "train",
        "gradient_accumulation_steps",
        &[
            "grad_accum",
            "gradient_accumulation",
            "grad_accumulation_steps",
            "accumulate_grad_batches",
            "grad_accum_steps",
        ],
    ),
    peer("train", "num_epochs", &["epochs", "num_train_epochs", "n_epochs", "max_epochs", "epoch"]),
    peer("train", "max_steps", &["iters", "steps", "num_steps", "max_train_steps", "max_steps_per_epoch", "num_iters"]),
    peer_with_note("train", "precision", &["bf16", "use_bf16"], "write precision = \"bf16\""),
    peer_with_note("train", "precision", &["fp16", "use_fp16", "f16"], "write precision = \"f16\""),
    peer_with_note("train", "precision", &["fp32", "tf32", "f32"], "write precision = \"f32\""),
    peer("train", "precision", &["mixed_precision", "compute_dtype", "amp", "bnb_4bit_compute_dtype", "dtype"]),
    peer(
        "train",
        "gradient_checkpointing",
        &[
            "enable_activation_checkpointing",
            "activation_checkpointing",
            "grad_checkpoint",
            "use_gradient_checkpointing",
            "checkpoint_activations",
            "gradient_checkpoint",
        ],
    ),
    peer_with_note(
        "train",
        "loss_chunk_tokens",
        &["num_output_chunks", "chunked_cross_entropy_num_chunks", "loss_chunk_size", "loss_chunk"],
        "it is the target tokens of a chunk, not the number of chunks",
    ),
    peer(
        "train",
        "max_grad_norm",
        &[
            "gradient_clipping",
            "grad_clip",
            "clip_grad_norm",
            "max_norm",
            "gradient_clip_val",
            "grad_clip_norm",
            "clip",
        ],
    ),
    // [optimizer]
    peer("optimizer", "name", &["optim", "optimizer_type", "type", "_component_", "optimizer_name", "optimizer"]),
    peer("optimizer", "learning_rate", &["lr", "max_lr", "peak_lr", "base_lr", "learning_rate_init"]),
    peer("optimizer", "weight_decay", &["wd", "decay", "l2"]),
    peer_with_note(
        "optimizer",
        "betas",
        &["adam_beta1", "adam_beta2", "beta1", "beta2", "adam_betas", "optim_args"],
        "both in one list: betas = [0.9, 0.999]",
    ),
    peer("optimizer", "eps", &["adam_epsilon", "epsilon", "adam_eps"]),
    // [scheduler]
    peer("scheduler", "lr_scheduler", &["lr_scheduler_type", "scheduler", "schedule", "lr_schedule", "decay_type"]),
    peer("scheduler", "lr_scheduler", &["name", "type"]),
    peer("scheduler", "warmup_steps", &["num_warmup_steps", "warmup", "lr_warmup_steps", "warmup_iters"]),
    peer("scheduler", "warmup_ratio", &["warmup_fraction", "lr_warmup_fraction", "warmup_proportion"]),
    peer_with_note(
        "scheduler",
        "min_lr_ratio",
        &["min_lr", "cosine_min_lr", "min_learning_rate", "end_lr", "lr_end"],
        "it is a share of the peak: min_lr / learning_rate",
    ),
    peer("scheduler", "min_lr_ratio", &["cosine_min_lr_ratio", "min_lr_rate", "lr_scheduler_kwargs"]),
    // [eval]
    peer("eval", "eval_steps", &["eval_interval", "evals_per_epoch", "steps_per_eval", "run_val_every_n_steps"]),
    peer("eval", "eval_steps", &["evaluation_strategy", "eval_strategy", "val_check_interval", "eval_every"]),
    peer("eval", "max_batches", &["val_batches", "eval_max_batches", "max_iters", "limit_val_batches", "eval_iters"]),
    peer(
        "eval",
        "early_stopping_patience",
        &["early_stopping", "patience", "early_stop_patience", "early_stopping_rounds"],
    ),
    peer("eval", "generate", &["prompts", "sample_prompts", "eval_prompts", "samples", "do_sample_eval"]),
    none(&["per_device_eval_batch_size", "eval_batch_size"], "an evaluation uses `micro_batch_size`, in [train]"),
    none(&["load_best_model_at_end", "metric_for_best_model", "greater_is_better"], "the last adapter is the result"),
    // [checkpoint]
    peer("checkpoint", "save_steps", &["save_every", "save_interval", "steps_per_save", "saves_per_epoch"]),
    peer("checkpoint", "save_steps", &["save_strategy", "checkpoint_interval", "checkpointing_steps"]),
    peer("checkpoint", "save_total_limit", &["save_limit", "keep_last", "keep_last_n", "max_checkpoints", "limit"]),
    none(
        &["resume_from_checkpoint", "auto_resume_from_checkpoints", "resume", "resume_adapter_file"],
        "continue a run with --resume on the command line",
    ),
    none(&["save_safetensors", "save_only_model", "save_adapter_weights_only"], "adapters are safetensors always"),
    // [logging]
    peer("logging", "logging_steps", &["log_steps", "steps_per_report", "log_every_n_steps", "log_interval"]),
    peer("logging", "logging_steps", &["log_every", "logging_strategy"]),
    peer("logging", "tensorboard", &["use_tensorboard", "report_to", "use_tb", "log_with"]),
    peer("logging", "gpu_sample_ms", &["sample_ms", "gpu_sample_interval_ms", "log_peak_memory_stats"]),
    none(
        &["wandb", "wandb_project", "use_wandb", "wandb_run_id", "wandb_name", "mlflow_tracking_uri", "use_mlflow"],
        "figures go to metrics.jsonl and TensorBoard",
    ),
    none(&["logging_dir", "log_dir", "tensorboard_dir"], "figures are written below `output_dir`"),
    // [device]
    peer("device", "name", &["device", "device_map", "accelerator", "backend", "devices", "gpu", "type"]),
    // What this trainer does its own way.
    none(
        &["deepspeed", "fsdp", "fsdp_config", "ddp_timeout", "tensor_parallel_size", "local_rank"],
        "this trainer runs on one device",
    ),
    none(
        &["flash_attention", "attn_implementation", "sdp_attention", "xformers_attention", "use_flash_attention_2"],
        "attention needs no setting",
    ),
    none(&["compile", "torch_compile", "use_liger_kernel", "unsloth"], "kernels need no setting; leave it out"),
    none(&["trust_remote_code"], "no code is taken from a model; leave it out"),
    none(&["hub_model_id", "push_to_hub", "hf_use_auth_token", "hub_token"], "the Hub's token is read from HF_TOKEN"),
    none(&["group_by_length"], "rows are visited in an order drawn from the seed; leave it out"),
    none(&["neftune_noise_alpha"], "noise on embeddings is not available"),
];

const SHORT_INTERVAL: &[&str] = &["steps", "every", "interval", "every_n_steps"];
const SOURCE_PATH: &[&str] = &[
    "file",
    "files",
    "data_files",
    "data_path",
    "dataset",
    "name",
    "file_name",
    "source",
    "data_file",
    "ds_path",
    "url",
];
const SOURCE_FORMAT: &[&str] = &["type", "ds_type", "kind", "formatting", "style", "conversation_style", "template"];
const SOURCE_COLUMNS: &[&str] = &[
    "column_map",
    "columns_map",
    "field",
    "field_messages",
    "field_instruction",
    "field_input",
    "field_output",
    "message_property_mappings",
    "text_column",
    "text_field",
    "dataset_text_field",
    "prompt_feature",
    "completion_feature",
    "text_feature",
    "rename",
];
const SOURCE_WEIGHT: &[&str] = &["weights", "probability", "interleave_probs", "mix", "ratio", "sampling_weight"];
const COLUMNS_NOTE: &str = "our name first: columns = { prompt = \"question\", completion = \"answer\" }";
