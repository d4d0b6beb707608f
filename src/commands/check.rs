//! `lora-train check`: every mistake that can be known before training.

use crate::failure::Failure;
use crate::recipe::{Purpose, RecipeArgs};

/// Arguments of `lora-train check`.
#[derive(Clone, Debug, clap::Args)]
pub struct CheckArgs {
    /// The recipe and changes to it.
    #[command(flatten)]
    pub recipe: RecipeArgs,
}

/// Checks a recipe.
///
/// # Errors
///
/// All mistakes that were found.
pub fn run(args: &CheckArgs) -> Result<(), Failure> {
    args.recipe.load(Purpose::Training)?;
    Ok(())
}
