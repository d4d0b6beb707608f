//! A training run, from start to end.

pub mod args;
mod changes;
pub mod device_memory;
pub mod dir;
pub mod environment;
mod facts;
mod finish;
pub mod inputs;
mod load;
pub mod overview;
mod prepare;
mod resume;
mod start;
mod verify;

pub use args::{Resume, TrainArgs};

use std::cell::OnceCell;
use std::time::Instant;

use crate::data::dataset::Dataset;
use crate::failure::Failure;
use crate::recipe::Purpose;
use crate::schema::Places;
use crate::train::stop::Stop;

use device_memory::with_advice;
use dir::RunDir;
use load::Loaded;
use prepare::Prepared;

/// A run whose folder, rows and weights are loaded.
struct Run<'a> {
    args: &'a TrainArgs,
    prepared: &'a Prepared,
    dir: &'a RunDir,
    data: &'a Dataset,
    stop: &'a Stop,
    process_start: Instant,
}

/// Trains.
///
/// # Errors
///
/// Mistakes in the recipe or its inputs, failures during training, an interruption.
pub fn train(args: &TrainArgs) -> Result<(), Failure> {
    let (advice, places) = (OnceCell::new(), OnceCell::new());
    with_advice(&advice, || train_within(args, &advice, &places))
        .map_err(|failure| failure.located(places.get_or_init(Places::default)))
}

/// Trains. `advice` is set to the message for out-of-memory errors, `places` to where the recipe's keys were written.
fn train_within(args: &TrainArgs, advice: &OnceCell<String>, places: &OnceCell<Places>) -> Result<(), Failure> {
    // The system's start time of the process would include a caller that replaced itself by this program, such as the
    // build of `cargo run`.
    let process_start = Instant::now();
    let stop = Stop::on_signals().map_err(Failure::running)?;
    let (recipe, given) = args.recipe.load_with_text(Purpose::Training)?;
    let _ = places.set(recipe.places.clone());

    // Cheap checks come first: no weight and no row is read before all this is known to exist.
    let (existing, resumed) = resume::open_folder(args, &recipe)?;
    let prepared = Prepared::new(recipe, args.quiet)?;
    stop.on_abort(&prepared.memory.advice);
    let _ = advice.set(prepared.memory.advice.clone());
    let dir = existing.map_or_else(|| RunDir::create(&prepared.recipe.output_dir), Ok)?;

    let Loaded { data, step } = Loaded::read(args, &prepared, &dir, resumed.as_ref(), &stop)?;
    let run = Run { args, prepared: &prepared, dir: &dir, data: &data, stop: &stop, process_start };
    let mut trainer = run.start(step, resumed, &given)?;
    run.train(&mut trainer)
}
