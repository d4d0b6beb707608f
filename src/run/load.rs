//! Rows and weights.

use std::convert::Infallible;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use super::TrainArgs;
use super::dir::RunDir;
use super::overview::total_steps;
use super::prepare::Prepared;
use super::resume::Resumed;
use crate::data::cache::CacheSettings;
use crate::data::pipeline::{DataPipeline, OpenOptions};
use crate::export::{adapter_set, read_adapter};
use crate::failure::Failure;
use crate::hub::Progress;
use crate::lora::AdapterSet;
use crate::model::Model;
use crate::recipe::Recipe;
use crate::train::state::RowOrder;
use crate::train::step::TrainStep;
use crate::train::stop::Stop;

/// Said where there was nothing to save.
const STOPPED: &str = "stopped before the first step";
/// How long rows that are being tokenised may take once the run is to stop.
const GRACE: Duration = Duration::from_secs(1);
/// How often the wish to stop is looked at while rows are read.
const STOP_CHECK: Duration = Duration::from_millis(50);

/// Rows, and the model with its adapters: fresh ones, or those of a checkpoint.
pub(super) struct Loaded {
    pub(super) data: DataPipeline,
    pub(super) step: TrainStep,
}

impl Loaded {
    /// Reads them.
    ///
    /// # Errors
    ///
    /// Files that cannot be read or understood; a checkpoint that does not fit, or with no step left to take.
    pub(super) fn read(
        args: &TrainArgs,
        prepared: &Prepared,
        dir: &RunDir,
        resumed: Option<&Resumed>,
        stop: &Stop,
    ) -> Result<Self, Failure> {
        let recipe = &prepared.recipe;
        let (data, model) = read_rows_and_model(args, prepared, stop)?;
        if let (Some(resume), Some(resumed)) = (&args.resume, resumed) {
            resumed.refuse_if_done(resume, dir, total_steps(recipe, &data))?;
        }
        let adapters = adapters(prepared, resumed)?;
        let restored = resumed.map(|resumed| (resumed, adapters.clone()));
        let ratio = recipe.lora.loraplus_lr_ratio;
        let mut step = TrainStep::new(model, adapters, &recipe.train, &recipe.optimizer, ratio, recipe.seed);
        if let Some((resumed, adapters)) = restored {
            resumed.restore(&mut step, adapters, &row_order(recipe, &data))?;
        }
        Ok(Self { data, step })
    }
}

/// What fixes which rows are in which micro-batch.
pub(super) fn row_order(recipe: &Recipe, data: &DataPipeline) -> RowOrder {
    RowOrder {
        seed: recipe.seed,
        micro_batch_size: recipe.train.micro_batch_size,
        shuffle: recipe.data.shuffle,
        packed_length: recipe.data.packing.then_some(recipe.data.max_length),
        rows_per_epoch: data.rows_per_epoch(),
    }
}

/// The tokenizer takes as long to parse as a small model to load, so they are read at the same time.
fn read_rows_and_model(args: &TrainArgs, prepared: &Prepared, stop: &Stop) -> Result<(DataPipeline, Model), Failure> {
    let Prepared { recipe, source, device, .. } = prepared;
    let is_stopped = || stop.requested();
    let progress = Progress::detect(args.quiet);
    let options =
        OpenOptions { cache: CacheSettings::from_env(), progress, is_stopped: &is_stopped, ..OpenOptions::default() };
    // Dropped once the rows are read.
    let (reading, is_read) = mpsc::channel::<Infallible>();
    let (data, model) = std::thread::scope(|scope| {
        let data = scope.spawn(|| {
            let _reading = reading;
            // A signal waits for the rows at hand, so that no file is left half written; not for the model.
            stop.defer();
            let data = source.open_data(&recipe.data, recipe.seed, &options);
            stop.at_once();
            if stop.requested() {
                Stop::end(STOPPED);
            }
            data
        });
        scope.spawn(move || {
            while is_read.recv_timeout(STOP_CHECK) == Err(RecvTimeoutError::Timeout) {
                if stop.requested() {
                    // The threads that make tokens may be busy with weights. What is kept bears an end at any moment.
                    let _ = is_read.recv_timeout(GRACE);
                    Stop::end(STOPPED);
                }
            }
        });
        let model = source.load(recipe.model.dtype, recipe.train.precision, device);
        (data.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), model)
    });
    Ok((data?, model?))
}

/// Fresh adapters, or those of a checkpoint.
fn adapters(prepared: &Prepared, resumed: Option<&Resumed>) -> Result<AdapterSet, Failure> {
    let Prepared { recipe, source, selection, device, .. } = prepared;
    let Some(Resumed { checkpoint, .. }) = resumed else {
        return Ok(source.new_adapters(selection, &recipe.lora, recipe.seed, device));
    };
    let saved = read_adapter(checkpoint).map_err(Failure::input)?;
    let dropout = recipe.lora.lora_dropout;
    adapter_set(checkpoint, saved.weights, selection, &source.config, dropout, &device.device).map_err(Failure::input)
}
