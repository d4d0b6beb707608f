//! The inputs of a run: model files, tokenizer, rows. Mistakes in them end the command with exit code 2.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::images::images_of_rows;
use crate::config::{DataConfig, Init, LoraConfig, ModelOptions, Precision, Residency};
use crate::data::batch::padded_length;
use crate::data::dataset::{Dataset, OpenOptions};
use crate::data::error::DataError;
use crate::data::progress::{Meter, Work};
use crate::data::tokenizer::{Tokenizer, TokenizerError};
use crate::device::OpenDevice;
use crate::hub::{self, HubError, HubSettings, Location, Progress, Wanted};
use crate::lora::targets::Selection;
use crate::measure::telemetry::NvmlSelector;
use crate::model::weights::{RandomWeights, WeightFiles, Weights};
use crate::model::{Model, Storage, load};
use crate::ops::kernels::Place;
use crate::ops::product::F32Products;
use crate::recipe::Recipe;
use crate::save::export::{SavedAdapter, check_written, grow};
use crate::schema::{Problem, Problems};
use crate::spec::ModelConfig;
use crate::train::budget::images::ImageMemory;
use crate::train::budget::workload::Workload;
use crate::util::failure::Failure;
use crate::util::gguf::is_gguf;

/// Where the weights of a model may come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightsFrom {
    /// The model's files, downloaded where they are missing.
    Hub,
    /// The model's files where they are on this machine already; nothing large is downloaded.
    Disk,
    /// Nowhere: only shapes are needed, so random numbers take their place.
    Nowhere,
}

/// What could be read of a model. A part with a mistake is absent.
#[derive(Debug, Default)]
pub(crate) struct ModelParts {
    pub(crate) folder: Option<PathBuf>,
    /// Where its tokenizer is, if not there: beside an adapter that has more tokens.
    pub(crate) tokenizer_folder: Option<PathBuf>,
    pub(crate) config: Option<ModelConfig>,
    /// Its weights; also absent where they are not downloaded.
    pub(crate) weights: Option<Weights>,
    /// Whether the weights that training needs are on this machine.
    pub(crate) is_downloaded: bool,
    /// Whether no progress is shown.
    quiet: bool,
}

impl ModelParts {
    /// Finds a model: a folder, a repository of the Hub, or, for random weights, a config.json alone. A download shows
    /// its progress unless `quiet`. Returns the parts and every mistake in them.
    pub(crate) fn read(options: &ModelOptions, seed: u64, from: WeightsFrom, quiet: bool) -> (Self, Option<Failure>) {
        let FoundModel { folder, config, is_downloaded } = match find_model(options, from, quiet) {
            Ok(found) => found,
            Err(error) => return (Self::default(), Some(error.into())),
        };
        let mut problems = Problems::default();
        let config = ModelConfig::from_file(&config).map_err(|error| problems.0.extend(Problem::list(&error))).ok();
        let weights = if options.init == Init::Random || from == WeightsFrom::Nowhere {
            config.as_ref().map(|config| Weights::Random(RandomWeights::new(config, seed)))
        } else if is_downloaded || is_gguf(&folder) {
            // If a GGUF file is not downloaded, its shapes and types are.
            let opened = match &config {
                Some(config) => Weights::open(&folder, config),
                None if is_gguf(&folder) => return (Self::default(), Some(Failure::Input(problems))),
                None => WeightFiles::open(&folder).map(Weights::Files),
            };
            opened.map_err(|error| problems.0.extend(Problem::list(&error))).ok()
        } else {
            None
        };
        if let (Some(weights), Some(config)) = (&weights, &config) {
            let checked = weights.check(config);
            problems.0.extend(checked.err().into_iter().flat_map(|error| Problem::list(&error)));
        }
        let failure = (!problems.0.is_empty()).then_some(Failure::Input(problems));
        let weights = weights.filter(|_| is_downloaded);
        (Self { folder: Some(folder), tokenizer_folder: None, config, weights, is_downloaded, quiet }, failure)
    }

    /// The model, if every part is there.
    pub(crate) fn whole(self) -> Option<ModelSource> {
        let Self { folder, tokenizer_folder, config, weights, quiet, .. } = self;
        Some(ModelSource { folder: folder?, tokenizer_folder, config: config?, weights: weights?, quiet })
    }

    /// Gives the model the rows that a `[lora]` section needs.
    pub(crate) fn grow(&mut self, lora: &LoraConfig) {
        if let (Some(config), Some(folder)) = (&mut self.config, &self.folder) {
            self.tokenizer_folder = grow(config, folder, lora);
        }
    }
}

/// The files of a model.
#[derive(Debug)]
pub(crate) struct FoundModel {
    /// Its folder, or its GGUF file.
    pub(crate) folder: PathBuf,
    pub(crate) config: PathBuf,
    is_downloaded: bool,
}

/// Finds the files of a model.
pub(crate) fn find_model(options: &ModelOptions, from: WeightsFrom, quiet: bool) -> Result<FoundModel, HubError> {
    let path = Path::new(&options.path);
    let needs_weights = options.init == Init::Pretrained && from != WeightsFrom::Nowhere;
    if !needs_weights && path.is_file() && !is_gguf(path) {
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        return Ok(FoundModel { folder, config: path.to_owned(), is_downloaded: true });
    }
    let resolve = |wanted, settings: &HubSettings| {
        hub::resolve(&options.path, options.revision.as_deref(), wanted, settings, Progress::detect(quiet))
    };
    let settings = HubSettings::from_env();
    let wanted = if needs_weights { Wanted::Model } else { Wanted::WithoutWeights };
    let may_download = !settings.offline && matches!(Location::parse(&options.path)?, Location::Repository { .. });
    let (folder, is_downloaded) = if from == WeightsFrom::Disk && may_download && needs_weights {
        match resolve(wanted, &HubSettings { offline: true, ..settings.clone() }) {
            Ok(folder) => (folder, true),
            Err(_) => (resolve(Wanted::WithoutWeights, &settings)?, false),
        }
    } else {
        (resolve(wanted, &settings)?, true)
    };
    let config = if folder.is_file() { folder.clone() } else { folder.join("config.json") };
    Ok(FoundModel { folder, config, is_downloaded })
}

/// A model on disk: its config is read, its weights are mapped but not read.
#[derive(Debug)]
pub(crate) struct ModelSource {
    /// Its folder, or its GGUF file.
    pub(crate) folder: PathBuf,
    /// Where its tokenizer is, if not there: beside an adapter that has more tokens.
    tokenizer_folder: Option<PathBuf>,
    pub(crate) config: ModelConfig,
    pub(crate) weights: Weights,
    quiet: bool,
}

impl ModelSource {
    /// Finds a model, as [`ModelParts::read`] does.
    pub(crate) fn open(options: &ModelOptions, seed: u64, from: WeightsFrom, quiet: bool) -> Result<Self, Failure> {
        let (parts, failure) = ModelParts::read(options, seed, from, quiet);
        failure.map_or_else(|| parts.whole().ok_or_else(no_weights), Err)
    }

    /// The model of a recipe, and the layers that its adapters match.
    pub(crate) fn of_recipe(recipe: &Recipe, from: WeightsFrom, quiet: bool) -> Result<(Self, Selection), Failure> {
        let source = Self::open(&recipe.model, recipe.seed, from, quiet).map_err(|failure| failure.about("model.path"));
        source
            .and_then(|mut source| {
                recipe.model.fit(&source.config)?;
                source.tokenizer_folder = grow(&mut source.config, &source.folder, &recipe.lora);
                select(&recipe.lora, &source.config).map(|selection| (source, selection))
            })
            .map_err(|failure| failure.located(&recipe.places))
    }

    /// Reads the weights onto a device.
    ///
    /// # Errors
    /// A type that the device does not support, or weights that do not fit the type.
    pub(crate) fn load(&self, storage: Storage, precision: Precision, device: &OpenDevice) -> Result<Model, Failure> {
        let compute = precision.dtype();
        for dtype in [storage.dtype, compute] {
            device.require_dtype(dtype).map_err(Failure::input)?;
        }
        require_residency(storage.residency, device.is_gpu().then_some(&*device.label))?;
        self.write_copy(storage)?;
        let model = load::load(&self.config, &self.weights, storage, compute, &device.device);
        let splits = precision == Precision::F32 && device.f32_products_are_tf32();
        let products = if splits { F32Products::Split } else { F32Products::OfDevice };
        Ok(model.map_err(Failure::input)?.with_f32_products(products))
    }

    /// Writes the copy that weights on disk are used from, if there is none yet, and shows how far it is.
    fn write_copy(&self, storage: Storage) -> Result<(), Problem> {
        let Some(path) = self.weights.copy(&self.config, storage)? else { return Ok(()) };
        let meter = RefCell::new(None);
        let start = |all| Meter::start(Progress::detect(self.quiet), Work::Writing, path.display().to_string(), all);
        let on_bytes = |done, all| meter.borrow_mut().get_or_insert_with(|| start(all)).advance(done);
        let written = self.weights.in_form(&self.config, storage, &on_bytes);
        meter.into_inner().into_iter().for_each(Meter::finish);
        written.map(drop)
    }

    /// The tokenizer in the model's folder or file, or beside the adapter that it [grew](Self::grow) for.
    ///
    /// # Errors
    /// Files that cannot be read or understood; a tokenizer that belongs to another model.
    pub(crate) fn tokenizer(&self) -> Result<Tokenizer, Failure> {
        tokenizer(self.tokenizer_source(), &self.config).map_err(Failure::input)
    }

    /// The folder or GGUF file that it is in.
    pub(crate) fn tokenizer_source(&self) -> &Path {
        self.tokenizer_folder.as_ref().unwrap_or(&self.folder)
    }

    /// Gives the model the rows that the adapter in `folder` has.
    pub(crate) fn grow(&mut self, saved: &SavedAdapter, folder: &Path) {
        let found = saved.grow(&mut self.config, &self.folder, folder);
        self.tokenizer_folder = found.or(self.tokenizer_folder.take());
    }

    /// The tokenizer and the rows.
    ///
    /// # Errors
    /// Files that cannot be read or understood; a tokenizer that belongs to another model; a stop request while rows
    /// are tokenised.
    pub(crate) fn open_data(
        &self,
        data: &DataConfig,
        seed: u64,
        options: &OpenOptions<'_>,
    ) -> Result<Dataset, Failure> {
        let tokenizer = self.tokenizer().map_err(|failure| failure.about("model.path"))?;
        let options = OpenOptions {
            cache: options.cache.clone(),
            images: images_of_rows(&self.folder, &self.config, data),
            ..*options
        };
        Dataset::open(data, Arc::new(tokenizer), seed, &options).map_err(|error| match error {
            DataError::Interrupted => Failure::Interrupted,
            error => data_failure(error),
        })
    }
}

/// Refuses weights on disk for a GPU, the label of which is `gpu`.
pub(crate) fn require_residency(residency: Residency, gpu: Option<&str>) -> Result<(), Problem> {
    let Some(gpu) = gpu.filter(|_| residency == Residency::Mapped) else { return Ok(()) };
    let message = format!("`model.residency` = \"mapped\" is for the CPU, and {gpu} computes");
    Err(Problem::new(message).hint("\"host\" keeps them in host memory"))
}

/// The failure of a model whose weights are not to be downloaded.
pub(super) fn no_weights() -> Failure {
    Failure::input("the weights of the model are not on this machine")
}

/// The tokenizer in a model's folder or file.
///
/// # Errors
/// Files that cannot be read or understood; a tokenizer that belongs to another model.
pub(crate) fn tokenizer(folder: &Path, config: &ModelConfig) -> Result<Tokenizer, TokenizerError> {
    Tokenizer::open(folder)?.for_rows(config.vocab_size)
}

/// The linear layers that a `[lora]` section selects.
pub(crate) fn select(lora: &LoraConfig, config: &ModelConfig) -> Result<Selection, Failure> {
    lora.select(config).map_err(|errors| {
        Failure::Input(Problems(errors.iter().map(|error| Problem::new(error.to_string())).collect()))
    })
}

/// The same of adapters that are trained: what is written at the end must select them again.
pub(crate) fn select_written(lora: &LoraConfig, config: &ModelConfig, scores: bool) -> Result<Selection, Failure> {
    let selection = select(lora, config)?;
    check_written(&lora.written(), config, scores)?;
    Ok(selection)
}

/// Failure of a command that cannot read its rows. A failed worker is not counted as a mistake in the inputs.
pub(crate) fn data_failure(error: DataError) -> Failure {
    if error.is_mistake() { Failure::input(error) } else { Failure::running(error) }
}

/// The quantities that determine the memory of a recipe's steps.
pub(crate) fn workload<'a>(
    recipe: &'a Recipe,
    config: &'a ModelConfig,
    selection: &'a Selection,
    images: &'a ImageMemory,
    place: Place,
) -> Workload<'a> {
    let precision = recipe.train.precision;
    Workload {
        config,
        selection,
        storage: recipe.storage(Some(config)),
        is_random: recipe.model.init == Init::Random,
        precision,
        rows: recipe.train.micro_batch_size,
        row_length: if place.pads_rows() { padded_length(recipe.data.max_length) } else { recipe.data.max_length },
        is_packed: recipe.data.packing,
        images,
        gradient_checkpointing: recipe.train.gradient_checkpointing,
        gradient_accumulation_steps: recipe.train.gradient_accumulation_steps,
        layered_accumulation: recipe.train.layered_accumulation,
        loss_chunk: recipe.train.loss_chunk(),
        prefetch_batches: recipe.data.prefetch_batches,
        is_part_of_base: recipe.lora.starts_in_base(),
        eva_rho: recipe.lora.starts_from_rows().then(|| recipe.lora.rho()),
        optimizer: &recipe.optimizer,
        objective: &recipe.objective,
        is_noisy: recipe.is_noisy(),
        place,
        num_ranks: 1,
        ship_as: recipe.train.ship_as,
    }
}

/// How NVML finds the GPU that trains; `None` if the processor does.
pub(crate) fn nvml_selector(device: &OpenDevice) -> Option<NvmlSelector> {
    match &device.cuda {
        Some(gpu) => Some(NvmlSelector::Uuid(gpu.uuid.clone())),
        None => (device.is_gpu() && !device.is_software).then_some(NvmlSelector::Unknown),
    }
}
