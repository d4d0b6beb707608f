//! The inputs of a run: model files, tokenizer, rows. Mistakes in them end the command with exit code 2.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::data::config::DataConfig;
use crate::data::dataset::{Dataset, OpenOptions};
use crate::data::error::DataError;
use crate::data::tokenizer::Tokenizer;
use crate::device::{Dtype, OpenDevice};
use crate::failure::Failure;
use crate::hub::{self, HubSettings, Progress, Wanted};
use crate::lora::AdapterSet;
use crate::lora::config::LoraConfig;
use crate::lora::targets::Selection;
use crate::model::Model;
use crate::model::weights::{RandomWeights, WeightFiles, Weights};
use crate::model::{Init, ModelOptions, load};
use crate::recipe::Recipe;
use crate::schema::{Problem, Problems};
use crate::spec::ModelConfig;
use crate::telemetry::NvmlSelector;
use crate::train::memory::Workload;

/// A model on disk: its config is read, its weights are mapped but not read.
#[derive(Debug)]
pub struct ModelSource {
    /// Its folder.
    pub folder: PathBuf,
    /// Its shape.
    pub config: ModelConfig,
    /// Its weights.
    pub weights: Weights,
}

impl ModelSource {
    /// Finds a model: a folder, a repository of the Hub, or, for random weights, a config.json alone. A download shows
    /// its progress unless `quiet`.
    ///
    /// # Errors
    ///
    /// A model that is missing or not supported, or weights that do not match its config.
    pub fn open(options: &ModelOptions, seed: u64, quiet: bool) -> Result<Self, Failure> {
        let (folder, config) = match config_alone(options) {
            Some(alone) => alone,
            None => {
                let wanted = match options.init {
                    Init::Pretrained => Wanted::Model,
                    Init::Random => Wanted::WithoutWeights,
                };
                let (revision, progress) = (options.revision.as_deref(), Progress::detect(quiet));
                let folder = hub::resolve(&options.path, revision, wanted, &HubSettings::from_env(), progress)?;
                (folder.clone(), folder.join("config.json"))
            }
        };
        let config = ModelConfig::from_file(&config).map_err(Failure::input)?;
        let weights = match options.init {
            Init::Random => Weights::Random(RandomWeights::new(&config, seed)),
            Init::Pretrained => Weights::Files(WeightFiles::open(&folder).map_err(Failure::input)?),
        };
        weights.check(&config).map_err(Failure::input)?;
        Ok(Self { folder, config, weights })
    }

    /// Reads the weights onto a device, stored as `dtype` or, if absent, as `precision`: the type of the computation.
    ///
    /// # Errors
    ///
    /// A type that the device does not support, or weights that do not fit the type.
    pub fn load(&self, dtype: Option<Dtype>, precision: Dtype, device: &OpenDevice) -> Result<Model, Failure> {
        let storage = dtype.unwrap_or(precision);
        for dtype in [storage, precision] {
            device.require_dtype(dtype).map_err(Failure::input)?;
        }
        load::load(&self.config, &self.weights, storage, precision, &device.device).map_err(Failure::input)
    }

    /// The tokenizer in the model's folder.
    ///
    /// # Errors
    ///
    /// Files that cannot be read or understood; a tokenizer that belongs to another model.
    pub fn tokenizer(&self) -> Result<Tokenizer, Failure> {
        let tokenizer = Tokenizer::open(&self.folder).map_err(Failure::input)?;
        match vocabulary_problem(&self.folder, &tokenizer, &self.config) {
            Some(problem) => Err(problem.into()),
            None => Ok(tokenizer),
        }
    }

    /// The tokenizer and the rows.
    ///
    /// # Errors
    ///
    /// Files that cannot be read or understood; a tokenizer that belongs to another model; a stop request while rows
    /// are tokenised.
    pub fn open_data(&self, data: &DataConfig, seed: u64, options: &OpenOptions<'_>) -> Result<Dataset, Failure> {
        let tokenizer = self.tokenizer().map_err(|failure| failure.about("model.path"))?;
        Dataset::open(data, Arc::new(tokenizer), seed, options).map_err(|error| match error {
            DataError::Interrupted => Failure::Interrupted,
            error => data_failure(error),
        })
    }

    /// The linear layers that a `[lora]` section selects.
    ///
    /// # Errors
    ///
    /// Targets and layers that the model does not have.
    pub fn select(&self, lora: &LoraConfig) -> Result<Selection, Failure> {
        lora.select(self.config.num_hidden_layers).map_err(|errors| {
            Failure::Input(Problems(errors.iter().map(|error| Problem::new(error.to_string())).collect()))
        })
    }

    /// New adapters, which leave the model's output unchanged.
    #[must_use]
    pub fn new_adapters(&self, selection: &Selection, lora: &LoraConfig, seed: u64, device: &OpenDevice) -> AdapterSet {
        let init = lora.init_lora_weights;
        AdapterSet::new(&self.config, selection, init, lora.lora_dropout, seed, &device.device)
    }
}

/// Folder and config.json of a model with random weights whose path names only a config.json.
#[must_use]
pub fn config_alone(options: &ModelOptions) -> Option<(PathBuf, PathBuf)> {
    let path = Path::new(&options.path);
    let folder = || path.parent().unwrap_or(Path::new("")).to_owned();
    (options.init == Init::Random && path.is_file()).then(|| (folder(), path.to_owned()))
}

/// The error for a tokenizer that has more ids than the model has embeddings.
#[must_use]
pub fn vocabulary_problem(folder: &Path, tokenizer: &Tokenizer, config: &ModelConfig) -> Option<Problem> {
    let (max_id, vocab_size) = (tokenizer.max_id() as usize, config.vocab_size);
    (max_id >= vocab_size).then(|| {
        let folder = folder.display();
        Problem::new(format!(
            "{folder}: the tokenizer has ids up to {max_id}, and the model has embeddings for {vocab_size}"
        ))
        .hint("tokenizer.json and config.json are of different models")
    })
}

/// Failure of a command that cannot read its rows. A failed worker is not counted as a mistake in the inputs.
#[must_use]
pub fn data_failure(error: DataError) -> Failure {
    if error.is_mistake() { Failure::input(error) } else { Failure::running(error) }
}

/// The quantities that determine the memory of a recipe's steps.
#[must_use]
pub fn workload<'a>(recipe: &Recipe, config: &'a ModelConfig, selection: &'a Selection, on_cpu: bool) -> Workload<'a> {
    let precision = recipe.train.precision;
    Workload {
        config,
        selection,
        storage: recipe.model.dtype.unwrap_or(precision),
        precision,
        rows: recipe.train.micro_batch_size,
        row_length: recipe.data.max_length,
        gradient_checkpointing: recipe.train.gradient_checkpointing,
        gradient_accumulation_steps: recipe.train.gradient_accumulation_steps,
        loss_chunk: recipe.train.loss_chunk(),
        prefetch_batches: recipe.data.prefetch_batches,
        on_cpu,
    }
}

/// How NVML finds the GPU that trains.
#[must_use]
pub fn nvml_selector(device: &OpenDevice) -> Option<NvmlSelector> {
    device.cuda.as_ref().map(|gpu| NvmlSelector::Uuid(gpu.uuid.clone()))
}
