//! What a recipe asks for, checked before any weight is read and any row is tokenised.

use super::device_memory::StepMemory;
use super::inputs::{ModelSource, WeightsFrom};
use crate::device::{self, OpenDevice};
use crate::failure::Failure;
use crate::lora::targets::Selection;
use crate::recipe::Recipe;

/// A recipe, and the model, layers and device that it names.
#[derive(Debug)]
pub struct Prepared {
    /// The recipe.
    pub recipe: Recipe,
    /// Its model.
    pub source: ModelSource,
    /// The layers that its adapters match.
    pub selection: Selection,
    /// Its device.
    pub device: OpenDevice,
    /// Estimated memory of its steps.
    pub memory: StepMemory,
}

impl Prepared {
    /// Finds the model and its layers, opens the device and estimates the memory of a step.
    ///
    /// # Errors
    ///
    /// A model, layers or a device that do not exist.
    pub fn new(recipe: Recipe, from: WeightsFrom, quiet: bool) -> Result<Self, Failure> {
        let (source, selection) = ModelSource::of_recipe(&recipe, from, quiet)?;
        let device = device::open(&recipe.device.name).map_err(Failure::input)?;
        let memory = StepMemory::estimate(&recipe, &source.config, &selection, &device);
        Ok(Self { recipe, source, selection, device, memory })
    }

    /// Number of trained parameters.
    #[must_use]
    pub fn num_trainable(&self) -> usize {
        self.selection.num_parameters(&self.source.config)
    }

    /// Number of parameters of base and adapters.
    #[must_use]
    pub fn num_parameters(&self) -> usize {
        self.source.config.num_parameters() + self.num_trainable()
    }
}
