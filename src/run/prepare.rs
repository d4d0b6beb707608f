//! The checked settings of a run, before any weight is read and any row is tokenised.

use super::device_memory::StepMemory;
use super::inputs::ModelSource;
use crate::device::{self, OpenDevice};
use crate::failure::Failure;
use crate::lora::targets::Selection;
use crate::recipe::Recipe;

/// The recipe, and the model and device for it.
pub(super) struct Prepared {
    pub(super) recipe: Recipe,
    pub(super) source: ModelSource,
    pub(super) selection: Selection,
    pub(super) device: OpenDevice,
    pub(super) memory: StepMemory,
}

impl Prepared {
    /// Finds the model and its layers, opens the device and estimates the memory of a step.
    ///
    /// # Errors
    ///
    /// A model, layers or a device that do not exist.
    pub(super) fn new(recipe: Recipe, quiet: bool) -> Result<Self, Failure> {
        let source =
            ModelSource::open(&recipe.model, recipe.seed, quiet).map_err(|failure| failure.about("model.path"))?;
        let selection = source.select(&recipe.lora)?;
        let device = device::open(&recipe.device.name).map_err(Failure::input)?;
        let memory = StepMemory::estimate(&recipe, &source.config, &selection, &device);
        Ok(Self { recipe, source, selection, device, memory })
    }

    /// Number of trained parameters.
    pub(super) fn num_trainable(&self) -> usize {
        self.selection.num_parameters(&self.source.config)
    }
}
