//! Rows and weights.

use std::convert::Infallible;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use super::Run;
use super::dir::REFERENCE;
use super::eva::{self, STOPPED};
use super::inputs::select;
use super::overview::total_steps;
use super::prepare::Prepared;
use super::ranks::Joined;
use super::resume::Resumed;
use crate::data::cache::CacheSettings;
use crate::data::dataset::{Dataset, OpenOptions};
use crate::data::progress::{Meter, Work};
use crate::hub::Progress;
use crate::lora::AdapterSet;
use crate::model::Model;
use crate::recipe::Recipe;
use crate::save::export::{adapter_set, find_adapter, read_adapter};
use crate::train::objective::objective;
use crate::train::state::RowOrder;
use crate::train::step::TrainStep;
use crate::train::stop::Stop;
use crate::util::allocator;
use crate::util::failure::Failure;

/// How long tokenising may continue after a stop request.
const GRACE: Duration = Duration::from_secs(1);
/// How often stop requests are checked while rows are read.
const STOP_CHECK: Duration = Duration::from_millis(50);

/// Rows, and the model with its adapters: fresh ones, or those of a checkpoint.
pub(super) struct Loaded {
    pub(super) data: Dataset,
    pub(super) step: TrainStep,
    /// Of every rank, its host.
    pub(super) hosts: Vec<String>,
}

impl Loaded {
    /// Reads the rows and the model.
    ///
    /// # Errors
    ///
    /// Files that cannot be read or understood; a checkpoint that does not fit or has no steps left.
    pub(super) fn read(run: &mut Run<'_>, resumed: Option<&Resumed>, mut joined: Joined) -> Result<Self, Failure> {
        let starts_from_rows = run.prepared.recipe.lora.starts_from_rows();
        if let Some(resumed) = resumed.filter(|_| starts_from_rows) {
            let found = read_adapter(&resumed.checkpoint)?.config;
            run.prepared.take_ranks(run.prepared.recipe.lora.with_found(found))?;
        }
        let (data, model) = read_rows_and_model(run, &mut joined)?;
        let hosts = joined.compare(&run.common_recipe, &run.prepared, &data, resumed)?;
        if let (Some(resume), Some(resumed)) = (&run.args.resume, resumed) {
            resumed.refuse_if_done(resume, &run.dir, total_steps(&run.prepared.recipe, &data))?;
        }
        let mut start = None;
        if starts_from_rows && resumed.is_none() {
            let eva::Found { lora, values, about } = eva::find(run, &data, &model, &mut *joined.ranks)?;
            run.prepared.take_ranks(lora)?;
            (run.prepared.about_start, start) = (Some(about), Some(values));
        }
        let (run, prepared) = (&*run, &run.prepared);
        let recipe = &prepared.recipe;
        let (mut adapters, taken) = adapters(run, resumed, &model)?;
        start.iter().for_each(|values| adapters.start_a(values));
        recipe.lora.trainable_token_indices.iter().for_each(|ids| model.start_tokens(&mut adapters, ids));
        model.start_modules(&mut adapters, prepared.selection.modules().map(|(module, _)| module));
        if recipe.objective.scores() {
            adapters = adapters.with_score(model.config.hidden_size, recipe.seed, &model.device());
        }
        let ratio = recipe.lora.loraplus_lr_ratio;
        let written = resumed.map(|resumed| read_set(prepared, &resumed.checkpoint)).transpose()?;
        let step = TrainStep::new(model, adapters, &recipe.train, &recipe.optimizer, ratio, recipe.seed);
        let mut step = step.with_objective(objective(&recipe.objective)).with_ranks(joined.ranks);
        if let Some(folder) = recipe.lora.start_from.as_deref().filter(|_| step.needs_reference()) {
            let kept = recipe.output_dir.join(REFERENCE);
            let folder = if resumed.is_some() { kept } else { find_adapter(folder) };
            step = step.with_reference(read_set(prepared, &folder)?);
        }
        if let Some(taken) = taken {
            step = step.with_taken(taken);
        }
        if let Some((resumed, written)) = resumed.zip(written) {
            resumed.restore(&mut step, written, &row_order(recipe, &data))?;
        }
        Ok(Self { data, step, hosts })
    }
}

/// The settings that determine which rows are in which micro-batch.
pub(super) fn row_order(recipe: &Recipe, data: &Dataset) -> RowOrder {
    RowOrder {
        seed: recipe.seed,
        micro_batch_size: recipe.train.micro_batch_size,
        shuffle: recipe.data.shuffle,
        packed_length: recipe.data.packing.then_some(recipe.data.max_length),
        rows_per_epoch: data.rows_per_epoch(),
    }
}

/// Reads rows and model in parallel, since parsing the tokenizer takes as long as loading a small model.
/// Of the ranks of a node, the first one's rows are there before the others ask for theirs.
fn read_rows_and_model(run: &Run<'_>, joined: &mut Joined) -> Result<(Dataset, Model), Failure> {
    let Run { args, prepared: Prepared { recipe, source, device, .. }, place, stop, .. } = run;
    let is_stopped = || stop.requested();
    let progress = Progress::detect(args.quiet || !place.is_first());
    let load = || source.load(recipe.storage(Some(&source.config)), recipe.train.precision, device);
    let loaded = (!place.is_first_of_node()).then(load).transpose()?;
    let options =
        OpenOptions { cache: CacheSettings::from_env(), progress, is_stopped: &is_stopped, ..OpenOptions::default() };
    joined.first_of_node(|| {
        allocator::give_back_freed_memory();
        // Dropped once the rows are read.
        let (reading, is_read) = mpsc::channel::<Infallible>();
        let (data, model) = std::thread::scope(|scope| {
            let data = scope.spawn(|| {
                let _reading = reading;
                // A signal waits for the current rows, so that no file is left incomplete. It does not wait for the model.
                stop.defer();
                let data = source.open_data(&recipe.data, recipe.seed, &options);
                stop.at_once();
                if stop.requested() {
                    Stop::end(STOPPED);
                }
                allocator::give_back_now();
                data
            });
            scope.spawn(move || {
                while is_read.recv_timeout(STOP_CHECK) == Err(RecvTimeoutError::Timeout) {
                    if stop.requested() {
                        // The tokenising threads may be busy with weights. The row cache can be interrupted at any moment.
                        let _ = is_read.recv_timeout(GRACE);
                        Stop::end(STOPPED);
                    }
                }
            });
            let model = loaded.map_or_else(load, Ok);
            (data.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), model)
        });
        rayon::broadcast(|_| allocator::give_back_now());
        allocator::keep_freed_memory();
        Ok((data?, model?))
    })
}

/// Fresh adapters, or those that the recipe starts from; and what takes the part of the base out of it that they start as.
/// For a resumed run the numbers come later.
fn adapters(
    run: &Run<'_>,
    resumed: Option<&Resumed>,
    model: &Model,
) -> Result<(AdapterSet, Option<AdapterSet>), Failure> {
    let Run { args, prepared, stop, .. } = run;
    let Prepared { recipe, source, selection, device, .. } = prepared;
    if let Some(folder) = recipe.lora.start_from.as_deref().filter(|_| resumed.is_none()) {
        return Ok((read_set(prepared, &find_adapter(folder))?, None));
    }
    let mut adapters = source.new_adapters(selection, &recipe.lora, recipe.seed, device);
    let init = recipe.lora.init_lora_weights;
    let starts_in_base = recipe.lora.starts_in_base();
    if resumed.is_some() {
        let taken = starts_in_base.then(|| adapters.clone());
        return Ok((adapters, taken));
    }
    model.start_magnitudes(&mut adapters);
    if !starts_in_base {
        return Ok((adapters, None));
    }
    let all = adapters.iter().count();
    let mut meter = Meter::start(
        Progress::detect(args.quiet || !run.place.is_first()),
        Work::Decomposing,
        "the base".to_owned(),
        all,
    );
    let weight = |layer, site| model.weight_values(layer, site);
    let taken = adapters.take_from_base(init, recipe.seed, weight, |num_parts| {
        meter.advance(num_parts);
        if stop.requested() {
            Stop::end(STOPPED);
        }
    });
    meter.finish();
    Ok((adapters, Some(taken)))
}

/// The adapters in a folder, in the form in which this recipe writes them.
pub(super) fn read_set(prepared: &Prepared, folder: &Path) -> Result<AdapterSet, Failure> {
    let Prepared { recipe, source, lora, device, .. } = prepared;
    let selection = select(&lora.written(), &source.config)?;
    let ids = recipe.lora.trainable_token_indices.as_deref();
    let saved = read_adapter(folder)?.named_for(&source.config);
    let weights = saved.without_equal_tables(&source.weights, &source.config).weights;
    adapter_set(folder, weights, (&selection, ids), &source.config, recipe.lora.lora_dropout, &device.device)
        .map_err(Failure::input)
}
