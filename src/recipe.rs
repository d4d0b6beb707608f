//! The recipe: all sections together.

mod args;
mod contradictions;
mod flags;
pub(crate) mod of_run;
mod peers;
mod reference;
mod start_from;

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::config::{
    BestBy, CheckpointConfig, CostConfig, DataConfig, DeviceConfig, EvalConfig, LoggingConfig, LoraConfig,
    ModelOptions, ObjectiveConfig, ObjectiveName, OptimizerConfig, SchedulerConfig, TrainConfig, WatchdogConfig,
};
use crate::data::files::FileKind;
use crate::device::Dtype;
use crate::model::Storage;
use crate::schema::{self, Keys, Override, Places, Problem, Problems, Section, did_you_mean, searched_folder, section};
use crate::spec::ModelConfig;
use crate::util::gguf::is_gguf;

pub use args::RecipeArgs;
pub use flags::{Flag, flag};
pub(crate) use peers::asks_for_nothing;
pub use peers::peers;
pub use reference::{Meant, explained, key_names, look_up, reference};

section! {
    /// Everything that configures a run: one TOML file, every default filled in.
    pub struct Recipe {
        /// Folder that the run writes. Default: runs/ and the name of the recipe.
        /// Relative paths, here and below, start at the directory in which lora-train is started. In every path `~` is the
        /// home folder, and `${VARIABLE}` the environment's.
        output_dir: PathBuf = PathBuf::new() => path() like "runs/reference", None,
            ["output", "out_dir", "output_path", "adapter_path", "save_dir", "checkpoint_dir"];
        /// Seed of everything random: adapters, dropout, order of rows, held-out rows, sampled text.
        // TOML's whole numbers are signed.
        seed: u64 = 0 => count(0..=i64::MAX as u64), OtherRows,
            ["random_seed", "manual_seed", "random_state", "data_seed"];
        /// The frozen base.
        model: ModelOptions = ModelOptions::default() => section() of ModelOptions,
            ["base", "base_model_config", "model_args", "model_config"];
        /// The adapters; names and meaning as in PEFT.
        lora: LoraConfig = LoraConfig::default() => section() of LoraConfig,
            ["peft", "adapter", "adapters", "lora_parameters", "lora_config", "peft_config", "lora_args"];
        /// Rows, and how they become batches. Tokens of files of 16 MiB and more are kept in lora-train/tokens in the user's
        /// cache folder (`XDG_CACHE_HOME`, ~/.cache), where the next run finds them; the environment variable
        /// `LORA_TRAIN_CACHE` names another folder. Of more than 32 GiB those go that were not used for longest.
        data: DataConfig = DataConfig::default() => section() of DataConfig, LaterSteps + steps,
            ["dataset_config", "data_args", "data_config"];
        /// The steps.
        train: TrainConfig = TrainConfig::default() => section() of TrainConfig,
            ["training", "trainer", "training_args", "training_arguments", "train_args"];
        /// What training minimises.
        objective: ObjectiveConfig = ObjectiveConfig::default() => section() of ObjectiveConfig, LaterSteps,
            ["preference", "rlhf", "dpo_config", "loss_config"];
        /// What makes an update of a gradient.
        optimizer: OptimizerConfig = OptimizerConfig::default() => section() of OptimizerConfig, LaterSteps,
            ["optim", "optimizer_args", "optimiser"];
        /// The learning rate over the steps.
        scheduler: SchedulerConfig = SchedulerConfig::default() => section() of SchedulerConfig, LaterSteps,
            ["lr_schedule", "schedule", "scheduler_args"];
        /// What is measured between steps.
        eval: EvalConfig = EvalConfig::default() => section() of EvalConfig, None + steps,
            ["evaluation", "validation", "eval_args"];
        /// What is saved between steps.
        checkpoint: CheckpointConfig = CheckpointConfig::default() => section() of CheckpointConfig, None,
            ["checkpointer", "checkpointing", "checkpoints", "saving"];
        /// Warns at once of what goes wrong, and stops a run that does not recover, with a checkpoint and exit code 1.
        watchdog: WatchdogConfig = WatchdogConfig::default() => section() of WatchdogConfig, None;
        /// What is written down.
        logging: LoggingConfig = LoggingConfig::default() => section() of LoggingConfig, None,
            ["log", "logger", "metric_logger", "report"];
        /// What the machine costs; where a price is given, summary.json has the run's cost and that of a million tokens.
        cost: CostConfig = CostConfig::default() => section() of CostConfig, None;
        /// Where it is computed.
        device: DeviceConfig = DeviceConfig::default() => section() of DeviceConfig, None;
    } with {
        /// Where all that was written.
        #[serde(skip)]
        pub places: Places,
    }
}

/// Why a recipe is read; this decides what it must contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Training, checking or inspecting: there must be training rows.
    Training,
    /// Training that continues from a checkpoint, which has what the recipe started from.
    Resuming,
    /// Measuring on synthetic batches: no rows are needed.
    Benchmark,
}

impl Recipe {
    /// How the frozen weights are held; without `config`, as if they were not quantised already.
    #[must_use]
    pub fn storage(&self, config: Option<&ModelConfig>) -> Storage {
        self.model.storage(self.train.precision.dtype(), config)
    }

    /// The types that its device must compute in: that of activations, and that of the base where it is named.
    pub fn dtypes(&self) -> impl Iterator<Item = Dtype> + use<> {
        let compute = self.train.precision.dtype();
        std::iter::once(compute).chain(self.model.dtype.filter(move |dtype| *dtype != compute))
    }

    /// Whether every token gets masks or noise of its own.
    #[must_use]
    pub fn is_noisy(&self) -> bool {
        self.lora.lora_dropout > 0.0 || self.train.neftune_noise_alpha.is_some()
    }

    /// Reads a recipe file, with the changes of the command line.
    ///
    /// # Errors
    /// A file that cannot be read, or all mistakes in it, sorted by place.
    pub fn load(path: &Path, overrides: &[Override], purpose: Purpose) -> Result<Self, Problems> {
        let text = read_text(path)?;
        Self::parse(path, &text, overrides, purpose)
    }

    /// Reads a recipe from its text. `path` is its name in messages, and gives `output_dir` its default.
    ///
    /// # Errors
    /// All mistakes in it, sorted by place.
    pub fn parse(path: &Path, text: &str, overrides: &[Override], purpose: Purpose) -> Result<Self, Problems> {
        match Self::read(path, text, overrides, purpose) {
            (Some(recipe), problems) if problems.0.is_empty() => Ok(recipe),
            (_, problems) => Err(problems),
        }
    }

    fn read(path: &Path, text: &str, overrides: &[Override], purpose: Purpose) -> (Option<Self>, Problems) {
        let path = if is_stdin(path) { Path::new("stdin") } else { path };
        let read = |root: &mut Section| {
            let default = Self { output_dir: default_output_dir(path).into(), ..Self::default() };
            let mut recipe = <Self as Keys>::read(root, default);
            let resumed = (purpose == Purpose::Resuming).then_some(&*recipe.output_dir);
            start_from::take_over(&mut recipe.lora, &recipe.model, &recipe.objective, root, resumed);
            recipe.data.row_kind = recipe.objective.rows();
            if let Some(rate) = recipe.objective.learning_rate().filter(|_| !root.has("optimizer.learning_rate")) {
                recipe.optimizer.learning_rate = rate;
            }
            // The default by another name: nothing is used again.
            let is_default = |size: &usize| *size == recipe.train.gradient_accumulation_steps;
            recipe.objective.steps_per_generation =
                recipe.objective.steps_per_generation.filter(|size| !is_default(size));
            recipe.hold_together(root, purpose);
            recipe
        };
        let (read, problems) = schema::read(&path.display().to_string(), text, overrides, Self::ROWS, &peers(), read);
        (read.map(|(recipe, places)| Self { places, ..recipe }), problems)
    }

    /// What makes an evaluation better than another.
    #[must_use]
    pub fn best_by(&self) -> BestBy {
        let by = if self.objective.name == ObjectiveName::Grpo { BestBy::Reward } else { BestBy::Loss };
        self.eval.metric_for_best.unwrap_or(by)
    }

    /// The recipe as TOML, with every default filled in: `resolved.toml`. Reading it gives an equal recipe.
    ///
    /// # Panics
    /// Never: TOML can express everything in a recipe.
    #[must_use]
    #[expect(clippy::expect_used, reason = "every field is text, a number, a list or a table: TOML holds them all")]
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a recipe is TOML")
    }
}

/// Longest recipe. A file of weights or data given by mistake is refused before it is read.
const MAX_RECIPE_BYTES: u64 = 1 << 20;

/// The default of `output_dir`: `runs/` and the recipe's name.
fn default_output_dir(path: &Path) -> String {
    let stem = path.file_stem().map_or_else(|| "run".to_owned(), |stem| stem.to_string_lossy().into_owned());
    format!("runs/{stem}")
}

/// What a file is by its ending, where that is no recipe's, and what to do with it.
fn other_kind(path: &Path) -> Option<(&'static str, &'static str)> {
    if is_gguf(path) {
        return Some(("a GGUF file", "`model.path` of a recipe may name it; `lora-train inspect` shows what it is"));
    }
    if path.extension().is_some_and(|end| end == "safetensors") {
        return Some((
            "a file of weights",
            "`model.path` of a recipe names the folder with config.json; `lora-train inspect FOLDER` shows what that is",
        ));
    }
    FileKind::of(path)
        .filter(|kind| *kind != FileKind::Txt)
        .map(|_| ("a file of rows", "`lora-train init --model MODEL --data FILE` writes a recipe that trains on it"))
}

/// Whether a recipe is read from standard input.
pub(crate) fn is_stdin(path: &Path) -> bool {
    path == Path::new("-")
}

fn read_text(path: &Path) -> Result<String, Problem> {
    let problem = |message: String| Problem::new(message).at(path.display());
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => {
            let missing = problem(format!("there is no such file in {}", searched_folder(path).display()));
            did_you_mean(path).into_iter().fold(missing, Problem::hint)
        }
        io::ErrorKind::IsADirectory => {
            let folder = problem("this is a folder, expected a recipe file".to_owned());
            let is_model = path.join("config.json").is_file();
            let hint = || format!("`lora-train init --model {} --data FILE` writes one for this model", path.display());
            if is_model { folder.hint(hint()) } else { folder }
        }
        _ => problem(format!("cannot read the recipe: {error}")),
    };
    if let Some((kind, hint)) = other_kind(path).filter(|_| path.is_file()) {
        return Err(problem(format!("{kind}, expected a recipe file")).hint(hint));
    }
    let mut bytes = Vec::new();
    let mut read = |from: &mut dyn Read| from.take(MAX_RECIPE_BYTES + 1).read_to_end(&mut bytes);
    let all = if is_stdin(path) {
        read(&mut io::stdin().lock())
    } else {
        fs::File::open(path).and_then(|mut file| read(&mut file))
    };
    all.map_err(failed)?;
    if bytes.len() as u64 > MAX_RECIPE_BYTES {
        return Err(problem(format!("longer than {MAX_RECIPE_BYTES} bytes, expected a recipe file")));
    }
    String::from_utf8(bytes).map_err(|error| {
        let offset = error.utf8_error().valid_up_to();
        problem(format!("not UTF-8 text at byte {offset}, expected a TOML file")).hint("save it as UTF-8")
    })
}

#[cfg(test)]
mod tests;
