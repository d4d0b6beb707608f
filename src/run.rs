//! A training run, from start to end.

pub(crate) mod args;
mod assemble;
mod changes;
pub(crate) mod device_memory;
pub(crate) mod dir;
mod environment;
mod eva;
mod finish;
pub(crate) mod images;
pub(crate) mod inputs;
pub(crate) mod kernel_check;
mod load;
pub(crate) mod next_commands;
#[cfg(unix)]
mod notebook;
pub(crate) mod overview;
pub(crate) mod prepare;
mod ranks;
mod resume;
pub(crate) mod shipping;
mod start;
mod verify;

pub(crate) use args::TrainArgs;
pub(crate) use finish::trainer_failure;
pub(crate) use prepare::Prepared;

use std::cell::OnceCell;
use std::time::Instant;

use crate::recipe::Purpose;
use crate::schema::Places;
use crate::train::stop::Stop;
use crate::util::failure::Failure;
#[cfg(unix)]
use crate::util::terminal::is_notebook;

use device_memory::with_advice;
use dir::RunDir;
use inputs::WeightsFrom;
use load::Loaded;
use ranks::{Joined, RankPlace};
use shipping::require_shippable;
use start::Started;

/// What was asked for, and the folder it goes to.
struct Run<'a> {
    args: &'a TrainArgs,
    /// The recipe as its user wrote it, with all changes in it: its file may be another by now.
    given: String,
    prepared: Prepared,
    /// The process of a notebook's cell has this one as its child.
    is_in_notebook: bool,
    /// The recipe as all ranks have it.
    common_recipe: String,
    dir: RunDir,
    place: RankPlace,
    stop: Stop,
    process_start: Instant,
}

pub(crate) fn train(args: &TrainArgs) -> Result<(), Failure> {
    #[cfg(unix)]
    let is_in_notebook = is_notebook() && ranks::is_alone() && notebook::continue_in_child().is_ok();
    #[cfg(not(unix))]
    let is_in_notebook = false;
    let (advice, places) = (OnceCell::new(), OnceCell::new());
    with_advice(&advice, || train_within(args, is_in_notebook, &advice, &places))
        .map_err(|failure| failure.located(places.get_or_init(Places::default)))
}

/// Trains. `advice` is set to the message for out-of-memory errors, `places` to where the recipe's keys were written.
fn train_within(
    args: &TrainArgs,
    is_in_notebook: bool,
    advice: &OnceCell<String>,
    places: &OnceCell<Places>,
) -> Result<(), Failure> {
    // The system's start time of the process would include a caller that replaced itself by this program, such as the
    // build of `cargo run`.
    let process_start = Instant::now();
    let mut joined = Joined::join()?;
    let stop = Stop::on_signals().map_err(Failure::running)?;
    if joined.place.size > 1 || is_in_notebook {
        stop.outlast();
    }
    let purpose = if args.resume.is_some() { Purpose::Resuming } else { Purpose::Training };
    let (recipe, given) = args.recipe.load_with_text(purpose)?;
    let _ = places.set(recipe.places.clone());
    if let Some(run) = args.recipe.run().filter(|_| !args.allow_command) {
        recipe.refuse_programs_of(run, &given)?;
    }
    let given = args.recipe.written(&given, &recipe, purpose);
    let args = &TrainArgs { resume: args.resume_in(&recipe.output_dir), ..args.clone() };

    // Cheap checks come first: no weight and no row is read before all this is known to exist.
    let place = joined.place.clone();
    let (existing, resumed) = resume::open_folder(args, &recipe, place.is_first())?;
    let kept = resumed.as_ref().and_then(|resumed| resumed.checkpointing);
    let quiet = args.quiet || !place.is_first();
    let common_recipe = recipe.to_toml();
    let recipe = place.recipe(recipe)?;
    let prepared = joined.first_of_node(|| Prepared::new(recipe, kept, WeightsFrom::Hub, quiet))?;
    let model = Some((&prepared.source.config, &prepared.selection));
    require_shippable(&prepared.recipe, model, Some(&prepared.device), place.size)?;
    stop.on_abort(&prepared.memory.advice);
    let _ = advice.set(prepared.memory.advice.clone());
    // The other ranks have no files that anybody needs.
    let own = (!place.is_first()).then(tempfile::tempdir).transpose().map_err(Failure::running)?;
    let folder = own.as_ref().map_or(&*prepared.recipe.output_dir, tempfile::TempDir::path);
    let dir = existing.map_or_else(|| RunDir::create(folder), Ok)?;

    let mut run = Run { args, given, prepared, is_in_notebook, common_recipe, dir, place, stop, process_start };
    let Loaded { data, step, hosts } = Loaded::read(&mut run, resumed.as_ref(), joined)?;
    Started::new(&run, &data, step, &hosts, resumed)?.train()
}
