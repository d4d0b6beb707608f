//! A training run, as a straight line.

pub mod args;
pub mod dir;
pub mod environment;

pub use args::{Resume, TrainArgs};

use crate::failure::Failure;
use crate::recipe::Purpose;

/// Trains.
///
/// # Errors
///
/// Mistakes in the recipe or its inputs, failures on the way, an interruption.
pub fn train(args: &TrainArgs) -> Result<(), Failure> {
    args.recipe.load(Purpose::Training)?;
    Err(Failure::running("training is not in this build"))
}
