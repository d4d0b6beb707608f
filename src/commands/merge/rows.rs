//! The rows of the run whose adapter is merged: what a quantised file loses is weighed and measured on them.

use std::path::Path;

use crate::commands::named::{Named, recipe_of};
use crate::config::{EvalConfig, ModelOptions, Residency, RowKind};
use crate::data::cache::CacheSettings;
use crate::data::dataset::{Dataset, OpenOptions};
use crate::hub::Progress;
use crate::lora::AdapterSet;
use crate::recipe::of_run::moved_paths;
use crate::recipe::{Purpose, Recipe};
use crate::run::images::with_images;
use crate::run::inputs::{WeightsFrom, data_failure};
use crate::run::{Prepared, trainer_failure};
use crate::save::export::{Imatrix, read_adapter};
use crate::schema::Override;
use crate::train::eval::eval_loss;
use crate::train::importance::{NUM_TOKENS, imatrix};
use crate::train::step::TrainStep;
use crate::train::stop::Stop;
use crate::util::failure::Failure;
use crate::util::terminal;
use crate::util::text::counted;

/// A run: its rows, and the model that it trained.
pub(super) struct RunRows {
    prepared: Prepared,
    data: Dataset,
    trained: TrainStep,
    stop: Stop,
}

impl RunRows {
    /// Reads rows and model; `None` where the adapter belongs to no run, or to one that trained on no texts.
    ///
    /// # Errors
    /// Files that are no longer where the run had them.
    pub(super) fn open(named: &Named) -> Result<Option<Self>, Failure> {
        let Some(adapter) = named.adapters.first() else { return Ok(None) };
        let Some(path) = recipe_of(&adapter.folder) else { return Ok(None) };
        let text = std::fs::read_to_string(&path).map_err(|error| Failure::input(error.to_string()))?;
        // The adapter is read; what it started from may be gone, and so may the device.
        let start = text.contains("\nstart_from = ").then(|| Override::set("lora.start_from="));
        let mut changes = moved_paths(&adapter.folder, &text);
        changes.extend(start.into_iter().chain([Override::set("device.name=auto")]));
        let mut recipe = Recipe::parse(&path, &text, &changes, Purpose::Benchmark)?;
        if recipe.objective.rows() == RowKind::Prompt {
            return Ok(None);
        }
        let (path, revision) = (named.base.path.clone(), named.base.revision.clone());
        recipe.model = ModelOptions { path, revision, ..recipe.model };
        let stop = Stop::on_signals().map_err(Failure::running)?;
        let mut prepared = prepared(recipe)?;
        let saved = read_adapter(&adapter.folder)?;
        prepared.source.grow(&saved, &adapter.folder);
        let Prepared { recipe, source, device, .. } = &prepared;
        let is_stopped = || stop.requested();
        let options = OpenOptions {
            cache: CacheSettings::from_env(),
            progress: Progress::detect(false),
            is_stopped: &is_stopped,
            ..OpenOptions::default()
        };
        let data = source.open_data(&recipe.data, recipe.seed, &options)?;
        let adapters = saved.into_set(&adapter.folder, &source.config, &device.device).map_err(Failure::input)?;
        let model = with_images(prepared.load_model()?, (&source.folder, &source.weights), data.images(), &options)?;
        let trained = prepared.step_of(model, adapters);
        Ok(Some(Self { prepared, data, trained, stop }))
    }

    /// What the inputs of the layers weigh on rows that were trained on.
    ///
    /// # Errors
    /// A row that cannot be read; a stop.
    pub(super) fn imatrix(&self) -> Result<Imatrix, Failure> {
        let bar = terminal::bar(NUM_TOKENS as u64).with_message("weighing inputs");
        let (is_stopped, on_tokens) = (|| self.stop.requested(), |tokens| bar.set_position(tokens as u64));
        let imatrix = imatrix(&self.trained, &self.data, &is_stopped, &on_tokens).map_err(data_failure)?;
        bar.finish_and_clear();
        imatrix.ok_or(Failure::Interrupted)
    }

    /// The losses of the model as it was trained and of the file that it was written to, on the run's evaluation rows, for
    /// people; `None` without such rows, and where answers are compared or scored.
    ///
    /// # Errors
    /// A row that cannot be read; a stop.
    pub(super) fn losses(self, file: &Path) -> Result<Option<String>, Failure> {
        let Self { prepared: Prepared { recipe, .. }, data, trained, stop } = self;
        if data.num_eval_rows() == 0 || recipe.objective.rows() != RowKind::Sequence {
            return Ok(None);
        }
        let size = recipe.train.micro_batch_size;
        let all = data.num_eval_batches(size, recipe.eval.max_batches);
        let most = (NUM_TOKENS / (size * recipe.data.max_length)).max(4).min(all);
        let eval = EvalConfig { max_batches: Some(most), ..recipe.eval.clone() };
        let loss = |step: &TrainStep| {
            let bar = terminal::bar(most as u64).with_message("measuring the loss");
            let on_progress = |done: usize, _| bar.set_position(done as u64);
            let total = eval_loss(step, &data, None, &eval, &stop, on_progress);
            bar.finish_and_clear();
            total.map_err(|error| trainer_failure(error.into()))?.ok_or(Failure::Interrupted)
        };
        let before = loss(&trained)?;
        drop(trained);
        let path = file.display().to_string();
        let model = ModelOptions { path, residency: recipe.model.residency, ..ModelOptions::default() };
        let written = prepared(Recipe { model, ..recipe.clone() })?;
        let none = AdapterSet::none(written.source.config.num_layers());
        let after = loss(&written.step_of(written.load_model()?, none))?;
        let rows = counted((most * size).min(data.num_eval_rows()), "evaluation row");
        let text = |(before, after)| format!("loss on {rows}: {after:.4}, before it was rounded {before:.4}");
        Ok(before.mean().zip(after.mean()).map(text))
    }
}

/// Of a CPU, weights that stay on disk take no memory.
fn prepared(recipe: Recipe) -> Result<Prepared, Failure> {
    let mut prepared = Prepared::new(recipe, None, WeightsFrom::Hub, true)?;
    if !prepared.device.is_gpu() {
        prepared.recipe.model.residency = Residency::Mapped;
    }
    Ok(prepared)
}
