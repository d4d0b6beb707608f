//! What a recipe asks for, looked up before any weight is read and any row is tokenised.

use super::device_memory::{Room, StepMemory};
use super::images::images;
use super::inputs::{
    ModelParts, ModelSource, WeightsFrom, data_failure, no_weights, require_residency, select_written,
};
use super::kernel_check;
use crate::config::{GradientCheckpointing, LoraConfig};
use crate::data::dataset::{Dataset, OpenOptions};
use crate::device::OpenDevice;
use crate::lora::targets::Selection;
use crate::recipe::Recipe;
use crate::spec::ModelConfig;
use crate::train::budget::fit::Decision;
use crate::train::budget::images::ImageMemory;
use crate::util::failure::Failure;

/// A recipe, and the model, layers and device that it names: `check` prints it, training continues from it.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) recipe: Recipe,
    pub(crate) source: ModelSource,
    pub(crate) selection: Selection,
    /// The recipe's section, with the ranks that its adapters have where these start from the rows.
    pub(crate) lora: LoraConfig,
    /// What these took to start, for people.
    pub(crate) about_start: Option<String>,
    pub(crate) device: OpenDevice,
    /// What the rows' images take, once they are read.
    pub(crate) images: ImageMemory,
    /// Estimated memory of its steps.
    pub(crate) memory: StepMemory,
}

impl Prepared {
    /// Finds the model and its layers, opens the device, estimates the memory of a step and decides what the recipe
    /// leaves open. `kept` is what an earlier start of the run had for `train.gradient_checkpointing` = "auto".
    pub(crate) fn new(
        mut recipe: Recipe,
        kept: Option<GradientCheckpointing>,
        from: WeightsFrom,
        quiet: bool,
    ) -> Result<Self, Failure> {
        let PreparedParts { model, selection, device, failures } = PreparedParts::find(&recipe, from, quiet);
        let failure = failures.into_iter().reduce(Failure::and);
        match (failure, model.whole(), selection, device) {
            (None, Some(source), Some(selection), Some(device)) => {
                let (model, images) = ((&source.config, &selection), ImageMemory::default());
                let memory = StepMemory::estimate(&recipe, model, &images, Room::of(&device), kept);
                if let Some(Decision { choice, .. }) = &memory.checkpointing {
                    recipe.train.gradient_checkpointing = *choice;
                }
                let lora = recipe.lora.clone();
                Ok(Self { recipe, source, selection, lora, about_start: None, device, images, memory })
            }
            (failure, ..) => Err(failure.unwrap_or_else(no_weights).located(&recipe.places)),
        }
    }

    /// Takes the ranks that adapters have which start from the rows.
    pub(super) fn take_ranks(&mut self, lora: LoraConfig) -> Result<(), Failure> {
        let scores = self.recipe.objective.scores();
        let selection = select_written(&lora, &self.source.config, scores)?;
        let Selection { hits, .. } = std::mem::replace(&mut self.selection, selection);
        (self.selection.hits, self.lora) = (hits, lora);
        Ok(())
    }

    /// Takes the images of the rows into account: what is held of them may change what is decided by the memory. `kept` as in
    /// [`new`](Self::new).
    ///
    /// # Errors
    /// A row that cannot be read.
    pub(crate) fn take_images(&mut self, data: &Dataset, kept: Option<GradientCheckpointing>) -> Result<(), Failure> {
        if !data.has_images() {
            return Ok(());
        }
        self.images = ImageMemory::of(data).map_err(data_failure)?;
        let Self { recipe, source, selection, images, memory, .. } = self;
        if memory.checkpointing.is_some() {
            recipe.train.gradient_checkpointing = GradientCheckpointing::Auto;
        }
        *memory = StepMemory::estimate(recipe, (&source.config, selection), images, memory.room(), kept);
        if let Some(Decision { choice, .. }) = &memory.checkpointing {
            recipe.train.gradient_checkpointing = *choice;
        }
        Ok(())
    }

    /// The same for rows that are not read yet: they are, if the model sees images.
    ///
    /// # Errors
    /// As [`ModelSource::open_data`].
    pub(crate) fn look_for_images(&mut self, options: &OpenOptions<'_>) -> Result<(), Failure> {
        let Self { recipe: Recipe { data, seed, .. }, source, .. } = self;
        if images(&source.folder, &source.config, data).is_none_or(|images| images.vision().is_err()) {
            return Ok(());
        }
        let data = source.open_data(data, *seed, options)?;
        self.take_images(&data, None)
    }

    /// Why the memory may be too small for micro-batches of these rows.
    pub(super) fn memory_warning(&self, data: &Dataset) -> Option<String> {
        let Self { source, selection, images, memory, .. } = self;
        let recipe = with_rows_of(&self.recipe, data);
        StepMemory::estimate(&recipe, (&source.config, selection), images, memory.room(), None).warning
    }

    /// Number of trained parameters.
    pub(crate) fn num_trainable(&self) -> usize {
        let config = &self.source.config;
        self.selection.num_parameters(config) + self.recipe.objective.num_score_parameters(config.hidden_size)
    }

    /// Number of parameters of base and adapters.
    pub(crate) fn num_parameters(&self) -> usize {
        self.source.config.num_parameters() + self.num_trainable()
    }
}

/// The recipe with micro-batches of no more rows than there are.
pub(crate) fn with_rows_of(recipe: &Recipe, data: &Dataset) -> Recipe {
    let mut recipe = recipe.clone();
    let rows = data.rows_per_epoch().max(data.num_eval_rows()).max(1);
    recipe.train.micro_batch_size = recipe.train.micro_batch_size.min(rows);
    recipe
}

/// What could be found of a [`Prepared`]. A part with a mistake is absent, and so is what depends on it.
#[derive(Debug, Default)]
pub(crate) struct PreparedParts {
    pub(crate) model: ModelParts,
    pub(crate) selection: Option<Selection>,
    pub(crate) device: Option<OpenDevice>,
    pub(crate) failures: Vec<Failure>,
}

impl PreparedParts {
    /// Looks for every part. A recipe without `model.path` has no model.
    pub(crate) fn find(recipe: &Recipe, from: WeightsFrom, quiet: bool) -> Self {
        let mut parts = Self::default();
        if !recipe.model.path.is_empty() {
            let (mut model, failure) = ModelParts::read(&recipe.model, recipe.seed, from, quiet);
            parts.failures.extend(failure.map(|failure| failure.about("model.path")));
            model.grow(&recipe.lora);
            let scores = recipe.objective.scores();
            let selected = |config: &ModelConfig| select_written(&recipe.lora, config, scores);
            parts.selection = model.config.as_ref().and_then(|config| parts.keep(selected(config)));
            let fit = model.config.as_ref().map_or(Ok(()), |config| recipe.model.fit(config));
            parts.failures.extend(fit.err().map(Failure::from));
            parts.model = model;
        }
        let device =
            parts.keep(kernel_check::open(&recipe.device.name, recipe.train.precision.dtype()).map_err(Failure::input));
        if let Some(device) = &device {
            for dtype in recipe.dtypes() {
                parts.keep(device.require_dtype(dtype).map_err(Failure::input));
            }
        }
        let gpu = match &device {
            Some(device) => device.is_gpu().then_some(&*device.label),
            // The CPU always opens.
            None => Some(&*recipe.device.name).filter(|name| *name != "auto"),
        };
        parts.keep(require_residency(recipe.model.residency, gpu).map_err(Failure::from));
        Self { device, ..parts }
    }

    fn keep<T>(&mut self, part: Result<T, Failure>) -> Option<T> {
        part.map_err(|failure| self.failures.push(failure)).ok()
    }

    /// Estimated memory of the steps, where model, layers and device are known.
    pub(crate) fn memory(&self, recipe: &Recipe, images: &ImageMemory) -> Option<StepMemory> {
        let model = (self.model.config.as_ref()?, self.selection.as_ref()?);
        Some(StepMemory::estimate(recipe, model, images, Room::of(self.device.as_ref()?), None))
    }
}
