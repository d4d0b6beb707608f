//! The keys that are searched.

use crate::device::Dtype;
use crate::ops::cross_entropy::LossChunk;
use crate::train::config::GradientCheckpointing;

/// The settings that are searched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Settings {
    pub(super) micro_batch_size: usize,
    pub(super) gradient_accumulation_steps: usize,
    pub(super) gradient_checkpointing: GradientCheckpointing,
    /// As [`TrainConfig::loss_chunk_tokens`](crate::train::config::TrainConfig::loss_chunk_tokens).
    pub(super) loss_chunk_tokens: Option<usize>,
    pub(super) num_workers: usize,
    pub(super) prefetch_batches: usize,
    pub(super) packing: bool,
    pub(super) precision: Dtype,
    pub(super) storage: Option<Dtype>,
}

impl Settings {
    /// What is to be set to come from `base` to these, as `--set` takes it.
    pub(super) fn changes_from(&self, base: &Self) -> Vec<String> {
        let mut changes = Vec::new();
        let mut set = |is_new: bool, key: &str, value: String| {
            if is_new {
                changes.push(format!("{key}={value}"));
            }
        };
        let checkpointing = serde_json::to_string(&self.gradient_checkpointing).unwrap_or_default();
        set(
            self.gradient_checkpointing != base.gradient_checkpointing,
            "train.gradient_checkpointing",
            checkpointing.trim_matches('"').to_owned(),
        );
        let rows = self.micro_batch_size;
        set(rows != base.micro_batch_size, "train.micro_batch_size", rows.to_string());
        let steps = self.gradient_accumulation_steps;
        set(steps != base.gradient_accumulation_steps, "train.gradient_accumulation_steps", steps.to_string());
        if let Some(tokens) = self.loss_chunk_tokens {
            let is_new = self.loss_chunk_tokens != base.loss_chunk_tokens;
            set(is_new, "train.loss_chunk_tokens", tokens.to_string());
        }
        set(self.num_workers != base.num_workers, "data.num_workers", self.num_workers.to_string());
        let batches = self.prefetch_batches;
        set(batches != base.prefetch_batches, "data.prefetch_batches", batches.to_string());
        set(self.packing != base.packing, "data.packing", self.packing.to_string());
        set(self.precision != base.precision, "train.precision", self.precision.to_string());
        if let Some(storage) = self.storage {
            set(self.storage != base.storage, "model.dtype", storage.to_string());
        }
        changes
    }

    /// How many target tokens' logits exist at a time.
    pub(super) fn loss_chunk(&self) -> LossChunk {
        self.loss_chunk_tokens.map_or(LossChunk::Auto, LossChunk::Tokens)
    }

    /// Rows of an update.
    pub(super) fn rows_of_step(&self) -> usize {
        self.micro_batch_size * self.gradient_accumulation_steps
    }

    /// Whether a run with these trains on the same rows, as many of them in an update, in the same arithmetic.
    pub(super) fn keeps_numbers_of(&self, base: &Self) -> bool {
        let numbers =
            |settings: &Self| (settings.rows_of_step(), settings.packing, settings.precision, settings.storage);
        numbers(self) == numbers(base)
    }
}
