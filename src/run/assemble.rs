//! A model, its adapters and the step that trains them, put together for training, `bench` and `eval` alike.

use std::path::Path;

use super::eva::STOPPED;
use super::inputs::{data_failure, select, workload};
use super::prepare::Prepared;
use crate::config::DataConfig;
use crate::data::dataset::Dataset;
use crate::data::progress::{Meter, Work};
use crate::hub::Progress;
use crate::lora::AdapterSet;
use crate::model::Model;
use crate::recipe::Recipe;
use crate::save::export::{adapter_set, find_adapter, read_adapter};
use crate::train::budget::flops::StepFlops;
use crate::train::objective::objective;
use crate::train::rollouts::Rollouts;
use crate::train::step::TrainStep;
use crate::train::stop::Stop;
use crate::util::failure::Failure;

/// Adapters before the first step.
pub(crate) struct Adapters {
    pub(crate) trained: AdapterSet,
    /// What takes the part of the base out of it that they start as.
    negated_start: Option<AdapterSet>,
}

impl Prepared {
    /// Reads the weights of the model.
    pub(crate) fn load_model(&self) -> Result<Model, Failure> {
        let Self { recipe, source, device, .. } = self;
        source.load(recipe.storage(Some(&source.config)), recipe.train.precision, device)
    }

    /// Adapters of the recipe's shapes whose numbers come later, as from a checkpoint, or are of no interest.
    pub(crate) fn unstarted_adapters(&self) -> Adapters {
        let Self { recipe: Recipe { lora, seed, .. }, source, selection, device, .. } = self;
        let (init, dropout) = (lora.init_lora_weights, lora.lora_dropout);
        let trained = AdapterSet::new(&source.config, selection, init, dropout, *seed, &device.device);
        let negated_start = lora.starts_in_base().then(|| trained.clone());
        Adapters { trained, negated_start }
    }

    /// Fresh adapters, of which the rows may say the A (`of_rows`), or those that the recipe starts from.
    ///
    /// # Errors
    /// A folder of an adapter that cannot be read, or holds another than the recipe's.
    pub(super) fn started_adapters(
        &self,
        model: &Model,
        of_rows: Option<&[f32]>,
        quiet: bool,
        stop: &Stop,
    ) -> Result<Adapters, Failure> {
        if let Some(folder) = &self.recipe.lora.start_from {
            return Ok(Adapters { trained: self.read_adapters(&find_adapter(folder))?, negated_start: None });
        }
        let Adapters { mut trained, negated_start } = self.unstarted_adapters();
        model.start_magnitudes(&mut trained);
        of_rows.into_iter().for_each(|values| trained.start_a(values));
        let negated_start = negated_start.map(|_| {
            let (progress, all) = (Progress::detect(quiet), trained.iter().count());
            let mut meter = Meter::start(progress, Work::Decomposing, "the base".to_owned(), all);
            let weight = |layer, site| model.weight_values(layer, site);
            let (init, seed) = (self.recipe.lora.init_lora_weights, self.recipe.seed);
            let negated_start = trained.take_from_base(init, seed, weight, |num_parts| {
                meter.advance(num_parts);
                if stop.requested() {
                    Stop::end(STOPPED);
                }
            });
            meter.finish();
            negated_start
        });
        Ok(Adapters { trained, negated_start })
    }

    /// The adapters in a folder, in the form in which this recipe writes them.
    ///
    /// # Errors
    /// Files that cannot be read, or hold other adapters.
    pub(super) fn read_adapters(&self, folder: &Path) -> Result<AdapterSet, Failure> {
        let Self { recipe, source, lora, device, .. } = self;
        let selection = select(&lora.written(), &source.config)?;
        let ids = recipe.lora.trainable_token_indices.as_deref();
        let saved = read_adapter(folder)?.named_for(&source.config);
        let weights = saved.without_equal_tables(&source.weights, &source.config).weights;
        adapter_set(folder, weights, (&selection, ids), &source.config, recipe.lora.lora_dropout, &device.device)
            .map_err(Failure::input)
    }

    /// The step that trains adapters and what the recipe trains in full beside them.
    pub(crate) fn step(&self, model: Model, adapters: Adapters) -> TrainStep {
        let Self { recipe, selection, .. } = self;
        let Adapters { mut trained, negated_start } = adapters;
        recipe.lora.trainable_token_indices.iter().for_each(|ids| model.start_tokens(&mut trained, ids));
        model.start_modules(&mut trained, selection.modules().map(|(module, _)| module));
        if recipe.objective.scores() {
            trained = trained.with_score(model.config.hidden_size, recipe.seed, &model.device());
        }
        self.step_of(model, trained).with_negated_start(negated_start)
    }

    /// The step of adapters to which nothing is added.
    pub(crate) fn step_of(&self, model: Model, adapters: AdapterSet) -> TrainStep {
        let recipe = &self.recipe;
        let ratio = recipe.lora.loraplus_lr_ratio;
        TrainStep::new(model, adapters, &recipe.train, &recipe.optimizer, ratio, recipe.seed)
            .with_objective(objective(&recipe.objective))
    }

    /// What writes the answers that it trains on; `None` where the rows have them.
    pub(crate) fn rollouts(&self, data: &Dataset) -> Result<Option<Rollouts>, Failure> {
        let Recipe { objective, data: DataConfig { max_length, .. }, seed, logging, .. } = &self.recipe;
        let rollouts = Rollouts::open(objective, data, *max_length, *seed).map_err(data_failure)?;
        let recorded = |rollouts: Rollouts| {
            rollouts.with_sample_steps(logging.logging_steps.max(10)).with_max_recorded(logging.rollouts.number())
        };
        Ok(rollouts.map(recorded))
    }

    /// The FLOPs of a step of this model.
    pub(crate) fn flops(&self, model: &Model) -> StepFlops {
        workload(&self.recipe, &self.source.config, &self.selection, &self.images, model.place()).flops()
    }
}
