//! Names that other trainers use for our keys: axolotl, TRL and transformers, PEFT, Unsloth, torchtune, mlx-lm,
//! LLaMA-Factory.

use super::Recipe;
use crate::schema::{self, Keys, Peer};

/// Other trainers' names: those in the rows of our keys, and those without a key here. If a name appears twice, the
/// entry of the section in which it was written applies.
#[must_use]
pub fn peers() -> Vec<Peer> {
    let none = |(names, note): &(&'static [&'static str], &'static str)| Peer {
        names,
        section: String::new(),
        key: None,
        note: Some(note),
    };
    schema::peers(Recipe::ROWS, "").into_iter().chain(NO_KEY.iter().map(none)).collect()
}

/// Keys of other trainers that have no key here, and what to do instead.
const NO_KEY: &[(&[&str], &str)] = &[
    (&["modules_to_save", "lora_modules_to_save", "additional_target"], "only adapters are trained here"),
    (&["bias", "lora_bias"], "biases stay frozen here, PEFT's bias = \"none\""),
    (&["task_type"], "there is one task here: causal language modelling; leave it out"),
    (&["adapter", "finetuning_type", "use_peft", "train_type", "fine_tune_type"], "LoRA is what this trainer does"),
    (&["stage", "rl", "rlhf_type"], "supervised fine-tuning is what this trainer does; DPO is not available"),
    (&["do_train", "do_eval"], "leave it out: a run trains, and evaluates on the rows of [[data.eval]]"),
    (&["dataset_dir", "data_dir"], "`path` in [[data.train]] names a file with its folder"),
    (
        &["overwrite_output_dir", "overwrite", "overwrite_cache"],
        "a run is never overwritten unasked: `--overwrite` on the command line deletes it",
    ),
    (&["fan_in_fan_out"], "Llama's linear layers need none; leave it out"),
    (&["special_tokens", "added_tokens", "pad_token", "eos_token"], "special tokens are the tokenizer's own"),
    (&["tokenizer", "tokenizer_config", "tokenizer_type"], "the tokenizer is the one in the model's folder"),
    (&["per_device_eval_batch_size", "eval_batch_size"], "an evaluation uses `micro_batch_size`, in [train]"),
    (
        &["load_best_model_at_end", "greater_is_better"],
        "adapter/ is the last adapter, adapter-best/ the best by `metric_for_best`, in [eval]",
    ),
    (
        &["resume_from_checkpoint", "auto_resume_from_checkpoints", "resume"],
        "continue a run with --resume on the command line",
    ),
    (&["save_safetensors", "save_only_model", "save_adapter_weights_only"], "adapters are safetensors always"),
    (
        &["wandb", "wandb_project", "use_wandb", "wandb_run_id", "wandb_name"],
        "figures go to metrics.jsonl, TensorBoard and MLflow; docs/telemetry.md has the way to W&B",
    ),
    (&["use_mlflow"], "`mlflow_tracking_uri`, in [logging], names a server"),
    (&["logging_dir", "log_dir", "tensorboard_dir"], "figures are written below `output_dir`"),
    (
        &["deepspeed", "fsdp", "fsdp_config", "ddp_timeout", "tensor_parallel_size", "local_rank"],
        "this trainer runs on one device",
    ),
    (&["gpus", "num_gpus", "n_gpu", "num_processes", "nproc_per_node"], "this trainer runs on one device"),
    (
        &["flash_attention", "attn_implementation", "sdp_attention", "xformers_attention", "use_flash_attention_2"],
        "attention needs no setting",
    ),
    (&["flash_attn"], "attention needs no setting"),
    (&["compile", "torch_compile", "use_liger_kernel", "unsloth"], "kernels need no setting; leave it out"),
    (&["trust_remote_code"], "no code is taken from a model; leave it out"),
    (&["hf_use_auth_token", "hub_token", "hf_token", "use_auth_token"], "the Hub's token is read from HF_TOKEN"),
    (
        &["push_to_hub", "hub_model_id", "push_to_hub_model_id", "hub_strategy"],
        "`lora-train push RUN OWNER/NAME` puts the adapter of a run on the Hub",
    ),
    (&["plot_loss"], "every run writes report.html; leave it out"),
    (&["verbose", "debug", "log_level", "disable_tqdm"], "every step is in metrics.jsonl; --quiet shows less"),
    (&["group_by_length"], "rows are visited in an order drawn from the seed; leave it out"),
    (&["neftune_noise_alpha"], "noise on embeddings is not available"),
];
