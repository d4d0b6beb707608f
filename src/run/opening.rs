//! What a run says before its first step: the values that follow from recipe, model and data.

use crate::data::pipeline::DataPipeline;
use crate::device::OpenDevice;
use crate::lora::targets::Selection;
use crate::metrics::Sinks;
use crate::recipe::Recipe;
use crate::spec::ModelConfig;
use crate::text::with_commas;
use crate::train::config::GradientCheckpointing;
use crate::train::schedule::{Schedule, steps_per_epoch};

/// Values that follow from recipe, model and data.
#[derive(Debug)]
pub(super) struct Opening<'a> {
    /// The recipe.
    pub(super) recipe: &'a Recipe,
    /// The model's shape.
    pub(super) config: &'a ModelConfig,
    /// The adapted layers.
    pub(super) selection: &'a Selection,
    /// Parameters that are trained.
    pub(super) num_trainable: usize,
    /// The rows.
    pub(super) data: &'a DataPipeline,
    /// Where it is computed.
    pub(super) device: &'a OpenDevice,
    /// Steps and learning rates.
    pub(super) schedule: Schedule,
}

impl Opening<'_> {
    /// Parameters of base and adapters.
    #[must_use]
    pub(super) fn num_parameters(&self) -> usize {
        self.config.num_parameters() + self.num_trainable
    }

    /// Says it, line by line; what is odd as a warning.
    pub(super) fn tell(&self, sinks: &mut Sinks) {
        for line in [self.device(), self.model(), self.parameters(), self.targets()] {
            sinks.note(&line);
        }
        for line in self.files() {
            sinks.note(&line);
        }
        for line in [self.batch(), self.steps()] {
            sinks.note(&line);
        }
        for warning in self.data.warnings() {
            sinks.warn(&warning);
        }
        if self.recipe.train.gradient_checkpointing == GradientCheckpointing::Offload && !self.device.is_gpu() {
            sinks.warn(
                "`train.gradient_checkpointing` = \"offload\" saves nothing here: on the CPU block inputs are in host \
                 memory anyway, and are copied once more\n  hint: set it to true",
            );
        }
        let (longest, positions) = (self.recipe.data.max_length, self.config.max_position_embeddings);
        if longest > positions {
            sinks.warn(&format!(
                "`data.max_length` = {longest} is longer than the {positions} positions that the model was made for\n  \
                 hint: set it to {positions} or less"
            ));
        }
    }

    fn device(&self) -> String {
        let precision = self.recipe.train.precision;
        let storage = self.recipe.model.dtype.unwrap_or(precision);
        let OpenDevice { label, reason, .. } = self.device;
        format!("device: {label} ({reason}); computes in {}, base stored in {}", precision.name(), storage.name())
    }

    fn model(&self) -> String {
        let ModelConfig { model_type, num_hidden_layers, hidden_size, .. } = self.config;
        let path = &self.recipe.model.path;
        format!("model: {path} ({model_type}, {num_hidden_layers} layers of width {hidden_size})")
    }

    fn parameters(&self) -> String {
        let (trainable, all) = (self.num_trainable, self.num_parameters());
        #[allow(clippy::cast_precision_loss, reason = "shown with four digits")]
        let percent = 100.0 * trainable as f64 / all as f64;
        format!(
            "trainable params: {} || all params: {} || trainable%: {percent:.4}",
            with_commas(trainable),
            with_commas(all)
        )
    }

    fn targets(&self) -> String {
        let hits = self.selection.hits.iter().map(|hits| format!("{} x {}", hits.num_hits, hits.target));
        format!("adapted layers: {}", hits.collect::<Vec<_>>().join(", "))
    }

    fn files(&self) -> Vec<String> {
        let line = |file: &crate::data::sources::FileInfo| {
            let role = if file.is_eval { "evaluation" } else { "training" };
            let mut line = format!(
                "{role} data: {} ({} rows, {})",
                file.path.display(),
                with_commas(file.num_rows),
                file.format.name()
            );
            line.push_str(self.data.form_of(file));
            if !file.unused_columns.is_empty() {
                line.push_str(&format!("; columns not read: {}", file.unused_columns.join(", ")));
            }
            if let Some(kept) = file.kept_tokens {
                line.push_str(&format!("; {kept}"));
            }
            line
        };
        let mut lines: Vec<String> = self.data.files().iter().map(line).collect();
        if self.recipe.data.eval_split.is_some() {
            let (held_out, left) = (self.data.num_eval_rows(), self.data.num_train_rows());
            lines.push(format!("evaluation data: {held_out} rows held out, {left} rows left to train on"));
        }
        lines
    }

    fn batch(&self) -> String {
        let train = &self.recipe.train;
        let (rows, steps) = (train.micro_batch_size, train.gradient_accumulation_steps);
        let tokens = rows * steps * self.recipe.data.max_length;
        format!(
            "effective batch: {} sequences ({rows} x {steps}), at most {} tokens",
            rows * steps,
            with_commas(tokens)
        )
    }

    fn steps(&self) -> String {
        let train = &self.recipe.train;
        let batches = usize::try_from(self.data.batches_per_epoch(train.micro_batch_size)).unwrap_or(usize::MAX);
        let per_epoch = steps_per_epoch(batches, train.gradient_accumulation_steps);
        let (total, warmup) = (self.schedule.total_steps(), self.schedule.warmup_steps());
        #[allow(clippy::cast_precision_loss, reason = "shown with two decimals")]
        let epochs = total as f64 / per_epoch.max(1) as f64;
        let warmup = match warmup {
            0 => "no warm-up".to_owned(),
            warmup => format!("warm-up in the first {warmup}"),
        };
        format!("{total} steps: {epochs:.2} epochs of {per_epoch} steps; {warmup}")
    }
}
