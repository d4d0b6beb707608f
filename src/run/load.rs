//! Rows and weights.

use std::convert::Infallible;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use super::Run;
use super::dir::REFERENCE;
use super::eva::{self, STOPPED};
use super::images::{add_shown, with_images};
use super::overview::total_steps;
use super::prepare::Prepared;
use super::ranks::Joined;
use super::resume::Resumed;
use crate::data::cache::CacheSettings;
use crate::data::dataset::{Dataset, OpenOptions};
use crate::hub::Progress;
use crate::model::Model;
use crate::recipe::Recipe;
use crate::save::export::{find_adapter, read_adapter};
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
    /// Files that cannot be read or understood; a checkpoint that does not fit or has no steps left.
    pub(super) fn read(run: &mut Run<'_>, resumed: Option<&Resumed>, mut joined: Joined) -> Result<Self, Failure> {
        let starts_from_rows = run.prepared.recipe.lora.starts_from_rows();
        if let Some(resumed) = resumed.filter(|_| starts_from_rows) {
            let found = read_adapter(&resumed.checkpoint)?.config;
            run.prepared.take_ranks(run.prepared.recipe.lora.with_found(found))?;
        }
        let (data, model) = read_rows_and_model(run, &mut joined)?;
        run.prepared.take_images(&data, resumed.and_then(|resumed| resumed.checkpointing))?;
        let hosts = joined.compare(&run.common_recipe, &run.prepared, &data, resumed)?;
        if let (Some(resume), Some(resumed)) = (&run.args.resume, resumed) {
            resumed.refuse_if_done(resume, &run.dir, total_steps(&run.prepared.recipe, &data))?;
        }
        let mut of_rows = None;
        if starts_from_rows && resumed.is_none() {
            let eva::Found { lora, values, about } = eva::find(run, &data, &model, &mut *joined.ranks)?;
            run.prepared.take_ranks(lora)?;
            (run.prepared.about_start, of_rows) = (Some(about), Some(values));
        }
        let Run { args, prepared, place, stop, .. } = &*run;
        let recipe = &prepared.recipe;
        let adapters = match resumed {
            Some(_) => prepared.unstarted_adapters(),
            None => prepared.started_adapters(&model, of_rows.as_deref(), args.quiet || !place.is_first(), stop)?,
        };
        let written = resumed.map(|resumed| prepared.read_adapters(&resumed.checkpoint)).transpose()?;
        let mut step = prepared.step(model, adapters).with_ranks(joined.ranks);
        if let Some(folder) = recipe.lora.start_from.as_deref().filter(|_| step.needs_reference()) {
            let kept = recipe.output_dir.join(REFERENCE);
            let folder = if resumed.is_some() { kept } else { find_adapter(folder) };
            step = step.with_reference(prepared.read_adapters(&folder)?);
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
    let Run { args, prepared, place, stop, .. } = run;
    let Prepared { recipe, source, .. } = prepared;
    let is_stopped = || stop.requested();
    let progress = Progress::detect(args.quiet || !place.is_first());
    let load = || prepared.load_model();
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
        let data = data?;
        add_shown(&data, &recipe.eval.generate)?;
        let model = with_images(model?, (&source.folder, &source.weights), data.images(), &options)?;
        Ok((data, model))
    })
}
