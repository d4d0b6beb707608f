//! The programs whose configurations are read, and how they differ by default.

use serde_json::{Map, Value};

/// Whose configuration it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trainer {
    Peft,
    Torchtune,
    Litgpt,
    MlxLm,
    LlamaFactory,
    Axolotl,
    Trl,
    Swift,
    OpenAi,
    /// A program with Unsloth's classes.
    Unsloth,
    /// A program with those of transformers, PEFT and TRL.
    Python,
    /// Keys like those of the others.
    Unknown,
}

impl Trainer {
    /// Recognises a configuration by keys that only it has.
    pub(super) fn of(root: &Map<String, Value>) -> Self {
        let has = |key: &str| root.contains_key(key);
        let is_component = |value: &Value| value.get("_component_").is_some();
        match () {
            () if has("peft_type") => Self::Peft,
            () if has("training_file") || has("grader") || is_grader(root) => Self::OpenAi,
            () if ["tuner_backend", "tuner_type", "split_dataset_ratio", "rlhf_type"].into_iter().any(has) => {
                Self::Swift
            }
            () if root.values().any(is_component) => Self::Torchtune,
            () if has("checkpoint_dir") || has("initial_checkpoint_dir") => Self::Litgpt,
            () if ["finetuning_type", "stage", "cutoff_len", "peft_config", "template"].into_iter().any(has) => {
                Self::LlamaFactory
            }
            () if has("base_model") => Self::Axolotl,
            () if has("model") && root.get("train").is_some_and(Value::is_boolean) => Self::MlxLm,
            () if ["lora_parameters", "iters", "fine_tune_type", "num_layers"].into_iter().any(has) => Self::MlxLm,
            () if has("model_name_or_path") => Self::Trl,
            () => Self::Unknown,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Peft => "PEFT",
            Self::Torchtune => "torchtune",
            Self::Litgpt => "litgpt",
            Self::MlxLm => "mlx-lm",
            Self::LlamaFactory => "LLaMA-Factory",
            Self::Axolotl => "axolotl",
            Self::Trl => "TRL",
            Self::Swift => "ms-swift",
            Self::OpenAi => "OpenAI",
            Self::Unsloth => "Unsloth",
            Self::Python => "a program",
            Self::Unknown => "another trainer",
        }
    }

    /// What it does where its configuration says nothing, and we do something else.
    pub(super) fn defaults(self) -> impl Iterator<Item = (&'static str, &'static str)> {
        // As on a command line.
        let settings = match self {
            // A job there says next to nothing: what `init` writes anyway.
            Self::Unknown => "",
            // A job there says next to nothing: what `init` writes anyway.
            Self::OpenAi => "lora.r=16 lora.lora_alpha=32 train.num_epochs=3 scheduler.warmup_ratio=0.03",
            Self::Swift => {
                r#"lora.r=8 lora.lora_alpha=32 lora.lora_dropout=0.05 train.micro_batch_size=1 train.num_epochs=3.0
                train.precision="bf16" optimizer.learning_rate=1e-4 optimizer.weight_decay=0.1
                optimizer.betas=[0.9,0.95] scheduler.warmup_ratio=0.05"#
            }
            Self::Unsloth => {
                r#"lora.r=16 lora.lora_alpha=16 train.micro_batch_size=8 train.num_epochs=3.0
                optimizer.learning_rate=5e-5 scheduler.lr_scheduler="linear""#
            }
            Self::Python => {
                r#"lora.r=8 lora.lora_alpha=8 lora.target_modules=["q_proj","v_proj"] train.micro_batch_size=8
                train.num_epochs=3.0 optimizer.learning_rate=5e-5 scheduler.lr_scheduler="linear""#
            }
            Self::Peft => r#"lora.lora_alpha=8 lora.target_modules=["q_proj","v_proj"]"#,
            Self::Trl => {
                r#"lora.r=16 lora.lora_alpha=32 lora.lora_dropout=0.05 lora.target_modules=["q_proj","v_proj"]
                train.micro_batch_size=8 train.num_epochs=3.0 train.precision="bf16" optimizer.learning_rate=2e-5
                scheduler.lr_scheduler="linear""#
            }
            Self::Axolotl => {
                r#"lora.target_modules=["q_proj","v_proj"] data.max_length=512 train.micro_batch_size=1
                train.precision="bf16" scheduler.warmup_ratio=0.03"#
            }
            Self::LlamaFactory => {
                r#"lora.r=8 data.max_length=2048 data.image_max_pixels=589824 train.micro_batch_size=8
                train.num_epochs=3.0 optimizer.learning_rate=5e-5 scheduler.lr_scheduler="linear""#
            }
            Self::Torchtune => {
                r#"train.max_grad_norm=0.0 optimizer.weight_decay=0.01 scheduler.lr_scheduler="constant""#
            }
            Self::Litgpt => {
                r#"lora.lora_dropout=0.05 lora.target_modules=["q_proj","v_proj"] data.train_on_inputs=true
                train.micro_batch_size=1 train.gradient_accumulation_steps=16 train.num_epochs=5
                train.max_grad_norm=0.0 optimizer.learning_rate=1e-3 optimizer.weight_decay=0.01
                scheduler.warmup_steps=100"#
            }
            Self::MlxLm => {
                r#"lora.r=8 data.max_length=2048 data.train_on_inputs=true train.micro_batch_size=4
                train.max_steps=1000 train.gradient_checkpointing=false train.max_grad_norm=0.0
                optimizer.learning_rate=1e-5 scheduler.lr_scheduler="constant" eval.eval_steps=200
                eval.max_batches=25 checkpoint.save_steps=100 logging.logging_steps=10"#
            }
        };
        settings.split_whitespace().filter_map(|setting| setting.split_once('='))
    }

    /// What it does by default that no setting here does: keys that say otherwise, and what it is.
    pub(super) fn differences(self) -> &'static [(&'static [&'static str], &'static str)] {
        match self {
            Self::Torchtune => &[(
                &["tokenizer.max_seq_len"],
                "rows keep their whole length there; data.max_length cuts them here, and says how many",
            )],
            Self::Trl | Self::Unsloth | Self::Python => &[(
                &[
                    "assistant_only_loss", "completion_only_loss", "train_on_responses_only", "beta",
                    "num_generations", "reward_funcs",
                ],
                "TRL puts loss on whole conversations; here on the answers, or data.train_on_inputs = true",
            )],
            Self::Axolotl => &[(
                &["excess_length_strategy"],
                "axolotl drops rows longer than sequence_len; here they are cut, and counted",
            )],
            _ => &[],
        }
    }

    /// Whether its steps are transformers' `Trainer`.
    pub(super) fn is_of_transformers(self) -> bool {
        matches!(self, Self::LlamaFactory | Self::Axolotl | Self::Swift) || self.is_of_trl()
    }

    /// Whether its keys are TRL's.
    pub(super) fn is_of_trl(self) -> bool {
        matches!(self, Self::Trl | Self::Unsloth | Self::Python | Self::Unknown)
    }
}

/// Whether an object is one of OpenAI's graders.
fn is_grader(root: &Map<String, Value>) -> bool {
    let kinds = ["string_check", "text_similarity", "python", "score_model", "label_model", "multi"];
    root.get("type").and_then(Value::as_str).is_some_and(|kind| kinds.contains(&kind))
}
