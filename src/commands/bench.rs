//! `lora-train bench`: how fast a recipe trains on this machine.

use crate::failure::Failure;
use crate::recipe::RecipeArgs;

/// Arguments of `lora-train bench`.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchArgs {
    /// The recipe and changes to it.
    #[command(flatten)]
    pub recipe: RecipeArgs,
}

/// Runs `max_steps` steps on synthetic full-length batches and prints the figures.
///
/// # Errors
///
/// A recipe, model or device that cannot be used.
pub fn run(_args: &BenchArgs) -> Result<(), Failure> {
    Err(Failure::running("`bench` is not in this build"))
}
