//! `lora-train inspect`: what the model will really see.

use crate::failure::Failure;
use crate::recipe::RecipeArgs;

/// Arguments of `lora-train inspect`.
#[derive(Clone, Debug, clap::Args)]
pub struct InspectArgs {
    /// The recipe and changes to it.
    #[command(flatten)]
    pub recipe: RecipeArgs,

    /// Rows to show
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub rows: usize,
}

/// Shows the tokens of some rows, which of them carry loss, lengths and truncations.
///
/// # Errors
///
/// Mistakes in the recipe, the tokenizer or the data.
pub fn run(_args: &InspectArgs) -> Result<(), Failure> {
    Err(Failure::running("`inspect` is not in this build"))
}
