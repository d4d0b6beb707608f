//! Decides when checkpoints are saved, and which are kept.

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Map, Value, json};

use super::state::TrainerState;
use super::step::TrainStep;
use crate::config::{CheckpointConfig, LoraConfig};
use crate::measure::figures::evaluation::{EvalFigure, Group};
use crate::measure::metrics::Evaluations;
use crate::save::checkpoint::{CheckpointError, Checkpoints, HostTensor};
use crate::save::export::{
    AdapterWeights, ExportError, PromptForm, SHIPPED_FILE, Shipped, adapter_weights, write_adapter, write_tokenizer,
};
use crate::util::files;

/// What is written beside an adapter's weights.
pub struct AdapterFiles {
    /// The settings for `adapter_config.json`.
    pub lora: LoraConfig,
    /// The model that the adapter belongs to, for `adapter_config.json`.
    pub base_model_name_or_path: String,
    /// The form in which rows are passed to the model.
    pub prompt_form: PromptForm,
    /// The folder with the tokenizer's files; absent where they are in a GGUF file.
    pub tokenizer: Option<PathBuf>,
}

impl AdapterFiles {
    /// Writes an adapter, and what it was `shipped` as, if it was.
    ///
    /// # Errors
    /// Files that cannot be written.
    pub fn write(&self, folder: &Path, weights: &AdapterWeights, shipped: Option<&Shipped>) -> Result<(), ExportError> {
        write_adapter(folder, weights, &self.lora, &self.base_model_name_or_path)?;
        let left = folder.join(SHIPPED_FILE);
        match shipped {
            Some(shipped) => shipped.write(folder)?,
            None if left.exists() => std::fs::remove_file(&left).map_err(ExportError::io("delete", &left))?,
            None => {}
        }
        self.prompt_form.write(folder)
    }

    /// Puts the tokenizer beside an adapter that other programs are to use; checkpoints are smaller without.
    ///
    /// # Errors
    /// Files that cannot be read or written.
    pub fn write_tokenizer(&self, folder: &Path) -> Result<(), ExportError> {
        self.tokenizer.iter().try_for_each(|from| write_tokenizer(from, folder, &self.prompt_form))
    }
}

/// Name of the folder in `output_dir` with the adapter of the best evaluation.
pub const BEST_ADAPTER: &str = "adapter-best";
const BEST_FILE: &str = "best.json";

/// The step of the evaluation that an adapter is the best by, of its `best.json`; `None` where there is none.
#[must_use]
pub fn best_step(folder: &Path) -> Option<u64> {
    let best: Value = serde_json::from_slice(&std::fs::read(folder.join(BEST_FILE)).ok()?).ok()?;
    best["step"].as_u64()
}

/// Saves checkpoints.
pub struct Saver {
    config: CheckpointConfig,
    checkpoints: Checkpoints,
    adapter_files: AdapterFiles,
    /// The whole recipe as TOML, every default filled in.
    recipe: String,
    /// Whether this rank writes: the first does.
    pub(super) writes: bool,
    /// Whether the current state is on disk as a checkpoint.
    pub(super) is_saved: bool,
    /// When the last checkpoint was saved or failed to be saved; at first, when training started.
    last_save: Instant,
    /// The newest checkpoint that was saved while the watchdog found nothing wrong.
    sound: Option<PathBuf>,
}

impl Saver {
    /// A saver before the first step of a run.
    #[must_use]
    pub fn new(
        config: CheckpointConfig,
        checkpoints: Checkpoints,
        adapter_files: AdapterFiles,
        recipe: String,
    ) -> Self {
        let last_save = Instant::now();
        Self { config, checkpoints, adapter_files, recipe, writes: true, is_saved: false, last_save, sound: None }
    }

    /// Continues from a checkpoint; `sound` is the newest one that was saved while the watchdog found nothing wrong.
    #[must_use]
    pub fn resumed(self, sound: Option<PathBuf>) -> Self {
        Self { is_saved: true, sound, ..self }
    }

    /// The same on a rank that leaves the files to the first.
    #[must_use]
    pub fn silent(self) -> Self {
        Self { writes: false, ..self }
    }

    /// Takes the state as saved, by the first rank.
    pub(super) fn leave_to_first(&mut self) -> PathBuf {
        (self.is_saved, self.last_save) = (true, Instant::now());
        PathBuf::new()
    }

    /// What is written beside an adapter's weights.
    #[must_use]
    pub fn adapter_files(&self) -> &AdapterFiles {
        &self.adapter_files
    }

    /// Starts the count of `save_minutes`.
    pub(super) fn start(&mut self) {
        self.last_save = Instant::now();
    }

    /// Whether the recipe wants checkpoints at all.
    pub(super) fn saves(&self) -> bool {
        self.config.save_steps.is_some() || self.config.save_seconds().is_some()
    }

    /// Whether a checkpoint is due: every `save_steps`, or `save_minutes` after the last one.
    pub(super) fn is_due(&self, step: u64) -> bool {
        let every = self.config.save_steps.is_some_and(|every| step.is_multiple_of(every));
        let is_late = self.config.save_seconds().is_some_and(|wait| self.last_save.elapsed().as_secs_f64() >= wait);
        (every || is_late) && step > 0 && !self.is_saved
    }

    pub(super) fn save(
        &mut self,
        step: &TrainStep,
        moments: &[HostTensor],
        state: &TrainerState,
    ) -> Result<PathBuf, CheckpointError> {
        let weights = adapter_weights(step.adapters());
        let write = |folder: &Path| self.adapter_files.write(folder, &weights, step.shipped());
        self.last_save = Instant::now();
        let path = self.checkpoints.save(state.step, write, moments, state, &self.recipe)?;
        if state.trouble.is_none() {
            self.sound = Some(path.clone());
        }
        self.is_saved = true;
        Ok(path)
    }

    /// Deletes the oldest checkpoints, but keeps `newest` and the newest one that was saved while the watchdog found
    /// nothing wrong: a run that goes wrong can be resumed from it.
    pub(super) fn rotate(&self, newest: &Path) -> Result<(), CheckpointError> {
        if !self.writes {
            return Ok(());
        }
        let keep = [Some(newest), self.sound.as_deref()];
        self.checkpoints.rotate(&keep.into_iter().flatten().collect::<Vec<_>>())
    }

    /// Writes the best adapter so far, and the evaluation that it is the best by.
    pub(super) fn keep_best(&self, step: &TrainStep, evaluations: &Evaluations) -> Result<(), ExportError> {
        if !self.writes {
            return Ok(());
        }
        let folder = self.checkpoints.folder().with_file_name(BEST_ADAPTER);
        self.adapter_files.write(&folder, &adapter_weights(step.adapters()), step.shipped())?;
        let path = folder.join(BEST_FILE);
        let mut best = Map::from_iter([("step".to_owned(), json!(evaluations.best_step))]);
        let figures = EvalFigure::headlines(&[Group::Loss, Group::Score, Group::Answers]);
        best.extend(evaluations.best.by_name(figures));
        files::write(&path, format!("{}\n", Value::Object(best))).map_err(ExportError::io("write", &path))?;
        self.adapter_files.write_tokenizer(&folder)
    }

    pub(super) fn newest_good(&self) -> Option<PathBuf> {
        self.checkpoints.newest_good().ok().and_then(|found| found.checkpoint)
    }

    /// When the next checkpoint after `step` is due, as a hint; empty if no checkpoint is due.
    pub(super) fn next_save(&self, step: u64, total_steps: u64) -> String {
        let next = self.config.save_steps.map(|every| (step / every + 1) * every);
        let next = next.filter(|next| *next <= total_steps).map(|next| format!("after step {next}"));
        let later = self.config.save_seconds().map(|wait| format!("in {} minutes", wait / 60.0));
        let times: Vec<String> = next.into_iter().chain(later).collect();
        if times.is_empty() { String::new() } else { format!("\n  hint: it is tried again {}", times.join(" or ")) }
    }
}
